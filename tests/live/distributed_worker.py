"""One process of a distributed run that is monitored; started twice by the tests.

Both processes see the same batches, so that their mean gradient is that of one process, to the last
digit.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from tests.live.models import train
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

import wqk

STEPS = 3


def sharded(model: torch.nn.Module, policy: MixedPrecisionPolicy) -> torch.nn.Module:
    """Every second layer by itself, the rest with the root, as is usual."""
    fully_shard(model.encoder.layer[0], mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def in_half_precision(model: torch.nn.Module, path: Path) -> None:
    """A look after a forward pass without a backward one, which leaves FSDP's copies in place."""
    sharded(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    monitor = wqk.Monitor(model, path)
    with torch.no_grad():
        model(torch.zeros(1, 4, dtype=torch.long))
    monitor(0)
    model(torch.zeros(1, 4, dtype=torch.long)).last_hidden_state.sum().backward()


def batch(rank: int) -> torch.Tensor:
    """Another one for each process."""
    return torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(rank))


LIMIT = 1e-4


def clipped(model: torch.nn.Module, rank: int, path: Path) -> None:
    """Measured on each process's own batch, and clipped by the largest of all."""
    clipper = wqk.Clipper(model, LIMIT)
    for micro_batch in (batch(rank), batch(rank + 2)):
        model(micro_batch).last_hidden_state.sum().backward()
    report = clipper()
    state = {
        name.removeprefix("module."): getattr(value, "full_tensor", lambda v=value: v)()
        for name, value in model.state_dict().items()
    }
    torch.save((state, tuple(report.heads)), path.with_name(f"{path.name}-{rank}"))


def main(rank: int, folder: Path) -> None:
    from tests.live.models import bert

    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2
    )
    train(DistributedDataParallel(bert()), folder / "run" / "ddp.jsonl", STEPS)
    train(sharded(bert(), MixedPrecisionPolicy()), folder / "run" / "fsdp.jsonl", STEPS)
    in_half_precision(bert(), folder / "run" / "half.jsonl")
    folder = folder / "clipped"
    folder.mkdir(exist_ok=True)
    clipped(DistributedDataParallel(bert().train()), rank, folder / "ddp")
    clipped(sharded(bert().train(), MixedPrecisionPolicy()), rank, folder / "fsdp")
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
