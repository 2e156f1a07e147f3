"""transformers' Trainer, fed with our blocks and tasks; import this file late, it needs torch.

Axis letters: B batch, N tokens of a block.
"""

from __future__ import annotations

import math
import shutil
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from wqk.errors import RunError
from wqk.runs import METRICS, append_line
from wqk.training.blocks import HELD_OUT_MASKS, MASKS, draw_blocks, spaced_blocks, stream_seed
from wqk.training.objectives import OBJECTIVES, Masking, RowSelection, Task, loss_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from transformers import PreTrainedModel

    from wqk.training.corpus.store import TokenStore
    from wqk.training.recipe import Recipe

# Checkpoints are written in here and renamed out of it when complete.
STAGING = ".saving"


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

    Batches, masks and held-out blocks are functions of the seed and the batch's number; of each
    batch every process takes its own rows.
    """

    control: Any

    def __init__(
        self,
        model: PreTrainedModel,
        recipe: Recipe,
        corpus: TokenStore,
        arguments: TrainingArguments,
        penalty: Callable[[], torch.Tensor] | None,
        seconds: float,
    ) -> None:
        super().__init__(model=model, args=arguments)
        self.remove_callback(PrinterCallback)
        self.recipe, self.penalty = recipe, penalty
        self.tokens = {split: corpus.tokens(split) for split in ("train", "held_out")}
        self.folder = Path(arguments.output_dir)
        self.selection = RowSelection(model)
        self.masking = Masking(
            recipe.mask_share, recipe.corruption, corpus.special["mask"], corpus.vocabulary_size
        )
        self.draw = torch.Generator(device=self.args.device)
        self.penalty_sum = torch.zeros((), device=self.args.device)
        self.logged_step = 0
        self.seconds, self.resumed_at = seconds, time.perf_counter()
        self.loss_is_scaled_for_ga = False
        share = recipe.batch // self.args.world_size
        self.own = slice(self.args.process_index * share, (self.args.process_index + 1) * share)

    # What is trained on

    def get_train_dataloader(self) -> BatchNumbers:
        """Numbers instead of tensors: a gather from the memory map needs no workers."""
        per_step = self.recipe.accumulation
        return BatchNumbers(self.recipe.steps * per_step, lambda: self.state.global_step * per_step)

    def _task(self, blocks: Any, stream: int, index: int, own: slice) -> Task:
        """A batch's task, drawn for all processes alike; this one's rows of it."""
        whole = torch.from_numpy(blocks).to(self.args.device, non_blocking=True)
        self.draw.manual_seed(stream_seed(self.recipe.seed, stream, index))
        task = OBJECTIVES[self.recipe.objective](whole, self.masking, self.draw)
        if own == slice(0, len(whole)):
            return task
        each = len(task.rows) // len(whole)
        mine = slice(own.start * each, own.stop * each)
        first = own.start * whole.shape[1]
        return Task(task.inputs[own], task.rows[mine] - first, task.targets[mine])

    def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
        """Mean cross-entropy of one batch, in nats, and the weighted penalty."""
        recipe, index = self.recipe, inputs["index"]
        tokens = self.tokens["train"]
        blocks = draw_blocks(tokens, recipe.block, recipe.batch, seed=recipe.seed, index=index)
        loss = loss_of(model, self.selection, self._task(blocks, MASKS, index, self.own))
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
        recipe, world = self.recipe, self.args.world_size
        with self._clock_stopped(), torch.inference_mode():
            self.model.eval()
            blocks = spaced_blocks(self.tokens["held_out"], recipe.block, recipe.held_out_blocks)
            total = torch.zeros(2, dtype=torch.float64, device=self.args.device)
            batch = max(1, recipe.batch // world)
            for index, start in enumerate(range(0, len(blocks), batch)):
                if index % world != self.args.process_index:
                    continue
                piece = blocks[start : start + batch]
                task = self._task(piece, HELD_OUT_MASKS, index, slice(0, len(piece)))
                with self.accelerator.autocast():
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
        step = self.state.global_step
        if "loss" in logs:
            logs = {name: logs[name] for name in ("loss", "learning_rate")}
            if self.penalty is not None:
                mean = self.penalty_sum.item() / (step - self.logged_step)
                logs |= {"loss": logs["loss"] - self.recipe.penalty_weight * mean, "penalty": mean}
                self.penalty_sum.zero_()
            self.logged_step = step
            per_step = self.recipe.accumulation * self.recipe.batch * self.recipe.block
            logs |= {"tokens": step * per_step, "seconds": round(self._clock(), 3)}
            if not math.isfinite(logs["loss"]):
                raise RunError(
                    f"the loss is {logs['loss']} at step {step}; try a lower learning rate, more "
                    f"warmup or float32. Its checkpoints up to here are in {self.folder}"
                )
        if not logs.keys() & {"loss", "held_out_loss"} and "train_loss" in logs:
            return  # transformers' closing summary
        if self.is_world_process_zero() and logs.keys() & {"loss", "held_out_loss"}:
            append_line(self.folder / METRICS, {"step": step, **logs})
        super().log(logs, start_time)

    def _get_output_dir(self, trial: Any) -> str:
        """Where checkpoints are written before they get their name."""
        return str(self.folder / STAGING)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint whole or not at all; let go of the one before unless it is kept."""
        staging, main = self.folder / STAGING, self.is_world_process_zero()
        name = f"checkpoint-{self.state.global_step}"
        if (self.folder / name).exists():
            return
        with self._clock_stopped():
            if main:
                shutil.rmtree(staging, ignore_errors=True)
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            self.accelerator.wait_for_everyone()
            if main:
                (staging / name).rename(self.folder / name)
                staging.rmdir()
                self._thin_out(self.state.global_step)

    def _thin_out(self, newest: int) -> None:
        """Earlier checkpoints go, or stay without what only resuming needs."""
        for path in self.folder.glob("checkpoint-*"):
            step = int(path.name.rpartition("-")[2])
            if step < newest and not self.recipe.keeps(step):
                shutil.rmtree(path)
            elif step < newest and self.recipe.keep_checkpoints != "all":
                (path / "optimizer.pt").unlink(missing_ok=True)

    def _clock(self) -> float:
        """Seconds of training so far, over all interruptions."""
        return self.seconds + time.perf_counter() - self.resumed_at

    @contextmanager
    def _clock_stopped(self) -> Iterator[None]:
        """Held-out losses and checkpoints do not count as training."""
        self.seconds = self._clock()
        try:
            yield
        finally:
            self.resumed_at = time.perf_counter()


class Cadence(TrainerCallback):  # type: ignore[misc]
    """When to log, evaluate and save, as the recipe says."""

    def __init__(self, trainer: RunTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """The state before the first step."""
        self.trainer.logged_step = state.global_step
        if state.global_step == 0:
            self.trainer.evaluate()
            if self.trainer.recipe.keeps(0):
                self.trainer._save_checkpoint(self.trainer.model, None)
        self.trainer.resumed_at = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Each at its own cadence, and all of them after the last step."""
        recipe, step = self.trainer.recipe, state.global_step
        last = step >= recipe.steps
        control.should_log = last or step % recipe.log_every == 0
        control.should_evaluate = last or step % recipe.held_out_every == 0
        control.should_save = last or step % recipe.save_every == 0 or step in recipe.kept_steps
