"""Paired comparisons over seeds: mean, interval, p, and the smallest detectable difference."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from wqk.errors import required_by

LEVEL = 0.95  # of intervals; the test's size is 1 − LEVEL
POWER = 0.8  # at which an effect counts as detectable


@dataclass(frozen=True)
class Paired:
    """A mean of differences, one for each seed, by Student's t.

    Attributes
    ----------
    count
        Number of seeds.
    mean
        Mean of the differences.
    low, high
        The mean's 95 % interval; None, as are ``p`` and ``detectable``, for a single seed or if all
        differences are equal, so that their spread is unknown.
    p
        Two-sided, of the hypothesis that the mean is zero.
    detectable
        The smallest true difference that this many seeds of this spread detect with power 80 %.
    """

    count: int
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None
    detectable: float | None = None


def paired(differences: Sequence[float]) -> Paired:
    """The mean of differences compared with zero.

    Raises
    ------
    MissingPackage
        SciPy is not installed.

    Examples
    --------
    >>> result = paired([0.1, 0.3, 0.2])
    >>> [round(value, 3) for value in (result.mean, result.low, result.high, result.p)]
    [0.2, -0.048, 0.448, 0.074]
    >>> paired([0.5])
    Paired(count=1, mean=0.5, low=None, high=None, p=None, detectable=None)
    """
    count, mean = len(differences), fmean(differences)
    if count < 2 or not (deviation := stdev(differences)):
        return Paired(count, mean)
    with required_by("an interval over seeds"):
        from scipy.stats import t  # type: ignore[import-untyped]
    error, freedom = deviation / count**0.5, count - 1
    quantile = float(t.ppf((1 + LEVEL) / 2, freedom))
    return Paired(
        count,
        mean,
        mean - quantile * error,
        mean + quantile * error,
        float(2 * t.sf(abs(mean) / error, freedom)),
        (quantile + float(t.ppf(POWER, freedom))) * error,
    )
