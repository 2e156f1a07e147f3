"""bitsandbytes: NF4 and FP4 in one flat tensor; int8 with the largest entry of each row.

Tensors of a weight (O, I) of 4-bit codes, with N = O·I entries in the order of rows:

- ``weight`` (N/2, 1), bytes: two codes in a byte, the first one in the high bits;
- ``weight.quant_map`` (16,): the value of each code, from −1 to 1;
- ``weight.absmax``: the scale of each block of ``blocksize`` entries, in float32;
- ``weight.quant_state.bitsandbytes__nf4`` or ``…__fp4``: a JSON object with the shape and the
  sizes of blocks.

If scales are quantized, ``weight.absmax`` has a code of 8 bits for each block. The scale is then
nested_quant_map[code] · nested_absmax + nested_offset, with one ``weight.nested_absmax`` for each
``nested_blocksize`` scales.

Tensors of a weight (O, I) of int8: ``weight``, whole numbers, and ``SCB`` (O,), the largest entry
of each row, which has the code 127.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Grid, as_number
from wqk.checkpoints.quantization.matrix import (
    Arrays,
    QuantizedMatrix,
    ceil_divide,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import CORRECT, DEQUANTIZE, REQUANTIZE, Module, size
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    BIAS,
    Companion,
    Effect,
    Key,
    QuantizedFormat,
    Signature,
    keys,
)
from wqk.errors import CheckpointError, shown

KINDS = ("nf4", "fp4")
STATE = ".weight.quant_state.bitsandbytes__"

# Keys of a description that name types, which the values of the library are rounded to.
TYPES = {"dtype", "nested_dtype"}
STATE_KEYS = TYPES | {
    "quant_type",
    "shape",
    "blocksize",
    "nested_blocksize",
    "nested_offset",
}


@dataclass(frozen=True)
class BitsAndBytesSettings:
    """Bits of the codes and kind of 4-bit codes; None or empty if not set."""

    bits: int | None = None
    kind: str = ""


def _settings(settings: Settings) -> BitsAndBytesSettings:
    four = settings.switch("load_in_4bit", "_load_in_4bit")
    eight = settings.switch("load_in_8bit", "_load_in_8bit")
    if four and eight:
        raise settings.error(
            f"load_in_4bit and load_in_8bit are both set; expected one of the two; {CORRECT}"
        )
    if settings.word("bnb_4bit_quant_storage") not in ("", "uint8", "torch.uint8"):
        raise settings.error(
            f"bnb_4bit_quant_storage = {shown(settings.values['bnb_4bit_quant_storage'])} is a "
            f"type of codes that is not read; expected uint8; {DEQUANTIZE}"
        )
    bits = None
    if four:
        bits = 4
    elif eight:
        bits = 8
    return BitsAndBytesSettings(bits, settings.word("bnb_4bit_quant_type"))


def _open(module: Module, settings: BitsAndBytesSettings) -> QuantizedMatrix:
    bits = 8 if module.codes == ".weight" else 4
    if settings.bits not in (None, bits):
        raise module.error(
            "",
            f"the configuration sets load_in_{settings.bits}bit, and the codes have other bits",
            expected=f"codes of {settings.bits} bits",
            actual=bits,
            remedy=CORRECT,
        )
    return _int8(module) if bits == 8 else _four_bits(module, settings)


def _int8(module: Module) -> QuantizedMatrix:
    """Return a weight of whole numbers of 8 bits; the largest entry of a row has the code 127."""
    outputs, inputs = module.shape(".weight", "I8")
    largest_shape = module.shape(".SCB", "F32 F16 BF16", axes=None)
    if size(largest_shape) != outputs or largest_shape[:1] != (outputs,):
        raise module.error(
            ".SCB",
            "must have one entry for each output",
            expected=f"the shape ({outputs},)",
            actual=largest_shape,
        )
    components = {"codes": module.component(".weight", 1), "scales": module.component(".SCB", 1)}
    if module.has(".weight_format"):
        components["format"] = module.component(".weight_format")
    name = module.name(".weight")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if "format" in stored and stored["format"].any():
            raise CheckpointError(
                f"{name}: is laid out for a kernel, not row by row; expected the weight_format 0, "
                f"got {shown(stored['format'].reshape(-1)[0].item())}; {DEQUANTIZE}"
            )
        steps = stored["scales"].reshape(-1, 1) * np.float32(1 / 127)
        return scaled(stored["codes"], steps)

    return module.matrix(
        "INT 8-bit",
        (outputs, inputs),
        grid=uniform_grid(8, inputs),
        components=components,
        values=values,
    )


@dataclass(frozen=True)
class _QuantState:
    """The library's description of one matrix.

    Attributes
    ----------
    outputs, inputs
        Shape of the matrix, (O, I).
    block
        Number of entries that share a scale.
    scale_codes
        The storage of quantized scales; None for plain scales.
    """

    outputs: int
    inputs: int
    block: int
    scale_codes: _ScaleCodes | None

    @property
    def count(self) -> int:
        """Number of entries of the matrix."""
        return self.outputs * self.inputs

    @property
    def blocks(self) -> int:
        """Number of blocks of entries; the last block may have fewer entries."""
        return ceil_divide(self.count, self.block)


class _ScaleCodes(NamedTuple):
    """The storage of quantized scales: number of scales with one outer scale, and the offset."""

    block: int
    offset: float


def _state(module: Module, ending: str, kind: str, configured_kind: str) -> _QuantState:
    """Return the checked description of a matrix.

    Parameters
    ----------
    module, ending
        The module, and the end of the name of its description.
    kind
        Kind of the codes in the name of the description: ``nf4`` or ``fp4``.
    configured_kind
        Kind of the codes in the configuration; empty if not set.

    Raises
    ------
    CheckpointError
        The description has an unknown key, no sizes, or another kind.
    """
    values = module.description(ending)
    unknown_keys = sorted(set(values) - STATE_KEYS)
    if unknown_keys:
        raise module.error(
            ending,
            f"{shown(unknown_keys[0])} is not a key that is known",
            expected=f"the keys {', '.join(sorted(STATE_KEYS))}",
            actual=shown(unknown_keys),
            remedy=DEQUANTIZE,
        )
    quant_type = values.get("quant_type", kind)
    if quant_type != kind or configured_kind not in ("", kind):
        raise module.error(
            ending,
            "its name, quant_type and the configuration name different kinds of codes",
            expected=kind,
            actual=f"quant_type {shown(quant_type)} and the setting {configured_kind or 'none'}",
            remedy=CORRECT,
        )
    match values:
        case {"shape": [int(outputs), int(inputs)], "blocksize": int(block)} if (
            outputs > 0 and inputs > 0 and block > 0
        ):
            return _QuantState(outputs, inputs, block, _scale_codes(values))
    raise module.error(
        ending,
        "must be JSON with a matrix's shape and a blocksize",
        expected="positive whole numbers",
        actual=f"{shown(values.get('shape'))} and {shown(values.get('blocksize'))}",
    )


def _scale_codes(values: Mapping[str, Any]) -> _ScaleCodes | None:
    """Return the storage of quantized scales in a description; None for plain scales."""
    block, offset = values.get("nested_blocksize"), as_number(values.get("nested_offset"))
    if type(block) is not int or block <= 0 or offset is None:
        return None
    return _ScaleCodes(block, offset)


def _four_bits(module: Module, settings: BitsAndBytesSettings) -> QuantizedMatrix:
    """Return a weight of 4-bit codes, with a scale for each block of the flat tensor."""
    kinds = [kind for kind in KINDS if module.has(STATE + kind)]
    if len(kinds) != 1:
        raise module.error(
            ".weight",
            "has not one description of its codes",
            expected="quant_state.bitsandbytes__nf4 or quant_state.bitsandbytes__fp4",
            actual=" and ".join(kinds) or "none",
        )
    kind = kinds[0]
    state = _state(module, STATE + kind, kind, settings.kind)
    inputs = state.inputs
    codes_shape = module.shape(".weight", "U8", axes=None)
    byte_count = ceil_divide(state.count, 2)
    if size(codes_shape) != byte_count:
        raise module.error(
            ".weight",
            f"does not hold two codes a byte of {state.outputs} × {inputs}",
            expected=f"{byte_count} bytes",
            actual=f"the shape {codes_shape}",
        )
    module.require(".weight.quant_map", (16,), "F32")
    module.require(".weight.absmax", (state.blocks,), "F32 U8")
    # If rows are whole bytes of the flat tensor, only the wanted rows are read.
    is_by_row = inputs % 2 == 0 and codes_shape == (byte_count, 1)
    components = {
        "codes": module.component(".weight", rows=inputs // 2 if is_by_row else 0),
        "scales": module.component(".weight.absmax"),
        "table": module.component(".weight.quant_map"),
        "about": module.component(STATE + kind),
    }
    has_scale_codes = module.info(".weight.absmax").dtype == "U8"
    if has_scale_codes:
        if state.scale_codes is None:
            raise CheckpointError(
                f"{module.name(STATE + kind)}: scales are quantized, and nested_blocksize or "
                f"nested_offset is missing; {REQUANTIZE}"
            )
        outer_scales = ceil_divide(state.blocks, state.scale_codes.block)
        module.require(".weight.nested_quant_map", (256,), "F32")
        module.require(".weight.nested_absmax", (outer_scales,), "F32")
        components["outer"] = module.component(".weight.nested_absmax")
        components["outer_table"] = module.component(".weight.nested_quant_map")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        row_bytes = stored["codes"].reshape(-1)
        codes = np.stack([row_bytes >> 4, row_bytes & 15], axis=-1).reshape(-1)
        entries = rows[:, None] * inputs + np.arange(inputs)  # numbers in the flat tensor
        codes = codes.reshape(-1, inputs) if is_by_row else codes[entries]
        scales = stored["scales"]
        if has_scale_codes:
            scales = _scales_of_codes(stored, state)
        result: np.ndarray = stored["table"][codes] * scales[entries // state.block]
        return result

    return module.matrix(
        kind.upper(),
        (state.outputs, inputs),
        grid=Grid(state.block, 2 / 15),
        components=components,
        values=values,
    )


def _scales_of_codes(stored: Arrays, state: _QuantState) -> np.ndarray:
    """Return the scales of all blocks (blocks,), from codes of 8 bits."""
    assert state.scale_codes is not None
    outer_scales = np.repeat(stored["outer"], state.scale_codes.block)[: state.blocks]
    scales: np.ndarray = stored["outer_table"][stored["scales"]] * outer_scales
    return scales + np.float32(state.scale_codes.offset)


BITSANDBYTES = QuantizedFormat(
    name="bitsandbytes",
    methods=frozenset({"bitsandbytes", "bitsandbytes_4bit", "bitsandbytes_8bit", ""}),
    signatures=(
        Signature(".weight.absmax", frozenset({"F32", "U8"}), (".weight.quant_map",)),
        Signature(".weight", frozenset({"I8"}), (".SCB",)),
    ),
    companions=(
        Companion(".weight", Effect.VALUES, "codes", "always"),
        Companion(".weight.absmax", Effect.VALUES, "scales of blocks", "4 bits"),
        Companion(".weight.quant_map", Effect.VALUES, "values of the codes", "4 bits"),
        Companion(".weight.nested_absmax", Effect.VALUES, "outer scales", "quantized scales"),
        Companion(
            ".weight.nested_quant_map", Effect.VALUES, "values of scales", "quantized scales"
        ),
        Companion(f"{STATE}*", Effect.VALUES, "shape, blocks and offset as JSON", "4 bits"),
        Companion(".SCB", Effect.VALUES, "largest entry of each row", "8 bits"),
        Companion(".weight_format", Effect.CHECKED, "order of rows; 0 is row by row"),
        BIAS,
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        *keys(
            Effect.CHECKED,
            "bits of the codes",
            "load_in_4bit load_in_8bit _load_in_4bit _load_in_8bit",
        ),
        Key("bnb_4bit_quant_type", Effect.CHECKED, "kind of 4-bit codes"),
        Key("bnb_4bit_quant_storage", Effect.CHECKED, "type that codes are stored in"),
        *keys(
            Effect.NONE,
            "types of products, outliers of inputs, and modules that are stored plain",
            "bnb_4bit_compute_dtype bnb_4bit_use_double_quant llm_int8_enable_fp32_cpu_offload "
            "llm_int8_has_fp16_weight llm_int8_skip_modules llm_int8_threshold "
            "modules_to_not_convert",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="bitsandbytes 0.50.2, bit for bit, int8 to 10⁻⁷",
)
