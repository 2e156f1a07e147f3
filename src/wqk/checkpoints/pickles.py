"""Pickles read as data: tensors, plain values and records of known classes; nothing is executed.

A pickle is a program that builds an object, and may call any function by name. Here a name refers
to a reader in this module or to an inert record; every other name raises an error. Therefore a
malicious pickle can only produce wrong values. Pickles in torch archives describe tensors by their
types, shapes, strides and storages.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickle
from collections.abc import Callable, Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any, ClassVar, NamedTuple

from wqk.checkpoints.files import ITEM_BITS, check_sizes
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import Part


class Refused(pickle.UnpicklingError):
    """The pickle names a function or class that is not known as data."""


class Record:
    """An object without running its class; only its attributes are kept."""

    def __init__(self, *arguments: Any) -> None:
        self.state: Any = None  # the attributes, usually a dictionary

    def extend(self, items: Any) -> None:
        """Ignore items of a subclass of list."""

    append = extend

    def __setitem__(self, key: Any, value: Any) -> None:
        """Ignore items of a subclass of dict."""


class DataUnpickler(pickle._Unpickler):
    """Reads one pickle.

    The base class is the unpickler written in Python, because the unpickler in C allocates any size
    that a pickle claims. Classes and functions are replaced by the readers in `KNOWN`, or by
    records if they are `INERT`. The storages of tensors are added to ``storages`` by key.
    """

    # Attributes that the type stubs of the unpickler lack.
    stack: list[Any]
    append: Callable[[Any], None]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, file: IO[bytes], storages: dict[str, Storage]) -> None:
        super().__init__(file, encoding="utf-8", errors="surrogateescape")
        self._storages = storages
        # Nested tuples, by identity, with their entries.
        self._sizes: dict[int, tuple[tuple[Any, ...], int]] = {}

    def persistent_load(self, pid: Any) -> Storage:
        """Return the description of a storage outside the pickle."""
        match pid:
            case ("storage", str(dtype), str(key), _, int(size), *view) if not any(view):
                return self._storages.setdefault(key, Storage(dtype, key, size))
        raise pickle.UnpicklingError("a storage is described in an unknown way")

    def find_class(self, module: str, name: str) -> Any:
        """Return the replacement of a class or function, never the class or function."""
        full = f"{module}.{name}"
        if (module, name) not in KNOWN and not full.startswith(INERT):
            raise Refused(full)
        return KNOWN.get((module, name), Record)

    def _build(self) -> None:
        state = self.stack.pop()
        if isinstance(self.stack[-1], Record):
            self.stack[-1].state = state

    def _construct(self) -> None:
        arguments = self.stack.pop()
        self.stack[-1] = self.stack[-1](*arguments)

    def _construct_with_names(self) -> None:
        self.stack.pop()  # of the arguments
        self._construct()

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.stack[-1][_hashable(key)] = value

    def _set_items(self) -> None:
        items = self.pop_mark()
        target = self.stack[-1]
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_hashable(key)] = value

    def _add_items(self) -> None:
        self.stack[-1].extend(self.pop_mark())

    def _list(self) -> None:
        self.append([])

    def _list_of_items(self) -> None:
        self.append(self.pop_mark())

    def build_tuple(self, count: int | None) -> None:
        """Make a tuple of the last values, or of all values since the last mark."""
        if count is None:
            entries = tuple(self.pop_mark())
        else:
            entries = tuple(self.stack[-count:]) if count else ()
            del self.stack[len(self.stack) - count :]
        inner = [entry for entry in entries if type(entry) is tuple]
        if inner:
            inner_sizes = (self._sizes.get(id(entry), (entry, len(entry)))[1] for entry in inner)
            size = len(entries) + sum(inner_sizes)
            if size > LARGEST_TUPLE:
                raise pickle.UnpicklingError("a tuple whose entries name each other")
            self._sizes[id(entries)] = entries, size
        self.append(entries)

    def _refuse(self) -> None:
        raise Refused("an operation that no weights need")

    dispatch: ClassVar[dict[int, Any]] = pickle._Unpickler.dispatch | {
        pickle.BUILD[0]: _build,
        pickle.NEWOBJ[0]: _construct,
        pickle.NEWOBJ_EX[0]: _construct_with_names,
        pickle.SETITEM[0]: _set_item,
        pickle.SETITEMS[0]: _set_items,
        pickle.TUPLE[0]: lambda reader: reader.build_tuple(None),
        pickle.EMPTY_TUPLE[0]: lambda reader: reader.build_tuple(0),
        pickle.TUPLE1[0]: lambda reader: reader.build_tuple(1),
        pickle.TUPLE2[0]: lambda reader: reader.build_tuple(2),
        pickle.TUPLE3[0]: lambda reader: reader.build_tuple(3),
        # Sets become lists: to hash what a file nests takes exponential time.
        pickle.EMPTY_SET[0]: _list,
        pickle.ADDITEMS[0]: _add_items,
        pickle.FROZENSET[0]: _list_of_items,
        **dict.fromkeys(
            (
                pickle.BYTEARRAY8[0],
                pickle.NEXT_BUFFER[0],
                pickle.READONLY_BUFFER[0],
                pickle.EXT1[0],
                pickle.EXT2[0],
                pickle.EXT4[0],
                pickle.INST[0],
                pickle.OBJ[0],
            ),
            _refuse,
        ),
    }


def _hashable(key: Any) -> Any:
    """Return a dictionary's key if its hash is cheap."""
    if isinstance(key, str | int | float | bytes | Record | type | None):
        return key
    if isinstance(key, tuple) and all(isinstance(n, str | int | float | bytes) for n in key):
        return key
    raise pickle.UnpicklingError("a dictionary has a key that is neither text nor a number")


