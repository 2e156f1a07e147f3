"""Keys of single families whose loss no model of the other tests shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stand_in import Module

import wqk

pytest.importorskip("transformers")

import torch
import transformers
from tests.families.proving import edit_config
from tests.families.test_rotations import DENSE, random_model

HALF_WIDE = {"head_dim": 12}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def arrays(*names: str, rows: int, columns: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((rows, columns)).astype(np.float32) for name in names}


def test_nanochat_normalizes_after_a_stretched_rotation(tmp_path: Path) -> None:
    """The norm takes away YaRN's factor, which would otherwise be in every score."""
    yarn = {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "attention_factor": 3.0,
        "original_max_position_embeddings": 64,
    }
    random_model("NanoChatModel", DENSE | ENDS | {"rope_parameters": yarn}).save_pretrained(
        tmp_path
    )
    assert {block.verdict for block in wqk.verify(tmp_path).blocks} == {"right"}
    rotary = wqk.open(tmp_path).plans[0].rotary
    assert rotary is not None
    assert (rotary.amplitude, rotary.before_norm) == (1.0, True)


def test_cosmos3_edge_counts_key_heads_by_their_rows() -> None:
    """A stray number of key heads in the configuration is not read."""
    layer = "language_model.layers.0.self_attn"
    weights = arrays(f"{layer}.to_q.weight", rows=16, columns=8)
    weights |= arrays(f"{layer}.to_k.weight", f"{layer}.to_v.weight", rows=8, columns=8)
    text = {"num_attention_heads": 4, "head_dim": 4, "num_hidden_layers": 1}
    text["num_key_value_heads"] = 4
    (plan,) = wqk.open(Module(weights, {"model_type": "cosmos3_edge", "text_config": text})).plans
    assert (plan.query.heads, plan.key.heads) == (4, 2)


@pytest.mark.parametrize("has_own_table", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_beit_adds_positions_only_where_it_has_their_table(
    has_own_table: bool, shared: bool
) -> None:
    config = transformers.BeitConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=32,
        patch_size=16,
        use_relative_position_bias=has_own_table,
        use_shared_relative_position_bias=shared,
    )
    model = transformers.BeitModel(config)
    has_table = any("relative_position_bias_table" in name for name in model.state_dict())
    (plan,) = wqk.open(model).plans
    assert plan.position == ("relative" if has_table else "")
    assert has_table == (has_own_table or shared)


def test_timm_reads_no_blocks_of_another_module() -> None:
    def model(prefix: str) -> Module:
        weights = arrays(f"{prefix}blocks.0.attn.qkv.weight", rows=48, columns=16)
        return Module(weights, {"model_type": "timm", "num_heads": 4, "depth": 1})

    assert wqk.open(model("")).family == "timm"
    assert wqk.open(model("text.")).family == "inferred"


@pytest.mark.parametrize("module", ["attn", "attention"])
def test_qianfan_normalizes_queries_and_keys_under_both_names(module: str) -> None:
    weights = arrays("encoder.layers.0.attn.qkv.weight", rows=48, columns=16)
    names = [f"encoder.layers.0.{module}.{side}_norm.weight" for side in "qk"]
    weights |= {name: np.ones(16, np.float32) for name in names}
    config = {"model_type": "qianfan_ocr_vision", "num_attention_heads": 4, "num_hidden_layers": 1}
    (plan,) = wqk.open(Module(weights, config)).plans
    norms = [side.norm for side in (plan.query, plan.key)]
    assert [norm and norm.gain[0].name for norm in norms] == names


@pytest.mark.parametrize("grows", [True, False])
@pytest.mark.parametrize("norms", [True, False])
def test_queries_of_llama_4_grow_in_layers_without_rotary_positions(
    grows: bool, norms: bool
) -> None:
    sides = [f"layers.{n}.self_attn.{side}_proj.weight" for n in range(2) for side in "qk"]
    weights = arrays(*sides, rows=16, columns=16)
    config = {
        "model_type": "llama4_text",
        "head_dim": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "no_rope_layers": [1, 0],
        "floor_scale": 77,
        "attn_temperature_tuning": grows,
        "use_qk_norm": norms,
    }
    plans = wqk.open(Module(weights, config)).plans
    assert [plan.grows_from for plan in plans] == [None, 77 if grows else None]


