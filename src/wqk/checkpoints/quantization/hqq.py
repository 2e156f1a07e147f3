"""HQQ: groups are rows or columns of a matrix of codes; a word contains codes of distant rows.

The codes (C, S) of a matrix (O, I) are its values in order, C·S = O·I. Along axis 1 each row of
codes is a group, along axis 0 each column. Tensors of the matrix:

- ``W_q`` (T, S), words of k codes of b bits; ``packing`` names b and the type of a word. There are
  T = C / k rows of words, rounded up. Word t of a column has the codes of the rows t, T + t, 2T +
  t, …, the first code in the highest of its k·b used bits;
- ``scale`` and ``zero``, (C, 1) along axis 1, (1, S) along axis 0;
- ``shape``, the numbers O and I; ``nbits``, the used bits of a code; ``packing``, a name in bytes.

A value is (code − zero) · scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.quantization.matrix import Arrays, QuantizedMatrix, ceil_divide
from wqk.checkpoints.quantization.module import DEQUANTIZE, FLOATS, REQUANTIZE, Module
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    BIAS,
    Effect,
    QuantizedFormat,
    Signature,
    companions,
    keys,
)
from wqk.errors import CheckpointError, shown


class Packing(NamedTuple):
    """The storage of codes: bits of a code, codes in a word, and the type of the word."""

    bits: int
    codes_of_word: int
    word_type: str


PACKING = {
    b"8bit_u8": Packing(bits=8, codes_of_word=1, word_type="U8"),
    b"4bit_u8": Packing(bits=4, codes_of_word=2, word_type="U8"),
    b"3bit_32": Packing(bits=3, codes_of_word=10, word_type="I32"),
    b"2bit_u8": Packing(bits=2, codes_of_word=4, word_type="U8"),
    b"1bit_u8": Packing(bits=1, codes_of_word=8, word_type="U8"),
}

# Switches stored as tensors; weights with a switch on are not read.
SWITCHES = (".quant_scale", ".quant_zero", ".view_as_float", ".offload_meta")


@dataclass(frozen=True)
class _CodeMatrix:
    """The matrix of codes (C, S) of one weight (O, I).

    Attributes
    ----------
    outputs, inputs
        O and I.
    code_rows, width
        C and S.
    packing
        The storage of codes in words.
    used_bits
        Used bits of a code; a fraction if the number of values is not a power of two.
    has_row_groups
        Whether a group is a row of codes (axis 1) instead of a column (axis 0).
    """

    outputs: int
    inputs: int
    code_rows: int
    width: int
    packing: Packing
    used_bits: float
    has_row_groups: bool

    @property
    def word_rows(self) -> int:
        """Number of rows of words, T."""
        return ceil_divide(self.code_rows, self.packing.codes_of_word)

    @property
    def values_of_group(self) -> int:
        """Number of values that share a scale."""
        return self.width if self.has_row_groups else self.code_rows

    def codes_at(self, words: np.ndarray, row: np.ndarray, column: np.ndarray) -> np.ndarray:
        """Return the codes in these rows and columns from the words (T, S)."""
        place_in_word, word_row = np.divmod(row, self.word_rows)
        shifts = self.packing.bits * (self.packing.codes_of_word - 1 - place_in_word)
        largest_code = 2**self.packing.bits - 1
        codes: np.ndarray = (words[word_row, column] >> shifts) & largest_code
        return codes


def _code_matrix(module: Module) -> _CodeMatrix:
    """Return the matrix of codes of a module; `CheckpointError` if tensors do not fit."""
    packing = _packing(module)
    word_rows, width = module.shape(".W_q", packing.word_type)
    scales_shape = module.shape(".scale", FLOATS)
    outputs, inputs = _stored_shape(module)
    used_bits = _used_bits(module, packing)
    code_rows, remainder = divmod(outputs * inputs, width)
    fitting_axes = []
    if scales_shape == (code_rows, 1):
        fitting_axes.append(1)
    if scales_shape == (1, width):
        fitting_axes.append(0)
    has_words = remainder == 0 and word_rows == ceil_divide(code_rows, packing.codes_of_word)
    if not has_words or not fitting_axes or module.shape(".zero", FLOATS) != scales_shape:
        raise module.error(
            "",
            "HQQ's W_q, scales, zeros, nbits, packing and shape do not fit together",
            expected=f"words and scales of {outputs} × {inputs} codes of {packing.bits} bits",
            actual=f"W_q of shape {(word_rows, width)} and scales of shape {scales_shape}",
        )
    axis = _axis(module, fitting_axes)
    matrix = _CodeMatrix(
        outputs=outputs,
        inputs=inputs,
        code_rows=code_rows,
        width=width,
        packing=packing,
        used_bits=used_bits,
        has_row_groups=axis == 1,
    )
    _require_group(module, matrix.values_of_group)
    return matrix


def _packing(module: Module) -> Packing:
    """Return the storage of codes from ``packing``; `CheckpointError` for an unknown name."""
    stored = module.small(".packing")
    name = stored.astype(np.uint8).tobytes() if stored.dtype.kind in "iu" else b""
    if name not in PACKING:
        raise module.error(
            ".packing",
            "must be bytes of a name",
            expected=" or ".join(known.decode() for known in PACKING),
            actual=shown(stored[:16].tolist()),
        )
    return PACKING[name]


def _stored_shape(module: Module) -> tuple[int, int]:
    """Return the shape (O, I) from ``shape``; `CheckpointError` for other contents."""
    stored = module.small(".shape")
    is_shape = stored.dtype.kind == "i" and len(stored) == 2 and bool((stored > 0).all())
    if not is_shape:
        raise module.error(
            ".shape",
            "is not the shape of a matrix",
            expected="two positive whole numbers",
            actual=shown(stored[:3].tolist()),
        )
    outputs, inputs = map(int, stored)
    return outputs, inputs


def _used_bits(module: Module, packing: Packing) -> float:
    """Return the used bits of a code; `CheckpointError` for more bits than a code has."""
    stored = module.small(".nbits")
    bits = float(stored[0]) if len(stored) == 1 else 0.0
    if not 1 <= bits <= packing.bits:
        raise module.error(
            ".nbits",
            "does not fit the packing",
            expected=f"one number from 1 to {packing.bits}",
            actual=shown(stored[:3].tolist()),
        )
    return bits


def _axis(module: Module, fitting_axes: list[int]) -> int:
    """Return the stored axis of groups; without ``axis``, the only one that fits the scales."""
    if module.has(".axis"):
        stored = module.small(".axis")
        if len(stored) != 1 or stored[0] not in fitting_axes:
            raise module.error(
                ".axis",
                "is not the axis that the shape of the scales has",
                expected=" or ".join(map(str, fitting_axes)),
                actual=shown(stored[:3].tolist()),
            )
        return int(stored[0])
    if len(fitting_axes) > 1 and module.shape(".scale", FLOATS) != (1, 1):
        raise CheckpointError(
            f"{module.name('.axis')}: is missing, and both axes fit the scales; expected 0 or 1; "
            f"{REQUANTIZE}"
        )
    return fitting_axes[0]


def _require_group(module: Module, values_of_group: int) -> None:
    """Raise `CheckpointError` if the stored size of a group differs from the actual size."""
    if not module.has(".group_size"):
        return
    stored = module.small(".group_size")
    if len(stored) != 1 or stored[0] not in (values_of_group, 0, -1):
        raise module.error(
            ".group_size",
            "is not the number of values that share a scale",
            expected=values_of_group,
            actual=shown(stored[:3].tolist()),
        )


def _refuse_switches(module: Module) -> None:
    """Raise `CheckpointError` for a switch that changes the order or the type of tensors."""
    for ending in SWITCHES:
        if module.has(ending) and module.small(ending).any():
            raise module.error(
                ending,
                "is on, and such codes or scales are not read",
                expected=0,
                actual=shown(module.small(ending)[:3].tolist()),
                remedy=DEQUANTIZE,
            )
    if module.has(".channel_wise") and not module.small(".channel_wise").all():
        raise module.error(
            ".channel_wise",
            "is off: one scale for all is not read",
            expected=1,
            actual=shown(module.small(".channel_wise")[:3].tolist()),
            remedy=DEQUANTIZE,
        )


def _open(module: Module, settings: None) -> QuantizedMatrix:
    matrix = _code_matrix(module)
    _refuse_switches(module)
    inputs = matrix.inputs

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        # Values of the weight lie in the matrix of codes one after the other, row by row.
        positions = rows[:, None] * inputs + np.arange(inputs)
        row, column = np.divmod(positions, matrix.width)
        codes = matrix.codes_at(stored["W_q"], row, column)
        group = row if matrix.has_row_groups else column
        scales = stored["scale"].reshape(-1)[group]
        zeros = stored["zero"].reshape(-1)[group]
        result: np.ndarray = (codes.astype(np.float32) - zeros) * scales
        return result

    # The small tensors were read already; they count among the bytes of the matrix.
    endings = [c.ending for c in HQQ.companions if c is not BIAS and module.has(c.ending)]
    steps = max(1, round(2**matrix.used_bits - 1))  # between the smallest and the largest code
    return module.matrix(
        f"HQQ {matrix.used_bits:.3g}-bit",
        (matrix.outputs, inputs),
        grid=Grid(matrix.values_of_group, 2 / steps),
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
