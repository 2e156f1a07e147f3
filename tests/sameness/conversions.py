"""Mistakes that conversions make, rebuilt on tiny models; most from public threads on them.

Each row changes a right conversion as its threads report. `tests.sameness.test_conversions` checks
that the mistake is named, and that the repair makes the two checkpoints the same; the table of the
page "Check a conversion" is written from these rows by ``docs/generate_conversions.py``.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.cases import cases

LAYERS, D, H, G, R = 3, 80, 8, 2, 16
RANK = 4

Tensors = dict[str, np.ndarray]


@dataclass(frozen=True)
class Conversion:
    """One mistake.

    Attributes
    ----------
    description
        The mistake, in a phrase.
    threads
        Public threads that report the mistake, as ``owner/repository#number``; empty if no thread
        was found that reports it plainly.
    model
        The model that is converted; a key of `CONFIGS`.
    change
        Makes the mistake in a copy of the right tensors and configuration.
    verdict
        The kind of mismatch.
    named
        A part of the reason.
    layers
        The blocks that differ; all of them if empty.
    """

    description: str
    threads: tuple[str, ...]
    model: str
    change: Callable[[Tensors, dict[str, Any]], None]
    verdict: str
    named: str
    layers: tuple[int, ...] = ()


COMMON = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H}
GROUPED = COMMON | {"num_key_value_heads": G, "head_dim": R, "max_position_embeddings": 4096}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"model_type": "llama", "rope_theta": 500_000.0, "rope_scaling": LLAMA3},
    "qwen2": GROUPED | {"model_type": "qwen2", "rope_theta": 1e6},
    "qwen3": GROUPED | {"model_type": "qwen3", "rope_theta": 1e6},
    "gemma": GROUPED | {"model_type": "gemma"},
    "gemma2": GROUPED
    | {
        "model_type": "gemma2",
        "query_pre_attn_scalar": 16,
        "attn_logit_softcapping": 50.0,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "phi": COMMON | {"model_type": "phi", "partial_rotary_factor": 0.5, "hidden_size": H * R},
    "bert": COMMON | {"model_type": "bert", "hidden_size": H * R},
    "gpt_neox": COMMON | {"model_type": "gpt_neox", "hidden_size": H * R, "rotary_pct": 0.25},
    "phi3": GROUPED | {"model_type": "phi3"},
}


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
    row_shape = sides[0].shape[1:]
    return np.stack([side.reshape(H, R, *row_shape) for side in sides], axis=1).reshape(
        -1, *row_shape
    )


def halves(value: np.ndarray, heads: int, rotated: int = 0) -> np.ndarray:
    """`permute` of Hugging Face's conversion of LLaMA: pairs side by side become halves.

    Of each head the first dimensions are ``rotated``; 0 for all of them.
    """
    return _transposed(value, heads, rotated, (-1, 2))


def pairs(value: np.ndarray, heads: int, rotated: int = 0) -> np.ndarray:
    """`permute` of llama.cpp's conversion, the inverse of `halves`."""
    return _transposed(value, heads, rotated, (2, -1))