def test_older_scaling_by_kind_of_layer_is_passed_over_like_transformers_does() -> None:
    """Gemma 3 adds `rope_scaling` to full layers; parameters by kind in it change nothing."""
    by_kind = {
        kind: {"rope_type": "linear", "factor": 8.0, "rope_theta": 500.0}
        for kind in ("full_attention", "sliding_attention")
    }
    config = {
        "model_type": "gemma3_text",
        "hidden_size": 16,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "num_hidden_layers": 2,
        "head_dim": 4,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 8,
        "rope_scaling": by_kind,
    }
    sides = [f"layers.{n}.self_attn.{side}_proj.weight" for n in range(2) for side in "qk"]
    plans = wqk.open(Module(arrays(*sides, rows=16, columns=16), config)).plans
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding

    embedding = Gemma3RotaryEmbedding(transformers.Gemma3TextConfig.from_dict(dict(config)))
    for plan, kind in zip(plans, config["layer_types"], strict=True):
        frequencies = getattr(embedding, f"{kind}_inv_freq").double().numpy()
        assert plan.rotary is not None
        np.testing.assert_allclose(plan.rotary.frequencies, frequencies, rtol=1e-6)


KINDS = ("sliding_attention", "full_attention")


@pytest.mark.parametrize("kinds", [(a, b) for a in KINDS for b in KINDS])
def test_muse_counts_layers_without_positions_from_the_last(
    kinds: tuple[str, str], tmp_path: Path
) -> None:
    """Kinds of layers are written, bases of layers are not, as in published files."""
    settings = DENSE | HALF_WIDE | ENDS | {"layer_types": [*kinds], "sliding_window": 3}
    random_model("MuseGlimmerTextModel", settings).save_pretrained(tmp_path)
    edit_config(tmp_path, {"layer_rope_theta": None})
    assert {block.verdict for block in wqk.verify(tmp_path).blocks} == {"right"}
    plans = wqk.open(tmp_path).plans
    assert [plan.rotary is not None for plan in plans] == [True, False]


TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 60,
    "encoder_hidden_size": 20,
    "projection_dim": 8,
    "sep_token_id": 2,
    "is_decoder": True,
    **ENDS,
}
VISION = {
    "hidden_size": 20,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "image_size": 32,
    "patch_size": 16,
    "projection_dim": 8,
}


@pytest.mark.parametrize(
    ("name", "masks"),
    [
        ("BlipForConditionalGeneration", {"text_decoder": True}),
        ("BlipForQuestionAnswering", {"text_decoder": True, "text_encoder": False}),
        ("BlipForImageTextRetrieval", {"text_encoder": False}),
    ],
)
def test_the_class_that_runs_decides_the_mask_of_blip(name: str, masks: dict[str, bool]) -> None:
    config = transformers.BlipConfig(text_config=TEXT, vision_config=VISION)
    model = getattr(transformers, name)(config).eval()
    plans = [p for p in wqk.open(model).plans if p.kind == "self" and p.stack != "vision"]
    read = {plan.query.tensor.partition(".")[0]: plan.causal for plan in plans}
    assert read == masks
    for module, causal in masks.items():
        text = getattr(model, module)
        with torch.no_grad():
            tokens = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 9]])  # they differ at the end
            flags = {"is_decoder": True} if causal else {}
            picture = torch.randn(1, 2, 20).repeat(2, 1, 1)
            out = text(input_ids=tokens, encoder_hidden_states=picture, **flags)
        first = out[0][:, 0]
        assert torch.allclose(first[0], first[1], atol=1e-6) == causal


def test_the_mask_of_a_text_of_blip_alone_is_an_assumption() -> None:
    layer = "encoder.layer.0.attention.self"
    weights = arrays(f"{layer}.query.weight", f"{layer}.key.weight", rows=16, columns=16)
    config = {"model_type": "blip_text_model", "num_attention_heads": 4, "num_hidden_layers": 1}
    (plan,) = wqk.open(Module(weights, config)).plans
    (assumption,) = plan.assumptions
    assert (assumption.aspect.value, assumption.value) == ("mask", "none")


