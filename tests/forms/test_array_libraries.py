"""One kernel for every array library: the same numbers, gradients in PyTorch, no d × d array."""

from __future__ import annotations

import re
import tracemalloc
from typing import Any

import array_api_strict
import numpy as np
import pytest
import torch
from tests.forms.laws import EVERY_SHAPE, SHAPES, assert_close, compared, form_of, in_float64

from wqk import BilinearForm, coupling, directionality, symmetry, symmetry_null
from wqk.errors import FormError
from wqk.forms import kernels
from wqk.forms.kernels import outliers
from wqk.forms.scores import head_terms

ROUTES = pytest.mark.parametrize(
    ("d", "rank", "route"),
    [(24, 4, kernels.Identities), (10, 6, kernels.Tiles)],
    ids=["identities", "tiles"],
)

# Scores of a stack of heads.
SCORES = {
    "symmetry": symmetry,
    "symmetry_null": symmetry_null,
    "directionality": lambda f: directionality(f, gamma=1.0),
    "directionality_excess": lambda f: directionality(f, gamma=1.0, weight="excess"),
    "coupling": coupling,
    "within": lambda f: head_terms(f).within,
    "between": lambda f: head_terms(f).between,
    "within_random": lambda f: head_terms(f).within_random,
    "outliers": lambda f: outliers(f.row_norms, 1.0),
}


