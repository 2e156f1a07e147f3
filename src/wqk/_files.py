"""Files that appear whole or not at all: written beside their name, synced, then renamed."""

from __future__ import annotations

import contextlib
import os
import secrets
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
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    except OSError as error:
        raise TableError(f"{path}: cannot be written ({error.strerror})") from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
