"""The bilinear form of self-attention, W_qk = W_q W_kᵀ, kept as its two factors.

A form maps a query-side row vector x and a key-side row vector y to x W_qk yᵀ, the pair's raw
attention score (paper, Equation 2). The d × d matrix, of low rank, is built only by
`BilinearForm.dense`.

Axes: ``...`` a stack of forms, D width (``d_query``, ``d_key``), R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.errors import FormError
from wqk.forms import decompositions, kernels, sums


@dataclass(frozen=True, eq=False, repr=False)
class BilinearForm:
    """M = query · keyᵀ, or a stack of such forms.

    The leading axes stack forms and broadcast, so query heads may share a key head. Arrays may come
    from NumPy, PyTorch (gradients flow) or any other array-API library. Half precision is widened
    to float32.

    Parameters
    ----------
    query
        W_q, shape (..., d_query, rank). Its rows, and M's, belong to the query (predicted) side.
    key
        W_k, shape (..., d_key, rank). Its rows, and M's columns, belong to the key (context) side.

    Raises
    ------
    FormError
        The two ranks differ, the stacks do not broadcast, a factor is empty, or its entries are not
        real floating-point numbers.

    Examples
    --------
    >>> import numpy as np
    >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
    >>> form.dense()
    array([[3., 4.],
           [6., 8.]])
    >>> form
    BilinearForm(2 × 2, rank 1)
    >>> float(form([1.0, 0.0], [0.0, 1.0]))
    4.0
    """

    query: Float[Array, "... d_query rank"]
    key: Float[Array, "... d_key rank"]

    # NumPy defers to the form's own operators.
    __array_ufunc__ = None

    def __post_init__(self) -> None:
        query, key = tuple(self.query.shape), tuple(self.key.shape)
        if len(query) < 2 or len(key) < 2 or query[-1] != key[-1]:
            raise FormError(
                "query and key must be (..., d_query, rank) and (..., d_key, rank) with the same "
                f"rank, got {query} and {key}"
            )
        if 0 in query + key:
            raise FormError(f"query and key must not be empty, got {query} and {key}")
        _broadcast(query[:-2], key[:-2])
        for name, factor in zip(("query", "key"), kernels.widen(self.query, self.key), strict=True):
            object.__setattr__(self, name, factor)

    @classmethod
    def from_matrix(cls, matrix: Any) -> BilinearForm:
        """A form from M itself, (..., d_query, d_key), as M · Iᵀ.

        Examples
        --------
        >>> BilinearForm.from_matrix([[0, 1], [-1, 0]])
        BilinearForm(2 × 2, rank 2)
        """
        if not hasattr(matrix, "dtype"):
            matrix = np.asarray(matrix)
        xp = array_namespace(matrix)
        if xp.isdtype(matrix.dtype, ("bool", "integral")):
            matrix = xp.astype(matrix, xp.float64)
        if matrix.ndim < 2:
            raise FormError(f"a matrix must be (..., d_query, d_key), got {tuple(matrix.shape)}")
        identity = xp.eye(matrix.shape[-1], dtype=matrix.dtype, device=device(matrix))
        form = cls(matrix, identity)
        form.__dict__["moments"] = kernels.measure_entries(form.query, form.key)
        return form

    @property
    def shape(self) -> tuple[int, int]:
        """(d_query, d_key), the shape of M."""
        return int(self.query.shape[-2]), int(self.key.shape[-2])

    @property
    def rank(self) -> int:
        """Number of columns of each factor: an upper bound of M's rank."""
        return int(self.query.shape[-1])

    @property
    def stack(self) -> tuple[int, ...]:
        """Shape of the stack of forms; () for a single one."""
        return _broadcast(tuple(self.query.shape[:-2]), tuple(self.key.shape[:-2]))

    @property
    def is_square(self) -> bool:
        """Whether both sides have one width, as symmetry requires."""
        return self.shape[0] == self.shape[1]

    def __repr__(self) -> str:
        stack = f"{' × '.join(map(str, self.stack))} forms of " if self.stack else ""
        return f"BilinearForm({stack}{self.shape[0]} × {self.shape[1]}, rank {self.rank})"

    def __getitem__(self, index: Any) -> BilinearForm:
        """One form, or a smaller stack, by its place in the stack."""
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.stack):
            raise FormError(f"a stack of shape {self.stack} takes no index {index}")
        query, key = (_stacked(factor, self.stack) for factor in (self.query, self.key))
        return BilinearForm(query[(*index, ...)], key[(*index, ...)])

    def __call__(self, x: Any, y: Any) -> Array:
        """Scores x M yᵀ of query-side vectors x (..., N, d_query) and key-side y (..., N, d_key).

        Single vectors (d_query,) and (d_key,) give a single score.
        """
        xp = array_namespace(self.query, self.key)
        x, y = (xp.asarray(v, dtype=self.query.dtype) for v in (x, y))
        single = x.ndim == y.ndim == 1
        x, y = (v[None, :] if v.ndim == 1 else v for v in (x, y))
        scores = xp.matmul(xp.matmul(x, self.query), xp.matrix_transpose(xp.matmul(y, self.key)))
        return scores[..., 0, 0] if single else scores

    def dense(self) -> Float[Array, "... d_query d_key"]:
        """M itself, (..., d_query, d_key)."""
        xp = array_namespace(self.query, self.key)
        return xp.matmul(self.query, xp.matrix_transpose(self.key))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """`dense` as a NumPy array, for ``np.asarray(form)``."""
        if copy is False:
            raise ValueError(
                "a form's matrix has to be computed and needs a copy; leave out copy=False"
            )
        return np.asarray(kernels.on_host(self.dense()), dtype)

    def __matmul__(self, y: Any) -> Array:
        """M y of a vector (d_key,), or of the columns of a matrix (..., d_key, N).

        Examples
        --------
        >>> import numpy as np
        >>> form = BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]]))
        >>> form @ [1.0, 0.0], [1.0, 0.0] @ form
        (array([3., 6.]), array([3., 4.]))
        """
        return _times(self.query, self.key, self._operand(y, self.shape[1]))

    def __rmatmul__(self, x: Any) -> Array:
        """The product x M of a vector (d_query,), or of the rows of a matrix (..., N, d_query)."""
        xp = array_namespace(self.query, self.key)
        x = self._operand(x, self.shape[0], -1)
        if x.ndim == 1:
            return _times(self.key, self.query, x)
        return xp.matrix_transpose(_times(self.key, self.query, xp.matrix_transpose(x)))

    def _operand(self, values: Any, width: int, axis: int = -2) -> Array:
        """The other operand of a matrix product, in the form's type."""
        xp = array_namespace(self.query, self.key)
        values = xp.asarray(values, dtype=self.query.dtype)
        if values.ndim == 0 or values.shape[axis if values.ndim > 1 else 0] != width:
            raise FormError(
                f"a product with a {self.shape[0]} × {self.shape[1]} form needs {width} entries "
                f"along the shared axis, got shape {tuple(values.shape)}"
            )
        return values

    @property
    def T(self) -> BilinearForm:
        """The transpose: query and key change places."""
        return BilinearForm(self.key, self.query)

    def __mul__(self, factor: float) -> BilinearForm:
        return BilinearForm(self.query * factor, self.key)

    __rmul__ = __mul__

    def __neg__(self) -> BilinearForm:
        return self * -1.0

    def __add__(self, other: BilinearForm) -> BilinearForm:
        """The sum, of rank ``self.rank + other.rank``."""
        if self.shape != other.shape:
            raise FormError(f"forms must have the same shape, got {self.shape} and {other.shape}")
        return BilinearForm(
            _side_by_side(self.query, other.query), _side_by_side(self.key, other.key)
        )

    def __sub__(self, other: BilinearForm) -> BilinearForm:
        return self.difference(other)

    def difference(self, other: BilinearForm) -> BilinearForm:
        """``self - other`` as factors, of rank 2r: the update ΔW_qk (paper, Remark S1.6).

        For forms of one rank it is computed from the factors' differences, A Bᵀ − A₀B₀ᵀ =
        (A − A₀)Bᵀ + A₀(B − B₀)ᵀ, so that a small step between large forms keeps its precision.

        Examples
        --------
        >>> import numpy as np
        >>> one = BilinearForm(np.eye(2), np.eye(2))
        >>> float((one * 3.0).difference(one).norm) == float((one * 2.0).norm)
        True
        """
        if self.query.shape != other.query.shape or self.key.shape != other.key.shape:
            return self + -other
        return BilinearForm(
            _side_by_side(self.query - other.query, other.query),
            _side_by_side(self.key, self.key - other.key),
        )

    def sum(self) -> BilinearForm:
        """The sum over the stack as one form: the layer's W_qk from its heads' (paper, S20).

        Queries that share a key (a stack axis of length 1 in the key) are added, which keeps the
        rank at key_heads · head_width.
        """
        xp = array_namespace(self.query, self.key)
        query, key = (
            xp.reshape(a, (1,) * (len(self.stack) + 2 - a.ndim) + tuple(a.shape))
            for a in (self.query, self.key)
        )
        for _ in self.stack:
            if key.shape[-3] == 1:
                query, key = _total(query, xp), key[..., 0, :, :]
            elif query.shape[-3] == 1:
                query, key = query[..., 0, :, :], _total(key, xp)
            else:
                query, key = _join_last_axis(query, xp), _join_last_axis(key, xp)
        return BilinearForm(query, key)

    @cached_property
    def moments(self) -> kernels.Moments:
        """The sums over M's entries that scores are computed from; see `wqk.forms.kernels`."""
        return kernels.measure(self.query, self.key)

    @property
    def norm(self) -> Float[Array, "*stack"]:
        """Frobenius norm ‖M‖_F, shape (...).

        All norms of a form are in float64 if float32 cannot hold them.
        """
        xp = array_namespace(self.query, self.key)
        return kernels.restore(kernels.root(self.moments.square_norm, xp), self.moments.exponent)

    @property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """L2 norms of M's rows, shape (..., d_query)."""
        return kernels.restore(self.moments.row_norms, self.moments.exponent[..., None])

    @property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """L2 norms of M's columns, shape (..., d_key)."""
        return kernels.restore(self.moments.column_norms, self.moments.exponent[..., None])

    def svd(self) -> decompositions.SVD:
        """The singular value decomposition, from that of a rank × rank core.

        Returns
        -------
        SVD
            ``U`` (..., d_query, k), ``S`` (..., k), descending, and ``Vh`` (..., k, d_key), named
            as `numpy.linalg.svd` does; k = min(rank, d_query, d_key).

        Examples
        --------
        >>> import numpy as np
        >>> form = BilinearForm(np.array([[3.0], [0.0]]), np.array([[0.0], [2.0]]))
        >>> form.svd().S.round(6)
        array([6.])
        """
        return decompositions.svd(self.query, self.key)

    def singular_values(self) -> Float[Array, "... k"]:
        """The singular values of `svd`, in less time."""
        return decompositions.singular_values(self.query, self.key)

    def eigenvalues(self) -> Array:
        """Eigenvalues of a square form, (..., min(rank, d)), complex, largest magnitude first.

        The other d − rank are 0.

        Raises
        ------
        FormError
            The form is not square.

        Examples
        --------
        >>> import numpy as np
        >>> BilinearForm(np.array([[1.0], [2.0]]), np.array([[3.0], [4.0]])).eigenvalues().round(6)
        array([11.+0.j])
        """
        self.require_square("an eigenvalue")
        return decompositions.eigenvalues(self.query, self.key)

    @property
    def diagonal(self) -> Float[Array, "... d"]:
        """M's diagonal, shape (..., d), of a square form."""
        self.require_square("a diagonal")
        return sums.row_dots(self.query, self.key, array_namespace(self.query, self.key))

    @property
    def trace(self) -> Float[Array, "*stack"]:
        """tr(M), shape (...), of a square form."""
        return array_namespace(self.query, self.key).sum(self.diagonal, axis=-1)

    @property
    def symmetric_part(self) -> BilinearForm:
        """M_s = (M + Mᵀ)/2 as a form of rank 2r (paper, Equation 15)."""
        self.require_square("a symmetric part")
        return (self + self.T) * 0.5

    @property
    def skew_part(self) -> BilinearForm:
        """M_n = (M − Mᵀ)/2 as a form of rank 2r (paper, Equation 15)."""
        self.require_square("a skew part")
        return (self - self.T) * 0.5

    def require_square(self, what: str) -> None:
        """Raise `FormError` if the form is not square, which ``what`` needs."""
        if not self.is_square:
            raise FormError(f"{what} needs a square form, got {self.shape[0]} × {self.shape[1]}")


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two stacks."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise FormError(f"the stacks of query and key must broadcast, got {a} and {b}") from None


