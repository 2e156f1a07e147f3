"""A form behaves like its matrix: in every shape, computation, choice and refusal."""

from __future__ import annotations

import copy
import pickle
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.forms.laws import EVERY_SHAPE, SHAPES, assert_close, compared, form_of

import wqk
from wqk import BilinearForm
from wqk.errors import FormError
from wqk.forms.form import FORM_SYNONYMS


@EVERY_SHAPE
def test_what_a_form_computes_is_what_its_matrix_gives(shapes):
    form, matrix = form_of(shapes)
    assert form.shape == matrix.shape
    assert (form.ndim, form.rank) == (matrix.ndim, shapes[0][-1])
    assert form.is_square == (matrix.shape[-1] == matrix.shape[-2])
    for name, actual, expected in compared(shapes):
        assert_close(actual, expected, name=name)
    assert form.difference(form * 2.0).rank == 2 * form.rank
    assert form.sum().stack == ()


STACKS = st.sampled_from([((), ()), ((3,), (3,)), ((3,), ()), ((), (2,)), ((2, 1), (3,))])


@given(st.tuples(*[st.integers(1, 6)] * 5), STACKS, st.integers(0, 2**32 - 1))
def test_products_are_those_of_matrices_at_the_smallest_rank(sizes, stacks, seed):
    d_query, inner, d_key, rank, other_rank = sizes
    stack, other_stack = stacks
    factor_shapes = [(*stack, d_query, rank), (*stack, inner, rank)]
    other_factor_shapes = [(*other_stack, inner, other_rank), (*other_stack, d_key, other_rank)]
    form, matrix = form_of(factor_shapes, seed)
    other_form, other_matrix = form_of(other_factor_shapes, seed + 1)
    rank_by_product = [
        (form @ other_form, min(rank, inner, other_rank)),
        (form @ other_matrix, min(rank, inner)),
        (matrix @ other_form, min(inner, other_rank)),
    ]
    for product, smallest_rank in rank_by_product:
        assert_close(product, matrix @ other_matrix)
        assert product.rank == smallest_rank


def test_forms_of_several_stacks_add_by_broadcasting():
    heads, head_matrices = form_of(SHAPES["stack"])
    form, matrix = form_of(SHAPES["single"])
    assert_close(heads + form, head_matrices + matrix)
    assert_close(form - heads, matrix - head_matrices)


@pytest.mark.parametrize(("shapes", "rank"), [("grouped heads", 2 * 2), ("one key head", 2)])
def test_the_sum_of_grouped_heads_keeps_the_rank_of_the_keys(shapes, rank):
    assert form_of(SHAPES[shapes])[0].sum().rank == rank


def test_each_form_of_a_stack_has_its_own_number():
    heads, _ = form_of(SHAPES["stack"])
    np.testing.assert_allclose((heads / heads.norm).norm, 1.0)
    np.testing.assert_allclose((heads * [1, 2, 3, 4]).norm, heads.norm * [1, 2, 3, 4])
    assert_close(np.float64(2) * heads[0] * np.full(1, 2.0), 4 * heads.numpy()[0])


def test_scores_of_a_batch_for_one_form():
    form, matrix = form_of(SHAPES["not square"])
    x, y = np.ones((2, 4, 7)), np.arange(2 * 6 * 5.0).reshape(2, 6, 5)
    np.testing.assert_allclose(form(x, y), x @ matrix @ y.swapaxes(-1, -2))


# What is chosen


WHOLE = slice(None)
INDICES = {
    "not square": [
        0,
        -1,
        slice(1, 3),
        ...,
        (WHOLE, 2),
        (WHOLE, slice(None, None, 2)),
        (1, -1),
        (..., 0),
        (slice(1), ...),
        ([0, 2],),
        np.arange(7) % 2 == 0,
        (WHOLE, np.array([4, 0])),
        (np.int64(2), slice(2, 4)),
    ],
    "stack": [2, -1, slice(1, 3), ()],
    "query without stack": [(0, 2)],
    "grouped heads": [
        0,
        (1, 2),
        (WHOLE, 0),
        (0, 1, 2),
        (WHOLE, 1),
        (..., slice(2), 1),
        (0, 0, -1, -1),
        (1, 2, slice(3), slice(1, 2)),
        (1, 2, 0),
        (WHOLE, WHOLE, 1),
        (..., [0, 3]),
        np.array([[True, False, True], [False, True, False]]),
    ],
}


@pytest.mark.parametrize(
    ("shapes", "index"),
    [(SHAPES[name], index) for name in INDICES for index in INDICES[name]],
    ids=str,
)
def test_an_index_chooses_what_it_does_of_the_matrix(shapes, index):
    form, matrix = form_of(shapes)
    assert_close(form[index], matrix[index])


def test_rows_and_columns_by_lists_cross():
    form, matrix = form_of(SHAPES["not square"])
    assert_close(form[[0, 3], [1, 2, 4]], matrix[np.ix_([0, 3], [1, 2, 4])])