def test_every_layer_of_lxmert_is_fed_by_the_norm_before_it() -> None:
    """The output of the norm that a plan names is the input of the plan's queries."""
    depths = {"l_layers": 2, "r_layers": 2, "x_layers": 1}
    config = transformers.LxmertConfig(
        hidden_size=16,
        intermediate_size=16,
        num_attention_heads=4,
        vocab_size=30,
        visual_feat_dim=8,
        **depths,
    )
    model = transformers.LxmertModel(config).eval()
    inputs, outputs = dict[str, torch.Tensor](), dict[str, torch.Tensor]()

    def record(name: str, _: object, taken: tuple[torch.Tensor, ...], made: torch.Tensor) -> None:
        inputs[name], outputs[name] = taken[0], made

    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
            module.register_forward_hook(partial(record, name))
    with torch.no_grad():
        model(
            input_ids=torch.arange(6)[None],
            visual_feats=torch.randn(1, 3, 8),
            visual_pos=torch.rand(1, 3, 4),
        )
    fed = set()
    for plan in wqk.open(model).plans:
        norm = plan.query.input_norm
        # The norms within the layers of both streams run twice, once for each.
        if norm is not None and plan.stack in ("text", "vision"):
            fed.add((plan.stack, plan.layer))
            query, gain = (
                tensor.rpartition(".")[0] for tensor in (plan.query.tensor, norm.gain[0].name)
            )
            torch.testing.assert_close(inputs[query], outputs[gain])
    assert fed == {("text", 0), ("text", 1), ("vision", 1)}


def test_reading_order_of_pages_has_heads_of_its_own() -> None:
    layer = "reading_order.encoder.layer.0.attention.self"
    names = (f"{layer}.query.weight", f"{layer}.key.weight", f"{layer}.value.weight")
    weights = arrays(*names, rows=16, columns=16)
    reading_order = {"num_attention_heads": 2, "hidden_size": 16, "num_hidden_layers": 1}
    config = {
        "model_type": "pp_doclayout_v2",
        "encoder_attention_heads": 8,
        "reading_order_config": reading_order,
    }
    (plan,) = wqk.open(Module(weights, config)).plans
    assert (plan.stack, plan.query.heads, plan.key.heads) == ("reading-order", 2, 2)


def test_every_output_of_marian_is_that_of_its_queries() -> None:
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2}
    layers = {"encoder_layers": 1, "decoder_layers": 1, "decoder_start_token_id": 0}
    widths = {"d_model": 16, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 30}
    config = transformers.MarianConfig(pad_token_id=0, **heads, **layers, **widths)
    plans = wqk.open(transformers.MarianModel(config)).plans
    assert len(plans) == 3
    for plan in plans:
        assert plan.output is not None
        module = plan.query.tensor.removesuffix("q_proj.weight")
        assert plan.output.tensor == f"{module}out_proj.weight"


@pytest.mark.parametrize("size", [4, 5])
def test_an_even_window_of_t5gemma2_reaches_further_ahead(size: int) -> None:
    from transformers.models.t5gemma2.modeling_t5gemma2 import sliding_window_mask_function

    layer = "layers.0.self_attn"
    weights = arrays(*(f"{layer}.{name}_proj.weight" for name in "qkvo"), rows=16, columns=16)
    config = {
        "model_type": "t5gemma2_text",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 4,
        "query_pre_attn_scalar": 4,
        "sliding_window": size,
        "layer_types": ["sliding_attention"],
    }
    (plan,) = wqk.open(Module(weights, config)).plans
    allowed = sliding_window_mask_function(size, is_causal=False)
    offsets = [key - size for key in range(2 * size + 1) if allowed(0, 0, size, key)]
    assert (plan.window.back, plan.window.ahead) == (-min(offsets), max(offsets))


