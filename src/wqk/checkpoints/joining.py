"""Tensor-parallel files as one: tensors that are split over several files, joined on reading."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from wqk.checkpoints.stored import WeightFile


class JoinedFile:
    """Files that each hold some rows or columns of a model's tensors, in order.

    Parameters
    ----------
    files
        The files.
    axis
        Along which axis a tensor of this name and shape is split; None where every file has it all.

    Raises
    ------
    CheckpointError
        Pieces of a tensor differ in type, or along an axis that is not split.
    """

    def __init__(
        self,
        files: Sequence[WeightFile],
        axis: Callable[[str, tuple[int, ...]], int | None],
    ) -> None:
        self.source = files[0].source
        self._files = files
        self._axes: dict[str, int | None] = {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: self._joined(name, axis)
            for name in dict.fromkeys(name for file in files for name in file.tensors)
        }

    def _joined(self, name: str, axis: Callable[[str, tuple[int, ...]], int | None]) -> TensorInfo:
        pieces = [file.tensors[name] for file in self._holding(name)]
        first = pieces[0]
        along = self._axes[name] = axis(name, first.shape) if len(pieces) > 1 else None
        if along is None:
            return first
        rests = {(one.dtype, *one.shape[:along], *one.shape[along + 1 :]) for one in pieces}
        if len(rests) > 1:
            raise CheckpointError(
                f"{self.source.name}: the pieces of {name!r} in {len(pieces)} files do not fit "
                "together"
            )
        shape = list(first.shape)
        shape[along] = sum(one.shape[along] for one in pieces)
        return TensorInfo(first.dtype, tuple(shape), sum(one.nbytes for one in pieces))

    def _holding(self, name: str) -> list[WeightFile]:
        return [file for file in self._files if name in file.tensors]

    def position(self, name: str) -> int:
        """Where the first piece begins, for reading in file order."""
        return self._holding(name)[0].position(name)

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """None, as they are not all in one file."""
        return []

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""
        files, along = self._holding(part.name), self._axes[part.name]
        if along is None:
            return files[0].read(part)
        if along:
            return np.concatenate([file.read(part) for file in files], axis=along)
        wanted = part.row_ranges(self.tensors[part.name].shape)
        pieces = [piece for rows in wanted for piece in self._rows(part.name, files, *rows)]
        return np.concatenate(pieces)

    def _rows(
        self, name: str, files: Sequence[WeightFile], start: int, stop: int
    ) -> Iterator[np.ndarray]:
        """A run of rows, file by file."""
        first = 0
        for file in files:
            last = first + file.tensors[name].shape[0]
            low, high = max(start, first), min(stop, last)
            if low < high:
                yield file.read(Part(name, ((low - first, high - first),)))
            first = last
