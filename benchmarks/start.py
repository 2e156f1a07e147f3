"""Processor time of starting: ``python -m benchmarks.start``."""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys

import numpy as np

from benchmarks.rounds import estimate

# What is started, and the seconds that it may take; none for what is there for comparison.
STARTS: dict[str, tuple[tuple[str, ...], float | None]] = {
    "Python alone": (("-c", ""), None),
    "`import wqk`": (("-c", "import wqk"), 0.1),
    "`wqk --help`": (("-m", "wqk", "--help"), 0.1),
    "`wqk scan --help`": (("-m", "wqk", "scan", "--help"), None),
}


def seconds(arguments: tuple[str, ...]) -> float:
    """Of the processor, of a fresh interpreter."""

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
    taken = np.array(
        [[seconds(a) for a, _ in STARTS.values()] for _ in range(options.rounds + 1)][1:]
    )
    print("| | processor time | aim | |\n|:--|--:|--:|:--|")
    for column, (name, (_, aim)) in zip(taken.T, STARTS.items(), strict=True):
        found = estimate(column)
        verdict = f"{aim} s | {found.against(aim)}" if aim else "|"
        print(f"| {name} | {found} s | {verdict} |")


if __name__ == "__main__":
    main()
