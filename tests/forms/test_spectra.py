"""Spectra against dense float64 linear algebra, and their values by chance against drawn forms."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from wqk import BilinearForm
from wqk.forms.spectra import null_spectrum, spectral_norm, spectrum

SIZES = st.integers(1, 24)


def dense_spectrum(matrix: np.ndarray) -> dict[str, float]:
    """Measures of a spectrum by their definitions, on the matrix itself."""
    values = np.linalg.svdvals(matrix)
    shares = values[values > values[0] * 1e-14]
    shares = shares / shares.sum()
    measures = {
        "spectral_norm": values[0],
        "stable_rank": (matrix**2).sum() / values[0] ** 2,
        "effective_rank": np.exp(-(shares * np.log(shares)).sum()),
    }
    if len(matrix) == len(matrix.T):
        eigenvalues = np.linalg.eigvals(matrix)
        measures["eigenvalue_positivity"] = eigenvalues.real.sum() / np.abs(eigenvalues).sum()
    return measures


@given(SIZES, SIZES, SIZES, st.integers(0, 2**32 - 1), st.sampled_from(["f4", "f8"]))
@example(24, 24, 24, 0, "f4")
@example(7, 7, 24, 1, "f4")
@example(24, 3, 5, 2, "f8")
def test_every_measure_is_that_of_the_dense_matrix(d_query, d_key, rank, seed, dtype):
    random = np.random.default_rng(seed)
    query = random.standard_normal((2, d_query, rank)).astype(dtype)
    key = random.standard_normal((1, d_key, rank)).astype(dtype)
    form = BilinearForm.from_factors(query, key)
    measured, largest = spectrum(form), spectral_norm(form)
    for head in range(2):
        dense = query[head].astype(np.float64) @ key[0].astype(np.float64).T
        expected = dense_spectrum(dense)
        assert largest[head] == pytest.approx(expected["spectral_norm"], rel=1e-7)
        for name, value in expected.items():
            # Eigenvalues of a matrix far from normal are known to the root of the rounding.
            tolerance = 1e-5 if name == "eigenvalue_positivity" else 1e-6
            assert getattr(measured, name)[head] == pytest.approx(value, rel=tolerance, abs=1e-6)
    assert (measured.eigenvalue_positivity is None) == (d_query != d_key)


def test_small_singular_values_of_float32_factors_keep_their_digits() -> None:
    """σ from 1 down to 1e-5 would drown in Gram matrices of float32."""
    random = np.random.default_rng(0)
    bases = [np.linalg.qr(random.standard_normal((300, 40)))[0] for _ in range(2)]
    query = (bases[0] * np.logspace(0, -5, 40)).astype(np.float32)
    key = bases[1].astype(np.float32)
    dense = query.astype(np.float64) @ key.astype(np.float64).T
    expected = dense_spectrum(dense)["effective_rank"]
    measured = spectrum(BilinearForm.from_factors(query, key))
    assert measured.effective_rank == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(("dtype", "tolerance"), [("f4", 2e-7), ("f8", 1e-10)])
@pytest.mark.parametrize("gap", [0.0, 1e-8, 1e-4])
@pytest.mark.parametrize(("width", "rank"), [(300, 300), (1100, 300), (1201, 300), (300, 64)])
def test_the_largest_value_alone(dtype, tolerance, gap, width, rank):
    """Iteration on M, on its factors and on Gram matrices, and squaring agree; near a tie."""
    random = np.random.default_rng(0)
    left, right = (np.linalg.qr(random.standard_normal((width, rank)))[0] for _ in range(2))
    turn = np.linalg.qr(random.standard_normal((rank, rank)))[0]
    sizes = np.r_[1.0, 1.0 - gap, np.linspace(0.9 - gap, 0.0, rank - 2)]
    query, key = ((f @ turn).astype(dtype) for f in (left * sizes, right))
    query_root, key_root = (np.linalg.qr(f.astype("f8"), mode="r") for f in (query, key))
    expected = np.linalg.norm(query_root @ key_root.T, 2)
    largest = spectral_norm(BilinearForm.from_factors(query, key))
    assert largest == pytest.approx(expected, rel=tolerance)


def test_powers_of_heads_that_differ_in_everything() -> None:
    """The zero matrix, equal singular values, and one that the others hide until late."""
    sizes = np.stack([np.zeros(64), np.ones(64), np.r_[1 + 1e-5, np.ones(63)]])
    left, right = np.linalg.qr(np.random.default_rng(0).standard_normal((2, 3, 256, 64))).Q
    form = BilinearForm((1e3 * left * sizes[:, None]).astype("f4"), right.astype("f4"))
    assert form.moments.grams is not None
    assert spectral_norm(form) == pytest.approx([0, 1e3, 1e3 + 1e-2], rel=4e-7)


def test_a_spectrum_that_lanczos_does_not_resolve_falls_back_to_the_core(monkeypatch):
    form = BilinearForm.from_factors(*np.random.default_rng(0).standard_normal((2, 400, 300)))
    expected = spectral_norm(form)
    monkeypatch.setattr("wqk.forms.spectra.MOST_ITERATIONS", 8)
    assert spectral_norm(form) == pytest.approx(expected, rel=1e-12)
    assert spectral_norm(form * 0.0) == 0


def test_rank_that_is_not_there() -> None:
    """Equal columns make Gram matrices that have no Cholesky root."""
    column = np.random.default_rng(0).standard_normal((50, 1)).astype(np.float32)
    measured = spectrum(BilinearForm(np.repeat(column, 6, 1), np.repeat(column, 6, 1)))
    assert measured.stable_rank == pytest.approx(1)
    assert measured.effective_rank == pytest.approx(1, abs=1e-5)
    assert measured.eigenvalue_positivity == pytest.approx(1, abs=1e-6)


def test_zero_and_nilpotent_forms() -> None:
    zero = spectrum(BilinearForm(np.zeros((5, 2)), np.ones((5, 2))))
    assert zero.spectral_norm == 0
    assert np.isnan([zero.stable_rank, zero.effective_rank, zero.eigenvalue_positivity]).all()
    a, b = np.eye(4)[:, :1], np.eye(4)[:, 1:2]
    nilpotent = spectrum(BilinearForm(a, b))
    assert nilpotent.spectral_norm == pytest.approx(1)
    assert np.isnan(nilpotent.eigenvalue_positivity)


@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_scale_neither_over_nor_underflows(scale: float) -> None:
    query, key = np.random.default_rng(0).standard_normal((2, 40, 4)).astype(np.float32)
    plain, scaled = (
        spectrum(BilinearForm(factor, key)) for factor in (query, query * np.float32(scale))
    )
    assert scaled.spectral_norm / scale == pytest.approx(plain.spectral_norm, rel=1e-6)
    assert list(map(float, scaled[1:])) == pytest.approx(list(map(float, plain[1:])), rel=1e-5)


@pytest.mark.parametrize("shape", [(64, 64, 8), (40, 24, 16), (24, 24, 48), (600, 600, 300)])
def test_values_by_chance_are_those_of_drawn_forms(shape: tuple[int, int, int]) -> None:
    d_query, d_key, rank = shape
    random = np.random.default_rng(1)
    draws = 2000 // rank + 2
    form = BilinearForm.from_factors(
        random.standard_normal((draws, d_query, rank)), random.standard_normal((draws, d_key, rank))
    )
    drawn, null = spectrum(form), null_spectrum(d_query, d_key, rank)
    assert (drawn.spectral_norm / form.norm).mean() == pytest.approx(null.spectral_norm, rel=0.05)
    assert drawn.stable_rank.mean() == pytest.approx(null.stable_rank, rel=0.08)
    assert drawn.effective_rank.mean() == pytest.approx(null.effective_rank, rel=0.02)
    if drawn.eigenvalue_positivity is None:
        assert null.eigenvalue_positivity_spread is None
    elif draws > 20:
        spread = np.sqrt((drawn.eigenvalue_positivity**2).mean())
        assert spread == pytest.approx(null.eigenvalue_positivity_spread, rel=0.3)
