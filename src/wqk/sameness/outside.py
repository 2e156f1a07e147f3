"""What two models hold outside the forms of their attention, compared as it is stored.

Tensors of forms are compared as forms. The rest of an attention module (learned position terms,
temperatures, gates), and the mixers of layers without attention (linear attention, convolutions,
state spaces), are compared as they are stored, and so is everything else that is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.files import PLAIN
from wqk.families import AttentionPlan, Composed, Projection
from wqk.families.naming import without_numbers
from wqk.model import Model
from wqk.sameness.contents import (
    ATTENTION,
    MIXER,
    OTHER,
    Outcome,
    StoredComparison,
    TensorComparison,
    compare_stored,
    compare_tensors,
    find_by_content,
    stray_entries,
)
from wqk.sameness.tolerances import MOST
from wqk.sameness.weights import VALUES, Pair, form_parts

if TYPE_CHECKING:
    import numpy as np

    from wqk.sameness.comparisons import BlockComparison

# Modules that mix tokens without a softmax.
MIXERS = re.compile(
    r"mamba|ssm|linear_?att|conv|mixer|rg_?lru|recurrent|temporal_block|time_?mix|delta_?net|"
    r"retention|lightning|rwkv|hyena|fourier|hgrn|xlstm|mlstm|slstm"
)
# Names of tensors of attention: of its modules, of positions in its scores, of virtual keys.
ATTENDING = re.compile(
    r"(?<!post_)att(?:n|ention)(?!_?pool)|(?:^|[._])(?:sinks?|temperature|logit_scale|rel|relative|rpe|pos|"
    r"position|positions|alibi|slopes?|positional)(?:[._]|$)"
)
# What a library keeps beside weights, and makes anew: tables, counters; and masks of four axes.
BUFFERS = re.compile(
    r"(?:^|\.)(?:inv_freq|original_inv_freq|rope_freqs(?:\.weight)?|position_ids|masked_bias|"
    r"num_batches_tracked|n_averaged|token_type_ids|relative_position_index|_extra_state)$"
)
MASKS = re.compile(r"(?:^|\.)attn\.bias$")
# Scales of quantized weights, after the weight's name.
QUANTIZED = re.compile(r"_scale(?:_inv)?$")
FEED_FORWARD = re.compile(r"(?:^|[._])(?:mlp|ffn|ff|feed_forward|experts?|moe)(?:[._]|$)")


def left_in(model: Model) -> Iterator[Part]:
    """The rows of tensors of forms that no form holds, such as gates beside queries."""
    tensors, rows = model.checkpoint.tensors(), dict[str, list[tuple[int, int]]]()
    columns: dict[str, list[tuple[int, int]]] = {}
    for plan in model.plans:
        for part in form_parts(plan):
            rows.setdefault(part.name, []).extend(part.row_ranges(tensors[part.name].shape))
        for side in (plan.query, plan.key, plan.value if plan.output else None):
            one = side and side.projection
            for half in (one.outer, one.inner) if isinstance(one, Composed) else (one,):
                if isinstance(half, Projection) and half.transposed and half.outputs:
                    columns.setdefault(half.tensor, []).extend(half.outputs)
    for name, ranges in rows.items():
        shape = tensors[name].shape
        if name in columns and shape:  # read whole, used by columns
            if _gaps(columns[name], shape[-1]):
                yield Part(name)
        elif shape and (gaps := _gaps(ranges, shape[0])):
            yield Part(name, gaps)


def _gaps(ranges: list[tuple[int, int]], length: int) -> tuple[tuple[int, int], ...]:
    """What half-open ranges leave of a length.

    Examples
    --------
    >>> _gaps([(0, 2), (4, 6)], 8)
    ((2, 4), (6, 8))
    """
    found, end = [], 0
    for start, stop in sorted(ranges):
        if start > end:
            found.append((end, start))
        end = max(end, stop)
    return (*found, *(((end, length),) if end < length else ()))


def roles(model: Model) -> dict[str, str]:
    """Of every tensor outside the forms: ``attention``, ``mixer`` or ``other``."""
    tensors = model.checkpoint.tensors()
    formed = {part.name for plan in model.plans for part in form_parts(plan)}
    mixing = {part.name for plan in model.mixers for part in form_parts(plan)}
    modules = {_module(plan) for plan in model.plans} - {""}
    modules |= {name.rpartition(".")[0] + "." for name in _unread(model, tensors)}
    layers = {layer_of(name) for name in modules} - {""}
    kinds = {without_numbers(layer) for layer in layers}
    fed = {_child(name, layer_of(name)) for name in formed}
    usual = {_child(name, layer_of(name)) for name in tensors if layer_of(name) in layers}
    found = {}
    for name in tensors:
        scaled = QUANTIZED.sub("", name)
        is_mask = MASKS.search(name) and len(tensors[name].shape) == 4
        made = BUFFERS.search(name) or is_mask
        if name in formed or made or (scaled != name and scaled in tensors):
            continue  # part of a form, made anew, or a scale that reading applies
        layer = layer_of(name)
        own = name.startswith(tuple(modules))
        apart = layer not in layers and without_numbers(layer) in kinds
        feeds = FEED_FORWARD.search(name) is not None
        mixes = MIXERS.search(name.lower()) and not own and not feeds
        strange = _child(name, layer) not in usual or _child(name, layer) in fed
        if mixes or name in mixing or (apart and strange):
            found[name] = MIXER
        elif own or (ATTENDING.search(name.lower()) and not feeds):
            found[name] = MIXER if apart else ATTENTION
        else:
            found[name] = OTHER
    return found


def _unread(model: Model, tensors: Mapping[str, TensorInfo]) -> list[str]:
    """Tensors that look like queries, but that no block reads."""
    spellings = set(model.unread)
    return [n for n in tensors if without_numbers(n.removesuffix(".weight")) in spellings]


def layer_of(name: str) -> str:
    """A name up to its first number."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else ""


