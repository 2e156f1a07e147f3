"""Codes of quantized weights, predicted from exact weights.

Rounding moves an entry by at most half a step of its scale. A quantized file of other weights has
many entries that moved farther, although rounding explains the distance of the whole weight.
Entries at the end of a scale are left out, because scales are often chosen such that a few entries
are clipped.

Some methods (GPTQ) round one entry and then change the remaining entries of the row; their codes
cannot be predicted. Weights of these methods are compared only by distance.

Axes: n rows, D columns, B entries of one scale.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from wqk._typing import Float
from wqk.checkpoints import TensorInfo
from wqk.sameness.tolerances import EVEN_STEPS, SAME_FACTOR, SAME_LEVEL, STEP_SLACK

# Methods whose codes are not the nearest ones: errors are compensated, or scales are searched with
# weights of the entries. Files with plain integers (INT) do not record their method.
COMPENSATED = re.compile(r"GPTQ|AWQ|INT |HQQ|IQ\d|TQ\d")
# Half the relative distance of neighboring numbers in float16, in which quantizers compute.
COMPUTED = 2**-11
# Scales of one stretch of entries are read from at least this many.
SMALLEST = 8


def is_predictable(kind: str) -> bool:
    """Return whether a quantized format rounds each number to the nearest code.

    Examples
    --------
    >>> is_predictable("GPTQ 4-bit"), is_predictable("NF4")
    (False, True)
    """
    return COMPENSATED.search(kind) is None


def is_coded_alone(infos: Sequence[TensorInfo]) -> bool:
    """Return whether one of two tensors is exact, and the other has predictable codes."""
    coded = [info for info in infos if info.grid is not None]
    return len(coded) == 1 and is_predictable(coded[0].dtype)


def half_steps(
    actual: Float[np.ndarray, "n d"], shared: int
) -> tuple[Float[np.ndarray, "m b"], Float[np.ndarray, "m b"]]:
    """Return the distances from each entry to the ends of its rounding cell, below and above.

    A *level* is a value of entries of one scale. Half a step is the distance from an entry to the
    middle of the gap to the next level.

    Parameters
    ----------
    actual
        Dequantized numbers, which determine the levels.
    shared
        Number of neighboring entries that share a scale.

    Returns
    -------
    tuple of ndarray
        Lower and upper half steps, at least 0, in stretches of one scale; infinite at the ends of a
        scale, because entries there may be clipped.

    Examples
    --------
    >>> low, high = half_steps(np.array([[-2.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 2.0]]), 8)
    >>> low[0].tolist()
    [inf, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, inf]
    """
    stretches = np.asarray(actual, np.float64).reshape(-1, shared)
    ascending = np.sort(stretches, axis=1)
    smallest, largest = ascending[:, :1], ascending[:, -1:]
    gaps = np.diff(ascending, axis=1)
    spans = largest - smallest
    is_new_level = gaps > SAME_LEVEL * np.where(spans > 0, spans, 1.0)
    gaps_of_levels = np.where(is_new_level, gaps, np.inf)
    least_gap = gaps_of_levels.min(axis=1, initial=np.inf, keepdims=True)
    ratios = np.where(is_new_level, gaps / np.where(least_gap > 0, least_gap, 1.0), 1.0)
    is_whole = np.abs(ratios - np.round(ratios)) < EVEN_STEPS
    if is_whole.mean() > 1 - EVEN_STEPS:
        # Equal steps; a stretch may by chance hold no two neighboring levels.
        half_step = np.broadcast_to(least_gap / 2, stretches.shape)
        lower, upper = half_step.copy(), half_step.copy()
    else:
        lower, upper = _uneven_half_steps(stretches, gaps, is_new_level)
    is_at_end = (stretches <= smallest) | (stretches >= largest)
    lower[is_at_end] = np.inf
    upper[is_at_end] = np.inf
    return lower, upper


def _uneven_half_steps(
    stretches: np.ndarray, gaps: np.ndarray, is_new_level: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return half the distances to the next levels that occur, below and above, (m, B).

    Parameters
    ----------
    stretches
        Entries of one scale each, (m, B).
    gaps
        Differences of neighboring entries in ascending order, (m, B - 1).
    is_new_level
        Whether a gap separates two levels, and is more than rounding, (m, B - 1).
    """
    rows, count = stretches.shape
    places = np.arange(count)
    always = np.ones((rows, 1), bool)
    # The first and the last place of each entry's level, in ascending order.
    begins_level = np.hstack([always, is_new_level])
    ends_level = np.hstack([is_new_level, always])
    first = np.maximum.accumulate(np.where(begins_level, places, -1), axis=1)
    from_end = np.where(ends_level, places, count)[:, ::-1]
    last = np.minimum.accumulate(from_end, axis=1)[:, ::-1]
    # Gap i lies before place i; there is no gap before the first place and after the last one.
    outside = np.full((rows, 1), np.inf)
    gaps_before = np.hstack([outside, gaps, outside])
    lower = np.take_along_axis(gaps_before, first, axis=1) / 2
    upper = np.take_along_axis(gaps_before, last + 1, axis=1) / 2
    # Back to the order in which the entries are stored.
    order = np.argsort(stretches, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    return np.take_along_axis(lower, ranks, axis=1), np.take_along_axis(upper, ranks, axis=1)


def share_beyond_half_step(
    exact: Float[np.ndarray, "n d"],
    coded: Float[np.ndarray, "n d"],
    shared: int,
    rounding: float = 0.0,
) -> float:
    """Return the share of entries farther from their code than half a step of their scale.

    Parameters
    ----------
    exact, coded
        Exact numbers, and numbers of a quantized weight.
    shared
        Number of neighboring entries that share a scale; 1 for float8, with steps relative to each
        number.
    rounding
        Half the relative distance of neighboring exact numbers, as they are stored.

    Examples
    --------
    >>> exact = np.random.default_rng(0).standard_normal((64, 64))
    >>> scale = np.abs(exact).max(axis=1, keepdims=True) / 7
    >>> coded = np.round(exact / scale) * scale
    >>> share_beyond_half_step(exact, coded, 64)
    0.0
    >>> tuned = exact + 0.1 * np.random.default_rng(1).standard_normal((64, 64))
    >>> round(share_beyond_half_step(tuned, coded, 64), 2)
    0.19
    """
    if shared < SMALLEST or not coded.size:
        return 0.0
    if coded.size % shared:
        shared = coded.shape[-1]
    lower, upper = half_steps(coded, shared)
    stretches = np.asarray(exact, np.float64).reshape(lower.shape)
    distance = stretches - coded.reshape(lower.shape)
    stored = max(rounding, COMPUTED) * np.abs(stretches)
    is_above = distance > (1 + STEP_SLACK) * upper + stored
    is_below = distance < -(1 + STEP_SLACK) * lower - stored
    return float((is_above | is_below).mean())


def ratio_of_scales(
    expected: Float[np.ndarray, "n d"], actual: Float[np.ndarray, "n d"], shared: int
) -> np.ndarray | None:
    """Return the factors of the scales of two quantized weights with equal codes.

    Parameters
    ----------
    expected, actual
        Dequantized numbers of both weights.
    shared
        Number of neighboring entries that share a scale.

    Returns
    -------
    ndarray or None
        A factor for each scale; None if codes differ.

    Examples
    --------
    >>> codes = np.random.default_rng(0).integers(-7, 8, (4, 16)).astype(float)
    >>> scales = np.array([[1.0, 2.0], [1.0, 1.0], [3.0, 1.0], [1.0, 1.0]]).repeat(8, axis=1)
    >>> ratio_of_scales(codes, codes * scales, 8).tolist()
    [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    """
    if expected.shape != actual.shape or shared < 2 or actual.size % shared:
        return None
    w = np.asarray(expected, np.float64).reshape(-1, shared)
    v = np.asarray(actual, np.float64).reshape(-1, shared)
    squares = np.square(w).sum(axis=1)
    products = (w * v).sum(axis=1)
    factors = products / np.where(squares > 0, squares, 1.0)
    residual = np.abs(v - factors[:, None] * w).max(axis=1)
    allowed = SAME_FACTOR * np.abs(v).max(axis=1)
    if (residual > allowed).any():
        return None
    return np.where(squares > 0, factors, 1.0)
