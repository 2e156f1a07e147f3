"""Files of named tensors over local or remote sources of bytes.

Tensors are stored in one file row by row, as in safetensors (8 bytes little-endian header length, a
header of this length in JSON: name → dtype, shape, data_offsets; then the data). Or tensors are
joined from the rows or columns in tensor-parallel files.

Values are converted to float32 in pieces, so that the stored bytes of a whole tensor are never in
memory next to its values. 8-bit floats are multiplied by their scales. Two conventions are in use:
``weight_scale_inv`` (DeepSeek) has one factor for each block of the matrix, of the configuration's
``weight_block_size`` or else 128 × 128; ``weight_scale`` has one factor for the tensor, each row,
or each block.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np

from wqk._machine import empty_array
from wqk._typing import Int
from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.errors import CheckpointError, shown
from wqk.storage.byte_source import ByteSource, bytes_at

# NumPy's own limits: axes of an array, and values that it may seem to have next to an empty axis.
MOST_AXES = 64
MOST_VALUES = 2**59


# Bits of one stored value, by safetensors' name. Only floating types are scored, but headers list
# tensors of every type.
ITEM_BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "U16": 16,
    "I16": 16,
    "U32": 32,
    "I32": 32,
    "U64": 64,
    "I64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F16": 16,
    "BF16": 16,
    "F32": 32,
    "F64": 64,
    "C64": 64,
}

# Values widened at a time: 256 KB of float32, which stay in a core's cache.
PIECE = 2**16
# Values read at a time: enough for a read's own costs, such as those of noticing a file that
# changes, not to count.
READ = 2**19

# Last part of messages about a damaged file.
DOWNLOAD = "download or save the file again"


def refuse_pointer(start: bytes | bytearray) -> None:
    """Raise `CheckpointError` for the pointer to a large file in a clone without Git LFS."""
    if start.startswith(b"version "):
        raise CheckpointError("a Git LFS pointer, not the weights; run git lfs pull")


def is_text(name: str) -> bool:
    """Return whether a name can be stored and printed; single halves of surrogate pairs cannot."""
    return name.isascii() or not re.search("[\ud800-\udfff]", name)


def check_sizes(what: str, shape: Sequence[Any], offsets: Sequence[Any] = ()) -> None:
    """Raise `CheckpointError` for a shape or offsets that are invalid for any array.

    ``what`` is the subject of the message: the name of a tensor, in quotation marks.
    """
    for number in (*shape, *offsets):
        if type(number) is not int or not 0 <= number < 2**63:
            raise CheckpointError(
                f"{what} has a shape or offset that is not a whole number; expected 0 to 2**63 "
                f"- 1, got {shown(number)}; {DOWNLOAD}"
            )
    nonzero_sizes = [size for size in shape if size]
    if len(shape) > MOST_AXES or math.prod(nonzero_sizes) > MOST_VALUES:
        raise CheckpointError(
            f"{what} has an impossible shape; expected at most {MOST_AXES} axes and 2**59 values, "
            f"got {shown(list(shape))}; {DOWNLOAD}"
        )


class WeightFile(Protocol):
    """A file of named tensors over a source of bytes."""

    source: ByteSource
    tensors: Mapping[str, TensorInfo]

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return the ranges of a part's rows in ``source``; none if the rows are elsewhere."""

    def read(self, part: Part) -> np.ndarray:
        """Read the part's rows, joined, widened to float32 (float64 stays)."""


