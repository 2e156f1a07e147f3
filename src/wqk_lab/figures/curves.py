"""Curves over training: lines and bands from the scores and losses of several seeds.

Curves are rows of a frame in long form. ``quantity`` and ``layer`` (null: over all layers) identify
a curve; ``value`` is the mean over seeds, ``low`` and ``high`` are the minimum and the maximum;
``q25`` and ``q75`` are the quartiles over layers, averaged over seeds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import polars as pl

from wqk.errors import RunError
from wqk.tables.run import Run
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas.ranks import plain_layers

SCORES = ("symmetry", "directionality_excess")

CURVE: dict[str, pl.DataType] = {
    "quantity": pl.String(),
    **dict.fromkeys(("layer", "step"), pl.Int64()),
    **dict.fromkeys(("value", "low", "high", "q25", "q75"), pl.Float64()),
    "runs": pl.UInt32(),
}


def score_curves(runs: Sequence[Run], of: Literal["scores", "updates"] = "scores") -> pl.DataFrame:
    """Return symmetry and directionality (excess) along runs of one cell.

    By layer, and median and quartiles over layers; ``symmetry_gap`` is the difference between the
    most and the least symmetric layer. Steps that some run has not scored are omitted.

    Raises
    ------
    RunError
        The runs have no scored step in common.
    """
    curves = over_seeds([layer_curves(getattr(run, of)) for run in runs])
    return _not_empty(curves, runs, of)


def loss_curves(runs: Sequence[Run]) -> pl.DataFrame:
    """Return the held-out loss along runs of one cell, in nats per token.

    Raises
    ------
    RunError
        The runs have no step with a held-out loss in common.
    """
    curves = over_seeds([held_out_losses(run) for run in runs])
    return _not_empty(curves, runs, "a held-out loss")


def loss_differences(runs: Sequence[Run], baseline: Sequence[Run]) -> pl.DataFrame:
    """Return held-out losses minus the baseline's losses of the same seed, in nats per token.

    The result is empty if the runs have no seed in common.
    """
    losses_by_seed = {run.recipe.get("seed"): held_out_losses(run) for run in baseline}
    differences = []
    for run in runs:
        seed = run.recipe.get("seed")
        if seed not in losses_by_seed:
            continue
        baseline_losses = losses_by_seed[seed].select("step", baseline="value")
        losses = held_out_losses(run).join(baseline_losses, on="step")
        difference = pl.col("value") - pl.col("baseline")
        differences.append(losses.select("step", difference, quantity=pl.lit("loss_difference")))
    return over_seeds(differences)


def of_cells(curves: Mapping[str, pl.DataFrame], name: str) -> pl.DataFrame:
    """Join the curves of several cells to one frame, distinguished by the column ``name``."""
    return pl.concat(
        [frame.select(pl.lit(key).alias(name), pl.all()) for key, frame in curves.items()]
    )


def layer_curves(table: ScoreTable) -> pl.DataFrame:
    """Return the curves of one run's plain self-attention, by layer and over layers."""
    return from_layers(plain_layers(table).frame)


def from_layers(scores: pl.DataFrame) -> pl.DataFrame:
    """Return curves by layer and over layers, from ``step``, ``layer`` and the scores."""
    layers = (
        scores.select("step", "layer", *SCORES)
        .unpivot(SCORES, index=["step", "layer"], variable_name="quantity")
        .with_columns(pl.col("value").fill_nan(None))
        .drop_nulls("value")
    )
    value = pl.col("value")
    steps = layers.group_by("step", "quantity")
    medians = steps.agg(
        value.median(),
        q25=value.quantile(0.25, "linear"),
        q75=value.quantile(0.75, "linear"),
    )
    gaps = (
        steps.agg(value.max() - value.min())
        .filter(quantity="symmetry")
        .with_columns(quantity=pl.lit("symmetry_gap"))
    )
    return pl.concat([layers, medians, gaps], how="diagonal")


def held_out_losses(run: Run) -> pl.DataFrame:
    """Return the curve of one run's held-out losses."""
    return run.metrics.select(
        "step", quantity=pl.lit("held_out_loss"), value="held_out_loss"
    ).drop_nulls("value")


def over_seeds(frames: Sequence[pl.DataFrame]) -> pl.DataFrame:
    """Return mean, minimum and maximum of the runs' curves, at the steps common to all runs."""
    value = pl.col("value")
    return (
        pl.concat([pl.DataFrame(schema=CURVE), *frames], how="diagonal_relaxed")
        .group_by("quantity", "layer", "step")
        .agg(
            value.mean(),
            pl.col("q25", "q75").mean(),
            low=value.min(),
            high=value.max(),
            runs=pl.len(),
        )
        .filter(runs=len(frames))
        .sort("quantity", "layer", "step")
        .select(pl.col(name).cast(kind) for name, kind in CURVE.items())
    )


def has_seeds(curves: pl.DataFrame) -> bool:
    """Return whether any point has a range over seeds, which is drawn as a band."""
    return curves.filter(pl.col("low") < pl.col("high")).height > 0


def _not_empty(curves: pl.DataFrame, runs: Sequence[Run], contents: str) -> pl.DataFrame:
    if curves.is_empty():
        names = ", ".join(run.name for run in runs)
        raise RunError(f"{names}: no step has {contents} in all of these runs")
    return curves
