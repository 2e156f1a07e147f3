"""Interface of every file, local or remote: bytes by position."""

from __future__ import annotations

import io
from typing import Any, Protocol


class ByteSource(Protocol):
    """Bytes by position, of a local file or of a file behind HTTP."""

    name: str
    size: int

    @property
    def identity(self) -> Any:
        """Unique value of the content; None if the source has no such value."""

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, or raise `CheckpointError`."""


def bytes_at(source: ByteSource, offset: int, count: int) -> bytearray:
    """Return ``count`` bytes of a source from an offset."""
    content = bytearray(count)
    source.read_into(offset, memoryview(content))
    return content


class Raw(io.RawIOBase):
    """A source of bytes as a raw file of Python, for `io.BufferedReader`."""

    def __init__(self, source: ByteSource) -> None:
        self._source, self._position = source, 0

    def readable(self) -> bool:
        """Return True: a source can be read."""
        return True

    def seekable(self) -> bool:
        """Return True: a source can be read from any byte."""
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        """Move to a byte, which may lie behind the end."""
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._source.size}[whence]
        if base + offset < 0:
            raise OSError("before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        """Fill the buffer with the next bytes, fewer at the end of the source."""
        count = max(0, min(len(buffer), self._source.size - self._position))
        self._source.read_into(self._position, memoryview(buffer)[:count])
        self._position += count
        return count
