"""Checkpoints whose safetensors files are remote, all or in part: on the hub, or under a URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.float8 import scale_name
from wqk.checkpoints.local import (
    INDEX,
    LARGEST_JSON,
    NOT_WEIGHTS,
    SafetensorsCheckpoint,
    parse_object,
    refuse_quantized,
    shard_names,
)
from wqk.checkpoints.number_types import is_float8
from wqk.checkpoints.ranged import CONNECTIONS, RangedFile, Workers
from wqk.checkpoints.safetensors import SafetensorsFile
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from wqk.checkpoints.safetensors import ByteSource


class Folder(NamedTuple):
    """A folder that is not on this disk.

    Attributes
    ----------
    name
        What the user calls it.
    source
        The bytes of one of its files; None where there is no such file.
    names
        Its files, where it can be listed.
    """

    name: str
    source: Callable[[str], ByteSource | None]
    names: Sequence[str] = ()


class RemoteCheckpoint(SafetensorsCheckpoint):
    """Safetensors files of which some or all are remote."""

    def __init__(
        self,
        name: str,
        files: Sequence[SafetensorsFile],
        config: Mapping[str, Any],
        workers: Workers,
        revision: str | None = None,
        step: int | None = None,
    ) -> None:
        super().__init__(name, files, config, revision, step)
        self._workers = workers

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came over the network since it was opened, headers and configuration too."""
        return self._workers.traffic.bytes

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Begin to fetch what `read` will want."""
        for source, ranges in self._ranges(parts):
            source.want(ranges)

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part; all of them on their way before the first is waited for."""
        self.prefetch(parts)
        arrays = super().read(parts)
        for source, ranges in self._ranges(parts):
            source.forget(ranges)
        return arrays

    def abandon(self) -> None:
        """Stop waiting for what is on its way: reads in other threads end with an error."""
        self._workers.abandon()
        for file in self._file_of.values():
            if isinstance(file.source, RangedFile):
                file.source.clean()

    def _ranges(self, parts: Sequence[Part]) -> list[tuple[RangedFile, list[tuple[int, int]]]]:
        """Where parts, and the scales of float8 ones, lie in the remote files."""
        wanted: dict[RangedFile, list[tuple[int, int]]] = {}
        for part in parts:
            needed = [part]
            if is_float8(self.info(part.name).dtype):
                needed.append(Part(scale_name(part.name, self._tensors)))
            for piece in needed:
                file = self._file_of[piece.name]
                if isinstance(file.source, RangedFile):
                    wanted.setdefault(file.source, []).extend(file.byte_ranges(piece))
        return list(wanted.items())


def open_folder(
    folder: Folder, workers: Workers, revision: str | None = None, step: int | None = None
) -> RemoteCheckpoint:
    """The checkpoint in a remote folder; reads its configuration, its index and every header.

    Raises
    ------
    CheckpointError
        It holds no safetensors, or not all of them.
    """
    config = read_object(folder.source("config.json"))
    refuse_quantized(config, folder.name)
    names = _weights(folder)
    if not names:
        raise CheckpointError(
            f"{folder.name}: no weights here; expected model.safetensors or {INDEX}"
        )
    return open_files(folder, names, config, workers, revision, step)


def open_files(
    folder: Folder,
    names: Sequence[str],
    config: Mapping[str, Any],
    workers: Workers,
    revision: str | None = None,
    step: int | None = None,
) -> RemoteCheckpoint:
    """The checkpoint in these files of a folder, whose headers are read side by side."""

    def open_file(name: str) -> SafetensorsFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"{folder.name}: shard {name} is missing, though {INDEX} names it"
            )
        return SafetensorsFile(source)

    # Not the threads that fetch: these wait for those.
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(names)))
    try:
        files = list(pool.map(open_file, names))
    except BaseException:
        workers.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return RemoteCheckpoint(folder.name, files, config, workers, revision, step)


def read_object(source: ByteSource | None) -> dict[str, Any]:
    """The JSON object in a file; empty where there is no file."""
    if source is None:
        return {}
    if source.size > LARGEST_JSON:
        raise CheckpointError(f"{source.name}: too large for a configuration")
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    return parse_object(content, source.name)


def _weights(folder: Folder) -> list[str]:
    """The names of a folder's safetensors files, as `open_local` chooses among them."""
    if not folder.names or INDEX in folder.names:
        index = folder.source(INDEX)
        if index is not None:
            return shard_names(read_object(index), index.name)
    if not folder.names or "model.safetensors" in folder.names:
        return ["model.safetensors"]
    found = (name for name in folder.names if name.endswith(".safetensors"))
    return sorted(name for name in found if not name.startswith(NOT_WEIGHTS))
