"""Initializations at several scales: the effect of symmetry at equal norms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._style import PAPER_WIDTH, new_figure, style
from wqk.errors import RunError
from wqk.reporting.pictures import note
from wqk.tables.run import Run
from wqk_lab.figures.by_layer import finish_row, lettered
from wqk_lab.figures.curves import held_out_losses
from wqk_lab.figures.starts import looks_of
from wqk_lab.runs.groups import cells, starts
from wqk_lab.runs.speedup import first_below

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Quantities that a start changes, as named in reports, with the label of the axis.
SCALES = {
    "norm_ratio": r"norm of $W_{qk}$ at the start (random = 1)",
    "value_ratio": r"norm of $W_v$ at the start (random = 1)",
}

# Ratios that differ from 1 by less than this share count as unchanged.
UNCHANGED = 0.05

DOSE_SCHEMA: dict[str, pl.DataType] = {
    **dict.fromkeys(("scale", "start"), pl.String()),
    "factor": pl.Float64(),
    **dict.fromkeys(("seed", "step"), pl.Int64()),
    **dict.fromkeys(("held_out_loss", "level", "first_below"), pl.Float64()),
}


def dose_rows(runs: Sequence[Run], level: float | None = None) -> pl.DataFrame:
    """Return each run's loss at the last common step, and the scale of its start.

    ``scale`` is ``norm_ratio`` for runs with unchanged values, ``value_ratio`` for runs without a
    norm of W_qk set by ``--init-norm``; ``factor`` is the median of this ratio over layers. Starts
    with a single factor are omitted. ``first_below`` is the step at which the training loss falls
    below ``level`` (`wqk_lab.runs.speedup.first_below`); null if the loss never does, or without a
    level.

    Raises
    ------
    RunError
        No start has two factors, runs differ in more than seed, initialization and its scales, or
        the runs have no common held-out loss.
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
            start, seed = cell.shared.get("init", "random"), run.recipe.get("seed")
            norm, value = (_factor(run, scale) for scale in SCALES)
            if abs(value - 1) < UNCHANGED:
                rows.append(("norm_ratio", start, norm, seed, step, held_out[0], level, below))
            if not (cell.shared.get("init_norm") or cell.shared.get("init_head_norm")):
                rows.append(("value_ratio", start, value, seed, step, held_out[0], level, below))
    frame = pl.DataFrame(rows, schema=DOSE_SCHEMA, orient="row")
    factor = pl.col("factor")
    several = factor.max() > (1 + UNCHANGED) * factor.min()
    frame = frame.filter(several.over("scale", "start"))
    if frame.is_empty():
        raise RunError(
            "dose needs a start at two scales: wqk lab train --init symmetric --init-norm 2, or "
            "--init-values 2, beside one without"
        )
    return frame


@style()
def loss_by_scale(rows: pl.DataFrame) -> Figure:
    """Draw held-out losses, and the steps at which losses fall below a level, by scale."""
    quantities = {"held_out_loss": f"held-out loss at step {rows['step'][0]:,} (nats)"}
    if (level := rows["level"][0]) is not None:
        quantities["first_below"] = f"step at which training loss < {level:g}"
    scales = [scale for scale in SCALES if scale in rows["scale"]]
    looks = looks_of(rows)
    figure = new_figure(PAPER_WIDTH, 0.6 + 2.3 * len(quantities))
    axes = figure.subplots(len(quantities), len(scales), sharex="col", squeeze=False)
    for row, (quantity, label) in zip(axes, quantities.items(), strict=True):
        for axis, scale in zip(row, scales, strict=True):
            axis.sharey(row[0])
            _draw(axis, rows.filter(scale=scale), quantity, looks)
        finish_row(row, label, zero=False)
    for axis, scale in zip(axes[-1], scales, strict=True):
        axis.set_xlabel(SCALES[scale])
    lettered(axes[0], "ab")
    axes[0, 0].legend()
    symbols = "Thin: one seed; thick: means over all seeds"
    if level is not None and rows["first_below"].null_count():
        symbols += "; triangle: not below the level by then"
    note(figure, f"{symbols}.")
    return figure


def _draw(axis: Axes, rows: pl.DataFrame, quantity: str, looks: Mapping[str, Any]) -> None:
    for start, look in looks.items():
        shown = rows.filter(start=start)
        if shown.is_empty():
            continue
        reached = shown.drop_nulls(quantity).sort("factor")
        for seed in reached.partition_by("seed"):
            axis.plot(
                seed["factor"],
                seed[quantity],
                marker="o",
                color=look["color"],
                markersize=2.5,
                linewidth=0.5,
                alpha=0.5,
            )
        never = shown.filter(pl.col(quantity).is_null())
        axis.plot(never["factor"], never["step"], "^", color=look["color"], fillstyle="none")
        # Means over all seeds, whose factors differ in the last digits.
        means = (
            reached.group_by(pl.col("factor").log(10).round(2).alias("group"))
            .agg(pl.col("factor", quantity).mean(), pl.col("seed").n_unique())
            .filter(seed=shown["seed"].n_unique())
            .sort("factor")
        )
        axis.plot(means["factor"], means[quantity], label=start, **look)
    factors = np.unique(rows["factor"].round(1).to_numpy())
    axis.set_xscale("log")
    axis.set_xticks(factors, [f"{factor:g}" for factor in factors])
    axis.minorticks_off()


def _factor(run: Run, scale: str) -> float:
    """Return the median over layers of a ratio in the report on the run's start."""
    report = run.settings.get("initialization") or [{}]
    ratios = [layer.get(scale) for layer in report]
    if None in ratios:
        raise RunError(f"{run.folder}: its start has no report of scales; train it again")
    return float(median(ratios))
