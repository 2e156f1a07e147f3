"""The bilinear form of self-attention, W_qk = W_q W_kᵀ, kept as its two factors.

A form assigns to a query-side row vector x and a key-side row vector y the number x W_qk yᵀ: the
raw attention score of the pair (paper, Equation 2). The matrix itself is d × d and of low rank, so
it is never built unless `BilinearForm.dense` is called.

Axes: ``...`` a stack of forms, D width (``d_query``, ``d_key``), R rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.errors import FormError
from wqk.forms import kernels


@dataclass(frozen=True, eq=False, repr=False)
class BilinearForm:
    """M = query · keyᵀ, or a stack of such forms.

    The leading axes stack forms and broadcast: query heads that share a key head need it once.
    Arrays may come from NumPy, PyTorch (gradients flow) or any other array-API library. Half
    precision is widened to float32.

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

    def __post_init__(self) -> None:
        query, key = tuple(self.query.shape), tuple(self.key.shape)
        if len(query) < 2 or len(key) < 2 or query[-1] != key[-1]:
            raise FormError(
                "query and key must be (..., d_query, rank) and (..., d_key, rank) with one rank, "
                f"got {query} and {key}"
            )
        if 0 in query + key:
            raise FormError(f"query and key must not be empty, got {query} and {key}")
        _broadcast(query[:-2], key[:-2])
        for name, factor in zip(("query", "key"), kernels.widen(self.query, self.key), strict=True):
            object.__setattr__(self, name, factor)

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
        """Whether both sides have one width, so that symmetry means something."""
        return self.shape[0] == self.shape[1]

    def __repr__(self) -> str:
        stack = f"{' × '.join(map(str, self.stack))} forms of " if self.stack else ""
        return f"BilinearForm({stack}{self.shape[0]} × {self.shape[1]}, rank {self.rank})"

    def __getitem__(self, index: Any) -> BilinearForm:
        """One form, or a smaller stack, by its place in the stack."""
        xp = array_namespace(self.query, self.key)
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(self.stack):
            raise FormError(f"a stack of shape {self.stack} takes no index {index}")
        query = xp.broadcast_to(self.query, (*self.stack, *self.query.shape[-2:]))
        key = xp.broadcast_to(self.key, (*self.stack, *self.key.shape[-2:]))
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
        """M itself, (..., d_query, d_key): the only place where it is built."""
        xp = array_namespace(self.query, self.key)
        return xp.matmul(self.query, xp.matrix_transpose(self.key))

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
            raise FormError(f"forms must have one shape, got {self.shape} and {other.shape}")
        return BilinearForm(
            _side_by_side(self.query, other.query), _side_by_side(self.key, other.key)
        )

    def __sub__(self, other: BilinearForm) -> BilinearForm:
        return self.difference(other)

    def difference(self, other: BilinearForm) -> BilinearForm:
        """``self - other`` in factored shape, of rank 2r: the update ΔW_qk (paper, Remark S1.6).

        Between forms of one rank it is made of the factors' own differences, A Bᵀ − A₀B₀ᵀ =
        (A − A₀)Bᵀ + A₀(B − B₀)ᵀ, so that a small step between large forms keeps its digits.

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

        Where several queries share one key (a stack axis on which the key has length 1) the queries
        are added, which keeps the rank at key_heads · head_width.
        """
        form = self
        for _ in self.stack:
            form = form._sum_last_axis()
        return form

    def _sum_last_axis(self) -> BilinearForm:
        xp = array_namespace(self.query, self.key)
        axes = len(self.stack) + 2
        query, key = (
            xp.reshape(a, (1,) * (axes - a.ndim) + tuple(a.shape)) for a in (self.query, self.key)
        )
        if key.shape[-3] == 1:
            return BilinearForm(_total(query, xp), key[..., 0, :, :])
        if query.shape[-3] == 1:
            return BilinearForm(query[..., 0, :, :], _total(key, xp))
        return BilinearForm(_join_last_axis(query, xp), _join_last_axis(key, xp))

    @cached_property
    def moments(self) -> kernels.Moments:
        """Sums over M's entries, from which the scores are made; see `wqk.forms.kernels`."""
        return kernels.measure(self.query, self.key)

    @property
    def norm(self) -> Float[Array, "*stack"]:
        """Frobenius norm ‖M‖_F, shape (...)."""
        xp = array_namespace(self.query, self.key)
        return kernels.times_power(
            kernels.root(self.moments.square_norm, xp), self.moments.exponent
        )

    @property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """L2 norms of M's rows, shape (..., d_query)."""
        return kernels.times_power(self.moments.row_norms, self.moments.exponent[..., None])

    @property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """L2 norms of M's columns, shape (..., d_key)."""
        return kernels.times_power(self.moments.column_norms, self.moments.exponent[..., None])

    @property
    def diagonal(self) -> Float[Array, "... d"]:
        """M's diagonal, shape (..., d), of a square form."""
        self._require_square("a diagonal")
        return kernels.row_dots(self.query, self.key, array_namespace(self.query, self.key))

    @property
    def trace(self) -> Float[Array, "*stack"]:
        """tr(M), shape (...), of a square form."""
        xp = array_namespace(self.query, self.key)
        return xp.sum(self.diagonal, axis=-1)

    @property
    def symmetric_part(self) -> BilinearForm:
        """M_s = (M + Mᵀ)/2 as a form of rank 2r (paper, Equation 15)."""
        self._require_square("a symmetric part")
        return (self + self.T) * 0.5

    @property
    def skew_part(self) -> BilinearForm:
        """M_n = (M − Mᵀ)/2 as a form of rank 2r (paper, Equation 15)."""
        self._require_square("a skew part")
        return (self - self.T) * 0.5

    def _require_square(self, what: str) -> None:
        if not self.is_square:
            raise FormError(f"only a square form has {what}, got {self.shape[0]} × {self.shape[1]}")


def _broadcast(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two stacks."""
    length = max(len(a), len(b))
    a, b = (1,) * (length - len(a)) + a, (1,) * (length - len(b)) + b
    if any(m != n and 1 not in (m, n) for m, n in zip(a, b, strict=True)):
        raise FormError(f"the stacks of query and key must broadcast, got {a} and {b}")
    return tuple(int(max(m, n)) if 0 not in (m, n) else 0 for m, n in zip(a, b, strict=True))


def _side_by_side(a: Array, b: Array) -> Array:
    """Concatenate along the rank, after broadcasting the stacks."""
    xp = array_namespace(a, b)
    stack = _broadcast(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    a, b = (xp.broadcast_to(v, (*stack, *v.shape[-2:])) for v in (a, b))
    return xp.concat([a, b], axis=-1)


def _total(factor: Array, xp: Any) -> Array:
    """(..., S, D, R) added up over S."""
    return factor[..., 0, :, :] if factor.shape[-3] == 1 else xp.sum(factor, axis=-3)


def _join_last_axis(factor: Array, xp: Any) -> Array:
    """(..., S, D, R) to (..., D, S·R); a view where the factor is a transposed weight."""
    *stack, count, width, rank = factor.shape
    transposed = xp.matrix_transpose(factor)
    return xp.matrix_transpose(xp.reshape(transposed, (*stack, count * rank, width)))
