"""A matrix that is stored as codes, and the arithmetic that several formats share.

A code is a small whole number. Its value is (code − zero) · scale, with the scale and the zero of
its group of columns; or the value of a small float, times a scale.

Axes: O outputs, I inputs, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.errors import CheckpointError

# Values of 4-bit floats (E2M1) by their code. From the highest bit: 1 sign, 2 exponent (bias 1),
# 1 mantissa.
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# Distance of neighboring 4-bit floats from 2 to 4, as a share of the largest one, 6. Below 2 they
# are closer, and 4 and 6 are twice as far apart. With this step, the expected rounding of normal
# weights is to the measured one as on an even grid.
FLOAT4_STEP = 1 / 6

# Tensors already read, by role.
Arrays = Mapping[str, np.ndarray]


class Component(NamedTuple):
    """One of the stored tensors of a matrix.

    Attributes
    ----------
    name
        Name of the tensor.
    rows
        Rows of this tensor for each row of the matrix; 0 if the whole tensor is always needed.
    """

    name: str
    rows: int = 0


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix that is stored as codes.

    Attributes
    ----------
    info
        Format, bits and shape of the matrix, and the bytes of all tensors.
    components
        Tensors to read, by their role for the matrix.
    values
        Function of the tensors that were read and the numbers of the requested rows; it returns
        these rows in float32.
    groups
        Number of groups of columns, if a column can belong to any group (role ``group_of``); else
        0.
    note
        Sentence about a contradiction between configuration and tensors; else empty.
    rows_together
        Number of neighboring rows that are read together, because each row depends on all of them.
    """

    info: TensorInfo
    components: Mapping[str, Component]
    values: Callable[[Arrays, np.ndarray], np.ndarray]
    groups: int = 0
    note: str = ""
    rows_together: int = 1

    def parts(self, wanted: Part) -> dict[str, Part]:
        """Return the parts of the stored tensors for the requested rows, by role."""
        ranges = self._whole_ranges(wanted)
        parts = {}
        for role, component in self.components.items():
            if component.rows == 0:
                parts[role] = Part(component.name)
                continue
            stored_rows = tuple(
                (start * component.rows, stop * component.rows) for start, stop in ranges
            )
            parts[role] = Part(component.name, stored_rows)
        return parts

    def read(self, wanted: Part, stored: Arrays) -> Float[np.ndarray, "rows ..."]:
        """Return the requested rows, computed from the parts that were read.

        Parameters
        ----------
        wanted
            The matrix, or some of its rows.
        stored
            Arrays of the parts that `parts` returns for ``wanted``, by role.
        """
        rows = _row_numbers(self._whole_ranges(wanted))
        with np.errstate(all="ignore"):  # a later step reports values that are not finite
            values = self.values(stored, rows)
        if self.rows_together > 1:
            wanted_rows = _row_numbers(wanted.row_ranges(self.info.shape))
            values = values[np.searchsorted(rows, wanted_rows)]
        return values.reshape(wanted.shape(self.info.shape))

    def _whole_ranges(self, wanted: Part) -> tuple[tuple[int, int], ...]:
        """Return ranges of rows, extended to all rows that are read together."""
        ranges = wanted.row_ranges(self.info.shape)
        height = self.rows_together
        if height == 1:
            return ranges
        blocks = np.unique(_row_numbers(ranges) // height).tolist()
        return tuple((block * height, (block + 1) * height) for block in blocks)


def _row_numbers(ranges: Sequence[tuple[int, int]]) -> Int[np.ndarray, " rows"]:
    """Return the numbers of all rows in half-open ranges."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def scaled(
    codes: np.ndarray,
    scales: Float[np.ndarray, "rows groups"],
    zeros: np.ndarray | None = None,
    group_of: Int[np.ndarray, " columns"] | None = None,
) -> Float[np.ndarray, "rows columns"]:
    """Return (code − zero) · scale, with the zero and the scale of the group of each column.

    Parameters
    ----------
    codes
        Codes or small floats (rows, I).
    scales, zeros
        One number for each row and group, (rows, G); without zeros, nothing is subtracted.
    group_of
        Group of each column, (I,). By default, neighboring columns in groups of equal size.

    Raises
    ------
    CheckpointError
        ``group_of`` contains groups that do not exist.

    Examples
    --------
    >>> codes = np.array([[1, 2, 3, 4]])
    >>> scaled(codes, np.array([[1.0, 10.0]]))
    array([[ 1.,  2., 30., 40.]], dtype=float32)
    >>> scaled(codes, np.array([[1.0, 10.0]]), group_of=np.array([0, 1, 0, 1]))
    array([[ 1., 20.,  3., 40.]], dtype=float32)
    """
    values = codes.astype(np.float32)
    if group_of is None:
        rows, groups = values.shape[0], scales.shape[-1]
        grouped = values.reshape(rows, groups, -1)
        if zeros is not None:
            grouped -= zeros.astype(np.float32).reshape(-1, groups)[..., None]
        grouped *= scales.reshape(-1, groups)[..., None]
        return values
    _require_groups(group_of, columns=values.shape[1], groups=scales.shape[1])
    if zeros is not None:
        values -= zeros[:, group_of]
    values *= scales[:, group_of]
    return values


def _require_groups(group_of: np.ndarray, *, columns: int, groups: int) -> None:
    """Raise `CheckpointError` unless each column belongs to an existing group."""
    is_complete = group_of.shape == (columns,) and group_of.dtype.kind == "i"
    if not is_complete or group_of.min() < 0 or group_of.max() >= groups:
        actual = f"{group_of.dtype} of shape {group_of.shape}"
        if is_complete:
            actual = f"groups {group_of.min()} to {group_of.max()}"
        raise CheckpointError(
            f"group of each column: names groups without a scale; expected {columns} groups from 0 "
            f"to {groups - 1}, got {actual}; use the original checkpoint, or quantize it again"
        )


def group_size(columns: int, groups: int, name: str) -> int:
    """Return the number of columns of each group.

    Parameters
    ----------
    columns, groups
        Number of all columns, and of groups.
    name
        Tensor with one entry for each group, for the message.

    Raises
    ------
    CheckpointError
        The columns do not divide into groups of equal size.
    """
    if groups == 0 or columns % groups:
        raise CheckpointError(
            f"{name}: {groups} groups do not divide {columns} columns evenly; expected a divisor "
            f"of {columns}, got {groups}; use the original checkpoint, or quantize it again"
        )
    return columns // groups


def ceil_divide(count: int, size: int) -> int:
    """Return count / size, rounded up: the number of parts of at most ``size``.

    Examples
    --------
    >>> ceil_divide(12, 4), ceil_divide(13, 4)
    (3, 4)
    """
    return -(-count // size)


def uniform_grid(bits: int, shared: int) -> Grid:
    """Return the grid of whole numbers of some bits; ``shared`` values have one scale."""
    return Grid(shared, 2 / (2**bits - 1))


def nibbles(stored: np.ndarray) -> np.ndarray:
    """Return the low four bits of each byte, then its high four bits: (…, n) becomes (…, 2n).

    Examples
    --------
    >>> nibbles(np.array([0x21, 0x43], np.uint8))
    array([1, 2, 3, 4], dtype=uint8)
    """
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)


def powers_of_two(stored: np.ndarray) -> np.ndarray:
    """Return the powers of two whose exponents are stored with 127 added (E8M0), in float32.

    Examples
    --------
    >>> powers_of_two(np.array([126, 127, 130], np.uint8))
    array([0.5, 1. , 8. ], dtype=float32)
    """
    return np.asarray(np.ldexp(np.float32(1), stored.astype(np.int32) - 127))
