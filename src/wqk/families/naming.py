"""The names of a family, or of token embeddings, looked up among a checkpoint's tensors."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.checkpoints import Part, TensorInfo
from wqk.errors import CheckpointError
from wqk.families.inference import RECURRENT, candidates
from wqk.families.layouts import Composed

if TYPE_CHECKING:
    from wqk.checkpoints import Checkpoint
    from wqk.families.family import AttentionRule
    from wqk.families.layouts import Projection


@dataclass(frozen=True, eq=False)
class Match:
    """One layer's tensors that match a rule."""

    tensors: Mapping[str, TensorInfo]  # the checkpoint's
    index: tuple[int, ...]
    query: str  # full name of the weight
    key: str
    prefix: str

    @property
    def group(self) -> int:
        """The first index; 0 for attention that there is only once."""
        return self.index[0] if self.index else 0

    def weight(self, spellings: tuple[str, ...]) -> str | None:
        """Full name of the first of these spellings' weights that exists."""
        names = (_stored(self._filled(spelling), self.tensors) for spelling in spellings)
        return next((name for name in names if name in self.tensors), None)

    def part(self, spellings: tuple[str, ...]) -> Part | None:
        """The first of these full names' tensors that exists."""
        names = map(self._filled, spellings)
        return next((Part(name) for name in names if name in self.tensors), None)

    def bias(self, projection: Projection | Composed, names: tuple[str, ...]) -> Part | None:
        """The projection's bias: under a name of its own, or laid out like the outputs."""
        named = self.part(names)
        if named is not None or isinstance(projection, Composed):
            return named
        name = projection.tensor.removesuffix("weight") + "bias"
        return projection.bias_part(name) if not names and name in self.tensors else None

    def norm(self, spellings: tuple[str, ...], what: str, heads: int = 1) -> tuple[Part, ...]:
        """The gain (``weight``) or bias of a norm; one for each head if its name has ``{head}``."""
        # In the oldest files, a norm's gain and bias are gamma and beta.
        endings = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}[what]
        for spelling in spellings:
            numbers = range(heads if "{head}" in spelling else 1)
            # The name of a bare parameter already ends in weight.
            stem = weight_name(spelling).removesuffix("weight")
            stems = [stem.replace("{head}", str(n)) for n in numbers]
            for ending in endings:
                parts = [self.part((f"{stem}{ending}",)) for stem in stems]
                if all(parts):
                    return tuple(part for part in parts if part is not None)
        return ()

    def _filled(self, spelling: str) -> str:
        """The full name; ``{last}`` is the highest number that a tensor has."""
        before, mark, after = spelling.partition("{last}")
        if mark:
            start, end = re.escape(self.prefix + before), re.escape(after)
            found = (re.fullmatch(rf"{start}([0-9]{{1,9}}){end}", name) for name in self.tensors)
            last = max((int(match[1]) for match in found if match), default=0)
            spelling = f"{before}{last}{after}"
        return self.prefix + _fill(spelling, self.index)


def find_layers(
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, keyless: int = 0
) -> list[Match]:
    """The layers whose tensors match the rule's first spelling that matches at all.

    The last ``keyless`` layers need no keys of their own.
    """
    spellings = rule.fused or rule.query
    keys = rule.fused or rule.key
    for query, key in zip(spellings, keys, strict=True):
        matches = _matches(tensors, query, rule.prefix)
        if not matches:
            continue
        before = sorted({match["prefix"] for match in matches})
        if len(before) > 1 and before[0]:  # a tensor of exactly this name is the one that is meant
            raise CheckpointError(
                f"two sets of tensors match {query!r}, under "
                f"{before[0]!r} and {before[1]!r}; name one with a family file"
            )
        prefix = before[0]
        if rule.exact:
            _require_shared(prefix, query, tensors)
        found = []
        chosen = (match for match in matches if match["prefix"] == prefix)
        indices = sorted(tuple(int(n) for n in match.groups()[1:]) for match in chosen)
        if not rule.every_layer:  # else the gap is noticed
            _require_plain_weights(tensors, prefix, query, indices)
        for number, index in enumerate(indices):
            stems = [prefix + _fill(spelling, index) for spelling in (query, key)]
            names = [_stored(stem, tensors) for stem in stems]
            needed = names if number < len(indices) - keyless else names[:1]
            missing = [tensor for tensor in needed if tensor not in tensors]
            elsewhere = bool(rule.between) or _is_recurrent(stems[0].rpartition(".")[0], tensors)
            if missing and elsewhere:
                continue
            if missing:
                raise CheckpointError(f"incomplete, tensor {missing[0]!r} is missing")
            found.append(Match(tensors, index, names[0], names[1], prefix))
        return found
    return []


