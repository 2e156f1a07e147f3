"""Decoders that were converted to encoders or diffusion models: read as their code attends.

Their code is remote, so that it is never run. Classes of transformers stand in for it that differ,
as their authors describe it, in nothing but the mask and the names of tensors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families.architectures import FURTHER, NAMED
from tests.families.completeness import omissions
from tests.families.proving import (
    assert_same_blocks,
    edit_config,
    edit_tensors,
    respelled,
    save,
    torch,
    transformers,
)
from tools.deriving.probing import record_type
from tools.deriving.proof import WEAK, faults
from tools.deriving.records import read_record

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families import find_family
from wqk.live.recording import allowed
from wqk.live.verification import verify

REMOTE = ["a2d-llama", "a2d-qwen2", "dream", "a2d-qwen3", "sdar"]


@pytest.mark.parametrize("name", REMOTE)
def test_converted_decoders_attend_in_both_directions_by_their_type(name, tmp_path):
    save(NAMED[name], tmp_path)
    edit_config(tmp_path, {"is_causal": None})
    plans = wqk.open(tmp_path).plans
    assert {(p.stack, p.causal, p.statuses[-1:]) for p in plans} <= {
        ("encoder", False, ()),
        ("encoder", False, ("partial",)),
    }
    assert verify(tmp_path).difference < 1e-12
    edit_config(tmp_path, {"model_type": NAMED[name].model.removesuffix("Model").lower()})
    assert {(p.stack, p.causal) for p in wqk.open(tmp_path).plans} == {("decoder", True)}


LLADA = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "o_proj": "attn_out"}


def test_llada_is_llama_without_a_mask_under_names_of_olmo(tmp_path: Path) -> None:
    # The published code is remote; LLaMA's, renamed as published, stands in for it.
    llama, llada = tmp_path / "known", tmp_path / "llada"
    for folder in (llama, llada):
        save(NAMED["llama-bidirectional"], folder)
    names = {
        rf".*layers\.(\d+)\.self_attn\.{a}": rf"model.transformer.blocks.\1.{b}"
        for a, b in LLADA.items()
    }
    names[r".*layers\.(\d+)\.input_layernorm"] = r"model.transformer.blocks.\1.attn_norm"
    edit_tensors(llada, lambda tensors: respelled(tensors, names))
    config = {
        "model_type": "llada",
        "n_layers": 2,
        "n_heads": 6,
        "n_kv_heads": 2,
        "rope": True,
        "attention_layer_norm": False,
        "block_type": "llama",
        "is_causal": None,
        "head_dim": None,
        "num_attention_heads": None,
        "num_key_value_heads": None,
        "num_hidden_layers": None,
    }
    edit_config(llada, config)
    assert {(p.stack, p.causal, p.statuses) for p in wqk.open(llada).plans} == {
        ("encoder", False, ())
    }
    assert_same_blocks(llama, llada)
    edit_config(llada, {"attention_layer_norm": True})
    with pytest.raises(CheckpointError):
        wqk.open(llada)


def test_llada_moe_gives_the_same_type_and_has_the_names_of_qwen3(tmp_path: Path) -> None:
    reference, llada = tmp_path / "known", tmp_path / "llada"
    for folder in (reference, llada):
        save(NAMED["a2d-qwen3"], folder)
    edit_config(llada, {"model_type": "llada", "is_causal": None})
    assert {(p.stack, p.causal, p.family) for p in wqk.open(llada).plans} == {
        ("encoder", False, "llada")
    }
    assert_same_blocks(reference, llada)
    edit_config(llada, {"clip_qkv": 0.5})
    block = wqk.open(llada)[1]
    assert block.plan.clip == 0.5
    x = np.random.default_rng(0).standard_normal((5, block.form.shape[0]))
    assert np.abs(block.queries(x, np.zeros(5))).max() == 0.5


def test_llada2_holds_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    # GLM 4 MoE has the same norms and rotates as large a share, in tensors of their own.
    reference, llada2 = tmp_path / "known", tmp_path / "llada2"
    for folder in (reference, llada2):
        save(FURTHER["glm4-moe-half"], folder)

    def fused(tensors: dict[str, Any]) -> dict[str, Any]:
        renamed = {}
        for name, value in tensors.items():
            layer, _, ending = name.partition(".self_attn.")
            if ending == "q_proj.weight":
                parts = [tensors[f"{layer}.self_attn.{side}_proj.weight"] for side in "qkv"]
                renamed[f"model.{layer}.attention.query_key_value.weight"] = torch.cat(parts)
            elif ending:
                new = ending.replace("o_proj", "dense").replace("q_norm", "query_layernorm")
                new = new.replace("k_norm", "key_layernorm")
                renamed[f"model.{layer}.attention.{new}"] = value
            else:
                renamed[f"model.{name}"] = value
        return renamed

    edit_tensors(llada2, fused)
    # Half of the width turns, unless the configuration says otherwise.
    turned = {"rope_type": "default", "rope_theta": 10_000.0}
    edit_config(llada2, {"model_type": "llada2_moe", "rope_parameters": turned})
    assert verify(reference).ok
    assert {(p.stack, p.causal, p.family) for p in wqk.open(llada2).plans} == {
        ("encoder", False, "llada2")
    }
    assert_same_blocks(reference, llada2)
    # The decoder that it continues.
    edit_config(llada2, {"model_type": "bailing_moe_v2"})
    assert {(p.stack, p.causal) for p in wqk.open(llada2).plans} == {("decoder", True)}
    assert_same_blocks(reference, llada2)


def test_diffugpt_lifts_the_mask_of_gpt2_by_its_wrapper(tmp_path: Path) -> None:
    save(NAMED["gpt2"], tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: respelled(tensors, {r"^transformer\.": "denoise_model."})
    )
    assert {(p.stack, p.causal) for p in wqk.open(tmp_path).plans} == {("decoder", True)}
    edit_config(tmp_path, {"architectures": ["DiscreteDiffusionModel"]})
    assert {(p.stack, p.causal) for p in wqk.open(tmp_path).plans} == {("encoder", False)}


def test_the_decoder_of_t5gemma2_shares_a_softmax_with_the_encoder(tmp_path: Path) -> None:
    # Of the decoder's own tokens, normalized again, the model's attention is that of the forms.
    save(FURTHER["t5gemma2"], tmp_path)
    blocks = [block for block in wqk.open(tmp_path) if block.stack == "decoder"]
    assert len(blocks) == 4
    assert "share the softmax" in blocks[0].plan.reason
    checkpoint = open_checkpoint(tmp_path)
    assert omissions(checkpoint, find_family(checkpoint)) == []
    verified = [block for block in verify(tmp_path).blocks if block.stack == "decoder"]
    assert [block.described for block in verified] == [False] * 4
    # The decoder alone, as its own type.
    names = [name for name in checkpoint.tensors() if "decoder." in name]
    tensors = dict(zip(names, checkpoint.read([Part(name) for name in names]), strict=True))
    alone = wqk.open(StateDict(tensors, checkpoint.config["decoder"], "alone"))
    assert {(plan.family, plan.stack, plan.causal) for plan in alone.plans} == {
        ("t5gemma2-decoder", "decoder", True)
    }
    model = transformers.T5Gemma2Model.from_pretrained(tmp_path, attn_implementation="eager")
    inputs: list[Any] = []
    for layer in model.decoder.layers:
        layer.self_attn.q_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    tokens = torch.arange(3, 15)[None]
    with torch.no_grad():
        output = model(input_ids=tokens, decoder_input_ids=tokens.flip(1), output_attentions=True)
    at = np.arange(tokens.shape[1])
    distance = at[:, None] - at
    for block, x, reported in zip(blocks, inputs, output.decoder_attentions, strict=True):
        scores = block.scores(block.products(x.numpy(), x.numpy(), (at, at)))
        shares = np.exp(scores) * allowed(block.plan, distance)
        expected = shares / shares.sum(-1, keepdims=True)
        probabilities = reported.numpy() / reported.numpy().sum(-1, keepdims=True)
        assert reported.sum(-1).max() < 0.99
        assert np.abs(probabilities - expected).max() < 1e-4
        assert np.abs(probabilities - 1 / probabilities.shape[-1]).max() > 0.02


def test_kimi_k2_5_as_its_publisher_names_its_tensors(tmp_path: Path) -> None:
    """Transformers reads these names and writes others."""

    def published(name: str) -> str:
        for pattern, replacement in (
            (r"^language_model\.blocks", "language_model.model.layers"),
            (r"^vision_tower\.", "vision_tower.encoder."),
            (r"\.attn\.proj", ".wo"),
            (r"\.norm1\.", ".norm0."),
            (r"\.norm2\.", ".norm1."),
        ):
            name = re.sub(pattern, replacement, name)
        return name

    record_type("kimi_k25", tmp_path)
    edit_tensors(tmp_path, lambda tensors: {published(k): v for k, v in tensors.items()})
    record = read_record(tmp_path)
    for site in (*record.sites, *record.turned):
        for source in (s for p in site.products for s in (*p.query_sources, *p.key_sources)):
            source.parameter = published(source.parameter)
            source.norm = tuple(map(published, source.norm))
    family = find_family(open_checkpoint(tmp_path))
    assert family.name == "kimi-k25-vision + deepseek"
    problems = faults(record, open_checkpoint(tmp_path), family)
    # The record has no positions on axes; tests/families/test_rotations.py proves those.
    unproven = (*WEAK, "positions are not rotary like that, on axes")
    assert [fault for fault in problems if not fault.startswith(unproven)] == []
