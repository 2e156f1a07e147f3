"""Mistakes that conversions make, rebuilt on tiny models; most from public threads on them.

Each row changes a right conversion as its threads tell. `tests.comparing.test_conversions` checks
that the mistake is named, and that the repair makes the two checkpoints the same; the table of the
page "Check a conversion" is written from these rows by ``docs/generate_conversions.py``.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, D, H, G, R = 3, 80, 8, 2, 16
RANK = 4

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Conversion:
    """One mistake.

    Attributes
    ----------
    what
        What was done, in a phrase.
    threads
        Public threads that report it, as ``owner/repository#number``; none for what no thread
        was found that says it plainly.
    model
        Of which model; a key of `CONFIGS`.
    change
        Makes the mistake in a copy of the right tensors and configuration.
    verdict
        The kind of mismatch that it is.
    named
        What the reason has to say.
    layers
        The blocks that differ; all of them if empty.
    """

    what: str
    threads: tuple[str, ...]
    model: str
    change: Callable[[Tensors, dict[str, Any]], None]
    verdict: str
    named: str
    layers: tuple[int, ...] = ()


COMMON = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H}
GROUPED = COMMON | {"num_key_value_heads": G, "head_dim": R, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "qwen2": GROUPED | {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": GROUPED | {"model_type": "qwen3", "rope_theta": 1e6},
    "gemma": GROUPED | {"model_type": "gemma"},
    "gemma2": GROUPED
    | {
        "model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 50.0,
        "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi": COMMON | {"model_type": "phi", "partial_rotary_factor": 0.5, "hidden_size": H * R},
    "bert": COMMON | {"model_type": "bert", "hidden_size": H * R},
    "gpt_neox": COMMON | {"model_type": "gpt_neox", "hidden_size": H * R, "rotary_pct": 0.25},
    "phi3": GROUPED | {"model_type": "phi3"},
}  # fmt: skip


def right(model: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration of a right conversion."""
    config = dict(CONFIGS[model])
    random, tensors = np.random.default_rng(0), {}
    width, groups = config["hidden_size"], config.get("num_key_value_heads", H)
    for layer in range(LAYERS):
        sides = {"q": H, "k": groups, "v": groups}
        weights = {
            s: random.standard_normal((n * R, width)) / np.sqrt(width) for s, n in sides.items()
        }
        biases = {s: random.standard_normal(n * R) for s, n in sides.items()}
        output = random.standard_normal((width, H * R)) / np.sqrt(H * R)
        at = f"model.layers.{layer}"
        norm = f"{at}.input_layernorm"
        if model == "bert":
            at = f"encoder.layer.{layer}.attention.self"
            norm = f"encoder.layer.{layer}.output.LayerNorm"
            for side, name in zip("qkv", ("query", "key", "value"), strict=True):
                tensors[f"{at}.{name}.weight"], tensors[f"{at}.{name}.bias"] = (
                    weights[side],
                    biases[side],
                )
            tensors[f"encoder.layer.{layer}.attention.output.dense.weight"] = output
        elif model == "gpt_neox":
            name = f"gpt_neox.layers.{layer}.attention.query_key_value"
            norm = f"gpt_neox.layers.{layer}.input_layernorm"
            tensors[f"{name}.weight"] = per_head([weights[s] for s in "qkv"])
            tensors[f"{name}.bias"] = per_head([biases[s] for s in "qkv"])
            tensors[name.replace("query_key_value", "dense") + ".weight"] = output
        elif model == "phi3":
            tensors[f"{at}.self_attn.qkv_proj.weight"] = np.concatenate([weights[s] for s in "qkv"])
            tensors[f"{at}.self_attn.o_proj.weight"] = output
        else:
            name = "dense" if model == "phi" else "o_proj"
            tensors[f"{at}.self_attn.{name}.weight"] = output
            for side in "qkv":
                tensors[f"{at}.self_attn.{side}_proj.weight"] = weights[side]
                if model in ("qwen2", "phi"):
                    tensors[f"{at}.self_attn.{side}_proj.bias"] = biases[side]
            if model == "qwen3":
                for side in "qk":
                    gain = 1 + 0.3 * random.standard_normal(R)
                    tensors[f"{at}.self_attn.{side}_norm.weight"] = gain
        centre = 0.0 if model.startswith("gemma") else 1.0
        tensors[f"{norm}.weight"] = centre + 0.3 * random.standard_normal(width)
        if model in ("bert", "gpt_neox", "phi"):
            tensors[f"{norm}.bias"] = 0.3 * random.standard_normal(width)
    if model == "bert":
        for end, centre in (("weight", 1.0), ("bias", 0.0)):
            tensors[f"embeddings.LayerNorm.{end}"] = centre + 0.3 * random.standard_normal(width)
    return {name: value.astype(np.float32) for name, value in tensors.items()}, config


