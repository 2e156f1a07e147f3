"""The stored tensors of a candidate's block, and the values that the reference requires.

If both models store a block the same way, each tensor should be equal to the reference's tensor.
Otherwise queries, keys, values and outputs are converted from the reference's layout to the
candidate's layout: rotary pairs are put in the candidate's order, and key heads are repeated as in
the candidate.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wqk._machine import side_by_side
from wqk.checkpoints import Checkpoint, Part
from wqk.families import AttentionPlan, Norm, Projection, Side
from wqk.families.layouts import put_outputs
from wqk.sameness.blocks import MANY
from wqk.sameness.circuits import PlanPair
from wqk.sameness.permutations import to_order
from wqk.sameness.stored_tensors import equal_parts
from wqk.sameness.tensor_names import bias_of
from wqk.sameness.weight_pairs import SCORED, Gain, Role, TensorUse

SIDES = ("query", "key", "value", "output")
# Tensors of latent attention that are no weights, by their roles in a projection.
USES_OF_LATENTS = {"inner_norm": TensorUse.LATENT_NORM, "inner_bias": TensorUse.LATENT_BIAS}


@dataclass(eq=False)
class ExpectedTensor:
    """A stored tensor of the candidate: the actual and the expected numbers.

    Attributes
    ----------
    actual, expected
        Both arrays are in the candidate's layout, and are one array if known to be equal.
    source
        The corresponding tensor of the reference, or a weight that is stored the same way.
    roles
        Roles of the tensor in the block: several for a fused weight.
    sides
        The sides that the tensor contains, in the order of the roles; none for norms.
    gain
        The gain of the norm before the tensor.
    """

    actual: np.ndarray
    expected: np.ndarray
    source: str
    roles: list[Role] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    gain: Gain | None = None


class StoredBlock:
    """The stored tensors of the candidate's block, actual and expected.

    Attributes
    ----------
    checkpoints, plans
        The reference and the candidate, and the plans of their blocks.
    tensors
        The tensors by the candidate's names. If the layouts differ too much, the expected value of
        a tensor is unknown, and the tensor is left out.
    plan
        The candidate's plan, with the biases that only the reference has.
    added
        The biases that only the reference has, as zeros.
    has_same_layout
        True if both models store the block the same way.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], plans: PlanPair) -> None:
        self.checkpoints = checkpoints
        self.plans = plans
        self.plan = plans[1]
        self.has_same_layout = _layout_of(plans[0]) == _layout_of(plans[1])
        self.tensors: dict[str, ExpectedTensor] = {}
        self.added: dict[str, np.ndarray] = {}
        for side in SIDES:
            self._add_side(side)
        self._add_positions()

    def read(self, model: int, part: Part | str) -> np.ndarray:
        """Read a part, or a whole tensor, of the reference (``model`` 0) or the candidate (1)."""
        if isinstance(part, str):
            part = Part(part)
        (value,) = self.checkpoints[model].read([part])
        return value

    def _add_side(self, name: str) -> None:
        """Add the weights, the bias and the norms of a side."""
        reference, candidate = (getattr(plan, name) for plan in self.plans)
        if reference is None or candidate is None:
            return
        if not self._add_weight(name, reference, candidate):
            return
        self._add_bias(name, reference, candidate)
        if reference.input_norm is not None and candidate.input_norm is not None:
            role = Role(name, TensorUse.INPUT_NORM)
            self._add_norm(role, reference.input_norm, candidate.input_norm)
        if reference.norm is not None and candidate.norm is not None:
            role = Role(name, TensorUse.SCORE_NORM)
            self._add_norm(role, reference.norm, candidate.norm)

    def _add_weight(self, name: str, reference: Side, candidate: Side) -> bool:
        """Add the weights of a side; return whether their expected values are known.

        If the layouts differ, the values are unknown for a weight that is a product of several
        tensors, and if the candidate's heads are not the reference's heads, each repeated equally
        often.
        """
        if self.has_same_layout:
            self._add_stored_weights(name, reference, candidate)
            return True
        source, target = reference.projection, candidate.projection
        if not isinstance(source, Projection) or not isinstance(target, Projection):
            return False
        if candidate.heads % reference.heads or candidate.head_width != reference.head_width:
            return False
        weight = source.take(self.read(0, source.part))
        ordered = self._ordered(name, weight, reference, candidate)
        tensor = self._tensor(target.tensor, source.tensor, Role(name), candidate)
        target.put(tensor.expected, ordered)
        return True

    def _add_stored_weights(self, name: str, reference: Side, candidate: Side) -> None:
        """Add the tensors of a side that both models store in the same way."""
        sources = reference.projection.roles
        targets = candidate.projection.roles.values()
        for (projection_role, source), target in zip(sources.items(), targets, strict=True):
            use = USES_OF_LATENTS.get(projection_role)
            if use is not None:
                role = Role(name, use)
                self._tensor(target.name, source.name, role, copies_source=True)
            else:
                self._tensor(target.name, source.name, Role(name), candidate, copies_source=True)

    def _add_positions(self) -> None:
        """Add the weights of position scores, if both models store them in the same way."""
        reference, candidate = (plan.positional for plan in self.plans)
        if self.has_same_layout and reference is not None and candidate is not None:
            self._add_weight("positions of queries", reference.query, candidate.query)
            self._add_weight("positions of keys", reference.key, candidate.key)

    def _add_bias(self, name: str, reference: Side, candidate: Side) -> None:
        """Add the bias of a side if either model has this bias."""
        if not isinstance(candidate.projection, Projection):
            return
        bias = np.zeros((reference.heads, reference.head_width), np.float32)
        source = reference.tensor
        if reference.bias is not None:
            bias = self.read(0, reference.bias).reshape(bias.shape)
            source = reference.bias.name
        if candidate.bias is None:
            if not bias.any():
                return
            candidate = self._with_zero_bias(name, reference, candidate)
        part = candidate.bias
        assert part is not None
        tensor = self._tensor(part.name, source, Role(name, TensorUse.BIAS), candidate)
        ordered = self._ordered(name, bias, reference, candidate).reshape(-1)
        put_outputs(tensor.expected.reshape(-1), part.rows, ordered)

    def _with_zero_bias(self, name: str, reference: Side, candidate: Side) -> Side:
        """Give the candidate's side a bias of zeros, and return the side with the bias."""
        projection = candidate.projection
        assert isinstance(projection, Projection)
        part = projection.bias_part(bias_of(candidate.tensor))
        shape = self.checkpoints[1].info(candidate.tensor).shape
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
            if role.use is TensorUse.INPUT_NORM and number == 0:
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
        value = self.read(0, source).reshape(-1)
        tensor = self._tensor(target.name, source.name, role)
        ranges = target.row_ranges(tensor.expected.shape)
        count = sum(end - start for start, end in ranges)
        if tensor.expected.ndim == 1 and count == len(value):
            put_outputs(tensor.expected, target.rows, value + value.dtype.type(offset))
        return tensor

    def _ordered(
        self, name: str, weight: np.ndarray, reference: Side, candidate: Side
    ) -> np.ndarray:
        """Return rows (heads, R, …) in the candidate's rotary order, repeated for all its heads.

        Parameters
        ----------
        name
            The side.
        weight
            The rows of the reference: a weight (heads, R, D), or a bias (heads, R).
        reference, candidate
            The side in both models.
        """
        expected, actual = (plan.rotary for plan in self.plans)
        if name in SCORED and expected and actual and expected.order != actual.order:
            rotated = 2 * len(actual.frequencies)
            rows = to_order(actual.order, reference.heads, reference.head_width, rotated)
            flat = weight.reshape(-1, *weight.shape[2:])
            weight = flat[rows].reshape(weight.shape)
        return np.asarray(weight.repeat(candidate.heads // reference.heads, axis=0))

    def _tensor(
        self,
        name: str,
        source: str,
        role: Role,
        side: Side | None = None,
        *,
        copies_source: bool = False,
    ) -> ExpectedTensor:
        """Return a tensor of the candidate, with an additional role.

        Parameters
        ----------
        name, source
            Names of the tensor in the candidate, and of the corresponding tensor in the reference.
        role, side
            The additional role, and the side that the tensor contains in this role.
        copies_source
            Whether the source is the expected value. Otherwise the expected value begins as a copy
            of the actual value, and the caller replaces the part of this role.
        """
        if name not in self.tensors:
            actual, expected = self._arrays(name, source, copies_source)
            self.tensors[name] = ExpectedTensor(actual, expected, source)
        tensor = self.tensors[name]
        tensor.roles.append(role)
        if side is not None:
            tensor.sides.append(side)
        return tensor

    def _arrays(self, name: str, source: str, copies_source: bool) -> tuple[np.ndarray, np.ndarray]:
        """Read the actual and the expected value of a tensor; equal values are one array."""
        if not copies_source:
            actual = self.read(1, name)
            return actual, actual.copy()
        if equal_parts(self.checkpoints, (Part(source), Part(name))):
            actual = self.read(1, name)
            return actual, actual
        is_large = self.checkpoints[1].info(name).nbytes > MANY
        actual, expected = side_by_side(self.read, (1, 0), (name, source), many=is_large)
        return actual, expected


def added_biases(plans: PlanPair) -> Iterator[str]:
    """Yield the candidate's names for the biases that only the reference's block has."""
    for name in SIDES:
        reference, candidate = (getattr(plan, name) for plan in plans)
        if reference is None or candidate is None:
            continue
        if reference.bias and not candidate.bias:
            yield bias_of(candidate.tensor)


def _layout_of(plan: AttentionPlan) -> list[object]:
    """Return a description of the storage of a block, without the names of its tensors."""
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
