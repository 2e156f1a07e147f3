"""Models at several steps, from tables of scores or folders of checkpoints, as runs for figures.

For these runs, only the scores are known, not the recipe or the losses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

import polars as pl

from wqk.checkpoints import step_folders
from wqk.errors import RunError
from wqk.reporting.summary import short_names
from wqk.scanning.scan import scan
from wqk.tables.run import Run
from wqk.tables.score_table import ScoreTable, join
from wqk_lab.runs.groups import ModeGroup, RunCell

MODES = ("encoder", "decoder")


@dataclass(frozen=True)
class FollowedRun(Run):
    """A model at several steps with known scores, stack and name, but without recipe and losses."""

    table: ScoreTable
    title: str

    @property
    def name(self) -> str:
        """Name of the model."""
        return self.title

    @property
    def scores(self) -> ScoreTable:
        """Scores of all steps."""
        return self.table


def followed_runs(table: ScoreTable, folder: Path | None = None) -> list[FollowedRun]:
    """Return a run for each model and stack that a table contains at several steps.

    Parameters
    ----------
    table
        Scores with a ``step`` on rows: of a monitor, a scan of a run, `wqk.watch`, or a survey.
    folder
        Folder of the monitor that wrote the table, if any.

    Examples
    --------
    >>> rows = [{"checkpoint": f"run/checkpoint-{step}", "step": step, "stack": "encoder"}
    ...         for step in (1, 2)]
    >>> [(run.name, run.recipe["mode"]) for run in followed_runs(ScoreTable.from_rows(rows))]
    [('run', 'encoder')]
    """
    frame = table.frame.filter(pl.col("step").is_not_null())
    models = [
        _model(checkpoint, step)
        for checkpoint, step in frame.select("checkpoint", "step").iter_rows()
    ]
    frame = frame.with_columns(pl.Series("model", models, pl.String()))
    titles = short_names(list(dict.fromkeys(models)))
    runs = []
    for (model, stack), rows in frame.group_by("model", "stack", maintain_order=True):
        if rows["step"].n_unique() > 1 or folder is not None:
            scores = ScoreTable(rows.drop("model"), table.metadata)
            settings = {"recipe": {"mode": str(stack)}}
            runs.append(
                FollowedRun(folder or Path(str(model)), settings, scores, titles[str(model)])
            )
    return runs


def _model(checkpoint: str | None, step: int) -> str:
    """Return a checkpoint's name without the step's folder."""
    path = PurePath(checkpoint or "unnamed")
    has_step = path.name.rstrip("0123456789") != path.name and path.name.endswith(str(step))
    return str(path.parent) if has_step and path.parent.name else str(path)


def scan_steps(run: Path) -> ScoreTable | None:
    """Score the layers of every ``checkpoint-*`` in a folder; None without such checkpoints."""
    folders = step_folders(str(run))
    if not folders:
        return None
    return join([scan(folder, heads=False) for folder in folders])


def followed_groups(runs: Sequence[Run], figure: str) -> list[ModeGroup]:
    """Group followed runs for a figure: an encoder with a decoder, or single models.

    Raises
    ------
    RunError
        The figure shows one pair, but several models have one stack; two models of one stack have
        the same name; a model is neither an encoder nor a decoder; or a table has no directionality
        by excess.
    """
    for run in runs:
        stacks = run.scores.frame["stack"]
        if stacks.is_null().any() or "unknown" in stacks:
            raise RunError(
                f"{figure}: the table of {run.name} has rows without a stack; expected encoder or "
                "decoder in the column stack"
            )
        if run.scores.frame["directionality_excess"].is_null().all():
            raise RunError(
                f"{figure}: the table of {run.name} has no directionality_excess; add a column "
                "of this name, the directionality by excess"
            )
    modes = [str(run.recipe["mode"]) for run in runs]
    if unknown := sorted({*modes} - {*MODES}):
        raise RunError(
            f"{figure} shows encoders and decoders of text; got the stacks {', '.join(unknown)}"
        )
    if len(set(modes)) == len(modes):
        in_order = sorted(runs, key=lambda run: MODES.index(run.recipe["mode"]))
        return [ModeGroup("", {run.recipe["mode"]: _cell(run) for run in in_order})]
    if figure == "fig3":
        names = ", ".join(f"{run.name} ({mode})" for run, mode in zip(runs, modes, strict=True))
        raise RunError(
            f"fig3 shows one encoder, one decoder, or one of each; got {names}: give fewer, or "
            "draw s3 or s4, which show all"
        )
    cells_by_name: dict[str, dict[str, RunCell]] = {}
    for run, mode in zip(runs, modes, strict=True):
        cells = cells_by_name.setdefault(run.name, {})
        if mode in cells:
            raise _same_name(run.name, mode)
        cells[mode] = _cell(run)
    groups = []
    for name, cells in cells_by_name.items():
        groups.append(ModeGroup(name, {mode: cells[mode] for mode in MODES if mode in cells}))
    return groups


def titles_of_runs(runs: Sequence[Run]) -> list[str]:
    """Return the name of each followed run; runs of one name also have the stack.

    Raises
    ------
    RunError
        Two models of one stack have the same name.
    """
    counts = Counter(run.name for run in runs)
    titles: list[str] = []
    for run in runs:
        mode = str(run.recipe["mode"])
        title = run.name if counts[run.name] == 1 else f"{run.name}, {mode}"
        if title in titles:
            raise _same_name(run.name, mode)
        titles.append(title)
    return titles


def _same_name(name: str, mode: str) -> RunError:
    """Return the error of two models that a figure cannot distinguish."""
    return RunError(f"two models have the name {name} and the stack {mode}; rename a folder")


def _cell(run: Run) -> RunCell:
    return RunCell((run,), {"mode": run.recipe["mode"]})


def only_followed(runs: Iterable[Run]) -> bool:
    """Return whether all runs are followed runs; `RunError` if only some are."""
    kinds = {isinstance(run, FollowedRun) for run in runs}
    if len(kinds) > 1:
        raise RunError(
            "runs of wqk lab train, whose recipes are known, and models that are known by their "
            "scores alone are not drawn together; give the one or the other"
        )
    return True in kinds
