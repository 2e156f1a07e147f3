"""One module of a file, as the input of a format's reader."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.quantization.matrix import Arrays, Component, QuantizedMatrix, group_size
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    import numpy as np

# Types of scales.
FLOATS = "F16 BF16 F32"

# Last parts of messages: what a user can do about a file that is not read.
DEQUANTIZE = "use the original checkpoint, or dequantize this one first"
REQUANTIZE = "use the original checkpoint, or quantize it again"
CORRECT = "correct the configuration, or use the original checkpoint"

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
        Function that reads parts of tensors in their stored types.
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
        End of the name of the tensor that identified the format.
    source
        The file.
    """

    stem: str
    codes: str
    source: Source

    def name(self, ending: str) -> str:
        """Return the full name of a tensor of the module."""
        return self.stem + ending

    def error(
        self,
        ending: str,
        problem: str,
        *,
        expected: object,
        actual: object,
        remedy: str = REQUANTIZE,
    ) -> CheckpointError:
        """Return the error for a tensor of the module.

        Parameters
        ----------
        ending
            End of the name of the tensor, which is the subject of the message; empty for the
            module.
        problem, expected, actual
            Clauses: the problem, the requirement of the reader, and the content of the file.
        remedy
            Clause with advice for the user.
        """
        return CheckpointError(
            f"{self.name(ending)}: {problem}; expected {expected}, got {actual}; {remedy}"
        )

    def has(self, ending: str) -> bool:
        """Return whether the module has a tensor with this ending."""
        return self.name(ending) in self.source.tensors

    def info(self, ending: str) -> TensorInfo:
        """Return type, shape and size of a tensor.

        Raises
        ------
        CheckpointError
            The tensor is missing.
        """
        info = self.source.tensors.get(self.name(ending))
        if info is None:
            raise CheckpointError(
                f"{self.name(ending)}: is missing, without which the weight of {self.stem} cannot "
                f"be read; download the checkpoint again, or {REQUANTIZE}"
            )
        return info

    def shape(self, ending: str, dtypes: str, axes: int | None = 2) -> tuple[int, ...]:
        """Return the shape of a tensor, after a check of type and number of axes.

        Parameters
        ----------
        ending
            End of the name of the tensor.
        dtypes
            Possible types, with spaces between them.
        axes
            Number of axes; None for any number.

        Raises
        ------
        CheckpointError
            The tensor is missing or empty, or has another type or number of axes.
        """
        info = self.info(ending)
        has_type = info.dtype in dtypes.split()
        has_axes = axes is None or len(info.shape) == axes
        if not has_type or not has_axes or 0 in info.shape:
            of_axes = "" if axes is None else f"{axes} axes and "
            raise self.error(
                ending,
                "has another type or shape than its format stores",
                expected=f"{of_axes}the type {dtypes.replace(' ', ' or ')}",
                actual=f"{info.dtype} of shape {info.shape}",
            )
        return info.shape

    def require(self, ending: str, shape: tuple[int, ...], dtypes: str) -> None:
        """Raise `CheckpointError` if a tensor has another shape or type."""
        actual = self.shape(ending, dtypes, len(shape))
        if actual != shape:
            raise self.error(
                ending,
                "does not fit the other tensors of its weight",
                expected=f"the shape {shape}",
                actual=actual,
            )

    def require_promised(self, ending: str, promise: str) -> None:
        """Raise `CheckpointError` if a tensor is missing although the configuration promises it."""
        if not self.has(ending):
            raise CheckpointError(
                f"{self.name(ending)}: is missing, although the configuration sets {promise}; "
                f"{CORRECT}"
            )

    def group_width(self, ending: str, dtypes: str, shape: tuple[int, int]) -> int:
        """Return the number of columns that share a scale, for scales (outputs, groups).

        Parameters
        ----------
        ending, dtypes
            The tensor of the scales, and the types that it may have, as for `shape`.
        shape
            Outputs and inputs of the weight.

        Raises
        ------
        CheckpointError
            The scales have other rows than the weight, or groups that do not divide its columns.
        """
        outputs, inputs = shape
        scales_shape = self.shape(ending, dtypes)
        if scales_shape[0] != outputs:
            raise self.error(
                ending,
                f"of shape {scales_shape} for {outputs} outputs",
                expected=f"({outputs}, groups)",
                actual=scales_shape,
            )
        return group_size(inputs, scales_shape[1], self.name(ending))

    def require_group_width(self, ending: str, expected: int | None, actual: int) -> None:
        """Raise `CheckpointError` if groups have another width than configured."""
        if expected in (None, actual):
            return
        raise self.error(
            ending,
            "has groups of another size than the configuration sets",
            expected=expected,
            actual=actual,
            remedy=CORRECT,
        )

    def component(self, ending: str, rows: int = 0) -> Component:
        """Return a tensor of the module as a component of its matrix; see `Component`."""
        return Component(self.name(ending), rows)

    def small(self, ending: str) -> np.ndarray:
        """Read a small tensor as an array (values,); `CheckpointError` for a large one."""
        info = self.info(ending)
        if info.nbytes > LARGEST_DESCRIPTION:
            raise self.error(
                ending,
                "is too large for a description",
                expected=f"at most {LARGEST_DESCRIPTION:,} bytes",
                actual=f"{info.nbytes:,}",
            )
        return self.source.read([Part(self.name(ending))])[0].reshape(-1)

    def description(self, ending: str) -> dict[str, Any]:
        """Read the JSON object in a tensor of bytes; `CheckpointError` for other contents."""
        info = self.info(ending)
        value = None
        if info.dtype == "U8" and info.nbytes > 0:
            try:
                value = json.loads(self.small(ending).tobytes())
            except (ValueError, RecursionError):
                value = None
        if not isinstance(value, dict):
            raise self.error(
                ending,
                "is no description of a weight",
                expected="a JSON object in bytes (U8)",
                actual=f"{info.dtype} of shape {info.shape}",
            )
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
        """Return the matrix of this module in its stored tensors.

        Parameters
        ----------
        kind
            Format and bits for the column of a score table: ``GPTQ 4-bit``.
        shape
            Outputs and inputs of the matrix, (O, I).
        grid
            Grid of the values; None for values without a uniform grid.
        components, values, groups, note
            As in `QuantizedMatrix`.
        """
        names = {component.name for component in components.values()}
        nbytes = sum(self.source.tensors[name].nbytes for name in names)
        info = TensorInfo(kind, shape, nbytes, grid)
        return QuantizedMatrix(info, components, values, groups, note)


def with_column_factors(module: Module, matrix: QuantizedMatrix, ending: str) -> QuantizedMatrix:
    """Return a matrix (O, I) with columns multiplied by stored factors, (I,) or one number.

    A kernel multiplies the inputs of the module by these factors before the weight.
    """
    without_factors = matrix.values

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        result: np.ndarray = without_factors(stored, rows) * stored["inputs"].reshape(-1)
        return result

    nbytes = matrix.info.nbytes + module.info(ending).nbytes
    return replace(
        matrix,
        info=matrix.info._replace(nbytes=nbytes),
        components={**matrix.components, "inputs": module.component(ending)},
        values=values,
    )


def size(shape: tuple[int, ...]) -> int:
    """Return the number of values of a shape."""
    return math.prod(shape)
