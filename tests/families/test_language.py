"""Language families beyond the paper, proven as those of `test_families` are."""

from __future__ import annotations

from dataclasses import replace
from importlib import resources
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from tests.families.proving import (
    BART,
    BERT,
    GROUPED,
    LONGROPE,
    TOKENS,
    YARN,
    Architecture,
    edit_config,
    edit_tensors,
    prove_attention,
    prove_input_norms,
    prove_live,
    prove_values_and_outputs,
    save,
)

from wqk.attention import attention_plans, read_attention
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import find_family
from wqk.verification import verify

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

# As GROUPED, for models whose heads' width is hidden/heads.
NARROW = GROUPED | {"head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OPT = BERT | {"ffn_dim": 24}
OPT_POST = OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 16}
GPT2 = TOKENS | {"n_embd": 48, "n_head": 6, "n_layer": 2, "n_positions": 64}
# 6 heads: slopes of a number of heads that is no power of two.
BLOOM = TOKENS | {"hidden_size": 48, "n_head": 6, "n_layer": 2}
FALCON = TOKENS | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_hidden_layers": 2,
    "bias": True,
}
MPT = TOKENS | {"d_model": 48, "n_heads": 6, "n_layers": 2, "expansion_ratio": 2, "max_seq_len": 64}
WINDOWED = GROUPED | {"num_hidden_layers": 4, "sliding_window": 5}
GEMMA = WINDOWED | {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}
LATENT = TOKENS | {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "num_hidden_layers": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "q_lora_rank": 20,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 8,
    "v_head_dim": 14,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
VISION = {
    "hidden_size": 24,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}

ARCHITECTURES = [
    Architecture("opt", "OPTForCausalLM", OPT),
    Architecture("opt-post-norm", "OPTModel", OPT_POST),
    Architecture("opt-hub", "OPTModel", OPT, hub={"do_layer_norm_before": None}),
    Architecture("bloom", "BloomForCausalLM", BLOOM),
    Architecture("falcon-multi-query", "FalconForCausalLM", FALCON),
    Architecture(
        "falcon-alibi",
        "FalconForCausalLM",
        FALCON | {"multi_query": False, "alibi": True, "parallel_attn": False},
    ),
    Architecture(
        "falcon-grouped",
        "FalconModel",
        FALCON | {"new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    Architecture("mpt", "MptForCausalLM", MPT),
    Architecture(
        "mpt-clipped", "MptModel", MPT | {"attn_config": {"clip_qkv": 0.7, "softmax_scale": 0.5}}
    ),
    Architecture("gpt-bigcode", "GPTBigCodeForCausalLM", GPT2),
    Architecture(
        "gpt-bigcode-multi-head",
        "GPTBigCodeModel",
        GPT2 | {"multi_query": False, "scale_attn_weights": False},
    ),
    Architecture("codegen", "CodeGenForCausalLM", GPT2 | {"n_head": 8, "rotary_dim": 4}),
    Architecture("starcoder2", "Starcoder2ForCausalLM", NARROW | {"sliding_window": 5}),
    Architecture("stablelm", "StableLmForCausalLM", NARROW | {"use_qkv_bias": True}),
    Architecture("stablelm-norms", "StableLmModel", NARROW | {"qk_layernorm": True}),
    Architecture("persimmon", "PersimmonForCausalLM", BERT),
    Architecture("nemotron", "NemotronForCausalLM", GROUPED),
    Architecture("olmo", "OlmoForCausalLM", NARROW),
    Architecture("olmo-clipped", "OlmoModel", NARROW | {"clip_qkv": 0.7}),
    Architecture("olmo2", "Olmo2ForCausalLM", NARROW),
    Architecture(
        "olmo3",
        "Olmo3ForCausalLM",
        NARROW | {"num_hidden_layers": 4, "sliding_window": 5},
        blocks=4,
    ),
    Architecture("granite", "GraniteForCausalLM", NARROW | {"attention_multiplier": 0.3}),
    Architecture(
        "granitemoe",
        "GraniteMoeForCausalLM",
        NARROW | {"attention_multiplier": 0.3, "num_local_experts": 4},
    ),
    Architecture("cohere", "CohereForCausalLM", NARROW),
    Architecture("cohere-norms", "CohereModel", NARROW | {"use_qk_norm": True}),
    Architecture("cohere2", "Cohere2ForCausalLM", WINDOWED | {"head_dim": 8}, blocks=4),
    Architecture(
        "cohere2-hub",
        "Cohere2Model",
        WINDOWED | {"head_dim": 8},
        blocks=4,
        hub={"layer_types": None, "sliding_window_pattern": 4},
    ),
    Architecture("glm", "GlmForCausalLM", GROUPED | {"attention_bias": True}),
    Architecture("glm4", "Glm4ForCausalLM", GROUPED | {"attention_bias": True}),
    Architecture("gemma2", "Gemma2ForCausalLM", GEMMA, blocks=4),
    Architecture("gemma2-hub", "Gemma2Model", GEMMA, blocks=4, hub={"layer_types": None}),
    Architecture("gemma3-text", "Gemma3ForCausalLM", GEMMA | {"num_hidden_layers": 7}, blocks=7),
    Architecture(
        "gemma3-text-hub",
        "Gemma3TextModel",
        GEMMA | {"num_hidden_layers": 7},
        blocks=7,
        hub={
            "layer_types": None,
            "rope_parameters": None,
            "sliding_window_pattern": 6,
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    Architecture(
        "gemma3",
        "Gemma3ForConditionalGeneration",
        {"text_config": GEMMA, "vision_config": VISION, "mm_tokens_per_image": 4},
        blocks=4,
    ),
    # As on the hub: what is as in the smallest model is left out.
    Architecture(
        "gemma3-hub",
        "Gemma3Model",
        {
            "text_config": {
                "vocab_size": 61,
                "hidden_size": 48,
                "intermediate_size": 24,
                "num_hidden_layers": 7,
                "sliding_window": 5,
            },
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
        },
        blocks=7,
        hub={
            "text_config": {
                "model_type": "gemma3_text",
                "vocab_size": 61,
                "hidden_size": 48,
                "intermediate_size": 24,
                "num_hidden_layers": 7,
                "sliding_window": 5,
                "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            }
        },
    ),
    Architecture(
        "phimoe",
        "PhimoeForCausalLM",
        NARROW | {"attention_bias": True, "num_local_experts": 4, "sliding_window": 5},
    ),
    Architecture(
        "phimoe-long",
        "PhimoeModel",
        NARROW
        | {
            "head_dim": 8,
            "num_local_experts": 4,
            "rope_parameters": LONGROPE
            | {
                "rope_theta": 100.0,
                "short_mscale": 1.2,
                "long_mscale": 1.3,
                "original_max_position_embeddings": 32,
            },
        },
    ),
    Architecture("deepseek-v2", "DeepseekV2ForCausalLM", LATENT),
    Architecture("deepseek-v2-lite", "DeepseekV2Model", LATENT | {"q_lora_rank": None}),
    Architecture("deepseek-v3", "DeepseekV3ForCausalLM", LATENT),
    Architecture(
        "deepseek-v3-yarn",
        "DeepseekV3Model",
        LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    Architecture(
        "gpt-oss",
        "GptOssForCausalLM",
        GROUPED
        | {
            "sliding_window": 5,
            "num_local_experts": 4,
            "rope_parameters": YARN | {"truncate": False},
        },
    ),
    Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        GROUPED | {"num_hidden_layers": 4, "no_rope_layers": [1, 0, 1, 1]},
        blocks=4,
    ),
    Architecture(
        "xglm",
        "XGLMForCausalLM",
        TOKENS
        | {
            "d_model": 48,
            "attention_heads": 6,
            "num_layers": 2,
            "ffn_dim": 24,
            "max_position_embeddings": 64,
        },
    ),
    Architecture("biogpt", "BioGptForCausalLM", BERT),
    Architecture("pegasus", "PegasusForConditionalGeneration", BART, blocks=8),
    Architecture(
        "marian", "MarianMTModel", BART | {"decoder_vocab_size": 61, "decoder_layers": 1}, blocks=4
    ),
    Architecture("m2m100", "M2M100ForConditionalGeneration", BART, blocks=8),
    Architecture("blenderbot", "BlenderbotForConditionalGeneration", BART, blocks=8),
    Architecture("blenderbot-small", "BlenderbotSmallForConditionalGeneration", BART, blocks=8),
    Architecture("plbart", "PLBartForConditionalGeneration", BART, blocks=8),
    Architecture("mpnet", "MPNetForMaskedLM", BERT),
    Architecture("eurobert", "EuroBertForMaskedLM", GROUPED),
    Architecture("nomic-bert", "NomicBertModel", BERT),
    Architecture("ernie", "ErnieForMaskedLM", BERT),
    Architecture("layoutlm", "LayoutLMForMaskedLM", BERT),
    Architecture(
        "roc-bert",
        "RoCBertForMaskedLM",
        BERT | {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    ),
    Architecture("splinter", "SplinterModel", BERT),
    Architecture("data2vec-text", "Data2VecTextForMaskedLM", BERT),
    Architecture("bert-generation", "BertGenerationDecoder", BERT | {"is_decoder": True}),
    Architecture("megatron-bert", "MegatronBertForMaskedLM", BERT),
    Architecture("xlm-roberta-xl", "XLMRobertaXLForMaskedLM", BERT),
    Architecture(
        "umt5",
        "UMT5ForConditionalGeneration",
        TOKENS
        | {
            "d_model": 32,
            "num_heads": 4,
            "d_kv": 12,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
        },
        blocks=8,
    ),
    Architecture(
        "switch-transformers",
        "SwitchTransformersForConditionalGeneration",
        TOKENS
        | {
            "d_model": 32,
            "num_heads": 4,
            "d_kv": 12,
            "d_ff": 24,
            "num_layers": 2,
            "num_decoder_layers": 3,
            "num_experts": 2,
            "relative_attention_num_buckets": 8,
            "relative_attention_max_distance": 12,
        },
        blocks=8,
    ),
    Architecture("arcee", "ArceeForCausalLM", GROUPED),
    Architecture("cwm", "CwmForCausalLM", GROUPED | {"sliding_window": 5}),
    Architecture(
        "dots1",
        "Dots1ForCausalLM",
        GROUPED
        | EXPERTS
        | {
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
        },
    ),
    Architecture(
        "glm4-moe",
        "Glm4MoeForCausalLM",
        GROUPED | EXPERTS | {"use_qk_norm": True, "n_routed_experts": 4, "attention_bias": True},
    ),
    Architecture(
        "minimax-m2",
        "MiniMaxM2ForCausalLM",
        GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    Architecture(
        "ministral",
        "MinistralForCausalLM",
        GROUPED | {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]},
    ),
    Architecture("olmoe", "OlmoeForCausalLM", NARROW | EXPERTS),
    Architecture(
        "qwen2-moe",
        "Qwen2MoeForCausalLM",
        NARROW | EXPERTS | {"shared_expert_intermediate_size": 16},
    ),
    Architecture("qwen3-moe", "Qwen3MoeForCausalLM", GROUPED | EXPERTS),
    Architecture("seed-oss", "SeedOssForCausalLM", GROUPED | {"attention_bias": True}),
    Architecture("helium", "HeliumForCausalLM", NARROW),
    Architecture("ernie4-5", "Ernie4_5ForCausalLM", GROUPED | {"use_bias": True}),
    Architecture(
        "ernie4-5-moe", "Ernie4_5_MoeForCausalLM", NARROW | {"moe_num_experts": 4, "moe_k": 2}
    ),
    Architecture(
        "exaone4",
        "Exaone4ForCausalLM",
        WINDOWED | {"head_dim": 8, "sliding_window_pattern": 4},
        blocks=4,
    ),
    Architecture(
        "exaone4-full",
        "Exaone4Model",
        NARROW | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
    ),
    Architecture("nanochat", "NanoChatForCausalLM", GROUPED),
    Architecture("apertus", "ApertusForCausalLM", GROUPED),
    Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        NARROW
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]},
    ),
]


def named(name: str) -> Architecture:
    return next(a for a in ARCHITECTURES if a.name == name)


@pytest.fixture(params=ARCHITECTURES, ids=lambda a: a.name, scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """An architecture, its model, and the folder that the model is saved in."""
    folder = tmp_path_factory.mktemp(request.param.name)
    return request.param, save(request.param, folder), folder


def test_the_model_attends_with_the_forms_that_are_read(saved: Any) -> None:
    architecture, _, folder = saved
    prove_attention(architecture, folder)


def test_the_live_module_holds_the_same_blocks(saved: Any) -> None:
    prove_live(*saved)


def test_values_and_outputs_are_there(saved: Any) -> None:
    _, model, folder = saved
    prove_values_and_outputs(model, folder)


def test_the_named_norms_feed_queries_and_keys(saved: Any) -> None:
    _, model, _ = saved
    prove_input_norms(model)


# --- spellings of older files --------------------------------------------------------------------


def without_frequencies(tensors: dict[str, Any]) -> dict[str, Any]:
    """As ESM without its rotary frequencies, which it would load in single precision."""
    return {name: value for name, value in tensors.items() if not name.endswith("inv_freq")}


def language_model_first(tensors: dict[str, Any]) -> dict[str, Any]:
    """As the first files of composite models."""
    return {
        name.replace("model.language_model.", "language_model.model."): value
        for name, value in tensors.items()
    }


def with_a_draft_layer(tensors: dict[str, Any]) -> dict[str, Any]:
    """As DeepSeek-V3, with a layer for multi-token prediction after its own."""
    extra = {
        name.replace("layers.1.", "layers.2."): value.clone()
        for name, value in tensors.items()
        if "layers.1.self_attn." in name
    }
    return tensors | extra


ESM = Architecture(
    "esm",
    "EsmForMaskedLM",
    BERT | {"position_embedding_type": "rotary", "mask_token_id": 3},
)
OLDER = [
    (ESM, without_frequencies),
    (replace(ESM, config=ESM.config | {"position_embedding_type": "absolute"}), dict),
    (named("gemma3"), language_model_first),
    (named("deepseek-v3"), with_a_draft_layer),
]


@pytest.mark.parametrize(("architecture", "edit"), OLDER)
def test_older_files(
    architecture: Architecture, edit: Callable[[dict[str, Any]], dict[str, Any]], tmp_path: Path
) -> None:
    model = save(architecture, tmp_path)
    edit_tensors(tmp_path, edit)
    prove_attention(architecture, tmp_path)
    prove_live(architecture, model, tmp_path)
    prove_input_norms(model)


# --- what must fail ------------------------------------------------------------------------------

# A line of a family's file, as it is and as it would be wrong.
WRONG = {
    "no clipping": ("mpt-clipped", 'clip = "attn_config.clip_qkv"', ""),
    "no linear biases": ("bloom", 'position = "alibi"', ""),
    "linear biases without their scale": ("falcon-alibi", '"scaled alibi"', '"alibi"'),
    "linear biases in all models": ("falcon-grouped", 'position_if = "alibi"', ""),
    "rotary positions beside linear biases": ("falcon-alibi", 'only_if = "not alibi"', ""),
    "multi-query where there are groups": (
        "falcon-grouped",
        "multi_query and not new_decoder_architecture",
        "multi_query",
    ),
    "order of roles": ("codegen", '"qvk"', '"qkv"'),
    "number of blocks": ("codegen", "blocks = 4", "blocks = 2"),
    "norm over all heads": ("stablelm-norms", 'norm_over = "head"', ""),
    "norms of one head": ("stablelm-norms", ".norms.{head}", ".norms.0"),
    "norm over all heads of Cohere": ("cohere-norms", 'norm_over = "head"', ""),
    "no norm without gain": ("nanochat", "norm_gain = false", ""),
    "turning the usual way": ("nanochat", "reversed = true", ""),
    "positions without windows": ("cohere2", "windowed_only = true", ""),
    "positions in all layers": ("smollm3", 'layers = "no_rope_layers"', ""),
    "gain as it is stored": ("gemma3-text", "\nnorm_offset = 1.0", ""),
    "global base in windows": ("gemma3-text-hub", "local_base", "base"),
    "no scale of its own": ("granite", 'scale = "attention_multiplier"', ""),
    "no stretch in the scale": ("deepseek-v3-yarn", '"rotary_stretch ** 2"', "1"),
    "half-split positions": ("deepseek-v2", '"interleaved"', '"half"'),
    "another epsilon": ("deepseek-v3", "latent_norm_epsilon = 1e-6", "latent_norm_epsilon = 1e-1"),
}


@pytest.mark.parametrize(("name", "right", "wrong"), WRONG.values(), ids=WRONG.keys())
def test_a_wrong_family_fails(name: str, right: str, wrong: str, tmp_path: Path) -> None:
    save(named(name), tmp_path)
    family = find_family(open_checkpoint(tmp_path))
    shipped = resources.files("wqk.families") / "data" / f"{family.name}.toml"
    text = shipped.read_text(encoding="utf-8")
    assert right in text
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace(right, wrong), encoding="utf-8")
    verification = verify(tmp_path, family=path)
    assert not verification.ok
    assert verification.difference > 1e-3


def test_sinks_are_needed_where_the_model_has_them(tmp_path: Path) -> None:
    save(named("gpt-oss"), tmp_path)
    shipped = resources.files("wqk.families") / "data" / "gpt-oss.toml"
    text = shipped.read_text(encoding="utf-8")
    path = tmp_path / "wrong.toml"
    path.write_text(text.replace("self_attn.sinks", "self_attn.none"), encoding="utf-8")
    with pytest.raises(UnknownFamily, match="report their attention"):
        verify(tmp_path, family=path)


# --- latent attention ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite"])
def test_the_latent_form_is_the_product_of_its_factors(name: str, tmp_path: Path) -> None:
    model = save(named(name), tmp_path)
    attention = read_attention(tmp_path, layer=1)
    block = model.get_submodule("layers.1" if name.endswith("lite") else "model.layers.1")
    weights = {key: value.detach().numpy() for key, value in block.self_attn.named_parameters()}
    content, position, rank = 10, 8, 16
    key = weights["kv_b_proj.weight"].reshape(6, -1, rank)[:, :content]
    key = key * weights["kv_a_layernorm.weight"] @ weights["kv_a_proj_with_mqa.weight"][:rank]
    query = weights["q_proj.weight"] if name.endswith("lite") else weights["q_b_proj.weight"]
    query = query.reshape(6, content + position, -1)[:, :content]
    if not name.endswith("lite"):
        query = query * weights["q_a_layernorm.weight"] @ weights["q_a_proj.weight"]
    assert attention.head(0).rank == content
    for head in range(6):
        expected = query[head].T @ key[head]
        np.testing.assert_allclose(attention.head(head).dense(), expected, atol=1e-4)
    assert attention.plan.status == "partial"


def test_latent_attention_with_biases_is_refused(tmp_path: Path) -> None:
    save(replace(named("deepseek-v2"), config=LATENT | {"attention_bias": True}), tmp_path)
    with pytest.raises(CheckpointError, match="without biases"):
        attention_plans(open_checkpoint(tmp_path))


def test_latent_widths_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    save(named("deepseek-v2"), tmp_path)
    edit_config(tmp_path, {"qk_rope_head_dim": 6})
    with pytest.raises(CheckpointError, match="16 outputs for the latent and 6"):
        attention_plans(open_checkpoint(tmp_path))
    edit_config(tmp_path, {"qk_rope_head_dim": 8, "qk_nope_head_dim": 30})
    with pytest.raises(CheckpointError, match="have no outputs 0 to 30"):
        attention_plans(open_checkpoint(tmp_path))


# --- what is no form -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "reason"),
    [("DiffLlamaModel", "subtracts one softmax"), ("HunYuanDenseV1Model", "do not commute")],
)
def test_attention_that_is_no_form_is_refused(model: str, reason: str, tmp_path: Path) -> None:
    save(Architecture("refused", model, GROUPED), tmp_path)
    with pytest.raises(UnknownFamily, match=reason):
        attention_plans(open_checkpoint(tmp_path))
