"""Factors of a block's forms, in stored and in other coordinates.

Factors map residual vectors to queries, keys or values. The plain form is W_q W_kᵀ. Each coordinate
changes one property of the form. Coordinates can be combined, with one exception: values and
outputs have no distances, because positions do not act on them.

- ``fold_norm``: the gain of the norm before each side is folded in, with LayerNorm's centering;
  the form then acts on normalized residual vectors.
- ``bias``: the augmented form of [x, 1], with the biases as one more row and column. The key's bias
  is included only with rotary positions, a norm or limit after it, sinks, or no softmax. Otherwise
  its contribution is the same for all keys and cancels in the softmax.
- ``distances``: A R(−N) Bᵀ for relative distances N = i − j, in rotary models.
- ``circuit``: ``ov`` for W_v W_o instead of W_q W_kᵀ.

Axes: H query heads, G key heads, R head width, D model width, C latent width, N tokens.

A score, the input of the softmax, is ``cap(scale · (x A + a) R (y B + b)ᵀ + position)`` for visible
pairs. The form is A Bᵀ; `omissions` lists the other terms of a model's score.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from wqk._machine import cached_property
from wqk._typing import Array, Float
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import CheckpointError, NonFiniteWeights, demo_advice
from wqk.families import AttentionPlan, Composed, Norm, Side
from wqk.families.windows import ChunkWindow, LocalWindow
from wqk.forms import BilinearForm
from wqk.forms.arrays import array_namespace


@dataclass(frozen=True, eq=False)
class Factor:
    """Weights of one side of a block.

    Attributes
    ----------
    side
        The stored tensors that the weights come from.
    stored_weight, stored_bias
        Weight and bias of the projection, q = W x + b, in the orientation of an ``nn.Linear``.
    gain, shift
        Gain (R or H·R values) and bias of the norm between projection and score.
    temperature
        Factors of the projected vectors; see `Temperature`.
    latent, latent_bias
        Projection to the normalized latent, and bias, for latent attention.
    outer
        Projection from the latent to the heads; None without a latent, or for a replaced weight.
    """

    side: Side
    stored_weight: Float[Array, "heads width d"]
    stored_bias: Float[Array, "heads width"] | None = None
    gain: Float[Array, " gains"] | None = None
    shift: Float[Array, "heads width"] | None = None
    temperature: Float[Array, "heads_or_1 width_or_1"] | None = None
    latent: Float[Array, "latent d"] | None = None
    latent_bias: Float[Array, " latent"] | None = None
    outer: Float[Array, "heads width latent"] | None = None

    @property
    def drawn(self) -> tuple[Array, ...]:
        """Matrices that an initialization draws: the weight, or the two weights around a latent.

        The entries of a product of random matrices are not independent.
        """
        if self.latent is None or self.outer is None:
            return (self.weight,)
        return self.outer, self.latent[None]

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
        """The bias, with the norm's gain and the temperature folded in, but without ``shift``."""
        return self._folded[1]

    def vectors(
        self,
        x: Float[Array, "*batch tokens d"],
        weight: Float[Array, "heads width d"] | None = None,
    ) -> Array:
        """Compute queries, keys or values (…, H, N, R) of vectors (…, N, D), before positions.

        The vectors are products with the folded weight, by default `weight`, times each token's
        scale from the norms.
        """
        projection, norm = self.side.projection, self.side.norm
        result = _projected(x, self.weight if weight is None else weight, self.bias)
        scales: Any = 1.0
        if isinstance(projection, Composed) and self.latent is not None:
            latents = x @ self.latent.T
            if self.latent_bias is not None:
                latents = latents + self.latent_bias
            scales = _inverse_size(latents, (-1,), projection.norm.epsilon)
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

    def vectors_after_rotation(
        self, x: Float[Array, "*batch tokens d"], rotate: Callable[[Array], Array]
    ) -> Array:
        """Compute queries or keys (…, H, N, R) whose norm follows the rotation by positions.

        Parameters
        ----------
        x
            Inputs of the projection, (…, N, D).
        rotate
            Function that rotates vectors (…, H, N, R) by the positions of their tokens.
        """
        norm = self.side.norm
        assert norm is not None
        turned = rotate(_projected(x, self.stored_weight, self.stored_bias))
        gains = 0 if self.gain is None else len(self.gain)
        axes = (-1,) if norm.axes(gains, turned.shape[-1]) == (1,) else (-3, -1)
        if norm.kind == "layer":
            turned = turned - turned.mean(axis=axes, keepdims=True)
        result = turned * _inverse_size(turned, axes, norm.epsilon)
        if self.gain is not None:
            result = result * (self.gain + norm.offset).reshape(-1, 1, turned.shape[-1])
        if self.shift is not None:
            result = result + self.shift[:, None]
        if self.temperature is not None:
            result = result * self.temperature[:, None]
        return result


