"""A checkpoint seen otherwise: the first as the second has it, so that the two can be compared.

Its residual stream may be in other coordinates (QuaRot's, SpinQuant's, or renumbered ones): one
orthogonal matrix Q turns whatever the stream holds, x becomes x Q. Embeddings and the outputs of
every module turn with it, readers W become W diag(g) Q, where g is the gain of the norm before
them. Q is found from vectors that turn without a gain, rows of the embeddings and columns of what
writes (orthogonal Procrustes), and everything else has to agree with it.

Experts and neurons may lie in another order, which changes nothing where all that belongs to them
moves: experts are chosen by the rows of a router, neurons lie between rows of one weight and
columns of the next. Their order is read from one tensor, and the first model is given it.

Axes: n vectors, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from wqk._console import counted
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.checkpoint import Around
from wqk.comparing.answer import few
from wqk.comparing.contents import FLOATS
from wqk.comparing.outside import FEED_FORWARD, OTHER, form_parts, layer_of, roles
from wqk.comparing.tolerances import ALIKE, ROUNDING, SAME, TURNED
from wqk.comparing.units import permutation, same_numbers
from wqk.errors import CheckpointError
from wqk.families import Composed, Norm, Projection
from wqk.families.naming import NAMES, embedding_table
from wqk.model import Model
from wqk.model import open as open_model

# A tensor of experts: of one, which has a number, or of all, along its first axis.
EXPERTS = re.compile(r"^(?P<module>(?:.*?\.)?)(?:experts|\w+_exps)\.(?:(?P<number>\d+)\.)?")
# What chooses among them, below the same module: weights, biases of the choice.
ROUTER = re.compile(r"(?:^|\.)(?:gate|router|wg|ffn_gate_inp|exp_probs_b)(?:\.|$)")
# How many groups experts are chosen by, and the bias of such a choice.
GROUPS = re.compile(r"(?:^|[._])(?:n_groups?|num_expert_groups?|expert_group_count)$")
CORRECTED = re.compile(r"correction_bias|exp_probs_b")
# How many rows tell whether experts lie in an order.
SAMPLED = 8


class View(Around):
    """A checkpoint of which some tensors are seen otherwise; others have its bytes."""

    changed: Container[str] = ()

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """The base's bytes of what is as it was."""
        return None if part.name in self.changed else self.inner.raw(part, room)


