"""Folders of `torch.distributed.checkpoint`: tensors in chunks, which any process may have written.

A pickle, ``.metadata``, gives each tensor's shape and chunks, and each chunk's bytes in one of the
other files, an archive of one tensor. The pickle is read as data, and may name the records of this
format and nothing else.
"""

from __future__ import annotations

import io
import math
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import MOST_AXES, MOST_VALUES, Piece, PiecedFile
from wqk.checkpoints.number_types import ITEM_BITS
from wqk.checkpoints.pickles import DataUnpickler, Record, RecordType, Refused
from wqk.checkpoints.torch_archive import TorchFile
from wqk.checkpoints.torch_pickle import DTYPES
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy as np

    from wqk.checkpoints.checkpoint import Part
    from wqk.checkpoints.files import ByteSource

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


def open_distributed(
    source: ByteSource, open_file: Callable[[str], ByteSource | None]
) -> PiecedFile:
    """All tensors of a folder of `torch.distributed.checkpoint`.

    Parameters
    ----------
    source
        The bytes of its ``.metadata``.
    open_file
        The bytes of a file beside it; None if there is no such file.

    Raises
    ------
    CheckpointError
        The description is damaged, names anything but this format's records, or has chunks that do
        not make up the tensors.
    """
    sizes, storage = _description(source)
    chunks: dict[str, tuple[Chunk, ...]] = {}
    tensors: dict[str, TensorInfo] = {}
    try:
        for name, record in sizes.items():
            if record.kind == "TensorStorageMetadata" and not name.startswith(OPTIMIZER):
                tensors[name], chunks[name] = _tensor(name, record.state, storage)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{source.name}: describes a tensor in an unknown way ({first_line(error)})"
        ) from None

    @cache
    def opened(file: str) -> ByteSource:
        found = open_file(file)
        if found is None:
            raise CheckpointError(f"{source.name}: names {file}, which is missing")
        return found

    def piece(name: str, chunk: Chunk) -> Piece:
        stored = Slice(opened(chunk.file), chunk.offset, chunk.length, name)

        def read(part: Part) -> np.ndarray:
            archive = TorchFile(stored, bare=True)
            found, dtype = archive.tensors.get(""), tensors[name].dtype
            if found is None or (found.shape, found.dtype) != (chunk.shape, dtype):
                raise CheckpointError(
                    f"{source.name}: a chunk of {name!r} in {chunk.file} is not the {dtype} of "
                    f"shape {chunk.shape} that is described"
                )
            return archive.read(part)

        return Piece(chunk.begin, chunk.shape, read)

    pieces = {name: [piece(name, one) for one in many] for name, many in chunks.items()}
    return PiecedFile(source, tensors, pieces)


def _description(
    source: ByteSource,
) -> tuple[dict[str, Record], dict[tuple[str, tuple[int, ...]], Record]]:
    """Descriptions by tensor, and the places of chunks by tensor and offset."""
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
        raise ValueError("a shape is not a tuple, or has too many axes")
    if not all(type(n) is int and 0 <= n < 2**63 for n in value):
        raise ValueError("a shape with entries other than whole numbers")
    return value
