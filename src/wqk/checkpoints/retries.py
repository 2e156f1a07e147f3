"""What the network does by chance, and how often and how long it is borne with."""

from __future__ import annotations

import random
import re
import time
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import TYPE_CHECKING, NamedTuple

from wqk.errors import HubError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

# Answers that are worth another attempt.
PASSING = (408, 425, 429, 500, 502, 503, 504)


class Patience(NamedTuple):
    """How long to bear with a server.

    Attributes
    ----------
    attempts, attempts_to_connect
        Failures in a row before giving up; fewer where the server has never answered.
    first, longest
        Seconds to wait after the first failure, doubling from there, and at most.
    longest_asked
        A server that asks for more seconds than this is not waited for.
    timeout
        Seconds without a byte that end an attempt; None for the hub's HF_HUB_DOWNLOAD_TIMEOUT.
    sleep
        What waits.
    """

    attempts: int = 6
    attempts_to_connect: int = 3
    first: float = 0.5
    longest: float = 30.0
    longest_asked: float = 300.0
    timeout: float | None = None
    sleep: Callable[[float], None] = time.sleep

    def wait(self, failures: int, asked: float | None, name: str) -> None:
        """Wait after so many failures, at least as long as the server asked for."""
        if asked is not None and asked > self.longest_asked:
            raise HubError(f"{name}: the server asks to wait {asked:.0f} s; try again later")
        # Scattered, so that parallel requests do not come back all at once.
        backoff = min(self.longest, self.first * 2 ** (failures - 1)) * random.uniform(0.5, 1)
        self.sleep(backoff if asked is None else asked)


# What every file uses; the tests put a less patient one in its place.
PATIENCE = Patience()


class Interrupted(Exception):
    """An attempt that may succeed when made again, from the byte it reached."""

    def __init__(self, reason: str, received: int = 0, wait: float | None = None) -> None:
        super().__init__(reason)
        self.received, self.wait = received, wait


def transport_errors() -> tuple[type[Exception], ...]:
    """What the hub client's HTTP library raises; which library that is depends on its version."""
    from huggingface_hub import errors

    return (errors.HTTPError,)  # type: ignore[attr-defined]


@contextmanager
def interruptions(name: str) -> Iterator[None]:
    """Errors of the connection as `Interrupted`, and the client's refusal to go online."""
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        yield
    except OfflineModeIsEnabled:
        raise HubError(f"{name}: offline mode is on (HF_HUB_OFFLINE), and it is not here") from None
    except transport_errors() as error:
        raise Interrupted(reason(error)) from None


def reason(error: Exception) -> str:
    """What happened to the connection, in words."""
    name = type(error).__name__
    if "Timeout" in name:
        return "the server does not answer"
    return "the server cannot be reached" if name == "ConnectError" else "the connection broke"


def asked_wait(headers: Mapping[str, str]) -> float | None:
    """Seconds that the server asks to wait: Retry-After in either form, or its rate limit's end."""
    asked = headers.get("retry-after", "").strip()
    if asked.isdecimal():
        return float(asked)
    if asked:
        try:
            until = parsedate_to_datetime(asked)
            return max(0.0, (until - datetime.now(UTC)).total_seconds())
        except (ValueError, TypeError):
            return None
    limit = re.search(r";\s*r=0;\s*t=(\d+)", headers.get("ratelimit", ""))
    return float(limit[1]) if limit else None
