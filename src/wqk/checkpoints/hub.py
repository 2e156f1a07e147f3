"""Repositories of the Hub: files come from the cache of the Hub's client, or in ranges."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack
from urllib.parse import unquote

from wqk._files import exists
from wqk.checkpoints.adapters import AdaptedCheckpoint, read_adapter
from wqk.checkpoints.formats import (
    ENDINGS,
    Folder,
    beside,
    local_folder,
    open_local,
    read_folder,
)
from wqk.checkpoints.remote import RemoteAccess
from wqk.errors import CheckpointError, HubError, errors_about
from wqk.storage.hub_files import (
    Listing,
    Unreachable,
    list_repository,
    listing_in,
    login_headers,
    place_on_hub,
)
from wqk.storage.local import LocalFile
from wqk.storage.references import redacted, step_in
from wqk.storage.remote_file import RemoteFile
from wqk.storage.stores import web_location

if TYPE_CHECKING:
    from wqk.checkpoints.adapters import Adapter
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.storage.byte_source import ByteSource
    from wqk.storage.references import HubAccess


@dataclass(frozen=True)
class HubRequest:
    """A folder in a revision of a repository, to open."""

    repository: str
    revision: str | None
    folder: str  # empty for the repository's own
    adapters: bool  # whether an adapter is opened on its base model
    base: str | None  # the adapter's base model, in place of the one that the adapter names
    access: RemoteAccess

    @property
    def cache_dir(self) -> str | None:
        """Folder of the downloads of the Hub's client; None for the usual folder."""
        folder = self.access.settings.get("cache_dir")
        return os.fspath(folder) if folder else None

    @property
    def note(self) -> str:
        """Name of the note in the cache with the revision's listing."""
        from huggingface_hub import constants

        return f"{constants.ENDPOINT} {self.repository} {self.revision or 'main'}"


def open_hub(
    repository: str,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    adapters: bool = True,
    base: str | None = None,
    **settings: Unpack[HubAccess],
) -> Checkpoint:
    """Open a repository's weights; only headers are fetched until tensors are read.

    Parameters
    ----------
    repository, revision, subfolder
        The repository, its revision, and the folder with the weights.
    adapters
        Whether an adapter is opened on its base model. False for base models, because a base model
        may be an adapter that names itself.
    base
        Base model of an adapter, instead of the base that the adapter names.
    **settings
        Login and cache; see `HubAccess`.

    Raises
    ------
    HubError
        The repository or revision does not exist, access is denied, or there is no network and the
        cache lacks the files.
    CheckpointError
        The repository has no weights that can be scored.
    """
    request = HubRequest(
        repository=repository,
        revision=revision,
        folder=(subfolder or "").strip("/"),
        adapters=adapters,
        base=base,
        access=RemoteAccess.from_settings(settings),
    )
    with errors_about(repository):
        checkpoint: Checkpoint | None = None
        reason = "fetching is switched off"
        if not request.access.offline:
            reason = "the hub cannot be reached"
            with suppress(Unreachable):  # a second error, below, is reported alone
                checkpoint = _open_listed(request, _list(request), offline=False)
        if checkpoint is None:
            checkpoint = _open_offline(request, reason)
    checkpoint.name, checkpoint.revision = repository, revision
    step = step_in(revision)
    if step is not None:
        checkpoint.step = step
    return checkpoint


def open_base(
    adapter: Adapter, base: str | None = None, **settings: Unpack[HubAccess]
) -> Checkpoint:
    """Open the base model of an adapter from the Hub, or ``base`` instead.

    Parameters
    ----------
    adapter
        The adapter, which names a base model.
    base
        Path or Hub id of another base model; None for the base that the adapter names.
    **settings
        Login and cache; see `HubAccess`.

    Raises
    ------
    CheckpointError
        The name of the base model is neither a path that exists nor a Hub id.
    HubError
        The hub does not provide the base model.
    """
    if base is not None and exists(Path(base)):
        return open_local(Path(base))
    name = base or adapter.base
    if not is_hub_id(name):
        raise CheckpointError(
            f"{adapter.tensors.name}: its base model is missing: {redacted(name)!r} is neither "
            f"here (looked for in {_looked_for(name)}) nor a Hub id; give it with base=PATH"
        )
    revision = adapter.revision if base is None else None
    try:
        return open_hub(name, revision=revision, adapters=False, **settings)
    except HubError as error:
        raise HubError(
            f"{adapter.tensors.name}: its base model {name} is missing, on this machine and on "
            f"the Hub ({str(error).removeprefix(f'{name}: ')}); give it with base=PATH"
        ) from None


def open_on_base(adapter: Adapter, base: str | None, settings: HubAccess) -> Checkpoint:
    """Open an adapter on its base model; see `open_base`."""
    return AdaptedCheckpoint(open_base(adapter, base, **settings), adapter.on_base(base))


def _looked_for(path: str) -> str:
    """Return the absolute path of a base model for an error, without secrets of addresses."""
    return redacted(str(Path(path).absolute()))


