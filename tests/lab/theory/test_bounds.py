"""Random-matrix limits with the constants put right, and where their assumptions end."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import wqk
from wqk import BilinearForm
from wqk_lab.theory.bounds import shares_of_parts, simulate_scores

WIDTH = 24


simulated = cache(simulate_scores)  # several statements are about the same trials


def mean(values: np.ndarray) -> tuple[float, float]:
    """With its standard error."""
    return float(values.mean()), float(values.std(ddof=1) / np.sqrt(len(values)))


SYMMETRIC = ("normal", "uniform", "sparse", "student", "cauchy")


@pytest.mark.parametrize("law", SYMMETRIC)
@pytest.mark.parametrize("rank", [None, 1, 6])
def test_the_mean_symmetry_is_one_over_n_at_any_rank(law: str, rank: int | None) -> None:
    limits = simulated(WIDTH, rank, law, trials=2000)
    s, error = mean(limits.symmetry)
    assert abs(s - 1 / WIDTH) < 4 * error
    # The published constant, eight times as much, is out of reach.
    assert abs(s - 8 / WIDTH) > 20 * error
    d, error = mean(limits.directionality)
    assert abs(d) < 4 * error


def test_the_deviation_is_root_two_over_n_unless_tails_are_heavy() -> None:
    deviations = {}
    for law in ("normal", "uniform", "student", "cauchy"):
        for rank in (None, 1, 6):
            symmetry = simulated(WIDTH, rank, law, trials=2000).symmetry
            deviations[law, rank] = symmetry.std() * WIDTH
    for (law, _), deviation in deviations.items():
        if law in ("normal", "uniform"):
            assert deviation == pytest.approx(2**0.5, rel=0.1)
    normal, student, cauchy = (deviations[law, None] for law in ("normal", "student", "cauchy"))
    assert normal < student < cauchy > 2 * normal


def test_entries_that_are_not_centered_make_a_symmetric_matrix() -> None:
    s, error = mean(simulate_scores(WIDTH, None, "not centered", trials=500).symmetry)
    assert s > 10 * error + 1 / WIDTH


def test_the_simulation_is_that_of_dense_matrices_scored_by_hand() -> None:
    dense = np.random.default_rng(0).standard_normal((50, 9, 9))
    s = np.trace(dense @ dense, axis1=1, axis2=2) / (dense**2).sum(axis=(1, 2))
    np.testing.assert_allclose(simulate_scores(9, None, trials=50, seed=0).symmetry, s)


def test_trials_are_the_same_however_many_are_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = simulate_scores(8, None, trials=64).symmetry
    monkeypatch.setattr("wqk_lab.theory.bounds.ENTRIES", 64 * 10)
    np.testing.assert_allclose(simulate_scores(8, None, trials=64).symmetry, expected)


@given(st.integers(0, 10**6), st.integers(1, 6), st.floats(-3, 3))
def test_parts_are_orthogonal_and_scores_bounded(seed: int, rank: int, bias: float) -> None:
    random = np.random.default_rng(seed)
    form = BilinearForm(*(random.standard_normal((2, 7, rank)) ** 3 + bias))
    symmetric, skew = shares_of_parts(form)
    assert symmetric + skew == pytest.approx(1)
    assert symmetric - skew == pytest.approx(float(wqk.symmetry(form)))
    assert -1 <= float(wqk.symmetry(form)) <= 1
    assert -1 <= float(wqk.directionality(form)) <= 1
