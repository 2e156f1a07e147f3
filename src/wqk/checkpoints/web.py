"""Checkpoints under a URL: a file of weights, or a folder with weights and their configuration."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Unpack
from urllib.parse import quote, unquote, urlunsplit

from wqk._version import __version__
from wqk.checkpoints import http
from wqk.checkpoints.folders import read_folder
from wqk.checkpoints.formats import ENDINGS, PREFERRED, Weights, format_of, unread_format
from wqk.checkpoints.listing import Folder
from wqk.checkpoints.ranged import RangedFile, Workers, open_cache
from wqk.checkpoints.references import redacted, split_address
from wqk.errors import CheckpointError, HubError

if TYPE_CHECKING:
    from wqk.checkpoints.formats import Format
    from wqk.checkpoints.references import HubAccess
    from wqk.checkpoints.stored import StoredCheckpoint


# Files that a checkpoint may lack: a server that refuses these may still provide the weights.
OPTIONAL = ("config.json", "open_clip_config.json", *PREFERRED)

OFFLINE = "is not in the cache, and fetching is disabled"


class Page(NamedTuple):
    """What a page of the hub shows: a repository, perhaps at a revision, perhaps a folder of it."""

    repository: str
    revision: str | None
    subfolder: str | None


def is_url(ref: str) -> bool:
    """Whether a reference is fetched over HTTP.

    Examples
    --------
    >>> is_url("https://example.org/model.safetensors"), is_url("owner/model")
    (True, False)
    """
    return ref.lower().startswith(("https://", "http://"))


def hub_page(url: str) -> Page | None:
    """The repository that an address of the hub's pages shows; None for any other address.

    Examples
    --------
    >>> hub_page("https://huggingface.co/EleutherAI/pythia-70m/tree/step1000")
    Page(repository='EleutherAI/pythia-70m', revision='step1000', subfolder=None)
    >>> hub_page("https://huggingface.co/owner/name/resolve/main/model.safetensors")
    """
    from huggingface_hub import constants

    path = url.split("?")[0].rstrip("/").removeprefix(constants.ENDPOINT + "/")
    match = re.fullmatch(r"([\w.-]+/[\w.-]+)(?:/tree/([^/]+)(?:/(.+))?)?", path)
    if path == url or not match or match[1].split("/")[0] in ("api", "datasets", "spaces"):
        return None
    return Page(match[1], unquote(match[2]) if match[2] else None, match[3])


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
    headers = build_hf_headers(
        token=access.get("token") if on_hub else False,
        library_name="wqk",
        library_version=__version__,
    )
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
    return read_folder(
        Folder(name, source, workers=workers),
        Weights((path.name,), format=_own_format(path.name)) if is_file else None,
    )


def _own_format(name: str) -> Format | None:
    """The format of a single file that holds its configuration, so that no other is looked for."""
    return format_of(name) if name.endswith(".gguf") else None


def _child(url: str, name: str) -> str:
    """The address of a file in a folder; what follows the path stays, as it may be a key."""
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name)))


def _parent(url: str) -> str:
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0]))
