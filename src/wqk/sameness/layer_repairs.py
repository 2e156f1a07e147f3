"""Repairs of stacks with lost, repeated or added layers: layers are moved, added or removed.

If the candidate has a layer of the reference under another number, the layer gets its number back.
A missing layer is taken from the reference. All tensors of a layer move, including tensors that
were not compared. Therefore a repair is known only if all tensors of a layer equal the tensors of
its source.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from wqk._console import spans
from wqk.checkpoints import Checkpoint, Part
from wqk.families import AttentionPlan, Place
from wqk.model import Model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.comparisons import BlockComparison, Cause
from wqk.sameness.layers import moved_cause, source_of
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.repairs import Renumber, Setting, Step
from wqk.sameness.stored_tensors import compare_stored
from wqk.sameness.tensor_names import layer_prefix


class _Stack(NamedTuple):
    """A stack of both models with layers that only one of the models has.

    Attributes
    ----------
    plan
        The plan of a block that both models have.
    pairs, blocks
        The pairs of blocks of the stack, and their comparisons.
    missing, added
        Numbers of the layers that only the reference has, and that only the candidate has.
    """

    plan: AttentionPlan
    pairs: list[PlanPair]
    blocks: list[BlockComparison]
    missing: list[int]
    added: list[int]

    @property
    def holders(self) -> dict[int, int]:
        """The candidate's layer that has the weights of each of the reference's layers."""
        holders: dict[int, int] = {}
        for block in self.blocks:
            source = source_of(block)
            if source is not None:
                holders.setdefault(source, block.layer)
        return holders

    @property
    def layers(self) -> list[int]:
        """Numbers of the reference's layers."""
        return sorted([*(block.layer for block in self.blocks), *self.missing])


def with_layer_repairs(
    models: Sequence[Model],
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    missing: Sequence[Place],
    added: Sequence[Place],
) -> tuple[list[BlockComparison], list[Cause]]:
    """Add the repair of each stack with missing or added layers.

    Parameters
    ----------
    models
        The reference and the candidate.
    pairs, blocks
        The pairs of blocks, and their comparisons, with the causes of layers that moved.
    missing, added
        The blocks that only the reference has, and that only the candidate has.

    Returns
    -------
    tuple
        The blocks, and the causes of stacks that lack the last layers, or have further layers at
        the end.
    """
    explained = [*blocks]
    causes: list[Cause] = []
    for stack in _stacks(pairs, blocks, missing, added):
        steps = _steps(models, stack)
        if not steps:
            continue
        members = {block.place for block in stack.blocks if moved_cause(block) is not None}
        if not members:
            causes.append(_cause_of_ends(stack, steps))
        for number, block in enumerate(explained):
            if block.place in members:
                explained[number] = _with_steps(block, steps)
    return explained, causes


def _stacks(
    pairs: Sequence[PlanPair],
    blocks: Sequence[BlockComparison],
    missing: Sequence[Place],
    added: Sequence[Place],
) -> Iterator[_Stack]:
    """Yield stacks with some layers in both models, and some in only one model."""
    for stack, kind in dict.fromkeys((place.stack, place.kind) for place in (*missing, *added)):
        members = [
            (pair, block)
            for pair, block in zip(pairs, blocks, strict=True)
            if (block.stack, block.kind) == (stack, kind)
        ]
        if members:
            yield _Stack(
                plan=members[0][0][0],
                pairs=[pair for pair, _ in members],
                blocks=[block for _, block in members],
                missing=[place.layer for place in missing if place[:2] == (stack, kind)],
                added=[place.layer for place in added if place[:2] == (stack, kind)],
            )


def _cause_of_ends(stack: _Stack, steps: tuple[Step, ...]) -> Cause:
    """Return the cause of a stack that ends earlier or later than the reference's."""
    layers = stack.missing or stack.added
    noun = "layer" if len(layers) == 1 else "layers"
    verb = "is" if len(layers) == 1 else "are"
    predicate = "missing" if stack.missing else "added"
    reason = f"{noun} {spans(layers)} {verb} {predicate}"
    places = tuple(Place(stack.plan.stack, stack.plan.kind, layer) for layer in layers)
    names = [name for step in steps for name in step.edited]
    facts = {"tensors": dict.fromkeys(names, "tensor")}
    return Cause(Mismatch(Kind.LAYERS, reason, steps, facts=facts), places)


