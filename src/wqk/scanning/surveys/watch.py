"""Score the checkpoints of a run as they appear, next to any trainer in any framework."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from functools import partial
from pathlib import Path, PurePath

import polars as pl

from wqk._version import __version__
from wqk.checkpoints import holds_weights, step_folders
from wqk.checkpoints.formats import exists
from wqk.errors import (
    HubError,
    OutputError,
    RunError,
    WqkError,
    all_lines,
    errors_about,
    shortened,
)
from wqk.model import open as open_model
from wqk.scanning.surveys.jobs import Options, files_of
from wqk.scanning.surveys.surveying import open_folder, survey
from wqk.storage.buckets import BucketFolder
from wqk.storage.references import is_bucket, is_url, redacted, step_in
from wqk.tables.growing import growing_table
from wqk.tables.schema import SCHEMA_VERSION
from wqk.tables.score_table import ScoreTable, read_table

# Folder of the watched scores, by default inside the folder of the run.
WATCHED = "wqk-scores"

# Seconds between looks: a month.
LONGEST_WAIT = 30 * 24 * 3600


def watch(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    until: int | None = None,
    every: float = 10.0,
    gamma: float = 2.0,
    heads: bool = True,
    live: bool = False,
    executor: Executor | None = None,
    on_scores: Callable[[ScoreTable], None] | None = None,
    on_wait: Callable[[str, str], None] | None = None,
    on_failure: Callable[[str, str], None] | None = None,
) -> Iterator[ScoreTable]:
    """Score each folder of a run that is named after a step once it is complete.

    Trainer's ``checkpoint-*``, torchtitan's ``step-*``, Megatron-LM's ``iter_*``; on disk or in a
    bucket.

    A checkpoint is complete when all its tensors exist and its files have not changed between two
    looks; a distributed one has its ``.metadata`` then. The scores are a survey's, in ``out``: an
    interruption loses nothing, the next call resumes, and checkpoints that the trainer has deleted
    since keep their rows. A checkpoint that cannot be scored, such as after a divergence, is among
    the table's ``failed`` ones, and is tried again once its files change. Neither a failing
    checkpoint nor a full disk ends the watch.

    Parameters
    ----------
    run
        The run's folder, or its address in a bucket (``s3://``, ``gs://``, ``az://``); it need not
        exist yet.
    out
        The survey's folder, with the table ``scores.parquet``.
    until
        Stop once a checkpoint of this step, or a later one, is scored or cannot be; otherwise
        never.
    every
        Seconds from one look to the next.
    gamma, heads, executor
        As for `wqk.survey`.
    live
        Show all steps as one table that grows in place: in a notebook in the output of the cell,
        on a terminal in the last lines.
    on_scores
        Called with the rows of every checkpoint that was scored.
    on_wait
        Called once for each incomplete checkpoint, with its folder and the reason; and at the
        start if there is no run yet.
    on_failure
        Called for each complete checkpoint that cannot be scored, with its folder and the reason;
        and with ``out``, if the scores cannot be written. The next look then tries again.

    Yields
    ------
    ScoreTable
        The whole table, each time that it has grown.

    Raises
    ------
    WqkError
        At once, where there is no run to watch: ``run`` is a file, a checkpoint or a survey's
        folder, or ``out`` cannot be written or holds another survey.
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
    scored = partial(survey, out=out, gamma=gamma, heads=heads, executor=executor, jobs=1)
    tables = _watched(place, Path(out), scored, until, every, on_scores, on_wait, on_failure)
    return _shown(tables) if live else tables


def _shown(tables: Iterator[ScoreTable]) -> Iterator[ScoreTable]:
    """Yield tables, and show each in place of the previous one."""
    with growing_table() as show_table:
        for table in tables:
            show_table(table)
            yield table


