"""How a head's weight is spread over rotary frequencies, and how its form changes with distance.

Rotary positions rotate a head's dimensions plane by plane: fast planes distinguish nearby
positions, slow ones hardly rotate and match content at any distance. A plane's contribution to the
score is bounded by E_k = ‖A_k‖ ‖B_k‖, the norms of its two columns in each factor. Inner products
⟨M_a, M_b⟩ of heads at relative distances come from R × R Gram matrices.

Axes: H query heads, G key heads, P rotary planes, N distances, R head width, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.attention.factor import Factors
from wqk.errors import CheckpointError
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


class Bands(NamedTuple):
    """One block's rotary planes."""

    frequencies: Float[np.ndarray, " planes"]  # |radians per token|, after any scaling
    axes: Int[np.ndarray, " planes"]  # 0; for a picture's patches, 1 where the column turns planes
    energies: Float[np.ndarray, "heads planes"]  # E_k of each query head

    @property
    def shares(self) -> Float[np.ndarray, "heads planes"]:
        """E_k / Σ E_k, (H, P); NaN of a head whose form is zero."""
        return _ratio(self.energies, self.energies.sum(axis=1, keepdims=True))

    @property
    def low_share(self) -> Float[np.ndarray, " heads"]:
        """The share of the slower half of all planes in Σ E_k, (H,); 1/2 by chance."""
        slow = np.argsort(self.frequencies, kind="stable")[: len(self.frequencies) // 2]
        return np.asarray(self.shares[:, slow].sum(axis=1))


class Decay(NamedTuple):
    """Each head's form as a function of distance; NaN where M(0) is zero."""

    norm: Float[np.ndarray, "heads distances"]  # ‖M(N)‖ / ‖M(0)‖
    cosine: Float[np.ndarray, "heads distances"]  # of M(N) and M(0)


def rotary_bands(block: Factors) -> Bands:
    """The rotary planes of one block.

    Raises
    ------
    CheckpointError
        The block's positions are not rotary.

    Examples
    --------
    >>> import numpy as np, wqk
    >>> weights = {f"layers.0.self_attn.{s}_proj.weight": np.eye(8) for s in "qk"}
    >>> from wqk.checkpoints.modules import StateDict
    >>> config = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> bands = wqk.open(StateDict(weights, config, "toy"))[0].bands()
    >>> bands.energies.round(6).tolist(), bands.low_share.round(6).tolist()
    ([[2.0, 2.0], [2.0, 2.0]], [0.5, 0.5])
    """
    rotary = block.plan.rotary or block.plan.axial
    if rotary is None:
        raise CheckpointError(
            f"layer {block.layer} of the {block.plan.stack} has no bands: its positions "
            f"are {block.plan.position or 'not rotary'}"
        )
    first, second = rotary.planes
    planes = []
    for factor in (block.query, block.key):
        squares = np.square(factor.weight.astype(np.float64)).sum(axis=-1)
        planes.append(np.sqrt(squares[:, first] + squares[:, second]))
    sharing = block.head_count // block.key_head_count
    count = len(rotary.frequencies)
    return Bands(
        np.abs(np.asarray(rotary.frequencies, np.float64)),
        np.arange(count) * rotary.axes // count,
        planes[0] * planes[1].repeat(sharing, axis=0),
    )


def decay(block: Factors, distances: Sequence[int]) -> Decay:
    """How much each head's form at these distances differs from that at distance 0.

    Patches of a picture are taken to be N rows and N columns apart.
    """
    rotary = block.plan.rotary or block.plan.axial
    query = block.query.weight.astype(np.float64)
    key = block.key.weight.astype(np.float64)
    key = key.repeat(len(query) // len(key), axis=0)
    still = Heads(query, key, None)
    turned = still._replace(rotary=rotary.turning if rotary else None)
    pairs = InnerProducts(turned, turned), InnerProducts(still, turned)
    squares, products = (np.stack([pair.at(n) for n in distances], axis=-1) for pair in pairs)
    own = pairs[0].at(0)[:, None]
    return Decay(np.sqrt(_ratio(squares, own)), _ratio(products, np.sqrt(squares * own)))


def _ratio(value: np.ndarray, size: np.ndarray) -> np.ndarray:
    """``value / size``; NaN where the size is 0."""
    return value / np.where(size == 0, np.nan, size)
