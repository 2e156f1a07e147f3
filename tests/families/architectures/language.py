"""Language models beyond the paper."""

from __future__ import annotations

from typing import Any

from tests.families.architectures.architecture import (
    BART,
    BERT,
    GROUPED,
    LONGROPE,
    T5,
    TOKENS,
    YARN,
    Architecture,
)

# As published models of a type of their own, which need not say that they see what comes.
UNSAID: dict[str, Any] = {"is_causal": None}
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
MODERNBERT = BERT | {
    "num_hidden_layers": 4,
    "local_attention": 8,
    "cls_token_id": 1,
    "sep_token_id": 2,
    "attention_bias": True,
}
LIFTED = {"is_causal": False}
GEMMA_MODULE = GEMMA | {"num_hidden_layers": 2, "is_decoder": False}
T5GEMMA = TOKENS | {"encoder": GEMMA_MODULE, "decoder": GEMMA_MODULE | {"num_hidden_layers": 4}}
T5GEMMA_BLOCKS = {("encoder", "self"): 2, ("decoder", "self"): 4, ("decoder", "cross"): 4}
LONGCAT = {k: v for k, v in LATENT.items() if k != "num_hidden_layers"} | {
    "num_layers": 2,
    "head_dim": 8,
    "ffn_hidden_size": 24,
    "expert_ffn_hidden_size": 16,
    "zero_expert_num": 1,
    "moe_topk": 2,
}
SIGLIP_BLOCKS = {("vision", "self"): 1, ("vision-head", "cross"): 1}

