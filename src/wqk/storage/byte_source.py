"""Bytes by position: the interface of every file, here or remote."""

from __future__ import annotations

import io
from typing import Any, Protocol


class ByteSource(Protocol):
    """Bytes by position: a local file, or one behind HTTP."""

    name: str
    size: int

    @property
    def identity(self) -> Any:
        """Value that differs from that of any other content; None if there is no such value."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, or raise `CheckpointError`."""


def bytes_at(source: ByteSource, offset: int, count: int) -> bytearray:
    """Return ``count`` bytes of a source, from an offset on."""
    content = bytearray(count)
    source.read_into(offset, memoryview(content))
    return content


class Raw(io.RawIOBase):
    """A source of bytes as a raw file of Python, to be read ahead by `io.BufferedReader`."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        """Return True: a source can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: a source can be read from any byte on."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Go to a byte, which may lie behind the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer, as far as there are bytes."""
        count = max(0, min(len(buffer), self._source.size - self._position))
        self._source.read_into(self._position, memoryview(buffer)[:count])
        self._position += count
        return count
