"""Run the main measurements and print them as Markdown: ``make bench``.

Whatever is compared takes turns within rounds, and ratios are taken within a round, so that they
hold where absolute times drift (`benchmarks.rounds`).
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.composition import print_composition
from benchmarks.generate import BERT_BASE, LLAMA_3_8B, write_checkpoint
from benchmarks.rounds import alternate, estimate
from benchmarks.scans import SMALL, print_dense, print_limits, print_measures


def print_start_up(rounds: int) -> None:
    """How long the command takes to print its help, beside an interpreter that does nothing."""

    def run(*arguments: str) -> None:
        subprocess.run([sys.executable, *arguments], capture_output=True, check=True)

    seconds = alternate(
        {"help": lambda: run("-m", "wqk", "--help"), "nothing": lambda: run("-c", "")}, rounds
    )
    took, least = (1e3 * estimate(seconds[name].clock).median for name in ("help", "nothing"))
    print(f"`wqk --help`: {took:.0f} ms, of which {least:.0f} ms are Python's own start.")


def main() -> None:
    """Print all measurements; ``--layers 32`` takes all of LLaMA-3-8B's instead of 4."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--layers", type=int, default=LLAMA_3_8B.layers)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    print(f"{platform.machine()}, {os.cpu_count()} cores, NumPy {np.__version__}\n")
    print_start_up(options.rounds)
    with tempfile.TemporaryDirectory() as place:
        for shape in (BERT_BASE, replace(LLAMA_3_8B, layers=options.layers)):
            folder = write_checkpoint(Path(place) / shape.name, shape)
            rounds = options.rounds if shape.width < SMALL else max(5, options.rounds // 2)
            print_limits(folder, shape, rounds)
            print_dense(folder, shape, rounds if shape.width < SMALL else 3)
            print_measures(folder, shape, rounds if shape.width < SMALL else 3)
        print(
            "\n| composition of heads | | | time | processor | peak memory |\n" + "|:--" * 6 + "|"
        )
        print_composition(Path(place), BERT_BASE, options.rounds)


if __name__ == "__main__":
    main()
