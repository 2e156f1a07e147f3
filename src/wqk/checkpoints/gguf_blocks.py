"""Blocks of GGUF: values of few bits, and their layout in bytes.

A row of a quantized tensor is a sequence of blocks. A block has a fixed number of values and of
bytes. Its bytes are consecutive fields; each function here lists the fields in their order. Terms
of the tables:

- d, m: float16, in 2 bytes, little-endian; ``d`` is a scale, ``m`` an offset;
- n × b bits: n codes of b bits. By default, a byte contains codes of distant positions, the lowest
  bits first: the low halves of 16 bytes are the codes 0–15 of a block, the high halves are the
  codes 16–31.

Blocks of 256 values ("K") are 8 sub-blocks of 32 values or 16 of 16. A sub-block has a scale, which
is also a code, multiplied by the scale of the block. Sources: ``ggml-common.h`` (the fields) and
``ggml-quants.c`` (the arithmetic) of https://github.com/ggml-org/ggml.

Types of a codebook (IQ, TQ) are unpacked by the package ``gguf``.

Axes: B blocks, S sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np

from wqk.checkpoints.files import STORED, Stored
from wqk.checkpoints.quantization.matrix import FLOAT4_STEP
from wqk.errors import CheckpointError


class Quantization(NamedTuple):
    """The storage of the values of one type.

    Attributes
    ----------
    values, nbytes
        Values and bytes of a block.
    unpack
        Function from blocks (B, nbytes) to values (B, values), in float32.
    shared
        Number of values that share a scale.
    steps
        Distance of neighboring values, relative to the largest value with this scale.
    """

    values: int
    nbytes: int
    unpack: Callable[[np.ndarray], np.ndarray]
    shared: int
    steps: float


def _fields(blocks: np.ndarray, *widths: int) -> list[np.ndarray]:
    """Cut blocks (B, bytes) into consecutive fields of these widths in bytes."""
    fields = []
    start = 0
    for width in widths:
        fields.append(blocks[:, start : start + width])
        start += width
    return fields


def _float16(field: np.ndarray) -> np.ndarray:
    """Return the float16 in a field of 2 bytes, as float32 (B, 1)."""
    return np.ascontiguousarray(field).view("<f2").astype(np.float32)


def _int8(field: np.ndarray) -> np.ndarray:
    """Return the bytes of a field as whole numbers with a sign, (B, bytes)."""
    return field.view(np.int8)


def _nibbles(field: np.ndarray) -> np.ndarray:
    """Return the low halves of a field's bytes, then the high halves: (B, n) becomes (B, 2n)."""
    return np.concatenate([field & 0xF, field >> 4], axis=1)


def _bits(field: np.ndarray) -> np.ndarray:
    """Return the single bits of a field, the lowest bit of a byte first: (B, n) becomes (B, 8n)."""
    return np.unpackbits(np.ascontiguousarray(field), axis=1, bitorder="little")


def _layers(field: np.ndarray, groups: int, bits: int) -> np.ndarray:
    """Return the codes of a field in which a byte contains codes of distant positions.

    Parameters
    ----------
    field
        Bytes (B, n).
    groups
        Number of groups of neighboring bytes; a group contains neighboring values.
    bits
        Bits of a code.

    Returns
    -------
    Codes (B, groups, 8 / bits, n / groups): in a group, first the codes in the lowest bits of all
    its bytes, then the codes in the next bits. In this order, the codes are the values of a block.

    Examples
    --------
    >>> _layers(np.array([[0x21, 0x43]], np.uint8), groups=1, bits=4)
    array([[[[1, 3],
             [2, 4]]]], dtype=uint8)
    """
    shifts = np.arange(0, 8, bits, dtype=np.uint8)[:, None]
    bytes_of_group = field.reshape(len(field), groups, 1, -1)
    codes: np.ndarray = (bytes_of_group >> shifts) & (2**bits - 1)
    return codes


def _scaled(codes: np.ndarray, scales: np.ndarray, offsets: np.ndarray | None = None) -> np.ndarray:
    """Return codes · scales − offsets, with one scale and offset for each sub-block.

    ``codes`` are the codes of all sub-blocks, in order, in any shape (B, …); ``scales`` and
    ``offsets`` are (B, S). The result is (B, values), in float32.
    """
    values = codes.reshape(*scales.shape, -1).astype(np.float32) * scales[..., None]
    if offsets is not None:
        values = values - offsets[..., None]
    flat: np.ndarray = values.reshape(len(codes), -1)
    return flat


def _q4_0(blocks: np.ndarray) -> np.ndarray:
    """32 values d · (code − 8): d; 32 × 4 bits."""
    scale, codes = _fields(blocks, 2, 16)
    values: np.ndarray = _float16(scale) * (_nibbles(codes).astype(np.float32) - 8)
    return values


