"""What a training run shows: its progress, and in the end what came out and what to do next."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import polars as pl
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from wqk.cli import display

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wqk.runs.run import Run
    from wqk.training.progress import TrainingProgress
    from wqk.training.recipe import Recipe


@contextmanager
def progress(recipe: Recipe) -> Iterator[Callable[[TrainingProgress], None]]:
    """A bar on a terminal; in a pipe a line for each held-out loss; of one process only."""
    if not _is_first_process():
        yield lambda done: None
        return
    if not sys.stderr.isatty():
        yield _print_held_out
        return
    bar = Progress(
        TextColumn("{task.completed}/{task.total} steps"),
        BarColumn(),
        TextColumn("{task.fields[state]}"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("train", total=recipe.steps, state="")

        def update(done: TrainingProgress) -> None:
            bar.update(task, completed=done.steps_done, state=state(done))

        yield update


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"  # as torchrun says it


def _print_held_out(done: TrainingProgress) -> None:
    if done.held_out_is_new:
        display.say(f"step {done.steps_done}/{done.steps}: {state(done)}")


def state(done: TrainingProgress) -> str:
    """Losses in nats, and speed, as far as they are known.

    Examples
    --------
    >>> from wqk.training.progress import TrainingProgress
    >>> state(TrainingProgress(20, 100, 2.5, 2.625, 24_000.0, True))
    'loss 2.500, held out 2.625, 24,000 tokens/s'
    """
    losses = (("loss", done.loss), ("held out", done.held_out_loss))
    known = [f"{name} {value:.3f}" for name, value in losses if value is not None]
    if done.tokens_per_second is not None:
        known.append(f"{done.tokens_per_second:,.0f} tokens/s")
    return ", ".join(known)


def print_outcome(run: Run) -> None:
    """The end of a run in two lines; of several processes only the first speaks."""
    if not _is_first_process():
        return
    held_out = run.metrics.drop_nulls("held_out_loss")["held_out_loss"]
    last = run.metrics.filter(pl.col("seconds").is_not_null()).row(-1, named=True)
    took = timedelta(seconds=round(last["seconds"]))
    console = display.output()
    console.print(
        f"{run.folder}: {last['step']:,} steps, {last['tokens']:,} tokens in {took}; held-out loss "
        f"{held_out[0]:.3f} → {held_out[-1]:.3f} nats",
        soft_wrap=True,
    )
    console.print(
        f"next: wqk scan {run.folder}, or wqk figure updates {run.folder}", soft_wrap=True
    )
