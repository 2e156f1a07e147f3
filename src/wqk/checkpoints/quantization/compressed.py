"""compressed-tensors: whole numbers in words or bytes, 8-bit and 4-bit floats, with scales.

The configuration groups modules by their names or their class, and gives the weights of each group
a scheme: bits, type, symmetry, and which values share a scale. A module takes the scheme of the
first group that targets it, its full name before a pattern, a pattern before its class.

NVFP4 has scales in float8 under one global scale, by which they are divided. (ModelOpt multiplies
by its reciprocal, under another name: `wqk.checkpoints.quantization.modelopt`.) Rotations while the
model runs are those of `wqk.checkpoints.quantization.transforms`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.files import unpacked
from wqk.checkpoints.quantization.float8 import float8_matrix
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    Component,
    QuantizedMatrix,
    group_size,
    nibbles,
    powers_of_two,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import FLOATS, Module, size
from wqk.checkpoints.quantization.quantization_settings import Settings
from wqk.checkpoints.quantization.table import (
    ACTIVATIONS,
    BIAS,
    Companion,
    Effect,
    Key,
    QuantizedFormat,
    Signature,
    keys,
)
from wqk.errors import CheckpointError, shown

STRATEGIES = ("tensor", "channel", "group", "block", "tensor_group")

# Types of a stored zero point that has not been packed.
ZERO_TYPES = "I8 I32 I64"


@dataclass(frozen=True)
class WeightScheme:
    """The storage of the weights of one group of modules.

    Attributes
    ----------
    bits
        Bits of a code.
    is_float
        Whether codes are floats, not whole numbers.
    symmetric
        Whether there are no zero points; None without a configuration.
    strategy
        Values that share a scale; empty if not set.
    group
        Columns of a group; None if not set.
    block
        Rows and columns of a block; None if not set.
    ordered
        Whether columns were sorted before they were grouped.
    """

    bits: int
    is_float: bool = False
    symmetric: bool | None = True
    strategy: str = ""
    group: int | None = None
    block: tuple[int, int] | None = None
    ordered: bool = False


@dataclass(frozen=True)
class CompressedSettings:
    """Schemes by the modules that they are for, and modules that are stored plain."""

    schemes: tuple[tuple[tuple[str, ...], WeightScheme], ...] = ()
    ignore: tuple[str, ...] = ()

    def lists_as_plain(self, module: str) -> bool:
        """Return whether the configuration has a module, by name or pattern, stored plain."""
        return any(_rank(target, module) < 2 for target in self.ignore)

    def of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module; None without a configuration.

        Raises
        ------
        CheckpointError
            There are several schemes, and none of them targets the module.
        """
        distinct = list(dict.fromkeys(scheme for _, scheme in self.schemes))
        if len(distinct) <= 1:
            return distinct[0] if distinct else None
        ranks = [
            (rank, scheme)
            for targets, scheme in self.schemes
            if (rank := min((_rank(target, module) for target in targets), default=9)) < 9
        ]
        if not ranks:
            raise CheckpointError(
                f"{module}: none of the groups of modules in quantization_config.config_groups, "
                "which differ, targets it"
            )
        return min(ranks, key=lambda entry: entry[0])[1]


def _rank(target: str, module: str) -> int:
    """Return how closely a target names a module: 0 its name, 1 a pattern, 2 its class; or 9."""
    if target == module:
        return 0
    if target.startswith("re:"):
        return 1 if re.match(target[3:], module) else 9
    return 2 if target[:1].isupper() else 9


def _settings(settings: Settings) -> CompressedSettings:
    groups = settings.values.get("config_groups") or {}
    ignore = settings.values.get("ignore") or []
    if not isinstance(groups, dict) or (ignore and not _are_patterns(ignore)):
        raise settings.error("config_groups must be an object, and ignore names of modules")
    schemes: list[tuple[tuple[str, ...], WeightScheme]] = []
    for name, group in groups.items():
        match group:
            case {"weights": {} as weights, **rest}:
                targets: Any = rest.get("targets") or ["Linear"]
                if not _are_patterns(targets):
                    raise settings.error(f"config_groups.{name}.targets must be names of modules")
                schemes.append((tuple(targets), _scheme(settings, name, weights)))
    return CompressedSettings(tuple(schemes), tuple(ignore))


