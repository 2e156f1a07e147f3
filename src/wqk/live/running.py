"""Run a model in double precision with `transformers`, and record its attention.

By default, inputs are random tokens, images and sounds of the right size.

Axes: B examples, H query heads, N tokens (I queries, J keys), D width, C channels, S side of a
picture.
"""

from __future__ import annotations

import inspect
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.adapters import Adapter
from wqk.errors import (
    CheckpointError,
    FormError,
    MissingPackage,
    UnknownFamily,
    WqkError,
    first_line,
    required_by,
)
from wqk.families import AttentionPlan, Family, find_family, load_family
from wqk.families.config import Config
from wqk.live.observing import slow_path
from wqk.live.recording import recording, require_records
from wqk.model import Model
from wqk.model import open as open_model

if TYPE_CHECKING:
    from wqk.live.recording import Application

EXAMPLES = 2

# A model's inputs by the name of its argument.
Inputs = dict[str, np.ndarray]

# Positions beyond those of the input: RoBERTa's begin after that of its padding token, and decoders
# read two tokens more.
ROOM = 4

# Side of a picture for models that take pictures of any size.
SIDE = 64
# Number of tokens to draw from, for models without a vocabulary.
CODE_POINTS = 64
# Rows and columns of a picture that is given as patches.
PATCHES = (4, 8)
# Keys for the number of a spectrum's bins.
BINS = ("num_mel_bins", "feature_projection_input_dim", "input_feat_per_channel", "feature_size")


class InputRequest(NamedTuple):
    """A requested input of a model: given tokens, or random input."""

    tokens: Sequence[int] | None  # tokens of one text; None for random texts
    length: int  # number of random tokens, or of frames of a sound
    random: np.random.Generator

    @property
    def examples(self) -> int:
        """Number of texts, images or sounds."""
        return EXAMPLES if self.tokens is None else 1

    def normal(self, *shape: int) -> np.ndarray:
        """Return random numbers of the given shape for each example."""
        return self.random.standard_normal((self.examples, *shape))


def inputs_of(model: Any, tokens: Sequence[int] | None, length: int, seed: int) -> dict[str, Any]:
    """Return the model's main input, and for a model with a decoder, the text for the decoder.

    Raises `UnknownFamily` if no rule defines the model's input, and `FormError` if the tokens are
    more than the model's positions.
    """
    import torch

    main_input, model_type = model.main_input_name, model.config.model_type
    accepted = inspect.signature(model.forward).parameters
    make = MODEL_INPUTS.get(model_type) or MAIN_INPUTS.get(main_input)
    if "grid_thw" in accepted:
        make = patches_input
    if make is None:
        raise UnknownFamily(
            f"{type(model).__name__}: cannot generate the input {main_input!r}, only "
            f"{', '.join(MAIN_INPUTS)}; give a batch of your own: wqk.verify(model, batch)"
        )
    positions = most_positions(model)
    if positions is not None and tokens is not None and len(tokens) > positions:
        raise FormError(
            f"tokens must be at most {positions}, as many as the model has positions for; the text "
            f"has {len(tokens)}"
        )
    if positions is not None and positions > ROOM:
        length = min(length, positions - ROOM)
    request = InputRequest(tokens, length, np.random.default_rng(seed))
    inputs = make(model.config, request)
    has_decoder = getattr(model.config, "is_encoder_decoder", False)
    decoder_reads_tokens = "decoder_input_ids" in accepted and "decoder_input_ids" not in inputs
    if has_decoder and decoder_reads_tokens:
        # Two tokens more, so that rows and columns of cross-attention cannot be mistaken.
        longer_text = None if tokens is None else [*tokens, *tokens[:2]]
        decoder_request = request._replace(tokens=longer_text, length=length + 2)
        for name, values in token_input(model.config, decoder_request).items():
            inputs[f"decoder_{name}"] = values
    if "decoder_input_values" in accepted:
        inputs["decoder_input_values"] = request.normal(length + 2, model.config.num_mel_bins)
    arguments: dict[str, Any] = {
        name: torch.from_numpy(values) for name, values in inputs.items() if name in accepted
    }
    if "use_cache" in accepted:
        arguments["use_cache"] = False
    return arguments


