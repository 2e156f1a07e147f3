"""The number types of stored tensors, and how each becomes float32.

Half precision and 8-bit floats are widened piece by piece, so that the stored bytes of a whole
tensor are never in memory next to its values.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import numpy as np

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

# Bits of one stored value, by safetensors' name. Only floating types are scored, but headers list
# tensors of every type.
ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip

# Values widened at a time: 256 KB of float32, which stay in a core's cache.
PIECE = 2**16


@cache
def _values_of_codes(dtype: str) -> np.ndarray:
    """The float32 value of every code of a small type: looking up halves the time of converting."""
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


def _from_bfloat16(stored: np.ndarray, out: np.ndarray) -> None:
    """The upper half of a float32's bits."""
    np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)


def _copy(stored: np.ndarray, out: np.ndarray) -> None:
    out[...] = stored


# safetensors' name -> stored type, widened type, conversion of one piece.
_READERS: dict[str, tuple[str, type, Callable[[np.ndarray, np.ndarray], None]]] = {
    "F64": ("<f8", np.float64, _copy),
    "F32": ("<f4", np.float32, _copy),
    "F16": ("<u2", np.float32, _look_up("F16")),
    "BF16": ("<u2", np.float32, _from_bfloat16),
    "F8_E4M3": ("u1", np.float32, _look_up("F8_E4M3")),
    "F8_E5M2": ("u1", np.float32, _look_up("F8_E5M2")),
}


def is_float8(dtype: str) -> bool:
    """Whether the type is one of the 8-bit floats, whose values mean nothing without a scale."""
    return dtype in ("F8_E4M3", "F8_E5M2")


def widened_type(dtype: str, tensor: str) -> type:
    """float64 for a tensor stored as float64, float32 for every other floating type."""
    try:
        return _READERS[dtype][1]
    except KeyError:
        raise CheckpointError(
            f"{tensor}: weights are stored as {dtype}, which is not a floating-point type that wqk "
            f"reads ({', '.join(_READERS)}); a quantized model has to be dequantized first"
        ) from None


def widen(dtype: str, read: Callable[[int, memoryview], None], out: np.ndarray) -> None:
    """Fill ``out``, one-dimensional, contiguous and of `widened_type`, from stored bytes.

    ``read(offset, buffer)`` fills a buffer from this byte offset of the wanted run.
    """
    code, wide, convert = _READERS[dtype]
    stored = np.dtype(code)
    if stored == np.dtype(wide):
        read(0, _bytes_of(out))
        return
    buffer = np.empty(min(PIECE, out.size), stored)
    for start in range(0, out.size, PIECE):
        piece = buffer[: min(PIECE, out.size - start)]
        read(start * stored.itemsize, _bytes_of(piece))
        convert(piece, out[start : start + piece.size])


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, to be read into."""
    return array.view(np.uint8).data
