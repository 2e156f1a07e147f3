"""Training speed against a plain Trainer, step by step from one to the other.

::

    python -m benchmarks.training --corpus DIR

DIR is a token store of words whose documents are short, such as comments. The plain way, which is
how the paper's models were trained, takes one document a row, pads it to 512 tokens, masks in the
collator, attends eagerly, and computes logits everywhere. Every line of the table after it changes
one thing, down to the recipe ``fast``. All take equally many positions in a batch, and train a model
of 4 layers and width 256 in turn, one round after the other, in one process on one thread.

Times are of the processor, so that other work on the machine does not count as far as possible. Only
positions that carry text are counted. Gains are medians over rounds of the ratio to the plain way
in the same round; spread is (max − min) / median.

Axis letters: N tokens of a row.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from transformers import (
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers.utils import logging

from wqk.training.corpus import TokenStore
from wqk.training.models import build_model
from wqk.training.recipe import Recipe, make_recipe
from wqk.training.saving import tokenizer_files
from wqk.training.training import train

if TYPE_CHECKING:
    from collections.abc import Callable

    from wqk.training.progress import TrainingProgress

LENGTH = 512  # tokens that rows are padded to, as published


class Moment(NamedTuple):
    """Seconds: of the processor, over all threads, and of the wall."""

    processor: float
    wall: float


class Clock(TrainerCallback):  # type: ignore[misc]
    """Notes when each step ends, and tells how long the later ones took."""

    def __init__(self) -> None:
        self.moments: dict[int, Moment] = {}

    def note(self, step: int) -> None:
        self.moments.setdefault(step, Moment(time.process_time(), time.perf_counter()))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.note(state.global_step)

    def on_progress(self, done: TrainingProgress) -> None:
        self.note(done.steps_done)

    def seconds(self) -> Moment:
        """Medians over all steps but the first, which warms up."""
        pairs = [(self.moments[step - 1], self.moments[step]) for step in range(2, max(self.moments) + 1)]
        return Moment(*(
            statistics.median(end - start for start, end in zip(*column, strict=True))
            for column in zip(*(zip(*pair, strict=True) for pair in []), strict=True)
        ))
