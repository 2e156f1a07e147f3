"""A model whose residual stream was turned is the same up to it, if all of it was turned alike."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import build, torch

import wqk

CLASSES = {"llama3": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@cache
def model(name: str) -> Any:
    return build(replace(NAMED[name], model=CLASSES[name])).eval()


def turned(original: Any, left_out: str = "") -> Any:
    """Gains folded into what they feed, and all turned by a random orthogonal matrix."""
    other = copy.deepcopy(original)
    width = other.config.hidden_size
    basis = np.linalg.qr(np.random.default_rng(2).standard_normal((width, width)))[0]
    q = torch.tensor(basis, dtype=torch.float32)
    inner = other.model

    def read(weight: Any, norm: Any) -> None:
        weight.copy_((weight * norm.weight) @ q)

    with torch.no_grad():
        other.lm_head.weight = torch.nn.Parameter(other.lm_head.weight.clone())
        read(other.lm_head.weight, inner.norm)
        inner.embed_tokens.weight.copy_(inner.embed_tokens.weight @ q)
        for layer in inner.layers:
            attention, fed = layer.self_attn, layer.mlp
            for side in (attention.q_proj, attention.k_proj, attention.v_proj):
                read(side.weight, layer.input_layernorm)
            for side in (fed.gate_proj, fed.up_proj):
                read(side.weight, layer.post_attention_layernorm)
            for out in (attention.o_proj, fed.down_proj):
                out.weight.copy_(q.T @ out.weight)
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.fill_(1)
        inner.norm.weight.fill_(1)
        for name, parameter in other.named_parameters():
            if left_out and left_out in name:
                parameter.copy_(dict(original.named_parameters())[name])
    return other


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_a_turned_stream_computes_the_same_and_is_the_same(name: str) -> None:
    original, other = model(name), turned(model(name))
    tokens = torch.arange(1, 40)[None] % 60
    with torch.no_grad():
        logits = [one(tokens).logits for one in (original, other)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-3 * float(logits[0].abs().max())
    assert not wqk.same(original, other).same
    comparison = wqk.same(original, other, up_to=["stream"])
    assert comparison.same, comparison.sentence
    assert "turned by one orthogonal matrix" in " ".join(comparison.notes)
    kinship = wqk.kin(original, other)
    assert (kinship.conclusion, kinship.kind) == ("related", "rotated copy")


@pytest.mark.parametrize(
    "left",
    ["layers.1.self_attn.q_proj", "layers.1.mlp.up_proj", "layers.0.mlp.down_proj", "lm_head"],
)
def test_what_was_not_turned_along_is_said(left: str) -> None:
    comparison = wqk.same(model("llama3"), turned(model("llama3"), left), up_to=["stream"])
    assert not comparison.same
    assert (
        left in next(note for note in comparison.notes if "orthogonal" in note) or "q_proj" in left
    )
    if "q_proj" in left:
        assert [block.same for block in comparison.blocks] == [True, False]
    else:
        assert [one for one in comparison.differing if left in one.name]


def test_models_of_one_stream_are_compared_as_ever() -> None:
    comparison = wqk.same(model("llama3"), model("llama3"), up_to=["stream"])
    assert comparison.same
    assert comparison.notes[-1] == "up to the stream: the streams have the same coordinates"
