"""Measure parts of the scores of training runs, into the records of docs/results/parts.

python examples/measure_parts.py OUT.csv RUN[@STEP]... [--blocks N] [--layers] [--prefix NAME]

A line for each run, step, layer (none: all) and part. The part "whole" of a layer has the symmetry
of its form and the size of its control, |M|²/|S|². Lines without a share have the derivative and
curvature of the loss along that part, over the explained loss. Runs that OUT.csv holds already are
left out. The prefix is put before the names of the cells.
"""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import polars as pl

import wqk

COLUMNS = (
    "model",
    "seed",
    "step",
    "layer",
    "part",
    "loss",
    "share",
    "low",
    "high",
    "derivative",
    "curvature",
    "symmetry",
    "control_size",
)


def main() -> None:
    """Measure what is missing, and append it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--layers", action="store_true")
    given = parser.parse_args()
    known = set()
    if given.out.exists():
        with given.out.open(newline="", encoding="utf-8") as file:
            known = {tuple(row[n] for n in COLUMNS[:3]) for row in csv.DictReader(file)}
    for ref in given.runs:
        folder, _, step = ref.partition("@")
        run = wqk.open_run(folder)
        step = step or str(max(number for number, _ in run.checkpoints))
        cell, seed = run.name.rpartition("-")[0], str(run.recipe["seed"])
        about = (given.prefix + cell, seed, step)
        if about in known:
            continue
        checkpoint = dict(run.checkpoints)[int(step)]
        found = wqk.parts(
            checkpoint,
            corpus=run.corpus["folder"],
            each_layer=given.layers,
            mask_share=run.recipe["mask_share"],
            block=run.recipe["block"],
            blocks=given.blocks,
        )
        rows = [*found.shares.iter_rows(named=True)]
        everywhere = found.shares.filter(pl.col("layer").is_null())
        losses = dict(everywhere.select("part", "loss").iter_rows())
        explained = losses["none"] - losses["whole"]
        for slope in found.slopes.iter_rows(named=True):
            row = {"part": slope["direction"]}
            for name in ("derivative", "curvature"):
                row[name] = None if slope[name] is None else slope[name] / explained
            rows.append(row)
        control_size = dict(found.control_size.select("layer", "size").iter_rows())
        if not given.layers:
            rows += [{"part": "whole", "layer": layer} for layer in control_size]
        symmetry = dict(wqk.scan(checkpoint).layers.frame.select("layer", "symmetry").iter_rows())
        for row in rows:
            if row["part"] == "whole":
                row["symmetry"] = symmetry.get(row.get("layer"))
                row["control_size"] = control_size.get(row.get("layer"))
        named = dict(zip(COLUMNS, about, strict=False))
        with given.out.open("a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(
                file, COLUMNS, extrasaction="ignore", restval="", lineterminator="\n"
            )
            if not file.tell():
                writer.writeheader()
            for row in rows:
                short = {k: f"{v:.5f}" if isinstance(v, float) else v for k, v in row.items()}
                writer.writerow({**short, **named})
        print(*about, json.dumps(found.settings), flush=True)


if __name__ == "__main__":
    main()
