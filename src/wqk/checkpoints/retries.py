"""Transient network failures: how often to retry, and how long to wait."""

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

from wqk.errors import HubError

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
        if answer.cancel() or not answer.done():
            raise Interrupted("the server does not answer") from None
        raise
    except BaseException:
        answer.cancel()
        raise


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
