"""Objects and folders in a bucket."""

from __future__ import annotations

from typing import Any, NamedTuple

from wqk.storage.stores import open_bucket
from wqk.storage.transfers import attempted


class Entry(NamedTuple):
    """An object in the listing of a bucket."""

    size: int
    tag: str | None


def list_objects(address: str, *, deep: bool) -> tuple[dict[str, Entry], list[str]]:
    """List the objects under a bucket's address.

    Parameters
    ----------
    address
        Of a folder in a bucket.
    deep
        Whether objects in folders below are listed, too.

    Returns
    -------
    objects
        Path relative to the folder → size and tag.
    folders
        Names of the folders directly below, sorted; empty if ``deep``.
    """
    import obstore

    store, prefix = open_bucket(address)

    async def list_once() -> tuple[list[Any], list[str]]:
        if not deep:
            result = await obstore.list_with_delimiter_async(store, prefix or None)
            return list(result["objects"]), list(result["common_prefixes"])
        objects: list[Any] = []
        async for chunk in obstore.list(store, prefix or None):
            objects += chunk
        return objects, []

    listed, below = attempted(list_once)
    start = len(prefix) + 1 if prefix else 0
    objects = {
        item["path"][start:]: Entry(item["size"], item["e_tag"])
        for item in listed
        if len(item["path"]) > start
    }
    return objects, sorted(path[start:].rstrip("/") for path in below)
