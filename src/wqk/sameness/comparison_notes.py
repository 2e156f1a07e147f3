"""Notes on a comparison, and settings that differ, besides settings of blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from wqk._console import last_part
from wqk.attention.rounding import NARROWER, grid
from wqk.checkpoints import Checkpoint
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness import further_settings
from wqk.sameness.alignment import Alignment
from wqk.sameness.circuits import PlanPair
from wqk.sameness.mismatches import Mismatch
from wqk.sameness.missing_tensors import missing_in_both
from wqk.sameness.outside import absent_towers
from wqk.sameness.positions import is_guessed, positions_unknown

# Names of number types in notes.
TITLES_OF_TYPES = {
    "F8_E5M2": "float8 (e5m2)",
    "F8_E4M3": "float8 (e4m3)",
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
}


def notes_on(
    models: Sequence[Model], alignment: Alignment, notes_on_heads: Sequence[str]
) -> Iterator[str]:
    """Yield notes on parts that were not compared, and on numbers that were rounded.

    ``notes_on_heads`` are the notes of the comparison of blocks.
    """
    yield from _unknown_parts(alignment.pairs)
    yield from _values_not_compared(models, alignment.pairs)
    for model, plan in zip(models, alignment.anchor, strict=True):
        narrower = _narrower_type(model.checkpoint, plan)
        if narrower is not None:
            yield f"{model.checkpoint.name}: {narrower}"
    yield from missing_in_both(models, alignment.pairs)
    yield from notes_on_heads
    yield from absent_towers(models)


def _unknown_parts(pairs: Sequence[PlanPair]) -> Iterator[str]:
    """Yield a note on the parts of attention that a guess or a family does not define."""
    if is_guessed(pairs):
        yield (
            "not compared, because a family was guessed from tensor names and does not know them: "
            "mask, window, rotary positions and the order of their pairs, the score's scale, and "
            "norms that one side leaves open"
        )
    elif any(map(positions_unknown, pairs)):
        yield "not compared, because a family only names them: rotary positions"


def _values_not_compared(models: Sequence[Model], pairs: Sequence[PlanPair]) -> Iterator[str]:
    """Yield a note on each model with values, but without the outputs of the same blocks."""
    if is_guessed(pairs):
        return
    for number, model in enumerate(models):
        plans = [pair[number] for pair in pairs]
        if any(plan.value is not None and plan.output is None for plan in plans):
            name = last_part(model.checkpoint.name)
            yield f"values are not compared: {name} has no output weights, for the form W_v W_o"
            return


def _narrower_type(checkpoint: Checkpoint, plan: AttentionPlan) -> str | None:
    """Return a note on the type that the query weight was rounded to, if narrower than stored."""
    part = plan.query.projection.roles[""]
    stored = checkpoint.info(part.name).dtype
    if stored not in NARROWER:
        return None
    (values,) = checkpoint.read([part])
    rounded = grid(stored, values)
    if rounded == stored:
        return None
    return f"values are rounded to {TITLES_OF_TYPES[rounded]}, though stored as {stored}"


class DifferingSettings(NamedTuple):
    """Settings that differ, besides settings of blocks.

    Attributes
    ----------
    compared
        Settings that count as differences, as causes.
    not_compared
        Keys of the remaining settings.
    """

    compared: tuple[Mismatch, ...]
    not_compared: tuple[str, ...]


def settings_that_differ(models: Sequence[Model], everything: bool) -> DifferingSettings:
    """Return the settings that differ, besides settings of blocks.

    Without ``everything``, only settings of attention are compared. A setting that only one of two
    configurations contains is not compared.
    """
    causes = {
        cause.facts["name"]: cause
        for cause in further_settings.further_settings(models, everything)
    }
    compared: list[Mismatch] = []
    not_compared: list[str] = []
    for name, cause in causes.items():
        if everything or further_settings.of_attention(name, models):
            compared.append(cause)
        else:
            not_compared.append(name)
    not_compared += further_settings.lost_settings(models)
    return DifferingSettings(tuple(compared), tuple(not_compared))


def formats_of_one_model(pairs: Sequence[PlanPair]) -> tuple[str, ...]:
    """Return the formats with few bits in the forms of only one model."""
    reference_formats: set[str] = set()
    candidate_formats: set[str] = set()
    for reference, candidate in pairs:
        reference_formats.update(reference.quantized)
        candidate_formats.update(candidate.quantized)
    return tuple(sorted(reference_formats ^ candidate_formats))
