"""Tensors of attention that models of a type always have, and that a file lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import Overlay
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.edits import Take
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change
from wqk.sameness.weight_pairs import short
from wqk.sameness.weights import Pair


class Restored(NamedTuple):
    """A candidate's block with the tensors that its file lacks, taken from the reference."""

    cause: Mismatch
    model: Model
    plan: AttentionPlan


def cause_of_missing(pair: Pair, reference: Model) -> Mismatch | None:
    """Return the cause of a block that lacks tensors which the reference has; None without such."""
    sources = _sources(pair, reference)
    if not sources:
        return None
    titles = ", ".join(dict.fromkeys(map(short, sources)))
    facts = {"tensors": dict.fromkeys(sources, "norm before the score")}
    steps = (Change(tuple(sources), Take()),)
    return Mismatch(Kind.MISSING, f"{titles}: {Kind.MISSING}", steps, facts=facts)


def restored(models: Sequence[Model], pair: Pair) -> Restored | None:
    """Return the candidate's block as it is with its missing tensors; None if it lacks none."""
    reference, candidate = models
    cause = cause_of_missing(pair, reference)
    if cause is None:
        return None
    arrays = {
        name: reference.checkpoint.read([Part(source)])[0]
        for name, source in _sources(pair, reference).items()
    }
    model = open_model(Overlay(candidate.checkpoint, arrays), family=candidate.family_file)
    plan = next(plan for plan in model.plans if plan.place == pair[1].place)
    return Restored(cause, model, plan)


def _sources(pair: Pair, reference: Model) -> dict[str, str]:
    """Return the reference's name of each tensor that the candidate's block lacks."""
    own, other = pair[0].query.tensor, pair[1].query.tensor
    # Both names end in the same words; what precedes these may differ.
    shared = 0
    while shared < min(len(own), len(other)) and own[-1 - shared] == other[-1 - shared]:
        shared += 1
    prefixes = own[: len(own) - shared], other[: len(other) - shared]
    sources = {}
    for name in pair[1].missing:
        source = prefixes[0] + name.removeprefix(prefixes[1])
        if source in reference.checkpoint.tensors():
            sources[name] = source
    return sources


def missing_in_both(models: Sequence[Model], pairs: Sequence[Pair]) -> Iterator[str]:
    """Yield a note on tensors that models of this type have, and that both files lack."""
    titles: dict[str, None] = {}
    for pair in pairs:
        if pair[0].missing and pair[1].missing:
            titles |= dict.fromkeys(map(short, pair[0].missing))
    if titles:
        name = models[0].checkpoint.config.get("model_type", "this type")
        yield (
            f"not compared: {', '.join(titles)}, which models of {name} have, and which are "
            "missing from both files"
        )
