"""Cost of a monitor relative to training, on this machine: ``python -m benchmarks.monitoring``.

A training step, a look, and a step in which attention logits are measured are timed in turn, in one
process and on the same model. Times are of the processor, over all threads, so that other work on
the machine does not count; the step takes one thread, which wastes nothing on waiting. A look
copies the queries and keys, scores all layers and heads and their changes, and appends the rows to
the files; what measuring logits takes is the difference of the two steps. Times are medians; spread
is (max − min) / median.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from transformers import BertConfig, BertForMaskedLM, LlamaConfig, LlamaForCausalLM

import wqk
from wqk.live.logits import LogitMeter

if TYPE_CHECKING:
    from collections.abc import Callable

MODELS = {
    "BERT-mini, 4 layers, d 256": BertConfig(
        hidden_size=256, num_hidden_layers=4, num_attention_heads=4, intermediate_size=1024
    ),
    "BERT-base, 12 layers, d 768": BertConfig(),
    # Step and look both grow with the layers, so that one stands for all.
    "one layer of LLaMA-3-8B, d 4096": LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=8,
        intermediate_size=14336,
        vocab_size=1000,
    ),
}
CADENCES = (1000, 200)
AIM = 0.01  # share of a step, of looks that often


def seconds(run: Callable[[], object]) -> float:
    """Return the processor time over all threads."""
    start = time.process_time()
    run()
    return time.process_time() - start


def measure(
    config: BertConfig | LlamaConfig, batch: int, tokens: int, rounds: int
) -> list[list[float]]:
    """Seconds of each training step, and of each look."""
    torch.manual_seed(0)
    kind = LlamaForCausalLM if isinstance(config, LlamaConfig) else BertForMaskedLM
    model = kind(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    inputs = torch.randint(config.vocab_size, (batch, tokens))

    def train() -> None:
        loss = model(inputs, labels=inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        monitor = wqk.Monitor(model, Path(folder) / "scores.jsonl")
        train()
        monitor.look(0)
        meter = LogitMeter(model)

        def train_measured() -> None:
            meter.start()
            train()
            _ = meter.logits

        times = [
            (seconds(train), seconds(lambda step=step: monitor.look(step)), seconds(train_measured))
            for step in range(1, rounds + 1)
        ]
    plain, looks, measured = (list(column) for column in zip(*times, strict=True))
    return [
        plain,
        looks,
        [with_look - without_look for without_look, with_look in zip(plain, measured, strict=True)],
    ]


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--batch", type=int, default=8, help="sequences in a step")
    parser.add_argument("--tokens", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, PyTorch {torch.__version__}, "
        f"{arguments.batch} sequences of {arguments.tokens} tokens a step\n\n"
        "| model | step | spread | look | spread | logits | spread |"
        + "".join(f" look every {every} | logits |" for every in CADENCES)
        + f" looks, aim {AIM:.0%} |\n|:--|{'--:|' * (6 + 2 * len(CADENCES))}:--|"
    )
    for name, config in MODELS.items():
        cells = [name]
        medians = []
        for times in measure(config, arguments.batch, arguments.tokens, arguments.rounds):
            medians.append(statistics.median(times))
            spread = (max(times) - min(times)) / medians[-1]
            cells += [f"{medians[-1] * 1e3:.0f} ms", f"{spread:.0%}"]
        step, *parts = medians
        cells += [f"{part / (every * step):.3%}" for every in CADENCES for part in parts]
        cells.append("met" if parts[0] <= AIM * min(CADENCES) * step else "missed")
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
