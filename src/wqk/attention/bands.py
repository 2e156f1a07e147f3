"""How a head's weight is spread over rotary frequencies.

Rotary positions rotate a head's dimensions plane by plane: fast planes distinguish nearby
positions, slow ones hardly rotate and match content at any distance. A plane's contribution to the
score is bounded by E_k = ‖A_k‖ ‖B_k‖, the norms of its two columns in each factor.

Axes: H query heads, P rotary planes.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.attention.factor import Factors
from wqk.errors import CheckpointError


class Bands(NamedTuple):
    """One block's rotary planes."""

    frequencies: Float[np.ndarray, " planes"]  # |radians per token|, after any scaling
    axes: Int[np.ndarray, " planes"]  # 0; for a picture's patches, 1 where the column turns planes
    energies: Float[np.ndarray, "heads planes"]  # E_k of each query head

    @property
    def shares(self) -> Float[np.ndarray, "heads planes"]:
        """E_k / Σ E_k, (H, P); NaN of a head whose form is zero."""
        size = self.energies.sum(axis=1, keepdims=True)
        return self.energies / np.where(size == 0, np.nan, size)

    @property
    def low_share(self) -> Float[np.ndarray, " heads"]:
        """The share of the slower half of all planes in Σ E_k, (H,); 1/2 by chance."""
        slow = np.argsort(self.frequencies, kind="stable")[: len(self.frequencies) // 2]
        return np.asarray(self.shares[:, slow].sum(axis=1))


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
