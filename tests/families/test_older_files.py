"""Files as older programs wrote them: other names, and tensors that are not used."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.families.architectures import FURTHER, NAMED, Architecture
from tests.families.proving import (
    edit_tensors,
    prove_attention,
    prove_live,
    prove_norms,
    respelled,
    save,
)


def without_prefix(tensors: dict[str, Any]) -> dict[str, Any]:
    """As the hub's gpt2: no ``transformer.``, and the causal mask among the weights."""
    renamed = {name.removeprefix("transformer."): value for name, value in tensors.items()}
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, 64, 64).tril() for layer in range(2)}
    return renamed | masks


def with_buffers(tensors: dict[str, Any]) -> dict[str, Any]:
    """As Pythia: masks and rotary frequencies among the weights."""
    return tensors | {
        f"gpt_neox.layers.{layer}.attention.{name}": value
        for layer in range(2)
        for name, value in {
            "bias": torch.ones(1, 1, 64, 64, dtype=torch.bool).tril(),
            "masked_bias": torch.tensor(-1e9),
            "rotary_emb.inv_freq": torch.ones(4),
        }.items()
    }


def with_bias_in_cross_attention(tensors: dict[str, Any]) -> dict[str, Any]:
    """As the first T5 files, which hold a relative bias that is not used."""
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    return tensors | {name: torch.randn(8, 4)}


def with_a_draft_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """As models with layers for multi-token prediction after their own."""
    extra = {
        name.replace("layers.1.", "layers.2."): value.clone()
        for name, value in tensors.items()
        if "layers.1." in name
    }
    return tensors | extra


def without_frequencies(tensors: dict[str, Any]) -> dict[str, Any]:
    """As ESM without its rotary frequencies, which it would load in single precision."""
    return {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}


# As files converted from TensorFlow.
GAMMA_AND_BETA = {r"LayerNorm\.weight": "LayerNorm.gamma", r"LayerNorm\.bias": "LayerNorm.beta"}
# As composite models are named where they run.
MODEL_FIRST = {r"^language_model\.model\.": "model.language_model."}
OLDER = [
    (NAMED["gpt2"], without_prefix),
    (NAMED["bert"], GAMMA_AND_BETA),
    (NAMED["electra"], GAMMA_AND_BETA),
    (NAMED["deberta"], GAMMA_AND_BETA),
    (NAMED["gpt-neox"], with_buffers),
    (NAMED["t5"], with_bias_in_cross_attention),
    (NAMED["mistral"], with_a_draft_layer),
    (NAMED["deepseek-v3"], with_a_draft_layer),
    (NAMED["gemma3"], MODEL_FIRST),
    (FURTHER["esm"], without_frequencies),
]


@pytest.mark.parametrize(("architecture", "edit"), OLDER, ids=[row.name for row, _ in OLDER])
def test_older_files(architecture: Architecture, edit: Any, tmp_path: Path) -> None:
    model = save(architecture, tmp_path)
    respelling = partial(respelled, spelling=edit) if isinstance(edit, dict) else edit
    edit_tensors(tmp_path, respelling)
    prove_attention(architecture, tmp_path)
    prove_live(architecture, model, tmp_path)
    prove_norms(architecture, tmp_path)
