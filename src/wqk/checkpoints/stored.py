"""Checkpoints made of files: safetensors, torch archives, wherever the files' bytes come from."""

from __future__ import annotations

from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Protocol

from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.choosing import ARCHIVES
from wqk.checkpoints.float8 import apply_scales, block_of, scale_name
from wqk.checkpoints.llama2c import LlamaFile, is_llama2c
from wqk.checkpoints.number_types import is_float8
from wqk.checkpoints.safetensors import SafetensorsFile
from wqk.checkpoints.torch_archive import TorchFile
from wqk.errors import CheckpointError, concerning

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np

    from wqk.checkpoints.safetensors import ByteSource


class WeightFile(Protocol):
    """A file of named tensors over a source of bytes."""

    source: ByteSource
    tensors: Mapping[str, TensorInfo]

    def position(self, name: str) -> int:
        """Where the tensor's data begins, for reading in file order."""

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where a part's rows lie in the file: half-open ranges of bytes."""

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""


def weight_file(source: ByteSource) -> WeightFile:
    """A file of weights, by its ending; of those called ``.bin`` some are llama2.c's."""
    ending = PurePath(source.name).suffix
    if ending == ".bin" and is_llama2c(source):
        return LlamaFile(source)
    return TorchFile(source) if ending in ARCHIVES else SafetensorsFile(source)


class StoredCheckpoint(Checkpoint):
    """One or more files of weights and a configuration."""

    def __init__(
        self,
        name: str,
        files: Sequence[WeightFile],
        config: Mapping[str, Any],
        revision: str | None = None,
        step: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        self.name, self.config, self.revision, self.step = name, config, revision, step
        self.notes = tuple(notes)
        self._file_of: dict[str, WeightFile] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor in self._file_of:
                    raise CheckpointError(f"{name}: tensor {tensor!r} occurs in two files")
                self._file_of[tensor] = file
        self._tensors = {tensor: file.tensors[tensor] for tensor, file in self._file_of.items()}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, read in the order in which they lie in the files."""
        for part in parts:
            self.info(part.name)
        order = sorted(
            range(len(parts)),
            key=lambda i: (
                id(self._file_of[parts[i].name]),
                self._file_of[parts[i].name].position(parts[i].name),
            ),
        )
        with concerning(self.name):
            arrays = {i: self._read(parts[i]) for i in order}
        return [arrays[i] for i in range(len(parts))]

    def _read(self, part: Part) -> np.ndarray:
        info = self._tensors[part.name]
        try:
            array = self._file_of[part.name].read(part)
        except MemoryError:
            raise CheckpointError(
                f"{self.name}: tensor {part.name!r}, of shape {info.shape}, does not fit in memory"
            ) from None
        if is_float8(info.dtype):
            scale = scale_name(part.name, self._tensors)
            scales = self._file_of[scale].read(Part(scale))
            rows, block = part.row_ranges(info.shape), block_of(self.config)
            apply_scales(array, scales, info.shape, rows, scale, block)
        return array