def lack_of_values(plan: AttentionPlan) -> str:
    """Return the reason why a block has no values and outputs: the family or the checkpoint."""
    if not plan.rule.output:
        return f"family {plan.family} describes no values and outputs"
    names = plan.rule.output
    if plan.value is None and plan.rule.value:
        names = plan.rule.value
    tensor = names[0].replace("{layer}", str(plan.layer))
    return f"the checkpoint has no values and outputs; family {plan.family} expects {tensor}"


def load_factor(
    stored: Mapping[Part, Array], side: Side, name: str, *, contiguous: bool = True
) -> Factor:
    """Return the factor of one side from the parts that were read.

    If not ``contiguous``, a weight that is stored (in, out) is transposed without a copy. Raises
    `NonFiniteWeights` if a weight or bias has NaN or infinite entries.
    """
    projection, norm = side.projection, side.norm
    if isinstance(projection, Composed):
        weight = projection.weight(stored)
    else:
        weight = projection.take(stored[projection.part], contiguous=contiguous)
    bias = None if side.bias is None else stored[side.bias].reshape(weight.shape[:2])
    latent = outer = latent_bias = None
    if isinstance(projection, Composed):
        latent, outer = projection.inner.weight(stored)[0], projection.outer.weight(stored)
        if projection.bias is not None:
            bias, latent_bias = projection.constant(stored), stored[projection.bias]
            _require_finite(latent_bias, name, projection.bias.name)
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
        side=side,
        stored_weight=weight,
        stored_bias=bias,
        gain=_joined(stored, norm.gain, xp) if norm else None,
        shift=shift,
        temperature=temperature,
        latent=latent,
        latent_bias=latent_bias,
        outer=outer,
    )
    _require_finite(factor.weight, name, projection.roles[""].name)
    if side.bias is not None and factor.bias is not None:
        _require_finite(factor.bias, name, side.bias.name)
    return factor


