"""The weights of a candidate's block, expected and actual, and steps that undo findings.

Each stored tensor (`wqk.sameness.stored_block`) becomes a `WeightPair` in the orientation of
``nn.Linear``. Finders look at the pairs. The edits of findings are converted to the stored
orientation, and become steps of a repair.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, Part
from wqk.checkpoints.adapters import AdaptedCheckpoint, LoraFactors
from wqk.families import AttentionPlan, Composed, Projection, Side
from wqk.sameness.axis_orders import Stretches
from wqk.sameness.circuits import PlanPair
from wqk.sameness.edits import Edit, Within
from wqk.sameness.execution import Tensor, as_tensors
from wqk.sameness.finders.all_finders import search
from wqk.sameness.finders.tensors import OtherPlace
from wqk.sameness.lora_merges import MergeScale
from wqk.sameness.matching import are_in_place, same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.permutations import Sizes
from wqk.sameness.repairs import Change, Exchange, Step
from wqk.sameness.stored_block import SIDES, ExpectedTensor, StoredBlock
from wqk.sameness.tolerances import QUANTIZED_ALIKE
from wqk.sameness.weight_pairs import (
    SCORED,
    AdapterEffect,
    Layout,
    TensorUse,
    WeightFinding,
    WeightPair,
)


class _Share(NamedTuple):
    """The rows of a fused weight that belong to one side, or to no side.

    Attributes
    ----------
    side
        The side; ``rest`` for rows of no side, such as gates.
    heads
        Number of heads in the rows; 0 if the rows are not heads.
    rows
        Numbers of the rows in the fused weight.
    """

    side: str
    heads: int
    rows: np.ndarray


class BlockWeights:
    """The weights of the candidate's block, actual and expected.

    Attributes
    ----------
    pairs
        All weights and vectors, in the orientation of ``nn.Linear``.
    tensors
        The same tensors as they are stored, by the candidate's names.
    plan
        The candidate's plan, with the biases that only the reference has.
    added
        The biases that only the reference has, as zeros.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], plans: PlanPair) -> None:
        self._stored = StoredBlock(checkpoints, plans)
        self._checkpoints = checkpoints
        self._plans = plans
        self.plan = self._stored.plan
        self.tensors = self._stored.tensors
        self.added = self._stored.added
        self._factors: dict[str, LoraFactors] = {}
        self.pairs: list[WeightPair] = []
        self._fill_pairs()

    def clear(self) -> None:
        """Release all pairs; a pair refers to all pairs of the block, and thus to all weights."""
        self.pairs.clear()
        self.tensors.clear()
        self._factors.clear()

    # -- arrays for printed code -----------------------------------------------------------

    def actual_arrays(self) -> dict[str, np.ndarray]:
        """Return the candidate's tensors as they are stored, by name; zeros for absent biases."""
        return {name: tensor.actual for name, tensor in self.tensors.items()}

    def expected_arrays(self) -> dict[str, np.ndarray]:
        """Return the expected tensors of the candidate, in the stored layout, by name."""
        return {name: tensor.expected for name, tensor in self.tensors.items()}

    def adapter(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the factors A and B of the adapter of one of the models, by the weights' names."""
        return {name: as_tensors(factors) for name, factors in self._factors.items()}

    # -- pairs -----------------------------------------------------------------------------

    def _fill_pairs(self) -> None:
        """Make the pairs of all tensors, weights with their biases and parts."""
        pairs = {name: self._pair(name, tensor) for name, tensor in self.tensors.items()}
        for name, pair in pairs.items():
            bias_names = [side.bias.name for side in self.tensors[name].sides if side.bias]
            bias = None
            if bias_names and pair.is_matrix:
                bias = pairs.get(bias_names[0])
            if bias is not None and len(bias.expected) == len(pair.expected):
                pair = replace(pair, bias=bias)
            if pair.role.fused and pair.role.use is TensorUse.WEIGHT and not pair.right:
                pair = replace(pair, parts=tuple(self._parts(pair)))
            self.pairs.append(replace(pair, block=self.pairs))

    def _pair(self, name: str, tensor: ExpectedTensor) -> WeightPair:
        """Return a tensor as a weight (n, D) or a vector (n,), expected and actual."""
        role = tensor.roles[0]
        actual = self._as_matrix(name, tensor.actual)
        expected = actual
        if tensor.expected is not tensor.actual:
            expected = self._as_matrix(name, tensor.expected)
        piece = self._only_piece(name, tensor)
        sides_of_roles = {role.side for role in tensor.roles}
        sides = tuple(side for side in SCORED if side in sides_of_roles)
        heads, repeated = 0, 1
        makes_heads = not role.is_norm and role.side != "output"
        if makes_heads and piece is not None and len(actual) == piece.heads * piece.head_width:
            reference_side = getattr(self._plans[0], role.side, tensor.sides[0])
            heads = piece.heads
            repeated = tensor.sides[0].heads // reference_side.heads
        elif makes_heads:
            role, sides = replace(role, fused=True), ()
        info = self._checkpoints[1].tensors().get(name)
        rounding = rounding_in(self._checkpoints[0].info(tensor.source), expected)
        if info is not None:
            rounding = max(rounding, rounding_in(info, actual))
        return WeightPair(
            name=name,
            role=role,
            expected=expected,
            actual=actual,
            sizes=self._sizes(piece),
            heads=heads,
            rounding=rounding,
            gain=tensor.gain,
            layout=self._layout(name),
            grid=info.grid if info else None,
            regrouped=self._checkpoints[1].regrouping,
            repeated=max(1, repeated),
            adapter=self._adapter(name, tensor.source),
            sides=sides,
        )

    def _only_piece(self, name: str, tensor: ExpectedTensor) -> Projection | None:
        """Return the only projection in a tensor; None for norms and for fused weights."""
        if len(tensor.sides) != 1:
            return None
        (side,) = tensor.sides
        return _piece(side, side.tensor if tensor.roles[0].is_bias else name)

    def _sizes(self, piece: Projection | None) -> Sizes:
        """Return the numbers of the block; the head width comes from a tensor's only projection."""
        query, key = self.plan.query, self.plan.key
        rotary = self.plan.rotary or self.plan.axial
        width = query.head_width if piece is None else piece.head_width
        if rotary is None:
            return Sizes(query.heads, key.heads, width, width)
        rotated = min(2 * len(rotary.frequencies), width)
        return Sizes(query.heads, key.heads, width, rotated, rotary.order)

    def _parts(self, pair: WeightPair) -> Iterator[WeightPair]:
        """Yield the rows of each side of a fused weight, and the rows of no side, such as gates.

        If the rows of a side are unknown, nothing is yielded.
        """
        for share in self._shares(pair):
            rows = share.rows
            bias = pair.bias
            if bias is not None:
                bias = replace(bias, expected=bias.expected[rows], actual=bias.actual[rows])
            adapter = pair.adapter
            if adapter is not None:
                adapter = adapter.of_rows(rows)
            yield replace(
                pair,
                role=replace(pair.role, side=share.side, fused=False),
                expected=pair.expected[rows],
                actual=pair.actual[rows],
                heads=share.heads,
                bias=bias,
                rows=rows,
                sides=(share.side,) if share.side in SCORED else (),
                sizes=replace(pair.sizes, width=len(rows) // (share.heads or 1)),
                adapter=adapter,
            )

    def _shares(self, pair: WeightPair) -> list[_Share]:
        """Return the rows of each side of a fused weight; none if any rows are unknown."""
        tensor = self.tensors[pair.name]
        is_free = np.ones(len(pair.actual), bool)
        shares: list[_Share] = []
        for role, side in zip(tensor.roles, tensor.sides, strict=True):
            piece = _piece(side, pair.name)
            if piece is None or piece.outputs is None:
                return []
            rows = _numbers_of_rows(piece.outputs)
            if is_free[rows].all():  # rows that keys and values share come once
                shares.append(_Share(role.side, piece.heads, rows))
            is_free[rows] = False
        if is_free.any():
            heads, remainder = divmod(int(is_free.sum()), pair.sizes.width)
            free_rows = np.flatnonzero(is_free)
            shares.append(_Share("rest", 0 if remainder else heads, free_rows))
        return shares

    def _adapter(self, name: str, source: str) -> AdapterEffect | None:
        """Return the effect of an adapter of one of the models on a tensor.

        ``name`` is the name in the candidate, ``source`` the name in the reference. The factors of
        the adapter are kept for printed code.
        """
        if not self._stored.has_same_layout:
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
                self._factors[name] = factors
            return AdapterEffect(
                start=self._as_matrix(name, start),
                scale=MergeScale(scale, checkpoint.rank_of(stored_name), checkpoint.stabilized),
                in_reference=position == 0,
                factors=factors,
                is_transposed=self._layout(name).is_transposed,
                update=checkpoint.decomposed(stored_name),
            )
        return None

    def _layout(self, name: str) -> Layout:
        """Return the layout of a tensor: its shape, and the conversion to a matrix."""
        tensor = self.tensors[name]
        shape = tensor.actual.shape
        if tensor.roles[0].is_bias or not tensor.sides or len(shape) < 2:
            return Layout(shape)
        projection = tensor.sides[0].projection
        if not isinstance(projection, Projection) or projection.tensor != name:
            return Layout(shape)
        return Layout(shape, projection.transposed, tensor.roles[0].side == "output")

    def _as_matrix(self, name: str, value: np.ndarray) -> np.ndarray:
        """Return a tensor as ``nn.Linear`` stores it, (n, D); a vector is unchanged."""
        if self.tensors[name].roles[0].is_bias:
            return value.reshape(-1)
        return self._layout(name).as_matrix(value)

    # -- steps -----------------------------------------------------------------------------

    def mismatch(self, finding: WeightFinding) -> Mismatch:
        """Return a finding as a cause, with steps that edit the stored tensors."""
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

    def steps(self, finding: WeightFinding) -> tuple[Step, ...]:
        """Return the steps that undo a finding, as edits of the stored tensors."""
        steps: list[Step] = []
        if finding.swapped:
            steps.append(Exchange(tuple(finding.swapped), tuple(finding.swapped.values())))
        steps += finding.recuts
        for name, edit in finding.edits.items():
            steps.append(Change((name,), self._layout(name).as_stored(edit)))
        return tuple(steps)

    def side_steps(self, side: str, edit: Edit) -> tuple[Step, ...]:
        """Return the steps that edit the rows of a side and the bias of these rows.

        The result is empty if the weight is a product, or if its rows do not lie at equal distances
        in a fused weight.
        """
        planned: Side = getattr(self.plan, side)
        projection = planned.projection
        if not isinstance(projection, Projection):
            return ()
        bias_edit = edit.on_bias()
        bias = planned.bias
        if projection.outputs is not None:
            rows = _numbers_of_rows(projection.outputs)
            stretches = Stretches.of(rows)
            if not np.array_equal(stretches.indices, rows):
                return ()
            edit = Within(0, stretches, edit)
            bias_edit = edit.on_bias()
        steps = [Change((planned.tensor,), self._layout(planned.tensor).as_stored(edit))]
        if bias is not None and bias_edit is not None and bias.name in self.tensors:
            steps.append(Change((bias.name,), self._layout(bias.name).as_stored(bias_edit)))
        return tuple(steps)

    # -- other places ----------------------------------------------------------------------

    def other_place(
        self, pair: WeightPair, neighbors: Sequence[AttentionPlan]
    ) -> OtherPlace | None:
        """Find the block of the reference that contains a candidate's tensor from another block.

        ``neighbors`` are the plans of the reference's other blocks.
        """
        role = self.tensors[pair.name].roles[0]
        if role.use is not TensorUse.WEIGHT or role.side not in SIDES:
            return None
        plan = self._plans[0]
        for neighbor in neighbors:
            name = self._counterpart(pair.name, neighbor)
            if name is None:
                continue
            is_held = self._holds(pair.name, name)
            if not is_held and (pair.grid or not self._stored.has_same_layout):
                is_held = self._holds_converted(pair, name, neighbor)
            if not is_held:
                continue
            if (neighbor.stack, neighbor.kind) == (plan.stack, plan.kind):
                return OtherPlace(Kind.LAYER, f"weights of layer {neighbor.layer}")
            stack = f"weights of the {neighbor.stack}'s {neighbor.kind}-attention"
            return OtherPlace(Kind.TENSOR, stack)
        return None

    def _counterpart(self, name: str, neighbor: AttentionPlan) -> str | None:
        """Return the reference's tensor in another block with the role of a candidate's tensor."""
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
        """Return whether a tensor of the candidate equals a tensor of the reference."""
        actual = self.tensors[name].actual
        info = self._checkpoints[0].tensors().get(source)
        if info is None or info.shape != actual.shape:
            return False
        first_row = self._stored.read(0, Part(source, ((0, 1),)))
        return same_numbers(first_row, actual[:1]) and same_numbers(
            self._stored.read(0, source), actual
        )

    def _holds_converted(self, pair: WeightPair, source: str, neighbor: AttentionPlan) -> bool:
        """Return whether a weight equals another block's weight in the candidate's layout and type.

        ``source`` is the reference's tensor in that block. The block is read only if the first
        rows are nearly parallel: the first row of a head has the same place in all rotary orders.
        """
        info = self._checkpoints[0].tensors().get(source)
        if info is None or info.shape != pair.actual.shape:
            return False
        first_row = self._stored.read(0, Part(source, ((0, 1),)))
        if not are_in_place(first_row, pair.actual[:1], QUANTIZED_ALIKE):
            return False
        other_block = BlockWeights(self._checkpoints, (neighbor, self._plans[1]))
        pairs = {other.name: other for other in other_block.pairs}
        is_held = pair.name in pairs and pairs[pair.name].right
        other_block.clear()
        return is_held

    def find_folded_orders(self) -> list[WeightFinding]:
        """Find orders of rows that appear once the norms before the weights are folded in."""
        pairs = []
        for pair in self.pairs:
            gain = pair.gain
            if gain is None or len(gain.expected) != pair.actual.shape[-1]:
                continue
            if gain.actual.all():
                expected, actual = pair.expected * gain.expected, pair.actual * gain.actual
                pairs.append(replace(pair, expected=expected, actual=actual, block=[]))
        return [finding for finding in search(pairs) if finding.rows is not None]


def _piece(side: Side, name: str) -> Projection | None:
    """Return the part of a side in a tensor; of a product, one of the two factors."""
    projection = side.projection
    factors = [projection]
    if isinstance(projection, Composed):
        factors = [projection.outer, projection.inner]
    for factor in factors:
        if isinstance(factor, Projection) and factor.tensor == name:
            return factor
    return None


def _numbers_of_rows(ranges: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the numbers of the rows in half-open ranges."""
    return np.concatenate([np.arange(start, end) for start, end in ranges])
