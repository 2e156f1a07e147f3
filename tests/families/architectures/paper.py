"""Architectures of the paper, and their kin."""

from __future__ import annotations

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

DISENTANGLED = BERT | {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]}
GPT2 = TOKENS | {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64}
GPT_NEO = TOKENS | {
    "hidden_size": 32,
    "num_heads": 4,
    "num_layers": 4,
    "attention_types": [[["global", "local"], 2]],
    "window_size": 5,
    "max_position_embeddings": 64,
}
MODERNBERT = BERT | {
    "cls_token_id": 1,
    "sep_token_id": 2,
    "num_hidden_layers": 4,
    "local_attention": 6,
    "global_attn_every_n_layers": 3,
    "attention_bias": True,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
PAPER = [
    Architecture("bert", "BertForMaskedLM", BERT),
    Architecture("bert-without-prefix", "BertModel", BERT),
    Architecture("bert-decoder", "BertLMHeadModel", BERT | {"is_decoder": True}),
    # Two BERTs, the second of which attends to the first.
    Architecture(
        "bert-encoder-decoder",
        "EncoderDecoderModel",
        {
            "encoder": BERT | {"model_type": "bert"},
            "decoder": BERT
            | {"model_type": "bert", "is_decoder": True, "add_cross_attention": True},
        },
        {("encoder", "self"): 2, ("decoder", "self"): 2, ("decoder", "cross"): 2},
    ),
    Architecture("roberta", "RobertaForMaskedLM", BERT),
    Architecture("xlm-roberta", "XLMRobertaModel", BERT),
    Architecture("electra", "ElectraForPreTraining", BERT | {"embedding_size": 16}),
    Architecture("camembert", "CamembertModel", BERT),
    Architecture("roberta-prelayernorm", "RobertaPreLayerNormModel", BERT),
    Architecture(
        "distilbert",
        "DistilBertForMaskedLM",
        TOKENS | {"dim": 32, "n_heads": 4, "n_layers": 2, "hidden_dim": 24},
    ),
    Architecture("albert", "AlbertForMaskedLM", BERT | {"embedding_size": 16}, fed_by_norms=False),
    # Three passes, dealt to two groups (two and one) of two layers each.
    Architecture(
        "albert-groups",
        "AlbertModel",
        BERT | {"num_hidden_layers": 3, "num_hidden_groups": 2, "inner_group_num": 2},
        blocks=6,
        fed_by_norms=False,
    ),
    Architecture("deberta", "DebertaForMaskedLM", DISENTANGLED),
    Architecture(
        "deberta-one-term",
        "DebertaModel",
        DISENTANGLED | {"pos_att_type": ["p2c"]},
        hub={"pos_att_type": "p2c"},
    ),
    Architecture("deberta-v2", "DebertaV2ForMaskedLM", DISENTANGLED),
    Architecture(
        "deberta-v2-convolution",
        "DebertaV2Model",
        DISENTANGLED | {"conv_kernel_size": 3, "conv_act": "gelu"},
        fed_by_norms=False,
    ),
    Architecture(
        "deberta-v3",
        "DebertaV2Model",
        DISENTANGLED | {"share_att_key": True, "position_buckets": 4, "norm_rel_ebd": "layer_norm"},
        hub={"pos_att_type": "p2c|c2p"},
    ),
    Architecture("modernbert", "ModernBertForMaskedLM", MODERNBERT, blocks=4),
    Architecture(
        "modernbert-hub",
        "ModernBertModel",
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
    Architecture("openai-gpt", "OpenAIGPTLMHeadModel", GPT2),
    Architecture("gpt2", "GPT2LMHeadModel", GPT2 | {"scale_attn_by_inverse_layer_idx": True}),
    Architecture("gpt2-without-scale", "GPT2Model", GPT2 | {"scale_attn_weights": False}),
    Architecture(
        "gpt2-hub",
        "GPT2Model",
        GPT2,
        hub={"scale_attn_weights": None, "scale_attn_by_inverse_layer_idx": None},
    ),
    Architecture("gpt-neo", "GPTNeoForCausalLM", GPT_NEO, blocks=4),
    Architecture("gpt-neo-hub", "GPTNeoModel", GPT_NEO, blocks=4, hub={"attention_layers": None}),
    Architecture("gptj", "GPTJForCausalLM", GPT2 | {"rotary_dim": 4}),
    Architecture(
        "gpt-neox",
        "GPTNeoXForCausalLM",
        BERT | {"rope_parameters": {"rope_theta": 100.0, "partial_rotary_factor": 0.5}},
    ),
    Architecture(
        "gpt-neox-hub",
        "GPTNeoXModel",
        BERT,
        hub={"rope_parameters": None, "rotary_pct": 0.5, "rotary_emb_base": 100},
    ),
    Architecture("llama", "LlamaForCausalLM", GROUPED | {"attention_bias": True}),
    Architecture("llama3", "LlamaModel", GROUPED | {"rope_parameters": LLAMA3}),
    Architecture(
        "llama3-hub",
        "LlamaForCausalLM",
        GROUPED,
        hub={"rope_parameters": None, "rope_theta": 500.0, "rope_scaling": LLAMA3},
    ),
    Architecture(
        "llama-linear",
        "LlamaModel",
        GROUPED,
        hub={"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.5}},
    ),
    Architecture(
        "llama-dynamic",
        "LlamaModel",
        GROUPED | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 50.0}},
    ),
    Architecture("llama-yarn", "LlamaModel", GROUPED | {"rope_parameters": YARN}),
    Architecture(
        "llama-yarn-weighted",
        "LlamaModel",
        GROUPED | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}},
    ),
    Architecture("mistral", "MistralForCausalLM", GROUPED | {"sliding_window": 5}),
    Architecture("mistral-full", "MistralModel", GROUPED | {"sliding_window": None}),
    Architecture("mixtral", "MixtralForCausalLM", GROUPED | {"num_local_experts": 2}),
    Architecture(
        "qwen2",
        "Qwen2ForCausalLM",
        GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    Architecture(
        "qwen2-hub",
        "Qwen2Model",
        GROUPED | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        hub={"layer_types": None},
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", GROUPED),
    Architecture("gemma", "GemmaForCausalLM", GROUPED | {"num_key_value_heads": 1}),
    Architecture("phi", "PhiForCausalLM", GROUPED | {"head_dim": 8}),
    Architecture(
        "phi-norms",
        "PhiModel",
        GROUPED | {"head_dim": 8, "qk_layernorm": True},
        hub={"rope_parameters": None, "partial_rotary_factor": 0.25, "rope_theta": 50.0},
    ),
    Architecture("phi3", "Phi3ForCausalLM", GROUPED | {"sliding_window": 5}),
    Architecture(
        "phi4-mini",
        "Phi3Model",
        GROUPED
        | {
            "hidden_size": 96,
            "head_dim": 16,
            "max_position_embeddings": 128,
            "original_max_position_embeddings": 64,
            "rope_parameters": LONGROPE | {"rope_theta": 50.0, "partial_rotary_factor": 0.5},
        },
    ),
    Architecture(
        "phi4-mini-hub",
        "Phi3Model",
        GROUPED | {"hidden_size": 96, "head_dim": 16, "max_position_embeddings": 128},
        hub={
            "original_max_position_embeddings": 64,
            "rope_parameters": None,
            "rope_scaling": {**LONGROPE, "type": "longrope"},
            "partial_rotary_factor": 0.5,
            "rope_theta": 50.0,
        },
    ),
    Architecture("t5", "T5ForConditionalGeneration", T5, blocks=8),
    Architecture(
        "t5-equal-depth",
        "T5Model",
        T5 | {"num_decoder_layers": 2},
        blocks=6,
        hub={"num_decoder_layers": None},
    ),
    Architecture("mt5", "MT5ForConditionalGeneration", T5, blocks=8),
    Architecture("bart", "BartForConditionalGeneration", BART, blocks=8),
    Architecture("mbart", "MBartModel", BART, blocks=8),
]
