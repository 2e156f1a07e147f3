"""Rotations of compressed-tensors (``transform_config``), applied while the model runs.

A group of transforms has one matrix R of each size, and a list of locations where R acts. The width
of R is the width of the module's side, or ``head_dim``, for blocks along the diagonal.

- ``weight_input`` and ``weight_output`` are already multiplied into the stored weight. The model
  uses the stored weight, and no further step is needed.
- ``input`` and ``output`` act while the model runs: on the inputs x of a module, as x R, and on its
  outputs. The whole module then multiplies by ``Rᵀ`` on this side. Therefore this reader returns
  ``W Rᵀ`` for inputs, ``Rᵀ W`` and ``Rᵀ b`` for outputs.
- ``q_attn`` and ``k_cache`` rotate queries and keys after their positions. If both are rotated by
  one orthogonal matrix, no score changes.

R is stored in the file next to the first module with this transform, under the name of the group
and the location. Later modules share R, without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.quantization.matrix import Arrays, Component, QuantizedMatrix
from wqk.checkpoints.quantization.module import CORRECT, DEQUANTIZE, FLOATS, REQUANTIZE
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.errors import CheckpointError, shown

# Kinds of R. The first two have entries ±1 and are orthogonal after division by the root of their
# width.
HADAMARD = ("hadamard", "random-hadamard")
KINDS = (*HADAMARD, "random-matrix")

STORED_PLACES = ("weight_input", "weight_output")
RUNNING_PLACES = ("input", "output")
ATTENTION_PLACES = ("q_attn", "k_cache")
PLACES = (*STORED_PLACES, *RUNNING_PLACES, *ATTENTION_PLACES)

GROUP_KEYS = {"type", "apply", "randomize", "requires_grad", "head_dim", "precision"}
PLACE_KEYS = {"targets", "location", "inverse", "ignore"}

# Last words of the names of modules that are, and that are not, of the class Linear.
LINEAR = re.compile(r".*proj.*|.*dense.*|.*linear.*|fc\d*|lm_head|w[qkvo123]", re.IGNORECASE)
NOT_LINEAR = re.compile(r".*embed.*|wte|wpe|.*norm.*", re.IGNORECASE)

MATRIX_TYPES = (*FLOATS.split(), "F64")


@dataclass(frozen=True)
class Transform:
    """One location where the matrix of a group acts.

    Attributes
    ----------
    group
        Name of the group.
    kind
        Kind of the group's matrix, one of `KINDS`.
    location
        Location where the matrix acts.
    targets, ignore
        Modules with the transform, and exceptions.
    inverse
        Whether the inverse of the matrix acts.
    width
        Width of a block (``head_dim``); None for the whole side of the module.
    permuted
        Whether rows and columns of the matrix are permuted.
    """

    group: str
    kind: str
    location: str
    targets: tuple[str, ...]
    ignore: tuple[str, ...]
    inverse: bool
    width: int | None
    permuted: bool

    def names(self, module: str) -> bool:
        """Return whether the transform targets a module by its name or a pattern."""
        return _is_named(module, self.targets) and not _is_named(module, self.ignore)

    def names_class(self, module: str) -> bool:
        """Return whether the transform targets the class Linear, and does not ignore a module."""
        is_ignored = _is_named(module, self.ignore) or "Linear" in self.ignore
        return "Linear" in self.targets and not is_ignored

    def stored(self, module: str, ending: str = "weight") -> str:
        """Return the name of the matrix next to a module."""
        return f"{module}.{self.group}_{self.location}.{ending}"


def _is_named(module: str, targets: tuple[str, ...]) -> bool:
    """Return whether a list of names, or of patterns after ``re:``, includes a module."""
    for target in targets:
        if target == module:
            return True
        if target.startswith("re:") and re.match(target.removeprefix("re:"), module):
            return True
    return False


def read_transforms(settings: Settings) -> tuple[Transform, ...]:
    """Return the transforms of a quantization configuration.

    Raises
    ------
    CheckpointError
        A key, a kind or a location is unknown, or transforms of queries and keys do not cancel.
    """
    config = settings.values.get("transform_config")
    if not config:
        return ()
    inner = replace(settings, path=f"{settings.path}.transform_config")
    match config:
        case {"config_groups": {**groups}, **unknown} if not unknown:
            pass
        case _:
            raise inner.error(
                f"has other keys; expected config_groups alone, got {shown(config)}; {DEQUANTIZE}"
            )
    transforms: list[Transform] = []
    for name, group in groups.items():
        transforms += _group(inner, str(name), group)
    _require_cancelling(inner, transforms)
    return tuple(transforms)


def _group(settings: Settings, name: str, group: Any) -> Iterator[Transform]:
    """Return the transforms of one group."""
    path = f"{settings.path}.config_groups.{name}"
    if not isinstance(group, dict) or not group.keys() <= GROUP_KEYS:
        raise CheckpointError(
            f"{path}: is not known; expected the keys of a transform, "
            f"{', '.join(sorted(GROUP_KEYS))}, got {shown(group)}; {DEQUANTIZE}"
        )
    group_settings = Settings(settings.method, group, path)
    kind, width = group_settings.get("type"), group_settings.whole("head_dim")
    if kind not in KINDS:
        raise group_settings.error(
            f"type = {shown(kind)} is not a transform that is read; expected one of "
            f"{', '.join(KINDS)}; {DEQUANTIZE}"
        )
    if width is not None and width < 1:
        raise group_settings.error(f"head_dim must be a positive number; got {width}; {CORRECT}")
    places = group.get("apply") or []
    if not isinstance(places, list):
        raise group_settings.error(
            f"apply must be a list of places; got {shown(places)}; {CORRECT}"
        )
    for place in places:
        if not isinstance(place, dict) or not place.keys() <= PLACE_KEYS:
            raise group_settings.error(
                f"apply must have the keys of a place; expected {', '.join(sorted(PLACE_KEYS))}, "
                f"got {shown(place)}; {DEQUANTIZE}"
            )
        location = place.get("location")
        if location not in PLACES:
            raise group_settings.error(
                f"location = {shown(location)} is not a place that is read; expected one of "
                f"{', '.join(PLACES)}; {DEQUANTIZE}"
            )
        yield Transform(
            group=name,
            kind=kind,
            location=location,
            targets=_patterns(group_settings, "targets", place),
            ignore=_patterns(group_settings, "ignore", place),
            inverse=Settings("", place, f"{path}.apply").switch("inverse"),
            width=width,
            permuted=group_settings.switch("randomize") and kind == "hadamard",
        )


def _patterns(settings: Settings, key: str, place: Mapping[str, Any]) -> tuple[str, ...]:
    """Return names, patterns and classes of modules."""
    value = place.get(key) or []
    patterns = [value] if isinstance(value, str) else value
    try:
        for pattern in patterns:
            re.compile(pattern.removeprefix("re:"))
    except (re.error, AttributeError, TypeError):
        raise settings.error(
            f"{key} must be names of modules; expected a list of names or patterns, got "
            f"{shown(value)}; {CORRECT}"
        ) from None
    return tuple(patterns)


def _require_cancelling(settings: Settings, transforms: list[Transform]) -> None:
    """Raise `CheckpointError` unless queries and keys are rotated by one orthogonal matrix."""
    sides: dict[str, set[Transform]] = {place: set() for place in ATTENTION_PLACES}
    for transform in transforms:
        if transform.location in sides:
            sides[transform.location].add(replace(transform, location=""))
    queries, keys = sides.values()
    if queries != keys or any(transform.kind not in HADAMARD for transform in queries):
        raise settings.error(
            "q_attn and k_cache do not turn queries and keys by one orthogonal matrix, so that "
            f"they change scores, which is not read; {DEQUANTIZE}"
        )


@dataclass
class Transforms:
    """The transforms of a file, applied to its weights.

    Attributes
    ----------
    transforms
        All transforms of the configuration.
    tensors
        All tensors of the file.
    used
        Names of the tensors that a transform needed.
    """

    transforms: tuple[Transform, ...]
    tensors: Mapping[str, TensorInfo]
    used: set[str] = field(default_factory=set)

    @property
    def note(self) -> str:
        """Sentence about rotations that remain in the stored weights.

        Empty if no stored weight is rotated, or if rotations while the model runs undo the
        rotations of weights.
        """
        places = {transform.location for transform in self.transforms}
        if places.isdisjoint(STORED_PLACES) or not places.isdisjoint(RUNNING_PLACES):
            return ""
        return (
            "quantization_config.transform_config has rotated the stored weights for good; they "
            "are read as they are stored"
        )

    def applied(self, module: str, matrix: QuantizedMatrix) -> QuantizedMatrix:
        """Return the effective matrix of a module with quantized weights."""
        return _rounded(matrix, self._applied(module, matrix, is_linear=True))

    def plain(self) -> dict[str, QuantizedMatrix]:
        """Return the weights and biases that are stored plain and rotated while the model runs."""
        matrices = {}
        for name, info in self.tensors.items():
            module, dot, ending = name.rpartition(".")
            is_bias = ending == "bias" and len(info.shape) == 1
            is_weight = ending == "weight" and len(info.shape) == 2
            if not dot or not (is_bias or is_weight) or info.dtype not in MATRIX_TYPES:
                continue
            if self._is_of_transform(module):
                continue
            stored = _stored(name, info)
            is_linear = _is_linear(module)
            try:
                if is_bias:
                    matrix = self._rotated_outputs(module, stored, is_linear=is_linear)
                else:
                    matrix = self._applied(module, stored, is_linear=is_linear)
            except _OpenClass as error:
                matrix = _unreadable(stored, str(error))
            if matrix is not stored:
                matrices[name] = _rounded(stored, matrix)
        return matrices

    def refuse_unused(self) -> None:
        """Raise `CheckpointError` for matrices of transforms that no weight uses."""
        for name in sorted(self.tensors):
            place = name.rpartition(".")[0]
            if self._is_of_transform(place, RUNNING_PLACES) and name not in self.used:
                raise CheckpointError(
                    f"{name}: belongs to a transform, and transform_config has none for "
                    f"{place.rpartition('.')[0]}; {CORRECT}"
                )

    def _is_of_transform(
        self, module: str, places: Sequence[str] = (*RUNNING_PLACES, *ATTENTION_PLACES)
    ) -> bool:
        """Return whether a module is a transform in the file."""
        word = module.rpartition(".")[2]
        return any(
            word == f"{transform.group}_{transform.location}"
            for transform in self.transforms
            if transform.location in places
        )

    def _applied(
        self, module: str, matrix: QuantizedMatrix, *, is_linear: bool | None
    ) -> QuantizedMatrix:
        """Return a matrix with the transforms of both sides."""
        transform = self._transform(module, "input", is_linear=is_linear)
        if transform:
            rotation = self._rotation(transform, module, matrix.info.shape[1])
            matrix = _with_rotated_inputs(matrix, rotation)
        return self._rotated_outputs(module, matrix, is_linear=is_linear)

    def _rotated_outputs(
        self, module: str, matrix: QuantizedMatrix, *, is_linear: bool | None
    ) -> QuantizedMatrix:
        """Return a matrix or a bias with the transform of the outputs."""
        transform = self._transform(module, "output", is_linear=is_linear)
        if transform is None:
            return matrix
        rotation = self._rotation(transform, module, matrix.info.shape[0])
        return _with_rotated_outputs(matrix, rotation)

    def _transform(self, module: str, location: str, *, is_linear: bool | None) -> Transform | None:
        """Return the transform of a module at one location; None without a transform."""
        acting = []
        for transform in self.transforms:
            if transform.location != location:
                continue
            if transform.names(module) or (is_linear and transform.names_class(module)):
                acting.append(transform)
            elif is_linear is None and transform.names_class(module):
                raise _OpenClass(
                    f"{module}: transform_config rotates modules of the class Linear, and whether "
                    f"this one is of that class, the file leaves open; {DEQUANTIZE}"
                )
        if len(acting) > 1:
            raise CheckpointError(
                f"{module}: the groups {acting[0].group} and {acting[1].group} of transform_config "
                f"both act on its {location}, in an order that the file leaves open; expected one "
                f"group; {DEQUANTIZE}"
            )
        return acting[0] if acting else None

    def _rotation(self, transform: Transform, module: str, length: int) -> _Rotation:
        """Return the matrix of a transform, and its stored components."""
        width = transform.width or length
        if length % width:
            raise CheckpointError(
                f"{module}: blocks of {width} (head_dim of transform_config) do not divide "
                f"{length}; expected a divisor of {length}, got {width}; {CORRECT}"
            )
        components = {
            _role(transform): self._component(transform, module, "weight", (width, width))
        }
        if transform.permuted:
            components[f"{_role(transform)} order"] = self._component(
                transform, module, "perm", (width,)
            )
        self.used |= {component.name for component in components.values()}
        return _Rotation(transform, width, components, self.tensors)

    def _component(
        self, transform: Transform, module: str, ending: str, shape: tuple[int, ...]
    ) -> Component:
        """Return a tensor of a transform: next to the module, or to a module that shares it."""
        place = transform.stored(module, ending)
        if place in self.tensors:
            names = [place]
        else:
            names = [
                name
                for name, info in self.tensors.items()
                if info.shape == shape and self._is_shared(transform, name, ending)
            ]
        types = ("I64", "I32") if ending == "perm" else MATRIX_TYPES
        infos = [self.tensors[name] for name in names]
        if len(names) != 1 or infos[0].shape != shape or infos[0].dtype not in types:
            raise CheckpointError(
                f"{place}: the matrix of a transform is missing, or not the only one; expected one "
                f"tensor of shape {shape} for the group {transform.group} of transform_config, "
                f"here or next to another module, got {len(names)} of "
                f"{shown([info.shape for info in infos])}; {REQUANTIZE}"
            )
        return Component(names[0])

    def _is_shared(self, transform: Transform, name: str, ending: str) -> bool:
        """Return whether a tensor is the matrix of a transform's group, in the same direction.

        A random matrix and its inverse are two tensors; a Hadamard matrix is transposed instead.
        """
        place, dot, end = name.rpartition(".")
        module, _, place = place.rpartition(".")
        if not dot or end != ending:
            return False
        return any(
            place == f"{sibling.group}_{sibling.location}"
            and sibling.group == transform.group
            and (transform.kind in HADAMARD or sibling.inverse == transform.inverse)
            and (sibling.names(module) or sibling.names_class(module))
            for sibling in self.transforms
        )


class _OpenClass(CheckpointError):
    """The class of a module determines its values, but is unknown."""


def _is_linear(module: str) -> bool | None:
    """Return whether a module is of the class Linear, by its name; None if unknown."""
    word = module.rpartition(".")[2]
    if NOT_LINEAR.fullmatch(word):
        return False
    return True if LINEAR.fullmatch(word) else None


def _stored(name: str, info: TensorInfo) -> QuantizedMatrix:
    """Return a plain tensor as a matrix that is read without conversion."""
    return QuantizedMatrix(
        info,
        {"codes": Component(name, 1)},
        lambda stored, rows: stored["codes"],
    )


def _rounded(plain: QuantizedMatrix, rotated: QuantizedMatrix) -> QuantizedMatrix:
    """Return a rotated matrix whose values, products in float64, are rounded once to float32."""
    if rotated is plain:
        return plain

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        return np.asarray(rotated.values(stored, rows), np.float32)

    return replace(rotated, values=values)


def _unreadable(matrix: QuantizedMatrix, message: str) -> QuantizedMatrix:
    """Return a matrix that raises an error on reading."""

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        raise CheckpointError(message)

    return replace(matrix, values=values)


def _role(transform: Transform) -> str:
    """Return the role of the matrix R of a transform among the components of a weight."""
    return f"{transform.group} {transform.location}"


@dataclass(frozen=True)
class _Rotation:
    """The matrix R of a transform at one module, read from tensors."""

    transform: Transform
    width: int
    components: Mapping[str, Component]
    tensors: Mapping[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors."""
        return sum(self.tensors[component.name].nbytes for component in self.components.values())

    def matrix(self, stored: Arrays) -> np.ndarray:
        """Return R in float64, (width, width).

        Raises
        ------
        CheckpointError
            The stored order is not a permutation, or the entries are not ±1.
        """
        role = _role(self.transform)
        matrix = stored[role].astype(np.float64)
        if self.transform.permuted:
            order = stored[f"{role} order"]
            if not np.array_equal(np.sort(order), np.arange(self.width)):
                raise CheckpointError(
                    f"{self.components[f'{role} order'].name}: is not an order of {self.width} "
                    f"rows; expected each number from 0 to {self.width - 1} once; {REQUANTIZE}"
                )
            matrix = matrix[order][:, order]
        if self.transform.kind not in HADAMARD:
            return np.asarray(matrix)  # of an inverse, the inverse is stored
        if not (np.abs(matrix) == 1).all():
            raise CheckpointError(
                f"{self.components[role].name}: must have the entries 1 and -1 of a Hadamard "
                f"matrix; {REQUANTIZE}"
            )
        direction = matrix.T if self.transform.inverse else matrix
        return np.asarray(direction / self.width**0.5)


