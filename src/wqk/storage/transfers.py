"""Transfers of bytes: parallel, and repeated after failures that may pass.

All requests are made on one thread, by an event loop. After a failure that may pass (a broken
connection, 429, a 5xx), the request is repeated with growing waits. An answer that contradicts the
request raises an error at once. An attempt ends if the body arrives more slowly than
`Patience.slowest`.
"""

from __future__ import annotations

import asyncio
import os
import re
import threading
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar
from weakref import WeakSet

from wqk.errors import CheckpointError, HubError, WqkError
from wqk.storage import patience
from wqk.storage.stores import Location

T = TypeVar("T")

# Requests at once, as many as browsers and the hub's own client make.
CONNECTIONS = 8
# Bytes between two looks at the clock.
CHUNK = 2**18


class Absent(HubError):
    """The file does not exist, or this user has no access."""


class Refused(Absent):
    """The server denies this user access; the file may or may not exist."""

    def __init__(self, status: int) -> None:
        super().__init__(f"this login may not read it (the server answers {status})")
        self.status = status


class Passing(Exception):
    """A failure that may pass; ``attempts`` is the limit of such failures in a row."""

    def __init__(self, reason: str, attempts: int) -> None:
        super().__init__(reason)
        self.attempts = attempts


class Expired(Exception):
    """The credentials of an address are no longer accepted; ``refusal`` is the error to raise."""

    def __init__(self, refusal: HubError) -> None:
        super().__init__(str(refusal))
        self.refusal = refusal


class Answer(NamedTuple):
    """Bytes of an object, and the size, tag and date of the whole object."""

    content: bytearray
    size: int
    tag: str | None
    modified: str  # time of the last change; empty if the answer does not contain one


# Messages of obstore on permanent failures, and their meanings.
MEANINGS = (
    (
        r"MissingRegion|PermanentRedirect|IllegalLocationConstraint",
        "the bucket lies in another region; set AWS_REGION",
    ),
    (r"Requested \d+\.\.\d+, got \d+\.\.\d+", "the server sends another range"),
    (r"Content-Range header not present|CONTENT_RANGE", "the answer does not name its range"),
    (r"Content-Length|CONTENT_LENGTH", "the answer does not name its length"),
    (
        r"following redirect|status code: 30\d|builder error",
        "redirected to an address that is not followed",
    ),
    (
        r"UnknownIssuer|[Cc]ertificate",
        "the server's certificate is not trusted; set SSL_CERT_FILE to the authority's bundle",
    ),
)
CREDENTIALS = (
    "needs credentials; set AWS_ACCESS_KEY_ID, GOOGLE_APPLICATION_CREDENTIALS or "
    "AZURE_STORAGE_ACCOUNT_KEY, or AWS_SKIP_SIGNATURE=true for a public bucket"
)
# Addresses for the credentials of machines in a cloud.
CREDENTIAL_SERVERS = re.compile(r"169\.254\.|metadata\.google|token request|oauth2|sts\.amazonaws")
PASSING_STATUS = (408, 425, 429, 500, 502, 503, 504)


def failure_of(error: Exception, expires: bool = False) -> Exception:
    """Translate an error of `obstore`; the message may quote secrets.

    Returns
    -------
    Exception
        `Passing`; `Expired`, if ``expires`` and the address was refused; or a `WqkError`.
    """
    from obstore import exceptions

    message = str(error)
    status = re.search(r"status code: (\d{3})", message)
    code = int(status[1]) if status else None
    if CREDENTIAL_SERVERS.search(message):
        return HubError(CREDENTIALS)
    if isinstance(error, FileNotFoundError):
        refusal: HubError = Absent("no such file")
        return Expired(refusal) if expires else refusal
    if isinstance(error, exceptions.UnauthenticatedError | exceptions.PermissionDeniedError):
        refusal = Refused(code or 403)
        return Expired(refusal) if expires else refusal
    if isinstance(error, exceptions.PreconditionError):
        return CheckpointError("was replaced during the read; scan it again")
    if isinstance(error, exceptions.NotSupportedError):
        return CheckpointError(
            "the server does not support range requests; serve the folder with nginx or `npx "
            "serve`, or download the checkpoint and scan the folder"
        )
    if code == 416:
        return CheckpointError(
            "ends before the requested bytes; it is empty, or was replaced during the read"
        )
    if "NoSuchBucket" in message or "ContainerNotFound" in message:
        return Absent("no such bucket")
    if "ExpiredToken" in message:
        return HubError("the credentials have expired; log in again")
    if expires and code in (400, 410):
        return Expired(HubError(f"the server answers {code}"))
    if code in PASSING_STATUS:
        return Passing(f"the server answers {code}", patience.PATIENCE.attempts)
    for pattern, meaning in MEANINGS:
        if re.search(pattern, message):
            return CheckpointError(meaning)
    if code is not None:
        return HubError(f"the server answers {code}")
    if "kind: Connect" in message or "dns error" in message:
        return Passing("the server cannot be reached", patience.PATIENCE.attempts_to_connect)
    if "kind: Timeout" in message or "TimedOut" in message:
        return Passing("the server does not answer", patience.PATIENCE.attempts_if_slow)
    return Passing("the connection broke", patience.PATIENCE.attempts)


