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

What a model's score holds besides, `omissions` lists, for all that speak of it. A score is softmax-
ready: ``cap(scale · (x A + a) R (y B + b)ᵀ + position)`` where the mask allows it. The form A Bᵀ
leaves out the rest.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm


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


PLAIN, FOLDED = Coordinates(), Coordinates(fold_norm=True)


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
        elif plan.rule.between:
            why = f"has no form at a distance: behind it stand {', '.join(plan.rule.between)}"
        elif plan.rule.guess:
            why = "was guessed from the names of tensors; its positions are not known"
        raise CheckpointError(
            f"layer {plan.layer} of the {plan.stack} {why}; leave out the distance"
        )
    positions = np.full(form.widths[0], distance)
    turned = plan.rotary.turning.rotate(form.query, positions).astype(form.query.dtype)
    return BilinearForm.from_factors(turned, form.key)


def lacks_norm(plan: AttentionPlan, coordinates: Coordinates) -> bool:
    """Whether norms should be folded into a block but no norm is known to feed it.

    Either the residual stream is projected without a norm, or something lies between the norm and
    the projections. Then nothing is folded.
    """
    fed = [plan.value or plan.key] if coordinates.circuit == "ov" else [plan.query, plan.key]
    return coordinates.fold_norm and any(side.input_norm is None for side in fed)


def with_norm(
    weight: Float[Array, "heads width d"],
    bias: Float[Array, "heads width"] | None,
    gain: Float[Array, " d"],
    shift: Float[Array, " d"] | None,
    kind: str,
) -> tuple[Array, Array | None]:
    """A weight and a bias with the norm that feeds them folded in: its gain, shift and centering.

    They then act on normalized vectors. ``kind`` is that of the norm, ``rms`` or ``layer``.
    """
    folded = weight * gain
    if kind == "layer":
        folded = folded - folded.mean(axis=-1, keepdims=True)
    if shift is not None:
        moved = weight @ shift
        bias = moved if bias is None else bias + moved
    return folded, bias


def augmented(weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(heads, R, D + 1): with the bias, or 0, as the weight of a constant 1."""
    column = np.zeros(weight.shape[:2], weight.dtype) if bias is None else bias
    return np.concatenate([weight, column[..., None]], axis=-1)


Kind = Literal[
    "unknown", "rotary", "biases", "positions", "norms", "cap", "sinks", "window", "mixing", "scale"
]


class Omission(NamedTuple):
    """A term of the score that a form does not have."""

    kind: Kind
    term: str  # in a few words, for a list
    explanation: str  # in a sentence


def omissions(plan: AttentionPlan, coordinates: Coordinates = PLAIN) -> Iterator[Omission]:
    """The terms that the forms of one block leave out, in the order in which a score is made.

    Values and outputs make no score: their forms leave out nothing.

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
        yield Omission(
            "rotary",
            "rotary positions, which change it at every distance but 0",
            f"rotary positions; the form is the score at distance 0 ({rotary.order} order, "
            f"{2 * len(rotary.frequencies)} of {plan.query.head_width} dimensions turn)",
        )
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
        size = f"a window of {plan.window} tokens" if plan.window != "local" else "a local window"
        size = f"a {plan.window} tokens" if plan.window.startswith("chunk") else size
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
            f"the scale, {plan.scale:.4g}",
            f"the model multiplies scores by {plan.scale:.4g}; the form is without it",
        )


def _of_biases(plan: AttentionPlan) -> str:
    """What the biases would add, where that is known."""
    if plan.rule.guess:
        return ""
    if not plan.has_softmax:
        return "; each adds a term in the other side alone"
    key = (
        "the key's, turned by the positions, one in the query"
        if plan.rotary
        else "the key's is the same for all keys and cancels in the softmax"
    )
    return f"; the query's adds a term in the key alone, {key}"
