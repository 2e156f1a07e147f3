"""Models of parts, hybrids, gates, latents: scanned and verified, and what is said of the rest."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.command import run
from tests.families.architectures import Architecture
from tests.families.architectures.architecture import GROUPED, TOKENS
from tests.families.proving import edit_config, save
from tests.stand_in import Module

import wqk
from wqk.errors import UnknownFamily
from wqk.inspecting.explanation import explain

if TYPE_CHECKING:
    from pathlib import Path

WITHOUT_WIDTH = {key: value for key, value in GROUPED.items() if key != "head_dim"}
LATENT = WITHOUT_WIDTH | {
    "num_key_value_heads": 6,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 6,
    "qk_rope_head_dim": 4,
    "v_head_dim": 5,
    "first_k_dense_replace": 2,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
}
VISION = {"hidden_size": 32, "num_heads": 4, "depth": 1, "intermediate_size": 16, "patch_size": 4}
MAMBA = {"mamba_d_state": 4, "mamba_d_conv": 2, "mamba_expand": 2, "mamba_dt_rank": 3}

# The model; each stack's number of query heads, key heads and layers; the verdict; the model type
# that its configuration names instead of its own.
MODELS: dict[str, tuple[Architecture, dict[str, tuple[int, int, int]], str, str]] = {
    "Qwen3-VL": (
        Architecture(
            "qwen3-vl",
            "Qwen3VLModel",
            {
                "text_config": GROUPED | {"rope_parameters": {
                    "rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2]}},
                "vision_config": VISION | {
                    "out_hidden_size": 48, "spatial_merge_size": 2, "temporal_patch_size": 2,
                    "deepstack_visual_indexes": [], "num_position_embeddings": 16},
            },
        ),
        {"decoder": (6, 2, 2), "vision": (4, 4, 1)},
        "form right",
        "",
    ),
    "LLaVA": (
        Architecture(
            "llava",
            "LlavaModel",
            {
                "text_config": GROUPED | {"model_type": "llama"},
                "vision_config": {
                    "model_type": "clip_vision_model", "hidden_size": 24, "num_attention_heads": 4,
                    "num_hidden_layers": 1, "intermediate_size": 16, "image_size": 8,
                    "patch_size": 4},
            },
        ),
        {"decoder": (6, 2, 2), "vision": (4, 4, 1)},
        "right",
        "",
    ),
    "Kimi-K2": (
        Architecture("kimi", "DeepseekV3Model", LATENT),
        {"decoder": (6, 6, 2)},
        "right",
        "kimi_k2",
    ),
    "MiniCPM3": (
        Architecture("minicpm3", "MiniCPM3Model", LATENT),
        {"decoder": (6, 6, 2)},
        "right",
        "",
    ),
    "Jamba": (
        Architecture(
            "jamba",
            "JambaModel",
            WITHOUT_WIDTH | MAMBA | {
                "num_hidden_layers": 4, "attn_layer_period": 2, "attn_layer_offset": 1,
                "num_experts": 1, "use_mamba_kernels": False},
        ),
        {"decoder": (6, 2, 2)},
        "right",
        "",
    ),
    "Qwen3-Next": (
        Architecture(
            "qwen3-next",
            "Qwen3NextModel",
            GROUPED | {"layer_types": ["linear_attention", "full_attention"], "num_experts": 0,
                       "linear_key_head_dim": 4, "linear_value_head_dim": 4,
                       "linear_num_key_heads": 2, "linear_num_value_heads": 4},
        ),
        {"decoder": (6, 2, 1)},
        "right",
        "",
    ),
    "Zamba2": (
        Architecture(
            "zamba2",
            "Zamba2Model",
            TOKENS | {
                "hidden_size": 24, "num_hidden_layers": 3, "num_attention_heads": 4,
                "num_key_value_heads": 2, "layers_block_type": ["mamba", "hybrid", "hybrid"],
                "mamba_d_state": 4, "mamba_d_conv": 2, "mamba_headdim": 12, "n_mamba_heads": 4,
                "mamba_ngroups": 1, "num_mem_blocks": 1, "adapter_rank": 3,
                "intermediate_size": 16, "use_mem_rope": True, "chunk_size": 8},
        ),
        {"decoder": (4, 2, 1)},
        "right",
        "",
    ),
    "Whisper": (
        Architecture(
            "whisper",
            "WhisperForConditionalGeneration",
            TOKENS | {
                "d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 4,
                "encoder_ffn_dim": 24, "decoder_layers": 2, "decoder_attention_heads": 8,
                "decoder_ffn_dim": 40, "num_mel_bins": 8, "max_source_positions": 20,
                "max_target_positions": 32, "decoder_start_token_id": 1},
        ),
        {"encoder": (4, 4, 1), "decoder": (8, 8, 2)},
        "right",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("architecture", "heads", "verdict", "of_type"), MODELS.values(), ids=MODELS
)
def test_a_model_is_scanned_and_verified(
    architecture: Architecture,
    heads: dict[str, tuple[int, int, int]],
    verdict: str,
    of_type: str,
    tmp_path: Path,
) -> None:
    save(architecture, tmp_path)
    if of_type:
        edit_config(tmp_path, {"model_type": of_type})
    told = run("scan", str(tmp_path), "--json")
    assert told.exit_code == 0, told.output
    layers = wqk.scan(tmp_path).layers.frame.to_dicts()
    found = {
        row["stack"]: (row["heads"], row["key_heads"],
                       sum(r["stack"] == row["stack"] and r["kind"] == "self" for r in layers))
        for row in layers
        if row["kind"] == "self"
    }  # fmt: skip
    assert found == heads
    shown = run("verify", str(tmp_path), "--json")
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["verdict"] == verdict


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def test_half_of_a_gated_query_is_a_gate(tmp_path: Path) -> None:
    path = tmp_path / "wrong.toml"
    path.write_text(
        'name = "toy"\nlike = "qwen3-next"\nmodel_types = ["toy"]\n[change]\nlayout = "separate"\n'
    )
    weights = {
        f"layers.0.self_attn.{side}_proj.weight": draw(rows, 48)
        for side, rows in {"q": 2 * 72, "k": 24}.items()
    }
    config = {"model_type": "qwen3_next", "num_attention_heads": 6, "num_key_value_heads": 2,
              "head_dim": 12, "num_hidden_layers": 1}  # fmt: skip
    model = Module(weights, config)
    attention = wqk.open(model)[0]
    queries = weights["layers.0.self_attn.q_proj.weight"].reshape(6, 2, 12, 48)[:, 0]
    np.testing.assert_array_equal(attention.query.weight, queries)
    # Read as queries alone, heads would be twice as wide as those of the keys.
    with pytest.raises(wqk.errors.CheckpointError, match="do not fit"):
        wqk.open(model, family=path)[0]


def hybrid(beside: dict[str, np.ndarray], module: str) -> Module:
    """Attention in layer 1, and something else of the same module's name in layer 0."""
    pair = {f"layers.1.{module}.{side}_proj.weight": draw(24, 24) for side in "qkv"}
    others = {f"layers.0.{module}.{name}": value for name, value in beside.items()}
    return Module(pair | others, {"num_attention_heads": 4, "hidden_size": 24})


