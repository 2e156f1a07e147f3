"""Models in memory: an `nn.Module`, or a state dict of PyTorch or NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from array_api_compat import array_namespace

from wqk.checkpoints.checkpoint import Checkpoint, Part, TensorInfo
from wqk.checkpoints.transformer_lens import configuration, is_transformer_lens
from wqk.checkpoints.wrapping import (
    adapted_modules,
    by_plain_name,
    unwrapped,
    with_adapter,
    without_adapter,
)
from wqk.errors import CheckpointError

# Names of the arrays' types in the words of safetensors.
_TYPE_NAMES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


class StateDict(Checkpoint):
    """Named tensors in memory, on any device; they are not changed.

    ``adapted`` are the modules that add something to weights, by the weights' plain names.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        config: Mapping[str, Any],
        name: str,
        adapted: Mapping[str, Any] | None = None,
    ) -> None:
        self.name, self.config, self.adapted = name, config, adapted or {}
        # A state dict may hold more than arrays, such as a module's extra state.
        arrays = {key: value for key, value in tensors.items() if hasattr(value, "dtype")}
        plain = by_plain_name(arrays)
        if self.adapted:
            plain = {without_adapter(key): stored for key, stored in plain.items()}
        self._arrays = {key: arrays[stored] for key, stored in plain.items()}
        self._tensors = {key: _info(value) for key, value in self._arrays.items()}
        if is_transformer_lens(arrays):
            self.config = configuration(config, self._tensors)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, joined: copies on the host, as training goes on."""
        return [self._read(part) for part in parts]

    def _read(self, part: Part) -> Any:
        rows = [_on_host(rows) for rows in self._rows(part)]
        return np.array(rows[0]) if part.rows is None else np.concatenate(rows)

    def _rows(self, part: Part) -> list[Any]:
        """The wanted rows of an array, range by range, as stored."""
        info, array = self.info(part.name), self._arrays[part.name]
        _require_values(array, part.name)
        if info.dtype not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(f"{part.name}: holds {info.dtype}, not floating-point weights")
        if part.name in self.adapted:
            array = with_adapter(array, self.adapted[part.name], part.name)
        if part.rows is None:
            return [array]
        return [array[start:stop] for start, stop in part.row_ranges(info.shape)]


class Parameters(StateDict):
    """A module's parameters themselves: what is read are tensors of the model, not copies.

    Gradients flow through what is read, which is widened to at least float32; what is written to
    one of `arrays` changes the model. Raises `CheckpointError` if it is not a module, or its
    parameters are on the meta device or sharded.
    """

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "named_parameters"):
            raise CheckpointError(f"expected an nn.Module, got {type(model).__name__}")
        named = dict(model.named_parameters(remove_duplicate=False))
        for name, parameter in named.items():
            _require_values(parameter, f"{type(model).__name__}: {name}")
        name = type(model).__name__
        super().__init__(named, _configuration(model), name, adapted_modules(model))

    @property
    def arrays(self) -> Mapping[str, Any]:
        """Every whole parameter by name."""
        return self._arrays

    def _read(self, part: Part) -> Any:
        rows = self._rows(part)
        joined = rows[0] if len(rows) == 1 else array_namespace(*rows).concat(rows)
        return joined if joined.itemsize > 2 else joined.float()


def open_live(model: Any) -> StateDict:
    """A module by its state dict and configuration, or a state dict by itself."""
    if hasattr(model, "state_dict"):
        name = type(model).__name__
        adapted = adapted_modules(model) if hasattr(model, "named_modules") else None
        return StateDict(model.state_dict(), _configuration(model), name, adapted)
    return StateDict(model, {}, "state dict")


def _configuration(model: Any) -> Mapping[str, Any]:
    """The configuration of a module, or of the only `transformers` model in it."""
    model = unwrapped(model) if hasattr(model, "named_children") else model
    config: Any = getattr(model, "config", getattr(model, "cfg", None))  # TransformerLens: cfg
    if config is None and hasattr(model, "children"):
        held = [child for child in model.children() if hasattr(child, "config")]
        config = held[0].config if len(held) == 1 else None
    if hasattr(config, "to_dict"):
        as_dict: Mapping[str, Any] = config.to_dict()
        return as_dict
    if config is None:  # nn.MultiheadAttention, alone or in a model, counts its heads itself
        modules = model.modules() if hasattr(model, "modules") else [model]
        counts = {getattr(module, "num_heads", None) for module in modules} - {None}
        heads = counts.pop() if len(counts) == 1 else None
        return {"num_heads": heads} if isinstance(heads, int) else {}
    plain = config if isinstance(config, dict) else getattr(config, "__dict__", {})
    return {str(key): value for key, value in plain.items() if not str(key).startswith("_")}


def _require_values(array: Any, name: str) -> None:
    is_meta = getattr(array, "is_meta", False)
    if is_meta or hasattr(array, "full_tensor"):
        where = "on the meta device" if is_meta else "sharded over processes"
        raise CheckpointError(
            f"{name} is {where}, so its values are not available; pass the model with its weights, "
            "before it is sharded"
        )


def _info(value: Any) -> TensorInfo:
    name = str(value.dtype).removeprefix("torch.")
    itemsize = int(getattr(value, "itemsize", 0) or value.dtype.itemsize)
    shape = tuple(int(n) for n in value.shape)
    return TensorInfo(_TYPE_NAMES.get(name, name), shape, itemsize * int(np.prod(shape)))


def _on_host(value: Any) -> np.ndarray:
    """A NumPy array in float32, or in float64 where the tensor is."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.numpy() if str(value.dtype) == "torch.float64" else value.float().numpy()
    array = np.asarray(value)
    return array if array.dtype == np.float64 else array.astype(np.float32, copy=False)
