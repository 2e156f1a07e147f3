"""Checkpoints with remote files, all or in part: on the Hub, or at a URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.choosing import choose_weights, no_weights, parse_object, refuse_quantized
from wqk.checkpoints.float8 import scale_name
from wqk.checkpoints.local import LARGEST_JSON
from wqk.checkpoints.number_types import is_float8
from wqk.checkpoints.ranged import CONNECTIONS, RangedFile, Workers
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from wqk.checkpoints.choosing import Weights
    from wqk.checkpoints.safetensors import ByteSource
    from wqk.checkpoints.stored import WeightFile


class Folder(NamedTuple):
    """A remote folder.

    Attributes
    ----------
    name
        What the user calls it.
    source
        The bytes of one of its files; None where there is no such file.
    names
        Its files; None where they cannot be listed.
    below
        Paths of files deeper in it, for the error of a folder without weights.
    """

    name: str
    source: Callable[[str], ByteSource | None]
    names: Sequence[str] | None = None
    below: Sequence[str] = ()


class RemoteCheckpoint(StoredCheckpoint):
    """Files of weights of which some or all are remote."""

    def __init__(
        self,
        name: str,
        files: Sequence[WeightFile],
        config: Mapping[str, Any],
        workers: Workers,
        revision: str | None = None,
        step: int | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        super().__init__(name, files, config, revision, step, notes)
        self._workers = workers

    @property
    def bytes_fetched(self) -> int:
        """Bytes that came over the network since it was opened, headers and configuration too."""
        return self._workers.traffic.bytes

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Start fetching what `read` will need."""
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
        It holds no weights, or not all of them.
    """
    config = read_object(folder.source("config.json"))
    refuse_quantized(config, folder.name)
    weights = choose_weights(
        folder.name,
        folder.names,
        lambda name: read_object(folder.source(name)),
        lambda name: folder.source(name) is not None,
    )
    if not weights.files:
        raise no_weights(folder.name, folder.names or (), folder.below)
    return open_files(folder, weights, config, workers, revision, step)


def open_files(
    folder: Folder,
    weights: Weights,
    config: Mapping[str, Any],
    workers: Workers,
    revision: str | None = None,
    step: int | None = None,
) -> RemoteCheckpoint:
    """The checkpoint in these files of a folder, whose headers are read side by side."""

    def open_file(name: str) -> WeightFile:
        source = folder.source(name)
        if source is None:
            raise CheckpointError(
                f"{folder.name}: shard {name} is missing, although {weights.listed_in} names it"
            )
        return weight_file(source)

    # Not the threads that fetch: these wait for those.
    pool = ThreadPoolExecutor(min(CONNECTIONS, len(weights.files)))
    try:
        files = list(pool.map(open_file, weights.files))
    except BaseException:
        workers.abandon()
        raise
    finally:
        pool.shutdown(cancel_futures=True)
    return RemoteCheckpoint(folder.name, files, config, workers, revision, step, weights.notes)


def read_object(source: ByteSource | None) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no file."""
    if source is None:
        return {}
    if source.size > LARGEST_JSON:
        raise CheckpointError(f"{source.name}: too large for a configuration file")
    content = bytearray(source.size)
    source.read_into(0, memoryview(content))
    return parse_object(content, source.name)
