"""The number types of stored tensors, and how each becomes float32.

Half precision and 8-bit floats are widened piece by piece, so that the stored bytes of a whole
tensor are never in memory next to its values.

8-bit floats mean nothing without their scales, by which the stored values are multiplied. Two
conventions are in use: ``weight_scale_inv`` (DeepSeek) has one factor for each block of the matrix,
of the configuration's ``weight_block_size`` or else 128 × 128; ``weight_scale`` has one for the
tensor, each row, or each block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np

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


# safetensors' name -> stored type, widened type, conversion of one piece.
_READERS: dict[str, tuple[str, type, Callable[[np.ndarray, np.ndarray], None]]] = {
    "F64": ("<f8", np.float64, _copy),
    "F32": ("<f4", np.float32, _copy),
    "F16": ("<u2", np.float32, _from_float16),
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
    code, _, convert = _READERS[dtype]
    stored = np.dtype(code)
    out: np.ndarray = np.empty(sum(b - a for a, b in ranges) // stored.itemsize, wide)
    buffer = np.empty(0 if stored == out.dtype else min(READ, out.size), stored)
    filled = 0
    for start, stop in ranges:
        values = out[filled : filled + (stop - start) // stored.itemsize]
        filled += values.size
        if stored == out.dtype:
            read(start, _bytes_of(values))
            continue
        for done in range(0, values.size, READ):
            codes = buffer[: values.size - done]
            read(start + done * stored.itemsize, _bytes_of(codes))
            for first in range(0, codes.size, PIECE):
                piece = codes[first : first + PIECE]
                convert(piece, values[done + first : done + first + piece.size])
    return out


def _bytes_of(array: np.ndarray) -> memoryview:
    """The memory of a contiguous array, to be read into."""
    return array.view(np.uint8).data


def scale_name(name: str, tensors: Mapping[str, object]) -> str:
    """The tensor that holds the scales of the float8 tensor ``name``."""
    for suffix in ("_scale_inv", "_scale"):
        if name + suffix in tensors:
            return name + suffix
    raise CheckpointError(
        f"{name}: stored as float8 without its scales ({name}_scale_inv or {name}_scale); "
        "without them its values are meaningless"
    )


def apply_scales(
    values: np.ndarray,
    scales: np.ndarray,
    shape: Sequence[int],
    rows: Sequence[tuple[int, int]],
    name: str,
    block: tuple[int, int] | None = None,
) -> None:
    """Multiply ``values``, the widened rows of a float8 matrix, by their scales, in place.

    ``shape`` is that of the whole matrix, ``rows`` are those of it that were read. ``scales``, from
    the tensor ``name``, are one value, (rows,), (rows, 1) or a grid of blocks (row blocks, column
    blocks); ``block`` is a block's height and width, where the configuration says them.

    Examples
    --------
    >>> values = np.ones((2, 4), np.float32)
    >>> apply_scales(values, np.array([[1.0, 2.0], [3.0, 4.0]]), (4, 4), [(1, 3)], "scales")
    >>> values
    array([[1., 1., 2., 2.],
           [3., 3., 4., 4.]], dtype=float32)
    """
    if scales.size == 1:
        values *= scales.reshape(())
        return
    grid = scales.reshape(-1, 1) if scales.shape == tuple(shape[:1]) else scales
    if grid.ndim != 2 or len(shape) != 2:
        raise CheckpointError(f"{name}: scales of shape {scales.shape} for a tensor of {shape}")
    height, width = (
        _block_side(n, blocks, side, name)
        for n, blocks, side in zip(shape, grid.shape, block or (128, 128), strict=True)
    )
    wanted = np.concatenate([np.arange(start, stop) for start, stop in rows]) // height
    columns = np.arange(shape[1]) // width
    for block in np.unique(wanted):
        values[wanted == block] *= grid[block][columns].astype(values.dtype)


def block_of(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Height and width of the blocks that share a scale, if the configuration says them.

    Examples
    --------
    >>> block_of({"quantization_config": {"weight_block_size": [64, 32]}})
    (64, 32)
    """
    quantization = config.get("quantization_config")
    match quantization.get("weight_block_size") if isinstance(quantization, dict) else None:
        case [int(height), int(width)] if height > 0 and width > 0:
            return height, width
    return None


def _block_side(length: int, blocks: int, side: int, name: str) -> int:
    """Length of a block's side: the expected one, perhaps with a shorter last block, or exact."""
    if math.ceil(length / side) == blocks:
        return side
    side, rest = divmod(length, blocks) if blocks else (0, length)
    if rest:
        raise CheckpointError(f"{name}: {blocks} blocks of scales do not divide {length} evenly")
    return side
