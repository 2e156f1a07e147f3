"""Curves over training: from the scores and losses of several seeds to lines and bands.

Every curve is a frame in long form. ``quantity`` and ``layer`` (null: all layers at once) say what
is shown; ``value`` is the mean over seeds, ``low`` and ``high`` the smallest and the largest of
them; ``q25`` and ``q75`` are the quartiles over layers, averaged over seeds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import polars as pl

from wqk.atlas.medians import plain_layers
from wqk.errors import RunError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from wqk.runs.run import Run
    from wqk.scanning.tables import ScoreTable

SCORES = ("symmetry", "directionality_excess")

CURVE: dict[str, pl.DataType] = {
    "quantity": pl.String(),
    "layer": pl.Int64(),
    "step": pl.Int64(),
    "value": pl.Float64(),
    "low": pl.Float64(),
    "high": pl.Float64(),
    "q25": pl.Float64(),
    "q75": pl.Float64(),
    "runs": pl.UInt32(),
}


def score_curves(runs: Sequence[Run], of: Literal["scores", "updates"] = "scores") -> pl.DataFrame:
    """Symmetry and directionality (excess) along runs of one cell.

    For each layer; for all layers their median and quartiles; and as ``symmetry_gap`` the
    difference between the most and the least symmetric layer. Steps that not all runs have
    scored are omitted.

    Raises
    ------
    RunError
        The runs have no scored step in common.
    """
    curves = over_seeds([layer_curves(getattr(run, of)) for run in runs])
    if curves.is_empty():
        raise RunError(f"{_names(runs)}: no step has {of} in all of these runs")
    return curves


def loss_curves(runs: Sequence[Run]) -> pl.DataFrame:
    """The held-out loss along runs of one cell, in nats per token.

    Raises
    ------
    RunError
        The runs have no step with a held-out loss in common.
    """
    curves = over_seeds([held_out_losses(run) for run in runs])
    if curves.is_empty():
        raise RunError(f"{_names(runs)}: no step has a held-out loss in all of these runs yet")
    return curves


def loss_differences(runs: Sequence[Run], baseline: Sequence[Run]) -> pl.DataFrame:
    """Held-out losses minus those of the baseline's run with the same seed, in nats per token.

    Empty where no seed has both.
    """
    others = {run.recipe.get("seed"): held_out_losses(run) for run in baseline}
    shared = [run for run in runs if run.recipe.get("seed") in others]
    return over_seeds(
        [
            held_out_losses(run)
            .join(others[run.recipe.get("seed")].select("step", other="value"), on="step")
            .select(
                "step",
                pl.lit("loss_difference").alias("quantity"),
                pl.col("value") - pl.col("other"),
            )
            for run in shared
        ]
    )


def of_cells(curves: Mapping[str, pl.DataFrame], name: str) -> pl.DataFrame:
    """Curves of several cells in one frame, distinguished by the column ``name``."""
    return pl.concat(
        [frame.select(pl.lit(key).alias(name), pl.all()) for key, frame in curves.items()]
    )


def layer_curves(table: ScoreTable) -> pl.DataFrame:
    """One run's scores of plain self-attention: by layer, and over layers."""
    return from_layers(plain_layers(table).frame)


def from_layers(scores: pl.DataFrame) -> pl.DataFrame:
    """Curves by layer, and over layers, from ``step``, ``layer`` and the scores."""
    layers = (
        scores.select("step", "layer", *SCORES)
        .unpivot(SCORES, index=["step", "layer"], variable_name="quantity")
        .with_columns(pl.col("value").fill_nan(None))
        .drop_nulls("value")
    )
    step = layers.group_by("step", "quantity")
    medians = step.agg(
        pl.col("value").median(),
        pl.col("value").quantile(0.25, "linear").alias("q25"),
        pl.col("value").quantile(0.75, "linear").alias("q75"),
    )
    gaps = (
        step.agg(pl.col("value").max() - pl.col("value").min())
        .filter(quantity="symmetry")
        .with_columns(pl.lit("symmetry_gap").alias("quantity"))
    )
    return pl.concat([layers, medians, gaps], how="diagonal")


def held_out_losses(run: Run) -> pl.DataFrame:
    """One run's held-out losses, as a curve."""
    return run.metrics.select(
        "step", pl.lit("held_out_loss").alias("quantity"), value="held_out_loss"
    ).drop_nulls("value")


def over_seeds(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Mean, least and greatest of several runs' curves, at the steps that all of them have."""
    seeds = pl.concat([pl.DataFrame(schema=CURVE), *frames], how="diagonal")
    return (
        seeds.group_by("quantity", "layer", "step")
        .agg(
            pl.col("value").mean(),
            pl.col("value").min().alias("low"),
            pl.col("value").max().alias("high"),
            pl.col("q25", "q75").mean(),
            pl.len().alias("runs"),
        )
        .filter(pl.col("runs") == len(frames))
        .sort("quantity", "layer", "step")
        .select(pl.col(name).cast(kind) for name, kind in CURVE.items())
    )


def _names(runs: Sequence[Run]) -> str:
    return ", ".join(run.name for run in runs)
