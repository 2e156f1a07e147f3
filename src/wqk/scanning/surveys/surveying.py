"""Surveys: many checkpoints, one table, one manifest.

A survey's folder has a lock, a manifest, and one table for each finished job::

    DIR/
    ├── manifest.jsonl    the options, then one line for each event, appended
    ├── parts/            one table for each job
    ├── scores.parquet    the rows of all parts, in the order of the refs, after the last job
    ├── summary.*         medians of each model: .csv, .md and .tex
    └── .lock             held while a survey runs here; contains the name of the process
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

from wqk._files import append_lines, locked, read_lines, unwritable
from wqk._machine import usable_cores
from wqk._version import __version__
from wqk.errors import CheckpointError, OutputError, RunError, TableError, WqkError, called_as
from wqk.scanning.surveys.jobs import (
    Options,
    expand,
    failure,
    files_of,
    hub_revisions,
    local_files_of,
    run_in_processes,
    run_job,
    run_on,
)
from wqk.scanning.surveys.medians import identical_checkpoints, write_summary
from wqk.scanning.surveys.planning import MOST_JOBS, require_checkpoints, with_lists
from wqk.storage.references import HubAccess, check_options
from wqk.tables.schema import KEY, SCHEMA_VERSION
from wqk.tables.score_table import ScoreTable, join, read_table
from wqk.tables.writers import WRITERS

if TYPE_CHECKING:
    from wqk.scanning.surveys.jobs import Job, JobOutcome

# Fields of a line of the manifest, with their types, by event.
MANIFEST_FIELDS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "settings": {},
    "revisions": {"checkpoint": str, "revisions": list},
    "done": {"key": str, "files": (str, type(None))},
    "failed": {"key": str, "reason": str},
    "finished": {},
}


class SurveyFolder:
    """Folder of a survey, with the state of its jobs; made by `open_folder`.

    Attributes
    ----------
    done, failed
        Last line of the manifest about each job, by the key of the job.
    revisions
        Revisions of each repository at the first listing, also for a resumed survey.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.manifest = folder / "manifest.jsonl"
        self.scores = folder / "scores.parquet"
        self.done: dict[str, dict[str, Any]] = {}
        self.failed: dict[str, dict[str, Any]] = {}
        self.revisions: dict[str, list[str]] = {}
        self._tables: dict[str, ScoreTable] = {}

    def apply(self, line: dict[str, Any]) -> None:
        """Update the state by a line of the manifest."""
        match line["event"]:
            case "revisions":
                self.revisions[line["checkpoint"]] = line["revisions"]
            case "done":
                self.done[line["key"]] = line
                self.failed.pop(line["key"], None)
            case "failed":
                self.failed[line["key"]] = line
                self.done.pop(line["key"], None)

    def note(self, *lines: dict[str, Any]) -> None:
        """Append lines to the manifest, wait for the disk, and update the state."""
        append_lines(self.manifest, *lines)
        for line in lines:
            self.apply(line)

    def keep(self, job: Job, outcome: JobOutcome) -> dict[str, Any]:
        """Write a job's table, and return the line of the manifest about the job."""
        job_columns = {"key": job.key, "checkpoint": job.name, "revision": job.revision}
        seconds = round(outcome.seconds, 3)
        if outcome.error is not None:
            line: dict[str, Any] = {"event": "failed", **job_columns}
            line |= {"error": outcome.error, "reason": outcome.reason, "seconds": seconds}
            line["files"] = outcome.files
            if outcome.trace:
                line["trace"] = outcome.trace
            return line
        if outcome.table is not None:
            outcome.table.write(self.part(job.key))
        line = {"event": "done", **job_columns}
        line |= {"step": job.step, "rows": outcome.rows, "bytes": outcome.bytes_read}
        line |= {"seconds": seconds, "files": outcome.files}
        return line

    def part(self, key: str) -> Path:
        """Return the file with a job's table."""
        return self.folder / "parts" / f"{key}.parquet"

    def load_part(self, key: str) -> ScoreTable:
        """Return a job's table, read once; `TableError` if the file is damaged."""
        if key not in self._tables:
            try:
                self._tables[key] = read_table(self.part(key))
            except TableError as error:
                raise TableError(f"{error}; delete it and survey again") from None
        return self._tables[key]


