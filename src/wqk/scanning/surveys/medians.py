"""The summary of a survey: a row for each model with short names, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from pathlib import Path

import polars as pl

from wqk._console import csv_of_frame, number
from wqk._files import write_atomically
from wqk.tables.rendering import HEADLINE, label, titles
from wqk.tables.score_table import ScoreTable
from wqk.tables.sheet import Sheet

QUARTILES = ("median", "q25", "q75")


def summary_frame(table: ScoreTable) -> pl.DataFrame:
    """Return medians and quartiles over layers, a row for each model and kind of attention.

    The column ``model`` has a short name: the last part of the checkpoint's name, and what
    distinguishes models with the same last part.

    Examples
    --------
    >>> import wqk
    >>> frame = summary_frame(wqk.scan(wqk.demo_model("encoder")))
    >>> frame.select("stack", "layers", pl.col("symmetry_median").round(2)).row(0)
    ('encoder', 4, 0.6)
    """
    rows = table.layers.summary().rename({"count": "layers"})
    names = pl.Series("model", titles(rows.to_dicts()), pl.String())
    scores = [f"{score}_{quartile}" for score in HEADLINE for quartile in QUARTILES]
    identity = ("checkpoint", "revision", "step", "stack", "kind", "circuit", "distance", "layers")
    return rows.select(names, *identity, *scores)


def summary_sheet(table: ScoreTable) -> Sheet:
    """Return the medians of each model, with quartiles in brackets, for a page or a paper."""
    sheet = Sheet.of(
        *("model", "attention", "layers", *map(label, HEADLINE)), text=["model", "attention"]
    )
    sheet.caption = "medians over layers, with quartiles in brackets"
    for row in summary_frame(table).iter_rows(named=True):
        cells = [row["model"], f"{row['stack']} {row['kind']}", str(row["layers"])]
        for score in HEADLINE:
            median, low, high = (number(row[f"{score}_{name}"], 2) for name in QUARTILES)
            cells.append(f"{median} [{low}, {high}]")
        sheet.add(*cells)
    return sheet


def write_summary(table: ScoreTable, folder: Path) -> None:
    """Write ``summary.csv``, ``summary.md`` and ``summary.tex`` into a survey's folder."""
    sheet = summary_sheet(table)
    write_atomically(folder / "summary.csv", csv_of_frame(summary_frame(table)))
    write_atomically(folder / "summary.md", sheet.markdown().encode())
    write_atomically(folder / "summary.tex", sheet.latex().encode())