async def receive(location: Location, start: int, stop: int, tag: str | None) -> Answer:
    """Request a half-open range of bytes once, and check the answer against the request.

    ``tag`` is the tag that the object must have; None if unknown.
    """
    import obstore

    options: Any = {"range": (start, stop)}
    if tag:
        options["if_match"] = tag
    limits = patience.PATIENCE
    try:
        request = obstore.get_async(location.store, location.path, options=options)
        result = await asyncio.wait_for(request, limits.answer)
    except TimeoutError:
        raise Passing("the server does not answer", limits.attempts_if_slow) from None
    if result.attributes.get("Content-Encoding", "identity") != "identity":
        raise CheckpointError("the server compresses ranges, which shifts their bytes")
    first, last = result.range
    content = bytearray(last - first)
    received = 0
    async for chunk in in_time(result.stream(min_chunk_size=CHUNK)):
        if received + len(chunk) > len(content):
            raise CheckpointError(
                f"the server sends more than the {len(content)} bytes that it announces"
            )
        content[received : received + len(chunk)] = chunk
        received += len(chunk)
    if received < len(content):
        raise Passing(
            f"the server sends {received} of {len(content)} bytes", patience.PATIENCE.attempts
        )
    modified = result.meta["last_modified"]
    return Answer(
        content=content,
        size=result.meta["size"],
        tag=result.meta["e_tag"],
        modified=modified.isoformat() if modified.timestamp() > 0 else "",
    )


async def in_time(stream: Any) -> AsyncIterator[bytes]:
    """Yield the chunks of a body; raise `Passing` if a chunk takes longer than the slowest rate."""
    limits = patience.PATIENCE
    longest = limits.silence + CHUNK / limits.slowest
    while True:
        try:
            chunk = await asyncio.wait_for(anext(stream, None), longest)
        except TimeoutError:
            raise Passing("the server sends too slowly", limits.attempts_if_slow) from None
        if chunk is None:
            return
        yield chunk


async def repeated(call: Callable[[], Awaitable[T]], expires: bool = False) -> T:
    """Return the result of a call, repeated after failures that may pass.

    Raises
    ------
    WqkError
        The failure is permanent, or the call failed too often.
    Expired
        The address was refused, and ``expires``.
    """
    limits, failures = patience.PATIENCE, Counter[str]()
    while True:
        try:
            return await call()
        except (WqkError, asyncio.CancelledError, Expired):
            raise
        except Exception as error:
            failure = error if isinstance(error, Passing) else failure_of(error, expires)
            if not isinstance(failure, Passing):
                raise failure from None
            reason = str(failure)
            failures[reason] += 1
            if failures[reason] >= failure.attempts or failures.total() >= limits.attempts:
                raise HubError(
                    f"{reason}, {failures[reason]} times in a row; try again later (bytes read so "
                    "far are cached)"
                ) from None
            await asyncio.sleep(limits.wait(failures.total()))


class EventLoop:
    """An event loop on a daemon thread, which ends with the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: int | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        """Start a coroutine from any thread; `HubError` in a process that was forked since."""
        with self._lock:
            if self._process not in (None, os.getpid()):
                coroutine.close()
                raise HubError(
                    "remote files were read before this process was forked; start processes with "
                    "the method 'spawn'"
                )
            if self._loop is None:
                self._process = os.getpid()
                self._loop = asyncio.new_event_loop()
                # An error that nobody waits for any more needs no line in a log.
                self._loop.set_exception_handler(lambda *_: None)
                threading.Thread(
                    target=self._loop.run_forever, name="wqk-transfers", daemon=True
                ).start()
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)


EVENTS = EventLoop()


def attempted(call: Callable[[], Awaitable[T]]) -> T:
    """Return the result of a call on the event loop, repeated after failures that may pass."""
    return EVENTS.submit(repeated(call)).result()


class Transfers:
    """Transfers of one checkpoint, at most `CONNECTIONS` at once; ``bytes`` counts bodies."""

    def __init__(self) -> None:
        self.bytes = 0
        self._running: WeakSet[Future[Any]] = WeakSet()
        self._slots: asyncio.Semaphore | None = None

    def submit(self, job: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Start a job once fewer than `CONNECTIONS` others are running."""

        async def in_turn() -> T:
            if self._slots is None:
                self._slots = asyncio.Semaphore(CONNECTIONS)
            async with self._slots:
                return await job()

        future = EVENTS.submit(in_turn())
        self._running.add(future)
        return future

    def abandon(self) -> None:
        """Cancel all running jobs; threads that wait for a job receive an error."""
        for future in list(self._running):
            future.cancel()
