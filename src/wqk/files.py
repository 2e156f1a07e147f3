"""Files that appear whole or not at all: written beside their name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from typing import TYPE_CHECKING

from wqk.errors import TableError

if TYPE_CHECKING:
    from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Put ``content`` under ``path``; whoever looks finds the old file or all of the new one.

    Raises
    ------
    TableError
        The folder is missing, read-only or full.
    """
    try:
        descriptor, beside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise TableError(f"{path}: cannot be written ({error.strerror})") from None
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(beside, 0o666 & ~_umask())
        os.replace(beside, path)
    except OSError as error:
        raise TableError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(beside)


def _umask() -> int:
    """The process's mask for new files, which can only be read by setting it."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
