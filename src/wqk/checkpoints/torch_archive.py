"""Torch archives (``pytorch_model.bin`` and the like), read without PyTorch; nothing is executed.

An archive is a pickle of tensors' shapes, strides and storages, and the storages' bytes: members of
a ZIP file since PyTorch 1.6; earlier, one after the other behind the pickle. The pickle is read as
data (`wqk.checkpoints.pickles`), rows of tensors by position, as in safetensors files.
"""

from __future__ import annotations

import io
import math
import struct
import threading
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.files import refuse_pointer
from wqk.checkpoints.number_types import ITEM_BITS, widen, widened_type
from wqk.checkpoints.pickles import Refused
from wqk.checkpoints.torch_pickle import Storage, StoredTensor, load, plain, state_dict
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from wqk.checkpoints.files import ByteSource

# The description of a hundred thousand tensors takes about 20 MB.
LARGEST_PICKLE = 2**25

# Begins an archive from before PyTorch 1.6.
MAGIC = 0x1950A86A20F9469CFC6C


class TorchFile:
    """One torch archive: its tensors' places, and their rows on request.

    ``about`` has the plain values that are stored with the weights, such as a configuration. A
    ``bare`` archive holds one tensor instead of a dictionary, whose name is then empty. Raises
    `CheckpointError` for a file that is not a torch archive, is truncated, or holds anything but
    weights and plain values.
    """

    def __init__(self, source: ByteSource, bare: bool = False) -> None:
        self.source = source
        self._stream = _Stream(source)
        self._lock = threading.Lock()
        # For a remote archive: all small reads of its directory lie within these two.
        for position in (0, max(0, source.size - 2**16)):
            source.read_into(position, memoryview(bytearray(min(2**16, source.size - position))))
        try:
            start = _start(source)
            refuse_pointer(start, source.name)
            content = self._read_zip() if start.startswith(b"PK") else self._read_legacy()
        except CheckpointError:
            raise
        except Refused as error:
            raise CheckpointError(
                f"{source.name}: contains more than weights ({first_line(error)}); loading it "
                "could execute code, so it was not loaded; if you trust it, convert it to "
                "safetensors"
            ) from None
        except (MemoryError, KeyError):  # a key is a byte that is no instruction of a pickle
            raise CheckpointError(f"{source.name}: not a readable torch archive") from None
        except Exception as error:  # a damaged archive may fail in any way
            raise CheckpointError(
                f"{source.name}: not a readable torch archive ({first_line(error)})"
            ) from None
        if bare and isinstance(content, StoredTensor):
            content = {"": content}
        self._stored = state_dict(content, source.name)
        self.about: Mapping[str, Any] = plain(content) if isinstance(content, dict) else {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(t.dtype, t.shape, math.prod(t.shape) * ITEM_BITS[t.dtype] // 8)
            for name, t in self._stored.items()
        }

    def _read_zip(self) -> Any:
        archive = zipfile.ZipFile(self._stream)
        roots = [n.removesuffix("data.pkl") for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(f"{self.source.name}: a ZIP file, but not a torch archive")
        (root,) = roots
        for name in archive.namelist():
            if name.startswith(f"{root}code/") or name == f"{root}constants.pkl":
                raise CheckpointError(
                    f"{self.source.name}: a TorchScript program, which loading would execute; "
                    "save the model's state_dict() instead"
                )
        members = {info.filename.removeprefix(root): info for info in archive.infolist()}
        if "byteorder" in members and _member(archive, members["byteorder"], 16) != b"little":
            raise CheckpointError(
                f"{self.source.name}: stored in big-endian byte order, which is not supported"
            )
        content = load(io.BytesIO(_member(archive, members["data.pkl"], LARGEST_PICKLE)))
        self._archive, self._members = archive, members
        self._starts: dict[str, int] = {}
        return content

    def _read_legacy(self) -> Any:
        self._stream.seek(0)
        if load(self._stream) != MAGIC or load(self._stream) != 1001:
            raise CheckpointError(f"{self.source.name}: not a readable torch archive")
        about = load(self._stream)
        if not about.get("little_endian", True):
            raise CheckpointError(
                f"{self.source.name}: stored in big-endian byte order, which is not supported"
            )
        storages: dict[str, Storage] = {}
        content = load(self._stream, storages)
        keys = load(self._stream)
        position = self._stream.tell()
        self._members, self._starts = {}, {}
        for key in keys:
            self._starts[key] = position + 8  # behind the number of values
            position += 8 + _size(storages[key])
        if position != self.source.size:
            raise CheckpointError(
                f"{self.source.name}: has {self.source.size} bytes instead of {position}: truncated"
            )
        return content

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where the part's rows lie in the file: half-open ranges of bytes; none if compressed.

        Rows of a tensor that is not stored row by row come with everything between them.
        """
        tensor = self._checked(part.name)
        assert tensor.storage is not None
        if self._is_compressed(tensor.storage):
            return []
        item = ITEM_BITS[tensor.dtype] // 8
        if part.rows is None and tensor.storage.key not in self._starts:
            # The member's own header says where the data begins, at most this many bytes later.
            info = self._member_of(tensor.storage, part.name)
            header = 30 + len(info.filename) + 2**7
            stop = info.header_offset + header + tensor.storage.size * item
            return [(info.header_offset, min(stop, self.source.size))]
        start = self._start(tensor.storage, part.name)
        return [(start + a * item, start + b * item) for a, b in _runs(tensor, part)]

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""
        tensor = self._checked(part.name)
        wide = widened_type(tensor.dtype, part.name)
        item = ITEM_BITS[tensor.dtype] // 8
        runs = _runs(tensor, part)
        values: np.ndarray = np.empty(sum(stop - start for start, stop in runs), wide)
        filled = 0
        for start, stop in runs:
            read = self._reader(tensor, part.name, start * item)
            widen(tensor.dtype, read, values[filled : filled + stop - start])
            filled += stop - start
        if _is_row_major(tensor):
            return values.reshape(part.shape(tensor.shape))
        strides = [n * values.itemsize for n in tensor.stride]
        whole = np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)
        if part.rows is None:
            return np.ascontiguousarray(whole)
        return np.concatenate([whole[start:stop] for start, stop in part.row_ranges(tensor.shape)])

    def _checked(self, name: str) -> StoredTensor:
        """A tensor, after a check that its values exist."""
        tensor = self._stored[name]
        if tensor.storage is None:
            raise CheckpointError(f"{self.source.name}: {name!r} is {tensor.problem}")
        last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
        values = math.prod(tensor.shape)
        if (values and tensor.offset + last >= tensor.storage.size) or values > tensor.storage.size:
            raise CheckpointError(
                f"{self.source.name}: {name!r} of shape {tensor.shape} claims more values than the "
                f"{tensor.storage.size} that are stored"
            )
        return tensor

    def _reader(
        self, tensor: StoredTensor, name: str, begin: int
    ) -> Callable[[int, memoryview], None]:
        """A function that fills a buffer from a tensor's storage, beginning at this byte."""
        assert tensor.storage is not None
        if not self._is_compressed(tensor.storage):
            start = self._start(tensor.storage, name)
            return lambda offset, buffer: self.source.read_into(start + begin + offset, buffer)
        info = self._members[f"data/{tensor.storage.key}"]

        def inflate(offset: int, buffer: memoryview) -> None:
            try:
                with self._lock, self._archive.open(info) as member:
                    member.seek(begin + offset)
                    filled = 0
                    while filled < len(buffer):
                        count = member.readinto(buffer[filled:])  # type: ignore[attr-defined]
                        if not count:
                            raise EOFError("it ends early")
                        filled += count
            except CheckpointError:
                raise
            except Exception as error:  # a damaged member may fail in any way
                reason = first_line(error)
                raise CheckpointError(
                    f"{self.source.name}: {name!r} is damaged ({reason})"
                ) from None

        return inflate

    def _is_compressed(self, storage: Storage) -> bool:
        info = self._members.get(f"data/{storage.key}")
        return info is not None and info.compress_type != zipfile.ZIP_STORED

    def _member_of(self, storage: Storage, name: str) -> zipfile.ZipInfo:
        """The member that holds a storage of the tensor of this name."""
        info = self._members.get(f"data/{storage.key}")
        if info is None or info.file_size < _size(storage) or info.flag_bits & 1:
            raise CheckpointError(f"{self.source.name}: the data of {name!r} is missing")
        return info

    def _start(self, storage: Storage, name: str) -> int:
        """Where the bytes of a storage begin in the file, after a check that they exist."""
        if storage.key in self._starts:
            return self._starts[storage.key]
        info, size = self._member_of(storage, name), _size(storage)
        header = bytearray(30)
        self.source.read_into(info.header_offset, memoryview(header))
        signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
        start = info.header_offset + 30 + name_length + extra_length
        if signature != b"PK\3\4" or start + size > self.source.size:
            raise CheckpointError(f"{self.source.name}: the data of {name!r} is missing")
        self._starts[storage.key] = int(start)
        return int(start)


def _size(storage: Storage) -> int:
    """Bytes of a storage."""
    return storage.size * ITEM_BITS[storage.dtype] // 8


def _runs(tensor: StoredTensor, part: Part) -> list[tuple[int, int]]:
    """The values of a storage that a part needs, as half-open runs."""
    if _is_row_major(tensor):
        row = math.prod(tensor.shape[1:])
        ranges = part.row_ranges(tensor.shape)
        return [(tensor.offset + a * row, tensor.offset + b * row) for a, b in ranges]
    part.row_ranges(tensor.shape)
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride, strict=True))
    return [(tensor.offset, tensor.offset + last + 1)]


