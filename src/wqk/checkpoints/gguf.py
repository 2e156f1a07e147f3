"""GGUF, the format of llama.cpp: metadata, then tensors, some of them quantized.

A file begins with ``GGUF``, its version, and the numbers of tensors and of metadata; then come the
metadata, the tensors' names, shapes, types and places, and aligned, the data. Shapes are stored
innermost axis first, so that a matrix (out, in) is stored as in, out. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.files import RowFile, check_sizes, refuse_pointer
from wqk.checkpoints.number_types import ITEM_BITS, PIECE, QUANTIZED
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource

MAGIC = b"GGUF"

# Types of metadata by number: how `struct` reads them, and their size.
SCALARS = {
    0: ("<B", 1), 1: ("<b", 1), 2: ("<H", 2), 3: ("<h", 2), 4: ("<I", 4), 5: ("<i", 4),
    6: ("<f", 4), 7: ("<?", 1), 10: ("<Q", 8), 11: ("<q", 8), 12: ("<d", 8),
}  # fmt: skip
STRING, ARRAY = 8, 9

# Types of tensors by number, as ggml counts them. Those that are not read are named in errors.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

# Factors of rotary frequencies are tensors here, and configuration elsewhere.
ROTARY_FACTORS = ("rope_freqs.weight", "rope_factors_short.weight")

# Metadata longer than this are the tokenizer's: their bytes are passed over.
LONGEST = 4096
MOST_ENTRIES = 1_000_000
AHEAD = 2**18


class GGUFFile(RowFile):
    """A GGUF file, whose quantized rows are unpacked when they are read."""

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where the part's rows lie in the file: half-open ranges of bytes, in the part's order."""
        info, start = self.tensors[part.name], self._starts[part.name]
        row = info.nbytes // info.shape[0] if info.shape and info.shape[0] else info.nbytes
        return [(start + a * row, start + b * row) for a, b in part.row_ranges(info.shape)]

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, in float32 (float64 stays)."""
        info = self.tensors[part.name]
        if info.dtype not in QUANTIZED:
            return super().read(part)
        kind = QUANTIZED[info.dtype]
        out: np.ndarray = np.empty(part.shape(info.shape), np.float32)
        flat, filled = out.reshape(-1), 0
        most = PIECE // kind.values * kind.nbytes
        for start, stop in self.byte_ranges(part):
            for at in range(start, stop, most):
                stored = np.empty((min(most, stop - at) // kind.nbytes, kind.nbytes), np.uint8)
                self.source.read_into(at, stored.reshape(-1).data)
                values = kind.unpack(stored).reshape(-1)
                flat[filled : filled + values.size] = values
                filled += values.size
        return out


def open_gguf(source: ByteSource) -> GGUFFile:
    """A GGUF file, of which only the header is read; ``about`` holds its metadata, ``gguf``.

    Raises `CheckpointError` if the header does not describe the file.
    """
    at = _Cursor(source)
    start = at.take(4)
    refuse_pointer(start)
    if start != MAGIC:
        raise CheckpointError(f"a GGUF file begins with 'GGUF', this one with {start!r}")
    version = at.number("<I")
    if version not in (2, 3):
        what = "big-endian" if version > 2**16 else f"version {version}"
        raise CheckpointError(f"GGUF files of versions 2 and 3 are read, got {what}")
    count, entries = at.number("<Q"), at.number("<Q")
    if max(count, entries) > MOST_ENTRIES:
        raise CheckpointError(f"the header claims {max(count, entries)} entries: not a GGUF file")
    metadata: dict[str, Any] = {}
    for _ in range(entries):
        key = at.text()
        metadata[key] = at.value(at.number("<I"))
    listed = [_listed(at) for _ in range(count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 0 < alignment <= 2**20:
        raise CheckpointError(f"general.alignment must be a positive number, got {alignment!r:.30}")
    data = -(-at.position // alignment) * alignment
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    for name, info, offset in listed:
        if name in tensors:
            raise CheckpointError(f"tensor {name!r} occurs twice")
        if info.nbytes and data + offset + info.nbytes > source.size:
            beyond = data + offset + info.nbytes - source.size
            raise CheckpointError(f"{name!r} ends {beyond} bytes beyond the file: truncated")
        tensors[name], starts[name] = info, data + offset
    file = GGUFFile(source, tensors, starts, {"gguf": metadata})
    for name in ROTARY_FACTORS:
        if name in tensors and tensors[name].nbytes <= LONGEST:
            metadata[name] = [float(value) for value in file.read(Part(name))]
    return file


def _listed(at: _Cursor) -> tuple[str, TensorInfo, int]:
    """A tensor of the header, and where it starts in the data."""
    name, axes = at.text(), at.number("<I")
    if axes > 8:
        raise CheckpointError(f"{name!r} has {axes} axes: not a GGUF file")
    shape = tuple(at.number("<Q") for _ in range(axes))[::-1]
    kind, offset = at.number("<I"), at.number("<Q")
    check_sizes(repr(name), shape, (offset,))
    dtype, size = TYPES.get(kind, f"ggml type {kind}"), math.prod(shape)
    if dtype in QUANTIZED:
        own = QUANTIZED[dtype]
        if not shape or shape[-1] % own.values:
            raise CheckpointError(
                f"{name!r} of shape {shape} does not divide into blocks of {own.values}, as "
                f"{dtype} needs"
            )
        return name, TensorInfo(dtype, shape, size // own.values * own.nbytes), offset
    # The size of other types is not known; reading them is refused by their name.
    return name, TensorInfo(dtype, shape, size * ITEM_BITS.get(dtype, 0) // 8), offset


class _Cursor:
    """Reads a header from its start, some bytes ahead."""

    def __init__(self, source: ByteSource) -> None:
        self.position = 0
        self._source, self._start, self._held = source, 0, b""

    def take(self, count: int) -> bytes:
        """The next bytes."""
        if count > self._source.size - self.position:
            raise CheckpointError("ends within its header: truncated, or not a GGUF file")
        end = self.position + count
        if end > self._start + len(self._held):
            held = bytearray(min(max(count, AHEAD), self._source.size - self.position))
            self._source.read_into(self.position, memoryview(held))
            self._start, self._held = self.position, bytes(held)
        taken = self._held[self.position - self._start : end - self._start]
        self.position = end
        return taken

    def number(self, code: str) -> Any:
        """The next number, by its code in `struct`."""
        return struct.unpack(code, self.take(struct.calcsize(code)))[0]

    def text(self) -> str:
        """The next string."""
        length = self.number("<Q")
        return self.take(length).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """The next value of this type; of long arrays and strings, None."""
        if kind in SCALARS:
            return self.number(SCALARS[kind][0])
        if kind == STRING:
            length = self.number("<Q")
            if length <= LONGEST:
                return self.take(length).decode("utf-8", "replace")
            self._pass_over(length)
            return None
        if kind != ARRAY or depth > 4:
            raise CheckpointError(f"metadata of the unknown type {kind}: not a GGUF file")
        inner, count = self.number("<I"), self.number("<Q")
        if inner in SCALARS and count > LONGEST:
            self._pass_over(count * SCALARS[inner][1])
            return None
        if count > self._source.size:
            raise CheckpointError("ends within its header: truncated, or not a GGUF file")
        if inner == STRING and count > LONGEST:
            for _ in range(count):
                self._pass_over(self.number("<Q"))
            return None
        return [self.value(inner, depth + 1) for _ in range(count)]

    def _pass_over(self, count: int) -> None:
        if count > self._source.size - self.position:
            raise CheckpointError("ends within its header: truncated, or not a GGUF file")
        self.position += count
        if self.position > self._start + len(self._held):
            self._start, self._held = self.position, b""


# Every so many layers one sees everything, as llama.cpp's code has it by architecture.
WINDOW_PERIODS = {"gemma2": 2, "gemma3": 6, "cohere2": 4}
# Of these sizes, by their number of layers, the score's scale is not that of a head's width.
WIDE_SCALES = {"gemma2": 46, "gemma3": 62}


def configuration(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration in a file's metadata: its architecture's keys, dots as nested tables.

    Added are what other files call ``model_type``, ``head_dim`` and ``rope_scaling``, numbers of
    heads under their usual names for guesses, and what llama.cpp's code knows by architecture.

    Examples
    --------
    >>> about = {"general.architecture": "llama", "llama.attention.head_count": 4}
    >>> configuration(about)["attention"], configuration(about)["model_type"]
    ({'head_count': 4}, 'gguf-llama')
    """
    architecture = metadata.get("general.architecture")
    own = f"{architecture}."
    config: dict[str, Any] = {"model_type": f"gguf-{architecture}"}
    for key, value in metadata.items():
        if not key.startswith(own):
            continue
        *path, last = key.removeprefix(own).split(".")
        table = config
        for word in path:
            inner = table.setdefault(word, {})
            table = inner if isinstance(inner, dict) else {}
        table[last] = value
    attention = config.get("attention")
    attention = attention if isinstance(attention, dict) else {}
    heads, width = attention.get("head_count"), config.get("embedding_length")
    most = (
        max((n for n in heads if type(n) is int), default=0) if isinstance(heads, list) else heads
    )
    head_width = attention.get("key_length")
    if head_width is None and type(most) is int and type(width) is int and most > 0:
        head_width = width // most
    if type(head_width) is int and head_width > 0:
        config["head_dim"] = head_width
        config["score_scale"] = attention.get("scale") or head_width**-0.5
        wide = WIDE_SCALES.get(str(architecture)) == config.get("block_count")
        if wide and type(most) is int and type(width) is int:
            config["score_scale"] = (width / most) ** -0.5
    config["num_attention_heads"] = heads
    config["num_key_value_heads"] = attention.get("head_count_kv", heads)
    config["sliding_window"] = attention.get("sliding_window")
    config["alibi"] = bool(attention.get("max_alibi_bias")) or architecture == "bloom"
    if str(architecture) in WINDOW_PERIODS and config["sliding_window"]:
        config["sliding_window_pattern"] = WINDOW_PERIODS[str(architecture)]
    if architecture == "gemma3":
        config["rope"] = {"freq_base_swa": 10_000.0, **_table(config, "rope")}
    scaling = _scaling(metadata, config)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _table(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    value = config.get(key)
    return value if isinstance(value, dict) else {}


def _scaling(metadata: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """How rotary frequencies are scaled, in the words of `transformers`."""
    given = _table(_table(config, "rope"), "scaling")
    trained = given.get("original_context_length") or config.get("context_length")
    amplitude = given.get("attn_factor")
    for name in ROTARY_FACTORS:
        if isinstance(metadata.get(name), list):
            table = {"rope_type": "factors", "factors": metadata[name]}
            return table | ({"attention_factor": amplitude} if amplitude is not None else {})
    kind = given.get("type")
    if kind in (None, "none"):
        return {}
    about = {"rope_type": kind, "factor": given.get("factor")}
    if kind == "yarn":
        about |= {"original_max_position_embeddings": trained}
    return about | ({"attention_factor": amplitude} if amplitude is not None else {})
