"""A survey's folder: its lock, its manifest, and one table for each job that is done.

::

    DIR/
    ├── manifest.jsonl    the settings, then a line for whatever was done or failed, appended
    ├── parts/            one table for each job
    ├── scores.parquet    all of them, in the order of the refs, when the survey is through
    └── .lock             held while a survey runs here; names the process
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import socket
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError, TableError
from wqk.scanning.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from wqk.scanning.surveys.jobs import Job
    from wqk.scanning.surveys.work import Outcome, Settings

# Folders that this very process surveys: a file lock does not keep a process out of its own.
_HELD: set[Path] = set()


class Record:
    """What a survey has done so far, as its manifest tells; made by `open_record`.

    Attributes
    ----------
    done, failed
        The last line about a job, by its key.
    """

    def __init__(self, folder: Path, descriptor: int, lines: list[dict[str, Any]]) -> None:
        self.folder = folder
        self._descriptor = descriptor
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self._revisions: dict[str, list[str]] = {}
        for line in lines:
            self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if line["event"] == "revisions":
            self._revisions[line["checkpoint"]] = line["revisions"]
        elif line["event"] in ("done", "failed"):
            now, other = (self.done, self.failed)[:: 1 if line["event"] == "done" else -1]
            now[line["key"]] = line
            other.pop(line["key"], None)

    @property
    def scores(self) -> Path:
        """Where the survey's table lies in the end."""
        return self.folder / "scores.parquet"

    def part(self, key: str) -> Path:
        """Where a job's table lies."""
        return self.folder / "parts" / f"{key}.parquet"

    def note_revisions(self, repository: str, revisions: list[str]) -> None:
        """Keep a repository's list of revisions, so that a resumed survey means the same ones."""
        self.note({"event": "revisions", "checkpoint": repository, "revisions": revisions})

    def revisions(self, repository: str) -> list[str] | None:
        """The list that was kept, if any."""
        return self._revisions.get(repository)

    def note_outcome(self, job: Job, outcome: Outcome) -> None:
        """Keep a job's table and what became of it, in this order.

        Raises
        ------
        TableError
            The folder is full, or cannot be written any more.
        """
        about = {"key": job.key, "checkpoint": job.name, "revision": job.revision}
        seconds = round(outcome.seconds, 3)
        if outcome.table is None:
            trace = {"trace": outcome.trace} if outcome.trace else {}
            error = {"error": outcome.error, "reason": outcome.reason, "seconds": seconds}
            self.note({"event": "failed", **about, **error, **trace})
            return
        outcome.table.save(self.part(job.key))
        self.note(
            {
                "event": "done",
                **about,
                "step": job.step,
                "rows": len(outcome.table),
                "bytes": outcome.bytes_read,
                "seconds": seconds,
                "weights": outcome.weights,
                "files": outcome.files,
            }
        )

    def note(self, line: dict[str, Any]) -> None:
        """Append one line to the manifest, on the disk before this returns; or nothing of it."""
        content = (json.dumps(line, ensure_ascii=False) + "\n").encode()
        end = os.fstat(self._descriptor).st_size
        try:
            while content:
                content = content[os.write(self._descriptor, content) :]
            os.fsync(self._descriptor)
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, end)
            raise _unwritable(self.folder / "manifest.jsonl", error) from None
        self._take(line)

    def load_part(self, key: str) -> ScoreTable:
        """A job's table.

        Raises
        ------
        TableError
            It is not whole; says what to do.
        """
        try:
            return ScoreTable.load(self.part(key))
        except TableError as error:
            raise TableError(f"{error}; delete it and survey again") from None


@contextmanager
def open_record(folder: Path, settings: Settings) -> Iterator[Record]:
    """A survey's folder, made or taken up again, and locked against other surveys.

    Raises
    ------
    RunError
        Another survey is running in the folder, or it was surveyed with other settings.
    TableError
        The folder cannot be made, read or written, or its manifest is damaged.
    """
    with _lock(folder):
        path = folder / "manifest.jsonl"
        if not path.exists() and (folder / "scores.parquet").exists():
            raise TableError(
                f"{folder}: holds a scores.parquet that is no survey's; choose another folder"
            )
        try:
            (folder / "parts").mkdir(exist_ok=True)
            # What a kill has left of files that were being written.
            for left in (
                *folder.glob(".scores.parquet.*"),
                *(folder / "parts").glob(".*.parquet.*"),
            ):
                left.unlink()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            raise _unwritable(folder, error) from None
        try:
            lines = _whole_lines(path, descriptor)
            record = Record(folder, descriptor, lines[1:])
            if lines:
                _compare(folder, lines[0], asdict(settings))
            else:
                record.note({"event": "settings", **asdict(settings)})
            yield record
        finally:
            os.close(descriptor)


def _whole_lines(path: Path, descriptor: int) -> list[dict[str, Any]]:
    """The manifest's lines; one that an interruption tore off at the end is taken away."""
    try:
        content = path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.ftruncate(descriptor, len(whole))
    except OSError as error:
        raise _unwritable(path, error) from None
    lines = []
    for number, text in enumerate(whole.split(b"\n")[:-1], 1):
        try:
            line = json.loads(text)
            known = line["event"] in ("revisions", "finished")
            known = known or (number == 1) == (line["event"] == "settings")
            if not known or (line["event"] in ("done", "failed") and "key" not in line):
                raise ValueError
        except (ValueError, TypeError, KeyError):
            raise TableError(
                f"{path}: line {number} is not a survey's; mend or remove the line, "
                "or survey into another folder"
            ) from None
        lines.append(line)
    return lines


def _compare(folder: Path, then: dict[str, Any], now: dict[str, Any]) -> None:
    changed = [
        f"{name} {then.get(name)} then, {value} now"
        for name, value in now.items()
        if then.get(name) != value
    ]
    if changed:
        raise RunError(
            f"{folder}: was surveyed with other settings ({'; '.join(changed)}); "
            "survey with the same ones, or into another folder"
        )


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other surveys out of a folder; the system lets go of the lock however we end."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        place = folder.resolve()
    except FileExistsError:
        raise TableError(f"{folder}: is a file; a survey needs a folder") from None
    except OSError as error:
        raise _unwritable(folder, error) from None
    # Closing any descriptor of a file gives up all locks that the process has on it, so that our
    # own second survey must not even open it.
    if place in _HELD:
        raise RunError(f"{folder}: another survey of this process is running here")
    try:
        descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise _unwritable(folder, error) from None
    try:
        _take_lock(folder, descriptor)
        _HELD.add(place)
        yield
    finally:
        _HELD.discard(place)
        os.close(descriptor)


def _take_lock(folder: Path, descriptor: int) -> None:
    try:
        # A record lock, not flock: a forked worker that outlives us must not keep it.
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    except (BlockingIOError, PermissionError):
        holder = os.read(descriptor, 200).decode(errors="replace").strip() or "unknown"
        raise RunError(
            f"{folder}: another survey is running here ({holder}); wait for it, or choose "
            "another folder"
        ) from None
    except OSError as error:
        raise _unwritable(folder / ".lock", error) from None


def _unwritable(path: Path, error: OSError) -> TableError:
    return TableError(f"{path}: cannot be written ({error.strerror})")