def _is_row_major(tensor: StoredTensor) -> bool:
    """Whether values lie row after row without gaps."""
    step = 1
    for n, stride in zip(reversed(tensor.shape), reversed(tensor.stride), strict=True):
        if n != 1 and stride != step:
            return math.prod(tensor.shape) == 0
        step *= n
    return True


def _start(source: ByteSource) -> bytearray:
    start = bytearray(min(8, source.size))
    source.read_into(0, memoryview(start))
    if not start:
        raise CheckpointError(f"{source.name}: not a readable torch archive (it is empty)")
    return start


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """A member's content, up to this many bytes."""
    with archive.open(info) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{info.filename} is larger than {limit} bytes")
    return content


class _Stream(io.BufferedReader):
    """A source of bytes as a file that never allocates more than there is to read."""

    def __init__(self, source: ByteSource) -> None:
        super().__init__(_Raw(source), 2**16)
        self._size = source.size

    def read(self, size: int | None = -1) -> bytes:
        rest = self._size - self.tell()
        return super().read(rest if size is None or size < 0 else min(size, rest))

    def readline(self, size: int | None = -1) -> bytes:
        return super().readline(2**16)


class _Raw(io.RawIOBase):
    def __init__(self, source: ByteSource) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        count = max(0, min(len(buffer), self._source.size - self._position))
        self._source.read_into(self._position, memoryview(buffer)[:count])
        self._position += count
        return count
