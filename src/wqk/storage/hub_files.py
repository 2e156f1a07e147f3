"""Repositories of the Hub: their listings and the locations of their files.

One request lists a revision's files with their sizes and the hashes of their contents. A note in
the cache keeps the listing for use without a network. `huggingface_hub` handles the login, the
offline mode and its own cache; `wqk.storage.remote_file` reads the bytes.
"""

from __future__ import annotations

import re
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, NamedTuple, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from wqk._version import __version__
from wqk.errors import HubError, first_line
from wqk.storage import patience
from wqk.storage.references import redacted
from wqk.storage.stores import Location, web_location
from wqk.storage.transfers import PASSING_STATUS

T = TypeVar("T")

# Seconds that the Hub's client waits for a byte.
TIMEOUT = 10

# Who asks.
ABOUT: dict[str, Any] = {"library_name": "wqk", "library_version": __version__}


class Unreachable(HubError):
    """The Hub cannot be reached."""


class HubFile(NamedTuple):
    """A file in a listing; size and hash are None if the Hub does not report them."""

    size: int | None
    content: str | None
    is_large: bool  # whether the Hub redirects to another store


class Listing(NamedTuple):
    """The commit of a revision, and the files of the revision by path."""

    commit: str
    files: dict[str, HubFile]

    def to_note(self) -> dict[str, Any]:
        """Return plain values for a note in the cache."""
        return {"commit": self.commit, "files": {path: [*f] for path, f in self.files.items()}}


def listing_in(note: Any) -> Listing | None:
    """Return the listing in a note; None if the note is damaged or absent."""
    try:
        files = {path: checked(*entry) for path, entry in note["files"].items()}
        return Listing(str(note["commit"]), files)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def checked(size: Any, content: Any, is_large: Any = True) -> HubFile:
    """Return a listed file without invalid values."""
    is_size = type(size) is int and size >= 0
    return HubFile(
        size if is_size else None,
        content if isinstance(content, str) else None,
        bool(is_large),
    )


def list_repository(repository: str, revision: str | None, token: str | bool | None) -> Listing:
    """Ask the Hub for a revision's files.

    Raises
    ------
    Unreachable
        The Hub cannot be reached.
    HubError
        The repository or revision does not exist, or this login has no access.
    """
    from huggingface_hub import HfApi

    api = HfApi(token=token, **ABOUT)

    def ask() -> Listing:
        info = api.model_info(repository, revision=revision, files_metadata=True, timeout=TIMEOUT)
        return listing_of(info, revision or "main")

    return asked(ask, revision)


def listing_of(info: Any, revision: str) -> Listing:
    """Return the listing in the Hub's answer, without invalid entries."""
    files = {}
    for sibling in info.siblings or ():
        if isinstance(sibling.rfilename, str):
            large = sibling.lfs
            content = large.sha256 if large else sibling.blob_id
            is_large = bool(large) or sibling.size is None
            files[sibling.rfilename] = checked(sibling.size, content, is_large)
    is_commit = isinstance(info.sha, str) and re.fullmatch(r"[0-9a-f]{40}", info.sha)
    return Listing(info.sha if is_commit else revision, files)


def login_headers(token: str | bool | None) -> dict[str, str]:
    """Return the headers that carry a login."""
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers: dict[str, str] = build_hf_headers(token=token, **ABOUT)
    return headers


def place_on_hub(url: str, token: str | bool | None) -> Location:
    """Ask the Hub for the present location of a file; a signed address expires."""
    from huggingface_hub import get_hf_file_metadata

    metadata = asked(lambda: get_hf_file_metadata(url, token=token, timeout=TIMEOUT, **ABOUT), None)
    is_here = urlsplit(metadata.location)[:2] == urlsplit(url)[:2]
    return web_location(metadata.location, login_headers(token) if is_here else None)


def asked(ask: Callable[[], T], revision: str | None) -> T:
    """Ask the Hub, repeat if useful, and turn each error of the Hub into one line."""
    from huggingface_hub import errors

    refusals: dict[type[Exception], str] = {
        errors.GatedRepoError: "is gated; accept its terms on the hub and log in (hf auth login)",
        errors.RepositoryNotFoundError: "is neither a path here nor a repository that this login "
        "can see",
        errors.RevisionNotFoundError: f"has no revision {redacted(revision or 'main')!r}",
        errors.EntryNotFoundError: "no such file",
        errors.LocalTokenNotFoundError: "not logged in (hf auth login)",
    }
    start, failures = time.monotonic(), 0
    while True:
        limits = patience.PATIENCE
        try:
            return within_deadline(ask)
        except tuple(refusals) as error:
            reason = next(text for kind, text in refusals.items() if isinstance(error, kind))
            raise HubError(reason) from None
        except errors.HfHubHTTPError as error:
            status = error.response.status_code
            failures += 1
            if status not in PASSING_STATUS or failures >= limits.attempts:
                raise HubError(f"the hub answers {status}") from None
        except transport_errors():
            failures += 1
            is_late = time.monotonic() - start > limits.connect
            if is_late or failures >= limits.attempts_to_connect:
                raise Unreachable("the hub cannot be reached") from None
        except errors.OfflineModeIsEnabled:
            raise Unreachable("fetching is switched off (HF_HUB_OFFLINE)") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise HubError(
                f"the endpoint does not answer as a hub does ({first_line(error)}); "
                "check HF_ENDPOINT"
            ) from None
        time.sleep(limits.wait(failures))


def transport_errors() -> tuple[type[Exception], ...]:
    """Errors of the HTTP library that the installed client of the Hub uses."""
    from huggingface_hub import errors

    return (errors.HTTPError, TimeoutError)  # type: ignore[attr-defined]


def within_deadline(call: Callable[[], T]) -> T:
    """Return the result of a call to the Hub; `TimeoutError` if the Hub does not answer.

    The client's own timeout neither covers the search for the host's address nor ends while bytes
    drip in.
    """
    limits = patience.PATIENCE
    answer, connection = started(call), started(connect_to_hub)
    try:
        return answer.result(limits.connect)
    except TimeoutError:
        if answer.done():
            return answer.result()
        if not connection.done() or connection.exception() is not None:
            raise
        return answer.result(limits.answer)


def started(call: Callable[[], T]) -> Future[T]:
    """Start a call on a thread that ends with the process."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def connect_to_hub() -> None:
    """Open a connection to the Hub or to its proxy; `OSError` on failure."""
    from huggingface_hub import constants

    address = urlsplit(constants.ENDPOINT)
    proxy = getproxies().get(address.scheme)
    if proxy and not proxy_bypass(address.hostname or ""):
        address = urlsplit(proxy)
    port = address.port or (443 if address.scheme == "https" else 80)
    socket.create_connection((address.hostname, port), timeout=patience.PATIENCE.connect).close()
