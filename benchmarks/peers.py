"""Peers, which people would use instead, next to wqk: ``python -m benchmarks.peers``.

The peers are not dependencies: ``pip install -r benchmarks/peers.txt`` into this environment, or
into another one named with ``--python``. What is not installed is skipped with a word. Each runs in
a process of its own (`benchmarks.contender`), one after the other within each round.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path
from threading import Timer
from typing import Any

import numpy as np

from benchmarks.contender import WAYS
from benchmarks.generate import BERT_BASE, LLAMA_3_8B, write_checkpoint
from benchmarks.rounds import estimate

# Seconds after which a peer is given up.
LONGEST = 600

# How closely float32 sums of norms have to agree to count as the same numbers.
SAME = 1e-4


class Peer:
    """A process that runs one way to the scores each time it is asked."""

    def __init__(self, python: str, name: str, folder: Path) -> None:
        command = [python, "-m", "benchmarks.contender", name, str(folder)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.greeting = self.answer()

    def answer(self) -> dict[str, Any]:
        """Return the next line that is an answer; libraries print lines of their own."""
        assert self.process.stdout
        patience = Timer(LONGEST, self.process.kill)
        patience.start()
        try:
            for line in self.process.stdout:
                if line.startswith("{"):
                    return dict(json.loads(line))
        finally:
            patience.cancel()
        return {"absent": f"no answer within {LONGEST} s, or it ended without one"}

    def run(self) -> dict[str, Any]:
        """One run from file to table."""
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self.answer()


def measure(
    folder: Path, python: str, rounds: int, names: list[str]
) -> dict[str, list[dict[str, Any]] | str]:
    """Return the answers of every peer in every round, or why it could not run."""
    peers = {
        name: Peer(sys.executable if name == "wqk" else python, name, folder) for name in names
    }
    absent = {name: p.greeting["absent"] for name, p in peers.items() if "absent" in p.greeting}
    answers: dict[str, list[dict[str, Any]]] = {name: [] for name in peers if name not in absent}
    for turn in range(-1, rounds):
        for name in list(answers):
            answer = peers[name].run()
            if "absent" in answer:
                absent[name] = answer["absent"]
                del answers[name]
            elif turn >= 0:
                answers[name].append(answer)
    for peer in peers.values():
        peer.process.kill()
    return {name: answers.get(name) or absent[name] for name in names}


def print_table(title: str, results: dict[str, list[dict[str, Any]] | str]) -> None:
    """Print a line for each peer: computation, time, and the time of wqk in the same rounds."""
    print(f"\n## {title}\n")
    print("| | computes | same numbers | time | peer / wqk | of the processor | peak memory |")
    print("|:--|:--|:--|--:|--:|--:|--:|")
    ours = results["wqk"]
    assert not isinstance(ours, str)
    for name, answers in results.items():
        description = (WAYS[name].__doc__ or "").rstrip(".")
        if isinstance(answers, str):
            print(f"| {name} | {description} | not measured: {answers} | | | | |")
            continue
        ratios = [
            estimate(
                np.array(
                    [
                        answer[clock] / our_answer[clock]
                        for answer, our_answer in zip(answers, ours, strict=False)
                    ]
                )
            )
            for clock in ("seconds", "processor")
        ]
        seconds = [answer["seconds"] for answer in answers]
        sums = [last_answers[-1]["checksum"] for last_answers in (answers, ours)]
        agree = "–" if math.isnan(sums[0]) else f"{abs(sums[0] / sums[1] - 1) < SAME}"
        print(
            f"| {name} | {description} | {agree} | {1e3 * np.median(seconds):.0f} ms | "
            f"{ratios[0]} | {ratios[1]} | {answers[-1]['megabytes']:.0f} MB |"
        )


def main() -> None:
    """Print a table for each shape."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable, help="interpreter with the peers")
    parser.add_argument("--rounds", type=int, default=9)
    shapes = {shape.name: shape for shape in (BERT_BASE, LLAMA_3_8B)}
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=list(shapes))
    parser.add_argument("--skip", nargs="+", choices=WAYS, default=[], help="peers to leave out")
    options = parser.parse_args()
    names = [name for name in WAYS if name not in options.skip]
    with tempfile.TemporaryDirectory() as place:
        for shape in (shapes[name] for name in options.shapes):
            folder = write_checkpoint(Path(place) / shape.name, shape)
            title = f"{shape.name}, {shape.layers} layers, d {shape.width}"
            print_table(title, measure(folder, options.python, options.rounds, names))


if __name__ == "__main__":
    main()
