"""Student's t distribution: how far the mean of a few measurements may lie from the truth."""

from __future__ import annotations

import math

import numpy as np

# Nodes of the quadrature; beyond REACH standard deviations there is nothing left to integrate.
NODES, WEIGHTS = np.polynomial.legendre.leggauss(96)
REACH = 40.0


def tail(t: float, degrees: float) -> float:
    """Pr[T > t] for T with some degrees of freedom.

    With t = √n tan θ the density is proportional to cosⁿ⁻¹ θ. Infinitely many degrees of freedom
    make it normal.

    Examples
    --------
    >>> round(tail(12.706, 1), 4), round(tail(-2.0, 10), 4)
    (0.025, 0.9633)
    """
    if math.isinf(t) or t < 0:
        return float(t < 0) if math.isinf(t) else 1 - tail(-t, degrees)
    if math.isinf(degrees):
        return math.erfc(t / math.sqrt(2)) / 2
    start = math.atan(t / math.sqrt(degrees))
    half = min(math.pi / 2 - start, REACH / math.sqrt(degrees)) / 2
    constant = math.exp(math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2)) / math.sqrt(
        math.pi
    )
    cosines = np.cos(start + half * (NODES + 1))
    return float(constant * half * (WEIGHTS @ cosines ** (degrees - 1)))


def quantile(probability: float, degrees: float) -> float:
    """The t that T exceeds with a probability below one half.

    Examples
    --------
    >>> round(quantile(0.025, 1), 2), round(quantile(0.025, 7), 3)
    (12.71, 2.365)
    """
    low, high = 0.0, 1.0
    while tail(high, degrees) > probability:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle, degrees) > probability else (low, middle)
    return high
