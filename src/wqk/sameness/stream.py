"""The reference with the candidate's coordinates of the residual stream, and the candidate's gains.

The stream may be rotated (QuaRot, SpinQuant): one orthogonal matrix Q makes every vector x of the
stream x Q. Embeddings and the outputs of every module rotate with it, and weights W that read the
stream become W diag(g) Q, where g is the gain of the norm before them. Q is computed from vectors
that rotate without a gain, rows of the embeddings and columns of weights that write to the stream
(orthogonal Procrustes). All remaining tensors must agree with Q.

Axes: n vectors, D model width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wqk._console import counted, few
from wqk.attention.rounding import ROUNDING
from wqk.checkpoints import Part, TensorInfo
from wqk.checkpoints.checkpoint import View
from wqk.errors import CheckpointError
from wqk.families import Composed, Norm, Projection
from wqk.families.naming import EMBEDDING_NAMES, embedding_table
from wqk.model import Model
from wqk.model import open as open_model
from wqk.sameness.tensor_names import layer_prefix
from wqk.sameness.tensor_roles import names_in_forms
from wqk.sameness.tolerances import ROTATED, SAME_SHARE


class StreamWeight(NamedTuple):
    """A weight of a form that reads or writes the residual stream.

    Attributes
    ----------
    projection
        The weight.
    norm
        The norm before a weight that reads; None for weights that write, and without a norm.
    reads
        Whether the weight reads the stream.
    """

    projection: Projection
    norm: Norm | None
    reads: bool

    @property
    def gain(self) -> str:
        """Name of the norm's gain; empty without a norm."""
        return self.norm.gain[0].name if self.norm is not None and self.norm.gain else ""


class StreamAxis(NamedTuple):
    """The axis of a tensor that rotates with the stream.

    Attributes
    ----------
    axis
        The axis, of length D.
    gain
        Name of the gain of the norm before the tensor; empty without a norm.
    """

    axis: int
    gain: str