def _child(name: str, layer: str) -> str:
    return name.removeprefix(layer).partition(".")[0]


def _module(plan: AttentionPlan) -> str:
    """What the names of a block's tensors have in common below their layer; or nothing."""
    sides = [side for side in (plan.query, plan.key, plan.value, plan.output) if side is not None]
    paths = [side.tensor.split(".")[:-2] for side in sides]
    together = takewhile(lambda some: len(set(some)) == 1, zip(*paths, strict=False))
    path = ".".join(some[0] for some in together)
    last = path.rpartition(".")[2]
    return "" if last.isdigit() or last in ("", "model") else f"{path}."


def outside(
    models: Sequence[Model],
    pairs: Sequence[Pair],
    blocks: Sequence[BlockComparison],
    names: Mapping[str, str],
    everything: bool,
    layers: Collection[int] | None,
    tolerance: float,
) -> tuple[tuple[TensorComparison, ...], tuple[str, ...], tuple[str, ...]]:
    """Tensors outside the forms, or with single entries that differ; what was not compared."""
    checkpoints = [model.checkpoint for model in models]
    infos = [checkpoint.tensors() for checkpoint in checkpoints]
    by_role = [roles(model) for model in models]
    wanted = {ATTENTION, MIXER, OTHER} if everything else {ATTENTION, MIXER}
    chosen = [
        {name: role for name, role in some.items() if layers is None and role in wanted}
        for some in by_role
    ]
    is_guess = any(plan.rule.guess for pair in pairs for plan in pair)
    if everything and layers is None and is_guess:
        for names_of_side, model in zip(chosen, models, strict=True):
            names_of_side.update(dict.fromkeys(_beside_scores(model), ATTENTION))
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
    if is_guess:
        found = _found_in_fused(models, found)
    for number, one in enumerate(found):
        if one.outcome is Outcome.DIFFERS and tolerance and one.distance <= tolerance:
            found[number] = replace(one, outcome=Outcome.ROUNDED)
    left_out: list[str] = []
    for some, every in zip(chosen, by_role, strict=True):
        left_out += [names.get(name, name) for name in every if name not in some]
    unknown = [VALUES] * any(VALUES not in block.beside for block in blocks)
    unknown += [one.name or one.other for one in found if one.outcome is Outcome.UNKNOWN]
    found += () if tolerance else _entries(checkpoints, pairs, blocks, names)
    rest, other_rows = _rest(models, names)
    return (*found, *rest), (*unknown, *other_rows), tuple(dict.fromkeys(left_out))


