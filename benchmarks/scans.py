"""Scans beside the machine's limit and beside plain dense products, in turn within each round."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.dense import head_batch, head_loop, layer_product
from benchmarks.generate import query_key_bytes
from benchmarks.machine import operations, product_seconds, read_seconds
from benchmarks.rounds import alternate, estimate
from wqk import open_checkpoint, same, scan
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints.live import StateDict
from wqk.forms.spectra import spectrum

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from benchmarks.generate import Shape

# Time from disk to table over the limit, at most.
AIMS = {"BERT-base": 1.5, "LLaMA-3-8B": 1.3}

SMALL = 2048  # widths below which all heads fit into one batched dense product


def print_limits(folder: Path, shape: Shape, rounds: int) -> None:
    """One line for layers and one for layers with all heads: time, limit, and their ratio."""
    count = query_key_bytes(shape)
    seconds = alternate(
        {
            "read": read_seconds(folder / "model.safetensors", count),
            "layers": lambda: scan(folder, heads=False) and None,
            "product": product_seconds(),
            "heads": lambda: scan(folder) and None,
        },
        rounds,
    )
    size = (folder / "model.safetensors").stat().st_size
    print(
        f"\n## {shape.name}: {shape.layers} layers, d {shape.width}, {shape.heads} heads over "
        f"{shape.key_heads} key heads of width {shape.head_width}, {shape.dtype}, "
        f"{count / 1e6:.0f} of {size / 1e6:.0f} MB\n\n"
        "| from disk to table | time | limit | time / limit | aim | |\n|:--|--:|--:|--:|--:|:--|"
    )
    for name, heads in (("layers", False), ("heads", True)):
        limit = shape.layers * operations(shape, heads) * seconds["product"] + seconds["read"]
        ratio, aim = estimate(seconds[name] / limit), AIMS[shape.name]
        label = "layers and all heads" if heads else "layers"
        print(
            f"| {label} | {1e3 * estimate(seconds[name]).median:.0f} ms | "
            f"{1e3 * estimate(limit).median:.0f} ms | {ratio} | {aim} | {ratio.against(aim)} |"
        )
    rate, bandwidth = (
        1 / estimate(seconds["product"]).median,
        count / estimate(seconds["read"]).median,
    )
    print(
        f"\nFloat32 products at {rate / 1e9:.0f} GFLOP/s, reading at {bandwidth / 1e9:.1f} GB/s "
        f"(medians of {rounds} rounds). Peak memory of the scan: {peak_memory(folder):.0f} MB, of "
        f"which {peak_memory():.0f} MB are Python and its libraries."
    )


def print_dense(folder: Path, shape: Shape, rounds: int) -> None:
    """One block in memory: our scores beside dense products that do less."""
    checkpoint = open_checkpoint(folder)
    plan = attention_plans(checkpoint)[0]
    parts = [side.projection.part for side in (plan.query, plan.key)]
    stored = {part.name: array for part, array in zip(parts, checkpoint.read(parts), strict=True)}
    block = StateDict(stored, dict(checkpoint.config, num_hidden_layers=1), shape.name)
    attention = load_attention(checkpoint, plan)
    query, key = attention.query.weight, attention.key.weight
    contenders: dict[str, Callable[[], None]] = {
        "layer": lambda: scan(block, heads=False) and None,
        "heads": lambda: scan(block) and None,
        "the layer, one d × d product": lambda: layer_product(query, key),
        "all heads, a loop of d × d products": lambda: head_loop(query, key),
    }
    if shape.width < SMALL:
        contenders["all heads, batched d × d products"] = lambda: head_batch(query, key)
    seconds = alternate(contenders, rounds)
    layer, heads = seconds.pop("layer"), seconds.pop("heads")
    print("\n| one block in memory | dense | wqk | dense / wqk |\n|:--|--:|--:|--:|")
    for name, dense in seconds.items():
        ours = layer if name.startswith("the layer") else heads
        print(
            f"| {name} | {1e3 * estimate(dense).median:.1f} ms | "
            f"{1e3 * estimate(ours).median:.1f} ms | {estimate(dense / ours)} |"
        )
    print("\n`wqk` of all heads scores the layer, its null and its head terms in the same time.")


def print_measures(folder: Path, shape: Shape, rounds: int) -> None:
    """Scans with measures beside the plain one, and `wqk.same` of a checkpoint with itself.

    All heads and layers are scored; the spectra of the heads alone are taken from one block.
    """
    checkpoint = open_checkpoint(folder)
    heads = load_attention(checkpoint, attention_plans(checkpoint)[0]).heads
    seconds = alternate(
        {
            "scan": lambda: scan(folder) and None,
            "scan with σ₁": lambda: scan(folder, measures=["spectral_norm"]) and None,
            "scan with spectra": lambda: scan(folder, measures=["spectrum"]) and None,
            "`same`": lambda: same(folder, folder) and None,
            "spectra of one block's heads": lambda: spectrum(heads) and None,
        },
        rounds,
    )
    print("\n| all layers and heads | time | time / scan |\n|:--|--:|--:|")
    for name, taken in seconds.items():
        ratio = estimate(taken / seconds["scan"])
        print(f"| {name} | {1e3 * estimate(taken).median:.0f} ms | {ratio} |")
    extra = estimate(seconds["scan with σ₁"] / seconds["scan"])
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
