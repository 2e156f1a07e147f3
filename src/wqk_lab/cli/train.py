"""``wqk lab train``: an encoder or a decoder, from a token store to a run's directory."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from wqk._console import counted
from wqk._machine import usable_cores
from wqk.cli.options import COUNT, FOLDER_PATH, PATH
from wqk_lab.training.declared import documented, options_of, threads, use_threads
from wqk_lab.training.recipe import PRESETS, SIZES, Recipe, make_recipe

if TYPE_CHECKING:
    from wqk.tables.run import Run
    from wqk_lab.training.progress import TrainingProgress

# Fields of the recipe whose options do not have the form `--name VALUE`.
SPECIAL = ("preset", "config", "penalty", "penalty_weight", "parent")

# Seconds of a command from which on its share of other work than training is worth advice.
LONG = 60


def _presets(name: str) -> str:
    """Return a field's values in the presets, at the presets' own sizes."""
    fast = getattr(make_recipe("fast"), name)
    paper = getattr(make_recipe("paper"), name)
    if fast is None:
        return ""
    if fast == paper:
        return f"  [default: {fast}]"
    return f"  [default: {fast}; paper: {paper}]"


def _penalty(text: str) -> dict[str, Any]:
    kind, _, weight = text.partition("=")
    try:
        return {"penalty": kind, "penalty_weight": float(weight)}
    except ValueError:
        raise click.BadParameter(
            f"expected a kind and a weight such as symmetric=0.1, got {text!r}"
        ) from None


@documented
@click.command()
@click.option("--preset", type=click.Choice(list(PRESETS)))
@click.option("--size", type=click.Choice(list(SIZES)))
@click.option("--corpus", type=PATH, metavar="DIR")
@click.option("-o", "--out", type=FOLDER_PATH, required=True, metavar="RUN")
@click.option("--from", "parent", type=FOLDER_PATH, metavar="RUN")
@click.option("--resume", is_flag=True)
@click.option("--stop", type=COUNT, metavar="STEP")
@click.option(
    "--config", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="FILE.json"
)
@click.option("--penalty", type=_penalty, metavar="KIND=WEIGHT")
@options_of(Recipe, omit=SPECIAL, defaults=_presets)
@threads
@click.option("--report-to", multiple=True, metavar="LOGGER")
def train(
    preset: str | None,
    size: str | None,
    corpus: Path | None,
    out: Path,
    parent: Path | None,
    resume: bool,
    stop: int | None,
    config: Path | None,
    penalty: dict[str, Any] | None,
    report_to: tuple[str, ...],
    **chosen: Any,
) -> None:
    """Train a small encoder or decoder and record losses, scores and checkpoints in RUN.

    Unset options come from the preset. Defaults are shown for each preset's own size; in fast, the
    learning rate and the initial weights depend on the width, intervals and warmup on the
    steps. --resume continues an interrupted run; any options must equal its original ones, and
    without --threads it takes the run's own number of threads, if the machine has as many.
    --from starts from the weights of a finished run; --objective alone brings its own attention
    (masked: full; causal: to earlier tokens), and with --mode both can be combined freely. For
    several GPUs or processes: torchrun --nproc-per-node N -m wqk lab train.
    The example of width 64 is a recipe for characters that learns within a minute or two.

    \b
    Examples:
      wqk lab train --corpus wikipedia -o runs/encoder
      wqk lab train --mode decoder --steps 4000 --corpus wikipedia -o runs/decoder
      wqk lab train --preset paper --size mini --init symmetric --corpus wikipedia -o runs/symmetric
      wqk lab train --layers 2 --width 64 --heads 4 --block 32 --batch 16 --steps 3000 \\
          --learning-rate 0.005 --corpus characters -o runs/small
      wqk lab train --resume -o runs/encoder
      wqk lab train --from runs/decoder --objective masked -o runs/converted

    Parameters
    ----------
    preset
        Source of all other defaults: fast (default), or paper.
    size
        Layers, width and heads.
    corpus
        Token store to train on, written by wqk lab corpus.
    out
        Folder of the run.
    parent
        Continue this finished run, whose recipe is the default of all options, in a new one.
    resume
        Resume from the run's last checkpoint.
    stop
        Stop after this step; --resume continues. The schedule remains that of all steps.
    config
        A transformers configuration instead of size and norm.
    penalty
        Add a penalty to the loss: symmetric=0.1 or skew=0.1.
    report_to
        An accelerate tracker, such as tensorboard; repeatable.
    """
    from wqk.tables.run import SETTINGS, open_run
    from wqk_lab.training.conversion import continued, open_parent
    from wqk_lab.training.models import read_configuration
    from wqk_lab.training.training import train as train_model

    if parent is not None and resume:
        raise click.UsageError("--resume knows what a run continues; leave out --from.")
    if corpus is None and not resume and parent is None:
        raise click.UsageError("Missing option '--corpus': a token store made by wqk lab corpus.")
    if corpus is not None and corpus.is_file():
        raise click.UsageError(
            f"--corpus {corpus} is a file; expected a token store. "
            f"wqk lab corpus {corpus} -o DIR makes one of a text"
        )
    overrides = {name: value for name, value in chosen.items() if value is not None}
    overrides |= penalty or {}
    if config:
        overrides["config"] = read_configuration(config)
    trained_before = 0.0
    if resume:
        begun_run = open_run(out)
        _take_threads_of(begun_run)
        trained_before = _training_seconds(begun_run)
        before = Recipe.from_json(begun_run.recipe)
        named: dict[str, Any] = {"preset": preset} if preset else {}
        recipe = replace(before, **(named | SIZES.get(size or "", {}) | overrides))
    elif parent is not None:
        sizes = {"preset": preset} | SIZES.get(size or "", {})
        recipe = continued(open_parent(parent).recipe, parent.resolve().name, sizes | overrides)
    else:
        recipe = make_recipe(preset or "fast", size=size, **overrides)
    is_first = os.environ.get("RANK", "0") == "0"  # number of the process, set by torchrun
    if not resume and is_default_threads() and recipe.fits_one_thread:
        use_threads(1, "training")
    stopwatch = _Stopwatch()
    with _progress(recipe, stopwatch) if is_first else nullcontext() as on_progress:
        try:
            run = train_model(
                recipe,
                corpus,
                out,
                parent=parent,
                resume=resume,
                stop=stop,
                report_to=report_to,
                on_progress=on_progress,
            )
        except KeyboardInterrupt:
            next_step = "no run was begun"
            if (out / SETTINGS).exists():
                next_step = f"wqk lab train --resume -o {out} resumes it"
            raise KeyboardInterrupt(next_step) from None
    if is_first:
        _print_outcome(run, stopwatch, trained_before)


def is_default_threads() -> bool:
    """Return whether the command was given no number of threads."""
    source = click.get_current_context().get_parameter_source("threads")
    return source is ParameterSource.DEFAULT


def _take_threads_of(run: Run) -> None:
    """Use the run's original number of threads, so that sums keep their order.

    The number does not change if --threads was given, or if there are fewer processors.
    """
    if not is_default_threads():
        return
    environment = run.settings.get("environment")
    number = environment.get("threads") if isinstance(environment, dict) else None
    if type(number) is int and 0 < number <= usable_cores():
        use_threads(number, "training")


class _Stopwatch:
    """Time since the beginning of a command, and whether the command has trained."""

    def __init__(self) -> None:
        self._started = time.perf_counter()
        self.has_trained = False

    @property
    def elapsed(self) -> timedelta:
        """Time since the beginning, in whole seconds."""
        return timedelta(seconds=round(time.perf_counter() - self._started))


@contextmanager
def _progress(
    recipe: Recipe, stopwatch: _Stopwatch
) -> Iterator[Callable[[TrainingProgress], None]]:
    """Yield the recipe, then a bar on a terminal, or a line for each held-out loss in a pipe.

    The recipe is shown after training has begun, so that an error before is a single line.
    """
    from wqk.cli import display

    # Read before training, which is not part of the load of other programs.
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0

    def changes(done: TrainingProgress) -> dict[str, Any]:
        text = f"{done.steps_done}/{done.steps} steps, {state(done)}"
        return {"total": done.steps, "completed": done.steps_done, "text": text}

    with display.bar("train", changes) as update:

        def show(done: TrainingProgress) -> None:
            if not stopwatch.has_trained:
                display.say(summary(recipe))
                if advice := _advice_on_threads(load):
                    display.say(advice)
                stopwatch.has_trained = True
            if update:
                update(done)
            elif done.held_out_is_new:
                display.say(f"step {done.steps_done}/{done.steps}: {state(done)}")

        yield show


def summary(recipe: Recipe) -> str:
    """Return a recipe and the machine in one line."""
    import torch

    from wqk_lab.training.models import available_precision

    parts = [f"{recipe.mode} ({recipe.objective})"]
    if recipe.config is None:
        layers = counted(recipe.layers or 0, "layer")
        heads = counted(recipe.heads or 0, "head")
        parts += [layers, f"width {recipe.width}", heads]
    else:
        parts.append(f"a model of type {recipe.config.get('model_type')}")
    if recipe.parent is None:
        parts.append(f"init {recipe.init}")
    else:
        parts.append(f"from {recipe.parent['run']}")
    if recipe.penalty != "none":
        parts.append(f"penalty {recipe.penalty}")
    steps = counted(recipe.steps, "step")
    blocks = recipe.batch * recipe.accumulation
    device = counted(torch.get_num_threads(), "thread")
    if torch.cuda.is_available():
        device = "a GPU"
    parts += [
        f"{steps} of {blocks} × {recipe.block} tokens",
        f"learning rate {recipe.learning_rate:g}",
        f"seed {recipe.seed}",
        f"{available_precision(recipe.precision)} on {device}",
    ]
    idle = max(0, torch.cuda.device_count() - 1)
    if idle and "WORLD_SIZE" not in os.environ:
        parts.append(f"{counted(idle, 'more GPU')} idle: torchrun uses all")
    return ", ".join(parts)


def state(done: TrainingProgress) -> str:
    """Return losses in nats, median symmetry and speed, if known.

    Examples
    --------
    >>> from wqk_lab.training.progress import TrainingProgress
    >>> state(TrainingProgress(20, 100, 2.5, 2.625, 24_000.0, True, 0.31))
    'loss 2.500, held out 2.625, symmetry 0.31, 24,000 tokens/s'
    """
    losses = (("loss", done.loss), ("held out", done.held_out_loss))
    losses_shown = [f"{name} {value:.3f}" for name, value in losses if value is not None]
    if done.symmetry is not None:
        losses_shown.append(f"symmetry {done.symmetry:.2f}")
    if done.tokens_per_second is not None:
        losses_shown.append(f"{done.tokens_per_second:,.0f} tokens/s")
    return ", ".join(losses_shown)


def _training_seconds(run: Run) -> float:
    """Return the seconds of training in a run's metrics."""
    seconds = run.metrics["seconds"].drop_nulls()
    return float(seconds[-1]) if len(seconds) else 0.0


