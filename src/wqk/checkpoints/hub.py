"""Checkpoints on the hub, or under another address.

Of the hub: a revision's files, each from the hub's cache, or its ranges over HTTP.

One request lists a revision's files with their sizes and the hashes of their contents. The listing
is noted, so that without a network the same files are found again.

Under a URL stands a file of weights, or a folder with weights and their configuration.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack
from urllib.parse import quote, unquote, urlunsplit

from wqk._version import __version__
from wqk.checkpoints.adapters import AdaptedCheckpoint, read_adapter
from wqk.checkpoints.formats import (
    ENDINGS,
    PREFERRED,
    Folder,
    Weights,
    beside,
    format_of,
    local_folder,
    open_local,
    read_folder,
    unread_format,
)
from wqk.errors import CheckpointError, HubError, errors_about, first_line
from wqk.storage import http
from wqk.storage.local import LocalFile
from wqk.storage.ranged import RangedFile, Workers, open_cache
from wqk.storage.references import redacted, split_address, step_in

if TYPE_CHECKING:
    from wqk.checkpoints.adapters import Adapter
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.checkpoints.formats import StoredCheckpoint
    from wqk.storage.byte_source import ByteSource
    from wqk.storage.ranged import RangeCache
    from wqk.storage.references import HubAccess

TIMEOUT = 10

# Who asks.
ABOUT: dict[str, Any] = {"library_name": "wqk", "library_version": __version__}


class _Unreachable(HubError):
    """The Hub cannot be reached."""


class Listing(NamedTuple):
    """A revision's commit, and its files: path → size and hash of the content, where known."""

    commit: str
    files: dict[str, tuple[int | None, str | None]]


class Wanted(NamedTuple):
    """What is to be opened, and how."""

    repository: str
    revision: str | None
    folder: str  # empty for the repository's own
    access: HubAccess
    adapters: bool  # whether an adapter is opened on its base model
    cache: RangeCache  # of ranges and listings

    @property
    def cache_dir(self) -> str | None:
        """Where the hub's client keeps its downloads, if not in its usual place."""
        chosen = self.access.get("cache_dir")
        return os.fspath(chosen) if chosen else None

    @property
    def note(self) -> str:
        """The name under which its listing is noted."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT} {self.repository} {self.revision or 'main'}"


def open_hub(
    repository: str,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    adapters: bool = True,
    **access: Unpack[HubAccess],
) -> Checkpoint:
    """The repository's weights, of which only headers are fetched before something is read.

    An adapter is opened on its base model, unless ``adapters`` is false: it might name itself.
    Raises `HubError` for no such repository or revision, no permission, or no network and nothing
    in the cache, and `CheckpointError` for no weights that can be scored.
    """
    from huggingface_hub import constants

    folder, cache = (subfolder or "").strip("/"), open_cache(access.get("cache_dir"))
    wanted = Wanted(repository, revision, folder, access, adapters, cache)
    with errors_about(repository):
        if access.get("local_files_only") or constants.HF_HUB_OFFLINE:
            checkpoint = _open_offline(wanted, "fetching is switched off")
        else:
            try:
                checkpoint = _open(wanted, _list(wanted), offline=False)
            except _Unreachable:
                checkpoint = _open_offline(wanted, "the hub cannot be reached")
    checkpoint.name, checkpoint.revision = repository, revision
    step = step_in(revision)
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def open_base(adapter: Adapter, **access: Unpack[HubAccess]) -> Checkpoint:
    """The base model of an adapter, from the hub; `CheckpointError` if it is not a hub id."""
    if not is_hub_id(adapter.base):
        raise CheckpointError(
            f"{adapter.tensors.name}: its base model, {redacted(adapter.base)!r}, is neither "
            "here nor a Hub id; write one to base_model_name_or_path of a local copy's "
            "adapter_config.json"
        )
    return open_hub(adapter.base, revision=adapter.revision, adapters=False, **access)


def is_hub_id(ref: str) -> bool:
    """Whether a string that is not a path could name a repository: ``name`` or ``owner/name``.

    Examples
    --------
    >>> [is_hub_id(ref) for ref in ("gpt2", "a/b", "./a", "~/a", "/a", "a/b/c", "a.safetensors")]
    [True, True, False, False, False, False, False]
    """
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(ref)
    except HFValidationError:
        return False
    return Path(ref).suffix not in ENDINGS


def _open(wanted: Wanted, listing: Listing, *, offline: bool) -> Checkpoint:
    """The checkpoint in one folder of a listed revision."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    repository, inside = wanted.repository, f"{wanted.folder}/" if wanted.folder else ""
    headers = build_hf_headers(token=wanted.access.get("token"), **ABOUT)
    workers = Workers()

    def source(file: str) -> ByteSource | None:
        path = inside + file
        if path not in listing.files:
            return None
        size, content = listing.files[path]
        here = try_to_load_from_cache(
            repository, path, cache_dir=wanted.cache_dir, revision=listing.commit
        )
        if isinstance(here, str) and size in (None, Path(here).stat().st_size):
            return LocalFile(Path(here))
        remote = http.RemoteFile(
            hf_hub_url(repository, path, revision=listing.commit, endpoint=constants.ENDPOINT),
            name=f"{repository}/{path}",
            headers=headers,
            traffic=workers.traffic,
            size=size,
        )
        start = remote.describe() if size is None else b""
        # The hash is what this endpoint claims: another one's ranges are never taken for it.
        content = f"{constants.ENDPOINT} {content}" if content else None
        return RangedFile(remote, content, wanted.cache, workers, offline, start)

    paths = [path.removeprefix(inside) for path in listing.files if path.startswith(inside)]
    names = [path for path in paths if "/" not in path]
    below = [path for path in paths if "/" in path]
    folder = Folder(repository, source, names, lambda: below, workers)
    adapter = read_adapter(folder) if wanted.adapters else None
    return _on_base(adapter, wanted) if adapter else read_folder(folder)


