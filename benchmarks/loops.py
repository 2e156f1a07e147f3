"""`wqk lab train` next to two other ways to train, at equal loss: ``python -m benchmarks.loops``.

- A Trainer of transformers on the same model, packed blocks, objective and recipe.
- A loop in PyTorch in the style of nanochat: rotary positions, normalized queries and keys, squared
  ReLU, no biases or gains, Muon for matrices and AdamW for embeddings. Its model has as many layers
  and the same width.

All see blocks of the same tokens (docstrings of the standard library, as characters), one way after
the other, in one process, on one thread; seconds are of the processor. With a GPU, all run on it,
and seconds are by the clock. The held-out loss is taken by one function on the same rows and masks
and is not timed. Compared are the seconds to the lowest loss that all reach, interpolated between
two looks.

Axes: B blocks, N tokens, D width, H heads, R head width.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy, relu, rms_norm, scaled_dot_product_attention
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from wqk_lab.training.corpus import CorpusOptions, build_corpus
from wqk_lab.training.loop import Learner, held_out_loss, make_accelerator, training_batches
from wqk_lab.training.models import build_model
from wqk_lab.training.objectives import Objective, TokenRows
from wqk_lab.training.recipe import Recipe, make_recipe
from wqk_lab.training.training import train

if TYPE_CHECKING:
    from collections.abc import Callable

    from wqk_lab.training.corpus import TokenStore
    from wqk_lab.training.progress import TrainingProgress

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LOOKS = 6  # at the held-out loss in a run
SHAPE = {"layers": 4, "width": 128, "heads": 4, "block": 128, "batch": 16}


class LossCurve:
    """Held-out losses against seconds of training, without those of the looks."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self._since, self._spent = now(), 0.0

    def pause(self) -> None:
        """Stop the clock before a look."""
        self._spent += now() - self._since

    def look(self, loss: float) -> None:
        """Note a held-out loss and start the clock again."""
        self.seconds.append(self._spent)
        self.losses.append(loss)
        self._since = now()

    def since_first(self) -> float:
        """Seconds since the first look within training: without those of compiling."""
        return self.seconds[-1] - self.seconds[1]

    def reaches(self, loss: float) -> float:
        """Seconds to a loss that was reached."""
        falling = np.minimum.accumulate(self.losses)
        return float(np.interp(-loss, -falling, self.seconds))


def now() -> float:
    """Return the processor time; on a GPU, the time by the clock after its work is done."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()
        return time.perf_counter()
    return time.process_time()


def objective_of(recipe: Recipe, store: TokenStore) -> Objective:
    """As `wqk lab train` makes it."""
    return Objective(
        recipe.objective,
        recipe.mask_share,
        recipe.corruption,
        store.special["mask"],
        store.vocabulary_size,
    )


def train_ours(recipe: Recipe, store: TokenStore, folder: Path) -> LossCurve:
    """With its metrics, scores and a checkpoint at the end."""
    curve: LossCurve | None = None

    def on_progress(done: TrainingProgress) -> None:
        nonlocal curve
        if not done.held_out_is_new and curve:
            curve.pause()
        elif done.held_out_is_new:
            curve = curve or LossCurve()
            curve.look(float(done.held_out_loss or 0))

    train(recipe, store.folder, folder, on_progress=on_progress)
    assert curve
    return curve


def train_with_trainer(recipe: Recipe, store: TokenStore, folder: Path) -> LossCurve:
    """Train with transformers and packed rows, as people usually write it."""
    model = build_model(recipe, store.vocabulary_size, store.special).to(DEVICE)
    accelerator = make_accelerator(recipe, folder, ())
    learner = Learner(model, objective_of(recipe, store))
    rows = TokenRows.of(store, "train", recipe)
    blocks = [rows.drawn(recipe.batch, seed=recipe.seed, index=n) for n in range(recipe.steps)]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(store.tokenizer), pad_token="[PAD]", mask_token="[MASK]"
    )
    masked = recipe.mode == "encoder"
    collator = DataCollatorForLanguageModeling(
        tokenizer,
        mlm=masked,
        mlm_probability=recipe.mask_share if masked else None,
        mask_replace_prob=1.0,
        random_replace_prob=0.0,
    )
    curve = LossCurve()

    class Look(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            curve.look(held_out_loss(accelerator, learner, recipe, store))

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step % recipe.held_out_every == 0:
                curve.pause()
                curve.look(held_out_loss(accelerator, learner, recipe, store))
                model.train()

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(folder),
            max_steps=recipe.steps,
            per_device_train_batch_size=recipe.batch,
            learning_rate=recipe.learning_rate,
            warmup_steps=recipe.warmup,
            weight_decay=recipe.weight_decay,
            max_grad_norm=recipe.clip,
            use_cpu=DEVICE == "cpu",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            logging_strategy="no",
            dataloader_pin_memory=DEVICE != "cpu",
        ),
        train_dataset=[{"input_ids": row} for row in np.concatenate(blocks)],
        data_collator=collator,
        callbacks=[Look()],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return curve


class Plain(nn.Module):  # type: ignore[misc]
    """A transformer in the style of nanochat, causal or not; takes the place of a `Learner`."""

    def __init__(self, recipe: Recipe, objective: Objective, vocabulary: int) -> None:
        super().__init__()
        self.objective, self.causal = objective, recipe.mode == "decoder"
        self.heads, width, layers = SHAPE["heads"], SHAPE["width"], SHAPE["layers"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "qkv": nn.Linear(width, 3 * width, bias=False),
                    "out": nn.Linear(width, width, bias=False),
                    "up": nn.Linear(width, 4 * width, bias=False),
                    "down": nn.Linear(4 * width, width, bias=False),
                }
            )
            for _ in range(layers)
        )
        self.head = nn.Linear(width, vocabulary, bias=False)
        for matrix in (self.head, *(layer[n] for layer in self.layers for n in ("out", "down"))):
            nn.init.zeros_(matrix.weight)
        half = width // self.heads // 2
        angles = torch.outer(torch.arange(recipe.block), 10_000 ** (-torch.arange(half) / half))
        self.register_buffer("turns", torch.stack([angles.cos(), angles.sin()]))

    def rotated(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize (B, H, N, R) and turn by positions."""
        cos, sin = self.turns
        a, b = rms_norm(x, x.shape[-1:]).chunk(2, -1)
        return torch.cat([a * cos + b * sin, b * cos - a * sin], -1)

    def forward(self, blocks: torch.Tensor, draws: tuple[torch.Tensor, ...]) -> torch.Tensor:
        """Mean loss of blocks (B, N), in nats per predicted token."""
        task = self.objective.task(blocks, draws)
        x = rms_norm(self.embedding(task.inputs), self.embedding.weight.shape[-1:])
        for layer in self.layers:
            normed = rms_norm(x, x.shape[-1:])
            q, k, v = (
                projection.unflatten(-1, (self.heads, -1)).transpose(1, 2)
                for projection in layer["qkv"](normed).chunk(3, -1)
            )
            mixed = scaled_dot_product_attention(
                self.rotated(q), self.rotated(k), v, is_causal=self.causal
            )
            x = x + layer["out"](mixed.transpose(1, 2).flatten(2))
            x = x + layer["down"](relu(layer["up"](rms_norm(x, x.shape[-1:]))).square())
        rows = rms_norm(x.flatten(0, 1)[task.rows], x.shape[-1:])
        return cross_entropy(self.head(rows).float(), task.targets)


