"""The training loop, on accelerate; imported late, because it needs PyTorch.

All random numbers are a function of the seed and a number, such as the number of a batch. Therefore
the blocks, the masked tokens and the dropout of a step are the same after an interruption. Every
process draws the blocks and random numbers of a whole batch, and uses its part of the rows.

Axis letters: B batch, N tokens of a block.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from accelerate.state import AcceleratorState  # type: ignore[import-untyped]
from accelerate.utils import (  # type: ignore[import-untyped]
    GradientAccumulationPlugin,
    ProjectConfiguration,
)

from wqk._files import append_lines
from wqk.errors import RunError
from wqk.live import Monitor
from wqk.live.clipping import Clipper
from wqk.live.scoring import Penalty
from wqk.tables.run import CLIPS, METRICS, SCORES
from wqk_lab.training.corpus.store import TokenStore
from wqk_lab.training.models import (
    OPTIMIZER,
    SCALER,
    available_precision,
    load_checkpoint,
    save_checkpoint,
    tokenizer_files,
)
from wqk_lab.training.objectives import (
    DROPOUT,
    HELD_OUT_MASKS,
    MASKS,
    Objective,
    RowSelection,
    TokenRows,
    loss_of,
    stream_seed,
)
from wqk_lab.training.progress import TrainingProgress
from wqk_lab.training.recipe import Recipe

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Passes from which on compiling pays: it takes 15 s on an H200, and saves 7 of the 18 ms of a pass
# of a small model.
COMPILED = 2500


def make_accelerator(recipe: Recipe, folder: Path, report_to: Sequence[str]) -> Accelerator:
    """Return device, precision and processes: one GPU, unless torchrun starts more processes."""
    precision = available_precision(recipe.precision)
    AcceleratorState._reset_state()  # or all runs of a process would have the first's precision
    return Accelerator(
        cpu=not torch.cuda.is_available(),
        mixed_precision="no" if precision == "float32" else precision,
        gradient_accumulation_plugin=GradientAccumulationPlugin(
            num_steps=recipe.accumulation, sync_with_dataloader=False
        ),
        log_with=list(report_to) or None,
        project_config=ProjectConfiguration(str(folder), logging_dir=str(folder / "logs")),
    )


def run_loop(
    accelerator: Accelerator,
    model: PreTrainedModel,
    recipe: Recipe,
    store: TokenStore,
    folder: Path,
    *,
    checkpoint: tuple[int, Path] | None = None,
    seconds: float = 0.0,
    stop: int | None = None,
    on_progress: Callable[[TrainingProgress], None] | None = None,
) -> None:
    """Train a model in place, and write the run's files.

    ``checkpoint`` contains the step and the folder to resume from; ``seconds`` is the earlier
    training time.
    """
    model.to(accelerator.device)
    objective = Objective.of(recipe, store)
    learner = Learner(model, objective)
    if accelerator.device.type == "cuda" and pays_to_compile(recipe):
        learner.compile()
    trained, optimizer = accelerator.prepare(learner, make_optimizer(model, recipe))
    penalty = None if recipe.penalty == "none" else Penalty(model, recipe.penalty)
    monitor = Monitor(
        model,
        folder / SCORES,
        every=recipe.score_every,
        steps=recipe.saved_steps,
        logits=recipe.logits == "yes",
    )
    clipper = None
    if recipe.qk_clip is not None:
        clipper = Clipper(model, recipe.qk_clip, folder / CLIPS)
    log = MetricsLog(accelerator, recipe, folder, seconds, on_progress)
    tokenizer = tokenizer_files(store, recipe.block)
    scaler = accelerator.scaler

    def save(step: int) -> None:
        if accelerator.is_main_process:
            scaling = scaler.state_dict() if scaler else None
            state = {OPTIMIZER: optimizer.state_dict(), SCALER: scaling}
            save_checkpoint(folder, step, recipe, model, state, tokenizer)
        accelerator.wait_for_everyone()

    def evaluate(step: int) -> None:
        log.add(step, {"held_out_loss": held_out_loss(accelerator, learner, recipe, store)})

    begin, end = 0, min(stop or recipe.steps, recipe.steps)
    saved_steps = recipe.saved_steps | {end}
    if checkpoint is None:
        log.add_scores(0, monitor(0))
        evaluate(0)
        if 0 in saved_steps:
            save(0)
    else:
        begin, path = checkpoint
        state = load_checkpoint(path, model)
        optimizer.load_state_dict(state[OPTIMIZER])
        if scaler and SCALER in state:
            scaler.load_state_dict(state[SCALER])
        log.add_scores(begin, monitor(begin))

    if clipper is not None:
        clipper.begin(begin)
    batches = training_batches(accelerator, objective, recipe, store, begin, end)
    sums = torch.zeros(2, device=accelerator.device)  # of loss and penalty since the last entry
    logged = begin
    for step in range(begin + 1, end + 1):
        started = time.perf_counter()
        passed = recipe.batches_before + step
        index = passed * accelerator.num_processes + accelerator.process_index
        torch.manual_seed(stream_seed(recipe.seed, DROPOUT, index))
        rate = learning_rate(recipe, step - 1)
        for group in optimizer.param_groups:
            group["lr"] = rate
        for _ in range(recipe.accumulation):
            with accelerator.accumulate(trained):
                loss = trained(*next(batches))
                sums[0] += loss.detach()
                if penalty:
                    extra = penalty()
                    sums[1] += extra.detach()
                    loss = loss + recipe.penalty_weight * extra
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), recipe.clip)
                optimizer.step()
                optimizer.zero_grad()
        if clipper is not None:
            clipper(step)
        last, saving = step == end, step in saved_steps
        log.add_scores(step, monitor.look(step) if last else monitor(step))
        # Every checkpoint comes with an entry, so that a resumed run writes the same lines.
        means = None
        if saving or step % recipe.log_every == 0:
            batches_since = recipe.accumulation * (step - logged)
            means = (accelerator.reduce(sums, "mean") / batches_since).tolist()
            logged = step
            sums.zero_()
        # Held-out losses and checkpoints do not count as training.
        log.seconds += time.perf_counter() - started
        if means:
            log.add_training(step, rate, *means)
        if last or step % recipe.held_out_every == 0:
            evaluate(step)
        if saving:
            save(step)


def pays_to_compile(recipe: Recipe) -> bool:
    """Return whether a run has enough passes for compiling to save time on a GPU.

    The whole recipe decides, so that a resumed run computes in the same way as before.

    Examples
    --------
    >>> from wqk_lab.training.recipe import make_recipe
    >>> [pays_to_compile(make_recipe(steps=steps)) for steps in (600, 200_000)]
    [False, True]
    """
    return recipe.steps * recipe.accumulation >= COMPILED


class Learner(torch.nn.Module):  # type: ignore[misc]
    """Module from blocks and random numbers to the mean loss; compiles as one graph."""

    def __init__(self, model: PreTrainedModel, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective
        self.selection = RowSelection(model)

    def forward(self, blocks: torch.Tensor, draws: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Return the mean loss of blocks (B, N), in nats per predicted token."""
        return loss_of(self.model, self.selection, self.objective.task(blocks, draws))


