"""A remote file as a source of bytes, of which only requested ranges are fetched.

Ranges near each other become one request, large ones several. A few threads fetch them into the
cache on disk or, if that is full, into memory until they are read. A range is requested once,
however many readers want it.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future, InvalidStateError
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakSet, finalize

from wqk.checkpoints.http import Traffic
from wqk.errors import HubError

if TYPE_CHECKING:
    from wqk.checkpoints.http import RemoteFile
    from wqk.checkpoints.range_cache import RangeCache

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
        self._jobs: SimpleQueue[Any] = SimpleQueue()
        self._promised: WeakSet[Future[bytearray | None]] = WeakSet()
        for _ in range(count):
            threading.Thread(target=_work, args=(self._jobs,), daemon=True).start()
        finalize(self, _dismiss, self._jobs, count)

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
        self._remote, self._identity, self._cache = remote, identity, cache
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
        identity = self._identity if self._saves else None

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
        assert self._identity is not None
        return self._cache.load(self._identity, span.start, span.stop)

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
