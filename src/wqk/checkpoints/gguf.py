"""GGUF, the format of llama.cpp: metadata, then tensors, some of them quantized.

A file begins with ``GGUF``, its version, and the numbers of tensors and of metadata; then come the
metadata, the tensors' names, shapes, types and places, and aligned, the data. Shapes are stored
innermost axis first, so that a matrix (out, in) is stored as in, out. Specification:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.files import RowFile, check_sizes, refuse_pointer
from wqk.checkpoints.llama_cpp import ROTARY_FACTORS
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
FLOAT32, STRING, ARRAY = 6, 8, 9

# Types of tensors by number, as ggml counts them. Those that are not read are named in errors.
TYPES = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 9: "Q8_1",
    10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS",
    17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS",
    24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 30: "BF16", 34: "TQ1_0",
    35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip

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
            metadata[name] = [float(str(value)) for value in file.read(Part(name))]
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
        grid = Grid(own.shared, own.steps)
        return name, TensorInfo(dtype, shape, size // own.values * own.nbytes, grid), offset
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
            number = self.number(SCALARS[kind][0])
            # The shortest decimal that is this float32: what was written as 1e-6 is not 9.99…e-7.
            return float(str(np.float32(number))) if kind == FLOAT32 else number
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
