"""Factors and offsets of a weight: one for all numbers, or one for each row, column, block or head.

Axes: n rows, D columns; B blocks of a row, C columns of a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wqk.sameness.edits import DivideByGain, Negate, Scale, ScaleHeads
from wqk.sameness.matching import screening_sample
from wqk.sameness.mismatches import Kind
from wqk.sameness.round_factors import fit_factor
from wqk.sameness.tolerances import (
    INTEGER_SLACK,
    RESIDUAL_OF_SAMPLE,
    SAME_FACTOR,
    SAME_SHARE,
    UNEXPLAINED_BY_FACTORS,
)
from wqk.sameness.weight_pairs import Gain, WeightFinding, WeightPair

# Lengths of blocks of columns to which formats give scales of their own.
BLOCKS = (16, 32, 64, 128)


class Groups(NamedTuple):
    """A way to group the numbers of a weight; a group shares a factor or an offset.

    Attributes
    ----------
    kind
        The cause if the groups have factors.
    description
        The groups, in words; empty for one group of all numbers.
    axes
        The axes of the weight as (n, B, C) that a group extends along.
    size
        Columns of a block, C; 0 if a row is one block.
    """

    kind: Kind
    description: str
    axes: tuple[int, ...]
    size: int = 0


ALL_NUMBERS = Groups(Kind.SCALED, "", (0, 1, 2))
COLUMNS = Groups(Kind.COLUMN_FACTORS, "columns", (0,))
ROWS = Groups(Kind.ROW_FACTORS, "rows", (1, 2))
LARGEST_BLOCKS_FIRST = tuple(
    Groups(Kind.BLOCK_SCALES, f"blocks of {size} columns", (2,), size) for size in reversed(BLOCKS)
)


class _GroupFit(NamedTuple):
    """Factors of groups, fitted by least squares.

    Attributes
    ----------
    factors
        The factor of each group; the axes of (n, B, C) that a group extends along have length 1.
    residual
        The weight minus its fit, (n, B, C).
    """

    factors: np.ndarray
    residual: np.ndarray


def find_zeros(pair: WeightPair) -> WeightFinding | None:
    """Find a weight of zeros."""
    return None if pair.actual.any() else pair.finding(Kind.ZERO, "{}: all zero")


def find_factor(pair: WeightPair) -> WeightFinding | None:
    """Find one factor of all numbers."""
    return _find_shared(pair, (ALL_NUMBERS,), offset=False)


def find_factors(pair: WeightPair) -> WeightFinding | None:
    """Find factors, or else offsets, of rows, columns or blocks."""
    factors = _find_shared(pair, (COLUMNS, ROWS, *LARGEST_BLOCKS_FIRST), offset=False)
    if factors is not None:
        return factors
    return _find_shared(pair, (ALL_NUMBERS, ROWS, *LARGEST_BLOCKS_FIRST), offset=True)


def _find_shared(
    pair: WeightPair, groupings: Sequence[Groups], offset: bool
) -> WeightFinding | None:
    """Find one factor, or one offset, for each group of numbers."""
    columns = pair.expected[0].size
    for groups in groupings:
        size = groups.size or columns
        if pair.grid and groups.size:
            size = pair.grid.shared
        if columns % size or (groups.size and size == columns):
            continue
        finding = _find_shared_by(pair, groups, size, offset)
        if finding is not None:
            return finding
    return None


def _find_shared_by(
    pair: WeightPair, groups: Groups, size: int, offset: bool
) -> WeightFinding | None:
    """Find factors or offsets for one way to group numbers.

    Parameters
    ----------
    pair, groups
        The weight, and the grouping.
    size
        Columns of a block.
    offset
        Whether to search for offsets, besides factors. Otherwise offsets are 0.
    """
    sample = screening_sample(pair.expected)
    expected, actual = pair.expected[sample], pair.actual[sample]
    fit_of_sample = _fit_groups(expected, actual, size, groups.axes, offset)
    # Of unrelated weights, a fit of some rows leaves nearly everything.
    distance = np.linalg.norm(actual - expected)
    if np.linalg.norm(fit_of_sample.residual) > RESIDUAL_OF_SAMPLE * distance:
        return None
    factors, residual = _fit_groups(pair.expected, pair.actual, size, groups.axes, offset)
    if not factors.all() or (offset and not (factors > 0).all()):
        return None
    if _are_codes(pair) and (np.abs(residual) <= INTEGER_SLACK).all():
        of_groups = f", of {groups.description}" if groups.description else ""
        return pair.finding(Kind.INTEGERS, f"{{}}: whole numbers without their scales{of_groups}")
    if not _is_explained(pair, residual / factors):
        return None
    if offset:
        where = groups.description or "all numbers"
        return pair.finding(Kind.ZERO_POINT, f"{{}}: an offset for {where}: a zero point is off")
    return _name_factors(pair, groups, factors.reshape(-1))


def _are_codes(pair: WeightPair) -> bool:
    """Return whether a weight consists of whole numbers although the expected weight does not."""
    if not pair.is_matrix or not np.array_equal(pair.actual, np.rint(pair.actual)):
        return False
    return not np.array_equal(pair.expected, np.rint(pair.expected))


def _is_explained(pair: WeightPair, error: np.ndarray) -> bool:
    """Return whether factors explain a weight, given their error.

    ``error`` is the residual over the factors, in the scale of the expected weight, (n, B, C).
    """
    repaired = (pair.expected.reshape(error.shape) + error).reshape(pair.expected.shape)
    distance = np.linalg.norm(pair.actual - pair.expected)
    return bool(np.linalg.norm(error) <= UNEXPLAINED_BY_FACTORS * distance) and pair.fits(repaired)


def _fit_groups(
    expected: np.ndarray, actual: np.ndarray, size: int, axes: tuple[int, ...], offset: bool
) -> _GroupFit:
    """Fit a factor to each group of numbers; with ``offset``, to differences from the mean.

    ``size`` is the number of columns of a block. ``axes`` are the axes of (n, B, C) that a group
    extends along.
    """
    shape = len(expected), -1, size
    w = np.asarray(expected, np.float64).reshape(shape)
    v = np.asarray(actual, np.float64).reshape(shape)
    if offset:
        w = w - w.mean(axis=axes, keepdims=True)
        v = v - v.mean(axis=axes, keepdims=True)
    squares = np.square(w).sum(axis=axes, keepdims=True)
    products = (w * v).sum(axis=axes, keepdims=True)
    factors = products / np.where(squares > 0, squares, 1)
    return _GroupFit(factors, v - factors * w)


def _name_factors(pair: WeightPair, groups: Groups, factors: np.ndarray) -> WeightFinding:
    """Describe factors: one for all numbers, signs, a norm's gain, of heads, or of each group."""
    if groups.kind is Kind.BLOCK_SCALES:
        return pair.finding(groups.kind, f"{{}}: scales of other rows or {groups.description}")
    if groups.kind is Kind.SCALED:
        fit = fit_factor(pair.expected, pair.actual)
        description = f"{{}}: scaled by {fit.factor:.4g}"
        return pair.finding(groups.kind, description, Scale(fit.factor), facts=fit.facts())
    axis = 0 if groups.kind is Kind.ROW_FACTORS else 1
    if np.allclose(np.abs(factors), 1, atol=SAME_SHARE):
        negative = np.flatnonzero(factors < 0)
        count = f"{len(negative)} of {len(factors)} {groups.description}"
        edit = Negate(axis, tuple(negative.tolist()))
        return pair.finding(Kind.SIGNS, f"{{}}: other signs in {count}", edit)
    gain = pair.gain
    if gain is not None and axis == 1 and len(gain.actual) == len(factors):
        folded = _find_folded_gain(pair, gain, factors)
        if folded is not None:
            return folded
    of_heads = _find_factors_of_heads(pair, groups.kind, axis, factors)
    if of_heads is not None:
        return of_heads
    description = f"{{}}: each of its {groups.description} has a factor of its own"
    return pair.finding(groups.kind, description)