class RowFile:
    """A file in which each tensor is stored row by row from its start.

    ``about`` contains the plain values that are stored with the weights, such as a configuration;
    ``metadata`` contains the texts in a header of safetensors.
    """

    def __init__(
        self,
        source: ByteSource,
        tensors: Mapping[str, TensorInfo],
        starts: Mapping[str, int],
        about: Mapping[str, Any] | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        self.source, self.tensors, self.about = source, tensors, about or {}
        self._starts, self.metadata = starts, metadata or {}

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return the half-open ranges of bytes of a part's rows, in the order of the rows."""
        info, start = self.tensors[part.name], self._starts[part.name]
        rows = max(1, info.shape[0]) if info.shape else 1
        return [
            (start + first * info.nbytes // rows, start + last * info.nbytes // rows)
            for first, last in part.row_ranges(info.shape)
        ]

    def read(self, part: Part) -> np.ndarray:
        """Read the part's rows, joined, widened to float32 (float64 stays)."""
        info = self.tensors[part.name]
        values = widened(info.dtype, self.byte_ranges(part), self.source.read_into, part.name)
        return values.reshape(part.shape(info.shape))


# Key of the header's metadata under which ComfyUI describes quantized weights.
DESCRIPTION = "_quantization_metadata"

# The reference implementation's own limit.
LARGEST_HEADER = 100_000_000


def open_safetensors(source: ByteSource) -> RowFile:
    """Open a safetensors file; only the header is read.

    Raises
    ------
    CheckpointError
        The header does not describe the file: it is too short or long, or not JSON; a name occurs
        twice; a type or shape is invalid; offsets overlap, exceed the file or contradict the shape.
    """
    header, data_start = _read_header(source)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict):
        raise CheckpointError(
            "the header's metadata must be a JSON object; expected texts by name, got "
            f"{shown(metadata)}; {DOWNLOAD}"
        )
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    for name, entry in header.items():
        tensors[name], start = _checked(name, entry)
        starts[name] = data_start + start
    _require_cover(tensors, starts, data_start, source.size)
    described = {DESCRIPTION: metadata[DESCRIPTION]} if DESCRIPTION in metadata else {}
    return RowFile(source, tensors, starts, described, metadata)


def _require_cover(
    tensors: Mapping[str, TensorInfo], starts: Mapping[str, int], data_start: int, file_size: int
) -> None:
    """Raise `CheckpointError` if tensors overlap, or do not end with the file."""
    end, previous = data_start, ""
    for name in sorted(tensors, key=lambda name: (starts[name], tensors[name].nbytes)):
        if starts[name] < end:
            raise CheckpointError(
                f"the data of {name!r} and {previous!r} overlap; expected {name!r} to begin at "
                f"byte {end} or later, got {starts[name]}; {DOWNLOAD}"
            )
        end, previous = starts[name] + tensors[name].nbytes, name
    if end > file_size:
        beyond = [name for name, info in tensors.items() if starts[name] + info.nbytes > file_size]
        raise CheckpointError(truncated(file_size, end, min(beyond, key=starts.__getitem__)))
    if end != file_size:
        raise CheckpointError(
            f"has {file_size} bytes, its header describes {end}: truncated, or written in part; "
            f"{DOWNLOAD}"
        )


def _read_header(source: ByteSource) -> tuple[dict[str, Any], int]:
    """Return the header's JSON object and the offset of the data."""
    if source.size < 8:
        raise CheckpointError(
            "not a safetensors file, which begins with 8 bytes of header length; this file has "
            f"{source.size} bytes; {DOWNLOAD}"
        )
    prefix = bytes_at(source, 0, 8)
    refuse_pointer(prefix)
    length = int.from_bytes(prefix, "little")
    if length > min(LARGEST_HEADER, source.size - 8):
        raise CheckpointError(
            f"the header claims {length} bytes, the file has {source.size - 8} "
            f"after its first 8: truncated, or not a safetensors file; {DOWNLOAD}"
        )
    try:
        text = bytes_at(source, 8, length).decode("utf-8")
        header = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON ({error}); {DOWNLOAD}") from None
    if not isinstance(header, dict):
        raise CheckpointError(
            f"the header must be a JSON object; expected tensors by name, got {shown(header)}; "
            f"{DOWNLOAD}"
        )
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; `ValueError` if a name occurs twice."""
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs more than once")
    return result


def _refuse(constant: str) -> NoReturn:
    """Raise `ValueError` for NaN and infinity, which Python's parser accepts."""
    raise ValueError(f"{constant} is not JSON")


def truncated(file_size: int, expected_size: int, tensor: str) -> str:
    """Return the message on a file that ends before its tensors do.

    Examples
    --------
    >>> truncated(900, 1000, "key").partition(";")[0]
    "truncated: has 900 of 1000 bytes, 100 are missing, from 'key' on"
    """
    return (
        f"truncated: has {file_size} of {expected_size} bytes, {expected_size - file_size} are "
        f"missing, from {tensor!r} on; {DOWNLOAD}"
    )


def _checked(name: str, entry: Any) -> tuple[TensorInfo, int]:
    """Return a tensor and its offset in the data, after all checks."""
    if not is_text(name):
        raise CheckpointError(
            f"{name!r} is not text, so it cannot be a tensor's name; rename it, and {DOWNLOAD}"
        )
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
            check_sizes(repr(name), shape, (start, stop))
        case _:
            raise CheckpointError(
                f"{name!r} lacks a dtype, a shape or two data offsets; got {shown(entry)}; "
                f"{DOWNLOAD}"
            )
    if dtype not in ITEM_BITS:
        raise CheckpointError(
            f"{name!r} has the unknown type {dtype!r}; expected one of {', '.join(ITEM_BITS)}"
        )
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if (stop - start) * 8 != bits:
        raise CheckpointError(
            f"{name!r} of type {dtype} and shape {shape} needs {bits // 8} bytes, "
            f"its offsets give {stop - start}; {DOWNLOAD}"
        )
    return TensorInfo(dtype, tuple(shape), stop - start), start


class _Pieces(NamedTuple):
    """Files with the pieces of a tensor, and the axis of the split."""

    axis: int
    files: list[WeightFile]


class JoinedFiles:
    """Files with consecutive rows or columns of a model's tensors, as one file.

    Parameters
    ----------
    files
        The files, in the order of the rows.
    axis
        Function of the name and the shape of a tensor that returns the axis of the split; None if
        every file has the whole tensor.

    Raises
    ------
    CheckpointError
        Pieces of a tensor differ in type, or along an axis that is not split.
    """

    def __init__(
        self, files: Sequence[WeightFile], axis: Callable[[str, tuple[int, ...]], int | None]
    ) -> None:
        self.source = files[0].source
        tensors: dict[str, TensorInfo] = {}
        self._pieces: dict[str, _Pieces] = {}
        files_by_tensor: dict[str, list[WeightFile]] = {}
        for file in files:
            for name in file.tensors:
                files_by_tensor.setdefault(name, []).append(file)
        for name, holding in files_by_tensor.items():
            shape = holding[0].tensors[name].shape
            split_axis = axis(name, shape) if len(holding) > 1 else None
            pieces = _Pieces(0, holding[:1])
            if split_axis is not None:
                pieces = _Pieces(split_axis, holding)
            tensors[name] = self._joined(name, pieces)
            self._pieces[name] = pieces
        self.tensors: Mapping[str, TensorInfo] = tensors

    def _joined(self, name: str, pieces: _Pieces) -> TensorInfo:
        """Return type, shape and size of a tensor that is joined from its pieces."""
        axis = pieces.axis
        infos = [file.tensors[name] for file in pieces.files]
        if len(infos) == 1:
            return infos[0]._replace(grid=None)
        kinds = {(info.dtype, info.shape[:axis], info.shape[axis + 1 :]) for info in infos}
        if len(kinds) > 1:
            raise CheckpointError(
                f"{self.source.name}: the pieces of {name!r} in {len(infos)} files do not fit "
                f"together; expected one type, and shapes that differ along axis {axis} alone, got "
                f"{shown([info.shape for info in infos])}; download all files again"
            )
        dtype, before, after = kinds.pop()
        length = sum(info.shape[axis] for info in infos)
        nbytes = sum(info.nbytes for info in infos)
        return TensorInfo(dtype, (*before, length, *after), nbytes)

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Return no ranges: the rows may be in other files than ``source``."""
        return []

    def read(self, part: Part) -> np.ndarray:
        """Read the part's rows, joined, widened to float32 (float64 stays)."""
        axis, files = self._pieces[part.name]
        if len(files) == 1:
            return files[0].read(part)
        if axis > 0 or part.rows is None:
            return np.concatenate([file.read(part) for file in files], axis=axis)
        arrays = []
        for start, stop in part.row_ranges(self.tensors[part.name].shape):
            first_row = 0  # of the file, in the whole tensor
            for file in files:
                end_row = first_row + file.tensors[part.name].shape[0]
                low, high = max(start, first_row), min(stop, end_row)
                if low < high:
                    rows = (low - first_row, high - first_row)
                    arrays.append(file.read(Part(part.name, (rows,))))
                first_row = end_row
        return np.concatenate(arrays)


@cache
def values_of_codes(dtype: str) -> np.ndarray:
    """Return the float32 value of every code of a small type: (65536,) or (256,).

    Bits of a code, from the highest one: F16 has 1 sign, 5 exponent, 10 mantissa; F8_E5M2 the first
    8 of these; F8_E4M3 has 1 sign, 4 exponent (bias 7), 3 mantissa, no infinity, and NaN where all
    bits after the sign are set.

    Examples
    --------
    >>> values_of_codes("F8_E4M3")[[0b0_0111_000, 0b1_0111_100, 0b0_0000_001]].tolist()
    [1.0, -1.5, 0.001953125]
    """
    if dtype == "F16":
        return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
    codes = np.arange(2**8, dtype=np.uint16)
    if dtype == "F8_E5M2":
        return (codes << 8).view(np.float16).astype(np.float32)
    signs = np.where(codes & 0b1_0000_000, -1.0, 1.0)
    exponents = (codes >> 3).astype(int) & 0b1111
    fractions = (codes & 0b111) / 8
    normal = np.ldexp(1 + fractions, exponents - 7)
    subnormal = np.ldexp(fractions, -6)
    values = signs * np.where(exponents == 0, subnormal, normal)
    values[(codes & 0b0_1111_111) == 0b0_1111_111] = np.nan
    return values.astype(np.float32)


def _look_up(dtype: str) -> Callable[[np.ndarray, np.ndarray], None]:
    """Return a function that writes the values of codes, from a table of all codes of a type."""

    def convert(stored: np.ndarray, out: np.ndarray) -> None:
        np.take(values_of_codes(dtype), stored, out=out, mode="clip")

    return convert


def _from_float16(stored: np.ndarray, out: np.ndarray) -> None:
    """Write float16 values as float32.

    The bits are moved to their places in a float32, which is multiplied by 2**(127 − 15), the ratio
    of the two biases of the exponent. A table takes twice the time; only infinity and NaN, which
    become numbers of at least 2**16, are taken from the table.
    """
    bits = out.view(np.int32)
    # A float16 with its sign is 16 bits of a whole number: the shift repeats the sign in the three
    # places before the exponent, which the mask clears.
    np.left_shift(stored.view(np.int16), 13, out=bits, dtype=np.int32)
    sign, exponent_and_mantissa = 1 << 31, (2**15 - 1) << 13
    bits &= np.uint32(sign | exponent_and_mantissa).view(np.int32)
    out *= np.float32(2.0**112)
    if not out.size:
        return
    is_finite = out.min() > -(2.0**16) and out.max() < 2.0**16
    if not is_finite:
        _look_up("F16")(stored, out)


def _from_bfloat16(stored: np.ndarray, out: np.ndarray) -> None:
    """Write bfloat16 values as float32: their bits are the upper half of a float32."""
    np.left_shift(stored, 16, out=out.view(np.uint32), dtype=np.uint32)


def _copy(stored: np.ndarray, out: np.ndarray) -> None:
    """Write values without conversion."""
    out[...] = stored


class Stored(NamedTuple):
    """The layout of values in a file, and the function that widens them.

    Attributes
    ----------
    item
        NumPy type of one value, or of one block of values.
    wide
        Type of the values after reading.
    convert
        Function that writes the values of items (n,) into an array (n · values,).
    values
        Values in an item.
    """

    item: str
    wide: type
    convert: Callable[[np.ndarray, np.ndarray], None]
    values: int = 1


STORED: dict[str, Stored] = {
    "F64": Stored("<f8", np.float64, _copy),
    "F32": Stored("<f4", np.float32, _copy),
    "F16": Stored("<u2", np.float32, _from_float16),
    "BF16": Stored("<u2", np.float32, _from_bfloat16),
    "F8_E4M3": Stored("u1", np.float32, _look_up("F8_E4M3")),
    "F8_E5M2": Stored("u1", np.float32, _look_up("F8_E5M2")),
    # What quantized matrices are stored in.
    "U8": Stored("u1", np.uint8, _copy),
    "F8_E8M0": Stored("u1", np.uint8, _copy),
    "I8": Stored("i1", np.int8, _copy),
    "I32": Stored("<i4", np.int32, _copy),
    "U32": Stored("<u4", np.uint32, _copy),
    "I64": Stored("<i8", np.int64, _copy),
}
# Types that round each number separately, the finest first; and types with scales.
PLAIN = ("F64", "F32", "F16", "BF16")
FLOATS = (*PLAIN, "F8_E4M3", "F8_E5M2")


def is_float8(dtype: str) -> bool:
    """Return whether a type is an 8-bit float, with values that need a scale."""
    return dtype in ("F8_E4M3", "F8_E5M2")


def require_floats(dtype: str, tensor: str) -> None:
    """Raise `CheckpointError` for weights of other types than floating types."""
    if dtype not in FLOATS:
        raise CheckpointError(
            f"{tensor}: weights are stored as {dtype}, which is not a floating-point type that wqk "
            f"reads; expected one of {', '.join(FLOATS)}; a quantized model of a format that is "
            "not known has to be dequantized first"
        )


def widened_type(dtype: str, tensor: str) -> type:
    """Return the type of values after reading.

    Float64 and whole numbers do not change; other floating types become float32.
    """
    if dtype not in STORED:
        require_floats(dtype, tensor)
    return STORED[dtype].wide


def widened(
    dtype: str,
    ranges: Iterable[tuple[int, int]],
    read: Callable[[int, memoryview], None],
    tensor: str,
) -> np.ndarray:
    """Read the values in half-open ranges of bytes, joined to a flat array of `widened_type`.

    Parameters
    ----------
    dtype
        The stored type.
    ranges
        Ranges of bytes, each of whole items.
    read
        Function of an offset and a buffer that fills the buffer from this offset.
    tensor
        Name of the tensor, for messages.

    Raises
    ------
    CheckpointError
        The type is not supported.
    """
    ranges = list(ranges)
    wide = widened_type(dtype, tensor)
    layout = STORED[dtype]
    item_type = np.dtype(layout.item)
    item_count = sum(stop - start for start, stop in ranges) // item_type.itemsize
    out = empty_array(item_count * layout.values, wide)
    is_stored_wide = item_type == out.dtype
    buffer = np.empty(0, item_type)
    if not is_stored_wide:
        buffer = np.empty(min(READ // layout.values, item_count), item_type)
    filled = 0
    for start, stop in ranges:
        items = (stop - start) // item_type.itemsize
        values = out[filled : filled + items * layout.values]
        filled += values.size
        if is_stored_wide:
            read(start, _bytes_of(values))
        else:
            _read_widened(layout, start, read, buffer, values)
    return out


def _read_widened(
    layout: Stored,
    start: int,
    read: Callable[[int, memoryview], None],
    buffer: np.ndarray,
    values: np.ndarray,
) -> None:
    """Fill values from the items at a byte: read a buffer, and widen it in pieces."""
    items_of_piece = PIECE // layout.values
    item_count = len(values) // layout.values
    for first in range(0, item_count, max(1, len(buffer))):
        items = buffer[: item_count - first]
        read(start + first * buffer.itemsize, _bytes_of(items))
        for offset in range(0, len(items), items_of_piece):
            piece = items[offset : offset + items_of_piece]
            place = (first + offset) * layout.values
            layout.convert(piece, values[place : place + len(piece) * layout.values])


def _bytes_of(array: np.ndarray) -> memoryview:
    """Return the memory of a contiguous array, to read into."""
    return array.reshape(-1).view(np.uint8).data


def scale_name(name: str, tensors: Mapping[str, object]) -> str:
    """Return the name of the tensor with the scales of the float8 tensor ``name``."""
    for suffix in ("_scale_inv", "_scale"):
        if name + suffix in tensors:
            return name + suffix
    raise CheckpointError(
        f"{name}: stored as float8 without its scales, without which its values are meaningless; "
        f"expected {name}_scale_inv or {name}_scale; download the checkpoint again"
    )


def unpacked(packed: np.ndarray, bits: int, count: int) -> Int[np.ndarray, "rows count"]:
    """Return consecutive codes in words of 32 bits, the lowest bits first.

    Parameters
    ----------
    packed
        Words of 32 bits, (rows, W).
    bits
        Bits of a code, 1 to 8. A code of 3, 5, 6 or 7 bits may extend over two words.
    count
        Number of codes to return for each row; the last word may contain more codes.

    Returns
    -------
    The first codes of each row, (rows, count), as int32.

    Examples
    --------
    >>> unpacked(np.array([[0x87654321]], np.uint32), bits=4, count=8)
    array([[1, 2, 3, 4, 5, 6, 7, 8]], dtype=int32)
    """
    row_bytes = np.ascontiguousarray(packed).view(np.uint8)
    if bits == 8:
        codes = row_bytes[:, :count]
    elif 8 % bits == 0:
        codes = _codes_in_bytes(row_bytes, bits)[:, :count]
    else:
        codes = _codes_across_bytes(row_bytes, bits, count)
    return codes.astype(np.int32)


def _codes_in_bytes(row_bytes: np.ndarray, bits: int) -> Int[np.ndarray, "rows codes"]:
    """Return the codes of 1, 2 or 4 bits in bytes (rows, bytes), the lowest bits first."""
    shifts = np.arange(0, 8, bits, dtype=np.uint8)
    largest_code = np.uint8(2**bits - 1)
    codes = (row_bytes[..., None] >> shifts) & largest_code
    return codes.reshape(len(row_bytes), -1)


def _codes_across_bytes(
    row_bytes: np.ndarray, bits: int, count: int
) -> Int[np.ndarray, "rows count"]:
    """Return the first codes in bytes (rows, bytes); a code may extend over two bytes."""
    row_bits = np.unpackbits(row_bytes, axis=1, bitorder="little")
    bits_of_codes = row_bits[:, : count * bits].reshape(len(row_bytes), count, bits)
    powers_of_two = 1 << np.arange(bits, dtype=np.int32)
    return np.asarray(bits_of_codes.astype(np.int32) @ powers_of_two)
