"""Safetensors files: the header, checked, and rows of tensors by position.

The format: 8 bytes little-endian header length, that many bytes of JSON (name → dtype, shape,
data_offsets), then the data. Only a source of bytes is asked for, so that a local file and a remote
one are read by the same code.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

import numpy as np

from wqk.checkpoints.checkpoint import Part, TensorInfo
from wqk.checkpoints.number_types import ITEM_BITS, widen, widened_type
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

# The reference implementation's own limit.
LARGEST_HEADER = 100_000_000

# NumPy's own limits: axes of an array, and values that it may seem to have next to an empty axis.
MOST_AXES = 64
MOST_VALUES = 2**59


class ByteSource(Protocol):
    """Bytes by position: a local file, or one behind HTTP."""

    name: str
    size: int

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, or raise `CheckpointError`."""


class SafetensorsFile:
    """One safetensors file: its tensors' places, and their rows on request.

    Raises
    ------
    CheckpointError
        The header does not describe the file: too short or long, not JSON, a name twice, a type or
        shape that is none, offsets that overlap, exceed the file or disagree with the shape.
    """

    def __init__(self, source: ByteSource) -> None:
        self.source = source
        header, self._data_start = _read_header(source)
        self.metadata: Mapping[str, Any] = header.pop("__metadata__", {})
        if not isinstance(self.metadata, dict):
            raise CheckpointError(f"{source.name}: the header's metadata must be a JSON object")
        self._places = _check_entries(header, source.size - self._data_start, source.name)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(header[name]["dtype"], tuple(header[name]["shape"]), stop - start)
            for name, (start, stop) in self._places.items()
        }

    def position(self, name: str) -> int:
        """Where the tensor's data begins, for reading in file order."""
        return self._places[name][0]

    def byte_ranges(self, part: Part) -> list[tuple[int, int]]:
        """Where the part's rows lie in the file: half-open ranges of bytes, in the part's order."""
        info = self.tensors[part.name]
        row_bits = math.prod(info.shape[1:]) * ITEM_BITS[info.dtype]
        start = self._data_start + self._places[part.name][0]
        return [
            (start + first * row_bits // 8, start + last * row_bits // 8)
            for first, last in part.row_ranges(info.shape)
        ]

    def read(self, part: Part) -> np.ndarray:
        """The part's rows, joined, widened to float32 (float64 stays)."""
        info = self.tensors[part.name]
        out: np.ndarray = np.empty(
            math.prod(part.shape(info.shape)), _widened_type(info.dtype, part.name)
        )
        filled = 0
        for begin, end in self.byte_ranges(part):
            count = (end - begin) * 8 // ITEM_BITS[info.dtype]

            def read(offset: int, buffer: memoryview, begin: int = begin) -> None:
                self.source.read_into(begin + offset, buffer)

            widen(info.dtype, read, out[filled : filled + count])
            filled += count
        return out.reshape(part.shape(info.shape))


def refuse_pointer(start: bytes | bytearray, name: str) -> None:
    """Refuse the text that stands for a large file in a clone without Git LFS."""
    if start.startswith(b"version "):
        raise CheckpointError(f"{name}: a Git LFS pointer, not the weights; run git lfs pull")


def _widened_type(dtype: str, name: str) -> type:
    try:
        return widened_type(dtype)
    except CheckpointError as error:
        raise CheckpointError(f"{name}: {error}") from None


def _read_header(source: ByteSource) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the offset at which data begins."""
    if source.size < 8:
        raise CheckpointError(
            f"{source.name}: a safetensors file begins with 8 bytes of header length, "
            f"this file has {source.size} bytes"
        )
    prefix = bytearray(8)
    source.read_into(0, memoryview(prefix))
    refuse_pointer(prefix, source.name)
    length = int.from_bytes(prefix, "little")
    if length > min(LARGEST_HEADER, source.size - 8):
        raise CheckpointError(
            f"{source.name}: the header claims {length} bytes, the file has {source.size - 8} "
            "after its first 8: truncated, or not a safetensors file"
        )
    text = bytearray(length)
    source.read_into(8, memoryview(text))
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{source.name}: the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError(f"{source.name}: the header must be a JSON object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs more than once")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _check_entries(
    header: Mapping[str, Any], data_size: int, file: str
) -> dict[str, tuple[int, int]]:
    """Each tensor's (start, stop) within the data, after every claim was checked."""
    places = {name: _check_entry(name, entry, data_size, file) for name, entry in header.items()}
    end, previous = 0, ""
    for name, (start, stop) in sorted(places.items(), key=lambda item: item[1]):
        if start < end:
            raise CheckpointError(f"{file}: the data of {name!r} and {previous!r} overlap")
        end, previous = stop, name
    return places


def _check_entry(name: str, entry: Any, data_size: int, file: str) -> tuple[int, int]:
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise CheckpointError(f"{file}: {name!r} is not text, so it cannot be a tensor's name")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
            pass
        case _:
            raise CheckpointError(f"{file}: {name!r} lacks a dtype, a shape or two data offsets")
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{file}: {name!r} has the unknown type {dtype!r}")
    numbers = [*shape, start, stop]
    if not all(type(n) is int and 0 <= n < 2**63 for n in numbers):
        raise CheckpointError(f"{file}: {name!r} has a shape or offset that is not a whole number")
    if len(shape) > MOST_AXES or math.prod(n for n in shape if n) > MOST_VALUES:
        raise CheckpointError(f"{file}: {name!r} has an impossible shape")
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if (stop - start) * 8 != bits:
        raise CheckpointError(
            f"{file}: {name!r} of type {dtype} and shape {shape} needs {bits // 8} bytes, "
            f"its offsets give {stop - start}"
        )
    if stop > data_size:
        raise CheckpointError(
            f"{file}: {name!r} ends {stop - data_size} bytes beyond the file: truncated"
        )
    return start, stop
