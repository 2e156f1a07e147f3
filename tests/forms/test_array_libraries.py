"""One kernel for every array library: the same numbers, gradients in PyTorch, no d × d array."""

from __future__ import annotations

import tracemalloc
from typing import Any

import array_api_strict
import numpy as np
import pytest
import torch

from wqk import BilinearForm, coupling, directionality, symmetry, symmetry_null
from wqk.forms import kernels
from wqk.forms.kernels import outliers
from wqk.forms.scores import head_terms

ROUTES = pytest.mark.parametrize(
    ("d", "rank", "route"),
    [(24, 4, kernels.Identities), (10, 6, kernels.Tiles)],
    ids=["identities", "tiles"],
)

# Everything that is computed from a stack of heads.
MEASURES = {
    "symmetry": symmetry,
    "symmetry_null": symmetry_null,
    "directionality": lambda f: directionality(f, gamma=1.0),
    "directionality_excess": lambda f: directionality(f, gamma=1.0, weight="excess"),
    "coupling": coupling,
    "within": lambda f: head_terms(f).within,
    "between": lambda f: head_terms(f).between,
    "within_random": lambda f: head_terms(f).within_random,
    "norm": lambda f: f.norm,
    "row_norms": lambda f: f.row_norms,
    "column_norms": lambda f: f.column_norms,
    "outliers": lambda f: outliers(f.row_norms, 1.0),
    "trace": lambda f: f.trace,
    "diagonal": lambda f: f.diagonal,
    "dense": lambda f: f.dense(),
    "call": lambda f: f([1.0] * f.widths[0], [2.0] * f.widths[1]),
    "sum": lambda f: f.sum().dense(),
    "item": lambda f: f[1, 0].dense(),
    "difference": lambda f: (f - f.T * 2.0).norm,
    "parts": lambda f: symmetry(f.symmetric_part + f.skew_part * 0.5),
}


def factors(d: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(d)
    return rng.standard_normal((2, 3, d, rank)), rng.standard_normal((2, 1, d, rank))


def to_numpy(array: Any) -> np.ndarray:
    return np.asarray(array.detach() if hasattr(array, "detach") else array)


def make_torch(dtype: torch.dtype) -> Any:
    return lambda array: torch.from_numpy(array).to(dtype)


# How a library makes its array, the float64 values that it then holds, and the error to allow.
LIBRARIES = {
    "numpy float32": (lambda a: a.astype(np.float32), 1e-5),
    "numpy float16": (lambda a: a.astype(np.float16), 1e-5),
    "torch float64": (make_torch(torch.float64), 1e-12),
    "torch float32": (make_torch(torch.float32), 1e-5),
    "torch bfloat16": (make_torch(torch.bfloat16), 1e-5),
    "torch float16": (make_torch(torch.float16), 1e-5),
    "strict float64": (array_api_strict.asarray, 1e-12),
    "strict float32": (lambda a: array_api_strict.asarray(a, dtype=array_api_strict.float32), 1e-5),
}


@ROUTES
@pytest.mark.parametrize(("make", "tolerance"), LIBRARIES.values(), ids=LIBRARIES)
def test_every_library_gives_the_same_numbers(d, rank, route, make, tolerance):
    made = [make(factor) for factor in factors(d, rank)]
    form = BilinearForm(*made)
    held = (f.double() if isinstance(f, torch.Tensor) else f for f in made)
    reference = BilinearForm(*(np.asarray(f).astype(np.float64) for f in held))
    assert type(form.moments) is type(reference.moments) is route
    for name, measure in MEASURES.items():
        result, expected = measure(form), measure(reference)
        assert type(result) is type(form.query) or isinstance(form.query, np.ndarray), name
        scale = max(1.0, float(np.abs(expected).max()))
        np.testing.assert_allclose(
            to_numpy(result), expected, rtol=0, atol=tolerance * scale, err_msg=name
        )


@ROUTES
@pytest.mark.parametrize("make", [torch.from_numpy, array_api_strict.asarray])
def test_extreme_scales_and_degenerate_forms_in_every_library(d, rank, route, make):
    query, key = factors(d, rank)
    scaled = BilinearForm(make(query * 1e-200), make(key * 1e150))
    np.testing.assert_allclose(symmetry(scaled), symmetry(BilinearForm(query, key)), atol=1e-12)
    query[0, 1] = 0
    pruned = coupling(BilinearForm(make(query), make(key)))
    np.testing.assert_array_equal(np.isnan(to_numpy(pruned)).sum(), 11)
    form = BilinearForm(make(query), make(key))
    assert np.isnan(to_numpy(symmetry(form - form))).all()


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
    ways = [torch.randn(4, *f.shape, generator=random, dtype=f.dtype) for f in (query, key)]

    def along(steps):
        """The measure some steps away, in random directions of both factors."""
        moved = [
            f + torch.tensordot(steps, way, 1) for f, way in zip((query, key), ways, strict=True)
        ]
        return measure(BilinearForm(*moved))

    assert type(BilinearForm(query.requires_grad_(), key).moments) is route
    assert torch.autograd.gradcheck(along, torch.zeros(4, dtype=query.dtype, requires_grad=True))


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
    query, key = (torch.from_numpy(f.copy()) for f in factors(d, rank))
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


def peak_bytes(measure: Any) -> int:
    """Most memory that NumPy held at once while ``measure`` ran, beyond what was there before."""
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