def _on_base(adapter: Adapter, wanted: Wanted) -> Checkpoint:
    return AdaptedCheckpoint(open_base(adapter, **wanted.access), adapter)


def _list(wanted: Wanted) -> Listing:
    """Ask the hub for a revision's files, and note the answer."""
    from huggingface_hub import HfApi

    api = HfApi(token=wanted.access.get("token"), **ABOUT)

    def ask() -> Listing:
        about = api.model_info(
            wanted.repository, revision=wanted.revision, files_metadata=True, timeout=TIMEOUT
        )
        return _listing(about, wanted.revision or "main")

    listing = _asking(ask, wanted.revision)
    wanted.cache.write_note(wanted.note, listing._asdict())
    return listing


def _listing(about: Any, revision: str) -> Listing:
    """What the hub says of a revision, as far as it makes sense."""
    files = {
        sibling.rfilename: _claims(
            sibling.size, sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
        )
        for sibling in about.siblings or ()
        if isinstance(sibling.rfilename, str)
    }
    is_commit = isinstance(about.sha, str) and re.fullmatch(r"[0-9a-f]{40}", about.sha)
    return Listing(about.sha if is_commit else revision, files)


def _noted(note: Any) -> Listing | None:
    """The listing in a note; None if it is damaged, or there is none."""
    try:
        files = {path: _claims(size, content) for path, (size, content) in note["files"].items()}
        return Listing(str(note["commit"]), files)
    except (AttributeError, LookupError, TypeError, ValueError):
        return None


def _claims(size: Any, content: Any) -> tuple[int | None, str | None]:
    """A file's size and hash, if they are such."""
    is_size = type(size) is int and size >= 0
    return size if is_size else None, content if isinstance(content, str) else None


def _asking(ask: Callable[[], Listing], revision: str | None) -> Listing:
    """Ask the hub, again if that may help; its errors in one line each."""
    from huggingface_hub import errors

    refusals: dict[type[Exception], str] = {
        errors.GatedRepoError: "is gated; accept its terms on the hub and log in (hf auth login)",
        errors.RepositoryNotFoundError: "is neither a path here nor a repository that this login "
        "can see",
        errors.RevisionNotFoundError: f"has no revision {redacted(revision or 'main')!r}",
        errors.LocalTokenNotFoundError: "not logged in (hf auth login)",
    }
    passing: tuple[type[Exception], ...] = (http.Interrupted, *http.transport_errors())
    failures = 0
    while True:
        wait = None
        try:
            listing: Listing = http.within_deadline(ask, discard=lambda _: None)
            return listing
        except tuple(refusals) as error:
            reason = next(text for kind, text in refusals.items() if isinstance(error, kind))
            raise HubError(reason) from None
        except errors.HfHubHTTPError as error:
            status, wait = error.response.status_code, http.asked_wait(error.response.headers)
            failures += 1
            if status not in http.PASSING or failures >= http.PATIENCE.attempts:
                raise HubError(f"the hub answers {status}") from None
        except passing:
            failures += 1
            if failures >= http.PATIENCE.attempts_to_connect:
                raise _Unreachable("the hub cannot be reached") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise HubError(
                f"the endpoint does not answer as a hub does ({first_line(error)}); "
                "check HF_ENDPOINT"
            ) from None
        http.PATIENCE.wait(failures, wait)


