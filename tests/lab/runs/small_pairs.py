"""The whole set of pairs in small: every model of it, of its published type, with planted effects.

A model that continues another has its weights, with a part of the queries added to the keys where
the mask was lifted, W + c A Aᵀ, and taken away where it was put back; and a little noise.
"""

from __future__ import annotations

import itertools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save
from tests.small import sizes

from wqk_lab.runs.pairs import pairs

LAYERS, WIDTH, HEADS, GROUPS, RANK = 2, 32, 4, 2, 8
NOISE = 0.02
COUNTS = sizes(
    WIDTH, LAYERS, HEADS, num_key_value_heads=GROUPS, head_dim=RANK, query_pre_attn_scalar=RANK
)
GPT2_COUNTS = {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}

# By a part of the hub's name, of which the first that fits counts: its type, and where a layer's
# weight is, or each of its sides is.
TYPES = {
    "BERT": ["modernbert", "model.layers.{}.attn.Wqkv"],
    "ettin-enc": ["modernbert", "model.layers.{}.attn.Wqkv"],
    "gpt2": ["gpt2", "h.{}.attn.c_attn"],
    "diffugpt": ["gpt2", "denoise_model.h.{}.attn.c_attn"],
    "Ling": ["bailing_moe_v2", "model.layers.{}.attention.query_key_value"],
    "LLaDA": ["llada2_moe", "model.layers.{}.attention.query_key_value"],
    "ettin-dec": ["modernbert-decoder", "model.layers.{}.attn.{}_proj"],
    "MLMvsCLM": ["slm", "model.layers.{}.self_attn.{}_proj"],
    "gemma-2-2b": ["gemma2", "model.layers.{}.self_attn.{}_proj"],
    "gemma-3": ["gemma3_text", "model.layers.{}.self_attn.{}_proj"],
    "Mistral": ["mistral", "model.layers.{}.self_attn.{}_proj"],
    "diffullama": ["llama", "denoise_model.layers.{}.self_attn.{}_proj"],
    "lama": ["llama", "model.layers.{}.self_attn.{}_proj"],
    "LLaMA": ["llama", "model.layers.{}.self_attn.{}_proj"],
    "Dream": ["Dream", "model.layers.{}.self_attn.{}_proj"],
    "Qwen2.5": ["qwen2", "model.layers.{}.self_attn.{}_proj"],
    "SDAR": ["sdar", "model.layers.{}.self_attn.{}_proj"],
    "a2d": ["a2d-qwen3", "model.layers.{}.self_attn.{}_proj"],
    "OPDLM": ["a2d-qwen3", "model.layers.{}.self_attn.{}_proj"],
    "diffusion": ["a2d-qwen3", "model.layers.{}.self_attn.{}_proj"],
    "Qwen3": ["qwen3", "model.layers.{}.self_attn.{}_proj"],
}
QK_NORM, LAYER_NORM = "model.layers.{}.self_attn.{}_norm", "model.layers.{}.attention.{}_layernorm"
# The norms of queries and keys, and the gain that leaves them as they are.
NORMS = {
    "gemma3_text": (QK_NORM, 0.0),
    **dict.fromkeys(("sdar", "a2d-qwen3", "qwen3"), (QK_NORM, 1.0)),
    **dict.fromkeys(("bailing_moe_v2", "llada2_moe"), (LAYER_NORM, 1.0)),
}

Tensors = dict[str, np.ndarray]
Files = dict[str, "bytes | Path"]


def repositories(effect: float) -> dict[str, dict[str, Files]]:
    """The files of every repository, as a stand-in hub serves them; ``effect`` is c."""
    refs = {pair.before for pair in pairs()} | {pair.after for pair in pairs()}
    return {ref: {"main": files(ref, effect)} for ref in refs}


def weights(ref: str, effect: float, stack: str = "") -> tuple[np.ndarray, np.ndarray]:
    """Queries (layers, H · R, D) and keys (layers, G · R, D)."""
    made = next((p for p in pairs() if (p.after, p.after_stack) == (ref, stack)), None)
    dice = np.random.default_rng(zlib.crc32(f"{ref} {stack}".encode()))
    groups = HEADS if any(part in ref for part in ("ettin", "BERT", "gpt2", "diffugpt")) else GROUPS
    query = dice.normal(size=(LAYERS, HEADS * RANK, WIDTH))
    key = dice.normal(size=(LAYERS, groups * RANK, WIDTH))
    if made is not None and made.relation != "twins":
        query, key = weights(made.before, effect)
    if made is not None and made.relation != "control":
        shared = query.reshape(LAYERS, groups, -1, RANK, WIDTH).mean(axis=2).reshape(key.shape)
        key = key + effect * (made.expected or 0) * shared + NOISE * dice.normal(size=key.shape)
    return query, key


