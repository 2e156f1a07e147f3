"""Files on disk as sources of bytes, few of which are open at once."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, finalize

from wqk._machine import in_children
from wqk.errors import CheckpointError

# Files that are open at once.
MOST_OPEN = 64


class Identity(NamedTuple):
    """What tells a file, as it is now, from every other."""

    device: int
    inode: int
    size: int
    modified: int  # nanoseconds


class Handle:
    """An open file, closed when nothing refers to it any more."""

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
        """The file's identity as of now."""
        status = os.fstat(self._descriptor)
        return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)

    def read_into(self, offset: int, buffer: memoryview) -> int:
        """Read bytes from this offset; how many, which is 0 at the end."""
        if hasattr(os, "preadv"):
            return os.preadv(self._descriptor, [buffer], offset)
        with self._lock:  # Windows reads from the current position only
            os.lseek(self._descriptor, offset, os.SEEK_SET)
            content = os.read(self._descriptor, len(buffer))
        buffer[: len(content)] = content
        return len(content)


class LocalFile:
    """A file's bytes by position.

    Positional reads rather than a memory map: a file that shrinks while it is read gives an error,
    not a signal that kills the process. So does one that is written to, by its time; writes through
    a memory map may not show in it: scan files that nobody writes to.

    The last `MOST_OPEN` files that were read are open; others are opened again by their path, and
    must be the same file. A file that is replaced keeps its old content while it is open. Copies
    and pickles hold the path and the identity, never a handle.
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
        """What tells the file from others on every machine that sees its disk."""
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
        """The file's handle, opened again if others have been read since."""
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

    def close(self) -> None:
        """Let go of the handle; who reads at this moment keeps it until the end of the read."""
        self._handle = None


# The open files, those read last at the end.
_open: WeakKeyDictionary[LocalFile, None] = WeakKeyDictionary()
_lock = threading.Lock()


def _keep_open(file: LocalFile) -> None:
    """Move a file to the end of the open ones, and close the first if there are too many."""
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
