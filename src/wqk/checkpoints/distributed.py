"""Folders of `torch.distributed.checkpoint`: tensors in chunks, which any process may have written.

A file ``.metadata``, a pickle, says of every tensor its shape and chunks, and of every chunk which
bytes of which file it is: an archive of one tensor each. The pickle is read as data, and may name
the records of this format and nothing else.
"""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.number_types import ITEM_BITS, widened_type
from wqk.checkpoints.pickles import DataUnpickler, Record, RecordType, Refused
from wqk.checkpoints.safetensors import MOST_AXES, MOST_VALUES
from wqk.checkpoints.torch_archive import TorchFile
from wqk.checkpoints.torch_pickle import DTYPES
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from wqk.checkpoints.safetensors import ByteSource

# The description of a million chunks.
LARGEST_METADATA = 2**28

# What an optimizer keeps of every weight.
OPTIMIZER = ("optim.", "optimizer.", "optimizers.")

_HERE = "torch.distributed.checkpoint."
RECORDS = {
    f"{_HERE}metadata": (
        "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
        "MetadataIndex", "TensorProperties", "StorageMeta", "_MEM_FORMAT_ENCODING",
    ),
    f"{_HERE}filesystem": ("_StorageInfo", "_StoragePrefix"),
    "torch.distributed._shard.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PosixPath", "WindowsPath"),
    "pathlib._local": ("PosixPath", "WindowsPath"),
}  # fmt: skip
KNOWN: Mapping[tuple[str, str], Any] = {
    **{(module, name): RecordType(name) for module, names in RECORDS.items() for name in names},
    **{("torch", name): dtype for name, dtype in DTYPES.items()},
    ("torch", "Size"): lambda numbers=(): tuple(numbers),
}


class Chunk(NamedTuple):
    """A box of a tensor: where it begins, its shape, and which bytes of which file it is."""

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    file: str
    offset: int
    length: int


class Slice:
    """Some bytes of a source, as a source."""

    def __init__(self, source: ByteSource, offset: int, length: int, name: str) -> None:
        if offset + length > source.size:
            raise CheckpointError(
                f"{source.name}: {name!r} ends {offset + length - source.size} bytes beyond the "
                "file: truncated"
            )
        self.name, self.size = f"{source.name} ({name})", length
        self._source, self._offset = source, offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        if offset + len(buffer) > self.size:
            raise CheckpointError(f"{self.name}: ends early")
        self._source.read_into(self._offset + offset, buffer)


