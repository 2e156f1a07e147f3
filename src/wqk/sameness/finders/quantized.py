"""Columns of quantized weights with the scales of other groups.

Axes: n rows, D columns.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Part, Regrouping
from wqk.sameness.matching import evenly_spaced
from wqk.sameness.mismatches import Kind
from wqk.sameness.tolerances import LEFT_BY_REGROUPING
from wqk.sameness.weight_pairs import WeightFinding, WeightPair

# Rows that are enough to find the group of a column.
SAMPLED_ROWS = 256


class _ColumnGroups(NamedTuple):
    """The groups whose scales fit the columns, (D,), and a description."""

    groups: np.ndarray
    description: str


def find_groups(pair: WeightPair) -> WeightFinding | None:
    """Find columns of a quantized weight with the scales of other groups (act-order)."""
    if not pair.grid:
        return None
    rows = evenly_spaced(len(pair.actual), SAMPLED_ROWS).tolist()
    sampled = pair.regrouped(Part(pair.name, tuple((row, row + 1) for row in rows)))
    regrouping = pair.regrouped(Part(pair.name))
    if not sampled or not regrouping:
        return None
    regrouped = _find_column_groups(pair.expected[rows], sampled)
    if regrouped is None or not pair.fits(regrouping.values(regrouped.groups)):
        return None
    return pair.finding(Kind.GROUPS, f"{{}}: {regrouped.description}")


def _find_column_groups(expected: np.ndarray, regrouping: Regrouping) -> _ColumnGroups | None:
    """Return the groups whose scales fit the columns best; None if these are the stored groups.

    The groups are chosen on half of the rows, and compared with chance on the other half.
    """
    count = expected.shape[1]
    actual = regrouping.group_of
    neighbors = np.arange(count) * regrouping.groups // count

    def squares(groups: np.ndarray) -> np.ndarray:
        """Return the residual squares of both halves of the rows, (2, D)."""
        residual = np.square(regrouping.values(groups) - expected)
        return np.stack([residual[::2].sum(axis=0), residual[1::2].sum(axis=0)])

    by_group = [squares(np.full(count, group))[0] for group in range(regrouping.groups)]
    best = np.argmin(by_group, axis=0)
    if len(expected) < 2 or squares(best)[1].sum() > LEFT_BY_REGROUPING * squares(actual)[1].sum():
        return None
    if _are_constant_within(best, neighbors):
        size = count // regrouping.groups
        return _ColumnGroups(best, f"scales of other rows or blocks of {size} columns")
    moved = int((best != actual).sum())
    description = f"{moved} of {count} columns have the scales of another group"
    if np.array_equal(actual, neighbors):
        description += ": act-order (g_idx) is ignored"
    return _ColumnGroups(best, description)


def _are_constant_within(groups: np.ndarray, neighbors: np.ndarray) -> bool:
    """Return whether each block of neighboring columns has the scales of one group."""
    for block in range(int(neighbors.max(initial=-1)) + 1):
        if len(np.unique(groups[neighbors == block])) != 1:
            return False
    return True
