"""A matrix that is stored as codes, and the arithmetic that several formats share.

Axes: O outputs, I inputs, G groups of columns, W words.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.errors import CheckpointError

# Values of 4-bit floats (two exponent bits, one of mantissa) by their code.
FLOAT4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# Largest distance of neighboring 4-bit floats, as a share of the largest one.
FLOAT4_STEP = 1 / 6

Arrays = Mapping[str, np.ndarray]


class Component(NamedTuple):
    """One of the tensors that a matrix is stored in.

    Attributes
    ----------
    name
        Name of the tensor.
    rows
        Rows of this tensor for each row of the matrix; 0 if all of the tensor is always needed.
    """

    name: str
    rows: int = 0


@dataclass(frozen=True, eq=False)
class QuantizedMatrix:
    """A matrix that is stored as codes.

    Attributes
    ----------
    info
        Format and bits of the matrix, its shape, and the bytes of all its tensors.
    components
        Tensors to read, by their role for the matrix.
    values
        Function from the tensors that were read, and the numbers of the wanted rows, to these rows
        in float32.
    groups
        Number of groups of columns, if a column can belong to any group (role ``group_of``); else
        0.
    note
        Sentence about a contradiction of the configuration that the tensors settle; else empty.
    rows_together
        Neighboring rows that are read together, because each of them depends on all.
    """

    info: TensorInfo
    components: Mapping[str, Component]
    values: Callable[[Arrays, np.ndarray], np.ndarray]
    groups: int = 0
    note: str = ""
    rows_together: int = 1

    def parts(self, wanted: Part) -> dict[str, Part]:
        """Parts of the stored tensors that the wanted rows need, by role."""
        ranges = self._whole_ranges(wanted)
        parts = {}
        for role, (name, rows) in self.components.items():
            lines = tuple((start * rows, stop * rows) for start, stop in ranges) if rows else None
            parts[role] = Part(name, lines)
        return parts

    def read(self, wanted: Part, stored: Arrays) -> Float[np.ndarray, "rows ..."]:
        """Compute the wanted rows from the parts that were read for them."""
        rows = _row_numbers(self._whole_ranges(wanted))
        with np.errstate(all="ignore"):  # a later step reports values that are not finite
            values = self.values(stored, rows)
        if self.rows_together > 1:
            wanted_rows = _row_numbers(wanted.row_ranges(self.info.shape))
            values = values[np.searchsorted(rows, wanted_rows)]
        return values.reshape(wanted.shape(self.info.shape))

    def _whole_ranges(self, wanted: Part) -> tuple[tuple[int, int], ...]:
        """Return the wanted ranges of rows, widened to all rows that are read together."""
        ranges, together = wanted.row_ranges(self.info.shape), self.rows_together
        if together == 1:
            return ranges
        blocks = np.unique(_row_numbers(ranges) // together)
        return tuple((int(block) * together, (int(block) + 1) * together) for block in blocks)


def _row_numbers(ranges: Sequence[tuple[int, int]]) -> Int[np.ndarray, " rows"]:
    """Return the numbers of all rows in half-open ranges."""
    return np.concatenate([np.arange(start, stop) for start, stop in ranges])


def scaled(
    codes: np.ndarray,
    scales: Float[np.ndarray, "rows groups"],
    zeros: np.ndarray | None = None,
    group_of: Int[np.ndarray, " columns"] | None = None,
) -> Float[np.ndarray, "rows columns"]:
    """Subtract the zero of their group from codes (rows, I), and multiply by its scale.

    Groups are neighboring columns of equal number, unless ``group_of`` assigns them.

    Raises
    ------
    CheckpointError
        ``group_of`` names groups that do not exist.
    """
    values = codes.astype(np.float32)
    if group_of is None:
        rows, groups = values.shape[0], scales.shape[-1]
        grouped = values.reshape(rows, groups, -1)
        if zeros is not None:
            grouped -= zeros.astype(np.float32).reshape(-1, groups)[..., None]
        grouped *= scales.reshape(-1, groups)[..., None]
        return values
    is_complete = group_of.shape == values.shape[1:] and group_of.dtype.kind == "i"
    if not is_complete or not 0 <= group_of.min() <= group_of.max() < scales.shape[1]:
        raise CheckpointError(f"the groups of columns are not all among the {scales.shape[1]}")
    if zeros is not None:
        values -= zeros[:, group_of]
    values *= scales[:, group_of]
    return values


def group_size(columns: int, groups: int, name: str) -> int:
    """Return the columns of one group, if groups of equal size make up all columns."""
    if groups == 0 or columns % groups:
        raise CheckpointError(f"{name}: {groups} groups do not divide {columns} columns evenly")
    return columns // groups


def uniform_grid(bits: int, shared: int) -> Grid:
    """Return the grid of whole numbers of some bits, of which ``shared`` have one scale."""
    return Grid(shared, 2 / (2**bits - 1))


def nibbles(stored: np.ndarray) -> np.ndarray:
    """Return the low half of each byte, then its high half: (…, n) becomes (…, 2n)."""
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)


def powers_of_two(stored: np.ndarray) -> np.ndarray:
    """Return the powers of two whose exponents are stored with 127 added."""
    return np.asarray(np.ldexp(np.float32(1), stored.astype(np.int32) - 127))
