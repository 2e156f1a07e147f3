"""Norms of vectors: their tensors, what is linear in them, and what is not.

Axes: H heads, R head width, D width, N tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from wqk._typing import Array, Float
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints import Part

# Root mean square, or with the mean taken off first.
NORMS = ("rms", "layer")


@dataclass(frozen=True)
class Norm:
    """A norm of residual vectors, of a latent, or of queries or keys.

    Attributes
    ----------
    kind
        ``rms`` or ``layer``.
    gain, bias
        One tensor for all heads, or one for each; none if the norm has none.
    offset
        1 if the gain is stored as its difference from 1.
    epsilon
        Added to the mean square.
    alone
        Whether each head is normalized alone although the gains cover all heads.
    """

    kind: str
    gain: tuple[Part, ...] = ()
    bias: tuple[Part, ...] = ()
    offset: float = 0.0
    epsilon: float = 0.0
    alone: bool = False

    def axes(self, gains: int, width: int) -> tuple[int, ...]:
        """The axes of (heads, R) that are normalized together: one head, or all of them."""
        return (1,) if self.alone or gains in (0, width) else (0, 1)

    def fold(
        self,
        weight: Float[Array, "heads width d"],
        bias: Float[Array, "heads width"] | None,
        gain: Float[Array, " gains"],
    ) -> tuple[Float[Array, "heads width d"], Float[Array, "heads width"] | None]:
        """Fold the linear parts, gain and centering, into the weight and bias before the norm."""
        heads, width = weight.shape[:2]
        if len(gain) not in (width, heads * width):
            raise CheckpointError(
                f"a norm of {len(gain)} gains matches neither heads of width {width} nor {heads} "
                "of them"
            )
        if self.kind == "layer":
            axes = self.axes(len(gain), width)
            weight = weight - weight.mean(axis=axes, keepdims=True)
            bias = None if bias is None else bias - bias.mean(axis=axes, keepdims=True)
        gains = (gain + self.offset).reshape(-1, width)
        return weight * gains[..., None], None if bias is None else bias * gains
