"""A model's queries and keys while it trains: found once, copied to the host at every look.

Nothing else of the model is touched. Where parameters are sharded (FSDP2, or any other DTensor), a
look is a collective: each process takes part in gathering one tensor after the other, and only the
first keeps them.
"""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from wqk.attention import attention_plans
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.live import open_live
from wqk.errors import CheckpointError, RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import numpy as np
    import torch

    from wqk.families import AttentionPlan

# What wrappers call the one module that they wrap, as the whole model or within names.
WRAPPED = {"module", "_orig_mod"}
WITHIN_NAMES = {"_orig_mod", "_checkpoint_wrapped_module"}


class Snapshot(Checkpoint):
    """Queries and keys as they were after some step, on the host and in the model's own types.

    Attributes
    ----------
    non_finite
        What had NaN or infinite entries; it is kept as zeros.
    """

    def __init__(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        step: int | None = None,
        copies: Mapping[Part, torch.Tensor] | None = None,
    ) -> None:
        self.name, self.config, self.step = name, config, step
        self._tensors = tensors
        self._copies = dict(copies or {})
        self.non_finite = {part for part, copy in self._copies.items() if not _is_finite(copy)}
        for part in self.non_finite:
            self._copies[part] = self._copies[part].zero_()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor of the model, copied or not."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The copies of these parts, in float32, or in float64 where the model is."""
        return [_widened(self._copies[part]) for part in parts]

    def is_finite(self, plan: AttentionPlan) -> bool:
        """Whether all that a block's form is made of is finite."""
        return self.non_finite.isdisjoint(plan.parts.values())


class Tracker:
    """Where a model's queries and keys are.

    Parameters
    ----------
    model
        An `nn.Module`; what `DistributedDataParallel` or `torch.compile` wrapped is unwrapped.
    name
        What the rows of its scores call it.
    family, heads_per_layer
        As for `wqk.scan`.

    Raises
    ------
    UnknownFamily
        No family knows the model, and none can be guessed.
    CheckpointError
        Its queries and keys are not all there, or not stored as floating-point numbers.
    RunError
        They are sharded or adapted in a way that hides them.
    """

    def __init__(
        self,
        model: Any,
        name: str,
        family: Path | None = None,
        heads_per_layer: int | None = None,
    ) -> None:
        self._model = unwrapped(model)
        _require_readable(model)
        found = open_live(self._model)
        self._name, self._config = name, found.config
        self._tensors = {_plain(key): info for key, info in found.tensors().items()}
        described = Snapshot(found.name, found.config, self._tensors)
        self.plans = attention_plans(described, family, heads_per_layer)
        self._wanted: dict[str, list[Part]] = {}
        for part in dict.fromkeys(chain.from_iterable(p.parts.values() for p in self.plans)):
            self._wanted.setdefault(part.name, []).append(part)
        for tensor in self._wanted:
            _require_plain(tensor, self._tensors)

    def snapshot(self, step: int) -> Snapshot | None:
        """Copy the queries and keys; None in all processes of a distributed run but the first.

        Every process of a run with sharded parameters has to call this at the same step.
        """
        import torch

        keeps = is_first_process()
        copies: dict[Part, torch.Tensor] = {}
        tensors = _named_tensors(self._model)
        with torch.no_grad():
            for name, parts in self._wanted.items():
                tensor = tensors[name].detach()
                if hasattr(tensor, "full_tensor"):
                    tensor = tensor.full_tensor()
                if keeps:
                    copies |= {part: _copied(tensor, part) for part in parts}
        if not keeps:
            return None
        return Snapshot(self._name, self._config, self._tensors, step, copies)


def unwrapped(model: Any) -> Any:
    """The model itself, without what data parallelism or compilation wrapped around it."""
    children = dict(model.named_children())
    while len(children) == 1 and WRAPPED & children.keys():
        (model,) = children.values()
        children = dict(model.named_children())
    return model


def is_first_process() -> bool:
    """Whether this is the process that scores and writes: the only one, or rank 0."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )


def _named_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Parameters and buffers as they are now, by the names that they have in a checkpoint.

    What FSDP2 has left whole after a forward pass is the copy in the type of computation, not the
    parameter that is trained; resharding puts that back.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    named = chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    return {_plain(name): tensor for name, tensor in named}


def _plain(name: str) -> str:
    """A tensor's name without what compilation and activation checkpointing put into it."""
    return ".".join(word for word in name.split(".") if word not in WITHIN_NAMES)


def _require_readable(model: Any) -> None:
    """Refuse what leaves parameters empty or flattened between steps."""
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise RunError(
            "a monitor cannot see into FullyShardedDataParallel (FSDP 1), which flattens the "
            "parameters; train with fully_shard (fsdp_version: 2)"
        )
    if any(hasattr(parameter, "ds_id") for parameter in model.parameters()):
        raise RunError(
            "a monitor cannot see the parameters that DeepSpeed ZeRO stage 3 has taken apart; "
            "train with stage 2, or with fully_shard (FSDP 2)"
        )


def _require_plain(tensor: str, tensors: Mapping[str, TensorInfo]) -> None:
    """Refuse weights that are codes."""
    dtype = tensors[tensor].dtype
    if dtype not in ("F64", "F32", "F16", "BF16"):
        raise CheckpointError(f"{tensor}: holds {dtype}, not floating-point weights")


def _copied(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The wanted rows, joined, on the host."""
    import torch

    ranges = part.row_ranges(tuple(tensor.shape))
    rows = tensor if part.rows is None else torch.cat([tensor[a:b] for a, b in ranges])
    return rows.to("cpu", copy=True)


def _is_finite(tensor: torch.Tensor) -> bool:
    return bool(tensor.isfinite().all())


def _widened(tensor: torch.Tensor) -> np.ndarray:
    array: np.ndarray = (tensor if tensor.element_size() == 8 else tensor.float()).numpy()
    return array
