"""Rounding of stored weights: number types, and the precision of the factors of a form."""

from __future__ import annotations

import numpy as np

from wqk.attention.block import Block
from wqk.attention.factors import Factor
from wqk.checkpoints import TensorInfo
from wqk.families import Projection, Side

# Of each floating type: half the distance of neighboring numbers, relative to them (IEEE 754).
ROUNDING = {
    "F64": 2.0**-53,
    "F32": 2.0**-24,
    "F16": 2.0**-11,
    "BF16": 2.0**-8,
    "F8_E4M3": 2.0**-4,
    "F8_E5M2": 2.0**-3,
}
# The same at zero, where it is not relative.
AT_ZERO = {"F16": 2.0**-25}


def rounding_of(block: Block, factor: Factor, side: Side, roundings: float = 1.0) -> float:
    """Half the distance of neighboring stored numbers of a side, relative to them.

    ``roundings`` is of how many rounded factors it is the product.
    """
    whole = isinstance(side.projection, Projection)
    found = [0.0]
    for part in side.projection.roles.values():  # of a product, each factor
        info, values = block.checkpoint.info(part.name), factor.stored_weight
        values = np.asarray(values if whole else block.read([part])[0])
        # Beside quantized weights, gains are stored as floats.
        found.append(rounding_in(info, values) * (1.0 if info.grid else roundings**0.5))
    return max(found)


def grid(dtype: str, values: np.ndarray) -> str:
    """The coarsest type that holds these values, where they are stored in a wider one.

    Examples
    --------
    >>> grid("F32", np.array([1.0, 0.3], np.float16).astype(np.float32))
    'F16'
    """
    if dtype not in ("F64", "F32", "F16"):
        return dtype
    flat, found = values.ravel("K"), dtype
    for some in (flat[:4096], flat):  # most weights fail at once
        kinds = ("BF16", *(("F16",) * (dtype != "F16")), *(("F32",) * (dtype == "F64")))
        found = next((kind for kind in kinds if lies_on(some, kind)), dtype)
        if found == dtype:
            return dtype
    return found if flat.any() else dtype


def lies_on(values: np.ndarray, kind: str) -> bool:
    """Whether a narrower type holds all of these values."""
    single = values.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = single.astype(np.float16) if kind == "F16" else single
    coarse = kind == "BF16" and (single.view(np.uint32) & 0xFFFF).any()
    return not coarse and np.array_equal(values, narrow)


def rounding_in(info: TensorInfo, values: np.ndarray) -> float:
    """Half the distance of neighboring stored numbers, relative to the weight's values."""
    if info.grid:
        return info.grid.rounding(values)
    kind = grid(info.dtype, values)
    relative, at_zero = ROUNDING.get(kind, ROUNDING["F8_E5M2"]), AT_ZERO.get(kind, 0.0)
    flat = values.ravel("K")
    size = float(np.sqrt(np.vdot(flat, flat) / flat.size)) if at_zero and flat.size else 0.0
    return max(relative, at_zero / size if size else 0.0)
