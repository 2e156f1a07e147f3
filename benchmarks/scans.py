"""Scans next to what the machine allows, and next to plain dense products: ``benchmarks.scans``.

Whatever is compared takes turns within rounds, and ratios are taken within a round, so that they
hold where absolute times drift (`benchmarks.rounds`).
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import wqk
from benchmarks.dense import head_batch, head_loop, layer_product
from benchmarks.generate import BERT_BASE, LLAMA_3_8B, query_key_bytes, write_checkpoint
from benchmarks.machine import PRODUCT, operations, own_products, product, reading
from benchmarks.rounds import Seconds, alternate, estimate
from wqk import open_checkpoint, same, scan
from wqk._machine import one_blas_thread
from wqk.attention import Block
from wqk.checkpoints.modules import StateDict
from wqk.forms.spectra import spectrum

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.generate import Shape

# Time from disk to table over the limit, and processor time over that of its own products, at most.
AIMS = {"BERT-base": 1.5, "LLaMA-3-8B": 1.3}
OWN_AIMS = {"BERT-base": 1.35, "LLaMA-3-8B": 1.2}

SMALL = 2048  # widths below which all heads fit into one batched dense product


def print_limits(folder: Path, shape: Shape, rounds: int) -> None:
    """One line for layers and one for layers with all heads: time, limit, and their ratio."""
    count = query_key_bytes(shape)
    seconds = alternate(
        {
            "read": reading(folder / "model.safetensors", count),
            "layers": lambda: scan(folder, heads=False),
            "product": product(),
            "product on one thread": product(1),
            "heads": lambda: scan(folder),
        },
        rounds,
    )
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"\n**{shape.name}: {shape.layers} layers, d {shape.width}, {shape.heads} heads over "
        f"{shape.key_heads} key heads of width {shape.head_width}, {shape.dtype}, "
        f"{count / 1e6:.0f} of {size / 1e6:.0f} MB**\n\n"
        "| from disk to table | time | limit | time / limit | processor | limit | "
        "processor / limit | aim | |\n|:--|--:|--:|--:|--:|--:|--:|--:|:--|"
    )
    read, full, single = (seconds[n] for n in ("read", "product", "product on one thread"))
    for name, heads in (("layers", False), ("heads", True)):
        products = shape.layers * operations(shape, heads) / PRODUCT
        limits = Seconds(
            products * full.clock + read.clock, products * single.processor + read.processor
        )
        cells = []
        for times, limit in zip(seconds[name], limits, strict=True):
            ratio = estimate(times / limit)
            cells += [f"{1e3 * np.median(values):.0f} ms" for values in (times, limit)]
            cells.append(str(ratio))
        label, aim = "layers and all heads" if heads else "layers", AIMS[shape.name]
        print(f"| {label} | {' | '.join(cells)} | {aim} | {ratio.against(aim)} |")
    rate, bandwidth = PRODUCT / np.median(full.clock), count / np.median(read.clock)
    least = PRODUCT / np.median(single.processor)
    print(
        f"\nFloat32 products at {rate / 1e9:.0f} GFLOP/s by the clock on all cores, at "
        f"{least / 1e9:.0f} for each second of one core; reading at {bandwidth / 1e9:.1f} GB/s "
        f"(medians of {rounds} rounds). Peak memory of the scan: {peak_memory(folder):.0f} MB, of "
        f"which {peak_memory():.0f} MB are Python and its libraries."
    )


def print_products(folder: Path, shape: Shape, rounds: int) -> None:
    """Print a scan next to its matrix products and its reads."""
    seconds = alternate(
        {
            "read": reading(folder / "model.safetensors", query_key_bytes(shape)),
            "scan": lambda: scan(folder),
            "products": own_products(folder),
        },
        rounds,
    )
    read, scan_seconds, products = (
        seconds[name].processor for name in ("read", "scan", "products")
    )
    ratio, aim = estimate(scan_seconds / (products + read)), OWN_AIMS[shape.name]
    cells = (f"{1e3 * np.median(taken):.0f} ms" for taken in (scan_seconds, products, read))
    print(
        "\n| all layers and heads, processor time | of these, its products | reads "
        "| scan / (products + reads) | aim | |\n|--:|--:|--:|--:|--:|:--|\n"
        f"| {' | '.join(cells)} | {ratio} | {aim} | {ratio.against(aim)} |"
    )


def print_dense(folder: Path, shape: Shape, rounds: int) -> None:
    """One block in memory, on one core: our scores next to dense products that do less."""
    checkpoint = open_checkpoint(folder)
    plan = wqk.open(checkpoint).plans[0]
    parts = [side.projection.part for side in (plan.query, plan.key)]
    stored = {part.name: array for part, array in zip(parts, checkpoint.read(parts), strict=True)}
    block = StateDict(stored, dict(checkpoint.config, num_hidden_layers=1), shape.name)
    attention = Block(checkpoint, plan)
    query, key = attention.query.weight, attention.key.weight
    contenders: dict[str, Callable[[], object]] = {
        "layer": lambda: scan(block, heads=False),
        "heads": lambda: scan(block),
        "the layer, one d × d product": lambda: layer_product(query, key),
        "all heads, a loop of d × d products": lambda: head_loop(query, key),
    }
    if shape.width < SMALL:
        contenders["all heads, batched d × d products"] = lambda: head_batch(query, key)
    with one_blas_thread():  # a single block is scored on one core
        seconds = alternate(contenders, rounds)
    layer, heads = seconds.pop("layer"), seconds.pop("heads")
    print(
        "\n| one block in memory, on one core | dense | wqk | dense / wqk | of the processor |\n"
        "|:--|--:|--:|--:|--:|"
    )
    for name, dense in seconds.items():
        ours = layer if name.startswith("the layer") else heads
        print(
            f"| {name} | {1e3 * np.median(dense.clock):.1f} ms | "
            f"{1e3 * np.median(ours.clock):.1f} ms | {estimate(dense.clock / ours.clock)} | "
            f"{estimate(dense.processor / ours.processor)} |"
        )
    print("\n`wqk` of all heads scores the layer, its null and its head terms in the same time.")


def print_measures(folder: Path, shape: Shape, rounds: int) -> None:
    """Print scans with measures next to the plain scan, and `wqk.same` of equal checkpoints.

    All heads and layers are scored; the spectra of the heads alone are taken from one block.
    """
    checkpoint = open_checkpoint(folder)
    heads = Block(checkpoint, wqk.open(checkpoint).plans[0]).heads
    seconds = alternate(
        {
            "scan": lambda: scan(folder),
            "scan with σ₁": lambda: scan(folder, measures=["spectral_norm"]),
            "scan with spectra": lambda: scan(folder, measures=["spectrum"]),
            "`same`": lambda: same(folder, folder),
            "spectra of one block's heads": lambda: spectrum(heads),
        },
        rounds,
    )
    print("\n| all layers and heads | time | time / scan | of the processor |\n|:--|--:|--:|--:|")
    for name, taken in seconds.items():
        ratio, extra = (estimate(t / s) for t, s in zip(taken, seconds["scan"], strict=True))
        print(f"| {name} | {1e3 * np.median(taken.clock):.0f} ms | {ratio} | {extra} |")
    extra = estimate(seconds["scan with σ₁"].processor / seconds["scan"].processor)
    print(f"\nσ₁ on top of a scan, aim 1.1: {extra.against(1.1)}.")


def peak_memory(*folders: Path) -> float:
    """Peak resident megabytes of a process that scans folders, or only imports (Linux)."""
    code = (
        "import sys, wqk\nwqk.scan\n"
        "for folder in sys.argv[1:]: wqk.scan(folder)\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    command = [sys.executable, "-c", code, *map(str, folders)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    return int(done.stdout) / 1024


def main() -> None:
    """Print everything for both shapes; ``--layers 32`` takes all of LLaMA-3-8B's instead of 4."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.layers)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        for shape in (BERT_BASE, replace(LLAMA_3_8B, layers=options.layers)):
            folder = write_checkpoint(Path(place) / shape.name, shape)
            rounds = options.rounds if shape.width < SMALL else 3
            print_limits(
                folder, shape, options.rounds if rounds > 3 else max(5, options.rounds // 2)
            )
            print_products(folder, shape, rounds)
            print_dense(folder, shape, rounds)
            print_measures(folder, shape, rounds)


if __name__ == "__main__":
    main()
