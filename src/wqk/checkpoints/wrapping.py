"""What stands around a model and its modules: wrappers, and LoRA adapters.

Compilation, parallelism and activation checkpointing wrap a module in another, whose name stays in
those of the tensors, also once they are saved. PEFT replaces a module by one that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from wqk.checkpoints.transformer_lens import is_transformer_lens, linear_name
from wqk.errors import CheckpointError

# Names that wrappers give to the module within: parallel ones, compilation, FSDP 1, activation
# checkpointing.
WRAPPED = {"module", "_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}
# The name that an adapter gives to the module that it adapts.
ADAPTED = "base_layer"


def plain_name(name: str) -> str:
    """A tensor's name as the model itself has it, without wrappers.

    Examples
    --------
    >>> plain_name("module.layer.0._orig_mod.query.weight")
    'layer.0.query.weight'
    """
    words = name.split(".")
    if WRAPPED.isdisjoint(words):  # as of most of the many tensors of a mixture of experts
        return name
    return ".".join(word for word in words if word not in WRAPPED)


def by_plain_name(names: Iterable[str]) -> Mapping[str, str]:
    """The names by their plain ones, or by themselves if two have the same plain one.

    Examples
    --------
    >>> by_plain_name(["module.q.weight"]), by_plain_name(["module.q", "q"])
    ({'q.weight': 'module.q.weight'}, {'module.q': 'module.q', 'q': 'q'})
    """
    names = list(names)
    plain = {plain_name(name): name for name in names}
    if is_transformer_lens(plain):
        plain = {linear_name(name): stored for name, stored in plain.items()}
    return plain if len(plain) == len(names) else {name: name for name in names}


def without_adapter(name: str) -> str:
    """A tensor's name as it was before its module was adapted.

    Examples
    --------
    >>> without_adapter("layer.0.query.base_layer.weight")
    'layer.0.query.weight'
    """
    return name.replace(f".{ADAPTED}.", ".")


def adapted_modules(model: Any) -> dict[str, Any]:
    """The adapted modules of a model, by the plain names of the weights that they adapt."""
    return {
        without_adapter(plain_name(f"{name}.weight")): module
        for name, module in model.named_modules()
        if hasattr(module, ADAPTED)
    }


def require_plain_lora(module: Any, name: str) -> None:
    """Raise `CheckpointError` if the adapters of a module do more than to add a product."""
    more = ("use_dora", "lora_bias", "lora_variant")
    if not hasattr(module, "lora_A") or any(any(getattr(module, m, {}).values()) for m in more):
        raise CheckpointError(
            f"{name}: of the adapters of models in memory, plain LoRA ones are read, got another "
            f"kind ({type(module).__module__}); merge it, and scan the checkpoint"
        )


def with_adapter(weight: Any, module: Any, name: str) -> Any:
    """An adapted module's effective weight: its own plus its active adapters' products."""
    require_plain_lora(module, name)
    if module.merged or module.disable_adapters:
        return weight
    return sum((module.get_delta_weight(adapter) for adapter in module.active_adapters), weight)


def unwrapped(model: Any) -> Any:
    """The model itself."""
    while True:
        children = dict(model.named_children())
        if len(children) == 1 and WRAPPED & children.keys():
            (model,) = children.values()
        elif hasattr(model, "get_base_model"):  # PEFT
            model = model.get_base_model()
        else:
            return model