def per_head(sides: list[np.ndarray]) -> np.ndarray:
    """Each head's query, key and value one after the other."""
    rest = sides[0].shape[1:]
    return np.stack([side.reshape(H, R, *rest) for side in sides], axis=1).reshape(-1, *rest)


def halves(value: np.ndarray, heads: int) -> np.ndarray:
    """`permute` of Hugging Face's conversion of LLaMA: pairs side by side become halves."""
    rest = value.shape[1:]
    return value.reshape(heads, -1, 2, *rest).swapaxes(1, 2).reshape(value.shape)


def pairs(value: np.ndarray, heads: int) -> np.ndarray:
    """Its inverse, `permute` of llama.cpp's conversion."""
    rest = value.shape[1:]
    return value.reshape(heads, 2, -1, *rest).swapaxes(1, 2).reshape(value.shape)


HEADS = {"q": H, "k": G}


def edit(
    sides: str,
    change: Callable[[np.ndarray, int], np.ndarray],
    what: str = "proj.weight",
    layer: str = "",
) -> Callable[[Tensors, dict[str, Any]], None]:
    """Change the projections of these sides, given each side's number of heads."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name, value in tensors.items():
            for side in sides:
                if f".{side}_{what}" in name and f"layers.{layer}" in name:
                    tensors[name] = np.ascontiguousarray(change(value, HEADS[side]), np.float32)

    return apply


def both(*changes: Callable[[Tensors, dict[str, Any]], None]) -> Any:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for change in changes:
            change(tensors, config)

    return apply


def configure(**values: Any) -> Callable[[Tensors, dict[str, Any]], None]:
    """Set keys of the configuration; None takes one out."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for key, value in values.items():
            config.pop(key, None)
            if value is not None:
                config[key] = value

    return apply