def files(ref: str, effect: float) -> Files:
    if "LLM2Vec" in ref:
        return adapter(ref, effect)
    if "t5gemma" in ref:
        return encoder_decoder(ref, effect)
    kind, name = next(kind_and_name for part, kind_and_name in TYPES.items() if part in ref)
    tensors = named(name, *weights(ref, effect)) | norms(*NORMS.get(kind, ("", 0.0)))
    config: dict[str, Any] = COUNTS | {"model_type": kind}
    if kind == "gpt2":
        tensors, config = {name: t.T for name, t in tensors.items()}, config | GPT2_COUNTS
    if kind == "slm":
        config["auto_map"] = {"AutoModel": "modeling_slm.SLModel"}
    if "denoise" in name:
        config["architectures"] = ["DiscreteDiffusionModel"]
    return {"config.json": json.dumps(config).encode(), "model.safetensors": packed(tensors)}


def named(name: str, query: np.ndarray, key: np.ndarray) -> Tensors:
    """Every layer's query and key weights; a name without a side has both, and values of zero."""
    sides = {"q": query, "k": key}
    if name.count("{}") == 1:
        sides = {"": np.concatenate([query, key, np.zeros_like(key)], axis=1)}
    tensors = {}
    for side, stack in sides.items():
        for layer, weight in enumerate(stack):
            tensors[f"{name.format(layer, side)}.weight"] = weight
    return tensors


def norms(name: str, gain: float) -> Tensors:
    sides = ("query", "key") if "layernorm" in name else ("q", "k")
    if not name:
        return {}
    places = itertools.product(range(LAYERS), sides)
    names = [f"{name.format(layer, side)}.weight" for layer, side in places]
    return dict.fromkeys(names, np.full(RANK, gain))


def encoder_decoder(ref: str, effect: float) -> Files:
    is_second = "t5gemma-2-" in ref
    tensors: Tensors = {}
    for part, stack in (("encoder", "text" if is_second else "encoder"), ("decoder", "decoder")):
        at = f"model.{part}.layers.{{}}"
        sides = weights(ref, effect, stack)
        tensors |= named(f"{at}.self_attn.{{}}_proj", *sides)
        if is_second:
            tensors |= norms(f"{at}.self_attn.{{}}_norm", 0.0)
        elif part == "decoder":
            tensors |= named(f"{at}.cross_attn.{{}}_proj", *sides)
    config: dict[str, Any] = {"model_type": "t5gemma", "encoder": COUNTS, "decoder": COUNTS}
    if is_second:
        text = COUNTS | {"model_type": "t5gemma2_text"}
        encoder = {"model_type": "t5gemma2_encoder", "text_config": text}
        decoder = COUNTS | {"model_type": "t5gemma2_decoder"}
        config = {"model_type": "t5gemma2", "encoder": encoder, "decoder": decoder}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": packed(tensors)}


def adapter(ref: str, effect: float) -> Files:
    """The change of the keys, all of it, as a LoRA adapter of full rank."""
    before = next(pair.before for pair in pairs() if pair.after == ref)
    tensors = {}
    for layer, step in enumerate(weights(ref, effect)[1] - weights(before, effect)[1]):
        name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
        tensors[f"{name}.lora_A.weight"] = step
        tensors[f"{name}.lora_B.weight"] = np.eye(len(step))
    sizes = {"r": GROUPS * RANK, "lora_alpha": GROUPS * RANK, "target_modules": ["k_proj"]}
    config = {"peft_type": "LORA", "base_model_name_or_path": before, **sizes}
    return {
        "adapter_config.json": json.dumps(config).encode(),
        "adapter_model.safetensors": packed(tensors),
        "config.json": json.dumps({"architectures": ["MistralEncoderModel"]}).encode(),
    }


def packed(tensors: Tensors) -> bytes:
    return save({name: np.ascontiguousarray(t, np.float32) for name, t in tensors.items()})
