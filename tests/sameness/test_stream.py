"""A model whose residual stream was turned is the same up to it, if all of it was turned alike."""

from __future__ import annotations

import copy
import re
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import build, torch
from tests.sameness.plants import right

import wqk
from wqk.checkpoints.modules import StateDict

CLASSES = {"llama3": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


@cache
def model(name: str) -> Any:
    return build(replace(NAMED[name], model=CLASSES[name])).eval()


def basis(width: int) -> Any:
    """A random orthogonal matrix."""
    dice = np.random.default_rng(2).standard_normal((width, width))
    return torch.tensor(np.linalg.qr(dice)[0], dtype=torch.float32)


def turned(original: Any, left_out: str = "") -> Any:
    """Gains folded into what they feed, and all turned by a random orthogonal matrix."""
    candidate = copy.deepcopy(original)
    q, inner = basis(candidate.config.hidden_size), candidate.model

    def read(weight: Any, norm: Any) -> None:
        weight.copy_((weight * norm.weight) @ q)

    with torch.no_grad():
        candidate.lm_head.weight = torch.nn.Parameter(candidate.lm_head.weight.clone())
        read(candidate.lm_head.weight, inner.norm)
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
        for name, parameter in candidate.named_parameters():
            if left_out and left_out in name:
                parameter.copy_(dict(original.named_parameters())[name])
    return candidate


@pytest.mark.parametrize("name", ["llama3", "qwen2", "qwen3"])
def test_a_turned_stream_computes_the_same_and_is_the_same(name: str) -> None:
    original, candidate = model(name), turned(model(name))
    tokens = torch.arange(1, 40)[None] % 60
    with torch.no_grad():
        logits = [network(tokens).logits for network in (original, candidate)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-3 * float(logits[0].abs().max())
    assert not wqk.same(original, candidate).same
    comparison = wqk.same(original, candidate, up_to=["stream"])
    assert comparison.same, comparison.sentence
    assert "turned by one orthogonal matrix" in " ".join(comparison.notes)
    kinship = wqk.kin(original, candidate)
    assert (kinship.conclusion, kinship.kind) == ("related", "rotated copy")


@pytest.mark.parametrize(
    "left_out",
    ["layers.1.self_attn.q_proj", "layers.1.mlp.up_proj", "layers.0.mlp.down_proj", "lm_head"],
)
def test_what_was_not_turned_along_is_said(left_out: str) -> None:
    comparison = wqk.same(model("llama3"), turned(model("llama3"), left_out), up_to=["stream"])
    assert not comparison.same
    assert (
        left_out in next(note for note in comparison.notes if "orthogonal" in note)
        or "q_proj" in left_out
    )
    if "q_proj" in left_out:
        assert [block.same for block in comparison.blocks] == [True, False]
    else:
        assert [tensor for tensor in comparison.differing if left_out in tensor.name]


@pytest.mark.parametrize("offset", [None, 1, 2])
def test_a_gain_that_was_lost_or_is_another_layer_s_is_said(offset: int | None) -> None:
    original, candidate = model("llama3"), turned(model("llama3"))
    gains = [layer.post_attention_layernorm.weight for layer in original.model.layers]
    with torch.no_grad():
        for n, layer in enumerate(candidate.model.layers):
            gain = 1 if offset is None else gains[(n + offset) % len(gains)]
            weight = original.model.layers[n].mlp.up_proj.weight
            layer.mlp.up_proj.weight.copy_((weight * gain) @ basis(weight.shape[1]))
    assert wqk.same(original, candidate, up_to=["stream"]).same == (offset == 2)


@pytest.mark.parametrize(
    ("layout", "readers", "is_same"),
    [
        ("LLaMA", "gate_proj|up_proj", True),
        ("LLaMA", "up_proj", False),
        ("Gemma", "gate_proj|up_proj", True),
        ("Phi-3", "gate_up_proj", True),
        ("Gemma 2", "gate_proj|up_proj", False),  # that norm does not feed them
    ],
)
def test_a_gain_may_be_folded_into_all_that_it_feeds(
    layout: str, readers: str, is_same: bool
) -> None:
    tensors, config, _ = right(layout)
    folded, offset = dict(tensors), float("Gemma" in layout)
    for gain in [name for name in tensors if "post_attention" in name]:
        for name in tensors:
            if name.startswith(gain.partition("post")[0]) and re.search(readers, name):
                folded[name] = tensors[name] * (tensors[gain] + offset)
        folded[gain] = np.full_like(tensors[gain], 1 - offset)
    pair = StateDict(tensors, config, "a"), StateDict(folded, config, "b")
    assert wqk.same(*pair, everything=True).same == is_same


def test_models_of_one_stream_are_compared_as_ever() -> None:
    comparison = wqk.same(model("llama3"), model("llama3"), up_to=["stream"])
    assert comparison.same
    assert comparison.notes[-1] == "up to the stream: the streams have the same coordinates"


def renumbered(original: Any, with_outputs: bool = True) -> Any:
    """Key heads with their queries, values and outputs, and neurons, in another order."""
    candidate = copy.deepcopy(original)
    dice = np.random.default_rng(3)
    config = candidate.config
    heads = np.arange(config.num_attention_heads).reshape(config.num_key_value_heads, -1)[::-1]
    width = config.head_dim
    rows = {
        n: torch.tensor((np.ravel(order_of_side)[:, None] * width + np.arange(width)).ravel())
        for n, order_of_side in (("q", heads), ("k", np.arange(len(heads))[::-1]))
    }
    with torch.no_grad():
        for layer in candidate.model.layers:
            attention, fed = layer.self_attn, layer.mlp
            for side, order in (("q", "q"), ("k", "k"), ("v", "k")):
                projection = getattr(attention, f"{side}_proj")
                projection.weight.copy_(projection.weight[rows[order]].clone())
                if projection.bias is not None:
                    projection.bias.copy_(projection.bias[rows[order]].clone())
            out = attention.o_proj.weight
            out.copy_(out[:, rows["q"]].clone())
            order = torch.tensor(dice.permutation(config.intermediate_size))
            for weight in (fed.gate_proj.weight, fed.up_proj.weight):
                weight.copy_(weight[order].clone())
            if with_outputs:
                fed.down_proj.weight.copy_(fed.down_proj.weight[:, order].clone())
    return candidate


@pytest.mark.parametrize("name", ["llama3", "qwen2"])
@pytest.mark.parametrize("stream", [False, True])
def test_heads_and_neurons_are_freedoms_with_the_stream_and_without(name, stream):
    candidate = renumbered(turned(model(name)) if stream else model(name))
    tokens = torch.arange(1, 40)[None] % 60
    with torch.no_grad():
        logits = [network(tokens).logits for network in (model(name), candidate)]
    assert float((logits[0] - logits[1]).abs().max()) < 1e-3 * float(logits[0].abs().max())
    freedoms = ["heads", "neurons", *["stream"] * stream]
    comparison = wqk.same(model(name), candidate, up_to=freedoms)
    assert comparison.same, (comparison.sentence, comparison.notes)
    assert "neurons in another order in 2 modules" in " ".join(comparison.notes)
    for left_out in freedoms:
        assert not wqk.same(
            model(name), candidate, up_to={*freedoms} - {left_out}, everything=True
        ).same
    broken = renumbered(turned(model(name)) if stream else model(name), with_outputs=False)
    assert not wqk.same(model(name), broken, up_to=freedoms).same


def test_a_norm_that_subtracts_a_mean_is_refused_with_the_reason() -> None:
    comparison = wqk.same(*[wqk.open(wqk.demo_model("decoder"))] * 2, up_to=["stream"])
    assert "vector of ones" in " ".join(comparison.notes)


@pytest.mark.parametrize("norm", ["layers.1.input_layernorm", "layers.0.post_attention_layernorm"])
def test_a_gain_of_zero_in_a_turned_model_is_a_difference(norm: str) -> None:
    """No weight behind the gain replaces what it takes away."""
    original = model("llama3")
    candidate = turned(original)
    with torch.no_grad():
        dict(candidate.named_parameters())[f"model.{norm}.weight"][3] = 0
    assert wqk.same(original, turned(original), up_to=["stream"])
    assert not wqk.same(original, candidate, up_to=["stream"])