def most_positions(model: Any) -> int | None:
    """Return the number of positions of a model; None if unknown."""
    learned = learned_positions(model)
    if learned is not None:
        return learned
    config = getattr(model, "config", None)
    if not hasattr(config, "get_text_config"):  # not of transformers
        return None
    positions = getattr(text_config(config), "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def learned_positions(model: Any) -> int | None:
    """Return the number of rows in a table of positions; None without a table."""
    for name, module in model.named_modules():
        if name.endswith("position_embeddings") and hasattr(module, "num_embeddings"):
            # RoBERTa counts positions from that of the padding token.
            first = 0 if module.padding_idx is None else module.padding_idx + 1
            return int(module.num_embeddings) - first
    return None


def text_config(config: Any) -> Any:
    """Return the configuration of the text model, or of the decoder if there are several."""
    try:
        return config.get_text_config()
    except ValueError:
        return config.get_text_config(decoder=True)


def token_input(config: Any, request: InputRequest) -> Inputs:
    """Return the given text, or two random texts; the second text is shorter and padded."""
    if request.tokens is not None:
        numbers = np.asarray([request.tokens], np.int64)
        return {"input_ids": numbers, "attention_mask": np.ones_like(numbers)}
    padding = getattr(config, "pad_token_id", None) or 0
    # Canine has no vocabulary: it reads the code points themselves.
    vocabulary = getattr(text_config(config), "vocab_size", CODE_POINTS)
    numbers = request.random.integers(0, vocabulary - 1, (EXAMPLES, request.length))
    numbers += numbers >= padding
    mask = np.ones_like(numbers)
    mask[1, request.length - request.length // 4 :] = 0
    return {"input_ids": np.where(mask, numbers, padding), "attention_mask": mask}


def image_input(config: Any, request: InputRequest) -> Inputs:
    """Return random images (B, C, S, S), one for each text."""
    part = getattr(config, "vision_config", config)
    size = getattr(part, "image_size", None) or SIDE
    sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
    return {"pixel_values": request.normal(getattr(part, "num_channels", 3), *sides)}


def patches_input(config: Any, request: InputRequest) -> Inputs:
    """Return the patches (T, values) of an image, and the numbers of rows and columns."""
    channels: Any = getattr(config, "in_channels", None) or getattr(config, "num_channels", 3)
    values = channels * getattr(config, "temporal_patch_size", 1) * config.patch_size**2
    pixels = request.random.standard_normal((PATCHES[0] * PATCHES[1], values))
    return {
        "hidden_states": pixels,
        "pixel_values": pixels,
        "grid_thw": np.asarray([[1, *PATCHES]], np.int64),
    }


def text_and_image_input(config: Any, request: InputRequest) -> Inputs:
    """Return texts, and an image for each text."""
    return token_input(config, request) | image_input(config, request)


def sound_input(config: Any, request: InputRequest) -> Inputs:
    """Return random sounds that result in ``length`` frames after the model's convolutions."""
    samples = request.length
    for width, stride in zip(config.conv_kernel[::-1], config.conv_stride[::-1], strict=True):
        samples = (samples - 1) * stride + width
    return {"input_values": request.normal(samples)}


def spectrogram_input(config: Any, request: InputRequest) -> Inputs:
    """Return random spectrograms of the model's fixed size."""
    return {"input_values": request.normal(config.max_length, config.num_mel_bins)}


def spectrum_input(config: Any, request: InputRequest) -> Inputs:
    """Return random spectra, of the fixed length of Whisper, or with four frames for each token."""
    part = getattr(config, "audio_config", config)
    bins = next((getattr(part, key) for key in BINS if getattr(part, key, None)), 80)
    longest: Any = getattr(part, "max_source_positions", None)
    if longest is not None and hasattr(part, "num_mel_bins"):
        return {"input_features": request.normal(bins, 2 * longest)}
    return {"input_features": request.normal(4 * request.length, bins)}


# How a model's main input is made, by the name that `transformers` gives it.
MAIN_INPUTS: dict[str, Callable[..., Inputs]] = {
    "input_ids": token_input,
    "pixel_values": image_input,
    "input_values": sound_input,
    "input_features": spectrum_input,
}

# Models that need several inputs, by model type.
MODEL_INPUTS: dict[str, Callable[..., Inputs]] = {
    "audio-spectrogram-transformer": spectrogram_input,
    "clip": text_and_image_input,
    "siglip": text_and_image_input,
    "git": text_and_image_input,
}

# Inputs that tell tokens from padding, (B, N).
PADDING_MASKS = ("attention_mask", "decoder_attention_mask")


class ModelRun(NamedTuple):
    """Records of one pass of a model."""

    records: list[list[Application]]  # every application of the attention of each plan
    failures: list[str]  # parts of the model that could not be run, and why
    drawn: tuple[str, ...] = ()  # weights of layers and embeddings that were drawn at random


def run(
    ref: Any,
    stored: Model,
    *,
    adapter: Adapter | None = None,
    text: str | None,
    tokens: Sequence[int] | None,
    length: int,
    seed: int,
    flat: bool = False,
) -> ModelRun:
    """Run a model once; arguments and errors as for `wqk.live.verification.verify`.

    ``adapter`` is the adapter at ``ref``, if ``ref`` is not a model.

    With ``flat``, rotary positions are removed: every sine is 0, every cosine 1. Because some
    models compute their tables of positions on loading, each run loads the model.
    """
    if not isinstance(ref, str | os.PathLike) or Path(ref).is_file():
        raise CheckpointError(
            f"verify takes a folder or a Hub id, got "
            f"{ref if isinstance(ref, str | os.PathLike) else type(ref).__name__}; pass the folder "
            "with its config.json, or a module and a batch for it: wqk.verify(model, batch); a "
            "GGUF file is checked against its original: wqk same ORIGINAL FILE.gguf"
        )
    with required_by("running the model"):
        import torch
        from transformers import AutoTokenizer
    checkpoint, plans, hub = stored.checkpoint, stored.plans, stored.hub
    family = stored.family_file
    known_family = load_family(family) if family else find_family(checkpoint)
    with quiet(), double_precision(), flattened(flat):
        try:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                model, drawn = load_model(ref, checkpoint, known_family, hub, adapter)
            if text is not None and tokens is None:
                tokenizer = AutoTokenizer.from_pretrained(ref, trust_remote_code=False, **hub)
                tokens = tokenizer(text)["input_ids"]
            live = open_model(model, family=family).plans
            tensor_of = {plan.place: plan.query.tensor for plan in live}
            with recording(model, plans, live) as records:
                tensors = [tensor_of[plan.place] for plan in plans]
                failures = _run_all(
                    model,
                    list(zip(tensors, records, strict=True)),
                    lambda part: inputs_of(part, tokens, length, seed),
                )
            if not any(records):
                require_records(model, plans, records)
        except WqkError:
            raise
        except Exception as error:  # the model's own code may fail in any way
            reason = first_line(error)
            raise CheckpointError(f"{checkpoint.name}: cannot be run ({reason})") from error
    return ModelRun(records, failures, drawn)


# Weights that an attention's input depends on, and not those of heads and poolers on top.
IN_LAYERS = re.compile(r"\.\d+\.|embed")

# Names of files of tokenizers, and the model types whose tokenizers have no files.
TOKENIZER_FILE = re.compile(r"token|vocab|spiece|sentencepiece|bpe|merges|\.model$", re.IGNORECASE)
WITHOUT_VOCABULARY = re.compile(r'"model_type"\s*:\s*"(canine|perceiver)"')


def lack_of_tokenizer(folder: Path) -> str:
    """Return the reason why a model's folder has no tokenizer; empty if it may have one.

    Without a config.json, the reason is empty. No library is loaded.
    """
    config = folder / "config.json"
    if not config.is_file():
        return ""
    if any(TOKENIZER_FILE.search(file.name) for file in folder.iterdir()):
        return ""
    if WITHOUT_VOCABULARY.search(config.read_text("utf-8", "replace")):
        return ""
    return "no tokenizer.json, vocab.txt or the like"


def run_module(
    module: Any,
    plans: Sequence[AttentionPlan],
    batch: Any,
    *,
    flat: bool = False,
    exact: bool = True,
) -> ModelRun:
    """Run a module once with a batch, and record the blocks.

    Parameters
    ----------
    module, plans
        The `nn.Module`, and the plans of its blocks.
    batch
        The arguments of the module, as for `run_batch`.
    flat
        Whether to remove rotary positions by setting all angles of tables to zero.
    exact
        Whether code that requests float32 gets float64.
    """
    import torch

    if flat:
        module = _without_rotations(module)
    with (
        quiet(),
        double_precision() if exact else nullcontext(),
        flattened(flat),
        torch.no_grad(),
        recording(module, plans, plans) as records,
    ):
        run_batch(module, batch)
    return ModelRun(records, [])


def _without_rotations(module: Any) -> Any:
    """Return a copy with the same parameters and without rotary positions in tables.

    A copy is necessary because some modules store results computed from their tables (Qwen-Image).
    """
    import torch

    copied = deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    for part in copied.modules():
        for attributes in (part._buffers, vars(part)):
            for name, value in attributes.items():
                if isinstance(value, torch.Tensor):
                    attributes[name] = _unturned(name, value, type(part).__name__)
    return copied


def _unturned(name: str, table: Any, kind: str) -> Any:
    """Return a table of sines and cosines with all angles zero; other tensors are unchanged."""
    import torch

    tables = {"cos", "sin"}.intersection(name.split("_"))
    if table.is_complex():
        return torch.complex(table.abs(), torch.zeros_like(table.abs()))
    if tables:
        return torch.full_like(table, float("cos" in tables))
    if "Rotary" in kind and name.startswith("pos_embed"):  # timm's: sines, then cosines
        sines, cosines = table.chunk(2, -1)
        return torch.cat([torch.zeros_like(sines), torch.ones_like(cosines)], -1)
    return table


@contextmanager
def flattened(flat: bool) -> Iterator[None]:
    """If ``flat``, set the angles of rotary positions to zero."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    changes = {
        "aten::cos": torch.ones_like,
        "aten::sin": torch.zeros_like,
        "aten::polar": lambda output: torch.polar(output.abs(), torch.zeros_like(output.abs())),
    }

    class Flattening(TorchDispatchMode):  # type: ignore[misc]
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            output = operation(*args, **(kwargs or {}))
            schema = getattr(operation, "_schema", None)
            change = None if schema is None else changes.get(schema.name)
            return output if change is None else change(output)

    if not flat:
        yield
        return
    with Flattening():
        yield


def run_batch(module: Any, batch: Any) -> Any:
    """Return a module's output for a batch: arguments by name, in order, or a single argument."""
    with slow_path():
        try:
            if isinstance(batch, Mapping):
                return module(**batch)
            return module(*batch) if isinstance(batch, tuple | list) else module(batch)
        except WqkError:  # of an observer or a listener
            raise
        except Exception as error:  # the model's own code may fail in any way
            raise CheckpointError(
                f"{type(module).__name__}: cannot be run on this batch ({first_line(error)})"
            ) from error


def _run_all(
    model: Any,
    blocks: Sequence[tuple[str, Sequence[Application]]],
    make_inputs: Callable[[Any], dict[str, Any]],
) -> list[str]:
    """Run the model, and then each nested model without recorded blocks.

    Parameters
    ----------
    model
        The model.
    blocks
        Records of the blocks, by the names of their query tensors.
    make_inputs
        Function that makes the inputs of a model.

    Returns
    -------
    list of str
        Reasons why models could not be run.

    Raises
    ------
    Exception
        The first error of the models' code, if no block ran.
    """
    import torch

    failures, reasons = [], []
    for prefix, part in models_within(model):
        records_within = [record for tensor, record in blocks if tensor.startswith(prefix)]
        if not records_within or any(records_within):
            continue
        try:
            inputs = make_inputs(part)
            if _reports_attention(part):
                inputs["output_attentions"] = True
            with torch.no_grad():
                part(**inputs)
        except Exception as error:  # the model's own code may fail in any way
            failures.append(error)
            reasons.append(f"{prefix.rstrip('.') or type(model).__name__}: {first_line(error)}")
    if failures and not any(record for _, record in blocks):
        raise failures[0]
    return reasons


def _reports_attention(model: Any) -> bool:
    """Return whether a model has the argument ``output_attentions``."""
    parameters = inspect.signature(model.forward).parameters
    takes_any_name = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    return "output_attentions" in parameters or takes_any_name


def models_within(model: Any) -> Iterator[tuple[str, Any]]:
    """Yield the model and its nested `transformers` models, with prefixes of parameters."""
    from transformers import PreTrainedModel

    yield "", model
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel):
            yield f"{name}.", module


@contextmanager
def quiet() -> Iterator[None]:
    """Hide progress bars and warnings, such as warnings about missing heads of models."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


@contextmanager
def double_precision() -> Iterator[None]:
    """Make requests for float32 in PyTorch return float64.

    Models request float32 for rotary angles and the softmax, independent of the type of their
    weights.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def doubled(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class DoublePrecision(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            # Bytes stay unchanged: `torch.load` puts them into an empty tensor.
            is_empty = func is torch.empty and args and args[0] == (0,)
            if is_empty or func in (torch.Tensor.view, torch.frombuffer):
                return func(*args, **(kwargs or {}))
            if func is torch.Tensor.float:
                func = torch.Tensor.double
            positional = [doubled(value) for value in args]
            named = {name: doubled(value) for name, value in (kwargs or {}).items()}
            return func(*positional, **named)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(default)


def load_model(
    ref: Any,
    checkpoint: Checkpoint,
    family: Family,
    hub: Mapping[str, Any],
    adapter: Adapter | None = None,
) -> tuple[Any, tuple[str, ...]]:
    """Return the model in float64, with observable attention; without its head if possible.

    Also return the names of weights of layers and embeddings that the checkpoint lacks;
    transformers draws these weights at random.

    Raises
    ------
    UnknownFamily
        The installed transformers has no code for the model type.
    CheckpointError
        The checkpoint has no config.json.
    MissingPackage
        PEFT, which merges adapters, is not installed.
    """
    import torch
    import transformers
    from transformers import AutoModel

    source = {"pretrained_model_name_or_path": ref, **hub}
    if adapter:
        source |= {"pretrained_model_name_or_path": adapter.base, "revision": adapter.revision}
        source.pop("subfolder", None)
    config = _config_of(checkpoint, family, source)
    # An adapter names the modules of the model with its head; some models have no other class.
    has_headless_class = type(config) in transformers.MODEL_MAPPING
    needs_head = family.runs_with_head or adapter or not has_headless_class
    class_name = (config.architectures or [""])[0] if needs_head else ""
    model, report = load_pretrained(
        getattr(transformers, class_name, AutoModel),
        **source,
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
    )
    if adapter:
        model = _merged(model, ref, hub)
    # Parameters of some types are made in float32 by name, and stay so.
    drawn = tuple(sorted(name for name in report["missing_keys"] if IN_LAYERS.search(name)))
    return model.eval().double(), drawn


def _config_of(checkpoint: Checkpoint, family: Family, source: Mapping[str, Any]) -> Any:
    """Return the configuration for `transformers` to run a checkpoint.

    ``source`` contains the arguments of ``from_pretrained`` for the checkpoint. Raises the errors
    of `load_model`.
    """
    from transformers import CONFIG_MAPPING

    model_type = checkpoint.config.get("model_type")
    code = model_type if model_type in CONFIG_MAPPING else family.runs_as
    if code not in CONFIG_MAPPING:
        raise UnknownFamily(
            f"{checkpoint.name}: the installed transformers has no code for model type "
            f"{model_type!r}, so its attention cannot be run and compared; load it with its own "
            "class, and compare the module: wqk.verify(model, batch)"
        )
    stored, _ = CONFIG_MAPPING[code].get_config_dict(**source)
    if not stored:  # transformers would make up a default configuration
        raise CheckpointError(
            f"{checkpoint.name}: verify runs models as transformers loads them, and there is no "
            "config.json"
        )
    config = CONFIG_MAPPING[code].from_pretrained(**source, trust_remote_code=False)
    config._experts_implementation = "eager"  # the fused kernels know no float64
    # A class that stands in for a family's own code may be causal where the family is not.
    is_bidirectional_family = family.runs_as and not any(rule.causal for rule in family.attention)
    if is_bidirectional_family or Config(checkpoint.config).lifts_mask:
        config.is_causal = False
    return config


def load_pretrained(kind: Any, /, *ref: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    """Return a saved model of `transformers`, and the weights that did not fit.

    Code of a repository is never run.
    """
    model, report = kind.from_pretrained(
        *ref, output_loading_info=True, trust_remote_code=False, **options
    )
    return model, report


def _merged(model: Any, ref: Any, hub: Mapping[str, Any]) -> Any:
    """Return the model with an adapter's products in its weights."""
    try:
        import peft
    except ImportError:
        raise MissingPackage(
            f"{ref}: verify runs an adapter with PEFT: pip install peft", package="peft"
        ) from None
    return peft.PeftModel.from_pretrained(model, ref, **hub).merge_and_unload()
