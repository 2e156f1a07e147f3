"""ComfyUI: 8-bit floats and int8 with one scale, described by JSON next to each weight.

``comfy_quant`` names the format of a weight. A weight of int8 may have been rotated: in each group
of columns it was multiplied by a regular Hadamard matrix, which is its own inverse, and inputs are
multiplied by the same matrix while the model runs. The rotation is undone here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np

from wqk.checkpoints.files import DESCRIPTION
from wqk.checkpoints.quantization.float8 import FLOAT8, float8_matrix
from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.modelopt import with_input_scales
from wqk.checkpoints.quantization.module import FLOATS, Module, Source, size
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    ACTIVATIONS,
    BIAS,
    Companion,
    Effect,
    QuantizedFormat,
    Signature,
)
from wqk.errors import CheckpointError, shown

# Formats by their name in ``comfy_quant``, with the stored type of their codes.
FORMATS = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8_tensorwise": "I8"}

# Keys of ``comfy_quant`` that choose a kernel.
KERNELS = {"full_precision_matrix_mult"}

# Columns of a rotated group, where the file leaves them out.
ROTATED_COLUMNS = 256


@dataclass(frozen=True)
class _WeightFormat:
    """The format of one weight, and the columns of a rotated group; 0 if it is not rotated."""

    format: str
    rotated: int


def _description(values: Mapping[str, Any], name: str) -> _WeightFormat:
    """Read the description of one weight; `CheckpointError` for what is not read."""
    kind = values.get("format")
    if kind not in FORMATS:
        raise CheckpointError(
            f"{name}: the format {shown(kind)} is not read; expected one of {', '.join(FORMATS)}"
        )
    rotated = values.get("convrot", False)
    columns = values.get("convrot_groupsize", ROTATED_COLUMNS)
    unknown = sorted(set(values) - KERNELS - {"format", "convrot", "convrot_groupsize"})
    if unknown or rotated not in (True, False):
        raise CheckpointError(f"{name}: {shown(unknown or rotated)} is not known")
    if not rotated:
        return _WeightFormat(kind, 0)
    if kind != "int8_tensorwise" or not _is_power_of_four(columns):
        raise CheckpointError(
            f"{name}: a rotation of {shown(kind)} in groups of {shown(columns)} is not read"
        )
    return _WeightFormat(kind, columns)


def require_described(source: Source) -> None:
    """Raise `CheckpointError` if the header describes a weight that is read as another format.

    Early files describe their weights there, and have no ``comfy_quant``. Then they are read by
    their tensors, which is right for all formats but rotated ones.
    """
    for text in source.descriptions:
        try:
            layers = json.loads(text)["layers"].items()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(f"{DESCRIPTION} of the header must be JSON with layers") from None
        for layer, values in layers:
            if f"{layer}.comfy_quant" in source.tensors:
                continue
            name = f"{DESCRIPTION} of {layer}"
            if not isinstance(values, dict) or _description(values, name).rotated:
                raise CheckpointError(f"{name}: {shown(values)} is not read from the header")


def _is_power_of_four(value: Any) -> bool:
    return (
        type(value) is int
        and 4 <= value <= 2**16
        and value.bit_count() == 1
        and (value.bit_length() % 2 == 1)
    )


@cache
def regular_hadamard(order: int) -> np.ndarray:
    """Return the symmetric orthogonal matrix of ±1/√order whose rows all have one sum.

    Examples
    --------
    >>> regular_hadamard(4).sum(axis=0).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    four = np.array([[1, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]], np.float32)
    matrix = four
    while len(matrix) < order:
        matrix = np.kron(matrix, four)
    return matrix / np.float32(order**0.5)


def _open(module: Module, settings: None) -> QuantizedMatrix:
    name = module.name(".comfy_quant")
    description = _description(module.description(".comfy_quant"), name)
    dtype = module.info(".weight").dtype
    if dtype != FORMATS[description.format]:
        raise CheckpointError(
            f"{module.name('.weight')} has the type {dtype}, and comfy_quant names "
            f"{description.format}"
        )
    if dtype == "I8":
        matrix = _integers(module, description.rotated)
    else:
        matrix = float8_matrix(module, ".weight_scale", strategy="tensor")
    about = {"about": module.component(".comfy_quant")}
    nbytes = matrix.info.nbytes + module.info(".comfy_quant").nbytes
    matrix = replace(
        matrix,
        info=matrix.info._replace(nbytes=nbytes),
        components={**matrix.components, **about},
    )
    return with_input_scales(module, matrix)


def _integers(module: Module, rotated: int) -> QuantizedMatrix:
    """Whole numbers of 8 bits with a scale for each row or for all, perhaps rotated."""
    outputs, inputs = module.shape(".weight", "I8")
    scales = module.shape(".weight_scale", FLOATS, axes=None)
    if size(scales) not in (1, outputs) or (scales and scales[0] not in (1, outputs)):
        raise CheckpointError(
            f"{module.name('.weight_scale')} of shape {scales} for {outputs} outputs"
        )
    if rotated and inputs % rotated:
        raise CheckpointError(
            f"{module.name('.weight')}: rotated groups of {rotated} do not divide {inputs} columns"
        )
    by_row = int(size(scales) == outputs > 1)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        steps = np.broadcast_to(stored["scales"].reshape(-1, 1), (len(rows), 1))
        result = scaled(stored["codes"], steps)
        if rotated:
            groups = result.reshape(len(rows), -1, rotated)
            result = (groups @ regular_hadamard(rotated).T).reshape(len(rows), inputs)
        return np.asarray(result)

    return module.matrix(
        "INT 8-bit",
        (outputs, inputs),
        grid=None if rotated else uniform_grid(8, inputs),
        components={
            "codes": module.component(".weight", 1),
            "scales": module.component(".weight_scale", by_row),
        },
        values=values,
    )


def _settings(settings: Settings) -> None:
    return None


COMFY = QuantizedFormat(
    name="ComfyUI",
    methods=frozenset({""}),
    signatures=(Signature(".weight", FLOAT8 | {"I8", "U8"}, (".comfy_quant",)),),
    companions=(
        Companion(".weight", Effect.VALUES, "codes", "always"),
        Companion(".weight_scale", Effect.VALUES, "scales", "always"),
        Companion(".comfy_quant", Effect.VALUES, "format and rotation as JSON", "always"),
        Companion(".pre_quant_scale", Effect.VALUES, "factors of the inputs"),
        BIAS,
        *ACTIVATIONS,
    ),
    keys=(),
    settings=_settings,
    open=_open,
    proof="comfy-kitchen 0.2.40's dequantizing on a processor",
)
