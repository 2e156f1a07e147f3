"""One module of a file: what the reader of a format may look at."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.quantization.matrix import Arrays, Component, QuantizedMatrix
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

# Types of scales.
FLOATS = "F16 BF16 F32"

# A library's description of one matrix: a few numbers as JSON.
LARGEST_DESCRIPTION = 2**16


@dataclass(frozen=True)
class Source:
    """A file of tensors, its configuration, and a function that reads small tensors.

    Attributes
    ----------
    tensors
        All tensors by name.
    config
        Configuration of the model.
    read
        Function that reads parts of tensors as they are stored.
    descriptions
        ComfyUI's descriptions of weights, as JSON, from the headers of the files.
    has_factors
        Whether a tensor ``X.scale`` multiplies ``X.weight``, as in all files of llama.cpp.
    """

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    read: Callable[[Sequence[Part]], list[np.ndarray]]
    descriptions: Sequence[Any] = ()
    has_factors: bool = False


@dataclass(frozen=True)
class Module:
    """The tensors of one module, by the ends of their names.

    Attributes
    ----------
    stem
        Name of the module, without a trailing dot.
    codes
        End of the name of the tensor by which the format was recognized.
    source
        The file.
    """

    stem: str
    codes: str
    source: Source

    def name(self, ending: str) -> str:
        """Return the full name of a tensor of the module."""
        return self.stem + ending

    def has(self, ending: str) -> bool:
        """Return whether the module has a tensor with this ending."""
        return self.name(ending) in self.source.tensors

    def info(self, ending: str) -> TensorInfo:
        """Return type and shape of a tensor that has to be there."""
        info = self.source.tensors.get(self.name(ending))
        if info is None:
            raise CheckpointError(
                f"{self.name(ending)} is missing, without which its matrix cannot be read"
            )
        return info

    def shape(self, ending: str, dtypes: str, axes: int | None = 2) -> tuple[int, ...]:
        """Return the shape of a tensor that must have one of these types, and ``axes`` axes."""
        info = self.info(ending)
        is_typed = info.dtype in dtypes.split()
        if not is_typed or (axes is not None and len(info.shape) != axes) or 0 in info.shape:
            of_axes = "" if axes is None else f"of {axes} axes "
            raise CheckpointError(
                f"{self.name(ending)} must be a tensor {of_axes}of type "
                f"{dtypes.replace(' ', ' or ')}, got {info.dtype} of shape {info.shape}"
            )
        return info.shape

    def require(self, ending: str, shape: tuple[int, ...], dtypes: str) -> None:
        """Raise `CheckpointError` if a tensor has another shape or type."""
        actual = self.shape(ending, dtypes, len(shape))
        if actual != shape:
            raise CheckpointError(f"{self.name(ending)} must have the shape {shape}, got {actual}")

    def require_promised(self, ending: str, promise: str) -> None:
        """Raise `CheckpointError` if a tensor is missing that the configuration promises."""
        if not self.has(ending):
            raise CheckpointError(
                f"{self.name(ending)} is missing, although the configuration sets {promise}"
            )

    def component(self, ending: str, rows: int = 0) -> Component:
        """Return a tensor of the module as a component of its matrix."""
        return Component(self.name(ending), rows)

    def small(self, ending: str) -> np.ndarray:
        """Read a small tensor, flattened."""
        if self.info(ending).nbytes > LARGEST_DESCRIPTION:
            raise CheckpointError(f"{self.name(ending)} is too large for what it should hold")
        return self.source.read([Part(self.name(ending))])[0].reshape(-1)

    def description(self, ending: str) -> dict[str, Any]:
        """Read the JSON object in a tensor of bytes."""
        if self.info(ending).dtype != "U8" or self.info(ending).nbytes == 0:
            raise CheckpointError(f"{self.name(ending)} must be JSON in bytes")
        try:
            value = json.loads(self.small(ending).tobytes())
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            raise CheckpointError(f"{self.name(ending)} must be JSON in bytes")
        return value

    def matrix(
        self,
        kind: str,
        shape: tuple[int, ...],
        *,
        grid: Grid | None,
        components: Mapping[str, Component],
        values: Callable[[Arrays, np.ndarray], np.ndarray],
        groups: int = 0,
        note: str = "",
    ) -> QuantizedMatrix:
        """Return the matrix of this module, which is stored in these tensors."""
        names = {component.name for component in components.values()}
        nbytes = sum(self.source.tensors[name].nbytes for name in names)
        info = TensorInfo(kind, shape, nbytes, grid)
        return QuantizedMatrix(info, components, values, groups, note)


def size(shape: tuple[int, ...]) -> int:
    """Return the number of values of a shape."""
    return math.prod(shape)
