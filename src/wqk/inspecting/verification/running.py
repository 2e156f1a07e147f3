"""A model, run by `transformers` in double precision with its attention recorded.

Axes: B texts, H query heads, N tokens (I queries, J keys), D width.
"""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints import Checkpoint
from wqk.checkpoints.adapters import Adapter
from wqk.errors import (
    CheckpointError,
    MissingPackage,
    UnknownFamily,
    WqkError,
    first_line,
    required_by,
)
from wqk.families import Family, find_family, load_family
from wqk.families.config import Config
from wqk.inspecting.verification.inputs import inputs_of
from wqk.inspecting.verification.products import Products
from wqk.inspecting.verification.recording import (
    heads_apart,
    listen,
    place_of,
    require_records,
)
from wqk.model import Model
from wqk.model import open as open_model

if TYPE_CHECKING:
    import numpy as np

    from wqk.inspecting.verification.recording import Application

# Inputs that tell tokens from padding, (B, N).
PADDING_MASKS = ("attention_mask", "decoder_attention_mask")


class Run(NamedTuple):
    """What was recorded of a model's pass."""

    records: list[list[Application]]  # every application of the attention of each plan
    seen: dict[int, np.ndarray]  # which tokens are no padding, (B, N) by N
    failures: list[str]  # parts of the model that could not be run, and why


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
) -> Run:
    """Run a model once; arguments and errors as for `wqk.inspecting.verification.verify`.

    ``adapter`` is the one that ``ref`` names, if it does not name a model.

    With ``flat``, rotary positions are removed: every sine is 0, every cosine 1. Some models
    compute their tables of positions when they are loaded, so each run loads the model.
    """
    if not isinstance(ref, str | os.PathLike) or Path(ref).is_file():
        raise CheckpointError(
            "verify takes a folder or a Hub id, got "
            f"{ref if isinstance(ref, str | os.PathLike) else type(ref).__name__}; "
            "save the model with its config.json and pass the folder"
        )
    with required_by("running the model"):
        import torch  # noqa: F401
        from transformers import AutoTokenizer
    checkpoint, plans, hub = stored.checkpoint, stored.plans, stored.hub
    family = stored.family_file
    known = load_family(family) if family else find_family(checkpoint)
    products = Products()
    with quiet(), double_precision(), products.open(flat):
        try:
            model = _load_model(ref, checkpoint, known, hub, adapter)
            if text is not None and tokens is None:
                tokenizer = AutoTokenizer.from_pretrained(ref, trust_remote_code=False, **hub)
                tokens = tokenizer(text)["input_ids"]
            live = open_model(model, family=family).plans
            records = listen(model, plans, live, products)
            tensors = {place_of(plan): plan.query.tensor for plan in live}
            blocks = [(tensors[place_of(p)], r) for p, r in zip(plans, records, strict=True)]
            given, failures = _run_all(model, blocks, (tokens, length, seed))
            if not any(records):
                require_records(model, plans, records)
        except WqkError:
            raise
        except Exception as error:  # the model's own code may fail in any way
            reason = first_line(error)
            raise CheckpointError(f"{checkpoint.name}: cannot be run ({reason})") from error
    masks = [inputs[name].numpy() for inputs in given for name in PADDING_MASKS if name in inputs]
    return Run(records, {mask.shape[1]: mask.astype(bool) for mask in masks}, failures)


