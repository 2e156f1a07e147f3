"""What the scores need to know of M = A Bᵀ, computed from its factors in any array library.

Two routes to the same quantities. `Identities` works on Gram matrices and never forms an entry of
M; `Tiles` forms M block by block and forgets each block. With r the rank and d the width, the first
costs about 8 d r² operations and the second 2 d² r: `measure` takes the cheaper one, and leaves the
identities wherever subtraction would have eaten the digits.

Axes: ``...`` a stack of forms, D width, R rank. Factors are A = query (..., D, R) and B = key
(..., D, R); stacks broadcast, so that query heads which share a key head share its Gram matrix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.errors import FormError, NonFiniteWeights
from wqk.forms.sums import TileSums, gram, gram_dots, inner, row_dots, square_sum, tile_sums

# Largest entries of a factor with which sums of fourth powers neither over- nor underflow.
SAFE_ENTRY = {32: (1e-2, 1e2), 64: (1e-50, 1e50)}

# The relative error that a score may carry, by width of the floating-point type.
TOLERANCE = {32: 1e-5, 64: 1e-10}


class Moments(ABC):
    """Sums over the entries of M / 2**exponent = query · keyᵀ: what every score is a function of.

    Scores do not depend on the exponent; norms are multiplied by its power, last. ``grams`` are AᵀA
    and BᵀB on the route that needs them.
    """

    query: Float[Array, "... d_query r"]
    key: Float[Array, "... d_key r"]
    exponent: Float[Array, "*stack"]
    grams: tuple[Float[Array, "... r r"], Float[Array, "... r r"]] | None = None

    def __init__(self, query: Array, key: Array, exponent: Array) -> None:
        self._xp = array_namespace(query, key)
        self.query, self.key, self.exponent = query, key, exponent

    @property
    def whole(self) -> Float[Array, "... d_query d_key"] | None:
        """M / 2**exponent itself, where the route forms it at once."""
        return None

    @property
    @abstractmethod
    def cancels(self) -> bool:
        """Whether some M is so small against its factors that this route loses its digits."""

    @property
    @abstractmethod
    def square_norm(self) -> Float[Array, "*stack"]:
        """‖M‖²_F."""

    @property
    @abstractmethod
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """tr(M M), for square forms."""

    @property
    @abstractmethod
    def row_norms(self) -> Float[Array, "... d_query"]:
        """L2 norm of each row."""

    @property
    @abstractmethod
    def column_norms(self) -> Float[Array, "... d_key"]:
        """L2 norm of each column."""


def measure(query: Float[Array, "... d_query r"], key: Float[Array, "... d_key r"]) -> Moments:
    """Set up the cheaper accurate route for these factors.

    Parameters
    ----------
    query, key
        Factors (..., D, R) of a stack of forms, both float32 or both float64.

    Raises
    ------
    NonFiniteWeights
        A factor has NaN or infinite entries.
    """
    xp = array_namespace(query, key)
    query, query_exponent = balance(query, xp)
    key, key_exponent = balance(key, xp)
    exponent = query_exponent + key_exponent
    low_rank = 4 * query.shape[-1] <= min(query.shape[-2], key.shape[-2])
    moments = (Identities if low_rank else Tiles)(query, key, exponent)
    if moments.cancels:
        return Tiles(xp.astype(query, xp.float64), xp.astype(key, xp.float64), exponent)
    return moments


def measure_entries(matrix: Array, identity: Array) -> Moments:
    """The moments of M = matrix · identityᵀ, which is given explicitly.

    Raises
    ------
    NonFiniteWeights
        The matrix has NaN or infinite entries.
    """
    matrix, exponent = balance(matrix, array_namespace(matrix))
    return Entries(matrix, identity, exponent)


def widen(query: Array, key: Array) -> tuple[Array, Array]:
    """Both factors in one type, at least float32: half precision has no digits for sums of squares.

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


def bits(array: Array, xp: Any) -> int:
    """Width of an array's floating-point type: 16, 32 or 64."""
    return int(xp.finfo(array.dtype).bits)


def precision(array: Array, xp: Any) -> float:
    """How far a sum may fall short of its summands before its root misses the tolerance."""
    return float(xp.finfo(array.dtype).eps) / (2 * TOLERANCE[bits(array, xp)])


def root(squares: Array, xp: Any) -> Array:
    """The square root, of which the gradient at 0 is 0 and not infinite."""
    positive = squares > 0
    return xp.where(
        positive,
        xp.sqrt(xp.where(positive, squares, xp.ones_like(squares))),
        xp.zeros_like(squares),
    )


def times_power(array: Array, exponent: Array) -> Array:
    """``array * 2**exponent``, in two steps: the power of a subnormal's exponent is no number."""
    half = array_namespace(exponent).floor(exponent / 2)
    return array * 2.0**half * 2.0 ** (exponent - half)


def restore(array: Array, exponent: Array) -> Array:
    """``array * 2**exponent``, in float64 (complex128) where an exponent is not 0.

    Norms of factors that had to be balanced may lie outside of float32's range.
    """
    xp = array_namespace(array, exponent)
    if not xp.any(exponent != 0):
        return array
    is_real = xp.isdtype(array.dtype, "real floating")
    wide = xp.astype(array, xp.float64 if is_real else xp.complex128)
    return times_power(wide, xp.astype(exponent, xp.float64))