RECURRENT = {
    "Nemotron-H": ("mixer", {"A_log": draw(4), "in_proj.weight": draw(72, 24),
                             "conv1d.weight": draw(24, 1, 4)}, "state-space"),
    "MiniMax": ("self_attn", {"slope_rate": draw(4), "qkv_proj.weight": draw(72, 24)}, "lightning"),
    "RecurrentGemma": ("temporal_block", {"rg_lru.recurrent_param": draw(24),
                                          "conv_1d.weight": draw(24, 1, 4)}, "gated linear"),
    "LFM2": ("", {"conv.in_proj.weight": draw(72, 24), "conv.conv.weight": draw(24, 1, 3)},
             "short convolution"),
}  # fmt: skip


@pytest.mark.parametrize(("module", "beside", "kind"), RECURRENT.values(), ids=RECURRENT)
def test_other_layers_of_a_hybrid_are_named_as_what_they_are(
    module: str, beside: dict[str, Any], kind: str
) -> None:
    if not module:
        module, beside = "mixer", {f"{name}": value for name, value in beside.items()}
    model = hybrid(beside, module)
    explanation = explain(model)
    assert {(use.layers, use.heads) for use in explanation.uses} == {("1", "4×6")}
    (note,) = [note for note in explanation.notes if kind in note]
    assert note.startswith("layers 0:")


def test_queries_that_pass_a_convolution_are_refused() -> None:
    names = ("q_proj.weight", "k_proj.weight", "conv_qk_depthwise.weight")
    tensors = {f"layers.0.self_attn.qkv_proj.{name}": draw(24, 24) for name in names}
    for model_type, reason in (("zaya", "more than two tokens"), ("nobody", "not a form of two")):
        with pytest.raises(UnknownFamily, match=reason):
            wqk.scan(Module(tensors, {"model_type": model_type, "num_attention_heads": 4}))


