"""Singular values, eigenvalues, products and plain matrices against dense linear algebra."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wqk
from wqk import BilinearForm
from wqk.errors import FormError, NonFiniteWeights

SHAPES = {
    "single": ((7, 2), (5, 2)),
    "square": ((6, 2), (6, 2)),
    "full rank": ((6, 6), (6, 6)),
    "rank above the width": ((3, 4, 9), (3, 4, 9)),
    "unequal widths, rank above both": ((7, 12), (5, 12)),
    "grouped heads": ((2, 3, 6, 2), (2, 1, 6, 2)),
    "query without stack": ((6, 2), (2, 3, 6, 2)),
}
EVERY_SHAPE = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
LIBRARIES = pytest.mark.parametrize(
    "make", [np.asarray, torch.from_numpy, array_api_strict.asarray], ids=["np", "torch", "strict"]
)


def factors(shapes, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(shape) for shape in shapes]


def by_magnitude(values):
    """Complex numbers in an order that rounding does not change."""
    return np.sort_complex(np.round(values, 9))


@EVERY_SHAPE
@LIBRARIES
def test_singular_values_are_those_of_the_matrix(shapes, make):
    query, key = factors(shapes)
    form = BilinearForm.from_factors(make(query), make(key))
    matrix = query @ np.swapaxes(key, -1, -2)
    left, values, right = map(np.asarray, form.svd())
    size = values.shape[-1]
    assert size == min(form.rank, *form.widths)
    np.testing.assert_allclose(
        values, np.linalg.svd(matrix, compute_uv=False)[..., :size], atol=1e-12
    )
    np.testing.assert_allclose(left * values[..., None, :] @ right, matrix, atol=1e-12)
    np.testing.assert_allclose(np.asarray(form.singular_values()), values, atol=1e-12)


@EVERY_SHAPE
@LIBRARIES
def test_eigenvalues_are_those_of_the_matrix(shapes, make):
    query, key = factors(shapes, seed=1)
    form = BilinearForm.from_factors(make(query), make(key))
    if not form.is_square:
        with pytest.raises(FormError, match="an eigenvalue needs a square form, got 7 × 5"):
            form.eigenvalues()
        return
    values = np.asarray(form.eigenvalues())
    assert np.iscomplexobj(values)
    assert np.all(np.diff(np.abs(values)) <= 1e-12)
    dense = np.linalg.eigvals(query @ np.swapaxes(key, -1, -2))
    largest = np.take_along_axis(dense, np.argsort(-np.abs(dense)), -1)[..., : values.shape[-1]]
    np.testing.assert_allclose(by_magnitude(values), by_magnitude(largest), atol=1e-7)


@given(seed=st.integers(0, 2**32 - 1), d=st.integers(1, 9), rank=st.integers(1, 12))
def test_the_scores_follow_from_the_decompositions(seed, d, rank):
    query, key = factors(((d, rank), (d, rank)), seed)
    form = BilinearForm.from_factors(query, key)
    squares = float(np.sum(form.singular_values() ** 2))
    np.testing.assert_allclose(float(form.norm) ** 2, squares, rtol=1e-9)
    trace = np.sum(form.eigenvalues() ** 2)
    np.testing.assert_allclose(float(wqk.symmetry(form)) * squares, trace.real, atol=1e-9 * squares)


def test_decompositions_pass_gradients_on():
    query, key = map(torch.from_numpy, factors(((6, 2), (6, 2))))
    query.requires_grad_(True)
    assert torch.autograd.gradcheck(lambda q: BilinearForm(q, key).singular_values(), query)


@EVERY_SHAPE
@pytest.mark.parametrize("make", [np.asarray, torch.from_numpy], ids=["np", "torch"])
def test_products_are_those_of_the_matrix(shapes, make):
    query, key = factors(shapes)
    form = BilinearForm.from_factors(make(query), make(key))
    matrix = query @ np.swapaxes(key, -1, -2)
    rng = np.random.default_rng(2)
    x, rows = rng.standard_normal(form.widths[0]), rng.standard_normal((4, form.widths[0]))
    y, columns = rng.standard_normal(form.widths[1]), rng.standard_normal((form.widths[1], 4))
    for product, expected in (
        (form @ make(y), matrix @ y),
        (form @ make(columns), matrix @ columns),
        (make(x) @ form, x @ matrix),
        (make(rows) @ form, rows @ matrix),
    ):
        np.testing.assert_allclose(np.asarray(product), expected, atol=1e-12)


def test_products_and_factors_come_from_either_side():
    form = BilinearForm(*factors(((3, 2), (4, 2))))
    np.testing.assert_allclose([1.0, 2.0, 3.0] @ form, np.array([1.0, 2.0, 3.0]) @ form)
    assert isinstance(np.float64(2.0) * form, BilinearForm)
    for wrong in (lambda: form @ np.ones(3), lambda: np.ones(4) @ form, lambda: form @ 2.0):
        with pytest.raises(FormError, match="a 3 × 4 form needs"):
            wrong()


@EVERY_SHAPE
def test_a_form_becomes_an_array(shapes):
    query, key = factors(shapes)
    form = BilinearForm.from_factors(query, key)
    np.testing.assert_array_equal(np.asarray(form), form.dense())
    assert np.asarray(form, np.float32).dtype == np.float32
    trained = BilinearForm.from_factors(
        torch.from_numpy(query).requires_grad_(True), torch.from_numpy(key)
    )
    np.testing.assert_allclose(np.asarray(trained), form.dense())
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(form, copy=False)


@LIBRARIES
@pytest.mark.parametrize("shape", [(6, 6), (3, 5, 5), (1, 1)])
def test_scores_take_a_plain_matrix(make, shape):
    (matrix,) = factors([shape])
    form = BilinearForm(matrix, np.eye(shape[-1]))
    for score in (wqk.symmetry, wqk.symmetry_null, lambda m: wqk.directionality(m, gamma=1.0)):
        np.testing.assert_allclose(np.asarray(score(make(matrix))), score(form), atol=1e-12)


def test_scores_take_lists_whole_numbers_and_rectangles():
    assert float(wqk.symmetry([[0, 2], [2, 0]])) == 1.0
    assert float(wqk.directionality(np.ones((3, 2), int))) == 0.0
    assert float(wqk.symmetry(np.full((2, 2), 1e200))) == 1.0
    with pytest.raises(FormError, match="symmetry needs a square form, got 3 × 2"):
        wqk.symmetry(np.ones((3, 2)))
    with pytest.raises(FormError, match="a matrix must be"):
        wqk.symmetry([1.0, 2.0])
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