def test_iteration_ends():
    for name in ("stack", "not square"):
        form, matrix = form_of(SHAPES[name])
        assert len(form) == len(matrix) == len([*form])
        np.testing.assert_allclose([np.asarray(row) for row in form], matrix)
    with pytest.raises(IndexError):
        form[7]


# What is refused


SQUARE, WIDE, HEADS = (form_of(SHAPES[n])[0] for n in ("single", "not square", "stack"))
ONES = np.ones((4, 1))
REFUSED = [
    (lambda: WIDE.diagonal, "a diagonal needs a square form, got 7 × 5"),
    (lambda: WIDE.trace, "a diagonal needs a square form, got 7 × 5"),
    (lambda: WIDE.symmetric_part, "a symmetric part needs a square form, got 7 × 5"),
    (lambda: WIDE.skew_part, "a skew part needs a square form, got 7 × 5"),
    (lambda: WIDE.eigenvalues(), "an eigenvalue needs a square form, got 7 × 5"),
    (lambda: HEADS[0, 1, 2, 3], "of shape (4, 5, 5) takes no index (0, 1, 2, 3)"),
    (lambda: SQUARE[None], "takes no index"),
    (lambda: SQUARE[..., 0, ...], "takes no index"),
    (lambda: SQUARE[:0], "must not be empty"),
    (lambda: SQUARE + WIDE, "the same shape, got (5, 5) and (7, 5)"),
    (lambda: SQUARE - WIDE, "the same shape, got (5, 5) and (7, 5)"),
    (lambda: SQUARE + np.eye(5), "BilinearForm.from_matrix"),
    (lambda: 1.0 + SQUARE, "BilinearForm.from_matrix"),
    (lambda: SQUARE - 1, "BilinearForm.from_matrix"),
    (lambda: SQUARE * SQUARE, "matrix product is form @ other"),
    (lambda: SQUARE / SQUARE, "matrix product is form @ other"),
    # Not one number for each column of the factors.
    (lambda: HEADS * np.ones(2), "of the stack's shape, (4,); got shape (2,)"),
    (lambda: WIDE @ np.ones(7), "a 7 × 5 form needs 5 entries along the shared axis"),
    (lambda: np.ones(5) @ WIDE, "a 7 × 5 form needs 7 entries along the shared axis"),
    (lambda: WIDE @ np.ones((7, 5)), "needs 5 entries along the shared axis"),
    (lambda: np.ones((7, 5)) @ WIDE, "needs 7 entries along the shared axis"),
    (lambda: WIDE @ WIDE, "needs 5 entries along the shared axis"),
    (lambda: WIDE @ 2.0, "a 7 × 5 form needs"),
    (lambda: BilinearForm(np.ones((4, 2)), np.ones((4, 3))), "same rank, got (4, 2) and (4, 3)"),
    (lambda: BilinearForm(np.ones(4), ONES), "got (4,) and (4, 1)"),
    (lambda: BilinearForm([ONES] * 2, [ONES] * 3), "broadcast, got (2,) and (3,)"),
    (lambda: BilinearForm(np.ones((4, 0)), np.ones((4, 0))), "empty"),
    (lambda: BilinearForm(np.ones((0, 4)), np.ones((3, 4))), "empty"),
    (lambda: BilinearForm(np.ones((0, 4, 1)), np.ones((1, 4, 1))), "empty"),
    (lambda: BilinearForm(np.ones((4, 1), int), ONES), "got int64"),
    (lambda: BilinearForm(ONES, np.ones((4, 1), complex)), "got complex128"),
    (lambda: BilinearForm(np.ones((4, 1), bool), np.ones((4, 1), bool)), "got bool"),
    (lambda: BilinearForm([[1.0], [2.0, 3.0]], [[1.0]]), "nested lists of one shape"),
    (lambda: BilinearForm(SQUARE, np.ones((5, 2))), "got a form"),
    (lambda: BilinearForm(np.ones((16, 64)), np.ones((16, 64))), "from_linear(q_proj, k_proj)"),
    (lambda: BilinearForm(np.ones((64, 64)), np.ones((16, 64))), "rank, 64, of a 64 × 16 form"),
    (lambda: BilinearForm.from_linear(np.ones(3), np.ones(3)), "shape (3,)"),
    (lambda: wqk.directionality(SQUARE, 3), "gamma=3"),
    (lambda: wqk.symmetry(np.ones((3, 2))), "symmetry needs a square form, got 3 × 2"),
    (lambda: wqk.symmetry([1.0, 2.0]), "a matrix must be"),
    (lambda: wqk.symmetry_null(WIDE), "symmetry_null needs a square form, got 7 × 5"),
    (lambda: wqk.coupling(HEADS @ np.ones((5, 4))), "coupling needs a square form, got 5 × 4"),
    (lambda: wqk.head_terms(SQUARE), "or as (G, H/G)"),
    (lambda: wqk.head_terms(BilinearForm(*np.ones((2, 2, 3, 4, 1)))), "as (G, H/G)"),
    (lambda: wqk.directionality(SQUARE, gamma=np.nan), "gamma must be a finite number from 0 up"),
    (lambda: wqk.directionality(SQUARE, gamma=np.inf), "gamma must be a finite number from 0 up"),
    (lambda: wqk.directionality(SQUARE, gamma=-1.0), "gamma must be a finite number from 0 up"),
    (lambda: wqk.directionality(SQUARE, weight="square"), "'norm' or 'excess'"),
]


