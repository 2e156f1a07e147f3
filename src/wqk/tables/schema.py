"""The columns of a score table, in their order, and what identifies a row."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import polars as pl

from wqk._console import spans

# 2: columns of MEASURES may follow; files of version 1 are read as before.
SCHEMA_VERSION = 2

SCHEMA: dict[str, pl.DataType] = {
    "checkpoint": pl.String(),
    "revision": pl.String(),
    "step": pl.Int64(),
    "model_type": pl.String(),
    "family": pl.String(),
    "parameters": pl.Int64(),
    "stack": pl.String(),
    "kind": pl.String(),
    "window": pl.String(),
    "layer": pl.Int64(),
    "head": pl.Int64(),
    "key_head": pl.Int64(),
    "heads": pl.Int64(),
    "key_heads": pl.Int64(),
    "rank": pl.Int64(),
    "d_query": pl.Int64(),
    "d_key": pl.Int64(),
    "applications": pl.Int64(),
    "circuit": pl.String(),
    "distance": pl.Int64(),
    "norm": pl.Float64(),
    "symmetry": pl.Float64(),
    "symmetry_null": pl.Float64(),
    "symmetry_within_heads": pl.Float64(),
    "symmetry_between_heads": pl.Float64(),
    "symmetry_within_random": pl.Float64(),
    "directionality": pl.Float64(),
    "directionality_excess": pl.Float64(),
    "status": pl.String(),
}

# What a row's status may say, in this order, where more than one holds; "ok" if none does.
STATUSES = ("non-finite", "degenerate", "partial", "guessed", "random-looking", "unmoved")
BETWEEN_STATUSES = ", "

# Columns that a scan adds on request, after the others, by measure; see `wqk.scanning.measures`.
MEASURES: dict[str, tuple[str, ...]] = {
    "spectral_norm": ("spectral_norm", "spectral_norm_null"),
    "spectrum": (
        "spectral_norm",
        "spectral_norm_null",
        "stable_rank",
        "stable_rank_null",
        "effective_rank",
        "effective_rank_null",
        "eigenvalue_positivity",
        "eigenvalue_positivity_spread",
    ),
    "ceiling": ("query_norm", "key_norm", "score_ceiling", "score_ceiling_any_distance"),
    "bands": ("rotary_low_share",),
}
# Of the terms of first and second order of an update; see `wqk.forms.update_terms`.
UPDATE_TERMS: dict[str, pl.DataType] = {
    f"{order}_order_{name}": pl.Float64()
    for order in ("first", "second")
    for name in ("norm", "spectral_norm", "stable_rank")
}
# Of the attention logits that a monitor measures; see `wqk.live.logits`.
LOGITS: dict[str, pl.DataType] = {
    "max_logit": pl.Float64(),
    "logit_std": pl.Float64(),
    "attention_entropy": pl.Float64(),
    "attention_top_share": pl.Float64(),
}
OPTIONAL: dict[str, pl.DataType] = {
    **{name: pl.Float64() for columns in MEASURES.values() for name in columns},
    **UPDATE_TERMS,
    **LOGITS,
}

# No two rows of a table agree in all of these.
KEY = ("checkpoint", "revision", "step", "stack", "kind", "layer", "head", "circuit", "distance")

# What identifies one attention, which is one line of a summary.
GROUP = tuple(column for column in KEY if column not in ("layer", "head"))

# What identifies one layer's form, in a table and among the details.
LAYER = tuple(column for column in KEY if column != "head")

# The scores of which summaries give the median and the quartiles.
SUMMARIZED = ("symmetry", "directionality", "directionality_excess")


def present(columns: Mapping[str, pl.DataType], names: Collection[str]) -> dict[str, pl.DataType]:
    """The columns that are among the names."""
    return {name: kind for name, kind in columns.items() if name in names}


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
