"""Checkpoints made of files: safetensors, torch archives, wherever the files' bytes come from.

Of a safetensors file the header is read and checked: 8 bytes little-endian header length, that many
bytes of JSON (name → dtype, shape, data_offsets), then the data.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np

from wqk.checkpoints.checkpoint import Checkpoint, Part, Regrouping, TensorInfo
from wqk.checkpoints.files import RowFile, check_sizes, is_text, refuse_pointer
from wqk.checkpoints.formats import ARCHIVES
from wqk.checkpoints.gguf import open_gguf
from wqk.checkpoints.llama2c import open_llama2c
from wqk.checkpoints.modules import by_plain_name
from wqk.checkpoints.number_types import ITEM_BITS, is_float8, require_floats, scale_name
from wqk.checkpoints.quantized import Source, find_quantized
from wqk.checkpoints.ranged import RangedFile
from wqk.checkpoints.torch_archive import TorchFile
from wqk.errors import CheckpointError, errors_about

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource, WeightFile
    from wqk.checkpoints.ranged import Workers


def weight_file(source: ByteSource) -> WeightFile:
    """A file of weights, by its ending; of those called ``.bin`` some are llama2.c's."""
    ending = PurePath(source.name).suffix
    with errors_about(source.name):
        if ending == ".bin":
            _refuse_ctranslate2(source)
            if (file := open_llama2c(source)) is not None:
                return file
        if ending == ".gguf":
            return open_gguf(source)
        return TorchFile(source) if ending in ARCHIVES else open_safetensors(source)


def _refuse_ctranslate2(source: ByteSource) -> None:
    """Refuse a model of CTranslate2: a version, and the name of a specification with its length."""
    start = bytearray(min(64, source.size))
    source.read_into(0, memoryview(start))
    name = re.match(rb"[\x01-\x20]\0\0\0(.)\0(\w+Spec)\0", start, re.DOTALL)
    if name and name[1][0] == len(name[2]) + 1:
        raise CheckpointError(
            f"a CTranslate2 model ({name[2].decode()}), whose weights are joined, reordered "
            "and often quantized; use the checkpoint that it was converted from"
        )


