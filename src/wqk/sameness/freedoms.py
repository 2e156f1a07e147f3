"""Freedoms of a model: changes of the weights that leave the model's output unchanged."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial

from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.sameness.circuits import SCORES, PlanPair
from wqk.sameness.comparisons import BlockComparison
from wqk.sameness.experts_and_neurons import renumbered
from wqk.sameness.folded_mixers import with_folded_mixers
from wqk.sameness.form_causes import CircuitDifference
from wqk.sameness.mismatches import Kind
from wqk.sameness.stream import moved_gains, rotated_stream
from wqk.sameness.tensor_comparisons import ATTENTION
from wqk.sameness.tensor_names import layer_prefix
from wqk.sameness.tensor_roles import parts_outside_forms, roles
from wqk.sameness.tolerances import ROTATED


def in_candidates_terms(
    models: Sequence[Model],
    names: Mapping[str, str],
    up_to: Collection[str],
    is_whole: bool,
    tolerance: float,
) -> tuple[list[Model], list[str], float]:
    """Return the models, with the reference in the candidate's coordinates and orders.

    Parameters
    ----------
    names
        The candidate's names of the reference's tensors, where names agree.
    up_to
        Requested freedoms.
    is_whole
        Whether all tensors of all layers are compared.

    Returns
    -------
    tuple
        The models, notes, and the tolerance, which a rotation of the stream widens.
    """
    reference, candidate = models
    smoothed, notes = with_folded_mixers((reference, candidate), names)
    reference = smoothed or reference
    if "stream" in up_to:
        rotated, text = rotated_stream((reference, candidate), names)
        if rotated is None:
            notes.append(f"up to the stream: {text}")
        else:
            notes.append(f"the residual stream {text}")
            reference, tolerance = rotated, max(tolerance, ROTATED)
    if is_whole:
        for view in (moved_gains, partial(renumbered, neurons="neurons" in up_to)):
            changed, texts = view((reference, candidate), names)
            reference = changed or reference
            notes += texts
    return [reference, candidate], notes, tolerance


def any_order_of_heads(models: Sequence[Model], pairs: Sequence[PlanPair]) -> set[int]:
    """Return the blocks whose heads may be in any order: circuits describe heads completely.

    Positions that are added to scores, sinks and gates apply to a head by its number, and fix the
    order.
    """
    bound = set[int]()
    for position, model in enumerate(models):
        left = {part.name for part in parts_outside_forms(model)}
        shapes_by_layer = _shapes_besides_circuits(model)
        for number, pair in enumerate(pairs):
            plan = pair[position]
            shapes = shapes_by_layer.get(layer_prefix(plan.query.tensor), [])
            if _has_numbered_heads(plan, shapes) or plan.query.tensor in left:
                bound.add(number)
    return {*range(len(pairs))} - bound


def _shapes_besides_circuits(model: Model) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of attention's tensors that are in no circuit, by layer."""
    tensors = model.checkpoint.tensors()
    shapes: dict[str, list[tuple[int, ...]]] = {}
    for name, role in roles(model).items():
        if role == ATTENTION:
            shapes.setdefault(layer_prefix(name), []).append(tensors[name].shape)
    return shapes


def _has_numbered_heads(plan: AttentionPlan, shapes: Sequence[tuple[int, ...]]) -> bool:
    """Return whether positions, sinks or tensors outside the circuits belong to numbers of heads.

    ``shapes`` are the shapes of the layer's attention tensors that are in no circuit.
    """
    if plan.sinks:
        return True
    if not plan.position.startswith("rotary") and plan.position not in ("", "mask"):
        return True
    heads = plan.query.heads
    rows = heads * plan.query.head_width if layer_prefix(plan.query.tensor) else 0
    return any(heads in shape or (len(shape) > 1 and rows in shape) for shape in shapes)


def order_of_heads(
    block: BlockComparison, differences: Mapping[str, CircuitDifference]
) -> tuple[int, ...]:
    """Return the one order of heads that makes all circuits equal; () without such an order.

    Parameters
    ----------
    block
        The comparison of the two blocks.
    differences
        The difference of each circuit that differs, by the circuit's name.
    """
    if {*differences} != {SCORES, *block.beside}:
        return ()
    orders = set()
    for difference in differences.values():
        causes = difference.causes or ()
        is_order = len(causes) == 1 and causes[0].verdict is Kind.HEADS
        orders.add(causes[0].heads if is_order else ())
    return orders.pop() if len(orders) == 1 else ()
