"""Checkpoints on the hub: a revision's files, each from the hub's cache, or its ranges over HTTP.

One request lists a revision's files with their sizes and the hashes of their contents. The listing
is noted, so that without a network the same files are found again.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk._version import __version__
from wqk.checkpoints import http, retries
from wqk.checkpoints.adapters import AdaptedCheckpoint, read_adapter
from wqk.checkpoints.choosing import ENDINGS
from wqk.checkpoints.folders import Folder
from wqk.checkpoints.local import LocalFile, open_adapter, open_local
from wqk.checkpoints.range_cache import open_cache
from wqk.checkpoints.ranged import RangedFile, Workers
from wqk.checkpoints.remote import RemoteCheckpoint, open_remote
from wqk.checkpoints.steps import step_in
from wqk.checkpoints.stored import weight_file
from wqk.errors import CheckpointError, HubError, first_line

if TYPE_CHECKING:
    import os
    from collections.abc import Callable

    from wqk.checkpoints.adapters import Adapter
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.checkpoints.range_cache import RangeCache
    from wqk.checkpoints.safetensors import ByteSource

TIMEOUT = 10


class _NoRevision(HubError):
    """The repository has no such revision."""


class _Unreachable(HubError):
    """The Hub cannot be reached."""


class Listing(NamedTuple):
    """A revision's commit, and its files: path → size and hash of the content, where known."""

    commit: str
    files: dict[str, tuple[int | None, str | None]]


class Login(NamedTuple):
    """What identifies a repository's reader and place, and whether adapters get their base."""

    repository: str
    token: str | bool | None
    cache_dir: Path | None
    local_files_only: bool = False
    adapters: bool = True


def open_hub(
    repository: str,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
    adapters: bool = True,
) -> Checkpoint:
    """The repository's weights, of which only headers are fetched before something is read.

    An adapter is opened on its base model, unless ``adapters`` is false: it might name itself.

    Raises
    ------
    HubError
        No such repository or revision, no permission, no network, or nothing in the cache.
    CheckpointError
        The repository holds no weights that can be scored.
    """
    from huggingface_hub import constants

    login = Login(
        repository, token, Path(cache_dir) if cache_dir else None, local_files_only, adapters
    )
    cache, folder = open_cache(cache_dir), (subfolder or "").strip("/")
    if local_files_only or constants.HF_HUB_OFFLINE:
        return _open_offline(login, revision, folder, cache, "fetching is switched off")
    try:
        listing = _list(login, revision, cache)
    except _Unreachable:
        return _open_offline(login, revision, folder, cache, "the hub cannot be reached")
    return _open(login, listing, revision, folder, cache, offline=False)


def open_base(
    adapter: Adapter,
    *,
    token: str | bool | None,
    cache_dir: str | os.PathLike[str] | None,
    local_files_only: bool,
) -> Checkpoint:
    """The base model of an adapter, from the hub.

    Raises
    ------
    CheckpointError
        The adapter names a path.
    """
    if not is_hub_id(adapter.base):
        raise CheckpointError(
            f"{adapter.tensors.name}: its base model, {adapter.base!r}, is neither here nor a Hub "
            "id; write one to base_model_name_or_path of a local copy's adapter_config.json"
        )
    return open_hub(
        adapter.base,
        revision=adapter.revision,
        token=token,
        cache_dir=cache_dir,
        local_files_only=local_files_only,
        adapters=False,
    )


def is_hub_id(ref: str) -> bool:
    """Whether a string that is not a path could name a repository: ``name`` or ``owner/name``."""
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]

    try:
        validate_repo_id(ref)
    except HFValidationError:
        return False
    return not ref.startswith((".", "/", "~")) and Path(ref).suffix not in (*ENDINGS, ".gguf")


def _on_base(login: Login, adapter: Adapter) -> Checkpoint:
    base = open_base(
        adapter,
        token=login.token,
        cache_dir=login.cache_dir,
        local_files_only=login.local_files_only,
    )
    return AdaptedCheckpoint(base, adapter)


def _open(
    login: Login,
    listing: Listing,
    revision: str | None,
    folder: str,
    cache: RangeCache,
    offline: bool,
) -> Checkpoint:
    """The checkpoint in one folder of a listed revision."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    headers = build_hf_headers(token=login.token, library_name="wqk", library_version=__version__)
    workers = Workers()

    def source(file: str) -> ByteSource | None:
        path = f"{folder}/{file}" if folder else file
        if path not in listing.files:
            return None
        size, identity = listing.files[path]
        here = try_to_load_from_cache(
            login.repository, path, cache_dir=login.cache_dir, revision=listing.commit
        )
        if isinstance(here, str) and size in (None, Path(here).stat().st_size):
            return LocalFile(Path(here))
        remote = http.RemoteFile(
            hf_hub_url(
                login.repository, path, revision=listing.commit, endpoint=constants.ENDPOINT
            ),
            name=f"{login.repository}/{path}",
            headers=headers,
            traffic=workers.traffic,
            size=size,
        )
        start = remote.describe() if size is None else b""
        if identity is None and remote.tag:
            identity = f"{remote.url} {remote.tag} {remote.size}"
        # The hash is what this endpoint claims: another one's ranges are never taken for it.
        known = f"{constants.ENDPOINT} {identity}" if identity else None
        ranged = RangedFile(remote, known, cache, workers, offline)
        ranged.keep(start)
        return ranged

    names = [Path(path).name for path in listing.files if _folder_of(path) == folder]
    inside = f"{folder}/" if folder else ""
    below = [
        path.removeprefix(inside)
        for path in listing.files
        if path.startswith(inside) and _folder_of(path) != folder
    ]
    where = Folder(login.repository, source, names, lambda: below)
    step = step_in(revision)

    def open_file(name: str) -> Checkpoint:
        found = source(name)
        assert found is not None  # it is listed
        return RemoteCheckpoint(where.name, [weight_file(found)], {}, workers, revision, step)

    adapter = read_adapter(where, open_file) if login.adapters else None
    return _on_base(login, adapter) if adapter else open_remote(where, workers, revision, step)


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _list(login: Login, revision: str | None, cache: RangeCache) -> Listing:
    """Ask the hub for a revision's files, and note the answer."""
    from huggingface_hub import HfApi

    api = HfApi(token=login.token, library_name="wqk", library_version=__version__)

    def ask() -> Listing:
        about = api.model_info(
            login.repository, revision=revision, files_metadata=True, timeout=TIMEOUT
        )
        return _listing(about, revision or "main")

    listing = _asking(login.repository, revision, ask)
    cache.write_note(_note_name(login.repository, revision), listing._asdict())
    return listing


