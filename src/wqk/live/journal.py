"""Score tables that grow during training: JSON lines, appended crash-safely."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wqk._files import json_line, read_lines, unwritable, write_atomically
from wqk.errors import OutputError, RunError
from wqk.tables.run import drop_after


def journals(path: Path) -> tuple[Path, Path]:
    """The files for scores, ``path``, and for the scores of updates, next to it."""
    if path.suffix != ".jsonl":
        raise OutputError(
            f"{path}: a monitor appends to .jsonl; got the ending {path.suffix!r}", path=path
        )
    updates = "updates.jsonl" if path.name == "scores.jsonl" else f"{path.stem}-updates.jsonl"
    return path, path.with_name(updates)


def check(path: Path, gamma: float) -> None:
    """Create a file if needed, and check that rows with this gamma can be appended to it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab"):
            pass
    except OSError as error:
        raise unwritable(path, error) from None
    first = next(iter(read_lines(path)), {"metadata": {"gamma": gamma}})
    written = first.get("metadata", {}).get("gamma")
    if written != gamma:
        raise RunError(
            f"{path}: holds scores with gamma {written}, but these have gamma {gamma}; "
            "use the same gamma, or choose another file"
        )


def begin(path: Path, keep: int, metadata: Mapping[str, Any]) -> int:
    """Remove the rows of steps after ``keep``, and a torn last line.

    Returns how many rows of an earlier run were removed, if none is left; 0 otherwise.
    """
    before = len(read_lines(path))
    drop_after(path, keep)
    if read_lines(path)[1:]:
        return 0
    write_atomically(path, json_line({"metadata": dict(metadata)}))
    return max(0, before - 1)
