"""Checkpoints in buckets: a folder with weights and a configuration, or one file of weights.

One request lists a folder.
"""

from __future__ import annotations

import functools
from functools import partial
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Unpack

from wqk.checkpoints.adapters import read_adapter
from wqk.checkpoints.formats import Folder, choose_weights, read_folder
from wqk.checkpoints.hub import open_on_base
from wqk.checkpoints.remote import OFFLINE, RemoteAccess, single_file
from wqk.errors import CheckpointError, HubError
from wqk.storage.buckets import BucketFolder
from wqk.storage.range_cache import open_cache
from wqk.storage.references import redacted, step_in
from wqk.storage.transfers import Transfers

if TYPE_CHECKING:
    from wqk.checkpoints.checkpoint import Checkpoint
    from wqk.storage.references import HubAccess


def open_bucket_folder(
    address: str,
    *,
    subfolder: str | None = None,
    base: str | None = None,
    **settings: Unpack[HubAccess],
) -> Checkpoint:
    """Open the checkpoint in a folder of a bucket, or one of its files.

    One request lists the folder, and only headers are fetched until tensors are read. ``base`` is
    the base model of an adapter, instead of the base that the adapter names.

    Raises
    ------
    HubError
        The store does not provide the folder.
    CheckpointError
        The folder contains no checkpoint.
    """
    access = RemoteAccess.from_settings(settings)
    name = redacted(address)
    weights = single_file(PurePosixPath(name).name)
    if weights is not None:
        folder_address = name.rstrip("/").rpartition("/")[0]
    else:
        folder_address = f"{name.rstrip('/')}/{subfolder or ''}"
    files = _listed(folder_address, access)
    if not (files.objects or files.folders):
        raise CheckpointError(
            "there is nothing under this address; expected a folder with weights, or a file; check "
            "the address, and the rights to list it"
        )
    source = functools.cache(
        partial(files.file, transfers=access.transfers, cache=access.cache, offline=access.offline)
    )

    def below() -> list[str]:
        """Paths of the objects in nested folders; empty without a network."""
        if access.offline or not files.folders:
            return []
        return [path for path in files.deep if "/" in path]

    folder = Folder(name, source, [*files.objects], below, access.transfers)
    adapter = read_adapter(folder) if weights is None else None
    if adapter is not None:
        return open_on_base(adapter, base, settings)
    checkpoint = read_folder(folder, weights)
    step = step_in(PurePosixPath(files.address).name)
    if step is not None:
        checkpoint.step = step
    return checkpoint


def _listed(address: str, access: RemoteAccess) -> BucketFolder:
    """Return a folder with its listing: from the store, or offline from a note in the cache."""
    files = BucketFolder(address)
    if access.offline:
        listing = access.cache.note(files.key)
        if listing is None:
            raise HubError(OFFLINE)
        return BucketFolder(address, listing)
    objects = {name: list(entry) for name, entry in files.objects.items()}
    access.cache.write_note(files.key, [objects, files.folders])
    return files


def bucket_has_weights(address: str) -> bool:
    """Return whether a folder of a bucket contains weights that can be opened."""
    files, transfers = BucketFolder(address), Transfers()
    source = partial(files.file, transfers=transfers, cache=open_cache())
    folder = Folder(files.address, source, [*files.objects], tuple, transfers)
    return bool(choose_weights(folder).files)