@contextmanager
def open_folder(folder: Path, options: Options) -> Iterator[SurveyFolder]:
    """Create or resume a survey's folder, and lock it.

    Raises
    ------
    RunError
        Another survey is running in the folder, the survey in the folder has other options, or the
        manifest is damaged.
    TableError
        The folder contains a table that no survey wrote.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"{folder}: is a file; a survey needs a folder")
    if folder.suffix in WRITERS and not folder.exists():
        raise OutputError(
            f"{folder}: is named like a table; a survey needs a folder, in which it writes the "
            "table scores.parquet"
        )
    if folder.is_dir():
        _require_usable(folder, options)  # before the lock, which would change the folder
    with locked(folder / ".lock", "survey"):
        survey = SurveyFolder(folder)
        lines = _require_usable(folder, options)
        try:
            (folder / "parts").mkdir(exist_ok=True)
        except OSError as error:
            raise unwritable(folder, error) from None
        if not lines:
            survey.note({"event": "settings", **asdict(options)})
        for line in lines:
            survey.apply(line)
        yield survey


def _require_usable(folder: Path, options: Options) -> list[dict[str, Any]]:
    """Return the lines of a folder's manifest; raise an error if this survey cannot continue it."""
    survey = SurveyFolder(folder)
    if not survey.manifest.exists() and survey.scores.exists():
        raise TableError(
            f"{folder}: contains a scores.parquet that no survey wrote; choose another folder"
        )
    lines = _read_manifest(survey.manifest)
    if lines:
        _require_same_options(folder, lines[0], asdict(options))
    return lines


def _read_manifest(path: Path) -> list[dict[str, Any]]:
    lines = read_lines(path)
    for number, line in enumerate(lines, 1):
        is_first = number == 1
        if not _is_manifest_line(line) or is_first != (line["event"] == "settings"):
            raise RunError(
                f"{path}: line {number} was not written by a survey; repair or remove the line, "
                "or survey into another folder"
            )
    return lines


def _is_manifest_line(line: dict[str, Any]) -> bool:
    fields = MANIFEST_FIELDS.get(str(line.get("event")))
    if fields is None:
        return False
    return all(name in line and isinstance(line[name], kind) for name, kind in fields.items())


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


@dataclass(frozen=True)
class SurveyProgress:
    """Progress of a survey: ``jobs``, ``done`` and ``failed`` include earlier runs."""

    jobs: int  # number of all checkpoints
    done: int
    failed: int
    now: int  # scored and failed checkpoints of this run
    bytes_read: int  # in this run
    seconds: float  # since the start of this run
    failed_before: tuple[str, ...] = ()  # names of skipped checkpoints, failed in earlier runs


