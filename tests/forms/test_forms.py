"""The algebra of forms against the matrices they stand for."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest

from wqk import BilinearForm
from wqk.errors import FormError

# Shapes (query, key) of stacks that broadcast: alone, alike, shared keys, shared queries.
SHAPES = {
    "single": ((5, 2), (5, 2)),
    "not square": ((5, 2), (3, 2)),
    "stack": ((4, 5, 2), (4, 5, 2)),
    "grouped heads": ((2, 3, 5, 2), (2, 1, 5, 2)),
    "one key head": ((1, 4, 5, 2), (1, 1, 5, 2)),
    "shared query": ((1, 5, 2), (4, 3, 2)),
    "key without stack": ((4, 5, 2), (3, 2)),
    "query without stack": ((5, 2), (2, 3, 5, 2)),
    "rank above the width": ((3, 4, 9), (3, 4, 9)),
}
EVERY_SHAPE = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)
SQUARE = pytest.mark.parametrize(
    "shapes", [s for s in SHAPES.values() if s[0][-2] == s[1][-2]], ids=str
)


def form_of(
    shapes: tuple[tuple[int, ...], tuple[int, ...]], seed: int = 0
) -> tuple[BilinearForm, np.ndarray]:
    """A random form and M, or the stack of them, written out."""
    rng = np.random.default_rng(seed)
    query, key = (rng.standard_normal(shape) for shape in shapes)
    return BilinearForm.from_factors(query, key), np.einsum("...dr,...er->...de", query, key)


def assert_is(form: BilinearForm, matrix: np.ndarray) -> None:
    np.testing.assert_allclose(form.dense(), matrix, rtol=1e-12, atol=1e-12)


@EVERY_SHAPE
def test_shape_stack_and_rank(shapes):
    form, matrix = form_of(shapes)
    assert form.shape == matrix.shape
    assert form.rank == shapes[0][-1]
    assert form.is_square == (matrix.shape[-1] == matrix.shape[-2])
    assert_is(form, matrix)


@EVERY_SHAPE
def test_norms_are_those_of_the_matrix(shapes):
    form, matrix = form_of(shapes)
    np.testing.assert_allclose(form.norm, np.linalg.norm(matrix, axis=(-2, -1)))
    np.testing.assert_allclose(form.row_norms, np.linalg.norm(matrix, axis=-1))
    np.testing.assert_allclose(form.column_norms, np.linalg.norm(matrix, axis=-2))


@EVERY_SHAPE
def test_arithmetic_is_that_of_matrices(shapes):
    (one, m), (other, n) = form_of(shapes), form_of(shapes, seed=1)
    assert_is(one.T, m.swapaxes(-1, -2))
    assert_is(-one, -m)
    assert_is(one * 3.0, 3 * m)
    assert_is(0.5 * one, m / 2)
    assert_is(one + other, m + n)
    assert_is(one - other, m - n)
    assert_is(one.difference(other), m - n)
    assert one.difference(other).rank == 2 * one.rank


def test_forms_of_several_stacks_add_by_broadcasting():
    (one, m), (other, n) = form_of(SHAPES["stack"]), form_of(SHAPES["single"])
    assert_is(one + other, m + n)
    assert_is(other - one, n - m)


@EVERY_SHAPE
def test_the_sum_of_heads_is_the_sum_of_matrices(shapes):
    form, matrix = form_of(shapes)
    total = form.sum()
    assert total.stack == ()
    assert_is(total, matrix.reshape(-1, *form.widths).sum(0))


@pytest.mark.parametrize(
    ("shapes", "rank"), [(SHAPES["grouped heads"], 2 * 2), (SHAPES["one key head"], 2)]
)
def test_the_sum_of_grouped_heads_keeps_the_rank_of_the_keys(shapes, rank):
    assert form_of(shapes)[0].sum().rank == rank


@SQUARE
def test_parts_diagonal_and_trace(shapes):
    form, matrix = form_of(shapes)
    transpose = matrix.swapaxes(-1, -2)
    assert_is(form.symmetric_part, (matrix + transpose) / 2)
    assert_is(form.skew_part, (matrix - transpose) / 2)
    assert_is(form.symmetric_part + form.skew_part, matrix)
    np.testing.assert_allclose(form.diagonal, np.diagonal(matrix, axis1=-2, axis2=-1))
    np.testing.assert_allclose(form.trace, np.trace(matrix, axis1=-2, axis2=-1))


@pytest.mark.parametrize("what", ["diagonal", "trace", "symmetric_part", "skew_part"])
def test_parts_need_a_square_form(what):
    with pytest.raises(FormError, match=r"a .* needs a square form, got 5 × 3"):
        getattr(form_of(SHAPES["not square"])[0], what)


@pytest.mark.parametrize(
    ("shapes", "index"),
    [
        (SHAPES["stack"], 2),
        (SHAPES["stack"], -1),
        (SHAPES["stack"], slice(1, 3)),
        (SHAPES["stack"], ()),
        (SHAPES["grouped heads"], 1),
        (SHAPES["grouped heads"], (1, 2)),
        (SHAPES["grouped heads"], (slice(None), 0)),
        (SHAPES["query without stack"], (0, 2)),
    ],
)
def test_items_of_a_stack(shapes, index):
    form, matrix = form_of(shapes)
    assert_is(form[index], matrix[index])


def test_an_index_deeper_than_the_matrix_is_refused():
    with pytest.raises(FormError, match=r"of shape \(4, 5, 5\) takes no index \(0, 1, 2, 3\)"):
        form_of(SHAPES["stack"])[0][0, 1, 2, 3]


@EVERY_SHAPE
@pytest.mark.parametrize("count", [(), (3,)])
def test_scores_are_x_m_y(shapes, count):
    form, matrix = form_of(shapes)
    rng = np.random.default_rng(2)
    x, y = (rng.standard_normal((*count, width)) for width in form.widths)
    expected = np.einsum("...nd,...de,...me->...nm", np.atleast_2d(x), matrix, np.atleast_2d(y))
    scores = form(x, y)
    np.testing.assert_allclose(scores, expected if count else expected[..., 0, 0], atol=1e-12)
    np.testing.assert_allclose(form(x.tolist(), y.tolist()), scores)


def test_scores_of_a_batch_for_one_form():
    form, matrix = form_of(SHAPES["not square"])
    x, y = np.ones((2, 4, 5)), np.arange(2 * 6 * 3.0).reshape(2, 6, 3)
    np.testing.assert_allclose(form(x, y), x @ matrix @ y.swapaxes(-1, -2))


BAD_FACTORS = {
    "ranks differ": (np.ones((4, 2)), np.ones((4, 3)), r"the same rank, got \(4, 2\) and \(4, 3\)"),
    "a vector": (np.ones(4), np.ones((4, 1)), r"got \(4,\) and \(4, 1\)"),
    "stacks differ": (np.ones((2, 4, 1)), np.ones((3, 4, 1)), r"broadcast, got \(2,\) and \(3,\)"),
    "rank 0": (np.ones((4, 0)), np.ones((4, 0)), "empty"),
    "width 0": (np.ones((0, 4)), np.ones((3, 4)), "empty"),
    "no head": (np.ones((0, 4, 1)), np.ones((1, 4, 1)), "empty"),
    "integers": (np.ones((4, 1), int), np.ones((4, 1)), "real numbers.*got int64"),
    "complex": (np.ones((4, 1)), np.ones((4, 1), complex), "real numbers.*got complex128"),
    "booleans": (np.ones((4, 1), bool), np.ones((4, 1), bool), "real numbers.*got bool"),
}


@pytest.mark.usefixtures("unchecked_arguments")
@pytest.mark.parametrize(("query", "key", "message"), BAD_FACTORS.values(), ids=BAD_FACTORS)
def test_factors_that_make_no_form_are_refused(query, key, message):
    with pytest.raises(FormError, match=message):
        BilinearForm(query, key)


def test_forms_of_two_shapes_do_not_add():
    one, other = form_of(SHAPES["single"])[0], form_of(SHAPES["not square"])[0]
    with pytest.raises(FormError, match=r"the same shape, got \(5, 5\) and \(5, 3\)"):
        one + other


@pytest.mark.parametrize(
    ("query", "key", "expected"),
    [
        (np.float16, np.float16, np.float32),
        (np.float16, np.float32, np.float32),
        (np.float32, np.float32, np.float32),
        (np.float32, np.float64, np.float64),
    ],
)
def test_factors_meet_in_one_type_of_at_least_float32(query, key, expected):
    form = BilinearForm(np.ones((4, 1), query), np.ones((4, 1), key))
    assert form.query.dtype == form.key.dtype == form.dense().dtype == expected


def test_factors_of_one_type_are_not_copied():
    query, key = np.ones((2, 4, 1), np.float32)
    form = BilinearForm(query, key)
    assert form.query is query
    assert form.key is key


def test_half_precision_is_widened_before_heads_are_added():
    # 1 + 2⁻¹¹ does not exist in float16.
    query = np.array([[[1.0]], [[2.0**-11]]], np.float16)
    total = BilinearForm(query, np.ones((1, 1, 1), np.float16)).sum()
    assert float(total.dense()[0, 0]) == 1 + 2.0**-11


def test_a_form_does_not_change_its_factors():
    query, key = np.random.default_rng(0).standard_normal((2, 20, 3)) * 1e-200
    before = query.copy(), key.copy()
    form = BilinearForm(query, key)
    assert float(form.norm) == 0 or form.row_norms.shape == (20,)
    np.testing.assert_array_equal((query, key), before)


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        (SHAPES["not square"], "BilinearForm(5 × 3, rank 2)"),
        (SHAPES["grouped heads"], "BilinearForm(2 × 3 forms of 5 × 5, rank 2)"),
    ],
)
def test_repr(shapes, text):
    assert repr(form_of(shapes)[0]) == text


@pytest.mark.parametrize(
    "of", [lambda form, _: form, lambda _, matrix: BilinearForm.from_matrix(matrix)]
)
@SQUARE
def test_a_form_that_was_measured_is_copied_and_pickled(shapes, of):
    form = of(*form_of(shapes))
    measured = form.symmetry, form.norm, form.row_norms, form.svd().S
    for other in (pickle.loads(pickle.dumps(form)), copy.deepcopy(form)):
        again = other.symmetry, other.norm, other.row_norms, other.svd().S
        assert all(map(np.array_equal, measured, again))
