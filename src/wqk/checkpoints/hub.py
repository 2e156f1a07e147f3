"""Checkpoints on the Hub, or under the address of a store.

Files on the Hub come whole from the Hub's own cache, or in ranges. Under an address lies a file of
weights, or a folder with weights and their configuration.
"""

from __future__ import annotations

import functools
import os
import re
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple, Unpack
from urllib.parse import quote, unquote, urlunsplit

from wqk.checkpoints.adapters import AdaptedCheckpoint, read_adapter
from wqk.checkpoints.distributed import METADATA
from wqk.checkpoints.formats import (
    COMMON,
    ENDINGS,
    PREFERRED,
    Folder,
    Weights,
    beside,
    choose_weights,
    exists,
    local_folder,
    open_local,
    read_folder,
    unread_format,
)
from wqk.checkpoints.library_formats import DISTRIBUTED, format_of
from wqk.errors import CheckpointError, HubError, errors_about
from wqk.storage.buckets import BucketFolder
from wqk.storage.hub_files import (
    Listing,
    Unreachable,
    list_repository,
    listing_in,
    login_headers,
    place_on_hub,
)
from wqk.storage.local import LocalFile
from wqk.storage.range_cache import open_cache
from wqk.storage.references import redacted, split_address, step_in
from wqk.storage.remote_file import RemoteFile
from wqk.storage.stores import web_location
from wqk.storage.transfers import Absent, Transfers

if TYPE_CHECKING:
    from wqk.checkpoints.adapters import Adapter
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.checkpoints.formats import StoredCheckpoint
    from wqk.storage.byte_source import ByteSource
    from wqk.storage.range_cache import RangeCache
    from wqk.storage.references import HubAccess


class Wanted(NamedTuple):
    """A repository's revision to open, and the settings of access."""

    repository: str
    revision: str | None
    folder: str  # empty for the repository's own
    access: HubAccess
    adapters: bool  # whether an adapter is opened on its base model
    base: str | None  # the adapter's base model, in place of the one that it names
    cache: RangeCache  # of ranges and listings

    @property
    def cache_dir(self) -> str | None:
        """Folder of the downloads of the Hub's client; None for the usual folder."""
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
    base: str | None = None,
    **access: Unpack[HubAccess],
) -> Checkpoint:
    """Open a repository's weights; only headers are fetched before something is read.

    An adapter is opened on its base model, unless ``adapters`` is false: it might name itself.
    Raises `HubError` for no such repository or revision, no permission, or no network and nothing
    in the cache, and `CheckpointError` for no weights that can be scored.
    """
    from huggingface_hub import constants

    folder, cache = (subfolder or "").strip("/"), open_cache(access.get("cache_dir"))
    request = Wanted(repository, revision, folder, access, adapters, base, cache)
    with errors_about(repository):
        if access.get("local_files_only") or constants.HF_HUB_OFFLINE:
            checkpoint = _open_offline(request, "fetching is switched off")
        else:
            try:
                checkpoint = _open(request, _list(request), offline=False)
            except Unreachable:
                checkpoint = _open_offline(request, "the hub cannot be reached")
    checkpoint.name, checkpoint.revision = repository, revision
    step = step_in(revision)
    checkpoint.step = checkpoint.step if step is None else step
    return checkpoint


