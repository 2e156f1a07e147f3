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

# By the type that values are stored in: the types that they may have been rounded to before.
NARROWER = {
    "F64": ("F8_E5M2", "F8_E4M3", "BF16", "F16", "F32"),
    "F32": ("F8_E5M2", "F8_E4M3", "BF16", "F16"),
    "F16": ("F8_E5M2", "F8_E4M3", "BF16"),
    "BF16": ("F8_E5M2", "F8_E4M3"),
}
# Bits of the mantissa of float8 types. Fewer different sizes are not taken for float8: ternary
# weights, gains of one and weights of four bits lie on these grids, too.
MANTISSA = {"F8_E4M3": 3, "F8_E5M2": 2}
LEAST_SIZES = 20
# Relative distance of two numbers that were rounded to bfloat16.
TWICE_ROUNDED = 2.0**-7

# Values that are tested first: if a narrower type cannot hold them, the rest need not be tested.
FEW = 4096


def rounding_of(block: Block, factor: Factor, side: Side, roundings: float = 1.0) -> float:
    """Return half the distance of neighboring stored numbers of a side, relative to the numbers.

    Parameters
    ----------
    block, factor, side
        The block, and the weights and the plan of one of its sides.
    roundings
        Number of rounded factors in the product that makes a stored weight.
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
    """Return the coarsest number type for these values, possibly narrower than the stored type.

    Examples
    --------
    >>> grid("F32", np.array([1.0, 0.3], np.float16).astype(np.float32))
    'F16'
    """
    if dtype not in NARROWER:
        return dtype
    flat = values.ravel("K")
    coarsest = dtype
    for tested in (flat[:FEW], flat):
        candidates = (kind for kind in NARROWER[dtype] if lies_on(tested, kind))
        coarsest = next(candidates, dtype)
        if coarsest == dtype:
            return dtype
    return coarsest if flat.any() else dtype


def lies_on(values: np.ndarray, kind: str) -> bool:
    """Return whether a narrower type represents all values; float8, up to one scale."""
    if kind in MANTISSA:
        return _lies_on_float8(values, kind)
    single = values.astype(np.float32)
    with np.errstate(over="ignore"):
        narrow = single.astype(np.float16) if kind == "F16" else single
    has_more_bits = kind == "BF16" and (single.view(np.uint32) & 0xFFFF).any()
    return not has_more_bits and np.array_equal(values, narrow)


def _lies_on_float8(values: np.ndarray, kind: str) -> bool:
    """Return whether values are float8 values times one scale, rounded to bfloat16.

    Examples
    --------
    >>> steps = np.arange(8, 16) * 2.0 ** np.arange(-9, 0)[:, None]
    >>> lies_on(0.3 * steps, "F8_E4M3"), lies_on(np.linspace(1, 2, 72), "F8_E4M3")
    (True, False)
    """
    sizes = np.abs(values[values != 0].astype(np.float64)).ravel()
    if not np.isfinite(sizes).all() or len(np.unique(sizes[:FEW])) < LEAST_SIZES:
        return False
    largest = sizes.max()
    normal = sizes[sizes > largest * 2.0**-12]  # subnormal numbers have wider steps
    steps = 2 ** MANTISSA[kind]
    for numerator in range(steps, 2 * steps):
        for sample in (normal[:FEW], normal):  # most scales fail at once
            fractions, exponents = np.frexp(sample * (numerator / largest))
            mantissas = 2 * steps * fractions
            rounded = np.round(mantissas)
            fits = (np.abs(mantissas - rounded) <= TWICE_ROUNDED * mantissas).all()
            # For nearly equal values, grids cannot be distinguished.
            fits = fits and len(np.unique(np.ldexp(rounded, exponents))) >= LEAST_SIZES
            if not fits:
                break
        if fits:
            return True
    return False


def rounding_at_zero(kind: str, values: np.ndarray) -> float:
    """Return half the distance of a type's numbers next to zero, for values of this type."""
    if kind not in MANTISSA:
        return AT_ZERO.get(kind, 0.0)
    sizes = np.abs(values[values != 0])
    if not sizes.size:
        return 0.0
    smallest = float(sizes.min())
    multiples = sizes[sizes < 2 ** MANTISSA[kind] * smallest] / smallest
    # Next to zero, numbers of a type have equal distances, or the type has smaller numbers.
    are_subnormal = (np.abs(multiples - np.round(multiples)) <= 2 * TWICE_ROUNDED * multiples).all()
    return smallest / 2 if are_subnormal else 0.0


def rounding_in(info: TensorInfo, values: np.ndarray) -> float:
    """Return half the distance of neighboring stored numbers, relative to the weight's values."""
    if info.grid:
        return info.grid.rounding(values)
    kind = grid(info.dtype, values)
    relative = ROUNDING.get(kind, ROUNDING["F8_E5M2"])
    at_zero = rounding_at_zero(kind, values)
    flat = values.ravel("K")
    if not at_zero or not flat.size:
        return relative
    size = float(np.sqrt(np.vdot(flat, flat) / flat.size))  # root mean square
    return max(relative, at_zero / size) if size else relative
