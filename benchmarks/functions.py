"""`same`, `compose` and `kin` next to a scan: ``python -m benchmarks.functions``.

Two layers of three shapes, with queries, keys, values and outputs, from disk to result, each in a
process of its own. The exponents are of processor time and of memory against what is
stored, by least squares through the logarithms.

``--deep LLaMA-3-70B --layers 24`` measures that many layers of one shape instead, next to the same
model with the queries and keys of every layer in the other rotary order, next to one that was
trained on, each of its entries moved by 1 % of their standard deviation, and next to unrelated
weights. Each layer has the random rows of the first in another order.

``--equal LLaMA-3-8B --layers 8`` measures `same --all` of equal files next to reading both, once
and in two threads, into memory that is used again; with ``--cold`` from the disk (as root, on
Linux).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import wqk
from benchmarks.composition import write_whole
from benchmarks.generate import BERT_BASE, LLAMA_3_8B
from benchmarks.machine import reading
from benchmarks.rounds import alternate, estimate

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.generate import Shape

SHAPES = tuple(
    replace(like, name=name, layers=2, width=width, heads=heads, key_heads=key_heads)
    for like, name, width, heads, key_heads in (
        (BERT_BASE, "BERT-base", 768, 12, 12),
        (LLAMA_3_8B, "LLaMA-3-8B", 4096, 32, 8),
        (LLAMA_3_8B, "LLaMA-3-70B", 8192, 64, 8),
    )
)
CALLS = {
    "`scan`": "wqk.scan(a)",
    "`same`, equal weights": "wqk.same(a, a)",
    "`same`, unrelated weights": "wqk.same(a, b)",
    "`compose`": "wqk.compose(a)",
    "`kin`, unrelated weights": "wqk.kin(a, b)",
}
# Imports are not counted, nor is a first call on BERT-base's shape, which takes less than they do.
RUN = """
import json, resource, sys, time, wqk
a, b = sys.argv[1:3]
wqk.scan, wqk.same, wqk.compose, wqk.kin
for again in range(int(sys.argv[3])):
    clock, busy = time.perf_counter(), time.process_time()
    {call}
    seconds = time.perf_counter() - clock, time.process_time() - busy
