"""A folder, here or remote: the names of its files, their bytes, and the objects in them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from wqk.checkpoints.files import LocalFile
from wqk.checkpoints.pickles import plain
from wqk.errors import CheckpointError, errors_about, first_line

if TYPE_CHECKING:
    from wqk.checkpoints.files import ByteSource
    from wqk.checkpoints.ranged import Workers

# Largest configuration or index; YAML, which usually takes 5 kB, is slow to parse.
LARGEST_CONFIGURATION, LARGEST_YAML = 64 * 2**20, 2**18


class Folder(NamedTuple):
    """A folder, here or remote."""

    name: str  # what the user calls it
    source: Callable[[str], ByteSource | None]  # the bytes of a file; None if it does not exist
    names: Sequence[str] | None = None  # its files; None if they cannot be listed
    below: Callable[[], Iterable[str]] = tuple  # paths of files deeper in it
    workers: Workers | None = None  # what fetches the files of a remote folder

    def holds(self, file: str) -> bool:
        """Whether there is such a file; for folders that cannot be listed."""
        return self.source(file) is not None

    def object(self, file: str) -> dict[str, Any]:
        """The object in a file of JSON or YAML; empty if there is no file."""
        source = self.source(file)
        if source is None:
            return {}
        if source.size > LARGEST_CONFIGURATION:
            raise CheckpointError(f"{source.name}: too large for a configuration file")
        content = bytearray(source.size)
        source.read_into(0, memoryview(content))
        parse = _parse_yaml if file.endswith((".yaml", ".yml")) else _parse_json
        with errors_about(source.name):
            return parse(content)


def _parse_json(text: bytearray) -> dict[str, Any]:
    try:
        value = json.loads(text.decode("utf-8"))
        if re.search(rb"\\u[dD][89a-fA-F]", text):  # halves of pairs cannot be stored or printed
            whole = json.dumps(value, ensure_ascii=False).encode("utf-8", "replace")
            value = json.loads(whole)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"not valid JSON ({error})") from None
    if not isinstance(value, dict):
        raise CheckpointError("expected a JSON object")
    return value


def _parse_yaml(text: bytearray) -> dict[str, Any]:
    import yaml

    try:
        if len(text) > LARGEST_YAML:
            raise ValueError(f"larger than {LARGEST_YAML} bytes")
        value = yaml.safe_load(text.decode("utf-8"))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise CheckpointError(f"not valid YAML ({first_line(error)})") from None
    if not isinstance(value, dict):
        raise CheckpointError("expected keys with values")
    return dict(plain(value))


def local_folder(folder: Path) -> Folder:
    """A folder on disk."""

    def source(name: str) -> LocalFile | None:
        return LocalFile(folder / name) if os.path.lexists(folder / name) else None

    def below() -> list[str]:
        return [str(path.relative_to(folder)) for path in folder.glob("*/*")]

    return Folder(str(folder), source, [path.name for path in folder.iterdir()], below)


def exists(path: Path) -> bool:
    """Whether a path exists; one that the system rejects does not."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False