class StoredCheckpoint(Checkpoint):
    """One or more files of weights and a configuration.

    ``workers`` fetch the bytes of remote files; None if all files are local. Raises
    `CheckpointError` if two files hold a tensor of the same name.
    """

    def __init__(
        self,
        name: str,
        files: Sequence[WeightFile],
        config: Mapping[str, Any],
        step: int | None = None,
        notes: Sequence[str] = (),
        workers: Workers | None = None,
    ) -> None:
        self.name, self.config, self.step, self.notes = name, config, step, tuple(notes)
        self._workers = workers
        self._file_of: dict[str, WeightFile] = {}
        for file in files:
            for tensor in file.tensors:
                if tensor in self._file_of:
                    raise CheckpointError(f"{name}: tensor {tensor!r} occurs in two files")
                self._file_of[tensor] = file
        self._stored = by_plain_name(self._file_of)
        lying = {
            name: self._file_of[stored].tensors[stored] for name, stored in self._stored.items()
        }
        with errors_about(name):
            self._quantized = find_quantized(Source(lying, config, self._read_stored))
        used = {c.name for matrix in self._quantized.values() for c in matrix.components.values()}
        self._tensors = {
            **{name: info for name, info in lying.items() if name not in used},
            **{name: matrix.info for name, matrix in self._quantized.items()},
        }

    @property
    def identity(self) -> tuple[Any, ...]:
        """What tells the files' content, as it is now, from any other."""
        return tuple(file.source.identity for file in dict.fromkeys(self._file_of.values()))

    @property
    def bytes_fetched(self) -> int | None:
        """Bytes that came over the network since it was opened, headers and configuration too."""
        return None if self._workers is None else self._workers.traffic.bytes

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Start fetching what `read` will need."""
        for source, ranges in self._ranges(parts):
            source.want(ranges)

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, read in the order in which they lie in the files.

        All that is remote is on its way before the first of it is waited for.
        """
        for part in parts:
            self.info(part.name)
        self.prefetch(parts)
        with errors_about(self.name):
            order = sorted(range(len(parts)), key=lambda i: self._place(parts[i]))
            arrays = {i: self._read(parts[i]) for i in order}
        for source, ranges in self._ranges(parts):
            source.forget(ranges)
        return [arrays[i] for i in range(len(parts))]

    def raw(self, part: Part) -> np.ndarray | None:
        """A part's bytes; None if it is remote, compressed, in pieces, or has scales elsewhere."""
        info = self.info(part.name)
        if self._workers is not None or is_float8(info.dtype):
            return None
        file, own = self._lying(part)
        ranges = file.byte_ranges(own)
        if not ranges:
            return None
        found = np.empty(sum(stop - start for start, stop in ranges), np.uint8)
        at = 0
        for start, stop in ranges:
            file.source.read_into(start, found[at : at + stop - start].data)
            at += stop - start
        return found

    def regrouping(self, part: Part) -> Regrouping | None:
        """Rows with their columns in other groups; None where only neighbors make one."""
        matrix = self._quantized.get(part.name)
        if matrix is None or not matrix.groups:
            return None
        pieces = matrix.parts(part)
        stored = dict(zip(pieces, self._read_stored([*pieces.values()]), strict=True))
        count = matrix.info.shape[1]
        has = stored.get("group_of", np.arange(count) * matrix.groups // count)
        return Regrouping(
            matrix.groups, has, lambda by: matrix.read(part, {**stored, "group_of": by})
        )

    def _lying(self, part: Part) -> tuple[WeightFile, Part]:
        """The part in its file, under the name that it has there."""
        stored = self._stored[part.name]
        return self._file_of[stored], part._replace(name=stored)

    def abandon(self) -> None:
        """Stop waiting for what is on its way: reads in other threads end with an error."""
        if self._workers is not None:
            self._workers.abandon()
        for file in self._file_of.values():
            if isinstance(file.source, RangedFile):
                file.source.clean()

    def _pieces(self, part: Part) -> dict[str, Part]:
        """What has to be read for a part: itself, or the tensors in which it is quantized."""
        matrix = self._quantized.get(part.name)
        return {"": part} if matrix is None else matrix.parts(part)

    def _place(self, part: Part) -> tuple[int, list[tuple[int, int]]]:
        """Sorts parts by file and by place in it."""
        file, own = self._lying(next(iter(self._pieces(part).values())))
        return id(file), file.byte_ranges(own)

    def _read(self, part: Part) -> np.ndarray:
        info, matrix = self._tensors[part.name], self._quantized.get(part.name)
        pieces = self._pieces(part)
        try:
            arrays = self._read_stored([*pieces.values()])
            if matrix is not None:
                return matrix.read(part, dict(zip(pieces, arrays, strict=True)))
        except MemoryError:
            raise CheckpointError(
                f"{self.name}: tensor {part.name!r}, of shape {info.shape}, does not fit in memory"
            ) from None
        if is_float8(info.dtype):
            scale_name(part.name, self._tensors)  # which is not there
        if info.grid is None:
            require_floats(info.dtype, part.name)
        return arrays[0]

    def _read_stored(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """Rows of tensors as they lie in the files, whole numbers included."""
        lying = [self._lying(part) for part in parts]
        return [file.read(own) for file, own in lying]

    def _ranges(self, parts: Sequence[Part]) -> list[tuple[RangedFile, list[tuple[int, int]]]]:
        """Where parts, and all that quantized ones need, lie in the remote files."""
        wanted: dict[RangedFile, list[tuple[int, int]]] = {}
        for part in parts if self._workers is not None else ():
            for piece in self._pieces(part).values():
                file, own = self._lying(piece)
                if isinstance(file.source, RangedFile):
                    wanted.setdefault(file.source, []).extend(file.byte_ranges(own))
        return list(wanted.items())


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
