"""Checkpoints of known shapes with random weights, written without PyTorch."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@dataclass(frozen=True)
class Shape:
    """The shape of a model's attention, and the bytes of everything else in its file."""

    name: str
    model_type: str
    layers: int
    width: int
    heads: int
    key_heads: int
    head_width: int
    dtype: str  # "F16" or "BF16"
    query: str
    key: str
    rest: int = 0


BERT_BASE = Shape(
    "BERT-base",
    "bert",
    12,
    768,
    12,
    12,
    64,
    "F16",
    "encoder.layer.{}.attention.self.query.weight",
    "encoder.layer.{}.attention.self.key.weight",
    rest=191_000_000,
)
LLAMA_3_8B = Shape(
    "LLaMA-3-8B",
    "llama",
    4,
    4096,
    32,
    8,
    128,
    "BF16",
    "model.layers.{}.self_attn.q_proj.weight",
    "model.layers.{}.self_attn.k_proj.weight",
    rest=14_700_000_000,
)


def write_checkpoint(
    folder: Path,
    shape: Shape,
    seed: int = 0,
    change: Callable[[np.ndarray, int], np.ndarray] | None = None,
    *,
    spread: bool = False,
) -> Path:
    """Return a folder with config.json and one safetensors file.

    Queries and keys are random, and the same in every layer; the rest is a hole in the file, which
    takes no room on disk and is never read. With ``change`` every layer has weights of its own, and
    each is changed, given its number of heads. With ``spread`` the rest lies between the layers, as
    it does in real files, and otherwise behind them.
    """
    random = np.random.default_rng(seed)
    sizes = [
        (name.format(layer), heads * shape.head_width)
        for layer in range(shape.layers)
        for name, heads in ((shape.query, shape.heads), (shape.key, shape.key_heads))
    ]
    header: dict[str, object] = {}
    end, hole = 0, shape.rest // shape.layers if spread else 0
    for number, (name, rows) in enumerate(sizes):
        start, end = end, end + 2 * rows * shape.width
        header[name] = {
            "dtype": shape.dtype,
            "shape": [rows, shape.width],
            "data_offsets": [start, end],
        }
        if number % 2 and hole:
            header[f"rest.{number // 2}"] = _hole(end, hole)
            end += hole
    if not hole:
        header["rest"] = _hole(end, shape.rest)
    text = json.dumps(header).encode()
    folder.mkdir(parents=True)
    with (folder / "model.safetensors").open("wb") as file:
        file.writelines([len(text).to_bytes(8, "little"), text])
        layer: list[bytes] = []
        for _ in range(shape.layers):
            if change or not layer:
                weights = (
                    random.standard_normal((rows, shape.width), np.float32) * np.float32(0.02)
                    for _, rows in sizes[:2]
                )
                layer = [
                    _encode(change(w, len(w) // shape.head_width) if change else w, shape.dtype)
                    for w in weights
                ]
            file.writelines(layer)
            file.seek(hole, os.SEEK_CUR)
        file.truncate(file.tell() + (0 if hole else shape.rest))
    config = {
        "model_type": shape.model_type,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def _hole(start: int, size: int) -> dict[str, object]:
    return {"dtype": "U8", "shape": [size], "data_offsets": [start, start + size]}


def query_key_bytes(shape: Shape) -> int:
    """Return the bytes that a scan has to read."""
    rows = (shape.heads + shape.key_heads) * shape.head_width
    return 2 * shape.layers * rows * shape.width


def _encode(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "F16":
        return values.astype("<f2").tobytes()
    return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
