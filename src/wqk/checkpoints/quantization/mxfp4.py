"""Experts of gpt-oss: two 4-bit floats in a byte, with an exponent for each 32 of them.

Stored are (E, O, G, 16) bytes; the matrix is transposed as the model holds it, (E, I, O).
"""

from __future__ import annotations

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    QuantizedMatrix,
    nibbles,
    powers_of_two,
)
from wqk.checkpoints.quantization.module import Module
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    Companion,
    Effect,
    QuantizedFormat,
    Signature,
    keys,
)


def _open(module: Module, settings: None) -> QuantizedMatrix:
    experts, outputs, groups, half = module.shape("_blocks", "U8", axes=4)
    module.require("_scales", (experts, outputs, groups), "U8")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = powers_of_two(stored["scales"])
        blocks = FLOAT4[nibbles(stored["codes"])] * scales[..., None]
        return np.asarray(blocks.reshape(len(rows), outputs, -1).swapaxes(1, 2))

    return module.matrix(
        "MXFP4",
        (experts, groups * 2 * half, outputs),
        grid=Grid(2 * half, FLOAT4_STEP),
        components={
            "codes": module.component("_blocks", 1),
            "scales": module.component("_scales", 1),
        },
        values=values,
    )


def _settings(settings: Settings) -> None:
    return None


MXFP4 = QuantizedFormat(
    name="MXFP4 of gpt-oss",
    methods=frozenset({"mxfp4", ""}),
    signatures=(Signature("_blocks", frozenset({"U8"}), ("_scales",), weight=""),),
    companions=(
        Companion("_blocks", Effect.VALUES, "codes", "always"),
        Companion("_scales", Effect.VALUES, "exponents", "always"),
        Companion("_bias", Effect.NONE, "bias of the experts, a tensor of its own"),
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        *keys(
            Effect.NONE,
            "modules that are stored plain, and what is done on loading",
            "modules_to_not_convert dequantize",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="transformers 5.23's conversion, bit for bit",
)
