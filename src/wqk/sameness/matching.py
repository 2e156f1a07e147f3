"""Rows that are searched for among the rows of another array.

Axes: n rows, D columns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from wqk._machine import side_by_side
from wqk.sameness.blocks import MANY
from wqk.sameness.tolerances import SAME, SCREENED, TIED

# Rows are compared in this many random directions, some at a time to bound memory.
DIRECTIONS, SOME = 64, 512


def largest(values: np.ndarray) -> float:
    """Return the largest absolute value, 0 of none."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def within(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether no two numbers of two arrays are farther apart than a bound."""
    pieces = (slice(start, start + SOME) for start in range(0, len(a), SOME))
    return all(largest(a[piece] - b[piece]) <= bound for piece in pieces)


def sketch(rows: np.ndarray) -> np.ndarray:
    """Rows in a few random directions, of norm 1; all of narrow ones."""
    if rows.shape[1] > DIRECTIONS:
        random, shape = np.random.default_rng(0), (rows.shape[1], DIRECTIONS)
        rows = rows.astype(np.float32, copy=False) @ random.standard_normal(shape, np.float32)
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    return np.asarray(rows / np.where(norms > 0, norms, 1), np.float32)


def nearest(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """For each row the first of the most similar other ones, whatever the sign, by sketches."""

    def nearest_of(piece: slice) -> np.ndarray:
        products = np.abs(rows[piece] @ others.T)
        return np.asarray((products >= products.max(axis=1, keepdims=True) - TIED).argmax(axis=1))

    return _by_rows(nearest_of, rows, len(rows) * len(others), int)


def cosines(
    rows: np.ndarray, others: np.ndarray, place: np.ndarray | slice = slice(None)
) -> np.ndarray:
    """Of each row and the other in its place, whatever the sign; 1 for two of zeros.

    ``place`` are the others' rows, where these are not all in order.
    """
    at = np.arange(len(others))[place]

    def of(some: slice) -> np.ndarray:
        a, b = rows[some], others[at[some]]
        norms = np.linalg.norm(a, axis=1) * np.linalg.norm(b, axis=1)
        silent = ~(a.any(axis=1) | b.any(axis=1))
        products = np.abs(np.einsum("nd,nd->n", a, b))
        return np.where(silent, 1, products / np.where(norms > 0, norms, 1))

    return _by_rows(of, rows, rows.size, float)


def _by_rows(
    of: Callable[[slice], np.ndarray], rows: np.ndarray, numbers: int, dtype: type
) -> np.ndarray:
    """What a function gives for some rows at a time, joined."""
    pieces = [slice(start, start + SOME) for start in range(0, len(rows), SOME)]
    found = side_by_side(of, pieces, many=numbers > MANY)
    return np.concatenate([np.zeros(0, dtype), *found])


def matched(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each expected row the actual one that is it, and whether there are as many of it.

    Rows are given as sketches. Equal ones, such as those of repeated key heads or of pruned ones,
    are each other's in order.
    """
    labels = [nearest(actual, actual), nearest(expected, actual)]
    for label, rows in zip(labels, (actual, expected), strict=True):
        label[~rows.any(axis=1)] = -1
    order = [np.argsort(label, kind="stable") for label in labels]
    ranked = [label[some] for label, some in zip(labels, order, strict=True)]
    place = np.empty(len(expected), int)
    place[order[1]] = order[0]
    return place, np.equal(*ranked)


def permutation(
    expected: np.ndarray, actual: np.ndarray, alike: float, sketches: Sequence[np.ndarray] = ()
) -> np.ndarray | None:
    """Return the actual rows that make the expected ones.

    None if an expected row is absent, or if all rows are in place.
    """
    marks, others = sketches or side_by_side(sketch, (expected, actual), many=expected.size > MANY)
    if (np.abs((marks * others).sum(axis=1)) > alike).all():
        return None
    # Of unrelated rows, some tell it for all.
    some = marks[:: max(1, len(marks) // SCREENED)]
    near = np.abs((some * others[nearest(some, others)]).sum(axis=1))
    if (near[some.any(axis=1)] < 2 * alike - 1).any():
        return None
    place, found = matched(marks, others)
    is_found = found.all() and (cosines(expected, actual, place) > alike).all()
    return place if is_found and not np.array_equal(place, np.arange(len(place))) else None


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same, up to a share of their size."""
    size = float(np.linalg.norm(a)) / max(1, a.size) ** 0.5
    return a.shape == b.shape and within(a, b, 2 * SAME * (size + largest(a)))
