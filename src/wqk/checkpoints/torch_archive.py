"""Torch archives (``pytorch_model.bin`` and the like), read without PyTorch and without executing.

An archive is a pickle of tensors' shapes, strides and storages, and the storages' bytes: members of
a ZIP file since PyTorch 1.6, one after the other behind the pickle before. The pickle is read as
data (`wqk.checkpoints.pickles`), the rows of tensors by position, as those of safetensors files.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import threading
import zipfile
import zlib
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.number_types import ITEM_BITS, widen, widened_type
from wqk.checkpoints.pickles import DataUnpickler, Refused
from wqk.checkpoints.safetensors import MOST_AXES, MOST_VALUES
from wqk.errors import CheckpointError, first_line

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO

    from wqk.checkpoints.safetensors import ByteSource

# The description of a hundred thousand tensors takes about 20 MB.
LARGEST_PICKLE = 2**25

# Where training scripts keep the weights inside a larger dictionary, outermost first.
NESTED_UNDER = ("state_dict", "model_state_dict", "model", "module", "language_model", "encoder")

# Begins an archive from before PyTorch 1.6.
MAGIC = 0x1950A86A20F9469CFC6C

STORAGES = {
    "DoubleStorage": "F64", "FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16",
    "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
    "ByteStorage": "U8", "BoolStorage": "BOOL", "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8", "QInt8Storage": "I8", "QUInt8Storage": "U8", "QInt32Storage": "I32",
}  # fmt: skip
DTYPES = {
    "float64": "F64", "double": "F64", "float32": "F32", "float": "F32", "float16": "F16",
    "half": "F16", "bfloat16": "BF16", "int64": "I64", "long": "I64", "int32": "I32", "int": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "uint16": "U16", "uint32": "U32", "uint64": "U64",
    "bool": "BOOL", "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip

# Records that training scripts keep beside the weights: read as data, and not looked at. Pickled
# modules are not among them: what they compute depends on code that is not in the file.
INERT = (
    "torch.device", "torch.layout", "torch.strided", "torch.torch_version.", "torch._utils.",
    "torch.serialization.", "torch.storage.", "torch.nn.parameter.", "torch.optim.",
    "torch.distributed.", "numpy.", "argparse.Namespace", "types.SimpleNamespace", "pathlib.",
    "datetime.", "typing.", "omegaconf.", "pytorch_lightning.", "lightning.", "lightning_fabric.",
    "transformers.", "megatron.",
)  # fmt: skip


class Storage(NamedTuple):
    """A run of values that tensors share: its type, the key of its bytes, and how many it holds."""

    dtype: str
    key: str
    size: int


class StoredTensor(NamedTuple):
    """A tensor as an archive describes it; ``problem`` says why its values cannot be read."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: Storage | None = None
    problem: str = ""


