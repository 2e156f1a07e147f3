"""From a score table to rows like the published ones: medians over the layers of plain forms."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from wqk._console import number
from wqk.atlas.published import COLUMNS, last_part, with_flags
from wqk.errors import TableError
from wqk.scanning.schema import KEY
from wqk.scanning.tables import ScoreTable, join, read_table

# Metadata of scores comparable with the published ones; missing entries are assumed to match.
PLAIN = {"gamma": 2.0, "folded_norms": False, "biases": False}

# The published directionality goes by excess.
SCORES = {"symmetry": "symmetry", "directionality": "directionality_excess"}


def summarize(table: ScoreTable) -> pl.DataFrame:
    """A row like the published ones for each checkpoint and stack of a score table.

    Only comparable rows are used: self-attention, the query-key circuit at distance 0, and a table
    with gamma 2, without folded norms and biases; other tables yield no rows.

    Returns
    -------
    polars.DataFrame
        The columns of `published`; ``source`` is ``own``, ``name`` the last part of the
        checkpoint's name with its revision and step, and the layers' statuses are ``flags``.

    Examples
    --------
    >>> import wqk
    >>> rows = summarize(wqk.scan(wqk.demo_model("encoder")))
    >>> rows.select("name", "stack", "sound").rows()
    [('encoder', 'encoder', True)]
    """
    if any(table.metadata.get(key, value) != value for key, value in PLAIN.items()):
        return pl.DataFrame(schema=COLUMNS)
    plain = plain_layers(table)
    index = ["checkpoint", "revision", "step", "stack"]
    about = plain.frame.group_by(index, maintain_order=True).agg(
        pl.col("parameters").first(), pl.col("status").unique(maintain_order=True).alias("flags")
    )
    # Both keep the order in which the stacks first appear.
    rows = pl.concat([about, plain.summary().select(_spreads())], how="horizontal")
    return with_flags(
        rows.with_columns(
            pl.lit("own").alias("source"),
            pl.Series("name", [_name(row) for row in rows.iter_rows(named=True)], pl.String()),
            pl.col("checkpoint").alias("model"),
            pl.lit(None, pl.String()).alias("modality"),
            pl.col("flags").list.set_difference(["ok"]),
        )
    )


def plain_layers(table: ScoreTable) -> ScoreTable:
    """The layers' rows of plain self-attention: the query-key circuit at distance 0."""
    return table.layers.filter(
        pl.col("kind") == "self", pl.col("circuit") == "qk", pl.col("distance") == 0
    )


def _spreads() -> list[pl.Expr]:
    """Median and distances to the quartiles, under the names of the published rows."""
    return [
        expression.alias(score + ending)
        for score, column in SCORES.items()
        for ending, expression in (
            ("", pl.col(f"{column}_median")),
            ("_below", pl.col(f"{column}_median") - pl.col(f"{column}_q25")),
            ("_above", pl.col(f"{column}_q75") - pl.col(f"{column}_median")),
        )
    ]


def _name(row: Mapping[str, Any]) -> str:
    """The name of a row: the checkpoint, with its revision and step."""
    name = last_part(row["checkpoint"])
    if row["revision"]:
        name += f" @ {row['revision']}"
    if row["step"] is not None and str(row["step"]) not in name:
        name += f", step {row['step']}"
    return name


def of_model(rows: pl.DataFrame, row: Mapping[str, Any]) -> pl.DataFrame:
    """The rows of `summarize` of a published row's model, and of its stack if there are any.

    Models are identified by their Hub id, or, as in a local folder, by its last part.
    """
    model = pl.col("model").str.to_lowercase()
    named = rows.filter(model == row["model"].lower())
    if named.is_empty():
        named = rows.filter(model.str.split("/").list.last() == last_part(row["model"]).lower())
    of_stack = named.filter(stack=row["stack"])
    return of_stack if of_stack.height else named


def survey_table(*folders: str | PathLike[str]) -> ScoreTable:
    """The scores in the folders of surveys, finished or not (see `wqk.survey`).

    If several scored the same model, the last is used.

    Raises
    ------
    TableError
        A folder contains no survey, or one without scores.

    Examples
    --------
    >>> import tempfile, wqk
    >>> from concurrent.futures import ThreadPoolExecutor
    >>> with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor() as threads:
    ...     _ = wqk.survey(wqk.demo_model("decoder"), out=folder, heads=False, executor=threads)
    ...     summarize(survey_table(folder))["name"].to_list()
    ['decoder']
    """
    table = join([read_table(file) for folder in folders for file in _score_files(folder)])
    frame = table.frame.unique(subset=KEY, keep="last", maintain_order=True)
    return ScoreTable(frame, table.metadata)


def _score_files(folder: str | PathLike[str]) -> list[Path]:
    """A survey's table, or the parts of an unfinished one."""
    whole = Path(folder) / "scores.parquet"
    files = [whole] if whole.is_file() else sorted((Path(folder) / "parts").glob("*.parquet"))
    if not files:
        raise TableError(
            f"{folder}: contains no survey; expected a folder written by wqk survey --out"
        )
    return files


def spread(row: Mapping[str, Any], score: str) -> str:
    """A score as the paper prints it: the median, and the distances to the quartiles.

    Examples
    --------
    >>> from wqk.atlas import published
    >>> spread(published().row(0, named=True), "directionality")
    '-0.79 ± [0.11, 0.11]'
    """
    if row[score] is None:
        return "–"
    return f"{number(row[score], 2)} ± {interquartile(row, score)}"


def interquartile(row: Mapping[str, Any], score: str) -> str:
    """The distances from the median to the quartiles, ``[below, above]``."""
    return f"[{row[f'{score}_below']:.2f}, {row[f'{score}_above']:.2f}]"
