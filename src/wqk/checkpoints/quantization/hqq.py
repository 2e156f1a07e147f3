"""HQQ: groups are the rows or the columns of a matrix of codes, in words that hold far rows.

The codes (C, S) of a matrix (O, I) are its values in order, C·S = O·I. Along axis 1 each row of
codes is a group, along axis 0 each column. ``packing`` gives the bits of a code and the type of a
word, whose first code is the highest.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.matrix import Arrays, QuantizedMatrix
from wqk.checkpoints.quantization.module import FLOATS, Module
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    BIAS,
    Effect,
    QuantizedFormat,
    Signature,
    companions,
    keys,
)
from wqk.errors import CheckpointError

# Bits of a code, codes in a word, and the word's type.
PACKING = {
    b"8bit_u8": (8, 1, "U8"),
    b"4bit_u8": (4, 2, "U8"),
    b"3bit_32": (3, 10, "I32"),
    b"2bit_u8": (2, 4, "U8"),
    b"1bit_u8": (1, 8, "U8"),
}

# Switches that are stored as tensors, and that are not read if they are on.
SWITCHES = (".quant_scale", ".quant_zero", ".view_as_float", ".offload_meta")


@dataclass(frozen=True)
class _MatrixSizes:
    """Sizes of one matrix, from its small tensors."""

    outputs: int
    inputs: int
    bits: int
    in_word: int
    used_bits: float
    steps: int
    width: int
    by_row: bool

    @property
    def count(self) -> int:
        """Number of rows of codes."""
        return self.outputs * self.inputs // self.width


def _layout(module: Module) -> _MatrixSizes:
    """Read the sizes of a matrix; `CheckpointError` if its tensors do not fit together."""
    packing, shape, stored_bits = (
        module.small(ending) for ending in (".packing", ".shape", ".nbits")
    )
    if packing.dtype.kind not in "iu":
        raise CheckpointError(f"{module.name('.packing')} must be bytes of a name")
    bits, in_word, dtype = PACKING.get(packing.astype(np.uint8).tobytes(), (0, 1, ""))
    steps, width = module.shape(".W_q", dtype or "U8")
    scales = module.shape(".scale", FLOATS)
    outputs, inputs = map(int, shape) if shape.dtype.kind == "i" and len(shape) == 2 else (0, 0)
    used = float(stored_bits[0]) if len(stored_bits) == 1 else 0.0
    count, remainder = divmod(outputs * inputs, width)
    axes = [axis for axis, fits in ((1, (count, 1)), (0, (1, width))) if scales == fits]
    if (
        not (1 <= used <= bits and outputs > 0 and inputs > 0)
        or remainder
        or steps != -(-count // in_word)
        or not axes
        or module.shape(".zero", FLOATS) != scales
    ):
        raise CheckpointError(
            f"{module.stem}: HQQ's W_q of shape {(steps, width)}, scales of shape {scales}, zeros, "
            f"nbits, packing, and the shape {(outputs, inputs)} do not fit together"
        )
    axis = _axis(module, axes)
    _require_group(module, width if axis else count)
    return _MatrixSizes(outputs, inputs, bits, in_word, used, steps, width, by_row=axis == 1)


def _axis(module: Module, fitting: list[int]) -> int:
    """Return the axis of groups, as it is stored; without it, the only one that fits."""
    if module.has(".axis"):
        stored = module.small(".axis")
        if len(stored) != 1 or stored[0] not in fitting:
            raise CheckpointError(
                f"{module.name('.axis')} is {stored[:3].tolist()}, and the shape of the scales is "
                f"that of axis {' or '.join(map(str, fitting))}"
            )
        return int(stored[0])
    if len(fitting) > 1 and module.shape(".scale", FLOATS) != (1, 1):
        raise CheckpointError(f"{module.name('.axis')} is missing, and both axes fit the scales")
    return fitting[0]


def _require_group(module: Module, size: int) -> None:
    """Raise `CheckpointError` if the stored size of a group is another one."""
    if not module.has(".group_size"):
        return
    stored = module.small(".group_size")
    if len(stored) != 1 or int(stored[0]) not in (size, 0, -1):
        raise CheckpointError(
            f"{module.name('.group_size')} is {stored[:3].tolist()}, and the groups have {size} "
            "values"
        )


def _refuse_switches(module: Module) -> None:
    """Raise `CheckpointError` for what changes the order or the type of tensors."""
    for ending in SWITCHES:
        if module.has(ending) and module.small(ending).any():
            raise CheckpointError(
                f"{module.name(ending)} is on, and such codes or scales are not read"
            )
    if module.has(".channel_wise") and not module.small(".channel_wise").all():
        raise CheckpointError(
            f"{module.name('.channel_wise')} is off: one scale for all is not read"
        )


def _open(module: Module, settings: None) -> QuantizedMatrix:
    for ending in (".packing", ".shape", ".nbits"):
        if not module.has(ending):
            raise CheckpointError(f"{module.name(ending)} must be there, and small")
    layout = _layout(module)
    _refuse_switches(module)
    inputs = layout.inputs

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        # Positions of the values in the matrix of groups, row by row.
        positions = rows[:, None] * inputs + np.arange(inputs)
        row, column = np.divmod(positions, layout.width)
        # A word holds codes of rows that are `steps` apart, the first row in the highest bits.
        place_in_word, word_row = np.divmod(row, layout.steps)
        stored_words = stored["W_q"][word_row, column]
        shifts = layout.bits * (layout.in_word - 1 - place_in_word)
        codes = stored_words >> shifts & (2**layout.bits - 1)
        group = row if layout.by_row else column
        scales = stored["scale"].reshape(-1)[group]
        zeros = stored["zero"].reshape(-1)[group]
        return np.asarray((codes.astype(np.float32) - zeros) * scales)

    # The small tensors were read already; they count among the bytes of the matrix.
    endings = [c.ending for c in HQQ.companions if c is not BIAS and module.has(c.ending)]
    shared = layout.width if layout.by_row else layout.count
    return module.matrix(
        f"HQQ {layout.used_bits:.3g}-bit",
        (layout.outputs, inputs),
        grid=Grid(shared, 2 / max(1, round(2**layout.used_bits - 1))),
        components={ending.lstrip("."): module.component(ending) for ending in endings},
        values=values,
    )


def _settings(settings: Settings) -> None:
    return None


HQQ = QuantizedFormat(
    name="HQQ",
    methods=frozenset({"hqq", ""}),
    signatures=(
        Signature(".W_q", frozenset({"U8", "I32", "F16", "BF16", "F32"}), (".scale", ".nbits")),
    ),
    companions=(
        *companions(
            Effect.VALUES,
            W_q="codes",
            scale="scales of groups",
            zero="zero points of groups",
            packing="bits of a code and type of a word",
            shape="shape of the matrix",
        ),
        *companions(
            Effect.CHECKED,
            nbits="bits of a code",
            axis="axis of the groups",
            group_size="values of a group",
            channel_wise="scales of groups, not one for all",
            quant_scale="whether scales are codes",
            quant_zero="whether zero points are codes",
            view_as_float="whether codes are seen as floats",
            offload_meta="whether scales lie elsewhere",
        ),
        *companions(
            Effect.NONE,
            optimize="calibration",
            round_zero="calibration",
            unpack_view_dtype="type of unpacked codes",
            compute_dtype="type of products",
            encoded_state_dict="whether values are tensors",
            stores_quant_config="whether the configuration is stored",
        ),
        BIAS,
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        *keys(
            Effect.NONE,
            "settings that each module stores as tensors, and modules that are stored plain",
            "quant_config skip_modules modules_to_not_convert nbits group_size axis view_as_float "
            "dynamic_config",
        ),
    ),
    settings=_settings,
    open=_open,
    proof="hqq 0.2.8, bit for bit",
)