class TorchFile:
    """One torch archive: its tensors' places, and their rows on request.

    Raises
    ------
    CheckpointError
        The file is no torch archive, is truncated, or holds anything but weights and plain values.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        self._stream = _Stream(source)
        self._lock = threading.Lock()
        # A remote archive answers all small reads of its directory from these two.
        for position in (0, max(0, source.size - 2**16)):
            source.read_into(position, memoryview(bytearray(min(2**16, source.size - position))))
        try:
            content = self._read_zip() if _begins(source, b"PK") else self._read_legacy()
        except CheckpointError:
            raise
        except Refused as error:
            raise CheckpointError(
                f"{source.name}: holds more than weights ({first_line(error)}); loading it could "
                "run code, so it was not loaded; convert it to safetensors where you trust it"
            ) from None
        except MemoryError:
            raise CheckpointError(f"{source.name}: not a readable torch archive") from None
        except Exception as error:  # a damaged archive fails wherever its parser stumbles
            raise CheckpointError(
                f"{source.name}: not a readable torch archive ({first_line(error)})"
            ) from None
        self._stored = _state_dict(content, source.name)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(t.dtype, t.shape, math.prod(t.shape) * ITEM_BITS[t.dtype] // 8)
            for name, t in self._stored.items()
        }

    def _read_zip(self) -> Any:
        archive = zipfile.ZipFile(self._stream)
        roots = [n.removesuffix("data.pkl") for n in archive.namelist() if n.endswith("/data.pkl")]
        if len(roots) != 1:
            raise CheckpointError(f"{self.source.name}: a ZIP file, but no torch archive")
        (root,) = roots
        for name in archive.namelist():
            if name.startswith(f"{root}code/") or name == f"{root}constants.pkl":
                raise CheckpointError(
                    f"{self.source.name}: a TorchScript program, which loading would execute; "
                    "save the model's state_dict() instead"
                )
        members = {info.filename.removeprefix(root): info for info in archive.infolist()}
        if "byteorder" in members and _member(archive, members["byteorder"], 16) != b"little":
            raise CheckpointError(f"{self.source.name}: its numbers are big-endian")
        content = _load(io.BytesIO(_member(archive, members["data.pkl"], LARGEST_PICKLE)))
        self._archive, self._members = archive, members
        self._starts: dict[str, int] = {}
        return content

    def _read_legacy(self) -> Any:
        self._stream.seek(0)
        if _load(self._stream) != MAGIC or _load(self._stream) != 1001:
            raise CheckpointError(f"{self.source.name}: not a readable torch archive")
        about = _load(self._stream)
        if not about.get("little_endian", True):
            raise CheckpointError(f"{self.source.name}: its numbers are big-endian")
        storages: dict[str, Storage] = {}
        content = _load(self._stream, storages)
        keys = _load(self._stream)
        position = self._stream.tell()
        self._members, self._starts = {}, {}
        for key in keys:
            self._starts[key] = position + 8  # behind the number of values
            position += 8 + storages[key].size * ITEM_BITS[storages[key].dtype] // 8
        if position != self.source.size:
            raise CheckpointError(
                f"{self.source.name}: has {self.source.size} bytes instead of {position}: truncated"
            )
        return content

    def position(self, name: str) -> int:
        """Where the tensor's storage begins, for reading in file order."""
        storage = self._stored[name].storage
        if storage is None:
            return 0
        info = self._members.get(f"data/{storage.key}")
        return info.header_offset if info else self._starts.get(storage.key, 0)

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where the part's rows lie in the file: half-open ranges of bytes.

        Empty where they are compressed. Rows of a tensor that is stored in another order come with
        everything between them.
        """
        tensor = self._checked(part.name)
        assert tensor.storage is not None
        if self._is_compressed(tensor.storage):
            return []
        item = ITEM_BITS[tensor.dtype] // 8
        if part.rows is None and tensor.storage.key not in self._starts:
            # The member's own header says where the data begins, at most so many bytes later.
            begin = self.position(part.name)
            header = 30 + len(self._members[f"data/{tensor.storage.key}"].filename) + 2**7
            stop = begin + header + tensor.storage.size * item
            return [(begin, min(stop, self.source.size))]
        start = self._start(tensor.storage, part.name)
        return [(start + a * item, start + b * item) for a, b in _runs(tensor, part)]

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""
        tensor = self._checked(part.name)
        try:
            wide = widened_type(tensor.dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{part.name}: {error}") from None
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
        """A tensor whose values are there."""
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
        """What fills a buffer from a tensor's storage, from this byte of it on."""
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
            except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
                reason = first_line(error)
                raise CheckpointError(
                    f"{self.source.name}: {name!r} is damaged ({reason})"
                ) from None

        return inflate

    def _is_compressed(self, storage: Storage) -> bool:
        info = self._members.get(f"data/{storage.key}")
        return info is not None and info.compress_type != zipfile.ZIP_STORED

    def _start(self, storage: Storage, name: str) -> int:
        """Where the bytes of a storage begin in the file, after they were found to be there."""
        if storage.key in self._starts:
            return self._starts[storage.key]
        info = self._members.get(f"data/{storage.key}")
        size = storage.size * ITEM_BITS[storage.dtype] // 8
        if info is None or info.file_size < size or info.flag_bits & 1:
            raise CheckpointError(f"{self.source.name}: the data of {name!r} is not there")
        header = bytearray(30)
        self.source.read_into(info.header_offset, memoryview(header))
        signature, name_length, extra_length = struct.unpack("<4s22xHH", header)
        start = info.header_offset + 30 + name_length + extra_length
        if signature != b"PK\3\4" or start + size > self.source.size:
            raise CheckpointError(f"{self.source.name}: the data of {name!r} is not there")
        self._starts[storage.key] = int(start)
        return int(start)