class StreamView(View):
    """The reference with its stream rotated, and its gains moved to their places in the candidate.

    Without a rotation, only gains before weights outside of forms are moved, because forms do not
    depend on the place of a gain.

    Parameters
    ----------
    models, names
        The two models, and the candidate's name of each tensor of the reference.
    rotation
        The matrix Q, (D, D); None to move only gains.
    table
        The reference's name of the table of embeddings; empty without a rotation.

    Attributes
    ----------
    stream_axes
        The axis on which each tensor rotates, by name.
    unrotated
        Tensors that should rotate with the stream, but do not.
    """

    def __init__(
        self,
        models: Sequence[Model],
        names: Mapping[str, str],
        rotation: np.ndarray | None = None,
        table: str = "",
    ) -> None:
        reference, self._candidate = (model.checkpoint for model in models)
        super().__init__(reference)
        self._rotation = rotation
        self.unrotated = list[str]()
        self.stream_axes: dict[str, StreamAxis] = {}
        self._copies = self._untied_heads(names, table)
        if self._copies:
            self.config = {**self.config, "tie_word_embeddings": False}
        self._names = {**names, **{name: name for name in self._copies}}
        formed = {*names_in_forms(models[0].plans)}
        weights = [
            weight for weight in _stream_weights(models[0]) if weight.projection.tensor in names
        ]
        offsets = [weight.norm.offset for weight in weights if weight.norm]
        self._offset = max(offsets, default=0.0)
        gains_of_forms = {weight.gain for weight in weights if weight.gain}
        gain_by_reader = dict(self._readers(gains_of_forms, formed))
        if rotation is None:
            self._fold(gain_by_reader)
        else:
            for weight in weights:
                axis = 0 if weight.projection.transposed else 1
                self.stream_axes[weight.projection.tensor] = StreamAxis(axis, weight.gain)
            self._add_other_axes(gain_by_reader, formed, len(rotation))
        gains = {stream_axis.gain for stream_axis in self.stream_axes.values() if stream_axis.gain}
        gains = {gain for gain in gains if not self._is_lossy(gain)}
        self._moved_gains = gains - formed if rotation is None else gains
        self.changed = {*self.stream_axes, *self._copies, *self._moved_gains}

    def _untied_heads(self, names: Mapping[str, str], table: str) -> dict[str, str]:
        """Return the candidate's output heads that became untied when gains were folded in.

        The result contains the table of embeddings of each head, by the head's name.
        """
        if not table:
            return {}
        paired = {*names.values()}
        shape = self.inner.tensors()[table].shape
        return {
            name: table
            for name, info in self._candidate.tensors().items()
            if name not in paired and info.shape == shape
        }

    def _readers(
        self, gains: Collection[str], formed: Collection[str]
    ) -> Iterator[tuple[str, str]]:
        """Yield tensors that read the stream, (…, D), with the gain of the norm before them.

        Only tensors outside of forms are yielded. The gain of a tensor is the only gain of the
        layer outside of forms, or else the only gain of the layer; outside of layers, the rule is
        the same. If several gains remain, the gain is unknown, and the tensor is left out.

        Parameters
        ----------
        gains
            The gains of the norms before attention; all gains have their shape.
        formed
            The tensors of forms.
        """
        tensors = self.tensors()
        shapes = {tensors[gain].shape for gain in gains}
        gains_by_layer: dict[str, list[str]] = {}
        for name in self._names:
            if tensors[name].shape in shapes and not name.endswith("bias"):
                gains_by_layer.setdefault(layer_prefix(name), []).append(name)
        for name in self._names:
            shape = tensors[name].shape
            reads = len(shape) > 1 and shape[-1:] in shapes
            if not reads or name in formed or EMBEDDING_NAMES.fullmatch(name):
                continue
            gains_of_layer = gains_by_layer.get(layer_prefix(name), [])
            unformed = [gain for gain in gains_of_layer if gain not in formed]
            candidates = unformed or gains_of_layer
            if len(candidates) == 1:
                yield name, candidates[0]

    def _fold(self, gain_by_reader: Mapping[str, str]) -> None:
        """Add the axes of the readers of each differing gain, if the gain explains all readers."""
        tensors = self.inner.tensors()
        for gain in sorted({*gain_by_reader.values()}):
            if tensors[gain].shape != self._candidate.info(self._names[gain]).shape:
                continue
            is_centered = f"{gain.removesuffix('weight')}bias" in tensors
            if is_centered or np.allclose(*self._gains(gain), rtol=SAME_SHARE):
                continue
            stream_axes = {
                name: StreamAxis(len(tensors[name].shape) - 1, gain)
                for name, gain_of_reader in gain_by_reader.items()
                if gain_of_reader == gain
            }
            if all(self._fits(name, stream_axis) for name, stream_axis in stream_axes.items()):
                self.stream_axes |= stream_axes

    def _add_other_axes(
        self, gain_by_reader: Mapping[str, str], formed: Collection[str], width: int
    ) -> None:
        """Add the axes of all tensors except the weights of the forms."""
        gains = {stream_axis.gain for stream_axis in self.stream_axes.values()} | {
            *gain_by_reader.values()
        }
        for name in self._names:
            if name in self.stream_axes or name in gains:
                continue
            is_vector = len(self.tensors()[name].shape) < 2
            is_bias = name.endswith("bias") and name not in formed
            if not is_vector or is_bias:
                self._add_axis(name, gain_by_reader.get(name, ""), width)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return the reference's tensors, and output heads that the candidate stores separately."""
        tensors = self.inner.tensors()
        return {**tensors, **{name: tensors[table] for name, table in self._copies.items()}}

    def _in_reference(self, name: str) -> np.ndarray:
        """Read a tensor of the reference."""
        (value,) = self.inner.read([Part(self._copies.get(name, name))])
        return value

    def _in_candidate(self, name: str) -> np.ndarray:
        """Read the candidate's tensor with a given name in the reference."""
        (value,) = self._candidate.read([Part(self._names[name])])
        return value

    def value(self, name: str) -> np.ndarray | None:
        """Return the expected values of the candidate; None for unchanged tensors."""
        if name in self._moved_gains:
            return self._in_candidate(name)
        if name not in self.stream_axes and name not in self._copies:
            return None
        value = self._in_reference(name)
        if name not in self.stream_axes:
            return value
        axis, gain = self.stream_axes[name]
        before, after = self._gains(gain)
        rows = np.moveaxis(value, axis, -1) * before
        if self._rotation is not None:
            rows = rows @ self._rotation
        return np.ascontiguousarray(np.moveaxis(rows / after, -1, axis), value.dtype)

    def _add_axis(self, name: str, gain: str, width: int) -> None:
        """Add the axis along which a tensor rotates; record a tensor that does not rotate.

        A square weight may read or write the stream: both axes are tried.
        """
        shape = self.tensors()[name].shape
        axes = [axis for axis, size in enumerate(shape) if size == width]
        if not axes or shape != self._candidate.tensors()[self._names[name]].shape:
            return
        last_axis = len(shape) - 1
        stream_axes = [StreamAxis(axis, gain if axis == last_axis else "") for axis in axes]
        for stream_axis in stream_axes:
            if self._fits(name, stream_axis):
                self.stream_axes[name] = stream_axis
                return
        self.unrotated.append(name)
        self.stream_axes[name] = stream_axes[-1]

    def _fits(self, name: str, stream_axis: StreamAxis) -> bool:
        """Return whether a rotated tensor equals the candidate's, with rows in any order."""
        info = self.tensors()[name]
        candidate_info = self._candidate.tensors()[self._names[name]]
        if info.shape != candidate_info.shape:
            return False
        width = info.shape[stream_axis.axis]
        reference_rows, candidate_rows = (
            np.moveaxis(value, stream_axis.axis, -1).reshape(-1, width)
            for value in (self._in_reference(name), self._in_candidate(name))
        )
        before, after = self._gains(stream_axis.gain)
        # Products with one random vector stand for all columns.
        probe = np.random.default_rng(0).standard_normal(width)
        rotated_probe = probe / after
        if self._rotation is not None:
            rotated_probe = self._rotation @ rotated_probe
        expected = reference_rows @ (before * rotated_probe)
        actual = candidate_rows @ probe
        distance = min(
            np.linalg.norm(expected - actual),
            np.linalg.norm(np.sort(expected) - np.sort(actual)),
        )
        return bool(distance <= allowed(info, candidate_info) * np.linalg.norm(candidate_rows))

    def _is_lossy(self, gain: str) -> bool:
        """Return whether a gain is 0 in the candidate, but not in the reference.

        No weight after such a gain can restore the lost values. Therefore the gain was not moved.
        """
        (before,) = self.inner.read([Part(gain)])
        is_lost = self._in_candidate(gain) + self._offset == 0
        if self._rotation is None:
            is_lost &= before + self._offset != 0
        return bool(is_lost.any())

    def _gains(self, gain: str) -> tuple[Any, Any]:
        """Return the factors before a rotation and the divisors after it, (D,); 1 without a gain.

        The factors are the reference's gain, the divisors the candidate's.
        """
        if not gain:
            return 1.0, 1.0
        (before,) = self.inner.read([Part(gain)])
        after = self._in_candidate(gain) + self._offset
        return before + self._offset, np.where(after == 0, 1, after)


