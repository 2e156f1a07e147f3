"""Tables of the experiments, as Markdown: what docs/results shows.

::

    python examples/summarize_experiments.py RUNS

A cell is all runs of one name with different seeds; numbers are means ± standard deviations over
them. Of single runs there is no deviation.
"""

import argparse
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, stdev

import polars as pl

from wqk.runs.run import Run, open_run

LAYER_SCORES = ("symmetry", "directionality_excess")


def spread(values: Iterable[float], digits: int = 2) -> str:
    """Mean ± standard deviation."""
    numbers = list(values)
    deviation = f" ± {stdev(numbers):.{digits}f}" if len(numbers) > 1 else ""
    return f"{fmean(numbers):+.{digits}f}{deviation}"


def held_out(run: Run) -> float:
    """The last held-out loss, in nats for each predicted character."""
    return float(run.metrics["held_out_loss"].drop_nulls()[-1])


def layer_scores(run: Run, score: str, *, at_end: bool = True) -> list[float]:
    """One score of every layer, at the last look or at the first."""
    layers = run.scores.layers.frame
    step = layers["step"].max() if at_end else layers["step"].min()
    chosen = layers.filter(pl.col("step") == step).sort("layer")
    return [float(value) for value in chosen[score]]


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """A table in Markdown, with a line between it and what follows."""
    alignment = [":--", *["--:"] * (len(header) - 1)]
    for row in (header, alignment, *rows):
        print("| " + " | ".join(row) + " |")
    print()


def print_cells(cells: dict[str, list[Run]]) -> None:
    """Losses, and scores of every layer, at the end of training."""
    print("Held-out loss at the end, in nats:\n")
    losses = {name: [held_out(run) for run in runs] for name, runs in cells.items()}
    print_table(
        ["cell", "seeds", "steps", "held-out loss", "each"],
        [
            [
                name,
                str(len(runs)),
                str(runs[0].recipe["steps"]),
                spread(losses[name], 3).removeprefix("+"),
                " ".join(f"{loss:.3f}" for loss in losses[name]),
            ]
            for name, runs in cells.items()
        ],
    )
    for score in LAYER_SCORES:
        print(f"{score} by layer, at the end:\n")
        rows = []
        for name, runs in cells.items():
            by_layer = zip(*(layer_scores(run, score) for run in runs), strict=True)
            rows.append([name, *map(spread, by_layer)])
        print_table(["cell", *(f"layer {n}" for n in range(len(rows[0]) - 1))], rows)


def print_starts(cells: dict[str, list[Run]]) -> None:
    """Figure S5's claims: where symmetry starts and ends, and how far layers are apart."""
    print("Symmetry over layers, by start:\n")
    rows = []
    for name, runs in cells.items():
        first = [layer_scores(run, "symmetry", at_end=False) for run in runs]
        last = [layer_scores(run, "symmetry") for run in runs]
        gaps = (max(layers) - min(layers) for layers in last)
        rows.append([name, *(spread(map(fmean, ends)) for ends in (first, last)), spread(gaps)])
    print_table(["cell", "mean at the start", "mean at the end", "largest − smallest"], rows)


def main() -> None:
    """Group the runs by name and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("runs", type=Path, help="folder of runs named CELL-SEED")
    cells: dict[str, list[Run]] = {}
    for settings in sorted(parser.parse_args().runs.glob("*/run.json")):
        run = open_run(settings.parent)
        if run.checkpoints and run.checkpoints[-1][0] == run.recipe["steps"]:
            cells.setdefault(run.name.rpartition("-")[0], []).append(run)
    print_cells(cells)
    print_starts({name: runs for name, runs in cells.items() if "wikipedia-encoder" in name})


if __name__ == "__main__":
    main()
