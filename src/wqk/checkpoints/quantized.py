"""Quantized blocks of GGUF files: whole numbers of a few bits, with scales for every 16 or 32.

A block of ``Q8_0`` has a factor d for 32 values, v = d q; ``Q4_1`` also an offset. A block of the
K-quants has 256 values in sub-blocks, whose scales are whole numbers themselves, with one factor
for all. What the bits mean is defined by ggml's ``ggml-quants.c``.

Axes: B blocks, S sub-blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from wqk._typing import Float


class Quantization(NamedTuple):
    """How one type stores its values."""

    values: int  # in a block
    nbytes: int  # of a block
    unpack: Callable[[np.ndarray], np.ndarray]  # (B, nbytes) to (B, values)
    shared: int  # values that share a scale
    steps: float  # distance of neighboring values, as a share of the largest one with this scale


def rounding(kind: str, values: Float[np.ndarray, ...]) -> float:
    """Half the distance of neighboring values of a quantized tensor, relative to the values.

    As a root mean square over all scales; 0 for a tensor of zeros.

    Examples
    --------
    >>> round(rounding("Q8_0", np.ones(32)), 4)
    0.0039
    """
    chosen = QUANTIZED[kind]
    largest = np.abs(values.reshape(-1, chosen.shared)).max(axis=1).astype(np.float64)
    size = float(np.mean(np.square(values, dtype=np.float64)))
    half = chosen.steps / 2
    return half * float(np.sqrt(np.mean(largest**2) / size)) if size else 0.0


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
}
