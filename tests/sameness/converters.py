"""Mistakes of converters in layouts that no other table has: seen, named, undone in the file.

Every reference is a tiny random model of transformers, with rows, heads and widths that do not
coincide. Every candidate is what a converter with one mistake writes: of the scripts of
transformers, llama.cpp, MLX, Megatron, LitGPT, torchtitan, mergekit or PEFT.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import numpy as np
from tests.families.architectures import Architecture
from tests.sameness import conversions
from tests.sameness.conversions import both, configure, copy_layer
from tests.small import sizes

from wqk.sameness.mismatches import Kind

Array = np.ndarray
Tensors = dict[str, Array]
Config = dict[str, Any]
Change = Callable[[Tensors, Config], None]
Convert = Callable[[Tensors, Config], tuple[Tensors, Config]]

SEED = 20261128
LAYERS, H, G, R, D, VOCABULARY = 4, 6, 3, 16, 192, 64
PLAIN = sizes(H * R, LAYERS, H, vocab_size=VOCABULARY, intermediate_size=112)
PLAIN |= {"max_position_embeddings": 512, "pad_token_id": 0}
GROUPED = PLAIN | {"hidden_size": D, "num_key_value_heads": G, "head_dim": R}
ROTARY = {"rope_theta": 2e4, "rope_type": "default"}
UNTIED = {"tie_word_embeddings": False}
OLD = {"vocab_size": VOCABULARY, "n_embd": H * R, "n_head": H, "n_layer": LAYERS, "n_positions": 64}
EXPERTS = {"num_local_experts": 4, "num_experts": 4, "num_experts_per_tok": 2}
LAYOUTS: dict[str, tuple[str, Config]] = {
    "Mixtral": ("MixtralForCausalLM", GROUPED | EXPERTS | {"rope_parameters": ROTARY}),
    "OLMo 2": ("Olmo2ForCausalLM", PLAIN | {"num_key_value_heads": G, "rope_parameters": ROTARY}),
    "Cohere": ("CohereForCausalLM", PLAIN | {"num_key_value_heads": G}),
    "Granite": ("GraniteForCausalLM", PLAIN | {"num_key_value_heads": G} | UNTIED),
    "StableLM": ("StableLmForCausalLM", PLAIN | {"num_key_value_heads": G}),
    "StarCoder 2": ("Starcoder2ForCausalLM", PLAIN | {"num_key_value_heads": G} | UNTIED),
    "GPT-J": ("GPTJForCausalLM", OLD | {"rotary_dim": 8}),
    "CodeGen": ("CodeGenForCausalLM", OLD | {"rotary_dim": 8, "n_head": 8, "n_embd": 128}),
    "GPT-BigCode": ("GPTBigCodeForCausalLM", OLD | {"multi_query": True}),
    "GPT-Neo": (
        "GPTNeoForCausalLM",
        {key: value for key, value in PLAIN.items() if key != "num_hidden_layers"}
        | {"num_layers": LAYERS, "num_heads": H, "attention_types": [[["global", "local"], 2]]},
    ),
    "BLOOM": (
        "BloomForCausalLM",
        {"vocab_size": VOCABULARY, "hidden_size": H * R} | {"n_head": H, "n_layer": LAYERS},
    ),
    "MPT": (
        "MptForCausalLM",
        {"vocab_size": VOCABULARY, "d_model": H * R} | {"n_heads": H, "n_layers": LAYERS},
    ),
    "GLM": ("GlmForCausalLM", GROUPED | {"attention_bias": True} | UNTIED),
    "SmolLM 3": ("SmolLM3ForCausalLM", GROUPED | UNTIED),
    "Nemotron": ("NemotronForCausalLM", GROUPED | UNTIED),
    "RoBERTa": ("RobertaModel", PLAIN),
    "DistilBERT": (
        "DistilBertModel",
        {"vocab_size": VOCABULARY, "dim": H * R, "hidden_dim": 112}
        | {"n_heads": H, "n_layers": LAYERS},
    ),
    "ESM": ("EsmModel", PLAIN | {"position_embedding_type": "rotary", "mask_token_id": 1}),
    "ViT": ("ViTModel", sizes(H * R, LAYERS, H, intermediate_size=112, image_size=32)),
    "Gemma 3": (
        "Gemma3ForCausalLM",
        GROUPED | {"sliding_window": 16, "hidden_size": H * R} | {"query_pre_attn_scalar": 24},
    ),
    "BART": (
        "BartModel",
        {"vocab_size": VOCABULARY, "d_model": H * R, "encoder_layers": 3}
        | {"decoder_layers": 3, "encoder_attention_heads": H, "decoder_attention_heads": H}
        | {"encoder_ffn_dim": 112, "decoder_ffn_dim": 112},
    ),
    "Helium": ("HeliumForCausalLM", PLAIN | {"num_key_value_heads": G, "head_dim": R} | UNTIED),
    "LLaMA": ("LlamaForCausalLM", GROUPED | {"rope_parameters": ROTARY} | UNTIED),
}


@cache
def built(layout: str) -> tuple[Tensors, Config]:
    """The tensors and the configuration of a random model."""
    from tests.families.proving import build

    model = build(Architecture(layout, *LAYOUTS[layout]))
    heads = [
        key for key in model.state_dict() if key.endswith(("lm_head.weight", "embed_out.weight"))
    ]
    tied = model.config.to_dict().get("tie_word_embeddings", False)
    tensors = {
        name: value.float().numpy().copy()
        for name, value in model.state_dict().items()
        if not (tied and name in heads)
    }
    return tensors, model.config.to_dict()


def right(layout: str) -> tuple[Tensors, Config]:
    """A copy of the tensors and of the configuration."""
    tensors, config = built(layout)
    return {name: value.copy() for name, value in tensors.items()}, dict(config)


# -- changes -----------------------------------------------------------------------------------


def each(pattern: str, change: Callable[[Array], Array]) -> Change:
    """Change every tensor whose name a pattern matches."""

    def apply(tensors: Tensors, config: Config) -> None:
        names = [name for name in tensors if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            tensors[name] = np.ascontiguousarray(change(tensors[name]))

    return apply


def exchange(first: str, second: str, where: str = "") -> Change:
    """Exchange the tensors of two words in their names."""

    def apply(tensors: Tensors, config: Config) -> None:
        names = [name for name in tensors if first in name and re.search(where, name)]
        assert names, first
        for name in names:
            other = name.replace(first, second)
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return apply


def remove(pattern: str) -> Change:
    """Lose every tensor whose name a pattern matches."""

    def apply(tensors: Tensors, config: Config) -> None:
        names = [name for name in tensors if re.search(pattern, name)]
        assert names, pattern
        for name in names:
            del tensors[name]

    return apply


def halves(heads: int, rotated: int = 0) -> Callable[[Array], Array]:
    return partial(conversions.halves, heads=heads, rotated=rotated)


def pairs(heads: int, rotated: int = 0) -> Callable[[Array], Array]:
    return partial(conversions.pairs, heads=heads, rotated=rotated)


def per_head(heads: int) -> Callable[[Array], Array]:
    """Sections of queries, keys and values become head by head."""

    def change(fused: Array) -> Array:
        table = fused.reshape(3, heads, -1, *fused.shape[1:])
        return table.swapaxes(0, 1).reshape(fused.shape)

    return change


def sections(heads: int) -> Callable[[Array], Array]:
    """Queries, keys and values head by head become sections."""

    def change(fused: Array) -> Array:
        table = fused.reshape(heads, 3, -1, *fused.shape[1:])
        return table.swapaxes(0, 1).reshape(fused.shape)

    return change


def shards(count: int) -> Callable[[Array], Array]:
    """Shards of tensor parallelism in the reverse order."""
    return lambda rows: np.concatenate(np.split(rows, count)[::-1])


def first_shard_twice(rows: Array) -> Array:
    first = np.split(rows, 2)[0]
    return np.concatenate([first, first])


def columns_reversed(rows: Array) -> Array:
    """Shards of a row-parallel weight in the wrong order."""
    return np.concatenate(np.split(rows, 2, axis=1)[::-1], axis=1)


def initialized(rows: Array) -> Array:
    random = np.random.default_rng(SEED)
    return (0.02 * random.standard_normal(rows.shape)).astype(np.float32)


def layers(sources: list[int], key: str = "num_hidden_layers") -> Change:
    """Keep these layers, as mergekit's slices do."""

    def apply(tensors: Tensors, config: Config) -> None:
        original = dict(tensors)
        for name in list(tensors):
            if re.search(r"\.\d+\.", name):
                del tensors[name]
        for layer, source in enumerate(sources):
            for name, value in original.items():
                match = re.search(r"\.(\d+)\.", name)
                if match and int(match[1]) == source:
                    tensors[f"{name[: match.start()]}.{layer}.{name[match.end() :]}"] = value.copy()
        config[key] = len(sources)
        if isinstance(config.get("layer_types"), list):
            config["layer_types"] = [config["layer_types"][source] for source in sources]

    return apply


