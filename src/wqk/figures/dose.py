"""Initializations at several scales: what symmetry adds where all else is equally large."""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._style import PAGE, new_figure, style
from wqk.errors import RunError
from wqk.figures.curves import held_out_losses
from wqk.figures.panels import finish_row, letter, note
from wqk.figures.starts import looks_of
from wqk.runs.groups import cells, starts
from wqk.runs.speedup import first_below

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.runs.run import Run

# The scale that a run's start changes, as its report has it, and the axis that it is drawn along.
SCALES = {
    "norm_ratio": r"norm of $W_{qk}$ at the start (random = 1)",
    "value_ratio": r"norm of $W_v$ at the start (random = 1)",
}

# A scale within this share of the random start's is as drawn.
AS_DRAWN = 0.05

SCHEMA = {
    "scale": pl.String(),
    "start": pl.String(),
    "factor": pl.Float64(),
    "seed": pl.Int64(),
    "step": pl.Int64(),
    "held_out_loss": pl.Float64(),
    "level": pl.Float64(),
    "first_below": pl.Int64(),
}


def dose_rows(runs: Sequence[Run], level: float | None = None) -> pl.DataFrame:
    """Each run's loss at the last step that all have, against the scale that it started with.

    Parameters
    ----------
    runs
        Runs that differ only in seed, initialization and the scales of that.
    level
        Training loss in nats; ``first_below`` is the step at which a run falls below it (see
        `wqk.runs.speedup.first_below`), null where it does not, or where there is no level.

    Returns
    -------
    polars.DataFrame
        ``scale`` is ``norm_ratio`` for runs whose values are as drawn, and ``value_ratio`` for
        runs at the start's own norm of W_qk; ``factor`` the median over layers. A start with a
        single factor is left out.

    Raises
    ------
    RunError
        No start has two factors, runs differ in more, or they have no common held-out loss.
    """
    starts(runs, "dose", penalties=False)
    losses = {run.folder: held_out_losses(run).drop("quantity") for run in runs}
    step = min(int(frame["step"].to_numpy().max(initial=0)) for frame in losses.values())
    rows: list[tuple[Any, ...]] = []
    for cell in cells(runs):
        for run in cell.runs:
            held_out = losses[run.folder].filter(step=step)["value"]
            if held_out.is_empty():
                raise RunError(f"dose: {run.folder} has no held-out loss at step {step}")
            below = None if level is None else first_below(run, level)
            factors = {scale: _factor(run, scale) for scale in SCALES}
            own = {
                "norm_ratio": abs(factors["value_ratio"] - 1) < AS_DRAWN,
                "value_ratio": not cell.shared.get("init_norm"),
            }
            start, seed = cell.shared.get("init", "random"), run.recipe.get("seed")
            rows += [
                (scale, start, factors[scale], seed, step, held_out[0], level, below)
                for scale in SCALES
                if own[scale]
            ]
    found = pl.DataFrame(rows, schema=SCHEMA, orient="row")
    several = pl.col("factor").max() > (1 + AS_DRAWN) * pl.col("factor").min()
    found = found.filter(several.over("scale", "start"))
    if found.is_empty():
        raise RunError(
            "dose needs a start at two scales: wqk train --init symmetric --init-norm 2, or "
            "--init-values 2, beside one without"
        )
    return found


def loss_by_scale(rows: pl.DataFrame) -> Figure:
    """Held-out loss, and the step below the level where there is one, against each scale."""
    quantities = {"held_out_loss": f"held-out loss at step {rows['step'][0]:,} (nats)"}
    if (level := rows["level"][0]) is not None:
        quantities["first_below"] = f"step at which training loss < {level:g}"
    scales = [scale for scale in SCALES if scale in rows["scale"]]
    looks = looks_of(rows)
    with style():
        figure = new_figure(PAGE, 0.6 + 2.3 * len(quantities))
        axes = figure.subplots(len(quantities), len(scales), sharex="col", squeeze=False)
        for row, (quantity, label) in zip(axes, quantities.items(), strict=True):
            for axis, scale in zip(row, scales, strict=True):
                axis.sharey(row[0])
                _draw(axis, rows.filter(scale=scale), quantity, looks)
            finish_row(row, label, zero=False)
        for axis, scale in zip(axes[-1], scales, strict=True):
            axis.set_xlabel(SCALES[scale])
        for axis, name in zip(axes[0], "ab", strict=False):
            letter(axis, name)
        axes[0, 0].legend()
        note(
            figure,
            "Thin: one seed; thick: means over all seeds; triangle: not below the level by then.",
        )
    return figure


def _draw(axis: Axes, rows: pl.DataFrame, quantity: str, looks: Mapping[str, Any]) -> None:
    for start, look in looks.items():
        some = rows.filter(start=start)
        if some.is_empty():
            continue
        seeds = some["seed"].n_unique()
        never = some.filter(pl.col(quantity).is_null())
        some = some.drop_nulls(quantity)
        # Seeds of one factor differ in its last digits.
        factor = pl.col("factor").log(10).round(2)
        means = some.group_by(factor.alias("group")).agg(
            pl.col("factor", quantity).mean(), pl.col("seed").n_unique().alias("seeds")
        )
        means = means.filter(seeds=seeds).sort("factor")
        color = look["color"]
        for seed in some.sort("factor").partition_by("seed"):
            axis.plot(
                seed["factor"], seed[quantity],
                marker="o", color=color, markersize=2.5, linewidth=0.5, alpha=0.5,
            )  # fmt: skip
        axis.plot(never["factor"], never["step"], "^", color=color, fillstyle="none")
        axis.plot(means["factor"], means[quantity], label=start, **look)
    factors = np.unique(rows["factor"].round(1).to_numpy())
    axis.set_xscale("log")
    axis.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axis.minorticks_off()


def _factor(run: Run, scale: str) -> float:
    """The median over layers of what the start's report says."""
    report = run.settings.get("initialization") or [{}]
    ratios = [layer.get(scale) for layer in report]
    if None in ratios:
        raise RunError(f"{run.folder}: its start has no report of scales; train it anew")
    return float(median(ratios))
