"""Models with other layers between their attention, latent attention, and shared keys: verified."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.architectures import Architecture
from tests.families.architectures.architecture import GROUPED, TOKENS
from tests.families.proving import edit_config, edit_tensors, save, transformers
from tests.stand_in import Module

import wqk
from wqk.errors import CheckpointError, UnknownFamily
from wqk.inspecting.explanation import explain
from wqk.live.verification import verify

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT_WIDTH = {key: value for key, value in GROUPED.items() if key != "head_dim"}
MAMBA = {
    "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2, "mamba_d_head": 24,
    "mamba_n_heads": 4, "mamba_n_groups": 1, "mamba_chunk_size": 8,
}  # fmt: skip
LATENT = WITHOUT_WIDTH | {
    "num_key_value_heads": 6, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
    "original_max_position_embeddings": 32, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip
GRANITE = WITHOUT_WIDTH | MAMBA | {
    "num_hidden_layers": 3, "layer_types": ["mamba", "attention", "attention"],
    "attention_multiplier": 0.3, "num_local_experts": 0, "shared_intermediate_size": 16,
}  # fmt: skip
GEMMA_3N = Architecture(
    "gemma3n-text", "Gemma3nTextModel",
    GROUPED | {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "sliding_window": 8, "vocab_size_per_layer_input": 61,
        "hidden_size_per_layer_input": 8, "laurel_rank": 3, "altup_num_inputs": 2,
        "intermediate_size": [24] * 4, "activation_sparsity_pattern": [0.0] * 4},
)  # fmt: skip

# Each model, its layers with softmax attention, and their status.
MODELS: dict[str, tuple[Architecture, list[int], tuple[str, ...]]] = {
    architecture.name: (architecture, layers, status)
    for architecture, layers, status in (
        (Architecture(
            "mistral4", "Mistral4Model",
            LATENT | {
                "q_lora_rank": 14, "v_head_dim": 10, "n_routed_experts": 4, "n_group": 1,
                "topk_group": 1, "num_experts_per_tok": 1, "moe_intermediate_size": 8,
                "rope_parameters": YARN},
        ), [0, 1], ("partial",)),
        (Architecture(
            "kimi-linear", "KimiLinearModel",
            LATENT | {
                "layer_types": ["linear_attention", "full_attention"], "q_lora_rank": None,
                "mlp_layer_types": ["dense", "dense"], "v_head_dim": 5, "linear_head_dim": 8,
                "linear_num_heads": 6, "linear_conv_kernel_dim": 2, "head_dim": 10},
        ), [1], ("partial",)),
        (Architecture(
            "recurrent-gemma", "RecurrentGemmaModel",
            GROUPED | {
                "num_hidden_layers": 3, "lru_width": 48, "attention_window_size": 8,
                "block_types": ["recurrent", "recurrent", "attention"], "conv1d_width": 2},
        ), [2], ()),
        (Architecture(
            "falcon-h1", "FalconH1Model",
            GROUPED | MAMBA | {
                "mamba_d_ssm": 96, "key_multiplier": 0.5, "attention_in_multiplier": 0.7},
        ), [0, 1], ()),
        (Architecture(
            "bamba", "BambaModel",
            WITHOUT_WIDTH | MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1, 2]},
        ), [1, 2], ()),
        (Architecture("granite-hybrid", "GraniteMoeHybridModel", GRANITE), [1, 2], ()),
        (Architecture(
            "lfm2-moe", "Lfm2MoeModel",
            WITHOUT_WIDTH | {
                "num_hidden_layers": 2, "layer_types": ["conv", "full_attention"],
                "num_dense_layers": 2, "num_experts": 4, "num_experts_per_tok": 1,
                "moe_intermediate_size": 8},
        ), [1], ("partial",)),
        (GEMMA_3N, [0, 1, 2, 3], ("partial",)),
    )
}  # fmt: skip


@pytest.mark.parametrize(("architecture", "layers", "status"), MODELS.values(), ids=MODELS)
def test_a_hybrid_is_verified(
    architecture: Architecture, layers: list[int], status: tuple[str, ...], tmp_path: Path
) -> None:
    save(architecture, tmp_path)
    plans = wqk.open(tmp_path).plans
    assert [plan.layer for plan in plans] == layers
    assert {plan.statuses for plan in plans} == {status}
    verification = verify(tmp_path)
    assert verification.verdict == "right", verification


def test_mistral_4_is_not_run_as_the_model_that_it_is_like(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(MODELS["mistral4"][0], tmp_path)
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
    save(GEMMA_3N, tmp_path)
    notes = explain(wqk.open_checkpoint(tmp_path)).notes
    assert [any(f"keys of layer {n}" in note for note in notes) for n in range(3)] == [
        True, True, False,
    ]  # fmt: skip
    edit_config(tmp_path, {"num_kv_shared_layers": 3})
    with pytest.raises(CheckpointError, match="layer 1's type, full_attention"):
        wqk.scan(tmp_path)
    edit_config(tmp_path, {"num_kv_shared_layers": 1})
    with pytest.raises(CheckpointError, match=r"layers\.2\.self_attn\.k_proj\.weight.* is missing"):
        wqk.scan(tmp_path)


def test_an_attention_layer_without_its_keys_is_no_recurrence(tmp_path: Path) -> None:
    architecture, *_ = MODELS["kimi-linear"]
    save(architecture, tmp_path)

    def without_keys(tensors: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in tensors.items() if "kv_b_proj" not in name}

    edit_tensors(tmp_path, without_keys)
    with pytest.raises(CheckpointError, match="kv_b_proj"):
        wqk.scan(tmp_path)


def test_what_weighs_tokens_channel_by_channel_has_no_form(tmp_path: Path) -> None:
    config = TOKENS | {"hidden_size": 32, "attention_hidden_size": 32, "num_hidden_layers": 2}
    save(Architecture("rwkv", "RwkvModel", config), tmp_path)
    with pytest.raises(UnknownFamily, match=r"RWKV-4.* no product scores pairs"):
        wqk.scan(tmp_path)


# Of each hybrid, what its other layers are said to be.
OTHERS = {
    "lfm2-moe": "layers 0: a short convolution, which scores no pairs of tokens",
    "recurrent-gemma": "layers 0-1: a gated linear recurrence, which scores no pairs of tokens",
    "nemotron-h": "layers 1, 3: no attention there, and no recurrence.",
    "zamba": "layers 0, 2: Mamba by heads, each of whose forms sees a part of the inner vectors",
}
FURTHER = {
    "nemotron-h": Architecture(
        "nemotron-h", "NemotronHModel",
        {key: value for key, value in GROUPED.items() if key != "num_hidden_layers"} | {
            "layers_block_type": ["mamba", "mlp", "attention", "mlp"], "mamba_num_heads": 4,
            "mamba_head_dim": 12, "ssm_state_size": 6, "n_groups": 2, "chunk_size": 4},
    ),
    "zamba": Architecture(
        "zamba", "ZambaModel",
        WITHOUT_WIDTH | {
            "num_hidden_layers": 4, "layers_block_type": ["mamba", "hybrid"] * 2,
            "num_key_value_heads": 6, "attention_hidden_size": 96, "attention_head_dim": 16,
            "mamba_d_state": 4, "mamba_dt_rank": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_every_layer_of_a_hybrid_is_accounted_for(name: str, tmp_path: Path) -> None:
    save(FURTHER[name] if name in FURTHER else MODELS[name][0], tmp_path)
    assert OTHERS[name] in " ".join(explain(tmp_path).notes)
