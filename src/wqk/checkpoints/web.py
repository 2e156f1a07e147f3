"""Checkpoints on web servers: a file of weights, or a folder with weights and a configuration.

A web server cannot list a folder. Therefore files are requested by their usual names.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Unpack
from urllib.parse import quote, unquote, urlunsplit

from wqk.checkpoints.distributed import METADATA
from wqk.checkpoints.formats import COMMON, PREFERRED, Folder, read_folder
from wqk.checkpoints.library_formats import DISTRIBUTED
from wqk.checkpoints.remote import OFFLINE, RemoteAccess, single_file
from wqk.errors import HubError
from wqk.storage.hub_files import login_headers, place_on_hub
from wqk.storage.references import redacted, split_address
from wqk.storage.remote_file import RemoteFile
from wqk.storage.stores import web_location
from wqk.storage.transfers import Absent, Refused

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.checkpoints.formats import StoredCheckpoint
    from wqk.storage.references import HubAccess

# Optional files: a server may refuse these files, but provide the weights.
OPTIONAL = (
    *DISTRIBUTED.config,
    "open_clip_config.json",
    METADATA,
    COMMON,
    *PREFERRED,
)


def open_url(
    url: str, *, subfolder: str | None = None, **settings: Unpack[HubAccess]
) -> StoredCheckpoint:
    """Open the checkpoint at an address; only headers are fetched until tensors are read.

    A login is sent only to addresses of the Hub. Raises `HubError` if the server does not provide
    the file, and `CheckpointError` if the file is not a checkpoint, or the server cannot serve
    parts of files.
    """
    from huggingface_hub import constants

    access = RemoteAccess.from_settings(settings)
    name = redacted(url)
    path = PurePosixPath(unquote(split_address(url).path))
    weights = single_file(path.name)
    if weights is not None:
        address = _parent(url)
    elif subfolder:
        address = _child(url, subfolder)
    else:
        address = url
    is_on_hub = url.startswith(constants.ENDPOINT + "/")
    folder = WebFolder(address, is_on_hub, access, required=weights.files if weights else ())
    if access.offline and weights is None and not folder.has_notes_of(PREFERRED):
        raise HubError(f"{name}: {OFFLINE}")
    source = functools.cache(folder.file)
    contents = Folder(name, source, transfers=access.transfers, refusals=folder.refusals)
    return read_folder(contents, weights)


@dataclass(frozen=True)
class WebFolder:
    """A folder of a web server."""

    address: str
    is_on_hub: bool  # whether the server is the Hub, which redirects to signed addresses
    access: RemoteAccess
    required: Sequence[str] = ()  # files in the address
    refusals: list[Refused] = field(default_factory=list)  # answers for optional files

    def file(self, name: str) -> RemoteFile | None:
        """Open a file by its name; None if the folder lacks an optional file."""
        address = _child(self.address, name)
        is_optional = name in OPTIONAL and name not in self.required
        if self.access.offline:
            return self._noted_file(address, is_optional)
        return self._described_file(address, is_optional)

    def has_notes_of(self, names: tuple[str, ...]) -> bool:
        """Return whether an earlier request found any of these files."""
        cache = self.access.cache
        return any(cache.note(_child(self.address, name)) for name in names)

    def _noted_file(self, address: str, is_optional: bool) -> RemoteFile | None:
        """Open a file that an earlier request described, to read its bytes from the cache."""
        match self.access.cache.note(address):
            case [int(size), str(tag)] if size >= 0:
                return RemoteFile(
                    redacted(address),
                    web_location(address, login_headers(False)),
                    transfers=self.access.transfers,
                    cache=self.access.cache,
                    size=size,
                    tag=tag,
                    offline=True,
                )
        if is_optional:
            return None
        raise Absent(f"{redacted(address)}: {OFFLINE}")

    def _described_file(self, address: str, is_optional: bool) -> RemoteFile | None:
        """Open a file after a request for its size and tag, and write both to a note."""
        location, renew = None, None
        if self.is_on_hub:
            renew = partial(place_on_hub, address, self.access.token)
        else:
            location = web_location(address, login_headers(False))
        remote = RemoteFile(
            redacted(address),
            location,
            renew=renew,
            transfers=self.access.transfers,
            cache=self.access.cache,
        )
        try:
            remote.describe()
        except Absent as refusal:
            if not is_optional:
                raise
            if isinstance(refusal, Refused):
                self.refusals.append(refusal)
            return None
        if remote.strong_tag:
            self.access.cache.write_note(address, [remote.size, remote.strong_tag])
        return remote


def _child(url: str, name: str) -> str:
    """Return the address of a file in a folder; a query remains, because it may be a key."""
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rstrip("/") + "/" + quote(name)))


def _parent(url: str) -> str:
    """Return the address of the folder of a file."""
    parts = split_address(url)
    return urlunsplit(parts._replace(path=parts.path.rpartition("/")[0]))