def _with_rotated_inputs(matrix: QuantizedMatrix, rotation: _Rotation) -> QuantizedMatrix:
    """Return ``W Rᵀ``: the module multiplies its rotated inputs ``x R`` by W."""
    inner, width = matrix.values, rotation.width

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        weight = inner(stored, rows)
        # Columns lie in blocks along the diagonal of the whole rotation: (rows, blocks, width).
        blocks = weight.reshape(len(weight), -1, width)
        rotated = blocks @ rotation.matrix(stored).T
        return np.asarray(rotated.reshape(weight.shape))

    return _rotated(matrix, rotation, replace(matrix, values=values))


def _with_rotated_outputs(matrix: QuantizedMatrix, rotation: _Rotation) -> QuantizedMatrix:
    """Return ``Rᵀ W``, or ``Rᵀ b``: outputs y of the module are rotated to ``y R``."""
    inner, width = matrix.values, rotation.width

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        weight_or_bias = inner(stored, rows)
        columns = weight_or_bias.size // len(weight_or_bias)  # 1 for a bias
        blocks = weight_or_bias.reshape(-1, width, columns)
        rotated = rotation.matrix(stored).T @ blocks
        return np.asarray(rotated.reshape(weight_or_bias.shape))

    return _rotated(matrix, rotation, replace(matrix, values=values, rows_together=width))


def _rotated(
    matrix: QuantizedMatrix, rotation: _Rotation, rotated: QuantizedMatrix
) -> QuantizedMatrix:
    """Return a rotated matrix with the components of its rotation."""
    return replace(
        rotated,
        info=matrix.info._replace(nbytes=matrix.info.nbytes + rotation.nbytes),
        components={**matrix.components, **rotation.components},
        groups=0,
    )
