"""A form as an operand: products, quotients, slices, conversions, and factors of every kind."""

from __future__ import annotations

import array_api_strict
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import wqk
from wqk import BilinearForm
from wqk.errors import FormError

LIBRARIES = pytest.mark.parametrize(
    "make", [np.asarray, torch.from_numpy, array_api_strict.asarray], ids=["np", "torch", "strict"]
)
SHAPES = st.tuples(*[st.integers(1, 6)] * 5)
STACKS = st.sampled_from([((), ()), ((3,), (3,)), ((3,), ()), ((), (2,)), ((2, 1), (3,))])


def random_form(shape, rank, stack=(), seed=0):
    rng = np.random.default_rng(seed)
    query, key = (rng.standard_normal((*stack, width, rank)) for width in shape)
    return BilinearForm.from_factors(query, key)


def assert_is(form, matrix):
    np.testing.assert_allclose(form.numpy(), matrix, rtol=1e-11, atol=1e-11)


# Products.


@given(SHAPES, STACKS, st.integers(0, 2**32 - 1))
def test_products_of_forms_are_those_of_matrices_at_the_smallest_rank(sizes, stacks, seed):
    d_query, inner, d_key, rank, other_rank = sizes
    one = random_form((d_query, inner), rank, stacks[0], seed)
    other = random_form((inner, d_key), other_rank, stacks[1], seed + 1)
    product = one @ other
    assert_is(product, one.numpy() @ other.numpy())
    assert product.rank == min(rank, inner, other_rank)


@given(SHAPES, STACKS, st.integers(0, 2**32 - 1))
def test_products_with_matrices_are_forms_at_the_smallest_rank(sizes, stacks, seed):
    d_query, d_key, count, rank, _ = sizes
    form = random_form((d_query, d_key), rank, stacks[0], seed)
    rng = np.random.default_rng(seed)
    left = rng.standard_normal((*stacks[1], count, d_query))
    right = rng.standard_normal((*stacks[1], d_key, count))
    assert_is(left @ form, left @ form.numpy())
    assert_is(form @ right, form.numpy() @ right)
    assert (left @ form).rank == min(rank, d_query)
    assert (form @ right).rank == min(rank, d_key)


def test_products_of_two_precisions_keep_the_higher_one():
    single = BilinearForm(*np.ones((2, 4, 1), np.float32))
    double = random_form((4, 4), 2)
    assert (single @ double).query.dtype == (double @ single).query.dtype == np.float64


@LIBRARIES
def test_products_keep_the_library(make):
    form = random_form((5, 5), 2)
    made = BilinearForm(make(form.query), make(form.key))
    products = [made @ made, made @ make(np.ones((5, 3)))]
    if make is not array_api_strict.asarray:  # whose arrays defer to nothing
        products.append(make(np.ones((3, 5))) @ made)
    for product in products:
        assert type(product.query) is type(product.key) is type(made.query)


def test_the_gradient_flows_through_products_and_slices():
    query, key = (torch.randn(6, 2, dtype=torch.float64, requires_grad=True) for _ in "qk")

    def scalar(q, k):
        form = BilinearForm(q, k)
        return (form @ form / 2.0)[1:, :3].dense().sum() + form[2].sum()

    assert torch.autograd.gradcheck(scalar, (query, key))


def test_the_gradient_flows_to_the_vectors_that_are_scored():
    form = BilinearForm(*torch.randn(2, 6, 2, dtype=torch.float64))
    x, y = torch.randn(2, 3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, y: (form(x, y), (x @ form).dense()), (x, y))
    assert torch.autograd.gradcheck(lambda x: (form @ x, x @ form), x[0])


@pytest.mark.parametrize(
    "wrong",
    [
        lambda f: f @ random_form((4, 5), 2),
        lambda f: f @ np.ones((4, 5)),
        lambda f: np.ones((5, 4)) @ f,
    ],
)
def test_products_of_widths_that_differ_are_refused(wrong):
    with pytest.raises(FormError, match="needs 5 entries along the shared axis"):
        wrong(random_form((5, 5), 2))