def _print_outcome(run: Run, stopwatch: _Stopwatch, trained_before: float) -> None:
    """Print the outcome of a run, the time of the command if it has trained, and the next step.

    ``trained_before`` is the number of seconds of training before the command.
    """
    import polars as pl

    from wqk.cli import display
    from wqk_lab.training.frequencies import frequency_loss, plateau_sentence

    held_out = run.metrics.drop_nulls("held_out_loss")["held_out_loss"]
    last = run.metrics.filter(pl.col("seconds").is_not_null()).row(-1, named=True)
    took = timedelta(seconds=round(last["seconds"]))
    all_steps = run.recipe["steps"]
    is_stopped = last["step"] < all_steps
    reached = counted(last["step"], "step")
    if is_stopped:
        reached = f"stopped at {last['step']:,} of {counted(all_steps, 'step')}"
    since = " since the run began" if trained_before else ""
    outcome = (
        f"{run.folder}: {reached}, {last['tokens']:,} tokens in {took} of training{since}; "
        f"held-out loss {held_out[0]:.3f} → {held_out[-1]:.3f} nats"
    )
    plateau = ""
    loss_of_frequencies = frequency_loss(run)
    if loss_of_frequencies is not None:
        plateau = plateau_sentence(held_out[-1], loss_of_frequencies)
        if not plateau:
            outcome += f"; by the frequencies of tokens alone {loss_of_frequencies:.3f}"
    duration = "no step was left"
    if stopwatch.has_trained:
        duration = f"the command took {stopwatch.elapsed}, with held-out losses and checkpoints"
        duration += _advice_on_time(stopwatch.elapsed, last["seconds"] - trained_before)
    then = f"next: wqk scan {run.folder}, or wqk lab figure updates {run.folder}"
    if is_stopped:
        then = (
            f"next: wqk lab train --resume -o {run.folder} trains on; wqk scan {run.folder} scores "
            "the steps so far"
        )
    elif compared_runs := _runs_of_other_starts(run):
        then += f"; wqk lab speedup {' '.join(compared_runs)} compares the initializations"
    lines = [outcome, duration, plateau, then]
    display.output().print(*filter(None, lines), sep="\n", soft_wrap=True)


