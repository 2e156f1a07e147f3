"""Models as they are wrapped in training: followed as the plain model, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.live.models import bert, gpt2
from tests.live.test_monitor import same

import wqk
from wqk.errors import CheckpointError, RunError
from wqk.live.monitor import Cadence
from wqk.live.scoring import Tracker


class Wrapper(torch.nn.Module):
    """A module with the model as its only child, as `DataParallel` is."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def look(model: torch.nn.Module, folder: Path) -> wqk.ScoreTable:
    monitor = wqk.Monitor(model, folder / "scores.jsonl")
    monitor(0)
    assert monitor.latest is not None
    return monitor.latest


def test_wrapped_models_are_the_plain_model(tmp_path: Path) -> None:
    expected = wqk.scan(bert())
    compiled = torch.compile(bert(), backend="eager")
    layers = bert()
    layers.encoder.layer[1] = torch.compile(layers.encoder.layer[1], backend="eager")
    for number, model in enumerate((Wrapper(bert()), compiled, Wrapper(compiled), layers)):
        assert same(look(model, tmp_path / str(number)), expected)


def test_activation_checkpointing_is_seen_through(tmp_path: Path) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = bert()
    model.encoder.layer[0] = checkpoint_wrapper(model.encoder.layer[0])
    assert same(look(model, tmp_path), wqk.scan(bert()))


class Adapted(torch.nn.Module):
    """A linear layer with a low-rank adapter, with the attributes that PEFT's has."""

    merged = disable_adapters = False
    active_adapters = ("default",)

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ParameterDict({"default": torch.randn(2, 32) / 9})
        self.lora_B = torch.nn.ParameterDict({"default": torch.randn(32, 2) / 9})

    def get_delta_weight(self, adapter: str) -> torch.Tensor:
        return self.lora_B[adapter] @ self.lora_A[adapter]


def adapted_bert(role: str) -> tuple[torch.nn.Module, Adapted]:
    model = bert()
    attention = model.encoder.layer[0].attention.self
    adapter = Adapted(getattr(attention, role))
    setattr(attention, role, adapter)
    return model, adapter


def test_adapters_that_come_and_modules_that_change_later_are_followed(tmp_path: Path) -> None:
    model = bert()
    attention = model.encoder.layer[0].attention.self
    monitor = wqk.Monitor(model, tmp_path / "scores.jsonl", every=1)
    monitor(0)
    attention.key = Adapted(attention.key)
    before, attention.query = attention.query, torch.nn.Linear(32, 32)
    monitor(1)
    assert monitor.latest is not None
    assert same(monitor.latest, wqk.scan(model))
    assert not torch.equal(before.weight, attention.query.weight)


def test_an_adapter_s_product_is_part_of_the_weight(tmp_path: Path) -> None:
    model, adapter = adapted_bert("key")
    expected = bert()
    with torch.no_grad():
        expected.encoder.layer[0].attention.self.key.weight += adapter.get_delta_weight("default")
    assert same(look(model, tmp_path / "on"), wqk.scan(expected))
    adapter.disable_adapters = True
    assert same(look(model, tmp_path / "off"), wqk.scan(bert()))


def test_an_adapter_of_another_kind_is_refused_where_it_matters(tmp_path: Path) -> None:
    model, adapter = adapted_bert("key")
    del adapter.lora_A
    with pytest.raises(CheckpointError, match=r"layer\.0\.attention\.self\.key\.weight: .* LoRA"):
        look(model, tmp_path)
    model, adapter = adapted_bert("key")
    adapter.use_dora = {"default": True}
    with pytest.raises(CheckpointError, match="LoRA"):
        look(model, tmp_path)
    model, adapter = adapted_bert("value")
    del adapter.lora_A
    assert same(look(model, tmp_path), wqk.scan(bert()))


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_peft_s_own_adapters_are_followed(tmp_path: Path) -> None:
    import peft

    model = peft.get_peft_model(bert(), peft.LoraConfig(target_modules=["query"], r=2))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    followed, scanned = look(model, tmp_path), wqk.scan(model, bias=True)
    assert scanned.metadata["notes"] == []  # what is added is not said to be left out
    with pytest.raises(CheckpointError, match="has an adapter"):
        wqk.initialize_(model, "symmetric")
    merged = model.merge_and_unload()
    assert same(followed, wqk.scan(merged))
    assert same(scanned, wqk.scan(merged, bias=True))


def test_parameters_that_are_hidden_are_refused(tmp_path: Path) -> None:
    flattened = type("FullyShardedDataParallel", (Wrapper,), {})
    with pytest.raises(RunError, match=r"FSDP 1.*fully_shard"):
        look(flattened(bert()), tmp_path)
    partitioned = bert()
    for parameter in partitioned.parameters():
        parameter.ds_id = 0
        parameter.data = torch.empty(0)
    with pytest.raises(RunError, match="ZeRO stage 3"):
        look(partitioned, tmp_path)


def test_codes_are_refused() -> None:
    model = bert()
    weight = torch.zeros(32, 32, dtype=torch.int8)
    query = model.encoder.layer[0].attention.self.query
    query.weight = torch.nn.Parameter(weight, requires_grad=False)
    with pytest.raises(CheckpointError, match="holds I8, not floating"):
        Tracker(model, "run")


def test_a_snapshot_holds_the_queries_and_keys_alone_and_keeps_them() -> None:
    model = gpt2()
    tracker = Tracker(model, "run")
    snapshot = tracker.snapshot(0)
    held = sum(copy.numel() for copy in snapshot._copies.values())
    # c_attn is stored (in, out), so that its values come along; of the biases they do not.
    assert held == 2 * (32 * 3 * 32 + 2 * 32)
    before: Any = snapshot.read(list(tracker.model.plans[0].parts))
    kept = [array.copy() for array in before]
    model.h[0].attn.c_attn.weight.data += 1
    after = snapshot.read(list(tracker.model.plans[0].parts))
    assert all((old == new).all() for old, new in zip(kept, after, strict=True))


def test_powers_of_two_and_multiples() -> None:
    cadence = Cadence(1000, "log")
    assert [step for step in range(2001) if cadence.is_due(step)] == [
        0,
        1,
        2,
        4,
        8,
        16,
        32,
        64,
        128,
        256,
        512,
        1000,
        1024,
        2000,
    ]
    assert [step for step in range(20) if Cadence(None, [3, 5]).is_due(step)] == [3, 5]
