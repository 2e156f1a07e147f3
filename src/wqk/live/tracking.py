"""A model's queries and keys during training: located once, copied to the host for every scoring.

If parameters are sharded (FSDP 2, or any other DTensor), copying is a collective operation: all
processes gather one tensor after the other, and only the first keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

from wqk.attention.ceilings import ceiling_parts
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.wrapping import (
    plain_name,
    require_plain_lora,
    with_adapter,
    without_adapter,
)
from wqk.errors import CheckpointError, RunError
from wqk.families import AttentionPlan
from wqk.model import Model
from wqk.model import open as open_model

if TYPE_CHECKING:
    import numpy as np
    import torch


class Snapshot(Checkpoint):
    """Queries and keys after some step, on the host and in the model's own types.

    ``non_finite`` names the tensors with NaN or infinite entries, which are stored as zeros.
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
        self.non_finite = {part for part, copy in self._copies.items() if not copy.isfinite().all()}
        for part in self.non_finite:
            self._copies[part] = self._copies[part].zero_()

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Type, shape and size of every tensor of the model, copied or not."""
        return self._tensors

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The copies of these parts, in float32, or in float64 if the model's are."""
        copies = (self._copies[part] for part in parts)
        return [(copy if copy.element_size() == 8 else copy.float()).numpy() for copy in copies]

    def is_finite(self, plan: AttentionPlan) -> bool:
        """Whether all tensors of a block are finite."""
        return self.non_finite.isdisjoint((*plan.parts, *ceiling_parts(plan)))


class Tracker:
    """Finds a model's queries and keys once, and copies them at any step.

    ``name`` is that in the score table; ``with_norms`` adds the blocks' input norms, for ceilings.
    `RunError` if the parameters are flattened (FSDP 1) or partitioned between steps (ZeRO stage 3).
    """

    def __init__(
        self,
        model: Any,
        name: str,
        with_norms: bool = False,
    ) -> None:
        network = model.ref if isinstance(model, Model) else model
        _require_whole_parameters(network)
        self.model = open_model(model)
        checkpoint = self.model.checkpoint
        self._network, self._name, self._config = network, name, checkpoint.config
        self._tensors, self._adapted = checkpoint.tensors(), getattr(checkpoint, "adapted", {})
        self._wanted: dict[str, list[Part]] = {}
        parts = chain.from_iterable(
            (*plan.parts, *(ceiling_parts(plan) if with_norms else ())) for plan in self.model.plans
        )
        for part in dict.fromkeys(parts):
            self._wanted.setdefault(part.name, []).append(part)
        for tensor in self._wanted:
            dtype = self._tensors[tensor].dtype
            if dtype not in ("F64", "F32", "F16", "BF16"):
                raise CheckpointError(f"{tensor}: holds {dtype}, not floating-point weights")
            if tensor in self._adapted:
                require_plain_lora(self._adapted[tensor], tensor)

    def snapshot(self, step: int) -> Snapshot | None:
        """Copy the queries and keys; None in all processes of a distributed run but the first.

        Every process of a run with sharded parameters has to call this at the same step.
        """
        import torch

        keeps = is_first_process()
        copies: dict[Part, torch.Tensor] = {}
        tensors = _trained_tensors(self._network)
        with torch.no_grad():
            for name, parts in self._wanted.items():
                tensor = tensors[name].detach()
                if name in self._adapted:
                    tensor = with_adapter(tensor, self._adapted[name], name)
                if hasattr(tensor, "full_tensor"):
                    tensor = tensor.full_tensor()
                if keeps:
                    copies |= {part: _copied(tensor, part) for part in parts}
        if not keeps:
            return None
        return Snapshot(self._name, self._config, self._tensors, step, copies)


def is_first_process() -> bool:
    """Whether this is the process that scores and writes: the only one, or rank 0."""
    from torch import distributed

    return not (distributed.is_available() and distributed.is_initialized()) or (
        distributed.get_rank() == 0
    )


def _trained_tensors(model: Any) -> dict[str, torch.Tensor]:
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
    return {without_adapter(plain_name(name)): tensor for name, tensor in named}


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


def _copied(tensor: torch.Tensor, part: Part) -> torch.Tensor:
    """The wanted rows, joined, on the host."""
    import torch

    ranges = part.row_ranges(tuple(tensor.shape))
    rows = tensor if part.rows is None else torch.cat([tensor[a:b] for a, b in ranges])
    return rows.to("cpu", copy=True)
