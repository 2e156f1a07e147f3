"""The whole set of pairs in small: every model of it, of its published type, with planted effects.

A model that continues another has its weights, with a part of the queries added to the keys where
the mask was lifted, W + c A Aᵀ, and taken away where it was put back; and a little noise.
"""

from __future__ import annotations

import json
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np
from safetensors.numpy import save

from wqk_lab.runs.pairs import Pair, pairs

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, WIDTH, HEADS, GROUPS, RANK = 2, 32, 4, 2, 8
COUNTS = {
    "hidden_size": WIDTH, "num_attention_heads": HEADS, "num_hidden_layers": LAYERS,
    "num_key_value_heads": GROUPS, "head_dim": RANK, "query_pre_attn_scalar": RANK,
}  # fmt: skip

# Names and configurations by a part of the hub's name; the first that fits counts.
NORMS = ("self_attn.q_norm", "self_attn.k_norm")
LLAMA = ("model.layers.{}.self_attn.q_proj", "model.layers.{}.self_attn.k_proj")
DENOISE = ("denoise_model.layers.{}.self_attn.q_proj", "denoise_model.layers.{}.self_attn.k_proj")
DIFFUSION = {"architectures": ["DiscreteDiffusionModel"]}
SEPARATE: dict[str, tuple[tuple[str, str], dict[str, Any]]] = {
    "ettin-dec": (
        ("model.layers.{}.attn.q_proj", "model.layers.{}.attn.k_proj"),
        {"model_type": "modernbert-decoder"},
    ),
    "MLMvsCLM": (LLAMA, {"model_type": "slm", "auto_map": {"AutoModel": "modeling_slm.SLModel"}}),
    "gemma-2-2b": (LLAMA, {"model_type": "gemma2"}),
    "gemma-3": (LLAMA, {"model_type": "gemma3_text"}),
    "Mistral": (LLAMA, {"model_type": "mistral"}),
    "diffullama": (DENOISE, {"model_type": "llama", **DIFFUSION}),
    "lama": (LLAMA, {"model_type": "llama"}),
    "LLaMA": (LLAMA, {"model_type": "llama"}),
    "Dream": (LLAMA, {"model_type": "Dream"}),
    "Qwen2.5": (LLAMA, {"model_type": "qwen2"}),
    "SDAR": (LLAMA, {"model_type": "sdar"}),
    "a2d": (LLAMA, {"model_type": "a2d-qwen3"}),
    "OPDLM": (LLAMA, {"model_type": "a2d-qwen3"}),
    "diffusion": (LLAMA, {"model_type": "a2d-qwen3"}),
    "Qwen3": (LLAMA, {"model_type": "qwen3"}),
}
FUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "BERT": ("model.layers.{}.attn.Wqkv", {"model_type": "modernbert"}),
    "ettin-enc": ("model.layers.{}.attn.Wqkv", {"model_type": "modernbert"}),
    "gpt2": ("h.{}.attn.c_attn", {"model_type": "gpt2"}),
    "diffugpt": ("denoise_model.h.{}.attn.c_attn", {"model_type": "gpt2", **DIFFUSION}),
    "Ling": ("model.layers.{}.attention.query_key_value", {"model_type": "bailing_moe_v2"}),
    "LLaDA": ("model.layers.{}.attention.query_key_value", {"model_type": "llada2_moe"}),
}


