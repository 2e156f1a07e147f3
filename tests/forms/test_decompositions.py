"""Singular values, eigenvalues and plain matrices against dense linear algebra."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest
import torch
from tests.forms.laws import EVERY_SHAPE, SHAPES, assert_close, form_of

import wqk
from wqk import BilinearForm
from wqk.errors import NonFiniteWeights

LIBRARIES = pytest.mark.parametrize(
    "make", [np.asarray, torch.from_numpy, array_api_strict.asarray], ids=["np", "torch", "strict"]
)


def by_magnitude(values):
    """Complex numbers in an order that rounding does not change."""
    return np.sort_complex(np.round(values, 9))


@EVERY_SHAPE
@LIBRARIES
def test_singular_values_and_eigenvalues_are_those_of_the_matrix(shapes, make):
    form, matrix = form_of(shapes, make=make)
    left, values, right = map(np.asarray, form.svd())
    size = min(form.rank, *form.widths)
    assert_close(values, np.linalg.svd(matrix, compute_uv=False)[..., :size])
    assert_close(left * values[..., None, :] @ right, matrix)
    assert_close(form.singular_values(), values)
    if form.is_square:
        values = np.asarray(form.eigenvalues())
        assert np.iscomplexobj(values)
        assert np.all(np.diff(np.abs(values)) <= 1e-12)
        dense = np.linalg.eigvals(matrix)
        largest = np.take_along_axis(dense, np.argsort(-np.abs(dense)), -1)[..., :size]
        np.testing.assert_allclose(by_magnitude(values), by_magnitude(largest), atol=1e-7)


def test_singular_vectors_are_computed_once(monkeypatch):
    form, matrix = form_of(SHAPES["not square"])
    calls = []
    compute = wqk.forms.kernels.svd
    monkeypatch.setattr(wqk.forms.kernels, "svd", lambda *a: calls.append(a) or compute(*a))
    assert_close(form.U * form.S @ form.V.T, matrix)
    assert_close(form.U.T @ form.U, np.eye(2))
    assert_close(form.V.T @ form.V, np.eye(2))
    assert len(calls) == 1


@LIBRARIES
@pytest.mark.parametrize("shape", [(6, 6), (3, 5, 5), (1, 1)])
def test_scores_take_a_plain_matrix(make, shape):
    matrix = np.random.default_rng(0).standard_normal(shape)
    form = BilinearForm(matrix, np.eye(shape[-1]))
    for score in (wqk.symmetry, wqk.symmetry_null, lambda m: wqk.directionality(m, gamma=1.0)):
        assert_close(score(make(matrix)), score(form))


def test_scores_take_lists_whole_numbers_and_rectangles():
    assert float(wqk.symmetry([[0, 2], [2, 0]])) == 1.0
    assert float(wqk.directionality(np.ones((3, 2), int))) == 0.0
    assert float(wqk.symmetry(np.full((2, 2), 1e200))) == 1.0
    with pytest.raises(NonFiniteWeights):
        wqk.symmetry([[1.0, np.nan], [0.0, 1.0]])


@pytest.mark.parametrize("rank", [1, 8])
@pytest.mark.parametrize("scale", [1e-38, 4e37, 1e-25])
def test_norms_that_float32_cannot_hold(scale, rank):
    entries = np.random.default_rng(0).uniform(0.5, 1, (2, 8, rank))
    entries = (entries * scale).astype(np.float32)
    form, exact = BilinearForm(*entries), BilinearForm(*entries.astype(np.float64))
    for norm in ("norm", "row_norms", "column_norms"):
        np.testing.assert_allclose(getattr(form, norm), getattr(exact, norm), rtol=1e-5)
    np.testing.assert_allclose(form.svd().S[0], exact.svd().S[0], rtol=1e-5)
    np.testing.assert_allclose(form.eigenvalues()[0], exact.eigenvalues()[0], rtol=1e-5)


def test_the_sum_of_heads_that_float32_cannot_hold():
    query, key = np.full((1, 4, 8, 2), 1e38, np.float32), np.full((1, 1, 8, 2), 1.0, np.float32)
    layer = BilinearForm(query, key).sum()
    np.testing.assert_allclose(layer.norm, 4e38 * 16, rtol=1e-6)
    assert float(wqk.symmetry(layer)) == pytest.approx(1.0)
