"""Small models that tests share: arrays with the names of LLaMA, and modules of transformers."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from wqk.checkpoints.modules import StateDict


def sizes(width: int, layers: int, heads: int, **more: Any) -> dict[str, Any]:
    """Numbers of a configuration, by the names that most types of models have for them."""
    named = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return named | more


def llama(
    *,
    layers: int = 2,
    heads: int = 4,
    key_heads: int = 2,
    head_width: int = 6,
    width: int = 24,
    sides: str = "qk",
    biases: str = "",
    bias_size: float = 1.0,
    norms: bool = False,
    seed: int = 0,
    name: str = "tiny",
    **config: Any,
) -> StateDict:
    """A rotary model of grouped heads in memory, in float64: its queries and keys, or all sides."""
    rng = np.random.default_rng(seed)
    rows = {"q": heads * head_width, "k": key_heads * head_width, "v": key_heads * head_width}
    tensors = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        for side in sides:
            shape = (width, rows["q"]) if side == "o" else (rows[side], width)
            tensors[f"{at}.self_attn.{side}_proj.weight"] = rng.standard_normal(shape)
        for side in biases:
            tensors[f"{at}.self_attn.{side}_proj.bias"] = bias_size * rng.standard_normal(
                rows[side]
            )
        if norms:
            tensors[f"{at}.input_layernorm.weight"] = rng.uniform(0.5, 2, width)
    about = sizes(width, layers, heads, model_type="llama", num_key_value_heads=key_heads)
    return StateDict(tensors, about | {"head_dim": head_width} | config, name)


def save(folder: Path, tensors: dict[str, Any], config: dict[str, Any]) -> Path:
    """A folder with these tensors, of NumPy in float32 or of PyTorch, and their configuration."""
    folder.mkdir(parents=True, exist_ok=True)
    ours = {name: t for name, t in tensors.items() if isinstance(t, np.ndarray)}
    if ours:
        single = {name: np.asarray(t, np.float32, order="C") for name, t in ours.items()}
        pytest.importorskip("safetensors.numpy").save_file(single, folder / "model.safetensors")
    else:
        kept = {name: tensor.contiguous() for name, tensor in tensors.items()}
        pytest.importorskip("safetensors.torch").save_file(kept, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_model(folder: Path, model: StateDict) -> Path:
    """Write a model in memory into a folder, in float32."""
    return save(folder, model._arrays, model.config)


def adapter(folder: Path, base: object, tensors: dict[str, np.ndarray], **about: Any) -> Path:
    """A folder with an adapter of a base, of these tensors under PEFT's names."""
    folder.mkdir(exist_ok=True)
    config = {"peft_type": "LORA", "target_modules": "all-linear", **about}
    config.setdefault("base_model_name_or_path", str(base))
    (folder / "adapter_config.json").write_text(json.dumps(config))
    named = {f"base_model.model.{name}": value for name, value in tensors.items()}
    pytest.importorskip("safetensors.numpy").save_file(named, folder / "adapter_model.safetensors")
    return folder


def edit(folder: Path, change: Callable[[str, np.ndarray], np.ndarray]) -> Path:
    """Replace a folder's tensors by a function of name and tensor, in float32."""
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = numpy.load_file(folder / "model.safetensors").items()
    changed = {name: change(name, t.astype(np.float32)).astype(np.float32) for name, t in tensors}
    numpy.save_file(changed, folder / "model.safetensors")
    return folder


def running(key_heads: int = 1) -> Any:
    """A LLaMA of one layer of two heads over nine tokens, as `transformers` makes it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.manual_seed(0)
    chosen = sizes(16, 1, 2, num_key_value_heads=key_heads, intermediate_size=16, vocab_size=9)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**chosen))


def bert(kind: str = "BertModel", *, seed: int = 0, **changes: Any) -> Any:
    """Two layers of four heads, as `transformers` makes them."""
    import torch
    import transformers

    torch.manual_seed(seed)
    chosen = sizes(32, 2, 4, intermediate_size=16, vocab_size=50) | changes
    return getattr(transformers, kind)(transformers.BertConfig(**chosen))
