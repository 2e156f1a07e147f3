"""The keywords that every function takes which opens a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypedDict

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping


class HubAccess(TypedDict, total=False):
    """How to reach the hub: keywords with the hub's usual names.

    Attributes
    ----------
    token
        Access token; True for the one that ``hf auth login`` has stored.
    cache_dir
        Where downloads are kept, other than where the hub's client keeps them.
    local_files_only
        Whether to do without the network.
    """

    token: str | bool | None
    cache_dir: str | os.PathLike[str] | None
    local_files_only: bool


class HubFolder(HubAccess, total=False):
    """`HubAccess`, and where in the repository.

    Attributes
    ----------
    subfolder
        The folder of the repository, or of a local folder, that contains the model.
    """

    subfolder: str | None


class HubOptions(HubFolder, total=False):
    """`HubFolder`, and which revision of the repository.

    Attributes
    ----------
    revision
        A branch, a tag or a commit.
    """

    revision: str | None


def check_options(function: str, options: Mapping[str, Any], names: type = HubOptions) -> None:
    """Refuse a keyword that is none of the hub's, in the name of the function that was called.

    Raises
    ------
    TypeError
        As Python raises it for a function that spells out its keywords.
    """
    for name in options:
        if name not in names.__annotations__:
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
