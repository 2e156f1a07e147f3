"""The number types of stored tensors, and how each becomes float32.

Half precision and 8-bit floats are widened piece by piece, so that the stored bytes of a whole
tensor are never in memory next to its values.

8-bit floats mean nothing without their scales, by which the stored values are multiplied. Two
conventions are in use: ``weight_scale_inv`` (DeepSeek) has one factor for each block of the matrix,
of the configuration's ``weight_block_size`` or else 128 × 128; ``weight_scale`` has one for the
tensor, each row, or each block.

A block of GGUF's ``Q8_0`` has a factor d for 32 values, v = d q; ``Q4_1`` also an offset. A block
of the K-quants has 256 values in sub-blocks, whose scales are whole numbers themselves, with one
factor for all. What the bits mean is defined by ggml's ``ggml-quants.c``.

Axes: B blocks, S sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.checkpoints.checkpoint import Grid
from wqk.errors import CheckpointError

# Bits of one stored value, by safetensors' name. Only floating types are scored, but headers list
# tensors of every type.
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

# Values widened at a time: 256 KB of float32, which stay in a core's cache. Values read at a time:
# enough for a read's own costs, such as those of noticing a file that changes, not to count.
PIECE, READ = 2**16, 2**19


@cache
def _values_of_codes(dtype: str) -> np.ndarray:
    """The float32 value of every code of a small type."""
    if dtype == "F16":
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    codes = np.arange(2**8, dtype=np.uint16)
    if dtype == "F8_E5M2":  # the upper half of a float16's bits
        return (codes << 8).view(np.float16).astype(np.float32)
    # F8_E4M3: 1 sign, 4 exponent (bias 7), 3 mantissa bits, no infinity, NaN at the top.
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent, mantissa = (codes >> 3).astype(int) & 0xF, codes & 0x7
    normal = np.ldexp(1 + mantissa / 8, exponent - 7)
    values = sign * np.where(exponent == 0, np.ldexp(mantissa / 8, -6), normal)
    values[(codes & 0x7F) == 0x7F] = np.nan
    return values.astype(np.float32)


def _look_up(dtype: str) -> Callable[[np.ndarray, np.ndarray], None]:
    def convert(stored: np.ndarray, out: np.ndarray) -> None:
        np.take(_values_of_codes(dtype), stored, out=out, mode="clip")

    return convert


def _from_float16(stored: np.ndarray, out: np.ndarray) -> None:
    """Move the bits to their places in a float32 and multiply by the ratio of the two biases.

    This takes half the time of looking up. Infinity and NaN, which become numbers from 2**16 on by
    it, are looked up.
    """
    bits = out.view(np.int32)
    np.left_shift(stored.view(np.int16), 13, out=bits, dtype=np.int32)  # the sign fills four places
    bits &= np.int32(-0x70002000)
    out *= np.float32(2.0**112)
    if out.size and not -(2.0**16) < out.min() <= out.max() < 2.0**16:
        _look_up("F16")(stored, out)


def _from_bfloat16(stored: np.ndarray, out: np.ndarray) -> None:
    """The upper half of a float32's bits."""
    np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)


def _copy(stored: np.ndarray, out: np.ndarray) -> None:
    out[...] = stored


class Stored(NamedTuple):
    """How values lie in a file, and how a piece of them is widened."""

    item: str  # one value, or one block of them, as NumPy names it
    wide: type
    convert: Callable[[np.ndarray, np.ndarray], None]  # from items to values
    values: int = 1  # in an item


STORED: dict[str, Stored] = {
    "F64": Stored("<f8", np.float64, _copy),
    "F32": Stored("<f4", np.float32, _copy),
    "F16": Stored("<u2", np.float32, _from_float16),
    "BF16": Stored("<u2", np.float32, _from_bfloat16),
    "F8_E4M3": Stored("u1", np.float32, _look_up("F8_E4M3")),
    "F8_E5M2": Stored("u1", np.float32, _look_up("F8_E5M2")),
    # What quantized matrices are stored in.
    "U8": Stored("u1", np.uint8, _copy),
    "F8_E8M0": Stored("u1", np.uint8, _copy),
    "I8": Stored("i1", np.int8, _copy),
    "I32": Stored("<i4", np.int32, _copy),
    "U32": Stored("<u4", np.uint32, _copy),
    "I64": Stored("<i8", np.int64, _copy),
}
FLOATS = ("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")


