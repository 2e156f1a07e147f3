"""Singular values and eigenvalues of M = A Bᵀ from a core no wider than its rank.

With the QR decompositions A = Q_a R_a and B = Q_b R_b, M = Q_a (R_a R_bᵀ) Q_bᵀ: the core in the
middle has M's singular values, and R_a R_bᵀ Q_bᵀ Q_a has its nonzero eigenvalues.

Axes: ``...`` a stack of forms, D width, R rank, k = min(R, D) the size of the core.
"""

from __future__ import annotations

from typing import NamedTuple

from array_api_compat import array_namespace

from wqk._typing import Array, Float
from wqk.forms.kernels import balance, restore


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
    """Eigenvalues of a square query · keyᵀ, complex, in descending order of magnitude."""
    xp = array_namespace(query, key)
    query_basis, core, key_basis, exponent = _core(query, key)
    values = xp.linalg.eigvals(
        xp.matmul(core, xp.matmul(xp.matrix_transpose(key_basis), query_basis))
    )
    if xp.isdtype(values.dtype, "real floating"):  # from NumPy, if none is complex
        values = values + 0j
    order = xp.argsort(-xp.abs(values), axis=-1, stable=True)
    return restore(xp.take_along_axis(values, order, axis=-1), exponent[..., None])


def _core(query: Array, key: Array) -> tuple[Array, Array, Array, Array]:
    """Q_a, R_a R_bᵀ, Q_b and the exponent (...) of M = Q_a (R_a R_bᵀ) Q_bᵀ · 2**exponent."""
    xp = array_namespace(query, key)
    balanced = balance(query, xp), balance(key, xp)
    (query_basis, left), (key_basis, right) = (xp.linalg.qr(one.factor) for one in balanced)
    core = xp.matmul(left, xp.matrix_transpose(right))
    return query_basis, core, key_basis, balanced[0].exponent + balanced[1].exponent
