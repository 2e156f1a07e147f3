"""A survey's folder: its lock, its manifest, and one table for each finished job.

::

    DIR/
    ├── manifest.jsonl    the options, then one line for each event, appended
    ├── parts/            one table for each job
    ├── scores.parquet    all of them, in the order of the refs, once the survey is complete
    └── .lock             held while a survey runs here; names the process
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._files import append_lines, locked, read_lines, unwritable
from wqk.errors import OutputError, RunError, TableError
from wqk.tables.score_table import ScoreTable, read_table

if TYPE_CHECKING:
    from wqk.scanning.surveys.jobs import Job
    from wqk.scanning.surveys.work import Options, Outcome

# Fields, with their types, that a line of the manifest must have, by its event.
FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "settings": {},
    "revisions": {"checkpoint": str, "revisions": list},
    "done": {"key": str, "weights": str, "files": (str, type(None))},
    "failed": {"key": str, "reason": str},
    "finished": {},
}


class SurveyFolder:
    """What a survey has done so far, according to its manifest; made by `open_folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = folder / "manifest.jsonl"
        self.scores = folder / "scores.parquet"
        # The last line about a job, by its key.
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        # Those of each repository, as first listed: a resumed survey uses the same.
        self.revisions: dict[str, list[str]] = {}

    def apply(self, line: dict[str, Any]) -> None:
        """Take a line of the manifest into account."""
        match line["event"]:
            case "revisions":
                self.revisions[line["checkpoint"]] = line["revisions"]
            case "done":
                self.done[line["key"]] = line
                self.failed.pop(line["key"], None)
            case "failed":
                self.failed[line["key"]] = line
                self.done.pop(line["key"], None)

    def note(self, line: dict[str, Any]) -> None:
        """Append one line to the manifest; it is on the disk on return."""
        append_lines(self.manifest, line)
        self.apply(line)

    def note_outcome(self, job: Job, outcome: Outcome) -> None:
        """Keep a job's table, then a line about the job."""
        about = {"key": job.key, "checkpoint": job.name, "revision": job.revision}
        seconds = round(outcome.seconds, 3)
        if outcome.table is None:
            result = {"error": outcome.error, "reason": outcome.reason, "seconds": seconds}
            result |= {"trace": outcome.trace} if outcome.trace else {}
            self.note({"event": "failed", **about, **result})
            return
        outcome.table.write(self.part(job.key))
        result = {"step": job.step, "rows": len(outcome.table), "bytes": outcome.bytes_read}
        result |= {"seconds": seconds, "weights": outcome.weights, "files": outcome.files}
        self.note({"event": "done", **about, **result})

    def part(self, key: str) -> Path:
        """The file with a job's table."""
        return self.folder / "parts" / f"{key}.parquet"

    def load_part(self, key: str) -> ScoreTable:
        """A job's table; `TableError` if it is damaged."""
        try:
            return read_table(self.part(key))
        except TableError as error:
            raise TableError(f"{error}; delete it and survey again") from None


@contextmanager
def open_folder(folder: Path, options: Options) -> Iterator[SurveyFolder]:
    """Create or resume a survey's folder, and lock it.

    Raises `RunError` if another survey is running in it, if it was surveyed with other options, or
    if its manifest is damaged, and `TableError` if it contains a table that no survey wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; a survey needs a folder")
    with locked(folder / ".lock", "survey"):
        survey = SurveyFolder(folder)
        if not survey.manifest.exists() and survey.scores.exists():
            raise TableError(
                f"{folder}: contains a scores.parquet that no survey wrote; choose another folder"
            )
        try:
            (folder / "parts").mkdir(exist_ok=True)
            # Unfinished files of a survey that was killed.
            for temporary in folder.glob("**/.*.parquet.*"):
                temporary.unlink()
        except OSError as error:
            raise unwritable(folder, error) from None
        lines = _read_manifest(survey.manifest)
        if lines:
            _require_same_options(folder, lines[0], asdict(options))
        else:
            survey.note({"event": "settings", **asdict(options)})
        for line in lines:
            survey.apply(line)
        yield survey


def _read_manifest(path: Path) -> list[dict[str, Any]]:
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        fields = FIELDS.get(str(line.get("event")))
        if (
            fields is None
            or (number == 1) != (line["event"] == "settings")
            or not all(n in line and isinstance(line[n], kind) for n, kind in fields.items())
        ):
            raise RunError(
                f"{path}: line {number} was not written by a survey; repair or remove the line, "
                "or survey into another folder"
            )
    return lines


def _require_same_options(folder: Path, before: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{name} was {before.get(name)}, is now {value}"
        for name, value in now.items()
        if before.get(name) != value
    ]
    if changed:
        raise RunError(
            f"{folder}: surveyed with different options ({'; '.join(changed)}); "
            "use the same ones, or survey into another folder"
        )
