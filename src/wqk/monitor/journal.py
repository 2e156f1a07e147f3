"""Score tables that grow while a model trains: JSON lines, appended, whatever kills the process."""

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
    """A file of scores, to which each look adds its rows in one write.

    Parameters
    ----------
    path
        A ``.jsonl`` file, as `ScoreTable.save` writes it; it need not be there yet.
    gamma
        With which all its rows are made.

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
        """Make the file if need be, and see that rows can be added to it.

        Raises
        ------
        OutputError
            Its folder cannot be made or written.
        RunError
            It holds something else, or scores made with another gamma.
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
        """All whole rows."""
        return read_table(self.path)

    def begin(self, keep: int, metadata: Mapping[str, Any]) -> int:
        """Forget the rows of steps after ``keep``, and a line that a kill has torn.

        Returns
        -------
        int
            How many rows of an earlier run are gone, where none is left.
        """
        before = len(read_lines(self.path))
        drop_after(self.path, keep)
        if read_lines(self.path)[1:]:
            return 0
        write_whole(self.path, json_line({"metadata": dict(metadata)}))
        return max(0, before - 1)

    def append(self, table: ScoreTable) -> None:
        """Add rows; on the disk before this returns, or, where that fails, none of them.

        Raises
        ------
        OutputError
            The file cannot be written any more.
        """
        append_lines(self.path, *records(table.frame))
