"""Score the checkpoints of a run as they appear, next to any trainer in any framework."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl

from wqk.checkpoints import steps_of
from wqk.checkpoints.references import step_in
from wqk.errors import WqkError
from wqk.model import open as open_model
from wqk.scanning.surveys.survey import survey
from wqk.scanning.surveys.work import files_of
from wqk.tables.score_table import read_table

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator
    from concurrent.futures import Executor

    from wqk.tables.score_table import ScoreTable


def watch(
    run: str | os.PathLike[str],
    *,
    out: str | os.PathLike[str],
    until: int | None = None,
    every: float = 10.0,
    gamma: float = 2.0,
    heads: bool = True,
    executor: Executor | None = None,
    on_scores: Callable[[ScoreTable], None] | None = None,
    on_wait: Callable[[str, str], None] | None = None,
) -> Iterator[ScoreTable]:
    """Score each folder of a run that is named after a step once it is complete.

    Trainer's ``checkpoint-*``, torchtitan's ``step-*``, Megatron-LM's ``iter_*``.

    A checkpoint is complete when all its tensors exist and its files have not changed between two
    looks. The scores are a survey's, in ``out``: an interruption loses nothing, the next call
    resumes, and checkpoints that the trainer has deleted since keep their rows.

    Parameters
    ----------
    run
        The run's folder; it need not exist yet.
    out
        The survey's folder, with the table ``scores.parquet``.
    until
        Stop once a checkpoint of this step, or a later one, is scored; otherwise never.
    every
        Seconds from one look to the next.
    gamma, heads, executor
        As for `wqk.survey`.
    on_scores
        Called with the rows of every checkpoint that was scored.
    on_wait
        Called once for each incomplete checkpoint, with its folder and the reason; and at the
        start if there is no run yet.

    Yields
    ------
    ScoreTable
        The whole table, each time that it has grown.

    Raises
    ------
    WqkError
        As for `wqk.survey`.
    """
    looks: dict[str, str | None] = {}
    reported: set[str] = set()
    scores = Path(out, "scores.parquet")
    done = set(read_table(scores).frame["checkpoint"].unique()) if scores.exists() else set()
    if on_wait and not Path(run).is_dir():
        on_wait(str(run), "there is no such folder")
    while True:
        ready = []
        for folder in _steps(Path(run)):
            if folder in done:
                continue
            try:
                files, before = files_of(folder), looks.get(folder)
                looks[folder] = files
                if files is None or files != before:
                    continue
                open_model(folder)
            except WqkError as error:
                if folder not in reported and on_wait:
                    on_wait(folder, str(error))
                reported.add(folder)
                continue
            ready.append(folder)
        if ready:
            names = sorted({*done, *ready}, key=_step)
            table = survey(names, out=out, gamma=gamma, heads=heads, executor=executor, jobs=1)
            for folder in ready:
                rows = table.filter(pl.col("checkpoint") == folder)
                if on_scores and len(rows):
                    on_scores(rows)
            done |= set(ready)
            yield table
        if until is not None and any(_step(folder) >= until for folder in done):
            return
        time.sleep(every)


def _steps(run: Path) -> list[str]:
    return [folder for folder in steps_of(str(run)) if folder != str(run)] if run.is_dir() else []


def _step(folder: str) -> int:
    step = step_in(Path(folder).name)
    assert step is not None  # as `steps_of` found it by its step
    return step
