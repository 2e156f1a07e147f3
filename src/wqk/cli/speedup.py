"""``wqk speedup``: how much sooner one start reaches what another ends at."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from wqk.cli.options import json_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.runs.speedup import StartSpeedUp


@click.command()
@click.argument(
    "folders", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="RUN RUN..."
)
@click.option(
    "--loss",
    type=click.Choice(["held-out", "training"]),
    default="held-out",
    show_default=True,
    help="Of held-out text, or of training.",
)
@click.option(
    "--smoothing",
    type=click.FloatRange(min=0, max=1),
    default=0.05,
    show_default=True,
    help="Width of the trailing mean over the loss, as a share of all steps.",
)
@json_output
def speedup(
    folders: tuple[Path, ...],
    loss: Literal["held-out", "training"],
    smoothing: float,
    as_json: bool,
) -> None:
    """Compare runs that start differently with the start of the first one.

    The speed-up is the paper's (Table 1): the share of the steps saved when the loss first reaches
    the final loss of the baseline's run with the same seed, or 0 % if it never does. Beside it, the
    share saved until the loss stays there.

    \b
    Examples:
      wqk speedup runs/random runs/symmetric
      wqk speedup runs/random-* runs/symmetric-* runs/paired-*
    """
    from wqk.cli import display
    from wqk.runs.run import open_run
    from wqk.runs.speedup import speedups

    comparisons = speedups([open_run(f) for f in folders], loss=loss, smoothing=smoothing)
    if as_json:
        display.print_object(
            {
                "loss": loss,
                "smoothing": smoothing,
                "comparisons": [asdict(comparison) for comparison in comparisons],
            }
        )
        return
    _print(comparisons, loss, smoothing)


def _print(comparisons: Sequence[StartSpeedUp], loss: str, smoothing: float) -> None:
    """One line for each start."""
    from rich.table import Table

    from wqk.cli import display

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("start")
    for heading in ("seeds", "loss", "baseline", "speed-up", "lasting"):
        table.add_column(heading, justify="right")
    for comparison in comparisons:
        table.add_row(
            comparison.start,
            str(len(comparison.runs)),
            _number(*comparison.spread("loss")),
            _number(*comparison.spread("baseline_loss")),
            *(_percent(*comparison.spread(name)) for name in ("first", "lasting")),
        )
    console = display.output()
    console.print(table)
    console.print(
        f"Against {comparisons[0].baseline}, seed by seed; mean ± standard deviation. Speed-up: "
        f"share of the steps saved when the {loss} loss (trailing mean over {smoothing:.0%} of the "
        "steps) first reaches the baseline's last; lasting: until it stays there.",
        style="dim",
    )


def _number(mean: float, deviation: float | None) -> str:
    return f"{mean:.3f}" if deviation is None else f"{mean:.3f} ± {deviation:.3f}"


def _percent(mean: float, deviation: float | None) -> str:
    return f"{mean:.0%}" if deviation is None else f"{100 * mean:.0f} ± {100 * deviation:.0f} %"