# Numbers.


@LIBRARIES
def test_a_form_is_multiplied_and_divided_by_numbers(make):
    form = random_form((5, 4), 2)
    made, matrix = BilinearForm(make(form.query), make(form.key)), form.numpy()
    two = make(np.full((), 2.0))
    assert_is(made / 2, matrix / 2)
    assert_is(2 * made, matrix * 2)
    assert_is(made / two, matrix / 2)
    assert_is(made * two, matrix * 2)
    assert_is(made * make(np.full(1, 2.0)), matrix * 2)
    assert_is(-made, -matrix)


def test_each_form_of_a_stack_is_divided_by_its_own_number():
    heads = random_form((5, 5), 3, stack=(3,))
    np.testing.assert_allclose((heads / heads.norm).norm, 1.0)
    np.testing.assert_allclose((heads * [1, 2, 3]).norm, heads.norm * [1, 2, 3])
    with pytest.raises(FormError, match=r"of the stack's shape, \(3,\); got shape \(5,\)"):
        heads * np.ones(5)  # not one for each column of the factors


def test_forms_add_up_with_the_builtin_sum():
    forms = [random_form((4, 4), 2, seed=seed) for seed in range(3)]
    assert_is(sum(forms), sum(form.numpy() for form in forms))


@pytest.mark.parametrize(
    ("wrong", "advice"),
    [
        (lambda f: f * f, "matrix product is form @ other"),
        (lambda f: f / f, "matrix product is form @ other"),
        (lambda f: f + np.eye(4), "BilinearForm.from_matrix"),
        (lambda f: 1.0 + f, "BilinearForm.from_matrix"),
        (lambda f: f - 1, "BilinearForm.from_matrix"),
        (lambda f: f - random_form((5, 4), 2), "same shape"),
        (lambda f: f[None], "takes no index"),
        (lambda f: f[..., 0, ...], "takes no index"),
        (lambda f: f[:0], "must not be empty"),
    ],
)
def test_what_a_form_cannot_do_names_what_it_can(wrong, advice):
    with pytest.raises(FormError, match=advice):
        wrong(random_form((4, 4), 2))


# Slices.

INDICES = [
    0,
    -1,
    slice(1, 3),
    (slice(None), 2),
    (slice(None), slice(None, None, 2)),
    (1, -1),
    (..., 0),
    (slice(1), ...),
    ([0, 2],),
    np.array([True, False, True, True]),
    (slice(None), np.array([4, 0])),
    (np.int64(2), slice(2, 4)),
    ...,
]


@pytest.mark.parametrize("index", INDICES, ids=str)
@LIBRARIES
def test_rows_and_columns_are_those_of_the_matrix(index, make):
    if make is array_api_strict.asarray and "[" in str(index):
        pytest.skip("the standard has no indices by lists")
    form = random_form((4, 5), 2)
    made = BilinearForm(make(form.query), make(form.key))
    np.testing.assert_allclose(np.asarray(made[index]), form.numpy()[index], atol=1e-12)


@pytest.mark.parametrize(
    "index",
    [
        (0,),
        (1, 2),
        (0, 1, 2),
        (slice(None), 1),
        (..., slice(2), 1),
        (1, 2, slice(3), slice(1, 2)),
        (1, 2, 0),
        (0, 0, -1, -1),
        (slice(None), slice(None), 1),
        (..., [0, 3]),
    ],
    ids=str,
)
def test_indices_of_a_stack_go_on_into_the_matrix(index):
    heads = BilinearForm(random_form((4, 5), 2, (2, 3)).query, random_form((4, 5), 2, (2, 1)).key)
    np.testing.assert_allclose(np.asarray(heads[index]), heads.numpy()[index], atol=1e-12)


