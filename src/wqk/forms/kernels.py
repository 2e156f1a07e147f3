"""The sums over M = A Bᵀ that its scores need, computed from the factors in any array library.

There are two routes. `Identities` works on Gram matrices and never forms an entry of M, in about
8 d r² operations for width d and rank r; `Tiles` forms M block by block, in 2 d² r operations.
`measure` takes the cheaper one, and never the identities where they would cancel.

With the QR decompositions A = Q_a R_a and B = Q_b R_b, M = Q_a (R_a R_bᵀ) Q_bᵀ: the core in the
middle, k × k with k = min(R, D), has M's singular values, and R_a R_bᵀ Q_bᵀ Q_a its nonzero
eigenvalues.

Products larger than a core's cache are formed, summed and discarded block by block.

Axes: ``...`` a stack of forms, D width, R rank. Factors are A = query (..., D, R) and B = key
(..., D, R); stacks broadcast, so query heads that share a key head share its Gram matrix.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import array_api_compat
import numpy as np
from array_api_compat import is_array_api_obj, is_numpy_namespace

from wqk._machine import cached_property
from wqk._typing import Array, Bool, Float
from wqk.errors import FormError, NonFiniteWeights


def array_namespace(*arrays: Any) -> Any:
    """Return the module that computes with these arrays.

    For NumPy arrays this is NumPy itself, which follows the array API since version 2.1. The
    wrapper of NumPy in array-api-compat takes .09 s to import, a sixth of a small scan.

    Examples
    --------
    >>> array_namespace(np.eye(2), 1.0).__name__
    'numpy'
    """
    if all(isinstance(array, np.ndarray | np.generic | float | int | None) for array in arrays):
        return np
    return array_api_compat.array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Convert nested lists, or a list of arrays, to one array; return an array unchanged."""
    if is_array_api_obj(values):
        return values
    if hasattr(values, "weight"):
        raise FormError(
            f"expected arrays, got the module {type(values).__name__}; use "
            "BilinearForm.from_linear(q_proj, k_proj)"
        )
    if hasattr(values, "query") and hasattr(values, "key"):
        raise FormError("expected arrays, got a form; use form.query and form.key, or form.dense()")
    if isinstance(values, list | tuple) and values and is_array_api_obj(values[0]):
        return array_namespace(*values).stack(list(values))
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise FormError(f"expected an array or nested lists of one shape: {error}") from None
    if array.dtype.kind not in "biufc":
        raise FormError(
            f"expected an array or nested lists of numbers, got {type(values).__name__}; a model's "
            "forms are wqk.open(model)[layer].form and wqk.open(model)[layer, head]"
        )
    return array.astype(float) if array.dtype.kind in "iub" else array


def linear_weight(projection: Any) -> Array:
    """Return the weight (out, in) of an ``nn.Linear``, or such a weight itself."""
    weight = projection if is_array_api_obj(projection) else getattr(projection, "weight", None)
    weight = as_array(projection if weight is None else weight)
    expected = getattr(projection, "out_features", None), getattr(projection, "in_features", None)
    is_module = hasattr(projection, "weight")
    if weight.ndim != 2 or (is_module and tuple(weight.shape) != expected):
        raise FormError(
            f"expected an nn.Linear, or its weight (out, in), got {type(projection).__name__} with "
            f"a weight of shape {tuple(weight.shape)}; wqk.open reads other models"
        )
    return weight


def is_number(index: Any) -> bool:
    """Return whether an index selects a single row or column."""
    return hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0


def axes_taken(index: Any) -> int:
    """Return the number of axes that an index consumes: a mask consumes all its axes."""
    return index.ndim if "bool" in str(getattr(index, "dtype", "")) else 1


def keep_axis(index: Any, count: int) -> Any:
    """Return an index that selects the same rows or columns and keeps the axis."""
    if not is_number(index):
        return index
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of bounds for {count} rows or columns")
    return slice(number % count, number % count + 1)


