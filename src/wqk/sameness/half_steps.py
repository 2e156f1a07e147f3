"""Codes of quantized weights, predicted from exact ones.

Rounding moves no entry by more than half a step of its own scale. A quantized file of other weights
has many entries beyond it, although the distance of the whole weight is that of rounding. Entries
at the end of a scale are left out: scales are often chosen so that a few entries are clipped.

Some methods (GPTQ) move the other entries of a row when they round one, and their codes cannot be
predicted. They are compared by distance alone.

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
    """Return whether the codes of a quantized format are the nearest ones.

    Examples
    --------
    >>> is_predictable("GPTQ 4-bit"), is_predictable("NF4")
    (False, True)
    """
    return COMPENSATED.search(kind) is None


def is_coded_alone(infos: Sequence[TensorInfo]) -> bool:
    """Return whether one of two tensors is quantized by a predictable method, the other exact."""
    coded = [info for info in infos if info.grid is not None]
    return len(coded) == 1 and is_predictable(coded[0].dtype)


def half_steps(
    actual: Float[np.ndarray, "n d"], shared: int
) -> tuple[Float[np.ndarray, "m b"], Float[np.ndarray, "m b"]]:
    """Distances from each entry to the ends of its rounding cell, below and above.

    Parameters
    ----------
    actual
        Dequantized numbers; their levels are read from these.
    shared
        Number of neighboring entries that share a scale.

    Returns
    -------
    tuple of ndarray
        Lower and upper half steps, at least 0, in stretches of one scale; infinite at the ends of a
        scale, where entries may be clipped.

    Examples
    --------
    >>> low, high = half_steps(np.array([[-2.0, -1.0, 0.0, 1.0, 1.0, 0.0, -1.0, 2.0]]), 8)
    >>> low[0].tolist()
    [inf, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, inf]
    """
    stretches = np.asarray(actual, np.float64).reshape(-1, shared)
    ascending = np.sort(stretches, axis=1)
    gaps = np.diff(ascending, axis=1)
    spans = ascending[:, -1:] - ascending[:, :1]
    is_level = gaps > SAME_LEVEL * np.where(spans > 0, spans, 1.0)
    least = np.where(is_level, gaps, np.inf).min(axis=1, initial=np.inf, keepdims=True)
    ratios = np.where(is_level, gaps / np.where(least > 0, least, 1.0), 1.0)
    if (np.abs(ratios - np.round(ratios)) < EVEN_STEPS).mean() > 1 - EVEN_STEPS:
        # Equal steps; a stretch may by chance hold no two neighboring levels.
        half = np.broadcast_to(least / 2, stretches.shape)
        lower, upper = half.copy(), half.copy()
    else:
        lower, upper = _uneven(stretches, ascending, gaps, is_level)
    at_end = (stretches <= ascending[:, :1]) | (stretches >= ascending[:, -1:])
    lower[at_end] = upper[at_end] = np.inf
    return lower, upper


def _uneven(
    stretches: np.ndarray, ascending: np.ndarray, gaps: np.ndarray, is_level: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Half the distances to the next levels that occur, below and above."""
    rows, count = stretches.shape
    places = np.arange(count)
    always = np.ones((rows, 1), bool)
    # In ascending order, the last place of each entry's level, and the first one.
    last_places = np.where(np.hstack([is_level, always]), places, count)
    last = np.minimum.accumulate(last_places[:, ::-1], axis=1)[:, ::-1]
    first_places = np.where(np.hstack([always, is_level]), places, -1)
    first = np.maximum.accumulate(first_places, axis=1)
    outside = np.full((rows, 1), np.inf)
    gaps_around = np.hstack([outside, gaps, outside])
    lower = np.take_along_axis(gaps_around, first, axis=1) / 2
    upper = np.take_along_axis(gaps_around, last + 1, axis=1) / 2
    order = np.argsort(stretches, axis=1, kind="stable")
    ranks = np.argsort(order, axis=1)
    return np.take_along_axis(lower, ranks, axis=1), np.take_along_axis(upper, ranks, axis=1)


def share_beyond_half_step(
    exact: Float[np.ndarray, "n d"],
    coded: Float[np.ndarray, "n d"],
    shared: int,
    rounding: float = 0.0,
) -> float:
    """Share of entries that lie farther from their code than half a step of their own scale.

    Parameters
    ----------
    exact, coded
        Exact numbers, and those of a quantized weight.
    shared
        Number of neighboring entries that share a scale; 1 for float8, whose steps are relative to
        each number.
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
    """Factors of the scales of two quantized weights with equal codes; None if codes differ.

    Examples
    --------
    >>> codes = np.random.default_rng(0).integers(-7, 8, (4, 16)).astype(float)
    >>> scales = np.array([[1.0, 2.0], [1.0, 1.0], [3.0, 1.0], [1.0, 1.0]]).repeat(8, axis=1)
    >>> ratio_of_scales(codes, codes * scales, 8).tolist()
    [1.0, 2.0, 1.0, 1.0, 3.0, 1.0, 1.0, 1.0]
    """
    if expected.shape != actual.shape or shared < 2 or actual.size % shared:
        return None
    first = np.asarray(expected, np.float64).reshape(-1, shared)
    second = np.asarray(actual, np.float64).reshape(-1, shared)
    squares = np.square(first).sum(axis=1)
    products = (first * second).sum(axis=1)
    factors = products / np.where(squares > 0, squares, 1.0)
    residual = np.abs(second - factors[:, None] * first).max(axis=1)
    allowed = SAME_FACTOR * np.abs(second).max(axis=1)
    if (residual > allowed).any():
        return None
    return np.where(squares > 0, factors, 1.0)
