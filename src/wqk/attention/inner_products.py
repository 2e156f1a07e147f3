"""Inner products ⟨M_a, M_b⟩ of heads at relative distances, from R × R Gram matrices.

Axes: H query heads, R head width, D width and 1 for the biases, N tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.families.rotary import Rotary


class Heads(NamedTuple):
    """Factors of one form per head, (H, R, D) each."""

    query: np.ndarray
    key: np.ndarray
    rotary: Rotary | None


class InnerProducts:
    """⟨M_a(N), M_b(N)⟩ of each head, at any N from the same Gram matrices."""

    def __init__(self, a: Heads, b: Heads) -> None:
        self._queries = a.query @ b.query.swapaxes(-1, -2)
        self._keys = a.key @ b.key.swapaxes(-1, -2)
        self._rotary = a.rotary, b.rotary

    def at(self, distance: int) -> Float[np.ndarray, " heads"]:
        """The products at one distance, (H,)."""
        queries = self._queries
        if distance:
            queries = _turned(queries, self._rotary[1], distance).swapaxes(-1, -2)
            queries = _turned(queries, self._rotary[0], distance).swapaxes(-1, -2)
        return np.asarray((queries * self._keys).sum(axis=(-2, -1)))


def _turned(vectors: np.ndarray, rotary: Rotary | None, distance: int) -> np.ndarray:
    """Vectors (..., N, R), all turned to one position."""
    if rotary is None:
        return vectors
    turned: np.ndarray = rotary.rotate(vectors, np.full(vectors.shape[-2], distance))
    return turned
