"""Cost of a `wqk.Clipper` in a training step: ``python -m benchmarks.clipped_steps [ROUNDS]``.

A plain step and steps with a clipper alternate, on one thread, with random models and tokens. Each
step is forward, backward and AdamW; the limit is never passed, so that measuring alone is timed. A
row has the medians of the plain step and of the measured one, the median and the range of what the
clipper adds in a round, and the same of a step that is not due.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers

import wqk

LIMIT = 1e6
NEVER = 1_000_000


class Workload(NamedTuple):
    """A model that is trained, and the shape of its batches.

    Attributes
    ----------
    title
        Name in the table.
    make
        Makes the model.
    sequences, tokens
        Shape of a batch.
    measured_sequences
        Number of sequences that the clipper measures; None for all.
    """

    title: str
    make: Callable[[], Any]
    sequences: int
    tokens: int
    measured_sequences: int | None = None


def bert_mini() -> Any:
    """Return a random BERT-mini."""
    config = transformers.BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    )
    return transformers.BertForMaskedLM(config)


def small_gpt2() -> Any:
    """Return a random GPT-2 of six layers."""
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=384, n_layer=6, n_head=6))


WORKLOADS = (
    Workload("BERT-mini, 4 layers, d 256, 8 × 128 tokens, all sequences", bert_mini, 8, 128),
    Workload("the same, `sequences=4`", bert_mini, 8, 128, 4),
    Workload("GPT-2, 6 layers, d 384, 4 × 512 tokens, all sequences", small_gpt2, 4, 512),
)


class Trainee:
    """A model in training, with or without a clipper."""

    def __init__(self, workload: Workload, every: int | None) -> None:
        torch.manual_seed(0)
        self.model = workload.make().train()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        vocabulary = self.model.config.vocab_size
        self.tokens = torch.randint(vocabulary, (workload.sequences, workload.tokens))
        self.clipper = None
        if every is not None:
            self.clipper = wqk.Clipper(
                self.model, LIMIT, every=every, sequences=workload.measured_sequences
            )

    def step(self) -> float:
        """Run one step; return its processor time in seconds."""
        start = time.process_time()
        self.model(input_ids=self.tokens, labels=self.tokens).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.clipper is not None:
            self.clipper()
        return time.process_time() - start


def spread(shares: list[float]) -> str:
    """Return the median and the range of shares, in percent."""
    low, middle, high = min(shares), statistics.median(shares), max(shares)
    return f"{middle:+.0%} [{low:+.0%}, {high:+.0%}]"


def main() -> None:
    """Print a row for each workload."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 7
    torch.set_num_threads(1)
    print("| training step, random tokens | plain | measured | in addition | a step not due |")
    print("|:--|--:|--:|--:|--:|")
    for workload in WORKLOADS:
        trainees = [Trainee(workload, every) for every in (None, 1, NEVER)]
        for trainee in trainees:
            trainee.step()
        seconds = [[trainee.step() for trainee in trainees] for _ in range(rounds)]
        plain, measured, idle = (list(column) for column in zip(*seconds, strict=True))
        added = [
            with_clipper / step - 1 for step, with_clipper in zip(plain, measured, strict=True)
        ]
        not_due = [with_clipper / step - 1 for step, with_clipper in zip(plain, idle, strict=True)]
        medians = f"{statistics.median(plain):.2f} s | {statistics.median(measured):.2f} s"
        print(f"| {workload.title} | {medians} | {spread(added)} | {spread(not_due)} |", flush=True)


if __name__ == "__main__":
    main()
