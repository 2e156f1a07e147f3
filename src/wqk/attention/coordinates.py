"""The other forms of a block: with its norms and biases, at a distance, or of values and outputs.

The plain form is W_q W_kᵀ. Each coordinate changes one thing about it. They can be combined, except
for distances with values and outputs, on which positions do not act:

- ``fold_norm``: the gain of the norm that feeds each side is folded in, with LayerNorm's centering;
  the form then acts on normalized residual vectors.
- ``bias``: the augmented form of [x, 1], with the biases as one more row and column. The key's
  enters only with rotary positions; otherwise it is the same for all keys and cancels in the
  softmax.
- ``distances``: A R(−N) Bᵀ for relative distances N = i − j, in rotary models.
- ``circuit``: ``ov`` for W_v W_o instead of W_q W_kᵀ.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.attention import load_attention
from wqk.attention.factor import load_factor
from wqk.errors import CheckpointError
from wqk.forms import BilinearForm

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan, Norm


@dataclass(frozen=True)
class Coordinates:
    """Which form of each block to score; by default the plain W_q W_kᵀ."""

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


PLAIN = Coordinates()


class Half(NamedTuple):
    """One factor of a circuit before it becomes a form."""

    weight: Float[Array, "heads width d"]
    bias: Float[Array, "heads width"] | None
    norm: Norm | None


class Block(NamedTuple):
    """A block's two factors as stored, and its forms at each distance, made one by one."""

    weights: tuple[np.ndarray, ...]  # none if the forms are not a model's own
    forms: Iterator[tuple[int, BilinearForm]]


def read_block(
    checkpoint: Checkpoint,
    plan: AttentionPlan,
    coordinates: Coordinates,
    every_bias: bool = False,
) -> Block:
    """Read the tensors that the coordinates need, and build the block's forms.

    With ``every_bias``, the key's enters also where the softmax does not see it, as in scores that
    are compared across queries. For each distance, ``forms`` gives the heads as a stack (G, H/G).
    Raises `CheckpointError` if the block has no values and outputs; or, from ``forms``, no rotary
    positions.
    """
    left, right = _circuit(checkpoint, plan, coordinates.circuit)
    weights = left.weight, right.weight
    if coordinates.fold_norm and not lacks_norm(plan, coordinates):
        left, right = folded(checkpoint, left), folded(checkpoint, right)
    if coordinates.bias:
        if (
            not every_bias
            and plan.rule.guess
            and coordinates.circuit == "qk"
            and right.bias is not None
        ):
            raise CheckpointError(
                f"layer {plan.layer} of the {plan.stack} was guessed from tensor names; "
                "the key's bias counts only with rotary positions, and whether it has these is not "
                "known; leave out the biases, or describe the model in a family file"
            )
        keeps_right_bias = coordinates.circuit == "qk" and (every_bias or plan.rotary is not None)
        left = left._replace(weight=augmented(left.weight, left.bias))
        right_bias = right.bias if keeps_right_bias else None
        right = right._replace(weight=augmented(right.weight, right_bias))
    plain = stacked(left.weight, right.weight)
    return Block(weights, ((n, at_distance(plain, plan, n)) for n in coordinates.distances))


def stacked(
    left: Float[Array, "left_heads width d_left"], right: Float[Array, "right_heads width d_right"]
) -> BilinearForm:
    """The forms of all heads as a stack (G, H/G)."""
    groups = min(len(left), len(right))
    query, key = (
        weight.reshape(groups, -1, *weight.shape[1:]).swapaxes(-1, -2) for weight in (left, right)
    )
    return BilinearForm.from_factors(query, key)


def at_distance(form: BilinearForm, plan: AttentionPlan, distance: int) -> BilinearForm:
    """A R(−N) Bᵀ: the form between a query and a key N tokens before it.

    As at N = 0, the attention factor of YaRN and LongRoPE is left out: it is the same at every
    distance. Raises `CheckpointError` if the block's positions are not rotary along one axis.
    """
    if distance == 0:
        return form
    if plan.rotary is None:
        why = "has no rotary positions; its form is the same at every distance"
        if plan.positional:
            why = "has positions in dimensions of their own, which its form does not hold"
        elif plan.position.startswith("rotary"):
            why = f"has positions that are {plan.position}, for which one number is no distance"
        elif plan.rule.guess:
            why = "was guessed from the names of tensors; its positions are not known"
        raise CheckpointError(
            f"layer {plan.layer} of the {plan.stack} {why}; leave out the distance"
        )
    positions = np.full(form.shape[0], distance)
    turned = plan.rotary.turning.rotate(form.query, positions).astype(form.query.dtype)
    return BilinearForm.from_factors(turned, form.key)