def _run_all(
    model: Any,
    blocks: Sequence[tuple[str, Sequence[Application]]],
    arguments: tuple[Sequence[int] | None, int, int],
) -> tuple[list[dict[str, Any]], list[str]]:
    """Run the model, and then each model in it none of whose blocks ran.

    ``blocks`` are the names of the blocks' queries and their records, ``arguments`` are tokens,
    length and seed for `inputs_of`. Returns what the models were given, and why some could not be
    run; if no block ran, whatever the model's own code raised is raised.
    """
    import torch

    given, failures, reasons = [], [], []
    for prefix, part in _models(model):
        own = [record for tensor, record in blocks if tensor.startswith(prefix)]
        if not own or any(own):
            continue
        try:
            inputs = inputs_of(part, *arguments)
            parameters = inspect.signature(part.forward).parameters.values()
            reports = any(
                p.name == "output_attentions" or p.kind is p.VAR_KEYWORD for p in parameters
            )
            with torch.no_grad(), heads_apart():
                part(**inputs, **({"output_attentions": True} if reports else {}))
            given.append(inputs)
        except Exception as error:  # the model's own code may fail in any way
            failures.append(error)
            reasons.append(f"{prefix.rstrip('.') or type(model).__name__}: {first_line(error)}")
    if failures and not any(record for _, record in blocks):
        raise failures[0]
    return given, reasons


def _models(model: Any) -> Iterator[tuple[str, Any]]:
    """The model, then the `transformers` models in it, with the prefixes of their parameters."""
    from transformers import PreTrainedModel

    yield "", model
    for name, module in model.named_modules():
        if name and isinstance(module, PreTrainedModel):
            yield f"{name}.", module


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars and no warnings, as tensors that attention does not need may be missing."""
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
    """Give float64 to code that asks PyTorch for float32.

    Models compute rotary angles and the softmax in float32 by name, whatever their weights are.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    def doubled(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    class DoublePrecision(TorchFunctionMode):  # type: ignore[misc]
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if func in (torch.Tensor.view, torch.frombuffer):  # bytes as what they are
                return func(*args, **(kwargs or {}))
            func = torch.Tensor.double if func is torch.Tensor.float else func
            named = {key: doubled(value) for key, value in (kwargs or {}).items()}
            return func(*map(doubled, args), **named)

    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with DoublePrecision():
            yield
    finally:
        torch.set_default_dtype(default)


def _load_model(
    ref: Any,
    checkpoint: Checkpoint,
    family: Family,
    hub: Mapping[str, Any],
    adapter: Adapter | None = None,
) -> Any:
    """The model in float64, with observable attention; without its head if possible."""
    import torch
    import transformers
    from transformers import CONFIG_MAPPING, AutoModel

    model_type = checkpoint.config.get("model_type")
    code = model_type if model_type in CONFIG_MAPPING else family.runs_as
    if code not in CONFIG_MAPPING:
        raise UnknownFamily(
            f"{checkpoint.name}: the installed transformers has no code for model type "
            f"{model_type!r}, so its attention cannot be run and compared"
        )
    source = {"pretrained_model_name_or_path": ref, **hub}
    if adapter:
        source |= {"pretrained_model_name_or_path": adapter.base, "revision": adapter.revision}
        source.pop("subfolder", None)
    if not CONFIG_MAPPING[code].get_config_dict(**source)[0]:  # a default one would be made up
        raise CheckpointError(
            f"{checkpoint.name}: verify runs models as transformers loads them, and there is no "
            "config.json"
        )
    config = CONFIG_MAPPING[code].from_pretrained(**source, trust_remote_code=False)
    config._experts_implementation = "eager"  # the fused kernels know no float64
    remote = family.runs_as and not any(rule.causal for rule in family.attention)
    if remote or Config(checkpoint.config).lifts_mask:
        config.is_causal = False
    # An adapter names the modules of the model with its head.
    with_head = family.runs_with_head or adapter
    named = (config.architectures or [""])[0] if with_head else ""
    model = getattr(transformers, named, AutoModel).from_pretrained(
        **source,
        config=config,
        dtype=torch.float64,
        attn_implementation="eager",
        trust_remote_code=False,
    )
    return (_merged(model, ref, hub) if adapter else model).eval()


def _merged(model: Any, ref: Any, hub: Mapping[str, Any]) -> Any:
    """The model with an adapter's products in its weights."""
    try:
        import peft
    except ImportError:
        raise MissingPackage(
            f"{ref}: verify runs an adapter with PEFT: pip install peft", package="peft"
        ) from None
    return peft.PeftModel.from_pretrained(model, ref, **hub).merge_and_unload()
