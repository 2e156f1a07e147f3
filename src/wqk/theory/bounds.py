"""Bounds of the scores, and what random matrices give (Lemma S1.16, Propositions S1.17 and S1.18).

For entries, or entries of the factors, that are independent, centered, symmetric about 0 and of one
law: E[s] = 1/n exactly, at any rank; its standard deviation is √2/n as long as the law's fourth
moment is finite. E[d] = 0 where both factors have the same law, because the transpose is as likely
as the matrix itself; its standard deviation falls as slowly as 1/√n.

Axes: T trials, D width (the paper's n), R rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk.forms import BilinearForm
from wqk.forms.scores import directionality, symmetry

if TYPE_CHECKING:
    from collections.abc import Callable

    Law = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# Trials whose matrices are in memory at once hold about so many entries.
ENTRIES = 1 << 22


def _sparse(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return np.asarray(random.standard_normal(shape) * (random.random(shape) < 0.05))


def _students(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    # Finite variance, infinite fourth moment.
    return random.standard_t(3, shape)


# Laws of the entries, from the mildest to those that break an assumption.
LAWS: dict[str, Law] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "uniform": lambda random, shape: random.uniform(-1, 1, shape),
    "sparse": _sparse,
    "student": _students,
    "cauchy": lambda random, shape: random.standard_cauchy(shape),
    "not centered": lambda random, shape: 0.5 + random.standard_normal(shape),
}


class Limits(NamedTuple):
    """Scores of many random matrices: means, standard deviations, and errors of the means.

    Attributes
    ----------
    symmetry, symmetry_deviation, symmetry_error
        Of s: its mean, its spread, and the standard error of the mean.
    directionality, directionality_deviation, directionality_error
        Of d, Definition 3.2 as printed.
    excess_deviation
        Spread of d by the rule of the published tables.
    """

    symmetry: float
    symmetry_deviation: float
    symmetry_error: float
    directionality: float
    directionality_deviation: float
    directionality_error: float
    excess_deviation: float


def simulate_scores(
    width: int, rank: int | None = None, law: str = "normal", *, trials: int = 1000, seed: int = 0
) -> Limits:
    """Symmetry and directionality of random matrices, dense or of low rank.

    Sparse factors now and then make a zero matrix, which has no scores and is left out.

    Parameters
    ----------
    width
        D.
    rank
        R of the factors, whose entries are then drawn; None for a dense matrix.
    law
        A name out of `LAWS`.
    trials
        Number of matrices.
    seed
        Of everything.

    Examples
    --------
    >>> limits = simulate_scores(32, rank=8, trials=2000)
    >>> abs(limits.symmetry - 1 / 32) < 3 * limits.symmetry_error, limits.symmetry < 8 / 32 / 4
    (True, True)
    """
    random = np.random.default_rng(seed)
    draw = LAWS[law]
    scores = []
    at_once = max(1, ENTRIES // width**2)
    for start in range(0, trials, at_once):
        count = min(at_once, trials - start)
        query = draw(random, (count, width, rank or width))
        key = np.eye(width) if rank is None else draw(random, (count, width, rank))
        form = BilinearForm(query, key)
        scores.append((symmetry(form), directionality(form), directionality(form, weight="excess")))
    every: np.ndarray = np.concatenate(scores, axis=1)
    s, d, excess = every[:, ~np.isnan(every[0])]
    error = 1 / np.sqrt(len(s))
    return Limits(
        symmetry=float(s.mean()),
        symmetry_deviation=float(s.std(ddof=1)),
        symmetry_error=float(s.std(ddof=1) * error),
        directionality=float(d.mean()),
        directionality_deviation=float(d.std(ddof=1)),
        directionality_error=float(d.std(ddof=1) * error),
        excess_deviation=float(excess.std(ddof=1)),
    )


def shares_of_parts(form: BilinearForm) -> tuple[float, float]:
    """‖M_s‖²/‖M‖² and ‖M_n‖²/‖M‖², from the two parts themselves; they add up to 1 (Lemma S1.16).

    Examples
    --------
    >>> shares_of_parts(BilinearForm(np.eye(2), np.eye(2)))
    (1.0, 0.0)
    """
    whole = float(form.norm) ** 2
    parts = (float(part.norm) ** 2 / whole for part in (form.symmetric_part, form.skew_part))
    symmetric, skew = parts
    return symmetric, skew
