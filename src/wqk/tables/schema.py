"""Types and keys of score tables, and descriptions of their rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import polars as pl

from wqk._console import spans
from wqk.tables.columns import COLUMNS, LOGIT_COLUMNS, MEASURES, UPDATE_COLUMNS, Column

# 2: columns of measures may follow; files of version 1 are read as before.
SCHEMA_VERSION = 2

COLUMN_TYPES: dict[type, pl.DataType] = {str: pl.String(), int: pl.Int64(), float: pl.Float64()}


def types(columns: Iterable[Column]) -> dict[str, pl.DataType]:
    """Return the types of columns, by name.

    Examples
    --------
    >>> types([Column("layer", int, "its number")])
    {'layer': Int64}
    """
    return {column.name: COLUMN_TYPES[column.type] for column in columns}


SCHEMA = types(COLUMNS)
UPDATE_TERMS = types(UPDATE_COLUMNS)
LOGITS = types(LOGIT_COLUMNS)


def _columns_of_measures() -> list[Column]:
    """Return the columns of all measures on request; measures may share columns."""
    column_by_name = {}
    for measure in MEASURES:
        for column in measure.columns:
            column_by_name[column.name] = column
    return list(column_by_name.values())


# Columns that may follow `COLUMNS`: of measures on request, of updates and of a monitor.
FURTHER_COLUMNS = (*_columns_of_measures(), *UPDATE_COLUMNS, *LOGIT_COLUMNS)

# Parts of a row's status, in this order; "ok" if none applies.
STATUSES = (
    "non-finite",
    "degenerate",
    "partial",
    "guessed",
    "random-looking",
    "unmoved",
    "quantized",
)
BETWEEN_STATUSES = ", "

# No two rows of a table agree in all of these.
KEY = ("checkpoint", "revision", "step", "stack", "kind", "layer", "head", "circuit", "distance")

# Key columns of one attention, a line of a summary.
GROUP = tuple(column for column in KEY if column not in ("layer", "head"))

# Columns that identify one layer's form, in a table and among the details.
LAYER = tuple(column for column in KEY if column != "head")

# Scores whose median and quartiles are in summaries.
SUMMARIZED = ("symmetry", "directionality", "directionality_excess")


def joined_statuses(statuses: Collection[str]) -> str:
    """Return a row's status.

    Examples
    --------
    >>> joined_statuses({"random-looking", "guessed"}), joined_statuses(())
    ('guessed, random-looking', 'ok')
    """
    return BETWEEN_STATUSES.join(status for status in STATUSES if status in statuses) or "ok"


def status_counts(rows: Iterable[str]) -> Counter[str]:
    """Return the number of rows with each status, in the order of `STATUSES`; "ok" is left out.

    Examples
    --------
    >>> status_counts(["ok", "random-looking", "guessed, random-looking"])
    Counter({'random-looking': 2, 'guessed': 1})
    """
    counts: Counter[str] = Counter()
    for row in rows:
        counts.update(row.split(BETWEEN_STATUSES))
    return Counter({status: counts[status] for status in STATUSES if status in counts})


def summarized_status(rows: Sequence[str]) -> str:
    """Return the statuses of several rows as one text, with numbers if statuses differ.

    Examples
    --------
    >>> summarized_status(["ok", "random-looking"]), summarized_status(["ok"])
    ('random-looking (1 of 2)', 'ok')
    """
    parts = []
    for status, count in status_counts(rows).items():
        share = "" if count == len(rows) else f" ({count} of {len(rows)})"
        parts.append(status + share)
    return BETWEEN_STATUSES.join(parts) or "ok"


def statuses() -> pl.Expr:
    """Return the rows' statuses as lists.

    Examples
    --------
    >>> frame = pl.DataFrame({"status": ["ok", "guessed, random-looking"]})
    >>> frame.select(statuses().list.contains("guessed"))["status"].to_list()
    [False, True]
    """
    return pl.col("status").str.split(BETWEEN_STATUSES)


def conditions(frame: pl.DataFrame, metadata: Mapping[str, Any], *, every: bool) -> list[str]:
    """Return circuit, distances, norms, biases and gamma; without ``every``, only non-defaults.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("encoder"), bias=True, gamma=3.0)
    >>> ", ".join(conditions(table.frame, table.metadata, every=False))
    'biases included, gamma 3'
    >>> ", ".join(conditions(table.frame, table.metadata, every=True))
    'circuit qk, distance 0, norms not folded in, biases included, gamma 3'
    """
    phrases: list[tuple[str, bool]] = []  # with True for the default value
    if "circuit" in frame.columns:
        circuits = frame["circuit"].drop_nulls().unique(maintain_order=True).to_list()
        if circuits:
            phrases.append((f"circuit {' and '.join(circuits)}", circuits == ["qk"]))
        distances = sorted(frame["distance"].drop_nulls().unique().to_list())
        if distances:
            plural = "s" if len(distances) > 1 else ""
            phrases.append((f"distance{plural} {spans(distances)}", distances == [0]))
    folded = metadata.get("folded_norms")
    if folded is not None:
        phrases.append(("norms folded in" if folded else "norms not folded in", not folded))
    biases = metadata.get("biases")
    if biases is not None:
        phrases.append((f"biases {'included' if biases else 'left out'}", not biases))
    gamma = metadata.get("gamma")
    if gamma is not None:
        phrases.append((f"gamma {gamma:g}", gamma == 2))
    return [phrase for phrase, is_default in phrases if every or not is_default]


def records(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """Return a frame's rows ready for JSON: NaN becomes null."""
    return frame.fill_nan(None).to_dicts()
