"""What a training run shows: its progress, and in the end what came out and what to do next."""

from __future__ import annotations

import os
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING

import polars as pl

from wqk.cli import display

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from wqk.runs.run import Run
    from wqk.training.progress import TrainingProgress
    from wqk.training.recipe import Recipe


@contextmanager
def progress(recipe: Recipe) -> Iterator[Callable[[TrainingProgress], None]]:
    """The recipe, and a bar on a terminal or a line for each held-out loss in a pipe.

    Of several processes only the first speaks. The recipe is shown when training has begun, so that
    a mistake is one line.
    """
    if not _is_first_process():
        yield lambda done: None
        return
    announced: list[str] = []
    with display.bar("train") as update:

        def show(done: TrainingProgress) -> None:
            if not announced:
                announced.append(summary(recipe))
                display.say(announced[0])
            text = f"{done.steps_done}/{done.steps}"
            if update:
                text = f"{text} steps, {state(done)}"
                update(total=done.steps, completed=done.steps_done, text=text)
            elif done.held_out_is_new:
                display.say(f"step {text}: {state(done)}")

        yield show


def summary(recipe: Recipe) -> str:
    """A recipe and the machine in one line."""
    import torch

    from wqk.training.hardware import available_precision, idle_gpus

    sizes = (
        [f"{recipe.layers} layers", f"width {recipe.width}", f"{recipe.heads} heads"]
        if recipe.config is None
        else [f"a model of type {recipe.config.get('model_type')}"]
    )
    penalty = [] if recipe.penalty == "none" else [f"penalty {recipe.penalty}"]
    gpu, idle = torch.cuda.is_available(), idle_gpus()
    threads, blocks = torch.get_num_threads(), recipe.batch * recipe.accumulation
    device = "a GPU" if gpu else f"{threads} {'thread' if threads == 1 else 'threads'}"
    return ", ".join(
        [
            f"{recipe.mode} ({recipe.objective})",
            *sizes,
            f"init {recipe.init}",
            *penalty,
            f"{recipe.steps:,} steps of {blocks} × {recipe.block} tokens",
            f"learning rate {recipe.learning_rate:g}",
            f"seed {recipe.seed}",
            f"{available_precision(recipe.precision)} on {device}",
            *([f"{idle} more GPUs idle: torchrun uses them"] if idle else []),
        ]
    )


def _is_first_process() -> bool:
    return os.environ.get("RANK", "0") == "0"  # as torchrun says it


def state(done: TrainingProgress) -> str:
    """Losses in nats, median symmetry and speed, where there are any yet.

    Examples
    --------
    >>> from wqk.training.progress import TrainingProgress
    >>> state(TrainingProgress(20, 100, 2.5, 2.625, 24_000.0, True, 0.31))
    'loss 2.500, held out 2.625, symmetry 0.31, 24,000 tokens/s'
    """
    losses = (("loss", done.loss), ("held out", done.held_out_loss))
    known = [f"{name} {value:.3f}" for name, value in losses if value is not None]
    if done.symmetry is not None:
        known.append(f"symmetry {done.symmetry:.2f}")
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
