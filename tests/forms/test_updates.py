"""The two terms of an update against dense matrices in float64."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk import BilinearForm
from wqk.errors import FormError
from wqk.forms.chaining import change, update_terms
from wqk.forms.spectra import spectrum


@given(
    st.integers(1, 20),
    st.integers(1, 20),
    st.integers(1, 8),
    st.sampled_from([1.0, 1e-3, 1e-6]),
    st.integers(0, 2**32 - 1),
)
def test_terms_add_up_to_the_change_and_have_its_spectra(d_query, d_key, rank, step, seed):
    random = np.random.default_rng(seed)
    a, b = random.standard_normal((d_query, rank)), random.standard_normal((d_key, rank))
    da, db = (step * random.standard_normal(factor.shape) for factor in (a, b))
    before, after = BilinearForm.from_factors(a, b), BilinearForm.from_factors(a + da, b + db)
    terms = update_terms(before, after)
    first, second = da @ b.T + a @ db.T, da @ db.T
    size = np.linalg.norm(first) + np.linalg.norm(second)
    # The steps themselves have the rounding of the factors whose differences they are.
    tolerance = 1e-14 * (np.linalg.norm(a) * np.linalg.norm(b)) + 1e-9 * size
    np.testing.assert_allclose(terms.first.dense(), first, atol=tolerance)
    np.testing.assert_allclose(terms.second.dense(), second, atol=tolerance)
    change = (terms.first + terms.second).dense()
    np.testing.assert_allclose(change, after.dense() - before.dense(), atol=tolerance)
    assert spectrum(terms.first).spectral_norm == pytest.approx(
        np.linalg.norm(first, 2), rel=1e-6, abs=tolerance
    )


def test_where_nothing_or_only_some_heads_moved_float32_is_enough() -> None:
    a, b = np.random.default_rng(0).standard_normal((2, 3, 20, 4)).astype(np.float32)
    before = BilinearForm.from_factors(a, b)
    moved = np.array([0, 1e-5, 0], np.float32)[:, None, None]
    for step in (0 * moved, moved):
        update = change(before, BilinearForm.from_factors(a, b + step * b))
        assert update.moments.query.dtype == np.float32
        expected = np.linalg.norm(a @ (step * b).swapaxes(1, 2), axis=(1, 2))
        np.testing.assert_allclose(update.norm, expected, rtol=1e-2)  # of steps of a few digits


def test_only_factors_of_one_shape_step_into_each_other() -> None:
    with pytest.raises(FormError, match="factors of the same shape"):
        update_terms(BilinearForm(np.eye(3), np.eye(3)), BilinearForm(np.eye(3, 2), np.eye(3, 2)))


def test_a_factor_without_a_stack_serves_all_forms() -> None:
    matrices = np.random.default_rng(0).standard_normal((2, 6, 9))
    before = BilinearForm.from_matrix(matrices)
    terms = update_terms(before, BilinearForm.from_matrix(1.5 * matrices))
    np.testing.assert_allclose(terms.first.dense(), 0.5 * matrices, atol=1e-14)
    np.testing.assert_array_equal(terms.second.dense(), 0)
