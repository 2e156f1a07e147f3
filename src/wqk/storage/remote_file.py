"""A remote file as a source of bytes; only requested ranges are fetched.

Ranges near each other become one request, large ranges several. The bytes are kept in the cache on
disk; if the cache is full, in memory until they are read. Several readers of a range share one
request.
"""

from __future__ import annotations

import asyncio
import threading
from bisect import bisect_right
from collections.abc import Callable, Coroutine, Iterable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, NamedTuple

from wqk.errors import CheckpointError, HubError, errors_about
from wqk.storage.range_cache import RangeCache
from wqk.storage.stores import Location
from wqk.storage.transfers import Answer, Expired, Transfers, receive, repeated

# Most bytes of one request. With 8 of them in flight a fetch takes 128 MB of memory; much smaller
# ones would spend their time on round trips.
LARGEST_REQUEST = 2**24

# Unwanted bytes between two ranges that are fetched to save a request: a round trip is worth a few
# 10 kB, and the share keeps what is fetched within 2 % of what is wanted.
LARGEST_GAP = 2**16
GAP_SHARE = 1 / 64

# How often in a row a new address is asked for, because the last one was refused.
MOST_RENEWALS = 5

# Of a file that no tag vouches for: ranges that are read again after each later one, and how much
# of each.
WITNESSES, WITNESS = 3, 2**12


class ByteSpan(NamedTuple):
    """A range of a file that is held or requested."""

    start: int
    stop: int
    coming: Future[bytearray | None] | None  # None, or a result of None, for cached bytes

    @property
    def outcome(self) -> bytearray | BaseException | None:
        """The bytes, if only in memory, or the error of a failed request; else None."""
        if self.coming is None or not self.coming.done():
            return None
        if self.coming.cancelled():
            return HubError("interrupted")
        return self.coming.exception() or self.coming.result()