def _listing(about: Any, revision: str) -> Listing:
    """What the hub says of a revision, as far as it makes sense."""
    files = {
        sibling.rfilename: (
            sibling.size if type(sibling.size) is int and sibling.size >= 0 else None,
            _content_hash(sibling),
        )
        for sibling in about.siblings or ()
        if isinstance(sibling.rfilename, str)
    }
    is_commit = isinstance(about.sha, str) and re.fullmatch(r"[0-9a-f]{40}", about.sha)
    return Listing(about.sha if is_commit else revision, files)


def _content_hash(sibling: Any) -> str | None:
    """The hash of a file's content, as the hub claims it."""
    claimed = sibling.lfs.sha256 if sibling.lfs else sibling.blob_id
    return claimed if isinstance(claimed, str) else None


def _asking(repository: str, revision: str | None, ask: Callable[[], Listing]) -> Listing:
    """Ask the hub, again where that may help; its errors in one line each."""
    from huggingface_hub import errors

    failures = 0
    passing: tuple[type[Exception], ...] = (retries.Interrupted, *retries.transport_errors())
    while True:
        wait = None
        try:
            listing: Listing = retries.within_deadline(ask, discard=lambda _: None)
            return listing
        except errors.GatedRepoError:
            reason = "is gated; accept its terms on the hub and log in (hf auth login)"
            raise HubError(f"{repository}: {reason}") from None
        except errors.RepositoryNotFoundError:
            reason = "is neither a path here nor a repository that this login can see"
            raise HubError(f"{repository}: {reason}") from None
        except errors.RevisionNotFoundError:
            raise _NoRevision(f"{repository}: has no revision {revision!r}") from None
        except errors.LocalTokenNotFoundError:
            raise HubError(f"{repository}: not logged in (hf auth login)") from None
        except errors.OfflineModeIsEnabled:
            raise _Unreachable(f"{repository}: offline mode is on (HF_HUB_OFFLINE)") from None
        except errors.HfHubHTTPError as error:
            status, wait = error.response.status_code, retries.asked_wait(error.response.headers)
            failures += 1
            if status not in retries.PASSING or failures >= retries.PATIENCE.attempts:
                raise HubError(f"{repository}: the hub answers {status}") from None
        except passing:
            failures += 1
            if failures >= retries.PATIENCE.attempts_to_connect:
                raise _Unreachable(f"{repository}: the hub cannot be reached") from None
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            reason = f"the endpoint does not answer as a hub does ({first_line(error)})"
            raise HubError(f"{repository}: {reason}; check HF_ENDPOINT") from None
        retries.PATIENCE.wait(failures, wait, repository)


def _in_cache(login: Login, path: Path, revision: str | None) -> Checkpoint:
    adapter = open_adapter(path) if login.adapters else None
    checkpoint = _on_base(login, adapter) if adapter else open_local(path)
    checkpoint.name, checkpoint.revision = login.repository, revision
    checkpoint.step = step_in(revision)
    return checkpoint


def _open_offline(
    login: Login, revision: str | None, folder: str, cache: RangeCache, why: str
) -> Checkpoint:
    """What was downloaded whole, or else what earlier scans have left of a listed revision."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    incomplete: CheckpointError | None = None
    try:
        path = snapshot_download(
            login.repository,
            revision=revision,
            cache_dir=login.cache_dir,
            local_files_only=True,
        )
        return _in_cache(login, Path(path, folder), revision)
    except LocalEntryNotFoundError:
        pass
    except CheckpointError as error:
        incomplete = error
    note = cache.note(_note_name(login.repository, revision))
    if isinstance(note, dict) and note.keys() == set(Listing._fields):
        files = {path: (about[0], about[1]) for path, about in note["files"].items()}
        listing = Listing(note["commit"], files)
        return _open(login, listing, revision, folder, cache, offline=True)
    if incomplete:
        raise incomplete
    where = f" at revision {revision!r}" if revision else ""
    raise HubError(f"{login.repository}: is not a local path, not in the cache{where}, and {why}")


def _note_name(repository: str, revision: str | None) -> str:
    from huggingface_hub import constants

    return f"{constants.ENDPOINT} {repository} {revision or 'main'}"
