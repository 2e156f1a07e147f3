"""Rows that are searched for among the rows of another array.

A row is compared by its sketch, its products with a few random directions. Cosines of whole rows
confirm a match.

Axes: n rows, m rows of another array, D columns, S columns of a sketch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from wqk._machine import side_by_side
from wqk.sameness.blocks import MANY
from wqk.sameness.tolerances import SAME_SHARE, SCREENED, TIED

# Number of random directions of a sketch.
DIRECTIONS = 64
# Rows are compared in stretches of this length, which bounds memory.
STRETCH = 512
# Rows whose products are summed at a time, which stay in a cache.
CACHED_ROWS = 64
# The label of rows of zeros, which are no row's nearest.
ZERO = -1


def largest(values: np.ndarray) -> float:
    """Return the largest absolute value; 0 for an empty array."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def within(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether no two numbers of two arrays are farther apart than a bound."""
    stretches = (slice(start, start + STRETCH) for start in range(0, len(a), STRETCH))
    return all(largest(a[stretch] - b[stretch]) <= bound for stretch in stretches)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal, up to a share of their size."""
    root_mean_square = float(np.linalg.norm(a)) / max(1, a.size) ** 0.5
    bound = 2 * SAME_SHARE * (root_mean_square + largest(a))
    return a.shape == b.shape and within(a, b, bound)


def sketch(rows: np.ndarray) -> np.ndarray:
    """Return rows (n, D) in random directions, (n, S), scaled to norm 1.

    Rows of up to as many columns as there are directions keep their columns.
    """
    width = rows.shape[1]
    if width > DIRECTIONS:
        random = np.random.default_rng(0)
        directions = random.standard_normal((width, DIRECTIONS), np.float32)
        rows = rows.astype(np.float32, copy=False) @ directions
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    divisors = np.where(norms > 0, norms, 1)
    return np.asarray(rows / divisors, np.float32)


def nearest(sketches: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the most similar of other rows (m, S) for each row (n, S), whatever the sign.

    Of rows that are equally similar, the first is returned.
    """

    def nearest_in(stretch: slice) -> np.ndarray:
        similarity = np.abs(sketches[stretch] @ others.T)
        is_tied = similarity >= similarity.max(axis=1, keepdims=True) - TIED
        return np.asarray(is_tied.argmax(axis=1))

    products = len(sketches) * len(others)
    return _by_stretches(nearest_in, len(sketches), int, in_threads=products > MANY)


def cosines(rows: np.ndarray, others: np.ndarray, places: np.ndarray | None = None) -> np.ndarray:
    """Return the absolute cosine of corresponding rows, (n,); 1 where both are zero.

    Parameters
    ----------
    rows, others
        Two arrays of rows, (n, D) and (m, D).
    places
        The rows of the second array that correspond to those of the first; all in order by default.
    """
    if places is None:
        places = np.arange(len(others))

    def cosines_in(stretch: slice) -> np.ndarray:
        x, y = rows[stretch], others[places[stretch]]
        products = np.abs(np.einsum("nd,nd->n", x, y))
        products_of_norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        # Also where only the product of the norms underflows to 0.
        divisors = np.where(products_of_norms > 0, products_of_norms, 1)
        both_are_zero = ~x.any(axis=1) & ~y.any(axis=1)
        return np.where(both_are_zero, 1, products / divisors)

    return _by_stretches(cosines_in, len(rows), float, in_threads=rows.size > MANY)


def are_in_place(rows: np.ndarray, others: np.ndarray, least_cosine: float) -> bool:
    """Return whether corresponding rows of two arrays (n, D) have at least a cosine.

    The sign of a cosine is ignored. Rows that are both zero are alike.

    Examples
    --------
    >>> rows = np.eye(3)
    >>> in_place(rows, -2 * rows, 0.999), in_place(rows, rows[[1, 0, 2]], 0.999)
    (True, False)
    """
    sample = screened(rows)
    if not (cosines(rows[sample], others[sample]) > least_cosine).all():
        return False
    # In the order of the memory.
    if rows.strides[0] < rows.strides[-1]:
        products = sum(_products_of_columns(rows.T, others.T), np.zeros((3, len(rows))))
        return _are_alike(products, least_cosine)
    stretches = _stretches(len(rows), CACHED_ROWS)
    return all(
        _are_alike(_products_of_rows(rows[each], others[each]), least_cosine) for each in stretches
    )


