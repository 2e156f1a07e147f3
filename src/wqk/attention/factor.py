"""One factor of a block's form: it maps residual vectors to queries, keys or values.

Axes: H heads, R head width, D model width, C latent width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from wqk._caching import cached_property
from wqk._typing import Array, Float
from wqk.checkpoints import Part
from wqk.errors import NonFiniteWeights
from wqk.families import Composed, Side


@dataclass(frozen=True, eq=False)
class Factor:
    """The weights of one side of a block."""

    side: Side  # where they come from
    stored_weight: Float[Array, "heads width d"]  # as an ``nn.Linear`` stores it, q = W x
    stored_bias: Float[Array, "heads width"] | None = None
    gain: Float[Array, " gains"] | None = None  # of the norm before the score: R or H·R values
    shift: Float[Array, "heads width"] | None = None  # what that norm adds
    temperature: Float[Array, "heads 1"] | None = None  # a factor of each head
    latent: Float[Array, "latent d"] | None = None  # maps to the normalized latent, if there is one

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
        """The weight, with the linear parts of the norm and the temperature folded in."""
        return self._folded[0]

    @property
    def bias(self) -> Float[Array, "heads width"] | None:
        """The bias, with the same folded in, but without the norm's ``shift``."""
        return self._folded[1]

    def vectors(
        self,
        x: Float[Array, "*batch tokens d"],
        weight: Float[Array, "heads width d"] | None = None,
    ) -> Array:
        """Queries, keys or values (…, H, N, R) of residual vectors (…, N, D), before positions.

        They are products with the folded weight, by default `weight`, times the tokens' own scales.
        """
        projection, norm = self.side.projection, self.side.norm
        result = _projected(x, self.weight if weight is None else weight, self.bias)
        scales: Any = 1.0
        if isinstance(projection, Composed) and self.latent is not None:
            scales = _inverse_size(x @ self.latent.T, (-1,), projection.norm.epsilon)
            scales = scales[..., None, :, :]
            result = result * scales
        if norm is not None:
            plain = _projected(x, self.stored_weight, self.stored_bias) * scales
            gains = 0 if self.gain is None else len(self.gain)
            axes = (-1,) if norm.axes(gains, plain.shape[-1]) == (1,) else (-3, -1)
            if norm.kind == "layer":
                plain = plain - plain.mean(axis=axes, keepdims=True)
            result = result * _inverse_size(plain, axes, norm.epsilon)
        if self.shift is not None:
            shift = self.shift if self.temperature is None else self.shift * self.temperature
            result = result + shift[:, None]
        return result


def load_factor(stored: Mapping[Part, Array], side: Side, name: str) -> Factor:
    """The factor from what has been read for a side.

    Raises `NonFiniteWeights` if a weight or bias has NaN or infinite entries.
    """
    projection, norm = side.projection, side.norm
    weight = projection.weight(stored)
    xp = array_namespace(weight)
    shift = _joined(stored, norm.bias, xp) if norm else None
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
        _joined(stored, norm.gain, xp) if norm else None,
        shift,
        temperature,
        projection.inner.weight(stored)[0] if isinstance(projection, Composed) else None,
    )
    for part, array in ((projection.roles[""], factor.weight), (side.bias, factor.bias)):
        if part is not None and array is not None:
            _require_finite(array, f"{name}: {part.name}")
    return factor


def _joined(stored: Mapping[Part, Array], parts: tuple[Part, ...], xp: Any) -> Array | None:
    """The entries of all parts one after the other; None if there are none."""
    return xp.concat([stored[part].reshape(-1) for part in parts]) if parts else None


def _projected(x: Array, weight: Array, bias: Array | None) -> Array:
    vectors = x[..., None, :, :] @ weight.swapaxes(-1, -2)
    return vectors if bias is None else vectors + bias[:, None]


def _inverse_size(vectors: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """The factor that brings vectors to a mean square of 1."""
    return ((vectors**2).mean(axis=axes, keepdims=True) + epsilon) ** -0.5


def _require_finite(weight: Array, name: str) -> None:
    xp = array_namespace(weight)
    # A sum is finite only where all its summands are, and costs one pass.
    with np.errstate(over="ignore", invalid="ignore"):
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
