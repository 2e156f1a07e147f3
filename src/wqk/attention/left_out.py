"""Terms of a model's score outside the scored form, in a few words."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.attention.coordinates import Coordinates
    from wqk.families import AttentionPlan


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
    if plan.sinks:
        yield "sinks"
