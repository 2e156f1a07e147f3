"""llama2.c's ``.bin`` files: a header of sizes, then all values of one kind, layer after layer.

A file of the first kind begins with seven whole numbers; version 1 begins with ``ak42`` and its
number, and has 256 bytes of header. Both hold float32. Version 2 is quantized.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import RowFile
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource

MAGIC = b"24ka"  # 0x616b3432, little-endian
SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")

# The order of a file's tensors; names without an ending are of all layers.
NORMS = ("attention_norm", "ffn_norm")
ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")
LAYERS = (*ATTENTION, *FORWARD)
FIRST_KIND = (
    "tok_embeddings.weight", "attention_norm", *ATTENTION, "ffn_norm", *FORWARD,
    "norm.weight", "freqs_cos", "freqs_sin", "output.weight",
)  # fmt: skip
VERSION_1 = (*NORMS, "norm.weight", "tok_embeddings.weight", *LAYERS, "output.weight")

# No model of this format is larger.
LARGEST, MOST_LAYERS = 2**20, 10_000


def is_llama2c(source: ByteSource) -> bool:
    """Whether a file is llama2.c's: by its first bytes, or by sizes that give its length."""
    start = _start(source)
    if start[:4] == MAGIC:
        return True
    sizes = _sizes(start)
    if sizes is None:
        return False
    tensors = _tensors(sizes, FIRST_KIND, shared=sizes["vocab_size"] > 0)
    return sum(4 * math.prod(shape) for _, shape in tensors) == source.size - 28


def open_llama2c(source: ByteSource) -> RowFile:
    """A file of llama2.c: its tensors, as its Python code calls them, and ``model_args``.

    Raises `CheckpointError` if it is quantized, or not as long as its header says.
    """
    start = _start(source)
    is_legacy, version = start[:4] != MAGIC, int.from_bytes(start[4:8], "little")
    if not is_legacy and version != 1:
        raise CheckpointError(
            f"version {version} of llama2.c's files is not read"
            + ("; it is quantized, use the original checkpoint" if version == 2 else "")
        )
    sizes = _sizes(start if is_legacy else start[8:])
    if sizes is None:
        raise CheckpointError("its header does not hold the sizes of a model")
    # In files of the first kind, a negative vocabulary means an output matrix of its own.
    shared = sizes["vocab_size"] > 0 if is_legacy else start[36] != 0
    shapes = _tensors(sizes, FIRST_KIND if is_legacy else VERSION_1, shared)
    position = 28 if is_legacy else 256
    starts: dict[str, int] = {}
    tensors: dict[str, TensorInfo] = {}
    for name, shape in shapes:
        starts[name], tensors[name] = position, TensorInfo("F32", shape, 4 * math.prod(shape))
        position += tensors[name].nbytes
    if position != source.size:
        raise CheckpointError(
            f"has {source.size} bytes instead of {position}: truncated, or not a file of llama2.c"
        )
    arguments = sizes | {"vocab_size": abs(sizes["vocab_size"]), "norm_eps": 1e-5}
    return RowFile(source, tensors, starts, {"model_args": arguments})


def _start(source: ByteSource) -> bytes:
    start = bytearray(min(64, source.size))
    source.read_into(0, memoryview(start))
    return bytes(start)


def _sizes(header: bytes) -> dict[str, int] | None:
    """The seven sizes; None if they are not those of a model."""
    if len(header) < 28:
        return None
    sizes = dict(zip(SIZES, struct.unpack_from("<7i", header), strict=True))
    positive = all(0 < abs(size) <= LARGEST for size in sizes.values())
    if not positive or any(size < 0 for key, size in sizes.items() if key != "vocab_size"):
        return None
    heads = sizes["n_heads"]
    fits = sizes["dim"] % heads == 0 and heads % sizes["n_kv_heads"] == 0
    return sizes if fits and sizes["n_layers"] <= MOST_LAYERS else None


def _tensors(
    sizes: Mapping[str, int], order: Iterable[str], shared: bool
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes in this order; without an output matrix if it is the embeddings'."""
    dim, hidden, vocabulary = sizes["dim"], sizes["hidden_dim"], abs(sizes["vocab_size"])
    head_width = dim // sizes["n_heads"]
    keys, turned = head_width * sizes["n_kv_heads"], (sizes["max_seq_len"], head_width // 2)
    shapes: dict[str, tuple[int, ...]] = {
        "tok_embeddings.weight": (vocabulary, dim), "output.weight": (vocabulary, dim),
        "norm.weight": (dim,), "freqs_cos": turned, "freqs_sin": turned,
        "attention_norm": (dim,), "ffn_norm": (dim,),
        "attention.wq": (dim, dim), "attention.wk": (keys, dim), "attention.wv": (keys, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (hidden, dim), "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }  # fmt: skip
    for name in order:
        if name in (*LAYERS, *NORMS):
            for layer in range(sizes["n_layers"]):
                yield f"layers.{layer}.{name}.weight", shapes[name]
        elif name != "output.weight" or not shared:
            yield name, shapes[name]
