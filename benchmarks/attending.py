"""Cost of measured attention logits, next to TransformerLens's hooks.

``python -m benchmarks.attending [ROUNDS]`` runs a random GPT-2 small over one batch of 4 × 512
tokens on one thread: a plain pass and a measured one in turn, with SDPA and with plain operations,
and, where TransformerLens 4 is installed, its own plain pass and one with hooks on scores and
pattern. All passes alternate within a round. A row has the least and the median processor time of
each, what the measurement adds, and the memory that the measured pass adds to the plain one's peak.

Each kind runs in a process of its own, so that peaks of memory are its own; the processes take
turns pass by pass.
"""

from __future__ import annotations

import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

SEQUENCES, TOKENS, VOCABULARY = 4, 512, 50257
KINDS = ("sdpa", "eager", "transformer-lens")


def gpt2() -> Any:
    """Random GPT-2 small, and its batch."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    return model, torch.randint(VOCABULARY, (SEQUENCES, TOKENS))


def measured_by_wqk(kernel: str) -> tuple[Callable[[], object], Callable[[], object]]:
    """Return a plain pass with this kernel, and the pass that `wqk.logits` measures."""
    import torch

    import wqk

    model, tokens = gpt2()
    model.set_attn_implementation(kernel)
    batch = {"input_ids": tokens, "use_cache": False}

    def plain() -> object:
        with torch.no_grad():
            return model(**batch)

    return plain, lambda: wqk.logits(model, batch)


def measured_by_hooks() -> tuple[Callable[[], object], Callable[[], object]]:
    """Return TransformerLens's plain pass, and one with hooks that reduce scores and patterns."""
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    model, tokens = gpt2()
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        bridge = TransformerBridge.boot_transformers(folder, hf_model=model, device="cpu")
    reduced: dict[str, Any] = {}

    def of_scores(scores: Any, hook: Any) -> None:
        reduced[hook.name] = scores.amax((0, 2, 3))

    def of_pattern(weights: Any, hook: Any) -> None:
        entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
        reduced[hook.name] = entropy, weights.amax(-1).mean((0, 2))

    hooks = []
    for layer in range(12):
        hooks.append((f"blocks.{layer}.attn.hook_attn_scores", of_scores))
        hooks.append((f"blocks.{layer}.attn.hook_pattern", of_pattern))

    def plain() -> object:
        with torch.no_grad():
            return bridge(tokens, return_type=None)

    def hooked() -> object:
        with torch.no_grad():
            bridge.run_with_hooks(tokens, return_type=None, fwd_hooks=hooks)
        assert len(reduced) == len(hooks)
        return reduced

    return plain, hooked


def work(kind: str, connection: Connection) -> None:
    """Run passes on demand: answer each number of a pass with its processor time and the peak."""
    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        passes = measured_by_hooks() if kind == "transformer-lens" else measured_by_wqk(kind)
    except ImportError as error:
        connection.send(str(error))
        return
    connection.send("")
    while True:
        number = connection.recv()
        if number is None:
            return
        start = time.process_time()
        passes[number]()
        seconds = time.process_time() - start
        connection.send((seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024))


def main() -> None:
    """Print a row for each kind of measurement."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 3
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("spawn")
    workers: dict[str, Connection] = {}
    for kind in KINDS:
        connection, end = context.Pipe()
        context.Process(target=work, args=(kind, end), daemon=True).start()
        reason = connection.recv()
        if reason:
            print(f"{kind}: not run ({reason})")
        else:
            workers[kind] = connection
    seconds: dict[tuple[str, int], list[float]] = {
        (kind, number): [] for kind in workers for number in (0, 1)
    }
    peaks: dict[tuple[str, int], float] = {}
    for _ in range(rounds + 1):
        for number in (0, 1):
            for kind, connection in workers.items():
                connection.send(number)
                duration, peak = connection.recv()
                seconds[kind, number].append(duration)
                peaks.setdefault((kind, number), peak)
    print(
        "| kind | plain: least, median | measured: least, median | adds: least, median | memory |"
    )
    print("|:--|--:|--:|--:|--:|")
    for kind in workers:
        plain, measured = (seconds[kind, number][1:] for number in (0, 1))  # after a warm-up
        added = [after - before for before, after in zip(plain, measured, strict=True)]
        cells = [
            f"{min(values):.2f} s, {statistics.median(values):.2f} s"
            for values in (plain, measured)
        ]
        memory = peaks[kind, 1] - peaks[kind, 0]
        gain = f"{min(measured) - min(plain):.2f} s, {statistics.median(added):.2f} s"
        print(f"| {kind} | {cells[0]} | {cells[1]} | {gain} | {memory:.0f} MB |")
    for connection in workers.values():
        connection.send(None)


if __name__ == "__main__":
    main()
