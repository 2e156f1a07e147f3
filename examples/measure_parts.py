"""Measure parts of the scores of training runs, into the records of docs/results/parts.

python examples/measure_parts.py OUT.csv RUN[@STEP]... [--blocks N] [--layers] [--prefix NAME]
python examples/measure_parts.py OUT.csv MODEL... --text FILE | --samples N [the same options]

A line for each run, step, layer (none: all) and part. The part "whole" of a layer has the symmetry
of its form and the size of its control, |M|²/|S|². Lines without a share have the derivative and
curvature of the loss along that part, over the explained loss. Runs that OUT.csv holds already are
left out. The prefix is put before the names of the cells. With --text or --samples, the references
are folders of models that are no training runs: they read a text, or N samples of their own.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

import wqk
from wqk.live.parts import Parts

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

# If all scores explain less than this (nats), slopes over the explained loss are noise. They are
# left out.
LEAST_EXPLAINED = 0.01


def main() -> None:
    """Measure the runs that the table lacks, and append their lines."""
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("runs", nargs="+")
    parser.add_argument("--prefix", default="")
    parser.add_argument("--blocks", type=int, default=512)
    parser.add_argument("--layers", action="store_true")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--samples", type=int, help="texts of 128 tokens from the model itself")
    options = parser.parse_args()
    recorded = recorded_runs(options.out)
    for reference in options.runs:
        if options.text is None and options.samples is None:
            subject = subject_of_run(reference, options.prefix)
        else:
            subject = subject_of_model(Path(reference), options)
        if tuple(subject.identity.values()) in recorded:
            continue
        measured = wqk.parts(
            subject.checkpoint, each_layer=options.layers, blocks=options.blocks, **subject.reads
        )
        symmetry = wqk.scan(subject.checkpoint).layers.frame.select("layer", "symmetry")
        rows = rows_of(measured, dict(symmetry.iter_rows()), by_layer=options.layers)
        append(options.out, [subject.identity | row for row in rows])
        print(*subject.identity.values(), json.dumps(measured.settings), flush=True)


@dataclass(frozen=True)
class Subject:
    """A model to measure: its name, seed and step, its folder, and what `wqk.parts` reads."""

    identity: dict[str, str]
    checkpoint: Path
    reads: dict[str, Any]


def subject_of_run(reference: str, prefix: str) -> Subject:
    """Return a checkpoint of a training run, which reads the held-out text of the run."""
    folder, _, step = reference.partition("@")
    run = wqk.open_run(folder)
    step = step or str(max(number for number, _ in run.checkpoints))
    cell = run.name.rpartition("-")[0]
    identity = {"model": prefix + cell, "seed": str(run.recipe["seed"]), "step": step}
    reads = {
        "corpus": run.corpus["folder"],
        "mask_share": run.recipe["mask_share"],
        "block": run.recipe["block"],
    }
    return Subject(identity, Path(dict(run.checkpoints)[int(step)]), reads)


def subject_of_model(folder: Path, options: argparse.Namespace) -> Subject:
    """Return a model without seed and step, which reads a text or its own samples."""
    identity = {"model": options.prefix + folder.name, "seed": "", "step": ""}
    if options.text is not None:
        return Subject(identity, folder, {"text": options.text})
    return Subject(identity, folder, {"tokens": samples(folder, options.samples)})


def samples(folder: Path, count: int, length: int = 128) -> Any:
    """Return token ids (count, length) that a decoder draws from its own distribution, seed 0."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    first = torch.ones(count, 1, dtype=torch.long)
    ends = {"min_new_tokens": length - 1, "max_new_tokens": length - 1}
    with torch.no_grad():
        return model.generate(first, do_sample=True, top_k=0, **ends)


def recorded_runs(path: Path) -> set[tuple[str, ...]]:
    """Return model, seed and step of the runs that a table has."""
    if not path.exists():
        return set()
    with path.open(newline="", encoding="utf-8") as file:
        return {(row["model"], row["seed"], row["step"]) for row in csv.DictReader(file)}


def rows_of(measured: Parts, symmetry: dict[Any, float], *, by_layer: bool) -> list[dict[str, Any]]:
    """Return the lines of a model: shares, slopes, and symmetry and control of each layer."""
    rows = [*measured.shares.iter_rows(named=True)]
    everywhere = measured.shares.filter(pl.col("layer").is_null())
    losses = dict(everywhere.select("part", "loss").iter_rows())
    explained = losses["none"] - losses["whole"]
    slopes = measured.slopes if explained > LEAST_EXPLAINED else measured.slopes.clear()
    for slope in slopes.iter_rows(named=True):
        row = {"part": slope["direction"]}
        for name in ("derivative", "curvature"):
            row[name] = None if slope[name] is None else slope[name] / explained
        rows.append(row)
    control_size = dict(measured.control_size.select("layer", "size").iter_rows())
    if not by_layer:
        rows += [{"part": "whole", "layer": layer} for layer in control_size]
    for row in rows:
        if row["part"] == "whole":
            row["symmetry"] = symmetry.get(row.get("layer"))
            row["control_size"] = control_size.get(row.get("layer"))
    return rows


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Append rows to a table, numbers with five digits; a new table begins with its columns."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, COLUMNS, extrasaction="ignore", restval="", lineterminator="\n"
        )
        if not file.tell():
            writer.writeheader()
        for row in rows:
            cells = {}
            for name, value in row.items():
                cells[name] = f"{value:.5f}" if isinstance(value, float) else value
            writer.writerow(cells)


if __name__ == "__main__":
    main()
