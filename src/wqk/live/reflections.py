"""Random involutions of attention inputs that keep the inputs' second moments.

The control of ``wqk parts`` compares the scores S = x W xᵀ with M = (x R′) Wᵀ (x R′)ᵀ. With a
random orthogonal involution R instead of R′, M would nearly vanish, because inputs lie in few
directions that R does not keep. With the second moments C = E[xᵀx] of a block's inputs, R′ = C^-½ R
C^½ is also an involution, and x R′ also has the second moments C. Therefore M is about as large as
S.

Axes: D width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wqk._typing import Array, Float

# Second moments below a share of the largest are raised to it, so that the inverse root exists.
# Directions in which a few rare tokens lie can make the control too large: with the first share,
# 3.6 in the first layer of an encoder of characters, with 10⁻⁴ 1.1. Where weights act on directions
# of small moments, a large share makes it too small. A layer has the share whose control is nearest
# to the size of its scores; others than the first are tried beyond a factor of `NEAR_ENOUGH`.
LEAST_MOMENTS = (1e-6, 3e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3)
NEAR_ENOUGH = 1.5

# A control is refused if |M|²/|S|² lies outside these limits.
SMALLEST_CONTROL, LARGEST_CONTROL = 0.5, 2.0


@dataclass(frozen=True)
class InputRoots:
    """Square roots of the second moments C of a block's inputs, each (D, D)."""

    root: Array  #: C^½
    inverse_root: Array  #: C^-½

    def reflect(self, inputs: Array, involution: Array) -> Array:
        """Return x C^-½ R C^½ for inputs x (…, D) and an orthogonal involution R (D, D)."""
        return inputs @ self.inverse_root @ involution @ self.root


def input_roots(
    moments: Float[np.ndarray, "D D"], least_moment: float = LEAST_MOMENTS[0]
) -> InputRoots:
    """Return the square roots of second moments; small moments are raised to a least share.

    Examples
    --------
    Reflected inputs have the second moments of the inputs, however unequal those are:

    >>> inputs = np.random.default_rng(0).standard_normal((500, 6)) * [9, 5, 3, 2, 1, 0.5]
    >>> moments = inputs.T @ inputs / 500
    >>> reflected = input_roots(moments).reflect(inputs, involution(6, 0))
    >>> bool(np.allclose(reflected.T @ reflected / 500, moments))
    True
    """
    values, vectors = np.linalg.eigh(np.asarray(moments, np.float64))
    deviations = np.sqrt(np.maximum(values, least_moment * values[-1]))
    return InputRoots(
        root=(vectors * deviations) @ vectors.T,
        inverse_root=(vectors / deviations) @ vectors.T,
    )


def involution(width: int, seed: Any) -> Float[np.ndarray, "D D"]:
    """Return a random orthogonal matrix R = Rᵀ = R⁻¹ with as many eigenvalues 1 as −1.

    Examples
    --------
    >>> r = involution(6, 0)
    >>> bool(np.allclose(r @ r, np.eye(6))), bool(np.allclose(r, r.T)), round(float(r.trace()))
    (True, True, 0)
    """
    random = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(random.standard_normal((width, width)))
    signs = 1 - 2 * (np.arange(width) % 2)
    reflection: np.ndarray = (basis * signs) @ basis.T
    return reflection
