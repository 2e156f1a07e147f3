"""The largest singular value of M = A Bᵀ, from products of its factors or their Gram matrices.

MᵀM and P = AᵀA BᵀB have the same nonzero eigenvalues; λ₁ = σ₁². For many small forms, P is squared
repeatedly, in products of whole matrices; for a large one, vectors are iterated.

Axes: ``...`` a stack of forms, R rank, J steps done.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device

from wqk._typing import Array, Float
from wqk.forms.kernels import bits

# Allowed distance between the bounds of log λ₁, and allowed residual relative to λ₁, by width of
# the floating-point type: the relative error of σ₁ is at most a quarter of the one or half of the
# other.
ENCLOSURE = {32: 4e-7, 64: 2e-12}
RESIDUAL = {32: 1e-6, 64: 1e-11}

# With k equal eigenvalues, the bounds are at last log(k) / 2 ** MOST_SQUARINGS apart.
MOST_SQUARINGS = 48

MOST_STEPS = 160


def by_squaring(
    query_gram: Float[Array, "... r r"], key_gram: Float[Array, "... r r"]
) -> Float[Array, "*stack"]:
    """σ₁ of every form of a stack, in float64, by repeated squaring of P.

    No eigenvalue of P is negative, hence tr(P²ⁿ) / tr(Pⁿ) ≤ λ₁ⁿ and λ₁²ⁿ ≤ tr(P²ⁿ): both bounds
    converge to λ₁. Rounding errors grow by ‖A‖ ‖B‖ / σ₁, as in the norm from the same matrices.

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
    logarithm = xp.log(trace)  # of the trace of Pⁿ; `power` is a multiple of Pⁿ
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

    P is self-adjoint in the inner product of BᵀB. Every new vector is made orthogonal to all
    previous ones twice, without which float32 would lose the basis. λ₁ is accepted once
    ‖P x − λ₁ x‖ / λ₁ is small: an eigenvalue is no further than that. AᵀA is the product of the
    query side's matrices, applied to vectors (R,) one after the other, and BᵀB that of the key
    side's; without any it is the identity.

    Examples
    --------
    >>> import numpy as np
    >>> square = np.diag(np.arange(1.0, 9.0))
    >>> round(by_iteration([square], [square]), 9)
    8.0
    """

    def apply(side: Sequence[Array], vector: Array) -> Array:
        return reduce(lambda v, matrix: matrix @ v, side, vector)

    one = query_side[0]
    xp, rank = array_namespace(one), one.shape[-1]
    allowed = RESIDUAL[bits(one, xp)]
    start = np.random.default_rng(0).standard_normal(rank)
    new = xp.asarray(start, dtype=one.dtype, device=device(one))
    image = apply(key_side, new)
    # An orthonormal basis x in that inner product, and w = BᵀB x; in it, P is tridiagonal.
    vectors, images = (xp.zeros((0, rank), dtype=one.dtype, device=device(one)) for _ in "xw")
    diagonal: list[float] = []
    lengths = [_length(new, image)]
    while len(diagonal) < min(MOST_STEPS, rank) and lengths[-1] > 0:
        vectors = xp.concat([vectors, new[None, :] / lengths[-1]])
        images = xp.concat([images, image[None, :] / lengths[-1]])
        new = apply(query_side, images[-1, :])
        diagonal.append(float(new @ images[-1, :]))
        for _ in range(2):
            new = new - (images @ new) @ vectors
        image = apply(key_side, new)
        lengths.append(_length(new, image))
        steps = len(diagonal)
        if steps % max(2, steps // 8) == 0:
            tridiagonal = np.diag(diagonal) + np.diag(lengths[1:-1], -1)
            values, ritz = np.linalg.eigh(tridiagonal)  # reads the lower half
            if lengths[-1] * abs(ritz[-1, -1]) <= allowed * values[-1]:
                return math.sqrt(values[-1])
    return None


def _trace(square: Array, xp: Any) -> Float[Array, "*stack"]:
    """The trace in float64; 1 for the zero matrix."""
    trace = xp.linalg.trace(square, dtype=xp.float64)
    return xp.where(trace > 0, trace, xp.ones_like(trace))


def _length(vector: Array, image: Array) -> float:
    return math.sqrt(max(0.0, float(vector @ image)))
