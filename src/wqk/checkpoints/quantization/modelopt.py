"""NVIDIA's ModelOpt: 8-bit floats, whole numbers, and NVFP4 with its second scale.

Tensors of a weight (O, I) in NVFP4, with G groups of I/G columns:

- ``weight`` (O, I/2), bytes: two 4-bit floats (E2M1) in a byte, the left column in the low bits;
- ``weight_scale`` (O, G), 8-bit floats (E4M3);
- ``weight_scale_2``, one float32.

A value is float4 · weight_scale · weight_scale_2. (compressed-tensors divides the scales by the
reciprocal, under another name.) 8-bit floats are read by `wqk.checkpoints.quantization.float8`;
whole numbers are ``weight`` (O, I) with ``weight_scale``, (O,) or one number.

Inputs are multiplied by ``pre_quant_scale`` (I,) before the weight. Therefore the columns of the
effective weight have these factors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.float8 import FLOAT8, float8_matrix
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    QuantizedMatrix,
    nibbles,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import (
    CORRECT,
    DEQUANTIZE,
    FLOATS,
    Module,
    size,
    with_column_factors,
)
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    ACTIVATIONS,
    BIAS,
    Companion,
    Effect,
    QuantizedFormat,
    Signature,
    keys,
)
from wqk.errors import shown

# Algorithms whose weights are read, and the stored type of the codes of each.
ALGORITHMS = {
    "": "",
    "fp8": "F8",
    "fp8_pb_wo": "F8",
    "fp8_per_channel_per_token": "F8",
    "nvfp4": "U8",
    "nvfp4_awq": "U8",
    "w4a16_nvfp4": "U8",
    "w4a8_nvfp4_fp8": "U8",
    "w8a8_sq_per_channel": "I8",
    "w8a16": "I8",
    "mixed_precision": "",
}


@dataclass(frozen=True)
class ModelOptSettings:
    """Stored type of the codes, and columns of a group; empty or None if not set."""

    codes: str = ""
    group: int | None = None


def _settings(settings: Settings) -> ModelOptSettings:
    nested = settings.values.get("quantization")
    inner = nested if isinstance(nested, dict) else {}
    merged = replace(settings, values={**inner, **settings.values})
    for name in ("quant_method", "quant_algo", "group_size"):  # the others have no effect
        in_both = name in inner and name in settings.values
        if in_both and inner[name] != settings.values[name]:
            raise merged.error(
                f"{name} and quantization.{name} differ ({shown(settings.values[name])} and "
                f"{shown(inner[name])}); expected one value; {CORRECT}"
            )
    algorithm = merged.word("quant_algo")
    if algorithm not in ALGORITHMS:
        raise merged.error(
            f"quant_algo = {shown(algorithm)} stores weights in a way that is not read; expected "
            f"one of {', '.join(filter(None, ALGORITHMS))}; {DEQUANTIZE}"
        )
    return ModelOptSettings(
        codes=ALGORITHMS[algorithm],
        group=merged.whole("group_size"),
    )


def _open(module: Module, settings: ModelOptSettings) -> QuantizedMatrix:
    dtype = module.info(".weight").dtype
    if settings.codes and not dtype.startswith(settings.codes):
        raise module.error(
            ".weight",
            "has another type than quant_algo of the configuration stores",
            expected=f"{settings.codes}, or a type that begins so",
            actual=dtype,
            remedy=CORRECT,
        )
    if dtype == "U8":
        matrix = _nvfp4(module, settings)
    elif dtype == "I8":
        matrix = int8_matrix(module)
    else:
        matrix = float8_matrix(module, ".weight_scale")
    return with_input_scales(module, matrix)


def _nvfp4(module: Module, settings: ModelOptSettings) -> QuantizedMatrix:
    """Return a weight in NVFP4: 4-bit floats, with scales in float8 and one common scale."""
    outputs, row_bytes = module.shape(".weight", "U8")
    inputs = 2 * row_bytes
    columns_of_group = module.group_width(".weight_scale", "F8_E4M3", (outputs, inputs))
    module.require_group_width(".weight_scale", settings.group, columns_of_group)
    global_shape = module.shape(".weight_scale_2", "F32", axes=None)
    if size(global_shape) != 1:
        raise module.error(
            ".weight_scale_2", "is not one scale of all", expected="one number", actual=global_shape
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = stored["scales"] * stored["global"].reshape(())
        return scaled(FLOAT4[nibbles(stored["codes"])], scales)

    return module.matrix(
        "NVFP4",
        (outputs, inputs),
        grid=Grid(columns_of_group, FLOAT4_STEP),
        components={
            "codes": module.component(".weight", 1),
            "scales": module.component(".weight_scale", 1),
            "global": module.component(".weight_scale_2"),
        },
        values=values,
    )


def int8_matrix(module: Module) -> QuantizedMatrix:
    """Return a weight of whole numbers of 8 bits, with a scale for each row, or one scale."""
    outputs, inputs = module.shape(".weight", "I8")
    scales_shape = module.shape(".weight_scale", FLOATS, axes=None)
    is_single = size(scales_shape) == 1
    is_by_row = size(scales_shape) == outputs and scales_shape[:1] == (outputs,)
    if not is_single and not is_by_row:
        raise module.error(
            ".weight_scale",
            "fits neither all of the weight nor its rows",
            expected=f"1 or {outputs} scales",
            actual=f"the shape {scales_shape}",
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = np.broadcast_to(stored["scales"].reshape(-1, 1), (len(rows), 1))
        return scaled(stored["codes"], scales)

    return module.matrix(
        "INT 8-bit",
        (outputs, inputs),
        grid=uniform_grid(8, inputs),
        components={
            "codes": module.component(".weight", 1),
            "scales": module.component(".weight_scale", rows=0 if is_single else 1),
        },
        values=values,
    )


def with_input_scales(module: Module, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix (O, I) whose columns are multiplied by ``pre_quant_scale``, if stored."""
    if not module.has(".pre_quant_scale"):
        return matrix
    module.require(".pre_quant_scale", (matrix.info.shape[1],), FLOATS)
    return with_column_factors(module, matrix, ".pre_quant_scale")


