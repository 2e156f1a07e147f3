"""Cache on disk of ranges of remote files, each kept whole or not at all.

A range is stored under its file's identity: the store, the path, the size and a strong tag of the
content, or a hash that the Hub reports. The same weights in two repositories of the Hub are kept
once. Changed weights have another identity, and a tag counts only for the server that sent it. Each
range is a file of its own: its bytes, then a checksum over identity, place and bytes. The file is
written under a temporary name and renamed. Therefore any number of processes can read and write at
once, and a killed process leaves no file under a final name. No write waits for the disk: after a
crash of the machine, the checksum finds incomplete files, and the cache treats them as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

from wqk._files import write_atomically
from wqk.errors import OutputError

# Bytes that the cache may take, unless WQK_CACHE_LIMIT says otherwise.
LIMIT = 20 * 10**9

CHECKSUM = 32

# A file that a killed process left unfinished is removed after this many seconds.
ABANDONED = 3600


class RangeCache:
    """Ranges by identity and position, and small notes by name.

    The folder is created on the first write; a read-only folder is only read. If the cache exceeds
    ``limit`` bytes, the least recently used ranges are removed, except for ranges of this process:
    a checkpoint larger than the limit is cached up to the limit.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._start = time.time() - 1  # the clocks of file systems lag a little
        self._lock = threading.Lock()
        self._taken: int | None = None
        self._refused = limit + 1
        self._last = threading.local()

    def ranges(self, identity: str) -> list[tuple[int, int]]:
        """Return the ranges of a file that the cache contains, sorted."""
        try:
            names = [path.name for path in self._file_folder(identity).iterdir()]
        except OSError:
            return []
        ranges = []
        for name in names:
            match = re.fullmatch(r"(\d+)-(\d+)", name)
            if match:
                ranges.append((int(match[1]), int(match[2])))
        return sorted(ranges)

    def load(self, identity: str, start: int, stop: int) -> bytes | memoryview | None:
        """Return the bytes of a range; None if they are absent, or damaged.

        Each thread keeps its last range in memory, as ranges are read piece by piece.
        """
        key = (identity, start, stop)
        if getattr(self._last, "key", None) == key:
            return memoryview(self._last.content)
        path = self._file_folder(identity) / f"{start}-{stop}"
        try:
            stored = path.read_bytes()
        except OSError:
            return None
        content = memoryview(stored)[:-CHECKSUM]
        if (
            len(content) != stop - start
            or _checksum(identity, start, content) != stored[-CHECKSUM:]
        ):
            with contextlib.suppress(OSError):
                path.unlink()
            return None
        with contextlib.suppress(OSError):
            os.utime(path)
        self._last.key, self._last.content = key, content
        return content

    def save(self, identity: str, start: int, content: bytes | bytearray) -> bool:
        """Keep a range if the cache has room; return whether it was kept."""
        if not self._make_room(len(content) + CHECKSUM):
            return False
        path = self._file_folder(identity) / f"{start}-{start + len(content)}"
        return _write(path, content, _checksum(identity, start, content))

    def note(self, name: str) -> Any:
        """Return the note of a name; None if the note is absent."""
        try:
            return json.loads(self._note_path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None

    def write_note(self, name: str, value: Any) -> None:
        """Write a small JSON value under a name, unless the cache is read-only."""
        if self.limit > 0:
            _write(self._note_path(name), json.dumps(value).encode(), b"")

    def _file_folder(self, identity: str) -> Path:
        return self.folder / "ranges" / hashlib.sha256(identity.encode()).hexdigest()[:40]

    def _note_path(self, name: str) -> Path:
        return self.folder / "notes" / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"

    def _make_room(self, size: int) -> bool:
        """Reserve ``size`` bytes; the folder is measured again only if it seems full."""
        with self._lock:
            if size >= self._refused:  # what was refused once would be again
                return False
            if self._taken is None or self._taken + size > self.limit:
                self._taken = self._remove_oldest(size)
            if self._taken + size > self.limit:
                self._refused = size
                return False
            self._taken += size
            return True

    def _remove_oldest(self, size: int) -> int:
        """Remove least recently used ranges until ``size`` fits; return the bytes still in use."""
        entries: list[tuple[float, int, Path]] = []
        for path in (self.folder / "ranges").glob("*/*"):
            with contextlib.suppress(OSError):
                about = path.stat()
                entries.append((about.st_mtime, about.st_size, path))
        taken = sum(count for _, count, _ in entries)
        for used, count, path in sorted(entries):
            finished = not path.name.startswith(".")
            if finished and (taken + size <= self.limit or used >= self._start):
                continue
            if finished or time.time() - used > ABANDONED:
                with contextlib.suppress(OSError):
                    path.unlink()
                    taken -= count
        return taken


def open_cache(cache_dir: str | os.PathLike[str] | None = None) -> RangeCache:
    """Return the user's cache: WQK_CACHE, ``wqk`` in ``cache_dir``, or in the folder of the Hub.

    WQK_CACHE_LIMIT, in bytes, sets its size; 0 keeps nothing.
    """
    from huggingface_hub import constants

    folder = Path(cache_dir or constants.HF_ASSETS_CACHE) / "wqk"
    if chosen := os.environ.get("WQK_CACHE"):
        folder = Path(chosen).expanduser()
    limit = LIMIT
    chosen_limit = os.environ.get("WQK_CACHE_LIMIT", "")
    if chosen_limit.isdecimal():
        limit = int(chosen_limit)
    return RangeCache(folder, limit)


def _checksum(identity: str, start: int, content: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.sha256(f"{identity} {start} ".encode())
    digest.update(content)
    return digest.digest()


def _write(path: Path, *contents: bytes | bytearray) -> bool:
    """Write a file completely or not at all; a read-only cache is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, *contents, sync=False)
    except (OSError, OutputError):
        return False
    return True
