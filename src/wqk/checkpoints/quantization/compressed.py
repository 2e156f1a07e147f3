"""compressed-tensors: whole numbers in words or bytes, 8-bit and 4-bit floats, with scales.

The configuration groups modules by their names or their class, and gives the weights of each group
a scheme: bits, type, symmetry, and which values share a scale. A module has the scheme of the first
group that targets the module; its full name has priority over patterns, and patterns over its
class.

Tensors of a weight (O, I) with G groups of columns:

- whole numbers of b bits in words: ``weight_packed`` (O, W) of 32-bit words. The codes of a row are
  consecutive, the first code in the lowest bits. 2^(b − 1) is subtracted from each code;
- whole numbers in bytes: ``weight`` (O, I);
- 8-bit floats: ``weight`` (O, I), see `wqk.checkpoints.quantization.float8`;
- 4-bit floats (E2M1): ``weight_packed`` (O, I/2), bytes with two codes, the left column in the low
  bits. NVFP4 has ``weight_scale`` in float8, divided by ``weight_global_scale``, one number. MXFP4
  has exponents of two with 127 added in ``weight_scale``.

``weight_scale`` is (O, G), (O,) or one number. ``weight_zero_point`` has one entry for each scale,
as a plain number or, if it is of 32-bit words, packed as codes of b bits along the outputs.
``weight_g_idx`` (I,) is the group of each column. A value of whole numbers is
(code − zero) · scale.

ModelOpt multiplies the scales of NVFP4 by the reciprocal of the global scale, under another name
(`wqk.checkpoints.quantization.modelopt`). `wqk.checkpoints.quantization.transforms` handles
rotations while the model runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np

from wqk.checkpoints.checkpoint import Grid
from wqk.checkpoints.files import unpacked
from wqk.checkpoints.quantization.float8 import Block, float8_matrix
from wqk.checkpoints.quantization.matrix import (
    FLOAT4,
    FLOAT4_STEP,
    Arrays,
    Component,
    QuantizedMatrix,
    ceil_divide,
    group_size,
    nibbles,
    powers_of_two,
    scaled,
    uniform_grid,
)
from wqk.checkpoints.quantization.module import CORRECT, FLOATS, Module, size
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

# Values of ``actorder`` with columns in sorted groups, and values without an effect.
ORDERING = (True, "group", "dynamic")
UNORDERED = ("weight", "static")

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
        Whether zero points are absent; None without a configuration.
    strategy
        Kind of values that share a scale; empty if not set.
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
    block: Block | None = None
    ordered: bool = False

    def __str__(self) -> str:
        kind = "float" if self.is_float else "int"
        zeros = "symmetric" if self.symmetric else "with zero points"
        return f"{kind} of {self.bits} bits, {zeros}"


class ModuleGroup(NamedTuple):
    """Names, patterns and classes of modules, and the scheme of these modules."""

    targets: tuple[str, ...]
    scheme: WeightScheme


class Closeness(IntEnum):
    """Kinds of targets that match a module, the closest first."""

    NAME = 0
    PATTERN = 1
    CLASS = 2


@dataclass(frozen=True)
class CompressedSettings:
    """Schemes of groups of modules, and modules that are stored plain."""

    groups: tuple[ModuleGroup, ...] = ()
    ignore: tuple[str, ...] = ()

    def lists_as_plain(self, module: str) -> bool:
        """Return whether the configuration lists a module, by name or pattern, as plain."""
        exact = (Closeness.NAME, Closeness.PATTERN)
        return any(_closeness(target, module) in exact for target in self.ignore)

    def of(self, module: str) -> WeightScheme | None:
        """Return the scheme of a module; None without a configuration.

        If all groups have one scheme, every module has this scheme. Otherwise the group with the
        closest target is chosen; among equally close targets, the first.

        Raises
        ------
        CheckpointError
            The schemes of groups differ, and no group targets the module.
        """
        schemes = list(dict.fromkeys(group.scheme for group in self.groups))
        if len(schemes) <= 1:
            return schemes[0] if schemes else None
        closest: tuple[Closeness, WeightScheme] | None = None
        for group in self.groups:
            for target in group.targets:
                closeness = _closeness(target, module)
                if closeness is not None and (closest is None or closeness < closest[0]):
                    closest = closeness, group.scheme
        if closest is None:
            raise CheckpointError(
                f"{module}: none of the groups of modules in quantization_config.config_groups, "
                f"which differ, targets it; {CORRECT}"
            )
        return closest[1]


def _closeness(target: str, module: str) -> Closeness | None:
    """Return the kind of a target that matches a module; None if the target does not match.

    Examples
    --------
    >>> _closeness("re:.*q_proj", "layers.0.q_proj")
    <Closeness.PATTERN: 1>
    """
    if target == module:
        return Closeness.NAME
    if target.startswith("re:"):
        return Closeness.PATTERN if re.match(target[3:], module) else None
    return Closeness.CLASS if target[:1].isupper() else None


def _settings(settings: Settings) -> CompressedSettings:
    groups = settings.values.get("config_groups") or {}
    ignore = settings.values.get("ignore") or []
    if not isinstance(groups, dict) or (ignore and not _are_patterns(ignore)):
        raise settings.error(
            "config_groups must be an object, and ignore names of modules; got "
            f"{shown(groups)} and {shown(ignore)}; {CORRECT}"
        )
    module_groups: list[ModuleGroup] = []
    for name, group in groups.items():
        match group:
            case {"weights": {} as weights, **further}:
                targets: Any = further.get("targets") or ["Linear"]
                if not _are_patterns(targets):
                    raise settings.error(
                        f"config_groups.{name}.targets must be names of modules; got "
                        f"{shown(targets)}; {CORRECT}"
                    )
                scheme = _scheme(settings, name, weights)
                module_groups.append(ModuleGroup(tuple(targets), scheme))
    return CompressedSettings(tuple(module_groups), tuple(ignore))


def _are_patterns(targets: Any) -> bool:
    """Return whether a value is a list of names of modules, or of patterns after ``re:``."""
    if not isinstance(targets, list):
        return False
    if not all(isinstance(target, str) for target in targets):
        return False
    try:
        for target in targets:
            re.compile(target.removeprefix("re:"))
    except re.error:
        return False
    return True


def _scheme(settings: Settings, group: str, weights: Mapping[str, Any]) -> WeightScheme:
    """Return the scheme of one group of modules.

    Parameters
    ----------
    settings
        The quantization configuration.
    group
        Name of the group among ``config_groups``.
    weights
        The object ``weights`` of the group.

    Raises
    ------
    CheckpointError
        A value of the scheme is unknown.
    """
    weight_settings = Settings(
        settings.method, weights, f"{settings.path}.config_groups.{group}.weights"
    )
    bits = 8 if weights.get("num_bits") is None else weight_settings.whole("num_bits")
    kind = weight_settings.word("type") or "int"
    strategy, actorder = weight_settings.word("strategy"), weights.get("actorder")
    if bits is None or not 1 <= bits <= 8 or kind not in ("int", "float"):
        raise weight_settings.error(
            "these codes are not known; expected num_bits from 1 to 8 and type int or float, got "
            f"{shown(bits)} and {kind}; {CORRECT}"
        )
    if strategy not in ("", *STRATEGIES):
        raise weight_settings.error(
            f"strategy = {strategy} is not one of {', '.join(STRATEGIES)}; {CORRECT}"
        )
    if actorder not in (None, False, *ORDERING, *UNORDERED):
        raise weight_settings.error(
            f"actorder = {shown(actorder)} is not known; expected group, dynamic, weight or "
            f"static; {CORRECT}"
        )
    block = _block(weight_settings, weights.get("block_structure"))
    if (block is None) == (strategy == "block"):
        raise weight_settings.error(
            "block_structure is set, and only then, for the strategy block; got the strategy "
            f"{strategy or 'none'} and {shown(weights.get('block_structure'))}; {CORRECT}"
        )
    columns = weight_settings.whole("group_size")
    return WeightScheme(
        bits=bits,
        is_float=kind == "float",
        symmetric=weights.get("symmetric") is None or weight_settings.switch("symmetric"),
        strategy=strategy,
        group=None if columns in (None, -1) else columns,
        block=block,
        ordered=actorder in ORDERING,
    )


def _block(settings: Settings, structure: Any) -> Block | None:
    """Return a block in the form ``[128, 128]`` or ``"128x128"``; None if not set."""
    match structure:
        case None:
            return None
        case [int(rows), int(columns)] if rows > 0 and columns > 0:
            return Block(rows, columns)
        case str() if re.fullmatch(r"[1-9]\d*x[1-9]\d*", structure):
            rows, columns = map(int, structure.split("x"))
            return Block(rows, columns)
    raise settings.error(
        "block_structure must be rows and columns; expected [128, 128] or '128x128', got "
        f"{shown(structure)}; {CORRECT}"
    )


class _Scales(NamedTuple):
    """Scales of a matrix of whole numbers.

    Attributes
    ----------
    component
        The tensor of the scales.
    groups
        Groups of columns, G.
    """

    component: Component
    groups: int

    @property
    def are_by_row(self) -> bool:
        """Return whether each row has separate scales."""
        return self.component.rows > 0


def _scales(module: Module, scheme: WeightScheme | None, outputs: int, inputs: int) -> _Scales:
    """Return the scales of rows, or of groups of columns; or one scale for the whole matrix.

    Raises
    ------
    CheckpointError
        The scales do not fit the weight (O, I), or do not fit the scheme.
    """
    shape = module.shape(".weight_scale", FLOATS, axes=None)
    is_single = size(shape) == 1
    if is_single:
        groups, are_by_row = 1, False
    elif shape[0] == outputs and len(shape) <= 2:
        groups, are_by_row = size(shape[1:]), True
    else:
        raise module.error(
            ".weight_scale",
            f"of shape {shape} for {outputs} outputs",
            expected=f"one scale, ({outputs},) or ({outputs}, groups)",
            actual=shape,
        )
    columns = group_size(inputs, groups, module.name(".weight_scale"))
    if scheme:
        fits_strategy = {"tensor": is_single, "channel": groups == 1, "block": False}
        fits = fits_strategy.get(scheme.strategy, True)
        if not fits or (scheme.group and scheme.group != columns):
            has_groups = scheme.strategy in ("group", "tensor_group")
            of_size = f" of {scheme.group}" if has_groups else ""
            raise module.error(
                ".weight_scale",
                f"of shape {shape} are not the scales that the configuration sets",
                expected=f"strategy {scheme.strategy or 'not set'}{of_size}, for {outputs} outputs "
                f"of {inputs} inputs",
                actual=f"groups of {columns}",
                remedy=CORRECT,
            )
    return _Scales(module.component(".weight_scale", rows=1 if are_by_row else 0), groups)


def _require_promised(module: Module, scheme: WeightScheme | None) -> None:
    """Raise `CheckpointError` for promised companions that are missing."""
    if scheme and not scheme.symmetric:
        module.require_promised(".weight_zero_point", "symmetric = false")
    if scheme and scheme.ordered:
        module.require_promised(".weight_g_idx", "actorder, the order of columns")


def _order(module: Module, inputs: int) -> dict[str, Component]:
    """Return the group of each column as a component, if stored; else empty."""
    if not module.has(".weight_g_idx"):
        return {}
    module.require(".weight_g_idx", (inputs,), "I32 I64")
    return {"group_of": module.component(".weight_g_idx")}


def _group_of(stored: Arrays) -> np.ndarray | None:
    """Return the group of each column, (I,); None for neighboring columns, stored as −1."""
    group_of = stored.get("group_of")
    if group_of is None or (group_of == -1).any():
        return None
    return group_of


def _refuse_zeros(name: str, zeros: np.ndarray, scheme: WeightScheme | None) -> None:
    """Raise `CheckpointError` for zero points that the configuration excludes."""
    if scheme and scheme.symmetric and zeros.any():
        raise CheckpointError(
            f"{name}: has zero points that are not 0, although the configuration sets symmetric; "
            f"expected only 0, got {np.flatnonzero(zeros).size:,} others; {CORRECT}"
        )


def _open(module: Module, settings: CompressedSettings) -> QuantizedMatrix:
    scheme = settings.of(module.stem)
    dtype = module.info(module.codes).dtype
    is_packed = module.codes == ".weight_packed"
    if is_packed and dtype == "U8":
        matrix = _packed_floats(module, scheme)
    elif is_packed:
        matrix = _packed(module, scheme)
    elif dtype == "I8":
        matrix = _integers(module, scheme)
    else:
        matrix = _float8(module, scheme)
    if settings.lists_as_plain(module.stem):
        return replace(
            matrix,
            note="quantization_config.ignore lists modules that are stored quantized; they are "
            "read as they are stored",
        )
    return matrix


def _packed(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Return a weight of whole numbers in words of 32 bits."""
    outputs, row_words = module.shape(".weight_packed", "I32")
    if scheme is None:
        raise CheckpointError(
            f"{module.stem}: config.json must set the bits of packed weights "
            f"(quantization_config.config_groups.*.weights.num_bits); {CORRECT}"
        )
    if scheme.is_float:
        raise module.error(
            ".weight_packed",
            "has words of whole numbers, and the configuration sets the type float",
            expected="the type int",
            actual=scheme,
            remedy=CORRECT,
        )
    bits = scheme.bits
    inputs, rest_bits = divmod(32 * row_words, bits)
    if rest_bits:
        raise module.error(
            ".weight_packed",
            f"{row_words} words are no whole number of codes of {bits} bits",
            expected=f"a multiple of {bits} bits in a row",
            actual=32 * row_words,
            remedy=CORRECT,
        )
    _require_promised(module, scheme)
    scales = _scales(module, scheme, outputs, inputs)
    components = {
        "codes": module.component(".weight_packed", 1),
        "scales": scales.component,
        **_order(module, inputs),
    }
    zero_name, packs_zeros = module.name(".weight_zero_point"), False
    if module.has(".weight_zero_point"):
        packs_zeros = module.info(".weight_zero_point").dtype == "I32"
        rows = ceil_divide(outputs * bits, 32) if packs_zeros else outputs
        module.require(".weight_zero_point", (rows, scales.groups), "I32 I8")
        components["zeros"] = module.component(".weight_zero_point")
    if module.has(".weight_shape"):
        module.require(".weight_shape", (2,), "I32 I64")
        components["shape"] = module.component(".weight_shape")
    offset = 2 ** (bits - 1)  # of whole numbers, which are stored without a sign

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if "shape" in stored and [*stored["shape"]] != [outputs, inputs]:
            raise module.error(
                ".weight_shape",
                f"{row_words} words of {bits} bits hold {inputs} inputs; padded rows are not read",
                expected=[outputs, inputs],
                actual=[*map(int, stored["shape"])],
            )
        codes = unpacked(stored["codes"], bits, inputs) - offset
        zeros = stored.get("zeros")
        if zeros is not None:
            if packs_zeros:
                zeros = unpacked(zeros.T, bits, outputs).T - offset
            _refuse_zeros(zero_name, zeros, scheme)
            zeros = zeros[rows]
        scales_of_rows = _by_row(stored["scales"], scales, len(rows))
        return scaled(codes, scales_of_rows, zeros, _group_of(stored))

    return module.matrix(
        f"INT {bits}-bit",
        (outputs, inputs),
        grid=uniform_grid(bits, inputs // scales.groups),
        components=components,
        values=values,
        groups=scales.groups,
    )


def _by_row(stored: np.ndarray, scales: _Scales, rows: int) -> np.ndarray:
    """Return scales or zero points by row and group, (rows, G); a single scale is repeated."""
    return np.broadcast_to(stored.reshape(-1, scales.groups), (rows, scales.groups))


def _integers(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Return a weight of whole numbers, one number in a byte."""
    outputs, inputs = module.shape(".weight", "I8")
    if scheme and scheme.is_float:
        raise module.error(
            ".weight",
            "has whole numbers, and the configuration sets the type float",
            expected="the type int",
            actual=scheme,
            remedy=CORRECT,
        )
    _require_promised(module, scheme)
    scales = _scales(module, scheme, outputs, inputs)
    components = {
        "codes": module.component(".weight", 1),
        "scales": scales.component,
        **_order(module, inputs),
    }
    if module.has(".weight_zero_point"):
        shape = module.shape(".weight_zero_point", ZERO_TYPES, axes=None)
        zero_rows = outputs if scales.are_by_row else 1
        is_single = not scales.are_by_row and size(shape) == 1
        is_by_row = size(shape) == zero_rows * scales.groups and shape[:1] == (zero_rows,)
        if not is_single and not is_by_row:
            raise module.error(
                ".weight_zero_point",
                "must have one entry for each scale",
                expected=f"({zero_rows}, {scales.groups})",
                actual=shape,
            )
        components["zeros"] = module.component(".weight_zero_point", scales.component.rows)
    zero_name = module.name(".weight_zero_point")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales_of_rows = _by_row(stored["scales"], scales, len(rows))
        zeros = stored.get("zeros")
        if zeros is not None:
            _refuse_zeros(zero_name, zeros, scheme)
            zeros = _by_row(zeros, scales, len(rows))
        return scaled(stored["codes"], scales_of_rows, zeros, _group_of(stored))

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
    """Return a weight of 4-bit floats: NVFP4, with scales in float8; or MXFP4, with exponents."""
    outputs, row_bytes = module.shape(".weight_packed", "U8")
    inputs = 2 * row_bytes
    columns_of_group = module.group_width(".weight_scale", "F8_E4M3 U8 F8_E8M0", (outputs, inputs))
    is_nvfp4 = module.info(".weight_scale").dtype == "F8_E4M3"
    if scheme:
        _require_floats(module, scheme, bits=4)
        module.require_group_width(".weight_scale", scheme.group, columns_of_group)
    components = {
        "codes": module.component(".weight_packed", 1),
        "scales": module.component(".weight_scale", 1),
    }
    if is_nvfp4:
        global_shape = module.shape(".weight_global_scale", "F32", axes=None)
        if size(global_shape) != 1:
            raise module.error(
                ".weight_global_scale",
                "is not one scale of all",
                expected="one number",
                actual=global_shape,
            )
        components["global"] = module.component(".weight_global_scale")
    elif module.has(".weight_global_scale"):
        raise module.error(
            ".weight_scale",
            "has exponents, as MXFP4, next to the global scale of NVFP4: which of the two formats "
            "it is, the file leaves open",
            expected="F8_E4M3, or no global scale",
            actual=module.info(".weight_scale").dtype,
        )

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if is_nvfp4:
            scales = stored["scales"] / stored["global"].reshape(())
        else:
            scales = powers_of_two(stored["scales"])
        return scaled(FLOAT4[nibbles(stored["codes"])], scales)

    return module.matrix(
        "NVFP4" if is_nvfp4 else "MXFP4",
        (outputs, inputs),
        grid=Grid(columns_of_group, FLOAT4_STEP),
        components=components,
        values=values,
    )


def _require_floats(module: Module, scheme: WeightScheme, *, bits: int) -> None:
    """Raise `CheckpointError` unless the scheme is for floats of these bits."""
    is_ordered = bits == 4 and scheme.ordered
    is_symmetric = scheme.symmetric is not False
    if not scheme.is_float or scheme.bits != bits or not is_symmetric or is_ordered:
        raise module.error(
            module.codes,
            f"has {bits}-bit floats, and the configuration sets another scheme",
            expected=f"float of {bits} bits, symmetric, with columns in their order",
            actual=scheme,
            remedy=CORRECT,
        )


def _float8(module: Module, scheme: WeightScheme | None) -> QuantizedMatrix:
    """Return a weight of 8-bit floats with scales of the tensor, rows, groups or blocks."""
    strategy, block = "", None
    if scheme:
        _require_floats(module, scheme, bits=8)
        strategy, block = scheme.strategy, scheme.block
        if strategy == "group" and scheme.group:
            block = Block(1, scheme.group)
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
