"""The sums over M = A Bᵀ that its scores need, computed from the factors in any array library.

There are two routes. `Identities` works on Gram matrices and never forms an entry of M, in about 8
D R² operations; `Tiles` forms M block by block, in 2 D² R operations. `measure` takes the cheaper
route, but not the identities if their sums would cancel. Blocks stay in a core's cache.

The factors, and therefore M, are first divided by powers of two (`balance`); the exponents are
kept.

With the QR decompositions A = Q_a R_a and B = Q_b R_b, M = Q_a (R_a R_bᵀ) Q_bᵀ: the core in the
middle, k × k with k = min(R, D), has M's singular values, and R_a R_bᵀ Q_bᵀ Q_a its nonzero
eigenvalues.

The order of this file: `measure` and the two routes, tiles, balanced factors, sums, decompositions,
and directionality.

Axes: ``...`` a stack of forms, D width, R rank. Factors are A = query (..., D, R) and B = key
(..., D, R); stacks broadcast, so query heads that share a key head share its Gram matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_numpy_namespace

from wqk._machine import cached_property
from wqk._typing import Array, Bool, Float
from wqk.errors import FormError, NonFiniteWeights
from wqk.forms.arrays import array_namespace, bits

# Entries of one intermediate block: 2 MB in float32, which stays in a core's cache.
BLOCK_ENTRIES = 2**19

# If a factor's largest entry is in this range, sums of fourth powers neither over- nor underflow.
SAFE_ENTRY = {32: (1e-2, 1e2), 64: (1e-50, 1e50)}

# Relative error allowed in a score, by width of the floating-point type.
SCORE_TOLERANCE = {32: 1e-5, 64: 1e-10}

# A standard deviation below this share of the mean is rounding error.
NO_SPREAD = 1e-6


def measure(query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"]) -> Moments:
    """Return the moments of a stack of forms; the factors are both float32 or both float64.

    Raises
    ------
    NonFiniteWeights
        A factor has NaN or infinite entries.
    """
    xp = array_namespace(query, key)
    has_low_rank = 4 * query.shape[-1] <= min(query.shape[-2], key.shape[-2])
    route = Identities if has_low_rank else Tiles
    moments = route(balance(query, xp), balance(key, xp))
    if moments.cancels():
        return Tiles(*level(xp.astype(query, xp.float64), xp.astype(key, xp.float64), xp))
    return moments


def measure_entries(matrix: Array, identity: Array) -> Moments:
    """Return the moments of M = matrix · identityᵀ; NonFiniteWeights as for `measure`."""
    xp = array_namespace(matrix)
    return Entries(balance(matrix, xp), balance(identity, xp))


class Balanced(NamedTuple):
    """A factor divided by a power of two so that sums of fourth powers of entries are finite."""

    factor: Float[Array, "... d r"]
    exponent: Float[Array, "*stack"]  # the factor was divided by 2**exponent
    square_lengths: Float[Array, "... r"]  # sums of squares of the factor's columns


class Moments:
    """Sums over the entries of M / 2**exponent = query · keyᵀ; all scores are functions of them.

    Scores do not depend on the exponent. Norms are multiplied by the power of two at the end.

    Attributes
    ----------
    query, key
        The factors A and B, divided by powers of two.
    exponent
        Exponent of the power of two by which M was divided.
    square_lengths
        Sums of squares of the columns of A and of B.
    grams
        AᵀA and BᵀB; None on the route by tiles.
    matrix
        M / 2**exponent, if it is formed at once.
    square_norm
        ‖M‖²_F.
    trace_of_square
        tr(M M), for square forms.
    row_norms, column_norms
        L2 norms of M's rows and columns.
    """

    query: Float[Array, "... d_query r"]
    key: Float[Array, "... d_key r"]
    exponent: Float[Array, "*stack"]
    square_lengths: tuple[Float[Array, "... r"], Float[Array, "... r"]]
    grams: tuple[Float[Array, "... r r"], Float[Array, "... r r"]] | None = None
    matrix: Float[Array, "... d_query d_key"] | None = None
    square_norm: Float[Array, "*stack"]
    trace_of_square: Float[Array, "*stack"]
    row_norms: Float[Array, "... d_query"]
    column_norms: Float[Array, "... d_key"]

    def __init__(self, query: Balanced, key: Balanced) -> None:
        self.query, self.key = query.factor, key.factor
        self.exponent = query.exponent + key.exponent
        self.square_lengths = query.square_lengths, key.square_lengths

    @cached_property
    def square_sizes(self) -> tuple[Float[Array, "*query_stack"], Float[Array, "*key_stack"]]:
        """‖A‖² and ‖B‖². Their product is an upper bound of ‖M‖²."""
        query_squares, key_squares = self.square_lengths
        return self._xp.sum(query_squares, axis=-1), self._xp.sum(key_squares, axis=-1)

    def share(self, value: Float[Array, "*stack"]) -> Float[Array, "*stack"]:
        """``value / ‖M / 2**exponent‖²``; NaN for the zero matrix."""
        return quotient(value, self.square_norm, self._xp)

    @property
    def _xp(self) -> Any:
        return array_namespace(self.query, self.key)  # modules cannot be pickled


class Identities(Moments):
    """Moments from Gram matrices: A = query, B = key, C = BᵀA."""

    grams: tuple[Float[Array, "... r r"], Float[Array, "... r r"]]

    def __init__(self, query: Balanced, key: Balanced) -> None:
        super().__init__(query, key)
        self.grams = gram(self.query, self._xp), gram(self.key, self._xp)

    def cancels(self) -> bool:
        """Return whether, for some form, ‖M‖² is so far below ‖AᵀA‖ ‖BᵀB‖ that digits are lost."""
        xp = self._xp
        query_gram, key_gram = self.grams
        # The Gram matrices are symmetric; their transposes are summed faster, along the memory.
        query_size = xp.sqrt(square_sum(xp.matrix_transpose(query_gram), xp))
        key_size = xp.sqrt(square_sum(xp.matrix_transpose(key_gram), xp))
        least = 2 * least_ratio(self.query, xp) * query_size * key_size
        return bool(xp.any(self.square_norm < least))

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """Sum of AᵀA ∘ BᵀB."""
        query_gram, key_gram = self.grams
        return inner(query_gram, key_gram, self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of C ∘ Cᵀ."""
        cross = self._xp.matmul(self._xp.matrix_transpose(self.key), self.query)
        return inner(cross, self._xp.matrix_transpose(cross), self._xp)

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Square roots of the row sums of (A BᵀB) ∘ A."""
        _, key_gram = self.grams
        _, key_square_size = self.square_sizes
        return self._norms(self.query, self.key, key_gram, key_square_size)

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Square roots of the row sums of (B AᵀA) ∘ B."""
        query_gram, _ = self.grams
        query_square_size, _ = self.square_sizes
        return self._norms(self.key, self.query, query_gram, query_square_size)

    def _norms(
        self,
        factor: Float[Array, "... d r"],
        opposite: Float[Array, "... d_opposite r"],
        opposite_gram: Float[Array, "... r r"],
        opposite_square_size: Float[Array, "*opposite_stack"],
    ) -> Float[Array, "... d"]:
        """Return the row norms of ``factor @ opposite.T``, by tiles if the identity cancels.

        Parameters
        ----------
        factor, opposite
            A and B for the rows of M, B and A for the columns.
        opposite_gram, opposite_square_size
            Gram matrix and squared Frobenius norm of ``opposite``.
        """
        xp = self._xp
        squares = gram_dots(factor, opposite_gram, xp)
        bounds = row_dots(factor, factor, xp) * opposite_square_size[..., None]
        has_cancelled = squares < least_ratio(factor, xp) ** 2 * bounds
        if bool(xp.any(has_cancelled)):
            squares = xp.where(has_cancelled, tile_sums(factor, opposite, xp).rows, squares)
        return root(squares, xp)