LANGUAGE = [
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
    # Its publishers' files say that there is one key head, and not how many.
    Architecture("gpt-bigcode", "GPTBigCodeForCausalLM", GPT2, hub={"num_key_value_heads": None}),
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
    Architecture("olmo", "OlmoForCausalLM", NARROW, fed_by_norms=False),
    Architecture("olmo-clipped", "OlmoModel", NARROW | {"clip_qkv": 0.7}, fed_by_norms=False),
    Architecture("olmo2", "Olmo2ForCausalLM", NARROW, fed_by_norms=False),
    Architecture(
        "olmo3",
        "Olmo3ForCausalLM",
        NARROW | {"num_hidden_layers": 4, "sliding_window": 5},
        blocks=4,
        fed_by_norms=False,
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
        blocks={("decoder", "self"): 4, **SIGLIP_BLOCKS},
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
        blocks={("decoder", "self"): 7, **SIGLIP_BLOCKS},
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
    Architecture("kimi-k2", "DeepseekV3ForCausalLM", LATENT, hub={"model_type": "kimi_k2"}),
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
    Architecture("modernbert-decoder", "ModernBertDecoderForCausalLM", MODERNBERT, blocks=4),
    Architecture(
        "modernbert-decoder-hub",
        "ModernBertDecoderModel",
        MODERNBERT,
        blocks=4,
        hub={
            "rope_parameters": None,
            "layer_types": None,
            "global_rope_theta": 300.0,
            "local_rope_theta": 50.0,
            "global_attn_every_n_layers": 3,
        },
    ),
    Architecture("t5gemma", "T5GemmaForConditionalGeneration", T5GEMMA, T5GEMMA_BLOCKS),
    # Classes of transformers, run without the causal mask (is_causal), stand in for remote code
    # that is described as these with only the padding mask.
    Architecture("llama-bidirectional", "LlamaModel", GROUPED | LIFTED),
    Architecture("gemma2-bidirectional", "Gemma2Model", GEMMA | LIFTED, blocks=4),
    Architecture(
        "a2d-llama", "LlamaModel", GROUPED | LIFTED, hub=UNSAID | {"model_type": "a2d-llama"}
    ),
    Architecture(
        "a2d-qwen2", "Qwen2Model", NARROW | LIFTED, hub=UNSAID | {"model_type": "a2d-qwen2"}
    ),
    Architecture("dream", "Qwen2Model", NARROW | LIFTED, hub=UNSAID | {"model_type": "Dream"}),
    Architecture(
        "a2d-qwen3", "Qwen3Model", GROUPED | LIFTED, hub=UNSAID | {"model_type": "a2d-qwen3"}
    ),
    Architecture("sdar", "Qwen3Model", GROUPED | LIFTED, hub=UNSAID | {"model_type": "sdar"}),
    Architecture(
        "llm2vec-mistral", "MistralModel", GROUPED, hub={"architectures": ["MistralBiModel"]}
    ),
    Architecture(
        "llm2vec-llama",
        "LlamaModel",
        GROUPED,
        hub={
            "architectures": ["LlamaModel"],
            "auto_map": {"AutoModel": "modeling_llama_encoder.LlamaEncoderModel"},
        },
    ),
    Architecture("llm2vec-gemma", "GemmaModel", GROUPED, hub={"architectures": ["GemmaBiModel"]}),
    Architecture("nomic-bert", "NomicBertModel", BERT),
    Architecture("ernie", "ErnieForMaskedLM", BERT),
    Architecture(
        "llama4-text",
        "Llama4TextModel",
        GROUPED | {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "num_local_experts": 2},
    ),
    Architecture(
        "llama4-text-without-norms",
        "Llama4TextModel",
        GROUPED
        | {"num_hidden_layers": 2, "no_rope_layers": [1, 0], "num_local_experts": 2}
        | {"use_qk_norm": False},
    ),
    # Windows with a scaling of their own.
    Architecture(
        "gemma3-text-scaled-windows",
        "Gemma3ForCausalLM",
        GEMMA
        | {"layer_types": ["sliding_attention", "full_attention"] * 2}
        | {
            "rope_parameters": {
                "sliding_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 100.0},
                "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            }
        },
        blocks=4,
    ),
    # As published: every fourth layer has no rotary positions, which the file does not say.
    Architecture(
        "llama4-text-hub",
        "Llama4TextModel",
        GROUPED | {"num_hidden_layers": 4, "num_local_experts": 2},
        blocks=4,
        hub={"no_rope_layers": [], "layer_types": None},
    ),
    Architecture(
        "mobilebert",
        "MobileBertModel",
        BERT
        | {
            "embedding_size": 16,
            "intra_bottleneck_size": 16,
            "normalization_type": "layer_norm",
        },
        fed_by_norms=False,
    ),
    Architecture("layoutlm", "LayoutLMForMaskedLM", BERT),
    Architecture(
        "roc-bert",
        "RoCBertForMaskedLM",
        BERT | {"pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    ),
    Architecture("splinter", "SplinterModel", BERT),
    Architecture("data2vec-text", "Data2VecTextForMaskedLM", BERT),
    Architecture("bert-generation", "BertGenerationDecoder", BERT | {"is_decoder": True}),
    Architecture(
        "esm-absolute",
        "EsmForMaskedLM",
        BERT | {"position_embedding_type": "absolute", "mask_token_id": 3},
    ),
    Architecture("megatron-bert", "MegatronBertForMaskedLM", BERT),
    Architecture("xlm-roberta-xl", "XLMRobertaXLForMaskedLM", BERT),
    Architecture(
        "umt5",
        "UMT5ForConditionalGeneration",
        T5,
        blocks=8,
    ),
    Architecture(
        "switch-transformers",
        "SwitchTransformersForConditionalGeneration",
        T5 | {"num_experts": 2},
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
    # As published: the number of rotated dimensions, here half of each head's.
    Architecture(
        "minimax-m2-hub",
        "MiniMaxM2ForCausalLM",
        GROUPED
        | {"num_local_experts": 4, "num_experts_per_tok": 2}
        | {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}},
        hub={"rope_parameters": None, "rope_theta": 500.0, "rotary_dim": 6},
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
        fed_by_norms=False,
    ),
    Architecture(
        "exaone4-full",
        "Exaone4Model",
        NARROW | {"sliding_window": None, "layer_types": ["full_attention"] * 2},
        fed_by_norms=False,
    ),
    Architecture("nanochat", "NanoChatForCausalLM", GROUPED, fed_by_norms=False),
    Architecture("apertus", "ApertusForCausalLM", GROUPED),
    Architecture(
        "lfm2",
        "Lfm2ForCausalLM",
        NARROW
        | {"num_hidden_layers": 3, "layer_types": ["full_attention", "conv", "full_attention"]},
    ),
    Architecture("longcat-flash", "LongcatFlashForCausalLM", LONGCAT, blocks=4),
]