def _find_factors_of_heads(
    pair: WeightPair, kind: Kind, axis: int, factors: np.ndarray
) -> WeightFinding | None:
    """Find factors of rows or columns that are equal within each head."""
    heads = pair.heads if axis == 0 else pair.transposed.heads
    if heads < 2 or len(factors) % heads or len(factors) == heads:
        return None
    by_head = factors.reshape(heads, -1)
    means = by_head.mean(axis=1)
    if not np.allclose(by_head, means[:, None], rtol=SAME_FACTOR):
        return None
    edit = ScaleHeads(axis, tuple(means.tolist()), by_head.shape[1])
    description = "{}: each head has a factor of its own"
    return pair.finding(kind, description, edit, facts={"factors": edit.factors})


def _find_folded_gain(pair: WeightPair, gain: Gain, factors: np.ndarray) -> WeightFinding | None:
    """Find a norm's gain in the factors of columns."""
    powers = {1: "once too often", 2: "twice too often", -1: "not at all"}
    for values, of_reference in ((gain.actual, False), (gain.expected, True)):
        if not values.all():
            continue
        for power, times in powers.items():
            if not np.allclose(factors, values**power, rtol=SAME_SHARE):
                continue
            description = f"{{}}: the gain of the norm before it is folded in {times}"
            if of_reference:
                description = "{}: the original's gain of the norm before it is folded in"
            edit = DivideByGain(1, gain.name, values, gain.offset, power, of_reference)
            return pair.finding(Kind.GAIN_FOLDED, description, edit)
    return None
