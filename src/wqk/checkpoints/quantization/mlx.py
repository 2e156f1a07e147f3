"""MLX: codes in words of 32 bits, row after row, with scales of groups.

Tensors of a weight (O, I) of b-bit codes with G groups of columns:

- ``weight`` (O, I·b/32), words: the consecutive codes of a row, the first code in the lowest bits;
  a code of 3, 5 or 6 bits may extend over two words;
- ``scales`` (O, G);
- ``biases`` (O, G), only in the affine mode.

==========  ================  ================================  =========================
mode        code              scale, columns of a group         value
==========  ================  ================================  =========================
``affine``  number of b bits  float, as configured              code · scale + bias
``mxfp4``   float, E2M1       exponent with 127 added, 32       float4 · 2^(scale − 127)
``nvfp4``   float, E2M1       8-bit float (E4M3), 16            float4 · scale
``mxfp8``   float, E4M3       exponent with 127 added, 32       float8 · 2^(scale − 127)
==========  ================  ================================  =========================
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.files import unpacked, values_of_codes
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    QuantizedMatrix,
    powers_of_two,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import CORRECT, DEQUANTIZE, FLOATS, Module
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
from wqk.errors import shown

if TYPE_CHECKING:
    import numpy as np


class FloatMode(NamedTuple):
    """A mode with floats as codes: the bits of a code, and the columns of a group."""

    bits: int
    columns: int


FLOAT_MODES = {
    "mxfp4": FloatMode(bits=4, columns=32),
    "nvfp4": FloatMode(bits=4, columns=16),
    "mxfp8": FloatMode(bits=8, columns=32),
}


@dataclass(frozen=True)
class MlxScheme:
    """Mode, columns of a group and bits of a code; empty or None if not set."""

    mode: str = ""
    group: int | None = None
    bits: int | None = None


@dataclass(frozen=True)
class MlxSettings:
    """The default scheme, and schemes of single modules."""

    scheme: MlxScheme
    by_module: Mapping[str, MlxScheme]

    def of(self, module: str) -> MlxScheme:
        """Return the scheme of a module."""
        return self.by_module.get(module, self.scheme)


def _settings(settings: Settings) -> MlxSettings:
    module_settings = {
        name: _scheme(Settings("mlx", value, f"{settings.path}.{name}"))
        for name, value in settings.values.items()
        if isinstance(value, dict)
    }
    return MlxSettings(_scheme(settings), module_settings)


def _scheme(settings: Settings) -> MlxScheme:
    mode = settings.word("mode")
    if mode not in ("", "affine", *FLOAT_MODES):
        raise settings.error(
            f"mode = {shown(mode)} is not known; expected affine, {', '.join(FLOAT_MODES)}; "
            f"{DEQUANTIZE}"
        )
    return MlxScheme(mode, settings.whole("group_size"), settings.whole("bits"))


def _open(module: Module, settings: MlxSettings) -> QuantizedMatrix:
    scheme = settings.of(module.stem)
    scale_type = module.info(".scales").dtype
    has_float_codes = scale_type == "U8"
    if has_float_codes == (scheme.mode in ("", "affine")):
        raise module.error(
            ".scales",
            f"are not those of the mode {scheme.mode or 'affine'}, which the configuration sets "
            "(config.json, quantization.mode)",
            expected=FLOATS.replace(" ", " or ") if has_float_codes else "U8",
            actual=scale_type,
            remedy=CORRECT,
        )
    return _floats(module, scheme) if has_float_codes else _affine(module, scheme)


def _affine(module: Module, scheme: MlxScheme) -> QuantizedMatrix:
    """Return a weight with whole numbers as codes, with scales and biases of groups."""
    outputs, row_words = module.shape(".weight", "U32")
    scales_shape = module.shape(".scales", FLOATS)
    biases_shape = module.shape(".biases", FLOATS)
    if biases_shape != scales_shape or scales_shape[0] != outputs:
        raise module.error(
            ".scales",
            "scales and biases must have a row for each of its outputs",
            expected=f"({outputs}, groups) of both",
            actual=f"{scales_shape} and {biases_shape}",
        )
    groups = scales_shape[1]
    columns_of_group = scheme.group or 0
    inputs = groups * columns_of_group
    row_bits = 32 * row_words
    bits = row_bits // max(1, inputs)
    configured_bits = bits if scheme.bits is None else scheme.bits
    if not 1 <= bits <= 8 or bits * inputs != row_bits or configured_bits != bits:
        raise module.error(
            ".weight",
            "the words of a row do not have the configured codes (config.json, "
            "quantization.group_size and bits)",
            expected=f"{groups} groups of {shown(scheme.group)} codes of {shown(configured_bits)} "
            "bits",
            actual=f"{row_words} words",
            remedy=CORRECT,
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = unpacked(stored["weight"], bits, inputs)
        result = scaled(codes, stored["scales"])
        grouped = result.reshape(len(rows), groups, columns_of_group)
        grouped += stored["biases"][..., None]  # in place: a view of the result
        return result

    return module.matrix(
        f"MLX {bits}-bit",
        (outputs, inputs),
        grid=uniform_grid(bits, columns_of_group),
        components={
            name: module.component(f".{name}", 1) for name in ("weight", "scales", "biases")
        },
        values=values,
    )


def _floats(module: Module, scheme: MlxScheme) -> QuantizedMatrix:
    """Return a weight with floats as codes, with scales that are exponents or 8-bit floats."""
    outputs, row_words = module.shape(".weight", "U32")
    scales_shape = module.shape(".scales", "U8")
    mode = FLOAT_MODES[scheme.mode]
    inputs = 32 * row_words // mode.bits
    groups, remainder = divmod(inputs, mode.columns)
    is_configured = scheme.bits in (None, mode.bits) and scheme.group in (None, mode.columns)
    if not is_configured or scales_shape != (outputs, groups) or remainder:
        raise module.error(
            ".weight",
            f"its words, its scales and the configuration are not those of {scheme.mode}",
            expected=f"codes of {mode.bits} bits, and a scale for {mode.columns} of them",
            actual=f"{row_words} words a row, scales of shape {scales_shape}, and the settings "
            f"bits {shown(scheme.bits)} and group_size {shown(scheme.group)}",
        )
    value_by_code = FLOAT4 if mode.bits == 4 else values_of_codes("F8_E4M3")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        floats = value_by_code[unpacked(stored["weight"], mode.bits, inputs)]
        if scheme.mode == "nvfp4":
            return scaled(floats, values_of_codes("F8_E4M3")[stored["scales"]])
        return scaled(floats, powers_of_two(stored["scales"]))

    return module.matrix(
        f"MLX {scheme.mode}",
        (outputs, inputs),
        grid=Grid(mode.columns, FLOAT4_STEP) if mode.bits == 4 else None,
        components={name: module.component(f".{name}", 1) for name in ("weight", "scales")},
        values=values,
    )


def _by_module(names: str, effect: Effect, meaning: str) -> tuple[Key, ...]:
    """Return keys of the configuration that single modules may also have."""
    paths: list[str] = []
    for name in names.split():
        paths += [name, f"*.{name}"]
    return keys(effect, meaning, " ".join(paths))


MLX = QuantizedFormat(
    name="MLX",
    methods=frozenset({"mlx"}),
    signatures=(Signature(".weight", frozenset({"U32"}), (".scales",)),),
    companions=(
        Companion(".weight", Effect.VALUES, "codes", "always"),
        Companion(".scales", Effect.VALUES, "scales of groups", "always"),
        Companion(".biases", Effect.VALUES, "smallest values of groups", "mode = affine"),
        BIAS,
    ),
    keys=(
        *_by_module("group_size", Effect.VALUES, "columns of a group"),
        *_by_module("bits", Effect.CHECKED, "bits of a code"),
        *_by_module("mode", Effect.VALUES, "affine, mxfp4, mxfp8 or nvfp4"),
        Key("quant_method", Effect.CHECKED, "name of the method"),
        Key("linear_class", Effect.REFUSED, "ternary weights"),
        Key("quantization_mode", Effect.REFUSED, "ternary weights"),
    ),
    settings=_settings,
    open=_open,
    proof="MLX 0.32.4 on a processor, bit for bit; its float modes in float64",
)
