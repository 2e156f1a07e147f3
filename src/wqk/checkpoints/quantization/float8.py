"""8-bit floats with scales.

Tensors of a weight (O, I):

- ``weight`` (O, I), 8-bit floats: E4M3 (1 sign, 4 exponent, 3 mantissa bits) or E5M2;
- ``weight_scale_inv`` or ``weight_scale``, which both multiply the values: one number; (O,) or (O,
  1), for rows; or one number for each block of rows and columns. The size of a block is configured,
  or 128 × 128 (DeepSeek), or follows from the numbers of blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    ceil_divide,
    powers_of_two,
    scaled,
)
from wqk.checkpoints.quantization.module import (
    CORRECT,
    DEQUANTIZE,
    FLOATS,
    REQUANTIZE,
    Module,
    size,
)
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    ACTIVATIONS,
    BIAS,
    Companion,
    Effect,
    Key,
    QuantizedFormat,
    Signature,
    keys,
)
from wqk.errors import CheckpointError, shown

FLOAT8 = frozenset({"F8_E4M3", "F8_E5M2"})


class Block(NamedTuple):
    """Numbers of rows and columns that share a scale."""

    rows: int
    columns: int


# Blocks of DeepSeek's models; the first configurations lack the size.
DEFAULT_BLOCK = Block(128, 128)


@dataclass(frozen=True)
class Float8Settings:
    """Size of a block, and the type of the codes; None or empty if not set."""

    block: Block | None = None
    kind: str = ""


def _settings(settings: Settings) -> Float8Settings:
    sides = settings.get("weight_block_size")
    match sides:
        case None:
            block = None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            block = Block(high, wide)
        case _:
            raise settings.error(
                "weight_block_size must be rows and columns; expected a list of two positive "
                f"whole numbers, got {shown(sides)}; {CORRECT}"
            )
    kind = settings.word("fmt")
    if kind not in ("", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
        raise settings.error(
            f"fmt = {shown(kind)} is not a type of 8-bit floats that is known; expected e4m3 or "
            f"e5m2; {DEQUANTIZE}"
        )
    return Float8Settings(block, kind.removeprefix("float8_").removesuffix("fn"))


def _open(module: Module, settings: Float8Settings) -> QuantizedMatrix:
    dtype = module.info(module.codes).dtype
    if settings.kind and f"F8_{settings.kind.upper()}" != dtype:
        raise module.error(
            module.codes,
            "has another type than the configuration sets (fmt)",
            expected=settings.kind,
            actual=dtype,
            remedy=CORRECT,
        )
    endings = [f"{module.codes}{end}" for end in ("_scale_inv", "_scale")]
    scales = [ending for ending in endings if module.has(ending)]
    if len(scales) > 1:
        raise CheckpointError(
            f"{module.name(scales[0])} and {module.name(scales[1])} are both there; expected the "
            f"scales of a weight under one of the names; {REQUANTIZE}"
        )
    return float8_matrix(module, scales[0], block=settings.block)


def float8_matrix(
    module: Module,
    ending: str,
    *,
    block: tuple[int, int] | None = None,
    strategy: str = "",
    exponents_in_bytes: bool = False,
) -> QuantizedMatrix:
    """Return a tensor of 8-bit floats (O, I) with its scales; of any shape with one scale.

    Parameters
    ----------
    module, ending
        The module, and the end of the name of the scales.
    block
        Configured rows and columns of a block.
    strategy
        Configured kind of scales: ``tensor``, ``channel``, ``group``, ``block``; empty if not set.
    exponents_in_bytes
        Whether scales of type U8 are exponents.

    Raises
    ------
    CheckpointError
        Scales have another type, fit no blocks of the tensor, or fit both its rows and its columns.
    """
    info = module.info(module.codes)
    are_exponents = _are_exponents(module, ending, exponents_in_bytes)
    scales_shape = _shape_by_axis(module, ending)
    is_single = size(scales_shape) == 1
    _require_strategy(module, ending, strategy, scales_shape)
    if block is None and not strategy and len(scales_shape) == 2:
        _require_one_reading(module, ending, scales_shape)
    block_sides: list[int] = []
    if not is_single:
        for length, blocks, side in zip(
            info.shape, scales_shape, block or DEFAULT_BLOCK, strict=True
        ):
            block_sides.append(_block_side(module, ending, length, blocks, side, block is not None))

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = powers_of_two(stored["scales"]) if are_exponents else stored["scales"]
        if is_single:
            result: np.ndarray = stored["codes"] * scales.reshape(()).astype(np.float32)
            return result
        rows_of_block, columns_of_block = block_sides
        scales_of_rows = scales.reshape(scales_shape)[rows // rows_of_block]
        block_of_column = np.arange(info.shape[1]) // columns_of_block
        return scaled(stored["codes"], scales_of_rows, group_of=block_of_column)

    return module.matrix(
        info.dtype,
        info.shape,
        grid=None,
        components={
            "codes": module.component(module.codes, 1),
            "scales": module.component(ending),
        },
        values=values,
    )


def _are_exponents(module: Module, ending: str, exponents_in_bytes: bool) -> bool:
    """Return whether scales are exponents instead of numbers; `CheckpointError` for other types."""
    dtype = module.info(ending).dtype
    if dtype == "F8_E8M0" or (dtype == "U8" and exponents_in_bytes):
        return True
    float_types = (*FLOATS.split(), "F64")
    if dtype not in float_types:
        raise module.error(
            ending,
            "scales must have a floating-point type",
            expected=", ".join(float_types),
            actual=dtype,
        )
    return False


def _shape_by_axis(module: Module, ending: str) -> tuple[int, ...]:
    """Return the shape of scales with one length for each axis of the weight.

    A single scale has the lengths 1; scales of rows, (O,), are (O, 1).
    """
    weight_shape, stored_shape = module.info(module.codes).shape, module.info(ending).shape
    shape = stored_shape
    if size(stored_shape) == 1:
        shape = (1,) * len(weight_shape)
    elif stored_shape == weight_shape[:1]:
        shape = (*stored_shape, 1)
    if len(shape) != len(weight_shape) or (size(shape) > 1 and len(shape) != 2):
        raise module.error(
            ending,
            f"scales of shape {stored_shape} for a tensor of {weight_shape}",
            expected="one scale, or one for each row or block of a matrix",
            actual=f"the shape {stored_shape}",
        )
    return shape


def _require_strategy(
    module: Module, ending: str, strategy: str, scales_shape: tuple[int, ...]
) -> None:
    """Raise `CheckpointError` if scales are not of the configured kind."""
    weight_shape = module.info(module.codes).shape
    has_all_rows = scales_shape[:1] == weight_shape[:1]
    fits_strategy = {
        "tensor": size(scales_shape) == 1,
        "channel": has_all_rows and size(scales_shape[1:]) == 1,
        "group": has_all_rows,
    }
    if not fits_strategy.get(strategy, True):
        raise module.error(
            ending,
            f"scales of shape {scales_shape} for a tensor of {weight_shape}, and the configuration "
            f"sets the strategy {strategy}",
            expected=f"scales of the strategy {strategy}",
            actual=f"the shape {scales_shape}",
            remedy=CORRECT,
        )


def _require_one_reading(module: Module, ending: str, scales_shape: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if scales fit both axes, and no setting determines their blocks.

    Libraries write scales of the tensor, of rows, of groups of a row, and of blocks of 128 × 128.
    Other scales are accepted if their transpose does not fit.
    """
    weight_shape = module.info(module.codes).shape
    (outputs, inputs), (block_rows, block_columns) = weight_shape, scales_shape
    default_blocks = (
        ceil_divide(outputs, DEFAULT_BLOCK.rows),
        ceil_divide(inputs, DEFAULT_BLOCK.columns),
    )
    is_transposed_row = scales_shape == (1, outputs)
    has_default_blocks = scales_shape == default_blocks and not is_transposed_row
    if size(scales_shape) == 1 or block_rows == outputs or has_default_blocks:
        return
    is_empty = block_rows == 0 or block_columns == 0
    if not is_empty and inputs % block_rows == 0 and outputs % block_columns == 0:
        raise CheckpointError(
            f"{module.name(ending)}: scales of shape {scales_shape} for a tensor of {weight_shape} "
            "fit its rows as well as its columns, and which of them they are for, the file leaves "
            "open; expected weight_block_size in quantization_config, got none; set "
            "weight_block_size"
        )


