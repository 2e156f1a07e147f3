"""Which rows of a score table figures show, and how they name the models."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from wqk.atlas.published import last_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.scanning.tables import ScoreTable

# What a title adds to a model's name if it distinguishes models.
DISTINGUISHING = ("revision", "step", "stack", "kind", "circuit")


def latest(table: ScoreTable) -> ScoreTable:
    """Of every checkpoint with several steps, such as a training run, only the last."""
    steps = pl.col("step")
    return table.filter(steps.is_null() | (steps == steps.max().over("checkpoint", "revision")))


def titles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names: the last part of the checkpoint's, and what differs among those of that name.

    Examples
    --------
    >>> rows = [{"checkpoint": "openai/whisper-tiny", "stack": s} for s in ("encoder", "decoder")]
    >>> titles([*rows, {"checkpoint": "openai-community/gpt2", "stack": "decoder"}])
    ['whisper-tiny, encoder', 'whisper-tiny, decoder', 'gpt2']
    """
    namesakes: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        namesakes.setdefault(last_part(row["checkpoint"]), []).append(row)
    varying = {
        name: [key for key in DISTINGUISHING if len({row.get(key) for row in group}) > 1]
        for name, group in namesakes.items()
    }
    names = [last_part(row["checkpoint"]) for row in rows]
    return [
        ", ".join([name, *(str(row[key]) for key in varying[name] if row[key] is not None)])
        for name, row in zip(names, rows, strict=True)
    ]


def titled(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of a score table with their `titles` in the column ``title``."""
    names = titles(frame.select("checkpoint", *DISTINGUISHING).to_dicts())
    return frame.with_columns(pl.Series("title", names, pl.String()))
