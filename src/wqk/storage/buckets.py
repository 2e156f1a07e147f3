"""Listings of the folders of a bucket: the objects and the folders in a folder."""

from __future__ import annotations

import posixpath
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any, NamedTuple

from wqk.errors import CheckpointError, errors_about
from wqk.storage.range_cache import RangeCache
from wqk.storage.references import redacted
from wqk.storage.remote_file import RemoteFile
from wqk.storage.stores import Location, endpoint_of, open_bucket
from wqk.storage.transfers import Absent, Transfers, attempted


class Entry(NamedTuple):
    """An object in the listing of a bucket."""

    size: int
    tag: str | None


class BucketFolder:
    """A folder of a bucket, listed on first access to its objects.

    Parameters
    ----------
    address
        Such as ``s3://bucket/run``; a query (``?…``) is ignored.
    listing
        Objects and folders of an earlier listing; None to ask the store.
    """

    def __init__(self, address: str, listing: Any = None) -> None:
        self.address = redacted(address).rstrip("/")
        with errors_about(self.address):
            self.store, self.prefix = open_bucket(self.address)
        self.endpoint = endpoint_of(address.partition("://")[0].lower())
        if listing is not None:
            objects, self.folders = listing
            self.objects = {path: Entry(size, tag) for path, (size, tag) in objects.items()}

    @property
    def key(self) -> str:
        """Address of the folder with the endpoint of the server; unique among all servers."""
        return f"{self.endpoint} {self.address}"

    @property
    def root(self) -> str:
        """Address of the whole bucket."""
        return self.address.removesuffix(self.prefix).rstrip("/")

    @cached_property
    def _listed(self) -> tuple[dict[str, Entry], list[str]]:
        import obstore

        async def list_once() -> Any:
            return await obstore.list_with_delimiter_async(self.store, self.prefix or None)

        with errors_about(self.address):
            result = attempted(list_once)
        names = [self._within(path).rstrip("/") for path in result["common_prefixes"]]
        return self._entries(result["objects"]), sorted(name for name in names if name)

    @cached_property
    def objects(self) -> dict[str, Entry]:
        """The objects directly in the folder, by name."""
        return self._listed[0]

    @cached_property
    def folders(self) -> list[str]:
        """Names of the folders directly below, sorted."""
        return self._listed[1]

    @cached_property
    def deep(self) -> dict[str, Entry]:
        """All objects in the folder and in the folders below, by path from the folder."""
        import obstore

        async def list_all() -> list[Any]:
            objects: list[Any] = []
            async for chunk in obstore.list(self.store, self.prefix or None):
                objects += chunk
            return objects

        with errors_about(self.address):
            return self._entries(attempted(list_all))

    def file(
        self, name: str, transfers: Transfers, cache: RangeCache, *, offline: bool = False
    ) -> RemoteFile | None:
        """Open an object by its path from the folder; None if no such object exists."""
        entry = self.objects.get(name)
        if entry is None and "/" in name and not name.startswith("../") and not offline:
            entry = self.deep.get(name)
        path = posixpath.normpath(posixpath.join(self.prefix, name))
        is_around = name.startswith("../") and not path.startswith("..")
        if entry is None and (offline or not is_around):
            return None
        address = f"{self.root}/{path}"
        remote = RemoteFile(
            address,
            Location(self.store, path, f"{self.endpoint} {address}"),
            transfers=transfers,
            cache=cache,
            size=entry.size if entry else None,
            tag=entry.tag if entry else None,
            offline=offline,
        )
        if entry is None:
            try:
                remote.describe()
            except Absent:
                return None
        return remote

    def _entries(self, listed: list[Any]) -> dict[str, Entry]:
        entries = {self._within(o["path"]): Entry(o["size"], _quoted(o["e_tag"])) for o in listed}
        entries.pop("", None)  # placeholder of an empty folder
        return entries

    def _within(self, path: str) -> str:
        start = len(self.prefix) + 1 if self.prefix else 0
        return path[start:]


def _quoted(tag: str | None) -> str | None:
    """Return a tag as answers contain it; Azure's listings leave the quotation marks out."""
    return tag if tag is None or '"' in tag else f'"{tag}"'


def matching_folders(address: str) -> list[str]:
    """Sorted addresses of the folders that match an address with ``*`` in the last part.

    Raises
    ------
    CheckpointError
        No folder matches, an earlier part contains ``*``, or the address contains ``[``.
    """
    if "[" in redacted(address):
        raise CheckpointError(
            "a pattern of an address contains only *, got '['; use *, or list the addresses in a "
            "text file and give @FILE"
        )
    parent, _, pattern = redacted(address).rstrip("/").rpartition("/")
    if "*" in parent or parent.endswith(":/"):
        raise CheckpointError("only the last part of an address may contain *")
    names = [name for name in BucketFolder(parent).folders if fnmatchcase(name, pattern)]
    if not names:
        raise CheckpointError(f"no folder there matches {pattern!r}")
    return [f"{parent}/{name}" for name in names]


def step_names(address: str, is_step: Callable[[str], bool]) -> list[str]:
    """Addresses of the folders directly below an address that are named after training steps."""
    folder = BucketFolder(address)
    return [f"{folder.address}/{name}" for name in folder.folders if is_step(name)]
