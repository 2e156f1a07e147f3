"""The types of a score table's columns, and what identifies a row."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import polars as pl

from wqk._console import spans
from wqk.tables.columns import COLUMNS, LOGIT_COLUMNS, MEASURES, UPDATE_COLUMNS, Column

# 2: columns of measures may follow; files of version 1 are read as before.
SCHEMA_VERSION = 2

TYPES: dict[type, pl.DataType] = {str: pl.String(), int: pl.Int64(), float: pl.Float64()}


def types(columns: Iterable[Column]) -> dict[str, pl.DataType]:
    """The types of columns, by name.

    Examples
    --------
    >>> types([Column("layer", int, "its number")])
    {'layer': Int64}
    """
    return {column.name: TYPES[column.type] for column in columns}


SCHEMA = types(COLUMNS)
UPDATE_TERMS = types(UPDATE_COLUMNS)
LOGITS = types(LOGIT_COLUMNS)

# Those that may follow: of measures on request, of updates and of a monitor.
FURTHER_COLUMNS = (
    *{column.name: column for measure in MEASURES for column in measure.columns}.values(),
    *UPDATE_COLUMNS,
    *LOGIT_COLUMNS,
)

# What a row's status may say, in this order, where more than one holds; "ok" if none does.
STATUSES = (
    "non-finite", "degenerate", "partial", "guessed", "random-looking", "unmoved", "quantized",
)  # fmt: skip
BETWEEN_STATUSES = ", "

# No two rows of a table agree in all of these.
KEY = ("checkpoint", "revision", "step", "stack", "kind", "layer", "head", "circuit", "distance")

# What identifies one attention, which is one line of a summary.
GROUP = tuple(column for column in KEY if column not in ("layer", "head"))

# What identifies one layer's form, in a table and among the details.
LAYER = tuple(column for column in KEY if column != "head")

# The scores of which summaries give the median and the quartiles.
SUMMARIZED = ("symmetry", "directionality", "directionality_excess")


def joined_statuses(statuses: Collection[str]) -> str:
    """A row's status.

    Examples
    --------
    >>> joined_statuses({"random-looking", "guessed"}), joined_statuses(())
    ('guessed, random-looking', 'ok')
    """
    return BETWEEN_STATUSES.join(one for one in STATUSES if one in statuses) or "ok"


def statuses() -> pl.Expr:
    """The rows' statuses as lists.

    Examples
    --------
    >>> frame = pl.DataFrame({"status": ["ok", "guessed, random-looking"]})
    >>> frame.select(statuses().list.contains("guessed"))["status"].to_list()
    [False, True]
    """
    return pl.col("status").str.split(BETWEEN_STATUSES)


def conditions(frame: pl.DataFrame, metadata: Mapping[str, Any], *, every: bool) -> list[str]:
    """Circuit, distances, norms, biases and gamma; without ``every`` only non-default ones.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("encoder"), bias=True, gamma=3.0)
    >>> ", ".join(conditions(table.frame, table.metadata, every=False))
    'biases included, gamma 3'
    >>> ", ".join(conditions(table.frame, table.metadata, every=True))
    'circuit qk, distance 0, norms not folded in, biases included, gamma 3'
    """
    return [words for words, is_usual in _conditions(frame, metadata) if every or not is_usual]


def _conditions(frame: pl.DataFrame, metadata: Mapping[str, Any]) -> Iterator[tuple[str, bool]]:
    """Each condition, and whether it is the default."""
    if "circuit" in frame.columns:
        circuits = frame["circuit"].drop_nulls().unique(maintain_order=True).to_list()
        if circuits:
            yield f"circuit {' and '.join(circuits)}", circuits == ["qk"]
        distances = sorted(frame["distance"].drop_nulls().unique().to_list())
        if distances:
            plural = "s" if len(distances) > 1 else ""
            yield f"distance{plural} {spans(distances)}", distances == [0]
    folded, biases, gamma = (metadata.get(k) for k in ("folded_norms", "biases", "gamma"))
    if folded is not None:
        yield f"norms {'' if folded else 'not '}folded in", not folded
    if biases is not None:
        yield f"biases {'included' if biases else 'left out'}", not biases
    if gamma is not None:
        yield f"gamma {gamma:g}", gamma == 2
