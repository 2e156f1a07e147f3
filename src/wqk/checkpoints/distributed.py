"""Folders of `torch.distributed.checkpoint`: tensors in chunks, which any process may have written.

A pickle, ``.metadata``, gives each tensor's shape and chunks, and each chunk's bytes in one of the
other files, an archive of one tensor. The pickle is read as data, and may name the records of this
format and nothing else.
"""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import Piece, PiecedFile, check_sizes
from wqk.checkpoints.number_types import ITEM_BITS
from wqk.checkpoints.pickles import DTYPES, DataUnpickler, Record, RecordType, Refused
from wqk.checkpoints.torch_archive import TorchFile
from wqk.errors import CheckpointError, errors_about, first_line, shown

if TYPE_CHECKING:
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


class Slice:
    """Some bytes of a source, as a source."""

    def __init__(self, source: ByteSource, offset: int, length: int, name: str) -> None:
        beyond = offset + length - source.size
        if beyond > 0:
            raise CheckpointError(
                f"{source.name}: {name!r} ends {beyond} bytes beyond the file: truncated"
            )
        self.name, self.size = f"{source.name} ({name})", length
        self.identity = (source.identity, offset, length)
        self._source, self._offset = source, offset

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        if offset + len(buffer) > self.size:
            raise CheckpointError(f"{self.name}: ends early")
        self._source.read_into(self._offset + offset, buffer)


def open_distributed(
    source: ByteSource, open_file: Callable[[str], ByteSource | None]
) -> PiecedFile:
    """All tensors of a folder of `torch.distributed.checkpoint`, from its ``.metadata``.

    ``open_file`` opens a file beside it; None if there is no such file. Raises `CheckpointError` if
    the description is damaged, names anything but this format's records, or has chunks that do not
    make up the tensors.
    """
    records, places = _description(source)

    @cache
    def opened(file: str) -> ByteSource:
        found = open_file(file)
        if found is None:
            raise CheckpointError(f"{source.name}: names {file}, which is missing")
        return found

    def piece(name: str, dtype: str, state: Mapping[str, Any]) -> Piece:
        begin, shape = _sizes(name, state["offsets"]), _sizes(name, state["sizes"])
        place = (places.get((name, begin)) or places[name, ()]).state
        if place.get("transform_descriptors"):
            raise ValueError(f"{name!r} is compressed")
        file, offset, length = place["relative_path"], place["offset"], place["length"]
        check_sizes(repr(name), (), (offset, length))
        if not isinstance(file, str) or PurePath(file).name != file or "\0" in file:
            raise ValueError(f"{name!r} is in {file!r}, outside of the folder")
        stored = Slice(opened(file), offset, length, name)

        def read(part: Part) -> np.ndarray:
            with errors_about(stored.name):
                archive = TorchFile(stored, bare=True)
                found = archive.tensors.get("")
                if found is None or (found.shape, found.dtype) != (shape, dtype):
                    raise CheckpointError(
                        f"a chunk of {name!r} is not the {dtype} of shape {shape} that is described"
                    )
                return archive.read(part)

        return Piece(begin, shape, read)

    tensors: dict[str, TensorInfo] = {}
    pieces: dict[str, list[Piece]] = {}
    try:
        for name, record in records.items():
            if record.kind != "TensorStorageMetadata" or name.startswith(OPTIMIZER):
                continue
            properties, shape = record.state["properties"].state, _sizes(name, record.state["size"])
            dtype = properties[0] if isinstance(properties, tuple) else properties["dtype"]
            if dtype not in ITEM_BITS:
                raise ValueError(f"{name!r} has the unknown type {shown(dtype)}")
            pieces[name] = [piece(name, dtype, chunk.state) for chunk in record.state["chunks"]]
            _check_cover(name, shape, pieces[name])
            tensors[name] = TensorInfo(dtype, shape, math.prod(shape) * ITEM_BITS[dtype] // 8)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"describes a tensor in an unknown way ({first_line(error)})"
        ) from None
    return PiecedFile(source, tensors, pieces)


def _description(
    source: ByteSource,
) -> tuple[dict[str, Record], dict[tuple[str, tuple[int, ...]], Record]]:
    """Descriptions by tensor, and the places of chunks by tensor and offset."""
    if source.size > LARGEST_METADATA:
        raise CheckpointError("too large for a description of tensors")
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    try:
        whole = DataUnpickler(io.BytesIO(content), KNOWN).load().state
        records = {
            name: record
            for name, record in whole["state_dict_metadata"].items()
            if isinstance(name, str) and isinstance(record, Record)
        }
        places = {
            (index.state["fqn"], index.state.get("offset") or ()): info
            for index, info in whole["storage_data"].items()
            if isinstance(info, Record)
        }
    except Refused as error:
        raise CheckpointError(
            f"contains more than the description of tensors ({first_line(error)}); "
            "loading it could execute code, so it was not loaded"
        ) from None
    except Exception as error:  # a damaged pickle fails wherever its parser stumbles
        raise CheckpointError(
            f"not a readable description of tensors ({first_line(error)})"
        ) from None
    return records, places


def _check_cover(name: str, shape: tuple[int, ...], pieces: Sequence[Piece]) -> None:
    """Refuse pieces that lie outside of a tensor, or do not make it up."""
    for piece in pieces:
        ends = [a + n for a, n in zip(piece.begin, piece.shape, strict=True)]
        if len(ends) != len(shape) or any(map(int.__gt__, ends, shape)):
            raise ValueError(f"a chunk of {name!r} is outside of it")
    if sum(math.prod(piece.shape) for piece in pieces) != math.prod(shape):
        raise ValueError(f"the chunks of {name!r} do not make it up")


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    sizes = tuple(value)
    check_sizes(repr(name), sizes)
    return sizes