def is_float8(dtype: str) -> bool:
    """Whether the type is one of the 8-bit floats, whose values mean nothing without a scale."""
    return dtype in ("F8_E4M3", "F8_E5M2")


def require_floats(dtype: str, tensor: str) -> None:
    """Raise `CheckpointError` for weights of any but the floating types."""
    if dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor}: weights are stored as {dtype}, which is not a floating-point type that wqk "
            f"reads ({', '.join(FLOATS)}); a quantized model of a format that is not known has to "
            "be dequantized first"
        )


def widened_type(dtype: str, tensor: str) -> type:
    """float64 stays, other floating types become float32; whole numbers stay what they are."""
    if dtype not in STORED:
        require_floats(dtype, tensor)
    return STORED[dtype].wide


def widened(
    dtype: str,
    ranges: Iterable[tuple[int, int]],
    read: Callable[[int, memoryview], None],
    tensor: str,
) -> np.ndarray:
    """The values in half-open ranges of bytes, joined: a flat array of `widened_type`.

    ``read(offset, buffer)`` fills a buffer from this byte on.
    """
    ranges, wide = list(ranges), widened_type(dtype, tensor)
    item, _, convert, each = STORED[dtype]
    stored = np.dtype(item)
    count = sum(b - a for a, b in ranges) // stored.itemsize
    out: np.ndarray = np.empty(count * each, wide)
    at_once, in_a_piece = READ // each, PIECE // each
    buffer = np.empty(0 if stored == out.dtype else min(at_once, count), stored)
    filled = 0
    for start, stop in ranges:
        items = (stop - start) // stored.itemsize
        values = out[filled : filled + items * each]
        filled += values.size
        if stored == out.dtype:
            read(start, _bytes_of(values))
            continue
        for done in range(0, items, at_once):
            codes = buffer[: items - done]
            read(start + done * stored.itemsize, _bytes_of(codes))
            for first in range(0, len(codes), in_a_piece):
                piece, at = codes[first : first + in_a_piece], (done + first) * each
                convert(piece, values[at : at + len(piece) * each])
    return out


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, to be read into."""
    return array.reshape(-1).view(np.uint8).data


def scale_name(name: str, tensors: Mapping[str, object]) -> str:
    """The tensor that holds the scales of the float8 tensor ``name``."""
    for suffix in ("_scale_inv", "_scale"):
        if name + suffix in tensors:
            return name + suffix
    raise CheckpointError(
        f"{name}: stored as float8 without its scales ({name}_scale_inv or {name}_scale); "
        "without them its values are meaningless"
    )


class Quantization(NamedTuple):
    """How one type stores its values."""

    values: int  # in a block
    nbytes: int  # of a block
    unpack: Callable[[np.ndarray], np.ndarray]  # (B, nbytes) to (B, values)
    shared: int  # values that share a scale
    steps: float  # distance of neighboring values, as a share of the largest one with this scale


def rounding(grid: Grid, values: Float[np.ndarray, ...]) -> float:
    """Half the distance of neighboring values of a quantized tensor, relative to the values.

    As a root mean square over all scales; 0 for a tensor of zeros. Values that do not divide into
    those that share a scale are taken to share the largest.

    Examples
    --------
    >>> round(rounding(Grid(32, 1 / 127), np.ones(32)), 4)
    0.0039
    """
    shared = grid.shared if values.size % grid.shared == 0 else max(1, values.size)
    largest = np.abs(values.reshape(-1, shared)).max(axis=1, initial=0).astype(np.float64)
    size = float(np.mean(np.square(values, dtype=np.float64))) if values.size else 0.0
    half = grid.steps / 2
    return half * float(np.sqrt(np.mean(largest**2) / size)) if size else 0.0


def unpacked(words: np.ndarray, bits: int, count: int) -> Int[np.ndarray, "rows count"]:
    """Codes that lie in words of 32 bits one after the other, the lowest bits first.

    ``words`` (rows, W) are 32-bit integers; of what they hold, the first ``count`` codes of each
    row are returned, as int32.

    Examples
    --------
    >>> unpacked(np.array([[0x87654321]], np.uint32), bits=4, count=8)
    array([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=int32)
    """
    words = np.ascontiguousarray(words)
    if bits == 8:
        return words.view(np.uint8)[:, :count].astype(np.int32)
    if 8 % bits == 0:
        shifts = np.arange(0, 8, bits, dtype=np.uint8)
        codes = (words.view(np.uint8)[..., None] >> shifts) & np.uint8(2**bits - 1)
        return codes.reshape(len(words), -1)[:, :count].astype(np.int32)
    single = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little")
    codes = single[:, : count * bits].reshape(len(words), count, bits).astype(np.int32)
    return np.asarray(codes @ (1 << np.arange(bits, dtype=np.int32)))


def _half(blocks: np.ndarray, at: int) -> np.ndarray:
    """A float16 of each block, (B, 1)."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """The low halves of each block's bytes, then the high ones."""
    return np.concatenate([stored & 0xF, stored >> 4], axis=1)


def _bits(stored: np.ndarray) -> np.ndarray:
    """Single bits of each block, the lowest first."""
    return np.unpackbits(np.ascontiguousarray(stored), axis=1, bitorder="little")


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * (_nibbles(blocks[:, 2:]).astype(np.float32) - 8))


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2))


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    whole = _nibbles(blocks[:, 6:]) | _bits(blocks[:, 2:6]) << 4
    return np.asarray(_half(blocks, 0) * (whole.astype(np.float32) - 16))


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    whole = _nibbles(blocks[:, 8:]) | _bits(blocks[:, 4:8]) << 4
    return np.asarray(_half(blocks, 0) * whole + _half(blocks, 2))


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    return np.asarray(_half(blocks, 0) * blocks[:, 2:].view(np.int8))


