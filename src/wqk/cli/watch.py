"""``wqk watch``: the scores of a run's checkpoints as they appear."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk.cli.options import PATH, POSITIVE, REF, every_head, gamma

if TYPE_CHECKING:
    from wqk.tables.score_table import ScoreTable


@click.command()
@click.argument("run", metavar="DIR", type=REF)
@click.option("--out", type=PATH, metavar="DIR", help="[default: DIR/wqk-scores]")
@click.option("--until", type=click.IntRange(min=0), metavar="STEP", help="Stop after this step.")
@click.option(
    "--every", type=POSITIVE, default=10.0, metavar="SECONDS",
    help="Seconds between looks at the folder.",
)  # fmt: skip
@every_head
@gamma
def watch(run: str, out: Path | None, **options: Any) -> None:
    """Score each checkpoint of a training run as soon as it is complete.

    Works with any trainer that names folders after steps (checkpoint-100, step-100): it only
    looks at files, and reads only queries and keys. Ctrl-C ends it; the same command resumes.

    \b
    Example:
      wqk watch ./run --until 100000
    """
    from wqk.cli import display
    from wqk.scanning.surveys.watch import watch as watch_run
    from wqk.tables.rendering import HEADLINE, label

    folder = out or Path(run) / "wqk-scores"

    def tell(rows: ScoreTable) -> None:
        summary = rows.layers.summary().row(0, named=True)
        medians = {name: summary[f"{name}_median"] for name in HEADLINE}
        step = rows.frame["step"][0]
        texts = (f"{label(n)} {value:.3f}" for n, value in medians.items() if value is not None)
        click.echo(f"step {step}: {', '.join(texts)}")

    def wait(folder: str, reason: str) -> None:
        display.say(f"{folder} is not complete yet: {reason}")

    def fail(folder: str, reason: str) -> None:
        display.say(f"{folder} cannot be scored, and is tried again once it changes: {reason}")

    every = f"{options['every']:g} seconds"
    display.say(f"{run}: waiting for folders named after steps, with a look every {every}")
    try:
        for _ in watch_run(
            run, out=folder, on_scores=tell, on_wait=wait, on_failure=fail, **options
        ):
            pass
    except KeyboardInterrupt:
        written = folder / "scores.parquet"
        raise KeyboardInterrupt(
            f"the scores are in {written}" if written.exists() else "no checkpoint was scored"
        ) from None
