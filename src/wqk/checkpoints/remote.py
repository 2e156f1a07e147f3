"""Settings and helpers that the Hub, web servers and buckets share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from wqk.checkpoints.formats import ENDINGS, WeightFiles, unread_format
from wqk.checkpoints.library_formats import format_of
from wqk.errors import CheckpointError
from wqk.storage.range_cache import open_cache
from wqk.storage.transfers import Transfers

if TYPE_CHECKING:
    from wqk.storage.range_cache import RangeCache
    from wqk.storage.references import HubAccess

# End of the error for a file that only the network provides.
OFFLINE = "is not in the cache, and fetching is disabled; allow fetching, or download it first"


@dataclass(frozen=True)
class RemoteAccess:
    """Access to the files of one remote checkpoint."""

    settings: HubAccess  # as the user gave them; a base model is opened with the same
    offline: bool  # whether only the caches are read
    cache: RangeCache  # ranges of files, and notes of listings
    transfers: Transfers  # fetches the files' ranges, and counts their bytes

    @classmethod
    def from_settings(cls, settings: HubAccess) -> RemoteAccess:
        """Return the access that the user's settings and environment allow."""
        from huggingface_hub import constants

        return cls(
            settings=settings,
            offline=bool(settings.get("local_files_only") or constants.HF_HUB_OFFLINE),
            cache=open_cache(settings.get("cache_dir")),
            transfers=Transfers(),
        )

    @property
    def token(self) -> str | bool | None:
        """Login of the Hub; None for the stored login, False for no login."""
        return self.settings.get("token")


def single_file(name: str) -> WeightFiles | None:
    """Return the weights at an address with the name of a file; None for a folder.

    Raises `CheckpointError` for the name of a file in an unsupported format.

    Examples
    --------
    >>> single_file("model.safetensors").files, single_file("step-100")
    (('model.safetensors',), None)
    """
    if reason := unread_format(name):
        raise CheckpointError(reason)
    ending = PurePosixPath(name).suffix
    if ending not in ENDINGS:
        return None
    # A GGUF file contains its configuration: no other file is requested.
    layout = format_of(name) if ending == ".gguf" else None
    return WeightFiles((name,), format=layout)