class DistributedFile:
    """All tensors of a folder of `torch.distributed.checkpoint`.

    Parameters
    ----------
    source
        The bytes of its ``.metadata``.
    open_file
        The bytes of a file beside it; None where there is no such file.

    Raises
    ------
    CheckpointError
        The description is damaged, names anything but this format's records, or chunks that do not
        make up the tensors.
    """

    def __init__(self, source: ByteSource, open_file: Callable[[str], ByteSource | None]) -> None:
        self.source = source
        self._open = cache(open_file)
        sizes, storage = _description(source)
        self.tensors: Mapping[str, TensorInfo] = {}
        self._chunks: dict[str, tuple[Chunk, ...]] = {}
        try:
            for name, record in sizes.items():
                if record.kind == "TensorStorageMetadata" and not name.startswith(OPTIMIZER):
                    self.tensors[name], self._chunks[name] = _tensor(name, record.state, storage)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"{source.name}: describes a tensor in an unknown way ({first_line(error)})"
            ) from None
        for name, chunks in self._chunks.items():
            for chunk in chunks:
                Slice(self._file(chunk.file), chunk.offset, chunk.length, name)

    def position(self, name: str) -> int:
        """Where the tensor's first chunk begins, for reading in file order."""
        return self._chunks[name][0].offset if self._chunks[name] else 0

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """None, as they are in other files."""
        return []

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""
        info = self.tensors[part.name]
        try:
            wide = widened_type(info.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{part.name}: {error}") from None
        # Chunks that overlap could leave a gap, which must not pass for weights.
        out: np.ndarray = np.full(part.shape(info.shape), np.nan, wide)
        ranges = part.row_ranges(info.shape)
        for chunk in self._chunks[part.name]:
            if not info.shape:
                return self._piece(part.name, chunk, info.dtype).read(Part(""))
            runs = list(_overlaps(ranges, chunk.begin[0], chunk.shape[0]))
            if not runs or 0 in chunk.shape:
                continue
            own = tuple((low, low + count) for _, low, count in runs)
            rows = self._piece(part.name, chunk, info.dtype).read(Part("", own))
            across = [
                slice(a, a + n) for a, n in zip(chunk.begin[1:], chunk.shape[1:], strict=True)
            ]
            taken = 0
            for to, _, count in runs:
                out[(slice(to, to + count), *across)] = rows[taken : taken + count]
                taken += count
        return out

    def _piece(self, name: str, chunk: Chunk, dtype: str) -> TorchFile:
        """One chunk as an archive, after a look that it is what was described."""
        piece = TorchFile(
            Slice(self._file(chunk.file), chunk.offset, chunk.length, name), bare=True
        )
        found = piece.tensors.get("")
        if found is None or (found.shape, found.dtype) != (chunk.shape, dtype):
            raise CheckpointError(
                f"{self.source.name}: a chunk of {name!r} in {chunk.file} is not the {dtype} of "
                f"shape {chunk.shape} that is described"
            )
        return piece

    def _file(self, name: str) -> ByteSource:
        source = self._open(name)
        if source is None:
            raise CheckpointError(f"{self.source.name}: names {name}, which is missing")
        return source


def _description(
    source: ByteSource,
) -> tuple[dict[str, Record], dict[tuple[str, tuple[int, ...]], Record]]:
    """What is described by name, and where each chunk is stored by name and place."""
    if source.size > LARGEST_METADATA:
        raise CheckpointError(f"{source.name}: too large for a description of tensors")
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    try:
        whole = DataUnpickler(io.BytesIO(content), KNOWN).load().state
        sizes = {
            name: record
            for name, record in whole["state_dict_metadata"].items()
            if isinstance(name, str) and isinstance(record, Record)
        }
        storage = {
            (index.state["fqn"], index.state.get("offset") or ()): info
            for index, info in whole["storage_data"].items()
            if isinstance(info, Record)
        }
    except Refused as error:
        raise CheckpointError(
            f"{source.name}: contains more than the description of tensors ({first_line(error)}); "
            "loading it could execute code, so it was not loaded"
        ) from None
    except Exception as error:  # a damaged pickle fails wherever its parser stumbles
        raise CheckpointError(
            f"{source.name}: not a readable description of tensors ({first_line(error)})"
        ) from None
    return sizes, storage


def _tensor(
    name: str, state: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...]], Record]
) -> tuple[TensorInfo, tuple[Chunk, ...]]:
    properties = state["properties"].state
    dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
    shape = _numbers(state["size"])
    if dtype not in ITEM_BITS or math.prod(n for n in shape if n) > MOST_VALUES:
        raise ValueError(f"{name!r} has an impossible type or shape")
    chunks = tuple(_chunk(name, record.state, storage) for record in state["chunks"])
    for chunk in chunks:
        ends = [a + n for a, n in zip(chunk.begin, chunk.shape, strict=True)]
        if len(ends) != len(shape) or any(map(int.__gt__, ends, shape)):
            raise ValueError(f"a chunk of {name!r} is outside of it")
    values = math.prod(shape)
    if sum(math.prod(chunk.shape) for chunk in chunks) != values:
        raise ValueError(f"the chunks of {name!r} do not make it up")
    return TensorInfo(dtype, shape, values * ITEM_BITS[dtype] // 8), chunks


def _chunk(
    name: str, state: Mapping[str, Any], storage: Mapping[tuple[str, tuple[int, ...]], Record]
) -> Chunk:
    begin, shape = _numbers(state["offsets"]), _numbers(state["sizes"])
    stored = (storage.get((name, begin)) or storage[name, ()]).state
    if stored.get("transform_descriptors"):
        raise ValueError(f"{name!r} is compressed")
    file, offset, length = stored["relative_path"], stored["offset"], stored["length"]
    _numbers((offset, length))
    if not isinstance(file, str) or PurePath(file).name != file or "\0" in file:
        raise ValueError(f"{name!r} is in {file!r}, outside of the folder")
    return Chunk(begin, shape, file, offset, length)


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, tuple) or len(value) > MOST_AXES:
        raise ValueError("a shape that is none")
    if not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError("a shape with entries other than whole numbers")
    return value


def _overlaps(
    ranges: tuple[tuple[int, int], ...], begin: int, count: int
) -> Iterator[tuple[int, int, int]]:
    """Runs of rows in both: where they go, where they are in the chunk, and how many."""
    to = 0
    for start, stop in ranges:
        low, high = max(start, begin), min(stop, begin + count)
        if low < high:
            yield to + low - start, low - begin, high - low
        to += stop - start