def _are_patterns(targets: Any) -> bool:
    if not isinstance(targets, list) or not all(
        isinstance(target_name, str) for target_name in targets
    ):
        return False
    try:
        for target in targets:
            re.compile(target.removeprefix("re:"))
    except re.error:
        return False
    return True


def _scheme(settings: Settings, group: str, weights: Mapping[str, Any]) -> WeightScheme:
    """Read the scheme of one group of modules."""
    weight_settings = Settings(
        settings.method, weights, f"{settings.path}.config_groups.{group}.weights"
    )
    bits = 8 if weights.get("num_bits") is None else weight_settings.whole("num_bits")
    kind = weight_settings.word("type") or "int"
    strategy, actorder = weight_settings.word("strategy"), weights.get("actorder")
    if bits is None or not 1 <= bits <= 8 or kind not in ("int", "float"):
        raise weight_settings.error(
            f"expected num_bits from 1 to 8 and type int or float, got {shown(bits)} and {kind}"
        )
    if strategy not in ("", *STRATEGIES):
        raise weight_settings.error(f"strategy = {strategy} is not one of {', '.join(STRATEGIES)}")
    if actorder not in (None, False, True, "group", "dynamic", "weight", "static"):
        raise weight_settings.error(f"actorder = {shown(actorder)} is not known")
    block = weights.get("block_structure")
    match block:
        case None:
            sides = None
        case [int(high), int(wide)] if high > 0 and wide > 0:
            sides = (high, wide)
        case str() if re.fullmatch(r"[1-9]\d*x[1-9]\d*", block):
            high, wide = map(int, block.split("x"))
            sides = (high, wide)
        case _:
            raise weight_settings.error(
                f"block_structure must be rows and columns, got {shown(block)}"
            )
    if (sides is None) == (strategy == "block"):
        raise weight_settings.error("block_structure is set, and only then, for the strategy block")
    columns = weight_settings.whole("group_size")
    return WeightScheme(
        bits=bits,
        is_float=kind == "float",
        symmetric=weights.get("symmetric") is None or weight_settings.switch("symmetric"),
        strategy=strategy,
        group=None if columns in (None, -1) else columns,
        block=sides,
        ordered=actorder in (True, "group", "dynamic"),
    )


@dataclass(frozen=True)
class _Scales:
    """Scales of a matrix of whole numbers: their component and the groups of a row."""

    component: Component
    groups: int


def _scales(
    module: Module, scheme: WeightScheme | None, outputs: int, inputs: int, ending: str
) -> _Scales:
    """Return the scales of rows, or of groups of their columns; or one for all.

    Raises `CheckpointError` if they are not those of the scheme.
    """
    shape = module.shape(ending, FLOATS, axes=None)
    name = module.name(ending)
    if size(shape) == 1:
        groups, by_row = 1, outputs == 1
    elif shape[0] != outputs or len(shape) > 2:
        raise CheckpointError(f"{name} of shape {shape} for {outputs} outputs")
    else:
        groups, by_row = size(shape[1:]), True
    columns = group_size(inputs, groups, name)
    if scheme:
        has_groups = scheme.strategy in ("group", "tensor_group")
        expected = {"tensor": size(shape) == 1, "channel": groups == 1}
        fits = expected.get(scheme.strategy, True)
        if scheme.strategy == "block" or not fits or (scheme.group and scheme.group != columns):
            of_size = f" of {scheme.group}" if has_groups else ""
            raise CheckpointError(
                f"{name} of shape {shape} are not the scales that the configuration sets: strategy "
                f"{scheme.strategy or 'not set'}{of_size}, for {outputs} outputs of {inputs} inputs"
            )
    return _Scales(module.component(ending, int(by_row)), groups)


def _check_symmetry(module: Module, scheme: WeightScheme | None) -> None:
    """Raise `CheckpointError` for promised companions that are missing."""
    if scheme and not scheme.symmetric:
        module.require_promised(".weight_zero_point", "symmetric = false")
    if scheme and scheme.ordered:
        module.require_promised(".weight_g_idx", "actorder, the order of columns")


