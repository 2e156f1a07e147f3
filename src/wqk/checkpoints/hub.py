"""Checkpoints on the hub: a revision's files, each from the hub's cache, or its ranges over HTTP.

One request lists a revision's files with their sizes and the hashes of their contents. The listing
is noted, so that without a network the same files are found again.
"""

from __future__ import annotations

import re
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk._version import __version__
from wqk.checkpoints.http import PATIENCE, PASSING, RemoteFile, Traffic, asked_wait, unreachable
from wqk.checkpoints.local import INDEX, NOT_WEIGHTS, LocalFile, open_local, refuse_file
from wqk.checkpoints.range_cache import open_cache
from wqk.checkpoints.ranged import RangedFile, Workers
from wqk.checkpoints.remote import Folder, RemoteCheckpoint, open_folder
from wqk.errors import CheckpointError, HubError

if TYPE_CHECKING:
    import os

    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.checkpoints.range_cache import RangeCache
    from wqk.checkpoints.safetensors import ByteSource

# A configuration, an index and the weights: what `open_local` looks for.
WANTED = ("config.json", "*.safetensors", "*.safetensors.index.json")
WANTED_ARCHIVES = ("config.json", "pytorch_model*.bin", "pytorch_model.bin.index.json")

# Where the hub keeps safetensors that it made itself, and who proposes the others.
CONVERTED = "refs/convert/safetensors"
CONVERTER = "SFconvertbot"

TIMEOUT = 10


class Listing(NamedTuple):
    """A revision's commit, and its files: path → size and hash of the content, where known."""

    commit: str
    files: dict[str, tuple[int | None, str | None]]

    def holds(self, folder: str, ending: str) -> bool:
        """Whether weights of this ending lie directly in a folder."""
        return any(
            str(path.parent) == (folder or ".")
            and path.suffix == ending
            and not path.name.startswith(NOT_WEIGHTS)
            for path in map(PurePosixPath, self.files)
        )


class Login(NamedTuple):
    """What identifies a repository's reader and place."""

    repository: str
    token: str | bool | None
    cache_dir: Path | None


def open_hub(
    repository: str,
    *,
    revision: str | None = None,
    subfolder: str | None = None,
    token: str | bool | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    local_files_only: bool = False,
) -> Checkpoint:
    """The repository's weights, of which only headers are fetched before something is read.

    A repository of torch archives alone is read from the hub's safetensors conversion where that
    has the same archives beside it; else the archives are downloaded.

    Raises
    ------
    HubError
        No such repository or revision, no permission, no network, or nothing in the cache.
    CheckpointError
        The repository holds no weights that can be scored.
    """
    from huggingface_hub import constants

    login = Login(repository, token, Path(cache_dir) if cache_dir else None)
    cache, folder = open_cache(cache_dir), (subfolder or "").strip("/")
    if local_files_only or constants.HF_HUB_OFFLINE:
        return _open_offline(login, revision, folder, cache, "offline")
    try:
        listing = _list(login, revision, cache)
    except _Unreachable:
        return _open_offline(login, revision, folder, cache, "the hub cannot be reached")
    if not listing.holds(folder, ".safetensors"):
        if listing.holds(folder, ".bin"):
            converted = _conversion(login, listing, revision, folder, cache)
            if converted is None:
                return _download(login, revision, folder, WANTED_ARCHIVES, listing.commit)
            listing = converted
        else:
            _explain_absence(repository, listing)
    return _open(login, listing, revision, folder, cache, offline=False)


def step_of_revision(revision: str | None) -> int | None:
    """The training step that a revision is named after.

    Examples
    --------
    >>> step_of_revision("step1000"), step_of_revision("step1000-tokens4B")
    (1000, 1000)
    >>> step_of_revision("main")
    """
    match = re.match(r"step[-_]?(\d+)(?![\dk])", revision or "")
    return int(match[1]) if match else None


def _open(
    login: Login,
    listing: Listing,
    revision: str | None,
    folder: str,
    cache: RangeCache,
    offline: bool,
) -> RemoteCheckpoint:
    """The checkpoint in one folder of a listed revision."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.utils import build_hf_headers

    headers = build_hf_headers(token=login.token, library_name="wqk", library_version=__version__)
    traffic, workers = Traffic(), Workers()

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
        remote = RemoteFile(
            hf_hub_url(
                login.repository, path, revision=listing.commit, endpoint=constants.ENDPOINT
            ),
            name=f"{login.repository}/{path}",
            headers=headers,
            traffic=traffic,
            size=size,
        )
        start = remote.describe() if size is None else b""
        if identity is None and remote.tag:
            identity = f"{remote.url} {remote.tag} {remote.size}"
        ranged = RangedFile(remote, identity, cache, workers, offline)
        ranged.keep(start)
        return ranged

    names = [Path(path).name for path in listing.files if _folder_of(path) == folder]
    place = Folder(login.repository, source, names)
    return open_folder(place, traffic, revision, step_of_revision(revision))


def _folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def _list(login: Login, revision: str | None, cache: RangeCache) -> Listing:
    """Ask the hub for a revision's files, and note the answer."""
    from huggingface_hub import HfApi

    api = HfApi(token=login.token, library_name="wqk", library_version=__version__)
    info = _asking(
        login.repository,
        revision,
        lambda: api.model_info(
            login.repository, revision=revision, files_metadata=True, timeout=TIMEOUT
        ),
    )
    files = {
        sibling.rfilename: (
            sibling.size,
            sibling.lfs.sha256 if sibling.lfs else sibling.blob_id,
        )
        for sibling in info.siblings or ()
    }
    listing = Listing(info.sha or revision or "main", files)
    cache.write_note(_note_name(login.repository, revision), listing._asdict())
    return listing