def _stream_weights(model: Model) -> Iterator[StreamWeight]:
    """Yield the weights of the forms that read or write the stream."""
    for plan in model.plans:
        for side in (plan.query, plan.key, plan.value, plan.output):
            if side is None:
                continue
            reads = side is not plan.output
            projection = side.projection
            if isinstance(projection, Composed) and reads:
                projection = projection.inner
            if isinstance(projection, Projection):
                yield StreamWeight(projection, side.input_norm if reads else None, reads)


def moved_gains(
    models: Sequence[Model], names: Mapping[str, str]
) -> tuple[Model | None, list[str]]:
    """Return the reference with its gains moved to their places in the candidate, and notes.

    Only gains before weights outside of attention are moved: weights of feed-forward networks and
    of outputs. None if no gain is moved, or if blocks do not begin with a norm.
    """
    weights = [weight for weight in _stream_weights(models[0]) if weight.gain]
    if not weights:
        return None, []
    if any(
        layer_prefix(weight.projection.tensor) != layer_prefix(weight.gain) for weight in weights
    ):
        return None, []
    view = StreamView(models, names)
    if not view.changed:
        return None, []
    moved = {stream_axis.gain for stream_axis in view.stream_axes.values()}
    note = (
        f"{counted(len(moved), 'norm')} with a gain that is folded into what it feeds in one: "
        f"{min(moved)}, …"
    )
    return open_model(view, family=models[0].family_file), [note]