def _products_of_rows(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return ⟨x, y⟩, ⟨x, x⟩ and ⟨y, y⟩ of corresponding rows, (3, n)."""
    pairs = (rows, others), (rows, rows), (others, others)
    return np.stack([np.einsum("nd,nd->n", x, y) for x, y in pairs])


def _products_of_columns(rows: np.ndarray, others: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the same products of columns, (3, D), whose sums are those of all rows."""
    for stretch in _stretches(len(rows), CACHED_ROWS):
        a, b = rows[stretch], others[stretch]
        products = [np.einsum("nd,nd->d", x, y) for x, y in ((a, b), (a, a), (b, b))]
        yield np.stack(products).astype(np.float64)


def _are_alike(products: np.ndarray, least_cosine: float) -> bool:
    """Return whether rows with these products (3, n) have at least a cosine, or are zero."""
    across, squares, other_squares = products
    are_zero = (squares == 0) & (other_squares == 0)
    are_alike = np.abs(across) > least_cosine * np.sqrt(squares) * np.sqrt(other_squares)
    return bool((are_alike | are_zero).all())


def _stretches(count: int, length: int) -> list[slice]:
    """Return the stretches of a length that a number of rows consists of."""
    return [slice(start, start + length) for start in range(0, count, length)]


def _by_stretches(
    function: Callable[[slice], np.ndarray], count: int, dtype: type, in_threads: bool
) -> np.ndarray:
    """Return the joined results of a function for stretches of rows."""
    stretches = _stretches(count, STRETCH)
    results = side_by_side(function, stretches, many=in_threads)
    return np.concatenate([np.zeros(0, dtype), *results])


def matched(expected: np.ndarray, actual: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Assign an actual row to each expected row, by sketches (n, S).

    Equal rows, such as those of repeated key heads or of pruned heads, are assigned in order.

    Returns
    -------
    places : ndarray of int
        The actual row of each expected row, (n,).
    is_matched : ndarray of bool
        For sorted rows, whether the assigned rows have one label, (n,): all are true if each row
        occurs equally often among the expected and the actual ones.
    """
    labels_of_actual = nearest(actual, actual)
    labels_of_expected = nearest(expected, actual)
    labels_of_actual[~actual.any(axis=1)] = ZERO
    labels_of_expected[~expected.any(axis=1)] = ZERO
    actual_order = np.argsort(labels_of_actual, kind="stable")
    expected_order = np.argsort(labels_of_expected, kind="stable")
    places = np.empty(len(expected), int)
    places[expected_order] = actual_order
    is_matched = labels_of_actual[actual_order] == labels_of_expected[expected_order]
    return places, is_matched


def permutation(
    expected: np.ndarray,
    actual: np.ndarray,
    least_cosine: float,
    sketches: Sequence[np.ndarray] = (),
) -> np.ndarray | None:
    """Return the actual rows that make the expected rows.

    Parameters
    ----------
    expected, actual
        Two arrays of rows, (n, D).
    alike
        The least cosine of equal rows.
    sketches
        The sketches of both, where they have been computed before.

    Returns
    -------
    ndarray or None
        The actual row of each expected row, (n,). None if an expected row is absent, or if all
        rows are in place.
    """
    if not sketches:
        sketches = side_by_side(sketch, (expected, actual), many=expected.size > MANY)
    of_expected, of_actual = sketches
    similarity = np.abs((of_expected * of_actual).sum(axis=1))
    if (similarity > least_cosine).all():
        return None
    if lacks_rows(of_expected[screened(of_expected)], of_actual, least_cosine):
        return None
    places, is_matched = matched(of_expected, of_actual)
    if not is_matched.all() or np.array_equal(places, np.arange(len(places))):
        return None
    is_equal = cosines(expected, actual, places) > least_cosine
    return places if is_equal.all() else None


def screened(rows: np.ndarray) -> slice:
    """Return the places of the few rows that are tested first."""
    return slice(None, None, max(1, len(rows) // SCREENED))


def lacks_rows(sample: np.ndarray, of_actual: np.ndarray, least_cosine: float) -> bool:
    """Return whether one of a few expected rows, by sketches, is not among the actual rows."""
    matches = of_actual[nearest(sample, of_actual)]
    similarity = np.abs((sample * matches).sum(axis=1))
    is_row = sample.any(axis=1)
    return bool((similarity[is_row] < 2 * least_cosine - 1).any())
