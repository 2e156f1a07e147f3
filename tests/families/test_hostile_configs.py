"""Configurations that lie: whatever stands under a key ends in a scan or in a WqkError."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from tests.stand_in import Module

import wqk

HOSTILE = [
    None, True, -1, 0, 7, 2**31, 2**63, 1e308, -0.5, "", "12", "x" * 10_000, [], [1, 2], [[]], {},
    {"a": {"b": []}}, [None], ["full_attention"], {"rope_type": "no such"}, {"factor": "x"},
]  # fmt: skip
KEYS = {
    "bert": [
        "model_type", "num_attention_heads", "num_hidden_layers", "is_decoder", "architectures",
    ],
    "llama": [
        "num_attention_heads", "num_key_value_heads", "num_hidden_layers", "head_dim",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "layer_types",
        "quantization_config", "max_window_layers", "rms_norm_eps", "max_position_embeddings",
    ],
    "gpt2": ["n_head", "n_layer", "scale_attn_weights", "scale_attn_by_inverse_layer_idx"],
    "gpt_neo": ["attention_types", "attention_layers", "num_heads", "window_size"],
    "swin": ["num_heads", "depths", "window_size"],
}  # fmt: skip
TENSORS = {
    "bert": {
        "encoder.layer.0.attention.self.query": (8, 8),
        "encoder.layer.0.attention.self.key": (8, 8),
    },
    "llama": {"layers.0.self_attn.q_proj": (8, 8), "layers.0.self_attn.k_proj": (4, 8)},
    "gpt2": {"h.0.attn.c_attn": (8, 24)},
    "gpt_neo": {
        "h.0.attn.attention.q_proj": (8, 8), "h.0.attn.attention.k_proj": (8, 8),
    },
    "swin": {
        "encoder.layers.0.blocks.0.attention.self.query": (8, 8),
        "encoder.layers.0.blocks.0.attention.self.key": (8, 8),
    },
}  # fmt: skip
GOOD = {
    "num_attention_heads": 4, "num_key_value_heads": 2, "n_head": 4, "num_heads": 4,
    "num_hidden_layers": 1, "n_layer": 1, "num_layers": 1,
}  # fmt: skip


def model(kind: str, changes: dict[str, object]) -> Module:
    """A tiny model whose configuration is right but for the changes."""
    rng = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": rng.standard_normal(shape) for name, shape in TENSORS[kind].items()
    }
    return Module(tensors, {"model_type": kind, **GOOD, **changes})


@pytest.mark.parametrize(("kind", "key"), [(kind, key) for kind in KEYS for key in KEYS[kind]])
def test_no_value_does_more_than_be_refused(kind: str, key: str) -> None:
    for value in HOSTILE:
        start = time.perf_counter()
        liar = model(kind, {key: value})
        for look in (wqk.scan, wqk.explain):
            with contextlib.suppress(wqk.WqkError):
                look(liar)
        assert time.perf_counter() - start < 1, (key, value)


def test_seeded_pairs_of_lies() -> None:
    rng = np.random.default_rng(1)
    for _ in range(400):
        kind = str(rng.choice(list(KEYS)))
        keys = rng.choice(KEYS[kind], 2)
        changes = {str(key): HOSTILE[rng.integers(len(HOSTILE))] for key in keys}
        try:
            wqk.scan(model(kind, changes))
        except wqk.WqkError:
            continue


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00", '{"a":' * 5000, '"bert"', "NaN"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wqk.demo_model("encoder"), folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(wqk.WqkError):
        wqk.scan(folder)


def test_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wqk.demo_model("encoder"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
    with pytest.raises(wqk.WqkError, match="128 outputs do not divide into 5 heads"):
        wqk.scan(folder)
