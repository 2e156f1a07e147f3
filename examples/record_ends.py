"""Record the last scores and held-out losses of training runs.

``python examples/record_ends.py OUT.csv RUN...`` writes a line for each run: its cell (the run's
name without the seed), seed, last step, held-out loss, and means over layers of symmetry and
directionality (excess). Runs that have not ended are left out.
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import polars as pl

import wqk

COLUMNS = ("start", "seed", "step", "held_out_loss", "mean_symmetry", "mean_directionality")


def line_of(folder: Path) -> dict[str, object] | None:
    """Return a run's line of the table; None if the run has not ended."""
    run = wqk.open_run(folder)
    checkpoints = dict(run.checkpoints)
    step = run.recipe["steps"]
    if step not in checkpoints:
        return None
    layers = wqk.scan(checkpoints[step]).layers.frame
    loss = run.metrics.filter(pl.col("held_out_loss").is_not_null())["held_out_loss"][-1]
    return {
        "start": run.name.rpartition("-")[0],
        "seed": run.recipe["seed"],
        "step": step,
        "held_out_loss": f"{loss:.5f}",
        "mean_symmetry": f"{layers['symmetry'].mean():.5f}",
        "mean_directionality": f"{layers['directionality_excess'].mean():.5f}",
    }


def main() -> None:
    """Write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", type=Path, nargs="+")
    options = parser.parse_args()
    lines = [line for folder in options.runs if (line := line_of(folder))]
    with options.out.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(sorted(lines, key=lambda line: (str(line["start"]), line["seed"])))


if __name__ == "__main__":
    main()