def _watched(
    run: str,
    out: Path,
    scored: Callable[..., ScoreTable],
    until: int | None,
    every: float,
    on_scores: Callable[[ScoreTable], None] | None,
    on_wait: Callable[[str, str], None] | None,
    on_failure: Callable[[str, str], None] | None,
) -> Iterator[ScoreTable]:
    """Look at a run, and yield the table each time that it has grown."""
    scores = out / "scores.parquet"
    looks: dict[str, str | None] = {}
    reported: set[tuple[str, str]] = set()
    done: set[str] = set()
    failed: dict[str, str | None] = {}  # and the files that they had
    if scores.exists():
        earlier = read_table(scores)
        done = set(earlier.frame["checkpoint"].unique())
        failed = {entry["checkpoint"]: None for entry in earlier.metadata.get("failed") or ()}

    def report(callback: Callable[[str, str], None] | None, folder: str, error: Exception) -> None:
        reason = str(error) if isinstance(error, WqkError) else f"unexpected {all_lines(error)}"
        if (folder, reason) not in reported and callback:
            callback(folder, reason)
        reported.add((folder, reason))

    if on_wait and not _exists(run):
        on_wait(run, "there is no such folder")
    while True:
        ready = []
        for folder in _steps_now(run, partial(report, on_wait)):
            if folder in done:
                continue
            try:
                files, before = files_of(folder), looks.get(folder)
                looks[folder] = files
                if files is None or files != before or files == failed.get(folder):
                    continue
                open_model(folder)
            except Exception as error:  # no checkpoint ends the watch of the next ones
                report(on_wait, folder, error)
                continue
            ready.append(folder)
        if ready:
            retry = not failed.keys().isdisjoint(ready)
            # What has failed and is gone cannot be tried again.
            kept = {folder for folder in failed if not retry or _exists(folder)}
            names = sorted({*done, *kept, *ready}, key=_step)
            try:
                table = scored(names, retry=retry)
            except OutputError as error:  # such as a full disk; the next look tries again
                advice = f"free space on the disk of {out}, or allow to write there"
                report(on_failure, str(out), OutputError(f"{error}; {advice}"))
                time.sleep(every)
                continue
            except Exception as error:
                report(on_failure, str(out), error)
                time.sleep(every)
                continue
            reasons = {entry["checkpoint"]: entry["reason"] for entry in table.metadata["failed"]}
            for folder in ready:
                rows = table.filter(pl.col("checkpoint") == folder)
                if on_scores and len(rows):
                    on_scores(rows)
                if on_failure and folder in reasons:
                    on_failure(folder, reasons[folder])
            done = set(names) - reasons.keys()
            failed = {folder: looks.get(folder) for folder in reasons}
            yield table
        tried = {*done, *(folder for folder, files in failed.items() if files is not None)}
        if until is not None and any(_step(folder) >= until for folder in tried):
            return
        time.sleep(every)


def _exists(folder: str) -> bool:
    """Return whether a folder exists on disk, or has anything in it in a bucket."""
    if is_bucket(folder):
        listed = BucketFolder(folder)
        return bool(listed.objects or listed.folders)
    return Path(folder).is_dir()


def _steps_now(run: str, report: Callable[[str, Exception], None]) -> list[str]:
    """Return the folders of a run; none, with a report, while its store does not answer."""
    try:
        return step_folders(run)
    except HubError as error:
        report(run, error)
        return []


def _require_run(run: str) -> None:
    """Check that a folder is, or may become, a run's."""
    path = Path(run)
    if not is_bucket(run) and exists(path) and not path.is_dir():
        raise RunError(f"{run}: is a file; expected the folder of a run")
    if path.is_dir() and (path / "manifest.jsonl").exists() and (path / "parts").is_dir():
        raise RunError(f"{run}: is the folder of a survey; expected that of a training run")
    with errors_about(run):
        is_checkpoint = _exists(run) and not step_folders(run) and holds_weights(run)
    if is_checkpoint:
        raise RunError(
            f"{run}: is one checkpoint, without folders named after steps; expected the folder "
            "around them, or score it every so many steps in the loop: wqk.Monitor(model, path)"
        )


def _require_output(out: Path, run: str, options: Options) -> None:
    """Check that scores can be written, and that a survey in the folder is one of this run.

    For a run that does not exist yet, nothing is created: its folder may contain that of scores.
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
    """Return the step that a folder is named after."""
    step = step_in(PurePath(folder).name)
    assert step is not None  # as `steps_of` found it by its step
    return step