class Tiles(Moments):
    """Moments from one pass over the blocks of M."""

    def cancels(self) -> bool:
        """Return whether the digits of some M are lost in the precision of its factors."""
        xp = self._xp
        query_square_size, key_square_size = self.square_sizes
        bound = query_square_size * key_square_size
        if bits(self.query, xp) == 64:
            has_cancelled = (bound > 0) & (self._square_sum <= self._rounding**2 * bound)
        else:
            has_cancelled = self.square_norm < least_ratio(self.query, xp) ** 2 * bound
        return bool(xp.any(has_cancelled))

    @property
    def _rounding(self) -> float:
        """Relative rounding error of a sum of R products."""
        eps = float(self._xp.finfo(self.query.dtype).eps)
        return eps * int(self.query.shape[-1])

    @cached_property
    def _sums(self) -> TileSums:
        return tile_sums(self.query, self.key, self._xp)

    @cached_property
    def matrix(self) -> Float[Array, "... d_query d_key"] | None:
        """The matrix M, if small."""
        return self._sums.matrix

    @cached_property
    def _square_sum(self) -> Float[Array, "*stack"]:
        """‖M‖² as summed, with rounding errors."""
        return self._xp.sum(self._sums.rows, axis=-1)

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """‖M‖², or 0 if the sum may consist of rounding errors only."""
        xp = self._xp
        # ‖Σ_k a_k b_kᵀ‖ ≤ Σ_k ‖a_k‖ ‖b_k‖, to which rounding errors are proportional.
        query_squares, key_squares = self.square_lengths
        reach = xp.sum(xp.sqrt(query_squares) * xp.sqrt(key_squares), axis=-1)
        is_rounding = self._square_sum <= (self._rounding * reach) ** 2
        return xp.where(is_rounding, xp.zeros_like(self._square_sum), self._square_sum)

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
    """Moments from the entries of M: the query is M, the key is the identity."""

    def __init__(self, query: Balanced, key: Balanced) -> None:
        super().__init__(query, key)
        squares = self.query * self.query
        self.square_norm, _ = self.square_sizes
        self.row_norms = root(self._xp.sum(squares, axis=-1), self._xp)
        self.column_norms = root(self._xp.sum(squares, axis=-2), self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ Mᵀ, if M is square."""
        return inner(self.query, self._xp.matrix_transpose(self.query), self._xp)


class TileSums(NamedTuple):
    """Sums over the squared entries of M; for a square M, tr(M M); and M, if small."""

    rows: Float[Array, "... d_query"]
    columns: Float[Array, "... d_key"]
    trace_of_square: Float[Array, "*stack"] | None
    matrix: Float[Array, "... d_query d_key"] | None


def tile_sums(
    query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"], xp: Any
) -> TileSums:
    """Sum over M block by block, without ever holding a large M in memory.

    Blocks (i, j) and (j, i) of a square form are computed together, because tr(M M) needs both.
    """
    is_square = query.shape[-2] == key.shape[-2]
    stack_size = math.prod(query.shape[:-2]) or 1
    side = max(32, math.isqrt(BLOCK_ENTRIES // stack_size))
    row_parts = list(block_slices(query.shape[-2], side))
    column_parts = list(block_slices(key.shape[-2], side))
    row_sums: list[Any] = [0.0] * len(row_parts)
    column_sums: list[Any] = [0.0] * len(column_parts)
    trace: Any = 0.0
    keys = xp.matrix_transpose(key)
    # One product takes less time than the tiles of a small form.
    is_small = stack_size * query.shape[-2] * key.shape[-2] <= 2 * BLOCK_ENTRIES
    matrix = xp.matmul(query, keys) if is_small else None
    form = _Cut(query, keys, matrix)
    for i, rows in enumerate(row_parts):
        for j in range(i if is_square else 0, len(column_parts)):
            columns = column_parts[j]
            entries = form.block(rows, columns, xp)
            row_sums[i] = row_sums[i] + xp.linalg.vecdot(entries, entries)
            column_sums[j] = column_sums[j] + _column_dots(entries, xp)
            if not is_square:
                continue
            if i == j:  # a block of the diagonal is its own mirror image
                trace = trace + inner(entries, xp.matrix_transpose(entries), xp)
                continue
            mirror = form.block(columns, rows, xp)
            row_sums[j] = row_sums[j] + xp.linalg.vecdot(mirror, mirror)
            column_sums[i] = column_sums[i] + _column_dots(mirror, xp)
            trace = trace + 2 * inner(entries, xp.matrix_transpose(mirror), xp)
    return TileSums(
        rows=xp.concat(row_sums, axis=-1),
        columns=xp.concat(column_sums, axis=-1),
        trace_of_square=trace if is_square else None,
        matrix=matrix,
    )


class _Cut(NamedTuple):
    """A form to be cut into blocks: the factors, and the matrix if in memory."""

    query: Float[Array, "... d_query r"]
    keys: Float[Array, "... r d_key"]
    matrix: Float[Array, "... d_query d_key"] | None

    def block(self, rows: slice, columns: slice, xp: Any) -> Array:
        """Return the entries of some rows and columns."""
        if self.matrix is not None:
            return self.matrix[..., rows, columns]
        return xp.matmul(self.query[..., rows, :], self.keys[..., columns])


def _column_dots(entries: Array, xp: Any) -> Array:
    """Return the sum of squares of each column."""
    transposed = xp.matrix_transpose(entries)
    return row_dots(transposed, transposed, xp)


def block_slices(length: int, width: int) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of equal length, at most ``width``.

    Examples
    --------
    >>> list(block_slices(10, 4))
    [slice(0, 3, None), slice(3, 7, None), slice(7, 10, None)]
    """
    count = max(1, math.ceil(length / width))
    edges = [round(i * length / count) for i in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(edges))


def balance(factor: Float[Array, "... d r"], xp: Any) -> Balanced:
    """Divide a factor by a power of two, exactly, to bring its entries into the safe range.

    A factor that is already in the safe range is returned unchanged.

    Raises
    ------
    NonFiniteWeights
        The factor has NaN or infinite entries.
    """
    low, high = SAFE_ENTRY[bits(factor, xp)]
    width = factor.shape[-2]
    with np.errstate(over="ignore", invalid="ignore"):
        square_lengths = xp.linalg.vecdot(factor, factor, axis=-2)
    # The square of the largest entry lies between the largest sum of squares of a column and the
    # mean of that column's squares.
    largest_sum = xp.max(square_lengths, axis=-1)
    columns_are_safe = (largest_sum > low**2 * width) & (largest_sum < high**2)
    if bool(xp.all(columns_are_safe)):
        return Balanced(factor, xp.zeros_like(largest_sum), square_lengths)
    highest, lowest = xp.max(factor, axis=(-2, -1)), xp.min(factor, axis=(-2, -1))
    largest_entry = xp.maximum(highest, -lowest)
    entries_are_safe = (largest_entry > low) & (largest_entry < high)
    if bool(xp.all(entries_are_safe)):
        return Balanced(factor, xp.zeros_like(largest_entry), square_lengths)
    if not bool(xp.all(xp.isfinite(largest_entry))):
        raise NonFiniteWeights("the factors of a form must be finite, got NaN or infinite entries")
    exponent = xp.floor(_log2_or_zero(largest_entry, xp))
    scaled = times_power(factor, -exponent[..., None, None])
    return Balanced(scaled, exponent, xp.linalg.vecdot(scaled, scaled, axis=-2))


def level(
    query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"], xp: Any
) -> tuple[Balanced, Balanced]:
    """Rescale the rank dimensions of two factors to equal sizes on both sides, for the same M.

    A dimension that is huge in one factor and tiny or zero in the other may contribute little to M,
    but the digits of all other dimensions would be lost next to it. Factors are multiplied by
    powers of two, then balanced.
    """
    query_sizes = xp.max(xp.abs(query), axis=-2)
    key_sizes = xp.max(xp.abs(key), axis=-2)
    contributes = (query_sizes > 0) & (key_sizes > 0)
    log_ratio = _log2_or_zero(query_sizes, xp) - _log2_or_zero(key_sizes, xp)
    half = xp.floor(log_ratio / 2)
    level_query = _scaled_columns(query, -half, contributes, xp)
    level_key = _scaled_columns(key, half, contributes, xp)
    return balance(level_query, xp), balance(level_key, xp)


def _scaled_columns(
    factor: Float[Array, "... d r"],
    exponent: Float[Array, "... r"],
    contributes: Bool[Array, "... r"],
    xp: Any,
) -> Float[Array, "... d r"]:
    """Multiply columns by 2**exponent; columns that do not contribute to M become zero."""
    factor = times_power(factor, exponent[..., None, :])
    return xp.where(contributes[..., None, :], factor, xp.zeros_like(factor))


def times_power(array: Array, exponent: Array) -> Array:
    """Return ``array * 2**exponent``, in two steps: powers for subnormal numbers would overflow."""
    half = array_namespace(exponent).floor(exponent / 2)
    return array * 2.0**half * 2.0 ** (exponent - half)


def restore(array: Array, exponent: Array) -> Array:
    """Return ``array * 2**exponent``, in float64 (complex128) if an exponent is not 0.

    If all exponents are 0, the result is within the range of float32.
    """
    xp = array_namespace(array, exponent)
    if not xp.any(exponent != 0):
        return array
    is_real = xp.isdtype(array.dtype, "real floating")
    wide = xp.astype(array, xp.float64 if is_real else xp.complex128)
    return times_power(wide, xp.astype(exponent, xp.float64))


def _log2_or_zero(sizes: Array, xp: Any) -> Array:
    """Return the binary logarithm of sizes; 0 for a size of 0."""
    positive = xp.where(sizes > 0, sizes, xp.ones_like(sizes))
    return xp.log2(positive)


def gram(factor: Float[Array, "... d r"], xp: Any) -> Float[Array, "... r r"]:
    """Return AᵀA for each form of the stack."""
    return xp.matmul(xp.matrix_transpose(factor), factor)


def inner(
    a: Float[Array, "... d r"], b: Float[Array, "... d r"], xp: Any
) -> Float[Array, "*stack"]:
    """Return the Frobenius inner product over the last two axes."""
    return xp.sum(xp.linalg.vecdot(a, b), axis=-1)


def square_sum(array: Float[Array, "... d r"], xp: Any) -> Float[Array, "*stack"]:
    """Return the sum of squares over the last two axes, in the order of transposed weights."""
    return xp.sum(xp.linalg.vecdot(array, array, axis=-2), axis=-1)


def row_dots(
    a: Float[Array, "... d r"], b: Float[Array, "... d r"], xp: Any
) -> Float[Array, "... d"]:
    """Return a_i · b_i for every row i."""
    if is_numpy_namespace(xp):  # in one pass, without an array of the products
        return np.einsum("...dr,...dr->...d", a, b)
    return xp.sum(a * b, axis=-1)


def gram_dots(
    a: Float[Array, "... d r"], gram: Float[Array, "... r r"], xp: Any
) -> Float[Array, "... d"]:
    """Return a_i G · a_i for every row i and a symmetric matrix G, in blocks that fit the cache."""
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


def quotient(value: Array, size: Array, xp: Any) -> Array:
    """Divide ``value`` by ``size``; NaN where the size is 0."""
    is_zero = size == 0
    ratio = value / xp.where(is_zero, xp.ones_like(size), size)
    return xp.where(is_zero, xp.full_like(ratio, math.nan), ratio)


def root(squares: Array, xp: Any) -> Array:
    """Return the square root; at 0, the gradient is 0 instead of infinity."""
    is_positive = squares > 0
    positive = xp.where(is_positive, squares, xp.ones_like(squares))
    return xp.where(is_positive, xp.sqrt(positive), xp.zeros_like(squares))


def least_ratio(array: Array, xp: Any) -> float:
    """Return the smallest ratio of a sum to its summands at which the root is accurate enough."""
    return float(xp.finfo(array.dtype).eps) / (2 * SCORE_TOLERANCE[bits(array, xp)])


class SVD(NamedTuple):
    """M = U · diag(S) · Vh, with k = min(rank, d_query, d_key) singular values, descending."""

    U: Float[Array, "... d_query k"]
    S: Float[Array, "... k"]
    Vh: Float[Array, "... k d_key"]


class CoreFactors(NamedTuple):
    """M / 2**exponent = Q_a core Q_bᵀ, with orthonormal columns in Q_a and Q_b."""

    query_basis: Float[Array, "... d_query k_query"]  # Q_a
    core: Float[Array, "... k_query k_key"]  # R_a R_bᵀ
    key_basis: Float[Array, "... d_key k_key"]  # Q_b
    exponent: Float[Array, "*stack"]


def _core_factors(query: Array, key: Array) -> CoreFactors:
    """Factor query · keyᵀ by the QR decompositions Q_a R_a of the query and Q_b R_b of the key."""
    xp = array_namespace(query, key)
    balanced_query, balanced_key = balance(query, xp), balance(key, xp)
    query_basis, query_triangle = xp.linalg.qr(balanced_query.factor)
    key_basis, key_triangle = xp.linalg.qr(balanced_key.factor)
    return CoreFactors(
        query_basis=query_basis,
        core=xp.matmul(query_triangle, xp.matrix_transpose(key_triangle)),
        key_basis=key_basis,
        exponent=balanced_query.exponent + balanced_key.exponent,
    )


def svd(query: Array, key: Array) -> SVD:
    """Return U, S and Vh of query · keyᵀ; see `BilinearForm.svd`."""
    xp = array_namespace(query, key)
    factors = _core_factors(query, key)
    left, values, right = xp.linalg.svd(factors.core, full_matrices=False)
    return SVD(
        U=xp.matmul(factors.query_basis, left),
        S=restore(values, factors.exponent[..., None]),
        Vh=xp.matmul(right, xp.matrix_transpose(factors.key_basis)),
    )


def singular_values(query: Array, key: Array) -> Float[Array, "... k"]:
    """Return `SVD.S` alone."""
    factors = _core_factors(query, key)
    values = array_namespace(factors.core).linalg.svdvals(factors.core)
    return restore(values, factors.exponent[..., None])


def eigenvalues(query: Array, key: Array) -> Array:
    """Return the eigenvalues of a square query · keyᵀ, complex, in descending order of magnitude.

    The product keyᵀ · query has the same eigenvalues, except for zeros. The smaller product is
    used.
    """
    xp = array_namespace(query, key)
    balanced_query, balanced_key = balance(query, xp), balance(key, xp)
    keys = xp.matrix_transpose(balanced_key.factor)
    width, rank = query.shape[-2:]
    if rank <= width:
        product = xp.matmul(keys, balanced_query.factor)
    else:
        product = xp.matmul(balanced_query.factor, keys)
    values = xp.linalg.eigvals(product)
    if xp.isdtype(values.dtype, "real floating"):  # from NumPy, if none is complex
        values = values + 0j
    order = xp.argsort(-xp.abs(values), axis=-1, stable=True)
    exponent = balanced_query.exponent + balanced_key.exponent
    return restore(xp.take_along_axis(values, order, axis=-1), exponent[..., None])


class Directionalities(NamedTuple):
    """`wqk.directionality` with both weights; the fields are named as the columns."""

    directionality: Float[Array, "*stack"]
    directionality_excess: Float[Array, "*stack"]


def directionalities(moments: Moments, gamma: float = 2.0) -> Directionalities:
    """Return `wqk.directionality` with both weights, from one search for outliers."""
    is_nonzero = moments.square_norm > 0
    rows = _outlier_sums(moments.row_norms, gamma)
    columns = _outlier_sums(moments.column_norms, gamma)
    return Directionalities(
        directionality=_contrast(rows.norms, columns.norms, is_nonzero),
        directionality_excess=_contrast(rows.excesses, columns.excesses, is_nonzero),
    )


def _contrast(row_sum: Array, column_sum: Array, is_nonzero: Array) -> Array:
    """Return (R − C) / (R + C); 0 if both are 0, NaN for the zero matrix."""
    xp = array_namespace(row_sum)
    total = row_sum + column_sum
    divisor = xp.where(total == 0, xp.ones_like(total), total)
    score = (row_sum - column_sum) / divisor
    return xp.where(is_nonzero, score, xp.full_like(score, math.nan))


def outliers(norms: Float[Array, "... n"], gamma: float = 2.0) -> Bool[Array, "... n"]:
    """Return the mask of norms above mean + gamma · std (n − 1); empty if all are equal.

    Examples
    --------
    >>> import numpy as np
    >>> outliers(np.array([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0]))
    array([False, False, False, False, False, False,  True])
    """
    return _excess(norms, gamma) > 0


class OutlierSums(NamedTuple):
    """Two sums over outlying norms: the norms, and the norms minus the threshold."""

    norms: Float[Array, "*stack"]
    excesses: Float[Array, "*stack"]


def _outlier_sums(norms: Float[Array, "... n"], gamma: float) -> OutlierSums:
    """Sum the norms above the threshold, and the excesses over it, over the last axis."""
    xp = array_namespace(norms)
    excess = _excess(norms, gamma)
    is_outlier = excess > 0
    zero = xp.zeros_like(norms)
    return OutlierSums(
        norms=xp.sum(xp.where(is_outlier, norms, zero), axis=-1),
        excesses=xp.sum(xp.where(is_outlier, excess, zero), axis=-1),
    )


def _excess(norms: Float[Array, "... n"], gamma: float) -> Float[Array, "... n"]:
    """Return each norm minus the threshold mean + gamma · std; zero if all norms are equal."""
    if not 0 <= gamma < math.inf:
        raise FormError(f"gamma must be a finite number from 0 up, got {gamma}")
    xp = array_namespace(norms)
    count = norms.shape[-1]
    if count < 2:
        return xp.zeros_like(norms)
    mean = xp.mean(norms, axis=-1, keepdims=True)
    deviation = xp.std(norms, axis=-1, correction=1, keepdims=True)
    # No norm lies √n deviations above the mean; a larger factor would only overflow.
    factor = min(gamma, math.sqrt(count))
    excess = norms - (mean + factor * deviation)
    return xp.where(deviation > NO_SPREAD * mean, excess, xp.zeros_like(excess))
