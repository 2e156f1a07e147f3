"""The names of a family, looked up among a checkpoint's tensors."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk.checkpoints import Part
from wqk.errors import CheckpointError
from wqk.families.candidates import RECURRENT, candidates
from wqk.families.layouts import Composed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import TensorInfo
    from wqk.families.family import AttentionRule
    from wqk.families.layouts import Projection


@dataclass(frozen=True)
class Match:
    """The tensors of one rule in one layer, without the ``.weight`` of their names."""

    index: tuple[int, ...]
    query: str
    key: str
    prefix: str

    @property
    def group(self) -> int:
        """The first index; 0 for attention that there is only once."""
        return self.index[0] if self.index else 0


def find_layers(
    tensors: Mapping[str, TensorInfo], rule: AttentionRule, name: str, keyless: int = 0
) -> list[Match]:
    """The layers whose tensors match the rule's first spelling that matches at all.

    The last ``keyless`` layers need no keys of their own.
    """
    spellings = rule.fused or rule.query.names
    keys = rule.fused or rule.key.names
    for query, key in zip(spellings, keys, strict=True):
        matches = _matches(tensors, query, rule.prefix)
        if not matches:
            continue
        before = sorted({match["prefix"] for match in matches})
        if len(before) > 1 and before[0]:  # a tensor of exactly this name is the one that is meant
            raise CheckpointError(
                f"{name}: two sets of tensors match {query!r}, under "
                f"{before[0]!r} and {before[1]!r}; name one with a family file"
            )
        prefix = before[0]
        if rule.exact:
            _require_shared(prefix, query, tensors, name)
        found = []
        own = (match for match in matches if match["prefix"] == prefix)
        indices = sorted(tuple(int(n) for n in match.groups()[1:]) for match in own)
        for number, index in enumerate(indices):
            names = [prefix + _fill(spelling, index) for spelling in (query, key)]
            needed = names if number < len(indices) - keyless else names[:1]
            missing = [tensor for tensor in map(weight_name, needed) if tensor not in tensors]
            if missing and _is_recurrent(names[0].rpartition(".")[0], tensors):
                continue
            if missing:
                raise CheckpointError(f"{name}: incomplete, tensor {missing[0]!r} is missing")
            found.append(Match(index, names[0], names[1], prefix))
        return found
    return []


def _is_recurrent(module: str, tensors: Mapping[str, TensorInfo]) -> bool:
    """Whether a module holds a recurrence, which has queries as well (Kimi Linear)."""
    inside = (name.removeprefix(f"{module}.") for name in tensors if name.startswith(f"{module}."))
    return any(map(RECURRENT.fullmatch, inside))


def _require_shared(
    prefix: str, spelling: str, tensors: Mapping[str, TensorInfo], name: str
) -> None:
    """See that a prefix that a family file leaves out stands before all attention there is."""
    other = next((c.query for c in candidates(tensors) if not c.query.startswith(prefix)), None)
    if prefix and other:
        raise CheckpointError(
            f"{name}: the family file names {spelling!r}, which is there only under {prefix!r}, "
            f"beside {other!r}; write the whole name, {prefix + spelling!r}"
        )


def prefixes(tensors: Mapping[str, TensorInfo], rule: AttentionRule) -> dict[str, list[str]]:
    """Full names of the queries' weights that match any spelling, by what stands before it."""
    found: dict[str, list[str]] = {}
    for spelling in rule.fused or rule.query.names:
        for match in _matches(tensors, spelling, rule.prefix):
            found.setdefault(match["prefix"], []).append(match[0])
    return found


def _matches(
    tensors: Mapping[str, TensorInfo], spelling: str, prefix: str | None
) -> list[re.Match[str]]:
    """The full names of weights of this spelling, under the given prefix or under any."""
    body = re.sub(r"\\\{\w+\\\}", r"([0-9]{1,9})", re.escape(weight_name(spelling)))
    before = r"(?:.+\.)?" if prefix is None else re.escape(prefix)
    pattern = re.compile(rf"(?P<prefix>{before}){body}")
    return [match for match in map(pattern.fullmatch, tensors) if match]


def _fill(spelling: str, index: tuple[int, ...]) -> str:
    """The spelling with its ``{layer}`` and further indices filled in, in their order."""
    spelling = spelling.replace("{previous}", str(index[0] - 1 if index else 0))
    numbers = iter(index)
    return re.sub(r"\{\w+\}", lambda _: str(next(numbers)), spelling)


def weight_name(stem: str) -> str:
    """Full name of the weight; parameters that are no module's own end in ``weight`` already."""
    return stem if stem.endswith("weight") else f"{stem}.weight"


def named(
    tensors: Mapping[str, TensorInfo], spellings: tuple[str, ...], match: Match
) -> str | None:
    """Full name of the first weight of these spellings that is there."""
    names = (weight_name(match.prefix + _fill(spelling, match.index)) for spelling in spellings)
    return next((name for name in names if name in tensors), None)


def bias_of(
    tensors: Mapping[str, TensorInfo],
    projection: Projection | Composed,
    match: Match,
    names: tuple[str, ...],
) -> Part | None:
    """The bias that lies as the projection's outputs do, or under a name of its own."""
    own = part_of(tensors, names, match)
    if own is not None or isinstance(projection, Composed):
        return own
    name = projection.tensor.removesuffix("weight") + "bias"
    return projection.bias_part(name) if not names and name in tensors else None


def part_of(
    tensors: Mapping[str, TensorInfo], spellings: tuple[str, ...], match: Match
) -> Part | None:
    """The first tensor of these full names that is there."""
    names = (match.prefix + _fill(_last(tensors, s, match), match.index) for s in spellings)
    return next((Part(name) for name in names if name in tensors), None)


def _last(tensors: Mapping[str, TensorInfo], spelling: str, match: Match) -> str:
    """The spelling with ``{last}`` filled in: the greatest number under which there is a tensor."""
    before, mark, after = spelling.partition("{last}")
    if not mark:
        return spelling
    pattern = re.compile(rf"{re.escape(match.prefix + before)}([0-9]{{1,9}}){re.escape(after)}")
    numbers = [int(match[1]) for match in map(pattern.fullmatch, tensors) if match]
    return f"{before}{max(numbers, default=0)}{after}"


def norm_of(
    tensors: Mapping[str, TensorInfo],
    spellings: tuple[str, ...],
    match: Match,
    what: str,
    heads: int,
) -> tuple[Part, ...]:
    """The gain (``weight``) or bias of a norm; one for each head where its name has ``{head}``."""
    # Files from the first years call a norm's gain and bias gamma and beta.
    endings = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}[what]
    for spelling in spellings:
        numbers = range(heads if "{head}" in spelling else 1)
        # A parameter that is no module's own ends in weight already, as in `weight_name`.
        stem = spelling.removesuffix("weight") if spelling.endswith("weight") else f"{spelling}."
        stems = [stem.replace("{head}", str(n)) for n in numbers]
        for ending in endings:
            parts = [part_of(tensors, (f"{stem}{ending}",), match) for stem in stems]
            if all(parts):
                return tuple(part for part in parts if part is not None)
    return ()
