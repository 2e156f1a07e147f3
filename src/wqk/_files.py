"""Files that appear whole or not at all: written beside their name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from wqk.errors import OutputError

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` under ``path``; whoever looks finds the old file or all of the new one.

    Raises
    ------
    OutputError
        The folder is missing, read-only or full.
    """
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise _unwritable(path, error) from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()


def check_output(path: Path, what: str, endings: Iterable[str]) -> None:
    """Find out before any work whether a file of this name can be written.

    Parameters
    ----------
    path
        The file, which may be there already.
    what
        What will be in it, such as ``a table``.
    endings
        Those that name a format.

    Raises
    ------
    OutputError
        The ending is another one, the path is a folder, or its folder is missing or read-only.
    """
    endings = list(endings)
    if path.suffix not in endings:
        reason = f"{what} is written as {', '.join(endings)}"
        raise OutputError(
            f"{path}: {reason}; got the ending {path.suffix!r}", path=path, reason=reason
        )
    if path.is_dir():
        raise OutputError(f"{path}: is a folder; expected a file", path=path, reason="is a folder")
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        beside.touch(exist_ok=False)
        beside.unlink()
    except OSError as error:
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> OutputError:
    reason = error.strerror or type(error).__name__
    return OutputError(f"{path}: cannot be written ({reason})", path=path, reason=reason)
