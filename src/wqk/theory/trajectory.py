"""Columns against rows along a training run: in the weights, and in what changed between saves."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.theory.tails import Tails, tails

if TYPE_CHECKING:
    from pathlib import Path

    from wqk.forms import BilinearForm
    from wqk.runs.run import Run


class Moment(NamedTuple):
    """One layer at one saved step.

    Attributes
    ----------
    step, layer
        Which.
    weights
        Tails of W_qk.
    change
        Tails of what was added to it since the save before; None at the first.
    """

    step: int
    layer: int
    weights: Tails
    change: Tails | None


def follow(run: Run) -> list[Moment]:
    """Every self-attention layer at every saved step of a run, earliest first.

    Two states of the query and key weights are in memory at a time.

    Raises
    ------
    CheckpointError
        A checkpoint cannot be read.
    """
    moments = []
    before: dict[int, BilinearForm] = {}
    for step, folder in run.checkpoints:
        forms = _forms(folder)
        for layer, form in forms.items():
            change = tails(form.difference(before[layer])) if before else None
            moments.append(Moment(step, layer, tails(form), change))
        before = forms
    return moments


def _forms(folder: Path) -> dict[int, BilinearForm]:
    checkpoint = open_checkpoint(folder)
    return {
        plan.layer: load_attention(checkpoint, plan).form
        for plan in attention_plans(checkpoint)
        if plan.kind == "self"
    }
