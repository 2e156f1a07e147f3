"""Models in memory as checkpoints, also within wrappers.

Compilation, parallelism and activation checkpointing wrap a module in another module, whose name
becomes a part of the names of tensors, also in saved files. PEFT replaces a module by a module that
contains it.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any
from weakref import ref

import numpy as np
from array_api_compat import array_namespace

from wqk.checkpoints.checkpoint import (
    WRAPPED,
    Checkpoint,
    Part,
    TensorInfo,
    by_plain_name,
    is_transformer_lens,
    plain_name,
)
from wqk.checkpoints.configurations import Opened, configured, lens_configuration
from wqk.checkpoints.files import PLAIN
from wqk.checkpoints.parametrized import computed_weights, with_computed
from wqk.errors import CheckpointError

# Usual names of the configuration in modules.
CONFIGURATIONS = ("config", "cfg", "model_args", "args", "params", "hparams")
# Usual names of the number of heads in modules.
HEADS = ("num_heads", "heads", "n_heads", "n_head", "nhead")
# Name of the adapted module within an adapter.
ADAPTED = "base_layer"


def without_adapter(name: str) -> str:
    """Return a tensor's name before the module was adapted.

    Examples
    --------
    >>> without_adapter("layer.0.query.base_layer.weight")
    'layer.0.query.weight'
    """
    return name.replace(f".{ADAPTED}.", ".")


def adapted_modules(model: Any) -> dict[str, Any]:
    """Return the adapted modules of a model, by the plain names of the adapted weights."""
    return {
        without_adapter(plain_name(f"{name}.weight")): module
        for name, module in model.named_modules()
        if hasattr(module, ADAPTED)
    }


def require_plain_lora(module: Any, name: str) -> None:
    """Raise `CheckpointError` if the adapters of a module do more than add a product."""
    has_factors = hasattr(module, "lora_A")
    # Each of these attributes has a value for every adapter of the module.
    variants = [getattr(module, name, {}) for name in ("use_dora", "lora_bias", "lora_variant")]
    has_variant = any(any(by_adapter.values()) for by_adapter in variants)
    if not has_factors or has_variant:
        raise CheckpointError(
            f"{name}: of the adapters of models in memory, plain LoRA ones are read, got another "
            f"kind ({type(module).__module__}); merge it, and scan the checkpoint"
        )


def with_adapter(weight: Any, module: Any, name: str) -> Any:
    """Return an adapted module's effective weight: the base weight plus the adapters' products."""
    require_plain_lora(module, name)
    if module.merged or module.disable_adapters:
        return weight
    return sum((module.get_delta_weight(adapter) for adapter in module.active_adapters), weight)


def unwrapped(model: Any) -> Any:
    """Return the model without wrappers."""
    while True:
        children = dict(model.named_children())
        if len(children) == 1 and WRAPPED & children.keys():
            (model,) = children.values()
        elif hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        else:
            return model


# Names of the arrays' types in the words of safetensors.
_TYPE_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}


class StateDict(Checkpoint):
    """Named tensors in memory, on any device; they are not changed.

    Parameters
    ----------
    tensors
        The tensors by name.
    config, name
        As the attributes of `Checkpoint`.
    adapted
        Modules with adapters, by the plain names of the adapted weights. None for a mapping: its
        adapters are unknown, and names are not changed.
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
        # The adapter of a mapping is unknown: names stay unchanged.
        self._stored = by_plain_name(arrays)
        if adapted is not None:
            self._stored = {
                without_adapter(name): parameter for name, parameter in self._stored.items()
            }
        self._arrays = {key: arrays[stored] for key, stored in self._stored.items()}
        self._tensors = {key: _info(value) for key, value in self._arrays.items()}
        if is_transformer_lens(arrays):
            self.config = lens_configuration(config, self._tensors)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor, by name."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Copy the rows of each part to the host, joined: training may change the weights later."""
        return [self._read(part) for part in parts]

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """Return a part's bytes, if NumPy reads the array and no adapter changes it."""
        array = self._arrays.get(part.name)
        if part.name in self.adapted or type(array) is not np.ndarray:
            return None
        pieces = [array]
        if part.rows is not None:
            pieces = [array[start:stop] for start, stop in part.rows]
        return np.concatenate([np.ravel(piece).view(np.uint8) for piece in pieces])

    def _read(self, part: Part) -> Any:
        rows = [_on_host(rows) for rows in self._rows(part)]
        return np.array(rows[0]) if part.rows is None else np.concatenate(rows)

    def _array(self, name: str) -> Any:
        return self._arrays[name]

    def _rows(self, part: Part) -> list[Any]:
        """Return the rows of an array, range by range, as stored."""
        info, array = self.info(part.name), self._array(part.name)
        _require_values(array, part.name)
        if info.dtype not in PLAIN:
            raise CheckpointError(
                f"{part.name}: holds {info.dtype}, not floating-point weights; expected one of "
                f"{', '.join(PLAIN)}; dequantize the model, or scan its checkpoint"
            )
        if part.name in self.adapted:
            array = with_adapter(array, self.adapted[part.name], part.name)
        if part.rows is None:
            return [array]
        return [array[start:stop] for start, stop in part.row_ranges(info.shape)]