def grouped(d: int, rank: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return (2, 3, d, rank), (2, 1, d, rank)


def factors(d: int, rank: int) -> list[np.ndarray]:
    rng = np.random.default_rng(d)
    return [rng.standard_normal(shape) for shape in grouped(d, rank)]


def in_torch(dtype: torch.dtype) -> Any:
    return lambda array: torch.from_numpy(array).to(dtype)


# How a library makes its array, and the error to allow.
LIBRARIES = {
    "numpy float32": (lambda a: a.astype(np.float32), 1e-5),
    "numpy float16": (lambda a: a.astype(np.float16), 1e-5),
    "torch float64": (in_torch(torch.float64), 1e-12),
    "torch float32": (in_torch(torch.float32), 1e-5),
    "torch bfloat16": (in_torch(torch.bfloat16), 1e-5),
    "torch float16": (in_torch(torch.float16), 1e-5),
    "strict float64": (array_api_strict.asarray, 1e-12),
    "strict float32": (lambda a: array_api_strict.asarray(a, dtype=array_api_strict.float32), 1e-5),
}
EVERY_LIBRARY = pytest.mark.parametrize(("make", "tolerance"), LIBRARIES.values(), ids=LIBRARIES)


@EVERY_SHAPE
@EVERY_LIBRARY
def test_every_library_computes_what_the_matrix_gives(shapes, make, tolerance):
    library = type(make(np.ones(1)))
    for name, actual, expected in compared(shapes, make):
        assert_close(actual, expected, tolerance, name)
        array = actual.query if isinstance(actual, BilinearForm) else actual
        assert type(array) is library or library is np.ndarray, name


@ROUTES
@EVERY_LIBRARY
def test_every_library_gives_the_same_scores(d, rank, route, make, tolerance):
    form, _ = form_of(grouped(d, rank), make=make)
    reference = BilinearForm.from_factors(in_float64(form.query), in_float64(form.key))
    assert type(form.moments) is type(reference.moments) is route
    for name, score in SCORES.items():
        assert_close(score(form), score(reference), tolerance, name)
        assert type(score(form)) is type(form.query) or isinstance(form.query, np.ndarray), name


@ROUTES
@pytest.mark.parametrize("make", [torch.from_numpy, array_api_strict.asarray])
def test_extreme_scales_and_degenerate_forms_in_every_library(d, rank, route, make):
    query, key = factors(d, rank)
    scaled = BilinearForm(make(query * 1e-200), make(key * 1e150))
    np.testing.assert_allclose(symmetry(scaled), symmetry(BilinearForm(query, key)), atol=1e-12)
    query[0, 1] = 0
    form = BilinearForm(make(query), make(key))
    assert np.isnan(np.asarray(coupling(form))).sum() == 11
    assert np.isnan(np.asarray(symmetry(form - form))).all()


@pytest.mark.parametrize(
    "make", [torch.from_numpy, array_api_strict.asarray], ids=["torch", "strict"]
)
def test_numbers_and_operands_of_a_library(make):
    form, matrix = form_of(SHAPES["single"], make=make)
    for number in (make(np.full((), 2.0)), make(np.full(1, 2.0))):
        assert_close(form * number, matrix * 2)
        assert_close(form / number, matrix / 2)
    vectors = np.ones((3, 5))
    products = {"right": (form @ make(vectors.T), matrix @ vectors.T)}
    if make is torch.from_numpy:  # the standard's arrays defer to nothing
        products["left"] = make(vectors) @ form, vectors @ matrix
        products["vector"] = make(vectors[0]) @ form, vectors[0] @ matrix
        assert_close(form[[0, 3]], matrix[[0, 3]])
    for name, (product, expected) in products.items():
        assert_close(product, expected, name=name)
        assert type(getattr(product, "query", product)) is type(form.query)
    for index in (0, slice(1, 3), (slice(None), 2), (..., 0), (1, -1)):
        assert_close(form[index], matrix[index])


# Gradients


@ROUTES
@pytest.mark.parametrize(
    "measure",
    [
        symmetry,
        symmetry_null,
        lambda f: directionality(f, gamma=1.0, weight="excess"),
        lambda f: f.norm,
        lambda f: head_terms(f).within_random,
        lambda f: coupling(f).sum(),
    ],
    ids=["symmetry", "symmetry_null", "excess", "norm", "within_random", "coupling"],
)
def test_gradients_are_those_of_finite_differences(d, rank, route, measure):
    query, key = (torch.from_numpy(f[:1, :2]) for f in factors(d, rank))
    random = torch.Generator().manual_seed(0)
    query_directions, key_directions = (
        torch.randn(4, *factor.shape, generator=random, dtype=factor.dtype)
        for factor in (query, key)
    )

    def along(steps):
        """The measure some steps away, in random directions of both factors."""
        moved_query = query + torch.tensordot(steps, query_directions, 1)
        moved_key = key + torch.tensordot(steps, key_directions, 1)
        return measure(BilinearForm(moved_query, moved_key))

    assert type(BilinearForm(query.requires_grad_(), key).moments) is route
    assert torch.autograd.gradcheck(along, torch.zeros(4, dtype=query.dtype, requires_grad=True))


@pytest.mark.parametrize(
    "measure",
    [
        lambda f, x: f.singular_values(),
        lambda f, x: (f @ f / 2.0)[1:, :3].dense().sum() + f[2].sum(),
        lambda f, x: (f(x, x), (x @ f).dense(), f @ x[0], x[0] @ f),
    ],
    ids=["singular values", "products and slices", "what is scored"],
)
def test_gradients_flow_to_factors_and_to_vectors(measure):
    query, key, x = torch.randn(3, 6, 2, dtype=torch.float64).requires_grad_()
    rows = x.T.detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda q, k, x: measure(BilinearForm(q, k), x), (query, key, rows)
    )


@ROUTES
@pytest.mark.parametrize("scale", [1.0, 1e-70])
def test_the_gradient_of_directionality_points_uphill(d, rank, route, scale):
    # Not through gradcheck: an update along the gradient, as a penalty makes it.
    query, key = (torch.from_numpy(f[0, 0]).mul(scale).requires_grad_() for f in factors(d, rank))
    before = directionality(BilinearForm(query, key), gamma=1.0, weight="excess")
    (slope,) = torch.autograd.grad(before, query)
    step = 1e-4 * scale * slope / slope.norm()
    after = directionality(BilinearForm(query + step, key), gamma=1.0, weight="excess")
    expected = float((slope * step).sum())
    assert float((after - before).detach()) == pytest.approx(expected, rel=1e-2)


@ROUTES
def test_rows_of_zeros_leave_every_gradient_finite(d, rank, route):
    query, key = map(torch.from_numpy, factors(d, rank))
    query[..., 3, :] = 0
    query[1, 1] = 0
    query.requires_grad_()
    form = BilinearForm(query, key)
    total = form.norm.sum() + torch.nansum(directionality(form, gamma=1.0, weight="excess"))
    (slope,) = torch.autograd.grad(total + torch.nansum(symmetry(form)), query)
    assert torch.isfinite(slope).all()


