"""Folders of training runs; a folder can be read while the run continues.

::

    RUN/run.json         recipe, model configuration, environment, corpus; written once
    RUN/metrics.jsonl    losses, one JSON object a line, appended
    RUN/scores.jsonl     a score table with a `step` on every row, appended
    RUN/updates.jsonl    a score table of the changes since the previous scores, appended
    RUN/clips.jsonl      a line for each head that was clipped, if any was
    RUN/checkpoint-N/    the model after N steps, and the state that a resumed run needs; the
                         folder gets its name when it is complete

After a killed run, only the last line may be incomplete; this line is ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from wqk._files import json_line, read_lines, require_file, write_atomically
from wqk.errors import RunError, first_line
from wqk.tables.schema import types
from wqk.tables.score_table import ScoreTable
from wqk.tables.writers import from_objects

SETTINGS, METRICS, SCORES, UPDATES = "run.json", "metrics.jsonl", "scores.jsonl", "updates.jsonl"
CLIPS = "clips.jsonl"

METRICS_SCHEMA: dict[str, pl.DataType] = {
    "step": pl.Int64(),
    "loss": pl.Float64(),
    "penalty": pl.Float64(),
    "held_out_loss": pl.Float64(),
    "learning_rate": pl.Float64(),
    "tokens": pl.Int64(),
    "seconds": pl.Float64(),
}


@dataclass(frozen=True)
class Run:
    """Folder of one training run; files are read on first access and cached."""

    folder: Path
    #: What ``run.json`` holds: ``recipe``, ``model``, ``corpus``, ``environment``.
    settings: Mapping[str, Any] = field(repr=False)

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Settings that determine the numbers, as written by `wqk_lab.training.recipe.Recipe`."""
        return self._setting("recipe")

    @property
    def corpus(self) -> Mapping[str, Any]:
        """The token store of the run: ``folder``, ``fingerprint``, ``unit`` and others."""
        return self._setting("corpus")

    def _setting(self, name: str) -> Mapping[str, Any]:
        """Return a part of the settings; `RunError` if the part is missing."""
        part = self.settings.get(name)
        if not isinstance(part, dict):
            raise RunError(f"{self.folder / SETTINGS}: expected an object {name!r}, got {part!r}")
        return part

    @cached_property
    def metrics(self) -> pl.DataFrame:
        """One row for each logged step, in order, with the columns of `METRICS_SCHEMA`.

        ``loss`` is the mean in nats per predicted token since the previous row, without the
        ``penalty``; ``held_out_loss`` is null at steps without a measurement; ``tokens`` and
        ``seconds`` (of training) are totals.

        Raises
        ------
        RunError
            A line before the last is damaged.
        """
        path = self.folder / METRICS
        try:
            lines = pl.DataFrame(read_lines(path), schema=METRICS_SCHEMA)
        except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
            reason = first_line(error)
            raise RunError(f"{path}: does not hold a run's metrics ({reason})") from None
        merged = [pl.col(name).drop_nulls().last() for name in METRICS_SCHEMA if name != "step"]
        return lines.group_by("step").agg(merged).sort("step")

    @cached_property
    def scores(self) -> ScoreTable:
        """Scores during training; empty if none were recorded."""
        return read_table(self.folder / SCORES)

    @cached_property
    def updates(self) -> ScoreTable:
        """Scores of each form's change since the previous scores; ``step`` is the later step."""
        return read_table(self.folder / UPDATES)

    @cached_property
    def checkpoints(self) -> list[tuple[int, Path]]:
        """Steps and folders of the complete checkpoints, earliest first."""
        return checkpoints_in(self.folder)


def open_run(folder: str | PathLike[str]) -> Run:
    """Open the run in a folder, finished or not.

    Raises
    ------
    RunError
        The folder contains no run, or its ``run.json`` cannot be read.

    Examples
    --------
    >>> from tempfile import mkdtemp
    >>> run = create_run(mkdtemp() + "/first", {"recipe": {"steps": 2}})
    >>> from wqk._files import append_lines
    >>> _ = append_lines(run.folder / METRICS, {"step": 1, "loss": 2.5, "seconds": 0.1})
    >>> _ = append_lines(run.folder / METRICS, {"step": 1, "held_out_loss": 2.75})
    >>> again = open_run(run.folder)
    >>> again.name, again.recipe["steps"], again.checkpoints
    ('first', 2, [])
    >>> again.metrics.select("step", "loss", "held_out_loss").rows()
    [(1, 2.5, 2.75)]
    """
    folder = Path(folder)
    path = folder / SETTINGS
    require_file(path, RunError)
    try:
        # Halves of surrogate pairs, which no file or terminal takes, become question marks.
        text = json.dumps(json.loads(path.read_bytes()), ensure_ascii=False)
        settings = json.loads(text.encode("utf-8", "replace"))
    except FileNotFoundError:
        raise RunError(f"{folder}: not a run's folder; expected a {SETTINGS} in it") from None
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError):
        settings = None
    if not isinstance(settings, dict):
        raise RunError(f"{path}: expected one JSON object with the run's settings")
    return Run(folder, settings)


def create_run(folder: str | PathLike[str], settings: Mapping[str, Any]) -> Run:
    """Create a run's folder with its settings; `RunError` if the folder already contains a run."""
    folder = Path(folder)
    require_no_run(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{folder}: cannot be created ({error.strerror})") from None
    content = json.dumps(dict(settings), indent=2, ensure_ascii=False) + "\n"
    write_atomically(folder / SETTINGS, content.encode("utf-8", "replace"))
    return Run(folder, dict(settings))


def require_no_run(folder: Path) -> None:
    """Raise `RunError` if a folder already contains a run; the message says what to do with it."""
    if not (folder / SETTINGS).exists():
        return
    steps = open_run(folder).recipe.get("steps")
    saved = checkpoints_in(folder)
    if saved and saved[-1][0] == steps:
        raise RunError(
            f"{folder}: already contains a run, which is finished (step {steps}); choose another "
            f"folder (--from {folder} -o OTHER trains its weights further)"
        )
    raise RunError(f"{folder}: already contains a run; resume it, or choose another folder")


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Return the steps and folders of a run's complete checkpoints, earliest first."""
    checkpoints = []
    for path in folder.iterdir():
        match = re.fullmatch(r"checkpoint-(\d+)", path.name)
        if match and path.is_dir():
            checkpoints.append((int(match[1]), path))
    return sorted(checkpoints)


def drop_after(path: Path, step: int) -> None:
    """Remove lines of later steps, and an incomplete last line, from a file of JSON lines."""
    if not path.exists():
        return
    lines = read_lines(path)
    for name, kinds in (("step", int), ("seconds", (int, float))):
        if any(not isinstance(line.get(name, 0), kinds) for line in lines):
            raise RunError(f"{path}: expected a number as {name!r} of every line")
    kept_lines = [json_line(line) for line in lines if line.get("step", 0) <= step]
    write_atomically(path, *kept_lines)


def read_table(path: Path) -> ScoreTable:
    """Read a score table that is still being written, without an incomplete last line.

    Raises
    ------
    RunError
        A complete line is not a row of a score table, or the file cannot be read.
    """
    column_types = types((*ScoreTable.declared, *ScoreTable.further))
    try:
        return ScoreTable(*from_objects(read_lines(path), column_types))
    except (TypeError, ValueError, OverflowError, pl.exceptions.PolarsError) as error:
        reason = first_line(error)
        raise RunError(f"{path}: does not hold a run's scores ({reason})") from None
