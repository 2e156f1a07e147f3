"""A model with its head, blocks of a text that it reads, and the loss of each block.

Axes: B blocks, N tokens, V vocabulary.
"""

from __future__ import annotations

import io
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Unpack

import numpy as np

from wqk._console import counted
from wqk._files import UNREADABLE, opened
from wqk._typing import Float
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.modules import unwrapped
from wqk.errors import CheckpointError, CorpusError, first_line
from wqk.live.running import load_pretrained, most_positions, quiet, run_batch
from wqk.model import Model
from wqk.storage.references import HubOptions
from wqk.tables.run import checkpoints_in

Predicts = Literal["masked", "causal", "sequence", "states"]

# How the names of architectures end, and what those predict.
ENDINGS: dict[str, Predicts] = {
    "ForMaskedLM": "masked",
    "ForPreTraining": "masked",
    "ForCausalLM": "causal",
    "LMHeadModel": "causal",
    "ForConditionalGeneration": "sequence",
}

BLOCK = 128  # tokens, by default
AT_ONCE = 64  # blocks in a pass
IGNORED = -100  # the label of what is not predicted


@dataclass(eq=False)
class HeldOut:
    """A model and the text that its loss is measured on.

    Attributes
    ----------
    model
        A `transformers` model.
    name
        Of the text.
    predicts
        What the loss is of: see `wqk.live.parts.Parts`.
    inputs, labels
        Token ids (B, N); labels are `IGNORED` where nothing is predicted.
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

    def remember_states(self) -> None:
        """Keep the hidden states of the model as it is, where they stand for the loss."""
        self._states = []
        if self.predicts == "states":
            self._states = [self._run(at) for at in self._passes()]

    def losses(self) -> Float[np.ndarray, " blocks"]:
        """The loss of each block: mean over its predicted tokens."""
        return np.concatenate([self._losses(at) for at in self._passes()])

    def _passes(self) -> list[slice]:
        return [slice(at, at + AT_ONCE) for at in range(0, self.count, AT_ONCE)]

    def _run(self, at: slice) -> Any:
        """Logits, or the last hidden states."""
        import torch

        device = self.model.device
        inputs = {"input_ids": torch.from_numpy(self.inputs[at]).to(device)}
        if self.predicts == "sequence":
            inputs["labels"] = torch.from_numpy(self.labels[at]).to(device)
        cache = {"use_cache": False} if hasattr(self.model.config, "use_cache") else {}
        out = run_batch(self.model, inputs | cache)
        if self.predicts == "states":
            return out.last_hidden_state
        return out.logits if "logits" in out else out.prediction_logits

    def _losses(self, at: slice) -> np.ndarray:
        import torch

        out = self._run(at)
        if self.predicts == "states":
            own = self._states[at.start // AT_ONCE]
            apart = (out - own).double().square().mean((1, 2))
            return np.asarray((apart / own.double().var((1, 2))).cpu())
        labels = torch.from_numpy(self.labels[at]).to(out.device)
        if self.predicts == "causal":
            out, labels = out[:, :-1], labels[:, 1:]
        each = torch.nn.functional.cross_entropy(
            out.swapaxes(1, 2).to(torch.promote_types(out.dtype, torch.float32)),
            labels,
            reduction="none",
            ignore_index=IGNORED,
        )
        return np.asarray((each.sum(1) / (labels != IGNORED).sum(1)).double().cpu())


def open_held_out(
    model: Any,
    own: partial[Any] | None,
    text: Any,
    corpus: Any,
    tokens: Any,
    blocks: int,
    block: int | None,
    mask_share: float,
    seed: int,
) -> HeldOut:
    """A text for a model with its own tokenizer; arguments and errors as for `wqk.live.parts`."""
    if sum(value is not None for value in (text, corpus, tokens)) != 1:
        raise CorpusError("give one of text, corpus and tokens: what the model is to read")
    if blocks < 2:
        raise CorpusError(f"an interval needs at least 2 blocks; got {blocks}")
    predicts = predicted_by(type(model).__name__)
    if predicts == "sequence" and not model.config.is_encoder_decoder:
        predicts = "causal"  # a decoder that also sees pictures
    if type(model).__name__.endswith("ForPreTraining") and model.get_output_embeddings() is None:
        predicts = "states"  # ELECTRA's discriminator
    if predicts == "states":
        model = model.base_model
    mask: int | None = None
    if text is not None:
        name, ids, mask = _encoded(Path(text), own, blocks * (block or BLOCK))
    elif corpus is not None:
        name, ids, mask = _stored(Path(corpus))
    else:
        name, ids = "token ids", np.asarray(tokens)
        if ids.dtype.kind not in "iu" or ids.ndim not in (1, 2):
            raise CorpusError(
                f"tokens must be whole numbers (B, N) or (N,), got {ids.dtype} {ids.shape}"
            )
        mask = getattr(model.config, "mask_token_id", None)
        if mask is None and own:
            with suppress(CorpusError):
                mask = own().mask_token_id
    if ids.ndim == 1:
        positions = most_positions(model)
        length = min(BLOCK, positions or BLOCK) if block is None else block
        if positions is not None and length > positions:
            raise CorpusError(f"blocks of {length} tokens; the model has {positions} positions")
        count = min(blocks, len(ids) // length) if length > 1 else 0
        if count < 2:
            raise CorpusError(
                f"{name}: {len(ids):,} tokens hold no 2 blocks of {length}; give more text, or "
                "fewer tokens in a block (block)"
            )
        # From all over the text.
        starts = np.linspace(0, len(ids) // length - 1, count).astype(int) * length
        ids = ids[starts[:, None] + np.arange(length)]
    ids = ids[:blocks].astype(np.int64)
    if min(ids.shape) < 2:
        raise CorpusError(f"{name}: expected 2 or more blocks of 2 or more tokens, got {ids.shape}")
    try:
        size = model.get_input_embeddings().num_embeddings
    except (AttributeError, NotImplementedError):
        raise CheckpointError(f"{type(model).__name__} does not read tokens") from None
    if ids.min() < 0 or ids.max() >= size:
        raise CorpusError(
            f"{name}: has token ids up to {ids.max()}, and the model a vocabulary of {size}; "
            "give a text in the model's own tokens"
        )
    if predicts == "sequence":
        half = ids.shape[1] // 2
        return HeldOut(model, name, predicts, ids[:, :half].copy(), ids[:, half:].copy())
    if predicts != "masked":
        return HeldOut(model, name, predicts, ids, ids)
    if mask is None:
        raise CorpusError(f"{name}: an encoder predicts masked tokens, and no mask token is known")
    if not 0 < mask_share < 1:
        raise CorpusError(f"the share of masked tokens lies in (0, 1), got {mask_share:g}")
    hidden = choose(np.random.default_rng(seed), ids.shape, mask_share)
    return HeldOut(
        model, name, predicts, np.where(hidden, mask, ids), np.where(hidden, ids, IGNORED)
    )


def choose(random: np.random.Generator, shape: tuple[int, ...], share: float) -> np.ndarray:
    """Draw the masked tokens, (B, N): equally many in each block, at least 1 and less than N.

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
    """What a model's class predicts, by its name."""
    kinds = (kind for ending, kind in ENDINGS.items() if name.endswith(ending))
    return next(kinds, "states")


