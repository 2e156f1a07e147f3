"""Checkpoints made of files, in a folder or alone, wherever the files' bytes come from."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.checkpoints.checkpoint import Checkpoint, Part, Regrouping, TensorInfo
from wqk.checkpoints.configurations import Opened, by_plain_name, configured
from wqk.checkpoints.files import JoinedFiles, bytes_at, open_safetensors
from wqk.checkpoints.formats import (
    ARCHIVES,
    ENDINGS,
    Folder,
    Weights,
    beside,
    choose_weights,
    format_of,
    local_folder,
    no_weights,
    parts_of,
    unread_format,
)
from wqk.checkpoints.gguf import open_gguf
from wqk.checkpoints.number_types import is_float8, require_floats, scale_name
from wqk.checkpoints.quantized import Source, find_quantized, refuse_unread
from wqk.checkpoints.ranged import CONNECTIONS, RangedFile
from wqk.checkpoints.references import redacted, step_in
from wqk.errors import CheckpointError, errors_about

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource, WeightFile
    from wqk.checkpoints.ranged import Workers


def weight_file(source: ByteSource) -> WeightFile:
    """A file of weights, by its ending."""
    ending = PurePath(source.name).suffix
    with errors_about(source.name):
        if ending == ".bin":
            _refuse_others(source)
        if ending == ".gguf":
            return open_gguf(source)
        if ending in ARCHIVES:
            from wqk.checkpoints.torch_archive import TorchFile

            return TorchFile(source)
        return open_safetensors(source)


def _refuse_others(source: ByteSource) -> None:
    """Refuse what others call .bin.

    A model of CTranslate2: a version, and the name of a specification with its length. One of
    llama2.c: seven sizes of a model, or a mark.
    """
    start = bytes_at(source, 0, min(64, source.size))
    sizes = struct.unpack("<7i", start[:28]) if len(start) == 64 else (0,)
    if start[:4] == b"24ka" or all(0 < abs(size) < 2**20 for size in sizes):
        raise CheckpointError(
            "a file of llama2.c, which is not read; use the .pt file that it was exported from"
        )
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

    def raw(self, part: Part, room: np.ndarray | None = None) -> np.ndarray | None:
        """A part's bytes; None if it is remote, compressed, in pieces, or has scales elsewhere."""
        info = self.info(part.name)
        if self._workers is not None or is_float8(info.dtype):
            return None
        file, own = self._lying(part)
        ranges = file.byte_ranges(own)
        if not ranges:
            return None
        size = sum(stop - start for start, stop in ranges)
        found = np.empty(size, np.uint8) if room is None or len(room) < size else room[:size]
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


def read_folder(folder: Folder, weights: Weights | None = None) -> StoredCheckpoint:
    """The checkpoint in a folder, or of some of its files; headers are read, weights are not.

    Raises `CheckpointError` if weights are missing, or cannot be scored.
    """
    chosen = weights or choose_weights(folder)
    layout = chosen.format
    paths = layout.configurations(chosen.files[0]) if layout else ("config.json",)
    config = next((found for path in paths if (found := folder.object(path))), {})
    refuse_unread(config)
    if not chosen.files:
        raise no_weights(folder)

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"shard {name} is missing, although {chosen.listed_in} names it; "
                "download the checkpoint again"
            )
        return weight_file(source)

    files = (
        _side_by_side(open_file, chosen.files, folder.workers)
        if folder.workers
        else [open_file(name) for name in chosen.files]
    )
    abouts = [about for file in files if (about := getattr(file, "about", None))]
    about = abouts[0] if abouts else {}
    if layout and layout.split_axis and len(files) > 1:
        files = [JoinedFiles(files, partial(layout.split_axis, width=config.get("dim")))]
    tensors = {name: info for file in files for name, info in file.tensors.items()}
    complete = configured(layout, Opened(config, about, tensors))
    others = dict.fromkeys(key for file in files for key in getattr(file, "passed_over", ()))
    notes = (f"passed over further weights in the archive: {', '.join(others)}",) if others else ()
    step = _step({**(config if layout else {}), **about})
    return StoredCheckpoint(
        folder.name, files, complete, step, (*chosen.notes, *notes), folder.workers
    )


def _side_by_side(
    open_file: Callable[[str], WeightFile], names: Sequence[str], workers: Workers
) -> list[WeightFile]:
    """Open remote files at once, in threads other than the workers, for which these wait."""
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(names)))
    try:
        return list(pool.map(open_file, names))
    except BaseException:
        workers.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _step(about: Mapping[str, Any]) -> int | None:
    """The training step that a file of weights records."""
    found = (about.get(key) for key in ("iteration", "iter_num", "global_step", "step"))
    return next((step for step in found if type(step) is int and step >= 0), None)


def open_local(path: Path) -> Checkpoint:
    """The checkpoint in a folder or a file.

    Raises `CheckpointError` without weights, or if they are of a kind that cannot be scored.
    """
    name = redacted(str(path))
    with errors_about(name):
        try:
            folder = path if path.is_dir() else path.parent
            checkpoint = read_folder(local_folder(path)) if path.is_dir() else _open_file(path)
            step = step_in(folder.resolve().name)  # also where it is called "."
        except OSError as error:
            raise CheckpointError(f"cannot be opened ({error.strerror})") from None
        except ValueError:  # a zero byte or a lone surrogate in the name
            raise CheckpointError("no such file or folder") from None
    checkpoint.name = name
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def _open_file(path: Path) -> StoredCheckpoint:
    """The checkpoint in one file, with the configuration beside it."""
    if not path.exists():
        raise CheckpointError(f"no such file or folder{beside(path)}")
    if what := unread_format(path.name):
        raise CheckpointError(what)
    layout = format_of(path.name)
    if path.suffix not in ENDINGS and not layout:
        raise CheckpointError(
            "not a checkpoint file; expected .safetensors, .gguf, or a torch archive "
            f"({', '.join(ARCHIVES)})"
        )
    folder = local_folder(path.parent)
    parts = layout.files(folder.names or ()) if layout and layout.split_axis else ()
    if len(parts) > 1:
        raise CheckpointError(
            f"one of {len(parts)} files that each hold some rows of every tensor; scan their folder"
        )
    return read_folder(folder, Weights(parts_of(path.name, folder.names or ()), format=layout))


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that can be opened."""
    return folder.is_dir() and bool(choose_weights(local_folder(folder)).files)
