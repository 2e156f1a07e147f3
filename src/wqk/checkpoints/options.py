"""The keywords that every function takes which opens a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, TypedDict


class HubAccess(TypedDict, total=False):
    """How to reach the hub: keywords with the hub's usual names."""

    token: str | bool | None  # True for the one that ``hf auth login`` has stored
    cache_dir: str | os.PathLike[str] | None  # where downloads are kept, if not in the usual place
    local_files_only: bool  # whether to do without the network


class HubFolder(HubAccess, total=False):
    """`HubAccess`, and where in the repository."""

    subfolder: str | None  # the folder, of a repository or a local folder, that contains the model


class HubOptions(HubFolder, total=False):
    """`HubFolder`, and which revision of the repository."""

    revision: str | None  # a branch, a tag or a commit


def check_options(function: str, options: Mapping[str, Any], names: type = HubOptions) -> None:
    """Refuse an unknown keyword with a `TypeError`, as if the function spelled out its keywords."""
    for name in options:
        if name not in names.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
