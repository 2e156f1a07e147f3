"""The first model with its residual stream in the second's coordinates, and its gains moved along.

The stream may be turned (QuaRot, SpinQuant): one orthogonal matrix Q turns whatever it holds, x
becomes x Q. Embeddings and the outputs of every module turn with it, readers W become W diag(g) Q,
where g is the gain of the norm before them. Q is found from vectors that turn without a gain, rows
of the embeddings and columns of what writes (orthogonal Procrustes), and everything else has to
agree with it.

Axes: n vectors, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from wqk._console import counted, few
from wqk.attention.rounding import ROUNDING
from wqk.checkpoints import Part, TensorInfo
from wqk.checkpoints.checkpoint import View
from wqk.errors import CheckpointError
from wqk.families import Composed, Norm, Projection
from wqk.families.naming import NAMES, embedding_table
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.outside import layer_of
from wqk.sameness.tolerances import SAME, TURNED
from wqk.sameness.weights import form_parts


class Turned(View):
    """The first checkpoint with its stream turned, its gains moved to where the second has them.

    Without a rotation, only the gains before what is beside the forms, which see none.

    Attributes
    ----------
    straight
        What should turn with the stream, and does not.
    """

    def __init__(
        self,
        models: Sequence[Model],
        names: Mapping[str, str],
        rotation: np.ndarray | None = None,
        table: str = "",
    ) -> None:
        first, self._second = (model.checkpoint for model in models)
        super().__init__(first)
        self._rotation, self._names, self.straight = rotation, dict(names), list[str]()
        tensors, shared = first.tensors(), {*names.values()}
        # A head that was tied before gains were folded into it.
        others = self._second.tensors().items() if table else ()
        self._copies = {
            n: table for n, i in others if n not in shared and i.shape == tensors[table].shape
        }
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
        tensors = self.inner.tensors()
        for gain in sorted({*fed.values()}):
            readers = {n: len(tensors[n].shape) - 1 for n, own in fed.items() if own == gain}
            is_centered = f"{gain.removesuffix('weight')}bias" in tensors
            if is_centered or np.allclose(*self._around(gain), rtol=SAME):
                continue
            if all(self._fits(name, axis, gain) for name, axis in readers.items()):
                self.how |= {name: (axis, gain) for name, axis in readers.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The first's, and its head if the second stores it apart."""
        known = self.inner.tensors()
        return {**known, **{name: known[table] for name, table in self._copies.items()}}

    def _there(self, name: str) -> np.ndarray:
        return self._second.read([Part(self._names[name])])[0]

    def value(self, name: str) -> np.ndarray | None:
        """Values as the second should have them."""
        if name in self._given:
            return self._there(name)
        if name not in self.how and name not in self._copies:
            return None
        value = self.inner.read([Part(self._copies.get(name, name))])[0]
        if name not in self.how:
            return value
        axis, gain = self.how[name]
        before, after = self._around(gain)
        turning = np.moveaxis(value, axis, -1) * before
        turning = (turning if self._rotation is None else turning @ self._rotation) / after
        return np.ascontiguousarray(np.moveaxis(turning, -1, axis), value.dtype)

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
        value, wanted = self.inner.read([Part(self._copies.get(name, name))])[0], self._there(name)
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
        return self.inner.read([Part(gain)])[0] + self._offset, np.where(there == 0, 1, there)


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