def renamed(ending: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Any:
    """Change every tensor of this ending; None takes it out."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(ending)]:
            value = change(tensors.pop(name))
            if value is not None:
                tensors[name] = np.ascontiguousarray(value, np.float32)

    return apply


def swap(first: str, second: str) -> Callable[[Tensors, dict[str, Any]], None]:
    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name in [n for n in tensors if n.endswith(first)]:
            other = name.removesuffix(first) + second
            tensors[name], tensors[other] = tensors[other], tensors[name]

    return apply


def shift_layers(tensors: Tensors, config: dict[str, Any]) -> None:
    old = dict(tensors)
    for name in tensors:
        for layer in range(1, LAYERS):
            if f"layers.{layer}." in name:
                tensors[name] = old[name.replace(f"layers.{layer}.", f"layers.{layer - 1}.")]


def number_stages_from_0(tensors: Tensors, config: dict[str, Any]) -> None:
    """Stages of two layers."""
    for name in tensors:
        if "layers.2." in name:
            tensors[name] = tensors[name.replace("layers.2.", "layers.0.")]


def tie_layers(tensors: Tensors, config: dict[str, Any]) -> None:
    for name in tensors:
        for layer in range(1, LAYERS):
            if f"layers.{layer}." in name:
                tensors[name] = tensors[name.replace(f"layers.{layer}.", "layers.0.")]


def tile_keys(tensors: Tensors, config: dict[str, Any]) -> None:
    """Key heads repeated as a whole, where each should be repeated for its queries, as values."""
    for name in [n for n in tensors if ".k_proj." in n or ".v_proj." in n]:
        value = tensors[name].reshape(G, R, -1)
        is_key = ".k_proj." in name
        many = np.tile(value, (H // G, 1, 1)) if is_key else value.repeat(H // G, axis=0)
        tensors[name] = many.reshape(H * R, -1)
    config["num_key_value_heads"] = H


def adapted(times: float) -> Callable[[Tensors, dict[str, Any]], None]:
    """An adapter of rank 4 merged so often; a right merge is once."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        random = np.random.default_rng(9)
        for name, value in tensors.items():
            if ".q_proj.w" in name or ".k_proj.w" in name:
                up, down = (random.standard_normal(s) for s in ((len(value), RANK), (RANK, D)))
                tensors[name] = (value + (times - 1) * 0.05 * up @ down).astype(np.float32)

    return apply


def initialized(value: np.ndarray, heads: int) -> np.ndarray:
    value = value.copy()
    rows = slice(3 * R, 5 * R)
    value[rows] = 0.02 * np.random.default_rng(4).standard_normal(value[rows].shape)
    return value


def copied(value: np.ndarray, heads: int) -> np.ndarray:
    return np.concatenate([value[: len(value) // 2]] * 2)


def regrouped(value: np.ndarray, heads: int) -> np.ndarray:
    return value.reshape(G, H // G, R, -1).swapaxes(0, 1).reshape(value.shape)


def reversed_heads(value: np.ndarray, heads: int) -> np.ndarray:
    return value.reshape(2, -1, *value.shape[1:])[::-1].reshape(value.shape)


ROTARY, BIASES, NORM = (
    "other rotary positions",
    "same weights, other biases",
    "same weights, other norm",
)
FUSED, ADAPTER, SETTING = "other layout of the fused weight", "other adapter", "other setting"

MISTAKES: tuple[Conversion, ...] = (
    Conversion(
        "Meta's weights renamed, their rows not permuted for halves",
        ("huggingface/transformers#25199", "tatsu-lab/stanford_alpaca#227"),
        "llama", edit("qk", pairs), ROTARY, "stored interleaved, read as half",
    ),
    Conversion(
        "permuted although the rows lay in halves already", ("AI-Hypercomputer/maxtext#1774",),
        "llama", edit("qk", halves), ROTARY, "converted to half once too often",
    ),
    Conversion(
        "the conversion run twice", ("huggingface/nanotron#427",),
        "llama", edit("qk", lambda w, n: pairs(pairs(w, n), n)), ROTARY, "converted twice",
    ),
    Conversion(
        "keys permuted with the number of query heads",
        ("ggml-org/llama.cpp#2376", "huggingface/transformers#31766",
         "Dao-AILab/flash-attention#546"),
        "llama", edit("k", lambda w, n: halves(pairs(w, n), H)), ROTARY,
        "converted with 8 heads of width 4 instead of 2 of 16",
    ),
    Conversion(
        "keys permuted with query heads divided by key heads",
        ("ggml-org/llama.cpp#3364", "jzhang38/TinyLlama#24"),
        "llama", edit("k", lambda w, n: halves(pairs(w, n), H // G)), ROTARY,
        "converted with 4 heads of width 8 instead of 2 of 16",
    ),
    Conversion(
        "queries permuted as one head", ("huggingface/transformers#30755",),
        "llama", edit("q", lambda w, n: halves(pairs(w, n), 1)), ROTARY,
        "converted with 1 head of width 128 instead of 8 of 16",
    ),
    Conversion(
        "queries permuted, keys forgotten", ("ggml-org/llama.cpp#3018",),
        "llama", edit("k", pairs), ROTARY, "in the key weights alone",
    ),
    Conversion(
        "weights permuted, biases not", ("nurl-lang/nurl#584",),
        "qwen2", edit("qk", pairs, "proj.bias"), BIASES, "biases were not reordered",
    ),
    Conversion(
        "gains of the queries' and keys' norms not permuted with the rows",
        ("huggingface/nanotron#427",),
        "qwen3", renamed("_norm.weight", lambda g: pairs(g, 1)), NORM, "gains were not reordered",
    ),
    Conversion(
        "the rotary base lost, so that the default applies",
        ("Open-Athena/MarinFold#198", "casper-hansen/AutoAWQ#271", "THUDM/slime#1720"),
        "qwen2", configure(rope_theta=None), ROTARY,
        "rotary base (rope_theta): 1000000 expected, 10000 found",
    ),
    Conversion(
        "the rotary scaling lost", ("Open-Athena/MarinFold#184", "deepspeedai/DeepSpeed#8345"),
        "llama", configure(rope_scaling=None), ROTARY,
        "(rope_scaling): llama3, factor 8 expected, none found",
    ),
    Conversion(
        "linear scaling in place of none", ("deepspeedai/DeepSpeed#8345",),
        "qwen2", configure(rope_scaling={"rope_type": "linear", "factor": 4.0}), ROTARY,
        "(rope_scaling): none expected, linear, factor 4 found",
    ),
    Conversion(
        "all dimensions rotated, where only some are", ("vllm-project/vllm#43770",),
        "phi", configure(partial_rotary_factor=1.0), ROTARY, "share of rotated dimensions",
    ),
    Conversion(
        "the scale of the scores left out", ("ml-explore/mlx-swift-examples#99",),
        "gemma2", configure(query_pre_attn_scalar=256), "other setting",
        "query_pre_attn_scalar: 16 against 256",
    ),
    Conversion(
        "the soft cap of the scores lost",
        ("vllm-project/vllm#5908", "EricLBuehler/mistral.rs#486"),
        "gemma2", configure(attn_logit_softcapping=0.0), SETTING, "softcap",
    ),
    Conversion(
        "the sliding window lost", ("vllm-project/vllm#5908", "huggingface/blog#2168"),
        "gemma2", configure(layer_types=["full_attention"] * 4), SETTING, "window: 8 against none",
        layers=(0, 2),
    ),
    Conversion(
        "biases of queries and keys lost",
        ("paiml/entrenar#258", "sbryngelson/ANEForge#253", "ServiceNow/Fast-LLM#398"),
        "qwen2",
        both(renamed("q_proj.bias", lambda b: None), renamed("k_proj.bias", lambda b: None)),
        BIASES, "biases of the query are missing",
    ),
    Conversion(
        "gains folded with 1 added, and 1 added again when they are read", ("utensils/mold#1078",),
        "gemma", renamed("layernorm.weight", lambda g: g + 1), NORM, "gains have 1 added",
    ),
    Conversion(
        "gains stored as differences from 1, and read as they are",
        ("huggingface/transformers#40796",),
        "llama", renamed("layernorm.weight", lambda g: g - 1), NORM, "are differences from 1",
    ),
    Conversion(
        "the norm before attention left at its start", ("JIA-Lab-research/LISA#177",),
        "llama", renamed("layernorm.weight", np.ones_like), NORM, "gains were not converted",
    ),
    Conversion(
        "query heads in the order of tiled key heads", ("nntile/nntile#347",),
        "llama", edit("q", regrouped), "other pairing of query and key heads", "h mod 2",
    ),
    Conversion(
        "key heads repeated as a whole instead of one by one",
        ("fkodom/grouped-query-attention-pytorch#5",),
        "llama", tile_keys, "other pairing of query and key heads", "not one by one",
    ),
    Conversion(
        "tensor-parallel parts joined in the wrong order", ("tenstorrent/tt-metal#52818",),
        "llama", edit("q", reversed_heads), "other pairing of query and key heads", "query heads",
    ),
    Conversion(
        "one tensor-parallel part loaded twice", ("vllm-project/vllm-gguf-plugin#103",),
        "llama", edit("q", copied), "heads copied from others", "4 is a copy of 0",
    ),
    Conversion(
        "some heads left as initialized", ("vllm-project/vllm#11802",),
        "llama", edit("q", initialized), "heads of other weights", "query heads 3 4",
    ),
    Conversion(
        "queries and keys exchanged", (),
        "bert",
        both(swap("query.weight", "key.weight"), swap("query.bias", "key.bias")),
        "transposed", "queries and keys have changed places",
    ),
    Conversion(
        "queries and keys exchanged, their biases not", (),
        "phi", swap("q_proj.weight", "k_proj.weight"), "transposed", "changed places",
    ),
    Conversion(
        "a square weight stored the other way round, as in Conv1D", ("AutoGPTQ/AutoGPTQ#139",),
        "bert", both(renamed("query.weight", np.transpose), renamed("key.weight", np.transpose)),
        "stored transposed", "stored transposed",
    ),
    Conversion(
        "layers off by one", (),
        "llama", shift_layers, "another layer's weights", "has those of layer", layers=(1, 2),
    ),
    Conversion(
        "each pipeline stage numbered from 0, so that the second has the first one's layers",
        ("huggingface/transformers#24381",),
        "llama", number_stages_from_0, "another layer's weights", "has those of layer 0",
        layers=(2,),
    ),
    Conversion(
        "every layer loaded from the first", (),
        "llama", tie_layers, "another layer's weights", "has those of layer 0", layers=(1, 2),
    ),
    Conversion(
        "the fused weight joined in sections, where each head's parts should follow each other",
        ("NVIDIA-NeMo/RL#2802", "epfLLM/Megatron-LLM#45", "sgl-project/sglang#40127"),
        "gpt_neox", renamed("query_key_value.weight", lambda w: np.concatenate(
            list(w.reshape(H, 3, R, -1).swapaxes(0, 1).reshape(3, H * R, -1)))),
        FUSED, "lie in sections",
    ),
    Conversion(
        "the fused weight joined head by head, where it is read in sections",
        ("huggingface/transformers#35088",),
        "phi3", renamed("qkv_proj.weight", lambda w: np.concatenate([
            part for g in range(G) for part in (
                w[g * (H // G) * R : (g + 1) * (H // G) * R],
                w[(H + g) * R : (H + g + 1) * R], w[(H + G + g) * R : (H + G + g + 1) * R])])),
        FUSED, "lie per key head",
    ),
    Conversion(
        "the sections of the fused weight in another order", ("vllm-project/vllm#53114",),
        "phi3", renamed("qkv_proj.weight", lambda w: np.concatenate(
            [w[H * R : (H + G) * R], w[: H * R], w[(H + G) * R :]])),
        FUSED, "lie in the order k q v",
    ),
    Conversion(
        "an adapter (LoRA) not merged",
        ("huggingface/peft#918", "huggingface/trl#386", "OpenBMB/MiniCPM-V#559"),
        "llama", adapted(0), ADAPTER, "update of rank 4",
    ),
    Conversion(
        "an adapter merged twice", ("jingyaogong/minimind#598", "EricLBuehler/candle-lora#26"),
        "llama", adapted(2), ADAPTER, "update of rank 4",
    ),
    Conversion(
        "an adapter merged without its rank-stabilized scale",
        ("turboderp-org/exllamav2#619", "vllm-project/vllm#6909", "predibase/lorax#299"),
        "llama", adapted(0.5), ADAPTER, "update of rank 4",
    ),
)  # fmt: skip