def _open_offline(wanted: Wanted, why: str) -> Checkpoint:
    """What was downloaded whole, or else what earlier scans have left of a listed revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    repository, revision = wanted.repository, wanted.revision
    incomplete: CheckpointError | None = None
    try:
        snapshot = snapshot_download(
            repository, revision=revision, cache_dir=wanted.cache_dir, local_files_only=True
        )
        path = Path(snapshot, wanted.folder)
        adapter = read_adapter(local_folder(path)) if wanted.adapters and path.is_dir() else None
        checkpoint = _on_base(adapter, wanted) if adapter else open_local(path)
        checkpoint.step = None  # folders of the cache are not named after steps
        return checkpoint
    except LocalEntryNotFoundError:
        pass
    except CheckpointError as error:
        incomplete = error
    if listing := _noted(wanted.cache.note(wanted.note)):
        return _open(wanted, listing, offline=True)
    if incomplete:
        raise incomplete
    where = f" at revision {redacted(revision)!r}" if revision else ""
    near = beside(Path(repository))
    raise HubError(f"is not a local path, not in the cache{where}, and {why}{near}")


# Files that a checkpoint may lack: a server that refuses these may still provide the weights.
OPTIONAL = ("config.json", "open_clip_config.json", *PREFERRED)

OFFLINE = "is not in the cache, and fetching is disabled"


def hub_page(url: str) -> tuple[str, str | None, str | None] | None:
    """The repository, revision and subfolder that one of the hub's pages shows; None for others.

    Examples
    --------
    >>> hub_page("https://huggingface.co/EleutherAI/pythia-70m/tree/step1000")
    ('EleutherAI/pythia-70m', 'step1000', None)
    >>> hub_page("https://huggingface.co/owner/name/resolve/main/model.safetensors")
    """
    from huggingface_hub import constants

    path = url.split("?")[0].rstrip("/").removeprefix(constants.ENDPOINT + "/")
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/tree/([^/]+)(?:/(.+))?)?", path)
    if path == url or not match or match[1].split("/")[0] in ("api", "datasets", "spaces"):
        return None
    return match[1], unquote(match[2]) if match[2] else None, match[3]


def open_url(
    url: str, *, subfolder: str | None = None, **access: Unpack[HubAccess]
) -> StoredCheckpoint:
    """The checkpoint under an address; only headers are fetched before something is read.

    A login is sent to the hub's own addresses alone. Raises `HubError` if the server does not
    provide it, `CheckpointError` if it is not one, or the server cannot serve parts of files.
    """
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    offline = access.get("local_files_only") or constants.HF_HUB_OFFLINE
    on_hub = url.startswith(constants.ENDPOINT + "/") and not offline
    headers = build_hf_headers(token=access.get("token") if on_hub else False, **ABOUT)
    cache, workers = open_cache(access.get("cache_dir")), Workers()
    path = Path(unquote(split_address(url).path))
    name = redacted(url)
    if what := unread_format(path.name):
        raise CheckpointError(f"{name}: {what}")
    is_file = path.suffix in ENDINGS
    base = _parent(url) if is_file else _child(url, subfolder) if subfolder else url

    @functools.cache
    def source(file: str) -> RangedFile | None:
        address = _child(base, file)
        remote = http.RemoteFile(
            address, name=redacted(address), headers=headers, traffic=workers.traffic
        )
        start = b""
        try:
            if offline:
                match cache.note(address):
                    case [int(size), str(tag)] if size >= 0:
                        remote.size, remote.tag = size, tag
                    case _:
                        raise http.Absent(f"{remote.name}: {OFFLINE}")
            else:
                start = remote.describe()
        except http.Absent:
            if file in OPTIONAL:
                return None
            raise
        if remote.tag and not offline:
            cache.write_note(address, [remote.size, remote.tag])
        return RangedFile(remote, None, cache, workers, offline, start)

    if offline and not is_file and not any(cache.note(_child(base, n)) for n in PREFERRED):
        raise HubError(f"{name}: {OFFLINE}")
    # Of a single file of GGUF, which holds its configuration, no other is looked for.
    own = format_of(path.name) if path.suffix == ".gguf" else None
    weights = Weights((path.name,), format=own) if is_file else None
    return read_folder(Folder(name, source, workers=workers), weights)


def _child(url: str, name: str) -> str:
    """The address of a file in a folder; what follows the path stays, as it may be a key."""
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name)))


def _parent(url: str) -> str:
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0]))