def test_bfloat16_parameters_get_their_gradient():
    query, key = (torch.from_numpy(f).to(torch.bfloat16).requires_grad_() for f in factors(24, 4))
    symmetry(BilinearForm(query, key).sum()).backward()
    assert query.grad.dtype == torch.bfloat16
    assert query.grad.abs().max() > 0


# Memory


def peak_bytes(measure: Any) -> int:
    """Most memory that NumPy allocated at once while ``measure`` ran."""
    tracemalloc.start()
    try:
        measure()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("d", "rank", "route", "part"),
    [(4096, 8, kernels.Identities, 30), (2500, 640, kernels.Tiles, 1.5)],
    ids=["identities", "tiles"],
)
def test_the_matrix_itself_is_never_made(d, rank, route, part):
    query, key = np.random.default_rng(0).standard_normal((2, d, rank), dtype=np.float32)
    form = BilinearForm(query, key)

    def measure() -> None:
        assert type(form.moments) is route
        for score in (symmetry, symmetry_null, directionality):
            assert np.isfinite(score(form))

    assert peak_bytes(measure) < d * d * query.itemsize / part


# PyTorch's tensors and modules


def test_a_form_becomes_a_tensor():
    form, matrix = form_of(SHAPES["not square"])
    np.testing.assert_array_equal(torch.as_tensor(form).numpy(), form.numpy())
    np.testing.assert_array_equal(torch.from_dlpack(form).numpy(), form.numpy())
    trained = BilinearForm(
        torch.from_numpy(form.query).requires_grad_(), torch.from_numpy(form.key)
    )
    assert_close(trained.numpy(), matrix)
    with pytest.raises(FormError, match=r"use form.dense\(\)"):
        torch.as_tensor(trained)
    rows = [torch.ones(4, 2), torch.zeros(4, 2)]
    assert BilinearForm(rows, rows).stack == (2,)
    assert isinstance(BilinearForm(rows, rows).query, torch.Tensor)


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
    assert_close(BilinearForm.from_linear(*weights, heads=heads), form.numpy())
    assert form.query.requires_grad


def test_linear_layers_without_heads_are_one_form():
    q_proj, k_proj = torch.nn.Linear(24, 8), torch.nn.Linear(20, 8)
    form = BilinearForm.from_linear(q_proj, k_proj)
    torch.testing.assert_close(form.dense(), q_proj.weight.T @ k_proj.weight)


def test_a_square_parameter_that_is_known_passes():
    weight = torch.nn.Linear(8, 8).weight
    assert BilinearForm.from_factors(weight, weight).query is weight
    assert BilinearForm(weight.T, weight.T).shape == (8, 8)


def linear(*arguments: Any) -> BilinearForm:
    """A form of layers with these numbers of outputs, or of these modules."""
    *layers, heads = arguments
    modules = [
        layer if isinstance(layer, torch.nn.Module) else torch.nn.Linear(24, layer)
        for layer in layers
    ]
    return BilinearForm.from_linear(*modules, heads)


SQUARE = torch.nn.Linear(8, 8)


@pytest.mark.usefixtures("unchecked_arguments")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: linear(16, 8, None), "as heads="),
        (lambda: linear(16, 8, 3), "do not divide into 3 query heads"),
        (lambda: linear(16, 8, 0), "do not divide"),
        (lambda: linear(24, 16, 6), "do not divide"),
        (lambda: linear(24, 16, 3), "do not divide"),
        (lambda: linear(torch.nn.LayerNorm(24), 8, None), "got LayerNorm"),
        (lambda: linear(torch.nn.Conv1d(24, 8, 1), 8, None), "got Conv1d"),
        (lambda: BilinearForm(torch.ones(4, 2), np.ones((4, 2))), "one library, got torch and num"),
        (lambda: BilinearForm(SQUARE, SQUARE), "got the module Linear; use BilinearForm.from_lin"),
        (lambda: BilinearForm(SQUARE.weight, SQUARE.weight), "square nn.Parameter"),
    ],
)
def test_what_are_no_factors_nor_projections_is_refused(call, message):
    with pytest.raises(FormError, match=re.escape(message)):
        call()