def allowed(*infos: TensorInfo) -> float:
    """Return the largest relative distance that rounding explains after a rotation."""
    return ROTATED + 2 * max(ROUNDING.get(info.dtype, ROUNDING["F8_E5M2"]) for info in infos)


def rotated_stream(models: Sequence[Model], names: Mapping[str, str]) -> tuple[Model | None, str]:
    """Return the reference in the coordinates of the candidate's stream, and a description.

    None if no rotation relates the two streams; the description then contains the reason.
    """
    readers = [weight for model in models for weight in _stream_weights(model) if weight.reads]
    gains = [weight.gain for weight in readers if weight.gain]
    if not gains or any(weight.norm is None or weight.norm.kind != "rms" for weight in readers):
        return None, (
            "a norm is not known, or subtracts a mean: of all rotations, only those that leave the "
            "vector of ones commute with it, so that means have to be folded into weights first"
        )
    reference, candidate = (model.checkpoint for model in models)
    (width,) = reference.info(gains[0]).shape
    try:
        table = embedding_table(reference, width)
    except CheckpointError as error:
        return None, str(error)
    if table not in names:
        return None, f"{candidate.name} has no {table}"
    candidate_width = candidate.info(names[table]).shape[-1]
    if candidate_width != width:
        return None, f"the streams have {width} and {candidate_width} dimensions"
    rotation, distance = _rotation(models, names, table, width)
    if distance > allowed(reference.info(table), candidate.info(names[table])):
        return (
            None,
            f"no one rotation turns the embeddings into the others ({distance:.2g} is left)",
        )
    if np.abs(rotation - np.eye(width)).max() < ROTATED:
        return None, "the streams have the same coordinates"
    view = StreamView(models, names, rotation, table)
    description = f"is turned by one orthogonal matrix ({width} × {width})"
    if view.unrotated:
        description += f"; not turned with it: {few(view.unrotated, 4)}"
    return open_model(view, family=models[0].family_file), description


def _rotation(
    models: Sequence[Model], names: Mapping[str, str], table: str, width: int
) -> tuple[np.ndarray, float]:
    """Return the rotation of the stream (D, D), and the relative distance of the embeddings.

    At least as many vectors as dimensions determine a rotation.
    """
    embeddings: tuple[np.ndarray, np.ndarray] | None = None
    products = np.zeros((width, width))
    count = 0
    for expected, actual in _vectors(models, names, table, width):
        embeddings = embeddings or (expected, actual)
        products += expected.T.astype(np.float64) @ actual
        count += len(expected)
        if count >= width:
            break
    assert embeddings is not None
    left, _, right = np.linalg.svd(products)
    rotation = left @ right
    expected, actual = embeddings
    norm = np.linalg.norm(actual) or 1
    return rotation, float(np.linalg.norm(expected @ rotation - actual) / norm)


def _vectors(
    models: Sequence[Model], names: Mapping[str, str], table: str, width: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield vectors (n, D) of both models that rotate without a gain, the embeddings first.

    Further vectors are the columns of weights that write to the stream.
    """
    reference, candidate = (model.checkpoint for model in models)
    # A padded vocabulary has more rows.
    vocabulary = min(reference.info(table).shape[0], candidate.info(names[table]).shape[0])
    rows = ((0, min(vocabulary, 8 * width)),)
    yield _read_pair(models, Part(table, rows), Part(names[table], rows))
    formed = {*names_in_forms(models[0].plans)}
    for name, info in reference.tensors().items():
        is_matrix = len(info.shape) == 2
        writes = is_matrix and info.shape[0] == width != info.shape[1]
        if not writes or name not in names or name in formed:
            continue
        if candidate.info(names[name]).shape == info.shape:
            expected, actual = _read_pair(models, Part(name), Part(names[name]))
            yield expected.T, actual.T


def _read_pair(
    models: Sequence[Model], reference_part: Part, candidate_part: Part
) -> tuple[np.ndarray, np.ndarray]:
    """Read a part of each model."""
    reference, candidate = (model.checkpoint for model in models)
    (expected,) = reference.read([reference_part])
    (actual,) = candidate.read([candidate_part])
    return expected, actual
