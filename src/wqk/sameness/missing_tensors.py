"""Tensors of attention that all models of a type have, but a file lacks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import Overlay
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.edits import Take
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Change
from wqk.sameness.tensor_names import title_in_block


class CompletedBlock(NamedTuple):
    """A block of the candidate with missing tensors added from the reference."""

    cause: Mismatch
    model: Model
    plan: AttentionPlan


def cause_of_missing(pair: PlanPair, models: Sequence[Model]) -> Mismatch | None:
    """Return the cause of a block that lacks tensors of the reference; None if complete."""
    sources = _sources(pair, models)
    if not sources:
        return None
    titles = ", ".join(dict.fromkeys(map(title_in_block, sources)))
    facts = {"tensors": dict.fromkeys(sources, "norm")}
    steps = (Change(tuple(sources), Take()),)
    return Mismatch(Kind.MISSING, f"{titles}: {Kind.MISSING}", steps, facts=facts)


def completed_block(models: Sequence[Model], pair: PlanPair) -> CompletedBlock | None:
    """Return the candidate's block with its missing tensors added; None if complete."""
    reference, candidate = models
    cause = cause_of_missing(pair, models)
    if cause is None:
        return None
    arrays = {
        name: reference.checkpoint.read([Part(source)])[0]
        for name, source in _sources(pair, models).items()
    }
    model = open_model(Overlay(candidate.checkpoint, arrays), family=candidate.family_file)
    plan = next(plan for plan in model.plans if plan.place == pair[1].place)
    return CompletedBlock(cause, model, plan)


def _sources(pair: PlanPair, models: Sequence[Model]) -> dict[str, str]:
    """Return the reference's names of the tensors that the candidate's block and file lack."""
    reference, candidate = models
    reference_prefix, candidate_prefix = _prefixes(pair[0].query.tensor, pair[1].query.tensor)
    sources = {}
    for name in pair[1].missing:
        source = reference_prefix + name.removeprefix(candidate_prefix)
        if source in reference.checkpoint.tensors():
            sources[name] = source
    for source in _lost_from_norms(pair):
        name = candidate_prefix + source.removeprefix(reference_prefix)
        if name not in candidate.checkpoint.tensors():  # else a setting has another norm there
            sources[name] = source
    return sources


def _lost_from_norms(pair: PlanPair) -> Iterator[str]:
    """Yield the reference's names of missing tensors of the norms before the projections.

    Both blocks must be of one family; a model's files have these tensors for all norms or for none.
    """
    if pair[0].family != pair[1].family:
        return
    for name in ("query", "key", "value"):
        reference, candidate = (getattr(plan, name) for plan in pair)
        if reference is None or candidate is None or reference.input_norm is None:
            continue
        norm = candidate.input_norm
        if norm is None:
            yield from (part.name for part in reference.input_norm.gain)
        if norm is None or not norm.bias:
            yield from (part.name for part in reference.input_norm.bias)


def _prefixes(reference_name: str, candidate_name: str) -> tuple[str, str]:
    """Return two names without their common ending.

    Examples
    --------
    >>> _prefixes("model.layers.0.q_proj", "layers.0.q_proj")
    ('model.', '')
    """
    shared = 0
    for first, second in zip(reversed(reference_name), reversed(candidate_name), strict=False):
        if first != second:
            break
        shared += 1
    lengths = len(reference_name) - shared, len(candidate_name) - shared
    return reference_name[: lengths[0]], candidate_name[: lengths[1]]


def missing_in_both(models: Sequence[Model], pairs: Sequence[PlanPair]) -> Iterator[str]:
    """Yield a note on tensors of this model type that both files lack."""
    titles: dict[str, None] = {}
    for pair in pairs:
        if pair[0].missing and pair[1].missing:
            titles |= dict.fromkeys(map(title_in_block, pair[0].missing))
    if titles:
        name = models[0].checkpoint.config.get("model_type", "this type")
        yield (
            f"not compared: {', '.join(titles)}, which models of {name} have, and which are "
            "missing from both files"
        )
