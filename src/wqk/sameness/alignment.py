"""Pairs of blocks: a block of the reference and the corresponding block of the candidate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple, TypeAlias

from wqk.errors import CheckpointError, require_list
from wqk.families import AttentionPlan, Place
from wqk.model import Model
from wqk.sameness.circuits import PlanPair
from wqk.sameness.places_in_words import places_in_words

# A stack and a kind of attention, such as ("decoder", "self").
BlockGroup: TypeAlias = tuple[str, str]


class Pairing(NamedTuple):
    """Corresponding blocks of two models, and blocks of one model only.

    Attributes
    ----------
    pairs
        Plans of the reference and of the candidate.
    missing, added
        Blocks that only the reference has, and blocks that only the candidate has.
    """

    pairs: list[PlanPair]
    missing: tuple[Place, ...]
    added: tuple[Place, ...]


class Alignment(NamedTuple):
    """The blocks of two models that are compared.

    Attributes
    ----------
    pairs, missing, added
        As in a `Pairing`, for the requested layers.
    anchor
        The plans of the first pair of blocks; plans of other mixers if the models have no
        attention.
    """

    pairs: list[PlanPair]
    missing: tuple[Place, ...]
    added: tuple[Place, ...]
    anchor: PlanPair


def align(models: Sequence[Model], layers: Collection[int] | None) -> Alignment:
    """Pair the blocks of two models; with ``layers``, only the blocks of these layers.

    Raises
    ------
    CheckpointError
        The models have no block in common.
    """
    reference, candidate = models
    pairing = paired_blocks(reference.plans, candidate.plans)
    anchors = pairing.pairs or paired_blocks(reference.mixers, candidate.mixers).pairs
    if not anchors:
        missing = places_in_words(pairing.missing) or "no attention"
        added = places_in_words(pairing.added) or "no attention"
        raise CheckpointError(
            f"{reference.checkpoint.name} and {candidate.checkpoint.name} have no attention block "
            f"in common: one has {missing}; the other has {added}"
        )
    if layers is not None:
        pairing = _chosen(pairing, layers)
    return Alignment(*pairing, anchors[0])


def paired_blocks(
    reference_plans: Sequence[AttentionPlan], candidate_plans: Sequence[AttentionPlan]
) -> Pairing:
    """Pair blocks of the same stack, kind and layer.

    A guessed family may name stacks differently. Two stacks with different names correspond if both
    are the only remaining stack of a kind, depth and width.
    """
    candidate_by_place = {plan.place: plan for plan in candidate_plans}
    stacks = _renamed_stacks(reference_plans, candidate_plans)
    pairs: list[PlanPair] = []
    missing: list[Place] = []
    for plan in reference_plans:
        place = plan.place
        stack = stacks.get((place.stack, place.kind), place.stack)
        partner = candidate_by_place.pop(place._replace(stack=stack), None)
        if partner is None:
            missing.append(place)
        else:
            pairs.append((plan, partner))
    return Pairing(pairs, tuple(missing), tuple(candidate_by_place))


class _Shape(NamedTuple):
    """The blocks of one stack and kind, without the name of the stack.

    Attributes
    ----------
    kind
        The kind of attention.
    sizes
        Layer, and width of the queries of all heads, of each block.
    """

    kind: str
    sizes: tuple[tuple[int, int], ...]


def _shapes(plans: Sequence[AttentionPlan]) -> dict[BlockGroup, _Shape]:
    """Return the shape of each stack and kind."""
    sizes_by_group: dict[BlockGroup, list[tuple[int, int]]] = {}
    for plan in plans:
        width = plan.query.heads * plan.query.head_width
        sizes = sizes_by_group.setdefault((plan.stack, plan.kind), [])
        sizes.append((plan.layer, width))
    shapes = {}
    for group, sizes in sizes_by_group.items():
        _, kind = group
        shapes[group] = _Shape(kind, tuple(sorted(sizes)))
    return shapes


def _renamed_stacks(
    reference_plans: Sequence[AttentionPlan], candidate_plans: Sequence[AttentionPlan]
) -> dict[BlockGroup, str]:
    """Return the candidate's names of stacks, where different from the reference's names."""
    reference, candidate = _shapes(reference_plans), _shapes(candidate_plans)
    unpaired = {group: shape for group, shape in reference.items() if group not in candidate}
    unpaired_shapes = list(unpaired.values())
    stacks: dict[BlockGroup, str] = {}
    for group, shape in unpaired.items():
        fitting = [
            other
            for other, other_shape in candidate.items()
            if other not in reference and other_shape == shape
        ]
        if len(fitting) == 1 and unpaired_shapes.count(shape) == 1:
            stacks[group] = fitting[0][0]
    return stacks


def _chosen(pairing: Pairing, layers: Collection[int]) -> Pairing:
    """Return the blocks of some layers; negative numbers count from the last layer of a stack.

    Raises
    ------
    CheckpointError
        No block has one of the numbers.
    """
    require_list("layers", layers, [0, -1])
    pairs, missing, added = pairing
    places = [*(reference.place for reference, _ in pairs), *missing, *added]
    last_layers: dict[BlockGroup, int] = {}
    for place in places:
        group = place.stack, place.kind
        last_layers[group] = max(place.layer, last_layers.get(group, place.layer))
    existing_numbers: set[int] = set()
    chosen: set[Place] = set()
    for place in places:
        from_end = place.layer - last_layers[place.stack, place.kind] - 1
        existing_numbers.update((place.layer, from_end))
        if place.layer in layers or from_end in layers:
            chosen.add(place)
    chosen_pairs = [pair for pair in pairs if pair[0].place in chosen]
    absent = set(layers) - existing_numbers
    if absent or not chosen_pairs:
        problem = f"no layer {min(absent)}" if absent else "no layer was chosen"
        last_layer = max(last_layers.values())
        raise CheckpointError(f"{problem}; layers are numbered from 0 to {last_layer}")
    return Pairing(
        chosen_pairs,
        tuple(place for place in missing if place in chosen),
        tuple(place for place in added if place in chosen),
    )
