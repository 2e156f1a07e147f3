"""What a model's score holds besides the form: one list, for all that speak of it.

A score is softmax-ready: ``cap(scale · (x A + a) R (y B + b)ᵀ + position)`` where the mask allows
it. The form A Bᵀ leaves out the rest, and says so here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from wqk.attention.coordinates import PLAIN, Coordinates
from wqk.families import AttentionPlan

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
    key = (
        "the key's, turned by the positions, one in the query"
        if plan.rotary
        else "the key's is the same for all keys and cancels in the softmax"
    )
    return f"; the query's adds a term in the key alone, {key}"
