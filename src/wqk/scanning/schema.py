"""The columns of a score table, in their order, and what identifies a row."""

from __future__ import annotations

import polars as pl

SCHEMA_VERSION = 1

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

# No two rows of a table agree in all of these.
KEY = ("checkpoint", "revision", "step", "stack", "kind", "layer", "head", "circuit", "distance")

# What the layers of one attention, and one line of a summary, have in common.
GROUP = tuple(column for column in KEY if column not in ("layer", "head"))

# What identifies one layer's form, in a table and among the details.
LAYER = tuple(column for column in KEY if column != "head")

# The scores of which summaries give the median and the quartiles.
SUMMARIZED = ("symmetry", "directionality", "directionality_excess")
