"""Heads of a weight that were replaced: averaged, copied, pruned or initialized again.

Axes: n rows, D columns; H heads, R head width.
"""

from __future__ import annotations

from functools import reduce
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.edits import Edit, Take, Then, Within
from wqk.sameness.finders.rows import find_in_columns
from wqk.sameness.matching import cosines, nearest, same_numbers, sketch
from wqk.sameness.mismatches import Kind, listed
from wqk.sameness.permutations import whole_heads
from wqk.sameness.tolerances import MAJORITY, QUANTIZED_ALIKE
from wqk.sameness.weight_pairs import TensorUse, WeightFinding, WeightPair

# Number of heads in a description.
LISTED_HEADS = 8


class _ReplacedHeads(NamedTuple):
    """The heads of a weight, divided into replaced and expected heads.

    Attributes
    ----------
    expected, actual
        The rows of all heads.
    replaced, kept
        Numbers of the heads that differ from the expected heads, and of the remaining heads.
    """

    expected: Float[np.ndarray, "H R D"]
    actual: Float[np.ndarray, "H R D"]
    replaced: Int[np.ndarray, " K"]
    kept: Int[np.ndarray, " L"]


def find_heads(pair: WeightPair) -> WeightFinding | None:
    """Find replaced heads: means, copies, zeros, other weights or new rows."""
    if not pair.heads:
        return None
    shape = pair.heads, pair.sizes.width, -1
    expected, actual = pair.expected.reshape(shape), pair.actual.reshape(shape)
    groups = _number_of_means(expected, actual)
    if groups is not None:
        description = f"{pair.heads} {pair.role} heads were averaged to {groups}, which loses them"
        return pair.finding(Kind.AVERAGED, description)
    if pair.rows_in_place:
        return None
    is_replaced_row = (pair.likeness < QUANTIZED_ALIKE).reshape(actual.shape[:2])
    replaced_share = is_replaced_row.mean(axis=1)
    replaced = np.flatnonzero(replaced_share > MAJORITY)
    kept = np.flatnonzero(replaced_share <= MAJORITY)
    if not len(replaced) or not len(kept) or not same_numbers(expected[kept], actual[kept]):
        return None
    kind, description = _origin(pair, _ReplacedHeads(expected, actual, replaced, kept))
    edit = _taken_heads(replaced, pair.sizes.width)
    numbers = tuple(replaced.tolist())
    return pair.finding(kind, description, edit, heads=numbers, facts=pair.facts_of_heads(numbers))


def find_columns_of_heads(pair: WeightPair) -> WeightFinding | None:
    """Find replaced heads among the columns of an output."""
    return find_in_columns(pair, find_heads)


def _taken_heads(heads: np.ndarray, width: int) -> Edit:
    """Return the edit that takes the rows of some heads from the reference."""
    edits: list[Edit] = []
    ends = np.flatnonzero(np.diff(heads) != 1) + 1
    for neighbors in np.split(heads, ends):
        length = len(neighbors) * width
        rows = Stretches(int(neighbors[0]) * width, length, length, 1)
        edits.append(Within(0, rows, Take()))
    return reduce(Then, edits)


def _number_of_means(expected: np.ndarray, actual: np.ndarray) -> int | None:
    """Return the number of groups of heads (H, R, D) that were replaced by the mean of the group.

    None if no number of groups explains all heads.
    """
    heads = len(expected)
    for groups in range(1, heads):
        if heads % groups:
            continue
        share = heads // groups
        grouped = expected.reshape(groups, share, *expected.shape[1:])
        # The first row of each head rules most groupings out.
        means_of_first = grouped[:, :, :1].mean(axis=1).repeat(share, axis=0)
        if not same_numbers(means_of_first, actual[:, :1]):
            continue
        means = grouped.mean(axis=1).repeat(share, axis=0)
        if same_numbers(means, actual):
            return groups
    return None


def _origin(pair: WeightPair, heads: _ReplacedHeads) -> tuple[Kind, str]:
    """Return the kind and the description of replaced heads."""
    actual = heads.actual[heads.replaced]
    title = f"{pair.role} heads {listed(heads.replaced)}"
    deviation = float(actual.std())
    if not deviation:
        return Kind.STRANGERS, f"{title} are zero, as pruned ones are"
    rows = actual.reshape(-1, actual.shape[2])
    source_rows = nearest(sketch(rows), pair.sketches[0])
    sources = whole_heads(source_rows, pair.sizes.width)
    if sources is not None and same_numbers(heads.expected[sources], actual):
        return Kind.COPIES, f"{pair.role} heads copied: {_copies(heads.replaced, sources)}"
    for source in pair.block:
        if _are_rows_of(rows, source):
            return Kind.STRANGERS, f"{title} are {source.role} heads of the original"
    deviation_of_kept = float(heads.actual[heads.kept].std())
    return Kind.STRANGERS, (
        f"{title} are none of the original's; left as initialized? (standard deviation "
        f"{deviation:.2g}, the others' {deviation_of_kept:.2g})"
    )


def _copies(heads: np.ndarray, sources: np.ndarray) -> str:
    """Describe heads that are copies of other heads."""
    copies: list[str] = []
    for head, source in zip(heads, sources, strict=True):
        copies.append(f"{head} is a copy of {source}")
    text = ", ".join(copies[:LISTED_HEADS])
    return f"{text} …" if len(copies) > LISTED_HEADS else text


def _are_rows_of(rows: np.ndarray, source: WeightPair) -> bool:
    """Return whether all given rows (n, D) are rows of the queries, keys or values."""
    role = source.role
    if role.use is not TensorUse.WEIGHT or role.fused or role.side not in ("query", "key", "value"):
        return False
    if source.expected.shape[1] != rows.shape[1] or not rows.any():
        return False
    source_rows = nearest(sketch(rows), source.sketches[0])
    return bool((cosines(rows, source.expected, source_rows) > QUANTIZED_ALIKE).all())
