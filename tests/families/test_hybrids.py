"""Layers of other kinds between those with attention, and layers that share keys."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.families.architectures import FURTHER
from tests.families.proving import edit_config, edit_tensors, save, transformers
from tests.stand_in import Module

import wqk
from wqk.errors import CheckpointError, UnknownFamily
from wqk.inspecting.explanation import explain
from wqk.live.verification import verify


def test_mistral_4_is_not_run_as_the_model_that_it_is_like(tmp_path, monkeypatch):
    save(FURTHER["mistral4"], tmp_path)
    assert "multiplied by a factor of their position" in wqk.open(tmp_path)[0].plan.reason
    monkeypatch.delitem(transformers.CONFIG_MAPPING._mapping, "mistral4")
    with pytest.raises(UnknownFamily, match="no code for model type 'mistral4'"):
        verify(tmp_path)


def test_granite_with_windows_has_the_scale_of_its_configuration() -> None:
    tensors = {f"layers.0.self_attn.{side}_proj.weight": np.ones((24, 24)) for side in "qk"}
    config = {"model_type": "granite_swa", "num_attention_heads": 4, "num_hidden_layers": 1}
    model = Module(tensors, config | {"attention_multiplier": 0.3, "head_dim": 6})
    assert wqk.open(model)[0].plan.scale == 0.3


def test_layers_without_keys_of_their_own_say_whose_they_use(tmp_path: Path) -> None:
    save(FURTHER["gemma3n-text"], tmp_path)
    notes = explain(wqk.open_checkpoint(tmp_path)).notes
    assert [any(f"keys of layer {n}" in note for note in notes) for n in (0, 1, 2)] == [1, 1, 0]
    edit_config(tmp_path, {"num_kv_shared_layers": 3})
    with pytest.raises(CheckpointError, match="layer 1's type, full_attention"):
        wqk.scan(tmp_path)
    edit_config(tmp_path, {"num_kv_shared_layers": 1})
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_proj\.weight.* is missing"):
        wqk.scan(tmp_path)


def test_an_attention_layer_without_its_keys_is_no_recurrence(tmp_path: Path) -> None:
    save(FURTHER["kimi-linear"], tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: {k: v for k, v in tensors.items() if "kv_b_proj" not in k}
    )
    with pytest.raises(CheckpointError, match="kv_b_proj"):
        wqk.scan(tmp_path)


def test_what_weighs_tokens_channel_by_channel_has_no_form(tmp_path: Path) -> None:
    save(FURTHER["rwkv"], tmp_path)
    with pytest.raises(UnknownFamily, match=r"RWKV-4.* no product scores pairs"):
        wqk.scan(tmp_path)


# Names of the other layers of each hybrid.
OTHERS = {
    "lfm2-moe": "layers 0: a short convolution, which scores no pairs of tokens",
    "recurrent-gemma": "layers 0-1: a gated linear recurrence, which scores no pairs of tokens",
    "nemotron-h": "layers 1, 3: no attention there, and no recurrence.",
    "zamba": "layers 0, 2: Mamba by heads, each of whose forms sees a part of the inner vectors",
}


@pytest.mark.parametrize("name", OTHERS)
def test_every_layer_of_a_hybrid_is_accounted_for(name: str, tmp_path: Path) -> None:
    save(FURTHER[name], tmp_path)
    assert OTHERS[name] in " ".join(explain(tmp_path).notes)
