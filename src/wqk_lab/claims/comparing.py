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
    """An estimate with its 95 % interval.

    Attributes
    ----------
    value, low, high
        The estimate and the ends of its interval.
    null
        The value of the estimate if there is no effect.
    p
        Two-sided p-value of the hypothesis that there is no effect.
    detectable
        The smallest true effect that is found with power 80 %, as a distance from ``null``.
    """

    value: float
    low: float
    high: float
    null: float
    p: float
    detectable: float


def separation(first: Sequence[float], second: Sequence[float]) -> ClaimEstimate:
    """Return the probability that a member of the first group exceeds one of the second (AUC).

    The p-value is Mann and Whitney's; the interval is that of DeLong, DeLong and Clarke-Pearson
    (1988), on the logit scale, or Wilson's of a share if the groups do not overlap.

    Examples
    --------
    >>> found = separation([0.5, 0.6, 0.4, 0.7], [0.1, 0.2, 0.45])
    >>> round(found.value, 3), found.low < 0.92 < found.high
    (0.917, True)
    """
    with required_by("an interval over models"):
        from scipy import stats  # type: ignore[import-untyped]
    a, b = np.asarray(first, float), np.asarray(second, float)
    wins = (a[:, None] > b) + 0.5 * (a[:, None] == b)
    area = float(wins.mean())
    variance = wins.mean(1).var(ddof=1) / len(a) + wins.mean(0).var(ddof=1) / len(b)
    error = float(math.sqrt(variance))
    normal = float(stats.norm.ppf((1 + LEVEL) / 2))
    if error and 0 < area < 1:
        center, reach = math.log(area / (1 - area)), normal * error / (area * (1 - area))
        low, high = (1 / (1 + math.exp(-(center + side * reach))) for side in (-1, 1))
    else:
        low, high = _wilson(area, min(len(a), len(b)), normal)
    p = float(stats.mannwhitneyu(a, b).pvalue)
    # Under no effect, by Mann and Whitney.
    null_error = math.sqrt((len(a) + len(b) + 1) / (12 * len(a) * len(b)))
    power = float(stats.norm.ppf(POWER))
    return ClaimEstimate(
        value=area, low=low, high=high, null=0.5, p=p, detectable=(normal + power) * null_error
    )


def _wilson(share: float, count: int, normal: float) -> tuple[float, float]:
    """Wilson's interval of a share."""
    scale = 1 + normal**2 / count
    center = (share + normal**2 / (2 * count)) / scale
    reach = normal / scale * math.sqrt(share * (1 - share) / count + normal**2 / (4 * count**2))
    return center - reach, center + reach


def mean_difference(differences: Sequence[float], test: PairTest) -> ClaimEstimate:
    """Return the mean of differences within pairs, with Student's interval.

    Examples
    --------
    >>> found = mean_difference([0.3, 0.2, 0.4, 0.1, 0.3, 0.2], "Wilcoxon")
    >>> round(found.value, 3), round(found.p, 4)
    (0.25, 0.0312)
    """
    with required_by("an interval over models"):
        from scipy import stats
    result = paired(differences)
    assert result.low is not None
    assert result.high is not None
    assert result.p is not None
    p = result.p if test == "Student" else float(stats.wilcoxon(differences, method="exact").pvalue)
    return ClaimEstimate(
        value=result.mean,
        low=result.low,
        high=result.high,
        null=0.0,
        p=p,
        detectable=float(result.detectable or math.nan),
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
