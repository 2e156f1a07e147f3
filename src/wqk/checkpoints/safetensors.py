"""Safetensors files: the header, read and checked.

The format: 8 bytes little-endian header length, that many bytes of JSON (name → dtype, shape,
data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, NoReturn

from wqk.checkpoints.checkpoint import TensorInfo
from wqk.checkpoints.files import RowFile, check_sizes, is_text, refuse_pointer
from wqk.checkpoints.number_types import ITEM_BITS
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource

# The reference implementation's own limit.
LARGEST_HEADER = 100_000_000


def open_safetensors(source: ByteSource) -> RowFile:
    """A safetensors file, of which only the header is read.

    Raises `CheckpointError` if the header does not describe the file: it is too short or long, or
    not JSON; a name occurs twice; a type or shape is invalid; offsets overlap, exceed the file or
    contradict the shape.
    """
    header, data_start = _read_header(source)
    if not isinstance(header.pop("__metadata__", {}), dict):
        raise CheckpointError("the header's metadata must be a JSON object")
    tensors: dict[str, TensorInfo] = {}
    starts: dict[str, int] = {}
    for name, entry in header.items():
        tensors[name], start = _checked(name, entry, source.size - data_start)
        starts[name] = data_start + start
    end, previous = data_start, ""
    for name in sorted(tensors, key=lambda name: (starts[name], tensors[name].nbytes)):
        if starts[name] < end:
            raise CheckpointError(f"the data of {name!r} and {previous!r} overlap")
        end, previous = starts[name] + tensors[name].nbytes, name
    return RowFile(source, tensors, starts)


def _read_header(source: ByteSource) -> tuple[dict[str, Any], int]:
    """The header's JSON object and the offset at which data begins."""
    if source.size < 8:
        raise CheckpointError(
            "a safetensors file begins with 8 bytes of header length, "
            f"this file has {source.size} bytes"
        )
    prefix = bytearray(8)
    source.read_into(0, memoryview(prefix))
    refuse_pointer(prefix)
    length = int.from_bytes(prefix, "little")
    if length > min(LARGEST_HEADER, source.size - 8):
        raise CheckpointError(
            f"the header claims {length} bytes, the file has {source.size - 8} "
            "after its first 8: truncated, or not a safetensors file"
        )
    text = bytearray(length)
    source.read_into(8, memoryview(text))
    try:
        header = json.loads(
            text.decode("utf-8"), object_pairs_hook=_without_duplicates, parse_constant=_refuse
        )
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"the header is not valid JSON ({error})") from None
    if not isinstance(header, dict):
        raise CheckpointError("the header must be a JSON object")
    return header, 8 + length


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a name occurs more than once")
    return result


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not JSON")


def _checked(name: str, entry: Any, data_size: int) -> tuple[TensorInfo, int]:
    """A tensor, and where it starts in the data, once every claim has been checked."""
    if not is_text(name):
        raise CheckpointError(f"{name!r} is not text, so it cannot be a tensor's name")
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [start, stop]}:
            check_sizes(repr(name), shape, (start, stop))
        case _:
            raise CheckpointError(f"{name!r} lacks a dtype, a shape or two data offsets")
    if dtype not in ITEM_BITS:
        raise CheckpointError(f"{name!r} has the unknown type {dtype!r}")
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if (stop - start) * 8 != bits:
        raise CheckpointError(
            f"{name!r} of type {dtype} and shape {shape} needs {bits // 8} bytes, "
            f"its offsets give {stop - start}"
        )
    if stop > data_size:
        raise CheckpointError(f"{name!r} ends {stop - data_size} bytes beyond the file: truncated")
    return TensorInfo(dtype, tuple(shape), stop - start), start