def _order(module: Module, inputs: int) -> dict[str, Component]:
    """Return the groups of columns as a component, if they are stored."""
    if not module.has(".weight_g_idx"):
        return {}
    module.require(".weight_g_idx", (inputs,), "I32 I64")
    return {"group_of": module.component(".weight_g_idx")}


def _group_of(stored: Arrays) -> np.ndarray | None:
    """Return the groups of columns; None if they are neighbors, which −1 stands for."""
    group_of = stored.get("group_of")
    return None if group_of is None or (group_of == -1).any() else group_of


def _refuse_zeros(name: str, zeros: np.ndarray, scheme: WeightScheme | None) -> None:
    """Raise `CheckpointError` for zero points that the configuration excludes."""
    if scheme and scheme.symmetric and zeros.any():
        raise CheckpointError(
            f"{name} has zero points that are not 0, although the configuration sets symmetric"
        )


def _open(module: Module, settings: CompressedSettings) -> QuantizedMatrix:
    scheme = settings.of(module.stem)
    dtype = module.info(module.codes).dtype
    if module.codes == ".weight_packed":
        opened = (_packed_floats if dtype == "U8" else _packed)(module, scheme)
    elif dtype == "I8":
        opened = _integers(module, scheme)
    else:
        opened = _float8(module, scheme)
    if settings.lists_as_plain(module.stem):
        return replace(
            opened,
            note="quantization_config.ignore lists modules that are stored quantized; they are "
            "read as they are stored",
        )
    return opened


