"""8-bit floating-point weights: their scales found and applied, or the tensor refused.

Two conventions are in use: ``weight_scale_inv`` (DeepSeek) has one factor for each block of the
matrix, of the configuration's ``weight_block_size`` or else 128 × 128; ``weight_scale`` has one for
the tensor, each row, or each block. The stored values are multiplied by both.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
    """Multiply the rows of a float8 matrix by their scales, in place.

    Parameters
    ----------
    values
        The widened rows that were read, joined: (sum of row ranges, columns).
    scales
        One value, (rows,), (rows, 1) or a grid of blocks (row blocks, column blocks).
    shape
        Shape of the whole matrix.
    rows
        Which rows of it ``values`` are.
    name
        The scales' tensor, for the error.
    block
        Height and width of a block, where the configuration says them.

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
