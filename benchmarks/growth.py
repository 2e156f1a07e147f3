"""Growth of costs with size: ``python -m benchmarks.growth --out FIGURE.png``.

Four questions, a table each, and one figure of the scans: scans of generated checkpoints, from
bert-tiny's shape to 70 billion parameters with holes for all that is not read; surveys by number of
checkpoints and of processes; reports by number of rows; and a look of the monitor as a share of a
training step, by size of the model. Times are of the processor, over all threads, so that other
work on the machine counts less; those of surveys are by the clock. Slopes are those of least
squares through the logarithms.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

import wqk
from benchmarks.generate import BERT_BASE, LLAMA_3_8B, Shape, query_key_bytes, write_checkpoint
from benchmarks.report import MANY, made_up
from benchmarks.surveys import survey_seconds
from wqk._style import GRAY, PAPER_WIDTH, TEAL, VIOLET, WINE, new_figure, save_figure, style

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

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
        like,
        name=name,
        layers=layers,
        width=width,
        heads=heads,
        key_heads=key_heads,
        head_width=head_width,
        rest=other_bytes,
    )
    for like, name, layers, width, heads, key_heads, head_width, other_bytes in SIZES
)
ONCE = 1e9  # bytes of queries and keys above which a scan is timed once

CHECKPOINTS, PROCESSES = (2, 4, 8, 16), (1, 2)
ROWS = (100, 400, 1600, 6400, 16_254, 100_104)
TICKS = [m * 10.0**n for n in range(-4, 4) for m in (1, 1.5, 2, 3, 5, 7)]
CADENCE = 200  # training steps between two looks

# Scans a folder that many times after one that is not counted, and prints what it took.
SCAN = """
import json, resource, sys, time, wqk
folder, rounds = sys.argv[1], int(sys.argv[2])
def read():
    return int(open("/proc/self/io").read().split()[1])
times = []
if rounds > 1:
    wqk.scan(folder)
