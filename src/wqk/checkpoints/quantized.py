"""Matrices that libraries store quantized, read as the values that they stand for.

A library stores a matrix (O, I) as codes of a few bits, with a scale, and often a zero, for each
group of columns, under names beside the module's own. Here such tensors become one, called
``weight`` as before quantization, whose rows are unpacked when they are read. Nothing is executed,
and only what the wanted rows need is read.

==================  ==============================================================================
format              codes
==================  ==============================================================================
GPTQ                ``qweight`` int32, bits in a row down each column; ``g_idx``: a column's group
AWQ (GEMM)          ``qweight`` int32 (I, O/8), eight outputs in a word in the order 0 2 4 6 1 3 5 7
compressed-tensors  ``weight_packed`` int32, bits in a row along each row; uint8: two 4-bit floats
bitsandbytes        ``weight`` uint8, two codes in a byte, row after row; int8 with ``SCB``
torchao             ``_weight_qdata`` int8 or float8 with ``_weight_scale``
MLX                 ``weight`` uint32, bits in a row along each row; ``scales``, ``biases``
MXFP4 (gpt-oss)     ``X_blocks`` uint8, two 4-bit floats, with an exponent for 32: ``X_scales``
HQQ                 ``W_q`` uint8 or int32, codes of rows far apart in a word; ``scale``, ``zero``
float8              ``weight`` float8 with ``weight_scale_inv`` or ``weight_scale``
==================  ==============================================================================

Values are exact products in float32; the libraries round theirs to the type that a model runs in.

Axes: O outputs, I inputs, G groups of columns, W words.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from wqk._typing import Float, Int
from wqk.checkpoints.checkpoint import Grid, Part, TensorInfo
from wqk.checkpoints.files import require_floats, scale_name, unpacked
from wqk.errors import CheckpointError

# The values of 4-bit floats of two exponent bits and one of mantissa, by their code.
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)

# The outputs that lie one after the other in a word of AWQ.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

# A library's description of one matrix: a few numbers as JSON.
LARGEST_STATE = 2**16

Arrays = Mapping[str, np.ndarray]


class Component(NamedTuple):
    """One of the tensors that a matrix is stored in."""

    name: str
    rows: int = 0  # of this tensor, for each row of the matrix; 0: all of it is always needed


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix that is stored as codes.

    Attributes
    ----------
    info
        Of the matrix itself: format and bits, its shape, the bytes of all its tensors.
    components
        What has to be read, by what it is to the matrix.
    values
        From what was read, and the numbers of the wanted rows, to these rows in float32.
    groups
        Of columns, where a column can be of any (role ``group_of``); else 0.
    """

    info: TensorInfo
    components: Mapping[str, Component]
    values: Callable[[Arrays, np.ndarray], np.ndarray]
    groups: int = 0

    def parts(self, wanted: Part) -> dict[str, Part]:
        """What has to be read for the wanted rows."""
        ranges = wanted.row_ranges(self.info.shape)
        return {
            role: Part(name, tuple((a * rows, b * rows) for a, b in ranges) if rows else None)
            for role, (name, rows) in self.components.items()
        }

    def read(self, wanted: Part, stored: Arrays) -> Float[np.ndarray, "rows ..."]:
        """The wanted rows, from what was read for them."""
        ranges = wanted.row_ranges(self.info.shape)
        rows = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        with np.errstate(all="ignore"):  # whoever uses values that are not finite says so
            return self.values(stored, rows).reshape(wanted.shape(self.info.shape))