class RemoteFile:
    """A file of a store as a source of bytes, with the ranges that were read before.

    Parameters
    ----------
    name
        Name without secrets, for errors.
    location
        Location of the file; None to call ``renew`` first.
    renew
        Function that returns the present location of the file; called when an address is no longer
        accepted.
    transfers, cache
        Shared by a checkpoint's files.
    size
        Size in bytes; None to learn the size from the first request.
    tag
        Tag of the content in a listing.
    content
        Hash of the content, which identifies the content in any place; None if unknown.
    offline
        Whether requests are forbidden.
    """

    def __init__(
        self,
        name: str,
        location: Location | None,
        *,
        transfers: Transfers,
        cache: RangeCache,
        renew: Callable[[], Location] | None = None,
        size: int | None = None,
        tag: str | None = None,
        content: str | None = None,
        offline: bool = False,
    ) -> None:
        self.name, self.size, self.tag = name, -1 if size is None else size, tag
        self._location, self._renew = location, renew
        self._transfers, self._cache, self._offline = transfers, cache, offline
        self._content, self._modified = content, ""
        self._renewal = asyncio.Lock()
        self._witnesses: list[tuple[int, bytes]] = []
        self._lock = threading.Lock()
        # Starts and stops both ascend, so that the last span that starts before a byte holds it, if
        # any does.
        self._spans: list[ByteSpan] = []
        self._saves = True
        if size is not None:
            self._find_cached()

    @property
    def identity(self) -> str | None:
        """Unique value of the content; None if the server reports no such value."""
        if self._content is not None:
            return self._content
        address = self._location.address if self._location else self.name
        return f"{address} {self.size} {self.strong_tag}" if self.strong_tag else None

    @property
    def strong_tag(self) -> str | None:
        """The tag; None if the tag is weak, as different contents can have one weak tag."""
        return None if self.tag is None or self.tag.startswith("W/") else self.tag

    def describe(self) -> None:
        """Learn size and tag from the first bytes; `Absent` if the file does not exist."""
        with errors_about(self.name):
            try:
                start = self._transfers.submit(lambda: self._fetch(0, 8)).result()
            except CancelledError:
                raise HubError("interrupted") from None
            self._find_cached()
            if self._missing(0, len(start)):
                kept = self.identity is not None and self._cache.save(self.identity, 0, start)
                known: Future[bytearray | None] = Future()
                known.set_result(None if kept else start)
                self._spans.insert(0, ByteSpan(0, len(start), known))

    def want(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Start to fetch all bytes of half-open ranges that are neither held nor requested."""
        with self._lock:
            missing: list[tuple[int, int]] = []
            for start, stop in ranges:
                missing += self._missing(start, stop)
            joined = coalesce(missing)
            for start, stop in joined:  # gaps are fetched, too, so that spans stay separate
                self._spans = [s for s in self._spans if s.start < start or s.stop > stop]
            for start, stop in split(joined):
                coming = self._transfers.submit(self._job(start, stop))
                self._spans.insert(self._place(start) + 1, ByteSpan(start, stop, coming))

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, waiting for requests in progress."""
        with errors_about(self.name):
            while buffer:
                span = self._span(offset)
                if span is None:
                    self.want([(offset, offset + len(buffer))])
                    continue
                content = self._bytes_of(span)
                if content is None:  # another process made room, or the disk lost it
                    self._drop(span)
                    # Else it may be lost for ever.
                    self._saves = self._saves and span.coming is None
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
        """Forget failed requests; the next read of their ranges makes new requests."""
        with self._lock:
            self._spans = [s for s in self._spans if not isinstance(s.outcome, BaseException)]

    def _job(self, start: int, stop: int) -> Callable[[], Coroutine[Any, Any, bytearray | None]]:
        """Return a function that fetches a range into the cache or into memory."""

        async def fetch() -> bytearray | None:
            if self._offline:
                raise HubError(
                    f"offline, and bytes {start}-{stop - 1} are not in the cache; "
                    "scan it once while online"
                )
            content = await self._fetch(start, stop)
            if len(content) < stop - start:
                raise CheckpointError(f"ends at byte {start + len(content)}, during the read")
            identity = self.identity if self._saves else None
            if identity is None:
                return content
            kept = await asyncio.to_thread(self._cache.save, identity, start, content)
            return None if kept else content

        return fetch

    async def _fetch(self, start: int, stop: int) -> bytearray:
        """Receive a range, from a new address if the last address is no longer accepted."""
        for renewal in range(MOST_RENEWALS):
            location = await self._located()
            try:
                request = partial(receive, location, start, stop, self._required_tag())
                answer = await repeated(request, expires=self._renew is not None)
            except Expired as expired:
                async with self._renewal:
                    if self._location is location:
                        self._location = None
                if renewal == MOST_RENEWALS - 1:
                    raise expired.refusal from None
                continue
            self._transfers.bytes += len(answer.content)
            self._check(answer)
            await self._check_witnesses(start, answer)
            return answer.content
        raise AssertionError("unreachable")

    async def _located(self) -> Location:
        """Return the location of the file; parallel requests look it up once."""
        async with self._renewal:
            if self._location is None:
                assert self._renew is not None
                self._location = await asyncio.to_thread(self._renew)
            return self._location

    def _required_tag(self) -> str | None:
        """Return the tag that an answer must have; None if a hash identifies the file."""
        return None if self._content else self.strong_tag

    def _check(self, answer: Answer) -> None:
        """Raise `CheckpointError` if an answer is about other content than the first answer."""
        if self.size >= 0 and answer.size != self.size:
            raise CheckpointError(
                f"has {answer.size} bytes instead of {self.size}; it was replaced during the read"
            )
        is_first, self.size = self.size < 0, answer.size
        if self._content is not None:
            return
        if is_first or (self.tag is None and not self._modified):
            self.tag = self.tag or answer.tag
            self._modified = answer.modified
        elif answer.tag != self.tag or (self.tag is None and answer.modified != self._modified):
            raise CheckpointError("was replaced during the read; scan it again")

    async def _check_witnesses(self, start: int, answer: Answer) -> None:
        """Read some earlier bytes again if no hash, tag or date can show a change."""
        if self._content is not None or self.tag is not None or self._modified:
            return
        for first, witness in self._witnesses:
            location = await self._located()
            stop = first + len(witness)
            again = await repeated(partial(receive, location, first, stop, None))
            self._transfers.bytes += len(again.content)
            if again.content != witness or again.size != self.size:
                raise CheckpointError("was replaced during the read; scan it again")
        if len(self._witnesses) < WITNESSES:
            self._witnesses.append((start, bytes(answer.content[:WITNESS])))

    def _find_cached(self) -> None:
        """Make spans of the ranges that are in the cache."""
        identity = self.identity
        for start, stop in self._cache.ranges(identity) if identity else ():
            if stop > (self._spans[-1].stop if self._spans else 0):
                self._spans.append(ByteSpan(start, stop, None))

    def _bytes_of(self, span: ByteSpan) -> bytes | bytearray | memoryview | None:
        """Return the bytes of a span; None if the cache no longer holds them."""
        if span.coming is not None:
            try:
                held = span.coming.result()
            except CancelledError:
                self._drop(span)
                raise HubError("interrupted") from None
            except BaseException:
                self._drop(span)
                raise
            if held is not None:
                return held
        assert self.identity is not None
        return self._cache.load(self.identity, span.start, span.stop)

    def _drop(self, span: ByteSpan) -> None:
        with self._lock:
            self._spans = [other for other in self._spans if other is not span]

    def _place(self, offset: int) -> int:
        """Index of the last span that starts at or before a byte; -1 if none does."""
        return bisect_right(self._spans, offset, key=lambda span: span.start) - 1

    def _span(self, offset: int) -> ByteSpan | None:
        """Return the span that holds a byte."""
        with self._lock:
            place = self._place(offset)
            span = self._spans[place] if place >= 0 else None
        return span if span is not None and offset < span.stop else None

    def _missing(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the parts of a range that no span covers."""
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
    """Join ranges that overlap, touch, or are so close that one request costs less than two.

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
    """Cut ranges above the limit of one request into equal pieces.

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