def load(ref: Any) -> tuple[Any, partial[Any] | None]:
    """A model with its head, if the checkpoint has one, in float32, and what reads its tokenizer.

    A model in memory is returned as it is, without its wrappers and a tokenizer.

    Raises
    ------
    CheckpointError
        transformers cannot load it, or it has learned prompts.
    """
    import torch
    import transformers

    hub = ref.hub if isinstance(ref, Model) else HubOptions()
    ref = ref.ref if isinstance(ref, Model) else ref
    if getattr(getattr(ref, "active_peft_config", None), "is_prompt_learning", False):
        raise CheckpointError(f"{type(ref).__name__}: its learned prompts would be left out")
    if not isinstance(ref, str | Path):
        return (unwrapped(ref) if hasattr(ref, "named_children") else ref), None
    steps = checkpoints_in(Path(ref)) if Path(ref).is_dir() else []
    place = str(steps[-1][1] if steps else ref)
    open_checkpoint(place, **hub)  # its errors are clearer than those of transformers
    with quiet():
        try:
            config = transformers.AutoConfig.from_pretrained(place, trust_remote_code=False, **hub)
            decodes = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
            name = (config.architectures or ["AutoModelForCausalLM" if decodes else ""])[0]
            made = getattr(transformers, name, transformers.AutoModel)
            model, report = load_pretrained(made, place, dtype=torch.float32, **hub)
            if report["missing_keys"]:
                headless = transformers.AutoModel
                model, report = load_pretrained(headless, place, dtype=torch.float32, **hub)
        except Exception as error:  # every model class has its own
            reason = first_line(error)
            raise CheckpointError(f"{ref}: cannot be loaded ({reason})") from error
    # A pooler reads the last states and is no part of them.
    if missing := sorted(name for name in report["missing_keys"] if "pooler" not in name):
        raise CheckpointError(
            f"{ref}: lacks {counted(len(missing), 'tensor')} that the model runs with, such as "
            f"{missing[0]}; drawn at random, they would decide the loss: give a whole checkpoint"
        )
    return model.eval(), partial(tokenizer_of, place, **hub)


