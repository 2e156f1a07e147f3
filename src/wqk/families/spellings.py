"""Spellings of a family in a checkpoint: the tensors of all layers that match a rule.

A spelling is a name with placeholders: ``layers.{layer}.self_attn.q_proj``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING

from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import Tensors
from wqk.errors import CheckpointError, did_you_mean
from wqk.families.candidates import RECURRENT, candidates
from wqk.families.layouts import Composed
from wqk.families.naming import weight_name

if TYPE_CHECKING:
    from wqk.families.layouts import Projection
    from wqk.families.rules import AttentionRule

Index = tuple[int, ...]

# Names of a norm's gain and bias; in the oldest files they are gamma and beta.
NORM_ENDINGS = {"weight": ("weight", "gamma"), "bias": ("bias", "beta")}


@dataclass(frozen=True, eq=False)
class Match:
    """The tensors of one layer that match a rule.

    Attributes
    ----------
    tensors
        All tensors of the checkpoint.
    index
        The numbers in the names; the layer is first.
    query, key
        Full names of the weights.
    prefix
        The start of all names.
    """

    tensors: Tensors
    index: Index
    query: str
    key: str
    prefix: str

    @property
    def group(self) -> int:
        """The first index; 0 for attention that occurs only once."""
        return self.index[0] if self.index else 0

    def weight(self, spellings: tuple[str, ...]) -> str | None:
        """Return the full name of the first weight with one of these spellings."""
        names = (_stored(self._filled(spelling), self.tensors) for spelling in spellings)
        return next((name for name in names if name in self.tensors), None)

    def part(self, spellings: tuple[str, ...]) -> Part | None:
        """Return the first existing tensor with one of these spellings of full names."""
        names = map(self._filled, spellings)
        return next((Part(name) for name in names if name in self.tensors), None)

    def bias(self, projection: Projection | Composed, names: tuple[str, ...]) -> Part | None:
        """Return the bias of a projection: under its own spelling, or with the weight's layout.

        Parameters
        ----------
        projection
            The projection.
        names
            Spellings of the bias, if its name does not follow from the weight.
        """
        if names or isinstance(projection, Composed):
            return self.part(names)
        name = f"{projection.tensor.removesuffix('weight')}bias"
        # PyTorch's attention has one bias, even if keys of another width have separate weights.
        fused = re.sub(r"(?<=\.)[qkv]_proj_bias$", "in_proj_bias", name)
        if fused != name and fused in self.tensors:
            size = projection.heads * projection.head_width
            start = "qkv".index(name[-len("q_proj_bias")]) * size
            return Part(fused, ((start, start + size),))
        return projection.bias_part(name) if name in self.tensors else None

    def norm(self, spellings: tuple[str, ...], kind: str, heads: int = 1) -> tuple[Part, ...]:
        """Return the gain (``weight``) or the ``bias`` of a norm; empty if absent.

        If the spelling has ``{head}``, the result has one part for each head.
        """
        for spelling in spellings:
            count = heads if "{head}" in spelling else 1
            # The name of a bare parameter already ends in weight.
            stem = weight_name(spelling).removesuffix("weight")
            for ending in NORM_ENDINGS[kind]:
                parts = []
                for head in range(count):
                    part = self.part((stem.replace("{head}", str(head)) + ending,))
                    if part is not None:
                        parts.append(part)
                if len(parts) == count:
                    return tuple(parts)
        return ()

    def named(self, spelling: str) -> str:
        """Return the full name of a spelling's weight, which may be absent."""
        return weight_name(self._filled(spelling)).replace("{head}", "0")

    def _filled(self, spelling: str) -> str:
        """Return the full name; ``{last}`` is the highest number among existing tensors."""
        before, placeholder, after = spelling.partition("{last}")
        if placeholder:
            pattern = rf"{re.escape(self.prefix + before)}([0-9]{{1,9}}){re.escape(after)}"
            matches = filter(None, (re.fullmatch(pattern, name) for name in self.tensors))
            last = max((int(match[1]) for match in matches), default=0)
            spelling = f"{before}{last}{after}"
        return self.prefix + _fill(spelling, self.index)