def _shifted(stored: np.ndarray, halves: int, bits: int) -> np.ndarray:
    """Numbers of a few bits that lie over each other: (B, halves, 8 / bits, bytes of a half)."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    return np.asarray((stored.reshape(len(stored), halves, 1, -1) >> shifts) & (2**bits - 1))


def _scales_and_offsets(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Eight scales and eight offsets of 6 bits each, from 12 bytes: (B, 8) both."""
    first, second, rest = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = np.concatenate([first & 63, (rest & 0xF) | (first >> 6) << 4], axis=1)
    offsets = np.concatenate([second & 63, (rest >> 4) | (second >> 6) << 4], axis=1)
    return scales, offsets


def _scaled(whole: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> np.ndarray:
    """Whole numbers of all sub-blocks with their scales (B, S), less their offsets."""
    values = whole.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    values = values if offsets is None else values - offsets[..., None]
    return np.asarray(values.reshape(len(whole), -1))


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    scales, factors = blocks[:, :16], (_half(blocks, 80), _half(blocks, 82))
    whole = _shifted(blocks[:, 16:80], 2, 2)
    return _scaled(whole, factors[0] * (scales & 0xF), factors[1] * (scales >> 4))


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    # The four bytes from 104 on hold the scales' two upper bits: of every fourth scale each.
    high = _shifted(blocks[:, 104:108], 1, 2).reshape(len(blocks), 16)
    scales = (_nibbles(blocks[:, 96:104]) | high << 4).astype(np.float32) - 32
    low = _shifted(blocks[:, 32:96], 2, 2).reshape(len(blocks), 8, 32)
    clear = 1 - _shifted(blocks[:, :32], 1, 1).reshape(len(blocks), 8, 32)
    whole = low.astype(np.float32) - 4 * clear.astype(np.float32)
    return _scaled(whole, _half(blocks, 108) * scales)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    whole = _shifted(blocks[:, 16:], 4, 4)
    return _scaled(whole, _half(blocks, 0) * scales, _half(blocks, 2) * offsets)


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    scales, offsets = _scales_and_offsets(blocks[:, 4:16])
    low = _shifted(blocks[:, 48:], 4, 4).reshape(len(blocks), 8, 32)
    high = _shifted(blocks[:, 16:48], 1, 1).reshape(len(blocks), 8, 32)
    return _scaled(low | high << 4, _half(blocks, 0) * scales, _half(blocks, 2) * offsets)


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    low = _shifted(blocks[:, :128], 2, 4).reshape(len(blocks), 2, 4, 32)
    high = _shifted(blocks[:, 128:192], 2, 2)
    whole = (low | high << 4).astype(np.float32) - 32
    return _scaled(whole, _half(blocks, 208) * blocks[:, 192:208].view(np.int8))


def _by_gguf(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Unpacks blocks of a type with ggml's own package, where it is installed."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"values of type {kind} are unpacked by the package gguf, which is not installed: "
                "pip install gguf"
            ) from None
        unpacked = gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, kind))
        return np.asarray(unpacked, np.float32)

    return unpack