def _require_plain_weights(
    tensors: Mapping[str, TensorInfo],
    prefix: str,
    spelling: str,
    indices: list[tuple[int, ...]],
) -> None:
    """Check that no layer stores its queries differently, such as quantized next to plain ones."""
    within = re.compile(rf"{re.escape(prefix)}{_numbered(spelling)}\.(?!bias$).+")
    for match in filter(None, map(within.fullmatch, tensors)):
        if tuple(map(int, match.groups())) not in indices:
            raise CheckpointError(
                f"incomplete, {match[0]!r} takes the place of the weight in some layers: quantized "
                "or adapted weights cannot be scored; dequantize or merge them first"
            )


def _is_recurrent(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a module is a recurrence, which may have queries too (Kimi Linear)."""
    inside = (name.removeprefix(f"{module}.") for name in tensors if name.startswith(f"{module}."))
    return any(map(RECURRENT.fullmatch, inside))


def _require_shared(prefix: str, spelling: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Check that a prefix that a family file leaves out precedes all attention of the model."""
    other = next((c.query for c in candidates(tensors) if not c.query.startswith(prefix)), None)
    if prefix and other:
        raise CheckpointError(
            f"the family file names {spelling!r}, which is there only under {prefix!r}, "
            f"beside {other!r}; write the whole name, {prefix + spelling!r}"
        )


def prefixes(tensors: Mapping[str, TensorInfo], rule: AttentionRule) -> dict[str, list[str]]:
    """Full names of the queries' weights that match any spelling, by their prefix."""
    found: dict[str, list[str]] = {}
    for spelling in rule.fused or rule.query:
        for match in _matches(tensors, spelling, rule.prefix):
            found.setdefault(match["prefix"], []).append(match[0])
    return found


def _matches(
    tensors: Mapping[str, TensorInfo], spelling: str, prefix: str | None
) -> list[re.Match[str]]:
    """The full names of weights of this spelling, under the given prefix or under any."""
    before = r"(?:.+\.)?" if prefix is None else re.escape(prefix)
    for name in (weight_name(spelling), spelling):
        pattern = re.compile(rf"(?P<prefix>{before}){_numbered(name)}")
        if found := [match for match in map(pattern.fullmatch, tensors) if match]:
            return found
    return []


def _numbered(spelling: str) -> str:
    """A pattern of the names with this spelling, with a group for each number."""
    return re.sub(r"\\\{\w+\\\}", r"([0-9]{1,9})", re.escape(spelling))


def _fill(spelling: str, index: tuple[int, ...]) -> str:
    """The spelling with its ``{layer}`` and further indices filled in, in their order."""
    spelling = spelling.replace("{previous}", str(index[0] - 1 if index else 0))
    numbers = iter(index)
    return re.sub(r"\{\w+\}", lambda _: str(next(numbers)), spelling)


def _stored(stem: str, tensors: Mapping[str, TensorInfo]) -> str:
    """Full name of the weight; of a bare parameter the stem itself."""
    name = weight_name(stem)
    return stem if name not in tensors and stem in tensors else name


def weight_name(stem: str) -> str:
    """Full name of the weight; names of bare parameters already end in ``weight``."""
    return stem if stem.endswith("weight") else f"{stem}.weight"


# What tables of token embeddings are called, without ``.weight``.
NAMES = re.compile(
    r"(?:.*\.)?(?:embed_tokens|tok_embeddings|token_embedding|word_embeddings|word_embedding|wte"
    r"|embed_in|shared|embeddings|tokens_embed|tok_embedding|embedding)(?:\.weight)?"
)


def embedding_table(checkpoint: Checkpoint, width: int, name: str | None = None) -> str:
    """The tensor (V, ``width``) with one embedding per token, by name or searched for.

    Raises `CheckpointError` if there is none, if it has another width, or if several may be it.
    """
    tensors = checkpoint.tensors()
    if name is not None:
        shape = checkpoint.info(name).shape
        if len(shape) != 2 or shape[1] != width or not shape[0]:
            raise CheckpointError(
                f"{name}: an embedding table must be (tokens, {width}), as wide as the "
                f"queries' input; got {shape}"
            )
        return name
    found = [
        tensor
        for tensor, info in tensors.items()
        if len(info.shape) == 2
        and info.shape[0]
        and info.shape[1] == width
        and NAMES.fullmatch(tensor)
    ]
    # A table that encoder and decoder share is stored under several names.
    found = [t for t in found if t.endswith("shared.weight")] or found
    if len(found) != 1:
        several = f"several might be it: {', '.join(found[:4])}" if found else "none was recognized"
        raise CheckpointError(
            f"{checkpoint.name}: no table of token embeddings of width {width} ({several}); "
            "name the tensor (embeddings=NAME)"
        )
    return found[0]
