"""Scoring the checkpoints of a run during training, for any trainer and framework."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path, PurePath

import polars as pl

from wqk._files import exists
from wqk._version import __version__
from wqk.checkpoints import holds_weights, step_folders
from wqk.checkpoints.files import DOWNLOAD
from wqk.errors import (
    HubError,
    OutputError,
    RunError,
    WqkError,
    all_lines,
    called_as,
    errors_about,
    shortened,
)
from wqk.model import open as open_model
from wqk.scanning.surveys.jobs import Options, files_of
from wqk.scanning.surveys.surveying import is_survey_folder, open_folder, survey
from wqk.storage.buckets import BucketFolder
from wqk.storage.references import is_bucket, is_url, redacted, step_in
from wqk.tables.growing import growing_table
from wqk.tables.schema import SCHEMA_VERSION
from wqk.tables.score_table import ScoreTable, read_table

# Folder of the watched scores, by default inside the folder of the run.
WATCHED = "wqk-scores"

# Seconds between the two looks of a watch that looks once, at most.
ONE_LOOK = 1.0

# Seconds between looks: a month.
LONGEST_WAIT = 30 * 24 * 3600


@called_as("wqk.watch(run, out=folder)")
def watch(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    until: int | None = None,
    once: bool = False,
    every: float = 10.0,
    gamma: float = 2.0,
    heads: bool = True,
    live: bool = False,
    executor: Executor | None = None,
    on_scores: Callable[[ScoreTable], None] | None = None,
    on_wait: Callable[[str, str], None] | None = None,
    on_failure: Callable[[str, str], None] | None = None,
) -> Iterator[ScoreTable]:
    """Score each step folder of a run as soon as the folder is complete.

    Step folders are ``checkpoint-*`` of Trainer, ``step-*`` of torchtitan and ``iter_*`` of
    Megatron-LM, on disk or in a bucket.

    A checkpoint is complete when all tensors exist and no file has changed between two looks; a
    distributed checkpoint also needs its ``.metadata``. The scores are a survey in ``out``: after
    an interruption the next call resumes, and the table keeps the rows of deleted checkpoints. The
    table's metadata lists failed checkpoints, for example after a divergence, under ``failed``. A
    failed checkpoint is scored again if its files change. Neither a failed checkpoint nor a full
    disk ends the watch.

    Parameters
    ----------
    run
        The run's folder, or its address in a bucket (``s3://``, ``gs://``, ``az://``); the folder
        may not exist yet.
    out
        The survey's folder, with the table ``scores.parquet``.
    until
        Stop once a checkpoint of this or a later step is scored or has failed; by default never
        stop.
    once
        Stop after the second look: score the steps that are complete now.
    every
        Seconds from one look to the next.
    gamma, heads, executor
        As for `wqk.survey`.
    live
        Show all steps as one table, updated in place: in the output of a notebook's cell, or in the
        last lines of a terminal.
    on_scores
        Called with the rows of every scored checkpoint.
    on_wait
        Called once for each incomplete checkpoint, with the folder and the reason; and at the start
        if the run does not exist yet.
    on_failure
        Called for each complete checkpoint that cannot be scored, with the folder and the reason;
        also with ``out``, if the scores cannot be written. The next look tries again.

    Yields
    ------
    ScoreTable
        The whole table, after each addition.

    Raises
    ------
    WqkError
        At the start: ``run`` is a file, a checkpoint or a survey's folder, or ``out`` cannot be
        written or contains another survey.
    """
    if not 0 < every <= LONGEST_WAIT:
        raise RunError(f"every={every:g}: expected seconds, more than 0 and at most {LONGEST_WAIT}")
    place = os.fspath(run)
    if is_bucket(place):
        place = redacted(place).rstrip("/")
    elif is_url(place) or redacted(place) != place:
        raise RunError(
            f"{redacted(place)}: is an address whose folders cannot be listed; expected the folder "
            "of a run, or its address in a bucket"
        )
    _require_run(place)
    _require_output(Path(out), place, Options(float(gamma), heads, __version__, SCHEMA_VERSION))
    watched = _Watch(
        place,
        Path(out),
        partial(survey, out=out, gamma=gamma, heads=heads, executor=executor, jobs=1),
        on_scores=on_scores,
        on_wait=on_wait,
        on_failure=on_failure,
    )
    tables = watched.tables(until, every, once)
    return _shown(tables) if live else tables


def _shown(tables: Iterator[ScoreTable]) -> Iterator[ScoreTable]:
    """Yield tables, and display each table in place of the previous table."""
    with growing_table() as show_table:
        for table in tables:
            show_table(table)
            yield table


class _Watch:
    """State of a watched run: files at the last look, scored checkpoints, failed checkpoints."""

    def __init__(
        self,
        run: str,
        out: Path,
        score: Callable[..., ScoreTable],
        *,
        on_scores: Callable[[ScoreTable], None] | None,
        on_wait: Callable[[str, str], None] | None,
        on_failure: Callable[[str, str], None] | None,
    ) -> None:
        self.run, self.out, self._score = run, out, score
        self._on_scores, self._on_wait, self._on_failure = on_scores, on_wait, on_failure
        self._reported: set[tuple[str, str]] = set()
        self._files_seen: dict[str, str | None] = {}  # by folder, at the last look
        self._done: set[str] = set()
        self._failed: dict[str, str | None] = {}  # files by folder; None for an earlier watch
        scores = out / "scores.parquet"
        if scores.exists():
            earlier = read_table(scores)
            self._done = set(earlier.frame["checkpoint"].unique())
            failures = earlier.metadata.get("failed") or ()
            self._failed = {entry["checkpoint"]: None for entry in failures}

    def tables(self, until: int | None, every: float, once: bool) -> Iterator[ScoreTable]:
        """Look at the run repeatedly, or twice; yield the table after each addition."""
        if self._on_wait and not _exists(self.run):
            self._on_wait(self.run, "there is no such folder")
        if once:
            self._complete_folders()
            time.sleep(min(every, ONE_LOOK))
            table = self._table_with(self._complete_folders())
            if table is not None:
                yield table
            return
        while True:
            ready = self._complete_folders()
            if ready:
                table = self._table_with(ready)
                if table is None:
                    time.sleep(every)
                    continue
                yield table
            if until is not None and self._has_reached(until):
                return
            time.sleep(every)

    def _complete_folders(self) -> list[str]:
        """Return complete folders that are not yet scored, or changed since a failure."""
        report = self._report_waiting
        ready = []
        for folder in _steps_now(self.run, report):
            if folder in self._done:
                continue
            try:
                if self._has_settled(folder):
                    open_model(folder)
                    ready.append(folder)
            except Exception as error:  # no checkpoint ends the watch of the next ones
                report(folder, error)
        return ready

    def _has_settled(self, folder: str) -> bool:
        """Return whether the files are unchanged since the last look, and new since a failure."""
        before = self._files_seen.get(folder)
        files = self._files_seen[folder] = files_of(folder)
        return files is not None and files == before and files != self._failed.get(folder)

    def _table_with(self, ready: list[str]) -> ScoreTable | None:
        """Score complete folders; report and return None if the scores cannot be written."""
        retry = not self._failed.keys().isdisjoint(ready)
        # What has failed and is gone cannot be tried again.
        kept = {folder for folder in self._failed if not retry or _exists(folder)}
        names = sorted({*self._done, *kept, *ready}, key=_step)
        out = str(self.out)
        try:
            table = self._score(names, retry=retry)
        except OutputError as error:  # such as a full disk; the next look tries again
            advice = f"free space on the disk of {out}, or allow to write there"
            self._report(self._on_failure, out, OutputError(f"{error}; {advice}"))
            return None
        except Exception as error:
            self._report(self._on_failure, out, error)
            return None
        reasons = {entry["checkpoint"]: entry["reason"] for entry in table.metadata["failed"]}
        for folder in ready:
            rows = table.filter(pl.col("checkpoint") == folder)
            if self._on_scores and len(rows):
                self._on_scores(rows)
            if self._on_failure and folder in reasons:
                self._on_failure(folder, reasons[folder])
        self._done = set(names) - reasons.keys()
        self._failed = {folder: self._files_seen.get(folder) for folder in reasons}
        return table

    def _has_reached(self, step: int) -> bool:
        """Return whether a checkpoint of this or a later step was scored or has failed."""
        tried = {folder for folder, files in self._failed.items() if files is not None}
        return any(_step(folder) >= step for folder in self._done | tried)

    def _report_waiting(self, folder: str, error: Exception) -> None:
        """Report an incomplete checkpoint, without advice on the file that a trainer may write."""
        if isinstance(error, WqkError):
            error = WqkError(str(error).removesuffix(f"; {DOWNLOAD}"))
        self._report(self._on_wait, folder, error)

    def _report(
        self, callback: Callable[[str, str], None] | None, folder: str, error: Exception
    ) -> None:
        """Call a function with an error, once for each folder and reason."""
        reason = f"unexpected {all_lines(error)}"
        if isinstance(error, WqkError):
            reason = str(error)
        if (folder, reason) not in self._reported and callback:
            callback(folder, reason)
        self._reported.add((folder, reason))


def _exists(folder: str) -> bool:
    """Return whether a folder exists on disk, or contains an object in a bucket."""
    if is_bucket(folder):
        listed = BucketFolder(folder)
        return bool(listed.objects or listed.folders)
    return Path(folder).is_dir()


def _steps_now(run: str, report: Callable[[str, Exception], None]) -> list[str]:
    """Return the folders of a run; report and return none if the store does not answer."""
    try:
        return step_folders(run)
    except HubError as error:
        report(run, error)
        return []


def _require_run(run: str) -> None:
    """Check that a folder can be the folder of a run."""
    path = Path(run)
    if not is_bucket(run) and exists(path) and not path.is_dir():
        raise RunError(f"{run}: is a file; expected the folder of a run")
    # A run's own folder may also contain a survey of the run.
    if is_survey_folder(path) and not step_folders(run):
        raise RunError(f"{run}: is the folder of a survey; expected that of a training run")
    with errors_about(run):
        is_checkpoint = _exists(run) and not step_folders(run) and holds_weights(run)
    if is_checkpoint:
        raise RunError(
            f"{run}: is one checkpoint, without folders named after steps; expected the folder "
            "around them, or score it every so many steps in the loop: wqk.Monitor(model, path)"
        )


def _require_output(out: Path, run: str, options: Options) -> None:
    """Check that scores can be written, and that a survey in the folder belongs to this run.

    If the run does not exist yet, no folder is created: the folder of scores may lie inside the
    run.
    """
    around = next((path for path in (out, *out.absolute().parents) if exists(path)), Path("/"))
    if not around.is_dir() or not os.access(around, os.W_OK | os.X_OK):
        reason = "it is read-only" if around.is_dir() else f"{around} is no folder"
        raise OutputError(f"{out}: cannot be written ({reason}); choose another folder with out=")
    if not out.exists() and not _exists(run):
        return
    with open_folder(out, options) as survey_folder:
        lines = (*survey_folder.done.values(), *survey_folder.failed.values())
        names = (str(line.get("checkpoint")) for line in lines)
        folder_of_run = run if is_bucket(run) else str(Path(run).absolute())
        stranger = next((name for name in names if _parent(name) != folder_of_run), None)
    if stranger is not None:
        raise RunError(
            f"{out}: holds a survey of other checkpoints, such as {shortened(stranger, 80)}; "
            "choose another folder with out="
        )


def _parent(folder: str) -> str:
    """Return the folder around a folder, on disk or in a bucket."""
    if is_bucket(folder):
        return folder.rpartition("/")[0]
    return str(Path(folder).absolute().parent)


def _step(folder: str) -> int:
    """Return the step in the name of a folder."""
    step = step_in(PurePath(folder).name)
    assert step is not None  # found by `steps_of`, so the name has a step
    return step
