"""Models that see, alone or beside a text."""

from __future__ import annotations

from tests.families.architectures.architecture import BERT, Architecture

VIT = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "image_size": 16,
    "patch_size": 4,
}
# Other numbers of heads and layers than the text, so that neither is read by the other's rule.
TOWER = VIT | {"num_attention_heads": 2, "num_hidden_layers": 3}
CLIP = {"text_config": BERT, "vision_config": TOWER, "projection_dim": 16}
# Twelve heads and layers, which files on the hub leave out.
SLIM = {"hidden_size": 24, "num_attention_heads": 12, "num_hidden_layers": 12}
SLIM_TEXT, SLIM_TOWER = BERT | SLIM, VIT | SLIM
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
    "text_config": BERT
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
PICTURES, TEXTS = ("vision", "self"), ("text", "self")

VISION = [
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
        fed_by_norms=False,
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
            PICTURES: 3,
            ("mask-decoder", "self"): 2,
            ("mask-decoder", "cross"): 2,
            ("mask-decoder-image", "cross"): 2,
            ("mask-decoder-final", "cross"): 1,
        },
    ),
    Architecture("swin", "SwinForImageClassification", SWIN, {SELF: 5}),
    Architecture("swinv2", "Swinv2ForImageClassification", SWIN, {SELF: 5}, fed_by_norms=False),
    Architecture("seggpt", "SegGptForImageSegmentation", SEGGPT, {SELF: 4}),
    Architecture("clip", "CLIPModel", CLIP, {TEXTS: 2, PICTURES: 3}),
    Architecture(
        "clip-hub",
        "CLIPModel",
        {"text_config": SLIM_TEXT | {"num_attention_heads": 8}, "vision_config": SLIM_TOWER},
        {TEXTS: 12, PICTURES: 12},
        hub=BY_DEFAULT,
    ),
    Architecture("clip-vision", "CLIPVisionModel", TOWER, {PICTURES: 3}),
    Architecture(
        "clip-vision-hub",
        "CLIPVisionModel",
        TOWER,
        {PICTURES: 3},
        spelling={"^": "vision_model."},
    ),
    Architecture("clip-text", "CLIPTextModel", BERT, {TEXTS: 2}),
    Architecture("clip-text-hub", "CLIPTextModel", BERT, {TEXTS: 2}, spelling={"^": "text_model."}),
    Architecture(
        "siglip", "SiglipModel", CLIP, {TEXTS: 2, PICTURES: 3, ("vision-head", "cross"): 1}
    ),
    Architecture(
        "siglip-vision", "SiglipVisionModel", TOWER, {PICTURES: 3, ("vision-head", "cross"): 1}
    ),
    Architecture("siglip-text", "SiglipTextModel", BERT, {TEXTS: 2}),
    Architecture(
        "siglip-hub",
        "SiglipModel",
        {"text_config": SLIM_TEXT, "vision_config": SLIM_TOWER},
        {TEXTS: 12, PICTURES: 12, ("vision-head", "cross"): 1},
        hub=BY_DEFAULT,
    ),
    Architecture("git", "GitForCausalLM", BERT | {"vision_config": TOWER}, {TEXTS: 2, PICTURES: 3}),
    Architecture(
        "mllama",
        "MllamaForConditionalGeneration",
        MLLAMA,
        {TEXTS: 2, ("text", "cross"): 2, PICTURES: 2, ("vision-global", "self"): 1},
    ),
]
