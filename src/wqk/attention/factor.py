"""One factor of a block's form, as read: it maps residual vectors to queries, keys or values.

Axes: H heads, R head width, D model width, C latent width, N tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.errors import NonFiniteWeights
from wqk.families import Composed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from wqk.checkpoints import Part
    from wqk.families import Norm, Side


@dataclass(frozen=True, eq=False)
class Factor:
    """The weights of one side of a block.

    Attributes
    ----------
    side
        Where they came from.
    stored_weight, stored_bias
        (H, R, D) as an ``nn.Linear`` stores it, q = W x, and (H, R) or None.
    gain, shift
        Of the norm between projection and score, or None: what it multiplies by, one value for
        each of R or of H·R, and what it adds, (H, R).
    temperature
        A factor of each head, (H, 1), or None.
    latent
        (C, D), where the projection goes through a latent that is normalized; or None.
    """

    side: Side
    stored_weight: Float[Array, "heads width d"]
    stored_bias: Float[Array, "heads width"] | None = None
    gain: Float[Array, " gains"] | None = None
    shift: Float[Array, "heads width"] | None = None
    temperature: Float[Array, "heads 1"] | None = None
    latent: Float[Array, "latent d"] | None = None

    @cached_property
    def _folded(self) -> tuple[Array, Array | None]:
        weight, bias = self.stored_weight, self.stored_bias
        if self.side.norm is not None and self.gain is not None:
            weight, bias = self.side.norm.fold(weight, bias, self.gain)
        if self.temperature is not None:
            weight = weight * self.temperature[..., None]
            bias = None if bias is None else bias * self.temperature
        return weight, bias

    @property
    def weight(self) -> Float[Array, "heads width d"]:
        """The weight with everything folded in that is linear in the norm and the temperature."""
        return self._folded[0]

    @property
    def bias(self) -> Float[Array, "heads width"] | None:
        """The bias with the same folded in; what the norm adds, ``shift``, is not part of it."""
        return self._folded[1]

    def vectors(self, x: Float[np.ndarray, "*batch tokens d"]) -> np.ndarray:
        """Queries, keys or values (…, H, N, R) of residual vectors (…, N, D), before positions."""
        result = x[..., None, :, :] @ self.stored_weight.swapaxes(-1, -2)
        if self.stored_bias is not None:
            result = result + self.stored_bias[:, None]
        projection = self.side.projection
        if isinstance(projection, Composed) and self.latent is not None:
            scales = _inverse_size(x @ self.latent.T, (-1,), projection.norm.epsilon)
            result = result * scales[..., None, :, :]
        if self.side.norm is not None:
            result = self._normalized(result, self.side.norm)
        if self.temperature is not None:
            result = result * self.temperature[:, None]
        return np.asarray(result)

    def _normalized(self, vectors: np.ndarray, norm: Norm) -> np.ndarray:
        width = vectors.shape[-1]
        axes = (
            (-1,)
            if norm.axes(0 if self.gain is None else len(self.gain), width) == (1,)
            else (-3, -1)
        )
        if norm.kind == "layer":
            vectors = vectors - vectors.mean(axis=axes, keepdims=True)
        vectors = vectors * _inverse_size(vectors, axes, norm.epsilon)
        if self.gain is not None:
            vectors = vectors * (self.gain + norm.offset).reshape(-1, 1, width)
        return vectors if self.shift is None else vectors + self.shift[:, None]


def load_factor(stored: Mapping[Part, Array], side: Side, name: str) -> Factor:
    """The factor of what has been read for a side.

    Raises
    ------
    NonFiniteWeights
        A weight or bias has NaN or infinite entries; says which tensor and how many.
    """
    projection, norm = side.projection, side.norm
    weight = projection.weight(stored)
    xp = array_namespace(weight)

    def joined(parts: tuple[Part, ...]) -> Array | None:
        return xp.concat([stored[part].reshape(-1) for part in parts]) if parts else None

    shift = joined(norm.bias) if norm else None
    if shift is not None:
        shift = xp.broadcast_to(shift.reshape(-1, weight.shape[1]), weight.shape[:2])
    temperature = None
    if side.temperature is not None:
        logarithm = stored[side.temperature.logarithm].reshape(-1, 1)
        temperature = xp.exp(logarithm).clip(max=side.temperature.limit)
    factor = Factor(
        side,
        weight,
        None if side.bias is None else stored[side.bias].reshape(weight.shape[:2]),
        joined(norm.gain) if norm else None,
        shift,
        temperature,
        projection.inner.weight(stored)[0] if isinstance(projection, Composed) else None,
    )
    for part, array in ((projection.roles[""], factor.weight), (side.bias, factor.bias)):
        if part is not None and array is not None:
            _require_finite(array, f"{name}: {part.name}")
    return factor


def _inverse_size(vectors: np.ndarray, axes: tuple[int, ...], epsilon: float) -> np.ndarray:
    """The factor that brings vectors to a mean square of 1."""
    return np.asarray(((vectors**2).mean(axis=axes, keepdims=True) + epsilon) ** -0.5)


def _require_finite(weight: Array, name: str) -> None:
    xp = array_namespace(weight)
    # A sum is finite only where all its summands are, and costs one pass.
    with np.errstate(over="ignore"):
        if xp.isfinite(xp.sum(weight)):
            return
    count = int(xp.sum(~xp.isfinite(weight)))
    if count:
        raise NonFiniteWeights(
            f"{name}: {count} of {math.prod(weight.shape)} weights are NaN or infinite; "
            "the checkpoint is broken",
            tensor=name,
            count=count,
        )
