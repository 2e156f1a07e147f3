"""8-bit floats, whose values mean nothing without their scales.

There is one scale for the tensor, for each row, or for each block: of 128 × 128 (DeepSeek), or of
the configured size. ``weight_scale_inv`` and ``weight_scale`` are both multiplied with the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    powers_of_two,
    scaled,
)
from wqk.checkpoints.quantization.module import FLOATS, Module, size
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

# Blocks of DeepSeek's models, whose first configurations left their size out.
DEFAULT_BLOCK = (128, 128)


@dataclass(frozen=True)
class Float8Settings:
    """Rows and columns of a block, and the type of the codes; None or empty if not set."""

    block: tuple[int, int] | None = None
    kind: str = ""


def _settings(settings: Settings) -> Float8Settings:
    sides = settings.get("weight_block_size")
    match sides:
        case None:
            block = None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            block = (high, wide)
        case _:
            raise settings.error(f"weight_block_size must be rows and columns, got {shown(sides)}")
    kind = settings.word("fmt")
    if kind not in ("", "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"):
        raise settings.error(f"fmt = {shown(kind)} is not a type of 8-bit floats that is known")
    return Float8Settings(block, kind.removeprefix("float8_").removesuffix("fn"))


def _open(module: Module, settings: Float8Settings) -> QuantizedMatrix:
    dtype = module.info(module.codes).dtype
    if settings.kind and f"F8_{settings.kind.upper()}" != dtype:
        raise CheckpointError(
            f"{module.name(module.codes)} has the type {dtype}, and the configuration sets "
            f"{settings.kind}"
        )
    endings = [f"{module.codes}{end}" for end in ("_scale_inv", "_scale")]
    scales = [ending for ending in endings if module.has(ending)]
    if len(scales) > 1:
        raise CheckpointError(
            f"{module.name(scales[0])} and {module.name(scales[1])} are both there, and a weight "
            "has the scales of one of them"
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
    """Return a tensor of 8-bit floats with its scales.

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
    """
    info = module.info(module.codes)
    name = module.name(ending)
    kind, stored_shape = module.info(ending).dtype, module.info(ending).shape
    exponents = kind == "F8_E8M0" or (kind == "U8" and exponents_in_bytes)
    if not exponents and kind not in (*FLOATS.split(), "F64"):
        raise CheckpointError(
            f"{name}: scales must have a floating-point type ({FLOATS.replace(' ', ', ')}), "
            f"got {kind}"
        )
    shape = stored_shape
    if size(shape) == 1:
        shape = (1,) * len(info.shape)
    elif shape == info.shape[:1]:
        shape = (*shape, 1)
    if len(shape) != len(info.shape) or (size(shape) > 1 and len(shape) != 2):
        raise CheckpointError(f"{name}: scales of shape {shape} for a tensor of {info.shape}")
    _require_strategy(name, strategy, info.shape, shape)
    if block is None and not strategy and len(shape) == 2:
        _require_one_reading(name, info.shape, shape)
    expected = block or DEFAULT_BLOCK
    is_configured = block is not None and size(shape) > 1
    sides = [
        _block_side(length, blocks, side, name, is_configured)
        for length, blocks, side in zip(info.shape, shape, expected, strict=False)
    ]

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = powers_of_two(stored["scales"]) if exponents else stored["scales"]
        if scales.size == 1:
            return np.asarray(stored["codes"] * scales.reshape(()).astype(np.float32))
        scale_rows = rows // sides[0]
        scale_columns = np.arange(info.shape[1]) // sides[1]
        scales_of_rows = scales.reshape(shape)[scale_rows]
        return scaled(stored["codes"], scales_of_rows, None, scale_columns)

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


def _require_strategy(
    name: str, strategy: str, weight: tuple[int, ...], scales: tuple[int, ...]
) -> None:
    """Raise `CheckpointError` if scales are not of the configured kind."""
    rows, columns = weight[:1], scales[1:]
    fits = {
        "tensor": size(scales) == 1,
        "channel": scales[:1] == rows and size(columns) == 1,
        "group": scales[:1] == rows,
    }
    if not fits.get(strategy, True):
        raise CheckpointError(
            f"{name}: scales of shape {scales} for a tensor of {weight}, and the configuration "
            f"sets the strategy {strategy}"
        )


def _require_one_reading(name: str, weight: tuple[int, ...], scales: tuple[int, ...]) -> None:
    """Raise `CheckpointError` if scales could lie along either axis, and nothing sets their blocks.

    Scales of the tensor, of rows, and of groups of a row are those that libraries write, and so are
    blocks of 128 × 128. Others are read if their transpose would not fit.
    """
    (outputs, inputs), (high, wide) = weight, scales
    blocks = tuple(
        math.ceil(length / side) for length, side in zip(weight, DEFAULT_BLOCK, strict=True)
    )
    is_transposed_row = scales == (1, outputs)
    if size(scales) == 1 or high == outputs or (scales == blocks and not is_transposed_row):
        return
    if high and wide and inputs % high == 0 and outputs % wide == 0:
        raise CheckpointError(
            f"{name}: scales of shape {scales} for a tensor of {weight} fit its rows as well as "
            "its columns, and which of them they are for, the file leaves open; expected "
            "weight_block_size in quantization_config"
        )


def _block_side(length: int, blocks: int, side: int, name: str, is_configured: bool) -> int:
    """Return the length of a block's side, of which the last block may have less.

    One block for all is as long as the tensor, and as many as there are entries are one entry each.
    """
    if blocks in (1, length) and not is_configured:
        return length // max(blocks, 1) or 1
    if math.ceil(length / side) == blocks:
        return side
    if is_configured:
        raise CheckpointError(
            f"{name}: {blocks} blocks of scales are not those of {length} in blocks of {side}, as "
            "the configuration sets them"
        )
    side, remainder = divmod(length, blocks) if blocks else (0, length)
    if remainder:
        raise CheckpointError(f"{name}: {blocks} blocks of scales do not divide {length} evenly")
    return side


_COMPANIONS = tuple(
    Companion(f"{codes}{end}", effect, meaning, required)
    for codes in (".weight", "")
    for end, effect, meaning, required in (
        ("", Effect.VALUES, "8-bit floats", "always"),
        ("_scale_inv", Effect.VALUES, "scales, multiplied", "or weight_scale"),
        ("_scale", Effect.VALUES, "scales, multiplied", "or weight_scale_inv"),
    )
)

FLOAT8_FORMAT = QuantizedFormat(
    name="FP8",
    methods=frozenset({"fp8", "fbgemm_fp8", ""}),
    signatures=(
        Signature(".weight", FLOAT8, (".weight_scale_inv", ".weight_scale")),
        Signature("", FLOAT8, ("_scale_inv", "_scale"), weight=""),
    ),
    companions=(
        *_COMPANIONS,
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