class BlockWeights:
    """The weights of one block; each weight is read on first use, and only once.

    Attributes
    ----------
    checkpoint
        The checkpoint that stores the weights.
    plan
        The plan of the block, with the names of its weights.
    """

    def __init__(self, checkpoint: Checkpoint, plan: AttentionPlan) -> None:
        self.checkpoint, self.plan = checkpoint, plan
        self._stored: dict[Part, Array] = {}

    def read(self, parts: Sequence[Part]) -> list[Array]:
        """Return parts of the checkpoint as `Checkpoint.read` does; each part is read only once."""
        missing = [part for part in dict.fromkeys(parts) if part not in self._stored]
        if missing:
            self._stored |= zip(missing, self.checkpoint.read(missing), strict=True)
        return [self._stored[part] for part in parts]

    def _factors(self, left: Side, right: Side) -> tuple[Factor, Factor]:
        """Return the factors of two sides, read in one request.

        Raises `NonFiniteWeights` if a weight or bias has NaN or infinite entries.
        """
        self.read([*left.parts, *right.parts])
        name = self.checkpoint.name
        return load_factor(self._stored, left, name), load_factor(self._stored, right, name)

    @property
    def layer(self) -> int:
        """Number of the layer within its stack, from 0."""
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
        """The factors `query` and `key`."""
        return self._factors(self.plan.query, self.plan.key)

    @property
    def query(self) -> Factor:
        """Weight of the queries (H, R, D), with bias and norm."""
        return self.query_key[0]

    @property
    def key(self) -> Factor:
        """Weight of the keys (G, R, D), with bias and norm.

        Query head h uses key head h // (H/G).
        """
        return self.query_key[1]

    @cached_property
    def positional(self) -> tuple[Factor, Factor] | None:
        """Position dimensions of latent attention, as queries and keys; None if absent.

        The form does not contain these dimensions.
        """
        positional = self.plan.positional
        if positional is None:
            return None
        return self._factors(positional.query, positional.key)

    @cached_property
    def value_output(self) -> tuple[Factor, Factor]:
        """Weights of values (G, R, D) and outputs (H, R, D), with biases and norms.

        Raises `CheckpointError` if the family or the checkpoint lacks values and outputs.
        """
        if self.plan.value is None or self.plan.output is None:
            raise CheckpointError(
                f"layer {self.layer} of the {self.stack}: {lack_of_values(self.plan)}"
                f"{demo_advice(self.checkpoint.name)}"
            )
        return self._factors(self.plan.value, self.plan.output)

    def linear(self, factor: Factor, norm: Norm | None) -> tuple[Array, Array | None]:
        """Return the weight (heads, R, D) and bias (heads, R) of a factor, with its norm folded in.

        The weight then acts on normalized vectors before gain and bias.
        """
        weight, bias = factor.weight, factor.bias
        if norm is None:  # the residual stream itself; or the output, which no norm follows
            return weight, bias
        gain, shift = self.gain(norm)
        return with_norm(weight, bias, gain, shift, norm.kind)

    def gain(self, norm: Norm) -> tuple[Array, Array | None]:
        """Return the gain of a norm, and its bias or None.

        Raises `NonFiniteWeights` for NaN or infinite entries, and `CheckpointError` for arrays that
        are not vectors.
        """
        parts = [*norm.gain, *norm.bias]
        for part, values in zip(parts, self.read(parts), strict=True):
            _require_finite(values, self.checkpoint.name, part.name)
            if values.ndim != 1:
                raise CheckpointError(
                    f"{self.checkpoint.name}: {part.name} must be a vector, a number for each "
                    f"dimension; got the shape {tuple(values.shape)}"
                )
        gain, *biases = self.read(parts)
        offset, factor = (gain.dtype.type(number) for number in (norm.offset, norm.factor))
        bias = factor * biases[0] if biases else None
        return factor * (gain + offset), bias


def _joined(stored: Mapping[Part, Array], parts: tuple[Part, ...], xp: Any) -> Array | None:
    """Concatenate the entries of all parts; None if there are no parts."""
    return xp.concat([stored[part].reshape(-1) for part in parts]) if parts else None


def _projected(x: Array, weight: Array, bias: Array | None) -> Array:
    vectors = x[..., None, :, :] @ weight.swapaxes(-1, -2)
    return vectors if bias is None else vectors + bias[:, None]


def _inverse_size(vectors: Array, axes: tuple[int, ...], epsilon: float) -> Array:
    """Return the factor that scales vectors to a mean square of 1."""
    size = (vectors**2).mean(axis=axes, keepdims=True) + epsilon
    return (size + (size == 0)) ** -0.5  # zeros stay zeros


def _require_finite(weight: Array, checkpoint: str, tensor: str) -> None:
    xp = array_namespace(weight)
    # A sum is finite only if all summands are finite, and takes one pass.
    with np.errstate(over="ignore", invalid="ignore"):
        if xp.isfinite(xp.sum(weight)):
            return
    count = int(xp.sum(~xp.isfinite(weight)))
    if count:
        raise NonFiniteWeights(
            f"{checkpoint}: {tensor}: {count} of {math.prod(weight.shape)} weights are NaN or "
            "infinite; the checkpoint is broken",
            checkpoint=checkpoint,
            tensor=tensor,
            count=count,
        )


@dataclass(frozen=True)
class Coordinates:
    """Coordinates of the forms to score; by default the plain W_q W_kᵀ."""

    circuit: Literal["qk", "ov"] = "qk"
    fold_norm: bool = False
    bias: bool = False
    distances: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        if not self.distances or any(n % 1 for n in self.distances):
            raise CheckpointError(
                f"distances must be whole numbers, one at least, got {self.distances}"
            )
        if self.circuit not in ("qk", "ov"):
            raise CheckpointError(f"a circuit is 'qk' or 'ov', got {self.circuit!r}")
        if self.circuit == "ov" and set(self.distances) != {0}:
            raise CheckpointError(
                "positions do not act on values and outputs, so their form has no distance; score "
                "the query-key circuit at distances, or leave the distances out"
            )


PLAIN, FOLDED = Coordinates(), Coordinates(fold_norm=True)


