"""MLX: codes in words of 32 bits, row after row, with scales of groups.

In its affine mode a value is scale · code + bias. In its other modes, whose scales are bytes, codes
are floats: 4 bits with exponents for 32 columns (mxfp4) or 8-bit floats for 16 (nvfp4), 8 bits with
exponents for 32 columns (mxfp8).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

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
from wqk.checkpoints.quantization.module import FLOATS, Module
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

if TYPE_CHECKING:
    import numpy as np

# Bits and columns of a group in modes whose codes are floats.
FLOAT_MODES = {"mxfp4": (4, 32), "nvfp4": (4, 16), "mxfp8": (8, 32)}


@dataclass(frozen=True)
class MlxScheme:
    """Mode, columns of a group and bits of a code; empty or None if not set."""

    mode: str = ""
    group: int | None = None
    bits: int | None = None


@dataclass(frozen=True)
class MlxSettings:
    """The scheme of most modules, and those of single ones."""

    scheme: MlxScheme
    by_module: Mapping[str, MlxScheme]

    def of(self, module: str) -> MlxScheme:
        """Return the scheme of one module."""
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
        raise settings.error(f"mode = {shown(mode)} is not known")
    return MlxScheme(mode, settings.whole("group_size"), settings.whole("bits"))


def _open(module: Module, settings: MlxSettings) -> QuantizedMatrix:
    scheme = settings.of(module.stem)
    are_bytes = module.info(".scales").dtype == "U8"
    if are_bytes == (scheme.mode in ("", "affine")):
        raise CheckpointError(
            f"{module.name('.scales')} of type {module.info('.scales').dtype} are not those of the "
            f"mode {scheme.mode or 'affine'}, which the configuration sets "
            "(config.json, quantization.mode)"
        )
    return _floats(module, scheme) if are_bytes else _affine(module, scheme)


def _affine(module: Module, scheme: MlxScheme) -> QuantizedMatrix:
    outputs, row_words = module.shape(".weight", "U32")
    scales = module.shape(".scales", FLOATS)
    if module.shape(".biases", FLOATS) != scales or scales[0] != outputs:
        raise CheckpointError(
            f"{module.name('.scales')} and biases must have a row for each of its outputs"
        )
    shared = scheme.group or 0
    bits = 32 * row_words // max(1, scales[1] * shared)
    configured = bits if scheme.bits is None else scheme.bits
    if not 1 <= bits <= 8 or bits * scales[1] * shared != 32 * row_words or configured != bits:
        raise CheckpointError(
            f"{module.name('.weight')}: {row_words} words are not {scales[1]} groups of "
            f"{shown(scheme.group)} codes of {shown(configured)} bits "
            "(config.json, quantization.group_size and bits)"
        )
    inputs = shared * scales[1]

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        result = scaled(unpacked(stored["weight"], bits, inputs), stored["scales"])
        result.reshape(len(rows), scales[1], -1)[...] += stored["biases"][..., None]
        return result

    return module.matrix(
        f"MLX {bits}-bit",
        (outputs, inputs),
        grid=uniform_grid(bits, shared),
        components={
            name: module.component(f".{name}", 1) for name in ("weight", "scales", "biases")
        },
        values=values,
    )


def _floats(module: Module, scheme: MlxScheme) -> QuantizedMatrix:
    """Codes that are floats, with scales that are exponents or 8-bit floats."""
    outputs, row_words = module.shape(".weight", "U32")
    scales = module.shape(".scales", "U8")
    bits, shared = FLOAT_MODES[scheme.mode]
    inputs = 32 * row_words // bits
    is_configured = scheme.bits in (None, bits) and scheme.group in (None, shared)
    if not is_configured or scales != (outputs, inputs // shared) or inputs % shared:
        raise CheckpointError(
            f"{module.name('.weight')}: {row_words} words and scales of shape {scales} are not "
            f"{outputs} rows of {scheme.mode}, {bits} bits in groups of {shared}"
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = unpacked(stored["weight"], bits, inputs)
        floats = FLOAT4[codes] if bits == 4 else values_of_codes("F8_E4M3")[codes]
        if scheme.mode == "nvfp4":
            return scaled(floats, values_of_codes("F8_E4M3")[stored["scales"]])
        return scaled(floats, powers_of_two(stored["scales"]))

    return module.matrix(
        f"MLX {scheme.mode}",
        (outputs, inputs),
        grid=Grid(shared, FLOAT4_STEP) if bits == 4 else None,
        components={name: module.component(f".{name}", 1) for name in ("weight", "scales")},
        values=values,
    )


def _by_module(names: str, effect: Effect, meaning: str) -> tuple[Key, ...]:
    """Return keys of the configuration that single modules may also have."""
    both = (name for key in names.split() for name in (key, f"*.{key}"))
    return keys(effect, meaning, " ".join(both))


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
