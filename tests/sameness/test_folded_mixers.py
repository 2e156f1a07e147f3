"""Smoothing of a hybrid (AWQ): gains folded into gates and linear attention are the same model."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness.execution import ProgramTensors, run
from wqk.sameness.mismatches import Kind

WIDTH, HEADS, HEAD_WIDTH = 32, 2, 16
READERS = ("in_proj_qkvz", "in_proj_ba", "q_proj", "k_proj", "v_proj")
Tensors = dict[str, np.ndarray]


@pytest.fixture(scope="module")
def hybrid() -> tuple[Any, Tensors, dict[str, Any]]:
    """A tiny Qwen 3 Next: a layer of linear attention, and one with gated queries."""
    torch.manual_seed(0)
    config = transformers.Qwen3NextConfig(
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        num_key_value_heads=1,
        head_dim=HEAD_WIDTH,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2,
        linear_num_key_heads=1,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        vocab_size=40,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    config._experts_implementation = "eager"
    module = transformers.Qwen3NextModel(config).double().eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module, arrays_of(module), config.to_dict()


def arrays_of(module: Any) -> Tensors:
    return {name: value.numpy().copy() for name, value in module.state_dict().items()}


def smoothed(tensors: Tensors, stale: str = "") -> Tensors:
    """The model with other gains, and all columns rescaled but those of one projection."""
    random, folded = np.random.default_rng(1), dict(tensors)
    for layer in range(2):
        factors = random.uniform(0.5, 2, WIDTH)
        gain = f"layers.{layer}.input_layernorm.weight"
        folded[gain] = (1 + tensors[gain]) / factors - 1
        for name, value in tensors.items():
            parts = name.split(".")
            if name.startswith(f"layers.{layer}.") and parts[-2] in READERS and parts[-2] != stale:
                folded[name] = value * factors
    return folded


def compared(original: Tensors, candidate: Tensors, config: dict[str, Any]):
    single = []
    for tensors in (original, candidate):
        single.append({name: value.astype(np.float32) for name, value in tensors.items()})
    models = [StateDict(arrays, config, name) for arrays, name in zip(single, "ab", strict=True)]
    return wqk.same(*models, everything=True), single


def test_a_smoothed_hybrid_is_the_same(hybrid: tuple[Any, Tensors, dict[str, Any]]) -> None:
    """The model's own outputs do not move; the comparison found three weights that differ."""
    module, tensors, config = hybrid
    folded = smoothed(tensors)
    tokens = torch.arange(10)[None]
    with torch.no_grad():
        before = module(tokens).last_hidden_state
        module.load_state_dict({name: torch.tensor(value) for name, value in folded.items()})
        after = module(tokens).last_hidden_state
        module.load_state_dict({name: torch.tensor(value) for name, value in tensors.items()})
    # Linear attention computes in float32.
    torch.testing.assert_close(before, after, rtol=1e-4, atol=1e-4)
    comparison, _ = compared(tensors, folded, config)
    assert comparison.same
    assert any("2 norms whose gain is folded" in note for note in comparison.notes)


@pytest.mark.parametrize("stale", ["in_proj_ba", "in_proj_qkvz"])
def test_a_projection_that_was_not_rescaled_is_named(
    hybrid: tuple[Any, Tensors, dict[str, Any]], stale: str
) -> None:
    _, tensors, config = hybrid
    comparison, (original, candidate) = compared(tensors, smoothed(tensors, stale), config)
    (cause,) = comparison.causes
    assert cause.mismatch.verdict is Kind.GAIN_FOLDED
    assert f"{stale}: not rescaled with the norm before it" in cause.mismatch.reason
    right = {n: v.astype(np.float32) for n, v in smoothed(tensors).items()}
    mended = ProgramTensors(candidate)
    run(comparison.repair, mended, ProgramTensors(right))
    repaired, _ = compared(original, {**candidate, **mended.changed}, config)
    assert repaired.same


def test_gates_that_were_not_rescaled_are_named(
    hybrid: tuple[Any, Tensors, dict[str, Any]],
) -> None:
    _, tensors, config = hybrid
    wrong = smoothed(tensors)
    name = "layers.1.self_attn.q_proj.weight"
    shape = (HEADS, 2, HEAD_WIDTH, WIDTH)
    rows = wrong[name].reshape(shape).copy()
    rows[:, 1] = tensors[name].reshape(shape)[:, 1]
    wrong[name] = rows.reshape(tensors[name].shape)
    comparison, _ = compared(tensors, wrong, config)
    (cause,) = comparison.causes
    assert cause.mismatch.verdict is Kind.GAIN_FOLDED
    assert "q_proj: not rescaled" in cause.mismatch.reason
