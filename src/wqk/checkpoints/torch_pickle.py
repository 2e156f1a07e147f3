"""The pickle in a torch archive: tensors' types, shapes, strides and storages."""

from __future__ import annotations

import math
import pickle
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.files import MOST_AXES, MOST_VALUES
from wqk.checkpoints.number_types import ITEM_BITS
from wqk.checkpoints.pickles import DataUnpickler, Record
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import IO

# Where training scripts keep the weights inside a larger dictionary, outermost first.
NESTED_UNDER = (
    "state_dict", "model_state_dict", "model", "module", "language_model", "encoder", "transformer",
)  # fmt: skip

# Plain values nested deeper than this, or longer lists, describe no model.
DEEPEST, LONGEST = 5, 10_000

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

# Records that training scripts store with the weights: read as data, and ignored. Pickled modules
# are not among them: what they compute depends on code that is not in the file.
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
    """A tensor as an archive describes it."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...] = ()
    offset: int = 0
    storage: Storage | None = None
    problem: str = ""  # why its values cannot be read


def state_dict(content: Any, name: str) -> dict[str, StoredTensor]:
    """The named tensors, or those in a nested dictionary in which scripts keep them."""
    for _ in range(4):
        if not isinstance(content, dict):
            break
        # Inner dictionaries first: a loss may stand beside them, as a tensor of its own.
        inner = next((content[key] for key in NESTED_UNDER if _has_tensors(content.get(key))), None)
        if inner is not None:
            content = inner
            continue
        tensors = {
            key: value
            for key, value in content.items()
            if isinstance(key, str) and isinstance(value, StoredTensor)
        }
        if any("\ud800" <= character <= "\udfff" for key in tensors for character in key):
            raise CheckpointError(f"{name}: a tensor's name is not text")
        if tensors:
            return tensors
        break
    raise CheckpointError(f"{name}: contains no state dict of named tensors")


def _has_tensors(content: Any, depth: int = 3) -> bool:
    """Whether there are tensors in a dictionary, or in one nested in it."""
    return isinstance(content, dict) and (
        any(isinstance(value, StoredTensor) for value in content.values())
        or (depth > 0 and any(_has_tensors(content.get(key), depth - 1) for key in NESTED_UNDER))
    )


def plain(value: Any, depth: int = 0) -> Any:
    """Plain values only: of a dictionary the entries under text, of an object its attributes.

    Examples
    --------
    >>> plain({"args": Record("Namespace", ()), "lr": 0.1, 7: "seven", "steps": (1, 2)})
    {'args': None, 'lr': 0.1, 'steps': [1, 2]}
    """
    if isinstance(value, Record):
        value = value.state if isinstance(value.state, dict) else None
    if isinstance(value, bool | int | float | str):
        return value
    if depth > DEEPEST or isinstance(value, StoredTensor | Storage):
        return None
    if isinstance(value, dict):
        return {k: plain(v, depth + 1) for k, v in value.items() if isinstance(k, str)}
    if isinstance(value, list | tuple):
        return [plain(one, depth + 1) for one in value[:LONGEST]]
    return None


def load(file: IO[bytes], storages: dict[str, Storage] | None = None) -> Any:
    """The object in a pickle; the storages that it names are added to ``storages`` by key."""
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
        raise pickle.UnpicklingError("a tensor has a shape with entries other than whole numbers")
    if len(shape) > MOST_AXES or math.prod(n for n in shape if n) > MOST_VALUES:
        raise pickle.UnpicklingError("a tensor has an impossible shape")
    # An untyped storage counts bytes.
    size = storage.size * ITEM_BITS[storage.dtype] // ITEM_BITS[dtype]
    return StoredTensor(dtype, shape, stride, offset, Storage(dtype, storage.key, size))


def _without_values(problem: str, shape: int, dtype: int | None) -> Callable[..., StoredTensor]:
    """A reader of tensors without values, whose shape and type are these arguments."""

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
    ("torch._utils", "_rebuild_sparse_tensor"): lambda _layout, parts, *_: _without_values(
        "a sparse tensor", 2, None
    )(*parts),
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