def test_rows_and_columns_by_lists_cross():
    form = random_form((4, 5), 2)
    np.testing.assert_allclose(
        form[[0, 3], [1, 2, 4]].numpy(), form.numpy()[np.ix_([0, 3], [1, 2, 4])]
    )


def test_iteration_ends():
    heads, form = random_form((4, 5), 2, stack=(3,)), random_form((4, 5), 2)
    assert [head.shape for head in heads] == [(4, 5)] * len(heads) == [(4, 5)] * 3
    np.testing.assert_allclose(list(form), form.numpy())
    with pytest.raises(IndexError):
        form[4]


def test_a_mask_chooses_heads():
    heads = random_form((4, 5), 2, stack=(2, 3))
    mask = np.array([[True, False, True], [False, True, False]])
    np.testing.assert_allclose(heads[mask].numpy(), heads.numpy()[mask])


# Scores and decompositions on the form itself.


def test_scores_on_the_form_are_the_functions():
    form = random_form((16, 16), 3, stack=(2,))
    for name in ("symmetry", "symmetry_null", "directionality"):
        np.testing.assert_array_equal(getattr(form, name), getattr(wqk, name)(form))
        np.testing.assert_array_equal(
            getattr(form, name), getattr(wqk, name)(form.query, form.key), err_msg=name
        )
    np.testing.assert_array_equal(
        form.directionality_excess, wqk.directionality(form, weight="excess")
    )


def test_a_threshold_taken_for_a_factor_is_named():
    with pytest.raises(FormError, match="gamma=3"):
        wqk.directionality(random_form((4, 4), 2), 3)


def test_singular_vectors_are_computed_once(monkeypatch):
    form, calls = random_form((6, 5), 3), []
    compute = wqk.forms.kernels.svd
    monkeypatch.setattr(wqk.forms.kernels, "svd", lambda *a: calls.append(a) or compute(*a))
    np.testing.assert_allclose(form.U * form.S @ form.V.T, form.numpy(), atol=1e-12)
    np.testing.assert_allclose(form.U.T @ form.U, np.eye(3), atol=1e-12)
    np.testing.assert_allclose(form.V.T @ form.V, np.eye(3), atol=1e-12)
    assert len(calls) == 1


# Conversions.


def test_a_form_becomes_a_tensor():
    form = random_form((4, 5), 2)
    np.testing.assert_array_equal(torch.as_tensor(form).numpy(), form.numpy())
    np.testing.assert_array_equal(torch.from_dlpack(form).numpy(), form.numpy())
    query = torch.ones(4, 2, requires_grad=True)
    trained = BilinearForm(query, query)
    assert trained.numpy().shape == (4, 4)
    with pytest.raises(FormError, match=r"use form.dense\(\)"):
        torch.as_tensor(trained)


def test_factors_may_be_lists():
    assert_is(BilinearForm([[1], [2]], [[3], [4]]), [[3, 4], [6, 8]])
    rows = [torch.ones(4, 2), torch.zeros(4, 2)]
    heads = BilinearForm(rows, rows)
    assert heads.stack == (2,)
    assert isinstance(heads.query, torch.Tensor)


@pytest.mark.usefixtures("unchecked_arguments")
@pytest.mark.parametrize(
    ("query", "key", "message"),
    [
        ([[1.0], [2.0, 3.0]], [[1.0]], "nested lists of one shape"),
        (torch.ones(4, 2), np.ones((4, 2)), "one library, got torch and numpy"),
        (torch.nn.Linear(4, 2), torch.nn.Linear(4, 2), r"got the module Linear; use .*from_linear"),
        (random_form((4, 4), 2), np.ones((4, 2)), "got a form"),
        (np.ones((16, 64)), np.ones((16, 64)), r"from_linear\(q_proj, k_proj\)"),
        (np.ones((64, 64)), np.ones((16, 64)), "the rank, 64, of a 64 × 16 form"),
        (torch.nn.Linear(8, 8).weight, torch.nn.Linear(8, 8).weight, "square nn.Parameter"),
    ],
)
def test_factors_that_are_not_what_they_seem_are_refused(query, key, message):
    with pytest.raises(FormError, match=message):
        BilinearForm(query, key)


