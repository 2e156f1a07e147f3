"""Files on disk as sources of bytes; only a few files are open at a time."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

from wqk._machine import in_children
from wqk.errors import CheckpointError

# Number of files open at the same time.
MOST_OPEN = 64


class Identity(NamedTuple):
    """Identity of a file in its present state, different for every other file or state."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds

    @classmethod
    def of(cls, status: os.stat_result) -> Identity:
        """Identity of the file with this status."""
        return cls(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


class Handle:
    """An open file, closed when the last reference to the handle is gone."""

    def __init__(self, path: Path, name: str) -> None:
        if path.exists() and not path.is_file():  # a pipe or a device may never end
            raise CheckpointError(f"{name}: not a regular file")
        try:
            self._descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        except OSError as error:
            raise CheckpointError(f"{name}: cannot be opened ({error.strerror})") from None
        finalize(self, os.close, self._descriptor)
        self._lock = threading.Lock()

    @property
    def identity(self) -> Identity:
        """The present identity of the file."""
        return Identity.of(os.fstat(self._descriptor))

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read bytes from an offset, and return their number: 0 at the end."""
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [buffer], offset)
        with self._lock:  # Windows reads from the current position only
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            content = os.read(self._descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)


class LocalFile:
    """Bytes of a file by position.

    Reads are positional, without a memory map: a file that shrinks during a read raises an error,
    where a memory map would kill the process by a signal. A file that is written to during a read
    raises an error, too, as the time of its last change differs. Writes through a memory map may
    leave the time unchanged: scan files that nobody writes to.

    The last `MOST_OPEN` files that were read are open. Further files are opened again by their
    path, and must be the same file. A file that is replaced keeps its old content while it is open.
    Copies and pickles contain the path and the identity, never a handle.
    """

    def __init__(self, path: str | Path, identity: Identity | None = None) -> None:
        self.name, self._path = str(path), Path(path).absolute()
        self._handle: Handle | None = None
        if identity is None:
            self._handle = Handle(self._path, self.name)
            identity = self._handle.identity
            _keep_open(self)
        self._identity, self.size = identity, identity.size

    def __reduce__(self) -> tuple[Any, ...]:
        return LocalFile, (self._path, self._identity), {"name": self.name}

    @property
    def identity(self) -> tuple[int, ...]:
        """Identity of the file, equal on every machine with access to the disk."""
        return self._identity[1:]

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset."""
        handle = self._opened()
        while buffer:
            try:
                count = handle.read_into(offset, buffer)
            except OSError as error:
                raise CheckpointError(f"{self.name}: cannot be read ({error.strerror})") from None
            if count == 0:
                raise CheckpointError(f"{self.name}: ended at byte {offset}, during the read")
            buffer, offset = buffer[count:], offset + count
        if handle.identity != self._identity:
            raise CheckpointError(
                f"{self.name}: changed during the read; scan it again once it is no longer "
                "written to"
            )

    def _opened(self) -> Handle:
        """Return the handle of the file; open the file again if the handle was closed."""
        handle = self._handle
        if handle is None:
            handle = Handle(self._path, self.name)
            if handle.identity != self._identity:
                raise CheckpointError(
                    f"{self.name}: is no longer the file that was opened; open the checkpoint again"
                )
            self._handle = handle
        _keep_open(self)
        return handle

    def require_in_place(self) -> None:
        """Raise `CheckpointError` if another file, or no file, is now under the path."""
        try:
            identity = Identity.of(self._path.stat())
        except OSError:
            identity = None
        if identity != self._identity:
            raise CheckpointError(
                f"{self.name}: was replaced while the checkpoint was opened; open the checkpoint "
                "again once it is no longer written to"
            )

    def close(self) -> None:
        """Release the handle; a read in progress keeps the file open until it ends."""
        self._handle = None


# The open files, those read last at the end.
_open: WeakKeyDictionary[LocalFile, None] = WeakKeyDictionary()
_lock = threading.Lock()


def _keep_open(file: LocalFile) -> None:
    """Mark a file as used last, and close the file used longest ago if too many are open."""
    with _lock:
        _open.pop(file, None)
        _open[file] = None
        while len(_open) > MOST_OPEN:
            first = next(iter(_open))
            del _open[first]
            first.close()


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()  # another thread of the parent may have held it


in_children(_after_fork)
