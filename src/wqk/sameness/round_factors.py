"""Round numbers near fitted factors: 2 for a fit of 1.99995 to rounded weights."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from wqk.sameness.tolerances import (
    CHANCE_OF_ROUND,
    DEVIATIONS_OF_FACTOR,
    ROUNDING_OF_FACTORS,
)

# Entries that are compared at once, to need little memory.
AT_ONCE = 2**20
# Head widths are multiples of this number.
STEP_OF_WIDTHS = 8


def round_factor(fitted: float, uncertainty: float) -> float:
    """Return the round number near a fitted factor, or else the fitted factor.

    Round numbers are whole numbers and their inverses, roots of head widths and their inverses, and
    numbers of up to three digits. A round number is returned if its distance from the fitted factor
    is at most the uncertainty, and if the uncertainty is small compared with the gaps between round
    numbers; otherwise some round number is always near. A factor is never 1.

    Parameters
    ----------
    fitted
        The factor.
    uncertainty
        The largest difference that rounding of the weights explains.

    Examples
    --------
    >>> round_factor(1.99995405, 1e-4), round_factor(1.99995405, 1e-6)
    (2.0, 1.99995405)
    >>> round_factor(1.0498, 3e-4), round_factor(-0.08838, 1e-5) == -(128**-0.5)
    (1.05, True)
    >>> round_factor(1.0498, 0.1)
    1.0498
    """
    size = abs(fitted)
    if not 0 < size < math.inf:
        return fitted
    for number, gap in _round_numbers(size):
        is_near = abs(size - number) <= uncertainty
        signed = math.copysign(number, fitted)
        if is_near and uncertainty <= CHANCE_OF_ROUND * gap and signed != 1:
            return signed
    return fitted


def _round_numbers(size: float) -> Iterator[tuple[float, float]]:
    """Yield the nearest round number of each kind, with the distance to the next of its kind."""
    for power in (1.0, -1.0, 0.5, -0.5):
        multiple_of = 1 if abs(power) == 1 else STEP_OF_WIDTHS
        whole = multiple_of * max(1, round(size ** (1 / power) / multiple_of))
        number = float(whole**power)
        yield number, abs((whole + multiple_of) ** power - number)
    for digits in (2, 3):
        step = 10.0 ** (math.floor(math.log10(size)) - digits + 1)
        yield float(f"{size:.{digits}g}"), step


class FittedFactor(NamedTuple):
    """A factor f of weights w, fitted to weights v by least squares.

    Attributes
    ----------
    fitted
        The factor: Σ w v / Σ w².
    uncertainty
        The largest error of the factor that rounding of v and of w explains.
    """

    fitted: float
    uncertainty: float

    @property
    def factor(self) -> float:
        """The round number near the fitted factor, or else the fitted factor."""
        return round_factor(self.fitted, self.uncertainty)

    def facts(self) -> dict[str, float]:
        """Return the fitted and the round factor, as facts of a cause."""
        return {"factor": self.factor, "fitted_factor": self.fitted}


def fit_factor(expected: np.ndarray, actual: np.ndarray) -> FittedFactor:
    """Fit the factor of expected weights w to actual weights v, two arrays of one shape.

    With e = v − f w, the factor f has the variance Σ w² e² / (Σ w²)², for any sizes of the single
    roundings e. If w is rounded as well, f is too small by at most the share Σ e² / Σ v².

    Examples
    --------
    >>> w = np.random.default_rng(0).normal(size=4096).astype(np.float32)
    >>> fit = fit_factor(w, (1.05 * w).astype(np.float16))
    >>> f"{fit.fitted:.7f} ± {fit.uncertainty:.7f}", fit.factor
    ('1.0500000 ± 0.0000175', 1.05)
    """
    w, v = expected.reshape(-1), actual.reshape(-1)
    square_of_expected = square_of_actual = product = 0.0
    for x, y in _in_pieces(w, v):
        square_of_expected += float(x @ x)
        square_of_actual += float(y @ y)
        product += float(x @ y)
    if not (square_of_expected and square_of_actual):
        return FittedFactor(0.0, 0.0)
    fitted = product / square_of_expected
    square_of_error = weighted_square = 0.0
    for x, y in _in_pieces(w, v):
        error = y - fitted * x
        square_of_error += float(error @ error)
        weighted_square += float(np.square(x * error).sum())
    deviation = math.sqrt(weighted_square) / square_of_expected
    too_small_by = square_of_error / square_of_actual + ROUNDING_OF_FACTORS
    return FittedFactor(fitted, DEVIATIONS_OF_FACTOR * deviation + too_small_by * abs(fitted))


def _in_pieces(w: np.ndarray, v: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield pieces of two vectors, in float64."""
    for start in range(0, w.size, AT_ONCE):
        piece = slice(start, start + AT_ONCE)
        yield w[piece].astype(np.float64), v[piece].astype(np.float64)