@pytest.mark.usefixtures("unchecked_arguments")
@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_makes_no_sense_is_refused_with_the_rule(call, message):
    with pytest.raises(FormError, match=re.escape(message)):
        call()


# Factors


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
    double, _ = form_of(SHAPES["single"])
    assert (form[[0] * 5, [0] * 5] @ double).query.dtype == np.float64
    assert (double @ form[[0] * 5, [0] * 5]).query.dtype == np.float64


def test_factors_of_one_type_are_neither_copied_nor_changed():
    query, key = np.random.default_rng(0).standard_normal((2, 20, 3)) * 1e-200
    before = query.copy(), key.copy()
    form = BilinearForm(query, key)
    assert form.query is query
    assert form.key is key
    assert float(form.norm) == 0 or form.row_norms.shape == (20,)
    np.testing.assert_array_equal((query, key), before)


def test_factors_may_be_lists_and_of_any_shape_where_they_are_known():
    assert_close(BilinearForm([[1], [2]], [[3], [4]]), [[3, 4], [6, 8]])
    assert BilinearForm.from_factors(np.ones((16, 64)), np.ones((16, 64))).rank == 64


# The form itself


@pytest.mark.parametrize(
    ("shapes", "text"),
    [
        ("not square", "BilinearForm(7 × 5, rank 2)"),
        ("grouped heads", "BilinearForm(2 × 3 forms of 5 × 5, rank 2)"),
    ],
)
def test_repr(shapes, text):
    assert repr(form_of(SHAPES[shapes])[0]) == text


@pytest.mark.parametrize("shapes", [s for s in SHAPES.values() if s[0][-2] == s[1][-2]], ids=str)
def test_a_form_that_was_measured_is_copied_and_pickled(shapes):
    factored, matrix = form_of(shapes)
    for form in (factored, BilinearForm.from_matrix(matrix)):
        measured = form.symmetry, form.norm, form.row_norms, form.svd().S
        for duplicate in (pickle.loads(pickle.dumps(form)), copy.deepcopy(form)):
            measured_again = (
                duplicate.symmetry,
                duplicate.norm,
                duplicate.row_norms,
                duplicate.svd().S,
            )
            assert all(map(np.array_equal, measured, measured_again))


def test_a_form_becomes_an_array():
    form, _ = form_of(SHAPES["stack"])
    np.testing.assert_array_equal(np.asarray(form), form.dense())
    assert np.asarray(form, np.float32).dtype == np.float32
    with pytest.raises(ValueError, match="needs a copy"):
        np.asarray(form, copy=False)


def test_scores_on_the_form_are_the_functions():
    form, _ = form_of(((2, 16, 3), (2, 16, 3)))
    for name in ("symmetry", "symmetry_null", "directionality"):
        score, function = getattr(form, name), getattr(wqk, name)
        np.testing.assert_array_equal(score, function(form))
        np.testing.assert_array_equal(score, function(form.query, form.key), err_msg=name)
    excess = wqk.directionality(form, weight="excess")
    np.testing.assert_array_equal(form.directionality_excess, excess)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("symetry", "symmetry"),
        ("spectrum", "singular_values()"),
        ("eigenvals", "eigenvalues"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(name, meant):
    message = re.escape(f"no attribute '{name}'; did you mean '{meant}")
    with pytest.raises(AttributeError, match=message):
        getattr(SQUARE, name)


def test_every_synonym_leads_to_something():
    attributes = dir(SQUARE)
    for name, meant in FORM_SYNONYMS.items():
        assert name not in attributes
        if not meant.startswith("(a @ b.T)"):
            assert meant.partition("(")[0].partition(".")[0].strip() in [*attributes, "form", "wqk"]


def test_the_cosine_of_two_forms_is_what_advice_says():
    random = np.random.default_rng(0)
    a, b = (wqk.BilinearForm(*random.standard_normal((2, 6, 3))) for _ in range(2))
    with pytest.raises(AttributeError) as caught:
        a.cosine(b)
    (formula,) = re.findall(r"'(\(a .*)'", str(caught.value))
    products = np.sum(np.asarray(a) * np.asarray(b))
    expected = products / np.linalg.norm(a.numpy()) / np.linalg.norm(b.numpy())
    assert eval(formula) == pytest.approx(expected)
