"""The factors of a block's forms: they map residual vectors to queries, keys or values.

Axes: H heads, G key heads, R head width, D model width, C latent width, N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from wqk._machine import cached_property
from wqk._typing import Array, Float
from wqk.attention.coordinates import with_norm
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, NonFiniteWeights
from wqk.families import AttentionPlan, Composed, Norm, Side
from wqk.forms.kernels import array_namespace


@dataclass(frozen=True, eq=False)
class Factor:
    """The weights of one side of a block."""

    side: Side  # where they come from
    stored_weight: Float[Array, "heads width d"]  # as an ``nn.Linear`` stores it, q = W x
    stored_bias: Float[Array, "heads width"] | None = None
    gain: Float[Array, " gains"] | None = None  # of the norm before the score: R or H·R values
    shift: Float[Array, "heads width"] | None = None  # what that norm adds
    temperature: Float[Array, "heads_or_1 width_or_1"] | None = None  # see `Temperature`
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
    bias = None if side.bias is None else stored[side.bias].reshape(weight.shape[:2])
    if side.factor != 1:
        weight, bias = weight * side.factor, None if bias is None else bias * side.factor
    xp = array_namespace(weight)
    shift = _joined(stored, norm.bias, xp) if norm else None
    if shift is not None:
        shift = xp.broadcast_to(shift.reshape(-1, weight.shape[1]), weight.shape[:2])
    temperature = None
    if side.temperature is not None:
        temperature = side.temperature.factors(stored[side.temperature.stored])
    factor = Factor(
        side,
        weight,
        bias,
        _joined(stored, norm.gain, xp) if norm else None,
        shift,
        temperature,
        projection.inner.weight(stored)[0] if isinstance(projection, Composed) else None,
    )
    for part, array in ((projection.roles[""], factor.weight), (side.bias, factor.bias)):
        if part is not None and array is not None:
            _require_finite(array, f"{name}: {part.name}")
    return factor


class Factors:
    """What is read of one block: each weight when it is first needed, and once.

    Attributes
    ----------
    checkpoint
        Where the weights are.
    plan
        Which weights they are.
    """

    def __init__(self, checkpoint: Checkpoint, plan: AttentionPlan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        self._stored: dict[Part, Array] = {}

    def read(self, parts: Sequence[Part]) -> list[Array]:
        """Parts of the checkpoint, as `Checkpoint.read` gives them; each is read once."""
        missing = [part for part in dict.fromkeys(parts) if part not in self._stored]
        if missing:
            self._stored |= zip(missing, self.checkpoint.read(missing), strict=True)
        return [self._stored[part] for part in parts]

    def _factors(self, *sides: Side) -> tuple[Factor, Factor]:
        """The factors of two sides, read in one request.

        `NonFiniteWeights` if a weight or bias has NaN or infinite entries.
        """
        self.read([part for side in sides for part in side.parts])
        left, right = (load_factor(self._stored, side, self.checkpoint.name) for side in sides)
        return left, right

    @property
    def layer(self) -> int:
        """The layer's number within its stack, from 0."""
        return self.plan.layer

    @property
    def stack(self) -> str:
        """``encoder``, ``decoder``, ``vision``, …."""
        return self.plan.stack

    @property
    def kind(self) -> str:
        """``self`` or ``cross``."""
        return self.plan.kind

    @property
    def head_count(self) -> int:
        """Number of query heads, H."""
        return self.plan.query.heads

    @property
    def key_head_count(self) -> int:
        """Number of key heads, G."""
        return self.plan.key.heads

    @cached_property
    def query_key(self) -> tuple[Factor, Factor]:
        """`query` and `key`."""
        return self._factors(self.plan.query, self.plan.key)

    @property
    def query(self) -> Factor:
        """The queries' weight (H, R, D), and what comes with it."""
        return self.query_key[0]

    @property
    def key(self) -> Factor:
        """The keys' weight (G, R, D), and what comes with it.

        Query head h meets key head h // (H/G).
        """
        return self.query_key[1]

    @cached_property
    def positional(self) -> tuple[Factor, Factor] | None:
        """Queries and keys of the dimensions of latent attention that hold only positions.

        They are not in the form.
        """
        apart = self.plan.positional
        return self._factors(apart.query, apart.key) if apart else None

    @cached_property
    def value_output(self) -> tuple[Factor, Factor]:
        """The weights of values (G, R, D) and outputs (H, R, D), and what comes with them.

        `CheckpointError` if the family describes none, or they are not there.
        """
        if self.plan.value is None or self.plan.output is None:
            raise CheckpointError(
                f"layer {self.layer} of the {self.stack}: family {self.plan.family} describes no "
                "values and outputs, or the checkpoint lacks them"
            )
        return self._factors(self.plan.value, self.plan.output)

    def linear(self, factor: Factor, norm: Norm | None) -> tuple[Array, Array | None]:
        """A factor's weight (heads, R, D) and bias (heads, R), with the norm before it folded in.

        They act on normalized vectors before gain and bias.
        """
        weight, bias = factor.weight, factor.bias
        if norm is None:  # the residual stream itself; or the output, which no norm follows
            return weight, bias
        gain, shift = self.gain(norm)
        return with_norm(weight, bias, gain, shift, norm.kind)

    def gain(self, norm: Norm) -> tuple[Array, Array | None]:
        """A norm's gain, and its bias if it has one.

        `NonFiniteWeights` if they have NaN or infinite entries, `CheckpointError` if they are no
        vectors.
        """
        parts = [*norm.gain, *norm.bias]
        for part, values in zip(parts, self.read(parts), strict=True):
            _require_finite(values, f"{self.checkpoint.name}: {part.name}")
            if values.ndim != 1:
                raise CheckpointError(
                    f"{self.checkpoint.name}: {part.name} must be a vector, a number for each "
                    f"dimension; got the shape {tuple(values.shape)}"
                )
        gain, *shift = self.read(parts)
        offset, factor = (gain.dtype.type(number) for number in (norm.offset, norm.factor))
        return factor * (gain + offset), factor * shift[0] if shift else None


def _joined(stored: Mapping[Part, Array], parts: tuple[Part, ...], xp: Any) -> Array | None:
    """The entries of all parts one after the other; None if there are none."""
    return xp.concat([stored[part].reshape(-1) for part in parts]) if parts else None


def _projected(x: Array, weight: Array, bias: Array | None) -> Array:
    vectors = x[..., None, :, :] @ weight.swapaxes(-1, -2)
    return vectors if bias is None else vectors + bias[:, None]


def _inverse_size(vectors: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """The factor that brings vectors to a mean square of 1."""
    size = (vectors**2).mean(axis=axes, keepdims=True) + epsilon
    return (size + (size == 0)) ** -0.5  # zeros stay zeros


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