def _with_steps(block: BlockComparison, steps: tuple[Step, ...]) -> BlockComparison:
    """Return a block; if its cause is a moved layer, the cause gets the steps of the stack."""
    moved = moved_cause(block)
    mismatches = []
    for cause in block.mismatches:
        if cause is moved:
            cause = replace(cause, steps=steps)
        mismatches.append(cause)
    return replace(block, mismatches=tuple(mismatches))


def _steps(models: Sequence[Model], stack: _Stack) -> tuple[Step, ...]:
    """Return the steps that restore the layers of a stack; none if any step is unknown."""
    has_other_causes = any(_has_other_causes(block) for block in stack.blocks)
    renumber = None if has_other_causes else _renumbered(models, stack)
    if renumber is None:
        return ()
    settings = _settings(models, stack)
    return (*settings, renumber) if settings else ()


def _has_other_causes(block: BlockComparison) -> bool:
    """Return whether causes besides settings and moved layers explain a block."""
    kinds = {cause.verdict for cause in block.mismatches if cause is not moved_cause(block)}
    return not kinds <= {Kind.SETTING}


def _renumbered(models: Sequence[Model], stack: _Stack) -> Renumber | None:
    """Return the step that moves, takes and removes layers; None if a tensor has another source."""
    prefix = layer_prefix(stack.plan.query.tensor)
    start = prefix.removesuffix(f"{stack.plan.layer}.")
    if start == prefix:
        return None
    checkpoints = [model.checkpoint for model in models]
    endings_by_layer = {
        layer: _endings(checkpoints[0], f"{start}{layer}.") for layer in stack.layers
    }
    endings = endings_by_layer[stack.layers[0]]
    if any(endings_of_layer != endings for endings_of_layer in endings_by_layer.values()):
        return None

    def holds(holder: int, source: int) -> bool:
        """Return whether a layer of the candidate has the tensors of a layer of the reference."""
        return _are_equal(checkpoints, f"{start}{source}.", f"{start}{holder}.", endings)

    holders = stack.holders
    if not all(holds(holder, source) for source, holder in holders.items()):
        return None
    # Layers of only the candidate may be reference layers, moved by a new layer.
    for source in stack.layers:
        for holder in stack.added:
            if source not in holders and holds(holder, source):
                holders[source] = holder
    moves = [
        (layer, holders[layer]) for layer in stack.layers if holders.get(layer, layer) != layer
    ]
    # A layer is read before another layer replaces it.
    if any(layer > holder for layer, holder in moves):
        moves.reverse()
    return Renumber(
        start=start,
        endings=tuple(endings),
        moves=tuple(moves),
        taken=tuple(layer for layer in stack.layers if layer not in holders),
        removed=tuple(stack.added),
    )


def _endings(checkpoint: Checkpoint, prefix: str) -> list[str]:
    """Return the sorted names of a layer's tensors without the prefix of the layer."""
    names = [name for name in checkpoint.tensors() if name.startswith(prefix)]
    return sorted(name.removeprefix(prefix) for name in names)


def _are_equal(
    checkpoints: Sequence[Checkpoint], source: str, holder: str, endings: Sequence[str]
) -> bool:
    """Return whether a layer of the candidate has the tensors of a layer of the reference."""
    if _endings(checkpoints[1], holder) != endings:
        return False
    for ending in endings:
        parts = Part(source + ending), Part(holder + ending)
        shapes = {
            checkpoint.info(part.name).shape
            for checkpoint, part in zip(checkpoints, parts, strict=True)
        }
        if len(shapes) > 1 or not compare_stored(checkpoints, parts).outcome.same:
            return False
    return True


def _settings(models: Sequence[Model], stack: _Stack) -> list[Setting]:
    """Return the settings of the number of layers, and lists with an entry for each layer."""
    section = stack.plan.rule.config
    reference, candidate = (_section(model.checkpoint.config, section) for model in models)
    depths = len(stack.layers), len(stack.layers) - len(stack.missing) + len(stack.added)
    path = (section,) if section else ()
    counts = [
        Setting((*path, str(key)), reference[key])
        for key in stack.plan.rule.layers
        if reference.get(key) == depths[0] and candidate.get(key) == depths[1]
    ]
    lists = []
    for key, value in candidate.items():
        expected = reference.get(key)
        if not (isinstance(value, list) and isinstance(expected, list)):
            continue
        if (len(expected), len(value)) == depths and expected != value:
            lists.append(Setting((*path, key), expected))
    return [*counts, *lists] if counts else []


def _section(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a part of a configuration by name; the whole configuration for an empty name."""
    section = config.get(name, {}) if name else config
    return section if isinstance(section, Mapping) else {}