QUANTIZED: dict[str, Quantization] = {
    "Q4_0": Quantization(32, 18, _q4_0, 32, 1 / 8),
    "Q4_1": Quantization(32, 20, _q4_1, 32, 2 / 15),
    "Q5_0": Quantization(32, 22, _q5_0, 32, 1 / 16),
    "Q5_1": Quantization(32, 24, _q5_1, 32, 2 / 31),
    "Q8_0": Quantization(32, 34, _q8_0, 32, 1 / 127),
    "Q2_K": Quantization(256, 84, _q2_k, 16, 2 / 3),
    "Q3_K": Quantization(256, 110, _q3_k, 16, 1 / 4),
    "Q4_K": Quantization(256, 144, _q4_k, 32, 2 / 15),
    "Q5_K": Quantization(256, 176, _q5_k, 32, 2 / 31),
    "Q6_K": Quantization(256, 210, _q6_k, 16, 1 / 32),
    # Values of a codebook; those of the last are several at once, whose steps are a bound.
    "IQ4_NL": Quantization(32, 18, _by_gguf("IQ4_NL"), 32, 24 / 127),
    "IQ4_XS": Quantization(256, 136, _by_gguf("IQ4_XS"), 32, 24 / 127),
    "MXFP4": Quantization(32, 17, _by_gguf("MXFP4"), 32, 1 / 3),
    "TQ1_0": Quantization(256, 54, _by_gguf("TQ1_0"), 256, 1.0),
    "TQ2_0": Quantization(256, 66, _by_gguf("TQ2_0"), 256, 1.0),
    "IQ3_XXS": Quantization(256, 98, _by_gguf("IQ3_XXS"), 32, 1 / 2),
    "IQ3_S": Quantization(256, 110, _by_gguf("IQ3_S"), 32, 1 / 2),
    "IQ2_XXS": Quantization(256, 66, _by_gguf("IQ2_XXS"), 32, 1.0),
    "IQ2_XS": Quantization(256, 74, _by_gguf("IQ2_XS"), 16, 1.0),
    "IQ2_S": Quantization(256, 82, _by_gguf("IQ2_S"), 16, 1.0),
    "IQ1_S": Quantization(256, 50, _by_gguf("IQ1_S"), 32, 2.0),
    "IQ1_M": Quantization(256, 56, _by_gguf("IQ1_M"), 16, 2.0),
}


def _as_stored(kind: Quantization) -> Stored:
    def convert(blocks: np.ndarray, out: np.ndarray) -> None:
        out[...] = kind.unpack(blocks).reshape(-1)

    return Stored(f"({kind.nbytes},)u1", np.float32, convert, kind.values)


STORED |= {name: _as_stored(kind) for name, kind in QUANTIZED.items()}
