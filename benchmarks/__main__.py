"""Run every measurement and print it as Markdown: ``make bench``.

Everything is timed in one run on one machine, so that ratios can be trusted where absolute times
cannot. Times are medians; spread is (max − min) / median.

Axes: H query heads, G key heads, R head width, D width.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.dense import head_batch, head_loop, layer_product
from benchmarks.generate import (
    BERT_BASE,
    LLAMA_3_8B,
    Shape,
    query_key_bytes,
    write_checkpoint,
)
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.checkpoints.live import StateDict
from wqk.scanning.scan import scan

if TYPE_CHECKING:
    from collections.abc import Callable


class Timing(NamedTuple):
    """Seconds."""

    median: float
    spread: float


def timed(run: Callable[[], object], repeats: int = 7) -> Timing:
    """Median and spread of a call's wall time, after one call that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    middle = statistics.median(times)
    return Timing(middle, (max(times) - min(times)) / middle)


def matrix_product_rate() -> float:
    """Floating-point operations each second of a large float32 product."""
    side = 2048
    a, b = np.random.default_rng(0).standard_normal((2, side, side), np.float32)
    return 2 * side**3 / timed(lambda: a @ b).median


def read_bandwidth(path: Path, count: int) -> float:
    """Bytes each second of the file's first ``count``, out of the page cache into one buffer."""
    buffer = bytearray(2**22)

    def read() -> None:
        with path.open("rb", buffering=0) as file:
            for _ in range(0, count, len(buffer)):
                file.readinto(buffer)

    return count / timed(read).median


def operations(shape: Shape, heads: bool) -> float:
    """Fewest floating-point operations known for a layer's, and its heads', scores.

    A layer of rank r = G R: two symmetric Gram matrices at D r² each, BᵀA, and the row and column
    norms at 2 D r² each; or all of M at 2 D² r. Its within-heads term: BᵀA of every head. A head:
    the same Gram matrices (the key's shared in its group) and norms with R for r.
    """
    width, rank = shape.width, shape.key_heads * shape.head_width
    each = width * shape.head_width**2
    layer = min(8 * width * rank**2, 2 * width**2 * rank) + shape.heads * 2 * each
    return layer + (shape.heads * 5 * each + shape.key_heads * each if heads else 0)


def peak_memory(folder: Path) -> tuple[float, float]:
    """Peak resident megabytes of a process that scans, and of one that only imports (Linux)."""
    code = (
        "import sys, wqk.scanning.scan\n"
        "for folder in sys.argv[1:]: wqk.scanning.scan.scan(folder)\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )

    def peak(*arguments: str) -> float:
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, capture_output=True, check=True, text=True)
        return int(done.stdout) / 1024

    return peak(str(folder)), peak()


def measure_shape(folder: Path, shape: Shape, rate: float) -> None:
    """Print one shape's tables."""
    file = folder / "model.safetensors"
    wanted = query_key_bytes(shape)
    bandwidth = read_bandwidth(file, wanted)
    checkpoint = open_checkpoint(folder)
    plans = attention_plans(checkpoint)
    in_memory = StateDict(
        {
            part.name: checkpoint.read([part])[0]
            for plan in plans
            for part in (plan.query.projection.part, plan.key.projection.part)
        },
        checkpoint.config,
        shape.name,
    )
    attention = load_attention(checkpoint, plans[0])
    query, key = attention.query.weight, attention.key.weight
    small = shape.width < 2048
    few = 7 if small else 3

    print(
        f"\n## {shape.name}: {shape.layers} layers, d {shape.width}, {shape.heads} heads over "
        f"{shape.key_heads} key heads of width {shape.head_width}, {shape.dtype}, "
        f"{wanted / 1e6:.0f} of {file.stat().st_size / 1e6:.0f} MB\n"
    )
    print("| from disk to table | time | spread | limit | time / limit |\n|:--|--:|--:|--:|--:|")
    for heads, name in ((False, "layers"), (True, "layers and all heads")):
        took = timed(lambda heads=heads: scan(folder, heads=heads))
        limit = shape.layers * operations(shape, heads) / rate + wanted / bandwidth
        print(
            f"| {name} | {took.median * 1e3:.0f} ms | {took.spread:.0%} | {limit * 1e3:.0f} ms | "
            f"{took.median / limit:.2f} |"
        )

    layers, both = (timed(lambda h=heads: scan(in_memory, heads=h)) for heads in (False, True))
    ours_layer = layers.median / shape.layers
    ours_heads = (both.median - layers.median) / shape.layers
    comparisons = [
        ("the layer, one d × d product", layer_product, ours_layer),
        ("all heads, a loop of d × d products", head_loop, ours_heads),
    ]
    if small:
        comparisons.append(("all heads, batched d × d products", head_batch, ours_heads))
    print("\n| one block in memory | dense | spread | wqk | ratio |\n|:--|--:|--:|--:|--:|")
    for name, dense, ours in comparisons:
        took = timed(lambda dense=dense: dense(query, key), few)
        print(
            f"| {name} | {took.median * 1e3:.1f} ms | {took.spread:.0%} | {ours * 1e3:.1f} ms | "
            f"{took.median / ours:.1f} |"
        )
    peak, empty = peak_memory(folder)
    print(
        f"\nPeak memory of the scan: {peak:.0f} MB, of which {empty:.0f} MB are Python and its "
        f"libraries; read bandwidth {bandwidth / 1e9:.1f} GB/s."
    )


def help_time() -> Timing:
    """Seconds until ``wqk --help`` has printed."""
    command = [sys.executable, "-m", "wqk", "--help"]
    return timed(lambda: subprocess.run(command, capture_output=True, check=True))


def main() -> None:
    """Print all measurements; ``--layers 32`` takes all of LLaMA-3-8B's instead of 4."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.layers)
    llama = replace(LLAMA_3_8B, layers=parser.parse_args().layers)
    rate = matrix_product_rate()
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}, "
        f"float32 products at {rate / 1e9:.0f} GFLOP/s"
    )
    took = help_time()
    print(f"`wqk --help`: {took.median * 1e3:.0f} ms (spread {took.spread:.0%})")
    with tempfile.TemporaryDirectory() as folder:
        for shape in (BERT_BASE, llama):
            measure_shape(write_checkpoint(Path(folder) / shape.name, shape), shape, rate)


if __name__ == "__main__":
    main()
