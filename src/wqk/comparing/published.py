"""Tables S2 and S3 as printed, and the known problems of some of their rows."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import polars as pl

DATA = Path(__file__).parent / "data"

# Scores are medians over layers, with the distances to the quartiles below and above.
COLUMNS: dict[str, pl.DataType] = {
    "source": pl.String(),
    "name": pl.String(),
    "model": pl.String(),
    "stack": pl.String(),
    "modality": pl.String(),
    "parameters": pl.Int64(),
    "symmetry": pl.Float64(),
    "symmetry_below": pl.Float64(),
    "symmetry_above": pl.Float64(),
    "directionality": pl.Float64(),
    "directionality_below": pl.Float64(),
    "directionality_above": pl.Float64(),
    "flags": pl.List(pl.String()),
    "sound": pl.Boolean(),
}


@dataclass(frozen=True)
class Flag:
    """A known problem of a row.

    Attributes
    ----------
    title, explanation
        Short and in full.
    artifact
        Whether the row's numbers do not describe a trained model's own form.
    drawn
        Models with the same problem that the paper shows only in figures.
    """

    title: str
    explanation: str
    artifact: bool
    drawn: Sequence[str] = ()

    @property
    def sentence(self) -> str:
        """Title and explanation in one."""
        return f"{self.title[:1].upper()}{self.title[1:]}. {self.explanation}"


@cache
def flags() -> dict[str, Flag]:
    """All flags by name.

    Examples
    --------
    >>> flags()["grouped-heads"].title
    'wrong pairs of heads'
    """
    entries = tomllib.loads((DATA / "flags.toml").read_text(encoding="utf-8"))
    return {name: Flag(**entry) for name, entry in entries.items()}


def published() -> pl.DataFrame:
    """The rows of Tables S2 and S3 in their order: the left half, then the right half.

    Returns
    -------
    polars.DataFrame
        ``source`` (``published``), ``name`` as printed, ``model`` (the checkpoint), medians over
        layers with their distances to the quartiles, to two decimals (directionality by excess),
        ``flags`` (see `flags`), and ``sound``, false if a flag makes the row an artifact. The
        directionality of GPT2-medium and Phi-2, which Table S3 lacks, is null.

    Examples
    --------
    >>> rows = published()
    >>> rows.height, rows.filter(~rows["sound"]).height
    (70, 19)
    """
    rows = pl.read_csv(
        DATA / "published.csv",
        comment_prefix="#",
        schema_overrides={k: v for k, v in COLUMNS.items() if k not in ("flags", "sound")},
    )
    return with_flags(rows.with_columns(split_flags(), source=pl.lit("published")))


def split_flags() -> pl.Expr:
    """The words of the column ``flags`` as a list."""
    return pl.col("flags").fill_null("").str.extract_all(r"\S+")


def with_flags(rows: pl.DataFrame) -> pl.DataFrame:
    """Rows with the column ``sound``, in the order and types of `COLUMNS`."""
    artifacts = [name for name, flag in flags().items() if flag.artifact]
    rows = rows.with_columns(sound=pl.col("flags").list.set_intersection(artifacts).list.len() == 0)
    return rows.select(pl.col(name).cast(kind) for name, kind in COLUMNS.items())


def marks(rows: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """A letter for each flag of some rows, in the order in which they appear.

    Examples
    --------
    >>> marks([{"flags": []}, {"flags": ["fused-tensor"]}, {"flags": ["mislabeled"]}])
    {'fused-tensor': 'a', 'mislabeled': 'b'}
    """
    names = dict.fromkeys(name for row in rows for name in row["flags"])
    return dict(zip(names, ascii_lowercase, strict=False))


def last_part(model: str) -> str:
    """A Hub id without its owner, or a path's last folder.

    Examples
    --------
    >>> last_part("openai-community/gpt2")
    'gpt2'
    """
    return model.rstrip("/").rpartition("/")[2]
