"""Costs of runs: floating-point operations, and how many of them a device computes a second."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from wqk._files import read_lines
from wqk.errors import RunError, required_by
from wqk.tables.run import METRICS, SETTINGS, open_run
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.experiments import Trial
from wqk_lab.training.recipe import Recipe

# Per weight and token, a training step takes 6 operations, and a held-out loss 2.
HELD_OUT = 1 / 3

# Seconds in which the speed of training is measured.
MEASURED = 1.5

# Rows with which a measurement begins; large models take long for more.
FIRST_ROWS = 1


def flops(recipe: Recipe, steps: int) -> float:
    """Return the floating-point operations of this many steps, at 6 per weight and token.

    Embeddings are left out; the products of queries with keys and of scores with values count. NaN
    if the recipe has a custom configuration.
    """
    return steps * recipe.accumulation * recipe.batch * _flops_of_row(recipe)


def _flops_of_row(recipe: Recipe) -> float:
    """Return the floating-point operations of one row of a training batch."""
    if recipe.config:
        return math.nan
    width, layers = recipe.width or 0, recipe.layers or 0
    weights = layers * (4 * width**2 + 2 * width * (recipe.intermediate or 0))
    return recipe.block * (6.0 * weights + 12.0 * layers * width * recipe.block)


def held_out_flops(recipe: Recipe, begun: int | None, goal: int) -> float:
    """Return the floating-point operations of the held-out losses between two steps.

    ``begun`` is the last step of the run so far; None for a run that has not begun, whose first
    held-out loss is that of step 0. The last held-out loss is that of ``goal``.
    """
    every = recipe.held_out_every
    losses = 1 if begun is None else 0
    last = begun or 0
    if last < goal:
        losses += goal // every - last // every + (goal % every > 0)
    return HELD_OUT * losses * recipe.held_out_blocks * _flops_of_row(recipe)


def flops_left(trials: Iterable[Trial]) -> float:
    """Return the operations that the unfinished runs still need, with held-out losses."""
    operations = 0.0
    for trial in trials:
        if not trial.done:
            operations += flops(trial.recipe, max(trial.goal - (trial.step or 0), 0))
            operations += held_out_flops(trial.recipe, trial.step, trial.goal)
    return operations


def speed_of_runs(folder: Path) -> float | None:
    """Return the operations a second of the training steps of all runs in a folder.

    None before any run has timed its steps.
    """
    operations = seconds = 0.0
    for settings in sorted(folder.glob(f"*/{SETTINGS}")):
        try:
            recipe = Recipe.from_json(open_run(settings.parent).recipe)
        except RunError:  # made by another version, or not by training
            continue
        # The last line of a finished run is the held-out loss, without a time.
        timed = [line for line in read_lines(settings.parent / METRICS) if line.get("seconds")]
        if timed and not recipe.config:
            operations += flops(recipe, int(timed[-1]["step"]))
            seconds += float(timed[-1]["seconds"])
    return operations / seconds if seconds and operations > 0 else None


def speed_now(recipe: Recipe, store: TokenStore, enough: float = MEASURED) -> float:
    """Return the operations a second of a recipe's training steps, measured on this machine.

    Steps are measured until ``enough`` seconds have passed, at first with a single row each, later
    with as many rows as a batch has. The speed is the mean of the steps with the most rows, under
    the load that the machine has now. On a processor, it is that of one thread or of all threads,
    whichever is faster: next to other programs, several threads wait for each other.

    Raises
    ------
    MissingPackage
        torch, transformers or accelerate is not installed.
    """
    with required_by("training"):
        import torch

        from wqk_lab.training.loop import Learner, make_optimizer
    from wqk_lab.training.models import available_precision, build_model
    from wqk_lab.training.objectives import Objective, TokenRows

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    precision = available_precision(recipe.precision)
    model = build_model(recipe, store.vocabulary_size, store.special).to(device)
    rows = TokenRows.of(store, "train", recipe)
    objective = Objective.of(recipe, store)
    learner, optimizer = Learner(model, objective), make_optimizer(model, recipe)
    generator = torch.Generator(device)

    def seconds_of_step(count: int, index: int) -> float:
        """Train on ``count`` rows, and return the time in seconds."""
        begin = time.perf_counter()
        blocks = torch.from_numpy(rows.drawn(count, seed=0, index=index)).to(device)
        draws = objective.draw(count, recipe.block, generator)
        types = {"bf16": torch.bfloat16, "fp16": torch.float16}
        with torch.autocast(device.type, types.get(precision), enabled=precision in types):
            loss = learner(blocks, draws)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()  # waits for the device
        return time.perf_counter() - begin

    threads = torch.get_num_threads()
    choices = sorted({1, threads}) if device.type == "cpu" else [threads]
    speeds = []
    try:
        for choice in choices:
            torch.set_num_threads(choice)
            speeds.append(_speed_of_steps(recipe, seconds_of_step, enough / len(choices)))
    finally:
        torch.set_num_threads(threads)
    return max(speeds)


def _speed_of_steps(
    recipe: Recipe, seconds_of_step: Callable[[int, int], float], enough: float
) -> float:
    """Return the operations a second of steps with as many rows as ``enough`` seconds allow."""
    count = min(FIRST_ROWS, recipe.batch)
    seconds_of_step(count, 0)  # the first step allocates memory
    index, total = 0, 0.0
    operations = seconds = 0.0  # of the steps with as many rows as the last one
    while total < enough:
        index += 1
        passed = seconds_of_step(count, index)
        total += passed
        operations += count * _flops_of_row(recipe)
        seconds += passed
        if count < recipe.batch and total < enough:
            count = min(2 * count, recipe.batch)
            operations = seconds = 0.0
    return operations / seconds