def _q4_1(blocks: np.ndarray) -> np.ndarray:
    """32 values d · code + m: d; m; 32 × 4 bits."""
    scale, offset, codes = _fields(blocks, 2, 2, 16)
    values: np.ndarray = _float16(scale) * _nibbles(codes) + _float16(offset)
    return values


def _q5_0(blocks: np.ndarray) -> np.ndarray:
    """32 values d · (code − 16): d; 32 highest bits, in order; 32 × the 4 bits below."""
    scale, high_bits, low_bits = _fields(blocks, 2, 4, 16)
    codes = _nibbles(low_bits) | _bits(high_bits) << 4
    values: np.ndarray = _float16(scale) * (codes.astype(np.float32) - 16)
    return values


def _q5_1(blocks: np.ndarray) -> np.ndarray:
    """32 values d · code + m: d; m; 32 highest bits, in order; 32 × the 4 bits below."""
    scale, offset, high_bits, low_bits = _fields(blocks, 2, 2, 4, 16)
    codes = _nibbles(low_bits) | _bits(high_bits) << 4
    values: np.ndarray = _float16(scale) * codes + _float16(offset)
    return values


def _q8_0(blocks: np.ndarray) -> np.ndarray:
    """32 values d · code: d; 32 whole numbers of 8 bits."""
    scale, codes = _fields(blocks, 2, 32)
    values: np.ndarray = _float16(scale) * _int8(codes)
    return values


def _q2_k(blocks: np.ndarray) -> np.ndarray:
    """256 values d · scale · code − m · offset, in sub-blocks of 16.

    Fields: 16 bytes of a scale (low 4 bits) and an offset (high 4 bits); 256 × 2 bits, in 2 groups
    of 32 bytes; d; m.
    """
    sub_blocks, codes, scale, offset = _fields(blocks, 16, 64, 2, 2)
    scales = _float16(scale) * (sub_blocks & 0xF)
    offsets = _float16(offset) * (sub_blocks >> 4)
    return _scaled(_layers(codes, groups=2, bits=2), scales, offsets)


def _q3_k(blocks: np.ndarray) -> np.ndarray:
    """256 values d · (scale − 32) · (code − 4), in sub-blocks of 16.

    Fields: 32 bytes of the highest bits of the codes, 256 × 1 bit; 64 bytes of their 2 bits below,
    256 × 2 bits, in 2 groups of 32 bytes; 12 bytes of 16 scales of 6 bits; d. Of the scales, 8
    bytes have the 4 low bits, and 4 bytes the 2 high bits of every fourth scale.
    """
    high_bits, low_bits, low_scales, high_scales, scale = _fields(blocks, 32, 64, 8, 4, 2)
    count = len(blocks)
    scales_above = _layers(high_scales, groups=1, bits=2).reshape(count, 16)
    scales = (_nibbles(low_scales) | scales_above << 4).astype(np.float32) - 32
    low_codes = _layers(low_bits, groups=2, bits=2).reshape(count, 8, 32)
    high_codes = _layers(high_bits, groups=1, bits=1).reshape(count, 8, 32)
    codes = (low_codes | high_codes << 2).astype(np.float32) - 4
    return _scaled(codes, _float16(scale) * scales)


def _q4_k(blocks: np.ndarray) -> np.ndarray:
    """256 values d · scale · code − m · offset, in sub-blocks of 32.

    Fields: d; m; 12 bytes of scales and offsets (`_scales_and_offsets`); 256 × 4 bits, in 4 groups
    of 32 bytes.
    """
    scale, offset, sub_blocks, codes = _fields(blocks, 2, 2, 12, 128)
    scales, offsets = _scales_and_offsets(sub_blocks)
    return _scaled(
        _layers(codes, groups=4, bits=4), _float16(scale) * scales, _float16(offset) * offsets
    )


def _q5_k(blocks: np.ndarray) -> np.ndarray:
    """256 values d · scale · code − m · offset, in sub-blocks of 32.

    Fields: d; m; 12 bytes of scales and offsets (`_scales_and_offsets`); 32 bytes of the highest
    bits of the codes, 256 × 1 bit; 128 bytes of the bits below, 256 × 4 bits, in 4 groups.
    """
    scale, offset, sub_blocks, high_bits, low_bits = _fields(blocks, 2, 2, 12, 32, 128)
    scales, offsets = _scales_and_offsets(sub_blocks)
    low_codes = _layers(low_bits, groups=4, bits=4).reshape(len(blocks), 8, 32)
    high_codes = _layers(high_bits, groups=1, bits=1).reshape(len(blocks), 8, 32)
    codes = low_codes | high_codes << 4
    return _scaled(codes, _float16(scale) * scales, _float16(offset) * offsets)