class Read(Enum):
    """Kinds of arrays for the weights of a model in memory."""

    HOST = "copies on the host, as NumPy arrays"
    DEVICE = "tensors on their own device, without gradients, gathered if they are sharded"
    GRADIENT = "tensors that gradients flow through"


class LiveCheckpoint(StateDict):
    """A module's present weights, by their names in saved files.

    Weights are looked up on every read, because FSDP and other wrappers replace parameters during a
    pass. Values are widened to at least float32.

    Parameters
    ----------
    model
        The `nn.Module`, plain or wrapped.
    read
        Kind of arrays: copies on the host, tensors on their device, or tensors with gradients.
    keep
        Whether the checkpoint keeps the model alive.

    Raises
    ------
    CheckpointError
        The object is not a module; or gradients are requested, but parameters are on the meta
        device or sharded.
    """

    def __init__(self, model: Any, read: Read = Read.HOST, *, keep: bool = True) -> None:
        kind = type(model).__name__
        if not hasattr(model, "named_modules"):
            raise CheckpointError(
                f"no model in memory; expected an nn.Module, got {kind}; pass the model itself"
            )
        self._computed = computed_weights(model)
        tensors = self._state(model)
        infos = {plain_name(name): _info(t) for name, t in tensors.items() if hasattr(t, "dtype")}
        config = _configuration(model)
        if not is_transformer_lens(infos):
            config = configured(None, Opened(config, {}, infos))
            if any(name.endswith(".c_q.weight") for name in infos):  # speed runs' only switch
                config = {"qk_norm": _norms_queries(model), **config}
        super().__init__(tensors, config, kind, adapted_modules(model))
        self.model, self._wanted, self._network = model if keep else None, read, ref(model)
        owner_by_id = {}
        for module in model.modules():
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                owner_by_id[id(tensor)] = (ref(module), name)
        self._owners = {}
        for name, tensor in self._arrays.items():
            if id(tensor) in owner_by_id:
                self._owners[name] = owner_by_id[id(tensor)]
        self._arrays = {}  # looked up on each read
        if read is Read.GRADIENT:
            for name, parameter in model.named_parameters():
                _require_values(parameter, f"{kind}: {name}")

    def current(self, name: str) -> Any:
        """Return a parameter or buffer, or a tensor that is joined from several on saving."""
        if name in self._owners:
            owner, attribute = self._owners[name]
            return getattr(owner(), attribute)
        stored, network = self._stored[name], self._network()
        if stored in self._computed:
            return self._computed[stored].value()
        return self._state(network)[stored]

    def _state(self, network: Any) -> dict[str, Any]:
        """Return the tensors of the module by name, with weights as used in passes."""
        tensors: dict[str, Any] = network.state_dict(keep_vars=True)
        return with_computed(tensors, self._computed) if self._computed else tensors

    def writable(self, name: str) -> Any:
        """Return a parameter that can be changed in place; `CheckpointError` if not stored."""
        import torch

        tensor, kind = self.current(name), self.info(name).dtype
        outside = not torch.is_inference_mode_enabled()
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        is_expanded = any(length > 1 and stride == 0 for length, stride in axes)
        self.require_stored([name])
        is_obstacle = {
            "is made of other weights when the model is saved": name not in self._owners,
            "is on the meta device": tensor.is_meta,
            f"holds {kind}": kind not in PLAIN,
            "was made in inference mode": tensor.is_inference() and outside,
            "is expanded: its rows or columns are one in memory": is_expanded,
        }
        obstacle = next((reason for reason, holds in is_obstacle.items() if holds), None)
        if obstacle is not None:
            raise CheckpointError(
                f"{self.name}: {name} {obstacle}, so that nothing can be written; expected a plain "
                "parameter with values of its own"
            )
        return tensor

    def require_stored(self, names: Iterable[str]) -> None:
        """Raise `CheckpointError` if a weight is computed from other parameters."""
        for name in sorted(names):
            computed = self._computed.get(self._stored.get(name, name))
            if computed is not None:
                raise CheckpointError(
                    f"{self.name}: {name} is computed from other parameters ({computed.method}), "
                    "so that nothing can be written; expected a weight that is stored; remove "
                    "the parametrization first"
                )

    def memory(self, name: str) -> Any:
        """Return a value that is the same for two names of one parameter in memory."""
        if name not in self._owners:
            return name
        tensor = self.current(name)
        place = 0 if hasattr(tensor, "full_tensor") else tensor.data_ptr()
        return place or id(tensor)

    def whole(self, name: str) -> Any:
        """Return a weight as used in passes: without gradients, adapted, gathered if sharded."""
        tensor = self.current(name).detach()
        if name in self.adapted:
            tensor = with_adapter(tensor, self.adapted[name], name)
        return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def _array(self, name: str) -> Any:
        return self.current(name)

    def _read(self, part: Part) -> Any:
        if self._wanted is Read.HOST:
            return super()._read(part)
        if self._wanted is Read.GRADIENT:
            rows = self._rows(part)
        else:
            tensor = self.whole(part.name)
            ranges = part.row_ranges(tuple(tensor.shape)) if part.rows is not None else ()
            rows = [tensor[start:stop] for start, stop in ranges] or [tensor]
        joined = rows[0] if len(rows) == 1 else array_namespace(*rows).concat(rows)
        return joined if joined.itemsize > 2 else joined.float()