def _runs(tensor: StoredTensor, part: Part) -> list[tuple[int, int]]:
    """The values of a storage that a part needs: half-open runs."""
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


def _begins(source: ByteSource, with_bytes: bytes) -> bool:
    if source.size < len(with_bytes):
        raise CheckpointError(f"{source.name}: not a readable torch archive (it is empty)")
    start = bytearray(len(with_bytes))
    source.read_into(0, memoryview(start))
    return start == with_bytes


def _member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, limit: int) -> bytes:
    """A member's content, of at most so many bytes."""
    with archive.open(info) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise ValueError(f"{info.filename} is larger than {limit} bytes")
    return content


def _state_dict(content: Any, name: str) -> dict[str, StoredTensor]:
    """The named tensors, or those in one of the dictionaries in which scripts keep them."""
    for _ in range(4):
        if not isinstance(content, dict):
            break
        tensors = {
            key: value
            for key, value in content.items()
            if isinstance(key, str) and isinstance(value, StoredTensor)
        }
        if any("\ud800" <= character <= "\udfff" for key in tensors for character in key):
            raise CheckpointError(f"{name}: a tensor's name is no text")
        if tensors:
            return tensors
        content = next((content[key] for key in NESTED_UNDER if key in content), None)
    raise CheckpointError(f"{name}: holds no state dict of named tensors")


# The pickle


def _load(file: IO[bytes], storages: dict[str, Storage] | None = None) -> Any:
    found = {} if storages is None else storages

    def persistent_load(about: Any) -> Storage:
        match about:
            case ("storage", str(dtype), str(key), _, int(size), *view) if not any(view):
                return found.setdefault(key, Storage(dtype, key, size))
        raise pickle.UnpicklingError("a storage is described in an unknown way")

    return DataUnpickler(file, KNOWN, INERT, persistent_load).load()


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    return _typed_tensor(storage, offset, shape, stride, dtype=storage.dtype)


def _typed_tensor(
    storage: Storage,
    offset: int,
    shape: Any,
    stride: Any,
    _gradient: Any = None,
    _hooks: Any = None,
    dtype: str = "",
    *_: Any,
) -> StoredTensor:
    shape, stride = tuple(shape), tuple(stride)
    numbers = (offset, *shape, *stride)
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers) or len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor has a shape that is not made of whole numbers")
    if len(shape) > MOST_AXES or math.prod(n for n in shape if n) > MOST_VALUES:
        raise pickle.UnpicklingError("a tensor has a shape that no array can have")
    # An untyped storage counts bytes.
    size = storage.size * ITEM_BITS[storage.dtype] // ITEM_BITS[dtype]
    return StoredTensor(dtype, shape, stride, offset, Storage(dtype, storage.key, size))


def _without_values(problem: str, shape: int, dtype: int | None) -> Callable[..., StoredTensor]:
    """A reader of tensors whose values are elsewhere: shape and type are at these arguments."""

    def read(*arguments: Any) -> StoredTensor:
        value = arguments[shape] if shape < len(arguments) else ()
        numbers = value if isinstance(value, tuple) else ()
        kind = arguments[dtype] if dtype is not None and dtype < len(arguments) else "F32"
        good = all(type(n) is int and 0 <= n < 2**31 for n in numbers)
        return StoredTensor(
            kind if kind in ITEM_BITS else "F32", tuple(numbers) if good else (), problem=problem
        )

    return read


def _from_type(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """A tensor of a subclass, as the plain tensor it is made from."""
    return function(*arguments)


def _first(value: Any, *_: Any) -> Any:
    return value


KNOWN: Mapping[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _first,
    ("torch._utils", "_rebuild_qtensor"): _without_values("a quantized tensor", 2, None),
    ("torch._utils", "_rebuild_sparse_tensor"): _without_values("a sparse tensor", 9, None),
    ("torch._utils", "_rebuild_nested_tensor"): _without_values("a nested tensor", 9, None),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _without_values(
        "on the meta device: its values were not saved", 1, 0
    ),
    ("torch._tensor", "_rebuild_from_type"): _from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): lambda numbers=(): tuple(numbers),
    **{("torch", name): dtype for name, dtype in (STORAGES | DTYPES).items()},
    **{("torch.storage", name): dtype for name, dtype in STORAGES.items()},
}


class _Stream(io.BufferedReader):
    """A source of bytes as a file, which reads no more at once than there is."""

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
