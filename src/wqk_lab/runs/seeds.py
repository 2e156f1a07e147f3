"""Values paired by seed, and the mean of differences with an interval."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import TypeVar

from wqk.errors import required_by

Value = TypeVar("Value")

LEVEL = 0.95  # of intervals; the test's size is 1 − LEVEL
POWER = 0.8  # at which an effect counts as detectable

# Differences with deviations below this share of the largest are equal up to rounding.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Paired:
    """A mean of differences, one difference for each seed, with a 95 % interval by Student's t.

    Interval, ``p`` and ``detectable`` are None if the spread is unknown: for a single seed, or if
    all differences are equal except for rounding.
    """

    count: int  #: Number of seeds.
    mean: float
    low: float | None = None
    high: float | None = None
    p: float | None = None  #: Two-sided, of the hypothesis that the mean is zero.
    #: The smallest true difference to be found with power 80 %, by number of seeds and spread.
    detectable: float | None = None


def paired(differences: Sequence[float]) -> Paired:
    """Compare the mean of differences with zero.

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
    >>> paired([2.0 - 1.5, 2.1 - 1.6]).low  # equal but for rounding
    """
    count, mean = len(differences), fmean(differences)
    deviation = 0.0 if count < 2 else stdev(differences)
    if deviation <= ROUNDING * max(map(abs, differences)):
        return Paired(count, mean)
    with required_by("an interval over seeds"):
        from scipy.stats import t  # type: ignore[import-untyped]
    error, degrees = deviation / count**0.5, count - 1
    quantile = float(t.ppf((1 + LEVEL) / 2, degrees))
    power = float(t.ppf(POWER, degrees))
    return Paired(
        count=count,
        mean=mean,
        low=mean - quantile * error,
        high=mean + quantile * error,
        p=float(2 * t.sf(abs(mean) / error, degrees)),
        detectable=(quantile + power) * error,
    )


def decimals(values: Iterable[float | None], least: int = 3) -> int:
    """Return the number of decimals at which each value has two significant digits.

    The number is at least ``least``. Values that are nearly zero next to the largest value have
    fewer significant digits: the largest value has at most five.

    Examples
    --------
    >>> decimals([-0.00045, 0.00053]), decimals([-0.2, 0.0004]), decimals([-0.5, 1e-9])
    (5, 5, 5)
    >>> decimals([0.25]), decimals([0.0]), decimals([None])
    (3, 3, 3)
    """
    exponents = [math.floor(math.log10(abs(value))) for value in values if value]
    if not exponents:
        return least
    return max(least, min(1 - min(exponents), 4 - max(exponents)))


def in_nats(result: Paired) -> str:
    """Return a mean difference of losses and the interval, with enough decimals for the ends.

    Examples
    --------
    >>> in_nats(Paired(2, 3.9e-5, -4.5e-4, 5.3e-4)), in_nats(Paired(1, -0.5))
    ('+0.00004 [−0.00045, +0.00053]', '−0.500')
    """
    ends = [result.mean] if result.low is None else [result.low, result.high]
    return interval(result, f"+.{decimals(ends)}f")


def interval(result: Paired, form: str) -> str:
    """Return a mean and the interval as text.

    Examples
    --------
    >>> interval(Paired(2, -0.5, -0.75, 0.25), "+.2f"), interval(Paired(1, 0.5), "+.0%")
    ('−0.50 [−0.75, +0.25]', '+50%')
    """

    def formatted(number: float) -> str:
        return format(number, form).replace("-", "−")

    mean = formatted(result.mean)
    if result.low is None or result.high is None:
        return mean
    return f"{mean} [{formatted(result.low)}, {formatted(result.high)}]"


def by_seed(*groups: Mapping[int, Value]) -> dict[int, tuple[Value, ...]]:
    """Return the values of each seed that all groups have, in the order of the first group.

    Examples
    --------
    >>> by_seed({1: 2.0, 2: 3.0}, {3: 1.0, 1: 1.5})
    {1: (2.0, 1.5)}
    """
    shared = set.intersection(*map(set, groups))
    values_by_seed = {}
    for seed in groups[0]:
        if seed in shared:
            values_by_seed[seed] = tuple(group[seed] for group in groups)
    return values_by_seed