def open_live(model: Any) -> StateDict:
    """Open a module by its state dict and configuration, or only a state dict."""
    if hasattr(model, "named_modules"):
        return LiveCheckpoint(model)
    if hasattr(model, "state_dict"):
        return StateDict(model.state_dict(), _configuration(model), type(model).__name__)
    state = StateDict(model, {}, "state dict")
    nested = {key: value for key, value in model.items() if isinstance(value, Mapping)}
    inner = [key for key, value in nested.items() if StateDict(value, {}, "").tensors()]
    if inner and not state.tensors():
        raise CheckpointError(
            "no tensors under their names; expected a state dict, arrays by name, got a dictionary "
            f"that has them under {inner[0]!r}; pass that entry, or the file's path"
        )
    return state


def _configuration(model: Any) -> Mapping[str, Any]:
    """Return the configuration of a module, or of the only `transformers` model in it."""
    model = unwrapped(model) if hasattr(model, "named_children") else model
    config = _configuration_object(model)
    if config is None:
        return _of_known_library(model) or _counted(model)
    settings: dict[str, Any] = {}
    for key, value in _attributes(config).items():
        if not str(key).startswith("_"):
            settings[str(key)] = list(value) if isinstance(value, tuple) else value  # as in a file
    if type(model).__module__.partition(".")[0] == "diffusers":
        settings["_class_name"] = type(model).__name__  # which is stored when the model is saved
    if {"model_type", "num_attention_heads", *HEADS} & settings.keys():
        return settings
    return {**_counted(model), **settings}


def _configuration_object(model: Any) -> Any:
    """Return the configuration of a module, an object or a dictionary; None without one.

    The configuration is an attribute with a usual name, the only dataclass among the attributes, or
    the ``config`` of the only part that has one.
    """
    for name in CONFIGURATIONS:
        config: Any = getattr(model, name, None)
        if config:
            return config
    dataclasses: list[Any] = [value for value in vars(model).values() if is_dataclass(value)]
    if len(dataclasses) == 1:
        return dataclasses[0]
    if hasattr(model, "children"):
        parts = [child for child in model.children() if hasattr(child, "config")]
        if len(parts) == 1:
            return parts[0].config
    return None


def _attributes(config: Any) -> Mapping[Any, Any]:
    """Return the keys and values of a configuration, an object or a dictionary."""
    if hasattr(config, "to_dict"):
        attributes: Mapping[Any, Any] = config.to_dict()
        return attributes
    if isinstance(config, dict):
        return config
    attributes = getattr(config, "__dict__", {})
    if is_dataclass(config):  # attributes may be slots
        declared = {field.name: getattr(config, field.name, None) for field in fields(config)}
        return {**declared, **attributes}
    return attributes


