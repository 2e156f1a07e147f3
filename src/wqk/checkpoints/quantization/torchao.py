"""torchao's tensors in safetensors: int8 and float8, or fewer bits in whole bytes."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    group_size,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import FLOATS, Module, size
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    BIAS,
    Companion,
    Effect,
    QuantizedFormat,
    Signature,
    companions,
    keys,
)
from wqk.errors import CheckpointError

CODES, SCALE, ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
INPUTS = "._weight_act_pre_scale"


def _open(module: Module, settings: None) -> QuantizedMatrix:
    outputs, inputs = module.shape(CODES, "I8 F8_E4M3")
    scales = module.shape(SCALE, FLOATS, axes=None)
    grid = scales if len(scales) == 2 else (size(scales), 1)
    if (grid[0] != 1 and scales[0] != outputs) or grid[0] not in (1, outputs):
        raise CheckpointError(
            f"{module.name(SCALE)} of shape {scales} fits no rows of {module.name(CODES)}, of "
            f"shape {(outputs, inputs)}; torchao's tensors for its own kernels are not read"
        )
    shared = group_size(inputs, grid[1], module.name(SCALE))
    by_row = int(grid[0] == outputs > 1)
    components = {
        "codes": module.component(CODES, 1),
        "scales": module.component(SCALE, by_row),
    }
    if module.has(ZERO):
        zeros = module.shape(ZERO, "I8 I32 I64 F16 BF16 F32", axes=None)
        if size(zeros) != size(grid) or zeros[:1] != scales[:1]:
            raise CheckpointError(f"{module.name(ZERO)} must have one entry for each scale")
        components["zeros"] = module.component(ZERO, by_row)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        zeros = stored.get("zeros")
        if zeros is not None:
            zeros = zeros.reshape(-1, grid[1])
        return scaled(stored["codes"], stored["scales"].reshape(-1, grid[1]), zeros)

    kind, bits = "F8_E4M3", 8
    is_whole = module.info(CODES).dtype == "I8"
    if is_whole:
        bits = _bits(module)
        kind = f"INT {bits}-bit"
    matrix = module.matrix(
        kind,
        (outputs, inputs),
        grid=uniform_grid(bits, shared) if is_whole else None,
        components=components,
        values=values,
    )
    return _with_input_scales(module, matrix)


def _bits(module: Module) -> int:
    """Return the bits of codes that are kept in whole bytes, from those of the first row."""
    (first,) = module.source.read([Part(module.name(CODES), ((0, 1),))])
    largest = int(max(first.max(), -1 - first.min(), 1))
    return min(8, 1 + largest.bit_length())


def _with_input_scales(module: Module, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Multiply the columns by the factors of the inputs, if there are any."""
    if not module.has(INPUTS):
        return matrix
    factors = module.shape(INPUTS, FLOATS, axes=None)
    if size(factors) not in (1, matrix.info.shape[1]):
        raise CheckpointError(f"{module.name(INPUTS)} must have one entry for each column")
    inner = matrix.values

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        return np.asarray(inner(stored, rows) * stored["inputs"].reshape(-1))

    components = {**matrix.components, "inputs": module.component(INPUTS)}
    nbytes = matrix.info.nbytes + module.info(INPUTS).nbytes
    info = matrix.info._replace(nbytes=nbytes)
    return replace(matrix, info=info, components=components, values=values)


def _settings(settings: Settings) -> None:
    return None


TORCHAO = QuantizedFormat(
    name="torchao",
    methods=frozenset({"torchao", ""}),
    signatures=(Signature(CODES, frozenset({"I8", "F8_E4M3"}), (SCALE,)),),
    companions=(
        Companion(CODES, Effect.VALUES, "codes", "always"),
        Companion(SCALE, Effect.VALUES, "scales", "always"),
        Companion(ZERO, Effect.VALUES, "zero points"),
        Companion(INPUTS, Effect.VALUES, "factors of the inputs"),
        *companions(
            Effect.NONE,
            _weight_act_quant_scale="scale of quantized inputs",
            _weight_act_quant_zero_point="zero point of quantized inputs",
        ),
        BIAS,
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        *keys(
            Effect.NONE,
            "quantization that made the tensors, and modules that are stored plain",
            "quant_type quant_type_kwargs modules_to_not_convert include_input_output_embeddings "
            "untie_embedding_weights",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="torchao 0.18.0, bit for bit",
)
