"""What a block of the second checkpoint should hold: the first one's weights in its layout.

Where both store a block the same way, each tensor should be the other's. Otherwise queries, keys,
values and outputs are taken from one layout and put into the other, rotary pairs in its order, key
heads as often as it has them.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import operator
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
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import Sizes, to_order
from wqk.sameness.rewrites import search
from wqk.sameness.units import Adapter, Finding, Gain, Unit, same_numbers
from wqk.sameness.weights import Pair

ROLES = ("query", "key", "value", "output")


@dataclass(eq=False)
class _Tensor:
    """A tensor of the second checkpoint: what it holds, and what it should, as far as known."""

    stored: np.ndarray
    wanted: np.ndarray
    source: str  # what the first one calls it, or a weight that is stored like its source
    roles: list[str] = field(default_factory=list)
    sides: list[Side] = field(default_factory=list)
    gain: Gain | None = None  # of the norm before it


class Expected:
    """The weights of a block as they are stored, and as they should be.

    Attributes
    ----------
    units
        Each weight as in ``nn.Linear``, each vector.
    plan
        The second block's, with the biases that only the first one has.
    added
        These, as zeros.
    """

    def __init__(self, checkpoints: Sequence[Checkpoint], pair: Pair) -> None:
        self._checkpoints, self._plans, self.plan = checkpoints, pair, pair[1]
        self._same = _same_layout(*pair)
        self._tensors: dict[str, _Tensor] = {}
        self.added: dict[str, np.ndarray] = {}
        for role in ROLES:
            first, second = (getattr(plan, role) for plan in pair)
            if first is not None and second is not None and self._weight(role, first, second):
                self._bias(role, first, second)
                for what in ("input_norm", "norm"):
                    norms = [getattr(side, what) for side in (first, second)]
                    if None not in norms:
                        self._norm(role, "score" if what == "norm" else "projection", *norms)
        apart = [plan.positional for plan in pair]
        if self._same and apart[0] is not None and apart[1] is not None:
            self._weight("positions of queries", apart[0].query, apart[1].query)
            self._weight("positions of keys", apart[0].key, apart[1].key)
        self.units: list[Unit] = []
        units = {name: self._unit(name, one) for name, one in self._tensors.items()}
        for name, unit in units.items():
            named = [side.bias.name for side in self._tensors[name].sides if side.bias]
            bias = units.get(named[0]) if named and unit.wanted.ndim == 2 else None
            if bias is not None and len(bias.wanted) == len(unit.wanted):
                unit = replace(unit, bias=bias)
            if unit.role == "fused" and not unit.right:
                unit = replace(unit, parts=tuple(self._parts(unit)))
            self.units.append(replace(unit, block=self.units))

    def _read(self, which: int, part: Part | str) -> np.ndarray:
        return self._checkpoints[which].read([Part(part) if isinstance(part, str) else part])[0]

    def _target(
        self, name: str, source: str, role: str, side: Side | None = None, known: bool = False
    ) -> _Tensor:
        """A tensor of the second checkpoint, with one more role.

        What it should be is ``known`` to be its source; otherwise it is at first as it is.
        """
        if name not in self._tensors:
            is_equal = known and equal_parts(self._checkpoints, (Part(source), Part(name)))
            places = [(1, 0), (name, source)] if known and not is_equal else [(1,), (name,)]
            many = self._checkpoints[1].info(name).nbytes > MANY
            values = side_by_side(self._read, *places, many=many)
            wanted = values[-1] if known else values[0].copy()
            self._tensors[name] = _Tensor(values[0], wanted, source)
        found = self._tensors[name]
        found.roles.append(role)
        found.sides += [side] if side is not None else []
        return found

    def _weight(self, role: str, first: Side, second: Side) -> bool:
        """Whether what a side should be is known."""
        one, other = first.projection, second.projection
        if self._same:
            for (what, a), b in zip(one.roles.items(), other.roles.values(), strict=True):
                is_norm = what == "inner_norm"
                title = f"norm of the latent of the {role}" if is_norm else role
                self._target(b.name, a.name, title, None if is_norm else second, known=True)
            return True
        fits = second.heads % first.heads == 0 and second.head_width == first.head_width
        if not (isinstance(one, Projection) and isinstance(other, Projection) and fits):
            return False
        weight = self._ordered(role, one.take(self._read(0, one.part)), first, second)
        other.put(self._target(other.tensor, one.tensor, role, second).wanted, weight)
        return True

    def _ordered(self, role: str, weight: np.ndarray, first: Side, second: Side) -> np.ndarray:
        """Rows (heads, R, ...) in the rotary order and with the heads of the second block."""
        turns = [plan.rotary for plan in self._plans]
        if role in ("query", "key") and turns[0] and turns[1] and turns[0].order != turns[1].order:
            pairs = len(turns[1].frequencies)
            rows = to_order(turns[1].order, first.heads, first.head_width, 2 * pairs)
            weight = weight.reshape(-1, *weight.shape[2:])[rows].reshape(weight.shape)
        return np.asarray(weight.repeat(second.heads // first.heads, axis=0))

    def _bias(self, role: str, first: Side, second: Side) -> None:
        """A side's bias, also where only one of the two has it."""
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
            part = projection.bias_part(f"{second.tensor.removesuffix('.weight')}.bias")
            shape = self._checkpoints[1].info(second.tensor).shape
            none = np.zeros(shape[-1] if projection.transposed else shape[0], np.float32)
            self._tensors.setdefault(part.name, _Tensor(none, none.copy(), first.tensor))
            self.added[part.name] = none
            second = replace(second, bias=part)
            self._tensors[second.tensor].sides[-1] = second
            changed: dict[str, Any] = {role: second}
            self.plan = replace(self.plan, **changed)
        source = first.bias.name if first.bias is not None else first.tensor
        target = self._target(part.name, source, f"bias of the {role}", second)
        ordered = self._ordered(role, bias, first, second).reshape(-1)
        put_outputs(target.wanted.reshape(-1), part.rows, ordered)

    def _norm(self, role: str, before: str, first: Norm, second: Norm) -> None:
        """Gains and biases of a norm, up to what is added to them when they are read."""
        gains = [*zip(first.gain, second.gain, strict=False)]
        for number, (a, b) in enumerate((*gains, *zip(first.bias, second.bias, strict=False))):
            value = self._read(0, a).reshape(-1)
            offset = 0.0 if number >= len(gains) else first.offset - second.offset
            target = self._target(b.name, a.name, f"norm before the {before} of the {role}")
            ends = b.row_ranges(target.wanted.shape)
            if target.wanted.ndim == 1 and sum(stop - start for start, stop in ends) == len(value):
                put_outputs(target.wanted, b.rows, value + value.dtype.type(offset))
            if before == "projection" and number == 0:
                tensor = self._tensors[getattr(self.plan, role).tensor]
                both = target.wanted + second.offset, target.stored + second.offset
                tensor.gain = Gain(b.name, *both, second.offset)

    def _unit(self, name: str, one: _Tensor) -> Unit:
        query, key = self.plan.query, self.plan.key
        rotary = self.plan.rotary or self.plan.axial
        turned = 2 * len(rotary.frequencies) if rotary is not None else query.head_width
        order = rotary.order if rotary is not None else ""
        role, heads, repeated = one.roles[0], 0, 1
        pieces = [
            _piece(side, side.tensor if role.startswith("bias") else name) for side in one.sides
        ]
        own = pieces[0] if len(pieces) == 1 else None
        width = own.head_width if own is not None else query.head_width
        sizes = Sizes(query.heads, key.heads, width, min(turned, width), order)
        stored = self._flat(name, one.stored)
        wanted = stored if one.wanted is one.stored else self._flat(name, one.wanted)
        sides = tuple(s for s in ("query", "key") if any(r.endswith(s) for r in one.roles))
        if role.startswith("norm"):
            role = role.rpartition(" of the ")[0]
        elif own is not None and len(stored) == own.heads * own.head_width and role != "output":
            first = getattr(self._plans[0], role.removeprefix("bias of the "), one.sides[0])
            heads, repeated = own.heads, one.sides[0].heads // first.heads
        elif role != "output":
            role = "bias of the fused weight" if role.startswith("bias") else "fused"
            sides = ()
        info = self._checkpoints[1].tensors().get(name)
        rounded = rounding_in(self._checkpoints[0].info(one.source), wanted)
        return Unit(
            name,
            role,
            wanted,
            stored,
            sizes,
            heads,
            max(rounded, rounding_in(info, stored) if info else 0.0),
            gain=one.gain,
            flipped=operator.xor(*self._axes(name, one.stored.shape)),
            grid=info.grid if info else None,
            regrouped=self._checkpoints[1].regrouping,
            repeated=max(1, repeated),
            adapter=self._adapter(name, one.source),
            sides=sides,
        )

    def _parts(self, unit: Unit) -> Iterator[Unit]:
        """The rows of each side of a fused weight, and those of none, such as gates."""
        tensor, free, bias = self._tensors[unit.name], np.ones(len(unit.stored), bool), unit.bias
        places: list[tuple[str, int, np.ndarray]] = []
        for role, side in zip(tensor.roles, tensor.sides, strict=True):
            one = _piece(side, unit.name)
            if one is None or one.outputs is None:
                return
            rows = np.concatenate([np.arange(*ends) for ends in one.outputs])
            if free[rows].all():  # what keys and values share comes once
                places.append((role, one.heads, rows))
            free[rows] = False
        if free.any():
            heads, more = divmod(int(free.sum()), unit.sizes.width)
            places.append(("rest", 0 if more else heads, np.flatnonzero(free)))
        for role, heads, rows in places:
            beside = bias and replace(bias, wanted=bias.wanted[rows], stored=bias.stored[rows])
            sizes = replace(unit.sizes, width=len(rows) // (heads or 1))
            yield replace(
                unit,
                role=role,
                wanted=unit.wanted[rows],
                stored=unit.stored[rows],
                heads=heads,
                bias=beside,
                rows=rows,
                sides=(role,) if role in ROLES[:2] else (),
                sizes=sizes,
            )

    def _adapter(self, name: str, source: str) -> Adapter | None:
        """What the adapter of one of the two does to a tensor."""
        for checkpoint, own in zip(self._checkpoints, (source, name), strict=True):
            if not (self._same and isinstance(checkpoint, AdaptedCheckpoint)):
                continue
            if (scale := checkpoint.scale_of(own)) is not None:
                start = self._flat(name, checkpoint.base.read([Part(own)])[0])
                return Adapter(start, scale, checkpoint is self._checkpoints[0])
        return None

    def _axes(self, name: str, shape: tuple[int, ...]) -> tuple[bool, bool]:
        """Whether a weight's last axes are to be exchanged, and then those of the matrix."""
        sides, roles = self._tensors[name].sides, self._tensors[name].roles
        one = sides[0].projection if sides else None
        if not isinstance(one, Projection) or one.tensor != name or len(shape) < 2:
            return False, False
        return one.transposed, roles[0] == "output"

    def _flat(self, name: str, value: np.ndarray) -> np.ndarray:
        """A tensor as ``nn.Linear`` stores it, (n, D); vectors as they are."""
        if self._tensors[name].roles[0].startswith("bias"):
            return value.reshape(-1)
        first, last = self._axes(name, value.shape)
        value = value.swapaxes(-1, -2) if first else value
        value = value.reshape(-1, value.shape[-1]) if value.ndim > 2 else value
        return value.T if last else value

    def stored(self, name: str, value: np.ndarray) -> np.ndarray:
        """The inverse: a tensor as the second checkpoint stores it."""
        shape = self._tensors[name].stored.shape
        first, last = self._axes(name, shape)
        value = value.T if last else value
        if first:
            return value.reshape(*shape[:-2], shape[-1], shape[-2]).swapaxes(-1, -2)
        return value.reshape(shape)

    def elsewhere(self, unit: Unit, neighbors: Sequence[AttentionPlan]) -> tuple[Kind, str] | None:
        """Which other block's tensor of the same role one is, and whether of another layer."""
        own, raw = self._plans[0], self._tensors[unit.name].stored
        role, source = self._tensors[unit.name].roles[0], self._tensors[unit.name].source
        for plan in neighbors if self._same and role in ROLES else ():
            of = [getattr(one, role) for one in (own, plan)]
            parts = [side.projection.roles.values() if side else () for side in of]
            name = next((b.name for a, b in zip(*parts, strict=False) if a.name == source), "")
            info = self._checkpoints[0].tensors().get(name)
            if info is None or info.shape != raw.shape:
                continue
            first = self._read(0, Part(name, ((0, 1),)))
            if same_numbers(first, raw[:1]) and same_numbers(self._read(0, name), raw):
                if (plan.stack, plan.kind) == (own.stack, own.kind):
                    return Kind.LAYER, f"weights of layer {plan.layer}"
                return Kind.TENSOR, f"weights of the {plan.stack}'s {plan.kind}-attention"
        return None

    def folded(self) -> list[Finding]:
        """What is found where the norms before the weights are folded in, on both sides."""
        gains: dict[str, Gain] = {}
        units = []
        for unit in self.units:
            own = unit.gain
            if own is not None and len(own.wanted) == unit.stored.shape[-1] and own.stored.all():
                gains[unit.name] = own
                wanted, stored = unit.wanted * own.wanted, unit.stored * own.stored
                units.append(replace(unit, wanted=wanted, stored=stored, block=[]))
        found = []
        for one in search(units):
            raw = {n: v / gains[n].stored if n in gains else v for n, v in one.repaired.items()}
            found += [replace(one, repaired=raw)] if one.rows is not None else []
        return found


def _piece(side: Side, name: str) -> Projection | None:
    """The part of a side that a tensor holds: of a product, one of its two factors."""
    one = side.projection
    halves = (one.outer, one.inner) if isinstance(one, Composed) else (one,)
    return next((h for h in halves if isinstance(h, Projection) and h.tensor == name), None)


def _same_layout(ours: AttentionPlan, theirs: AttentionPlan) -> bool:
    """Whether both blocks are stored the same way, whatever their tensors are called."""

    def layout(plan: AttentionPlan) -> list[object]:
        sides = [getattr(plan, role) for role in ROLES]
        shapes = [side and side.projection for side in sides]
        shapes = [
            replace(one, tensor="") if isinstance(one, Projection) else type(one) for one in shapes
        ]
        return [*shapes, plan.rotary.order if plan.rotary is not None else ""]

    return layout(ours) == layout(theirs)
