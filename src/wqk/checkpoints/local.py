"""Checkpoints on disk: a folder as `save_pretrained` writes it, or a single file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from wqk.checkpoints.choosing import (
    ARCHIVES,
    ENDINGS,
    Weights,
    choose_weights,
    foreign,
    no_weights,
    parse_object,
    refuse_quantized,
)
from wqk.checkpoints.references import presentable
from wqk.checkpoints.steps import step_in
from wqk.checkpoints.stored import StoredCheckpoint, weight_file
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from wqk.checkpoints.checkpoint import Checkpoint

# No configuration and no index is larger than this.
LARGEST_JSON = 64 * 2**20


class LocalFile:
    """A file's bytes by position.

    Positional reads rather than a memory map: a file that shrinks while it is read ends in an
    error, not in a signal that kills the process. One that is written to ends in an error, too; one
    that is replaced by another stays what it was, here.
    """

    def __init__(self, path: Path) -> None:
        self.name = str(path)
        require_regular(path)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
        status = os.fstat(self._descriptor)
        self.size, self._modified = status.st_size, status.st_mtime_ns

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        while buffer:
            try:
                count = os.preadv(self._descriptor, [buffer], offset)
            except OSError as error:
                raise CheckpointError(f"{self.name}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise CheckpointError(f"{self.name}: ended at byte {offset}, during the read")
            buffer, offset = buffer[count:], offset + count
        if os.fstat(self._descriptor).st_mtime_ns != self._modified:
            raise CheckpointError(
                f"{self.name}: changed during the read; scan it again once it is no longer "
                "written to"
            )

    def __del__(self) -> None:
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


def open_local(path: Path) -> Checkpoint:
    """The checkpoint in a folder or a file.

    Raises
    ------
    CheckpointError
        There are no weights, or they are of a kind that cannot be scored; the message says which.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
    except ValueError:  # a zero byte or a lone surrogate in the name
        raise CheckpointError(f"{str(path)!r}: no such file or folder") from None


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if what := foreign(path.name):
        raise CheckpointError(f"{path}: {what}")
    config = read_config(path.parent)
    refuse_quantized(config, str(path))
    if path.suffix not in ENDINGS:
        raise CheckpointError(
            f"{path}: not a checkpoint file; expected .safetensors, or a torch archive "
            f"({', '.join(ARCHIVES)})"
        )
    files = [weight_file(LocalFile(path))]
    return StoredCheckpoint(presentable(str(path)), files, config, step=_step_of(path.parent))


def _open_folder(folder: Path) -> Checkpoint:
    config = read_config(folder)
    refuse_quantized(config, str(folder))
    weights = _weights(folder)
    if not weights.files:
        below = (str(p.relative_to(folder)) for p in folder.glob("*/*") if p.suffix in ENDINGS)
        raise no_weights(str(folder), (p.name for p in folder.iterdir()), below)
    for name in weights.files:
        if weights.listed_in and not (folder / name).exists():
            raise CheckpointError(
                f"{folder}: shard {name} is missing, although {weights.listed_in} names it; "
                "download the checkpoint again"
            )
    files = [weight_file(LocalFile(folder / name)) for name in weights.files]
    return StoredCheckpoint(
        presentable(str(folder)), files, config, step=_step_of(folder), notes=weights.notes
    )


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights of its own, of a kind that can be opened."""
    return folder.is_dir() and bool(_weights(folder).files)


def _weights(folder: Path) -> Weights:
    return choose_weights(
        str(folder),
        [path.name for path in folder.iterdir()],
        lambda name: read_json(folder / name),
        lambda name: (folder / name).exists(),
    )


def read_config(folder: Path) -> Mapping[str, Any]:
    """The folder's config.json; empty without one."""
    path = folder / "config.json"
    return read_json(path) if path.exists() else {}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file."""
    require_regular(path)
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise CheckpointError(f"{path}: too large for a configuration file")
        return parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from None


def require_regular(path: Path) -> None:
    """Refuse a pipe or a device, which may never end, and a folder where a file should be."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")


def _step_of(folder: Path) -> int | None:
    """The step in a folder's own name, also where it is called ``.``."""
    return step_in(folder.resolve().name)