def _transposed(value: np.ndarray, heads: int, rotated: int, planes: tuple[int, int]) -> np.ndarray:
    """Exchange the two axes of each head's rotated dimensions."""
    table = value.reshape(heads, len(value) // heads, -1).copy()
    part = table[:, : rotated or None]
    part[:] = part.reshape(heads, *planes, part.shape[-1]).swapaxes(1, 2).reshape(part.shape)
    return table.reshape(value.shape)


HEADS = {"q": H, "k": G}


def edit(
    sides: str,
    change: Callable[[np.ndarray, int], np.ndarray],
    ending: str = "proj.weight",
    layer: str = "",
) -> Callable[[Tensors, dict[str, Any]], None]:
    """Change the projections of these sides, given each side's number of heads."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        for name, value in tensors.items():
            for side in sides:
                if f".{side}_{ending}" in name and f"layers.{layer}" in name:
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
            partner = name.removesuffix(first) + second
            tensors[name], tensors[partner] = tensors[partner], tensors[name]

    return apply


def shift_layers(tensors: Tensors, config: dict[str, Any]) -> None:
    old = dict(tensors)
    for name in tensors:
        for layer in range(1, LAYERS):
            if f"layers.{layer}." in name:
                tensors[name] = old[name.replace(f"layers.{layer}.", f"layers.{layer - 1}.")]


def copy_layer(source: str, target: str) -> Callable[[Tensors, dict[str, Any]], None]:
    """Take the tensors of one layer from another; the words are those of their names."""

    def apply(tensors: Tensors, config: dict[str, Any]) -> None:
        names = [name for name in tensors if target in name]
        assert names, target
        for name in names:
            tensors[name] = tensors[name.replace(target, source)].copy()

    return apply


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
        repeated = np.tile(value, (H // G, 1, 1)) if is_key else value.repeat(H // G, axis=0)
        tensors[name] = repeated.reshape(H * R, -1)
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


def in_sections(fused: np.ndarray) -> np.ndarray:
    return fused.reshape(H, 3, R, -1).swapaxes(0, 1).reshape(fused.shape)


def per_key_head(fused: np.ndarray) -> np.ndarray:
    sections = np.split(fused, [H * R, (H + G) * R])
    parts = [section.reshape(G, -1, fused.shape[-1]) for section in sections]
    return np.concatenate(parts, axis=1).reshape(fused.shape)


def rolled(fused: np.ndarray) -> np.ndarray:
    return np.concatenate([fused[H * R : (H + G) * R], fused[: H * R], fused[(H + G) * R :]])


# The change that makes each mistake, in a copy of the right tensors and configuration.
CHANGES: dict[str, Callable[[Tensors, dict[str, Any]], None]] = {
    "Meta's weights renamed, their rows not permuted for halves": edit("qk", pairs),
    "permuted although the rows lay in halves already": edit("qk", halves),
    "the conversion run twice": edit("qk", lambda w, n: pairs(pairs(w, n), n)),
    "keys permuted with the number of query heads": edit("k", lambda w, n: halves(pairs(w, n), H)),
    "keys permuted with query heads divided by key heads": edit(
        "k", lambda w, n: halves(pairs(w, n), H // G)
    ),
    "queries permuted as one head": edit("q", lambda w, n: halves(pairs(w, n), 1)),
    "queries permuted, keys forgotten": edit("k", pairs),
    "weights permuted, biases not": edit("qk", pairs, "proj.bias"),
    "gains of the queries' and keys' norms not permuted with the rows": renamed(
        "_norm.weight", lambda g: pairs(g, 1)
    ),
    "the rotary base lost, so that the default applies": configure(rope_theta=None),
    "the rotary scaling lost": configure(rope_scaling=None),
    "linear scaling in place of none": configure(
        rope_scaling={"rope_type": "linear", "factor": 4.0}
    ),
    "all dimensions rotated, where only some are": configure(partial_rotary_factor=1.0),
    "the scale of the scores left out": configure(query_pre_attn_scalar=256),
    "the soft cap of the scores lost": configure(attn_logit_softcapping=0.0),
    "the sliding window lost": configure(layer_types=["full_attention"] * 4),
    "biases of queries and keys lost": both(
        renamed("q_proj.bias", lambda b: None), renamed("k_proj.bias", lambda b: None)
    ),
    "gains folded with 1 added, and 1 added again when they are read": renamed(
        "layernorm.weight", lambda g: g + 1
    ),
    "gains stored as differences from 1, and read as they are": renamed(
        "layernorm.weight", lambda g: g - 1
    ),
    "the norm before attention left at its start": renamed("layernorm.weight", np.ones_like),
    "query heads in the order of tiled key heads": edit("q", regrouped),
    "key heads repeated as a whole instead of one by one": tile_keys,
    "tensor-parallel parts joined in the wrong order": edit("q", reversed_heads),
    "one tensor-parallel part loaded twice": edit("q", copied),
    "some heads left as initialized": edit("q", initialized),
    "queries and keys exchanged": both(
        swap("query.weight", "key.weight"), swap("query.bias", "key.bias")
    ),
    "queries and keys exchanged, their biases not": swap("q_proj.weight", "k_proj.weight"),
    "a square weight stored the other way round, as in Conv1D": both(
        renamed("query.weight", np.transpose), renamed("key.weight", np.transpose)
    ),
    "layers off by one": shift_layers,
    # Stages of two layers.
    "each pipeline stage numbered from 0, so that the second has the first one's layers": (
        copy_layer("layers.0.", "layers.2.")
    ),
    "every layer loaded from the first": tie_layers,
    "the fused weight joined in sections, where each head's parts should follow each other": (
        renamed("query_key_value.weight", in_sections)
    ),
    "the fused weight joined head by head, where it is read in sections": renamed(
        "qkv_proj.weight", per_key_head
    ),
    "the sections of the fused weight in another order": renamed("qkv_proj.weight", rolled),
    "an adapter (LoRA) not merged": adapted(0),
    "an adapter merged twice": adapted(2),
    "an adapter merged without its rank-stabilized scale": adapted(0.5),
}


def mistakes() -> Iterator[Conversion]:
    """Yield the mistakes of the table next to this file."""
    for row in cases(__file__, "mistakes"):
        fields = dict(row)
        for key, value in row.items():
            if isinstance(value, list):
                fields[key] = tuple(value)
        yield Conversion(change=CHANGES[row["description"]], **fields)


MISTAKES = tuple(mistakes())