for _ in range(rounds):
    before, start = read(), time.process_time()
    wqk.scan(folder)
    times.append(time.process_time() - start)
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps({"seconds": sorted(times)[rounds // 2], "read": read() - before, "memory": peak}))
"""


class GrowthCurve(NamedTuple):
    """One cost against one size, and how the two are written."""

    x: Sequence[float]
    y: Sequence[float]
    label: str
    color: str


def slope(curve: GrowthCurve, last: int = 4) -> float:
    """Return the exponent b of y = a xᵇ through the last points."""
    return float(np.polyfit(np.log(curve.x[-last:]), np.log(curve.y[-last:]), 1)[0])


def measure_scan(place: Path, shape: Shape, rounds: int) -> dict[str, float]:
    """Bytes stored, processor seconds, bytes read and peak bytes of a scan in a fresh process."""
    folder = write_checkpoint(place / shape.name, shape)
    rounds = rounds if query_key_bytes(shape) < ONCE else 1
    command = [sys.executable, "-c", SCAN, str(folder), str(rounds)]
    done = subprocess.run(command, capture_output=True, check=True, text=True)
    stored = (folder / "model.safetensors").stat().st_size
    (folder / "model.safetensors").unlink()  # the largest take gigabytes
    return {"stored": stored, **json.loads(done.stdout)}


def measure_surveys(place: Path) -> dict[int, list[float]]:
    """Seconds by the clock of surveys of BERT-base's shape, by number of processes."""
    refs = [
        str(write_checkpoint(place / f"model-{n}", BERT_BASE, seed=n))
        for n in range(max(CHECKPOINTS))
    ]
    return {
        n: [survey_seconds(refs[:count], place, jobs=n) for count in CHECKPOINTS] for n in PROCESSES
    }


def measure_reports(place: Path) -> tuple[list[float], list[float]]:
    """Processor seconds to write a report of that many rows, and its bytes."""
    table = made_up(MANY)
    seconds, sizes = [], []
    wqk.write_report(replace(table, frame=table.frame.head(1)), place / "first.html")
    for rows in ROWS:
        path, part_of_table = place / f"{rows}.html", replace(table, frame=table.frame.head(rows))
        start = time.process_time()
        wqk.write_report(part_of_table, path)
        seconds.append(time.process_time() - start)
        sizes.append(float(path.stat().st_size))
    return seconds, sizes


def measure_looks(rounds: int) -> dict[str, tuple[int, float, float]]:
    """Parameters, processor seconds of a step and of a look, by width of a BERT."""
    from transformers import BertConfig, BertForMaskedLM

    from benchmarks.monitoring import measure

    looks = {}
    for name, layers, width in (
        ("tiny", 2, 128),
        ("mini", 4, 256),
        ("small", 4, 512),
        ("base", 12, 768),
    ):
        config = BertConfig(
            hidden_size=width,
            num_hidden_layers=layers,
            num_attention_heads=width // 64,
            intermediate_size=4 * width,
        )
        count = sum(p.numel() for p in BertForMaskedLM(config).parameters())
        step, look, _ = (float(np.median(times)) for times in measure(config, 8, 128, rounds))
        looks[f"BERT-{name}"] = (count, step, look)
    return looks


def panel(
    axes: Any, curves: Sequence[GrowthCurve], x: str, y: str, points: Sequence[str] = ()
) -> None:
    """Curves on logarithmic axes, with names of the first one's points."""
    for curve in curves:
        axes.loglog(curve.x, curve.y, "o-", color=curve.color, label=curve.label)
    for number, name in enumerate(points[: len(curves[0].x)]):
        is_left = number in (3, 5) or number == len(curves[0].x) - 1
        axes.annotate(
            name,
            (curves[0].x[number], curves[0].y[number]),
            (-4, 2) if is_left else (4, -2),
            textcoords="offset points",
            fontsize=5.5,
            ha="right" if is_left else "left",
            va="bottom" if is_left else "top",
        )
    axes.set(xlabel=x, ylabel=y)
    axes.margins(0.12, 0.25)
    if any(curve.label for curve in curves):
        axes.legend(loc="upper left")
    axes.grid(alpha=0.25, linewidth=0.4)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("")


def table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> None:
    """Print a Markdown table."""
    print("\n| " + " | ".join(head) + " |\n|:--|" + "--:|" * (len(head) - 1))
    for line in lines:
        print("| " + " | ".join(line) + " |", flush=True)


def main() -> None:
    """Print the tables and save the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--largest", default=SHAPES[-1].name, help="last shape to scan")
    options = parser.parse_args()
    names = [shape.name for shape in SHAPES]
    shapes = SHAPES[: names.index(options.largest) + 1]
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        scans = [measure_scan(place, shape, options.rounds) for shape in shapes]
        table(
            ("scan", "stored", "read", "processor", "peak memory"),
            [
                (
                    s.name,
                    f"{v['stored'] / 1e9:.2f} GB",
                    f"{v['read'] / 1e6:.0f} MB",
                    f"{v['seconds']:.2f} s",
                    f"{v['memory'] / 1e6:.0f} MB",
                )
                for s, v in zip(shapes, scans, strict=True)
            ],
        )
        stored = [values["stored"] for values in scans]
        powers = []
        for name, key in (("time", "seconds"), ("bytes read", "read"), ("memory", "memory")):
            curve = GrowthCurve(stored, [values[key] for values in scans], "", "")
            powers.append(f"{name} to the {slope(curve):.2f}")
        print(f"\nAgainst what is stored, the four largest: {', '.join(powers)}.")
        surveys = measure_surveys(place)
        table(
            ("survey, by the clock", *map(str, CHECKPOINTS)),
            [
                (f"{n} process{'es' * (n > 1)}", *(f"{t:.1f} s" for t in times))
                for n, times in surveys.items()
            ],
        )
        report_seconds, report_sizes = measure_reports(place)
        table(
            ("report", *(f"{n:,} rows" for n in ROWS)),
            [
                ("processor", *(f"{t:.2f} s" for t in report_seconds)),
                ("size", *(f"{n / 1e6:.1f} MB" for n in report_sizes)),
            ],
        )
    looks = measure_looks(options.rounds)
    table(
        ("look of the monitor", "parameters", "step", "look", f"share, every {CADENCE} steps"),
        [
            (
                name,
                f"{count / 1e6:.0f} M",
                f"{1e3 * step:.0f} ms",
                f"{1e3 * look:.0f} ms",
                f"{look / (CADENCE * step):.2%}",
            )
            for name, (count, step, look) in looks.items()
        ],
    )
    with style():
        save_figure(scan_figure(scans, names), options.out)


def scan_figure(scans: Sequence[Mapping[str, float]], names: Sequence[str]) -> Figure:
    """Draw time, bytes read and peak memory of scans against the size of the checkpoint.

    The dashed lines are fits to the four largest checkpoints, with their slopes.
    """
    stored = [values["stored"] / 1e9 for values in scans]
    figure = new_figure(PAPER_WIDTH, 2.4)
    quantities = (
        ("seconds", 1, WINE, "scan, processor seconds"),
        ("read", 1e-9, TEAL, "read, gigabytes"),
        ("memory", 1e-6, VIOLET, "peak memory, megabytes"),
    )
    for axes, (key, unit, color, label) in zip(figure.subplots(1, 3), quantities, strict=True):
        curve = GrowthCurve(stored, [values[key] * unit for values in scans], "", color)
        is_first = key == "seconds"
        panel(axes, [curve], "checkpoint, gigabytes", label, names if is_first else ())
        power, offset = np.polyfit(np.log(stored[-4:]), np.log(curve.y[-4:]), 1)
        fit = np.exp(offset) * np.array(stored[-4:]) ** power
        axes.plot(stored[-4:], fit, "--", color=GRAY, linewidth=0.8, label=f"power {power:.1f}")
        axes.legend(loc="upper left")
        low, high = axes.get_ylim()
        if high / low < 100:
            axes.set_yticks([tick for tick in TICKS if low <= tick <= high])
    return figure


if __name__ == "__main__":
    main()
