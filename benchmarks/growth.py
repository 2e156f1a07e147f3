"""How costs grow: ``python -m benchmarks.growth --out FIGURE.png``.

Scans of generated checkpoints, from bert-tiny's shape to 70 billion parameters with holes for all
that is not read: seconds, bytes read, and peak memory, each in a fresh process, in turn over
rounds. Then the time of a survey against its number of checkpoints and of processes. Slopes are
those of least squares through the logarithms.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import numpy as np

import wqk
from benchmarks.generate import BERT_BASE, LLAMA_3_8B, Shape, query_key_bytes, write_checkpoint
from benchmarks.rounds import alternate, estimate
from benchmarks.scans import peak_memory
from wqk._style import BLUE, GREEN, ORANGE, PAGE, new_figure, save_figure, style

# Name, layers, width, heads, key heads, head width, bytes that a scan does not read.
SIZES = (
    (BERT_BASE, "BERT-tiny", 2, 128, 2, 2, 64, 8_000_000),
    (BERT_BASE, "BERT-medium", 8, 512, 8, 8, 64, 75_000_000),
    (BERT_BASE, "BERT-base", 12, 768, 12, 12, 64, 191_000_000),
    (BERT_BASE, "BERT-large", 24, 1024, 16, 16, 64, 570_000_000),
    (LLAMA_3_8B, "LLaMA-3-1B", 16, 2048, 32, 8, 64, 2_200_000_000),
    (LLAMA_3_8B, "LLaMA-3-8B", 32, 4096, 32, 8, 128, 14_700_000_000),
    (LLAMA_3_8B, "LLaMA-3-70B", 80, 8192, 64, 8, 128, 129_000_000_000),
)
SHAPES = tuple(
    replace(
        like, name=name, layers=layers, width=width, heads=heads, key_heads=key_heads,
        head_width=head_width, rest=rest,
    )
    for like, name, layers, width, heads, key_heads, head_width, rest in SIZES
)  # fmt: skip


def slope(x: np.ndarray, y: np.ndarray) -> float:
    """The exponent b of y = a xᵇ."""
    return float(np.polyfit(np.log(x), np.log(y), 1)[0])


def measure_scans(place: Path, shapes: list[Shape], rounds: int) -> dict[str, np.ndarray]:
    """Bytes stored, seconds, bytes read and peak megabytes, one value for each shape."""
    folders = {shape.name: write_checkpoint(place / shape.name, shape) for shape in shapes}
    runs = {
        name: (lambda folder=folder: wqk.scan(folder) and None) for name, folder in folders.items()
    }
    seconds = alternate(runs, rounds)
    return {
        "stored": np.array([query_key_bytes(s) + s.rest for s in shapes], float),
        "seconds": np.array([estimate(seconds[s.name]).median for s in shapes]),
        "read": np.array([query_key_bytes(s) for s in shapes], float),
        "memory": np.array([peak_memory(folders[s.name]) for s in shapes]),
    }


def measure_surveys(place: Path, counts: list[int], jobs: list[int]) -> dict[int, list[float]]:
    """Seconds of a survey of so many checkpoints of BERT-base's shape, by number of processes."""
    refs = []
    for number in range(max(counts)):
        folder = place / f"model-{number}"
        refs.append(str(write_checkpoint(folder, BERT_BASE, seed=number)))
    seconds: dict[int, list[float]] = {}
    for processes in jobs:
        seconds[processes] = []
        for count in counts:
            out = place / f"survey-{processes}-{count}"
            start = time.perf_counter()
            wqk.survey(refs[:count], out=out, jobs=processes)
            seconds[processes].append(time.perf_counter() - start)
    return seconds


def draw(scans: dict[str, np.ndarray], names: list[str], path: Path) -> None:
    """Seconds, bytes and memory against the size of the checkpoint, on logarithmic axes."""
    with style():
        figure = new_figure(PAGE, 2.6)
        axes = figure.subplots(1, 3)
        panels = (
            ("seconds", "seconds, file to table", BLUE, 1.0),
            ("read", "gigabytes read", ORANGE, 1e-9),
            ("memory", "peak memory, megabytes", GREEN, 1.0),
        )
        for axis, (key, label, color, unit) in zip(axes, panels, strict=True):
            axis.loglog(scans["stored"] / 1e9, scans[key] * unit, "o-", color=color)
            exponent = slope(scans["stored"][-4:], scans[key][-4:])
            axis.set_title(
                f"slope {exponent:.2f} above {names[-4]}", fontweight="normal", fontsize=7
            )
            axis.set(xlabel="checkpoint, gigabytes", ylabel=label)
        for x, y, name in zip(scans["stored"] / 1e9, scans["seconds"], names, strict=True):
            axes[0].annotate(name, (x, y), (3, -8), textcoords="offset points", fontsize=5)
        save_figure(figure, path)


def main() -> None:
    """Print the tables and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", default=SHAPES[-1].name, help="last shape to measure")
    options = parser.parse_args()
    names = [shape.name for shape in SHAPES]
    shapes = list(SHAPES[: names.index(options.largest) + 1])
    with tempfile.TemporaryDirectory() as place:
        scans = measure_scans(Path(place), shapes, options.rounds)
        print("| | stored | read | time | peak memory |\n|:--|--:|--:|--:|--:|")
        for i, shape in enumerate(shapes):
            print(
                f"| {shape.name} | {scans['stored'][i] / 1e9:.2f} GB | "
                f"{scans['read'][i] / 1e6:.0f} MB | {scans['seconds'][i]:.2f} s | "
                f"{scans['memory'][i]:.0f} MB |"
            )
        draw(scans, names[: len(shapes)], options.out)
        counts, jobs = [2, 4, 8, 16], [1, 2]
        surveys = measure_surveys(Path(place), counts, jobs)
    print("\n| survey of BERT-base shapes |" + "".join(f" {count} |" for count in counts))
    print("|:--|" + "--:|" * len(counts))
    for processes, seconds in surveys.items():
        cells = "".join(f" {value:.1f} s |" for value in seconds)
        print(f"| {processes} process{'es' * (processes > 1)} |{cells}")


if __name__ == "__main__":
    main()
