"""Rows of a score table with measures, in the table's order or sorted, for the terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl
from rich.text import Text

from wqk.errors import TableError
from wqk.tables.rendering import HEADLINE, label
from wqk.tables.schema import MEASURES
from wqk.tables.sheet import Cell, Sheet

if TYPE_CHECKING:
    from wqk.tables.score_table import ScoreTable

# The value in parentheses: what chance would give.
BESIDE = {
    "spectral_norm": "spectral_norm_null",
    "stable_rank": "stable_rank_null",
    "effective_rank": "effective_rank_null",
    "eigenvalue_positivity": "eigenvalue_positivity_spread",
}
SHORT = {
    "eigenvalue_positivity": "positivity",
    "spectral_norm": "σ₁",
    "score_ceiling_any_distance": "any distance",
}


def measured(
    table: ScoreTable, measures: Sequence[str], sort_by: str | None, top: int | None
) -> Iterator[Any]:
    """A table of scores and one for each measure, of the first ``top`` rows by a column."""
    frame = table.frame
    if sort_by is not None:
        if sort_by not in frame.columns:
            raise TableError(f"no column {sort_by!r}; columns are {', '.join(frame.columns)}")
        nothing = pl.col(sort_by).fill_nan(None) if frame[sort_by].dtype.is_float() else sort_by
        frame = frame.sort(nothing, descending=True, nulls_last=True, maintain_order=True)
    sheets = [[n for n in MEASURES[measure] if n not in BESIDE.values()] for measure in measures]
    sheets = [[*HEADLINE, "norm"], *sheets]
    index = [c for c in ("checkpoint", "stack", "kind", "distance") if frame[c].n_unique() > 1]
    index += ["layer", "head"] if frame["head"].is_not_null().any() else ["layer"]
    yield Text(table.frame["checkpoint"][0], style="bold")
    for columns in sheets:
        there = [c for c in columns if c in frame.columns and frame[c].is_not_null().any()]
        if not there:
            continue
        if sort_by is not None and sort_by not in (*there, *index):
            there.append(sort_by)
        names = (*index, *there)
        lines = Sheet.of(*(SHORT.get(name, label(name).replace("_", " ")) for name in names))
        for row in frame.head(top or frame.height).iter_rows(named=True):
            cells = ["all" if row[name] is None else str(row[name]) for name in index]
            lines.add(*cells, *(_cell(row[n], row.get(BESIDE.get(n, ""))) for n in there))
        yield lines
    chance = any(name in frame.columns for name in BESIDE.values())
    notes = ["In parentheses: the same of factors with independent entries."] if chance else []
    reasons = table.metadata.get("no_ceiling") or {}
    notes += [f"No ceiling ({stack}): {reason}." for stack, reason in reasons.items()]
    yield from (Text(note, style="dim") for note in notes)


def _cell(value: object, beside: float | None) -> Cell:
    if not isinstance(value, float):
        return Cell("–" if value is None else str(value))
    return Cell(f"{value:.3g}", "" if beside is None else f"{beside:.2g}")