def open_base(adapter: Adapter, base: str | None = None, **access: Unpack[HubAccess]) -> Checkpoint:
    """Open the base model of an adapter from the hub, or ``base`` in its place.

    Raises
    ------
    CheckpointError
        The base model is missing.
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
        return open_hub(name, revision=revision, adapters=False, **access)
    except HubError as error:
        raise HubError(
            f"{adapter.tensors.name}: its base model {name} is missing, on this machine and on "
            f"the Hub ({str(error).removeprefix(f'{name}: ')}); give it with base=PATH"
        ) from None


def _looked_for(path: str) -> str:
    """Return the absolute path of a base model for an error, without the secrets of addresses."""
    return redacted(str(Path(path).absolute()))


def is_hub_id(ref: str) -> bool:
    """Return whether a string that is no path could name a repository: ``name``, ``owner/name``.

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
    """Open the checkpoint in one folder of a listed revision."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

    repository, inside = wanted.repository, f"{wanted.folder}/" if wanted.folder else ""
    token = wanted.access.get("token")
    transfers = Transfers()

    def source(file: str) -> ByteSource | None:
        path = inside + file
        if path not in listing.files:
            return None
        about = listing.files[path]
        cached = try_to_load_from_cache(
            repository, path, cache_dir=wanted.cache_dir, revision=listing.commit
        )
        if isinstance(cached, str) and about.size in (None, Path(cached).stat().st_size):
            return LocalFile(Path(cached))
        url = hf_hub_url(repository, path, revision=listing.commit, endpoint=constants.ENDPOINT)
        remote = RemoteFile(
            f"{repository}/{path}",
            None if about.is_large else web_location(url, login_headers(token)),
            renew=partial(place_on_hub, url, token),
            transfers=transfers,
            cache=wanted.cache,
            size=about.size,
            # The hash is what this endpoint claims: another one's ranges are never taken for it.
            content=f"{constants.ENDPOINT} {about.content}" if about.content else None,
            offline=offline,
        )
        if about.size is None:
            remote.describe()
        return remote

    paths = [path.removeprefix(inside) for path in listing.files if path.startswith(inside)]
    names = [path for path in paths if "/" not in path]
    below = [path for path in paths if "/" in path]
    folder = Folder(repository, source, names, lambda: below, transfers)
    adapter = read_adapter(folder) if wanted.adapters else None
    return _on_base(adapter, wanted.base, wanted.access) if adapter else read_folder(folder)


def _on_base(adapter: Adapter, base: str | None, access: HubAccess) -> Checkpoint:
    return AdaptedCheckpoint(open_base(adapter, base, **access), adapter.on_base(base))


def _list(wanted: Wanted) -> Listing:
    """List a revision's files, and note the listing."""
    listing = list_repository(wanted.repository, wanted.revision, wanted.access.get("token"))
    wanted.cache.write_note(wanted.note, listing.to_note())
    return listing


def _open_offline(wanted: Wanted, why: str) -> Checkpoint:
    """Open a revision that was downloaded whole, or the ranges that earlier scans have left."""
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
        checkpoint = _on_base(adapter, wanted.base, wanted.access) if adapter else open_local(path)
        checkpoint.step = None  # folders of the cache are not named after steps
        return checkpoint
    except LocalEntryNotFoundError:
        pass
    except CheckpointError as error:
        incomplete = error
    listing = listing_in(wanted.cache.note(wanted.note))
    if listing is not None:
        return _open(wanted, listing, offline=True)
    if incomplete:
        raise incomplete
    where = f" at revision {redacted(revision)!r}" if revision else ""
    near = beside(Path(repository))
    raise HubError(f"is not a local path, not in the cache{where}, and {why}{near}")


# Files that a checkpoint may lack: a server that refuses these may still provide the weights.
OPTIONAL = (
    *DISTRIBUTED.config,
    "open_clip_config.json",
    METADATA,
    COMMON,
    *PREFERRED,
)

OFFLINE = "is not in the cache, and fetching is disabled"


