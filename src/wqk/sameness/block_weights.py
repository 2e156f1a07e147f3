"""The weights that a block of the candidate should contain: the reference's in its layout.

If both models store a block the same way, each tensor should be the reference's tensor. Otherwise
queries, keys, values and outputs are taken from the reference's layout and put into the
candidate's, with rotary pairs in the candidate's order, and each key head as often as the candidate
stores it.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wqk._machine import side_by_side
from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.adapters import AdaptedCheckpoint, LoraFactors
from wqk.families import AttentionPlan, Composed, Norm, Projection, Side
from wqk.families.layouts import put_outputs
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.blocks import MANY
from wqk.sameness.circuits import PlanPair
from wqk.sameness.edits import Edit, Within
from wqk.sameness.execution import Tensor, as_tensors
from wqk.sameness.finders.all_finders import search
from wqk.sameness.finders.tensors import OtherPlace
from wqk.sameness.lora_merges import MergeScale
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.permutations import Sizes, to_order
from wqk.sameness.repairs import Change, Exchange, Step
from wqk.sameness.stored_tensors import equal_parts
from wqk.sameness.tensor_names import bias_of
from wqk.sameness.weight_pairs import (
    SCORED,
    AdapterEffect,
    Gain,
    Layout,
    Role,
    WeightFinding,
    WeightPair,
)

SIDES = ("query", "key", "value", "output")
# Tensors of latent attention that are no weights, by their roles in a projection.
OF_LATENTS = {"inner_norm": "norm of the latent", "inner_bias": "bias of the latent"}


@dataclass(eq=False)
class ExpectedTensor:
    """A tensor of the candidate as it is stored: the actual numbers, and the expected ones.

    Attributes
    ----------
    actual, expected
        Both in the candidate's layout.
    source
        The corresponding tensor of the reference, or a weight that is stored like it.
    roles
        Uses of the tensor in the block.
    sides
        The sides that the tensor contains, in the order of the roles.
    gain
        The gain of the norm before the tensor.
    """

    actual: np.ndarray
    expected: np.ndarray
    source: str
    roles: list[Role] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    gain: Gain | None = None


class BlockWeights:
    """The weights of the candidate's block, actual and expected.

    Attributes
    ----------
    pairs
        Each weight as in ``nn.Linear``, each vector.
    tensors
        The same tensors as they are stored, by the candidate's names.
    plan
        The candidate's plan, with the biases that only the reference has.
    added
        These biases, as zeros.
    factors
        The factors of the adapter of one of the models, by the candidate's names of the weights.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], plans: PlanPair) -> None:
        self._checkpoints = checkpoints
        self._plans = plans
        self.plan = plans[1]
        self._has_same_layout = _same_layout(*plans)
        self.tensors: dict[str, ExpectedTensor] = {}
        self.added: dict[str, np.ndarray] = {}
        self.factors: dict[str, LoraFactors] = {}
        for side in SIDES:
            self._add_side(side)
        self._add_positions()
        self.pairs: list[WeightPair] = []
        self._fill_pairs()

    def _add_side(self, name: str) -> None:
        """Add the weights, the bias and the norms of a side."""
        reference, candidate = (getattr(plan, name) for plan in self._plans)
        if reference is None or candidate is None:
            return
        if not self._add_weight(name, reference, candidate):
            return
        self._add_bias(name, reference, candidate)
        if reference.input_norm is not None and candidate.input_norm is not None:
            role = Role(name, "norm before the projection")
            self._add_norm(role, reference.input_norm, candidate.input_norm)
        if reference.norm is not None and candidate.norm is not None:
            self._add_norm(Role(name, "norm before the score"), reference.norm, candidate.norm)

    def _add_positions(self) -> None:
        """Add the weights of scores of positions, if both models store them the same way."""
        reference, candidate = (plan.positional for plan in self._plans)
        if self._has_same_layout and reference is not None and candidate is not None:
            self._add_weight("positions of queries", reference.query, candidate.query)
            self._add_weight("positions of keys", reference.key, candidate.key)

    def _fill_pairs(self) -> None:
        """Make the pairs of all tensors, weights with their biases and parts."""
        pairs = {name: self._pair(name, tensor) for name, tensor in self.tensors.items()}
        for name, pair in pairs.items():
            bias_names = [side.bias.name for side in self.tensors[name].sides if side.bias]
            bias = None
            if bias_names and pair.expected.ndim == 2:
                bias = pairs.get(bias_names[0])
            if bias is not None and len(bias.expected) == len(pair.expected):
                pair = replace(pair, bias=bias)
            if pair.role.fused and pair.role.part == "weight" and not pair.right:
                pair = replace(pair, parts=tuple(self._parts(pair)))
            self.pairs.append(replace(pair, block=self.pairs))

    def clear(self) -> None:
        """Release the pairs, each of which refers to all pairs and therefore to all weights."""
        self.pairs.clear()
        self.tensors.clear()
        self.factors.clear()

    def actual_arrays(self) -> dict[str, np.ndarray]:
        """Return the candidate's tensors as they are stored, by name; zeros for absent biases."""
        return {name: tensor.actual for name, tensor in self.tensors.items()}

    def adapter(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the factors A and B of the adapter of one of the models, for printed code."""
        return {name: as_tensors(factors) for name, factors in self.factors.items()}

    def expected_arrays(self) -> dict[str, np.ndarray]:
        """Return the same tensors as they should be."""
        return {name: tensor.expected for name, tensor in self.tensors.items()}

    def steps(self, finding: WeightFinding) -> tuple[Step, ...]:
        """Return the steps that undo a finding, on tensors as they are stored."""
        steps: list[Step] = []
        if finding.swapped:
            steps.append(Exchange(tuple(finding.swapped), tuple(finding.swapped.values())))
        steps += finding.recuts
        for name, edit in finding.edits.items():
            steps.append(Change((name,), self._layout(name).as_stored(edit)))
        return tuple(steps)

    def mismatch(self, finding: WeightFinding) -> Mismatch:
        """Return a finding as a cause, of tensors by their names and as they are stored."""
        pair = finding.pair
        roles = {pair.name: str(pair.role) for pair in pair.block if pair.name in finding.tensors}
        facts: dict[str, Any] = {"tensor": pair.name, "tensors": roles, **finding.facts}
        if pair.gain is not None:
            facts["gain"] = pair.gain.name
        return Mismatch(
            finding.kind,
            finding.phrase.about(pair.title),
            self.steps(finding),
            finding.sides,
            finding.heads,
            facts,
        )

    def side_steps(self, side: str, edit: Edit) -> tuple[Step, ...]:
        """Return the steps of an edit of the rows of a side, and of its bias."""
        planned: Side = getattr(self.plan, side)
        projection = planned.projection
        if not isinstance(projection, Projection):
            return ()
        bias_edit = edit.on_bias()
        bias = planned.bias
        if projection.outputs is not None:
            rows = np.concatenate([np.arange(*ends) for ends in projection.outputs])
            described = Stretches.of(rows)
            if not np.array_equal(described.indices, rows):
                return ()
            edit = Within(0, described, edit)
            bias_edit = edit.on_bias()
        steps = [Change((planned.tensor,), self._layout(planned.tensor).as_stored(edit))]
        if bias is not None and bias_edit is not None and bias.name in self.tensors:
            steps.append(Change((bias.name,), self._layout(bias.name).as_stored(bias_edit)))
        return tuple(steps)

    def _read(self, position: int, part: Part | str) -> np.ndarray:
        """Read a part of the reference, at position 0, or of the candidate, at position 1."""
        if isinstance(part, str):
            part = Part(part)
        (value,) = self._checkpoints[position].read([part])
        return value

    def _tensor(
        self, name: str, source: str, role: Role, side: Side | None = None, known: bool = False
    ) -> ExpectedTensor:
        """Return a tensor of the candidate, with one more role.

        If ``known``, the source is the expected value; otherwise the actual value is, at first.
        """
        if name not in self.tensors:
            actual, expected = self._arrays(name, source, known)
            self.tensors[name] = ExpectedTensor(actual, expected, source)
        tensor = self.tensors[name]
        tensor.roles.append(role)
        if side is not None:
            tensor.sides.append(side)
        return tensor

    def _arrays(self, name: str, source: str, known: bool) -> tuple[np.ndarray, np.ndarray]:
        """Read the actual and the expected value of a tensor; equal values are one array."""
        if not known:
            actual = self._read(1, name)
            return actual, actual.copy()
        if equal_parts(self._checkpoints, (Part(source), Part(name))):
            actual = self._read(1, name)
            return actual, actual
        is_large = self._checkpoints[1].info(name).nbytes > MANY
        actual, expected = side_by_side(self._read, (1, 0), (name, source), many=is_large)
        return actual, expected

    def _add_weight(self, name: str, reference: Side, candidate: Side) -> bool:
        """Add the weights of a side; return whether their expected values are known."""
        if self._has_same_layout:
            self._add_stored_weights(name, reference, candidate)
            return True
        source, target = reference.projection, candidate.projection
        if not isinstance(source, Projection) or not isinstance(target, Projection):
            return False
        if candidate.heads % reference.heads or candidate.head_width != reference.head_width:
            return False
        weight = source.take(self._read(0, source.part))
        ordered = self._ordered(name, weight, reference, candidate)
        tensor = self._tensor(target.tensor, source.tensor, Role(name), candidate)
        target.put(tensor.expected, ordered)
        return True

    def _add_stored_weights(self, name: str, reference: Side, candidate: Side) -> None:
        """Add the tensors of a side that both models store the same way."""
        sources = reference.projection.roles
        targets = candidate.projection.roles.values()
        for (part, source), target in zip(sources.items(), targets, strict=True):
            if part in OF_LATENTS:
                role = Role(name, OF_LATENTS[part])
                self._tensor(target.name, source.name, role, known=True)
            else:
                self._tensor(target.name, source.name, Role(name), candidate, known=True)

    def _ordered(
        self, name: str, weight: np.ndarray, reference: Side, candidate: Side
    ) -> np.ndarray:
        """Return rows (heads, R, ...) in the candidate's rotary order, and with its heads."""
        expected, actual = (plan.rotary for plan in self._plans)
        if name in SCORED and expected and actual and expected.order != actual.order:
            rotated = 2 * len(actual.frequencies)
            rows = to_order(actual.order, reference.heads, reference.head_width, rotated)
            flat = weight.reshape(-1, *weight.shape[2:])
            weight = flat[rows].reshape(weight.shape)
        return np.asarray(weight.repeat(candidate.heads // reference.heads, axis=0))

    def _add_bias(self, name: str, reference: Side, candidate: Side) -> None:
        """Add the bias of a side, also if only one model has the bias."""
        if not isinstance(candidate.projection, Projection):
            return
        bias = np.zeros((reference.heads, reference.head_width), np.float32)
        source = reference.tensor
        if reference.bias is not None:
            bias = self._read(0, reference.bias).reshape(bias.shape)
            source = reference.bias.name
        if candidate.bias is None:
            if not bias.any():
                return
            candidate = self._with_zero_bias(name, reference, candidate)
        part = candidate.bias
        assert part is not None
        tensor = self._tensor(part.name, source, Role(name, "bias"), candidate)
        ordered = self._ordered(name, bias, reference, candidate).reshape(-1)
        put_outputs(tensor.expected.reshape(-1), part.rows, ordered)

    def _with_zero_bias(self, name: str, reference: Side, candidate: Side) -> Side:
        """Give the candidate's side a bias of zeros, and return the side with the bias."""
        projection = candidate.projection
        assert isinstance(projection, Projection)
        part = projection.bias_part(bias_of(candidate.tensor))
        shape = self._checkpoints[1].info(candidate.tensor).shape
        zeros = np.zeros(shape[-1] if projection.transposed else shape[0], np.float32)
        self.tensors.setdefault(part.name, ExpectedTensor(zeros, zeros.copy(), reference.tensor))
        self.added[part.name] = zeros
        side = replace(candidate, bias=part)
        self.tensors[candidate.tensor].sides[-1] = side
        changed: dict[str, Any] = {name: side}
        self.plan = replace(self.plan, **changed)
        return side

    def _add_norm(self, role: Role, reference: Norm, candidate: Norm) -> None:
        """Add gains and biases of a norm, up to the offsets that are added to stored gains."""
        offset = reference.offset - candidate.offset
        gains = [*zip(reference.gain, candidate.gain, strict=False)]
        for number, (source, target) in enumerate(gains):
            tensor = self._add_norm_vector(role, source, target, offset)
            if role.part == "norm before the projection" and number == 0:
                weight = self.tensors[getattr(self.plan, role.side).tensor]
                weight.gain = Gain(
                    name=target.name,
                    expected=tensor.expected + candidate.offset,
                    actual=tensor.actual + candidate.offset,
                    offset=candidate.offset,
                )
        for source, target in zip(reference.bias, candidate.bias, strict=False):
            self._add_norm_vector(role, source, target, 0.0)

    def _add_norm_vector(
        self, role: Role, source: Part, target: Part, offset: float
    ) -> ExpectedTensor:
        """Add a gain or a bias of a norm."""
        value = self._read(0, source).reshape(-1)
        tensor = self._tensor(target.name, source.name, role)
        ranges = target.row_ranges(tensor.expected.shape)
        count = sum(end - start for start, end in ranges)
        if tensor.expected.ndim == 1 and count == len(value):
            put_outputs(tensor.expected, target.rows, value + value.dtype.type(offset))
        return tensor

    def _pair(self, name: str, tensor: ExpectedTensor) -> WeightPair:
        """Return a tensor as a weight (n, D) or a vector (n,), expected and actual."""
        query, key = self.plan.query, self.plan.key
        rotary = self.plan.rotary or self.plan.axial
        role = tensor.roles[0]
        pieces = [_piece(side, side.tensor if role.is_bias else name) for side in tensor.sides]
        piece = pieces[0] if len(pieces) == 1 else None
        width = piece.head_width if piece is not None else query.head_width
        turned = 2 * len(rotary.frequencies) if rotary is not None else width
        order = rotary.order if rotary is not None else ""
        actual = self._flat(name, tensor.actual)
        expected = actual
        if tensor.expected is not tensor.actual:
            expected = self._flat(name, tensor.expected)
        heads, repeated = 0, 1
        sides = tuple(side for side in SCORED if any(role.side == side for role in tensor.roles))
        if not role.is_norm and role.side != "output":
            if piece is not None and len(actual) == piece.heads * piece.head_width:
                of_reference = getattr(self._plans[0], role.side, tensor.sides[0])
                heads, repeated = piece.heads, tensor.sides[0].heads // of_reference.heads
            else:
                role, sides = replace(role, fused=True), ()
        info = self._checkpoints[1].tensors().get(name)
        rounding = rounding_in(self._checkpoints[0].info(tensor.source), expected)
        if info is not None:
            rounding = max(rounding, rounding_in(info, actual))
        return WeightPair(
            name,
            role,
            expected,
            actual,
            Sizes(query.heads, key.heads, width, min(turned, width), order),
            heads,
            rounding,
            gain=tensor.gain,
            layout=self._layout(name),
            grid=info.grid if info else None,
            regrouped=self._checkpoints[1].regrouping,
            repeated=max(1, repeated),
            adapter=self._adapter(name, tensor.source),
            sides=sides,
        )

    def _parts(self, pair: WeightPair) -> Iterator[WeightPair]:
        """Yield the rows of each side of a fused weight, and the rows of none, such as gates."""
        tensor = self.tensors[pair.name]
        is_free = np.ones(len(pair.actual), bool)
        places: list[tuple[str, int, np.ndarray]] = []
        for role, side in zip(tensor.roles, tensor.sides, strict=True):
            piece = _piece(side, pair.name)
            if piece is None or piece.outputs is None:
                return
            rows = np.concatenate([np.arange(*ends) for ends in piece.outputs])
            if is_free[rows].all():  # rows that keys and values share come once
                places.append((role.side, piece.heads, rows))
            is_free[rows] = False
        if is_free.any():
            heads, remainder = divmod(int(is_free.sum()), pair.sizes.width)
            places.append(("rest", 0 if remainder else heads, np.flatnonzero(is_free)))
        for name, heads, rows in places:
            bias = pair.bias
            if bias is not None:
                bias = replace(bias, expected=bias.expected[rows], actual=bias.actual[rows])
            adapter = pair.adapter
            if adapter is not None:
                adapter = adapter.of_rows(rows)
            yield replace(
                pair,
                role=Role(name),
                expected=pair.expected[rows],
                actual=pair.actual[rows],
                heads=heads,
                bias=bias,
                rows=rows,
                sides=(name,) if name in SCORED else (),
                sizes=replace(pair.sizes, width=len(rows) // (heads or 1)),
                adapter=adapter,
            )

    def _adapter(self, name: str, source: str) -> AdapterEffect | None:
        """Return the effect of an adapter of one of the models on a tensor."""
        if not self._has_same_layout:
            return None
        for position, stored_name in enumerate((source, name)):
            checkpoint = self._checkpoints[position]
            if not isinstance(checkpoint, AdaptedCheckpoint):
                continue
            scale = checkpoint.scale_of(stored_name)
            if scale is None:
                continue
            (start,) = checkpoint.base.read([Part(stored_name)])
            factors = checkpoint.factors(stored_name)
            if factors is not None:
                self.factors[name] = factors
            layout = self._layout(name)
            return AdapterEffect(
                start=self._flat(name, start),
                scale=MergeScale(scale, checkpoint.rank_of(stored_name), checkpoint.stabilized),
                in_reference=position == 0,
                factors=factors,
                is_transposed=layout.is_transposed,
                update=checkpoint.decomposed(stored_name),
            )
        return None

    def _layout(self, name: str) -> Layout:
        """Return the shape of a tensor, and how to make a matrix as in ``nn.Linear`` of it."""
        tensor = self.tensors[name]
        shape = tensor.actual.shape
        if tensor.roles[0].is_bias or not tensor.sides or len(shape) < 2:
            return Layout(shape)
        projection = tensor.sides[0].projection
        if not isinstance(projection, Projection) or projection.tensor != name:
            return Layout(shape)
        return Layout(shape, projection.transposed, tensor.roles[0].side == "output")

    def _flat(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return a tensor as ``nn.Linear`` stores it, (n, D); vectors as they are."""
        if self.tensors[name].roles[0].is_bias:
            return value.reshape(-1)
        layout = self._layout(name)
        if layout.exchanges_axes:
            value = value.swapaxes(-1, -2)
        if value.ndim > 2:
            value = value.reshape(-1, value.shape[-1])
        return value.T if layout.transposes else value

    def other_place(
        self, pair: WeightPair, neighbors: Sequence[AttentionPlan]
    ) -> OtherPlace | None:
        """Find the other block of the reference that contains a tensor of the candidate."""
        role = self.tensors[pair.name].roles[0]
        if not self._has_same_layout or role.part != "weight" or role.side not in SIDES:
            return None
        plan = self._plans[0]
        for neighbor in neighbors:
            name = self._counterpart(pair.name, neighbor)
            if name is None or not self._holds(pair.name, name):
                continue
            if (neighbor.stack, neighbor.kind) == (plan.stack, plan.kind):
                return OtherPlace(Kind.LAYER, f"weights of layer {neighbor.layer}")
            stack = f"weights of the {neighbor.stack}'s {neighbor.kind}-attention"
            return OtherPlace(Kind.TENSOR, stack)
        return None

    def _counterpart(self, name: str, neighbor: AttentionPlan) -> str | None:
        """Return the reference's tensor in another block that has the use of a tensor."""
        tensor = self.tensors[name]
        role = tensor.roles[0]
        sides = [getattr(plan, role.side) for plan in (self._plans[0], neighbor)]
        if any(side is None for side in sides):
            return None
        sources, targets = (side.projection.roles.values() for side in sides)
        for source, target in zip(sources, targets, strict=False):
            if source.name == tensor.source:
                return str(target.name)
        return None

    def _holds(self, name: str, source: str) -> bool:
        """Return whether a tensor of the candidate equals one of the reference's tensors."""
        actual = self.tensors[name].actual
        info = self._checkpoints[0].tensors().get(source)
        if info is None or info.shape != actual.shape:
            return False
        first_row = self._read(0, Part(source, ((0, 1),)))
        return same_numbers(first_row, actual[:1]) and same_numbers(self._read(0, source), actual)

    def folded(self) -> list[WeightFinding]:
        """Find orders of rows that show once the norms before the weights are folded in."""
        pairs = []
        for pair in self.pairs:
            gain = pair.gain
            if gain is None or len(gain.expected) != pair.actual.shape[-1]:
                continue
            if gain.actual.all():
                expected, actual = pair.expected * gain.expected, pair.actual * gain.actual
                pairs.append(replace(pair, expected=expected, actual=actual, block=[]))
        return [finding for finding in search(pairs) if finding.rows is not None]


def added_biases(plans: PlanPair) -> Iterator[str]:
    """Yield the names of the biases that the candidate's block lacks and the reference's has."""
    for name in SIDES:
        reference, candidate = (getattr(plan, name) for plan in plans)
        if reference is None or candidate is None:
            continue
        if reference.bias and not candidate.bias:
            yield bias_of(candidate.tensor)


def _piece(side: Side, name: str) -> Projection | None:
    """Return the part of a side that a tensor contains: of a product, one of the two factors."""
    projection = side.projection
    factors = [projection]
    if isinstance(projection, Composed):
        factors = [projection.outer, projection.inner]
    for factor in factors:
        if isinstance(factor, Projection) and factor.tensor == name:
            return factor
    return None


def _same_layout(reference: AttentionPlan, candidate: AttentionPlan) -> bool:
    """Return whether both blocks are stored the same way, whatever the names of their tensors."""
    return _layout_of(reference) == _layout_of(candidate)


def _layout_of(plan: AttentionPlan) -> list[object]:
    """Return how a block is stored, without the names of its tensors."""
    layout: list[object] = []
    for name in SIDES:
        side: Side | None = getattr(plan, name)
        if side is None:
            layout.append(None)
        elif isinstance(side.projection, Projection):
            layout.append(replace(side.projection, tensor=""))
        else:
            layout.append(len(side.projection.roles))
    layout.append(plan.rotary.order if plan.rotary is not None else "")
    return layout
