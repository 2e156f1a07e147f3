"""Checkpoints on disk: a folder as `save_pretrained` writes it, or a single file."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from wqk.checkpoints.adapters import read_adapter
from wqk.checkpoints.choosing import ARCHIVES, ENDINGS, choose_weights, foreign
from wqk.checkpoints.folders import Folder, read_file, read_folder
from wqk.checkpoints.formats import format_of
from wqk.checkpoints.references import presentable
from wqk.checkpoints.steps import step_in
from wqk.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from wqk.checkpoints.adapters import Adapter
    from wqk.checkpoints.checkpoint import Checkpoint


class LocalFile:
    """A file's bytes by position.

    Positional reads rather than a memory map: a file that shrinks while it is read gives an error,
    not a signal that kills the process. So does one that is written to; one that is replaced keeps
    its old content here.
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

    Raises `CheckpointError` without weights, or if they are of a kind that cannot be scored.
    """
    try:
        return _open(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be opened ({error.strerror})") from None
    except ValueError:  # a zero byte or a lone surrogate in the name
        raise CheckpointError(f"{str(path)!r}: no such file or folder") from None


def _open(path: Path) -> Checkpoint:
    if path.is_dir():
        folder, checkpoint = path, read_folder(local_folder(path))
    else:
        _require_weights(path)
        folder, checkpoint = path.parent, read_file(local_folder(path.parent), path.name)
    checkpoint.name = presentable(str(path))
    step = step_in(folder.resolve().name)  # also where it is called "."
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def _require_weights(path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path}: no such file or folder")
    if what := foreign(path.name):
        raise CheckpointError(f"{path}: {what}")
    if path.suffix not in ENDINGS and not format_of(path.name):
        raise CheckpointError(
            f"{path}: not a checkpoint file; expected .safetensors, or a torch archive "
            f"({', '.join(ARCHIVES)})"
        )


def open_adapter(folder: Path) -> Adapter | None:
    """The adapter in a folder; None where it holds none."""
    return read_adapter(local_folder(folder)) if folder.is_dir() else None


def local_folder(folder: Path) -> Folder:
    """A folder on disk."""

    def source(name: str) -> LocalFile | None:
        return LocalFile(folder / name) if os.path.lexists(folder / name) else None

    def below() -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.glob("*/*")]

    return Folder(str(folder), source, [path.name for path in folder.iterdir()], below)


def has_weights(folder: Path) -> bool:
    """Whether a folder holds weights that can be opened."""
    return folder.is_dir() and bool(choose_weights(local_folder(folder)).files)


def exists(path: Path) -> bool:
    """Whether a path exists; one that the system rejects does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def require_regular(path: Path) -> None:
    """Refuse a pipe or a device, which may never end, and a folder where a file should be."""
    if path.exists() and not path.is_file():
        raise CheckpointError(f"{path}: not a regular file")