# Plain values nested deeper, longer lists, or more values in all than these describe no model.
DEEPEST = 5
LONGEST = 10_000
MOST = 2_000_000
# Entries of a tuple, written out: what a key may be is hashed.
LARGEST_TUPLE = 100_000

STORAGES = {
    "DoubleStorage": "F64",
    "FloatStorage": "F32",
    "HalfStorage": "F16",
    "BFloat16Storage": "BF16",
    "LongStorage": "I64",
    "IntStorage": "I32",
    "ShortStorage": "I16",
    "CharStorage": "I8",
    "ByteStorage": "U8",
    "BoolStorage": "BOOL",
    "ComplexFloatStorage": "C64",
    "UntypedStorage": "U8",
    "QInt8Storage": "I8",
    "QUInt8Storage": "U8",
    "QInt32Storage": "I32",
}
DTYPES = {
    "float64": "F64",
    "double": "F64",
    "float32": "F32",
    "float": "F32",
    "float16": "F16",
    "half": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "long": "I64",
    "int32": "I32",
    "int": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "uint16": "U16",
    "uint32": "U32",
    "uint64": "U64",
    "bool": "BOOL",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}

# Records that training scripts store with the weights: read as data, and ignored. Pickled modules
# are not among them: what they compute depends on code that is not in the file.
INERT = (
    "torch.device",
    "torch.layout",
    "torch.strided",
    "torch.torch_version.",
    "torch._utils.",
    "torch.serialization.",
    "torch.storage.",
    "torch.nn.parameter.",
    "torch.optim.",
    "torch.distributed.",
    "numpy.",
    "argparse.Namespace",
    "types.SimpleNamespace",
    "pathlib.",
    "datetime.",
    "typing.",
    "omegaconf.",
    "pytorch_lightning.",
    "lightning.",
    "lightning_fabric.",
    "transformers.",
    "megatron.",
)


class Storage(NamedTuple):
    """Values that tensors share: type, key of the bytes, and number of values."""

    dtype: str
    key: str
    size: int

    @property
    def nbytes(self) -> int:
        """Number of bytes of the values."""
        return self.size * ITEM_BITS[self.dtype] // 8


class StoredTensor(NamedTuple):
    """Description of a tensor in an archive.

    Attributes
    ----------
    dtype, shape
        Type and shape, as in `TensorInfo`.
    stride
        For each axis, the number of values of the storage from one entry to the next.
    offset
        Index of the first value in the storage.
    storage
        The storage; None if the tensor has no values that can be read.
    problem
        Noun phrase for a tensor without a storage: ``a sparse tensor``.
    """

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: Storage | None = None
    problem: str = ""

    @property
    def extent(self) -> int:
        """Number of values in the storage from the tensor's first to its last value."""
        return 1 + sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))

    @property
    def is_row_major(self) -> bool:
        """Return whether the tensor's values are stored row after row without gaps."""
        if math.prod(self.shape) == 0:
            return True
        expected_stride = 1
        for length, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if length != 1 and stride != expected_stride:
                return False
            expected_stride *= length
        return True

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return the half-open ranges of bytes of the storage that a part needs.

        If the tensor is not stored row by row, all bytes from the first to the last value are
        needed.
        """
        ranges = part.row_ranges(self.shape)
        values_of_row = math.prod(self.shape[1:])
        if not self.is_row_major:
            ranges, values_of_row = ((0, self.extent),), 1
        item_bytes = ITEM_BITS[self.dtype] // 8
        byte_ranges = []
        for first, last in ranges:
            start = self.offset + first * values_of_row
            stop = self.offset + last * values_of_row
            byte_ranges.append((start * item_bytes, stop * item_bytes))
        return byte_ranges


def plain(value: Any) -> Any:
    """Return only plain values; other values become None.

    From a dictionary, entries with text keys are kept; from an object, its attributes. A value with
    several occurrences counts every time, because lists that contain each other are endless.

    Examples
    --------
    >>> plain({"args": Record(), "lr": 0.1, 7: "seven", "steps": (1, 2)})
    {'args': None, 'lr': 0.1, 'steps': [1, 2]}
    """
    return _plain(value, 0, itertools.count())


def _plain(value: Any, depth: int, counter: Iterator[int]) -> Any:
    """Return one value as a plain value.

    Parameters
    ----------
    value
        The value.
    depth
        Number of containers around the value.
    counter
        Counter of the values of the whole document.
    """
    if next(counter) >= MOST:
        raise CheckpointError(
            f"holds more than {MOST:,} plain values beside its weights; save the weights alone"
        )
    if isinstance(value, Record):
        value = value.state if isinstance(value.state, dict) else None
    if isinstance(value, bool | int | float | str):
        return value
    if depth > DEEPEST or isinstance(value, StoredTensor | Storage):
        return None
    if isinstance(value, dict):
        return {k: _plain(v, depth + 1, counter) for k, v in value.items() if isinstance(k, str)}
    if isinstance(value, list | tuple):
        return [_plain(element, depth + 1, counter) for element in value[:LONGEST]]
    return None


def load(file: IO[bytes], storages: dict[str, Storage] | None = None) -> Any:
    """Return the object in a pickle; its storages are added to ``storages`` by key."""
    return DataUnpickler(file, {} if storages is None else storages).load()


def _tensor(storage: Storage, offset: int, shape: Any, stride: Any, *_: Any) -> StoredTensor:
    """Return the tensor that ``torch._utils._rebuild_tensor`` would make, of the storage's type."""
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
    """Return the tensor that ``torch._utils._rebuild_tensor_v3`` would make."""
    shape, stride = tuple(shape), tuple(stride)
    check_sizes("a tensor", shape, (offset, *stride))
    if len(shape) != len(stride):
        raise pickle.UnpicklingError("a tensor has not as many strides as axes")
    # An untyped storage counts bytes.
    size = storage.size * ITEM_BITS[storage.dtype] // ITEM_BITS[dtype]
    return StoredTensor(dtype, shape, stride, offset, Storage(dtype, storage.key, size))


