"""One file behind HTTP: its size, its tag, and ranges of its bytes.

Requests go through the hub client's own session, which knows the user's proxies, certificates and
offline mode. Transient failures (broken connections, 429, 5xx) are retried from the byte reached;
inconsistent responses (lengths or ranges other than requested, another tag) are refused.
"""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any, NamedTuple
from urllib.parse import urljoin

from wqk.errors import CheckpointError, HubError, errors_about
from wqk.storage.references import redacted, split_address

# Answers that are worth another attempt.
PASSING = (408, 425, 429, 500, 502, 503, 504)


class Patience(NamedTuple):
    """How long to wait for a server, and how often to try again; times are in seconds."""

    attempts: int = 6  # failures in a row before giving up
    attempts_to_connect: int = 3  # the same if the server has never answered
    first: float = 0.5  # wait after the first failure, doubling from there
    longest: float = 30.0
    longest_asked: float = 300.0  # a server that asks for more is not waited for
    timeout: float | None = None  # without a byte; None for the hub's HF_HUB_DOWNLOAD_TIMEOUT
    slowest: float = 2.0**13  # bytes a second below which an attempt is given up
    sleep: Callable[[float], None] = time.sleep

    @property
    def longest_answer(self) -> float:
        """Seconds until the headers of an answer must be there, despite interim answers."""
        from huggingface_hub import constants

        return 3 * (self.timeout or constants.HF_HUB_DOWNLOAD_TIMEOUT)

    @property
    def longest_fruitless(self) -> float:
        """Seconds of attempts without progress before giving up, however few they are."""
        return 2 * self.longest_answer

    def deadline(self, size: int) -> float:
        """Deadline on the monotonic clock for receiving this many bytes."""
        return time.monotonic() + self.longest_answer + size / self.slowest

    def wait(self, failures: int, asked: float | None) -> None:
        """Wait after this many failures, at least as long as the server asked for."""
        if asked is not None and asked > self.longest_asked:
            raise HubError(f"the server asks to wait {asked:.0f} s; try again later")
        # Random, so that parallel requests do not come back all at once.
        backoff = min(self.longest, self.first * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        self.sleep(backoff if asked is None else asked)


# What every file uses; the tests put a less patient one in its place.
PATIENCE = Patience()


class Interrupted(Exception):
    """An attempt that may succeed when made again, from the byte it reached."""

    def __init__(self, reason: str, received: int = 0, wait: float | None = None) -> None:
        super().__init__(reason)
        self.received, self.wait = received, wait


def within_deadline(send: Callable[[], Any], discard: Callable[[Any], None]) -> Any:
    """Send a request; `Interrupted` if the answer's headers take longer than `Patience` allows.

    The client's own timeout starts anew with every byte, so headers that drip in, or endless
    interim answers, never reach it. A late answer is discarded.
    """
    answer: Future[Any] = Future()

    def run() -> None:
        try:
            result = send()
        except BaseException as error:
            with suppress(InvalidStateError):
                answer.set_exception(error)
            return
        try:
            answer.set_result(result)
        except InvalidStateError:
            discard(result)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(PATIENCE.longest_answer)
    except TimeoutError:
        if answer.cancel():
            raise Interrupted("the server does not answer") from None
        return answer.result()
    finally:
        answer.cancel()  # where waiting was interrupted


def transport_errors() -> tuple[type[Exception], ...]:
    """What the hub client's HTTP library raises; which library that is depends on its version."""
    from huggingface_hub import errors

    return (errors.HTTPError,)  # type: ignore[attr-defined]


@contextmanager
def interruptions() -> Iterator[None]:
    """Turn connection errors into `Interrupted`, and the client's offline mode into `HubError`."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise HubError("offline mode is on (HF_HUB_OFFLINE), and it is not in the cache") from None
    except transport_errors() as error:
        raise Interrupted(reason(error)) from None


def reason(error: Exception) -> str:
    """What happened to the connection."""
    name = type(error).__name__
    if "Timeout" in name:
        return "the server does not answer"
    return "the server cannot be reached" if name == "ConnectError" else "the connection broke"


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait, by Retry-After in either form or by its rate limit."""
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    if asked:
        try:
            until = parsedate_to_datetime(asked)
            return max(0.0, (until - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError, OverflowError):
            return None
    limit = re.search(r";\s*r=0;\s*t=(\d{1,9})", headers.get("ratelimit", ""))
    return float(limit[1]) if limit else None


REDIRECTS = (301, 302, 303, 307, 308)
MOST_REDIRECTS = 5

# Answers to an expired signature, which is worth a new one.
EXPIRED = (400, 401, 403, 404, 410)

# An attempt that brought this much is no failure, however it ended.
PROGRESS = 2**18

RANGE = re.compile(r"bytes (\d{1,19})-(\d{1,19})/(\d{1,19}|\*)")


class Traffic:
    """A thread-safe count of the bytes in bodies of answers."""

    def __init__(self) -> None:
        self.bytes = 0
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        """Add bytes."""
        with self._lock:
            self.bytes += count


class Absent(HubError):
    """There is no such file, or not for this user."""


class RemoteFile:
    """A file behind HTTP, as a source of bytes, which ``traffic`` counts.

    ``name`` is for errors, without secrets; ``headers`` are sent to the origin of ``url`` only, as
    they may contain credentials. Redirects are followed, remembered while they work, never stored.
    A ``size`` that is not known is learned from the first request.
    """

    def __init__(
        self,
        url: str,
        *,
        name: str,
        headers: Mapping[str, str],
        traffic: Traffic,
        size: int | None = None,
    ) -> None:
        self.url, self.name, self.size = url, name, size if size is not None else -1
        self.tag: str | None = None
        self._headers, self._traffic = dict(headers), traffic
        self._location: str | None = None
        self._answered = False
        self._lock = threading.Lock()
        self._tags: dict[str, str] = {}

    def describe(self) -> bytes:
        """Learn the size and tag; return the first bytes, up to 8. `Absent` without a file."""
        buffer = bytearray(8)
        with errors_about(self.name):
            count = self._read(0, memoryview(buffer), short=True)
        return bytes(buffer[:count])

    def read_into(self, offset: int, buffer: memoryview) -> None:
        """Fill the buffer from this offset, resuming where a connection breaks."""
        with errors_about(self.name):
            self._read(offset, buffer)

    def _read(self, offset: int, buffer: memoryview, short: bool = False) -> int:
        filled = failures = 0
        fruitless = 0.0  # seconds of attempts in a row that brought next to nothing
        while filled < len(buffer):
            began = time.monotonic()
            try:
                with interruptions():
                    received = self._attempt(offset + filled, buffer[filled:])
                filled += received
                if short:
                    break
                if filled < len(buffer) and received < PROGRESS:
                    raise Interrupted("the server sends almost nothing", wait=0)
            except Interrupted as interrupted:
                filled += interrupted.received
                if interrupted.received >= PROGRESS:
                    failures, fruitless = 0, 0.0
                failures, fruitless = failures + 1, fruitless + time.monotonic() - began
                patience = PATIENCE
                most = patience.attempts if self._answered else patience.attempts_to_connect
                if failures >= most or fruitless >= patience.longest_fruitless:
                    raise HubError(
                        f"{interrupted}, {failures} times in a row; try again later "
                        "(bytes read so far are cached)"
                    ) from None
                patience.wait(failures, interrupted.wait)
        return filled

    def _attempt(self, offset: int, buffer: memoryview) -> int:
        """One request; how much of the buffer it filled."""
        response = self._respond(f"bytes={offset}-{offset + len(buffer) - 1}")
        received, deadline = 0, PATIENCE.deadline(len(buffer))
        try:
            length = self._check(response, offset, len(buffer))
            for chunk in response.iter_raw():
                if received + len(chunk) > length:
                    raise CheckpointError(
                        f"the server sent more than the {length} bytes it announced"
                    )
                buffer[received : received + len(chunk)] = chunk
                received += len(chunk)
                self._traffic.add(len(chunk))
                if time.monotonic() > deadline:
                    raise Interrupted("the server sends too slowly", received)
        except transport_errors() as error:
            raise Interrupted(reason(error), received) from None
        finally:
            response.close()
        if received < length:
            raise Interrupted(f"the server sent {received} of {length} bytes", received)
        return received

    def _respond(self, asked: str) -> Any:
        """The answer to a request for a range, after resolving the address if necessary."""
        location = self._location
        if location is None:
            with self._lock:  # parallel requests resolve once, not each for itself
                location = self._location
                if location is None:
                    return self._resolve(asked)
        response = self._send(location, asked)
        if response.status_code in REDIRECTS or (
            location != self.url and response.status_code in EXPIRED
        ):
            _discard(response)
            with self._lock:
                if self._location == location:
                    self._location = None
            raise Interrupted("the address that the server redirects to expired", wait=0)
        return self._accept(response, location)

    def _resolve(self, asked: str) -> Any:
        """Follow redirects from the file's own address; the last one's is kept in memory."""
        url = self.url
        for _ in range(MOST_REDIRECTS):
            response = self._send(url, asked)
            linked = response.headers.get("x-linked-etag")
            if linked:
                self._keep_tag(self.url, linked)
            if response.status_code not in REDIRECTS:
                response = self._accept(response, url)
                self._location = url
                return response
            _discard(response)
            try:
                target = urljoin(url, response.headers.get("location", ""))
                schemes = split_address(url).scheme, split_address(target).scheme
            except (ValueError, CheckpointError):
                raise CheckpointError("redirected to an invalid URL") from None
            if schemes not in (("https", "https"), ("http", "http"), ("http", "https")):
                raise CheckpointError(
                    f"redirected from {schemes[0]} to {schemes[1] or 'nowhere'}, "
                    "which is not followed"
                )
            url = target
        raise CheckpointError(f"redirected more than {MOST_REDIRECTS} times")

    def _send(self, url: str, asked: str) -> Any:
        from huggingface_hub import constants
        from huggingface_hub.utils import get_session  # type: ignore[attr-defined]

        headers = {"Range": asked, "Accept-Encoding": "identity"}
        if _origin(url) == _origin(self.url):
            headers |= self._headers
        timeout = PATIENCE.timeout or constants.HF_HUB_DOWNLOAD_TIMEOUT
        client = get_session()
        try:
            request = client.build_request("GET", url, headers=headers, timeout=timeout)
        except Exception:  # the client's parser of addresses may fail in any way
            raise CheckpointError(f"{redacted(url)} is no address") from None
        response = within_deadline(
            lambda: client.send(request, stream=True, follow_redirects=False),
            discard=lambda late: late.close(),
        )
        self._answered = True
        return response

    def _accept(self, response: Any, url: str) -> Any:
        """The answer, if it has content."""
        status = response.status_code
        if status in (200, 206):
            if redacted(self.url) not in self._tags or url == self.url:
                # Otherwise the hub has given a hash of the content; the tags of its storage may
                # differ from one place to the next.
                headers = response.headers
                self._keep_tag(url, headers.get("etag"), headers.get("last-modified"))
            return response
        _discard(response)
        if status in PASSING:
            raise Interrupted(f"the server answers {status}", wait=asked_wait(response.headers))
        if status == 416:
            raise CheckpointError(
                "ends before the requested bytes; it is empty, or was replaced during the read"
            )
        raise _refusal(status, response.headers)

    def _keep_tag(self, url: str, tag: str | None, modified: str | None = None) -> None:
        """Remember an address's tag of the content; another tag means other content.

        Without a tag, the time of the last change serves; it is too coarse for a cache.
        """
        version = tag or modified or ""
        if self._tags.setdefault(redacted(url), version) != version:
            raise CheckpointError("was replaced during the read; scan it again")
        if self.tag is None and tag and not tag.startswith("W/"):
            self.tag = tag.strip('"')

    def _check(self, response: Any, offset: int, wanted: int) -> int:
        """The answer's number of bytes, once all its claims agree with the request."""
        headers = response.headers
        if headers.get("content-encoding", "identity") != "identity":
            raise CheckpointError("the server compresses ranges, which shifts their bytes")
        length = _whole_number(headers.get("content-length"))
        if response.status_code == 200:
            if offset == 0 and length is not None and length <= wanted:
                self._keep_size(length)
                return length
            raise CheckpointError(
                "the server does not support range requests; "
                "download the checkpoint and scan the folder"
            )
        claim = RANGE.fullmatch(headers.get("content-range", ""))
        if not claim:
            raise CheckpointError("the server does not say which range it sends")
        first, last = int(claim[1]), int(claim[2])
        if first != offset or not first <= last < offset + wanted:
            raise CheckpointError(
                f"bytes {offset}-{offset + wanted - 1} were requested, but the "
                f"server sends {first}-{last}"
            )
        if length not in (None, last - first + 1):
            raise CheckpointError(
                f"the server announces {length} bytes for the range {first}-{last}"
            )
        if claim[3] != "*":
            self._keep_size(int(claim[3]))
        if self.size < 0:
            raise CheckpointError("the server does not say how long the file is")
        return last - first + 1

    def _keep_size(self, size: int) -> None:
        if self.size >= 0 and size != self.size:
            raise CheckpointError(
                f"has {size} bytes instead of {self.size}; it was replaced during the read"
            )
        self.size = size


def _discard(response: Any) -> None:
    """Read the rest of a short answer, to reuse its connection; drop a long one."""
    length = _whole_number(response.headers.get("content-length"))
    try:
        if length is not None and length < 2**16:
            for _ in response.iter_raw():
                pass
    finally:
        response.close()


def _origin(url: str) -> tuple[str, str]:
    parts = split_address(url)
    return parts.scheme, parts.netloc.lower()


def _refusal(status: int, headers: Mapping[str, str]) -> Exception:
    """The error for an answer that another attempt would not change."""
    code = headers.get("x-error-code")
    if code == "GatedRepo":
        return HubError("is gated; accept its terms on the hub, then hf auth login")
    if code == "RepoNotFound":
        return HubError("is in no repository that this login can see")
    if status in (404, 410):
        return Absent("no such file")
    if status in (401, 403):
        return Absent(f"this login may not read it (the server answers {status})")
    return HubError(f"the server answers {status}")


def _whole_number(text: str | None) -> int | None:
    return int(text) if text and re.fullmatch(r"[0-9]{1,19}", text) else None
