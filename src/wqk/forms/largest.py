"""The largest singular value of M = A Bᵀ, from products of its factors or their Gram matrices.

MᵀM has the eigenvalues of P = AᵀA BᵀB, but for zeros: λ₁ = σ₁². Small stacks of forms square P, in
which all work is products of whole matrices; single large ones iterate on vectors.

Axes: ``...`` a stack of forms, R rank, J steps done.
"""

from __future__ import annotations

import math
from functools import reduce
from typing import TYPE_CHECKING, Any

import numpy as np
from array_api_compat import array_namespace, device

from wqk.forms.kernels import bits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk._typing import Array, Float

# Between which bounds λ₁ may lie, and the residual, both relative to λ₁ and by width of the
# floating-point type: σ₁ is off by at most a quarter of the one or half of the other.
ENCLOSURE = {32: 4e-7, 64: 2e-12}
RESIDUAL = {32: 1e-6, 64: 1e-11}

# k equal eigenvalues leave bounds log(k) / 2 ** MOST_SQUARINGS apart.
MOST_SQUARINGS = 48

MOST_STEPS = 160


def by_squaring(
    query_gram: Float[Array, "... r r"], key_gram: Float[Array, "... r r"]
) -> Float[Array, "*stack"]:
    """σ₁ of every form of a stack, in float64, from powers of P, each the square of the last.

    No eigenvalue of P is negative, hence tr(P²ⁿ) / tr(Pⁿ) ≤ λ₁ⁿ and λ₁²ⁿ ≤ tr(P²ⁿ) for every n.
    The two enclose λ₁ and close in on it. What is rounded on the way enters in proportion to
    ‖A‖ ‖B‖ / σ₁, as it does into the norm from the same matrices.

    Examples
    --------
    >>> import numpy as np
    >>> by_squaring(np.diag([4.0, 1.0]), np.diag([9.0, 1.0])).round(9)
    np.float64(6.0)
    """
    xp = array_namespace(query_gram, key_gram)
    allowed = ENCLOSURE[bits(query_gram, xp)]
    power = xp.matmul(query_gram, key_gram)
    trace = _trace(power, xp)
    logarithm = xp.log(trace)  # of the trace of Pⁿ, of which `power` is a multiple
    for n in (2.0**k for k in range(MOST_SQUARINGS)):
        power = power / xp.astype(trace, power.dtype)[..., None, None]
        power = xp.matmul(power, power)
        trace = _trace(power, xp)
        least = (logarithm + xp.log(trace)) / n
        logarithm = 2 * logarithm + xp.log(trace)
        most = logarithm / (2 * n)
        if bool(xp.all(most - least <= allowed)):
            break
    return xp.exp((least + most) / 4)


def by_iteration(query_side: Sequence[Array], key_side: Sequence[Array]) -> float | None:
    """σ₁ of one form by Lanczos iteration; None if it did not converge.

    P is self-adjoint in the inner product of BᵀB. Every new vector is made orthogonal to all before
    it, twice, without which float32 would lose the basis. λ₁ is accepted once ‖P x − λ₁ x‖ / λ₁ is
    small: it is no further than that from an eigenvalue.

    Parameters
    ----------
    query_side, key_side
        Matrices that are applied to a vector (R,) one after the other, which makes AᵀA and BᵀB of
        it. None stand for the identity.

    Examples
    --------
    >>> import numpy as np
    >>> square = np.diag(np.arange(1.0, 9.0))
    >>> round(by_iteration([square], [square]), 9)
    8.0
    """
    one = query_side[0]
    xp, rank = array_namespace(one), one.shape[-1]
    allowed = RESIDUAL[bits(one, xp)]
    start = np.random.default_rng(0).standard_normal(rank)  # the same at every call
    new = xp.asarray(start, dtype=one.dtype, device=device(one))
    image = reduce(_times, key_side, new)
    # Vectors x of length 1 in that inner product, and w = BᵀB x: on them, P is tridiagonal.
    vectors, images = (xp.zeros((0, rank), dtype=one.dtype, device=device(one)) for _ in "xw")
    diagonal: list[float] = []
    lengths = [_length(new, image)]
    while len(diagonal) < min(MOST_STEPS, rank) and lengths[-1] > 0:
        vectors = xp.concat([vectors, new[None, :] / lengths[-1]])
        images = xp.concat([images, image[None, :] / lengths[-1]])
        new = reduce(_times, query_side, images[-1, :])
        diagonal.append(float(new @ images[-1, :]))
        for _ in range(2):
            new = new - (images @ new) @ vectors
        image = reduce(_times, key_side, new)
        lengths.append(_length(new, image))
        steps = len(diagonal)
        if steps % max(2, steps // 8) == 0:
            tridiagonal = np.diag(diagonal) + np.diag(lengths[1:-1], -1)
            values, turns = np.linalg.eigh(tridiagonal)  # reads the lower half
            if lengths[-1] * abs(turns[-1, -1]) <= allowed * values[-1]:
                return math.sqrt(values[-1])
    return None


def _times(vector: Array, matrix: Array) -> Array:
    return matrix @ vector


def _trace(square: Array, xp: Any) -> Float[Array, "*stack"]:
    """In float64, and 1 for the zero matrix."""
    trace = xp.linalg.trace(square, dtype=xp.float64)
    return xp.where(trace > 0, trace, xp.ones_like(trace))


def _length(vector: Array, image: Array) -> float:
    return math.sqrt(max(0.0, float(vector @ image)))
