"""Freedoms of a model: changes of all of its weights together that change nothing it does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from wqk.model import Model
from wqk.sameness.answer import BlockComparison
from wqk.sameness.contents import ATTENTION
from wqk.sameness.diagnosis import Apart
from wqk.sameness.folded_mixers import with_folded_mixers
from wqk.sameness.mismatches import Kind
from wqk.sameness.orders import renumbered
from wqk.sameness.outside import layer_of, left_in, roles
from wqk.sameness.stream import folded, turned
from wqk.sameness.tolerances import TURNED
from wqk.sameness.weights import SCORES, Pair


def in_candidates_terms(
    models: Sequence[Model],
    names: Mapping[str, str],
    up_to: Collection[str],
    is_whole: bool,
    tolerance: float,
) -> tuple[list[Model], list[str], float]:
    """Return the models, the reference in the candidate's coordinates and orders.

    Parameters
    ----------
    names
        The candidate's name of each tensor of the reference, as far as names agree.
    up_to
        Freedoms that were asked for.
    is_whole
        Whether all tensors are compared, in all layers.

    Returns
    -------
    tuple
        The models, notes, and the tolerance, which a rotation of the stream widens.
    """
    reference, candidate = models
    smoothed, notes = with_folded_mixers((reference, candidate), names)
    reference = smoothed or reference
    if "stream" in up_to:
        rotated, text = turned((reference, candidate), names)
        if rotated is None:
            notes.append(f"up to the stream: {text}")
        else:
            notes.append(f"the residual stream {text}")
            reference, tolerance = rotated, max(tolerance, TURNED)
    if is_whole:
        for view in (folded, partial(renumbered, neurons="neurons" in up_to)):
            changed, texts = view((reference, candidate), names)
            reference = changed or reference
            notes += texts
    return [reference, candidate], notes, tolerance


def any_order_of_heads(models: Sequence[Model], pairs: Sequence[Pair]) -> set[int]:
    """The blocks in which all that belongs to a head is in its circuits, so that any may be first.

    Positions that are added to scores, sinks and gates are a head's by its number.
    """
    bound = set[int]()
    for which, model in enumerate(models):
        tensors, left = model.checkpoint.tensors(), {part.name for part in left_in(model)}
        beside: dict[str, list[tuple[int, ...]]] = {}
        for name, role in roles(model).items():
            if role == ATTENTION:
                beside.setdefault(layer_of(name), []).append(tensors[name].shape)
        for number, plan in enumerate(pair[which] for pair in pairs):
            layer, heads = layer_of(plan.query.tensor), plan.query.heads
            rows = heads * plan.query.head_width if layer else 0
            numbered = any(
                heads in shape or (len(shape) > 1 and rows in shape)
                for shape in beside.get(layer, [])
            )
            added = not plan.position.startswith("rotary") and plan.position not in ("", "mask")
            if numbered or added or plan.sinks or plan.query.tensor in left:
                bound.add(number)
    return {*range(len(pairs))} - bound


def order_of_heads(block: BlockComparison, apart: Mapping[str, Apart]) -> tuple[int, ...]:
    """The one order of heads in which scores, values and outputs are the same; () without one."""
    if {*apart} != {SCORES, *block.beside}:
        return ()
    found = [circuit.explained for circuit in apart.values()]
    orders = {
        one[0].heads if one and len(one) == 1 and one[0].verdict == Kind.HEADS else ()
        for one in found
    }
    return orders.pop() if len(orders) == 1 else ()