def _packed(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Whole numbers in words of 32 bits, one row after the other."""
    outputs, width = module.shape(".weight_packed", "I32")
    if scheme is None:
        raise CheckpointError(
            f"{module.stem}: config.json must set the bits of packed weights "
            "(quantization_config.config_groups.*.weights.num_bits)"
        )
    if scheme.is_float:
        raise CheckpointError(
            f"{module.name('.weight_packed')} has words of whole numbers, and the configuration "
            "sets the type float"
        )
    bits = scheme.bits
    if width * 32 % bits:
        raise CheckpointError(
            f"{module.name('.weight_packed')}: {width} words are no whole number of codes of "
            f"{bits} bits"
        )
    inputs = width * 32 // bits
    _check_symmetry(module, scheme)
    scales = _scales(module, scheme, outputs, inputs, ".weight_scale")
    components = {
        "codes": module.component(".weight_packed", 1),
        "scales": scales.component,
        **_order(module, inputs),
    }
    zero_name, packs_zeros = module.name(".weight_zero_point"), False
    if module.has(".weight_zero_point"):
        packs_zeros = module.info(".weight_zero_point").dtype == "I32"
        rows = -(-outputs * bits // 32) if packs_zeros else outputs
        module.require(".weight_zero_point", (rows, scales.groups), "I32 I8")
        components["zeros"] = module.component(".weight_zero_point")
    if module.has(".weight_shape"):
        module.require(".weight_shape", (2,), "I32 I64")
        components["shape"] = module.component(".weight_shape")
    offset = 2 ** (bits - 1)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if "shape" in stored and [*stored["shape"]] != [outputs, inputs]:
            raise CheckpointError(
                f"{module.name('.weight_shape')} is {[*map(int, stored['shape'])]}, and {width} "
                f"words of {bits} bits hold {inputs} inputs; padded rows are not read"
            )
        codes = unpacked(stored["codes"], bits, inputs)
        zeros = stored.get("zeros")
        if zeros is not None:
            if packs_zeros:
                zeros = unpacked(zeros.T, bits, outputs).T - offset
            _refuse_zeros(zero_name, zeros, scheme)
            zeros = zeros[rows]
        grouped = stored["scales"].reshape(-1, scales.groups)
        return scaled(codes - offset, _by_row(grouped, codes), zeros, _group_of(stored))

    return module.matrix(
        f"INT {bits}-bit",
        (outputs, inputs),
        grid=uniform_grid(bits, inputs // scales.groups),
        components=components,
        values=values,
        groups=scales.groups,
    )


def _by_row(scales: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Repeat one scale of all for each row."""
    return np.broadcast_to(scales, (len(codes), scales.shape[1]))


def _integers(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Whole numbers, one in a byte."""
    outputs, inputs = module.shape(".weight", "I8")
    if scheme and scheme.is_float:
        raise CheckpointError(
            f"{module.name('.weight')} has whole numbers, and the configuration sets the type float"
        )
    _check_symmetry(module, scheme)
    scales = _scales(module, scheme, outputs, inputs, ".weight_scale")
    components = {
        "codes": module.component(".weight", 1),
        "scales": scales.component,
        **_order(module, inputs),
    }
    if module.has(".weight_zero_point"):
        shape = module.shape(".weight_zero_point", ZERO_TYPES, axes=None)
        rows = outputs if scales.component.rows else 1
        if size(shape) != rows * scales.groups or shape[0] != rows:
            raise CheckpointError(
                f"{module.name('.weight_zero_point')} must have one entry for each scale"
            )
        components["zeros"] = module.component(".weight_zero_point", scales.component.rows)
    zero_name = module.name(".weight_zero_point")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        grouped = _by_row(stored["scales"].reshape(-1, scales.groups), stored["codes"])
        zeros = stored.get("zeros")
        if zeros is not None:
            _refuse_zeros(zero_name, zeros, scheme)
            zeros = _by_row(zeros.reshape(-1, scales.groups), stored["codes"])
        return scaled(stored["codes"], grouped, zeros, _group_of(stored))

    bits = scheme.bits if scheme else 8
    return module.matrix(
        f"INT {bits}-bit",
        (outputs, inputs),
        grid=uniform_grid(bits, inputs // scales.groups),
        components=components,
        values=values,
        groups=scales.groups if module.has(".weight_g_idx") else 0,
    )


def _packed_floats(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Two 4-bit floats in a byte: NVFP4, scales in float8; and MXFP4, scales that are exponents."""
    outputs, half = module.shape(".weight_packed", "U8")
    scales = module.shape(".weight_scale", "F8_E4M3 U8 F8_E8M0")
    is_nvidia = module.info(".weight_scale").dtype == "F8_E4M3"
    if scales[0] != outputs:
        raise CheckpointError(
            f"{module.name('.weight_scale')} of shape {scales} for {outputs} outputs"
        )
    shared = group_size(2 * half, scales[1], module.name(".weight_scale"))
    if scheme:
        if not scheme.is_float or scheme.bits != 4 or scheme.symmetric is False or scheme.ordered:
            raise CheckpointError(
                f"{module.name('.weight_packed')} has 4-bit floats, and the configuration sets "
                f"{'float' if scheme.is_float else 'int'} of {scheme.bits} bits, "
                f"{'symmetric' if scheme.symmetric else 'with zero points'}"
            )
        if scheme.group not in (None, shared):
            raise CheckpointError(
                f"{module.name('.weight_scale')} of shape {scales} has groups of {shared}, and the "
                f"configuration sets {scheme.group}"
            )
    components = {
        "codes": module.component(".weight_packed", 1),
        "scales": module.component(".weight_scale", 1),
    }
    if is_nvidia:
        if size(module.shape(".weight_global_scale", "F32", axes=None)) != 1:
            raise CheckpointError(f"{module.name('.weight_global_scale')} must be one number")
        components["global"] = module.component(".weight_global_scale")
    elif module.has(".weight_global_scale"):
        raise CheckpointError(
            f"{module.name('.weight_scale')} has exponents, as MXFP4, next to the global scale of "
            "NVFP4: which of the two formats it is, the file leaves open"
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if is_nvidia:
            scales = stored["scales"] / stored["global"].reshape(())
        else:
            scales = powers_of_two(stored["scales"])
        return scaled(FLOAT4[nibbles(stored["codes"])], scales)

    return module.matrix(
        "NVFP4" if is_nvidia else "MXFP4",
        (outputs, 2 * half),
        grid=Grid(shared, FLOAT4_STEP),
        components=components,
        values=values,
    )


def _float8(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """8-bit floats with scales of the tensor, rows, groups or blocks."""
    if scheme and (not scheme.is_float or scheme.bits != 8 or scheme.symmetric is False):
        raise CheckpointError(
            f"{module.name('.weight')} has 8-bit floats, and the configuration sets "
            f"{'float' if scheme.is_float else 'int'} of {scheme.bits} bits, "
            f"{'symmetric' if scheme.symmetric else 'with zero points'}"
        )
    strategy = scheme.strategy if scheme else ""
    block = scheme.block if scheme else None
    if scheme and strategy == "group" and scheme.group:
        block = (1, scheme.group)
    return float8_matrix(
        module, ".weight_scale", block=block, strategy=strategy, exponents_in_bytes=True
    )


COMPRESSED = QuantizedFormat(
    name="compressed-tensors",
    methods=frozenset({"compressed-tensors", ""}),
    signatures=(
        Signature(".weight_packed", frozenset({"I32", "U8"}), (".weight_scale",)),
        Signature(".weight", frozenset({"I8"}), (".weight_scale",)),
        Signature(".weight", frozenset({"F8_E4M3", "F8_E5M2"}), (".weight_scale",)),
    ),
    companions=(
        Companion(".weight_packed", Effect.VALUES, "codes in words; two 4-bit floats in a byte"),
        Companion(".weight", Effect.VALUES, "codes in bytes; 8-bit floats"),
        Companion(".weight_scale", Effect.VALUES, "scales", "always"),
        Companion(".weight_zero_point", Effect.VALUES, "zero points", "symmetric = false"),
        Companion(".weight_g_idx", Effect.VALUES, "group of each column", "actorder = group"),
        Companion(".weight_global_scale", Effect.VALUES, "divisor of the scales", "NVFP4"),
        Companion(".weight_shape", Effect.CHECKED, "shape of the matrix"),
        BIAS,
        *ACTIVATIONS,
        Companion(
            ".*_input.weight", Effect.VALUES, "matrix that rotates inputs", "transform_config"
        ),
        Companion(".*_input.perm", Effect.VALUES, "order of the rows of that matrix", "randomize"),
        Companion(
            ".*_output.weight", Effect.VALUES, "matrix that rotates outputs", "transform_config"
        ),
        Companion(".*_output.perm", Effect.VALUES, "order of the rows of that matrix", "randomize"),
    ),
    keys=(
        *keys(Effect.CHECKED, "name of the method", "quant_method"),
        Key("config_groups.*.targets", Effect.VALUES, "modules of a group"),
        Key("config_groups.*.weights.num_bits", Effect.VALUES, "bits of a code"),
        Key("config_groups.*.weights.type", Effect.CHECKED, "whole numbers or floats"),
        Key("config_groups.*.weights.symmetric", Effect.CHECKED, "false: there are zero points"),
        Key("config_groups.*.weights.strategy", Effect.CHECKED, "values that share a scale"),
        Key("config_groups.*.weights.group_size", Effect.CHECKED, "columns of a group"),
        Key(
            "config_groups.*.weights.block_structure", Effect.VALUES, "rows and columns of a block"
        ),
        Key("config_groups.*.weights.actorder", Effect.CHECKED, "group: weight_g_idx is there"),
        Key(
            "config_groups.*.weights.dynamic", Effect.REFUSED, "weights that are scaled at run time"
        ),
        *keys(
            Effect.NONE,
            "calibration, and types of scales",
            "config_groups.*.weights.observer config_groups.*.weights.observer_kwargs "
            "config_groups.*.weights.scale_dtype config_groups.*.weights.zp_dtype "
            "config_groups.*.input_activations config_groups.*.output_activations "
            "config_groups.*.format format kv_cache_scheme quantization_status "
            "global_compression_ratio version moe_sparsity_config run_compressed dequantize "
            "use_optimized_inference",
        ),
        Key("ignore", Effect.CHECKED, "modules that are stored plain"),
        Key("sparsity_config.format", Effect.REFUSED, "sparse weights", neutral=("dense",)),
        *keys(
            Effect.NONE,
            "sparsity of weights that are stored dense",
            "sparsity_config.apply_mask sparsity_config.global_sparsity sparsity_config.ignore "
            "sparsity_config.registry_requires_subclass sparsity_config.sparsity_structure "
            "sparsity_config.targets",
        ),
        Key(
            "transform_config", Effect.VALUES, "rotations of inputs and outputs of modules, undone"
        ),
    ),
    settings=_settings,
    open=_open,
    proof="compressed-tensors 0.20.0, bit for bit, NVFP4 to its rounding to bfloat16",
)
