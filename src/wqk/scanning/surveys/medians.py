"""The summary of a survey: a row for each model with short names, as CSV, Markdown and LaTeX."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl

from wqk._console import csv_of_frame, number
from wqk._files import write_atomically
from wqk.tables.rendering import HEADLINE, identical_models, label, title, titles
from wqk.tables.schema import GROUP, summarized_status
from wqk.tables.score_table import ScoreTable
from wqk.tables.sheet import Sheet

QUARTILES = ("median", "q25", "q75")

# Columns of numbers in which identical checkpoints may differ.
OF_CHECKPOINT = ("step", "parameters")


def identical_checkpoints(frame: pl.DataFrame) -> list[list[str]]:
    """Return groups of checkpoints with identical scores, by name and revision.

    In a group, all sizes and scores are equal in every row and to the last digit. A checkpoint with
    only zero forms is in no group, because scores of zero forms do not identify queries and keys.

    Examples
    --------
    >>> rows = [{"checkpoint": name, "layer": 0, "norm": 2.0, "symmetry": 0.5} for name in "ab"]
    >>> other = {"checkpoint": "c", "layer": 0, "norm": 2.0, "symmetry": 0.4}
    >>> identical_checkpoints(ScoreTable.from_rows([*rows, other]).frame)
    [['a', 'b']]
    """
    sizes_and_scores = pl.selectors.numeric() - pl.selectors.by_name(*OF_CHECKPOINT)
    names_by_digest: dict[bytes, list[str]] = {}
    for rows in frame.partition_by("checkpoint", "revision", maintain_order=True):
        norms = rows["norm"].fill_null(0).fill_nan(0)
        if (norms == 0).all():
            continue
        row_hashes = rows.select(sizes_and_scores).hash_rows()
        digest = row_hashes.to_numpy().tobytes()
        name = title(rows.row(0, named=True))
        names_by_digest.setdefault(digest, []).append(name)
    return [names for names in names_by_digest.values() if len(names) > 1]


def summary_frame(table: ScoreTable) -> pl.DataFrame:
    """Return medians and quartiles over layers, a row for each model and kind of attention.

    The column ``model`` contains short names: the last part of the checkpoint's name, followed by
    the revision, step or stack if models have the same last part. The column ``status`` contains
    the statuses of the layers, with the number of layers if not all have the status.

    Examples
    --------
    >>> import wqk
    >>> frame = summary_frame(wqk.scan(wqk.demo_model("encoder")))
    >>> frame.select("stack", "layers", pl.col("symmetry_median").round(2)).row(0)
    ('encoder', 4, 0.6)
    """
    layers = table.layers
    rows = layers.summary().rename({"count": "layers"})
    groups = layers.frame.partition_by(GROUP, maintain_order=True)
    statuses = [summarized_status(group["status"].to_list()) for group in groups]
    short_names = pl.Series("model", titles(rows.to_dicts()), pl.String())
    columns = ["checkpoint", "revision", "step", "stack", "kind", "circuit", "distance", "layers"]
    for score in HEADLINE:
        columns += [f"{score}_{quartile}" for quartile in QUARTILES]
    return rows.select(short_names, *columns, pl.Series("status", statuses, pl.String()))


def summary_sheet(table: ScoreTable) -> Sheet:
    """Return the medians of each model, with quartiles in brackets, for a page or a paper.

    The last column has the statuses, if any model has another status than ``ok``.
    """
    frame = summary_frame(table)
    has_statuses = (frame["status"] != "ok").any()
    headings = ["model", "attention", "layers", *map(label, HEADLINE)]
    if has_statuses:
        headings.append("status")
    sheet = Sheet.of(*headings, text=["model", "attention", "status"])
    sheet.caption = "medians over layers, with quartiles in brackets"
    if identical := table.metadata.get("identical"):
        sheet.caption += f"; {identical_models(_with_short_names(identical, table))}"
    for row in frame.iter_rows(named=True):
        cells = [row["model"], f"{row['stack']} {row['kind']}", str(row["layers"])]
        for score in HEADLINE:
            median, low, high = (number(row[f"{score}_{name}"], 2) for name in QUARTILES)
            cells.append(f"{median} [{low}, {high}]")
        if has_statuses:
            cells.append("" if row["status"] == "ok" else row["status"])
        sheet.add(*cells)
    return sheet


def _with_short_names(groups: Sequence[Sequence[str]], table: ScoreTable) -> list[list[str]]:
    """Return groups of checkpoints by short names, from names with revisions."""
    models = table.frame.select("checkpoint", "revision", "step").unique(maintain_order=True)
    rows = models.to_dicts()
    short_names = dict(zip(map(title, rows), titles(rows), strict=True))
    groups_by_short_name = []
    for names in groups:
        groups_by_short_name.append([short_names[name] for name in names])
    return groups_by_short_name


def write_summary(table: ScoreTable, folder: Path) -> None:
    """Write ``summary.csv``, ``summary.md`` and ``summary.tex`` into a survey's folder."""
    sheet = summary_sheet(table)
    write_atomically(folder / "summary.csv", csv_of_frame(summary_frame(table)))
    write_atomically(folder / "summary.md", sheet.markdown().encode())
    write_atomically(folder / "summary.tex", sheet.latex().encode())
