"""Pair the blocks of the reference with those of the candidate."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from wqk.errors import CheckpointError, require_list
from wqk.families import AttentionPlan, Place
from wqk.model import Model
from wqk.sameness.weights import Pair


class Alignment(NamedTuple):
    """The blocks of two models, paired.

    Attributes
    ----------
    pairs
        Plans of the reference and of the candidate.
    missing, added
        Blocks that only the reference has, and only the candidate.
    anchor
        The plans of a first pair, of blocks or else of other mixers.
    """

    pairs: list[Pair]
    missing: tuple[Place, ...]
    added: tuple[Place, ...]
    anchor: Pair


def align(models: Sequence[Model], layers: Collection[int] | None) -> Alignment:
    """Pair the blocks of two models, of some layers alone if these are given.

    Raises
    ------
    CheckpointError
        The two have no block in common.
    """
    reference, candidate = models
    pairs, missing, added = paired(reference.plans, candidate.plans)
    anchors = pairs or paired(reference.mixers, candidate.mixers)[0]
    if not anchors:
        first, second = (", ".join(map(str, places[:3])) for places in (missing, added))
        raise CheckpointError(
            f"{reference.checkpoint.name} and {candidate.checkpoint.name} have no attention block "
            f"in common: one has {first}, …; the other {second}, …"
        )
    chosen = _chosen(pairs, missing, added, layers)
    return Alignment(*chosen, anchors[0])


def paired(
    of_reference: Sequence[AttentionPlan], of_candidate: Sequence[AttentionPlan]
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """Blocks of the same stack, kind and layer; and those of either that have no partner.

    Stacks whose name only one side has, as a guess calls them otherwise, belong together if they
    are the only ones of their kind, depth and width that are left.
    """
    by_place = {plan.place: plan for plan in of_candidate}
    renamed = _renamed(of_reference, of_candidate)
    pairs, missing = [], []
    for plan in of_reference:
        place = plan.place
        called = place._replace(stack=renamed.get(place[:2], place.stack))
        if called in by_place:
            pairs.append((plan, by_place.pop(called)))
        else:
            missing.append(place)
    return pairs, tuple(missing), tuple(by_place)


def _renamed(
    of_reference: Sequence[AttentionPlan], of_candidate: Sequence[AttentionPlan]
) -> dict[tuple[str, str], str]:
    """What a stack and kind of the first side is called by the second, where names differ."""

    def groups(plans: Sequence[AttentionPlan]) -> dict[tuple[str, str], tuple[Any, ...]]:
        found: dict[tuple[str, str], list[tuple[int, ...]]] = {}
        for plan in plans:
            size = plan.layer, plan.query.heads * plan.query.head_width
            found.setdefault((plan.stack, plan.kind), []).append(size)
        return {key: (key[1], *sorted(sizes)) for key, sizes in found.items()}

    first, second = groups(of_reference), groups(of_candidate)
    left = {key: size for key, size in first.items() if key not in second}
    right = {key: size for key, size in second.items() if key not in first}
    fitting = {key: [o for o, same in right.items() if same == size] for key, size in left.items()}
    alone = [key for key, size in left.items() if list(left.values()).count(size) == 1]
    return {key: fitting[key][0][0] for key in alone if len(fitting[key]) == 1}


def _chosen(
    pairs: list[Pair],
    missing: tuple[Place, ...],
    added: tuple[Place, ...],
    layers: Collection[int] | None,
) -> tuple[list[Pair], tuple[Place, ...], tuple[Place, ...]]:
    """The blocks of these layers; negative numbers count from a stack's last one."""
    if layers is None:
        return pairs, missing, added
    require_list("layers", layers, [0, -1])
    places = [*(pair[0].place for pair in pairs), *missing, *added]
    last = {one[:2]: one.layer for one in sorted(places, key=lambda one: one.layer)}
    numbers = {one: {one.layer, one.layer - last[one[:2]] - 1} for one in places}
    wanted = {one for one in places if not numbers[one].isdisjoint(layers)}
    chosen = [pair for pair in pairs if pair[0].place in wanted]
    absent = set(layers).difference(*numbers.values())
    if absent or not chosen:
        what = f"no layer {min(absent)}" if absent else "no layer was chosen"
        raise CheckpointError(f"{what}; layers are numbered from 0 to {max(last.values())}")
    missing, added = (tuple(one for one in some if one in wanted) for some in (missing, added))
    return chosen, missing, added