def stacked(
    left: Float[Array, "left_heads width d_left"], right: Float[Array, "right_heads width d_right"]
) -> BilinearForm:
    """Return the forms of all heads as a stack (G, H/G)."""
    groups = min(len(left), len(right))
    left_groups = left.reshape(groups, -1, *left.shape[1:])
    right_groups = right.reshape(groups, -1, *right.shape[1:])
    return BilinearForm.from_factors(left_groups.swapaxes(-1, -2), right_groups.swapaxes(-1, -2))


def at_distance(form: BilinearForm, plan: AttentionPlan, distance: int) -> BilinearForm:
    """Return a R(−N) Bᵀ, the form between a query and a key N tokens earlier.

    The attention factor of YaRN and LongRoPE is left out, because it is the same at every distance.

    Raises
    ------
    CheckpointError
        The block's positions are not rotary along one axis.
    """
    if distance == 0:
        return form
    if plan.rotary is None or plan.turns_gains:
        reason = "has no rotary positions; its form is the same at every distance"
        if plan.turns_gains:
            reason = (
                "normalizes queries and keys after their rotation, with a gain for each dimension, "
                "so that a score depends on both positions and not on their distance"
            )
        elif plan.positional:
            reason = "has positions in dimensions of their own, which its form does not hold"
        elif plan.position.startswith("rotary"):
            reason = f"has positions that are {plan.position}, for which one number is no distance"
        elif plan.rule.between:
            reason = f"has no form at a distance: its products pass {', '.join(plan.rule.between)}"
        elif plan.rule.guess:
            reason = "was guessed from the names of tensors; its positions are not known"
        raise CheckpointError(
            f"layer {plan.layer} of the {plan.stack} {reason}; leave out the distance"
        )
    positions = np.full(form.widths[0], distance)
    turned = plan.rotary.turning.rotate(form.query, positions).astype(form.query.dtype)
    return BilinearForm.from_factors(turned, form.key)


def lacks_norm(plan: AttentionPlan, coordinates: Coordinates) -> bool:
    """Return whether norms should be folded in, but no norm before the block is known.

    Either the residual stream is projected without a norm, or another operation lies between the
    norm and the projections. Then no norm is folded.

    Examples
    --------
    >>> from dataclasses import replace
    >>> import wqk
    >>> plan = wqk.open(wqk.demo_model("induction"))[0].plan
    >>> plan = replace(plan, query=replace(plan.query, input_norm=None))
    >>> [lacks_norm(plan, Coordinates(circuit=one, fold_norm=True)) for one in ("qk", "ov")]
    [True, False]
    """
    sides = [plan.query, plan.key]
    if coordinates.circuit == "ov":
        sides = [plan.value or plan.key]
    return coordinates.fold_norm and any(side.input_norm is None for side in sides)


def reason_without_norm(plan: AttentionPlan) -> str:
    """Return why a block has no norm that could be folded in.

    Examples
    --------
    >>> import wqk
    >>> reason_without_norm(wqk.open("demo:encoder").plans[0])
    'the checkpoint lacks the norm in front of its attention, encoder.layer.*.attention.LayerNorm'
    """
    names = plan.rule.key_input_norm if plan.rule.kind == "cross" else plan.rule.input_norm
    if not names:
        return f"family {plan.family} names no norm in front of its attention"
    name = re.sub(r"\{\w+\}", "*", names[0])
    return f"the checkpoint lacks the norm in front of its attention, {name}"


def with_norm(
    weight: Float[Array, "heads width d"],
    bias: Float[Array, "heads width"] | None,
    gain: Float[Array, " d"],
    shift: Float[Array, " d"] | None,
    kind: str,
) -> tuple[Array, Array | None]:
    """Fold the norm before a projection into its weight and bias: gain, shift and centering.

    The results act on normalized vectors. The kind of norm is ``rms`` or ``layer``.
    """
    folded = weight * gain
    if kind == "layer":
        folded = folded - folded.mean(axis=-1, keepdims=True)
    if shift is not None:
        projected_shift = weight @ shift
        bias = projected_shift if bias is None else bias + projected_shift
    return folded, bias


