"""Rounding of stored weights: number types, and the precision of the factors of a form."""

from __future__ import annotations

import numpy as np

from wqk.attention.block import Block
from wqk.attention.factors import Factor
from wqk.checkpoints import TensorInfo
from wqk.families import Projection, Side

# Half the distance of neighboring numbers of a type, relative to the numbers (IEEE 754).
ROUNDING = {
    "F64": 2.0**-53,
    "F32": 2.0**-24,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4,
    "F8_E5M2": 2.0**-3,
}
# Half the distance of the numbers next to zero, which is absolute.
AT_ZERO = {"F16": 2.0**-25}

# Values that are tested first: if a narrower type cannot hold them, the rest need not be tested.
FEW = 4096


def rounding_of(block: Block, factor: Factor, side: Side, roundings: float = 1.0) -> float:
    """Return half the distance of neighboring stored numbers of a side, relative to them.

    Parameters
    ----------
    block, factor, side
        The block, and the weights and the plan of one of its sides.
    roundings
        Number of rounded factors whose product a stored weight is.
    """
    is_stored = isinstance(side.projection, Projection)
    largest = 0.0
    for part in side.projection.roles.values():  # a composed projection has several factors
        info = block.checkpoint.info(part.name)
        values = factor.stored_weight if is_stored else block.read([part])[0]
        rounding = rounding_in(info, np.asarray(values))
        if not info.grid:  # the gains of quantized weights are stored as floats, and rounded once
            rounding *= roundings**0.5
        largest = max(largest, rounding)
    return largest


def grid(dtype: str, values: np.ndarray) -> str:
    """Return the coarsest number type that holds these values, which may be narrower than stored.

    Examples
    --------
    >>> grid("F32", np.array([1.0, 0.3], np.float16).astype(np.float32))
    'F16'
    """
    narrower = {"F64": ("BF16", "F16", "F32"), "F32": ("BF16", "F16"), "F16": ("BF16",)}
    if dtype not in narrower:
        return dtype
    flat = values.ravel("K")
    coarsest = dtype
    for tested in (flat[:FEW], flat):
        candidates = (kind for kind in narrower[dtype] if lies_on(tested, kind))
        coarsest = next(candidates, dtype)
        if coarsest == dtype:
            return dtype
    return coarsest if flat.any() else dtype


def lies_on(values: np.ndarray, kind: str) -> bool:
    """Return whether a narrower type holds all of these values."""
    single = values.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = single.astype(np.float16) if kind == "F16" else single
    has_more_bits = kind == "BF16" and (single.view(np.uint32) & 0xFFFF).any()
    return not has_more_bits and np.array_equal(values, narrow)


def rounding_in(info: TensorInfo, values: np.ndarray) -> float:
    """Return half the distance of neighboring stored numbers, relative to the weight's values."""
    if info.grid:
        return info.grid.rounding(values)
    kind = grid(info.dtype, values)
    relative = ROUNDING.get(kind, ROUNDING["F8_E5M2"])
    at_zero = AT_ZERO.get(kind, 0.0)
    flat = values.ravel("K")
    if not at_zero or not flat.size:
        return relative
    size = float(np.sqrt(np.vdot(flat, flat) / flat.size))  # root mean square
    return max(relative, at_zero / size) if size else relative