def _without_values(
    problem: str, shape_index: int, dtype_index: int | None
) -> Callable[..., StoredTensor]:
    """Return a reader of tensors without values.

    Parameters
    ----------
    problem
        Noun phrase for these tensors.
    shape_index, dtype_index
        Indices of the arguments for shape and type; None if no argument is the type. Invalid values
        count as an empty shape, and as float32.
    """

    def read(*arguments: Any) -> StoredTensor:
        shape = arguments[shape_index] if shape_index < len(arguments) else ()
        is_shape = isinstance(shape, tuple) and all(
            type(length) is int and 0 <= length < 2**31 for length in shape
        )
        dtype = "F32"
        if dtype_index is not None and dtype_index < len(arguments):
            dtype = arguments[dtype_index]
        return StoredTensor(
            dtype if dtype in ITEM_BITS else "F32", shape if is_shape else (), problem=problem
        )

    return read


def _from_type(function: Any, _: Any, arguments: Any, *__: Any) -> Any:
    """Return a tensor of a subclass as the plain tensor that it was made from."""
    return function(*arguments)


def _first(value: Any, *_: Any) -> Any:
    """Return the first argument: the tensor of a parameter."""
    return value


# Modules and names of the classes of plain values.
BUILTINS = ("builtins", "__builtin__")
PLAIN_CLASSES = ("list", "dict", "tuple", "int", "float", "str", "bool", "complex", "slice")

# What stands for classes and functions: of plain values stored with weights, and of tensors.
KNOWN: Mapping[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): lambda *_: {},
    ("collections", "defaultdict"): lambda *_: {},
    ("collections", "Counter"): lambda *_: {},
    **dict.fromkeys(itertools.product(BUILTINS, PLAIN_CLASSES), Record),
    **{(module, "set"): lambda items=(): list(items) for module in BUILTINS},
    ("_codecs", "encode"): lambda text, *_: text.encode("latin1"),
    ("torch._utils", "_rebuild_tensor"): _tensor,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor,
    ("torch._utils", "_rebuild_tensor_v3"): _typed_tensor,
    ("torch._utils", "_rebuild_parameter"): _first,
    ("torch._utils", "_rebuild_parameter_with_state"): _first,
    ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _first,
    ("torch._utils", "_rebuild_qtensor"): _without_values("a quantized tensor", 2, None),
    ("torch._utils", "_rebuild_sparse_tensor"): lambda _layout, parts, *_: _without_values(
        "a sparse tensor", 2, None
    )(*parts),
    ("torch._utils", "_rebuild_nested_tensor"): _without_values("a nested tensor", 9, None),
    ("torch._utils", "_rebuild_meta_tensor_no_storage"): _without_values(
        "on the meta device: its values were not saved", 1, 0
    ),
    ("torch._tensor", "_rebuild_from_type"): _from_type,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("torch", "Size"): lambda numbers=(): tuple(map(operator.index, numbers)),
    **{("torch", name): dtype for name, dtype in (STORAGES | DTYPES).items()},
    **{("torch.storage", name): dtype for name, dtype in STORAGES.items()},
}
