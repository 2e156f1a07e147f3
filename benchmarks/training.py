"""Training speed, from a plain Trainer to ours: ``python -m benchmarks.training --corpus DIR``.

DIR is a token store of words whose documents are short, such as comments. The plain way, which is
how the paper's models were trained, takes one document a row, pads it to 512 tokens, masks in the
collator, attends eagerly and computes logits everywhere. Each line after it changes one thing more,
down to the recipe ``fast``. All train a model of 4 layers and width 256 on equally many positions a
batch, in turn, round after round, in one process on one thread.

Positions that carry text are counted, no others. Times are of the processor, so that other work on
the machine does not count. Speeds and gains are medians over rounds; a gain compares with the plain
way in the same round; spread is (max − min) / median.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import (
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.models import build_model
from wqk_lab.training.recipe import Recipe, make_recipe
from wqk_lab.training.training import train

if TYPE_CHECKING:
    from collections.abc import Callable

    from wqk_lab.training.progress import TrainingProgress

    # Trains a few steps in a folder, and says when each of them ends.
    Run = Callable[[str, "Clock"], None]

LENGTH = 512  # of a row, as published
ROWS = 1024  # for the plain way: more than it gets through


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ends, in seconds of the processor (over all threads) and of the wall."""

    def __init__(self) -> None:
        self.moments: dict[int, tuple[float, float]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """As transformers calls it."""
        self.note(state.global_step)

    def on_progress(self, done: TrainingProgress) -> None:
        """As `train` calls it, more than once at some steps."""
        if done.steps_done:
            self.note(done.steps_done)

    def note(self, step: int) -> None:
        """Only the first time that a step is heard of."""
        self.moments.setdefault(step, (time.process_time(), time.perf_counter()))

    def seconds(self) -> np.ndarray:
        """Return a step's, on either clock: medians without the first step, which warms up."""
        return np.median(np.diff(list(self.moments.values()), axis=0), axis=0)


def padded_rows(store: TokenStore) -> list[dict[str, np.ndarray]]:
    """One document a row, cut or padded to its length."""
    tokens, starts = store.tokens(), store.documents()
    rows = []
    for start, end in pairwise(starts[: ROWS + 1]):
        text = tokens[start : min(end, start + LENGTH)].astype(np.int64)
        row = np.full(LENGTH, store.special["padding"])
        row[: len(text)] = text
        rows.append({"input_ids": row, "attention_mask": (np.arange(LENGTH) < len(text)) * 1})
    return rows


def full_rows(store: TokenStore) -> list[dict[str, np.ndarray]]:
    """Return the same stream cut every that many tokens."""
    count = min(ROWS, len(store.tokens()) // LENGTH)
    rows = store.tokens()[: count * LENGTH].astype(np.int64).reshape(count, LENGTH)
    return [{"input_ids": row, "attention_mask": np.ones_like(row)} for row in rows]


def text_share(store: TokenStore) -> float:
    """Return the share of text in the padded rows of all documents."""
    return float(np.minimum(np.diff(store.documents()), LENGTH).mean()) / LENGTH


def train_plainly(
    recipe: Recipe, store: TokenStore, rows: list[dict[str, np.ndarray]], folder: str, clock: Clock
) -> None:
    """Train with transformers and nothing else, as people usually write it."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(store.tokenizer), pad_token="[PAD]", mask_token="[MASK]"
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=recipe.steps,
        per_device_train_batch_size=recipe.batch,
        learning_rate=recipe.learning_rate,
        weight_decay=recipe.weight_decay,
        use_cpu=True,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(
        model=build_model(recipe, store.vocabulary_size, store.special),
        args=arguments,
        train_dataset=rows,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm_probability=recipe.mask_share),
        callbacks=[clock],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()


def train_ours(recipe: Recipe, store: TokenStore, folder: str, clock: Clock) -> None:
    """Train with everything: metrics, scores and a checkpoint at the end."""
    train(recipe, store.folder, folder, on_progress=clock.on_progress)


def ladder(store: TokenStore, positions: int, steps: int) -> dict[str, tuple[float, Run]]:
    """Return the changes of each line of the table, its share of text, and its command."""
    rarely = dict.fromkeys(("held_out_every", "score_every", "save_every"), steps + 1)
    short = {"warmup": 0, "steps": steps + 1, "log_every": 1, "held_out_blocks": 1, **rarely}
    shape = {"size": "mini", "accumulation": 1, "keep_checkpoints": "last", **short}
    batch = positions // LENGTH
    paper = make_recipe("paper", batch=batch, attention="eager", **shape)
    without_dropout = replace(paper, dropout=0.0)
    fused = replace(without_dropout, attention="sdpa")
    fast = make_recipe("fast", **shape)
    fast = replace(fast, batch=positions // fast.block)
    short = replace(fused, block=fast.block, batch=fast.batch)
    return {
        f"plain Trainer, rows padded to {LENGTH}": (
            text_share(store),
            partial(train_plainly, paper, store, padded_rows(store)),
        ),
        "rows full of text": (1.0, partial(train_plainly, paper, store, full_rows(store))),
        "`wqk`: logits where predicted": (1.0, partial(train_ours, paper, store)),
        "no dropout": (1.0, partial(train_ours, without_dropout, store)),
        "fused attention": (1.0, partial(train_ours, fused, store)),
        f"blocks of {fast.block}": (1.0, partial(train_ours, short, store)),
        "recipe `fast`: pre-norm, 30 % predicted": (1.0, partial(train_ours, fast, store)),
    }


def measure(runs: list[Run], rounds: int) -> np.ndarray:
    """Seconds of a step in every round, of every run, on both clocks."""
    seconds = np.empty((rounds, len(runs), 2))
    for number, row in enumerate(seconds, 1):
        for place, run in enumerate(runs):
            clock = Clock()
            with tempfile.TemporaryDirectory() as folder:
                run(f"{folder}/run", clock)
            row[place] = clock.seconds()
        print(f"round {number} of {rounds}: {row[:, 0].round(2)} s", file=sys.stderr, flush=True)
    return seconds


def spread(values: np.ndarray) -> str:
    """(max − min) / median."""
    return f"{(values.max() - values.min()) / np.median(values):.0%}"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--corpus", required=True, help="token store of words")
    parser.add_argument("--positions", type=int, default=4096, help="in a batch (%(default)s)")
    parser.add_argument("--steps", type=int, default=3, help="timed in a round (%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="(%(default)s)")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    store = TokenStore.open(arguments.corpus)
    rungs = ladder(store, arguments.positions, arguments.steps)
    shares = np.array([share for share, _ in rungs.values()])
    seconds = measure([run for _, run in rungs.values()], arguments.rounds)
    speeds = arguments.positions * shares[:, None] / seconds
    gains = speeds / speeds[:, :1]
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, one thread, "
        f"{arguments.positions} positions a step, {shares[0]:.1%} text in padded rows\n\n"
        "| | text tokens a second | spread | gain | spread | gain by the wall |\n"
        "|:--|--:|--:|--:|--:|--:|"
    )
    for number, name in enumerate(rungs):
        speed, gain, by_wall = speeds[:, number, 0], gains[:, number, 0], gains[:, number, 1]
        print(
            f"| {name} | {np.median(speed):,.0f} | {spread(speed)} | {np.median(gain):.1f} "
            f"| {spread(gain)} | {np.median(by_wall):.1f} |"
        )


if __name__ == "__main__":
    main()
