"""Cost of `wqk.same` for checkpoints that differ: ``python -m benchmarks.mismatches``.

Next to a scan, in turn within each round, on layers of LLaMA-3-8B's shape. Peak memory is that of a
process that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.generate import LLAMA_3_8B, write_checkpoint
from benchmarks.rounds import alternate, estimate
from wqk import open_checkpoint, same, scan

if TYPE_CHECKING:
    from collections.abc import Callable

# Processor time of a pair over that of a scan, and megabytes, at most.
SCANS, MEMORY = 2.5, 600
NAMES = {
    "equal": "an equal copy",
    "moved": "a factor moved from queries to keys (the same attention)",
    "base": "another rotary base",
    "pairs": "rows in the other rotary order",
    "head": "a head left as initialized",
    "noise": "every weight changed by 1 %",
    "unrelated": "unrelated weights",
}


def pairs(weight: np.ndarray, heads: int) -> np.ndarray:
    """Halves of each head side by side."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def head(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the third head of the queries replaced."""
    if heads == LLAMA_3_8B.heads:
        rows = slice(2 * LLAMA_3_8B.head_width, 3 * LLAMA_3_8B.head_width)
        random = np.random.default_rng(1)
        weight[rows] = 0.02 * random.standard_normal(weight[rows].shape, np.float32)
    return weight


def noise(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return a hundredth of each weight's spread added."""
    extra = np.random.default_rng(2).standard_normal(weight.shape, np.float32)
    return weight + np.float32(2e-4) * extra


def moved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Multiply queries by 3 and divide keys by 3."""
    return weight * np.float32(3.0 if heads == LLAMA_3_8B.heads else 1 / 3)


CHANGES: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "pairs": pairs,
    "head": head,
    "noise": noise,
    "moved": moved,
}


def add_norms(folder: Path, layers: int) -> None:
    """Gains of the norms before attention, in a file next to the weights'."""
    from safetensors.numpy import save_file

    random = np.random.default_rng(3)
    gains = {
        f"model.layers.{layer}.input_layernorm.weight": np.asarray(
            1 + 0.3 * random.standard_normal(LLAMA_3_8B.width), np.float32
        )
        for layer in range(layers)
    }
    files = dict.fromkeys(open_checkpoint(folder).tensors(), "weights.safetensors")
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    save_file(gains, folder / "norms.safetensors")
    index = {"weight_map": files | dict.fromkeys(gains, "norms.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")


def write(place: Path, layers: int) -> Path:
    """Return the first checkpoint, and next to it what it is compared with."""
    shape = replace(LLAMA_3_8B, layers=layers, rest=0)
    for name in ("original", *NAMES):
        change = CHANGES.get(name, lambda weight, heads: weight)
        write_checkpoint(place / name, shape, int(name == "unrelated"), change)
        add_norms(place / name, layers)
    path = place / "base" / "config.json"
    config = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"rope_theta": 5e5}), encoding="utf-8")
    return place / "original"


def peak_memory(*folders: Path) -> float:
    """Peak resident megabytes of a process that compares two folders (Linux)."""
    code = (
        "import sys, wqk\nwqk.same(*sys.argv[1:])\n"
        "print(next(x for x in open('/proc/self/status') if x.startswith('VmHWM')).split()[1])"
    )
    command = [sys.executable, "-c", code, *map(str, folders)]
    return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) / 1024


def main() -> None:
    """Print a line for each kind of pair."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        original = write(Path(folder), options.layers)
        contenders: dict[str, Callable[[], object]] = {"scan": lambda: scan(original)}
        for name in NAMES:
            contenders[name] = lambda candidate=Path(folder) / name: same(original, candidate)
        seconds = alternate(contenders, options.rounds)
        scans = seconds["scan"].processor
        print(f"A scan: {np.median(scans):.1f} s of processor time.\n")
        print("| B is | processor time / scan | peak memory |\n|:--|--:|--:|")
        for name, description in NAMES.items():
            ratio = estimate(seconds[name].processor / scans)
            print(
                f"| {description} | {ratio} | {peak_memory(original, Path(folder) / name):.0f} MB |"
            )
    print(f"\nAims: {SCANS} scans, {MEMORY} MB.")


if __name__ == "__main__":
    main()
