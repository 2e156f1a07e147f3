"""Whether weights look as if they had never been trained.

Initial entries are independent, centered and of one variance, so the norms of a weight's rows and
columns hardly differ: the squared norm of n normal entries has the relative variance 2/n, that of
uniform or truncated ones less. Training soon makes some inputs and outputs many times larger than
others, before it shows anywhere else.

Axes: H heads, R rank of a form, in a head its width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from wqk._typing import Array, Float
from wqk.forms.form import BilinearForm
from wqk.forms.scores import directionality, symmetry

# Standard errors by which a statistic may differ from its value for independent entries.
STANDARD_ERRORS = 5.0

# Rows taken at a time, so that their entries stay in a core's cache.
ROWS = 64

# Forms drawn for a range: another one falls between the least and the largest with probability
# (n − 1) / (n + 1), which is 95 %.
DRAWS = 39
# D · R² up to which forms are drawn at their own size, in a second or two.
DRAWN = 2e8


@cache
def untrained_range(width: int, rank: int, gamma: float = 2.0) -> dict[str, tuple[float, float]]:
    """The scores that forms of untrained weights have: 95 % ranges, by drawing such forms.

    Factors (D, R) have independent normal entries, whose law no rotation of the rank dimensions
    changes: the ranges are those at every relative distance. Forms above `DRAWN` are drawn at a
    smaller width and rank of the same ratio, whose ranges are wider.

    Parameters
    ----------
    width, rank
        D and R of the form.
    gamma
        As for `wqk.directionality`.

    Returns
    -------
    ``symmetry`` and ``directionality_excess``, each with the ends of its range.

    Examples
    --------
    >>> low, high = untrained_range(64, 16)["symmetry"]
    >>> low < 1 / 64 < high, high < 1 / 64 + 4 * 2**0.5 / 64  # 1/D ± √2/D
    (True, True)
    """
    shrink = min(1.0, (DRAWN / (width * rank**2)) ** (1 / 3))
    shape = max(2, round(width * shrink)), max(1, round(rank * shrink))
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(DRAWS):
        form = BilinearForm(rng.standard_normal(shape), rng.standard_normal(shape))
        drawn.append((symmetry(form), directionality(form, gamma=gamma, weight="excess")))
    columns = zip(("symmetry", "directionality_excess"), np.array(drawn).T, strict=True)
    return {name: (float(values.min()), float(values.max())) for name, values in columns}


def looks_random(weights: Sequence[Float[Array, "_ _ _"]], symmetry: float, d: int) -> bool:
    """Whether a layer's weights and its symmetry are those of independent random entries.

    The weights are the query's and the key's, each (H, R, D). The symmetry of a form of width ``d``
    with random factors is 1/d ± √2/d (paper, Proposition S1.17, with its constant corrected).

    Examples
    --------
    >>> rng = np.random.default_rng(0)
    >>> drawn = [*rng.standard_normal((2, 4, 16, 64))]
    >>> trained = [weight * np.linspace(0.5, 1.5, 64) for weight in drawn]
    >>> looks_random(drawn, 0.02, 64), looks_random(trained, 0.02, 64), looks_random(drawn, 0.9, 64)
    (True, False, False)
    """
    if abs(symmetry - 1 / d) > STANDARD_ERRORS * math.sqrt(2) / d:
        return False
    return all(_is_even(weight.reshape(-1, weight.shape[-1])) for weight in weights)


def _is_even(weight: Float[Array, "outputs inputs"]) -> bool:
    """Whether the norms of rows and columns spread no more than by chance."""
    rows, columns = _square_sums(weight)
    if not 1e-20 < rows.max(initial=0) < 1e20:  # squares may have over- or underflowed
        largest = np.abs(weight).max(initial=0)
        if largest == 0:
            return False
        rows, columns = _square_sums(weight / largest)
    for norms, count in zip((rows, columns), weight.shape[::-1], strict=True):
        if len(norms) < 2 or not norms.any():
            return False
        spread = norms.var() / norms.mean() ** 2
        # A variance estimated from n norms has the relative standard error √(2/n).
        allowed = 1 + STANDARD_ERRORS * math.sqrt(2 / len(norms))
        if spread > allowed * 2 / count:
            return False
    return True


def _square_sums(weight: Float[Array, "outputs inputs"]) -> tuple[np.ndarray, np.ndarray]:
    """Sums of squares of the rows and of the columns."""
    rows, columns = (np.zeros(count) for count in weight.shape)
    with np.errstate(over="ignore"):
        for start in range(0, len(weight), ROWS):
            part = weight[start : start + ROWS]
            rows[start : start + ROWS] = np.vecdot(part, part)
            columns += np.einsum("oi,oi->i", part, part)
    return rows, columns
