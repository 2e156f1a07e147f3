"""The rows of a score table that figures show, and short names of their models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl

from wqk.comparing.published import last_part
from wqk.tables.score_table import ScoreTable

# Columns that a title adds to a model's name if models of that name differ in them.
DISTINGUISHING = ("revision", "step", "stack", "kind", "circuit")


def latest(table: ScoreTable) -> ScoreTable:
    """The table with only the last step of every checkpoint with several, such as a run."""
    steps = pl.col("step")
    return table.filter(steps.is_null() | (steps == steps.max().over("checkpoint", "revision")))


def titles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last part of each checkpoint's name, and in what it differs from others of that name.

    Examples
    --------
    >>> rows = [{"checkpoint": "openai/whisper-tiny", "stack": s} for s in ("encoder", "decoder")]
    >>> titles([*rows, {"checkpoint": "openai-community/gpt2", "stack": "decoder"}])
    ['whisper-tiny, encoder', 'whisper-tiny, decoder', 'gpt2']
    """
    namesakes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        namesakes.setdefault(last_part(row["checkpoint"]), []).append(row)

    def title(row: Mapping[str, Any]) -> str:
        name = last_part(row["checkpoint"])
        differing = [
            str(row[column])
            for column in DISTINGUISHING
            if len({other.get(column) for other in namesakes[name]}) > 1 and row[column] is not None
        ]
        return ", ".join([name, *differing])

    return [title(row) for row in rows]


def titled(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of a score table with their `titles` in the column ``title``."""
    names = titles(frame.select("checkpoint", *DISTINGUISHING).to_dicts())
    return frame.with_columns(pl.Series("title", names, pl.String()))
