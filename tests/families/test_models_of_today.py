"""Models of parts, hybrids, gates, latents: scanned and verified, and what is said of the rest."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.errors import UnknownFamily
from wqk.inspecting.explanation import explain


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


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


def test_a_part_without_forms_refuses_the_whole() -> None:
    tensors = {f"model.layers.0.self_attn.{side}_proj.weight": draw(24, 24) for side in "qk"}
    config = {"model_type": "of-tomorrow", "text_config": {"model_type": "zaya"}}
    with pytest.raises(UnknownFamily, match=r"text_config: .* more than two tokens"):
        wqk.scan(Module(tensors, config))