class Small:
    """All models of the pairs; ``effect`` is c, ``noise`` the spread of what is added besides."""

    def __init__(self, effect: float, noise: float = 0.02) -> None:
        self.effect, self.noise, self.pairs = effect, noise, pairs()

    def repositories(self) -> dict[str, dict[str, dict[str, bytes | Path]]]:
        """The files of every repository, as a stand-in hub serves them."""
        refs = dict.fromkeys(ref for pair in self.pairs for ref in (pair.before, pair.after))
        return {ref: {"main": self.files(ref)} for ref in refs}

    def weights(self, ref: str, stack: str = "") -> tuple[np.ndarray, np.ndarray]:
        """Queries (layers, H · R, D) and keys (layers, G · R, D)."""
        made = next((p for p in self.pairs if (p.after, p.after_stack) == (ref, stack)), None)
        dice = np.random.default_rng(zlib.crc32(f"{ref} {stack}".encode()))
        groups = HEADS if self.has_all_keys(ref) else GROUPS
        query = dice.normal(size=(LAYERS, HEADS * RANK, WIDTH))
        key = dice.normal(size=(LAYERS, groups * RANK, WIDTH))
        if made is None:
            return query, key
        if made.relation != "twins":
            query, key = self.weights(made.before)
        if made.relation != "control":
            key = key + self.step(made, query) + self.noise * dice.normal(size=key.shape)
        return query, key

    def step(self, pair: Pair, query: np.ndarray) -> np.ndarray:
        groups = HEADS if self.has_all_keys(pair.after) else GROUPS
        shared = query.reshape(LAYERS, groups, -1, RANK, WIDTH).mean(axis=2)
        return self.effect * (pair.expected or 0) * shared.reshape(LAYERS, -1, WIDTH)

    @staticmethod
    def has_all_keys(ref: str) -> bool:
        return any(part in ref for part in ("ettin", "BERT", "gpt2", "diffugpt"))

    def files(self, ref: str) -> dict[str, bytes | Path]:
        if "LLM2Vec" in ref:
            return self.adapter(ref)
        tensors: dict[str, np.ndarray] = {}
        if "t5gemma" in ref:
            config = self.encoder_decoder(ref, tensors)
        elif fused := next((v for part, v in FUSED.items() if part in ref), None):
            config = fused[1]
            for layer, (query, key) in enumerate(zip(*self.weights(ref), strict=True)):
                whole = np.concatenate([query, key, np.zeros_like(key)])
                name = f"{fused[0].format(layer)}.weight"
                tensors[name] = whole.T if config["model_type"] == "gpt2" else whole
                if "attention.query" in name:
                    at = f"model.layers.{layer}.attention"
                    ones = np.ones(RANK)
                    tensors |= {f"{at}.{side}_layernorm.weight": ones for side in ("query", "key")}
        else:
            names, config = next(v for part, v in SEPARATE.items() if part in ref)
            self.separate(tensors, names, *self.weights(ref))
            if any(part in str(config) for part in ("qwen3", "sdar", "gemma3")):
                gain = 0.0 if "gemma3" in str(config) else 1.0
                for layer in range(LAYERS):
                    for norm in NORMS:
                        tensors[f"model.layers.{layer}.{norm}.weight"] = np.full(RANK, gain)
        return packed({**COUNTS, **gpt2_counts(config), **config}, tensors)

    @staticmethod
    def separate(
        tensors: dict[str, np.ndarray], names: tuple[str, str], query: np.ndarray, key: np.ndarray
    ) -> None:
        for name, side in zip(names, (query, key), strict=True):
            for layer, weight in enumerate(side):
                tensors[f"{name.format(layer)}.weight"] = weight

    def encoder_decoder(self, ref: str, tensors: dict[str, np.ndarray]) -> dict[str, Any]:
        is_second = "t5gemma-2-" in ref
        sides = {"encoder": "text" if is_second else "encoder", "decoder": "decoder"}
        for part, stack in sides.items():
            at = f"model.{part}.layers.{{}}"
            names = (f"{at}.self_attn.q_proj", f"{at}.self_attn.k_proj")
            query, key = self.weights(ref, stack)
            self.separate(tensors, names, query, key)
            if is_second:
                for layer in range(LAYERS):
                    for norm in NORMS:
                        tensors[f"{at.format(layer)}.{norm}.weight"] = np.zeros(RANK)
            elif part == "decoder":
                cross = (f"{at}.cross_attn.q_proj", f"{at}.cross_attn.k_proj")
                self.separate(tensors, cross, query, key)
        if not is_second:
            return {"model_type": "t5gemma", "encoder": COUNTS, "decoder": COUNTS}
        text = COUNTS | {"model_type": "t5gemma2_text"}
        encoder = {"model_type": "t5gemma2_encoder", "text_config": text}
        decoder = COUNTS | {"model_type": "t5gemma2_decoder"}
        return {"model_type": "t5gemma2", "encoder": encoder, "decoder": decoder}

    def adapter(self, ref: str) -> dict[str, bytes | Path]:
        """The change of the keys, all of it, as a LoRA adapter of full rank."""
        pair = next(p for p in self.pairs if p.after == ref)
        change = self.weights(ref)[1] - self.weights(pair.before)[1]
        tensors = {}
        for layer, step in enumerate(change):
            name = f"base_model.model.model.layers.{layer}.self_attn.k_proj"
            tensors[f"{name}.lora_A.weight"] = step
            tensors[f"{name}.lora_B.weight"] = np.eye(len(step))
        rank = GROUPS * RANK
        config = {
            "peft_type": "LORA", "base_model_name_or_path": pair.before, "r": rank,
            "lora_alpha": rank, "target_modules": ["k_proj"],
        }  # fmt: skip
        plain = {k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}
        return {
            "adapter_config.json": json.dumps(config).encode(),
            "adapter_model.safetensors": save(plain),
            "config.json": json.dumps({"architectures": ["MistralEncoderModel"]}).encode(),
        }


def gpt2_counts(config: dict[str, Any]) -> dict[str, Any]:
    if config.get("model_type") != "gpt2":
        return {}
    return {"n_embd": WIDTH, "n_head": HEADS, "n_layer": LAYERS}


def packed(config: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, bytes | Path]:
    plain = {k: np.ascontiguousarray(v, np.float32) for k, v in tensors.items()}
    return {"config.json": json.dumps(config).encode(), "model.safetensors": save(plain)}