class Source(NamedTuple):
    """What a format may look at: all tensors, the configuration's settings, and small tensors."""

    tensors: Mapping[str, TensorInfo]
    config: Mapping[str, Any]
    read: Callable[[Sequence[Part]], list[np.ndarray]]

    def shape(self, name: str, dtypes: str, axes: int = 2) -> tuple[int, ...]:
        """The shape of a tensor that has to be there, with one of these types."""
        info = self.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{name} is missing, without which its matrix cannot be read")
        if info.dtype not in dtypes.split() or len(info.shape) != axes or 0 in info.shape:
            raise CheckpointError(
                f"{name} must be a tensor of {axes} axes of type {dtypes.replace(' ', ' or ')}, "
                f"got {info.dtype} of shape {info.shape}"
            )
        return info.shape

    def matrix(
        self,
        kind: str,
        shape: tuple[int, ...],
        grid: Grid | None,
        components: Mapping[str, Component],
        values: Callable[[Arrays, np.ndarray], np.ndarray],
        groups: int = 0,
    ) -> Quantized:
        """A matrix that is stored in these tensors."""
        nbytes = sum(self.tensors[name].nbytes for name, _ in components.values())
        return Quantized(TensorInfo(kind, shape, nbytes, grid), components, values, groups)


FLOATS = "F16 BF16 F32"


def find_quantized(source: Source) -> dict[str, Quantized]:
    """The quantized matrices among the tensors, by the names that their weights had before.

    Raises `CheckpointError` for tensors of a known format that do not fit together.
    """
    found: dict[str, Quantized] = {}
    for name, info in source.tensors.items():
        for scheme in SCHEMES:
            stem = name[: len(name) - len(scheme.end)]
            if (
                name.endswith(scheme.end)
                and info.dtype in scheme.types.split()
                and any(stem + other in source.tensors for other in scheme.beside)
            ):
                found[stem + scheme.becomes] = scheme.open(stem, source)
                break
    return found


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration's ``quantization_config``; empty without one."""
    found = config.get("quantization_config")
    return found if isinstance(found, dict) else {}


