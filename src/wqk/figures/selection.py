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


def titles(places: Sequence[Mapping[str, Any]]) -> list[str]:
    """Short names: the last part of the checkpoint's, and what differs among those of that name.

    Examples
    --------
    >>> places = [{"checkpoint": "openai/whisper-tiny", "stack": s} for s in ("encoder", "decoder")]
    >>> titles([*places, {"checkpoint": "openai-community/gpt2", "stack": "decoder"}])
    ['whisper-tiny, encoder', 'whisper-tiny, decoder', 'gpt2']
    """
    namesakes: dict[str, list[Mapping[str, Any]]] = {}
    for place in places:
        namesakes.setdefault(last_part(place["checkpoint"]), []).append(place)
    varying = {
        name: [key for key in DISTINGUISHING if len({place.get(key) for place in group}) > 1]
        for name, group in namesakes.items()
    }
    names = [last_part(place["checkpoint"]) for place in places]
    return [
        ", ".join([name, *(str(place[key]) for key in varying[name] if place[key] is not None)])
        for name, place in zip(names, places, strict=True)
    ]


def titled(frame: pl.DataFrame) -> pl.DataFrame:
    """Rows of a score table with their `titles` in the column ``title``."""
    names = titles(frame.select("checkpoint", *DISTINGUISHING).to_dicts())
    return frame.with_columns(pl.Series("title", names, pl.String()))
