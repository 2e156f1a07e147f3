"""Families that see, proven: random models attend with the forms read from their files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from tests.families.proving import (
    TOKENS,
    Architecture,
    edit_tensors,
    prove_attention,
    prove_live,
    save,
)
from tests.families.towers import prove_norms, prove_variety

from wqk.attention import attention_plans
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.verification import verify

VIT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
TEXT = TOKENS | {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
# Other numbers of heads and layers than the text, so that neither is read by the other's rule.
TOWER = VIT | {"num_attention_heads": 2, "num_hidden_layers": 3}
CLIP = {"text_config": TEXT, "vision_config": TOWER, "projection_dim": 16}
# Twelve heads and layers, which files on the hub leave out.
SLIM = {"hidden_size": 24, "num_attention_heads": 12, "num_hidden_layers": 12}
SLIM_TEXT, SLIM_TOWER = TEXT | SLIM, VIT | SLIM
BY_DEFAULT = {
    name: {k: v for k, v in part.items() if k not in ("num_attention_heads", "num_hidden_layers")}
    for name, part in (("text_config", SLIM_TEXT), ("vision_config", SLIM_TOWER))
}
# Windows smaller than the picture in the first stage, and shifted in its second layer.
SWIN = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 16,
    "depths": [2, 3],
    "num_heads": [2, 4],
    "window_size": 4,
}
BACKBONE = {
    "model_type": "swin",
    "image_size": 64,
    "patch_size": 4,
    "embed_dim": 8,
    "depths": [1, 2, 1, 1],
    "num_heads": [1, 2, 2, 4],
    "window_size": 4,
    "out_features": ["stage1", "stage2", "stage3", "stage4"],
}
RESNET = {
    "model_type": "resnet",
    "embedding_size": 8,
    "hidden_sizes": [8, 8, 8, 16],
    "depths": [1, 1, 1, 1],
    "layer_type": "basic",
    "out_features": ["stage4"],
}
DETR = {
    "d_model": 32,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 24,
    "decoder_layers": 3,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 24,
    "num_queries": 7,
    "use_timm_backbone": False,
    "use_pretrained_backbone": False,
    "backbone": None,
    "backbone_config": RESNET,
}
MASK2FORMER = {
    "backbone_config": BACKBONE,
    "feature_size": 32,
    "mask_feature_size": 32,
    "hidden_dim": 32,
    "num_attention_heads": 4,
    "encoder_layers": 1,
    "decoder_layers": 4,
    "dim_feedforward": 24,
    "encoder_feedforward_dim": 24,
    "num_queries": 7,
    "use_pretrained_backbone": False,
}
# Pictures of 8 × 8 patches, in windows of 3 × 3 but for the second layer.
SAM = {
    "vision_config": {
        "hidden_size": 32,
        "output_channels": 16,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 32,
        "patch_size": 4,
        "window_size": 3,
        "global_attn_indexes": [1],
        "mlp_dim": 24,
        "num_pos_feats": 8,
    },
    "prompt_encoder_config": {
        "hidden_size": 16,
        "image_size": 32,
        "patch_size": 4,
        "mask_input_channels": 4,
    },
    "mask_decoder_config": {
        "hidden_size": 16,
        "mlp_dim": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "iou_head_hidden_dim": 16,
    },
}
SEGGPT = VIT | {
    "image_size": [16, 8],
    "num_hidden_layers": 4,
    "merge_index": 1,
    "intermediate_hidden_state_indices": [3],
    "pretrain_image_size": 16,
    "decoder_hidden_size": 8,
}
MLLAMA = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 24,
        "image_size": 16,
        "patch_size": 4,
        "max_num_tiles": 2,
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
        "intermediate_layers_indices": [0],
        "vision_output_dim": 64,
    },
    "text_config": TEXT
    | {
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "num_hidden_layers": 4,
        "cross_attention_layers": [1, 3],
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    },
}

SELF = ("encoder", "self")
VISION, TEXTS = ("vision", "self"), ("text", "self")
# Models whose attention is fed by no norm: positions are added first, or norms come after it.
WITHOUT_NORMS = ("detr", "swinv2")

ARCHITECTURES = [
    Architecture("vit", "ViTForImageClassification", VIT, {SELF: 2}),
    Architecture("vit-without-biases", "ViTModel", VIT | {"qkv_bias": False}, {SELF: 2}),
    Architecture("dino", "ViTModel", VIT, {SELF: 2}),
    Architecture("deit", "DeiTForImageClassification", VIT, {SELF: 2}),
    Architecture("vit-msn", "ViTMSNModel", VIT, {SELF: 2}),
    Architecture("ijepa", "IJepaModel", VIT, {SELF: 2}),
    Architecture("yolos", "YolosModel", VIT | {"image_size": [16, 8]}, {SELF: 2}),
    Architecture(
        "vit-mae",
        "ViTMAEForPreTraining",
        VIT
        | {
            "decoder_hidden_size": 24,
            "decoder_num_attention_heads": 3,
            "decoder_num_hidden_layers": 3,
            "decoder_intermediate_size": 24,
        },
        {SELF: 2, ("decoder", "self"): 3},
    ),
    Architecture(
        "vit-mae-hub",
        "ViTMAEForPreTraining",
        VIT | {"decoder_hidden_size": 24, "decoder_num_attention_heads": 3},
        {SELF: 2, ("decoder", "self"): 8},
        spelling={r"decoder_encoder\.layer\.": "decoder_layers."},
    ),
    Architecture(
        "beit", "BeitForImageClassification", VIT | {"use_relative_position_bias": True}, {SELF: 2}
    ),
    Architecture(
        "beit-shared", "BeitModel", VIT | {"use_shared_relative_position_bias": True}, {SELF: 2}
    ),
    Architecture("dit", "BeitModel", VIT | {"use_absolute_position_embeddings": True}, {SELF: 2}),
    Architecture(
        "data2vec-vision",
        "Data2VecVisionModel",
        VIT | {"use_relative_position_bias": True},
        {SELF: 2},
    ),
    Architecture("dinov2", "Dinov2Model", VIT, {SELF: 2}),
    Architecture("dinov2-with-registers", "Dinov2WithRegistersModel", VIT, {SELF: 2}),
    Architecture(
        "imagegpt",
        "ImageGPTModel",
        {"vocab_size": 61, "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
        {("decoder", "self"): 2},
    ),
    Architecture(
        "imagegpt-with-head",
        "ImageGPTForCausalImageModeling",
        {
            "vocab_size": 61,
            "n_embd": 32,
            "n_head": 4,
            "n_layer": 2,
            "n_positions": 64,
            "scale_attn_by_inverse_layer_idx": True,
        },
        {("decoder", "self"): 2},
        hub={"scale_attn_weights": None},
    ),
    Architecture(
        "detr",
        "DetrForObjectDetection",
        DETR,
        {SELF: 2, ("decoder", "self"): 3, ("decoder", "cross"): 3},
    ),
    Architecture(
        "mask2former",
        "Mask2FormerForUniversalSegmentation",
        MASK2FORMER,
        {("decoder", "self"): 3, ("decoder", "cross"): 3, ("backbone", "self"): 5},
    ),
    Architecture(
        "sam",
        "SamModel",
        SAM,
        {
            VISION: 3,
            ("mask-decoder", "self"): 2,
            ("mask-decoder", "cross"): 2,
            ("mask-decoder-image", "cross"): 2,
            ("mask-decoder-final", "cross"): 1,
        },
    ),
    Architecture("swin", "SwinForImageClassification", SWIN, {SELF: 5}),
    Architecture("swinv2", "Swinv2ForImageClassification", SWIN, {SELF: 5}),
    Architecture("seggpt", "SegGptForImageSegmentation", SEGGPT, {SELF: 4}),
    Architecture("clip", "CLIPModel", CLIP, {TEXTS: 2, VISION: 3}),
    Architecture(
        "clip-hub",
        "CLIPModel",
        {"text_config": SLIM_TEXT | {"num_attention_heads": 8}, "vision_config": SLIM_TOWER},
        {TEXTS: 12, VISION: 12},
        hub=BY_DEFAULT,
    ),
    Architecture("clip-vision", "CLIPVisionModel", TOWER, {VISION: 3}),
    Architecture(
        "clip-vision-hub",
        "CLIPVisionModel",
        TOWER,
        {VISION: 3},
        spelling={"^": "vision_model."},
    ),
    Architecture("clip-text", "CLIPTextModel", TEXT, {TEXTS: 2}),
    Architecture("clip-text-hub", "CLIPTextModel", TEXT, {TEXTS: 2}, spelling={"^": "text_model."}),
    Architecture("siglip", "SiglipModel", CLIP, {TEXTS: 2, VISION: 3, ("vision-head", "cross"): 1}),
    Architecture(
        "siglip-vision", "SiglipVisionModel", TOWER, {VISION: 3, ("vision-head", "cross"): 1}
    ),
    Architecture("siglip-text", "SiglipTextModel", TEXT, {TEXTS: 2}),
    Architecture(
        "siglip-hub",
        "SiglipModel",
        {"text_config": SLIM_TEXT, "vision_config": SLIM_TOWER},
        {TEXTS: 12, VISION: 12, ("vision-head", "cross"): 1},
        hub=BY_DEFAULT,
    ),
    Architecture("git", "GitForCausalLM", TEXT | {"vision_config": TOWER}, {TEXTS: 2, VISION: 3}),
    Architecture(
        "mllama",
        "MllamaForConditionalGeneration",
        MLLAMA,
        {TEXTS: 2, ("text", "cross"): 2, VISION: 2, ("vision-global", "self"): 1},
    ),
]


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: a.name, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An architecture, its model, and the folder that the model is saved in."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return request.param, save(request.param, folder), folder


def test_the_model_attends_with_the_forms_that_are_read(saved: Any) -> None:
    architecture, _, folder = saved
    prove_attention(architecture, folder)


def test_the_live_module_holds_the_same_blocks(saved: Any) -> None:
    architecture, model, folder = saved
    prove_live(architecture, model, folder)


def test_every_head_is_another_and_values_are_there(saved: Any) -> None:
    _, _, folder = saved
    prove_variety(folder)


def test_norms_feed_what_is_projected(saved: Any) -> None:
    architecture, _, folder = saved
    assert (prove_norms(folder) > 0) == (architecture.name not in WITHOUT_NORMS)


# --- what must fail ------------------------------------------------------------------------------

WRONG = {
    "queries for keys": ("swin", "attention.self.query", "attention.self.key"),
    "order of a fused tensor": ("sam", '"sectioned"', '"sectioned"\norder = "kqv"'),
    "no relative rows and columns": ("sam", 'position = "relative"', ""),
    "no bias of windows": ("swin", 'position = "relative"', ""),
    "no cosine": ("swinv2", "norm_gain = false", ""),
    "no temperature": ("swinv2", "temperature =", "# temperature ="),
    "a text that looks ahead": ("clip", "causal = true", ""),
    "norms of cross-attention": ("mllama", "query_norm = [", "query_bias = ["),
    "no mask of pixels": ("mask2former", 'position = "mask"', ""),
    "stages' heads": ("swin", 'heads = "num_heads"', 'heads = "wrong"\ndefaults = { wrong = 2 }'),
}


@pytest.mark.parametrize(("name", "old", "new"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_family_fails(name: str, old: str, new: str, tmp_path: Path) -> None:
    save(next(a for a in ARCHITECTURES if a.name == name), tmp_path)
    shipped = resources.files("wqk.families") / "data" / f"{name}.toml"
    text = shipped.read_text(encoding="utf-8")
    assert old in text
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(old, new), encoding="utf-8")
    verification = verify(tmp_path, family=path)
    assert not verification.ok
    assert verification.difference > 1e-3


# --- what a scan is told -------------------------------------------------------------------------


def test_windows_are_told_for_the_layers_that_have_them(tmp_path: Path) -> None:
    save(next(a for a in ARCHITECTURES if a.name == "sam"), tmp_path)
    plans = [p for p in attention_plans(open_checkpoint(tmp_path)) if p.stack == "vision"]
    assert [plan.window for plan in plans] == ["3x3", None, "3x3"]
    assert all(plan.status == "partial" for plan in plans)


def test_layers_are_counted_through_the_stages(tmp_path: Path) -> None:
    save(next(a for a in ARCHITECTURES if a.name == "swinv2"), tmp_path)
    plans = attention_plans(open_checkpoint(tmp_path))
    assert [plan.layer for plan in plans] == [0, 1, 2, 3, 4]
    assert [plan.query.heads for plan in plans] == [2, 2, 4, 4, 4]
    assert {plan.window for plan in plans} == {"4x4"}
    assert "cosine" in plans[0].reason


def test_a_missing_stage_is_noticed(tmp_path: Path) -> None:
    save(next(a for a in ARCHITECTURES if a.name == "swin"), tmp_path)
    edit_tensors(
        tmp_path, lambda tensors: {n: v for n, v in tensors.items() if ".1.blocks.2." not in n}
    )
    with pytest.raises(CheckpointError, match="incomplete"):
        attention_plans(open_checkpoint(tmp_path))
