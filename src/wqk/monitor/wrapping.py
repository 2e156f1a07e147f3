"""Wrappers, sharding and adapters around a model during training.

=====================================  ========================================================
`DistributedDataParallel`, `compile`   unwrapped
`fully_shard` (FSDP 2), any DTensor    read as trained; gathered on reading
LoRA adapters (PEFT)                   their products are added to the weights that they adapt
other adapters, FSDP 1, ZeRO stage 3   refused: the weights that are trained cannot be seen
=====================================  ========================================================
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError

if TYPE_CHECKING:
    import torch

# Names that wrappers give to the one module that they wrap.
WRAPPED = {"module", "_orig_mod"}

# Names that compilation, activation checkpointing and adapters insert into those of parameters.
WITHIN_NAMES = {"_orig_mod", "_checkpoint_wrapped_module", "base_layer"}


def unwrapped(model: Any) -> Any:
    """The model itself; RunError if its parameters are flattened or partitioned between steps."""
    _require_whole_parameters(model)
    while True:
        children = dict(model.named_children())
        if len(children) == 1 and WRAPPED & children.keys():
            (model,) = children.values()
        elif hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        else:
            return model


def plain_name(name: str) -> str:
    """A tensor's name as a checkpoint of the plain model has it.

    Examples
    --------
    >>> plain_name("layer.0._orig_mod.query.base_layer.weight")
    'layer.0.query.weight'
    """
    return ".".join(word for word in name.split(".") if word not in WITHIN_NAMES)


def trained_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Current parameters and buffers, by their plain names.

    After a forward pass, FSDP 2 may leave an unsharded copy in the compute type in place of
    the trained parameter; resharding restores the parameter.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {plain_name(name): tensor for name, tensor in named}


def adapters(model: Any, wanted: Collection[str]) -> dict[str, Any]:
    """Modules with an adapter of a wanted weight, by its plain name; all must be plain LoRA."""
    found = {}
    for name, module in model.named_modules():
        weight = plain_name(f"{name}.weight")
        if weight not in wanted or not hasattr(module, "base_layer"):
            continue
        if not hasattr(module, "lora_A") or any(getattr(module, "use_dora", {}).values()):
            raise RunError(
                f"{weight}: a monitor supports LoRA adapters, got another kind "
                f"({type(module).__module__}); merge it, and scan the checkpoint"
            )
        found[weight] = module
    return found


def with_adapter(weight: torch.Tensor, module: Any) -> torch.Tensor:
    """The effective weight of the module: its own plus its active adapters' products."""
    if module.merged or module.disable_adapters:
        return weight
    return sum((module.get_delta_weight(adapter) for adapter in module.active_adapters), weight)


def _require_whole_parameters(model: Any) -> None:
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RunError(
            "a monitor cannot read the parameters of FullyShardedDataParallel (FSDP 1), which "
            "flattens the parameters; train with fully_shard (fsdp_version: 2)"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise RunError(
            "a monitor cannot read parameters that DeepSpeed ZeRO stage 3 has partitioned; "
            "train with stage 2, or with fully_shard (FSDP 2)"
        )