def train_plainly(recipe: Recipe, store: TokenStore, folder: Path) -> LossCurve:
    """Train in a few lines, with nanochat's rates: constant, then falling over the last fifth."""
    torch.manual_seed(recipe.seed)
    objective = objective_of(recipe, store)
    model = Plain(recipe, objective, store.vocabulary_size).to(DEVICE)
    accelerator = make_accelerator(recipe, folder, ())
    narrow = (model.embedding.weight.shape[1] / 768) ** -0.5
    optimizers = [
        torch.optim.Muon(model.layers.parameters(), lr=0.02, momentum=0.95, weight_decay=0.0),
        torch.optim.AdamW(
            [
                {"params": model.embedding.parameters(), "lr": 0.2 * narrow},
                {"params": model.head.parameters(), "lr": 0.004 * narrow},
            ],
            betas=(0.8, 0.95),
            eps=1e-10,
            weight_decay=0.0,
            fused=True,
        ),
    ]
    schedules = [
        torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda step: min(1.0, (recipe.steps - step) / (0.2 * recipe.steps))
        )
        for optimizer in optimizers
    ]
    batches = training_batches(accelerator, objective, recipe, store, 0, recipe.steps)
    curve = LossCurve()
    curve.look(held_out_loss(accelerator, model, recipe, store))
    for step in range(1, recipe.steps + 1):
        model(*next(batches)).backward()
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        if step % recipe.held_out_every == 0:
            curve.pause()
            curve.look(held_out_loss(accelerator, model, recipe, store))
    return curve


WAYS: dict[str, Callable[[Recipe, TokenStore, Path], LossCurve]] = {
    "a packed Trainer": train_with_trainer,
    "`wqk lab train`": train_ours,
    "a nanochat-like loop": train_plainly,
}


def write_store(place: Path) -> TokenStore:
    """Return the docstrings of the standard library as characters."""
    text = place / "docstrings.jsonl"
    subprocess.run([sys.executable, "examples/write_docstrings.py", str(text)], check=True)
    return build_corpus([text], place / "corpus", CorpusOptions(text="characters"))


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=120, help="of each run (%(default)s)")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    every = max(1, options.steps // LOOKS)
    steps = every * LOOKS
    rarely = dict.fromkeys(("score_every", "save_every"), steps + 1)
    tokens = SHAPE["batch"] * SHAPE["block"]
    print(
        f"{SHAPE['layers']} layers of width {SHAPE['width']}, {tokens:,} tokens a step, {steps} "
        f"steps, PyTorch {torch.__version__}, on "
        + ("a GPU, by the clock." if DEVICE == "cuda" else "one thread.")
        + "\n\n| | tokens a second | / Trainer | since the first look, / Trainer "
        "| held-out loss, nats | the loss that all reach | how often an hour, / Trainer |\n"
        "|:--|--:|--:|--:|--:|--:|--:|"
    )
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        store = write_store(place)
        for mode in ("encoder", "decoder"):
            recipe = make_recipe(
                "fast",
                mode=mode,
                steps=steps,
                log_every=every,
                held_out_every=every,
                held_out_blocks=64,
                keep_checkpoints="last",
                **rarely,
                **SHAPE,
            )
            curves = {
                name: way(recipe, store, place / f"{mode}-{number}")
                for number, (name, way) in enumerate(WAYS.items())
            }
            trainer = curves["a packed Trainer"]
            loss = max(curve.losses[-1] for curve in curves.values())
            for name, curve in curves.items():
                faster = trainer.seconds[-1] / curve.seconds[-1]
                later = trainer.since_first() / curve.since_first()
                print(
                    f"| {mode}, {name} | {tokens * steps / curve.seconds[-1]:,.0f} | {faster:.2f} "
                    f"| {later:.2f} | {curve.losses[-1]:.2f} "
                    f"| {loss:.2f} after {curve.reaches(loss):.1f} s "
                    f"| {trainer.reaches(loss) / curve.reaches(loss):.2f} |",
                    flush=True,
                )


if __name__ == "__main__":
    main()