def _circuit(checkpoint: Checkpoint, plan: AttentionPlan, circuit: str) -> tuple[Half, Half]:
    """The two factors of W_q W_kᵀ or of W_v W_o."""
    if circuit == "qk":
        attention = load_attention(checkpoint, plan)
        return (
            Half(attention.query.weight, attention.query.bias, plan.query.input_norm),
            Half(attention.key.weight, attention.key.bias, plan.key.input_norm),
        )
    if plan.value is None or plan.output is None:
        raise CheckpointError(
            f"layer {plan.layer} of the {plan.stack}: family {plan.family} describes no values "
            "and outputs, or the checkpoint lacks them"
        )
    wanted = [*plan.value.parts, *plan.output.parts]
    stored = dict(zip(wanted, checkpoint.read(wanted), strict=True))
    value, output = (
        load_factor(stored, side, checkpoint.name) for side in (plan.value, plan.output)
    )
    return Half(value.weight, value.bias, plan.value.input_norm), Half(output.weight, None, None)


def lacks_norm(plan: AttentionPlan, coordinates: Coordinates) -> bool:
    """Whether norms should be folded into a block but no norm is known to feed it.

    Either the residual stream is projected without a norm, or something lies between the norm and
    the projections. Then nothing is folded.
    """
    fed = [plan.value or plan.key] if coordinates.circuit == "ov" else [plan.query, plan.key]
    return coordinates.fold_norm and any(side.input_norm is None for side in fed)


def folded(checkpoint: Checkpoint, side: Half) -> Half:
    """The factor acting on normalized vectors before gain and bias."""
    norm = side.norm
    if norm is None:  # no norm follows W_o on the way to the residual stream
        return side
    gain, *shift = checkpoint.read([*norm.gain, *norm.bias])
    return with_norm(side, gain + gain.dtype.type(norm.offset), shift[0] if shift else None)


def with_norm(side: Half, gain: np.ndarray, shift: np.ndarray | None) -> Half:
    """The factor with the gain and the bias of the norm that feeds it, (D,) each, folded in."""
    weight = side.weight * gain
    if side.norm is not None and side.norm.kind == "layer":
        weight = weight - weight.mean(axis=-1, keepdims=True)
    bias = side.bias
    if shift is not None:
        moved = side.weight @ shift
        bias = moved if bias is None else bias + moved
    return side._replace(weight=weight, bias=bias)


def augmented(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(heads, R, D + 1): with the bias, or 0, as the weight of a constant 1."""
    column = np.zeros(weight.shape[:2], weight.dtype) if bias is None else bias
    return np.concatenate([weight, column[..., None]], axis=-1)


def left_out(plan: AttentionPlan, coordinates: Coordinates) -> Iterator[str]:
    """The terms of the score that the form in these coordinates does not have."""
    if coordinates.circuit != "qk":
        return
    if plan.rotary is not None and coordinates.distances == (0,):
        yield "rotary positions, which turn it at every distance but 0"
    if plan.rotary is not None and plan.rotary.amplitude != 1:
        yield "the attention factor of the rotary positions, the same at every distance"
    if plan.position.startswith("rotary"):
        yield f"positions ({plan.position})"
    elif plan.position or plan.positional:
        yield f"{plan.position or 'its own'} positions"
    if not coordinates.bias and (plan.query.bias or plan.key.bias):
        yield "biases"
    if not coordinates.fold_norm and (plan.query.input_norm or plan.key.input_norm):
        yield "the gains of the norms that feed it"
    if plan.rule.guess:
        yield "scale, positions and masks, which are not known"
    if plan.softcap:
        yield "the soft cap of the scores"
    if plan.sinks:
        yield "sinks"