# Runs of other initializations that a closing line names, at most.
MOST_NAMED = 8


def _runs_of_other_starts(run: Run) -> list[str]:
    """Return the folders to compare a run with: runs next to it that differ only in their start.

    The list begins with a run of a random start, if there is one, and contains the run itself. It
    is empty if no such run has ended at the same step, or if there are too many to name.
    """
    from wqk.errors import RunError
    from wqk.tables.run import SETTINGS, open_run
    from wqk_lab.runs.groups import comparable

    runs = [run]
    for settings in sorted(run.folder.parent.glob(f"*/{SETTINGS}")):
        if settings.parent.samefile(run.folder):
            continue
        try:
            sibling = open_run(settings.parent)
            if sibling.checkpoints and sibling.checkpoints[-1][0] == run.recipe["steps"]:
                runs.append(sibling)
        except RunError:
            continue
    group = next((group for group in comparable(runs) if run in group), [])
    if len(group) > MOST_NAMED:
        return []
    group.sort(key=lambda member: member.recipe.get("init") != "random")
    return [str(member.folder) for member in group]


def _advice_on_time(elapsed: timedelta, training_seconds: float) -> str:
    """Name the options that save time, if a command took longer for other work than for training.

    Examples
    --------
    >>> _advice_on_time(timedelta(seconds=187), 60)
    '; --held-out-blocks and --held-out-every reduce the former, --save-every the latter'
    >>> _advice_on_time(timedelta(seconds=187), 150)
    ''
    """
    other_seconds = elapsed.total_seconds() - training_seconds
    if other_seconds < max(training_seconds, LONG):
        return ""
    return "; --held-out-blocks and --held-out-every reduce the former, --save-every the latter"


def _advice_on_threads(load: float) -> str:
    """Return advice if other programs keep the cores busy; empty for one thread, or on a GPU.

    Threads wait for each other in every operation. ``load`` is the number of running processes.
    """
    import torch

    cores = usable_cores()
    if torch.get_num_threads() == 1 or torch.cuda.is_available() or load < cores / 2:
        return ""
    return (
        f"other programs keep the cores busy (load {load:.1f} on {counted(cores, 'core')}): with "
        "--threads 1, training may be several times as fast"
    )
