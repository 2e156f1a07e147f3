"""`same`, `compose` and `kin` beside a scan: ``python -m benchmarks.functions``.

Two layers of three shapes, with queries, keys, values and outputs, from disk to result, each in a
process of its own. The exponents are of processor time and of memory against what is
stored, by least squares through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.composition import write_whole
from benchmarks.generate import BERT_BASE, LLAMA_3_8B

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
    options = parser.parse_args()
    names = [shape.name for shape in SHAPES]
    shapes = SHAPES[: names.index(options.largest) + 1]
    stored: list[int] = []
    found: dict[str, list[list[float]]] = {name: [] for name in CALLS}
    for shape in shapes:
        with tempfile.TemporaryDirectory() as place:
            folders = [write_whole(Path(place) / str(seed), shape, seed) for seed in range(2)]
            stored.append((folders[0] / "model.safetensors").stat().st_size)
            for name, call in CALLS.items():
                found[name].append(measure(call, folders, 2 if shape.width < 1000 else 1))
    print(
        "| two layers, processor time (by the clock), peak memory | "
        + " | ".join(
            f"{shape.name}, {size / 1e6:.0f} MB" for shape, size in zip(shapes, stored, strict=True)
        )
        + " | time / scan, largest | exponent of time | of memory |\n|:--|"
        + "--:|" * (len(shapes) + 3)
    )
    for name, rows in found.items():
        cells = [f"{busy:.2f} s ({clock:.2f} s), {peak:.0f} MB" for clock, busy, peak in rows]
        values = np.array(rows)
        powers = (np.polyfit(np.log(stored), np.log(values[:, n]), 1)[0] for n in (1, 2))
        ratio = values[-1, 1] / found["`scan`"][-1][1]
        print(
            f"| {name} | {' | '.join(cells)} | {ratio:.1f} | "
            + " | ".join(f"{power:.2f}" for power in powers)
            + " |"
        )


if __name__ == "__main__":
    main()
