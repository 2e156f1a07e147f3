"""Medians over the layers of a score table, as rows like the published ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import polars as pl

from wqk._console import number
from wqk.comparing.published import COLUMNS, last_part, with_flags
from wqk.errors import TableError
from wqk.tables.schema import KEY, statuses
from wqk.tables.score_table import ScoreTable, join, read_table

# Metadata of tables comparable with the published scores; missing entries count as these.
PLAIN = {"gamma": 2.0, "folded_norms": False, "biases": False}

# Published directionality is by excess.
SCORES = {"symmetry": "symmetry", "directionality": "directionality_excess"}


def summarize(table: ScoreTable) -> pl.DataFrame:
    """A row like the published ones for each checkpoint and stack of a score table.

    Only comparable scores are used: self-attention, the query-key circuit at distance 0, gamma 2,
    without folded norms and biases. Other tables give no rows.

    Returns
    -------
    polars.DataFrame
        The columns of `published`; ``source`` is ``own``, ``name`` the last part of the
        checkpoint's name with its revision and step, and ``flags`` the layers' statuses.

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
    about = plain.frame.group_by(
        "checkpoint", "revision", "step", "stack", maintain_order=True
    ).agg(pl.col("parameters").first(), flags=statuses().explode().unique(maintain_order=True))
    # Both keep the order in which the stacks first appear.
    rows = pl.concat([about, plain.summary().select(_spreads())], how="horizontal")
    return with_flags(
        rows.with_columns(
            pl.Series("name", [_name(row) for row in rows.iter_rows(named=True)], pl.String()),
            pl.col("flags").list.set_difference(["ok"]),
            source=pl.lit("own"),
            model="checkpoint",
            modality=pl.lit(None, pl.String()),
        )
    )


def plain_layers(table: ScoreTable) -> ScoreTable:
    """The layers' rows of plain self-attention: the query-key circuit at distance 0."""
    return table.layers.filter(
        pl.col("kind") == "self", pl.col("circuit") == "qk", pl.col("distance") == 0
    )


def _spreads() -> Iterator[pl.Expr]:
    """Medians and distances to the quartiles, named as in the published rows."""
    for score, column in SCORES.items():
        median, low, high = (pl.col(f"{column}_{part}") for part in ("median", "q25", "q75"))
        yield median.alias(score)
        yield (median - low).alias(f"{score}_below")
        yield (high - median).alias(f"{score}_above")


def _name(row: Mapping[str, Any]) -> str:
    """The checkpoint's name, with its revision and step."""
    name = last_part(row["checkpoint"])
    if row["revision"]:
        name += f" @ {row['revision']}"
    if row["step"] is not None and str(row["step"]) not in name:
        name += f", step {row['step']}"
    return name


def of_model(rows: pl.DataFrame, row: Mapping[str, Any]) -> pl.DataFrame:
    """The `summarize` rows of a published row's model, if possible of its stack.

    Models are identified by their Hub id or, as for a local folder, by its last part.
    """
    model = pl.col("model").str.to_lowercase()
    named = rows.filter(model == row["model"].lower())
    if named.is_empty():
        named = rows.filter(model.str.split("/").list.last() == last_part(row["model"]).lower())
    of_stack = named.filter(stack=row["stack"])
    return of_stack if of_stack.height else named


def survey_table(*folders: str | PathLike[str]) -> ScoreTable:
    """The scores in the folders of surveys, finished or not (see `wqk.survey`).

    If several surveys scored the same form, the last one's scores are used.

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
    files: list[Path] = []
    for folder in map(Path, folders):
        whole = folder / "scores.parquet"
        found = [whole] if whole.is_file() else sorted((folder / "parts").glob("*.parquet"))
        if not found:
            raise TableError(
                f"{folder}: contains no survey; expected a folder written by wqk survey --out"
            )
        files += found
    table = join([read_table(file) for file in files])
    return ScoreTable(
        table.frame.unique(subset=KEY, keep="last", maintain_order=True), table.metadata
    )


def spread(row: Mapping[str, Any], score: str) -> str:
    """A score as the paper prints it: the median, and the distances to the quartiles.

    Examples
    --------
    >>> from wqk.comparing.published import published
    >>> spread(published().row(0, named=True), "directionality")
    '-0.79 ± [0.11, 0.11]'
    """
    if row[score] is None:
        return "–"
    return f"{number(row[score], 2)} ± {interquartile(row, score)}"


def interquartile(row: Mapping[str, Any], score: str) -> str:
    """The distances from the median to the quartiles, ``[below, above]``."""
    return f"[{row[f'{score}_below']:.2f}, {row[f'{score}_above']:.2f}]"
