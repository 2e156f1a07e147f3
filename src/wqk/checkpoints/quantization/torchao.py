"""torchao's tensors in safetensors: int8, float8, and fewer bits in whole bytes.

Tensors of a weight (O, I) with G groups of I/G columns:

- ``_weight_qdata`` (O, I), one code in a byte: a whole number or an 8-bit float;
- ``_weight_scale``, (O, G), (O,) or one number;
- ``_weight_zero_point``, as the scales;
- ``_weight_act_pre_scale``, (I,) or one number: factors of the inputs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    group_size,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import (
    DEQUANTIZE,
    FLOATS,
    Module,
    size,
    with_column_factors,
)
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

if TYPE_CHECKING:
    import numpy as np

CODES, SCALE, ZERO = "._weight_qdata", "._weight_scale", "._weight_zero_point"
INPUTS = "._weight_act_pre_scale"


def _open(module: Module, settings: None) -> QuantizedMatrix:
    outputs, inputs = module.shape(CODES, "I8 F8_E4M3")
    scales_shape = module.shape(SCALE, FLOATS, axes=None)
    scale_rows, groups = scales_shape if len(scales_shape) == 2 else (size(scales_shape), 1)
    is_by_row = scale_rows == outputs and scales_shape[:1] == (outputs,)
    if scale_rows != 1 and not is_by_row:
        raise module.error(
            SCALE,
            f"of shape {scales_shape} fits no rows of {module.name(CODES)}, of shape "
            f"{(outputs, inputs)}; torchao's tensors for its own kernels are not read",
            expected=f"1 or {outputs} rows",
            actual=scale_rows,
            remedy=DEQUANTIZE,
        )
    columns_of_group = group_size(inputs, groups, module.name(SCALE))
    rows_for_each = 1 if scale_rows > 1 else 0
    components = {
        "codes": module.component(CODES, 1),
        "scales": module.component(SCALE, rows_for_each),
    }
    if module.has(ZERO):
        zeros_shape = module.shape(ZERO, "I8 I32 I64 F16 BF16 F32", axes=None)
        if size(zeros_shape) != scale_rows * groups or zeros_shape[:1] != scales_shape[:1]:
            raise module.error(
                ZERO,
                "must have one entry for each scale",
                expected=f"the shape {scales_shape}",
                actual=zeros_shape,
            )
        components["zeros"] = module.component(ZERO, rows_for_each)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = stored["scales"].reshape(-1, groups)
        zeros = stored.get("zeros")
        if zeros is not None:
            zeros = zeros.reshape(-1, groups)
        return scaled(stored["codes"], scales, zeros)

    if module.info(CODES).dtype == "I8":
        bits = _bits(module)
        kind, grid = f"INT {bits}-bit", uniform_grid(bits, columns_of_group)
    else:
        kind, grid = "F8_E4M3", None
    matrix = module.matrix(
        kind,
        (outputs, inputs),
        grid=grid,
        components=components,
        values=values,
    )
    return _with_input_scales(module, matrix)


def _bits(module: Module) -> int:
    """Return the bits of codes in whole bytes, from the range of the codes of the first row.

    A sign and n bits represent the whole numbers from −2ⁿ to 2ⁿ − 1.
    """
    (first_row,) = module.source.read([Part(module.name(CODES), ((0, 1),))])
    largest_magnitude = int(max(first_row.max(), -1 - first_row.min(), 1))
    return min(8, 1 + largest_magnitude.bit_length())


def _with_input_scales(module: Module, matrix: QuantizedMatrix) -> QuantizedMatrix:
    """Return a matrix (O, I) whose columns are multiplied by factors of the inputs, if stored."""
    if not module.has(INPUTS):
        return matrix
    columns = matrix.info.shape[1]
    factors_shape = module.shape(INPUTS, FLOATS, axes=None)
    if size(factors_shape) not in (1, columns):
        raise module.error(
            INPUTS,
            "must have one entry for each column",
            expected=f"1 or {columns} factors",
            actual=f"the shape {factors_shape}",
        )
    return with_column_factors(module, matrix, INPUTS)


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
