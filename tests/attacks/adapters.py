"""LoRA adapters with damaged settings and factors; the base plus scale · B A, in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from safetensors.numpy import load_file, save_file
from tests import small
from tests.attacks.outcomes import VALUES, Case, Meaningless, Scores, are_equal, dense_scores, scan
from tests.sameness.adapting import adapter_on

Tensors = dict[str, np.ndarray]
HEADS, KEY_HEADS, WIDTH = 4, 2, 4
SETTINGS: dict[str, tuple[Any, ...]] = {
    "r": (1, 2, 3, 4, 5, 8, *VALUES),
    "lora_alpha": (1, 3, 16, 2.5, -4, *VALUES),
    "use_rslora": (True, False, None),
    "target_modules": (["q_proj"], ["k_proj"], "q_proj", r".*\.(q|k)_proj", ["proj"], *VALUES),
    "rank_pattern": ({"q_proj": 2}, {"k_proj": 4}, {"layers.0": 4}),
    "alpha_pattern": ({"q_proj": 2}, {"k_proj": -3}, {"v_proj": 3}),
    "layers_to_transform": (0, [0], [1], [0, 1], [7], "0"),
    "bias": ("none", "all", "lora_only", None),
    "fan_in_fan_out": (True, False),
    "peft_type": ("LORA", "lora", "IA3", None),
    "modules_to_save": (["lm_head"], ["q_proj"], []),
    "exclude_modules": (["q_proj"], ["v_proj"], []),
    "use_dora": (True, False),
}


def update_of(name: str, settings: dict[str, Any], factors: Tensors) -> np.ndarray | float:
    """Update of one weight by an adapter, as PEFT computes it."""
    module = name.removesuffix(".weight")
    stem = f"base_model.model.{module}"
    # Also under the names that they have in a model's own state.
    down, up = (
        factors.get(f"{stem}.lora_{end}.weight", factors.get(f"{stem}.lora_{end}.default.weight"))
        for end in "AB"
    )
    if down is None and up is None:
        return 0.0
    rank, alpha = settings.get("r"), settings.get("lora_alpha")
    for ending, value in (settings.get("rank_pattern") or {}).items():
        if module.endswith(f".{ending}"):
            rank = value
    for ending, value in (settings.get("alpha_pattern") or {}).items():
        if module.endswith(f".{ending}"):
            alpha = value
    if not isinstance(rank, int) or isinstance(rank, bool) or rank <= 0:
        raise Meaningless(f"r = {rank!r}")
    if not isinstance(alpha, int | float) or isinstance(alpha, bool) or not is_finite(alpha):
        raise Meaningless(f"lora_alpha = {alpha!r}")
    if down is None or up is None or down.ndim != 2 or up.ndim != 2:
        raise Meaningless(f"{module} lacks a factor")
    if len(down) != rank or up.shape[1] != rank:
        raise Meaningless(f"factors of {module} are not of rank {rank}")
    scale = alpha / (rank**0.5 if settings.get("use_rslora") else rank)
    product: np.ndarray = scale * up.astype(np.float64) @ down.astype(np.float64)
    return product


def is_finite(number: float) -> bool:
    """Return whether a number has a finite value in float64."""
    try:
        return math.isfinite(number)
    except OverflowError:
        return False


def truth(base: Tensors, settings: dict[str, Any], factors: Tensors) -> Scores:
    """Scores of the base model with the adapter."""
    scores: dict[Any, Any] = {}
    for layer in range(2):
        sides = []
        for side, heads in (("q", HEADS), ("k", KEY_HEADS)):
            name = f"model.layers.{layer}.self_attn.{side}_proj.weight"
            update = update_of(name, settings, factors)
            weight = base[name].astype(np.float64)
            if isinstance(update, np.ndarray) and update.shape != weight.shape:
                raise Meaningless(f"{name} of shape {weight.shape}, update {update.shape}")
            sides.append((weight + update).reshape(heads, WIDTH, -1))
        for head in range(HEADS):
            key = sides[1][head * KEY_HEADS // HEADS]
            scores["self", layer, head] = dense_scores(sides[0][head], key)
    return scores


def changed_factors(factors: Tensors, dice: Random) -> tuple[Tensors, str]:
    """Damage one factor; the factors, and a description."""
    changed = dict(factors)
    name = dice.choice(sorted(factors))
    value = changed[name]
    kind = dice.choice(("gone", "turned", "exchanged", "rank", "type", "zero", "nan", "renamed"))
    if kind == "gone":
        del changed[name]
    elif kind == "turned":
        changed[name] = value.T
    elif kind == "exchanged":
        rival = name.replace("lora_A", "lora_C").replace("lora_B", "lora_A")
        rival = rival.replace("lora_C", "lora_B")
        if rival in changed:
            changed[name], changed[rival] = changed[rival], value
        else:
            changed[rival] = changed.pop(name)
    elif kind == "rank":
        axis = 0 if "lora_A" in name else 1
        changed[name] = value.take(range(dice.choice((1, 2, 3))), axis)
    elif kind == "type":
        changed[name] = value.astype(dice.choice((np.float16, np.float64, np.int8)))
    elif kind == "zero":
        changed[name] = np.zeros_like(value)
    elif kind == "nan":
        changed[name] = np.where(np.arange(value.size).reshape(value.shape) == 1, np.nan, value)
    else:
        replacement = dice.choice(("default.weight", "weight_x", "weight"))
        new = name.removesuffix("weight") + replacement
        new = dice.choice((new, name.replace("layers.0", "layers.1"), name.replace("q_", "v_")))
        del changed[name]
        changed[new] = value
        name = f"{name} to {new}"
    return changed, f"{kind}: {name}"


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Adapters of a small LLaMA."""
    model = small.llama(layers=2, key_heads=KEY_HEADS, head_width=WIDTH, width=16)
    base = {name: value.astype(np.float32) for name, value in model._arrays.items()}
    adapter, _ = adapter_on(folder, base, model.config)
    file = adapter / "adapter_model.safetensors"
    originals = load_file(file)
    about = json.loads((adapter / "adapter_config.json").read_text())
    while True:
        settings, factors, descriptions = dict(about), originals, []
        for _ in range(dice.choice((1, 1, 2))):
            if dice.random() < 0.5:
                key = dice.choice(sorted(SETTINGS))
                settings[key] = dice.choice(SETTINGS[key])
                descriptions.append(f"{key} = {settings[key]!r}")
            else:
                factors, description = changed_factors(factors, dice)
                descriptions.append(description)
        text = json.dumps(settings)
        (adapter / "adapter_config.json").write_text(text, errors="surrogatepass")
        save_file({name: np.ascontiguousarray(v) for name, v in factors.items()}, file)
        yield Case(
            "; ".join(descriptions),
            partial(scan, adapter, folder / "scores.parquet", dice),
            lambda scores, s=settings, f=factors: are_equal(scores, truth(base, s, f)),
        )
