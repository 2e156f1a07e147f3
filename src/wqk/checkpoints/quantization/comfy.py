"""ComfyUI: 8-bit floats and int8 with one scale, described by JSON next to each weight.

Tensors of a weight (O, I):

- ``weight`` (O, I), 8-bit floats or whole numbers of 8 bits;
- ``weight_scale``, one number, or (O,) for whole numbers;
- ``comfy_quant``, bytes: a JSON object with the ``format``, and for a rotated weight ``convrot``
  and ``convrot_groupsize``.

A weight of whole numbers may be rotated: each group of columns was multiplied by a regular Hadamard
matrix, which is its own inverse, and inputs are multiplied by the same matrix while the model runs.
The rotation is undone here.
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
from wqk.checkpoints.quantization.matrix import Arrays, QuantizedMatrix
from wqk.checkpoints.quantization.modelopt import int8_matrix, with_input_scales
from wqk.checkpoints.quantization.module import CORRECT, DEQUANTIZE, Module, Source
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

# Keys of ``comfy_quant`` that are read.
KEYS = ("format", "convrot", "convrot_groupsize")

# Columns of a rotated group, if the file leaves them out.
ROTATED_COLUMNS = 256


@dataclass(frozen=True)
class _WeightFormat:
    """The description of one weight.

    Attributes
    ----------
    format
        Name of the format, one of `FORMATS`.
    rotated_columns
        Columns of a rotated group; None if the weight is not rotated.
    """

    format: str
    rotated_columns: int | None


def _description(values: Mapping[str, Any], name: str) -> _WeightFormat:
    """Return the checked description of one weight.

    Parameters
    ----------
    values
        The JSON object of ``comfy_quant``.
    name
        Name of the tensor, for messages.

    Raises
    ------
    CheckpointError
        A format, a key or a rotation is not supported.
    """
    kind = values.get("format")
    if kind not in FORMATS:
        raise CheckpointError(
            f"{name}: the format {shown(kind)} is not read; expected one of {', '.join(FORMATS)}; "
            f"{DEQUANTIZE}"
        )
    unknown_keys = sorted(set(values) - KERNELS - set(KEYS))
    if unknown_keys:
        raise CheckpointError(
            f"{name}: {shown(unknown_keys)} is not known; expected the keys {', '.join(KEYS)}; "
            f"{DEQUANTIZE}"
        )
    is_rotated = values.get("convrot", False)
    if is_rotated not in (True, False):
        raise CheckpointError(
            f"{name}: convrot is not known; expected true or false, got {shown(is_rotated)}; "
            f"{DEQUANTIZE}"
        )
    if not is_rotated:
        return _WeightFormat(kind, rotated_columns=None)
    columns = values.get("convrot_groupsize", ROTATED_COLUMNS)
    if kind != "int8_tensorwise" or not _is_power_of_four(columns):
        raise CheckpointError(
            f"{name}: a rotation of {shown(kind)} in groups of {shown(columns)} is not read; "
            f"expected int8_tensorwise in groups of a power of 4; {DEQUANTIZE}"
        )
    return _WeightFormat(kind, rotated_columns=columns)


def require_described(source: Source) -> None:
    """Raise `CheckpointError` if the header describes a weight that is read in another format.

    Early files describe their weights in the header, and have no ``comfy_quant``. Their format is
    inferred from tensors, which is correct for all formats except rotated weights.
    """
    for text in source.descriptions:
        try:
            layers = json.loads(text)["layers"].items()
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            raise CheckpointError(
                f"{DESCRIPTION} of the header: is no description of weights; expected a JSON "
                f"object with the key layers, got {shown(text)}; {DEQUANTIZE}"
            ) from None
        for layer, values in layers:
            if f"{layer}.comfy_quant" in source.tensors:
                continue
            name = f"{DESCRIPTION} of {layer}"
            is_described = isinstance(values, dict)
            if not is_described or _description(values, name).rotated_columns is not None:
                raise CheckpointError(
                    f"{name}: {shown(values)} is not read from the header; expected the format of "
                    f"a weight that is not rotated; {DEQUANTIZE}"
                )


def _is_power_of_four(value: Any) -> bool:
    """Return whether a value is one of the whole numbers 4, 16, 64, …, 65536."""
    return type(value) is int and value in (4**exponent for exponent in range(1, 9))


@cache
def regular_hadamard(order: int) -> np.ndarray:
    """Return the regular Hadamard matrix (order, order) of a power of 4, in float32.

    The entries are ±1/√order, the matrix is symmetric and orthogonal, and all rows have the same
    sum. The matrix is a Kronecker power of the matrix of order 4.

    Examples
    --------
    >>> (2 * regular_hadamard(4)).tolist()[0]
    [1.0, 1.0, 1.0, -1.0]
    >>> regular_hadamard(4).sum(axis=0).tolist()
    [1.0, 1.0, 1.0, 1.0]
    """
    signs_of_four = np.ones((4, 4), np.float32)
    for row in range(4):
        signs_of_four[row, 3 - row] = -1
    signs = signs_of_four
    while len(signs) < order:
        signs = np.kron(signs, signs_of_four)
    return signs / np.float32(order**0.5)


def _open(module: Module, settings: None) -> QuantizedMatrix:
    name = module.name(".comfy_quant")
    description = _description(module.description(".comfy_quant"), name)
    dtype = module.info(".weight").dtype
    if dtype != FORMATS[description.format]:
        raise module.error(
            ".weight",
            f"has another type than the format {description.format} in comfy_quant stores",
            expected=FORMATS[description.format],
            actual=dtype,
        )
    if dtype == "I8":
        matrix = int8_matrix(module)
    else:
        matrix = float8_matrix(module, ".weight_scale", strategy="tensor")
    if description.rotated_columns is not None:
        matrix = _rotated_back(module, matrix, description.rotated_columns)
    about = {"about": module.component(".comfy_quant")}
    nbytes = matrix.info.nbytes + module.info(".comfy_quant").nbytes
    matrix = replace(
        matrix,
        info=matrix.info._replace(nbytes=nbytes),
        components={**matrix.components, **about},
    )
    return with_input_scales(module, matrix)


def _rotated_back(module: Module, matrix: QuantizedMatrix, columns: int) -> QuantizedMatrix:
    """Return a matrix (O, I) whose groups of columns are multiplied by a Hadamard matrix.

    The values lie on no grid.
    """
    inputs = matrix.info.shape[1]
    if inputs % columns:
        raise module.error(
            ".weight",
            f"rotated groups of {columns} do not divide {inputs} columns",
            expected=f"a divisor of {inputs}",
            actual=columns,
            remedy=CORRECT,
        )
    rotated_values = matrix.values

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        rotated_groups = rotated_values(stored, rows).reshape(len(rows), -1, columns)
        groups = rotated_groups @ regular_hadamard(columns).T
        result: np.ndarray = groups.reshape(len(rows), inputs)
        return result

    return replace(matrix, info=matrix.info._replace(grid=None), values=values)


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