def test_a_learned_scale_after_the_projection_makes_a_guess_partial() -> None:
    tensors = {f"layers.0.self_attn.{side}_proj.weight": draw(24, 24) for side in "qk"}
    model = Module(
        tensors | {"layers.0.self_attn.scaling": draw(6)},
        {"model_type": "nobody", "num_attention_heads": 4, "hidden_size": 24},
    )
    assert any("self_attn.scaling" in note for note in explain(model).notes)


def test_weights_that_are_rounded_as_the_model_runs_are_partial() -> None:
    tensors = {f"layers.0.self_attn.{side}_proj.weight": draw(24, 24) for side in "qk"}
    config = {"model_type": "bitnet", "num_attention_heads": 4, "num_hidden_layers": 1}
    config["num_key_value_heads"] = 4
    rounded = config | {"quantization_config": {"quant_method": "bitnet"}}
    assert set(wqk.scan(Module(tensors, config)).frame["status"]) == {"ok"}
    table = wqk.scan(Module(tensors, rounded))
    assert set(table.frame["status"]) == {"partial"}
    assert "three values" in str(table.metadata["partial"])


def test_layers_that_share_keys_are_read_with_those_they_use() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    weights = {
        f"layers.{layer}.self_attn.{side}_proj.weight": draw(24, 24, seed=layer + 9 * (side == "k"))
        for layer in range(4)
        for side in "qk"
    }
    config = {"num_attention_heads": 4, "hidden_size": 24, "layer_types": kinds}
    model = Module(weights, config | {"num_kv_shared_layers": 2})
    for layer, source in enumerate((0, 1, 0, 1)):
        attention = wqk.open(model)[layer]
        for factor, side, number in ((attention.query, "q", layer), (attention.key, "k", source)):
            stored = weights[f"layers.{number}.self_attn.{side}_proj.weight"]
            np.testing.assert_array_equal(factor.weight.reshape(24, 24), stored)
    assert any("keys of layer 1" in note for note in explain(model).notes)


@pytest.mark.parametrize("adapted", [False, True])
def test_a_shared_block_with_adapters_is_partial(adapted: bool) -> None:
    weights = {
        f"layers.6.shared_transformer.self_attn.{side}_proj.weight": draw(24, 48) for side in "qk"
    }
    config = {"model_type": "zamba2", "num_attention_heads": 4, "hidden_size": 24,
              "use_shared_attention_adapter": adapted}  # fmt: skip
    table = wqk.scan(Module(weights, config))
    assert set(table.frame["status"]) == {"partial" if adapted else "ok"}
    assert set(table.frame["layer"]) == {6}


def test_a_part_without_forms_refuses_the_whole() -> None:
    tensors = {f"model.layers.0.self_attn.{side}_proj.weight": draw(24, 24) for side in "qk"}
    config = {"model_type": "of-tomorrow", "text_config": {"model_type": "zaya"}}
    with pytest.raises(UnknownFamily, match=r"text_config: .* more than two tokens"):
        wqk.scan(Module(tensors, config))


def test_a_flux_block_attends_with_its_two_streams() -> None:
    width, heads, tokens = 6, 4, 5
    d = width * heads
    path = "transformer_blocks.0.attn."
    sides = {"to_": "norm_", "add_": "norm_added_"}
    tensors = {}
    for stream, norm in sides.items():
        for side in "qk":
            name = f"{stream}{side}" + ("_proj" if stream == "add_" else "")
            tensors[f"{path}{name}.weight"] = draw(d, d, seed=ord(side) + len(stream))
            tensors[f"{path}{norm}{side}.weight"] = draw(width, seed=ord(side) + len(stream))
    model = Module(tensors, {"num_attention_heads": heads, "attention_head_dim": width})
    for stream, norm in sides.items():
        x = draw(tokens, d, seed=9)
        vectors = []
        for side in "qk":
            name = f"{stream}{side}" + ("_proj" if stream == "add_" else "")
            projected = (x @ tensors[f"{path}{name}.weight"].T).reshape(tokens, heads, width)
            size = np.sqrt((projected**2).mean(-1, keepdims=True))
            vectors.append(projected / size * tensors[f"{path}{norm}{side}.weight"])
        expected = np.einsum("ihr,jhr->hij", *vectors)
        name = f"{stream}q" + ("_proj" if stream == "add_" else "")
        attention = wqk.open(model).block(0, stack=name)
        np.testing.assert_allclose(attention.products(x, x), expected, atol=1e-12)