MODELOPT = QuantizedFormat(
    name="ModelOpt",
    methods=frozenset({"modelopt", "modelopt_fp4", "modelopt_mixed", "nvfp4", ""}),
    signatures=(
        Signature(".weight", frozenset({"U8"}), (".weight_scale_2", ".weight_scale")),
        Signature(".weight", FLOAT8 | {"I8"}, (".weight_scale",)),
    ),
    companions=(
        Companion(".weight", Effect.VALUES, "codes", "always"),
        Companion(".weight_scale", Effect.VALUES, "scales", "always"),
        Companion(".weight_scale_2", Effect.VALUES, "factor of the scales", "NVFP4"),
        Companion(".pre_quant_scale", Effect.VALUES, "factors of the inputs"),
        BIAS,
        *ACTIVATIONS,
        Companion(".k_bias", Effect.NONE, "offset of cached keys"),
        Companion(".v_bias", Effect.NONE, "offset of cached values"),
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        *keys(Effect.CHECKED, "algorithm: type of the codes", "quant_algo quantization.quant_algo"),
        *keys(Effect.CHECKED, "columns of a group", "group_size quantization.group_size"),
        *keys(
            Effect.NONE,
            "scaled inputs; the factors are stored, or folded into the norm before",
            "pre_quant_scale quantization.pre_quant_scale",
        ),
        *keys(
            Effect.REFUSED,
            "zero points",
            "has_zero_point quantization.has_zero_point",
        ),
        *keys(
            Effect.NONE,
            "inputs, caches, provenance, and modules that are stored plain",
            "config_groups ignore exclude_modules kv_cache_scheme kv_cache_quant_algo producer "
            "quantized_layers quantization.exclude_modules quantization.kv_cache_quant_algo "
            "quantization.quantized_layers modules_to_not_convert",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="ModelOpt 0.47.0's formulas in float64",
)