def scaled(factor: float) -> Callable[[Array], Array]:
    return lambda values: (factor * values).astype(np.float32)


def added(number: float) -> Callable[[Array], Array]:
    return lambda values: (values + number).astype(np.float32)


def multi_query_shards(fused: Array) -> Array:
    """The shared key before the queries."""
    return np.concatenate([fused[H * R :], fused[: H * R]])


def folded(norm: str, weights: str) -> Change:
    """Multiply a norm's gain into weights, and leave the norm as it is."""

    def apply(tensors: Tensors, config: Config) -> None:
        for name in [name for name in tensors if name.endswith(f"{norm}.weight")]:
            prefix = name.removesuffix(f"{norm}.weight")
            for weight in [key for key in tensors if key.startswith(prefix)]:
                if re.search(weights, weight):
                    tensors[weight] = tensors[weight] * tensors[name]

    return apply


def rope(key: str, value: Any) -> Change:
    """Set a parameter of the rotary positions."""

    def apply(tensors: Tensors, config: Config) -> None:
        parameters = dict(config.get("rope_parameters") or {})
        config["rope_parameters"] = parameters | {key: value}

    return apply


def experts_rolled(tensors: Tensors, config: Config) -> None:
    """The experts one further, their router as it was."""
    for name in list(tensors):
        if re.search(r"experts\.\d+\.", name):
            continue
        if "experts." in name and tensors[name].ndim == 3:
            tensors[name] = np.roll(tensors[name], 1, axis=0)


