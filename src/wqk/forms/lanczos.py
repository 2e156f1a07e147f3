"""The largest singular value of M = A Bᵀ by Lanczos iteration, for forms of high rank.

MᵀM has the eigenvalues of AᵀA BᵀB, which is self-adjoint in the inner product of BᵀB: so that the
iteration needs products of R-vectors with these two matrices and nothing of width D. Every new
vector is made orthogonal to all before it, twice, without which float32 would lose the basis.

Axes: ``...`` a stack of forms, R rank, J steps done.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

    from wqk._typing import Array, Float

# Steps from one test of convergence to the next, and after how many to give up.
STRIDE, MOST_STEPS = 8, 160

# What the residual may be, relative to the eigenvalue, by width of the floating-point type.
RESIDUAL = {32: 1e-6, 64: 1e-11}


def largest_singular_value(
    times_query: Callable[[Array], Array],
    times_key: Callable[[Array], Array],
    start: Float[Array, "... r one"],
    residual: float,
    xp: Any,
) -> Float[Array, "*stack"] | None:
    """σ₁ of every form of a stack, in float64; None if some did not converge.

    Parameters
    ----------
    times_query, times_key
        The products with AᵀA and BᵀB of column vectors (..., R, 1).
    start
        A random vector for each form.
    residual
        The largest ‖AᵀA BᵀB x − λ x‖ / λ accepted; λ = σ₁² is no further from an eigenvalue.

    Notes
    -----
    x are vectors of length 1 in the inner product of BᵀB, and w = BᵀB x. Among them, the matrix of
    AᵀA BᵀB is tridiagonal: ⟨w, AᵀA w⟩, and beside it the lengths of the new vectors.
    """
    rank = start.shape[-2]
    new, image = start, times_key(start)
    basis: list[Array] = []
    images: list[Array] = []
    diagonal: list[Array] = []
    lengths: list[Array] = []
    while len(diagonal) < min(MOST_STEPS, rank):
        length = xp.sqrt(xp.clip(_dot(new, image, xp), 0.0))
        if not bool(xp.all(length > 0)):
            return None
        basis.append(new / length)
        images.append(image / length)
        new = times_query(images[-1])
        diagonal.append(_dot(new, images[-1], xp))
        x, w = xp.concat(basis, axis=-1), xp.concat(images, axis=-1)
        for _ in range(2):
            new = new - xp.matmul(x, xp.matmul(xp.matrix_transpose(w), new))
        image = times_key(new)
        lengths.append(xp.sqrt(xp.clip(_dot(new, image, xp), 0.0)))
        if len(diagonal) % STRIDE == 0:
            values, vectors = xp.linalg.eigh(_tridiagonal(diagonal, lengths[:-1], xp))
            largest = values[..., -1]
            left = xp.astype(lengths[-1][..., 0, 0], xp.float64) * xp.abs(vectors[..., -1, -1])
            if bool(xp.all(left <= residual * largest)):
                return xp.sqrt(largest)
    return None


def random_start(stack: tuple[int, ...], rank: int) -> np.ndarray:
    """The same random vectors at every call, (..., R, 1)."""
    return np.random.default_rng(0).standard_normal((*stack, rank, 1))


def _dot(a: Array, b: Array, xp: Any) -> Float[Array, "... one one"]:
    return xp.sum(a * b, axis=(-2, -1), keepdims=True)


def _tridiagonal(diagonal: list[Array], beside: list[Array], xp: Any) -> Float[Array, "... j j"]:
    """Symmetric matrices from their diagonals and next to diagonals, in float64."""
    count = len(diagonal)
    places = xp.eye(count, dtype=xp.float64, device=getattr(diagonal[0], "device", None))
    rows = [xp.astype(value, xp.float64) * places[i, :] for i, value in enumerate(diagonal)]
    upper = [xp.astype(value, xp.float64) * places[i + 1, :] for i, value in enumerate(beside)]
    lower = [xp.astype(value, xp.float64) * places[i, :] for i, value in enumerate(beside)]
    for i in range(count - 1):
        rows[i] = rows[i] + upper[i]
        rows[i + 1] = rows[i + 1] + lower[i]
    return xp.concat(rows, axis=-2)
