"""Torch archives, such as ``pytorch_model.bin``, read without PyTorch; nothing is executed.

An archive is a pickle of tensors' shapes, strides and storages, and the storages' bytes. Since
PyTorch 1.6, these are members of a ZIP file; earlier, the bytes follow the pickle. The pickle is
read as data (`wqk.checkpoints.pickles`), and rows of tensors by position, as in safetensors files.
The state dict may be nested in larger dictionaries of training scripts.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zipfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import DOWNLOAD, ITEM_BITS, is_text, refuse_pointer, widened
from wqk.checkpoints.pickles import Refused, Storage, StoredTensor, load, plain
from wqk.errors import (
    CheckpointError,
    UnsafeCheckpoint,
    WqkError,
    errors_about,
    first_line,
    shortened,
)
from wqk.storage.byte_source import Raw, bytes_at

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import Part
    from wqk.storage.byte_source import ByteSource

# Where scripts keep the weights, first of all.
NESTED_UNDER = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "language_model",
    "encoder",
    "transformer",
)


# Keys of the state of an optimizer of PyTorch.
OPTIMIZER_KEYS = {"state", "param_groups"}


def state_dict(content: Any) -> tuple[dict[str, StoredTensor], tuple[str, ...]]:
    """Return the named tensors of an archive, and the keys of further weights that are not read.

    The tensors may be in a nested dictionary: a dictionary with a usual name, or the only one with
    tensors. Further weights are, for example, moving averages.

    Raises
    ------
    CheckpointError
        No dictionary contains named tensors, or several dictionaries do, but none has a usual name.
    """
    passed_over: list[str] = []
    held: list[str] = []
    for _ in range(4):
        if not isinstance(content, dict):
            break
        # Inner dictionaries first: a loss may lie next to them, as a tensor of its own.
        held = [k for k, v in content.items() if isinstance(k, str) and _has_tensors(v)]
        usual = [key for key in NESTED_UNDER if key in held]
        tensors = {k: v for k, v in content.items() if isinstance(v, StoredTensor)}
        if usual or (len(held) == 1 and all(len(v.shape) < 2 for v in tensors.values())):
            chosen = (usual or held)[0]
            for key in held:
                if key != chosen and _has_layers(content[key]):
                    passed_over.append(key)
            content = content[chosen]
            continue
        named = {key: value for key, value in tensors.items() if isinstance(key, str)}
        if not all(map(is_text, named)):
            raise CheckpointError(
                "a tensor's name is not text; expected no lone halves of surrogate pairs; rename "
                "it, and save the weights again"
            )
        if named:
            return named, tuple(passed_over)
        break
    remedy = "save the model's state_dict() alone"
    if isinstance(content, dict) and {*content} == OPTIMIZER_KEYS:
        remedy = "it is the state of an optimizer; give the folder, or the file of the weights"
    elif held:
        remedy = f"{' and '.join(held[:5])} may be; save one of them alone"
    raise CheckpointError(shortened(f"contains no state dict of named tensors; {remedy}"))


def _has_tensors(content: Any, depth: int = 2) -> bool:
    """Return whether a dictionary has tensors, at most ``depth`` usual nested dictionaries deep."""
    if not isinstance(content, dict):
        return False
    if any(isinstance(value, StoredTensor) for value in content.values()):
        return True
    return depth > 0 and any(_has_tensors(content.get(key), depth - 1) for key in NESTED_UNDER)


def _has_layers(content: Mapping[Any, Any]) -> bool:
    """Return whether a dictionary has tensors of numbered layers."""
    return any(re.search(r"\.\d+\.", str(name)) for name in content)


# The description of a hundred thousand tensors takes about 20 MB.
LARGEST_PICKLE = 2**25

# Begins an archive from before PyTorch 1.6.
MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_VERSION = 1001


class TorchFile:
    """A torch archive: the locations of its tensors, and their rows on request.

    Parameters
    ----------
    source
        The bytes of the archive.
    bare
        Whether the archive may also contain a single tensor, with the name "", or only plain
        values.

    Attributes
    ----------
    tensors
        The tensors by name.
    about
        Plain values that are stored with the weights, such as a configuration.
    passed_over
        Keys of further weights that are not read.

    Raises
    ------
    CheckpointError
        The file is not a torch archive, is truncated, or contains other objects than weights and
        plain values.
    """

    def __init__(self, source: ByteSource, *, bare: bool = False) -> None:
        self.source = source
        # For a remote archive: small reads of its directory lie within its first and last bytes.
        window = 2**12 if bare else 2**16
        self._stream = _BoundedReader(source, window)
        self._members: dict[str, zipfile.ZipInfo] = {}
        self._starts: dict[str, int] = {}  # storages by key
        for position in (0, max(0, source.size - window)):
            bytes_at(source, position, min(window, source.size - position))
        start = bytes_at(source, 0, min(8, source.size))
        if not start:
            raise CheckpointError(f"not a readable torch archive (it is empty); {DOWNLOAD}")
        refuse_pointer(start)
        try:
            content = self._read_zip() if start.startswith(b"PK") else self._read_legacy()
        except WqkError:
            raise
        except Refused as error:
            raise UnsafeCheckpoint(
                f"contains more than weights ({first_line(error)}); loading it could execute code, "
                "so it was not loaded; if you trust it, convert it to safetensors"
            ) from None
        except (MemoryError, KeyError):  # a key is a byte that is no instruction of a pickle
            raise CheckpointError(f"not a readable torch archive; {DOWNLOAD}") from None
        except Exception as error:  # a damaged archive may fail in any way
            raise CheckpointError(
                f"not a readable torch archive ({first_line(error)}); {DOWNLOAD}"
            ) from None
        self._stored: dict[str, StoredTensor] = {}
        self.passed_over: tuple[str, ...] = ()
        if bare and isinstance(content, StoredTensor):
            self._stored = {"": content}
        elif not bare:
            self._stored, self.passed_over = state_dict(content)
        self.about: Mapping[str, Any] = plain(content) if isinstance(content, dict) else {}
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(t.dtype, t.shape, math.prod(t.shape) * ITEM_BITS[t.dtype] // 8)
            for name, t in self._stored.items()
        }

    def _read_zip(self) -> Any:
        """Return the object in an archive since PyTorch 1.6, and store its members."""
        archive = zipfile.ZipFile(self._stream)
        roots = [n.removesuffix("data.pkl") for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(
                "a ZIP file, but not a torch archive; expected one member data.pkl, got "
                f"{len(roots)}; unpack it, or use the file that torch.save wrote"
            )
        (root,) = roots
        for name in archive.namelist():
            if name.startswith(f"{root}code/") or name == f"{root}constants.pkl":
                raise CheckpointError(
                    "a TorchScript program, which loading would execute; save the model's "
                    "state_dict() instead"
                )
        members = {info.filename.removeprefix(root): info for info in archive.infolist()}
        order = b"little"
        if "byteorder" in members:
            order = _member(archive, members["byteorder"], 16)
        _require_little_endian(order == b"little")
        self._members = members
        return load(io.BytesIO(_member(archive, members["data.pkl"], LARGEST_PICKLE)))

    def _read_legacy(self) -> Any:
        """Return the object in an older archive, and store the offsets of its storages.

        Such a file is a sequence: pickles of magic bytes, a version and the system; the object; the
        keys of the storages; then, for each storage, 8 bytes of its length and its values.
        """
        self._stream.seek(0)
        if load(self._stream) != MAGIC or load(self._stream) != LEGACY_VERSION:
            raise CheckpointError(f"not a readable torch archive; {DOWNLOAD}")
        _require_little_endian(load(self._stream).get("little_endian", True))
        storages: dict[str, Storage] = {}
        content = load(self._stream, storages)
        keys = load(self._stream)
        position = self._stream.tell()
        for key in keys:
            self._starts[key] = position + 8  # behind the number of values
            position += 8 + storages[key].nbytes
        if position != self.source.size:
            raise CheckpointError(
                f"has {self.source.size} bytes instead of {position}: truncated; {DOWNLOAD}"
            )
        return content

    def first_value(self, name: str) -> int:
        """Return the offset of a tensor's first value in the file.

        Raises
        ------
        CheckpointError
            The tensor is not stored row by row, or its values are missing.
        """
        tensor, storage = self._checked(name)
        if not tensor.is_row_major:
            raise CheckpointError(
                "is not stored row by row; expected a contiguous tensor; save it again with "
                ".contiguous()"
            )
        return self._start(storage, name) + tensor.offset * ITEM_BITS[tensor.dtype] // 8

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return the half-open ranges of bytes of a part's rows in the file.

        If the tensor is not stored row by row, the ranges include all bytes between the rows.
        """
        with errors_about(self.source.name):
            tensor, storage = self._checked(part.name)
            if part.rows is None and storage.key not in self._starts:
                # The member's own header says where data begins, at most this many bytes later.
                info = self._member_of(storage, part.name)
                header = 30 + len(info.filename) + 2**7
                stop = info.header_offset + header + storage.nbytes
                return [(info.header_offset, min(stop, self.source.size))]
            return self._ranges(tensor, storage, part)

    def read(self, part: Part) -> np.ndarray:
        """Read the part's rows, joined, widened to float32 (float64 stays)."""
        with errors_about(self.source.name):
            tensor, storage = self._checked(part.name)
            ranges = self._ranges(tensor, storage, part)
            values = widened(tensor.dtype, ranges, self.source.read_into, part.name)
        if tensor.is_row_major:
            return values.reshape(part.shape(tensor.shape))
        strides = [n * values.itemsize for n in tensor.stride]
        array = np.lib.stride_tricks.as_strided(values, tensor.shape, strides, writeable=False)
        if part.rows is None:
            return np.ascontiguousarray(array)
        return np.concatenate([array[start:stop] for start, stop in part.row_ranges(tensor.shape)])

    def _checked(self, name: str) -> tuple[StoredTensor, Storage]:
        """Return a tensor and its storage, after a check that the tensor's values exist."""
        tensor = self._stored[name]
        if tensor.storage is None:
            raise CheckpointError(
                f"{name!r} is {tensor.problem}; expected a dense tensor with values; save it as one"
            )
        values, size = math.prod(tensor.shape), tensor.storage.size
        if values and max(values, tensor.offset + tensor.extent) > size:
            raise CheckpointError(
                f"{name!r} of shape {tensor.shape} claims more values than the {size} that are "
                f"stored; {DOWNLOAD}"
            )
        return tensor, tensor.storage

    def _ranges(self, tensor: StoredTensor, storage: Storage, part: Part) -> list[tuple[int, int]]:
        start = self._start(storage, part.name)
        return [(start + a, start + b) for a, b in tensor.byte_ranges(part)]

    def _member_of(self, storage: Storage, name: str) -> zipfile.ZipInfo:
        """Return the member with a storage of the tensor ``name``."""
        info = self._members.get(f"data/{storage.key}")
        if info is None or info.file_size < storage.nbytes or info.flag_bits & 1:
            raise CheckpointError(f"the data of {name!r} is missing; {DOWNLOAD}")
        if info.compress_type != zipfile.ZIP_STORED:
            raise CheckpointError(
                f"the data of {name!r} is compressed, which torch.save does not do; load it in "
                "PyTorch, and save it again"
            )
        return info

    def _start(self, storage: Storage, name: str) -> int:
        """Return the offset of a storage's bytes in the file, after a check of their number."""
        if storage.key not in self._starts:
            info = self._member_of(storage, name)
            header = bytes_at(self.source, info.header_offset, 30)
            signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
            start = info.header_offset + 30 + name_length + extra_length
            if signature != b"PK\3\4" or start + storage.nbytes > self.source.size:
                raise CheckpointError(f"the data of {name!r} is missing; {DOWNLOAD}")
            self._starts[storage.key] = start
        return self._starts[storage.key]


def _require_little_endian(stored: bool) -> None:
    if not stored:
        raise CheckpointError(
            "stored in big-endian byte order, which is not supported; expected little-endian; save "
            "it on such a machine"
        )


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """Return a member's content, up to ``limit`` bytes."""
    with archive.open(info) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{info.filename} is larger than {limit} bytes")
    return content


class _BoundedReader(io.BufferedReader):
    """A source of bytes as a file that never allocates more than the remaining bytes."""

    def __init__(self, source: ByteSource, ahead: int) -> None:
        super().__init__(Raw(source), ahead)
        self._size = source.size

    def read(self, size: int | None = -1) -> bytes:
        remaining = self._size - self.tell()
        return super().read(remaining if size is None or size < 0 else min(size, remaining))

    def readline(self, size: int | None = -1) -> bytes:
        return super().readline(2**16)