class Overlay(View):
    """A checkpoint in which some tensors have other values, or with another configuration."""

    def __init__(
        self, base: Checkpoint, values: Mapping[str, np.ndarray],
        config: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(base, config)
        self._values = self.changed = values

    def value(self, name: str) -> np.ndarray | None:
        """The other values."""
        return self._values.get(name)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The base's, and those that it lacks."""
        found = {n: TensorInfo("F32", v.shape, 4 * v.size) for n, v in self._values.items()}
        return found | dict(self.inner.tensors())


class Renumbered(View):
    """A checkpoint with tensors along an axis in another order, or in the place of others.

    ``orders`` has an axis and the indices along it for some names, ``places`` the tensor that
    stands for another.
    """

    def __init__(
        self, base: Checkpoint, orders: Mapping[str, tuple[int, np.ndarray]],
        places: Mapping[str, str],
    ) -> None:  # fmt: skip
        super().__init__(base)
        self._orders, self._places = orders, places
        self.changed = {*orders, *places}

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The rows and columns that stand for those wanted, and no others."""
        found = []
        for name, rows in parts:
            axis, order = self._orders.get(name, (1, None))
            if order is not None and axis == 0:
                wanted = [order[slice(*ends)] for ends in Part(name, rows).row_ranges(order.shape)]
                rows = tuple((int(row), int(row) + 1) for row in np.concatenate(wanted))
            (value,) = self.inner.read([Part(self._places.get(name, name), rows)])
            found.append(value if order is None or axis == 0 else np.take(value, order, axis))
        return found


# -- the residual stream -----------------------------------------------------------------------


class Turned(View):
    """The first checkpoint with its stream turned, its gains moved to where the second has them.

    Without a rotation, only the gains before what is beside the forms, which see none.

    Attributes
    ----------
    straight
        What should turn with the stream, and does not.
    """

    def __init__(
        self, models: Sequence[Model], names: Mapping[str, str],
        rotation: np.ndarray | None = None, table: str = "",
    ) -> None:  # fmt: skip
        self._first, self._second = (model.checkpoint for model in models)
        super().__init__(self._first)
        self._rotation, self._names, self.straight = rotation, dict(names), list[str]()
        tensors, shared = self._first.tensors(), {*names.values()}
        # A head that was tied before gains were folded into it.
        others = self._second.tensors().items() if table else ()
        self._copies = {n: table for n, i in others
                        if n not in shared and i.shape == tensors[table].shape}  # fmt: skip
        if self._copies:
            self.config = {**self.config, "tie_word_embeddings": False}
        self._names |= {name: name for name in self._copies}
        formed = {part.name for plan in models[0].plans for part in form_parts(plan)}
        read = [(one, norm) for one, norm, _ in _sides(models[0]) if one.tensor in names]
        self._offset = max((norm.offset for _, norm in read if norm), default=0.0)
        fed = dict(self._feeding({gain for _, norm in read if (gain := _gain(norm))}, formed))
        self.how: dict[str, tuple[int, str]] = {}
        if rotation is None:
            self._fold(fed)
        else:
            self.how = {one.tensor: (0 if one.transposed else 1, _gain(norm)) for one, norm in read}
            gains = {gain for _, gain in self.how.values()} | {*fed.values()}
            for name in [n for n in self._names if n not in self.how and n not in gains]:
                is_vector = len(self.tensors()[name].shape) < 2
                if not is_vector or (name.endswith("bias") and name not in formed):
                    self._try(name, fed.get(name, ""), len(rotation))
        given = {gain for _, gain in self.how.values()} - {""}
        self._given = given - (formed if rotation is None else set())
        self.changed = {*self.how, *self._copies, *self._given}

    def _feeding(
        self, gains: Collection[str], formed: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        """What reads the stream beside the forms, (..., D), and the gain of the norm before it.

        In a layer it is the only gain that no form has, or else the only one of all; outside of
        layers likewise. Of several, none is known.
        """
        tensors, by_layer = self.tensors(), dict[str, list[str]]()
        widths = {tensors[gain].shape for gain in gains}
        for name in self._names:
            if tensors[name].shape in widths and not name.endswith("bias"):
                by_layer.setdefault(layer_of(name), []).append(name)
        for name in self._names:
            own = by_layer.get(layer_of(name), [])
            own = [gain for gain in own if gain not in formed] or own
            reads = len(tensors[name].shape) > 1 and tensors[name].shape[-1:] in widths
            if reads and len(own) == 1 and name not in formed and not NAMES.fullmatch(name):
                yield name, own[0]

    def _fold(self, fed: Mapping[str, str]) -> None:
        """Note what has another gain before it, where that made all that reads it another."""
        tensors = self._first.tensors()
        for gain in sorted({*fed.values()}):
            readers = {n: len(tensors[n].shape) - 1 for n, own in fed.items() if own == gain}
            is_centered = f"{gain.removesuffix('weight')}bias" in tensors
            if is_centered or np.allclose(*self._around(gain), rtol=SAME):
                continue
            if all(self._fits(name, axis, gain) for name, axis in readers.items()):
                self.how |= {name: (axis, gain) for name, axis in readers.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The first's, and its head if the second stores it apart."""
        known = self._first.tensors()
        return {**known, **{name: known[table] for name, table in self._copies.items()}}

    def _there(self, name: str) -> np.ndarray:
        return self._second.read([Part(self._names[name])])[0]

    def value(self, name: str) -> np.ndarray | None:
        """Values as the second should have them."""
        if name in self._given:
            return self._there(name)
        if name not in self.how and name not in self._copies:
            return None
        value = self._first.read([Part(self._copies.get(name, name))])[0]
        return self._turn(value, *self.how[name]) if name in self.how else value

    def _try(self, name: str, gain: str, width: int) -> None:
        """Note on which axis a tensor turns, the gain before it being known; or that it does not.

        A square weight may also write what it has as rows.
        """
        shape = self.tensors()[name].shape
        axes = [axis for axis, size in enumerate(shape) if size == width]
        if not axes or shape != self._second.tensors()[self._names[name]].shape:
            return
        options = [(axis, gain if axis == len(shape) - 1 else "") for axis in axes]
        found = next((one for one in options if self._fits(name, *one)), None)
        self.straight += [] if found else [name]
        self.how[name] = found or options[-1]

    def _fits(self, name: str, axis: int, gain: str) -> bool:
        """Whether a tensor is the second's once it is turned; rows may lie in another order."""
        infos = self.tensors()[name], self._second.tensors()[self._names[name]]
        if infos[0].shape != infos[1].shape:
            return False
        value, wanted = self._first.read([Part(self._copies.get(name, name))])[0], self._there(name)
        width = value.shape[axis]
        ours, goal = (np.moveaxis(some, axis, -1).reshape(-1, width) for some in (value, wanted))
        probe, (before, after) = np.random.default_rng(0).standard_normal(width), self._around(gain)
        last = probe / after
        turned = ours @ (before * (last if self._rotation is None else self._rotation @ last))
        probed = goal @ probe
        pairs = (turned, probed), (np.sort(turned), np.sort(probed))
        apart = min(np.linalg.norm(one - two) for one, two in pairs)
        return bool(apart <= allowed(*infos) * np.linalg.norm(goal))

    def _around(self, gain: str) -> tuple[Any, Any]:
        """What multiplies values before they turn, and divides them after."""
        if not gain:
            return 1.0, 1.0
        there = self._there(gain) + self._offset
        return self._first.read([Part(gain)])[0] + self._offset, np.where(there == 0, 1, there)

    def _turn(self, value: np.ndarray, axis: int, gain: str) -> np.ndarray:
        """Values times the gain of the first, turned, without the gain of the second."""
        before, after = self._around(gain)
        turning = np.moveaxis(value, axis, -1) * before
        turning = (turning if self._rotation is None else turning @ self._rotation) / after
        return np.ascontiguousarray(np.moveaxis(turning, -1, axis), value.dtype)


def _sides(model: Model) -> Iterator[tuple[Projection, Norm | None, bool]]:
    """What of the forms reads the stream, with the norm before it; then what writes to it."""
    for plan in model.plans:
        for side in (plan.query, plan.key, plan.value, plan.output):
            one, reads = side and side.projection, side is not plan.output
            one = one.inner if isinstance(one, Composed) and reads else one
            if side is not None and isinstance(one, Projection):
                yield one, side.input_norm if reads else None, reads


def _gain(norm: Norm | None) -> str:
    return norm.gain[0].name if norm is not None and norm.gain else ""


def folded(models: Sequence[Model], names: Mapping[str, str]) -> tuple[Model | None, list[str]]:
    """The first model with its gains where the second has them, in blocks that begin with a norm.

    That of what attention does not read: feed-forward networks, outputs.
    """
    gains = {one.tensor: gain for one, norm, _ in _sides(models[0]) if (gain := _gain(norm))}
    if not gains or any(layer_of(name) != layer_of(gain) for name, gain in gains.items()):
        return None, []
    found = Turned(models, names)
    if not found.changed:
        return None, []
    moved = {gain for _, gain in found.how.values()}
    note = f"{counted(len(moved), 'norm')} with a gain that is folded into what it feeds in one: "
    return open_model(found, family=models[0].family_file), [f"{note}{min(moved)}, …"]


def allowed(*infos: TensorInfo) -> float:
    """How far a tensor may lie from the turned one, relative to it."""
    return TURNED + 2 * max(ROUNDING.get(info.dtype, ROUNDING["F8_E5M2"]) for info in infos)


def turned(models: Sequence[Model], names: Mapping[str, str]) -> tuple[Model | None, str]:
    """The first model turned as the second's stream is, and what does not turn, in words."""
    norms = [norm for model in models for _, norm, reads in _sides(model) if reads]
    gains = [gain for norm in norms if (gain := _gain(norm))]
    if not gains or any(norm is None or norm.kind != "rms" for norm in norms):
        return None, (
            "a norm is not known, or subtracts a mean: of all rotations, only those that leave the "
            "vector of ones commute with it, so that means have to be folded into weights first"
        )
    first, second = (model.checkpoint for model in models)
    (width,) = first.info(gains[0]).shape
    try:
        table = embedding_table(first, width)
    except CheckpointError as error:
        return None, str(error)
    if table not in names:
        return None, f"{second.name} has no {table}"
    products, count = np.zeros((width, width)), 0
    pairs = [next(vectors := _vectors(models, names, table, width))]
    for ours, theirs in chain(pairs, vectors):  # read one by one, until there are enough
        products += ours.T.astype(np.float64) @ theirs
        count += len(ours)
        if count >= width:
            break
    left, _, right = np.linalg.svd(products)
    rotation, (ours, theirs) = left @ right, pairs[0]
    apart = float(np.linalg.norm(ours @ rotation - theirs) / (np.linalg.norm(theirs) or 1))
    if apart > allowed(first.info(table), second.info(names[table])):
        return None, f"no one rotation turns the embeddings into the others ({apart:.2g} is left)"
    if np.abs(rotation - np.eye(width)).max() < TURNED:
        return None, "the streams have the same coordinates"
    found = Turned(models, names, rotation, table)
    words = f"is turned by one orthogonal matrix ({width} × {width})"
    if found.straight:
        words += f"; not turned with it: {few(found.straight, 4)}"
    return open_model(found, family=models[0].family_file), words


def _vectors(
    models: Sequence[Model], names: Mapping[str, str], table: str, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Vectors (n, D) of both models that turn without a gain: embeddings, columns that write."""
    first, second = (model.checkpoint for model in models)
    rows = ((0, min(first.info(table).shape[0], 8 * width)),)
    yield first.read([Part(table, rows)])[0], second.read([Part(names[table], rows)])[0]
    formed = {part.name for plan in models[0].plans for part in form_parts(plan)}
    for name, info in first.tensors().items():
        writes = len(info.shape) == 2 and info.shape[0] == width != info.shape[1]
        if writes and name in names and name not in formed:
            yield first.read([Part(name)])[0].T, second.read([Part(names[name])])[0].T


# -- experts and neurons -----------------------------------------------------------------------


class _Order:
    """The order of the first model's tensors in the second, as far as names agree."""

    def __init__(self, checkpoints: Sequence[Checkpoint], names: Mapping[str, str]) -> None:
        tensors, others = (checkpoint.tensors() for checkpoint in checkpoints)
        self.checkpoints, self.names = checkpoints, names
        self.shapes = {
            name: info.shape for name, info in tensors.items()
            if name in names and others[names[name]].shape == info.shape and info.dtype in FLOATS
        }  # fmt: skip
        self.orders: dict[str, tuple[int, np.ndarray]] = {}
        self.places: dict[str, str] = {}

    def both(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """A tensor of either."""
        first, second = self.checkpoints
        return first.read([Part(name)])[0], second.read([Part(self.names[name])])[0]

    def of_rows(self, name: str) -> np.ndarray | None:
        """The first's rows that make the second's, where they lie in another order."""
        return permutation(*self.both(name)[::-1], ALIKE)

    def experts(self) -> Iterator[str]:
        """Note the order of experts; modules in which it is another one."""
        modules: dict[str, list[re.Match[str]]] = {}
        for match in filter(None, map(EXPERTS.match, self.shapes)):
            modules.setdefault(match["module"], []).append(match)
        for module, own in modules.items():
            numbers = {int(match["number"]) for match in own if match["number"]}
            count = max(numbers) + 1 if numbers else self.shapes[own[0].string][0]
            routers = [name for name, shape in self.shapes.items() if name.startswith(module)
                       and ROUTER.search(name) and shape[:1] == (count,)]  # fmt: skip
            weight = next((name for name in routers if len(self.shapes[name]) == 2), None)
            order = None if weight is None else self.of_rows(weight)
            groups = _groups(self.checkpoints[0].config)
            if groups is None:  # older files leave it out where the class has a number of its own
                groups = 0 if any(CORRECTED.search(name) for name in routers) else 1
            if order is None or not groups or count % groups:
                continue
            group = order.reshape(groups, -1) // (count // groups)  # chosen before their experts
            places = {match.string: f"{match.string[: match.start('number')]}"
                      f"{order[int(match['number'])]}{match.string[match.end('number') :]}"
                      for match in own if match["number"]}  # fmt: skip
            fused = [match.string for match in own if not match["number"]]
            known = all(self.shapes.get(one) == self.shapes[name] for name, one in places.items())
            if known and (group == group[:, :1]).all() and self._fits(places, fused, order):
                self.orders |= dict.fromkeys((*routers, *fused), (0, order))
                self.places |= places
                yield module

    def _fits(self, places: Mapping[str, str], fused: Sequence[str], order: np.ndarray) -> bool:
        """Whether some experts lie in an order, too."""
        some = [(Part(self.names[name]), Part(one)) for name, one in places.items()]
        some += [
            (Part(self.names[name], ((n, n + 1),)), Part(name, ((row, row + 1),)))
            for name in fused[:1] for n, row in enumerate(order.tolist())
        ]  # fmt: skip
        first, second = self.checkpoints
        return all(
            same_numbers(first.read([ours])[0], second.read([theirs])[0])
            for theirs, ours in some[:SAMPLED]
        )

    def neurons(self, others: Collection[str]) -> Iterator[str]:
        """Note the order of neurons; modules, or layers without any, in which it is another one."""
        modules: dict[str, list[str]] = {}
        for name in self.shapes:
            module = re.sub(r"\.[^.]+(?:\.(?:weight|bias))?$", "", name)
            if not FEED_FORWARD.search(name):
                module = (re.match(r".*?\.\d+(?=\.)", name) or [""])[0]
            if name in others and module and not EXPERTS.match(name):
                modules.setdefault(module, []).append(name)
        for module, own in modules.items():
            matrices = [name for name in own if len(self.shapes[name]) == 2]
            found = {name: order for name in matrices if (order := self.of_rows(name)) is not None}
            if not found:
                continue
            name, order = min(found.items(), key=lambda one: len(one[1]))
            gates, neurons = np.array_split(order, 2)
            if len(found) == 1 and np.array_equal(gates + len(gates), neurons):
                order = gates  # and their neurons lie in one weight
            count, width = len(order), self.shapes[name][1]
            if count == width:
                continue  # what are rows of neurons, and what columns, cannot be told
            moved: dict[str, tuple[int, np.ndarray]] = {}
            for name in own:  # all that a neuron has moves with it, whatever was moved there
                shape = self.shapes[name]
                of = self.shapes.get(re.sub(r"bias$", "weight", name), shape)
                makes = of in ((count, width), (2 * count, width)) and shape[0] == of[0]
                if makes or shape == (count,):
                    moved[name] = 0, np.concatenate([order, order + count])[: shape[0]]
                elif len(shape) == 2 and shape[1] == count:
                    moved[name] = 1, order
            if any(axis for axis, _ in moved.values()):  # rows that nothing reads are no neurons
                self.orders |= moved
                yield module


def _groups(config: Mapping[str, Any]) -> int | None:
    """How many groups of experts a configuration names, of all its parts the most."""
    found = [
        _groups(value) if isinstance(value, Mapping) else value if GROUPS.search(str(key)) else None
        for key, value in config.items()
    ]
    return max((number for number in found if isinstance(number, int)), default=None)


def renumbered(
    models: Sequence[Model], names: Mapping[str, str], neurons: bool
) -> tuple[Model | None, list[str]]:
    """The first model with the second's order of experts, and of neurons; and what it says."""
    order = _Order([model.checkpoint for model in models], names)
    others = {name for name, role in roles(models[0]).items() if role == OTHER and neurons}
    moved = {"experts": [*order.experts()], "neurons": [*order.neurons(others)]}
    if not order.orders:
        return None, []
    view = Renumbered(models[0].checkpoint, order.orders, order.places)
    notes = [f"{what} in another order in {len(some)} modules: {some[0].rstrip('.')}, …"
             for what, some in moved.items() if some]  # fmt: skip
    return open_model(view, family=models[0].family_file), notes