def find_layers(tensors: Tensors, rule: AttentionRule, keyless: int = 0) -> list[Match]:
    """Return the layers of the first spelling of a rule that matches.

    Parameters
    ----------
    tensors
        All tensors of the checkpoint.
    rule
        The rule.
    keyless
        Number of layers at the end that may lack keys.

    Raises
    ------
    CheckpointError
        A key is missing, or several sets of tensors match.
    """
    queries, keys = rule.fused or rule.query, rule.fused or rule.key
    for query, key in zip(queries, keys, strict=True):
        names = _matching_names(tensors, query, rule.prefix)
        if names:
            return _layers_of_spelling(tensors, rule, query, key, names, keyless)
    return []


def _layers_of_spelling(
    tensors: Tensors,
    rule: AttentionRule,
    query: str,
    key: str,
    names: list[re.Match[str]],
    keyless: int,
) -> list[Match]:
    """Return the layers with query weights of these names; see `find_layers`."""
    all_prefixes = sorted({name["prefix"] for name in names})
    prefix = all_prefixes[0]
    if len(all_prefixes) > 1 and prefix:  # a tensor with exactly this name has precedence
        raise CheckpointError(
            f"two sets of tensors match {query!r}, under "
            f"{prefix!r} and {all_prefixes[1]!r}; expected one; name it with a family file "
            "(family=FILE.toml)"
        )
    if rule.exact:
        _require_shared(prefix, query, tensors)
    indices = sorted(
        tuple(map(int, name.groups()[1:])) for name in names if name["prefix"] == prefix
    )
    if not rule.every_layer:  # otherwise the gap is noticed
        _require_plain_weights(tensors, prefix, query, indices)
    if rule.exact and keyless < len(indices):
        _require_key(tensors, [prefix + _fill(key, index) for index in indices])
    layers = []
    for number, index in enumerate(indices):
        stem = prefix + _fill(query, index)
        query_name = _stored(stem, tensors)
        key_name = _stored(prefix + _fill(key, index), tensors)
        needs_key = number < len(indices) - keyless
        needed = (query_name, key_name) if needs_key else (query_name,)
        missing = [name for name in needed if name not in tensors]
        if not missing:
            layers.append(Match(tensors, index, query_name, key_name, prefix))
        elif not rule.between and not _is_in_recurrence(stem, tensors):
            raise CheckpointError(
                f"incomplete, tensor {missing[0]!r} is missing; download the checkpoint again"
            )
    return layers


def _require_key(tensors: Tensors, keys: Sequence[str]) -> None:
    """Check that a layer has its key; if no layer has one, a family file may misspell the name.

    ``keys`` are the names of the keys of all layers, in the spelling of the family file.
    """
    if any(_stored(key, tensors) in tensors for key in keys):
        return
    stored_names = [name.removesuffix(".weight") for name in tensors]
    raise CheckpointError(
        f"the family file names the key {keys[0]!r}, which the checkpoint lacks"
        f"{did_you_mean(keys[0], stored_names) or '; correct the name in the file'}"
    )


def require_whole_layers(tensors: Tensors, rules: Sequence[AttentionRule]) -> None:
    """Check that every layer with a part of any attention also has queries.

    The check covers rules that only some layers have: a layer with lost queries would otherwise be
    left out silently.

    Raises
    ------
    CheckpointError
        A layer has keys, values or outputs of such a rule, but no queries of any rule.
    """
    partial_rules = [rule for rule in rules if not rule.every_layer]
    if not partial_rules:
        return
    with_queries: set[tuple[str, int]] = set()
    for rule in rules:
        for spelling in rule.fused or rule.query:
            with_queries.update(map(_place, _matching_names(tensors, spelling, rule.prefix)))
    known_prefixes = {prefix for prefix, _ in with_queries}
    for rule in partial_rules:
        for spelling in chain(rule.key, rule.value, rule.output):
            if "{layer}" not in spelling:
                continue
            for match in _matching_names(tensors, spelling, rule.prefix):
                prefix, layer = _place(match)
                if prefix in known_prefixes and (prefix, layer) not in with_queries:
                    raise CheckpointError(
                        f"incomplete, layer {layer} has {match[0]!r}, but no queries; download the "
                        "checkpoint again"
                    )