@called_as(
    "wqk.survey(refs, out=folder), or without a folder wqk.join([wqk.scan(ref) for ref in refs])"
)
def survey(
    refs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    out: str | os.PathLike[str],
    *,
    revisions: Sequence[str] = (),
    gamma: float = 2.0,
    heads: bool = True,
    executor: Executor | None = None,
    jobs: int | None = None,
    retry: bool = False,
    on_progress: Callable[[SurveyProgress], None] | None = None,
    **hub: Unpack[HubAccess],
) -> ScoreTable:
    """Score many checkpoints into one table; after an interruption the same call resumes.

    `wqk.scan` scores a short list, also of models in memory, without a folder.

    Parameters
    ----------
    refs
        Folders, files, hub ids, URLs, runs with ``checkpoint-*`` steps, named sets
        (``paper:language``), and ``@file`` for a text file with one ref per line.
    out
        A folder for the manifest, the parts and the table, ``scores.parquet``.
    revisions
        Names or patterns (``step*``) of hub revisions, or of a run's step folders.
    gamma, heads
        As for `wqk.scan`.
    executor
        Any `concurrent.futures.Executor`; without one, worker processes are started.
    jobs
        Number of worker processes, which share the cores; by default one for each core, at most 8.
    retry
        Whether to repeat all failed checkpoints; local ones whose files have appeared or changed
        are repeated in any case.
    on_progress
        Called at the start and after every checkpoint.
    **hub
        ``token``, ``cache_dir``, ``local_files_only``: see `open_checkpoint`. The workers receive
        these options; the manifest does not contain them.

    Returns
    -------
    ScoreTable
        The table of ``scores.parquet``, in the order of the refs. The metadata lists ``failed``
        checkpoints with reasons, and groups of ``identical`` checkpoints, with equal scores in
        every row.

    Raises
    ------
    RunError
        Another survey is running in ``out``, the survey in ``out`` has other options, or the
        workers have died.
    OutputError
        The folder cannot be written.
    CheckpointError
        A list or a named set does not exist, a list has no ``@`` before its name, or a folder
        contains folders of checkpoints. Failed checkpoints do not raise.

    Examples
    --------
    >>> import tempfile, wqk
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> models = [wqk.demo_model("encoder"), wqk.demo_model("decoder")]
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
    ...     table = wqk.survey(models, out=folder, heads=False, executor=threads)
    >>> len(table), table.metadata["failed"]
    (8, [])
    """
    check_options("survey", hub, HubAccess)
    references = [refs] if isinstance(refs, str | os.PathLike) else list(refs)
    for name in references:
        if not isinstance(name, str | os.PathLike):
            raise CheckpointError(
                f"a survey takes paths, Hub ids and named sets, got {type(name).__name__}"
            )
    names = with_lists(os.fspath(name) for name in references)
    require_checkpoints(names, revisions)
    options = Options(float(gamma), heads, __version__, SCHEMA_VERSION)
    with open_folder(Path(out), options) as folder:
        listing = partial(_revisions, folder, retry, hub.get("token"))
        chosen = expand(names, revisions, listing)
        pending = [job for job in chosen if _is_pending(folder, job, retry)]
        runnable = [job for job in pending if job.problem is None]
        if executor is None:
            work = partial(run_job, options, parts=folder.folder / "parts", **hub)
            processes = min(len(runnable), jobs or min(MOST_JOBS, usable_cores()))
            running = run_in_processes(work, runnable, processes)
        else:
            # The workers may be on other machines, without access to the folder.
            work = partial(run_job, options, parts=None, **hub)
            running = run_on(executor, work, runnable)
        with closing(running):
            _collect(folder, chosen, pending, running, on_progress)
        return _finish(folder, chosen, options)


def _revisions(
    folder: SurveyFolder, retry: bool, token: str | bool | None, repository: str
) -> list[str]:
    """Return a repository's revisions, listed once in a survey, and again with ``retry``."""
    if retry or repository not in folder.revisions:
        listed = hub_revisions(repository, token)
        folder.note({"event": "revisions", "checkpoint": repository, "revisions": listed})
    return folder.revisions[repository]


def _is_pending(folder: SurveyFolder, job: Job, retry: bool) -> bool:
    """Return whether a job is new, has changed files, or failed and is to be repeated.

    A failed job whose files on disk have appeared or changed since is repeated without ``retry``.
    """
    if job.key in folder.failed:
        files = None if job.problem else local_files_of(job.location)
        files_at_failure = folder.failed[job.key].get("files", files)  # earlier versions lack it
        return retry or (files is not None and files != files_at_failure)
    part = folder.part(job.key)
    if job.key not in folder.done or not part.exists() or not part.stat().st_size:
        return True
    try:
        files = files_of(job.location)
    except WqkError:
        return True
    return files is not None and files != folder.done[job.key]["files"]