def is_hub_id(ref: str) -> bool:
    """Return whether a string that is not a path may be a repository: ``name``, ``owner/name``.

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


# The path of a repository's page, and of a folder's page in one of its revisions.
PAGE = re.compile(
    r"""
    (?P<repository> (?P<owner> [\w.-]+ ) / [\w.-]+ )
    (?: /tree/ (?P<revision> [^/]+ ) (?: / (?P<subfolder> .+ ) )? )?
    """,
    re.VERBOSE,
)

# First parts of paths that are no owner of models.
NOT_OWNERS = ("api", "datasets", "spaces")


class HubPage(NamedTuple):
    """Repository, revision and folder of a page of the Hub."""

    repository: str
    revision: str | None
    subfolder: str | None


def hub_page(url: str) -> HubPage | None:
    """Return the repository, revision and subfolder of a page of the Hub; None for other pages.

    Examples
    --------
    >>> hub_page("https://huggingface.co/EleutherAI/pythia-70m/tree/step1000")
    HubPage(repository='EleutherAI/pythia-70m', revision='step1000', subfolder=None)
    >>> hub_page("https://huggingface.co/owner/name/resolve/main/model.safetensors")
    """
    from huggingface_hub import constants

    hub = constants.ENDPOINT + "/"
    address = url.split("?")[0].rstrip("/")
    if not address.startswith(hub):
        return None
    page = PAGE.fullmatch(address.removeprefix(hub))
    if page is None or page["owner"] in NOT_OWNERS:
        return None
    revision = unquote(page["revision"]) if page["revision"] else None
    return HubPage(page["repository"], revision, page["subfolder"])


def _open_listed(request: HubRequest, listing: Listing, *, offline: bool) -> Checkpoint:
    """Open the checkpoint in one folder of a listed revision."""
    inside = f"{request.folder}/" if request.folder else ""
    paths = [path.removeprefix(inside) for path in listing.files if path.startswith(inside)]
    names = [path for path in paths if "/" not in path]
    deeper = [path for path in paths if "/" in path]

    def source(name: str) -> ByteSource | None:
        return _file_on_hub(request, listing, inside + name, offline=offline)

    transfers = request.access.transfers
    folder = Folder(request.repository, source, names, lambda: deeper, transfers)
    adapter = read_adapter(folder) if request.adapters else None
    if adapter is not None:
        return open_on_base(adapter, request.base, request.access.settings)
    return read_folder(folder)


def _file_on_hub(
    request: HubRequest, listing: Listing, path: str, *, offline: bool
) -> ByteSource | None:
    """Open a listed file, from the cache of the Hub's client if complete; None if not listed."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

    if path not in listing.files:
        return None
    listed = listing.files[path]
    repository, access = request.repository, request.access
    download = try_to_load_from_cache(
        repository, path, cache_dir=request.cache_dir, revision=listing.commit
    )
    if isinstance(download, str) and listed.size in (None, Path(download).stat().st_size):
        return LocalFile(Path(download))
    url = hf_hub_url(repository, path, revision=listing.commit, endpoint=constants.ENDPOINT)
    remote = RemoteFile(
        f"{repository}/{path}",
        None if listed.is_large else web_location(url, login_headers(access.token)),
        renew=partial(place_on_hub, url, access.token),
        transfers=access.transfers,
        cache=access.cache,
        size=listed.size,
        # The hash is a claim of this endpoint: never use ranges of another endpoint for it.
        content=f"{constants.ENDPOINT} {listed.content}" if listed.content else None,
        offline=offline,
    )
    if listed.size is None:
        remote.describe()
    return remote


def _list(request: HubRequest) -> Listing:
    """List a revision's files, and write the listing to a note."""
    listing = list_repository(request.repository, request.revision, request.access.token)
    request.access.cache.write_note(request.note, listing.to_note())
    return listing


def _open_offline(request: HubRequest, reason: str) -> Checkpoint:
    """Open a revision from a complete download, or from the ranges in the cache."""
    incomplete: CheckpointError | None = None
    try:
        checkpoint = _open_download(request)
    except CheckpointError as error:
        checkpoint, incomplete = None, error
    if checkpoint is not None:
        return checkpoint
    listing = listing_in(request.access.cache.note(request.note))
    if listing is not None:
        return _open_listed(request, listing, offline=True)
    if incomplete is not None:
        raise incomplete
    where = f" at revision {redacted(request.revision)!r}" if request.revision else ""
    similar = beside(Path(request.repository))
    raise HubError(
        f"is not a local path, not in the cache{where}, and {reason}"
        f"{similar or '; check the name, or download it first'}"
    )


def _open_download(request: HubRequest) -> Checkpoint | None:
    """Open a revision in the cache of the Hub's client; None if the cache lacks the revision.

    Raises
    ------
    CheckpointError
        The revision was downloaded without weights.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot = snapshot_download(
            request.repository,
            revision=request.revision,
            cache_dir=request.cache_dir,
            local_files_only=True,
        )
    except LocalEntryNotFoundError:
        return None
    path = Path(snapshot, request.folder)
    adapter = None
    if request.adapters and path.is_dir():
        adapter = read_adapter(local_folder(path))
    if adapter is not None:
        checkpoint = open_on_base(adapter, request.base, request.access.settings)
    else:
        checkpoint = open_local(path)
    checkpoint.step = None  # folders of the cache are not named after steps
    return checkpoint
