"""``wqk lab speedup``: how much sooner one initialization reaches another's final loss."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from wqk.cli.options import PATH, Number, json_output
from wqk_lab.training.declared import below, documented

if TYPE_CHECKING:
    from wqk_lab.runs.seeds import Paired
    from wqk_lab.runs.speedup import Field, StartSpeedUp


@documented
@click.command()
@click.argument("folders", nargs=-1, required=True, type=PATH, metavar="RUN RUN...")
@click.option("--loss", type=click.Choice(["held-out", "training"]), default="held-out")
@click.option("--smoothing", type=Number(min=0, max=1), default=0.05)
@below
@json_output
def speedup(
    folders: tuple[Path, ...],
    loss: Literal["held-out", "training"],
    smoothing: float,
    below: float | None,
    as_json: bool,
) -> None:
    """Compare runs with other initializations to the first run's, seed by seed.

    The speed-up is that of the paper's Table 1: the share of steps saved when the loss reaches the
    final loss of the baseline's run with the same seed. If the candidate's final loss is higher,
    the roles are swapped and the speed-up is negative. Between logged steps, losses are
    interpolated by a falling curve. Means have 95 % intervals, p is that of a paired t-test, and
    the detectable difference is the smallest that this number of seeds finds with power 80 %.

    \b
    Examples:
      wqk lab speedup runs/random runs/symmetric
      wqk lab speedup runs/random-* runs/symmetric-* runs/paired-*
      wqk lab speedup runs/random-* runs/published-* --below 3.0

    Parameters
    ----------
    loss
        Compare held-out losses, or training losses.
    smoothing
        Smooth losses over this many steps on either side, as a fraction of all steps.
    """
    from wqk.cli import display
    from wqk.tables.run import open_run
    from wqk_lab.runs.outcomes import is_uninformative
    from wqk_lab.runs.speedup import first_below, speedups
    from wqk_lab.training.frequencies import plateau_note

    runs = [open_run(folder) for folder in folders]
    comparisons = speedups(runs, loss=loss, smoothing=smoothing, level=below)
    value = {
        "loss": loss,
        "smoothing": smoothing,
        "comparisons": [*map(_as_object, comparisons)],
        "below": {run.name: first_below(run, below) for run in runs if below is not None},
    }
    display.show(value, *lines_of(comparisons, loss, smoothing, below), as_json=as_json)
    if any(is_uninformative(comparison.over_seeds("saved")) for comparison in comparisons):
        display.say("the speed-up of each seed, with mean, interval and p, is in --json")
    for run in runs:
        if note := plateau_note(run):
            display.say(f"{run.name}: {note}")


FIELDS: tuple[Field, ...] = ("difference", "saved")


def _as_object(comparison: StartSpeedUp) -> dict[str, Any]:
    """Return a comparison for JSON, with its means over seeds."""
    means = {f"{name}_over_seeds": asdict(comparison.over_seeds(name)) for name in FIELDS}
    later = comparison.steps_later
    return {**asdict(comparison), **means, "steps_later": later and asdict(later)}


def lines_of(
    comparisons: Sequence[StartSpeedUp], loss: str, smoothing: float, below: float | None = None
) -> Iterator[Any]:
    """Yield tables of losses and of steps, a line for each initialization, and explanations."""
    from rich.text import Text

    from wqk._console import counted
    from wqk.tables.sheet import Sheet, SheetColumn
    from wqk_lab.runs.outcomes import is_uninformative, saving, verdict
    from wqk_lab.runs.seeds import decimals, in_nats, interval

    start = SheetColumn("start", text=True, whole=True)
    headings = ("seeds", "loss difference", "p", "detectable")
    of_losses = Sheet([start, *map(SheetColumn, headings)])
    of_steps = Sheet([start, *map(SheetColumn, ("speed-up", "p", "detectable"))])
    of_level = Sheet([start, SheetColumn("" if below is None else f"below {below:g}")])
    for comparison in comparisons:
        difference, saved = (comparison.over_seeds(name) for name in FIELDS)
        detectable = "–"
        if difference.detectable is not None:
            detectable = f"{difference.detectable:.{decimals([difference.detectable])}f}"
        cells = [str(difference.count), in_nats(difference), _p_value(difference), detectable]
        of_losses.add(comparison.start, *cells)
        detectable = "–" if saved.detectable is None else f"{saved.detectable:.0%}"
        of_steps.add(comparison.start, interval(saved, "+.0%"), _p_value(saved), detectable)
        if below is not None:
            of_level.add(comparison.start, crossing(comparison))
    first = comparisons[0]
    yield of_losses
    yield of_steps
    if below is not None:
        yield of_level
    counts = sorted({len(comparison.runs) for comparison in comparisons})
    seeds = f"{counts[0]} to {counts[-1]} seeds" if len(counts) > 1 else counted(counts[0], "seed")
    note = (
        f"Against {first.baseline} at step {first.step:,} of {first.steps:,}, seed by seed "
        f"({seeds}). "
        f"Difference: {loss} loss in nats (smoothed over {smoothing:.0%} of the steps), mean and "
        "95 % interval; none for a single seed or equal differences. Speed-up: share of the steps "
        "saved until the loss, by a falling curve through it, reaches where the other ends. Each p "
        "and each detectable effect is that of the mean in its line."
    )
    if below is not None:
        note += f" Below {below:g}: steps later than the baseline."
    yield Text(note, style="dim")
    yield from map(verdict, comparisons)
    yield from (saving(c) for c in comparisons if is_uninformative(c.over_seeds("saved")))


def _p_value(difference: Paired) -> str:
    """Return the p-value as text; a dash without a test."""
    return "–" if difference.p is None else f"{difference.p:.2g}"


def crossing(comparison: StartSpeedUp) -> str:
    """Return, as text, how many steps later than the baseline the loss falls below the level.

    Examples
    --------
    >>> from wqk_lab.runs.speedup import SpeedUp, StartSpeedUp
    >>> runs = SpeedUp(1, 2, 1, 0, 300, 250), SpeedUp(2, 2, 1, 0, None, 400)
    >>> crossing(StartSpeedUp("paired", "random", 500, 500, runs))
    'by 500: 2 of 2, baseline 1 of 2'
    >>> crossing(StartSpeedUp("paired", "random", 500, 500, runs[:1]))
    '−50'
    """
    from wqk_lab.runs.seeds import interval

    if comparison.steps_later is not None:
        return interval(comparison.steps_later, "+.0f")
    runs = comparison.runs
    crossed = sum(run.below is not None for run in runs)
    baseline_crossed = sum(run.baseline_below is not None for run in runs)
    count = len(runs)
    return f"by {comparison.step:,}: {crossed} of {count}, baseline {baseline_crossed} of {count}"
