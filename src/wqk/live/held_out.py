"""A model with its head, the blocks of text to read, and the loss of each block.

Axes: B blocks, N tokens, V vocabulary.
"""

from __future__ import annotations

import io
import json
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import numpy as np

from wqk._console import counted
from wqk._files import UNREADABLE, opened
from wqk._typing import Float
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.adapters import AdaptedCheckpoint
from wqk.checkpoints.modules import unwrapped
from wqk.errors import CheckpointError, CorpusError, demo_advice, demo_folder, first_line
from wqk.live.running import lack_of_tokenizer, load_pretrained, most_positions, quiet, run_batch
from wqk.model import Model
from wqk.storage.references import HubOptions
from wqk.tables.run import checkpoints_in

Predicts = Literal["masked", "causal", "sequence", "states"]

# Endings of the names of architectures, with the tokens that such models predict.
ENDINGS: dict[str, Predicts] = {
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "sequence",
}

BLOCK = 128  # tokens, by default
AT_ONCE = 64  # blocks in a pass
MLP = ".mlp."  # in the names of weights of MLPs
IGNORED = -100  # label of tokens without a prediction


@dataclass(eq=False)
class HeldOut:
    """A model, and the text for measuring its loss.

    Attributes
    ----------
    model
        A `transformers` model.
    name
        Name of the text.
    predicts
        The predicted tokens: see `wqk.live.parts.Parts`.
    inputs, labels
        Token ids (B, N); the labels of tokens that are not predicted are `IGNORED`.
    """

    model: Any
    name: str
    predicts: Predicts
    inputs: np.ndarray
    labels: np.ndarray
    _states: list[Any] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.inputs)

    @property
    def length(self) -> int:
        """Tokens in a block."""
        return int(self.inputs.shape[1])

    @property
    def frequency_loss(self) -> float | None:
        """Loss of the frequencies of the predicted tokens: their entropy; None for states."""
        if self.predicts == "states":
            return None
        labels = self.labels[:, 1:] if self.predicts == "causal" else self.labels
        _, counts = np.unique(labels[labels != IGNORED], return_counts=True)
        frequencies = counts / counts.sum()
        return float(-(frequencies * np.log(frequencies)).sum())

    def remember_states(self) -> None:
        """Store the hidden states of the unchanged model, if the loss is a distance of states."""
        self._states = []
        if self.predicts == "states":
            self._states = [self._run(blocks) for blocks in self._passes()]

    def losses(self) -> Float[np.ndarray, " blocks"]:
        """Return the loss of each block: the mean over the block's predicted tokens."""
        return np.concatenate([self._losses(blocks) for blocks in self._passes()])

    def _passes(self) -> list[slice]:
        """Return the blocks for each pass of the model."""
        return [slice(start, start + AT_ONCE) for start in range(0, self.count, AT_ONCE)]

    def _run(self, blocks: slice) -> Any:
        """Return logits (B, N, V), or the last hidden states (B, N, D), of some blocks."""
        import torch

        device = self.model.device
        inputs: dict[str, Any] = {"input_ids": torch.from_numpy(self.inputs[blocks]).to(device)}
        if self.predicts == "sequence":
            inputs["labels"] = torch.from_numpy(self.labels[blocks]).to(device)
        if hasattr(self.model.config, "use_cache"):
            inputs["use_cache"] = False
        output = run_batch(self.model, inputs)
        if self.predicts == "states":
            return output.last_hidden_state
        return output.logits if "logits" in output else output.prediction_logits

    def _losses(self, blocks: slice) -> Float[np.ndarray, " blocks"]:
        """Return the losses of some blocks."""
        if self.predicts == "states":
            return self._distances(blocks)
        import torch

        logits = self._run(blocks)
        labels = torch.from_numpy(self.labels[blocks]).to(logits.device)
        if self.predicts == "causal":
            logits, labels = logits[:, :-1], labels[:, 1:]
        token_losses = torch.nn.functional.cross_entropy(
            logits.swapaxes(1, 2).to(torch.promote_types(logits.dtype, torch.float32)),
            labels,
            reduction="none",
            ignore_index=IGNORED,
        )
        predicted_tokens = (labels != IGNORED).sum(1)
        return np.asarray((token_losses.sum(1) / predicted_tokens).double().cpu())

    def _distances(self, blocks: slice) -> Float[np.ndarray, " blocks"]:
        """Return squared distances from the stored states, divided by their variance."""
        whole_states = self._states[blocks.start // AT_ONCE]
        distances = (self._run(blocks) - whole_states).double().square().mean((1, 2))
        return np.asarray((distances / whole_states.double().var((1, 2))).cpu())


class TokenSource(NamedTuple):
    """Tokens of a text, before they are cut into blocks.

    Attributes
    ----------
    name
        Name of the text.
    ids
        Token ids, (B, N), or in one row, (N,).
    mask
        Id of the mask token; None if the text has none.
    """

    name: str
    ids: np.ndarray
    mask: int | None


@dataclass(frozen=True)
class TextChoice:
    """The choice of a text, and of the blocks to cut from the text.

    Attributes have the meanings of the same names in `wqk.live.parts`; exactly one of ``text``,
    ``corpus`` and ``tokens`` is set.
    """

    text: Any = None
    corpus: Any = None
    tokens: Any = None
    blocks: int = 256
    block: int | None = None
    mask_share: float = 0.15
    seed: int = 0

    def __post_init__(self) -> None:
        sources = (self.text, self.corpus, self.tokens)
        if sum(source is not None for source in sources) != 1:
            raise CorpusError("give one of text, corpus and tokens: what the model is to read")
        if self.blocks < 2:
            raise CorpusError(f"blocks: an interval needs 2 or more, got {self.blocks}")


def open_held_out(model: Any, tokenizer_maker: partial[Any] | None, choice: TextChoice) -> HeldOut:
    """Return a model with the blocks of a text to predict.

    ``tokenizer_maker`` reads the model's tokenizer. Raises the errors of `wqk.live.parts`.
    """
    predicts = _predicted_by_model(model)
    if predicts == "states":
        model = model.base_model
    source = _source(model, tokenizer_maker, choice)
    ids = source.ids
    if ids.ndim == 1:
        ids = _cut(source, model, choice.blocks, choice.block)
    ids = ids[: choice.blocks].astype(np.int64)
    _check_ids(source.name, ids, model)
    if predicts == "sequence":
        half = ids.shape[1] // 2
        inputs, labels = ids[:, :half].copy(), ids[:, half:].copy()
    elif predicts == "masked":
        inputs, labels = _masked(source, ids, choice)
    else:
        inputs = labels = ids
    return HeldOut(model, source.name, predicts, inputs, labels)


def _source(model: Any, tokenizer_maker: partial[Any] | None, choice: TextChoice) -> TokenSource:
    """Return the tokens of the chosen text."""
    if choice.text is not None:
        count = choice.blocks * (choice.block or BLOCK)
        return _encoded(Path(choice.text), tokenizer_maker, count)
    if choice.corpus is not None:
        return _stored(Path(choice.corpus))
    return _given(choice.tokens, model, tokenizer_maker)


def _masked(
    source: TokenSource, ids: np.ndarray, choice: TextChoice
) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and labels (B, N), with masks in place of the tokens to predict."""
    if source.mask is None:
        raise CorpusError(
            f"{source.name}: an encoder predicts masked tokens, and no mask token is known"
        )
    if not 0 < choice.mask_share < 1:
        raise CorpusError(f"the share of masked tokens lies in (0, 1), got {choice.mask_share:g}")
    is_masked = choose(np.random.default_rng(choice.seed), ids.shape, choice.mask_share)
    return np.where(is_masked, source.mask, ids), np.where(is_masked, ids, IGNORED)


def _predicted_by_model(model: Any) -> Predicts:
    """Return the tokens that a model predicts, from its class and configuration."""
    class_name = type(model).__name__
    predicts = predicted_by(class_name)
    if class_name.endswith("ForPreTraining") and model.get_output_embeddings() is None:
        return "states"  # ELECTRA's discriminator
    if predicts == "sequence" and not model.config.is_encoder_decoder:
        return "causal"  # a decoder with images as further input
    return predicts


def _given(tokens: Any, model: Any, tokenizer_maker: partial[Any] | None) -> TokenSource:
    """Return token ids from the caller, with the model's mask token."""
    ids = np.asarray(tokens)
    if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
        raise CorpusError(
            f"tokens must be whole numbers (B, N) or (N,), got {ids.dtype} {ids.shape}"
        )
    mask = getattr(model.config, "mask_token_id", None)
    if mask is None and tokenizer_maker:
        with suppress(CorpusError):
            mask = tokenizer_maker().mask_token_id
    return TokenSource("token ids", ids, mask)


def _cut(source: TokenSource, model: Any, blocks: int, block: int | None) -> np.ndarray:
    """Return blocks of tokens, (B, N), spread over a text in one row."""
    name, ids, _ = source
    positions = most_positions(model)
    length = min(BLOCK, positions or BLOCK) if block is None else block
    if positions is not None and length > positions:
        raise CorpusError(
            f"block: the model has {positions} positions; expected at most {positions} tokens in "
            f"a block, got {length}"
        )
    count = min(blocks, len(ids) // length) if length > 1 else 0
    if count < 2:
        raise CorpusError(
            f"{name}: {len(ids):,} tokens hold no 2 blocks of {length}; give more text, or "
            "fewer tokens in a block (block)"
        )
    starts = np.linspace(0, len(ids) // length - 1, count).astype(int) * length
    return np.asarray(ids[starts[:, None] + np.arange(length)])


def _check_ids(name: str, ids: np.ndarray, model: Any) -> None:
    """Raise `CorpusError` for blocks that are too few, too short, or outside the vocabulary."""
    if min(ids.shape) < 2:
        raise CorpusError(f"{name}: expected 2 or more blocks of 2 or more tokens, got {ids.shape}")
    try:
        vocabulary_size = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        raise CheckpointError(
            f"{type(model).__name__}: has no table of token embeddings; expected a model that "
            "reads tokens"
        ) from None
    if ids.min() < 0 or ids.max() >= vocabulary_size:
        raise CorpusError(
            f"{name}: has token ids up to {ids.max()}, and the model a vocabulary of "
            f"{vocabulary_size}; give a text in the model's own tokens"
        )


def choose(random: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    """Draw the masked tokens, (B, N): the same number in each block, at least 1 and less than N.

    Examples
    --------
    >>> choose(np.random.default_rng(0), (3, 20), 0.15).sum(axis=1).tolist()
    [3, 3, 3]
    """
    count = min(max(1, round(share * shape[1])), shape[1] - 1)
    ranks = random.random(shape).argsort(axis=1).argsort(axis=1)
    chosen: np.ndarray = ranks < count
    return chosen


def predicted_by(name: str) -> Predicts:
    """Return the tokens that a model of a class predicts; ``states`` for a class without a head."""
    for ending, predicts in ENDINGS.items():
        if name.endswith(ending):
            return predicts
    return "states"


def require_tokenizer(ref: Any) -> None:
    """Raise `CorpusError` if a model's folder has no tokenizer file, without loading a library.

    The tokenizer may still be unreadable: see `tokenizer_of`.
    """
    folder = ref.ref if isinstance(ref, Model) else ref
    if not isinstance(folder, str | Path):
        return
    reason = lack_of_tokenizer(Path(folder))
    if reason:
        raise _no_tokenizer(str(folder), reason)


def load(ref: Any, caller: str = "parts") -> tuple[Any, partial[Any] | None]:
    """Return a model in float32, and a function that reads the model's tokenizer.

    The model has a head if the checkpoint has one. A model in memory is returned without wrappers,
    and without a tokenizer. ``caller`` is the name of the calling function, for errors.

    Raises
    ------
    CheckpointError
        transformers cannot load the model, or the model has learned prompts.
    """
    hub, checkpoint = HubOptions(), None
    if isinstance(ref, Model):
        hub, checkpoint, ref = ref.hub, ref.checkpoint, ref.ref
    if getattr(getattr(ref, "active_peft_config", None), "is_prompt_learning", False):
        raise CheckpointError(f"{type(ref).__name__}: its learned prompts would be left out")
    if isinstance(ref, str):
        ref = demo_folder(ref) or ref
    if not isinstance(ref, str | Path):
        model = unwrapped(ref) if hasattr(ref, "named_children") else ref
        return model, None
    steps = checkpoints_in(Path(ref)) if Path(ref).is_dir() else []
    place = str(steps[-1][1] if steps else ref)
    if checkpoint is None:
        checkpoint = open_checkpoint(place)  # with clearer errors than those of transformers
    if isinstance(checkpoint, AdaptedCheckpoint):
        raise CheckpointError(
            f"{ref}: is an adapter, and {caller} runs whole models: merge it into its base with "
            "PEFT (model.merge_and_unload()), and pass the merged model or its folder"
        )
    model = _from_pretrained(ref, place, checkpoint.tensors(), hub).eval()
    return model, partial(tokenizer_of, place, **hub)


def _from_pretrained(ref: Any, place: str, stored: Collection[str], hub: HubOptions) -> Any:
    """Return a saved model in float32, with a head if the checkpoint has all weights of the head.

    ``ref`` is the name in errors, ``stored`` are the names of the checkpoint's tensors.
    """
    import torch
    import transformers

    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **hub)
            name = (config.architectures or [""])[0]
            if not name and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
                name = "AutoModelForCausalLM"
            headless = transformers.AutoModel
            model_class = getattr(transformers, name, headless)
            model, report = load_pretrained(model_class, place, dtype=torch.float32, **hub)
            missing = _missing(model, report["missing_keys"], stored)
            if missing:
                model, report = load_pretrained(headless, place, dtype=torch.float32, **hub)
                missing = _missing(model, report["missing_keys"], stored)
        except Exception as error:  # every model class has its own
            reason = first_line(error)
            raise CheckpointError(f"{ref}: cannot be loaded ({reason})") from error
    # A pooler reads the last states, and is not part of the states.
    if missing := [name for name in missing if "pooler" not in name]:
        raise CheckpointError(
            f"{ref}: lacks {counted(len(missing), 'tensor')} that the model runs with, such as "
            f"{missing[0]}; drawn at random, they would decide the result: give a whole checkpoint"
            f"{demo_advice(str(ref))}"
        )
    return model


def _missing(model: Any, names: Iterable[str], stored: Collection[str]) -> list[str]:
    """Return the names of missing weights, without those of MLPs that the checkpoint never had.

    A model of attention alone is stored as a type with MLPs. The weights of these MLPs, drawn at
    random, are set to zero, so that the MLPs add nothing.
    """
    import torch

    missing = sorted(names)
    is_attention_alone = any(MLP in name for name in missing) and not any(
        MLP in name for name in stored
    )
    if not is_attention_alone:
        return missing
    parameters = dict(model.named_parameters())
    remaining = []
    for name in missing:
        parameter = parameters.get(name)
        is_norm = parameter is not None and parameter.ndim == 1 and "norm" in name
        if parameter is not None and MLP in name:
            torch.nn.init.zeros_(parameter)
        elif not is_norm:  # the norm before an MLP of zeros has no effect
            remaining.append(name)
    return remaining


# A sentence on a model that `load` has loaded without MLPs.
ATTENTION_ALONE = (
    "the weights of all MLPs are absent or zero: the model was run with attention alone"
)


def has_attention_alone(model: Any) -> bool:
    """Return whether all weights of a model's MLPs are zero, as `load` makes absent MLPs."""
    weights = [weight for name, weight in model.named_parameters() if MLP in name]
    return bool(weights) and not any(weight.any() for weight in weights)


def fresh(model: Any, seed: int) -> Any:
    """Return a new model of the same class and configuration; None if it cannot be created."""
    import copy

    import torch

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return type(model)._from_config(copy.deepcopy(model.config)).eval()
        except Exception:  # model classes raise different errors
            return None


def _encoded(path: Path, tokenizer_maker: partial[Any] | None, count: int) -> TokenSource:
    """Return the first tokens of a text file, at least ``count``, from a model's tokenizer."""
    if tokenizer_maker is None:
        raise CorpusError("a text needs the tokenizer of a saved model; give tokens instead")
    # Tokens are hardly ever longer than 40 characters; the remaining text is not read.
    enough = 40 * count
    text = _beginning(path, enough)
    tokenizer = tokenizer_maker()
    with quiet():
        ids = tokenizer(text[:enough], add_special_tokens=False)["input_ids"]
    return TokenSource(path.name, np.asarray(ids, np.int64), tokenizer.mask_token_id)


def require_text(path: Path) -> None:
    """Raise `CorpusError` if a file contains no text; only the beginning is read."""
    _beginning(path, 1)


def _beginning(path: Path, enough: int) -> str:
    """Return at least the first ``enough`` characters of a file of text or JSON Lines."""
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            if {".jsonl", ".ndjson", ".json"} & {suffix.lower() for suffix in path.suffixes}:
                documents: list[str] = []
                length = 0
                for line in iter(lines.readline, ""):
                    documents.append(json.loads(line)["text"])
                    length += len(documents[-1])
                    if length >= enough:
                        break
                text = "\n".join(documents)
            else:
                text = lines.read(enough)
    except (*UNREADABLE, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as text ({first_line(error)})") from None
    except (KeyError, TypeError):
        raise CorpusError(f'{path}: expected a JSON object with a "text" in each line') from None
    return text


def tokenizer_of(ref: str, **hub: Unpack[HubOptions]) -> Any:
    """Return a model's tokenizer; `CorpusError` if the model has no tokenizer for text."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(ref, trust_remote_code=False, **hub)
        # Where a model's files are missing, transformers may make a tokenizer without words.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("no vocabulary")
    except Exception as error:  # the libraries raise anything
        reason = first_line(error)
        # A reason that ends in a colon is followed by a list, which would be cut off.
        raise _no_tokenizer(ref, "" if reason.endswith(":") else reason) from None
    return tokenizer


def _no_tokenizer(ref: str, reason: str) -> CorpusError:
    """Return the error about a model without a tokenizer."""
    shown = f" ({reason})" if reason else ""
    return CorpusError(
        f"{ref}: has no tokenizer that encodes text{shown}; save the model's next to the weights, "
        "or give a token store: wqk lab corpus FILE "
        "--vocabulary vocab.txt -o STORE, then corpus=STORE"
    )


def _stored(folder: Path) -> TokenSource:
    """Return the held-out tokens of a folder that ``wqk lab corpus`` wrote."""
    try:
        header = json.loads((folder / "store.json").read_bytes())
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        tokens = np.fromfile(folder / "held_out.tokens", dtype=dtype)
        return TokenSource(folder.name, tokens, header["special"].get("mask"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{folder}: is not a folder of tokens ({first_line(error)}); wqk lab corpus writes one"
        ) from None