def balance(
    factor: Float[Array, "... d r"], xp: Any
) -> tuple[Float[Array, "... d r"], Float[Array, "*stack"]]:
    """Bring a factor into the safe range by powers of two, which is exact.

    Returns the factor, and the exponent (...) of the power of two that was taken off it. Factors
    that are safe already, which is nearly always, come back untouched.
    """
    low, high = SAFE_ENTRY[bits(factor, xp)]
    largest = xp.maximum(xp.max(factor, axis=(-2, -1)), -xp.min(factor, axis=(-2, -1)))
    if bool(xp.all((largest > low) & (largest < high))):
        return factor, xp.zeros_like(largest)
    if not bool(xp.all(xp.isfinite(largest))):
        raise NonFiniteWeights("the factors of a form must be finite, got NaN or infinite entries")
    exponent = xp.floor(xp.log2(xp.where(largest > 0, largest, xp.ones_like(largest))))
    return times_power(factor, -exponent[..., None, None]), exponent


class Identities(Moments):
    """Moments from Gram matrices, each computed when first asked for: A = query, B = key."""

    def __init__(self, query: Array, key: Array, exponent: Array) -> None:
        super().__init__(query, key, exponent)
        self._query_gram, self._key_gram = gram(query, self._xp), gram(key, self._xp)
        self.grams = self._query_gram, self._key_gram

    @property
    def cancels(self) -> bool:
        """Whether some ‖M‖² is so small against the Gram matrices that its digits are lost."""
        xp = self._xp
        grams = self._query_gram, self._key_gram
        # Symmetric, and summed in less time along the memory.
        query, key = (xp.sqrt(square_sum(xp.matrix_transpose(one), xp)) for one in grams)
        return bool(xp.any(self.square_norm < 2 * precision(self.query, xp) * query * key))

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """Sum of AᵀA ∘ BᵀB."""
        return inner(self._query_gram, self._key_gram, self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of C ∘ Cᵀ, with C = BᵀA."""
        cross = self._xp.matmul(self._xp.matrix_transpose(self.key), self.query)
        return inner(cross, self._xp.matrix_transpose(cross), self._xp)

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Roots of the row sums of (A BᵀB) ∘ A."""
        return self._norms(self.query, self.key, self._key_gram)

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Roots of the row sums of (B AᵀA) ∘ B."""
        return self._norms(self.key, self.query, self._query_gram)

    def _norms(self, factor: Array, other: Array, other_gram: Array) -> Array:
        """Norms of the rows of ``factor @ other.T``."""
        xp = self._xp
        squares = gram_dots(factor, other_gram, xp)
        reach = row_dots(factor, factor, xp) * square_sum(other, xp)[..., None]
        lost = squares < precision(factor, xp) ** 2 * reach
        if bool(xp.any(lost)):
            squares = xp.where(lost, tile_sums(factor, other, xp).rows, squares)
        return root(squares, xp)


class Tiles(Moments):
    """Moments from one pass over the blocks of M."""

    @property
    def cancels(self) -> bool:
        """Whether some M is so small against its factors that float64 is needed for its digits."""
        if bits(self.query, self._xp) == 64:
            return False
        small = precision(self.query, self._xp) ** 2
        return bool(self._xp.any(self.square_norm < small * self._reach))

    @cached_property
    def _reach(self) -> Array:
        """‖A‖² ‖B‖²."""
        return square_sum(self.query, self._xp) * square_sum(self.key, self._xp)

    @cached_property
    def _sums(self) -> TileSums:
        return tile_sums(self.query, self.key, self._xp)

    @property
    def whole(self) -> Float[Array, "... d_query d_key"] | None:
        """M, where it is small."""
        return self._sums.whole

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """‖M‖², and 0 where M is nothing but the rounding of sums that cancel."""
        xp = self._xp
        square_norm = xp.sum(self._sums.rows, axis=-1)
        rounding = float(xp.finfo(self.query.dtype).eps) * self.query.shape[-1]
        is_zero = square_norm <= rounding**2 * self._reach
        return xp.where(is_zero, xp.zeros_like(square_norm), square_norm)

    @property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ Mᵀ; only a square form has it."""
        return self._sums.trace_of_square

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Roots of the row sums of M ∘ M."""
        return root(self._sums.rows, self._xp)

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Roots of the column sums of M ∘ M."""
        return root(self._sums.columns, self._xp)


class Entries(Moments):
    """Moments from M itself: the query is M, the key the identity."""

    cancels = False

    @cached_property
    def square_norm(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ M."""
        return square_sum(self.query, self._xp)

    @cached_property
    def trace_of_square(self) -> Float[Array, "*stack"]:
        """Sum of M ∘ Mᵀ."""
        return inner(self.query, self._xp.matrix_transpose(self.query), self._xp)

    @cached_property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """Roots of the row sums of M ∘ M."""
        return root(self._xp.sum(self.query * self.query, axis=-1), self._xp)

    @cached_property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """Roots of the column sums of M ∘ M."""
        return root(self._xp.sum(self.query * self.query, axis=-2), self._xp)
