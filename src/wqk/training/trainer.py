"""transformers' Trainer, fed with our blocks and tasks; import this file late, it needs torch.

Axis letters: B batch, N tokens of a block, P predictions.
"""

from __future__ import annotations

import math
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from wqk._files import append_lines
from wqk.errors import RunError
from wqk.runs.run import METRICS
from wqk.training.blocks import HELD_OUT_MASKS, MASKS, draw_blocks, spaced_blocks, stream_seed
from wqk.training.objectives import OBJECTIVES, Masking, RowSelection, Task, loss_of
from wqk.training.progress import TrainingProgress
from wqk.training.saving import STAGING, clear_staging, publish, thin_out

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from transformers import PreTrainedModel

    from wqk.training.corpus.store import TokenStore
    from wqk.training.recipe import Recipe


class BatchNumbers:
    """The numbers of the batches from where the run stands; blocks are read when one is due."""

    def __init__(self, total: int, done: Callable[[], int]) -> None:
        self.total, self.done = total, done

    def __len__(self) -> int:
        return self.total

    def __iter__(self) -> Iterator[dict[str, int]]:
        return ({"index": index} for index in range(self.done(), self.total))


class RunTrainer(Trainer):  # type: ignore[misc]
    """Trains a model by a recipe and keeps the run's metrics and checkpoints.

    Blocks and masks are functions of the seed and the batch's number. All processes draw them
    alike, and each takes its own rows.
    """

    control: Any

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        corpus: TokenStore,
        arguments: TrainingArguments,
        tokenizer_files: Mapping[str, bytes],
        seconds: float,
        stop: int | None = None,
    ) -> None:
        super().__init__(model=model, args=arguments)
        self.remove_callback(PrinterCallback)
        self.loss_is_scaled_for_ga = False  # ours is each batch's mean
        self.recipe, self.folder = recipe, Path(arguments.output_dir)
        self.stop = min(stop or recipe.steps, recipe.steps)
        self.tokens = {split: corpus.tokens(split) for split in ("train", "held_out")}
        self.tokenizer_files = tokenizer_files
        self.selection = RowSelection(model)
        self.masking = Masking(
            recipe.mask_share, recipe.corruption, corpus.special["mask"], corpus.vocabulary_size
        )
        self.generator = torch.Generator(device=self.args.device)
        self.penalty = _penalty(model, recipe)
        self.penalty_sum = torch.zeros((), device=self.args.device)
        self.logged_step = 0
        self.seconds, self.started = seconds, time.perf_counter()

    # What is trained on

    def get_train_dataloader(self) -> BatchNumbers:
        """Numbers instead of tensors: a gather from the memory map needs no workers."""
        per_step = self.recipe.accumulation
        return BatchNumbers(self.recipe.steps * per_step, lambda: self.state.global_step * per_step)

    def _task(self, blocks: Any, stream: int, index: int) -> Task:
        """A whole batch's task."""
        batch = torch.from_numpy(blocks).to(self.args.device)
        self.generator.manual_seed(stream_seed(self.recipe.seed, stream, index))
        return OBJECTIVES[self.recipe.objective](batch, self.masking, self.generator)

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Mean cross-entropy of this process's part of a batch, in nats; the weighted penalty."""
        recipe, index = self.recipe, inputs["index"]
        blocks = draw_blocks(
            self.tokens["train"], recipe.block, recipe.batch, seed=recipe.seed, index=index
        )
        task = self._task(blocks, MASKS, index)
        part = task.part(self.args.process_index, self.args.world_size)
        loss = loss_of(model, self.selection, part)
        if self.penalty is None:
            return loss
        penalty = self.penalty()
        self.penalty_sum += penalty.detach() / recipe.accumulation
        return loss + recipe.penalty_weight * penalty

    def floating_point_ops(self, inputs: Any) -> int:
        """Not counted: going through all parameters at every batch costs more than it tells."""
        return 0

    # What is kept

    def evaluate(self, *_: Any, **__: Any) -> dict[str, float]:
        """Mean loss in nats over the same held-out blocks, under the same masks, every time."""
        recipe = self.recipe
        blocks = spaced_blocks(self.tokens["held_out"], recipe.block, recipe.held_out_blocks)
        total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        with self._clock_stopped(), torch.no_grad():
            self.model.eval()
            for index, start in enumerate(range(0, len(blocks), recipe.batch)):
                if index % self.args.world_size == self.args.process_index:
                    task = self._task(blocks[start : start + recipe.batch], HELD_OUT_MASKS, index)
                    loss = loss_of(self.model, self.selection, task)
                    total += torch.stack((loss * len(task.rows), loss.new_tensor(len(task.rows))))
            total = self.accelerator.reduce(total, reduction="sum")
            self.model.train()
        held_out = {"held_out_loss": (total[0] / total[1]).item()}
        self.log(dict(held_out))
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, held_out
        )
        return held_out

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add a line to the run's metrics, and tell the loggers the same."""
        if "loss" in logs:
            logs = self._training_line(logs)
        elif "held_out_loss" not in logs:
            return  # the Trainer's closing summary
        if self.is_world_process_zero():
            append_lines(self.folder / METRICS, {"step": self.state.global_step, **logs})
        super().log(logs, start_time)

    def _training_line(self, logs: dict[str, float]) -> dict[str, float]:
        """Means since the line before, and what has been spent so far."""
        recipe, step = self.recipe, self.state.global_step
        line = {name: logs[name] for name in ("loss", "learning_rate")}
        if not math.isfinite(line["loss"]):
            raise RunError(
                f"the loss is {line['loss']} at step {step}; try a lower learning rate or more "
                f"warmup. Earlier checkpoints are in {self.folder}"
            )
        if self.penalty is not None:
            line["penalty"] = self.penalty_sum.item() / (step - self.logged_step)
            line["loss"] -= recipe.penalty_weight * line["penalty"]
            self.penalty_sum.zero_()
        self.logged_step = step
        line["tokens"] = step * recipe.accumulation * recipe.batch * recipe.block
        line["seconds"] = round(self._clock(), 3)
        return line

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are written before they get their name."""
        return str(self.folder / STAGING)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint whole or not at all; let go of earlier ones that are not kept."""
        first = self.is_world_process_zero()
        with self._clock_stopped():
            if first:
                clear_staging(self.folder)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if first:
                publish(self.folder, self.state.global_step, self.tokenizer_files)
                thin_out(self.folder, self.state.global_step, self.recipe)

    def _clock(self) -> float:
        """Seconds of training so far, over all interruptions."""
        return self.seconds + time.perf_counter() - self.started

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Held-out losses and checkpoints do not count as training."""
        self.seconds = self._clock()
        try:
            yield
        finally:
            self.started = time.perf_counter()


class Cadence(TrainerCallback):  # type: ignore[misc]
    """When to log, evaluate and save, as the recipe says."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer
        self.saved_steps = trainer.recipe.saved_steps | {trainer.stop}

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Record the state before the first step."""
        self.trainer.logged_step = state.global_step
        if state.global_step == 0:
            self.trainer.evaluate()
            if 0 in self.saved_steps:
                self.trainer._save_checkpoint(self.trainer.model, None)
        self.trainer.started = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Each at its own cadence, and all of them after the last step.

        A checkpoint comes with a line of metrics, so that a resumed run writes the same lines.
        """
        recipe, step = self.trainer.recipe, state.global_step
        last = control.should_training_stop = step >= self.trainer.stop
        control.should_evaluate = last or step % recipe.held_out_every == 0
        control.should_save = step in self.saved_steps
        control.should_log = control.should_save or step % recipe.log_every == 0


class Reporter(TrainerCallback):  # type: ignore[misc]
    """Turns the run's metrics into progress."""

    def __init__(self, steps: int, on_progress: Callable[[TrainingProgress], None]) -> None:
        self.steps, self.on_progress = steps, on_progress
        self.latest: dict[str, float] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the latest of each number, and tell them; of scores, say nothing."""
        if logs.keys().isdisjoint({"loss", "held_out_loss"}):
            return
        before, self.latest = self.latest, self.latest | logs
        if "tokens" in before and "tokens" in logs:
            passed = logs["seconds"] - before["seconds"]
            if passed > 0:
                self.latest["speed"] = (logs["tokens"] - before["tokens"]) / passed
        self.on_progress(
            TrainingProgress(
                state.global_step,
                self.steps,
                self.latest.get("loss"),
                self.latest.get("held_out_loss"),
                self.latest.get("speed"),
                "held_out_loss" in logs,
            )
        )


def _penalty(model: PreTrainedModel, recipe: Recipe) -> Callable[[], torch.Tensor] | None:
    """The penalty as a function of the live weights."""
    if recipe.penalty == "none":
        return None
    from wqk.training.penalties import Penalty

    return Penalty(model, recipe.penalty)
