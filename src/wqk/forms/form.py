"""The bilinear form of self-attention, W_qk = W_q W_kᵀ, kept as its two factors.

A form maps a query-side row vector x and a key-side row vector y to x W_qk yᵀ, the pair's raw
attention score (paper, Equation 2). The d × d matrix, of low rank, is built only on request.

Axes: ``...`` a stack of forms, D width (``d_query``, ``d_key``), R rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import device, is_array_api_obj

from wqk._guesses import METHOD_CALLS
from wqk._machine import cached_property
from wqk._style import current
from wqk._typing import Array, Float, Scores
from wqk.errors import Advising, FormError, called_as
from wqk.forms import kernels
from wqk.forms.arrays import (
    array_namespace,
    as_array,
    axes_taken,
    common_stack,
    is_number,
    joined,
    keep_axis,
    linear_weight,
    on_host,
    side_by_side,
    stacked_as,
    total,
    widen,
)
from wqk.forms.kernels import directionalities

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Names in other libraries for attributes of a form.
FORM_SYNONYMS = {
    "A": "query",
    "B": "key",
    **dict.fromkeys(("cosine", "cosine_similarity"), "(a @ b.T).trace / (a.norm * b.norm)"),
    **dict.fromkeys(("at", "rotate", "rope"), "wqk.open(ref)[layer, head].at(distance)"),
    "decompose": "form.symmetric_part, form.skew_part",
    "directions": "svd(), or wqk.tokens(ref, layer, head, directions=5)",
    "W_qk": "dense()",
    "outliers": "form.column_norms, form.row_norms",
    "score": "form(x, y)",
    "spectrum": "singular_values()",
    "effective_rank": 'wqk.scan(ref, measures=["spectrum"])',
    **dict.fromkeys(("low_rank", "truncate"), "svd()"),
    "stable_rank": "form.norm**2 / form.S[0] ** 2",
}
# Names of attributes of arrays, which the dense matrix has.
ARRAY_CALLS = {name: f"numpy().{name}" for name in dir(np.ndarray) if not name.startswith("_")}


@dataclass(frozen=True, init=False, eq=False, repr=False)
class BilinearForm(Advising, synonyms=FORM_SYNONYMS, calls={**ARRAY_CALLS, **METHOD_CALLS}):
    """M = query · keyᵀ, or a stack of such forms.

    Measures that need only sums over the entries are properties: ``form.norm``, ``form.symmetry``,
    ``form.trace``. Measures that need a decomposition are methods: ``form.svd()``,
    ``form.eigenvalues()``.

    The leading axes stack forms and broadcast, so query heads may share a key head. Factors are
    arrays of NumPy, PyTorch (gradients flow) or any other array-API library, or nested lists. Half
    precision is widened to float32.

    Parameters
    ----------
    query
        W_q, shape (..., d_query, rank). The rows of W_q and of M belong to the query (predicted)
        side.
    key
        W_k, shape (..., d_key, rank). The rows of W_k and the columns of M belong to the key
        (context) side.

    Raises
    ------
    FormError
        The two ranks differ, the stacks do not broadcast, a factor is empty, or its entries are not
        real floating-point numbers. Or the factors may be transposed like the weights of an
        ``nn.Linear``: the rank exceeds a width, or a factor is a square ``nn.Parameter``.
        `from_linear` takes such weights, `from_factors` takes factors of any shape as they are.

    Examples
    --------
    >>> form = BilinearForm([[1.0], [2.0]], [[3.0], [4.0]])
    >>> form
    BilinearForm(2 × 2, rank 1)
    >>> form.numpy()
    array([[3., 4.],
           [6., 8.]])
    >>> float(form([1.0, 0.0], [0.0, 1.0])), float(form.trace)
    (4.0, 11.0)
    """

    query: Float[Array, "... d_query rank"]
    key: Float[Array, "... d_key rank"]

    # NumPy defers to the form's own operators.
    __array_ufunc__ = None

    @called_as("BilinearForm(query, key), or BilinearForm.from_matrix(matrix)")
    def __init__(self, query: Any, key: Any) -> None:
        self._set_factors(query, key)
        advice = (
            "weights of nn.Linear are (out, in): use BilinearForm.from_linear(q_proj, k_proj), or "
            "transpose them; BilinearForm.from_factors(query, key) takes factors as they are"
        )
        if self.rank > min(self.widths):
            raise FormError(
                f"the rank, {self.rank}, of a {self._size} form should not exceed its width; "
                f"{advice}"
            )
        for factor in (query, key):
            is_parameter = type(factor).__name__ == "Parameter"
            if is_parameter and factor.shape[-2] == factor.shape[-1]:
                raise FormError(f"a square nn.Parameter may be transposed; {advice}")

    @classmethod
    def from_factors(cls, query: Any, key: Any) -> BilinearForm:
        """Return a form of factors in the shapes (..., d_query, rank) and (..., d_key, rank).

        Unlike the constructor, this method does not suspect transposed factors: the rank may exceed
        the width, and parameters may be square.

        Examples
        --------
        >>> import numpy as np
        >>> BilinearForm.from_factors(np.ones((4, 6)), np.ones((4, 6)))
        BilinearForm(4 × 4, rank 6)
        """
        form = object.__new__(BilinearForm)
        form._set_factors(query, key)
        return form

    @classmethod
    def from_linear(cls, q_proj: Any, k_proj: Any, heads: int | None = None) -> BilinearForm:
        """Return a form from two ``nn.Linear``, or from their weights, which are stored (out, in).

        Biases are left out: the form is the part of the score that is linear in both vectors.

        Parameters
        ----------
        q_proj, k_proj
            The projections to queries and keys, or weights (out, d_query) and (out, d_key).
        heads
            The number of query heads, H, in the outputs of ``q_proj``. The result is then the
            stack of heads, (G, H/G), where each of G key heads serves H/G query heads. By default
            all outputs belong to one form.

        Raises
        ------
        FormError
            A weight is not (out, in), or the outputs do not divide into these heads.

        Examples
        --------
        >>> import torch
        >>> q_proj, k_proj = torch.nn.Linear(64, 32), torch.nn.Linear(64, 16)
        >>> BilinearForm.from_linear(q_proj, k_proj, heads=4)
        BilinearForm(2 × 2 forms of 64 × 64, rank 8)
        """
        query, key = linear_weight(q_proj), linear_weight(k_proj)
        query_outputs, d_query = int(query.shape[0]), int(query.shape[1])
        key_outputs, d_key = int(key.shape[0]), int(key.shape[1])
        if heads is None:
            if query_outputs != key_outputs:
                raise FormError(
                    f"query and key have {query_outputs} and {key_outputs} outputs, as grouped "
                    "heads have; pass the number of query heads as heads="
                )
            return cls.from_factors(query.T, key.T)
        width = query_outputs // heads if heads > 0 else 0
        key_heads = key_outputs // width if width else 0
        is_divided = (heads * width, key_heads * width) == (query_outputs, key_outputs)
        if not key_heads or not is_divided or heads % key_heads:
            raise FormError(
                f"{query_outputs} query and {key_outputs} key outputs do not divide into {heads} "
                "query heads and their key heads"
            )
        xp = array_namespace(query, key)
        query = xp.reshape(query, (key_heads, heads // key_heads, width, d_query))
        key = xp.reshape(key, (key_heads, 1, width, d_key))
        return cls.from_factors(xp.matrix_transpose(query), xp.matrix_transpose(key))

    @classmethod
    def from_matrix(cls, matrix: Any) -> BilinearForm:
        """Return the form of a matrix M, (..., d_query, d_key), as M · Iᵀ.

        Examples
        --------
        >>> BilinearForm.from_matrix([[0, 1], [-1, 0]])
        BilinearForm(2 × 2, rank 2)
        """
        matrix = as_array(matrix)
        xp = array_namespace(matrix)
        if xp.isdtype(matrix.dtype, ("bool", "integral")):
            matrix = xp.astype(matrix, xp.float64)
        if matrix.ndim < 2:
            raise FormError(f"a matrix must be (..., d_query, d_key), got {tuple(matrix.shape)}")
        identity = xp.eye(matrix.shape[-1], dtype=matrix.dtype, device=device(matrix))
        form = cls.from_factors(matrix, identity)
        form.__dict__["moments"] = kernels.measure_entries(form.query, form.key)
        return form

    def _set_factors(self, query: Any, key: Any) -> None:
        """Check and store two factors, widened to a common type."""
        query, key = as_array(query), as_array(key)
        query_shape, key_shape = tuple(query.shape), tuple(key.shape)
        if min(query.ndim, key.ndim) < 2 or query_shape[-1] != key_shape[-1]:
            raise FormError(
                "query and key must be (..., d_query, rank) and (..., d_key, rank) with the same "
                f"rank, got {query_shape} and {key_shape}"
            )
        if 0 in query_shape or 0 in key_shape:
            raise FormError(f"query and key must not be empty, got {query_shape} and {key_shape}")
        common_stack(query_shape[:-2], key_shape[:-2])
        try:
            query, key = widen(query, key)
        except TypeError:
            libraries = f"{type(query).__module__} and {type(key).__module__}"
            raise FormError(f"query and key must be of one library, got {libraries}") from None
        object.__setattr__(self, "query", query)
        object.__setattr__(self, "key", key)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of `dense`: the stack's axes, then d_query and d_key."""
        return (*self.stack, *self.widths)

    @property
    def ndim(self) -> int:
        """Number of axes of `dense`; 2 for a single form."""
        return len(self.shape)

    @property
    def widths(self) -> tuple[int, int]:
        """(d_query, d_key)."""
        return int(self.query.shape[-2]), int(self.key.shape[-2])

    @property
    def rank(self) -> int:
        """Number of columns of each factor, at least M's rank."""
        return int(self.query.shape[-1])

    @property
    def stack(self) -> tuple[int, ...]:
        """Shape of the stack of forms; () for a single form."""
        return common_stack(tuple(self.query.shape[:-2]), tuple(self.key.shape[:-2]))

    @property
    def groups(self) -> BilinearForm:
        """The forms, stacked with each shared factor stored once; see `wqk.Block.groups`."""
        return self

    @property
    def is_square(self) -> bool:
        """True if both sides have the same width, as symmetry requires."""
        return self.widths[0] == self.widths[1]

    def __repr__(self) -> str:
        stack = f"{' × '.join(map(str, self.stack))} forms of " if self.stack else ""
        return f"BilinearForm({stack}{self._size}, rank {self.rank})"

    @property
    def _title(self) -> str:
        """Title of the picture."""
        return repr(self)

    @property
    def _size(self) -> str:
        """The widths, for messages, such as ``64 × 64``."""
        d_query, d_key = self.widths
        return f"{d_query} × {d_key}"

    def __len__(self) -> int:
        """Return the length of the first axis of the stack, or a single form's number of rows."""
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        """Yield the forms along the first axis of the stack; for a single form, the rows."""
        return (self[i] for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        """Select forms of the stack, then rows and columns of M, by an index of `dense`.

        The result is a form with its own factors; a single row or column is an array. Lists of rows
        and of columns select a submatrix, as with `numpy.ix_`.

        Examples
        --------
        >>> import numpy as np
        >>> heads = BilinearForm(np.ones((12, 64, 8)), np.ones((12, 64, 8)))
        >>> heads[3], heads[:4, :, 10:20], heads[3, [0, 5]]
        (BilinearForm(64 × 64, rank 8),
         BilinearForm(4 forms of 64 × 10, rank 8),
         BilinearForm(2 × 64, rank 8))
        >>> heads[3, 0, 1], heads[3, 0].shape
        (np.float64(8.0), (64,))
        """
        *stack_index, rows, columns = self._full_index(index)
        query = stacked_as(self.query, self.stack)[(*stack_index, ...)]
        key = stacked_as(self.key, self.stack)[(*stack_index, ...)]
        d_query, d_key = self.widths
        part = BilinearForm.from_factors(
            query[..., keep_axis(rows, d_query), :], key[..., keep_axis(columns, d_key), :]
        )
        if not (is_number(rows) or is_number(columns)):
            return part
        row_index = 0 if is_number(rows) else slice(None)
        column_index = 0 if is_number(columns) else slice(None)
        whole_stack = [slice(None)] * len(part.stack)  # an ellipsis would not give a plain number
        return part.dense()[(*whole_stack, row_index, column_index)]

    def _full_index(self, index: Any) -> tuple[Any, ...]:
        """Return an index of all axes of `dense`, with slices for an ellipsis and omitted axes."""
        entries = index if isinstance(index, tuple) else (index,)
        dots = [position for position, entry in enumerate(entries) if entry is Ellipsis]
        indexed = sum(axes_taken(entry) for entry in entries if entry is not Ellipsis)
        missing = len(self.stack) + 2 - indexed
        if missing < 0 or len(dots) > 1 or any(entry is None for entry in entries):
            raise FormError(
                f"a form of shape {self.shape} takes no index {entries}; expected at most "
                f"{len(self.stack) + 2} numbers, slices or lists, and at most one ellipsis"
            )
        position = dots[0] if dots else len(entries)
        return (*entries[:position], *[slice(None)] * missing, *entries[position + 1 :])

    @called_as("form(x, y); a property, such as form.symmetric_part, has no parentheses")
    def __call__(self, x: Any, y: Any) -> Array:
        """Return scores x M yᵀ of query-side x (..., N, d_query) and key-side y (..., N, d_key).

        Single vectors (d_query,) and (d_key,) give a single score.
        """
        xp = array_namespace(self.query, self.key)
        x, y = self._converted(x), self._converted(y)
        is_single = x.ndim == y.ndim == 1
        x = x[None, :] if x.ndim == 1 else x
        y = y[None, :] if y.ndim == 1 else y
        queries = xp.matmul(x, self.query)
        keys = xp.matmul(y, self.key)
        scores = xp.matmul(queries, xp.matrix_transpose(keys))
        return scores[..., 0, 0] if is_single else scores

    @current
    def plot(self, title: str | None = None) -> Figure:
        """Draw a single form's entries, and the norms of its rows and columns (needs matplotlib).

        Notebooks display the figure; ``savefig(path)`` writes a file.

        Examples
        --------
        >>> import numpy as np
        >>> figure = BilinearForm(np.eye(8), np.eye(8)).plot()
        >>> figure.get_suptitle()
        'BilinearForm(8 × 8, rank 8)'
        """
        from wqk.forms.images import matrix, matrix_image

        image = matrix_image(self)
        scores = f"directionality (excess) {float(self.directionality_excess):z.2f}"
        if self.is_square:
            scores = f"symmetry {float(self.symmetry):z.2f}, {scores}"
        return matrix(image, title or self._title, scores)

    def dense(self) -> Float[Array, "... d_query d_key"]:
        """Return M, (..., d_query, d_key), in the factors' library, with gradients."""
        xp = array_namespace(self.query, self.key)
        return xp.matmul(self.query, xp.matrix_transpose(self.key))

    def numpy(self) -> np.ndarray:
        """Return M as a NumPy array, without gradients; the same as ``np.asarray(form)``."""
        return np.asarray(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if copy is False:
            raise ValueError(
                "a form's matrix has to be computed and needs a copy; leave out copy=False"
            )
        return np.asarray(on_host(self.dense()), dtype)

    def __dlpack__(self, **options: Any) -> Any:
        matrix = self.dense()
        if getattr(matrix, "requires_grad", False):
            raise FormError(
                "a conversion would lose the gradient; use form.dense(), which keeps it"
            )
        return matrix.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.query.__dlpack_device__()

    def __matmul__(self, other: Any) -> Any:
        """Return the product with a vector (d_key,), a matrix (..., d_key, N) or a form.

        Products with matrices and forms are forms, of the smallest rank that the factors give:
        ``x @ form @ y.T`` has the entries of the array ``form(x, y)``, and no array is built.

        Examples
        --------
        >>> form = BilinearForm([[1.0], [2.0]], [[3.0], [4.0]])
        >>> form @ [1.0, 0.0], [1.0, 0.0] @ form
        (array([3., 6.]), array([3., 4.]))
        >>> form @ form, (form @ form).numpy().tolist()
        (BilinearForm(2 × 2, rank 1), [[33.0, 44.0], [66.0, 88.0]])
        """
        xp = array_namespace(self.query, self.key)
        _, d_key = self.widths
        if isinstance(other, BilinearForm):
            query, other_query = widen(self.query, other.query)
            widened = BilinearForm.from_factors(query, self.key)
            return (widened @ other_query) @ xp.matrix_transpose(other.key)
        y = self._operand(other, d_key)
        if y.ndim == 1:
            inner = xp.matmul(xp.matrix_transpose(self.key), y[:, None])
            return xp.matmul(self.query, inner)[..., 0]
        y = xp.matrix_transpose(y)
        if self.rank > d_key:
            return BilinearForm.from_factors(self.dense(), y)
        return BilinearForm.from_factors(self.query, xp.matmul(y, self.key))

    def __rmatmul__(self, other: Any) -> Any:
        """Return the product of a vector (d_query,) or a matrix (..., N, d_query) with the form."""
        xp = array_namespace(self.query, self.key)
        d_query, _ = self.widths
        x = self._operand(other, d_query, -1)
        if x.ndim == 1:
            return self.T @ x
        return (self.T @ xp.matrix_transpose(x)).T

    def _operand(self, values: Any, width: int, axis: int = -2) -> Array:
        """Return the second operand of a matrix product, in the form's type.

        Parameters
        ----------
        values
            A vector, or matrices with ``width`` entries along ``axis``.
        width
            Width of the form on the side of the operand.
        axis
            Axis of a matrix that meets the form.

        Raises
        ------
        FormError
            The operand has another width.
        """
        values = self._converted(values)
        if values.ndim == 0 or values.shape[axis if values.ndim > 1 else 0] != width:
            raise FormError(
                f"a product with a {self._size} form needs {width} entries "
                f"along the shared axis, got shape {tuple(values.shape)}"
            )
        return values

    def _converted(self, values: Any) -> Array:
        """Return values as an array of the form's library and type; a tensor keeps its gradient."""
        xp = array_namespace(self.query)
        if is_array_api_obj(values) and array_namespace(values) is xp:
            return xp.astype(values, self.query.dtype, copy=False)
        return xp.asarray(values, dtype=self.query.dtype, device=device(self.query))

    def _transposed(self) -> BilinearForm:
        """Return the transpose, as ``T``."""
        return self.T

    def _nested_lists(self) -> list[Any]:
        """Return the dense matrix as nested lists."""
        nested: list[Any] = self.numpy().tolist()
        return nested

    @property
    def T(self) -> BilinearForm:
        """The transpose: query and key exchanged."""
        return BilinearForm.from_factors(self.key, self.query)

    def __mul__(self, factor: Any) -> BilinearForm:
        """Multiply by a number, or multiply the forms of a stack by the entries of an array."""
        return BilinearForm.from_factors(self.query * self._scalar(factor), self.key)

    __rmul__ = __mul__

    def __truediv__(self, divisor: Any) -> BilinearForm:
        return BilinearForm.from_factors(self.query / self._scalar(divisor), self.key)

    def __neg__(self) -> BilinearForm:
        return self * -1.0

    def _scalar(self, factor: Any) -> Any:
        """Return a number, or an array with a number for each form, ready to multiply the query."""
        if isinstance(factor, BilinearForm):
            raise FormError(
                "an entrywise product or quotient of forms has no factors; the matrix product is "
                "form @ other, the entries are form.numpy() * other.numpy()"
            )
        if isinstance(factor, list | tuple):
            factor = self._converted(factor)
        shape = tuple(getattr(factor, "shape", ()))
        if not shape:
            return factor
        if shape == (1,):
            return factor[0]
        if shape != self.stack:
            raise FormError(
                f"a factor must be a number, or an array of the stack's shape, {self.stack}; "
                f"got shape {shape}"
            )
        return factor[..., None, None]

    def __add__(self, other: BilinearForm) -> BilinearForm:
        """Return the sum, of rank ``self.rank + other.rank``."""
        self._require_alike(other)
        return BilinearForm.from_factors(
            side_by_side(self.query, other.query), side_by_side(self.key, other.key)
        )

    def __radd__(self, other: Any) -> BilinearForm:
        """Return ``0 + form``, the first step of the builtin `sum`."""
        return self if isinstance(other, int) and other == 0 else self + other

    def __sub__(self, other: BilinearForm) -> BilinearForm:
        return self.difference(other)

    def _require_alike(self, other: Any) -> None:
        """Raise `FormError` unless the operand is a form of the same widths."""
        if not isinstance(other, BilinearForm):
            raise FormError(
                f"a form adds to another form, got {type(other).__name__}; "
                "make a form of a matrix with BilinearForm.from_matrix(matrix)"
            )
        if self.widths != other.widths:
            raise FormError(f"forms must have the same shape, got {self.shape} and {other.shape}")

    def difference(self, other: BilinearForm) -> BilinearForm:
        """Return ``self - other`` as factors, of rank 2r: the update ΔW_qk (paper, Remark S1.6).

        If the forms have the same rank, the result is computed from the differences of the factors,
        A Bᵀ − A₀B₀ᵀ = (A − A₀)Bᵀ + A₀(B − B₀)ᵀ, so that a small step between large forms keeps its
        precision.

        Examples
        --------
        >>> import numpy as np
        >>> identity = BilinearForm(np.eye(2), np.eye(2))
        >>> float((identity * 3.0).difference(identity).norm) == float((identity * 2.0).norm)
        True
        """
        self._require_alike(other)
        if self.query.shape != other.query.shape or self.key.shape != other.key.shape:
            return self + -other
        return BilinearForm.from_factors(
            side_by_side(self.query - other.query, other.query),
            side_by_side(self.key, self.key - other.key),
        )

    def sum(self) -> BilinearForm:
        """Return the sum over the stack as one form: the layer's W_qk from its heads' (paper, S20).

        Queries that share a key (a stack axis of length 1 in the key) are added, so that the rank
        is only key_heads · head_width.
        """
        xp = array_namespace(self.query, self.key)
        axes = len(self.stack) + 2
        query, key = _with_axes(self.query, axes), _with_axes(self.key, axes)
        for _ in self.stack:  # the last axis of the stack is summed, then the one before
            if key.shape[-3] == 1:
                query, key = total(query, xp), key[..., 0, :, :]
            elif query.shape[-3] == 1:
                query, key = query[..., 0, :, :], total(key, xp)
            else:
                query, key = joined(query, xp), joined(key, xp)
        return BilinearForm.from_factors(query, key)

    @cached_property
    def moments(self) -> kernels.Moments:
        """Sums over M's entries, from which scores are computed; see `wqk.forms.kernels`."""
        return kernels.measure(self.query, self.key)

    @property
    def norm(self) -> Scores:
        """Frobenius norm ‖M‖_F, shape (...).

        All norms of a form are in float64 if float32 cannot hold them.
        """
        xp = array_namespace(self.query, self.key)
        norm = kernels.restore(kernels.root(self.moments.square_norm, xp), self.moments.exponent)
        return self.number(norm)

    @property
    def row_norms(self) -> Float[Array, "... d_query"]:
        """L2 norms of M's rows, shape (..., d_query)."""
        return kernels.restore(self.moments.row_norms, self.moments.exponent[..., None])

    @property
    def column_norms(self) -> Float[Array, "... d_key"]:
        """L2 norms of M's columns, shape (..., d_key)."""
        return kernels.restore(self.moments.column_norms, self.moments.exponent[..., None])

    @property
    def symmetry(self) -> Scores:
        """Symmetry s of a square form, shape (...); see `wqk.symmetry`."""
        self.require_square("symmetry")
        xp = array_namespace(self.query, self.key)
        share = self.moments.share(self.moments.trace_of_square)
        return self.number(xp.clip(share, -1.0, 1.0))  # rounding may exceed the bounds

    @property
    def symmetry_null(self) -> Scores:
        """Mean of s under random signs of rows; see `wqk.symmetry_null`."""
        self.require_square("symmetry_null")
        xp = array_namespace(self.query, self.key)
        diagonal = kernels.row_dots(self.moments.query, self.moments.key, xp)
        share = self.moments.share(xp.sum(diagonal * diagonal, axis=-1))
        return self.number(xp.clip(share, 0.0, 1.0))

    @property
    def directionality(self) -> Scores:
        """Directionality as printed in Definition 3.2; `wqk.directionality` has parameters."""
        return self.number(directionalities(self.moments).directionality)

    @property
    def directionality_excess(self) -> Scores:
        """Directionality of the published tables: ``wqk.directionality(form, weight="excess")``."""
        return self.number(directionalities(self.moments).directionality_excess)

    @staticmethod
    def number(score: Array) -> Scores:
        """Return the score of a single NumPy form as a number; return other scores unchanged."""
        is_single = isinstance(score, np.ndarray | np.generic) and not score.ndim
        shown: Scores = float(score) if is_single else score
        return shown

    def svd(self) -> kernels.SVD:
        """Return the singular value decomposition, computed once from a rank × rank core.

        Returns
        -------
        SVD
            ``U`` (..., d_query, k), ``S`` (..., k), descending, and ``Vh`` (..., k, d_key), named
            as `numpy.linalg.svd` does; k = min(rank, d_query, d_key).

        Examples
        --------
        >>> import numpy as np
        >>> form = BilinearForm([[3.0], [0.0]], [[0.0], [2.0]])
        >>> form.svd().S.round(6)
        array([6.])
        """
        return self._svd

    @cached_property
    def _svd(self) -> kernels.SVD:
        return kernels.svd(self.query, self.key)

    @property
    def U(self) -> Float[Array, "... d_query k"]:
        """Left singular vectors, as columns: M = U · diag(S) · Vᵀ, computed once."""
        return self.svd().U

    @property
    def S(self) -> Float[Array, "... k"]:
        """Singular values, descending."""
        return self.svd().S

    @property
    def V(self) -> Float[Array, "... d_key k"]:
        """Right singular vectors, as columns."""
        return array_namespace(self.query).matrix_transpose(self.svd().Vh)

    def singular_values(self) -> Float[Array, "... k"]:
        """Return the singular values of `svd` alone, in less time."""
        return kernels.singular_values(self.query, self.key)

    def eigenvalues(self) -> Array:
        """Return the eigenvalues of a square form, (..., min(rank, d)), complex, largest first.

        The other d − rank eigenvalues are 0.

        Raises
        ------
        FormError
            The form is not square.

        Examples
        --------
        >>> BilinearForm([[1.0], [2.0]], [[3.0], [4.0]]).eigenvalues().round(6)
        array([11.+0.j])
        """
        self.require_square("an eigenvalue")
        return kernels.eigenvalues(self.query, self.key)

    @property
    def diagonal(self) -> Float[Array, "... d"]:
        """The diagonal of M, shape (..., d), for square forms."""
        self.require_square("a diagonal")
        return kernels.row_dots(self.query, self.key, array_namespace(self.query, self.key))

    @property
    def trace(self) -> Scores:
        """tr(M), shape (...), for square forms."""
        return self.number(array_namespace(self.query, self.key).sum(self.diagonal, axis=-1))

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
        """Raise `FormError`, with ``what`` in the message, unless the form is square."""
        if not self.is_square:
            raise FormError(f"{what} needs a square form, got {self._size}")


def _with_axes(factor: Array, count: int) -> Array:
    """Return a factor with axes of length 1 in front, ``count`` axes in all."""
    missing = count - factor.ndim
    return array_namespace(factor).reshape(factor, (*[1] * missing, *factor.shape))
