"""Checkpoints with remote files, all or in part: on the Hub, or at a URL."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.checkpoint import Part
from wqk.checkpoints.choosing import Weights
from wqk.checkpoints.float8 import scale_name
from wqk.checkpoints.folders import Folder, read_folder
from wqk.checkpoints.number_types import is_float8
from wqk.checkpoints.ranged import CONNECTIONS, RangedFile, Workers
from wqk.checkpoints.stored import StoredCheckpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    import numpy as np

    from wqk.checkpoints.stored import WeightFile


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


def open_remote(
    folder: Folder,
    workers: Workers,
    revision: str | None = None,
    step: int | None = None,
    file: str | None = None,
) -> RemoteCheckpoint:
    """The checkpoint in a remote folder, or in one file of it; headers are read side by side.

    Raises
    ------
    CheckpointError
        It holds no weights, or not all of them.
    """

    def side_by_side(
        open_file: Callable[[str], WeightFile], names: Sequence[str]
    ) -> list[WeightFile]:
        # Not the threads that fetch: these wait for those.
        pool = ThreadPoolExecutor(min(CONNECTIONS, len(names)))
        try:
            return list(pool.map(open_file, names))
        except BaseException:
            workers.abandon()
            raise
        finally:
            pool.shutdown(cancel_futures=True)

    contents = read_folder(folder, Weights((file,)) if file else None, side_by_side)
    return RemoteCheckpoint(
        folder.name,
        contents.files,
        contents.config,
        workers,
        revision,
        contents.step if step is None else step,
        contents.notes,
    )