def hub_page(url: str) -> tuple[str, str | None, str | None] | None:
    """Return the repository, revision and subfolder of a page of the Hub; None for other pages.

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
    """Open the checkpoint under an address; only headers are fetched before something is read.

    A login is sent to the hub's own addresses alone. Raises `HubError` if the server does not
    provide it, `CheckpointError` if it is not one, or the server cannot serve parts of files.
    """
    from huggingface_hub import constants

    offline = bool(access.get("local_files_only") or constants.HF_HUB_OFFLINE)
    on_hub = url.startswith(constants.ENDPOINT + "/") and not offline
    token = access.get("token") if on_hub else False
    cache, transfers = open_cache(access.get("cache_dir")), Transfers()
    path = Path(unquote(split_address(url).path))
    name = redacted(url)
    if reason := unread_format(path.name):
        raise CheckpointError(f"{name}: {reason}")
    is_file = path.suffix in ENDINGS
    base = _parent(url) if is_file else _child(url, subfolder) if subfolder else url

    @functools.cache
    def source(file: str) -> RemoteFile | None:
        address = _child(base, file)
        size, tag = None, None
        if offline:
            match cache.note(address):
                case [int(noted_size), str(noted_tag)] if noted_size >= 0:
                    size, tag = noted_size, noted_tag
                case _ if file in OPTIONAL:
                    return None
                case _:
                    raise Absent(f"{redacted(address)}: {OFFLINE}")
        remote = RemoteFile(
            redacted(address),
            None if on_hub else web_location(address, login_headers(False)),
            renew=partial(place_on_hub, address, token) if on_hub else None,
            transfers=transfers,
            cache=cache,
            size=size,
            tag=tag,
            offline=offline,
        )
        if offline:
            return remote
        try:
            remote.describe()
        except Absent:
            if file in OPTIONAL:
                return None
            raise
        if remote.strong_tag:
            cache.write_note(address, [remote.size, remote.strong_tag])
        return remote

    if offline and not is_file and not any(cache.note(_child(base, n)) for n in PREFERRED):
        raise HubError(f"{name}: {OFFLINE}")
    # Of a single file of GGUF, which holds its configuration, no other is looked for.
    layout = format_of(path.name) if path.suffix == ".gguf" else None
    weights = Weights((path.name,), format=layout) if is_file else None
    return read_folder(Folder(name, source, transfers=transfers), weights)


def open_bucket_folder(
    address: str,
    *,
    subfolder: str | None = None,
    base: str | None = None,
    **access: Unpack[HubAccess],
) -> Checkpoint:
    """Open the checkpoint in a folder of a bucket, or one of its files.

    One request lists the folder; only headers are fetched before something is read. ``base`` is the
    base model of an adapter, if not the one that the adapter names.

    Raises
    ------
    HubError
        The store does not provide it.
    CheckpointError
        There is none.
    """
    from huggingface_hub import constants

    offline = bool(access.get("local_files_only") or constants.HF_HUB_OFFLINE)
    cache, transfers = open_cache(access.get("cache_dir")), Transfers()
    path = PurePosixPath(redacted(address))
    if reason := unread_format(path.name):
        raise CheckpointError(reason)
    is_file = path.suffix in ENDINGS
    around = redacted(address).rstrip("/")
    around = around.rpartition("/")[0] if is_file else f"{around}/{subfolder or ''}"
    files = BucketFolder(around)
    if offline:
        listing = cache.note(files.key)
        if listing is None:
            raise HubError(OFFLINE)
        files = BucketFolder(around, listing)
    else:
        objects = {name: list(entry) for name, entry in files.objects.items()}
        cache.write_note(files.key, [objects, files.folders])
    source = functools.cache(partial(files.file, transfers=transfers, cache=cache, offline=offline))

    def below() -> list[str]:
        """Paths of the objects deeper in the folder; without a network, none."""
        if offline or not files.folders:
            return []
        return [path for path in files.deep if "/" in path]

    folder = Folder(redacted(address), source, [*files.objects], below, transfers)
    if not (files.objects or files.folders):
        raise CheckpointError("there is nothing under this address")
    adapter = None if is_file else read_adapter(folder)
    if adapter is not None:
        return _on_base(adapter, base, access)
    layout = format_of(path.name) if path.suffix == ".gguf" else None
    checkpoint = read_folder(folder, Weights((path.name,), format=layout) if is_file else None)
    named = PurePosixPath(files.address).name
    checkpoint.step = step_in(named) if step_in(named) is not None else checkpoint.step
    return checkpoint


def bucket_has_weights(address: str) -> bool:
    """Return whether a folder of a bucket holds weights that can be opened."""
    files, transfers = BucketFolder(address), Transfers()
    source = partial(files.file, transfers=transfers, cache=open_cache())
    folder = Folder(files.address, source, [*files.objects], tuple, transfers)
    return bool(choose_weights(folder).files)


def _child(url: str, name: str) -> str:
    """Return the address of a file in a folder; what follows the path stays, as it may be a key."""
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name)))


def _parent(url: str) -> str:
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0]))