print(json.dumps([*seconds, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


# How many times a scan by the clock a pair is to take at most.
AIM = 2.0
# A model next to others: its queries and keys in the other rotary order, trained on, unrelated.
OTHERS = ("rotary", "trained", "unrelated")
DEEP = {
    "`scan`": ("wqk.scan(a)", "rotary"),
    "`same`, other rotary order": ("assert wqk.same(a, b).repair", "rotary"),
    "`same --all`, other rotary order": ("assert wqk.same(a, b, everything=True).repair", "rotary"),
    "`same`, trained on": ("assert not wqk.same(a, b).same", "trained"),
    "`same`, unrelated": ("assert not wqk.same(a, b).same", "unrelated"),
    "`kin`, trained on": ("wqk.kin(a, b)", "trained"),
    "`kin`, unrelated": ("wqk.kin(a, b)", "unrelated"),
}


def write_deep(place: Path, shape: Shape) -> dict[str, Path]:
    """Return a checkpoint of many layers under "", and `OTHERS`."""
    folders = {}
    for name in ("", *OTHERS):
        seed = int(name == "unrelated")
        folders[name] = folder = write_whole(place / f"of {name}", replace(shape, layers=1), seed)
        random = np.random.default_rng(7)
        with (folder / "model.safetensors").open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            tensors = {
                name: np.frombuffer(file.read(2 * math.prod(about["shape"])), np.float16).reshape(
                    about["shape"]
                )
                for name, about in header.items()
            }
        size = sum(value.nbytes for value in tensors.values())
        every = {
            tensor.replace(".0.", f".{layer}."): {
                **about,
                "data_offsets": [layer * size + end for end in about["data_offsets"]],
            }
            for layer in range(shape.layers)
            for tensor, about in header.items()
        }
        text = json.dumps(every).encode()
        with (folder / "model.safetensors").open("wb") as file:
            file.writelines([len(text).to_bytes(8, "little"), text])
            for layer in range(shape.layers):
                for tensor, value in tensors.items():
                    rolled = np.roll(value, layer, axis=0)
                    if name == "rotary" and ("q_proj" in tensor or "k_proj" in tensor):
                        pairs = rolled.reshape(-1, 2, shape.head_width // 2, shape.width)
                        rolled = pairs.swapaxes(1, 2)
                    if name == "trained":
                        moved = random.standard_normal(rolled.shape, np.float32)
                        rolled = (rolled + 0.01 * rolled.std() * moved).astype(np.float16)
                    file.write(rolled.tobytes())
        config = json.loads((folder / "config.json").read_text()) | {
            "num_hidden_layers": shape.layers
        }
        (folder / "config.json").write_text(json.dumps(config))
    return folders


def print_deep(shape: Shape, rounds: int) -> None:
    """One line for each function."""
    with tempfile.TemporaryDirectory() as place:
        folders = write_deep(Path(place), shape)
        stored = (folders[""] / "model.safetensors").stat().st_size
        measured = np.array(
            [
                [
                    measure(call, [folders[""], folders[folder_name]], 1)
                    for call, folder_name in DEEP.values()
                ]
                for _ in range(rounds)
            ]
        )
    print(
        f"| {shape.layers} layers of {shape.name}, {stored / 1e9:.1f} GB | processor time | "
        "/ scan | by the clock | / scan | aim | peak memory |\n|:--|--:|--:|--:|--:|:--|--:|"
    )
    for name, measured_call in zip(DEEP, np.moveaxis(measured, 1, 0), strict=True):
        clock, busy, peak = np.median(measured_call, axis=0)
        ratios = [estimate(measured_call[:, n] / measured[:, 0, n]) for n in (1, 0)]
        aim = "" if name == "`scan`" else f"{AIM:g}: {ratios[1].against(AIM)}"
        print(
            f"| {name} | {busy:.1f} s | {ratios[0]} | {clock:.1f} s | {ratios[1]} | {aim} | "
            f"{peak:.0f} MB |"
        )


def print_equal(shape: Shape, rounds: int, cold: bool) -> None:
    """One line by the clock, and one of processor time."""
    with tempfile.TemporaryDirectory() as place:
        folders = [write_whole(Path(place) / name, shape) for name in "ab"]
        files = [folder / "model.safetensors" for folder in folders]
        size = files[0].stat().st_size
        reads = [reading(file, size) for file in files]

        def dropped(call: Callable[[], object]) -> Callable[[], object]:
            def from_disk() -> None:
                os.sync()
                Path("/proc/sys/vm/drop_caches").write_text("1", "ascii")
                call()

            return from_disk if cold else call

        def read() -> None:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda read_part: read_part(), reads))

        times = alternate(
            {
                "reading": dropped(read),
                "same": dropped(lambda: wqk.same(*folders, everything=True)),
            },
            rounds,
        )
    layers = f"{shape.layers} layers of {shape.name}, {size / 1e9:.1f} GB a file"
    print(f"| {layers} | reading both | `same --all` | ratio | aim 1.3 |\n|:--|--:|--:|--:|:--|")
    for field in ("clock", "processor"):
        reading, same = (getattr(times[name], field) for name in ("reading", "same"))
        ratio = estimate(same / reading)
        seconds = " | ".join(
            f"{np.median(seconds_of_call):.3f} s" for seconds_of_call in (reading, same)
        )
        print(f"| {field} | {seconds} | {ratio} | {ratio.against(1.3)} |")


def measure(call: str, folders: list[Path], calls: int) -> list[float]:
    """Seconds by the clock and of the processor of the last call, and peak megabytes."""
    command = [sys.executable, "-c", RUN.format(call=call), *map(str, folders), str(calls)]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    seconds: list[float] = json.loads(done.stdout)
    return seconds


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--largest", default=SHAPES[-1].name, help="last shape (%(default)s)")
    parser.add_argument("--deep", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--equal", choices=[shape.name for shape in SHAPES])
    parser.add_argument("--cold", action="store_true", help="with --equal: files from the disk")
    parser.add_argument("--rounds", type=int, help="with --deep (3) and --equal (9)")
    parser.add_argument("--layers", type=int, default=8, help="with the two (%(default)s)")
    options = parser.parse_args()
    names = [shape.name for shape in SHAPES]
    if options.deep:
        shape = SHAPES[names.index(options.deep)]
        print_deep(replace(shape, layers=options.layers), options.rounds or 3)
        return
    if options.equal:
        shape = replace(SHAPES[names.index(options.equal)], layers=options.layers)
        print_equal(shape, options.rounds or 9, options.cold)
        return
    shapes = SHAPES[: names.index(options.largest) + 1]
    stored: list[int] = []
    seconds_by_call: dict[str, list[list[float]]] = {name: [] for name in CALLS}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as place:
            folders = [write_whole(Path(place) / str(seed), shape, seed) for seed in range(2)]
            stored.append((folders[0] / "model.safetensors").stat().st_size)
            for name, call in CALLS.items():
                seconds_by_call[name].append(measure(call, folders, 2 if shape.width < 1000 else 1))
    print(
        "| two layers, processor time (by the clock), peak memory | "
        + " | ".join(
            f"{shape.name}, {size / 1e6:.0f} MB" for shape, size in zip(shapes, stored, strict=True)
        )
        + " | time / scan, largest | exponent of time | of memory |\n|:--|"
        + "--:|" * (len(shapes) + 3)
    )
    for name, rows in seconds_by_call.items():
        cells = [f"{busy:.2f} s ({clock:.2f} s), {peak:.0f} MB" for clock, busy, peak in rows]
        values = np.array(rows)
        powers = (np.polyfit(np.log(stored), np.log(values[:, n]), 1)[0] for n in (1, 2))
        ratio = values[-1, 1] / seconds_by_call["`scan`"][-1][1]
        print(
            f"| {name} | {' | '.join(cells)} | {ratio:.1f} | "
            + " | ".join(f"{power:.2f}" for power in powers)
            + " |"
        )


if __name__ == "__main__":
    main()
