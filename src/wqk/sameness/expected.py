"""What a block of the second checkpoint should hold: the first one's weights in its layout.

Where both store a block the same way, each tensor should be the other's. Otherwise queries, keys,
values and outputs are taken from one layout and put into the other, rotary pairs in its order, key
heads as often as it has them.

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
from wqk.checkpoints.adapters import AdaptedCheckpoint
from wqk.families import AttentionPlan, Composed, Norm, Projection, Side
from wqk.families.layouts import put_outputs
from wqk.sameness.blocks import MANY
from wqk.sameness.contents import equal_parts
from wqk.sameness.edits import Edit, Stretches, Within
from wqk.sameness.finders import search
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.permutations import Sizes, to_order
from wqk.sameness.repairs import Change, Exchange, Step
from wqk.sameness.weight_pairs import (
    SCORED,
    Adapter,
    Finding,
    Gain,
    Layout,
    Role,
    WeightPair,
)
from wqk.sameness.weights import Pair

SIDES = ("query", "key", "value", "output")
# Tensors of latent attention that are no weights, by their roles in a projection.
OF_LATENTS = {"inner_norm": "norm of the latent", "inner_bias": "bias of the latent"}


@dataclass(eq=False)
class StoredTensor:
    """A tensor of the candidate as it is stored: the actual numbers, and the expected ones.

    Attributes
    ----------
    actual, expected
        Both in the candidate's layout.
    source
        The reference's name of it, or of a weight that is stored like its source.
    roles
        Its uses in the block.
    sides
        The sides that it holds, in the order of the roles.
    gain
        Of the norm before it.
    """

    actual: np.ndarray
    expected: np.ndarray
    source: str
    roles: list[Role] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    gain: Gain | None = None


class Expected:
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
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], plans: Pair) -> None:
        self._checkpoints, self._plans, self.plan = checkpoints, plans, plans[1]
        self._same = _same_layout(*plans)
        self.tensors: dict[str, StoredTensor] = {}
        self.added: dict[str, np.ndarray] = {}
        for side in SIDES:
            first, second = (getattr(plan, side) for plan in plans)
            if first is None or second is None or not self._add_weight(side, first, second):
                continue
            self._add_bias(side, first, second)
            if first.input_norm is not None and second.input_norm is not None:
                role = Role(side, "norm before the projection")
                self._add_norm(role, first.input_norm, second.input_norm)
            if first.norm is not None and second.norm is not None:
                self._add_norm(Role(side, "norm before the score"), first.norm, second.norm)
        apart = [plan.positional for plan in plans]
        if self._same and apart[0] is not None and apart[1] is not None:
            self._add_weight("positions of queries", apart[0].query, apart[1].query)
            self._add_weight("positions of keys", apart[0].key, apart[1].key)
        self.pairs: list[WeightPair] = []
        self._fill_pairs()

    def _fill_pairs(self) -> None:
        """Make the pairs of all tensors, weights with their biases and parts."""
        pairs = {name: self._pair(name, tensor) for name, tensor in self.tensors.items()}
        for name, pair in pairs.items():
            biases = [side.bias.name for side in self.tensors[name].sides if side.bias]
            bias = pairs.get(biases[0]) if biases and pair.expected.ndim == 2 else None
            if bias is not None and len(bias.expected) == len(pair.expected):
                pair = replace(pair, bias=bias)
            if pair.role.fused and pair.role.part == "weight" and not pair.right:
                pair = replace(pair, parts=tuple(self._parts(pair)))
            self.pairs.append(replace(pair, block=self.pairs))

    def clear(self) -> None:
        """Forget the pairs, each of which holds the list of all, and so their weights."""
        self.pairs.clear()
        self.tensors.clear()

    def actual_arrays(self) -> dict[str, np.ndarray]:
        """The candidate's tensors as they are stored, by name; zeros for absent biases."""
        return {name: tensor.actual for name, tensor in self.tensors.items()}

    def expected_arrays(self) -> dict[str, np.ndarray]:
        """The same tensors as they should be."""
        return {name: tensor.expected for name, tensor in self.tensors.items()}

    def steps(self, finding: Finding) -> tuple[Step, ...]:
        """Return the steps that undo a finding, on tensors as they are stored."""
        steps: list[Step] = []
        if finding.swapped:
            steps.append(Exchange(tuple(finding.swapped), tuple(finding.swapped.values())))
        steps += finding.recuts
        for name, edit in finding.edits.items():
            steps.append(Change((name,), self._layout(name).as_stored(edit)))
        return tuple(steps)

    def mismatch(self, finding: Finding) -> Mismatch:
        """Return a finding as a cause, of tensors by their names and as they are stored."""
        pair = finding.pair
        roles = {pair.name: str(pair.role) for pair in pair.block if pair.name in finding.tensors}
        facts: dict[str, Any] = {"tensor": pair.name, "tensors": roles, **finding.facts}
        if pair.gain is not None:
            facts["gain"] = pair.gain.name
        return Mismatch(
            finding.kind,
            finding.description.replace("{}", pair.title),
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

    def _read(self, which: int, part: Part | str) -> np.ndarray:
        return self._checkpoints[which].read([Part(part) if isinstance(part, str) else part])[0]

    def _tensor(
        self, name: str, source: str, role: Role, side: Side | None = None, known: bool = False
    ) -> StoredTensor:
        """Return a tensor of the candidate, with one more role.

        What it should be is ``known`` to be its source; otherwise it is at first as it is.
        """
        if name not in self.tensors:
            actual, expected = self._arrays(name, source, known)
            self.tensors[name] = StoredTensor(actual, expected, source)
        tensor = self.tensors[name]
        tensor.roles.append(role)
        if side is not None:
            tensor.sides.append(side)
        return tensor

    def _arrays(self, name: str, source: str, known: bool) -> tuple[np.ndarray, np.ndarray]:
        """Read a tensor and, if it is known, its source; equal ones are one array."""
        if not known:
            actual = self._read(1, name)
            return actual, actual.copy()
        if equal_parts(self._checkpoints, (Part(source), Part(name))):
            actual = self._read(1, name)
            return actual, actual
        many = self._checkpoints[1].info(name).nbytes > MANY
        actual, expected = side_by_side(self._read, (1, 0), (name, source), many=many)
        return actual, expected

    def _add_weight(self, side: str, first: Side, second: Side) -> bool:
        """Add the weights of a side; return whether what it should be is known."""
        one, other = first.projection, second.projection
        if self._same:
            for (part, a), b in zip(one.roles.items(), other.roles.values(), strict=True):
                if part in OF_LATENTS:
                    self._tensor(b.name, a.name, Role(side, OF_LATENTS[part]), known=True)
                else:
                    self._tensor(b.name, a.name, Role(side), second, known=True)
            return True
        fits = second.heads % first.heads == 0 and second.head_width == first.head_width
        if not (isinstance(one, Projection) and isinstance(other, Projection) and fits):
            return False
        weight = self._ordered(side, one.take(self._read(0, one.part)), first, second)
        other.put(self._tensor(other.tensor, one.tensor, Role(side), second).expected, weight)
        return True

    def _ordered(self, side: str, weight: np.ndarray, first: Side, second: Side) -> np.ndarray:
        """Rows (heads, R, ...) in the rotary order and with the heads of the candidate."""
        turns = [plan.rotary for plan in self._plans]
        if side in SCORED and turns[0] and turns[1] and turns[0].order != turns[1].order:
            pairs = len(turns[1].frequencies)
            rows = to_order(turns[1].order, first.heads, first.head_width, 2 * pairs)
            weight = weight.reshape(-1, *weight.shape[2:])[rows].reshape(weight.shape)
        return np.asarray(weight.repeat(second.heads // first.heads, axis=0))

    def _add_bias(self, side: str, first: Side, second: Side) -> None:
        """Add a side's bias, also where only one of the two has it."""
        projection = second.projection
        if not isinstance(projection, Projection):
            return
        bias = np.zeros((first.heads, first.head_width), np.float32)
        if first.bias is not None:
            bias = self._read(0, first.bias).reshape(bias.shape)
        part = second.bias
        if part is None:
            if not bias.any():
                return
            part = projection.bias_part(bias_of(second.tensor))
            shape = self._checkpoints[1].info(second.tensor).shape
            zeros = np.zeros(shape[-1] if projection.transposed else shape[0], np.float32)
            self.tensors.setdefault(part.name, StoredTensor(zeros, zeros.copy(), first.tensor))
            self.added[part.name] = zeros
            second = replace(second, bias=part)
            self.tensors[second.tensor].sides[-1] = second
            changed: dict[str, Any] = {side: second}
            self.plan = replace(self.plan, **changed)
        source = first.bias.name if first.bias is not None else first.tensor
        tensor = self._tensor(part.name, source, Role(side, "bias"), second)
        ordered = self._ordered(side, bias, first, second).reshape(-1)
        put_outputs(tensor.expected.reshape(-1), part.rows, ordered)

    def _add_norm(self, role: Role, first: Norm, second: Norm) -> None:
        """Add gains and biases of a norm, up to what is added to them when they are read."""
        gains = [*zip(first.gain, second.gain, strict=False)]
        for number, (a, b) in enumerate((*gains, *zip(first.bias, second.bias, strict=False))):
            value = self._read(0, a).reshape(-1)
            offset = 0.0 if number >= len(gains) else first.offset - second.offset
            tensor = self._tensor(b.name, a.name, role)
            ends = b.row_ranges(tensor.expected.shape)
            if tensor.expected.ndim == 1 and sum(end - start for start, end in ends) == len(value):
                put_outputs(tensor.expected, b.rows, value + value.dtype.type(offset))
            if role.part == "norm before the projection" and number == 0:
                fed = self.tensors[getattr(self.plan, role.side).tensor]
                both = tensor.expected + second.offset, tensor.actual + second.offset
                fed.gain = Gain(b.name, *both, second.offset)

    def _pair(self, name: str, tensor: StoredTensor) -> WeightPair:
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
        """The rows of each side of a fused weight, and those of none, such as gates."""
        tensor, free = self.tensors[pair.name], np.ones(len(pair.actual), bool)
        places: list[tuple[str, int, np.ndarray]] = []
        for role, side in zip(tensor.roles, tensor.sides, strict=True):
            piece = _piece(side, pair.name)
            if piece is None or piece.outputs is None:
                return
            rows = np.concatenate([np.arange(*ends) for ends in piece.outputs])
            if free[rows].all():  # what keys and values share comes once
                places.append((role.side, piece.heads, rows))
            free[rows] = False
        if free.any():
            heads, remainder = divmod(int(free.sum()), pair.sizes.width)
            places.append(("rest", 0 if remainder else heads, np.flatnonzero(free)))
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

    def _adapter(self, name: str, source: str) -> Adapter | None:
        """The effect of an adapter of one of the two on a tensor."""
        for checkpoint, own in zip(self._checkpoints, (source, name), strict=True):
            if not (self._same and isinstance(checkpoint, AdaptedCheckpoint)):
                continue
            if (scale := checkpoint.scale_of(own)) is not None:
                start = self._flat(name, checkpoint.base.read([Part(own)])[0])
                in_reference = checkpoint is self._checkpoints[0]
                rank = checkpoint.rank_of(own)
                update = checkpoint.decomposed(own)
                return Adapter(start, scale, rank, in_reference, checkpoint.stabilized, update)
        return None

    def _layout(self, name: str) -> Layout:
        """The shape of a tensor, and how it is turned into a matrix as in ``nn.Linear``."""
        tensor = self.tensors[name]
        shape = tensor.actual.shape
        if tensor.roles[0].is_bias:
            return Layout(shape)
        side = tensor.sides[0].projection if tensor.sides else None
        if not isinstance(side, Projection) or side.tensor != name or len(shape) < 2:
            return Layout(shape)
        return Layout(shape, side.transposed, tensor.roles[0].side == "output")

    def _flat(self, name: str, value: np.ndarray) -> np.ndarray:
        """A tensor as ``nn.Linear`` stores it, (n, D); vectors as they are."""
        if self.tensors[name].roles[0].is_bias:
            return value.reshape(-1)
        layout = self._layout(name)
        value = value.swapaxes(-1, -2) if layout.turned_first else value
        value = value.reshape(-1, value.shape[-1]) if value.ndim > 2 else value
        return value.T if layout.turned_last else value

    def elsewhere(
        self, pair: WeightPair, neighbors: Sequence[AttentionPlan]
    ) -> tuple[Kind, str] | None:
        """Return the other block whose tensor of the same role one is, as kind and words."""
        own, tensor = self._plans[0], self.tensors[pair.name]
        role = tensor.roles[0]
        if not self._same or role.part != "weight" or role.side not in SIDES:
            return None
        for plan in neighbors:
            both = [getattr(each, role.side) for each in (own, plan)]
            parts = [side.projection.roles.values() if side else () for side in both]
            pairs = zip(*parts, strict=False)
            name = next((b.name for a, b in pairs if a.name == tensor.source), "")
            info = self._checkpoints[0].tensors().get(name)
            if info is None or info.shape != tensor.actual.shape:
                continue
            first = self._read(0, Part(name, ((0, 1),)))
            if not same_numbers(first, tensor.actual[:1]):
                continue
            if same_numbers(self._read(0, name), tensor.actual):
                if (plan.stack, plan.kind) == (own.stack, own.kind):
                    return Kind.LAYER, f"weights of layer {plan.layer}"
                return Kind.TENSOR, f"weights of the {plan.stack}'s {plan.kind}-attention"
        return None

    def folded(self) -> list[Finding]:
        """Orders of rows that are found where the norms before the weights are folded in."""
        pairs = []
        for pair in self.pairs:
            gain = pair.gain
            fits = gain is not None and len(gain.expected) == pair.actual.shape[-1]
            if gain is not None and fits and gain.actual.all():
                expected, actual = pair.expected * gain.expected, pair.actual * gain.actual
                pairs.append(replace(pair, expected=expected, actual=actual, block=[]))
        return [finding for finding in search(pairs) if finding.rows is not None]


def bias_of(weight: str) -> str:
    """Return the name of the bias of a weight."""
    return f"{weight.removesuffix('.weight')}.bias"


def added_biases(plans: Pair) -> Iterator[str]:
    """Yield the names of the biases that the candidate's block lacks and the reference's has."""
    for name in SIDES:
        first, second = (getattr(plan, name) for plan in plans)
        if first is not None and second is not None and first.bias and not second.bias:
            yield bias_of(second.tensor)


def _piece(side: Side, name: str) -> Projection | None:
    """The part of a side that a tensor holds: of a product, one of its two factors."""
    one = side.projection
    halves = (one.outer, one.inner) if isinstance(one, Composed) else (one,)
    return next((h for h in halves if isinstance(h, Projection) and h.tensor == name), None)


def _same_layout(ours: AttentionPlan, theirs: AttentionPlan) -> bool:
    """Whether both blocks are stored the same way, whatever their tensors are called."""

    def layout(plan: AttentionPlan) -> list[object]:
        sides = [getattr(plan, side) for side in SIDES]
        shapes = [side and side.projection for side in sides]
        shapes = [
            replace(one, tensor="") if isinstance(one, Projection) else one and len(one.roles)
            for one in shapes
        ]
        return [*shapes, plan.rotary.order if plan.rotary is not None else ""]

    return layout(ours) == layout(theirs)
