"""Score tables that grow during training: JSON lines, appended crash-safely."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wqk._files import append_lines, json_line, read_lines, unwritable, write_whole
from wqk.errors import OutputError, RunError
from wqk.runs.run import drop_after, read_table
from wqk.scanning.tables import ScoreTable, records

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


class Journal:
    """A file of scores, to which rows are appended in one write per scored step.

    Parameters
    ----------
    path
        A ``.jsonl`` file, as `ScoreTable.save` writes it; it need not exist yet.
    gamma
        The threshold of all its rows.

    Raises
    ------
    OutputError
        It has another ending.
    """

    def __init__(self, path: Path, gamma: float) -> None:
        if path.suffix != ".jsonl":
            raise OutputError(
                f"{path}: a monitor appends to .jsonl; got the ending {path.suffix!r}", path=path
            )
        self.path, self.gamma = path, gamma

    def check(self) -> None:
        """Create the file if needed, and check that rows can be appended to it.

        Raises
        ------
        OutputError
            Its folder cannot be created or written.
        RunError
            It contains something else, or scores with another gamma.
        """
        path, gamma = self.path, self.gamma
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

    def read(self) -> ScoreTable:
        """All complete rows."""
        return read_table(self.path)

    def begin(self, keep: int, metadata: Mapping[str, Any]) -> int:
        """Remove the rows of steps after ``keep``, and a torn last line.

        Returns
        -------
        int
            How many rows of an earlier run were removed, if none is left; 0 otherwise.
        """
        before = len(read_lines(self.path))
        drop_after(self.path, keep)
        if read_lines(self.path)[1:]:
            return 0
        write_whole(self.path, json_line({"metadata": dict(metadata)}))
        return max(0, before - 1)

    def append(self, table: ScoreTable) -> None:
        """Append rows; all are on the disk on return, or none is.

        Raises
        ------
        OutputError
            The file can no longer be written.
        """
        append_lines(self.path, *records(table.frame))