def make_optimizer(model: PreTrainedModel, recipe: Recipe) -> torch.optim.Optimizer:
    """Return AdamW with weight decay on matrices, without decay on biases and norms."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    groups = [
        {"params": matrices, "weight_decay": recipe.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=recipe.learning_rate, fused=True)


def learning_rate(recipe: Recipe, done: int) -> float:
    """Return the learning rate of the update after ``done`` updates.

    Examples
    --------
    >>> from wqk_lab.training.recipe import make_recipe
    >>> recipe = make_recipe(learning_rate=1.0, warmup=2, steps=6, schedule="linear")
    >>> [learning_rate(recipe, done) for done in range(6)]
    [0.0, 0.5, 1.0, 0.75, 0.5, 0.25]
    """
    if done < recipe.warmup:
        return recipe.learning_rate * done / recipe.warmup
    share = (done - recipe.warmup) / max(1, recipe.steps - recipe.warmup)  # of the steps after
    factors = {
        "linear": 1 - share,
        "cosine": (1 + math.cos(math.pi * share)) / 2,
        "constant": 1,
    }
    return recipe.learning_rate * factors[recipe.schedule]


def training_batches(
    accelerator: Accelerator,
    objective: Objective,
    recipe: Recipe,
    store: TokenStore,
    begin: int,
    end: int,
) -> Iterator[tuple[torch.Tensor, tuple[torch.Tensor, ...]]]:
    """Yield this process's blocks and random numbers of each batch, from ``begin`` to ``end``.

    A thread reads the next blocks while the device works; for a GPU, into pinned memory, so that
    the copy is asynchronous.
    """
    rows = TokenRows.of(store, "train", recipe)
    device = accelerator.device
    generator = torch.Generator(device)
    share = recipe.batch // accelerator.num_processes
    share_of_process = slice(
        accelerator.process_index * share, (accelerator.process_index + 1) * share
    )

    def read(index: int) -> torch.Tensor:
        blocks = rows.drawn(recipe.batch, seed=recipe.seed, index=index)
        batch = torch.from_numpy(blocks[share_of_process])
        return batch.pin_memory() if device.type == "cuda" else batch

    first, last = (recipe.batches_before + n * recipe.accumulation for n in (begin, end))
    with ThreadPoolExecutor(1) as reader:
        upcoming = reader.submit(read, first)
        for index in range(first, last):
            blocks, upcoming = upcoming.result(), reader.submit(read, index + 1)
            generator.manual_seed(stream_seed(recipe.seed, MASKS, index))
            draws = objective.draw(recipe.batch, recipe.block, generator)
            yield (
                blocks.to(device, non_blocking=True),
                tuple(draw[share_of_process] for draw in draws),
            )


def held_out_loss(
    accelerator: Accelerator, learner: Learner, recipe: Recipe, store: TokenStore
) -> float:
    """Return the mean loss in nats over held-out rows; rows and masks are always the same."""
    blocks = TokenRows.of(store, "held_out", recipe).spaced(recipe.held_out_blocks)
    objective, generator = learner.objective, torch.Generator(accelerator.device)
    sums = torch.zeros(2, dtype=torch.float64, device=accelerator.device)
    learner.eval()
    with torch.no_grad():
        for index, start in enumerate(range(0, len(blocks), recipe.batch)):
            if index % accelerator.num_processes == accelerator.process_index:
                batch = torch.from_numpy(blocks[start : start + recipe.batch])
                batch = batch.to(accelerator.device)
                generator.manual_seed(stream_seed(recipe.seed, HELD_OUT_MASKS, index))
                draws = objective.draw(len(batch), recipe.block, generator)
                targets = objective.task(batch, draws).count
                sums += torch.stack([learner(batch, draws) * targets, targets])
    learner.train()
    loss, targets = accelerator.reduce(sums, "sum").tolist()
    return float(loss / targets)


class MetricsLog:
    """Writer of a run's entries to metrics, loggers and progress callback, from one process."""

    def __init__(
        self,
        accelerator: Accelerator,
        recipe: Recipe,
        folder: Path,
        seconds: float,
        on_progress: Callable[[TrainingProgress], None] | None,
    ) -> None:
        self._accelerator, self._recipe, self._folder = accelerator, recipe, folder
        self._on_progress = on_progress
        self.seconds = seconds  # of training so far, over all interruptions
        self._latest: dict[str, float] = {}

    def add_training(self, step: int, rate: float, loss: float, penalty: float) -> None:
        """Add means since the previous entry, and totals; `RunError` for non-finite means."""
        recipe = self._recipe
        if not math.isfinite(loss + penalty):
            raise RunError(
                f"the loss is {loss + recipe.penalty_weight * penalty} at step {step}; try a lower "
                f"learning rate or more warmup. Earlier checkpoints are in {self._folder}"
            )
        entry = {"loss": loss, "learning_rate": rate}
        if recipe.penalty != "none":
            entry["penalty"] = penalty
        entry["tokens"] = step * recipe.accumulation * recipe.batch * recipe.block
        entry["seconds"] = round(self.seconds, 3)
        if passed := entry["seconds"] - self._latest.get("seconds", entry["seconds"]):
            self._latest["speed"] = (entry["tokens"] - self._latest["tokens"]) / passed
        self.add(step, entry)

    def add(self, step: int, entry: dict[str, float]) -> None:
        """Add a line to the run's metrics."""
        self._latest |= entry
        if not self._accelerator.is_main_process:
            return
        append_lines(self._folder / METRICS, {"step": step, **entry})
        self._accelerator.log(entry, step=step)
        if self._on_progress:
            names = ("loss", "held_out_loss", "speed")
            loss, held_out, speed = (self._latest.get(name) for name in names)
            is_new, symmetry = "held_out_loss" in entry, self._latest.get("wqk/symmetry_median")
            self._on_progress(
                TrainingProgress(step, self._recipe.steps, loss, held_out, speed, is_new, symmetry)
            )

    def add_scores(self, step: int, medians: dict[str, float]) -> None:
        """Log the medians of the monitor, which writes scores to separate files."""
        self._latest |= medians
        if medians:
            self._accelerator.log(medians, step=step)
