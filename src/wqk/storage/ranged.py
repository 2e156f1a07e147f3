"""A remote file as a source of bytes, of which only requested ranges are fetched.

Ranges near each other become one request, large ones several. A few threads fetch them into the
cache on disk or, if that is full, into memory until they are read. A range is requested once,
however many readers want it.

On disk, a range is stored under its file's identity: its origin and the content hash that the
origin reports. The same weights in two repositories of a hub are kept once, changed weights are
never mistaken for the old ones, and what one server claims is never believed of another. Each range
is a file of its own: its bytes, then a checksum over identity, place and bytes. It is written under
a temporary name and renamed, so that any number of processes can read and write at once, and a
killed one leaves nothing under a final name. Nothing waits for the disk: the checksum finds what a
crash of the machine has torn, which is then read as absent.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import threading
import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, finalize

from wqk._files import write_atomically
from wqk.errors import HubError, OutputError
from wqk.storage.http import Traffic

if TYPE_CHECKING:
    from wqk.storage.http import RemoteFile

# Bytes that the cache may take, unless WQK_CACHE_LIMIT says otherwise.
LIMIT = 20 * 10**9

CHECKSUM = 32

# A file that a killed process left unfinished is removed after this many seconds.
ABANDONED = 3600


class RangeCache:
    """Ranges by identity and position, and small notes by name.

    The folder is created on the first write; a read-only one is only read. Within ``limit`` bytes,
    the least recently used ranges make room, except for those of this process: a checkpoint larger
    than the limit is cached up to it.
    """

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._start = time.time() - 1  # the clocks of file systems lag a little
        self._lock = threading.Lock()
        self._taken: int | None = None
        self._refused = limit + 1
        self._last = threading.local()

    def ranges(self, identity: str) -> list[tuple[int, int]]:
        """The ranges of a file that are here, sorted."""
        try:
            names = [path.name for path in self._file_folder(identity).iterdir()]
        except OSError:
            return []
        found = (re.fullmatch(r"(\d+)-(\d+)", name) for name in names)
        return sorted((int(match[1]), int(match[2])) for match in found if match)

    def load(self, identity: str, start: int, stop: int) -> bytes | memoryview | None:
        """A range's bytes; None if it is not here, or not what was written.

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
        """Keep a range if there is room; return whether it was kept."""
        if not self._make_room(len(content) + CHECKSUM):
            return False
        path = self._file_folder(identity) / f"{start}-{start + len(content)}"
        return _write(path, content, _checksum(identity, start, content))

    def note(self, name: str) -> Any:
        """What was noted under a name, or None."""
        try:
            return json.loads(self._note_path(name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return None

    def write_note(self, name: str, value: Any) -> None:
        """Note a small JSON value, if the cache can be written to."""
        if self.limit > 0:
            _write(self._note_path(name), json.dumps(value).encode(), b"")

    def _file_folder(self, identity: str) -> Path:
        return self.folder / "ranges" / hashlib.sha256(identity.encode()).hexdigest()[:40]

    def _note_path(self, name: str) -> Path:
        return self.folder / "notes" / f"{hashlib.sha256(name.encode()).hexdigest()[:40]}.json"

    def _make_room(self, size: int) -> bool:
        """Take ``size`` of the limit; what other processes wrote is seen once it seems full."""
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
        """Remove ranges until ``size`` fits, oldest use first; the bytes that remain taken."""
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
    """The user's cache: WQK_CACHE, or ``wqk`` in ``cache_dir``, or the hub's place for libraries.

    WQK_CACHE_LIMIT, in bytes, sets its size; 0 keeps nothing.
    """
    from huggingface_hub import constants

    chosen = os.environ.get("WQK_CACHE")
    default = Path(cache_dir) if cache_dir else Path(constants.HF_ASSETS_CACHE)
    folder = Path(chosen).expanduser() if chosen else default / "wqk"
    limit = os.environ.get("WQK_CACHE_LIMIT", "")
    return RangeCache(folder, int(limit) if limit.isdecimal() else LIMIT)


def _checksum(identity: str, start: int, content: bytes | bytearray | memoryview) -> bytes:
    digest = hashlib.sha256(f"{identity} {start} ".encode())
    digest.update(content)
    return digest.digest()


def _write(path: Path, *contents: bytes | bytearray) -> bool:
    """Write a file, or none; a cache that cannot be written to is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, *contents, sync=False)
    except (OSError, OutputError):
        return False
    return True


# Connections at once, as many as browsers and the hub's own client open.
CONNECTIONS = 8

# Most bytes of one request. With 8 of them in flight a fetch takes 128 MB of memory; much smaller
# ones would spend their time on round trips.
LARGEST_REQUEST = 2**24

# Unwanted bytes between two ranges that are fetched to save a request: a round trip is worth a few
# 10 kB, and the share keeps what is fetched within 2 % of what is wanted.
LARGEST_GAP = 2**16
GAP_SHARE = 1 / 64


class Workers:
    """Threads that do small jobs in order.

    Unlike those of an executor they die with the process: an interrupted command need not wait for
    downloads that it no longer needs. ``traffic`` counts what they fetched.
    """

    def __init__(self, count: int = CONNECTIONS) -> None:
        self.traffic = Traffic()
        self._process = os.getpid()
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._promised: WeakSet[Future[bytearray | None]] = WeakSet()
        for _ in range(count):
            threading.Thread(target=_work, args=(self._jobs,), daemon=True).start()
        finalize(self, _dismiss, self._jobs, count)

    def require_own_process(self) -> None:
        """Raise `HubError` in a process that was forked since: it lacks the threads."""
        if os.getpid() != self._process:
            raise HubError("was opened before this process was forked; open it again here")

    def submit(self, job: Callable[[], bytearray | None]) -> Future[bytearray | None]:
        """Do the job when its turn comes."""
        future: Future[bytearray | None] = Future()
        self._promised.add(future)
        self._jobs.put((future, job))
        return future

    def abandon(self) -> None:
        """Cancel all waiting readers."""
        for future in list(self._promised):
            _settle(future, error=HubError("interrupted"))


def _work(jobs: SimpleQueue[Any]) -> None:
    while (item := jobs.get()) is not None:
        future, job = item
        if not future.done():
            try:
                _settle(future, job())
            except BaseException as error:
                _settle(future, error=error)
        del item, future, job


def _settle(
    future: Future[bytearray | None],
    result: bytearray | None = None,
    error: BaseException | None = None,
) -> None:
    """Complete a future, unless it is done."""
    with contextlib.suppress(InvalidStateError):
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)


def _dismiss(jobs: SimpleQueue[Any], count: int) -> None:
    """Stop the threads, and drop jobs that have not started."""
    while not jobs.empty():
        jobs.get_nowait()
    for _ in range(count):
        jobs.put(None)


class Span(NamedTuple):
    """A range of a file that is held or requested."""

    start: int
    stop: int
    coming: Future[bytearray | None] | None  # the bytes; None if they are cached, as is its result

    @property
    def outcome(self) -> bytearray | BaseException | None:
        """The bytes, if they are in memory alone, or why they could not be fetched."""
        if self.coming is None or not self.coming.done():
            return None
        error = self.coming.exception()
        return self.coming.result() if error is None else error


class RangedFile:
    """A remote file as a source of bytes, with what was read before.

    ``content`` tells the file's content from any other: by default its address, tag and size.
    Without a tag it is not cached, as nothing vouches for it. ``cache`` and ``workers`` are shared
    by a checkpoint's files. If ``offline``, nothing may be fetched; ``start`` is the file's first
    bytes, if known already.
    """

    def __init__(
        self,
        remote: RemoteFile,
        content: str | None,
        cache: RangeCache,
        workers: Workers,
        offline: bool = False,
        start: bytes = b"",
    ) -> None:
        self.name, self.size = remote.name, remote.size
        by_tag = f"{remote.url} {remote.tag} {remote.size}" if remote.tag else None
        identity = content or by_tag
        self._remote, self.identity, self._cache = remote, identity, cache
        self._workers, self._offline = workers, offline
        self._saves = identity is not None
        self._lock = threading.Lock()
        # Starts and stops both ascend, so that the last span that starts before a byte holds it, if
        # any does.
        self._spans: list[Span] = []
        for begin, end in cache.ranges(identity) if identity else ():
            if end > (self._spans[-1].stop if self._spans else 0):
                self._spans.append(Span(begin, end, None))
        if self._missing(0, len(start)):
            kept = identity is not None and cache.save(identity, 0, start)
            known: Future[bytearray | None] = Future()
            known.set_result(None if kept else bytearray(start))
            self._spans.insert(0, Span(0, len(start), known))

    def want(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Start fetching what of these half-open ranges is neither held nor requested."""
        self._workers.require_own_process()
        with self._lock:
            missing = [gap for start, stop in ranges for gap in self._missing(start, stop)]
            joined = coalesce(missing)
            for start, stop in joined:  # gaps are fetched as well, so that spans stay apart
                self._spans = [s for s in self._spans if s.start < start or s.stop > stop]
            for start, stop in split(joined):
                job = self._job(start, stop)
                self._spans.insert(
                    self._place(start) + 1, Span(start, stop, self._workers.submit(job))
                )

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, waiting for requests in progress."""
        self._workers.require_own_process()
        while buffer:
            span = self._span(offset)
            if span is None:
                self.want([(offset, offset + len(buffer))])
                continue
            content = self._content(span)
            if content is None:  # another process made room, or the disk lost it
                self._drop(span)
                self._saves = self._saves and span.coming is None  # else it may be lost forever
                continue
            count = min(len(buffer), span.stop - offset)
            begin = offset - span.start
            buffer[:count] = memoryview(content)[begin : begin + count]
            buffer, offset = buffer[count:], offset + count

    def forget(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Release the bytes of these ranges from memory."""
        with self._lock:
            for start, stop in ranges:
                self._spans = [
                    span
                    for span in self._spans
                    if span.stop <= start
                    or span.start >= stop
                    or not isinstance(span.outcome, bytearray)
                ]

    def clean(self) -> None:
        """Drop failed requests, so that they are made again."""
        with self._lock:
            self._spans = [s for s in self._spans if not isinstance(s.outcome, BaseException)]

    def _job(self, start: int, stop: int) -> Callable[[], bytearray | None]:
        remote, cache, offline = self._remote, self._cache, self._offline
        identity = self.identity if self._saves else None

        def fetch() -> bytearray | None:
            if offline:
                raise HubError(
                    f"{remote.name}: offline, and bytes {start}-{stop - 1} are not in the cache; "
                    "scan it once while online"
                )
            content = bytearray(stop - start)
            remote.read_into(start, memoryview(content))
            return None if identity and cache.save(identity, start, content) else content

        return fetch

    def _content(self, span: Span) -> bytes | bytearray | memoryview | None:
        if span.coming is not None:
            try:
                held = span.coming.result()
            except BaseException:
                self._drop(span)
                raise
            if held is not None:
                return held
        assert self.identity is not None
        return self._cache.load(self.identity, span.start, span.stop)

    def _drop(self, span: Span) -> None:
        with self._lock:
            self._spans = [other for other in self._spans if other is not span]

    def _place(self, offset: int) -> int:
        """Index of the last span that starts at or before a byte; -1 where none does."""
        return bisect_right(self._spans, offset, key=lambda span: span.start) - 1

    def _span(self, offset: int) -> Span | None:
        with self._lock:
            place = self._place(offset)
            found = self._spans[place] if place >= 0 else None
        return found if found is not None and offset < found.stop else None

    def _missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """The parts of a range that no span covers."""
        gaps = []
        place = self._place(start)
        if place >= 0:
            start = max(start, self._spans[place].stop)
        for span in self._spans[place + 1 :]:
            if span.start >= stop:
                break
            if start < span.start:
                gaps.append((start, span.start))
            start = max(start, span.stop)
        return [*gaps, (start, stop)] if start < stop else gaps


def coalesce(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Join ranges that overlap, touch, or lie so near that one request is cheaper than two.

    Examples
    --------
    >>> coalesce([(1_000_000, 2_000_000), (0, 990_000), (2_100_000, 2_200_000)])
    [(0, 2000000), (2100000, 2200000)]
    """
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(ranges):
        gap = start - joined[-1][1] if joined else LARGEST_GAP + 1
        if gap <= min(LARGEST_GAP, (stop - start) * GAP_SHARE):
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def split(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Cut ranges that are too large for one request into equal pieces.

    Examples
    --------
    >>> split([(0, 40_000_000)])
    [(0, 13333334), (13333334, 26666668), (26666668, 40000000)]
    """
    pieces = []
    for start, stop in ranges:
        count = -(-(stop - start) // LARGEST_REQUEST)
        size = -(-(stop - start) // count)
        pieces += [(a, min(a + size, stop)) for a in range(start, stop, size)]
    return pieces
