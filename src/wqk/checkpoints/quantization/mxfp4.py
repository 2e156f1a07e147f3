"""Experts of gpt-oss: two 4-bit floats in a byte, with an exponent for every 32 floats.

Tensors of the weights of E experts, each (O, I) with G groups of 32 columns:

- ``_blocks`` (E, O, G, 16), bytes: two 4-bit floats (E2M1) in a byte, the left column in the low
  bits;
- ``_scales`` (E, O, G), bytes: exponents of two with 127 added (E8M0).

A value is float4 · 2^(exponent − 127). The matrix is (E, I, O), as in the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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

if TYPE_CHECKING:
    import numpy as np


def _open(module: Module, settings: None) -> QuantizedMatrix:
    experts, outputs, groups, group_bytes = module.shape("_blocks", "U8", axes=4)
    columns_of_group = 2 * group_bytes
    module.require("_scales", (experts, outputs, groups), "U8")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = powers_of_two(stored["scales"])
        grouped: np.ndarray = FLOAT4[nibbles(stored["codes"])] * scales[..., None]
        return grouped.reshape(len(rows), outputs, -1).swapaxes(1, 2)

    return module.matrix(
        "MXFP4",
        (experts, groups * columns_of_group, outputs),
        grid=Grid(columns_of_group, FLOAT4_STEP),
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
