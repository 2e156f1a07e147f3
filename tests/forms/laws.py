"""Operations of a form next to those of its matrix, for all shapes of stacks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from wqk import BilinearForm

# Shapes (query, key) of stacks that broadcast: alone, alike, shared keys, shared queries.
SHAPES = {
    "single": [(5, 2), (5, 2)],
    "not square": [(7, 2), (5, 2)],
    "full rank": [(6, 6), (6, 6)],
    "stack": [(4, 5, 2), (4, 5, 2)],
    "grouped heads": [(2, 3, 5, 2), (2, 1, 5, 2)],
    "one key head": [(1, 4, 5, 2), (1, 1, 5, 2)],
    "shared query": [(1, 5, 2), (4, 3, 2)],
    "key without stack": [(4, 5, 2), (3, 2)],
    "query without stack": [(5, 2), (2, 3, 5, 2)],
    "rank above the width": [(3, 4, 9), (3, 4, 9)],
    "unequal widths, rank above both": [(7, 12), (5, 12)],
}
EVERY_SHAPE = pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES)


def form_of(shapes: Any, seed: int = 0, make: Any = np.asarray) -> tuple[BilinearForm, np.ndarray]:
    """A random form of an array library, and its matrices in float64."""
    rng = np.random.default_rng(seed)
    arrays = [make(rng.standard_normal(shape)) for shape in shapes]
    query, key = map(in_float64, arrays)
    return BilinearForm.from_factors(*arrays), query @ key.mT


def in_float64(array: Any) -> np.ndarray:
    """Array of any library as a NumPy array in float64."""
    widened = array.double() if hasattr(array, "double") else array
    return np.asarray(widened, float)


def vectors(a: Any, axis: int, *count: int) -> np.ndarray:
    """Random vectors as long as an axis of a form, the same for the form and for its matrix."""
    return np.random.default_rng(2).standard_normal((*count, a.shape[axis]))


def transposed(a: Any) -> Any:
    return a.T if isinstance(a, BilinearForm) else a.mT


# The same expressions of two forms, and of their matrices.
ALIKE: dict[str, Callable[[Any, Any], Any]] = {
    "itself": lambda a, b: a,
    "negative": lambda a, b: -a,
    "multiple": lambda a, b: 0.5 * (a * 3.0),
    "quotient": lambda a, b: a / 2,
    "sum": lambda a, b: a + b,
    "difference": lambda a, b: a - b,
    "sum of several": lambda a, b: sum([a, b, a]),
    "transpose": lambda a, b: transposed(a),
    "product": lambda a, b: a @ transposed(b),
    "with a vector": lambda a, b: a @ vectors(a, -1),
    "with a list before": lambda a, b: vectors(a, -2).tolist() @ a,
    "with a matrix": lambda a, b: a @ vectors(a, -1, 4).T,
    "with a matrix before": lambda a, b: vectors(a, -2, 4) @ a,
}
# Expressions of a form, and of its matrix.
UNLIKE: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], Any]]] = {
    "norm": (lambda f: f.norm, lambda m: np.linalg.norm(m, axis=(-2, -1))),
    "row norms": (lambda f: f.row_norms, lambda m: np.linalg.norm(m, axis=-1)),
    "column norms": (lambda f: f.column_norms, lambda m: np.linalg.norm(m, axis=-2)),
    "sum of the stack": (lambda f: f.sum(), lambda m: m.reshape(-1, *m.shape[-2:]).sum(0)),
    "a score": (
        lambda f: f(vectors(f, -2).tolist(), vectors(f, -1)),
        lambda m: vectors(m, -2) @ m @ vectors(m, -1),
    ),
    "scores": (
        lambda f: f(vectors(f, -2, 3), vectors(f, -1, 4)),
        lambda m: vectors(m, -2, 3) @ m @ vectors(m, -1, 4).T,
    ),
}
SQUARE: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], Any]]] = {
    "symmetric part": (lambda f: f.symmetric_part, lambda m: (m + m.mT) / 2),
    "skew part": (lambda f: f.skew_part, lambda m: (m - m.mT) / 2),
    "diagonal": (lambda f: f.diagonal, lambda m: np.diagonal(m, axis1=-2, axis2=-1)),
    "trace": (lambda f: f.trace, lambda m: np.trace(m, axis1=-2, axis2=-1)),
    "symmetry": (lambda f: f.symmetry, lambda m: shares(m, m * m.mT)),
    "symmetry by chance": (
        lambda f: f.symmetry_null,
        lambda m: shares(m, m * m * np.eye(len(m.T))),
    ),
}


def shares(matrix: np.ndarray, terms: np.ndarray) -> np.ndarray:
    return np.asarray(terms.sum((-2, -1)) / np.square(matrix).sum((-2, -1)))


def compared(shapes: Any, make: Any = np.asarray) -> Iterator[tuple[str, Any, np.ndarray]]:
    """Each operation: its name, its result for a form, and that for the form's matrix."""
    form, matrix = form_of(shapes, 0, make)
    other_form, other_matrix = form_of(shapes, 1, make)
    for name, operation in ALIKE.items():
        yield name, operation(form, other_form), operation(matrix, other_matrix)
    measures = UNLIKE | SQUARE if form.is_square else UNLIKE
    for name, (of_form, of_matrix) in measures.items():
        yield name, of_form(form), of_matrix(matrix)


def assert_close(actual: Any, expected: Any, tolerance: float = 1e-12, name: str = "") -> None:
    """Compare entries up to a share of the largest entry, or of 1 if all are smaller."""
    actual = actual.detach() if hasattr(actual, "detach") else actual
    scale = max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(
        np.asarray(actual), expected, rtol=0, atol=tolerance * scale, err_msg=name
    )
