"""Untrained latent attention is recognized, whose weights are products of random matrices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.small import save

import wqk

D, HEADS, CONTENT, POSITION, QUERY_LATENT, KEY_LATENT = 128, 4, 32, 16, 64, 48


def latent(kind: str, trained: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """A model of one layer with latent attention: tensors and configuration."""
    dice = np.random.default_rng(0)
    at = "model.layers.0.self_attn."
    width = HEADS * (CONTENT + POSITION)
    shapes = {
        "q_a_proj.weight": (QUERY_LATENT, D),
        "q_b_proj.weight": (width, QUERY_LATENT),
        "kv_a_proj_with_mqa.weight": (KEY_LATENT + POSITION, D),
        "kv_b_proj.weight": (HEADS * 2 * CONTENT, KEY_LATENT),
        "o_proj.weight": (D, HEADS * CONTENT),
    }
    if kind == "deepseek_v2":  # its small models have no latent of queries
        shapes["q_proj.weight"] = (width, D)
        del shapes["q_a_proj.weight"], shapes["q_b_proj.weight"]
    tensors: dict[str, Any] = {
        at + name: (0.02 * dice.standard_normal(shape)).astype(np.float32)
        for name, shape in shapes.items()
    }
    tensors[f"{at}kv_a_layernorm.weight"] = np.ones(KEY_LATENT, np.float32)
    tensors[f"{at}q_a_layernorm.weight"] = np.ones(QUERY_LATENT, np.float32)
    tensors["model.layers.0.input_layernorm.weight"] = np.ones(D, np.float32)
    if trained:
        tensors[f"{at}kv_b_proj.weight"] *= np.linspace(0.5, 1.5, KEY_LATENT, dtype=np.float32)
    config = {
        "model_type": kind,
        "hidden_size": D,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "qk_nope_head_dim": CONTENT,
        "qk_rope_head_dim": POSITION,
        "v_head_dim": CONTENT,
        "kv_lora_rank": KEY_LATENT,
        "q_lora_rank": None if kind == "deepseek_v2" else QUERY_LATENT,
    }
    return tensors, config


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3", "minicpm3"])
@pytest.mark.parametrize("trained", [False, True])
def test_untrained_latent_attention_is_random_looking(kind: str, trained: bool, tmp_path) -> None:
    tensors, config = latent(kind, trained)
    save(tmp_path, {name: torch.tensor(values) for name, values in tensors.items()}, config)
    statuses = wqk.scan(tmp_path).frame["status"].to_list()
    assert all(("random-looking" in status) != trained for status in statuses)
