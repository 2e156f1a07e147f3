"""What conversions do to stored weights: a plant for each cause, in numbers that do not coincide.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.comparing.mismatches import Kind

if TYPE_CHECKING:
    from collections.abc import Callable

LAYERS, D, H, G, R = 2, 128, 6, 3, 20
SHARE = H // G

Tensors = dict[str, np.ndarray]
COMMON = {"hidden_size": D, "num_hidden_layers": LAYERS, "num_attention_heads": H}
GROUPED = COMMON | {"num_key_value_heads": G, "head_dim": R}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": GROUPED | {"model_type": "llama"},
    "phi3": GROUPED | {"model_type": "phi3"},
    "gpt_neox": COMMON | {"model_type": "gpt_neox", "hidden_size": H * R, "rotary_pct": 0.5},
    "falcon": COMMON
    | {
        "model_type": "falcon", "new_decoder_architecture": True, "num_kv_heads": G,
        "hidden_size": H * R,
    },
    "gated": GROUPED | {"model_type": "qwen3_next", "layer_types": ["full_attention"] * LAYERS},
}  # fmt: skip


def right(model: str) -> tuple[Tensors, dict[str, Any]]:
    """The tensors and the configuration of a right conversion."""
    config, dice, tensors = CONFIGS[model], np.random.default_rng(0), {}
    width = config["hidden_size"]

    def draw(*shape: int) -> np.ndarray:
        return dice.standard_normal(shape) / np.sqrt(shape[-1])

    for layer in range(LAYERS):
        at, attention = f"model.layers.{layer}", f"model.layers.{layer}.self_attn"
        norm = f"{at}.input_layernorm.weight"
        output = f"{attention}.o_proj.weight"
        if model == "phi3":
            tensors[f"{attention}.qkv_proj.weight"] = draw((H + 2 * G) * R, width)
        elif model == "gpt_neox":
            attention = f"gpt_neox.layers.{layer}.attention"
            norm, output = (
                f"gpt_neox.layers.{layer}.input_layernorm.weight",
                f"{attention}.dense.weight",
            )
            tensors[f"{attention}.query_key_value.weight"] = draw(3 * H * R, width)
            tensors[norm.replace("weight", "bias")] = draw(width)
        elif model == "falcon":
            attention = f"transformer.h.{layer}.self_attention"
            norm, output = f"transformer.h.{layer}.ln_attn.weight", f"{attention}.dense.weight"
            tensors[f"{attention}.query_key_value.weight"] = draw((H + 2 * G) * R, width)
            tensors[norm.replace("weight", "bias")] = draw(width)
        else:
            twice = 2 if model == "gated" else 1
            for side, heads in (("q", twice * H), ("k", G), ("v", G)):
                tensors[f"{attention}.{side}_proj.weight"] = draw(heads * R, width)
            for side in "qk" if model == "gated" else "":
                tensors[f"{attention}.{side}_norm.weight"] = 0.2 * draw(R)
        tensors[output] = draw(width, H * R)
        centre = 0.0 if model == "gated" else 1.0
        tensors[norm] = centre + 0.3 * np.random.default_rng(7).standard_normal(width)
    return {name: value.astype(np.float32) for name, value in tensors.items()}, dict(config)


@dataclass(frozen=True)
class Plant:
    """A mistake: of which model, in which weights, what it does to one, and how it is named."""

    what: str
    model: str
    ending: str  # of the weights' names, or several
    change: Callable[[np.ndarray], np.ndarray]
    kind: Kind
    named: str = ""


def sections(w: np.ndarray) -> list[np.ndarray]:
    return np.split(w, [H * R, (H + G) * R])


def in_blocks(w: np.ndarray, change: Callable[[np.ndarray], np.ndarray], size: int = 32) -> Any:
    """Blocks (n, D / size, size) of columns changed."""
    return change(w.reshape(len(w), -1, size)).reshape(w.shape)


def moved_scales(blocks: np.ndarray) -> np.ndarray:
    scales = np.abs(blocks).max(axis=2, keepdims=True)
    return blocks / scales * np.roll(scales, 1, axis=0)


def integers(blocks: np.ndarray) -> np.ndarray:
    return np.rint(blocks / np.abs(blocks).max(axis=2, keepdims=True) * 127)


GAIN = 1 + 0.3 * np.random.default_rng(1).standard_normal(D)

PLANTS: tuple[Plant, ...] = (
    Plant(
        "columns in the order of the other rotary convention",
        "llama",
        "q_proj.weight",
        lambda w: w.reshape(len(w), 2, -1).swapaxes(1, 2).reshape(w.shape),
        Kind.COLUMNS,
    ),
    Plant(
        "columns rolled",
        "llama",
        "k_proj.weight",
        lambda w: np.roll(w, 5, 1),
        Kind.COLUMNS,
        "rolled by 5",
    ),
    Plant(
        "columns in reverse order",
        "llama",
        "q_proj.weight",
        lambda w: w[:, ::-1],
        Kind.COLUMNS,
        "reverse",
    ),
    Plant(
        "columns of values",
        "llama",
        "v_proj.weight",
        lambda w: w.reshape(len(w), -1, 2)[:, :, ::-1].reshape(w.shape),
        Kind.COLUMNS,
        "nibbles",
    ),
    Plant(
        "halves of each 32 columns exchanged, as nibbles",
        "llama",
        "q_proj.weight",
        lambda w: in_blocks(w, lambda b: np.roll(b, 16, axis=2)),
        Kind.COLUMNS,
        "nibbles",
    ),
    Plant(
        "rows of values in the other rotary order",
        "llama",
        "v_proj.weight",
        lambda w: w.reshape(G, 2, R // 2, -1).swapaxes(1, 2).reshape(w.shape),
        Kind.ROWS,
        "rotary pairs",
    ),
    Plant(
        "heads of values exchanged",
        "llama",
        "v_proj.weight",
        lambda w: w.reshape(G, R, -1)[[1, 0, 2]].reshape(w.shape),
        Kind.HEADS,
    ),
    Plant(
        "columns of outputs by the other grouping",
        "llama",
        "o_proj.weight",
        lambda w: w.reshape(-1, G, SHARE, R).swapaxes(1, 2).reshape(w.shape),
        Kind.COLUMNS,
        "key heads",
    ),
    Plant(
        "fused q, k, v in the order k, q, v",
        "phi3",
        "qkv_proj.weight",
        lambda w: np.concatenate([sections(w)[n] for n in (1, 0, 2)]),
        Kind.FUSED,
    ),
    Plant(
        "two shards of the fused weight joined as they are",
        "phi3",
        "qkv_proj.weight",
        lambda w: np.concatenate(
            [
                np.concatenate(parts)
                for parts in zip(*(np.split(s, 2) for s in sections(w)), strict=True)
            ]
        ),
        Kind.FUSED,
        "2 shards",
    ),
    Plant(
        "fused rows as (R, H, 3)",
        "gpt_neox",
        "query_key_value.weight",
        lambda w: w.reshape(H, 3, R, -1).transpose(2, 0, 1, 3).reshape(w.shape),
        Kind.FUSED,
    ),
    Plant(
        "fused rows as (3, H, R)",
        "gpt_neox",
        "query_key_value.weight",
        lambda w: w.reshape(H, 3, R, -1).swapaxes(0, 1).reshape(w.shape),
        Kind.FUSED,
    ),
    Plant(
        "groups rolled by a head",
        "falcon",
        "query_key_value.weight",
        lambda w: np.roll(w.reshape(G, SHARE + 2, R, -1), 1, 1).reshape(w.shape),
        Kind.FUSED,
    ),
    Plant(
        "groups rolled as a whole",
        "falcon",
        "query_key_value.weight",
        lambda w: np.roll(w, (SHARE + 2) * R, 0),
        Kind.FUSED,
        "rolled by",
    ),
    Plant(
        "queries and gates flat, not by head",
        "gated",
        "q_proj.weight",
        lambda w: w.reshape(H, 2, R, -1).swapaxes(0, 1).reshape(w.shape),
        Kind.ROWS,
        "2 × heads",
    ),
    Plant(
        "outputs times a factor",
        "llama",
        "o_proj.weight",
        lambda w: 2 * w,
        Kind.SCALED,
        "scaled by 2",
    ),
    Plant(
        "signs of some rows of values",
        "llama",
        "v_proj.weight",
        lambda w: w * np.where(np.arange(len(w)) % R < 3, -1, 1)[:, None],
        Kind.SIGNS,
        "other signs in 9 of 60",
    ),
    Plant(
        "rows of values each scaled",
        "llama",
        "v_proj.weight",
        lambda w: w * np.linspace(0.5, 2, len(w))[:, None],
        Kind.ROW_FACTORS,
    ),
    Plant(
        "columns of queries each scaled",
        "llama",
        "q_proj.weight",
        lambda w: w * GAIN,
        Kind.COLUMN_FACTORS,
    ),
    Plant(
        "scales of blocks shifted by a row",
        "llama",
        "q_proj.weight",
        lambda w: in_blocks(w, moved_scales),
        Kind.BLOCK_SCALES,
        "of 32 columns",
    ),
    Plant(
        "integers without their scales",
        "llama",
        "k_proj.weight",
        lambda w: in_blocks(w, integers),
        Kind.INTEGERS,
    ),
    Plant(
        "zero points off by one step",
        "llama",
        "q_proj.weight",
        lambda w: in_blocks(w, lambda b: b + 0.1 * np.abs(b).max(axis=2, keepdims=True)),
        Kind.ZERO_POINT,
    ),
    Plant(
        "a norm's gain folded in, and still there",
        "llama",
        "q_proj.weight",
        lambda w: w * right("llama")[0]["model.layers.0.input_layernorm.weight"],
        Kind.GAIN_FOLDED,
    ),
    Plant("outputs stored (in, out)", "gpt_neox", "dense.weight", np.transpose, Kind.TRANSPOSED),
    Plant("keys and values exchanged", "llama", "", np.copy, Kind.TENSOR),
    Plant("values all zero", "llama", "v_proj.weight", np.zeros_like, Kind.ZERO),
)


def planted(plant: Plant) -> tuple[Tensors, dict[str, Any]]:
    """The tensors with the mistake in them."""
    tensors, config = right(plant.model)
    if plant.kind is Kind.TENSOR:
        for layer in range(LAYERS):
            sides = [f"model.layers.{layer}.self_attn.{side}_proj.weight" for side in "kv"]
            tensors[sides[0]], tensors[sides[1]] = tensors[sides[1]], tensors[sides[0]]
        return tensors, config
    for name, value in tensors.items():
        if name.endswith(plant.ending):
            tensors[name] = np.ascontiguousarray(plant.change(value), np.float32)
    return tensors, config
