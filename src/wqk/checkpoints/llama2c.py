"""llama2.c's ``.bin`` files: a header of sizes, then all values of one kind, layer after layer.

A file of the first kind begins with seven whole numbers; version 1 begins with ``ak42`` and its
number, and has 256 bytes of header. Both hold float32. Version 2 is quantized.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from typing import Any

    from wqk.checkpoints.safetensors import ByteSource

MAGIC = b"24ka"  # 0x616b3432, little-endian
SIZES = ("dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "vocab_size", "max_seq_len")

# No model of this format is larger; larger numbers are no sizes.
LARGEST, MOST_LAYERS = 2**20, 10_000


def is_llama2c(source: ByteSource) -> bool:
    """Whether a file is one of llama2.c's: by its first bytes, or by sizes that give its length."""
    start = _start(source)
    if start[:4] == MAGIC:
        return True
    sizes = _sizes(start)
    return sizes is not None and _length(_legacy(sizes)) == source.size - 28


class LlamaFile:
    """One file of llama2.c: its tensors' places, under their names in its own Python code.

    Attributes
    ----------
    about
        Its header, as ``model_args``.

    Raises
    ------
    CheckpointError
        It is quantized, or not as long as its header says.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        start = _start(source)
        is_legacy, version = start[:4] != MAGIC, int.from_bytes(start[4:8], "little")
        if not is_legacy and version != 1:
            raise CheckpointError(
                f"{source.name}: version {version} of llama2.c's files is not read"
                + ("; it is quantized, use the original checkpoint" if version == 2 else "")
            )
        sizes = _sizes(start if is_legacy else start[8:])
        if sizes is None:
            raise CheckpointError(f"{source.name}: its header holds no sizes of a model")
        shared = sizes["vocab_size"] > 0 if is_legacy else start[36] != 0
        shapes = list(_legacy(sizes) if is_legacy else _first(sizes, shared))
        offset = 28 if is_legacy else 256
        self.about: Mapping[str, Any] = {
            "model_args": sizes | {"vocab_size": abs(sizes["vocab_size"]), "norm_eps": 1e-5}
        }
        self._starts: dict[str, int] = {}
        tensors: dict[str, TensorInfo] = {}
        for name, shape in shapes:
            nbytes = 4 * math.prod(shape)
            self._starts[name], tensors[name] = offset, TensorInfo("F32", shape, nbytes)
            offset += nbytes
        if offset != source.size:
            raise CheckpointError(
                f"{source.name}: has {source.size} bytes instead of {offset}: truncated, or not "
                "a file of llama2.c"
            )
        self.tensors: Mapping[str, TensorInfo] = tensors

    def position(self, name: str) -> int:
        """Where the tensor's data begins, for reading in file order."""
        return self._starts[name]

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where the part's rows lie in the file: half-open ranges of bytes, in the part's order."""
        shape, start = self.tensors[part.name].shape, self._starts[part.name]
        row = 4 * math.prod(shape[1:])
        return [(start + a * row, start + b * row) for a, b in part.row_ranges(shape)]

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, in float32."""
        out = np.empty(part.shape(self.tensors[part.name].shape), np.float32)
        view, filled = out.reshape(-1).view(np.uint8).data, 0
        for begin, end in self.byte_ranges(part):
            self.source.read_into(begin, view[filled : filled + end - begin])
            filled += end - begin
        return out


def _start(source: ByteSource) -> bytes:
    start = bytearray(min(64, source.size))
    source.read_into(0, memoryview(start))
    return bytes(start)


def _sizes(header: bytes) -> dict[str, int] | None:
    """The seven sizes; None where they are those of no model."""
    if len(header) < 28:
        return None
    sizes = dict(zip(SIZES, struct.unpack_from("<7i", header), strict=True))
    positive = all(0 < abs(size) <= LARGEST for size in sizes.values())
    if not positive or any(size < 0 for key, size in sizes.items() if key != "vocab_size"):
        return None
    heads = sizes["n_heads"]
    fits = sizes["dim"] % heads == 0 and heads % sizes["n_kv_heads"] == 0
    return sizes if fits and sizes["n_layers"] <= MOST_LAYERS else None


def _layers(sizes: Mapping[str, int], *kinds: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """All layers' tensors of one kind, then all of the next."""
    dim, hidden = sizes["dim"], sizes["hidden_dim"]
    keys = dim // sizes["n_heads"] * sizes["n_kv_heads"]
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (dim,), "ffn_norm": (dim,),
        "attention.wq": (dim, dim), "attention.wk": (keys, dim), "attention.wv": (keys, dim),
        "attention.wo": (dim, dim),
        "feed_forward.w1": (hidden, dim), "feed_forward.w2": (dim, hidden),
        "feed_forward.w3": (hidden, dim),
    }  # fmt: skip
    for kind in kinds:
        for layer in range(sizes["n_layers"]):
            yield f"layers.{layer}.{kind}.weight", shapes[kind]


ATTENTION = ("attention.wq", "attention.wk", "attention.wv", "attention.wo")
FORWARD = ("feed_forward.w1", "feed_forward.w2", "feed_forward.w3")


def _legacy(sizes: Mapping[str, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of the first kind of files; a negative vocabulary has an output of its own."""
    dim, vocabulary = sizes["dim"], abs(sizes["vocab_size"])
    turned = (sizes["max_seq_len"], dim // sizes["n_heads"] // 2)
    yield "tok_embeddings.weight", (vocabulary, dim)
    yield from _layers(sizes, "attention_norm", *ATTENTION, "ffn_norm", *FORWARD)
    yield "norm.weight", (dim,)
    yield "freqs_cos", turned
    yield "freqs_sin", turned
    if sizes["vocab_size"] < 0:
        yield "output.weight", (vocabulary, dim)


def _first(sizes: Mapping[str, int], shared: bool) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The tensors of version 1."""
    dim, vocabulary = sizes["dim"], abs(sizes["vocab_size"])
    yield from _layers(sizes, "attention_norm", "ffn_norm")
    yield "norm.weight", (dim,)
    yield "tok_embeddings.weight", (vocabulary, dim)
    yield from _layers(sizes, *ATTENTION, *FORWARD)
    if not shared:
        yield "output.weight", (vocabulary, dim)


def _length(shapes: Iterator[tuple[str, tuple[int, ...]]]) -> int:
    return sum(4 * math.prod(shape) for _, shape in shapes)