def _scales_and_offsets(packed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return eight scales and eight offsets of 6 bits each, (B, 8) both, from 12 bytes (B, 12).

    ======  =======================  ========================
    bytes   low bits                 high bits
    ======  =======================  ========================
    0–3     scales 0–3, 6 bits       high 2 bits, scales 4–7
    4–7     offsets 0–3, 6 bits      high 2 bits, offsets 4–7
    8–11    low 4 bits, scales 4–7   low 4 bits, offsets 4–7
    ======  =======================  ========================
    """
    first, second, third = _fields(packed, 4, 4, 4)
    low_scales, high_scales = first & 0b111111, (third & 0xF) | (first >> 6) << 4
    low_offsets, high_offsets = second & 0b111111, (third >> 4) | (second >> 6) << 4
    scales = np.concatenate([low_scales, high_scales], axis=1)
    offsets = np.concatenate([low_offsets, high_offsets], axis=1)
    return scales, offsets


def _q6_k(blocks: np.ndarray) -> np.ndarray:
    """256 values d · scale · (code − 32), in sub-blocks of 16.

    Fields: 128 bytes of the low bits of the codes, 256 × 4 bits, in 2 groups of 64 bytes; 64 bytes
    of the high bits, 256 × 2 bits, in 2 groups of 32 bytes; 16 scales of 8 bits; d.
    """
    low_bits, high_bits, sub_scales, scale = _fields(blocks, 128, 64, 16, 2)
    low_codes = _layers(low_bits, groups=2, bits=4).reshape(len(blocks), 2, 4, 32)
    high_codes = _layers(high_bits, groups=2, bits=2)
    codes = (low_codes | high_codes << 4).astype(np.float32) - 32
    return _scaled(codes, _float16(scale) * _int8(sub_scales))


# Twice the values of 4-bit floats (E2M1), by code. From the highest bit: 1 sign, 2 exponent, 1
# mantissa.
DOUBLED_FLOAT4 = np.array([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], np.float32)


def _nvfp4(blocks: np.ndarray) -> np.ndarray:
    """64 values float4 · scale, in sub-blocks of 16.

    Fields: 4 scales, 8-bit floats without a sign; 64 × 4 bits, codes of E2M1, in 4 groups of 8
    bytes.
    """
    scales, codes = _fields(blocks, 4, 32)
    codes_of_sub_blocks = _layers(codes, groups=4, bits=4)
    return _scaled(DOUBLED_FLOAT4[codes_of_sub_blocks], _unsigned_float8(scales) / 2)


def _unsigned_float8(stored: np.ndarray) -> np.ndarray:
    """Return the values of 8-bit floats without a sign: 4 bits of exponent (bias 7), 3 of mantissa.

    ggml reads the code of NaN, 0x7F, as 0, and ignores the highest bit.
    """
    exponents = ((stored >> 3) & 0b1111).astype(np.int32)
    mantissas = (stored & 0b111).astype(np.float32)
    normal = np.ldexp(1 + mantissas / 8, exponents - 7)
    subnormal = np.ldexp(mantissas, -9)
    values = np.where(exponents == 0, subnormal, normal).astype(np.float32)
    values[stored == 0x7F] = 0
    return values


def _q1_0(blocks: np.ndarray) -> np.ndarray:
    """128 values ±d: d; 128 bits, in order; a set bit is +."""
    scale, signs = _fields(blocks, 2, 16)
    values: np.ndarray = _float16(scale) * (2 * _bits(signs).astype(np.float32) - 1)
    return values


def _by_gguf(kind: str) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function that unpacks blocks of a type with ggml's package ``gguf``."""

    def unpack(blocks: np.ndarray) -> np.ndarray:
        try:
            import gguf
        except ImportError:
            raise CheckpointError(
                f"values of type {kind} are unpacked by the package gguf, which is not installed; "
                "pip install gguf"
            ) from None
        unpacked = gguf.quants.dequantize(blocks, getattr(gguf.GGMLQuantizationType, kind))
        return np.asarray(unpacked, np.float32)

    return unpack


# By type: values and bytes of a block, the function, values that share a scale, and steps.
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
    "NVFP4": Quantization(64, 36, _nvfp4, 16, FLOAT4_STEP),
    "Q1_0": Quantization(128, 18, _q1_0, 128, 2.0),
    # Values of a codebook; those of the last are several at once, whose steps are a bound.
    "IQ4_NL": Quantization(32, 18, _by_gguf("IQ4_NL"), 32, 24 / 127),
    "IQ4_XS": Quantization(256, 136, _by_gguf("IQ4_XS"), 32, 24 / 127),
    "MXFP4": Quantization(32, 17, _by_gguf("MXFP4"), 32, FLOAT4_STEP),
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


def _unpack(kind: Quantization, blocks: np.ndarray, out: np.ndarray) -> None:
    """Write the values of blocks (B, nbytes) into a flat array, for `widened`."""
    out[...] = kind.unpack(blocks).reshape(-1)


STORED |= {
    name: Stored(f"({kind.nbytes},)u1", np.float32, partial(_unpack, kind), kind.values)
    for name, kind in QUANTIZED.items()
}