def _place(match: re.Match[str]) -> tuple[str, int]:
    """Return the prefix and the layer of a name that a spelling matches."""
    _, *numbers = match.groups()
    return match["prefix"], int(numbers[0]) if numbers else 0


def _is_in_recurrence(stem: str, tensors: Tensors) -> bool:
    """Return whether the module of a weight is a recurrence, which may have queries."""
    module = stem.rpartition(".")[0] + "."
    inside = [name.removeprefix(module) for name in tensors if name.startswith(module)]
    return any(map(RECURRENT.fullmatch, inside))


def _require_plain_weights(
    tensors: Tensors, prefix: str, spelling: str, indices: list[Index]
) -> None:
    """Check that no layer stores its queries in another format, such as quantized."""
    pattern = re.compile(rf"{re.escape(prefix)}{_numbered(spelling)}\.(?!bias$).+")
    for match in filter(None, map(pattern.fullmatch, tensors)):
        if tuple(map(int, match.groups())) not in indices:
            raise CheckpointError(
                f"incomplete, {match[0]!r} takes the place of the weight in some layers: quantized "
                "or adapted weights cannot be scored; dequantize or merge them first"
            )


def _require_shared(prefix: str, spelling: str, tensors: Tensors) -> None:
    """Check that the prefix omitted in a family file precedes all attention of the model."""
    if not prefix:
        return
    all_queries = [candidate.query for candidate in candidates(tensors)]
    query = next((query for query in all_queries if not query.startswith(prefix)), None)
    if query:
        raise CheckpointError(
            f"the family file names {spelling!r}, which is there only under {prefix!r}, "
            f"next to {query!r}; expected the whole name; write {prefix + spelling!r}"
        )


def prefixes(tensors: Tensors, rule: AttentionRule) -> dict[str, list[str]]:
    """Return full names of query weights that match any spelling of a rule, by their prefix."""
    names_by_prefix: dict[str, list[str]] = {}
    for spelling in rule.fused or rule.query:
        for match in _matching_names(tensors, spelling, rule.prefix):
            names_by_prefix.setdefault(match["prefix"], []).append(match[0])
    return names_by_prefix


def _matching_names(tensors: Tensors, spelling: str, prefix: str | None) -> list[re.Match[str]]:
    """Return matches of the weights of a spelling, under the given prefix or any prefix."""
    start = r"(?:.+\.)?" if prefix is None else re.escape(prefix)
    for name in (weight_name(spelling), spelling):
        pattern = re.compile(rf"(?P<prefix>{start}){_numbered(name)}")
        matches = [match for match in map(pattern.fullmatch, tensors) if match]
        if matches:
            return matches
    return []


def _numbered(spelling: str) -> str:
    """Return a pattern of the names with a spelling, with a group for each number."""
    return re.sub(r"\\\{\w+\\\}", r"([0-9]{1,9})", re.escape(spelling))


def _fill(spelling: str, index: Index) -> str:
    """Return a spelling with its ``{layer}`` and further numbers filled in, in order."""
    spelling = spelling.replace("{previous}", str(index[0] - 1 if index else 0))
    numbers = iter(index)
    return re.sub(r"\{\w+\}", lambda _: str(next(numbers)), spelling)


def _stored(stem: str, tensors: Tensors) -> str:
    """Return the full name of a weight; for a bare parameter, the stem."""
    name = weight_name(stem)
    return stem if name not in tensors and stem in tensors else name