def test_factors_that_are_known_pass():
    assert BilinearForm.from_factors(np.ones((16, 64)), np.ones((16, 64))).rank == 64
    weight = torch.nn.Linear(8, 8).weight
    assert BilinearForm.from_factors(weight, weight).query is weight
    assert BilinearForm(weight.T, weight.T).shape == (8, 8)


# nn.Linear.


@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (4, 2), (4, 1), (6, 3)])
def test_linear_layers_score_as_they_project(heads, key_heads):
    torch.manual_seed(0)
    q_proj = torch.nn.Linear(24, heads * 4, bias=False).double()
    k_proj = torch.nn.Linear(24, key_heads * 4, bias=False).double()
    form = BilinearForm.from_linear(q_proj, k_proj, heads=heads)
    assert form.stack == (key_heads, heads // key_heads)
    x = torch.randn(5, 24, dtype=torch.float64)
    queries = q_proj(x).reshape(5, heads, 4).transpose(0, 1)
    keys = k_proj(x).reshape(5, key_heads, 4).transpose(0, 1)
    expected = queries @ keys.repeat_interleave(heads // key_heads, 0).mT
    torch.testing.assert_close(form(x, x).reshape(heads, 5, 5), expected)
    weights = (p.weight.detach().numpy() for p in (q_proj, k_proj))
    assert_is(BilinearForm.from_linear(*weights, heads=heads), form.numpy())
    assert form.query.requires_grad


def test_linear_layers_without_heads_are_one_form():
    q_proj, k_proj = torch.nn.Linear(24, 8), torch.nn.Linear(20, 8)
    form = BilinearForm.from_linear(q_proj, k_proj)
    torch.testing.assert_close(form.dense(), q_proj.weight.T @ k_proj.weight)


@pytest.mark.parametrize(
    ("q_proj", "k_proj", "heads", "message"),
    [
        (torch.nn.Linear(24, 16), torch.nn.Linear(24, 8), None, "with heads="),
        (torch.nn.Linear(24, 16), torch.nn.Linear(24, 8), 3, "do not divide into 3 query heads"),
        (torch.nn.Linear(24, 16), torch.nn.Linear(24, 8), 0, "do not divide"),
        (torch.nn.Linear(24, 24), torch.nn.Linear(24, 16), 6, "do not divide"),
        (torch.nn.Linear(24, 24), torch.nn.Linear(24, 16), 3, "do not divide"),
        (torch.nn.LayerNorm(24), torch.nn.Linear(24, 8), None, "got LayerNorm"),
        (torch.nn.Conv1d(24, 8, 1), torch.nn.Linear(24, 8), None, "got Conv1d"),
        (np.ones(3), np.ones(3), None, r"shape \(3,\)"),
    ],
)
def test_layers_that_are_no_projections_to_heads_are_refused(q_proj, k_proj, heads, message):
    with pytest.raises(FormError, match=message):
        BilinearForm.from_linear(q_proj, k_proj, heads)


# Names.


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("W_q", "query"),
        ("symetry", "symmetry"),
        ("matrix", r"dense\(\)"),
        ("eigvals", "eigenvalues"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(name, meant):
    with pytest.raises(AttributeError, match=f"no attribute '{name}'; did you mean '{meant}"):
        getattr(random_form((4, 4), 2), name)


def test_every_synonym_leads_to_something():
    from wqk.forms.form import SYNONYMS

    known = dir(random_form((4, 4), 2))
    for name, meant in SYNONYMS.items():
        assert name not in known
        assert meant.partition("(")[0].partition(".")[0] in [*known, "form"]
