"""A model in other coordinates of its residual stream: QuaRot's, SpinQuant's, or renumbered ones.

One orthogonal matrix Q turns whatever the stream holds: x becomes x Q. Embeddings and the outputs
of every module turn with it, readers W become W diag(g) Q, where g is the gain of the norm before
them. Q is found from vectors that turn without a gain, rows of the embeddings and columns of what
writes (orthogonal Procrustes), and everything else has to agree with it.

Axes: n vectors, D model width.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from wqk.checkpoints import Part, TensorInfo
from wqk.checkpoints.checkpoint import Around
from wqk.comparing.scope import form_parts
from wqk.comparing.tolerances import ROUNDING, TURNED
from wqk.errors import CheckpointError
from wqk.families import Projection
from wqk.families.naming import embedding_table
from wqk.model import Model
from wqk.model import open as open_model


class Turned(Around):
    """The first checkpoint with its stream turned, its gains moved to where the second has them.

    Attributes
    ----------
    straight
        What should turn with the stream, and does not.
    """

    def __init__(
        self, models: Sequence[Model], names: Mapping[str, str], rotation: np.ndarray, table: str
    ) -> None:
        self._first, self._second = (model.checkpoint for model in models)
        super().__init__(self._first)
        self._rotation, self._names, self.straight = rotation, dict(names), list[str]()
        tensors, others = self._first.tensors(), self._second.tensors()
        # A head that was tied before gains were folded into it.
        shared = set(names.values())
        self._copies = {n: table for n, i in others.items()
                        if n not in shared and i.shape == tensors[table].shape}  # fmt: skip
        self._names |= {name: name for name in self._copies}
        self._gains = {n: 0.0 for n, i in tensors.items()
                       if i.shape == rotation.shape[:1] and n in names}  # fmt: skip
        self._how = dict(self._formed(models[0]))
        for name in [n for n in self._names if n not in self._how and n not in self._gains]:
            self._try(name)
        for name in set(self._gains) - {gain for _, gain in self._how.values()}:
            if np.ptp(np.stack([self._first.read([Part(name)])[0], self._there(name)])):
                self._try(name)  # no gain: a bias that is added to the stream

    def _formed(self, model: Model) -> Iterator[tuple[str, tuple[int, str]]]:
        """How what the forms hold turns: queries, keys and values read, outputs write."""
        for plan in model.plans:
            for side in (plan.query, plan.key, plan.value, plan.output):
                one = side and side.projection
                if side is None or not isinstance(one, Projection) or one.tensor not in self._names:
                    continue
                norm = None if side is plan.output else side.input_norm
                gain = norm.gain[0].name if norm and norm.gain else ""
                if norm and gain:
                    self._gains[gain] = norm.offset
                yield one.tensor, (0 if one.transposed else 1, gain)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """The first's, and its head if the second stores it apart."""
        known = self._first.tensors()
        return {**known, **{name: known[table] for name, table in self._copies.items()}}

    def _there(self, name: str) -> np.ndarray:
        return self._second.read([Part(self._names[name])])[0]

    def value(self, name: str) -> np.ndarray | None:
        """Values as the second should have them."""
        if any(gain == name for _, gain in self._how.values()):
            return self._there(name)
        if name not in self._how and name not in self._copies:
            return None
        value = self._first.read([Part(self._copies.get(name, name))])[0]
        return self._turn(value, *self._how[name]) if name in self._how else value

    def _try(self, name: str) -> None:
        """Note on which axis a tensor turns, with the gain before it; or that it does not."""
        info = self.tensors()[name]
        width, other = len(self._rotation), self._second.tensors()[self._names[name]]
        axes = [axis for axis, size in enumerate(info.shape) if size == width]
        if not axes or info.shape != other.shape:
            return
        value, wanted = self._first.read([Part(self._copies.get(name, name))])[0], self._there(name)
        probe = np.random.default_rng(0).standard_normal(width)
        for axis in axes:
            ours, goal = (
                np.moveaxis(some, axis, -1).reshape(-1, width) for some in (value, wanted)
            )
            probed, bound = goal @ probe, allowed(info, other) * np.linalg.norm(goal)
            for gain in ("", *(self._gains if len(info.shape) > 1 else ())):
                before, after = self._around(gain)
                turned = ours @ (before * (self._rotation @ (probe / after)))
                # Rows may lie in another order, as neurons do.
                pairs = (turned, probed), (np.sort(turned), np.sort(probed))
                if min(np.linalg.norm(one - two) for one, two in pairs) <= bound:
                    self._how[name] = axis, gain
                    return
        self.straight.append(name)
        self._how[name] = axes[-1], ""

    def _around(self, gain: str) -> tuple[Any, Any]:
        """What multiplies values before they turn, and divides them after."""
        if not gain:
            return 1.0, 1.0
        there = self._there(gain) + self._gains[gain]
        return self._first.read([Part(gain)])[0] + self._gains[gain], np.where(there == 0, 1, there)

    def _turn(self, value: np.ndarray, axis: int, gain: str) -> np.ndarray:
        """Values times the gain of the first, turned, without the gain of the second."""
        before, after = self._around(gain)
        turning = (np.moveaxis(value, axis, -1) * before) @ self._rotation / after
        return np.ascontiguousarray(np.moveaxis(turning, -1, axis), value.dtype)


def allowed(*infos: TensorInfo) -> float:
    """How far a tensor may lie from the turned one, relative to it."""
    return TURNED + 2 * max(ROUNDING.get(info.dtype, ROUNDING["F8_E5M2"]) for info in infos)


def turned(models: Sequence[Model], names: Mapping[str, str]) -> tuple[Model | None, str]:
    """The first model turned as the second's stream is, and what does not turn, in words."""
    sides = [side for model in models for plan in model.plans
             for side in (plan.query, plan.key, plan.value) if side is not None]  # fmt: skip
    norms = [side.input_norm for side in sides]
    gains = [norm.gain[0].name for norm in norms if norm is not None and norm.gain]
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
    for ours, theirs in (*pairs, *vectors):
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
        words += f"; not turned with it: {', '.join(found.straight[:4])}"
        words += f" and {len(found.straight) - 4} more" * (len(found.straight) > 4)
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