# -- right conversions -------------------------------------------------------------------------


def without_prefix(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """The base model alone, as `AutoModel` saves it, of models without a head of their own."""
    for prefix in ("model.", "transformer."):
        if all(name.startswith(prefix) for name in tensors):
            return {name.removeprefix(prefix): value for name, value in tensors.items()}, config
    return tensors, config


def to_meta(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Meta's names and order of rotated dimensions."""
    side_names = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo"}
    converted = {}
    for name, value in tensors.items():
        if match := re.match(r"model\.(layers\.\d+)\.self_attn\.(\w+)\.weight", name):
            heads = {"q_proj": H, "k_proj": G}.get(match[2])
            rows = pairs(heads)(value) if heads else value
            converted[f"{match[1]}.attention.{side_names[match[2]]}.weight"] = rows
        elif match := re.match(r"model\.(layers\.\d+)\.input_layernorm\.weight", name):
            converted[f"{match[1]}.attention_norm.weight"] = value
    params = {"dim": D, "n_layers": LAYERS, "n_heads": H, "n_kv_heads": G, "head_dim": R}
    return converted, params | {"norm_eps": 1e-6, "rope_theta": 2e4, "model_type": "llama-original"}


def to_litgpt(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """LitGPT's sections of queries, keys and values."""
    converted = {}
    for layer in range(LAYERS):
        path, target = f"model.layers.{layer}", f"transformer.h.{layer}"
        sides = [tensors[f"{path}.self_attn.{side}_proj.weight"] for side in "qkv"]
        converted[f"{target}.attn.qkv.weight"] = np.concatenate(sides)
        converted[f"{target}.attn.proj.weight"] = tensors[f"{path}.self_attn.o_proj.weight"]
        converted[f"{target}.norm_1.weight"] = tensors[f"{path}.input_layernorm.weight"]
    about = {"n_layer": LAYERS, "n_head": H, "n_query_groups": G, "n_embd": D, "head_size": R}
    about |= {"rotary_percentage": 1.0, "rope_base": 2e4, "norm_class_name": "RMSNorm"}
    return converted, about | {"model_type": "litgpt"}


def to_older_litgpt(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """LitGPT's first releases, each key head with its queries."""
    converted, about = to_litgpt(tensors, config)
    interleaved = {}
    for name, value in converted.items():
        if name.endswith("attn.qkv.weight"):
            queries, keys, values = np.split(value, [H * R, (H + G) * R])
            groups = [side.reshape(G, -1, D) for side in (queries, keys, values)]
            value = np.concatenate(groups, axis=1).reshape(-1, D)
            name = name.replace("qkv", "attn")
        interleaved[name] = value
    return interleaved, about


def in_float16(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Numbers rounded to float16."""
    return {n: v.astype(np.float16).astype(np.float32) for n, v in tensors.items()}, config


def to_torchtitan(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """torchtitan's names, which are Meta's, with gains of its norms and its own settings."""
    converted, about = to_meta(tensors, config)
    return converted, about | {"model_type": "torchtitan"}


def to_megatron(tensors: Tensors, config: Config) -> tuple[Tensors, Config]:
    """Megatron-core's groups of queries, key and value."""
    converted = {}
    for layer in range(LAYERS):
        path, target = f"model.layers.{layer}", f"decoder.layers.{layer}"
        sides = [tensors[f"{path}.self_attn.{side}_proj.weight"] for side in "qkv"]
        groups = [side.reshape(G, -1, D) for side in sides]
        fused = np.concatenate(groups, axis=1).reshape(-1, D)
        attention = f"{target}.self_attention"
        converted[f"{attention}.linear_qkv.weight"] = fused
        converted[f"{attention}.linear_proj.weight"] = tensors[f"{path}.self_attn.o_proj.weight"]
        converted[f"{target}.input_layernorm.weight"] = tensors[f"{path}.input_layernorm.weight"]
    about = {"num_layers": LAYERS, "hidden_size": D, "num_attention_heads": H, "kv_channels": R}
    about |= {
        "num_query_groups": G,
        "group_query_attention": True,
        "rotary": True,
        "rotary_base": 2e4,
        "rotary_percent": 1.0,
    }
    return converted, about | {"model_type": "megatron-core"}


class Mistake(NamedTuple):
    """A mistake of a converter.

    Attributes
    ----------
    layout
        The model.
    description
        The converter, and what it does.
    change
        The change of the right tensors and of their configuration.
    kinds
        The causes that name it.
    convert
        The right conversion into another layout, after which the mistake is made.
    """

    layout: str
    description: str
    change: Change
    kinds: tuple[Kind, ...]
    convert: Convert | None = None


ORDERS = (Kind.ROTARY, Kind.DIMENSIONS, Kind.ROWS, Kind.FUSED, Kind.HEADS, Kind.PAIRING)
QUERY, KEY, VALUE, OUTPUT = (rf"\.{side}_proj\.weight$" for side in "qkvo")
QK = r"\.[qk]_proj\.weight$"
MISTAKES: tuple[Mistake, ...] = (
    Mistake(
        "Mixtral",
        "llama.cpp's permutation not undone",
        both(each(QUERY, pairs(H)), each(KEY, pairs(G))),
        ORDERS,
    ),
    Mistake(
        "Mixtral", "experts of another rank's offset", experts_rolled, (Kind.EXPERTS, Kind.ROWS)
    ),
    Mistake(
        "Mixtral",
        "the router of the next layer",
        both(exchange("layers.1.mlp.gate.", "layers.2.mlp.gate.")),
        (Kind.LAYER, Kind.TENSOR),
    ),
    Mistake(
        "Mixtral", "mergekit passthrough lost a layer", layers([0, 1, 3]), (Kind.LAYER, Kind.LAYERS)
    ),
    Mistake(
        "OLMo 2",
        "rows in pairs, gains of the norms in halves",
        both(each(QUERY, pairs(H)), each(KEY, pairs(G))),
        ORDERS,
    ),
    Mistake(
        "OLMo 2",
        "gains of query and key norms in Meta's order",
        both(each(r"q_norm\.weight$", pairs(H)), each(r"k_norm\.weight$", pairs(G))),
        (*ORDERS, Kind.NORM),
    ),
    Mistake("OLMo 2", "gate and up exchanged", exchange("gate_proj", "up_proj"), (Kind.TENSOR,)),
    Mistake(
        "OLMo 2",
        "the rotary base of another size",
        rope("rope_theta", 5e5),
        (Kind.SETTING, Kind.ROTARY),
    ),
    Mistake(
        "Cohere",
        "halves as in llama, where pairs are read",
        both(each(QUERY, halves(H)), each(KEY, halves(G))),
        ORDERS,
    ),
    Mistake(
        "Cohere",
        "shards of the output projection reversed",
        each(OUTPUT, columns_reversed),
        (Kind.COLUMNS, *ORDERS),
    ),
    Mistake(
        "Cohere",
        "the logit scale of the smaller model",
        configure(logit_scale=0.25),
        (Kind.SETTING,),
    ),
    Mistake(
        "Granite",
        "attention multiplier lost",
        configure(attention_multiplier=0.25),
        (Kind.SETTING,),
    ),
    Mistake(
        "Granite",
        "keys permuted with the number of query heads",
        each(KEY, lambda w: pairs(G)(halves(H)(w))),
        ORDERS,
    ),
    Mistake(
        "Granite", "head left as initialized", each("lm_head", initialized), (Kind.INITIALIZED,)
    ),
    Mistake(
        "StableLM",
        "all dimensions rotated",
        rope("partial_rotary_factor", 1.0),
        (Kind.SETTING, Kind.ROTARY),
    ),
    Mistake("StableLM", "queries' shards in the reverse order", each(QUERY, shards(2)), ORDERS),
    Mistake(
        "StableLM",
        "the biases of norms lost",
        remove(r"input_layernorm\.bias$"),
        (Kind.MISSING, Kind.NORM, Kind.BIASES),
    ),
    Mistake(
        "StarCoder 2",
        "biases of queries in the other order",
        each(r"q_proj\.bias$", pairs(H)),
        (Kind.BIASES, *ORDERS),
    ),
    Mistake(
        "StarCoder 2",
        "keys and values exchanged, with their biases",
        both(exchange("k_proj", "v_proj")),
        (Kind.TENSOR, Kind.EXCHANGED),
    ),
    Mistake(
        "StarCoder 2",
        "the sliding window of another model",
        configure(sliding_window=16),
        (Kind.SETTING,),
    ),
    Mistake(
        "GPT-J",
        "rotated dimensions in halves, as GPT-NeoX has them",
        both(each(QK, halves(H, 8))),
        ORDERS,
    ),
    Mistake("GPT-J", "all dimensions of each head permuted", both(each(QK, halves(H))), ORDERS),
    Mistake(
        "GPT-J",
        "rotary_dim of another model",
        configure(rotary_dim=16),
        (Kind.SETTING, Kind.ROTARY),
    ),
    Mistake(
        "CodeGen",
        "mp_num read as 8 in place of 4",
        each(
            r"qkv_proj\.weight$",
            lambda w: w.reshape(4, 2, -1, w.shape[1]).swapaxes(0, 1).reshape(w.shape),
        ),
        (*ORDERS, Kind.TENSOR, Kind.STRANGERS),
    ),
    Mistake(
        "CodeGen",
        "plain sections q, k, v",
        each(
            r"qkv_proj\.weight$",
            lambda w: w.reshape(4, 3, -1, w.shape[1]).swapaxes(0, 1).reshape(w.shape),
        ),
        ORDERS,
    ),
    Mistake(
        "CodeGen",
        "one block's output transposed",
        each(r"h\.1\.attn\.out_proj\.weight$", lambda w: w.T),
        (Kind.TRANSPOSED, Kind.EXCHANGED),
    ),
    Mistake(
        "GPT-BigCode",
        "the shared key before the queries",
        each(r"c_attn\.weight$", lambda w: np.concatenate([w[H * R :], w[: H * R]])),
        ORDERS,
    ),
    Mistake(
        "GPT-BigCode",
        "queries' shards in the reverse order",
        each(r"c_attn\.weight$", lambda w: np.concatenate([shards(2)(w[: H * R]), w[H * R :]])),
        ORDERS,
    ),
    Mistake(
        "GPT-BigCode",
        "key and value exchanged",
        each(
            r"c_attn\.weight$",
            lambda w: np.concatenate([w[: H * R], w[H * R + R :], w[H * R : H * R + R]]),
        ),
        (*ORDERS, Kind.TENSOR),
    ),
    Mistake(
        "GPT-Neo",
        "queries divided by √R, as GPT-2 is",
        each(QUERY, scaled(R**-0.5)),
        (Kind.SCALED,),
    ),
    Mistake(
        "GPT-Neo",
        "global and local layers exchanged",
        configure(
            attention_layers=["local", "global"] * 2, attention_types=[[["local", "global"], 2]]
        ),
        (Kind.SETTING,),
    ),
    Mistake(
        "GPT-Neo",
        "queries and keys exchanged",
        exchange("q_proj", "k_proj"),
        (Kind.EXCHANGED, Kind.TENSOR),
    ),
    Mistake(
        "BLOOM",
        "Megatron's sections, where heads are read",
        each(r"query_key_value\.(weight|bias)$", sections(H)),
        ORDERS,
    ),
    Mistake(
        "BLOOM",
        "weights per head, biases in sections",
        each(r"query_key_value\.bias$", sections(H)),
        (*ORDERS, Kind.BIASES),
    ),
    Mistake(
        "BLOOM",
        "one rank of tensor parallelism twice",
        each(r"query_key_value\.(weight|bias)$", first_shard_twice),
        (Kind.COPIES, Kind.STRANGERS, Kind.FUSED),
    ),
    Mistake(
        "MPT",
        "fused per head, where sections are read",
        each(r"Wqkv\.weight$", per_head(H)),
        ORDERS,
    ),
    Mistake(
        "MPT",
        "ALiBi's slopes of another maximum",
        lambda t, c: c.update(attn_config=dict(c["attn_config"], alibi_bias_max=16)),
        (Kind.SETTING,),
    ),
    Mistake(
        "GLM",
        "rows in halves, where pairs are read",
        both(
            each(QUERY, halves(H, R // 2)),
            each(KEY, halves(G, R // 2)),
            each(r"q_proj\.bias$", halves(H, R // 2)),
            each(r"k_proj\.bias$", halves(G, R // 2)),
        ),
        ORDERS,
    ),
    Mistake(
        "GLM",
        "gate and up of the fused weight exchanged",
        each(r"gate_up_proj\.weight$", shards(2)),
        (Kind.ROWS, Kind.TENSOR),
    ),
    Mistake(
        "GLM",
        "biases of queries lost",
        each(r"q_proj\.bias$", np.zeros_like),
        (Kind.BIASES, Kind.ZERO),
    ),
    Mistake(
        "SmolLM 3",
        "positions in the layers without any",
        configure(no_rope_layers=[1] * LAYERS),
        (Kind.SETTING, Kind.ROTARY),
    ),
    Mistake(
        "SmolLM 3",
        "MLX: the head is the embeddings",
        lambda t, c: t.update({"lm_head.weight": t["model.embed_tokens.weight"].copy()}),
        (Kind.TENSOR, Kind.COPIES),
    ),
    Mistake(
        "SmolLM 3",
        "a stage of the pipeline numbered from 0",
        copy_layer("layers.1.", "layers.3."),
        (Kind.LAYER,),
    ),
    Mistake(
        "Nemotron",
        "gains with 1 added, which is added again",
        each(r"layernorm1p?\.weight$|layernorm\.weight$|model\.norm\.weight$", added(1.0)),
        (Kind.NORM, Kind.OFFSET),
    ),
    Mistake(
        "Nemotron",
        "Megatron's groups joined as sections",
        lambda t, c: nemotron_groups(t),
        (*ORDERS, Kind.TENSOR),
    ),
    Mistake(
        "RoBERTa",
        "fairseq's in_proj cut as k, q, v",
        exchange("query", "key", "attention.self"),
        (Kind.EXCHANGED, Kind.TENSOR),
    ),
    Mistake(
        "RoBERTa",
        "query weights scaled, biases not",
        each(r"query\.weight$", scaled(R**-0.5)),
        (Kind.SCALED,),
    ),
    Mistake(
        "RoBERTa",
        "one layer from the first",
        copy_layer("layer.0.", "layer.2."),
        (Kind.LAYER,),
    ),
    Mistake(
        "DistilBERT",
        "two norms of each layer exchanged",
        exchange("sa_layer_norm", "output_layer_norm"),
        (Kind.TENSOR, Kind.NORM),
    ),
    Mistake(
        "DistilBERT",
        "output projections transposed",
        each(r"out_lin\.weight$", lambda w: w.T),
        (Kind.TRANSPOSED,),
    ),
    Mistake(
        "ESM",
        "rotary order of Meta's files",
        each(r"(query|key)\.(weight|bias)$", pairs(H)),
        ORDERS,
    ),
    Mistake(
        "ESM",
        "absolute positions",
        configure(position_embedding_type="absolute"),
        (Kind.SETTING, Kind.ROTARY),
    ),
    Mistake("ViT", "timm's qkv cut per head", lambda t, c: timm_cut(t), (*ORDERS, Kind.TENSOR)),
    Mistake(
        "ViT",
        "biases of keys as queries'",
        exchange("q_proj.bias", "k_proj.bias"),
        (Kind.BIASES, Kind.TENSOR),
    ),
    Mistake(
        "ViT",
        "patches with height and width exchanged",
        each(r"patch_embeddings\.projection\.weight$", lambda w: w.swapaxes(-1, -2)),
        (Kind.TRANSPOSED,),
    ),
    Mistake(
        "Gemma 3",
        "gains of query norms with 1 added",
        each(r"[qk]_norm\.weight$", added(1.0)),
        (Kind.NORM, Kind.OFFSET),
    ),
    Mistake(
        "Gemma 3", "the scale of another size", configure(query_pre_attn_scalar=16), (Kind.SETTING,)
    ),
    Mistake(
        "Gemma 3",
        "each fourth layer global, not each sixth",
        configure(layer_types=["sliding_attention", "full_attention"] * 2),
        (Kind.SETTING,),
    ),
    Mistake(
        "BART",
        "cross-attention's keys and values exchanged",
        exchange("k_proj", "v_proj", "encoder_attn"),
        (Kind.EXCHANGED, Kind.TENSOR),
    ),
    Mistake(
        "BART",
        "decoder's self-attention from the encoder",
        lambda t, c: t.update(
            {
                name: t[name.replace("decoder.", "encoder.")].copy()
                for name in t
                if name.startswith("decoder.") and ".self_attn." in name
            }
        ),
        (Kind.TENSOR, Kind.LAYER),
    ),
    Mistake(
        "Helium",
        "the norm folded into queries, keys and values as well",
        folded("input_layernorm", r"self_attn\.[qkv]_proj"),
        (Kind.GAIN_FOLDED, Kind.COLUMN_FACTORS, Kind.NORM),
    ),
    Mistake(
        "Helium", "mergekit repeats a layer", layers([0, 1, 1, 2, 3]), (Kind.LAYER, Kind.LAYERS)
    ),
    Mistake("Helium", "the last layer lost", layers([0, 1, 2]), (Kind.LAYER, Kind.LAYERS)),
    Mistake(
        "LLaMA",
        "tensor-parallel feed-forward shards of down reversed",
        each(r"down_proj\.weight$", columns_reversed),
        (Kind.COLUMNS,),
    ),
    Mistake(
        "LLaMA",
        "gate and up shards interleaved",
        lambda t, c: interleaved_gate_up(t),
        (Kind.ROWS, Kind.TENSOR),
    ),
    Mistake(
        "LLaMA",
        "embeddings padded to a multiple",
        lambda t, c: t.update(
            {"model.embed_tokens.weight": np.pad(t["model.embed_tokens.weight"], ((0, 8), (0, 0)))}
        ),
        (Kind.RESIZED,),
    ),
    Mistake(
        "LLaMA", "the head tied by a flag", configure(tie_word_embeddings=True), (Kind.SETTING,)
    ),
    Mistake("LLaMA", "the head not written", remove("lm_head"), (Kind.SETTING, Kind.MISSING)),
    Mistake("LLaMA", "values' heads reversed", each(VALUE, shards(3)), (*ORDERS, Kind.TENSOR)),
    Mistake(
        "LLaMA",
        "to Meta's names with rows in halves",
        both(each(r"wq\.", halves(H)), each(r"wk\.", halves(G))),
        ORDERS,
        to_meta,
    ),
    Mistake(
        "LLaMA",
        "to Meta's names, w1 of keys and values",
        exchange("wk", "wv"),
        (Kind.EXCHANGED, Kind.TENSOR),
        to_meta,
    ),
    Mistake(
        "LLaMA",
        "to LitGPT's sections, joined as groups",
        lambda t, c: t.update(
            {
                n.replace("attn.attn", "attn.qkv"): v
                for n, v in to_older_litgpt(*right("LLaMA"))[0].items()
            }
        ),
        ORDERS,
        to_litgpt,
    ),
    Mistake(
        "LLaMA",
        "to LitGPT, keys before queries",
        each(
            r"attn\.qkv\.",
            lambda w: np.concatenate([w[H * R : (H + G) * R], w[: H * R], w[(H + G) * R :]]),
        ),
        (*ORDERS, Kind.TENSOR),
        to_litgpt,
    ),
    Mistake(
        "LLaMA",
        "to LitGPT with a quarter of the dimensions rotated",
        configure(rotary_percentage=0.25),
        (Kind.SETTING, Kind.ROTARY),
        to_litgpt,
    ),
    Mistake(
        "LLaMA",
        "to torchtitan, queries alone permuted",
        each(r"wk\.", halves(G)),
        ORDERS,
        to_torchtitan,
    ),
    Mistake(
        "LLaMA",
        "to torchtitan, the default base",
        configure(rope_theta=1e4),
        (Kind.SETTING, Kind.ROTARY),
        to_torchtitan,
    ),
    Mistake(
        "LLaMA",
        "to Megatron, ranks in the reverse order",
        each(r"linear_qkv\.", shards(3)),
        (*ORDERS, Kind.TENSOR),
        to_megatron,
    ),
    Mistake(
        "LLaMA",
        "to Megatron, sections where groups are read",
        lambda t, c: t.update(
            {
                n.replace("transformer.h", "decoder.layers").replace(
                    "attn.qkv", "self_attention.linear_qkv"
                ): v
                for n, v in to_litgpt(*right("LLaMA"))[0].items()
                if "qkv" in n
            }
        ),
        (*ORDERS, Kind.TENSOR),
        to_megatron,
    ),
    Mistake(
        "LLaMA",
        "to Megatron, its output projection per rank",
        each(r"linear_proj\.", columns_reversed),
        (*ORDERS, Kind.COLUMNS),
        to_megatron,
    ),
)


def nemotron_groups(tensors: Tensors) -> None:
    """Megatron's groups of queries, key and value, cut as three sections."""
    for layer in range(LAYERS):
        names = [f"model.layers.{layer}.self_attn.{side}_proj.weight" for side in "qkv"]
        groups = [tensors[name].reshape(G, -1, D) for name in names]
        fused = np.concatenate(groups, axis=1).reshape(-1, D)
        ends = np.cumsum([len(tensors[name]) for name in names])[:-1]
        for name, part in zip(names, np.split(fused, ends), strict=True):
            tensors[name] = np.ascontiguousarray(part)


def timm_cut(tensors: Tensors) -> None:
    """timm's sections of queries, keys and values, cut head by head."""
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        names = [name.replace("q_proj", f"{side}_proj") for side in "qkv"]
        fused = np.concatenate([tensors[each_name] for each_name in names])
        cut = sections(H)(fused)
        for each_name, part in zip(names, np.split(cut, 3), strict=True):
            tensors[each_name] = np.ascontiguousarray(part)


def interleaved_gate_up(tensors: Tensors) -> None:
    """Two ranks' gate and up, joined rank by rank and cut in the middle."""
    for name in [name for name in tensors if "gate_proj" in name]:
        up = name.replace("gate_proj", "up_proj")
        gates, ups = np.split(tensors[name], 2), np.split(tensors[up], 2)
        fused = np.concatenate([gates[0], ups[0], gates[1], ups[1]])
        tensors[name], tensors[up] = (np.ascontiguousarray(part) for part in np.split(fused, 2))
