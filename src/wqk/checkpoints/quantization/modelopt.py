"""NVIDIA's ModelOpt: 8-bit floats, whole numbers, and NVFP4 with its second scale.

The block scales of NVFP4 are multiplied by ``weight_scale_2``. (compressed-tensors divides them by
the reciprocal, under another name.) Inputs are multiplied by ``pre_quant_scale`` before they meet
the weight, so that the columns of the weight that the model attends with have these factors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.float8 import FLOAT8, float8_matrix
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    QuantizedMatrix,
    group_size,
    nibbles,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import FLOATS, Module, size
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
from wqk.errors import CheckpointError, shown

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
            raise merged.error(f"{name} and quantization.{name} differ")
    algorithm = merged.word("quant_algo")
    if algorithm not in ALGORITHMS:
        raise merged.error(
            f"quant_algo = {shown(algorithm)} stores weights in a way that is not read; use the "
            "original checkpoint, or dequantize it first"
        )
    return ModelOptSettings(
        codes=ALGORITHMS[algorithm],
        group=merged.whole("group_size"),
    )


def _open(module: Module, settings: ModelOptSettings) -> QuantizedMatrix:
    dtype = module.info(".weight").dtype
    if settings.codes and not dtype.startswith(settings.codes):
        raise CheckpointError(
            f"{module.name('.weight')} has the type {dtype}, and quant_algo stores {settings.codes}"
        )
    if dtype == "U8":
        matrix = _nvfp4(module, settings)
    elif dtype == "I8":
        matrix = _integers(module)
    else:
        matrix = float8_matrix(module, ".weight_scale")
    return with_input_scales(module, matrix)


def _nvfp4(module: Module, settings: ModelOptSettings) -> QuantizedMatrix:
    """4-bit floats, two in a byte, under scales in float8 under one scale."""
    outputs, half = module.shape(".weight", "U8")
    scales = module.shape(".weight_scale", "F8_E4M3")
    if scales[0] != outputs:
        raise CheckpointError(
            f"{module.name('.weight_scale')} of shape {scales} for {outputs} outputs"
        )
    shared = group_size(2 * half, scales[1], module.name(".weight_scale"))
    if settings.group not in (None, shared):
        raise CheckpointError(
            f"{module.name('.weight_scale')} of shape {scales} has groups of {shared}, and the "
            f"configuration sets {settings.group}"
        )
    if size(module.shape(".weight_scale_2", "F32", axes=None)) != 1:
        raise CheckpointError(f"{module.name('.weight_scale_2')} must be one number")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = stored["scales"] * stored["global"].reshape(())
        return scaled(FLOAT4[nibbles(stored["codes"])], scales)

    return module.matrix(
        "NVFP4",
        (outputs, 2 * half),
        grid=Grid(shared, FLOAT4_STEP),
        components={
            "codes": module.component(".weight", 1),
            "scales": module.component(".weight_scale", 1),
            "global": module.component(".weight_scale_2"),
        },
        values=values,
    )


def _integers(module: Module) -> QuantizedMatrix:
    """Whole numbers of 8 bits, with one scale for each row or for all."""
    outputs, inputs = module.shape(".weight", "I8")
    scales = module.shape(".weight_scale", FLOATS, axes=None)
    if size(scales) not in (1, outputs) or scales[0] not in (1, outputs):
        raise CheckpointError(
            f"{module.name('.weight_scale')} of shape {scales} for {outputs} outputs"
        )
    by_row = int(size(scales) == outputs)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        steps = np.broadcast_to(stored["scales"].reshape(-1, 1), (len(rows), 1))
        return scaled(stored["codes"], steps)

    return module.matrix(
        "INT 8-bit",
        (outputs, inputs),
        grid=uniform_grid(8, inputs),
        components={
            "codes": module.component(".weight", 1),
            "scales": module.component(".weight_scale", by_row),
        },
        values=values,
    )


def with_input_scales(module: Module, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Multiply the columns of a matrix by ``pre_quant_scale``, if it is there."""
    if not module.has(".pre_quant_scale"):
        return matrix
    module.require(".pre_quant_scale", (matrix.info.shape[1],), FLOATS)
    components = {**matrix.components, "inputs": module.component(".pre_quant_scale")}
    inner: Callable[[Arrays, np.ndarray], np.ndarray] = matrix.values

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        return np.asarray(inner(stored, rows) * stored["inputs"])

    nbytes = matrix.info.nbytes + module.info(".pre_quant_scale").nbytes
    info = matrix.info._replace(nbytes=nbytes)
    return replace(matrix, info=info, components=components, values=values)


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
