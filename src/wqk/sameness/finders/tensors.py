"""Tensors at the place of other tensors: exchanged, copied, or cut wrongly from a fused weight."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from wqk.sameness.edits import Edit, Permute, Take
from wqk.sameness.finders.rows import UNORDERED
from wqk.sameness.matching import (
    evenly_spaced,
    lacks_rows,
    permutation,
    same_numbers,
    screening_sample,
)
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import name_in_fused
from wqk.sameness.repairs import Recut
from wqk.sameness.tensor_names import title_in_block
from wqk.sameness.tolerances import SCREENED
from wqk.sameness.weight_pairs import (
    SCORED,
    TensorUse,
    WeightFinding,
    WeightPair,
    WeightPhrase,
    names_explained_by,
)

# The sides of a fused weight, in the order in which they are joined.
JOINED = ("query", "key", "value")


class OtherPlace(NamedTuple):
    """The other block of the reference that a weight comes from.

    Attributes
    ----------
    kind
        The cause: another layer's weights, or another tensor's.
    description
        The tensor or the layer, as the object of a sentence.
    """

    kind: Kind
    description: str


FindOtherPlace: TypeAlias = "Callable[[WeightPair], OtherPlace | None]"


def no_other_place(pair: WeightPair) -> None:
    """Return None: weights of other places are not searched for."""


def find_moved_tensors(
    pairs: Sequence[WeightPair], wrong: Sequence[WeightPair], find_other_place: FindOtherPlace
) -> list[WeightFinding]:
    """Find weights that are copies of another tensor, or exchanged with another tensor.

    Parameters
    ----------
    pairs, wrong
        All weights of a block, and the wrong weights.
    find_other_place
        Function that returns the other place in the reference that a weight comes from.
    """
    sources: dict[str, WeightPair] = {}
    for pair in wrong:
        source = _source_of(pair, pairs)
        if source is not None:
            sources[pair.name] = source
    findings = _exchanged(wrong, sources)
    explained = names_explained_by(findings)
    for pair in wrong:
        if pair.name in explained or pair.role.is_norm:
            continue
        source = sources.get(pair.name)
        if source is not None:
            description = f"{{}} {{holds}} {title_in_block(source.name)} of the original"
            findings.append(pair.finding(Kind.TENSOR, description))
            continue
        other = find_other_place(pair)
        if other is not None:
            findings.append(pair.finding(other.kind, f"{{}} {{holds}} {other.description}"))
    return findings


def _source_of(pair: WeightPair, pairs: Sequence[WeightPair]) -> WeightPair | None:
    """Return the pair whose expected numbers a tensor contains."""
    if not np.ptp(pair.actual):
        return None
    for source in pairs:
        could_be = source.name != pair.name and source.expected.shape == pair.actual.shape
        if could_be and same_numbers(source.expected, pair.actual):
            return source
    return None


def _exchanged(
    wrong: Sequence[WeightPair], sources: Mapping[str, WeightPair]
) -> list[WeightFinding]:
    """Find exchanged tensors, with or without exchanged biases."""
    by_name = {pair.name: pair for pair in wrong}
    partners: dict[str, str] = {}
    for name, source in sources.items():
        source_of_source = sources.get(source.name)
        is_back = source_of_source is not None and source_of_source.name == name
        if is_back and source.name in by_name:
            partners[name] = source.name
    # Weights first, because biases may have moved together with weights.
    names = sorted(partners, key=lambda name: by_name[name].role.use is not TensorUse.WEIGHT)
    findings: list[WeightFinding] = []
    explained: set[str] = set()
    for name in names:
        if name not in explained:
            finding = _exchange(by_name[name], by_name[partners[name]], partners)
            findings.append(finding)
            explained.update(finding.swapped)
    return findings


def _exchange(pair: WeightPair, partner: WeightPair, partners: Mapping[str, str]) -> WeightFinding:
    """Return the finding of two exchanged tensors."""
    swapped = {pair.name: partner.name, partner.name: pair.name}
    sides = {pair.role.side, partner.role.side}
    kind = Kind.TENSOR
    description = (
        f"{title_in_block(pair.name)} and {title_in_block(partner.name)} have changed places"
    )
    if sides == {"query", "key"} and pair.role.use is TensorUse.WEIGHT:
        kind = Kind.EXCHANGED
        description = "queries and keys have changed places"
    bias, bias_of_partner = pair.bias, partner.bias
    if bias is not None and bias_of_partner is not None:
        names = bias.name, bias_of_partner.name
        if all(name in partners for name in names):
            swapped |= {names[0]: names[1], names[1]: names[0]}
            description += " with their biases"
    scored = tuple(side for side in SCORED if side in sides)
    return WeightFinding(kind, WeightPhrase(description), {}, pair, sides=scored, swapped=swapped)


def find_recut(pairs: Sequence[WeightPair]) -> WeightFinding | None:
    """Find queries, keys and values with mixed rows, as from a fused weight that was cut wrongly.

    The rows of queries, keys and values are joined, and searched for among the expected rows of all
    three.
    """
    weights = _weights_of_sides(pairs)
    if not weights or not _may_be_recut(weights):
        return None
    rows = _rows_of_all(weights)
    lengths = tuple(len(pair.actual) for pair in weights)
    side_of_row = np.arange(len(weights)).repeat(lengths)
    if rows is None or np.array_equal(side_of_row[rows], side_of_row):
        return None
    first = weights[0]
    name = name_in_fused(rows, by_group=False, sizes=first.sizes)
    if name is None:
        edits: dict[str, Edit] = {pair.name: Take() for pair in weights}
        phrase = WeightPhrase(f"rows of queries, keys and values lie among each other {UNORDERED}")
        return WeightFinding(Kind.FUSED, phrase, edits, first, sides=SCORED)
    assert isinstance(name.edit, Permute)
    axis = 1 if first.layout.is_transposed else 0
    names = tuple(pair.name for pair in weights)
    recuts = [Recut(names, lengths, name.edit.order, axis)]
    biases = [pair.bias for pair in weights if pair.bias is not None]
    if len(biases) == len(weights) and not any(bias.right for bias in biases):
        names_of_biases = tuple(bias.name for bias in biases)
        recuts.append(Recut(names_of_biases, lengths, name.edit.order))
    phrase = WeightPhrase(
        f"queries, keys and values are cut from one weight whose rows {name.description}"
    )
    return WeightFinding(Kind.FUSED, phrase, {}, first, sides=SCORED, recuts=tuple(recuts))


def _weights_of_sides(pairs: Sequence[WeightPair]) -> list[WeightPair]:
    """Return the weights of queries, keys and values; none unless each weight has heads."""
    by_side: dict[str, WeightPair] = {}
    for pair in pairs:
        if pair.heads and pair.role.use is TensorUse.WEIGHT:
            by_side[pair.role.side] = pair
    if any(side not in by_side for side in JOINED):
        return []
    return [by_side[side] for side in JOINED]


def _may_be_recut(weights: Sequence[WeightPair]) -> bool:
    """Return whether the rows of queries, keys and values may come from one fused weight."""
    if len({pair.expected.shape[1] for pair in weights}) > 1:
        return False
    if len({pair.layout.is_transposed for pair in weights}) > 1:
        return False
    for pair in weights:
        if len(pair.layout.shape) != 2 or pair.repeated != 1 or pair.role.fused:
            return False
    wrong = [pair for pair in weights if not pair.right]
    return len(wrong) >= 2 and not all(_has_own_rows(pair) for pair in weights)


def _has_own_rows(pair: WeightPair) -> bool:
    """Return whether sampled rows of a weight are all among its expected rows."""
    if pair.right or pair.rows_in_place:
        return True
    expected, actual = pair.sketches
    rows = evenly_spaced(len(actual), SCREENED)
    likeness = np.abs(actual[rows] @ expected.T).max(axis=1)
    return bool((likeness > pair.least_cosine).all())


def _rows_of_all(weights: Sequence[WeightPair]) -> np.ndarray | None:
    """Return the order of the joined rows of several weights; None if missing or in order.

    The result contains, for each expected row, the number of the actual row in the joined weights.
    """
    sketches_of_expected = np.concatenate([pair.sketches[0] for pair in weights])
    sketches_of_actual = np.concatenate([pair.sketches[1] for pair in weights])
    least_cosine = min(pair.least_cosine for pair in weights)
    sample = sketches_of_expected[screening_sample(sketches_of_expected)]
    if lacks_rows(sample, sketches_of_actual, least_cosine):
        return None
    expected = np.concatenate([pair.expected for pair in weights])
    actual = np.concatenate([pair.actual for pair in weights])
    return permutation(expected, actual, least_cosine, (sketches_of_expected, sketches_of_actual))