def fresh(model: Any, seed: int) -> Any:
    """A new model of the same class and configuration; None if it cannot be made."""
    import copy

    import torch

    with quiet(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return type(model)._from_config(copy.deepcopy(model.config)).eval()
        except Exception:  # every model class has its own
            return None


def _encoded(
    path: Path, own: partial[Any] | None, wanted: int
) -> tuple[str, np.ndarray, int | None]:
    """A text file in a model's own tokens."""
    if own is None:
        raise CorpusError("a text needs the tokenizer of a saved model; give tokens instead")
    # A token has at least one character, mostly; what is not needed is not read.
    enough = 40 * wanted
    try:
        with opened(path) as file, io.TextIOWrapper(file, encoding="utf-8-sig") as lines:
            if {".jsonl", ".ndjson", ".json"} & {suffix.lower() for suffix in path.suffixes}:
                documents: list[str] = []
                while sum(map(len, documents)) < enough and (line := lines.readline()):
                    documents.append(json.loads(line)["text"])
                text = "\n".join(documents)
            else:
                text = lines.read(enough)
    except (*UNREADABLE, ValueError) as error:
        raise CorpusError(f"{path}: cannot be read as text ({first_line(error)})") from None
    except (KeyError, TypeError):
        raise CorpusError(f'{path}: expected a JSON object with a "text" in each line') from None
    tokenizer = own()
    with quiet():
        ids = tokenizer(text[:enough], add_special_tokens=False)["input_ids"]
    return path.name, np.asarray(ids, np.int64), tokenizer.mask_token_id


def tokenizer_of(ref: str, **hub: Unpack[HubOptions]) -> Any:
    """A model's own tokenizer; CorpusError if it has none that encodes text."""
    from transformers import AutoTokenizer

    try:
        with quiet():
            tokenizer = AutoTokenizer.from_pretrained(ref, trust_remote_code=False, **hub)
        # Where a model's files are missing, transformers may make a tokenizer without words.
        if len(tokenizer) <= len(tokenizer.all_special_ids):
            raise ValueError("no vocabulary")
    except Exception as error:  # the libraries raise anything
        reason = first_line(error)
        shown = "" if reason.endswith(":") else f" ({reason})"  # whose list would be cut off
        raise CorpusError(
            f"{ref}: has no tokenizer that encodes text{shown}; give a corpus, or token ids"
        ) from None
    return tokenizer


def _stored(folder: Path) -> tuple[str, np.ndarray, int | None]:
    """The held-out tokens of a folder that ``wqk lab corpus`` wrote."""
    try:
        header = json.loads((folder / "store.json").read_bytes())
        dtype = np.dtype(header["dtype"]).newbyteorder("<")
        tokens = np.fromfile(folder / "held_out.tokens", dtype=dtype)
        return folder.name, tokens, header["special"].get("mask")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorpusError(
            f"{folder}: is not a folder of tokens ({first_line(error)}); wqk lab corpus writes one"
        ) from None