def _collect(
    folder: SurveyFolder,
    chosen: Sequence[Job],
    pending: Sequence[Job],
    running: Iterator[list[tuple[Job, JobOutcome]]],
    on_progress: Callable[[SurveyProgress], None] | None,
) -> None:
    """Store every outcome as it completes."""
    start, bytes_read, now = time.perf_counter(), 0, 0
    unfinished = {job.key for job in pending}
    skipped = [job for job in chosen if job.key in folder.failed and job.key not in unfinished]
    failed_before = tuple(job.title for job in skipped)
    failed = len(skipped)
    done = len(chosen) - len(unfinished) - failed

    def report() -> None:
        if on_progress is not None:
            seconds = time.perf_counter() - start
            on_progress(
                SurveyProgress(
                    jobs=len(chosen),
                    done=done,
                    failed=failed,
                    now=now,
                    bytes_read=bytes_read,
                    seconds=seconds,
                    failed_before=failed_before,
                )
            )

    report()
    problems = ([(job, failure(job.problem))] for job in pending if job.problem)
    for complete in chain(problems, running):
        folder.note(*(folder.keep(job, outcome) for job, outcome in complete))
        for job, outcome in complete:
            if outcome.error:
                failed += 1
            else:
                done += 1
                # The table is read while the workers are busy. `_finish` raises its error.
                with suppress(TableError):
                    folder.load_part(job.key)
            now += 1
            bytes_read += outcome.bytes_read
            report()


def _finish(folder: SurveyFolder, chosen: Sequence[Job], options: Options) -> ScoreTable:
    """Write and return the table of all parts, in the order of the refs."""
    done = [job for job in chosen if job.key in folder.done]
    failed = []
    for job in chosen:
        if job.key in folder.failed:
            reason = folder.failed[job.key]["reason"]
            failed.append({"checkpoint": job.name, "revision": job.revision, "reason": reason})
    # A killed survey leaves unfinished files; its workers may run a moment longer.
    for temporary in folder.folder.glob("**/.*.parquet.*"):
        temporary.unlink(missing_ok=True)
    tables = {job: folder.load_part(job.key) for job in done}
    joined = join([*tables.values()]) if tables else ScoreTable.from_rows([])
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "wqk": options.wqk,
        "gamma": options.gamma,
        "folded_norms": False,
        "biases": False,
        "inferred": [],
        "unread": [],
        "notes": [],
        "partial": {},
        "left_out": {},
        "left_out_without_softmax": {},
    }
    metadata |= joined.metadata
    metadata["failed"] = failed
    metadata["identical"] = identical_checkpoints(joined.frame)
    table = ScoreTable(joined.frame.rechunk(), metadata)
    table.write(folder.scores)
    if len(table):
        write_summary(table, folder.folder)
    folder.note({"event": "finished", "done": len(done), "failed": len(failed)})
    return table


def is_survey_folder(folder: Path) -> bool:
    """Return whether a folder contains a survey, complete or interrupted."""
    return (folder / "manifest.jsonl").is_file() and (folder / "parts").is_dir()


def survey_table(*folders: str | PathLike[str]) -> ScoreTable:
    """Return the scores in the folders of surveys, finished or not (see `wqk.survey`).

    If several surveys scored the same form, the last one's scores are used.

    Raises
    ------
    TableError
        A folder contains no survey, or a survey without scores.

    Examples
    --------
    >>> import tempfile, wqk
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
    ...     _ = wqk.survey(wqk.demo_model("decoder"), out=folder, heads=False, executor=threads)
    ...     len(survey_table(folder))
    4
    """
    files: list[Path] = []
    for folder in map(Path, folders):
        table_files = [folder / "scores.parquet"]
        if not table_files[0].is_file():
            table_files = sorted((folder / "parts").glob("*.parquet"))
        if not table_files:
            raise TableError(
                f"{folder}: contains no survey; expected a folder written by wqk survey --out"
            )
        files += table_files
    table = join([read_table(file) for file in files])
    return ScoreTable(
        table.frame.unique(subset=KEY, keep="last", maintain_order=True), table.metadata
    )
