"""Search for rows of one array among the rows of another array.

The *sketch* of a row consists of its products with a few random directions, scaled to norm 1.
Sketches are compared first, then cosines of whole rows confirm a match. The sign of a cosine is
ignored everywhere in this file: a row with the opposite sign is a match, and the sign is found
later.

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
# Rows are compared in stretches of this length, to limit memory.
STRETCH = 512
# Rows whose products are summed at a time, which stay in a cache.
CACHED_ROWS = 64
# The label of rows of zeros, which are no row's nearest.
LABEL_OF_ZEROS = -1


def largest(values: np.ndarray) -> float:
    """Return the largest absolute value; 0 for an empty array."""
    return float(max(values.max(initial=0.0), -values.min(initial=0.0)))


def root_mean_square(values: np.ndarray) -> float:
    """Return the root mean square of an array, summed in float64."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))


def within(a: np.ndarray, b: np.ndarray, bound: float) -> bool:
    """Return whether corresponding numbers of two arrays differ by at most a bound."""
    stretches = _stretches(len(a), STRETCH)
    return all(largest(a[stretch] - b[stretch]) <= bound for stretch in stretches)


def same_numbers(a: np.ndarray, b: np.ndarray) -> bool:
    """Return whether two arrays are equal, up to a share of their root mean square and maximum."""
    root_mean_square = float(np.linalg.norm(a)) / max(1, a.size) ** 0.5
    bound = 2 * SAME_SHARE * (root_mean_square + largest(a))
    return a.shape == b.shape and within(a, b, bound)


def sketch(rows: np.ndarray) -> np.ndarray:
    """Return the sketches (n, S) of rows (n, D), of norm 1; the sketch of a zero row is zero.

    The sketch of a row with at most `DIRECTIONS` columns is the row itself.
    """
    width = rows.shape[1]
    if width > DIRECTIONS:
        random = np.random.default_rng(0)
        directions = random.standard_normal((width, DIRECTIONS), np.float32)
        rows = rows.astype(np.float32, copy=False) @ directions
    norms = np.linalg.norm(rows, axis=1, keepdims=True)
    divisors = np.where(norms > 0, norms, 1)
    return np.asarray(rows / divisors, np.float32)


def sketch_cosines(expected: np.ndarray, actual: np.ndarray) -> np.ndarray:
    """Return the approximate cosine of corresponding rows, (n,), from their sketches (n, S)."""
    return np.asarray(np.abs((expected * actual).sum(axis=1)))


