"""llama2.c's ``.bin`` files: seven whole numbers, then all values of one kind, layer after layer.

Later versions, which begin with ``ak42``, are refused: the ``.pt`` beside them holds the same.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import RowFile
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource

MAGIC = b"24ka"  # 0x616b3432, little-endian
SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")

# No model of this format is larger.
LARGEST, MOST_LAYERS = 2**20, 10_000


def open_llama2c(source: ByteSource) -> RowFile | None:
    """A file of llama2.c by sizes that give its length, its tensors as its Python code calls them.

    ``about`` holds its sizes, ``model_args``. None for another file; raises `CheckpointError` for a
    later version.
    """
    start = bytearray(min(28, source.size))
    source.read_into(0, memoryview(start))
    if start[:4] == MAGIC:
        version = int.from_bytes(start[4:8], "little")
        raise CheckpointError(
            f"version {version} of llama2.c's files is not read; use the .pt file that it was "
            "exported from"
        )
    sizes = _sizes(start)
    starts: dict[str, int] = {}
    tensors: dict[str, TensorInfo] = {}
    position = 28
    for name, shape in _tensors(sizes) if sizes else ():
        starts[name], tensors[name] = position, TensorInfo("F32", shape, 4 * math.prod(shape))
        position += tensors[name].nbytes
    if sizes is None or position != source.size:
        return None
    arguments = sizes | {"vocab_size": abs(sizes["vocab_size"]), "norm_eps": 1e-5}
    return RowFile(source, tensors, starts, {"model_args": arguments})


def _sizes(header: bytearray) -> dict[str, int] | None:
    """The seven sizes; None if they are not those of a model."""
    if len(header) < 28:
        return None
    sizes = dict(zip(SIZES, struct.unpack("<7i", header), strict=True))
    positive = all(0 < abs(size) <= LARGEST for size in sizes.values())
    if not positive or any(size < 0 for key, size in sizes.items() if key != "vocab_size"):
        return None
    heads = sizes["n_heads"]
    fits = sizes["dim"] % heads == 0 and heads % sizes["n_kv_heads"] == 0
    return sizes if fits and sizes["n_layers"] <= MOST_LAYERS else None


def _tensors(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in the file's order; a negative vocabulary has an output matrix."""
    dim, hidden, vocabulary = sizes["dim"], sizes["hidden_dim"], abs(sizes["vocab_size"])
    head_width = dim // sizes["n_heads"]
    keys, turned = head_width * sizes["n_kv_heads"], (sizes["max_seq_len"], head_width // 2)
    layers: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,),
        "attention.wq": (dim, dim), "attention.wk": (keys, dim), "attention.wv": (keys, dim),
        "attention.wo": (dim, dim), "ffn_norm": (dim,),
        "feed_forward.w1": (hidden, dim), "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }  # fmt: skip
    yield "tok_embeddings.weight", (vocabulary, dim)
    for name, shape in layers.items():
        yield from ((f"layers.{n}.{name}.weight", shape) for n in range(sizes["n_layers"]))
    yield "norm.weight", (dim,)
    yield from (("freqs_cos", turned), ("freqs_sin", turned))
    if sizes["vocab_size"] < 0:
        yield "output.weight", (vocabulary, dim)
