"""Bounds of the scores, and scores of random matrices (Lemma S1.16, Propositions S1.17 and S1.18).

If the entries of a matrix or of its factors are independent, symmetric about 0 and of one law, then
E[s] = 1/n exactly, for any rank; the standard deviation of s is √2/n if the law's fourth moment is
finite. E[d] = 0 if both factors have one law, because the transpose is as likely as the matrix; the
standard deviation of d decreases only as 1/√n.

Axes: T trials, D width (the paper's n), R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk.forms import BilinearForm
from wqk.forms.kernels import directionalities
from wqk.forms.scores import directionality, symmetry
from wqk_lab.theory.evidence import Evidence, StatementMeasure, ratio, sample_of
from wqk_lab.theory.verdict import Sample

if TYPE_CHECKING:
    Law = Callable[[np.random.Generator, tuple[int, ...]], np.ndarray]

# About how many entries of random matrices are in memory at once.
ENTRIES = 1 << 22

# The widths between which the directionality should fall; how many matrices of each width are
# drawn, and in how many groups.
NARROW, WIDE, TRIALS, GROUPS = 32, 128, 400, 20

# Laws of the entries, from the mildest to those that break an assumption. Student's has a finite
# variance and an infinite fourth moment.
LAWS: dict[str, Law] = {
    "normal": lambda random, shape: random.standard_normal(shape),
    "uniform": lambda random, shape: random.uniform(-1, 1, shape),
    "sparse": lambda random, shape: random.standard_normal(shape) * (random.random(shape) < 0.05),
    "student": lambda random, shape: random.standard_t(3, shape),
    "cauchy": lambda random, shape: random.standard_cauchy(shape),
    "not centered": lambda random, shape: 0.5 + random.standard_normal(shape),
}


class RandomScores(NamedTuple):
    """Scores of random matrices, (T,) each: s, d as printed, and d by the rule of the tables."""

    symmetry: np.ndarray
    directionality: np.ndarray
    excess: np.ndarray


def simulate_scores(
    width: int, rank: int | None = None, law: str = "normal", *, trials: int = 1000, seed: int = 0
) -> RandomScores:
    """Return symmetry and directionality of random matrices, dense or of low rank.

    With a ``rank``, R, the entries of the factors are drawn; with None, the entries of dense
    matrices, (D, D). ``law`` is one of `LAWS`. Zero matrices, which sparse factors may result in,
    have no scores and are left out.

    Examples
    --------
    >>> s = simulate_scores(32, rank=8, trials=2000).symmetry
    >>> bool(abs(s.mean() - 1 / 32) < 3 * s.std() / 2000**0.5), bool(s.mean() < 8 / 32 / 4)
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
        form = BilinearForm.from_factors(query, key)
        scores.append((symmetry(form), *directionalities(form.moments)))
    symmetries, directions, excesses = np.concatenate(scores, axis=1)
    has_scores = ~np.isnan(symmetries)
    return RandomScores(
        symmetry=symmetries[has_scores],
        directionality=directions[has_scores],
        excess=excesses[has_scores],
    )


def shares_of_parts(form: BilinearForm) -> tuple[float, float]:
    """Return ‖M_s‖²/‖M‖² and ‖M_n‖²/‖M‖² from both parts; the sum is 1 (Lemma S1.16).

    Examples
    --------
    >>> shares_of_parts(BilinearForm(np.eye(2), np.eye(2)))
    (1.0, 0.0)
    """
    square_norm = float(form.norm) ** 2
    parts = form.symmetric_part, form.skew_part
    symmetric, skew = (ratio(float(part.norm) ** 2, square_norm) for part in parts)
    return symmetric, skew


def _parts(evidence: Evidence) -> Sample:
    """Return ‖M_s‖² + ‖M_n‖² − ‖M‖² relative to ‖M‖², and the excess of the scores beyond ±1."""

    def measure(form: BilinearForm) -> dict[str, float]:
        s = float(symmetry(form))
        d = float(directionality(form))
        error = abs(sum(shares_of_parts(form)) - 1)
        return {"parts": max(error, abs(s) - 1, abs(d) - 1), "s": s}

    return sample_of({layer: [measure(form)] for layer, form in evidence.forms.items()})


def _draws(evidence: Evidence) -> dict[int, RandomScores]:
    """Return scores of random matrices by their width."""
    seed = evidence.subject.seed
    return {width: simulate_scores(width, trials=TRIALS, seed=seed) for width in (WIDE, NARROW)}


def _falling(evidence: Evidence) -> Sample:
    """Return ln E|d| of wide matrices minus ln E|d| of narrow matrices, group by group."""
    wide, narrow = (
        np.abs(scores.directionality).reshape(GROUPS, -1).mean(axis=1)
        for scores in evidence.once(_draws).values()
    )
    return _drawn(np.log(wide / narrow))


def _drawn(values: np.ndarray) -> Sample:
    """Return a sample from numbers of random matrices; each number is a unit."""
    return Sample(values[:, None], "draws")


MEASURES: dict[str, StatementMeasure] = {
    "parts": _parts,
    "symmetry": lambda evidence: _drawn(WIDE * evidence.once(_draws)[WIDE].symmetry),
    "directionality": lambda evidence: _drawn(evidence.once(_draws)[WIDE].directionality),
    "falling": _falling,
}