def nearest(sketches: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return the number of the most similar row of another array for each row, (n,).

    Among equally similar rows, the first row is returned.

    Parameters
    ----------
    sketches, others
        Sketches of the rows (n, S), and of the rows of the other array (m, S).
    """

    def nearest_in(stretch: slice) -> np.ndarray:
        similarity = np.abs(sketches[stretch] @ others.T)
        is_tied = similarity >= similarity.max(axis=1, keepdims=True) - TIED
        return np.asarray(is_tied.argmax(axis=1))

    products = len(sketches) * len(others)
    return _by_stretches(nearest_in, len(sketches), int, in_threads=products > MANY)


def cosines(
    rows: np.ndarray, others: np.ndarray, source_rows: np.ndarray | None = None
) -> np.ndarray:
    """Return the absolute cosines of corresponding rows, (n,); 1 if both rows are zero.

    Parameters
    ----------
    rows, others
        Two arrays of rows, (n, D) and (m, D).
    source_rows
        For each row of the first array, the corresponding row of the second array, (n,); by
        default, rows of equal number.
    """
    if source_rows is None:
        source_rows = np.arange(len(others))

    def cosines_in(stretch: slice) -> np.ndarray:
        x = rows[stretch]
        y = others[source_rows[stretch]]
        products = np.abs(np.einsum("nd,nd->n", x, y))
        norms = np.linalg.norm(x, axis=1) * np.linalg.norm(y, axis=1)
        divisors = np.where(norms > 0, norms, 1)  # the product of two norms may underflow to 0
        are_zero = ~x.any(axis=1) & ~y.any(axis=1)
        return np.where(are_zero, 1, products / divisors)

    return _by_stretches(cosines_in, len(rows), float, in_threads=rows.size > MANY)


def are_in_place(rows: np.ndarray, others: np.ndarray, least_cosine: float) -> bool:
    """Return whether corresponding rows of two arrays (n, D) have at least a given cosine.

    Two zero rows count as equal.

    Examples
    --------
    >>> rows = np.eye(3)
    >>> are_in_place(rows, -2 * rows, 0.999), are_in_place(rows, rows[[1, 0, 2]], 0.999)
    (True, False)
    """
    sample = screening_sample(rows)
    if not (cosines(rows[sample], others[sample]) > least_cosine).all():
        return False
    # Arrays are read in memory order, to save time.
    if rows.strides[0] < rows.strides[-1]:
        products = sum(_products_of_columns(rows.T, others.T), np.zeros((3, len(rows))))
        return _have_cosine(products, least_cosine)
    for stretch in _stretches(len(rows), CACHED_ROWS):
        products = _products_of_rows(rows[stretch], others[stretch])
        if not _have_cosine(products, least_cosine):
            return False
    return True


def _products_of_rows(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
    """Return ⟨x, y⟩, ⟨x, x⟩ and ⟨y, y⟩ of corresponding rows, (3, n)."""
    pairs = (rows, others), (rows, rows), (others, others)
    return np.stack([np.einsum("nd,nd->n", x, y) for x, y in pairs])


def _products_of_columns(rows: np.ndarray, others: np.ndarray) -> Iterator[np.ndarray]:
    """Yield products of stretches of columns, (3, D), with the sums ⟨x, y⟩, ⟨x, x⟩ and ⟨y, y⟩.

    ``rows`` and ``others`` are transposed: their columns x and y correspond.
    """
    for stretch in _stretches(len(rows), CACHED_ROWS):
        a, b = rows[stretch], others[stretch]
        products = [np.einsum("nd,nd->d", x, y) for x, y in ((a, b), (a, a), (b, b))]
        yield np.stack(products).astype(np.float64)


def _have_cosine(products: np.ndarray, least_cosine: float) -> bool:
    """Return whether rows with these products (3, n) have at least a given cosine, or are zero."""
    across, squares, other_squares = products
    are_zero = (squares == 0) & (other_squares == 0)
    are_near = np.abs(across) > least_cosine * np.sqrt(squares) * np.sqrt(other_squares)
    return bool((are_near | are_zero).all())


def _stretches(count: int, length: int) -> list[slice]:
    """Return consecutive slices of ``length`` rows; the last slice may be shorter."""
    return [slice(start, start + length) for start in range(0, count, length)]


def _by_stretches(
    function: Callable[[slice], np.ndarray], count: int, dtype: type, in_threads: bool
) -> np.ndarray:
    """Return the joined results of a function for stretches of as many rows as ``count``."""
    stretches = _stretches(count, STRETCH)
    results = side_by_side(function, stretches, many=in_threads)
    return np.concatenate([np.zeros(0, dtype), *results])


def _assigned_rows(expected: np.ndarray, actual: np.ndarray) -> np.ndarray | None:
    """Assign an actual row to each expected row, by sketches (n, S).

    The label of a row is the number of the nearest actual row, so that equal rows have one label.
    Rows with one label, such as rows of repeated key heads or of pruned heads, are assigned in
    order.

    Returns
    -------
    ndarray of int or None
        The actual row of each expected row, (n,). None if a label occurs more often among the
        expected rows than among the actual rows.
    """
    labels_of_actual = nearest(actual, actual)
    labels_of_expected = nearest(expected, actual)
    labels_of_actual[~actual.any(axis=1)] = LABEL_OF_ZEROS
    labels_of_expected[~expected.any(axis=1)] = LABEL_OF_ZEROS
    actual_order = np.argsort(labels_of_actual, kind="stable")
    expected_order = np.argsort(labels_of_expected, kind="stable")
    have_one_label = labels_of_actual[actual_order] == labels_of_expected[expected_order]
    if not have_one_label.all():
        return None
    source_rows = np.empty(len(expected), int)
    source_rows[expected_order] = actual_order
    return source_rows


def permutation(
    expected: np.ndarray,
    actual: np.ndarray,
    least_cosine: float,
    sketches: Sequence[np.ndarray] = (),
) -> np.ndarray | None:
    """Return the order of the actual rows that makes the expected rows.

    Parameters
    ----------
    expected, actual
        Two arrays of rows, (n, D).
    least_cosine
        The least cosine of equal rows.
    sketches
        The sketches of both arrays, if already computed.

    Returns
    -------
    ndarray or None
        The actual row of each expected row, (n,). None if an expected row is absent, or if all
        rows are in place.
    """
    if not sketches:
        sketches = side_by_side(sketch, (expected, actual), many=expected.size > MANY)
    expected_sketches, actual_sketches = sketches
    if (sketch_cosines(expected_sketches, actual_sketches) > least_cosine).all():
        return None
    sample = expected_sketches[screening_sample(expected_sketches)]
    if lacks_rows(sample, actual_sketches, least_cosine):
        return None
    source_rows = _assigned_rows(expected_sketches, actual_sketches)
    if source_rows is None or np.array_equal(source_rows, np.arange(len(source_rows))):
        return None
    is_equal = cosines(expected, actual, source_rows) > least_cosine
    return source_rows if is_equal.all() else None


def evenly_spaced(count: int, most: int) -> np.ndarray:
    """Return at most ``most`` of the numbers below ``count``, at equal distances.

    Examples
    --------
    >>> evenly_spaced(9, 3).tolist(), evenly_spaced(2, 3).tolist()
    ([0, 4, 8], [0, 1])
    """
    return np.unique(np.linspace(0, count - 1, most).astype(int))


def screening_sample(rows: np.ndarray) -> slice:
    """Return a slice of the few rows that are tested first."""
    return slice(None, None, max(1, len(rows) // SCREENED))


def lacks_rows(sample: np.ndarray, actual_sketches: np.ndarray, least_cosine: float) -> bool:
    """Return whether a sampled expected row is not among the actual rows.

    ``sample`` and ``actual_sketches`` are sketches. The error of a sketch may be as large as the
    difference of the least cosine from 1. Rows of zeros are ignored.
    """
    matches = actual_sketches[nearest(sample, actual_sketches)]
    similarity = sketch_cosines(sample, matches)
    is_row = sample.any(axis=1)
    return bool((similarity[is_row] < 2 * least_cosine - 1).any())
