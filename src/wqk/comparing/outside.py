"""What two models hold outside the forms of their attention, compared as it is stored."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from wqk.checkpoints import Checkpoint, Part
from wqk.comparing.contents import (
    FLOATS,
    Found,
    Outcome,
    TensorComparison,
    compare_stored,
    compare_tensors,
    stray_entries,
)
from wqk.comparing.scope import ATTENTION, OTHER, form_parts, left_in, roles
from wqk.comparing.tolerances import MOST
from wqk.comparing.weights import VALUES

if TYPE_CHECKING:
    import numpy as np

    from wqk.comparing.answer import BlockComparison
    from wqk.families import AttentionPlan
    from wqk.model import Model

    Pair = tuple[AttentionPlan, AttentionPlan]


def outside(
    models: Sequence[Model], pairs: Sequence[Pair], blocks: Sequence[BlockComparison],
    names: Mapping[str, str], everything: bool, layers: Collection[int] | None, tolerance: float,
) -> tuple[tuple[TensorComparison, ...], tuple[str, ...], tuple[str, ...]]:  # fmt: skip
    """Tensors outside the forms, or with single entries that differ; what was not compared."""
    checkpoints = [model.checkpoint for model in models]
    infos = [checkpoint.tensors() for checkpoint in checkpoints]
    by_role = [roles(model) for model in models]
    chosen = [
        {n: role for n, role in some.items() if layers is None and (everything or role != OTHER)}
        for some in by_role
    ]
    # What one family takes for an output's weight may be any tensor to the other, a guessed one: it
    # is compared as it is stored, not said to be missing.
    back = {other: name for name, other in names.items()}
    for own, theirs, called, stored in ((0, 1, names, infos[1]), (1, 0, back, infos[0])):
        for name, role in [*chosen[own].items()]:
            if (other := called.get(name)) in stored:
                chosen[theirs].setdefault(str(other), role)
    beside = pairs or [*zip(models[0].mixers, models[1].mixers, strict=False)]
    same_layout = all(names.get(one.query.tensor) == two.query.tensor for one, two in beside)
    strict = everything or same_layout
    found = compare_tensors(checkpoints, chosen, names, strict=strict)
    for number, one in enumerate(found):
        if one.outcome is Outcome.DIFFERS and tolerance and one.distance <= tolerance:
            found[number] = replace(one, outcome=Outcome.ROUNDED)
    left_out = [
        n for some, rest in zip(chosen, by_role, strict=True) for n in rest if n not in some
    ]
    left_out = [names.get(name, name) for name in left_out]
    unknown = [one.name or one.other for one in found if one.outcome is Outcome.UNKNOWN]
    if any(VALUES not in block.beside for block in blocks):
        unknown.insert(0, VALUES)
    found += () if tolerance else _entries(checkpoints, pairs, blocks, names)
    rest, other_rows = _rest(models, names)
    everything_else = tuple(dict.fromkeys(left_out))
    return (*found, *rest), (*unknown, *other_rows), everything_else


def _rest(
    models: Sequence[Model], names: Mapping[str, str]
) -> tuple[list[TensorComparison], list[str]]:
    """Rows beside those of forms, such as gates beside queries."""
    ours, theirs = ({part.name: part for part in left_in(model)} for model in models)
    found, unknown, (here, there) = [], [], [model.checkpoint for model in models]
    for name, part in ours.items():
        other = theirs.get(names.get(name, ""))
        shape = here.info(name).shape
        alike = other is not None and other.rows == part.rows
        if other is None or not alike or there.info(other.name).shape != shape:
            unknown.append(f"rows of {name} outside the forms")
            continue
        one = compare_stored((here, there), (part, other))
        found.append(TensorComparison(name, other.name, *one[:2], ATTENTION, one.distance))
    return found, unknown


def _entries(
    checkpoints: Sequence[Checkpoint], pairs: Sequence[Pair], blocks: Sequence[BlockComparison],
    names: Mapping[str, str],
) -> Iterator[TensorComparison]:  # fmt: skip
    """Tensors of equal forms of which single entries differ, too few for the forms to show it."""
    seen: set[str] = set()
    for (plan, _), block in zip(pairs, blocks, strict=True):
        if block.identical or not block.same:
            continue
        changed: list[tuple[str, Found, np.ndarray]] = []
        for name in dict.fromkeys(part.name for part in form_parts(plan)):
            other = names.get(name)
            infos = [
                c.tensors().get(n or "") for c, n in zip(checkpoints, (name, other), strict=True)
            ]
            if name in seen or infos[0] is None or infos[1] is None:
                continue
            if infos[0].shape != infos[1].shape or {i.dtype for i in infos if i} - set(FLOATS):
                continue
            seen.add(name)
            one = compare_stored(checkpoints, (Part(name), Part(str(other))))
            if one.outcome is Outcome.DIFFERS and one.changed is not None:
                changed.append((name, one, one.changed))
        moved = any(mask.shape[1] > 1 for _, _, mask in changed)
        for name, one, mask in changed:
            few = mask.mean() < MOST and not moved if mask.shape[1] == 1 else stray_entries(mask)
            if few:
                yield TensorComparison(name, names[name], *one[:2], ATTENTION, one.distance)


def absent_towers(models: Sequence[Model]) -> list[str]:
    """Towers that a configuration describes, and that neither file has a block of."""
    there = {word for model in models for plan in model.plans
             for word in (plan.stack, plan.rule.config, plan.family)}  # fmt: skip
    words = {
        key.removesuffix("_config"): key
        for model in models
        for key, value in model.checkpoint.config.items()
        if key in ("vision_config", "audio_config", "text_config") and isinstance(value, dict)
    }
    return [
        f"not compared: the {word} tower that the configuration describes ({key}), of which "
        "neither has attention here"
        for word, key in words.items()
        if not any(word in str(name) for name in there)
        and not (word == "text" and there & {"decoder", "encoder"})
    ]