def _counted(model: Any) -> dict[str, Any]:
    """Return the numbers of heads that modules store, such as `nn.MultiheadAttention`.

    If stages have different numbers, as in Swin, the numbers are a list, ordered by the first
    number in the names of the modules. If modules of a stage differ, the number is unknown, and
    left out.
    """
    modules = {"": model}
    if hasattr(model, "named_modules"):
        modules = dict(model.named_modules())
    counts_by_stage: dict[str, set[int]] = {}
    all_counts: set[int] = set()
    for name, module in modules.items():
        stage = next(filter(str.isdigit, name.split(".")), "")
        for attribute in HEADS:
            head_count = getattr(module, attribute, None)
            if type(head_count) is int:
                counts_by_stage.setdefault(stage, set()).add(head_count)
                all_counts.add(head_count)
    if len(all_counts) == 1:
        return {"num_heads": all_counts.pop()}
    count_by_stage: list[int] = []
    for stage_number in range(len(counts_by_stage)):
        counts = counts_by_stage.get(str(stage_number), set())
        if len(counts) != 1:
            return {}
        count_by_stage += counts
    return {"num_heads": count_by_stage} if len(count_by_stage) > 1 else {}


def _of_known_library(model: Any) -> dict[str, Any]:
    """Return the configuration of a timm or OpenCLIP model, read from its modules; else empty."""
    library, class_name = type(model).__module__.partition(".")[0], type(model).__name__
    if (library, class_name) == ("timm", "VisionTransformer"):
        return _timm_configuration(model)
    if library == "open_clip" and hasattr(model, "visual"):
        return _open_clip_configuration(model)
    return {}


def _timm_configuration(model: Any) -> dict[str, Any]:
    """Return the configuration of a vision transformer of timm; empty for other attention.

    The family does not cover norms of queries and keys, or other kinds of attention.
    """
    layers = list(model.blocks)
    attention: Any = getattr(layers[0], "attn", None)
    norm: Any = getattr(layers[0], "norm1", None)
    is_plain = type(attention).__name__ == "Attention" and hasattr(norm, "eps")
    if not is_plain or list(attention.q_norm.parameters()):
        return {}
    return {
        "model_type": "timm",
        "depth": len(layers),
        "num_heads": attention.num_heads,
        "layer_norm_epsilon": norm.eps,
    }


def _open_clip_configuration(model: Any) -> dict[str, Any]:
    """Return the configuration of a model of OpenCLIP; empty if a tower is not supported."""
    text = model if hasattr(model, "transformer") else getattr(model, "text", None)
    towers = {"vision_cfg": model.visual, "text_cfg": text}
    config: dict[str, Any] = {"model_type": "open_clip"}
    for key, tower in towers.items():
        stack: Any = getattr(tower, "transformer", None)
        if not hasattr(stack, "resblocks"):
            return {}
        heads = stack.resblocks[0].attn.num_heads
        config[key] = {"layers": len(stack.resblocks), "heads": heads}
    config["text_cfg"]["no_causal_mask"] = getattr(text, "attn_mask", None) is None
    return config


def _norms_queries(model: Any) -> bool:
    """Return whether the code of modules with queries normalizes queries.

    Speed runs have no switch for this norm, and nearly all use the norm. If no code can be read,
    the norm is assumed.
    """
    try:
        code = [
            inspect.getsource(type(module)) for module in model.modules() if hasattr(module, "c_q")
        ]
    except (OSError, TypeError):
        return True
    return any("norm(" in text for text in code)


def _require_values(array: Any, name: str) -> None:
    """Raise `CheckpointError` for a tensor without values in this process."""
    is_meta = getattr(array, "is_meta", False)
    if is_meta or hasattr(array, "full_tensor"):
        where = "on the meta device" if is_meta else "sharded over processes"
        raise CheckpointError(
            f"{name}: is {where}, so its values are not available; pass the model with its "
            "weights, before it is sharded"
        )


def _info(value: Any) -> TensorInfo:
    """Return type, shape and size of an array of any library."""
    name = str(value.dtype).removeprefix("torch.")
    itemsize = int(getattr(value, "itemsize", 0) or value.dtype.itemsize)
    shape = tuple(int(n) for n in value.shape)
    return TensorInfo(_TYPE_NAMES.get(name, name), shape, itemsize * int(np.prod(shape)))


def _on_host(value: Any) -> np.ndarray:
    """Return a NumPy array in float32, or in float64 for a float64 tensor."""
    if hasattr(value, "detach"):  # PyTorch
        tensor = value.detach().cpu()
        if str(tensor.dtype) != "torch.float64":
            tensor = tensor.float()  # also from bfloat16, which NumPy lacks
        value = tensor.numpy()
    array = np.asarray(value)
    if array.dtype == np.float64:
        return array
    return array.astype(np.float32, copy=False)