def test_torchtitan_normalizes_inputs_queries_and_keys() -> None:
    layer = "layers.0"
    weights = arrays(*(f"{layer}.attention.w{name}.weight" for name in "qkvo"), rows=16, columns=16)
    rng = np.random.default_rng(1)
    gains = {
        f"{layer}.attention_norm.weight": 16,
        f"{layer}.attention.q_norm.weight": 4,
        f"{layer}.attention.k_norm.weight": 4,
    }
    weights |= {name: rng.random(size).astype(np.float32) for name, size in gains.items()}
    config = {"model_type": "torchtitan", "n_layers": 1, "n_heads": 4, "dim": 16}
    (plan,) = wqk.open(Module(weights, config)).plans
    norms = (plan.query.input_norm, plan.query.norm, plan.key.norm)
    assert [norm and norm.gain[0].name for norm in norms] == list(gains)


HUB_NUMBERS = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")


@pytest.mark.parametrize(
    ("model_type", "module", "names", "numbers"),
    [
        ("nanochat", "model.layers.{}.self_attn", "q_proj k_proj v_proj o_proj", HUB_NUMBERS),
        (
            "nanochat",
            "transformer.h.{}.attn",
            "c_q c_k c_v c_proj",
            ("n_layer", "n_head", "n_kv_head"),
        ),
        ("torchtitan", "layers.{}.attention", "wq wk wv wo", HUB_NUMBERS),
        ("torchtitan", "layers.{}.attention", "wq wk wv wo", ("n_layers", "n_heads", "n_kv_heads")),
    ],
)
def test_numbers_are_read_under_every_name(
    model_type: str, module: str, names: str, numbers: tuple[str, str, str]
) -> None:
    """Three layers are stored, of which the configuration counts two."""
    weights, tensors_by_layer = {}, []
    for layer in range(3):
        tensors = [f"{module.format(layer)}.{name}.weight" for name in names.split()]
        weights |= arrays(tensors[0], tensors[3], rows=16, columns=16)
        weights |= arrays(*tensors[1:3], rows=8, columns=16)
        tensors_by_layer.append(tensors)
    config = {"model_type": model_type, **dict(zip(numbers, (2, 4, 2), strict=True))}
    plans = wqk.open(Module(weights, config)).plans
    assert [(plan.query.heads, plan.key.heads) for plan in plans] == [(4, 2), (4, 2)]
    for plan, tensors in zip(plans, tensors_by_layer[:2], strict=True):
        sides = (plan.query, plan.key, plan.value, plan.output)
        assert [side and side.tensor for side in sides] == tensors


@pytest.mark.parametrize(
    "numbers",
    [("n_layer", "n_head", "rotary_emb_base"), (*HUB_NUMBERS[:2], "rope_theta")],
)
def test_settings_of_nomic_bert_are_read_under_both_names(numbers: tuple[str, str, str]) -> None:
    names = [f"encoder.layers.{layer}.attn.Wqkv.weight" for layer in range(3)]
    config = {"model_type": "nomic_bert", **dict(zip(numbers, (2, 4, 500.0), strict=True))}
    plans = wqk.open(Module(arrays(*names, rows=48, columns=16), config)).plans
    assert [plan.query.heads for plan in plans] == [4, 4]
    for plan in plans:
        assert plan.rotary is not None
        np.testing.assert_allclose(plan.rotary.frequencies, [1.0, 500.0**-0.5])


@pytest.mark.parametrize("side", ["Encoder", "Decoder"])
@pytest.mark.parametrize("in_all_layers", [False, True])
def test_blt_attends_to_patches_in_one_layer_or_in_all(
    side: str, in_all_layers: bool, tmp_path: Path
) -> None:
    from transformers.models.blt import configuration_blt, modeling_blt

    config = getattr(configuration_blt, f"BltLocal{side}Config")(
        vocab_size=20,
        hidden_size=32,
        hidden_size_global=64,
        intermediate_size=32,
        num_attention_heads=4,
        head_dim=8,
        num_hidden_layers=3,
        cross_attn_k=2,
        cross_attn_all_layers=in_all_layers,
    )
    getattr(modeling_blt, f"BltLocal{side}")(config).save_pretrained(tmp_path)
    plans = wqk.open(tmp_path).plans
    layers = {kind: [p.layer for p in plans if p.kind == kind] for kind in ("self", "cross")}
    assert layers == {"self": [0, 1, 2], "cross": [0, 1, 2] if in_all_layers else [0]}
