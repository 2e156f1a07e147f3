"""Configurations as people write them: lengths without bounds, keys of their own, or left out."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from tests.families.architectures import Architecture
from tests.families.architectures.architecture import BERT, GROUPED
from tests.families.proving import edit_config, prove_attention, save
from tools.deriving.configured import configuration_faults
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import wqk

LONG = {"max_position_embeddings": 131072, "sliding_window": 131072}
PHI = BERT | {
    "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
    "pad_token_id": 0, "original_max_position_embeddings": 4096,
}  # fmt: skip
LONGROPE = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.5], "long_factor": [2.0] * 4}
DBRX = {"d_model": 48, "n_heads": 6, "n_layers": 2, "vocab_size": 61, "pad_token_id": 0}
ATTENTION = {"kv_n_heads": 2, "clip_qkv": 1.5, "rope_theta": 500000.0}
EXPERTS = {"ffn_hidden_size": 16, "moe_num_experts": 2, "moe_top_k": 1}
ROWS = {
    "Qwen2.5-7B": (
        Architecture("qwen2", "Qwen2Model", GROUPED | {"use_sliding_window": False}, hub=LONG),
        {None},
    ),
    "Qwen2 with windows": (
        Architecture(
            "qwen2", "Qwen2Model",
            GROUPED | LONG | {"use_sliding_window": True, "max_window_layers": 1},
        ),
        {None, "131072"},
    ),
    "Phi-3.5-mini": (
        Architecture(
            "phi3", "Phi3Model", PHI | LONG | {"sliding_window": 262144, "rope_scaling": LONGROPE}
        ),
        {"262144"},
    ),
    "DBRX": (
        Architecture(
            "dbrx", "DbrxModel",
            DBRX | {"attn_config": ATTENTION, "ffn_config": EXPERTS},
            hub={"num_key_value_heads": None},
        ),
        {None},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_published_lengths_and_keys_are_read(name: str, tmp_path: Path) -> None:
    architecture, windows = ROWS[name]
    save(architecture, tmp_path)
    prove_attention(architecture, tmp_path)
    assert {plan.window for plan in wqk.open(tmp_path).plans} == windows


@pytest.mark.parametrize("window", [0.5, -4, "131072", True, [4096], 10**400])
def test_a_window_that_is_no_number_of_tokens_is_refused(window: Any, tmp_path: Path) -> None:
    row = Architecture("qwen2", "Qwen2Model", GROUPED, hub={"sliding_window": window})
    save(row, tmp_path)
    with pytest.raises(wqk.errors.CheckpointError, match="sliding_window must be a positive whole"):
        wqk.open(tmp_path).plans  # noqa: B018


# Settings of which something was once read wrongly, or refused.
FOUND = (Path(__file__).parent / "found.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize("line", FOUND)
def test_settings_are_read_as_they_are_run(line: str, tmp_path: Path) -> None:
    assert configuration_faults(json.loads(line), tmp_path / "model") == []


# What publishers wrote, as far as attention depends on it, and where it was seen.
LINES = (Path(__file__).parent / "published.jsonl").read_text(encoding="utf-8").splitlines()
PUBLISHED = {row["model"]: row["config"] for row in map(json.loads, LINES)}
RUN = [name for name, config in PUBLISHED.items() if config["model_type"] in CONFIG_MAPPING_NAMES]


def prove_published(name: str, folder: Path) -> None:
    """Proven as it is; with its own lengths, it has the same windows under larger numbers."""
    config = PUBLISHED[name]
    assert configuration_faults(config, folder) == []
    small = [plan.window for plan in wqk.open(folder).plans]
    edit_config(folder, {key: value for key, value in config.items() if "window" in key})
    large = [plan.window for plan in wqk.open(folder).plans]
    assert [window is None for window in large] == [window is None for window in small]


@pytest.mark.parametrize("name", random.Random(39).sample(RUN, 8))
def test_a_share_of_published_configurations_is_read_as_it_is_run(
    name: str, tmp_path: Path
) -> None:
    prove_published(name, tmp_path / "model")


@pytest.mark.campaign
@pytest.mark.parametrize("name", RUN)
def test_published_configurations_are_read_as_they_are_run(name: str, tmp_path: Path) -> None:
    prove_published(name, tmp_path / "model")


def test_every_published_configuration_that_can_be_run_is_run() -> None:
    assert len(PUBLISHED) == len(LINES)
    assert {PUBLISHED[name]["model_type"] for name in PUBLISHED.keys() - set(RUN)} == {
        "baichuan", "chatglm", "deepseek", "internlm", "minicpm", "orion", "phi-msft", "qwen",
        "rwkv5",
    }  # fmt: skip
