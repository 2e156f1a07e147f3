"""Processor time of starting: ``python -m benchmarks.start``.

The file of 1 GB has the shape of Qwen2.5-0.5B; all but its queries and keys is a hole.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.generate import LLAMA_3_8B, write_checkpoint
from benchmarks.rounds import estimate

SHAPE = replace(
    LLAMA_3_8B,
    name="Qwen2.5-0.5B",
    layers=24,
    width=896,
    heads=14,
    key_heads=2,
    head_width=64,
    rest=950_000_000,
)

# What is started, and the seconds that it may take; none for what is there for comparison.
STARTS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "Python alone": (("-c", ""), None),
    "`import wqk`": (("-c", "import wqk"), 0.1),
    "`wqk --help`": (("-m", "wqk", "--help"), 0.1),
    "`wqk scan --help`": (("-m", "wqk", "scan", "--help"), None),
    "`wqk scan FILE --layers 0`, 1 GB: the first scores": (
        ("-m", "wqk", "scan", "FILE", "--layers", "0"),
        1.0,
    ),
    "`wqk scan FILE --heads`, 1 GB: all scores": (("-m", "wqk", "scan", "FILE", "--heads"), None),
}


def seconds(arguments: tuple[str, ...]) -> float:
    """Return the processor time of a fresh interpreter."""

    def used() -> float:
        usage = resource.getrusage(resource.RUSAGE_CHILDREN)
        return usage.ru_utime + usage.ru_stime

    before = used()
    subprocess.run([sys.executable, *arguments], capture_output=True, check=True)
    return used() - before


def main() -> None:
    """Print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = str(write_checkpoint(Path(place, "model"), SHAPE, spread=True))
        named = [
            tuple(folder if word == "FILE" else word for word in arguments)
            for arguments, _ in STARTS.values()
        ]
        taken = np.array([[*map(seconds, named)] for _ in range(options.rounds + 1)][1:])
    print("| | processor time | aim | |\n|:--|--:|--:|:--|")
    for column, (name, (_, aim)) in zip(taken.T, STARTS.items(), strict=True):
        ratio = estimate(column)
        verdict = f"{aim} s | {ratio.against(aim)}" if aim else "|"
        print(f"| {name} | {ratio} s | {verdict} |")


if __name__ == "__main__":
    main()
