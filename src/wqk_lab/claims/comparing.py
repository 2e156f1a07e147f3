"""Estimates that decide claims: separation of two groups, and differences within pairs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from wqk.errors import required_by
from wqk_lab.runs.seeds import LEVEL, POWER, paired

# Exact p-values of Wilcoxon's test exist for pairs of models; a few seeds have Student's.
PairTest = Literal["Wilcoxon", "Student"]


@dataclass(frozen=True)
class ClaimEstimate:
    """An estimate with a 95 % interval.

    Attributes
    ----------
    value, low, high
        The estimate and the ends of the interval.
    null
        The value of the estimate if there is no effect.
    p
        Two-sided p-value of the hypothesis that there is no effect.
    detectable
        The smallest true effect to be found with power 80 %, as a distance from ``null``.
    """

    value: float
    low: float
    high: float
    null: float
    p: float
    detectable: float


def separation(first: Sequence[float], second: Sequence[float]) -> ClaimEstimate:
    """Return the probability that a member of the first group exceeds a member of the second (AUC).

    The p-value is Mann and Whitney's. The interval is by DeLong, DeLong and Clarke-Pearson (1988),
    on the logit scale; if the groups do not overlap, Wilson's interval of a share.

    Parameters
    ----------
    first, second
        Values of the members of each group, 2 or more.

    Raises
    ------
    MissingPackage
        SciPy is not installed.

    Examples
    --------
    >>> estimate = separation([0.5, 0.6, 0.4, 0.7], [0.1, 0.2, 0.45])
    >>> round(estimate.value, 3), estimate.low < 0.92 < estimate.high
    (0.917, True)
    """
    with required_by("an interval over models"):
        from scipy import stats  # type: ignore[import-untyped]
    first_values, second_values = np.asarray(first, float), np.asarray(second, float)
    first_count, second_count = len(first_values), len(second_values)
    is_larger = first_values[:, None] > second_values
    is_equal = first_values[:, None] == second_values
    wins = is_larger + 0.5 * is_equal
    area = float(wins.mean())
    first_variance = wins.mean(1).var(ddof=1) / first_count
    second_variance = wins.mean(0).var(ddof=1) / second_count
    error = math.sqrt(first_variance + second_variance)
    quantile = float(stats.norm.ppf((1 + LEVEL) / 2))
    if error and 0 < area < 1:
        center = math.log(area / (1 - area))
        reach = quantile * error / (area * (1 - area))
        low, high = _logistic(center - reach), _logistic(center + reach)
    else:
        low, high = _wilson(area, min(first_count, second_count), quantile)
    # The error without an effect, by Mann and Whitney.
    null_error = math.sqrt((first_count + second_count + 1) / (12 * first_count * second_count))
    power = float(stats.norm.ppf(POWER))
    return ClaimEstimate(
        value=area,
        low=low,
        high=high,
        null=0.5,
        p=float(stats.mannwhitneyu(first_values, second_values).pvalue),
        detectable=(quantile + power) * null_error,
    )


def _logistic(logit: float) -> float:
    """Return the share with a given logit."""
    return 1 / (1 + math.exp(-logit))


def _wilson(share: float, count: int, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval of a share of ``count``, for a quantile of the normal law."""
    square = quantile**2
    scale = 1 + square / count
    center = (share + square / (2 * count)) / scale
    variance = share * (1 - share) / count + square / (4 * count**2)
    reach = quantile / scale * math.sqrt(variance)
    return center - reach, center + reach


def mean_difference(differences: Sequence[float], test: PairTest) -> ClaimEstimate:
    """Return the mean of differences within pairs, with Student's interval.

    Examples
    --------
    >>> estimate = mean_difference([0.3, 0.2, 0.4, 0.1, 0.3, 0.2], "Wilcoxon")
    >>> round(estimate.value, 3), round(estimate.p, 4)
    (0.25, 0.0312)
    """
    with required_by("an interval over models"):
        from scipy import stats
    mean = paired(differences)
    assert mean.low is not None
    assert mean.high is not None
    assert mean.p is not None
    p = mean.p
    if test == "Wilcoxon":
        p = float(stats.wilcoxon(differences, method="exact").pvalue)
    return ClaimEstimate(
        value=mean.mean,
        low=mean.low,
        high=mean.high,
        null=0.0,
        p=p,
        detectable=float(mean.detectable or math.nan),
    )


def adjusted(p_values: Sequence[float]) -> list[float]:
    """Return p-values adjusted for their number by Benjamini and Hochberg's method.

    Examples
    --------
    >>> [round(p, 3) for p in adjusted([0.01, 0.04, 0.03])]
    [0.03, 0.04, 0.04]
    """
    adjusted_values = [1.0] * len(p_values)
    smallest = 1.0
    for rank, index in reversed(list(enumerate(np.argsort(p_values), start=1))):
        smallest = min(smallest, p_values[index] * len(p_values) / rank)
        adjusted_values[index] = smallest
    return adjusted_values
