"""Models with linear attention or state spaces next to full attention, damaged in many ways.

The independent computation takes settings as the configuration class of transformers completes
them, and tensors as the module of transformers runs them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import numpy as np
import transformers
from safetensors.numpy import load_file, save_file
from tests.attacks.outcomes import (
    Case,
    Meaningless,
    Scores,
    are_equal,
    changed_setting,
    dense_scores,
    scan,
)
from tests.families.architectures import FURTHER
from tests.families.proving import save

Tensors = dict[str, np.ndarray]
Settings = dict[str, Any]

COMMON = (
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
OF_QWEN3_NEXT = (
    "linear_num_value_heads",
    "linear_num_key_heads",
    "linear_value_head_dim",
    "linear_key_head_dim",
)
OF_BAMBA = (
    "mamba_n_groups",
    "mamba_d_state",
    "mamba_n_heads",
)


def completed(kind: str, config: Settings, *keys: str) -> Any:
    """These settings, with the defaults of the configuration class, and no others."""
    if config.get("model_type") != kind:
        raise Meaningless(f"model_type = {config.get('model_type')!r}")
    defaults = transformers.AutoConfig.for_model(kind)
    names = (*COMMON, *keys)
    values = {key: config.get(key, getattr(defaults, key, None)) for key in names}
    for key, value in values.items():
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise Meaningless(f"{key} = {value!r}")
    return SimpleNamespace(**values)


def heads_of(tensors: Tensors, name: str, heads: int, width: int) -> np.ndarray:
    """A weight divided into heads: shape (heads, width, inputs)."""
    if name not in tensors:
        raise Meaningless(f"no {name}")
    weight = tensors[name]
    if not isinstance(heads, int) or not isinstance(width, int):
        raise Meaningless(f"{heads!r} heads of width {width!r}")
    if weight.ndim != 2 or len(weight) != heads * width:
        raise Meaningless(f"{name} of shape {weight.shape}")
    return weight.astype(np.float64).reshape(heads, width, -1)


def layers_in(tensors: Tensors) -> list[int]:
    """Numbers of the layers that hold attention, of either kind; the tensors decide."""
    kinds = ("self_attn", "linear_attn", "mamba")
    parts = (name.split(".") for name in tensors)
    return sorted({int(p[1]) for p in parts if len(p) > 2 and has(tensors, int(p[1]), *kinds)})


def has(tensors: Tensors, layer: int, *kinds: str) -> bool:
    """Return whether a layer has projections of one of these kinds.

    Other tensors without projections belong to no module: transformers ignores them.
    """
    projections = (name for name in tensors if "proj" in name and ".in_proj_ba." not in name)
    prefixes = tuple(f"layers.{layer}.{kind}." for kind in kinds)
    return any(name.startswith(prefixes) for name in projections)


def gains_of(tensors: Tensors, name: str, width: int) -> np.ndarray:
    """Gains of a norm of Qwen 3 Next, which are stored as their difference from 1."""
    if name not in tensors or tensors[name].ndim != 1 or tensors[name].size % width:
        raise Meaningless(f"{name} is missing, or has another shape")
    return 1 + tensors[name].astype(np.float64).reshape(-1, width, 1)


def full_attention(scores: dict[Any, Any], layer: int, query: np.ndarray, key: np.ndarray) -> None:
    if len(query) % len(key):
        raise Meaningless("key heads do not divide the query heads")
    for head, weight in enumerate(query):
        key_weight = key[head * len(key) // len(query)]
        scores["self", layer, head] = dense_scores(weight, key_weight)


def qwen3_next(config: Settings, tensors: Tensors) -> Scores:
    """Scores of a model of Qwen 3 Next."""
    c = completed("qwen3_next", config, *OF_QWEN3_NEXT)
    if not isinstance(c.head_dim, int):
        raise Meaningless(f"head_dim = {c.head_dim!r}")
    scores: dict[Any, Any] = {}
    for layer in layers_in(tensors):
        at = f"layers.{layer}"
        if has(tensors, layer, "self_attn"):
            wide = f"{at}.self_attn.q_proj.weight"
            query = heads_of(tensors, wide, c.num_attention_heads, 2 * c.head_dim)
            query = query[:, : c.head_dim]
            name = f"{at}.self_attn.k_proj.weight"
            key = heads_of(tensors, name, c.num_key_value_heads, c.head_dim)
            query = query * gains_of(tensors, f"{at}.self_attn.q_norm.weight", c.head_dim)
            key = key * gains_of(tensors, f"{at}.self_attn.k_norm.weight", c.head_dim)
            full_attention(scores, layer, query, key)
            continue
        values = c.linear_num_value_heads // c.linear_num_key_heads * c.linear_value_head_dim
        rows = 2 * c.linear_key_head_dim + 2 * values
        name = f"{at}.linear_attn.in_proj_qkvz.weight"
        queries_and_keys = heads_of(tensors, name, c.linear_num_key_heads, rows)
        for head, weight in enumerate(queries_and_keys):
            query, key, _ = np.split(weight, [c.linear_key_head_dim, 2 * c.linear_key_head_dim])
            scores["linear", layer, head] = dense_scores(query, key)
    return scores


def bamba(config: Settings, tensors: Tensors) -> Scores:
    """Scores of a model of Bamba; the rows of in_proj prove the width of what is between."""
    c = completed("bamba", config, *OF_BAMBA)
    scores: dict[Any, Any] = {}
    for layer in layers_in(tensors):
        at = f"layers.{layer}"
        if has(tensors, layer, "self_attn"):
            name = f"{at}.self_attn.q_proj.weight"
            if name not in tensors or len(tensors[name]) % c.num_attention_heads:
                raise Meaningless(name)
            width = len(tensors[name]) // c.num_attention_heads
            query = heads_of(tensors, name, c.num_attention_heads, width)
            name = f"{at}.self_attn.k_proj.weight"
            key = heads_of(tensors, name, c.num_key_value_heads, width)
            full_attention(scores, layer, query, key)
        if has(tensors, layer, "mamba"):
            name = f"{at}.mamba.in_proj.weight"
            if name not in tensors:
                raise Meaningless(name)
            states = c.mamba_n_groups * c.mamba_d_state
            inner = (len(tensors[name]) - 2 * states - c.mamba_n_heads) // 2
            (weight,) = heads_of(tensors, name, 1, 2 * (inner + states) + c.mamba_n_heads)
            keys, queries = np.split(weight[2 * inner : 2 * (inner + states)], 2)
            groups = zip(
                queries.reshape(c.mamba_n_groups, c.mamba_d_state, -1),
                keys.reshape(c.mamba_n_groups, c.mamba_d_state, -1),
                strict=True,
            )
            for group, (query, key) in enumerate(groups):
                scores["state-space", layer, group] = dense_scores(query, key)
    return scores


TRUTHS: dict[str, Callable[[Settings, Tensors], Scores]] = {
    "qwen3-next": qwen3_next,
    "bamba": bamba,
}
NUMBER_TYPES = (np.float16, np.float64, np.int8, np.bool_)


def changed_tensors(tensors: Tensors, dice: Random) -> tuple[Tensors, str]:
    """Damage the tensors in one place; the tensors, and a description."""
    changed = dict(tensors)
    mixing = [name for name in sorted(tensors) if "attn" in name or "mamba" in name]
    name = dice.choice(mixing if dice.random() < 0.8 else sorted(tensors))
    value = tensors[name]
    axis = dice.randrange(value.ndim)
    kind = dice.choice(
        ("gone", "short", "long", "turned", "named", "type", "nan", "zero", "other layer", "flat")
    )
    if kind == "gone":
        del changed[name]
    elif kind == "short":
        changed[name] = value.take(range(max(0, value.shape[axis] - dice.choice((1, 2, 8)))), axis)
    elif kind == "long":
        changed[name] = np.concatenate([value, value], axis)
    elif kind == "turned":
        changed[name] = value.T
    elif kind == "named":
        changed[name.replace("proj", dice.choice(("linear", "proj_x", "project")))] = value
        del changed[name]
    elif kind == "type":
        changed[name] = value.astype(dice.choice(NUMBER_TYPES))
    elif kind == "nan":
        damaged = value.copy()
        damaged.flat[dice.randrange(value.size)] = dice.choice((np.nan, np.inf))
        changed[name] = damaged
    elif kind == "zero":
        changed[name] = np.zeros_like(value)
    elif kind == "other layer":
        layer = dice.choice("0123")
        parts = name.split(".")
        if len(parts) > 2 and parts[1].isdigit():
            parts[1] = layer
            changed[".".join(parts)] = value
            name = f"{name} also in {layer}"
    else:
        changed[name] = value.reshape(-1)
    return changed, f"{kind}: {name}"


def write(folder: Path, config: Settings, tensors: Tensors) -> None:
    """Write a model as transformers does."""
    text = json.dumps(config)
    (folder / "config.json").write_text(text, encoding="utf-8", errors="surrogatepass")
    stored = {name: np.ascontiguousarray(value) for name, value in tensors.items()}
    save_file(stored, folder / "model.safetensors")


def attack(folder: Path, dice: Random) -> Iterator[Case]:
    """Hybrid models with damaged settings and tensors."""
    originals = {}
    for name in TRUTHS:
        save(FURTHER[name], folder / name)
        config = json.loads((folder / name / "config.json").read_text())
        originals[name] = (config, load_file(folder / name / "model.safetensors"))
    while True:
        name = dice.choice(sorted(originals))
        config, tensors = originals[name]
        descriptions = []
        for _ in range(dice.choice((1, 1, 2))):
            if dice.random() < 0.5:
                config, description = changed_setting(config, dice)
            else:
                tensors, description = changed_tensors(tensors, dice)
            descriptions.append(description)
        write(folder / name, config, tensors)
        truth = partial(TRUTHS[name], config, tensors)
        yield Case(
            f"{name}: {'; '.join(descriptions)}",
            partial(scan, folder / name, folder / "scores.parquet", dice),
            lambda scores, truth=truth: are_equal(scores, truth()),
        )