def _block_side(
    module: Module, ending: str, length: int, blocks: int, side: int, is_configured: bool
) -> int:
    """Return the length of a block along one axis; the last block may be shorter.

    A single block is as long as the tensor; if blocks are as many as entries, a block is one entry.

    Parameters
    ----------
    module, ending
        The module, and the end of the name of the scales.
    length
        Length of the weight along the axis.
    blocks
        Number of scales along the axis.
    side
        Configured or usual length of a block.
    is_configured
        Whether the configuration sets the length.
    """
    if blocks in (1, length) and not is_configured:
        return length // max(blocks, 1) or 1
    if ceil_divide(length, side) == blocks:
        return side
    if is_configured:
        raise module.error(
            ending,
            f"{blocks} blocks of scales are not those of {length} in blocks of {side}, as the "
            "configuration sets them",
            expected=f"{ceil_divide(length, side)} blocks",
            actual=blocks,
            remedy=CORRECT,
        )
    if blocks == 0 or length % blocks:
        raise module.error(
            ending,
            f"{blocks} blocks of scales do not divide {length} evenly",
            expected=f"a divisor of {length}",
            actual=blocks,
        )
    return length // blocks


def _companions(codes: str) -> tuple[Companion, Companion, Companion]:
    """Return the stored tensors of a weight from codes with names of this ending."""
    return (
        Companion(codes, Effect.VALUES, "8-bit floats", "always"),
        Companion(f"{codes}_scale_inv", Effect.VALUES, "scales, multiplied", "or weight_scale"),
        Companion(f"{codes}_scale", Effect.VALUES, "scales, multiplied", "or weight_scale_inv"),
    )


FLOAT8_FORMAT = QuantizedFormat(
    name="FP8",
    methods=frozenset({"fp8", "fbgemm_fp8", ""}),
    signatures=(
        Signature(".weight", FLOAT8, (".weight_scale_inv", ".weight_scale")),
        Signature("", FLOAT8, ("_scale_inv", "_scale"), weight=""),
    ),
    companions=(
        *_companions(".weight"),
        *_companions(""),
        BIAS,
        Companion("_bias", Effect.NONE, "bias of experts, a tensor of its own"),
        Companion("_input_scale", Effect.NONE, "scale of quantized inputs"),
        Companion(".activation_scale", Effect.NONE, "scale of quantized inputs"),
        Companion(".input_scale_ub", Effect.NONE, "bound of the scales of inputs"),
        *ACTIVATIONS,
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        Key("weight_block_size", Effect.VALUES, "rows and columns of a block"),
        Key("fmt", Effect.CHECKED, "type of the 8-bit floats"),
        *keys(
            Effect.NONE,
            "inputs, kernels, and modules that are stored plain",
            "activation_scheme activation_scale_ub modules_to_not_convert modules_to_convert "
            "ignored_layers ignore dequantize scale_fmt expert_dtype kv_cache_scheme "
            "kv_cache_quant_method",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="the values times their scales in float64",
)