def augmented(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """Return a weight (heads, R, D + 1) whose last column is the bias, or 0 without bias."""
    column = np.zeros(weight.shape[:2], weight.dtype) if bias is None else bias
    return np.concatenate([weight, column[..., None]], axis=-1)


OmissionKind = Literal[
    "unknown", "rotary", "biases", "positions", "norms", "cap", "sinks", "window", "mixing", "scale"
]


class Omission(NamedTuple):
    """A term of the score that is not part of a form.

    Attributes
    ----------
    kind
        The kind of term.
    term
        A short name of the term, for lists.
    explanation
        A sentence about the term.
    """

    kind: OmissionKind
    term: str
    explanation: str


def omissions(plan: AttentionPlan, coordinates: Coordinates = PLAIN) -> Iterator[Omission]:
    """Yield the terms that the forms of one block leave out, in the order of the computation.

    Output-value forms are not scores, and leave out no terms.

    Examples
    --------
    >>> import wqk
    >>> [omission.term for omission in wqk.open(wqk.demo_model("decoder"))[0].omissions()]
    ['biases', 'the scale, 0.1768']
    """
    if coordinates.circuit != "qk":
        return
    rotary = plan.rotary
    if rotary is not None and coordinates.distances == (0,):
        place = "of two tokens at position 0" if plan.turns_gains else "at distance 0"
        yield Omission(
            "rotary",
            "rotary positions, which change it at every distance but 0",
            f"rotary positions; the form is the score {place} ({rotary.order} order, "
            f"{2 * len(rotary.frequencies)} of {plan.query.head_width} dimensions turn)",
        )
    if plan.longest and coordinates.distances != (0,):
        term = f"what positions do otherwise in texts of more than {plan.longest} tokens"
        yield Omission("rotary", term, f"{term} is not part of the form")
    if rotary is not None and rotary.amplitude != 1:
        yield Omission(
            "rotary",
            "the attention factor of the rotary positions, the same at every distance",
            "the rotary positions' attention factor, the same at every distance, is not part of "
            "the form",
        )
    if not coordinates.bias and (plan.query.bias or plan.key.bias):
        yield Omission("biases", "biases", f"biases are not part of the form{_of_biases(plan)}")
    if plan.position.startswith("rotary"):
        yield Omission(
            "positions",
            f"positions ({plan.position})",
            f"positions are {plan.position}; the form is the score of equal positions",
        )
    elif plan.position:
        yield Omission(
            "positions",
            f"{plan.position} positions",
            f"{plan.position} positions are added to scores and not part of the form",
        )
    elif plan.positional is not None:
        yield Omission(
            "positions",
            "positions in dimensions of their own",
            "positions have dimensions of their own, whose product is added to that of the form",
        )
    if not coordinates.fold_norm and (plan.query.input_norm or plan.key.input_norm):
        yield Omission(
            "norms",
            "the gains of the norms that feed it",
            "the gains of the norms that feed it are not part of the form",
        )
    if plan.softcap:
        yield Omission(
            "cap",
            f"the soft cap of scores at ±{plan.softcap:g}",
            f"scores are softly capped at ±{plan.softcap:g}; the form is before that",
        )
    if plan.sinks:
        yield Omission(
            "sinks",
            "sinks",
            "a sink, a score of its own in every head, takes part of the attention",
        )
    if plan.window is not None:
        size = f"a window of {plan.window} tokens"
        if isinstance(plan.window, LocalWindow):
            size = "a local window"
        elif isinstance(plan.window, ChunkWindow):
            size = f"a {plan.window} tokens"
        yield Omission("window", size, f"some layers attend within {size}")
    for term in plan.rule.between:
        yield Omission("mixing", term, f"{term} is not part of the form")
    if plan.rule.guess:
        yield Omission(
            "unknown",
            "scale, positions and masks, which are not known",
            "scale, positions and masks are unknown",
        )
    elif plan.has_softmax:
        yield Omission(
            "scale",
            f"the scale, {plan.score_scale:.4g}",
            f"the model multiplies scores by {plan.score_scale:.4g}; the form is without it",
        )


def _of_biases(plan: AttentionPlan) -> str:
    """Describe the contribution of the biases; empty if it is unknown."""
    if plan.rule.guess:
        return ""
    if not plan.has_softmax:
        return "; each adds a term in the other side alone"
    if plan.rotary or plan.axial:
        key_term = "the key's, turned by the positions, one in the query"
    elif plan.key_bias_counts:
        key_term = "the key's one in the query"
    else:
        key_term = "the key's is the same for all keys and cancels in the softmax"
    return f"; the query's adds a term in the key alone, {key_term}"