def refuse_unread(config: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` if a configuration names a quantized format that is not read."""
    settings = _settings(config)
    method = str(settings.get("quant_method", "")).lower()
    kept = str(settings.get("checkpoint_format") or settings.get("version") or "").lower()
    if method in UNREAD_METHODS:
        what = method
    elif method == "gptq" and kept not in ("", "gptq", "gptq_v2"):
        what = f"gptq in its {kept} format"
    elif method == "awq" and kept not in ("", "gemm"):
        what = f"awq in its {kept} format"
    else:
        return
    raise CheckpointError(
        f"quantized with {what}, whose weights are not read; use the original checkpoint, or "
        "dequantize it first"
    )


# Methods whose files are known and not read.
UNREAD_METHODS = {
    "aqlm",
    "auto-round",
    "eetq",
    "fp_quant",
    "higgs",
    "marlin",
    "quanto",
    "quark",
    "spqr",
    "vptq",
}


def scaled(
    codes: np.ndarray,
    scales: Float[np.ndarray, "rows groups"],
    zeros: np.ndarray | None = None,
    group_of: Int[np.ndarray, " columns"] | None = None,
) -> Float[np.ndarray, "rows columns"]:
    """Values of codes (rows, I): less the zero of their group, times its scale.

    Groups are equally many neighboring columns, or as ``group_of`` says. Raises `CheckpointError`
    if that names groups that there are not.
    """
    values = codes.astype(np.float32)
    if group_of is None:
        rows, groups = values.shape[0], scales.shape[-1]
        grouped = values.reshape(rows, groups, -1)
        if zeros is not None:
            grouped -= zeros.astype(np.float32).reshape(-1, groups)[..., None]
        grouped *= scales.reshape(-1, groups)[..., None]
        return values
    whole = group_of.shape == values.shape[1:] and group_of.dtype.kind == "i"
    if not whole or not 0 <= group_of.min() <= group_of.max() < scales.shape[1]:
        raise CheckpointError(f"the groups of columns are not all among the {scales.shape[1]}")
    if zeros is not None:
        values -= zeros[:, group_of]
    values *= scales[:, group_of]
    return values


def _groups(columns: int, scales: tuple[int, ...], axis: int, name: str) -> int:
    """The size of equal groups of columns, from the shape of their scales."""
    if 0 in scales or columns % scales[axis]:
        raise CheckpointError(
            f"{name}: {scales[axis]} groups do not divide {columns} columns evenly"
        )
    return columns // scales[axis]


def _uniform(bits: int, shared: int) -> Grid:
    """The grid of whole numbers of some bits."""
    return Grid(shared, 2 / (2**bits - 1))


def _gptq_or_awq(stem: str, source: Source) -> Quantized:
    words, outputs = source.shape(f"{stem}.qweight", "I32")
    scales = source.shape(f"{stem}.scales", FLOATS)
    # Of AWQ the outputs are packed, of GPTQ the inputs.
    if scales[1] == outputs:
        return _gptq(stem, source, words, outputs, scales)
    if scales[1] == 8 * outputs:
        return _awq(stem, source, words, 8 * outputs, scales)
    raise CheckpointError(
        f"{stem}.scales of shape {scales} fit neither GPTQ's nor AWQ's qweight of shape "
        f"{(words, outputs)}"
    )


def _gptq(
    stem: str, source: Source, words: int, outputs: int, scales: tuple[int, ...]
) -> Quantized:
    groups = scales[0]
    zeros = source.shape(f"{stem}.qzeros", "I32")
    bits, rest = divmod(32 * zeros[1], outputs)
    if bits not in (2, 3, 4, 8) or rest or zeros[0] != groups or 32 * words % bits:
        raise CheckpointError(
            f"{stem}: qzeros of shape {zeros} and qweight of shape {(words, outputs)} are not "
            f"2, 3, 4 or 8 bits of {outputs} outputs in {groups} groups"
        )
    inputs = 32 * words // bits
    ordered = f"{stem}.g_idx" in source.tensors
    if ordered and source.shape(f"{stem}.g_idx", "I32 I64", axes=1) != (inputs,):
        raise CheckpointError(f"{stem}.g_idx must have one entry for each of {inputs} inputs")
    shared = _groups(inputs, scales, 0, f"{stem}.scales") if not ordered else -(-inputs // groups)
    components = {role: Component(f"{stem}.{role}") for role in ("qweight", "qzeros", "scales")}
    if ordered:
        components["group_of"] = Component(f"{stem}.g_idx")
    # The first version stores zeros less one, subtracted from all bits of a row at once. Codes do
    # not tell it: as for the library, it is the first where nothing is said.
    version = _settings(source.config).get("checkpoint_format")
    is_first = version != "gptq_v2"

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        codes = unpacked(stored["qweight"].T[rows], bits, inputs)
        packed = stored["qzeros"]
        zero = unpacked(_one_more(packed, bits, outputs) if is_first else packed, bits, outputs)
        return scaled(codes, stored["scales"].T[rows], zero.T[rows], stored.get("group_of"))

    kind = f"GPTQ {bits}-bit" + ("" if version else " (version not said: taken for the first)")
    grid = _uniform(bits, shared)
    return source.matrix(kind, (outputs, inputs), grid, components, values, groups)


def _one_more(packed: np.ndarray, bits: int, count: int) -> np.ndarray:
    """Packed codes with one added to each, with its carry into the next, as the library adds it."""
    words = np.ascontiguousarray(packed).view(np.uint32)
    if bits == 3:  # the fields lie across words, and the library adds field by field
        codes = (unpacked(words, 3, count) + 1) & 7
        bit = (codes[..., None] >> np.arange(3)) & 1
        return np.packbits(
            bit.reshape(len(words), -1).astype(np.uint8), axis=1, bitorder="little"
        ).view(np.uint32)
    return words + np.uint32(sum(1 << at for at in range(0, 32, bits)))


def _awq(
    stem: str, source: Source, inputs: int, outputs: int, scales: tuple[int, ...]
) -> Quantized:
    zeros = source.shape(f"{stem}.qzeros", "I32")
    if zeros != (scales[0], outputs // 8):
        raise CheckpointError(
            f"{stem}.qzeros must have shape {(scales[0], outputs // 8)}, got {zeros}"
        )
    shared = _groups(inputs, scales, 0, f"{stem}.scales")
    components = {role: Component(f"{stem}.{role}") for role in ("qweight", "qzeros", "scales")}
    # The place of an output in its word.
    places = np.argsort(AWQ_ORDER)

    def codes(words: np.ndarray, rows: np.ndarray) -> np.ndarray:
        shifts = (4 * places[rows % 8]).astype(np.uint32)
        held = words.view(np.uint32)[:, rows // 8] >> shifts & np.uint32(15)
        return np.asarray(held.T, np.int32)

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        return scaled(
            codes(stored["qweight"], rows), stored["scales"].T[rows], codes(stored["qzeros"], rows)
        )

    return source.matrix("AWQ 4-bit", (outputs, inputs), _uniform(4, shared), components, values)


def _packed(stem: str, source: Source) -> Quantized:
    """compressed-tensors' ``weight_packed``: whole numbers in words, or 4-bit floats in bytes."""
    name = f"{stem}.weight_packed"
    if source.tensors[name].dtype == "U8":
        return _packed_floats(stem, source)
    outputs, words = source.shape(name, "I32")
    bits, scale = _bits_of(_settings(source.config), stem), source.tensors[f"{stem}.weight_scale"]
    components = {"codes": Component(name, 1)}
    grouped = len(scale.shape) == 2 and scale.shape[0] == outputs
    by_row = grouped or scale.shape == (outputs,)
    if not by_row and math.prod(scale.shape) != 1:
        raise CheckpointError(f"{stem}.weight_scale of shape {scale.shape} for {outputs} outputs")
    components["scales"] = Component(f"{stem}.weight_scale", int(by_row))
    groups = scale.shape[1] if grouped else 1
    if f"{stem}.weight_zero_point" in source.tensors:
        zeros = source.shape(f"{stem}.weight_zero_point", "I32 I8")
        is_packed = source.tensors[f"{stem}.weight_zero_point"].dtype == "I32"
        if zeros != (-(-outputs * bits // 32) if is_packed else outputs, groups):
            raise CheckpointError(f"{stem}.weight_zero_point has the shape {zeros}")
        components["zeros"] = Component(f"{stem}.weight_zero_point")
    if f"{stem}.weight_g_idx" in source.tensors:
        components["group_of"] = Component(f"{stem}.weight_g_idx")
    if words * 32 % bits:
        raise CheckpointError(f"{name}: {words} words are no whole number of codes of {bits} bits")
    inputs = words * 32 // bits
    shared = _groups(inputs, (groups,), 0, f"{stem}.weight_scale")
    offset = 2 ** (bits - 1)
    if f"{stem}.weight_shape" in source.tensors:
        components["shape"] = Component(f"{stem}.weight_shape")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if "shape" in stored and [*stored["shape"].reshape(-1)] != [outputs, inputs]:
            raise CheckpointError(
                f"{stem}.weight_shape is {[*map(int, stored['shape'].reshape(-1))]}, and "
                f"{words} words of {bits} bits hold {inputs} inputs; padded rows are not read"
            )
        codes = unpacked(stored["codes"], bits, inputs)
        zeros = stored.get("zeros")
        if zeros is not None and zeros.dtype == np.int32:
            zeros = unpacked(zeros.T, bits, outputs).T - offset
        scales = stored["scales"].reshape(-1, groups)
        return scaled(
            codes - offset, scales, None if zeros is None else zeros[rows], stored.get("group_of")
        )

    return source.matrix(
        f"INT {bits}-bit", (outputs, inputs), _uniform(bits, shared), components, values, groups
    )


def _bits_of(settings: Mapping[str, Any], stem: str) -> int:
    """Bits of compressed-tensors' codes, which its groups of modules share."""
    groups = settings.get("config_groups")
    found = set()
    for group in groups.values() if isinstance(groups, dict) else ():
        match group:
            case {"weights": {"num_bits": int(bits)}}:
                found.add(bits)
    if len(found) != 1 or not 1 <= (bits := found.pop()) <= 8:
        raise CheckpointError(
            f"{stem}: config.json must say the bits of all packed weights alike "
            "(quantization_config.config_groups.*.weights.num_bits, 1 to 8)"
        )
    return bits


def _packed_floats(stem: str, source: Source) -> Quantized:
    """NVFP4, scales in float8 under a scale of all; and MXFP4, scales that are exponents."""
    outputs, half = source.shape(f"{stem}.weight_packed", "U8")
    scales = source.shape(f"{stem}.weight_scale", "F8_E4M3 U8 F8_E8M0")
    if scales[0] != outputs:
        raise CheckpointError(f"{stem}.weight_scale of shape {scales} for {outputs} outputs")
    shared = _groups(2 * half, scales, 1, f"{stem}.weight_scale")
    components = {
        "codes": Component(f"{stem}.weight_packed", 1),
        "scales": Component(f"{stem}.weight_scale", 1),
    }
    is_nvidia = source.tensors[f"{stem}.weight_scale"].dtype == "F8_E4M3"
    if is_nvidia:
        if source.shape(f"{stem}.weight_global_scale", "F32", axes=1) != (1,):
            raise CheckpointError(f"{stem}.weight_global_scale must be one number")
        components["whole"] = Component(f"{stem}.weight_global_scale")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = (
            stored["scales"] / stored["whole"].reshape(())
            if is_nvidia
            else _exponents(stored["scales"])
        )
        return scaled(FP4[_nibbles(stored["codes"])], scales)

    kind = "NVFP4" if is_nvidia else "MXFP4"
    return source.matrix(kind, (outputs, 2 * half), Grid(shared, 1 / 6), components, values)


def _nibbles(stored: np.ndarray) -> np.ndarray:
    """The low half of each byte, then its high half: (…, n) to (…, 2n)."""
    return np.stack([stored & 15, stored >> 4], axis=-1).reshape(*stored.shape[:-1], -1)


def _exponents(stored: np.ndarray) -> np.ndarray:
    """Powers of two, stored with 127 added."""
    return np.asarray(np.ldexp(np.float32(1), stored.astype(np.int32) - 127))


def _mxfp4(stem: str, source: Source) -> Quantized:
    """Experts of gpt-oss: (E, O, G, 16) bytes, transposed as the model holds them, (E, I, O)."""
    experts, outputs, groups, half = source.shape(f"{stem}_blocks", "U8", axes=4)
    if source.shape(f"{stem}_scales", "U8", axes=3) != (experts, outputs, groups):
        raise CheckpointError(f"{stem}_scales must have one entry for each block")
    components = {
        "codes": Component(f"{stem}_blocks", 1),
        "scales": Component(f"{stem}_scales", 1),
    }

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        blocks = FP4[_nibbles(stored["codes"])] * _exponents(stored["scales"])[..., None]
        return np.asarray(blocks.reshape(len(rows), outputs, -1).swapaxes(1, 2))

    shape = (experts, groups * 2 * half, outputs)
    return source.matrix("MXFP4", shape, Grid(2 * half, 1 / 6), components, values)


def _integers(stem: str, source: Source) -> Quantized:
    """One int8 for each entry (compressed-tensors, torchao, bitsandbytes), or a float8 (torchao).

    In each row of bitsandbytes, the largest entry is 127, and its scale what that stands for.
    """
    torchao, largest = f"{stem}._weight_qdata" in source.tensors, f"{stem}.SCB" in source.tensors
    start = f"{stem}._weight" if torchao else f"{stem}.weight"
    name = f"{start}_qdata" if torchao else start
    outputs, inputs = source.shape(name, "I8 F8_E4M3")
    scales_at, zero_name = f"{stem}.SCB" if largest else f"{start}_scale", f"{start}_zero_point"
    scales = source.tensors[scales_at]
    grid = scales.shape if len(scales.shape) == 2 else (math.prod(scales.shape), 1)
    several = grid[0] != 1 or largest
    if (several and scales.shape[0] != outputs) or grid[0] not in (1, outputs):
        raise CheckpointError(
            f"{scales_at} of shape {scales.shape} fits no rows of {name}, of shape "
            f"{(outputs, inputs)}; torchao's tensors for its own kernels are not read"
        )
    shared = _groups(inputs, grid, 1, scales_at)
    components = {
        "codes": Component(name, 1),
        "scales": Component(scales_at, int(grid[0] == outputs > 1)),
    }
    if zero_name in source.tensors:
        zeros_as = source.tensors[zero_name].shape
        if math.prod(zeros_as) != math.prod(grid) or zeros_as[:1] != scales.shape[:1]:
            raise CheckpointError(f"{zero_name} must have one entry for each scale")
        components["zeros"] = components["scales"]._replace(name=zero_name)
    if f"{start}_format" in source.tensors:
        components["format"] = Component(f"{start}_format")

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        if stored.get("format", np.zeros(1)).any():
            raise CheckpointError(f"{name} is laid out for a kernel, not row by row")
        zeros = stored.get("zeros")
        zeros = None if zeros is None else zeros.reshape(-1, grid[1])
        steps = stored["scales"].reshape(-1, grid[1]) * np.float32(1 / 127 if largest else 1)
        return scaled(stored["codes"], steps, zeros)

    if source.tensors[name].dtype != "I8":
        return source.matrix("F8_E4M3", (outputs, inputs), None, components, values)
    bits = 8
    if torchao:  # which keeps fewer bits in whole bytes
        (first,) = source.read([Part(name, ((0, 1),))])
        bits = min(8, 1 + int(max(first.max(), -1 - first.min(), 1)).bit_length())
    return source.matrix(
        f"INT {bits}-bit", (outputs, inputs), _uniform(bits, shared), components, values
    )


def _four_bits(stem: str, source: Source) -> Quantized:
    """Bitsandbytes' NF4 and FP4: codes in one flat tensor, a scale for each block of it."""
    name = f"{stem}.weight"
    names = (f"{name}.quant_state.bitsandbytes__{kind}" for kind in ("nf4", "fp4"))
    about = next((name for name in names if name in source.tensors), None)
    if about is None:
        raise CheckpointError(f"{name}: bitsandbytes' description of its codes is missing")
    if source.tensors[about].dtype != "U8" or not 0 < source.tensors[about].nbytes < LARGEST_STATE:
        raise CheckpointError(f"{about} must be JSON in bytes")
    try:
        state = json.loads(source.read([Part(about)])[0].tobytes())
    except (ValueError, RecursionError):
        state = None
    match state:
        case {"shape": [int(outputs), int(inputs)], "blocksize": int(block)}:
            pass
        case _:
            raise CheckpointError(f"{about} must be JSON with a matrix's shape and a blocksize")
    if name not in source.tensors or source.tensors[name].dtype != "U8":
        raise CheckpointError(f"{name} must be there, two codes in a byte of type U8")
    size = outputs * inputs
    components = {
        "codes": Component(name),
        "scales": Component(f"{name}.absmax"),
        "table": Component(f"{name}.quant_map"),
        "about": Component(about),
    }
    if not (outputs > 0 and inputs > 0 and block > 0) or (
        math.prod(source.tensors[name].shape) != -(-size // 2)
    ):
        raise CheckpointError(f"{name} does not hold two codes a byte of {outputs} × {inputs}")
    if source.shape(f"{name}.quant_map", "F32", axes=1) != (16,):
        raise CheckpointError(f"{name}.quant_map must have 16 values")
    blocks = source.shape(f"{name}.absmax", "F32 U8", axes=1)[0]
    if blocks != -(-size // block):
        raise CheckpointError(f"{name}.absmax must have an entry for each block of {block}")
    nested = source.tensors[f"{name}.absmax"].dtype == "U8"
    offset, outer = state.get("nested_offset"), state.get("nested_blocksize")
    if nested:
        fits = type(outer) is int and outer > 0 and isinstance(offset, int | float)
        if not fits or source.shape(f"{name}.nested_quant_map", "F32", axes=1) != (256,):
            raise CheckpointError(f"{name}: its scales are quantized, and what of them is missing")
        components["outer"] = Component(f"{name}.nested_absmax")
        components["outer_table"] = Component(f"{name}.nested_quant_map")
        if source.shape(f"{name}.nested_absmax", "F32", axes=1) != (-(-blocks // outer),):
            raise CheckpointError(f"{name}.nested_absmax must have an entry for {outer} scales")
    # Where rows are whole bytes of the flat tensor, only the wanted ones are read.
    by_row = inputs % 2 == 0 and source.tensors[name].shape == (size // 2, 1)
    if by_row:
        components["codes"] = Component(name, inputs // 2)

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

    kind = about.rpartition("__")[2].upper()
    return source.matrix(kind, (outputs, inputs), Grid(block, 2 / 15), components, values)


def _mlx(stem: str, source: Source) -> Quantized:
    """MLX: value = scale · code + bias."""
    outputs, words = source.shape(f"{stem}.weight", "U32")
    scales = source.shape(f"{stem}.scales", FLOATS)
    if source.shape(f"{stem}.biases", FLOATS) != scales or scales[0] != outputs:
        raise CheckpointError(f"{stem}.scales and biases must have a row for each of its outputs")
    settings = source.config.get("quantization")
    own = settings.get(stem) if isinstance(settings, dict) else None
    chosen = own if isinstance(own, dict) else settings if isinstance(settings, dict) else {}
    said = chosen.get("group_size")
    shared = said if type(said) is int and said > 0 else 0
    bits = 32 * words // max(1, scales[1] * shared)
    told = chosen.get("bits", bits)
    if not 1 <= bits <= 8 or bits * scales[1] * shared != 32 * words or told != bits:
        raise CheckpointError(
            f"{stem}.weight: {words} words are not {scales[1]} groups of {said!s:.20} codes of "
            f"{told!s:.20} bits (config.json, quantization.group_size and bits)"
        )
    components = {role: Component(f"{stem}.{role}", 1) for role in ("weight", "scales", "biases")}

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        result = scaled(unpacked(stored["weight"], bits, shared * scales[1]), stored["scales"])
        result.reshape(len(rows), scales[1], -1)[...] += stored["biases"][..., None]
        return result

    return source.matrix(
        f"MLX {bits}-bit", (outputs, shared * scales[1]), _uniform(bits, shared), components, values
    )


def _hqq(stem: str, source: Source) -> Quantized:
    """HQQ: groups are the rows or the columns of (C, S); a word holds codes of far rows."""
    about = [f"{stem}.{word}" for word in ("packing", "shape", "nbits")]
    for name in about:
        if name not in source.tensors or source.tensors[name].nbytes > LARGEST_STATE:
            raise CheckpointError(f"{name} must be there, and small")
    packing, shape, said = (found.reshape(-1) for found in source.read([*map(Part, about)]))
    bits, held, dtype = HQQ_PACKING.get(packing.astype(np.uint8).tobytes(), (0, 1, ""))
    steps, width = source.shape(f"{stem}.W_q", dtype or "U8")
    scales = source.shape(f"{stem}.scale", FLOATS)
    outputs, inputs = map(int, shape) if shape.dtype.kind == "i" and len(shape) == 2 else (0, 0)
    used = float(said[0]) if len(said) == 1 else 0.0
    count, rest = divmod(outputs * inputs, width)
    if (
        not (1 <= used <= bits and outputs > 0 and inputs > 0)
        or rest
        or steps != -(-count // held)
        or scales not in ((count, 1), (1, width))
        or source.shape(f"{stem}.zero", FLOATS) != scales
    ):
        raise CheckpointError(
            f"{stem}: HQQ's W_q of shape {(steps, width)}, scales of shape {scales}, zeros, nbits, "
            f"packing, and the shape {(outputs, inputs)} do not fit together"
        )
    along = scales[0] == count

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        row, column = np.divmod(rows[:, None] * inputs + np.arange(inputs), width)
        place, at = np.divmod(row, steps)
        codes = stored["W_q"][at, column] >> bits * (held - 1 - place) & (2**bits - 1)
        scale, zero = (stored[role].reshape(-1) for role in ("scale", "zero"))
        group = row if along else column
        return np.asarray((codes.astype(np.float32) - zero[group]) * scale[group])

    names = {word: f"{stem}.{word}" for word in HQQ if f"{stem}.{word}" in source.tensors}
    components = {word: Component(name) for word, name in names.items()}
    grid = Grid(width if along else count, 2 / max(1, round(2**used - 1)))
    return source.matrix(f"HQQ {used:.3g}-bit", (outputs, inputs), grid, components, values)


# What lies beside a matrix of HQQ, and bits of a code and codes in a word, the first one highest.
HQQ = (
    "W_q",
    "scale",
    "zero",
    "packing",
    "shape",
    "nbits",
    "axis",
    "group_size",
    "channel_wise",
    "optimize",
    "round_zero",
    "view_as_float",
    "unpack_view_dtype",
    "compute_dtype",
    "quant_scale",
    "quant_zero",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
)
HQQ_PACKING = {
    b"8bit_u8": (8, 1, "U8"),
    b"4bit_u8": (4, 2, "U8"),
    b"3bit_32": (3, 10, "I32"),
    b"2bit_u8": (2, 4, "U8"),
    b"1bit_u8": (1, 8, "U8"),
}


def _float8(name: str, source: Source) -> Quantized:
    """One scale for all, for each row, or for each block: of 128 × 128, or as configured."""
    scale, info = scale_name(name, source.tensors), source.tensors[name]
    kind, grid = source.tensors[scale].dtype, source.tensors[scale].shape
    exponents = kind == "F8_E8M0"
    if not exponents:
        require_floats(kind, scale)
    if math.prod(grid) == 1:
        grid = (1,) * len(info.shape)
    elif grid == info.shape[:1]:
        grid = (*grid, 1)
    if len(grid) != len(info.shape) or (math.prod(grid) > 1 and len(grid) != 2):
        raise CheckpointError(f"{scale}: scales of shape {grid} for a tensor of {info.shape}")
    expected = (128, 128)
    match _settings(source.config).get("weight_block_size"):
        case [int(high), int(wide)] if high > 0 and wide > 0:
            expected = (high, wide)
    sides = [
        _block_side(n, blocks, side, scale)
        for n, blocks, side in zip(info.shape, grid, expected, strict=False)
    ]

    def values(stored: Arrays, rows: np.ndarray) -> np.ndarray:
        scales = _exponents(stored["scales"]) if exponents else stored["scales"]
        if scales.size == 1:
            return np.asarray(stored["codes"] * scales.reshape(()).astype(np.float32))
        columns = np.arange(info.shape[1]) // sides[1]
        return scaled(stored["codes"], scales.reshape(grid)[rows // sides[0]], None, columns)

    components = {"codes": Component(name, 1), "scales": Component(scale)}
    return source.matrix(info.dtype, info.shape, None, components, values)


def _block_side(length: int, blocks: int, side: int, name: str) -> int:
    """Length of a block's side: the expected one, perhaps with a shorter last block, or exact."""
    if math.ceil(length / side) == blocks:
        return side
    side, rest = divmod(length, blocks) if blocks else (0, length)
    if rest:
        raise CheckpointError(f"{name}: {blocks} blocks of scales do not divide {length} evenly")
    return side


class Scheme(NamedTuple):
    """How tensors of one format are recognized."""

    end: str  # of the name of one of them
    types: str  # that it may have
    beside: tuple[str, ...]  # ends of other tensors' names, one of which has to be there
    open: Callable[[str, Source], Quantized]
    becomes: str = ".weight"  # end of the matrix's name


SCHEMES = (
    Scheme(".qweight", "I32", (".scales",), _gptq_or_awq),
    Scheme(".weight_packed", "I32 U8", (".weight_scale",), _packed),
    Scheme(".weight.absmax", "F32 U8", (".weight.quant_map",), _four_bits),
    Scheme(".weight", "I8", (".SCB", ".weight_scale"), _integers),
    Scheme("._weight_qdata", "I8 F8_E4M3", ("._weight_scale",), _integers),
    Scheme(".weight", "U32", (".scales",), _mlx),
    Scheme("_blocks", "U8", ("_scales",), _mxfp4, ""),
    Scheme(".W_q", "U8 I32 F16 BF16 F32", (".scale", ".nbits"), _hqq),
    Scheme("", "F8_E4M3 F8_E5M2", ("_scale_inv", "_scale"), _float8, ""),
)
