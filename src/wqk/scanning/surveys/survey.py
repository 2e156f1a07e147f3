"""Surveys: many checkpoints, one table, one manifest."""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wqk._version import __version__
from wqk.errors import CheckpointError, WqkError
from wqk.scanning.surveys.executors import default_jobs, run_in_processes, run_on
from wqk.scanning.surveys.jobs import expand, hub_revisions
from wqk.scanning.surveys.record import Record, open_record
from wqk.scanning.surveys.work import Settings, failure, files_of, run_job
from wqk.scanning.tables import SCHEMA_VERSION, ScoreTable, join

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence
    from concurrent.futures import Executor

    from wqk.scanning.surveys.jobs import Job
    from wqk.scanning.surveys.work import Outcome


@dataclass(frozen=True)
class SurveyProgress:
    """How far a survey has come.

    Attributes
    ----------
    jobs, done, failed
        Checkpoints in all, scored, and failed; what earlier runs did is counted.
    now
        Checkpoints that this run has scored or seen fail.
    bytes_read, seconds
        Read by this run, and its time.
    """

    jobs: int
    done: int
    failed: int
    now: int
    bytes_read: int
    seconds: float

    @property
    def remaining(self) -> float | None:
        """Seconds to go, if the rest take as long as those of this run did."""
        left = self.jobs - self.done - self.failed
        return self.seconds / self.now * left if self.now else None


def survey(
    refs: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    *,
    out: str | os.PathLike[str],
    revisions: Sequence[str] = (),
    gamma: float = 2.0,
    heads: bool = True,
    executor: Executor | None = None,
    jobs: int | None = None,
    retry: bool = False,
    on_progress: Callable[[SurveyProgress], None] | None = None,
) -> ScoreTable:
    """Score many checkpoints into one table; interrupted, the same call goes on where it stood.

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
        Any `concurrent.futures.Executor`; without one, processes of our own.
    jobs
        Number of these processes; as many as there are cores, at most 8.
    retry
        Whether checkpoints that have failed before are tried again.
    on_progress
        Called at the start and after every checkpoint.

    Returns
    -------
    ScoreTable
        As in ``scores.parquet``, in the order of the refs. Its metadata lists ``failed``
        checkpoints with their reasons, and ``duplicates``: checkpoints whose queries and keys are
        equal to the last bit.

    Raises
    ------
    RunError
        Another survey is running in ``out``, it was made with other settings, or the workers are
        gone.
    TableError
        The folder cannot be written.
    CheckpointError
        There is no such list or named set. Checkpoints that cannot be scored do not raise.

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
    names = [refs] if isinstance(refs, str | os.PathLike) else list(refs)
    for name in names:
        if not isinstance(name, str | os.PathLike):
            raise CheckpointError(
                f"a survey takes paths, hub ids and named sets, got {type(name).__name__}"
            )
    settings = Settings(float(gamma), heads, __version__, SCHEMA_VERSION)
    with open_record(Path(out), settings) as record:
        listing = partial(_revisions, record, retry)
        chosen = expand([os.fspath(name) for name in names], revisions, listing)
        open_jobs = [job for job in chosen if _is_open(record, job, retry)]
        work = partial(run_job, settings)
        running = (
            run_in_processes(work, _sound(open_jobs), jobs or default_jobs())
            if executor is None
            else run_on(executor, work, _sound(open_jobs))
        )
        with closing(running):
            _keep(record, chosen, open_jobs, running, on_progress)
        return _finish(record, chosen, settings)


def _revisions(record: Record, retry: bool, repository: str) -> list[str]:
    """A repository's revisions, listed once for the whole survey and again on ``retry``."""
    known = record.revisions(repository)
    if known is None or retry:
        known = hub_revisions(repository)
        record.note_revisions(repository, known)
    return known


def _is_open(record: Record, job: Job, retry: bool) -> bool:
    """Whether a job is to be done: new, changed on disk since, or failed and to be retried."""
    if job.key in record.failed:
        return retry
    if job.key not in record.done or not record.part(job.key).exists():
        return True
    try:
        files = files_of(job.location)
    except WqkError:
        return True
    return files is not None and files != record.done[job.key]["files"]


def _sound(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.problem is None]


def _keep(
    record: Record,
    chosen: Sequence[Job],
    open_jobs: Sequence[Job],
    running: Iterator[tuple[Job, Outcome]],
    on_progress: Callable[[SurveyProgress], None] | None,
) -> None:
    """Record every outcome as it comes."""
    start, bytes_read, now = time.perf_counter(), 0, 0
    still_open = {job.key for job in open_jobs}

    def tell() -> None:
        if on_progress is None:
            return
        over = [job.key for job in chosen if job.key not in still_open]
        failed = sum(key in record.failed for key in over)
        seconds = time.perf_counter() - start
        on_progress(
            SurveyProgress(len(chosen), len(over) - failed, failed, now, bytes_read, seconds)
        )

    tell()
    problems = ((job, failure(job.problem)) for job in open_jobs if job.problem)
    for outcomes in (problems, running):
        for job, outcome in outcomes:
            record.note_outcome(job, outcome)
            still_open.discard(job.key)
            now, bytes_read = now + 1, bytes_read + outcome.bytes_read
            tell()


def _finish(record: Record, chosen: Sequence[Job], settings: Settings) -> ScoreTable:
    """The whole table, from the parts alone, so that it does not matter when they were made."""
    done = [job for job in chosen if job.key in record.done]
    failed = [
        {"checkpoint": job.name, "revision": job.revision, "reason": line["reason"]}
        for job in chosen
        if (line := record.failed.get(job.key))
    ]
    duplicates = _duplicates(record, done)
    tables = [record.load_part(job.key) for job in done]
    metadata = {
        "wqk": settings.wqk,
        "gamma": settings.gamma,
        "folded_norms": False,
        "biases": False,
        "partial": {
            f"{job.name} {stack}": reason
            for job, table in zip(done, tables, strict=True)
            for stack, reason in table.metadata["partial"].items()
        },
        "inferred": list(dict.fromkeys(g for table in tables for g in table.metadata["inferred"])),
        "failed": failed,
        "duplicates": duplicates,
    }
    rows = join(tables).frame.rechunk() if tables else ScoreTable.from_rows([]).frame
    table = ScoreTable(rows, {"schema_version": SCHEMA_VERSION, **metadata})
    table.save(record.scores)
    finished: dict[str, Any] = {"done": len(done), "failed": len(failed), "duplicates": duplicates}
    record.note({"event": "finished", **finished})
    return table


def _duplicates(record: Record, done: Sequence[Job]) -> list[list[str]]:
    """Checkpoints with equal queries and keys, in groups."""
    groups: dict[str, list[str]] = {}
    for job in done:
        groups.setdefault(record.done[job.key]["weights"], []).append(job.title)
    return [titles for titles in groups.values() if len(titles) > 1]