def _stacked(factor: Array, stack: tuple[int, ...]) -> Array:
    """A factor broadcast to a stack's shape."""
    return array_namespace(factor).broadcast_to(factor, (*stack, *factor.shape[-2:]))


def _times(left: Array, right: Array, y: Array) -> Array:
    """The product left · (rightᵀ y) for a vector or the columns of a matrix."""
    xp = array_namespace(left, right)
    columns = y[:, None] if y.ndim == 1 else y
    product = xp.matmul(left, xp.matmul(xp.matrix_transpose(right), columns))
    return product[..., 0] if y.ndim == 1 else product


def _side_by_side(a: Array, b: Array) -> Array:
    """Concatenate along the rank, after broadcasting the stacks."""
    stack = _broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return array_namespace(a, b).concat([_stacked(a, stack), _stacked(b, stack)], axis=-1)


def _total(factor: Array, xp: Any) -> Array:
    """The sum of (..., S, D, R) over S, in float64 if float32 cannot hold it."""
    if factor.shape[-3] == 1:
        return factor[..., 0, :, :]
    with np.errstate(over="ignore"):
        total = xp.sum(factor, axis=-3)
        fits = bool(xp.isfinite(xp.sum(total)))
    if kernels.bits(factor, xp) < 64 and not fits:
        return xp.sum(xp.astype(factor, xp.float64), axis=-3)
    return total


def _join_last_axis(factor: Array, xp: Any) -> Array:
    """Reshape (..., S, D, R) to (..., D, S·R): a view if the factor is a transposed weight."""
    *stack, count, width, rank = factor.shape
    transposed = xp.matrix_transpose(factor)
    return xp.matrix_transpose(xp.reshape(transposed, (*stack, count * rank, width)))
