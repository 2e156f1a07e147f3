"""bitsandbytes: NF4 and FP4 in one flat tensor; int8 with the largest entry of each row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.matrix import Arrays, QuantizedMatrix, scaled, uniform_grid
from wqk.checkpoints.quantization.module import Module, size
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
        raise settings.error("load_in_4bit and load_in_8bit are both set")
    if settings.word("bnb_4bit_quant_storage") not in ("", "uint8", "torch.uint8"):
        raise settings.error(
            f"bnb_4bit_quant_storage = {shown(settings.values['bnb_4bit_quant_storage'])} is a "
            "type of codes that is not read; expected uint8"
        )
    bits = 4 if four else None
    return BitsAndBytesSettings(8 if eight else bits, settings.word("bnb_4bit_quant_type"))


def _open(module: Module, settings: BitsAndBytesSettings) -> QuantizedMatrix:
    bits = 8 if module.codes == ".weight" else 4
    if settings.bits not in (None, bits):
        raise CheckpointError(
            f"{module.stem} has codes of {bits} bits, and the configuration sets load_in_"
            f"{settings.bits}bit"
        )
    return _int8(module) if bits == 8 else _four_bits(module, settings)


def _int8(module: Module) -> QuantizedMatrix:
    """Whole numbers of 8 bits; in each row, 127 stands for the largest entry."""
    outputs, inputs = module.shape(".weight", "I8")
    scales = module.shape(".SCB", "F32 F16 BF16", axes=None)
    if size(scales) != outputs or scales[0] != outputs:
        raise CheckpointError(
            f"{module.name('.SCB')} of shape {scales} must have one entry for each of {outputs} "
            "outputs"
        )
    components = {"codes": module.component(".weight", 1), "scales": module.component(".SCB", 1)}
    if module.has(".weight_format"):
        components["format"] = module.component(".weight_format")
    name = module.name(".weight")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if "format" in stored and stored["format"].any():
            raise CheckpointError(f"{name} is laid out for a kernel, not row by row")
        return scaled(stored["codes"], stored["scales"].reshape(-1, 1) * np.float32(1 / 127))

    return module.matrix(
        "INT 8-bit",
        (outputs, inputs),
        grid=uniform_grid(8, inputs),
        components=components,
        values=values,
    )


@dataclass(frozen=True)
class _QuantState:
    """The library's description of one matrix."""

    outputs: int
    inputs: int
    block: int
    outer_block: int | None
    offset: float | None


def _state(module: Module, ending: str, kind: str, configured: str) -> _QuantState:
    values = module.description(ending)
    name = module.name(ending)
    unknown = sorted(set(values) - STATE_KEYS)
    if unknown:
        raise CheckpointError(f"{name}: {shown(unknown[0])} is not a key that is known")
    if values.get("quant_type", kind) != kind or configured not in ("", kind):
        raise CheckpointError(
            f"{name}: its name, quant_type and the configuration name different kinds of codes"
        )
    match values:
        case {"shape": [int(outputs), int(inputs)], "blocksize": int(block)}:
            pass
        case _:
            raise CheckpointError(f"{name} must be JSON with a matrix's shape and a blocksize")
    offset = values.get("nested_offset")
    return _QuantState(
        outputs,
        inputs,
        block,
        outer_block=_positive(values.get("nested_blocksize")),
        offset=float(offset) if isinstance(offset, int | float) else None,
    )


def _positive(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None


def _four_bits(module: Module, settings: BitsAndBytesSettings) -> QuantizedMatrix:
    """4-bit codes, two in a byte, the high half first; a scale for each block of the flat tensor.

    Scales may be codes as well, under outer scales and an offset.
    """
    kinds = [kind for kind in KINDS if module.has(STATE + kind)]
    if len(kinds) != 1:
        raise CheckpointError(
            f"{module.name('.weight')}: expected one description of its codes "
            f"(quant_state.bitsandbytes__nf4 or fp4), got {len(kinds)}"
        )
    kind = kinds[0]
    state = _state(module, STATE + kind, kind, settings.kind)
    outputs, inputs, block = state.outputs, state.inputs, state.block
    count = outputs * inputs
    codes = module.shape(".weight", "U8", axes=None)
    if not (outputs > 0 and inputs > 0 and block > 0) or size(codes) != -(-count // 2):
        raise CheckpointError(
            f"{module.name('.weight')} does not hold two codes a byte of {outputs} × {inputs}"
        )
    module.require(".weight.quant_map", (16,), "F32")
    blocks = -(-count // block)
    module.require(".weight.absmax", (blocks,), "F32 U8")
    # If rows are whole bytes of the flat tensor, only the wanted rows are read.
    by_row = inputs % 2 == 0 and codes == (count // 2, 1)
    components = {
        "codes": module.component(".weight", inputs // 2 if by_row else 0),
        "scales": module.component(".weight.absmax"),
        "table": module.component(".weight.quant_map"),
        "about": module.component(STATE + kind),
    }
    nested = module.info(".weight.absmax").dtype == "U8"
    outer, offset = state.outer_block or 0, state.offset or 0.0
    if nested:
        if state.outer_block is None or state.offset is None:
            raise CheckpointError(
                f"{module.name(STATE + kind)}: scales are quantized, and nested_blocksize and "
                "nested_offset are missing"
            )
        module.require(".weight.nested_quant_map", (256,), "F32")
        module.require(".weight.nested_absmax", (-(-blocks // outer),), "F32")
        components["outer"] = module.component(".weight.nested_absmax")
        components["outer_table"] = module.component(".weight.nested_quant_map")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        flat = stored["codes"].reshape(-1)
        codes = np.stack([flat >> 4, flat & 15], axis=-1).reshape(-1)
        entries = rows[:, None] * inputs + np.arange(inputs)
        codes = codes.reshape(-1, inputs) if by_row else codes[entries]
        scales = stored["scales"]
        if nested:
            large = np.repeat(stored["outer"], outer)[:blocks]
            scales = stored["outer_table"][scales] * large + np.float32(offset)
        return np.asarray(stored["table"][codes] * scales[entries // block])

    return module.matrix(
        kind.upper(),
        (outputs, inputs),
        grid=Grid(block, 2 / 15),
        components=components,
        values=values,
    )


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