def common_stack(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """Return the common shape of two stacks."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise FormError(f"the stacks of query and key must broadcast, got {a} and {b}") from None


def stacked_as(factor: Array, stack: tuple[int, ...]) -> Array:
    """Return a factor broadcast to a stack's shape."""
    return array_namespace(factor).broadcast_to(factor, (*stack, *factor.shape[-2:]))


def side_by_side(a: Array, b: Array) -> Array:
    """Concatenate along the rank, after broadcasting the stacks."""
    stack = common_stack(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return array_namespace(a, b).concat([stacked_as(a, stack), stacked_as(b, stack)], axis=-1)


def total(factor: Array, xp: Any) -> Array:
    """Return the sum of (..., S, D, R) over S, in float64 if float32 cannot hold it."""
    if factor.shape[-3] == 1:
        return factor[..., 0, :, :]
    with np.errstate(over="ignore", invalid="ignore"):
        total = xp.sum(factor, axis=-3)
        fits = bool(xp.isfinite(xp.sum(total)))
    if bits(factor, xp) < 64 and not fits:
        return xp.sum(xp.astype(factor, xp.float64), axis=-3)
    return total


def joined(factor: Array, xp: Any) -> Array:
    """Reshape (..., S, D, R) to (..., D, S·R): a view if the factor is a transposed weight."""
    *stack, count, width, rank = factor.shape
    transposed = xp.matrix_transpose(factor)
    return xp.matrix_transpose(xp.reshape(transposed, (*stack, count * rank, width)))


# Entries of one intermediate block: 2 MB in float32, which stays in a core's cache.
BLOCK_ENTRIES = 2**19


def square_sum(array: Array, xp: Any) -> Array:
    """Sum of squares over the last two axes, in the memory order of transposed weights."""
    return xp.sum(xp.linalg.vecdot(array, array, axis=-2), axis=-1)


def row_dots(
    a: Float[Array, "... d r"], b: Float[Array, "... d r"], xp: Any
) -> Float[Array, "... d"]:
    """a_i · b_i for every row i."""
    if is_numpy_namespace(xp):  # in one pass, without an array of the products
        return np.einsum("...dr,...dr->...d", a, b)
    return xp.sum(a * b, axis=-1)


def gram_dots(
    a: Float[Array, "... d r"], gram: Float[Array, "... r r"], xp: Any
) -> Float[Array, "... d"]:
    """a_i G · a_i for every row i and a symmetric matrix G, in blocks that stay in the cache."""
    width, rank = a.shape[-2:]
    stack = np.broadcast_shapes(a.shape[:-2], gram.shape[:-2])
    most_entries = BLOCK_ENTRIES // 4
    if stack and math.prod(stack) * width * rank > most_entries:
        a = xp.broadcast_to(a, (*stack, width, rank))
        gram = xp.broadcast_to(gram, (*stack, rank, rank))
        return xp.stack([gram_dots(a[i, ...], gram[i, ...], xp) for i in range(stack[0])])
    dots = []
    for part in block_slices(width, max(1024, most_entries // rank)):
        rows = a[..., part, :]
        products = xp.matmul(gram, xp.matrix_transpose(rows))
        dots.append(row_dots(rows, xp.matrix_transpose(products), xp))
    return xp.concat(dots, axis=-1)


def gram(factor: Float[Array, "... d r"], xp: Any) -> Float[Array, "... r r"]:
    """AᵀA for each form of the stack."""
    return xp.matmul(xp.matrix_transpose(factor), factor)


def inner(a: Array, b: Array, xp: Any) -> Array:
    """Frobenius inner product over the last two axes."""
    return xp.sum(xp.linalg.vecdot(a, b), axis=-1)


def block_slices(length: int, width: int) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of equal length, at most ``width``."""
    count = max(1, math.ceil(length / width))
    edges = [round(i * length / count) for i in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(edges))


class TileSums(NamedTuple):
    """Sums over the squares of M's entries, tr(M M) where M is square, and M itself if small."""

    rows: Float[Array, "... d_query"]
    columns: Float[Array, "... d_key"]
    trace_of_square: Float[Array, "*stack"] | None
    matrix: Float[Array, "... d_query d_key"] | None


def tile_sums(query: Array, key: Array, xp: Any) -> TileSums:
    """Sum over M block by block. A large M is never in memory as a whole.

    Blocks (i, j) and (j, i) of a square form are computed together, because tr(M M) needs both.
    """
    is_square = query.shape[-2] == key.shape[-2]
    stack = math.prod(query.shape[:-2]) or 1
    side = max(32, math.isqrt(BLOCK_ENTRIES // stack))
    row_parts = list(block_slices(query.shape[-2], side))
    column_parts = list(block_slices(key.shape[-2], side))
    rows: list[Any] = [0.0] * len(row_parts)
    columns: list[Any] = [0.0] * len(column_parts)
    trace: Any = 0.0
    keys = xp.matrix_transpose(key)
    # One product takes less time than the tiles of a small form.
    is_small = stack * query.shape[-2] * key.shape[-2] <= 2 * BLOCK_ENTRIES
    matrix = xp.matmul(query, keys) if is_small else None

    for i in range(len(row_parts)):
        for j in range(i if is_square else 0, len(column_parts)):
            # A set with an order: the blocks of the diagonal are their own mirror images.
            blocks = dict.fromkeys([(i, j), (j, i)] if is_square else [(i, j)])
            tiles = {}
            for row, column in blocks:
                r, c = row_parts[row], column_parts[column]
                if matrix is None:
                    entries = xp.matmul(query[..., r, :], keys[..., c])
                else:
                    entries = matrix[..., r, c]
                tiles[row, column] = entries
                rows[row] = rows[row] + xp.linalg.vecdot(entries, entries)
                turned = xp.matrix_transpose(entries)
                columns[column] = columns[column] + row_dots(turned, turned, xp)
            if is_square:
                mirror = xp.matrix_transpose(tiles[j, i])
                trace = trace + len(tiles) * inner(tiles[i, j], mirror, xp)
    return TileSums(
        rows=xp.concat(rows, axis=-1),
        columns=xp.concat(columns, axis=-1),
        trace_of_square=trace if is_square else None,
        matrix=matrix,
    )


# If a factor's largest entry is in this range, sums of fourth powers neither over- nor underflow.
SAFE_ENTRY = {32: (1e-2, 1e2), 64: (1e-50, 1e50)}

# Relative error allowed in a score, by width of the floating-point type.
SCORE_TOLERANCE = {32: 1e-5, 64: 1e-10}


class Balanced(NamedTuple):
    """A factor divided by a power of two, such that sums of fourth powers of entries are finite."""

    factor: Float[Array, "... d r"]
    exponent: Float[Array, "*stack"]
    square_lengths: Float[Array, "... r"]  # sums of squares of the factor's columns


class Moments:
    """Sums over the entries of M / 2**exponent = query · keyᵀ. Every score is a function of them.

    Scores do not depend on the exponent. Norms are multiplied by the power of two at the end.
    """

    query: Float[Array, "... d_query r"]
    key: Float[Array, "... d_key r"]
    exponent: Float[Array, "*stack"]
    # Sums of squares of the factors' columns.
    square_lengths: tuple[Float[Array, "... r"], Float[Array, "... r"]]
    # AᵀA and BᵀB, on the route that needs them; M / 2**exponent, if it is formed at once.
    grams: tuple[Float[Array, "... r r"], Float[Array, "... r r"]] | None = None
    matrix: Float[Array, "... d_query d_key"] | None = None
    # ‖M‖²_F; tr(M M), for square forms; L2 norms of the rows and of the columns.
    square_norm: Float[Array, "*stack"]
    trace_of_square: Float[Array, "*stack"]
    row_norms: Float[Array, "... d_query"]
    column_norms: Float[Array, "... d_key"]

    def __init__(self, query: Balanced, key: Balanced) -> None:
        self.query, self.key = query.factor, key.factor
        self.exponent = query.exponent + key.exponent
        self.square_lengths = query.square_lengths, key.square_lengths

    @cached_property
    def square_sizes(self) -> tuple[Array, Array]:
        """‖A‖² and ‖B‖², whose product ‖M‖² cannot exceed."""
        query, key = (self._xp.sum(squares, axis=-1) for squares in self.square_lengths)
        return query, key

    def share(self, value: Array) -> Array:
        """``value / ‖M / 2**exponent‖²``; NaN for the zero matrix."""
        return quotient(value, self.square_norm, self._xp)

    @property
    def _xp(self) -> Any:
        return array_namespace(self.query, self.key)  # a module, which no pickle can hold


def measure(query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"]) -> Moments:
    """Return the moments of a stack of forms, both factors float32 or both float64.

    Raises
    ------
    NonFiniteWeights
        A factor has NaN or infinite entries.
    """
    xp = array_namespace(query, key)
    low_rank = 4 * query.shape[-1] <= min(query.shape[-2], key.shape[-2])
    route = Identities if low_rank else Tiles
    moments = route(balance(query, xp), balance(key, xp))
    if moments.cancels():
        return Tiles(*level(xp.astype(query, xp.float64), xp.astype(key, xp.float64), xp))
    return moments


def measure_entries(matrix: Array, identity: Array) -> Moments:
    """Return the moments of M = matrix · identityᵀ; NonFiniteWeights as for `measure`."""
    xp = array_namespace(matrix)
    return Entries(balance(matrix, xp), balance(identity, xp))


def widen(query: Array, key: Array) -> tuple[Array, Array]:
    """Convert both factors to one type, at least float32: half precision overflows in sums.

    Raises
    ------
    FormError
        The entries are not real floating-point numbers of at most 64 bits.
    """
    xp = array_namespace(query, key)
    for array in (query, key):
        if not xp.isdtype(array.dtype, "real floating") or bits(array, xp) > 64:
            raise FormError(
                f"factors must hold real numbers, float16 to float64, got {array.dtype}"
            )
    common = xp.result_type(query.dtype, key.dtype, xp.float32)
    return xp.astype(query, common, copy=False), xp.astype(key, common, copy=False)


def on_host(array: Array) -> np.ndarray:
    """Return an array of any library as NumPy's."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def bits(array: Array, xp: Any) -> int:
    """Width of an array's floating-point type: 16, 32 or 64."""
    return int(xp.finfo(array.dtype).bits)


def precision(array: Array, xp: Any) -> float:
    """Return the ratio of a sum to its summands below which the sum's root misses the tolerance."""
    return float(xp.finfo(array.dtype).eps) / (2 * SCORE_TOLERANCE[bits(array, xp)])


def quotient(value: Array, size: Array, xp: Any) -> Array:
    """Divide ``value`` by ``size``; NaN where the size is 0."""
    is_zero = size == 0
    ratio = value / xp.where(is_zero, xp.ones_like(size), size)
    return xp.where(is_zero, xp.full_like(ratio, math.nan), ratio)


def root(squares: Array, xp: Any) -> Array:
    """Return the square root, with the gradient 0, not infinity, at 0."""
    positive = squares > 0
    safe = xp.where(positive, squares, xp.ones_like(squares))
    return xp.where(positive, xp.sqrt(safe), xp.zeros_like(squares))


def times_power(array: Array, exponent: Array) -> Array:
    """``array * 2**exponent``, in two steps, since a subnormal number's power would overflow."""
    half = array_namespace(exponent).floor(exponent / 2)
    return array * 2.0**half * 2.0 ** (exponent - half)


def restore(array: Array, exponent: Array) -> Array:
    """``array * 2**exponent``, in float64 (complex128) if an exponent is not 0.

    Only then can the result be outside float32's range.
    """
    xp = array_namespace(array, exponent)
    if not xp.any(exponent != 0):
        return array
    is_real = xp.isdtype(array.dtype, "real floating")
    wide = xp.astype(array, xp.float64 if is_real else xp.complex128)
    return times_power(wide, xp.astype(exponent, xp.float64))


def balance(factor: Float[Array, "... d r"], xp: Any) -> Balanced:
    """Divide a factor by a power of two, which is exact, to bring its entries into the safe range.

    A factor that is already in the safe range is returned unchanged.
    """
    low, high = SAFE_ENTRY[bits(factor, xp)]
    with np.errstate(over="ignore", invalid="ignore"):
        squares = xp.linalg.vecdot(factor, factor, axis=-2)
    # The largest entry is no larger than the longest column, nor smaller than its entries' mean.
    longest = xp.max(squares, axis=-1)
    columns_are_safe = (longest > low**2 * factor.shape[-2]) & (longest < high**2)
    if bool(xp.all(columns_are_safe)):
        return Balanced(factor, xp.zeros_like(longest), squares)
    highest, lowest = xp.max(factor, axis=(-2, -1)), xp.min(factor, axis=(-2, -1))
    largest = xp.maximum(highest, -lowest)
    entries_are_safe = (largest > low) & (largest < high)
    if bool(xp.all(entries_are_safe)):
        return Balanced(factor, xp.zeros_like(largest), squares)
    if not bool(xp.all(xp.isfinite(largest))):
        raise NonFiniteWeights("the factors of a form must be finite, got NaN or infinite entries")
    exponent = xp.floor(_log2_or_zero(largest, xp))
    scaled = times_power(factor, -exponent[..., None, None])
    return Balanced(scaled, exponent, xp.linalg.vecdot(scaled, scaled, axis=-2))


def _log2_or_zero(sizes: Array, xp: Any) -> Array:
    """Return the binary logarithm of sizes; 0 for a size of 0."""
    positive = xp.where(sizes > 0, sizes, xp.ones_like(sizes))
    return xp.log2(positive)


def level(
    query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"], xp: Any
) -> tuple[Balanced, Balanced]:
    """Return factors of the same M in which every rank dimension has the same size on both sides.

    A dimension that is huge in one factor and tiny or zero in the other may contribute little to
    M, but next to it the digits of all other dimensions would be lost. Factors are multiplied by
    powers of two, then balanced.
    """
    query_sizes = xp.max(xp.abs(query), axis=-2)
    key_sizes = xp.max(xp.abs(key), axis=-2)
    contributes = (query_sizes > 0) & (key_sizes > 0)
    ratio = _log2_or_zero(query_sizes, xp) - _log2_or_zero(key_sizes, xp)
    half = xp.floor(ratio / 2)

    def scaled(factor: Array, exponent: Array) -> Array:
        factor = times_power(factor, exponent[..., None, :])
        return xp.where(contributes[..., None, :], factor, xp.zeros_like(factor))

    return balance(scaled(query, -half), xp), balance(scaled(key, half), xp)


class Identities(Moments):
    """Moments from Gram matrices: A = query, B = key, C = BᵀA."""

    grams: tuple[Float[Array, "... r r"], Float[Array, "... r r"]]

    def __init__(self, query: Balanced, key: Balanced) -> None:
        super().__init__(query, key)
        self.grams = gram(self.query, self._xp), gram(self.key, self._xp)

    def cancels(self) -> bool:
        """Return whether cancellation in the Gram matrices loses the digits of some ‖M‖²."""
        xp = self._xp
        # The Gram matrices are symmetric; their transposes are summed faster, along the memory.
        query, key = (xp.sqrt(square_sum(xp.matrix_transpose(matrix), xp)) for matrix in self.grams)
        return bool(xp.any(self.square_norm < 2 * precision(self.query, xp) * query * key))

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """Sum of AᵀA ∘ BᵀB."""
        return inner(*self.grams, self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of C ∘ Cᵀ."""
        cross = self._xp.matmul(self._xp.matrix_transpose(self.key), self.query)
        return inner(cross, self._xp.matrix_transpose(cross), self._xp)

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Square roots of the row sums of (A BᵀB) ∘ A."""
        return self._norms(self.query, self.key, self.grams[1], self.square_sizes[1])

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Square roots of the row sums of (B AᵀA) ∘ B."""
        return self._norms(self.key, self.query, self.grams[0], self.square_sizes[0])

    def _norms(
        self, factor: Array, opposite: Array, opposite_gram: Array, opposite_size: Array
    ) -> Array:
        """Norms of the rows of ``factor @ opposite.T``, by tiles where the identity cancels."""
        xp = self._xp
        squares = gram_dots(factor, opposite_gram, xp)
        bounds = row_dots(factor, factor, xp) * opposite_size[..., None]
        lost = squares < precision(factor, xp) ** 2 * bounds
        if bool(xp.any(lost)):
            squares = xp.where(lost, tile_sums(factor, opposite, xp).rows, squares)
        return root(squares, xp)


class Tiles(Moments):
    """Moments from one pass over the blocks of M."""

    def cancels(self) -> bool:
        """Return whether the digits of some M are lost in the precision of its factors."""
        xp = self._xp
        bound = self.square_sizes[0] * self.square_sizes[1]
        if bits(self.query, xp) == 64:
            lost = (bound > 0) & (self._square_norm <= self._rounding**2 * bound)
        else:
            lost = self.square_norm < precision(self.query, xp) ** 2 * bound
        return bool(xp.any(lost))

    @property
    def _rounding(self) -> float:
        eps = float(self._xp.finfo(self.query.dtype).eps)
        return eps * int(self.query.shape[-1])

    @cached_property
    def _sums(self) -> TileSums:
        return tile_sums(self.query, self.key, self._xp)

    @cached_property
    def matrix(self) -> Float[Array, "... d_query d_key"] | None:
        """M, if it is small."""
        return self._sums.matrix

    @cached_property
    def _square_norm(self) -> Float[Array, "*stack"]:
        return self._xp.sum(self._sums.rows, axis=-1)

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """‖M‖², or 0 if M is only the rounding error of sums that cancel."""
        xp = self._xp
        # ‖Σ_k a_k b_kᵀ‖ ≤ Σ_k ‖a_k‖ ‖b_k‖, to which rounding errors are proportional.
        query, key = (xp.sqrt(squares) for squares in self.square_lengths)
        reach = xp.sum(query * key, axis=-1)
        is_zero = self._square_norm <= (self._rounding * reach) ** 2
        return xp.where(is_zero, xp.zeros_like(self._square_norm), self._square_norm)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ Mᵀ."""
        return self._sums.trace_of_square

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Square roots of the row sums of M ∘ M."""
        return root(self._sums.rows, self._xp)

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Square roots of the column sums of M ∘ M."""
        return root(self._sums.columns, self._xp)


class Entries(Moments):
    """Moments from M itself, which is the query; the key is the identity."""

    def __init__(self, query: Balanced, key: Balanced) -> None:
        super().__init__(query, key)
        squares = self.query * self.query
        self.square_norm = self.square_sizes[0]
        self.row_norms = root(self._xp.sum(squares, axis=-1), self._xp)
        self.column_norms = root(self._xp.sum(squares, axis=-2), self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ Mᵀ, if M is square."""
        return inner(self.query, self._xp.matrix_transpose(self.query), self._xp)


class SVD(NamedTuple):
    """M = U · diag(S) · Vh, with k = min(rank, d_query, d_key) singular values, descending."""

    U: Float[Array, "... d_query k"]
    S: Float[Array, "... k"]
    Vh: Float[Array, "... k d_key"]


def svd(query: Array, key: Array) -> SVD:
    """U, S and Vh of query · keyᵀ; see `BilinearForm.svd`."""
    xp = array_namespace(query, key)
    query_basis, core, key_basis, exponent = _core(query, key)
    left, values, right = xp.linalg.svd(core, full_matrices=False)
    return SVD(
        xp.matmul(query_basis, left),
        restore(values, exponent[..., None]),
        xp.matmul(right, xp.matrix_transpose(key_basis)),
    )


def singular_values(query: Array, key: Array) -> Float[Array, "... k"]:
    """`SVD.S` alone."""
    _, core, _, exponent = _core(query, key)
    return restore(array_namespace(core).linalg.svdvals(core), exponent[..., None])


def eigenvalues(query: Array, key: Array) -> Array:
    """Eigenvalues of a square query · keyᵀ, complex, in descending order of magnitude.

    Those of keyᵀ · query are the same, but for zeros. The smaller of the two products is used.
    """
    xp = array_namespace(query, key)
    left, right = balance(query, xp), balance(key, xp)
    d, rank = query.shape[-2:]
    product = (
        xp.matmul(xp.matrix_transpose(right.factor), left.factor)
        if rank <= d
        else xp.matmul(left.factor, xp.matrix_transpose(right.factor))
    )
    values = xp.linalg.eigvals(product)
    if xp.isdtype(values.dtype, "real floating"):  # from NumPy, if none is complex
        values = values + 0j
    order = xp.argsort(-xp.abs(values), axis=-1, stable=True)
    exponent = left.exponent + right.exponent
    return restore(xp.take_along_axis(values, order, axis=-1), exponent[..., None])


def _core(query: Array, key: Array) -> tuple[Array, Array, Array, Array]:
    """Q_a, R_a R_bᵀ, Q_b and the exponent (...) of M = Q_a (R_a R_bᵀ) Q_bᵀ · 2**exponent."""
    xp = array_namespace(query, key)
    balanced_query, balanced_key = balance(query, xp), balance(key, xp)
    query_basis, query_triangle = xp.linalg.qr(balanced_query.factor)
    key_basis, key_triangle = xp.linalg.qr(balanced_key.factor)
    core = xp.matmul(query_triangle, xp.matrix_transpose(key_triangle))
    exponent = balanced_query.exponent + balanced_key.exponent
    return query_basis, core, key_basis, exponent


# A standard deviation below this share of the mean is rounding error.
NO_SPREAD = 1e-6


class Directionalities(NamedTuple):
    """`wqk.directionality` with either weight, named as columns are."""

    directionality: Float[Array, "*stack"]
    directionality_excess: Float[Array, "*stack"]


def directionalities(moments: Moments, gamma: float = 2.0) -> Directionalities:
    """Return `wqk.directionality` with both weights, from one search for outliers."""
    xp = array_namespace(moments.row_norms)

    def contrast(rows: Array, columns: Array) -> Array:
        total = rows + columns
        score = (rows - columns) / xp.where(total == 0, xp.ones_like(total), total)
        return xp.where(moments.square_norm > 0, score, xp.full_like(score, math.nan))

    sums = (_outlier_sums(norms, gamma) for norms in (moments.row_norms, moments.column_norms))
    return Directionalities(*map(contrast, *sums))


def outliers(norms: Float[Array, "... n"], gamma: float = 2.0) -> Bool[Array, "... n"]:
    """Mask of the norms above mean + gamma · std (n − 1) of the last axis; empty if all are equal.

    Examples
    --------
    >>> import numpy as np
    >>> outliers(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]))
    array([False, False, False, False, False, False,  True])
    """
    return _excess(norms, gamma) > 0


def _outlier_sums(norms: Array, gamma: float) -> tuple[Array, Array]:
    """Return two sums over the outliers: of the norms, and of the norms less the threshold."""
    xp = array_namespace(norms)
    excess = _excess(norms, gamma)
    zero = xp.zeros_like(norms)
    summands = xp.where(excess > 0, norms, zero), xp.where(excess > 0, excess, zero)
    return xp.sum(summands[0], axis=-1), xp.sum(summands[1], axis=-1)


def _excess(norms: Array, gamma: float) -> Array:
    """Each norm less the threshold mean + gamma · std; zero if all norms are equal."""
    if not 0 <= gamma < math.inf:
        raise FormError(f"gamma must be a finite number from 0 up, got {gamma}")
    xp = array_namespace(norms)
    if norms.shape[-1] < 2:
        return xp.zeros_like(norms)
    mean = xp.mean(norms, axis=-1, keepdims=True)
    spread = xp.std(norms, axis=-1, correction=1, keepdims=True)
    # No norm lies √n deviations above the mean; a larger factor would only overflow.
    deviations = min(gamma, math.sqrt(norms.shape[-1]))
    excess = norms - (mean + deviations * spread)
    return xp.where(spread > NO_SPREAD * mean, excess, xp.zeros_like(excess))
