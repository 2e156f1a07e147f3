"""The paper's tables, with one's own scores and losses beside the published ones."""

from __future__ import annotations

from statistics import mean, stdev
from typing import TYPE_CHECKING, Literal

from wqk.atlas import TrainingResult, paper_table
from wqk.errors import OutputError, RunError, TableError
from wqk.figures.curves import held_out_losses
from wqk.runs.groups import cells, differ_in_start
from wqk.runs.speedup import compare

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.atlas.paper_tables import Name
    from wqk.figures.sources import Sources
    from wqk.runs.groups import Cell
    from wqk.runs.run import Run

TEXTS: dict[str, Literal["markdown", "latex"]] = {".md": "markdown", ".tex": "latex"}


def table_text(name: Name, sources: Sources, ending: str = ".md") -> str:
    """Table 1, S2 or S3 as text, with what the sources say beside what is published.

    Parameters
    ----------
    name
        As for `wqk.atlas.paper_table`.
    sources
        Training runs for ``table1``, any scores for the others; none for the table as published.
    ending
        ``.md`` or ``.tex``.

    Raises
    ------
    TableError
        There are sources, but of the wrong kind; or the ending is another one.

    Examples
    --------
    >>> from wqk.figures.sources import Sources
    >>> table_text("table1", Sources()).splitlines()[2]
    '| Model | Loss | Speed-up |'
    """
    if ending not in TEXTS:
        reason = f"{name} is written as {' or '.join(TEXTS)}"
        raise OutputError(f"{reason}; got the ending {ending!r}", reason=reason)
    own = training_results(sources.runs) if name == "table1" else sources.scores
    if not own and (sources.runs or sources.table or sources.blocks):
        needed = "training runs" if name == "table1" else "scores (wqk survey, wqk scan --out)"
        raise TableError(f"{name} takes {needed} beside the published values; got none")
    return paper_table(name, TEXTS[ending], own or None)


def training_results(runs: Sequence[Run]) -> list[TrainingResult]:
    """Mean and standard deviation over seeds of encoders' last held-out loss, and their speed-up.

    Runs that have not come to their last step are left out. A speed-up is over the random start of
    the same recipe, where there is one; see `wqk.runs.speedup`.

    Raises
    ------
    RunError
        No run of an encoder is through.
    """
    done = [run for run in runs if run.recipe.get("mode") == "encoder" and _last_loss(run)]
    if runs and not done:
        raise RunError(f"table1 needs encoders at the end of training; got {len(runs)} other runs")
    found = cells(done)
    return [_result(cell, [c for c in found if _is_baseline(c, cell)]) for cell in found]


def _is_baseline(baseline: Cell, cell: Cell) -> bool:
    """Whether a cell starts at random, and another differs in its start but not in all seeds."""
    seeds = ({run.recipe.get("seed") for run in some.runs} for some in (baseline, cell))
    return (
        baseline is not cell
        and baseline.start == "random"
        and differ_in_start(baseline, cell)
        and bool(set.intersection(*seeds))
    )


def _result(cell: Cell, baselines: Sequence[Cell]) -> TrainingResult:
    saved = [compare(baseline, cell).spread("first") for baseline in baselines[:1]]
    losses = [loss for run in cell.runs for loss in _last_loss(run)]
    return TrainingResult(
        size=f"{cell.settings.get('layers')}-layer",
        dataset=str(cell.settings["corpus"]).capitalize(),
        initialization=cell.start,
        loss=mean(losses),
        loss_sd=stdev(losses) if len(losses) > 1 else None,
        speed_up=saved[0][0] if saved else None,
        speed_up_sd=saved[0][1] if saved else None,
    )


def _last_loss(run: Run) -> list[float]:
    """The held-out loss after the last step of the recipe, if the run has come so far."""
    return held_out_losses(run).filter(step=run.recipe.get("steps"))["value"].to_list()
