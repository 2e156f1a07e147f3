"""Models that report no attention of all queries and keys: what `wqk verify` says of them.

What is read of them is proven by `test_every_family.py`, which follows their operations.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.architectures import FURTHER
from tests.families.proving import save

import wqk
from wqk.live.verification import verify


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("xlnet", 'key = "layer.{layer}.rel_attn.v"'),
        ("squeezebert", 'key = "encoder.layers.{layer}.attention.value"\nvalue = []\noutput = []'),
    ],
)
def test_other_keys_are_noticed(name: str, change: str, tmp_path: Path) -> None:
    save(FURTHER[name], tmp_path / "model")
    wrong = tmp_path / "wrong.toml"
    wrong.write_text(f'name = "wrong"\nlike = "{name}"\nmodel_types = []\n[change]\n{change}\n')
    verified = verify(wqk.open(tmp_path / "model", family=wrong))
    assert [block.verdict for block in verified.blocks] == ["wrong", "wrong"]


def test_what_pytorch_attends_with_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = save(FURTHER["nemotron-asr"], tmp_path).eval()
    inputs: list[Any] = []
    heard: list[Any] = []
    attend = torch.nn.functional.scaled_dot_product_attention

    def recorded(query: Any, key: Any, *args: Any, **settings: Any) -> Any:
        heard.append((query, key, settings["scale"]))
        return attend(query, key, *args, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    for layer in model.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    with torch.no_grad():
        model(input_features=torch.randn(2, 96, 16))
    blocks = wqk.open(tmp_path)
    assert len(blocks) == len(heard) == len(inputs) == 2
    for layer, block, x, (query, key, scale) in zip(
        model.layers, blocks, inputs, heard, strict=True
    ):
        queries = query - layer.self_attn.bias_u[None, :, None].detach()
        keys = key.repeat_interleave(block.head_count // key.shape[1], 1)
        np.testing.assert_allclose(block.queries(x.numpy()), queries, atol=1e-5)
        np.testing.assert_allclose(block.keys(x.numpy()), keys, atol=1e-5)
        assert block.plan.score_scale == pytest.approx(scale)
        assert (str(block.plan.window), block.plan.causal) == ("local", False)


def test_what_chunks_attend_with_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without distances, whose vectors are projected to nothing."""
    model = save(FURTHER["gemma4-audio"], tmp_path).eval()
    capped: list[Any] = []
    tanh = torch.tanh
    monkeypatch.setattr(torch, "tanh", lambda scores: capped.append(scores) or tanh(scores))
    x, past = torch.randn(1, 6, 32), 4
    for layer, block in zip(model.layers, wqk.open(tmp_path), strict=True):
        with torch.no_grad():
            layer.self_attn(x, torch.zeros(1, 7, 32))
        assert layer.self_attn.per_dim_scale.std() > 0
        logits = tanh(capped.pop()[0, :, 0, :6, past : past + 6]) * block.plan.softcap
        np.testing.assert_allclose(block.logits(x[0].numpy(), x[0].numpy()), logits, rtol=1e-4)
        plan, module = block.plan, f"layers.{block.plan.layer}.self_attn"
        facts = (plan.stack, plan.causal, str(plan.window), plan.position, plan.position_uses)
        assert facts == ("audio", True, "5", "relative", ("query",))
        assert plan.value.tensor == f"{module}.v_proj.linear.weight"
        assert plan.output.tensor == f"{module}.post.linear.weight"
        norm = plan.query.input_norm
        assert norm.gain[0].name == f"layers.{plan.layer}.norm_pre_attn.weight"
        assert norm.epsilon == layer.norm_pre_attn.eps
