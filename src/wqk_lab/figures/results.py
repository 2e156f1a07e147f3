"""The paper's tables, with the user's scores and losses next to the published values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from wqk._console import last_part
from wqk.errors import OutputError, RunError, TableError
from wqk.tables.run import Run
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas import TrainingResult, paper_table, summarize
from wqk_lab.atlas.paper_tables import TableName
from wqk_lab.figures.curves import held_out_losses
from wqk_lab.runs.groups import START, RunCell, cells
from wqk_lab.runs.seeds import Paired, paired
from wqk_lab.runs.speedup import compare

if TYPE_CHECKING:
    from wqk_lab.figures.sources import Sources

TEXTS: dict[str, Literal["markdown", "latex"]] = {".md": "markdown", ".tex": "latex"}


def table_text(
    name: TableName, sources: Sources, ending: str = ".md", *, only_own: bool = False
) -> str:
    """Return Table 1, S2 or S3 as text, with results of the sources next to the published values.

    Parameters
    ----------
    name
        As for `wqk_lab.atlas.paper_table`.
    sources
        Training runs for ``table1``, any scores for the other tables; None for the published table.
    ending
        ``.md`` or ``.tex``.
    only_own
        Whether Tables S2 and S3 have only the rows with results of the sources.

    Raises
    ------
    TableError
        The sources are of the wrong kind, or the ending is unknown.

    Examples
    --------
    >>> from wqk_lab.figures.sources import Sources
    >>> table_text("table1", Sources()).splitlines()[2]
    '| Model | Loss | Speed-up |'
    """
    if ending not in TEXTS:
        reason = f"{name} is written as {' or '.join(TEXTS)}"
        raise OutputError(f"{reason}; got the ending {ending!r}", reason=reason)
    own_results = training_results(sources.runs) if name == "table1" else sources.scores
    if not own_results and (sources.runs or sources.table or sources.blocks):
        needed = "scores (wqk survey, wqk scan --out)"
        if name == "table1":
            needed = "training runs"
        raise TableError(f"{name} takes {needed} next to the published values; got none")
    return paper_table(name, TEXTS[ending], own_results or None, only_own=only_own)


def not_comparable(table: ScoreTable | None) -> list[str]:
    """Return the names of the checkpoints that Tables S2 and S3 leave out.

    These checkpoints have no scores of plain self-attention, as the published scores are.

    Examples
    --------
    >>> import wqk
    >>> not_comparable(wqk.scan(wqk.demo_model("encoder")))
    []
    """
    if table is None:
        return []
    comparable = set(summarize(table)["model"])
    names = table.frame["checkpoint"].unique(maintain_order=True)
    return [last_part(name) for name in names if name not in comparable]


def training_results(runs: Sequence[Run]) -> list[TrainingResult]:
    """Return encoders' loss and speed-up at their last step, by size, corpus and start.

    Speed-ups are relative to the random start of the same recipe, if any (`wqk_lab.runs.speedup`).

    Raises
    ------
    RunError
        No run is an encoder with a held-out loss, runs of a cell end at different steps, or two
        cells have one name.
    """
    encoders = [run for run in runs if run.recipe.get("mode") == "encoder" and _last(run)[0]]
    if runs and not encoders:
        raise RunError(f"table1 needs trained encoders; got {len(runs)} other runs")
    grouped = cells(encoders)
    named: dict[tuple[str, ...], RunCell] = {}
    results = []
    for cell in grouped:
        baselines = [baseline for baseline in grouped if _is_baseline(baseline, cell)]
        result = _result(cell, baselines[0] if baselines else None)
        name = (result.size, result.dataset, result.initialization)
        if namesake := named.get(name):
            fields = dict.fromkeys([*namesake.shared, *cell.shared])
            differing = [f for f in fields if namesake.shared.get(f) != cell.shared.get(f)]
            raise RunError(
                f"table1: {', '.join(name)} are two cells, {cell.runs[0].folder} and "
                f"{namesake.runs[0].folder}, which differ in {', '.join(differing)}; give the runs "
                "of one"
            )
        named[name] = cell
        results.append(result)
    return results


def _is_baseline(baseline: RunCell, cell: RunCell) -> bool:
    """Return whether a cell starts at random, and differs from another cell only in the start.

    The two cells have at least one seed in common.
    """
    return (
        baseline is not cell
        and baseline.start == "random"
        and baseline.without(START) == cell.without(START)
        and not _seeds(baseline).isdisjoint(_seeds(cell))
    )


def _seeds(cell: RunCell) -> set[Any]:
    """Return the seeds of a cell's runs."""
    return {run.recipe.get("seed") for run in cell.runs}


def _result(cell: RunCell, baseline: RunCell | None) -> TrainingResult:
    steps = sorted({_last(run)[0] for run in cell.runs})
    if len(steps) > 1:
        raise RunError(
            f"table1: the runs of {cell.start} end at the steps {', '.join(map(str, steps))}"
            "; resume the shorter ones, or leave them out"
        )
    loss = paired([_last(run)[1] for run in cell.runs])
    saved = compare(baseline, cell).over_seeds("saved") if baseline else None
    step, shared = steps[0], cell.shared
    model = "own model" if shared.get("config") else "{layers} layers of width {width}"
    batch = shared.get("batch", 0) * shared.get("accumulation", 1)
    until = "" if step == shared.get("steps") else f" of {shared.get('steps'):,}"
    return TrainingResult(
        size=f"{model.format_map({**shared})}, {step:,}{until} steps of "
        f"{batch} × {shared.get('block')} tokens",
        dataset=str(shared["corpus"]),
        initialization=cell.start,
        loss=loss.mean,
        loss_interval=_interval(loss),
        speed_up=saved.mean if saved else None,
        speed_up_interval=_interval(saved),
        seeds=loss.count,
    )


def _interval(result: Paired | None) -> tuple[float, float] | None:
    if result is None or result.low is None or result.high is None:
        return None
    return result.low, result.high


def _last(run: Run) -> tuple[int, float]:
    """Return step and value of a run's last held-out loss; step 0 without a loss."""
    losses = held_out_losses(run)
    if losses.is_empty():
        return 0, 0.0
    return int(losses["step"][-1]), float(losses["value"][-1])