def _beside_scores(model: Model) -> set[str]:
    """Tensors of forms that a guess does not name: values, outputs, norms."""
    scored = {side.tensor for plan in model.plans for side in (plan.query, plan.key)}
    formed = {part.name for plan in model.plans for part in form_parts(plan)}
    return formed - scored


def _found_in_fused(
    models: Sequence[Model], compared: Sequence[TensorComparison]
) -> list[TensorComparison]:
    """Return the comparisons; what lies in a fused weight is found, in whatever order.

    A guess names the queries and keys of a fused weight, and not its values.
    """
    lost = {Outcome.MISSING, Outcome.ADDED}
    fused = [
        any(plan.query.tensor == plan.key.tensor and plan.rule.guess for plan in model.plans)
        for model in models
    ]
    if not any(fused) or lost.isdisjoint({one.outcome for one in compared}):
        return [*compared]
    checkpoints = [model.checkpoint for model in models]
    formed = [
        list(dict.fromkeys(part.name for plan in model.plans for part in form_parts(plan)))
        for model in models
    ]
    unpaired: tuple[list[str], list[str]] = ([], [])
    for one in compared:
        if one.outcome in lost:
            unpaired[0].extend([one.name] if one.name else [])
            unpaired[1].extend([one.other] if one.other else [])
    names = [list(dict.fromkeys((*own, *more))) for own, more in zip(formed, unpaired, strict=True)]
    places = find_by_content(checkpoints, *names)
    answered = []
    for one in compared:
        place = places[0].get(one.name) if one.name else places[1].get(one.other)
        if one.outcome in lost and place:
            one = replace(one, outcome=Outcome.FOUND, reason=place)
        answered.append(one)
    return answered


def _rest(
    models: Sequence[Model], names: Mapping[str, str]
) -> tuple[list[TensorComparison], list[str]]:
    """Rows beside those of forms, such as gates beside queries."""
    ours, theirs = ({part.name: part for part in left_in(model)} for model in models)
    found, unknown, (here, there) = [], [], [model.checkpoint for model in models]
    for name, part in ours.items():
        other = theirs.get(names.get(name, ""))
        alike = other is not None and other.rows == part.rows
        if other is None or not alike or there.info(other.name).shape != here.info(name).shape:
            unknown.append(f"rows of {name} outside the forms")
            continue
        one = compare_stored((here, there), (part, other))
        found.append(TensorComparison(name, other.name, *one[:2], ATTENTION, one.distance))
    return found, unknown


def _entries(
    checkpoints: Sequence[Checkpoint],
    pairs: Sequence[Pair],
    blocks: Sequence[BlockComparison],
    names: Mapping[str, str],
) -> Iterator[TensorComparison]:
    """Tensors of equal forms of which single entries differ, too few for the forms to show it."""
    seen: set[str] = set()
    for (plan, _), block in zip(pairs, blocks, strict=True):
        if block.identical or not block.same:
            continue
        changed: list[tuple[str, StoredComparison, np.ndarray]] = []
        for name in dict.fromkeys(part.name for part in form_parts(plan)):
            own, other = checkpoints[0].info(name), names.get(name)
            theirs = checkpoints[1].tensors().get(other or "")
            if name in seen or theirs is None or own.shape != theirs.shape:
                continue
            if {own.dtype, theirs.dtype} - {*PLAIN}:
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
    plans = [plan for model in models for plan in model.plans]
    there = {word for plan in plans for word in (plan.stack, plan.rule.config, plan.family)}
    configs = [model.checkpoint.config for model in models]
    return [
        f"not compared: the {word} tower that the configuration describes ({word}_config), of "
        "which neither has attention here"
        for word in ("vision", "audio", "text")
        if any(isinstance(config.get(f"{word}_config"), dict) for config in configs)
        and not any(word in str(name) for name in there)
        and not (word == "text" and there & {"decoder", "encoder"})
    ]
