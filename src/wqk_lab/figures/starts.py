"""Comparison of initializations: Figure S5, and the held-out losses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, cycle
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import counted
from wqk._style import GRAY, OLIVE, PAPER_WIDTH, SAND, TEAL, VIOLET, WINE, new_figure, style
from wqk.reporting.pictures import draw_curve, note, panel_grid
from wqk.tables.run import Run
from wqk_lab.figures.by_layer import draw_layers, finish_row, label_steps, lettered
from wqk_lab.figures.curves import has_seeds, loss_curves, loss_differences, of_cells, score_curves
from wqk_lab.figures.followed import only_followed, titles_of_runs
from wqk_lab.runs.groups import starts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

# Line styles that remain distinguishable in grayscale; penalties and combinations take the others.
LOOKS: dict[str, dict[str, Any]] = {
    "random": {"color": "black", "linestyle": "-"},
    "symmetric": {"color": WINE, "linestyle": "--"},
    "indefinite": {"color": TEAL, "linestyle": "-."},
    "paired": {"color": SAND, "linestyle": ":"},
    "skew": {"color": VIOLET, "linestyle": (0, (6, 1, 1, 1, 1, 1))},
    "mimetic": {"color": OLIVE, "linestyle": (0, (8, 2))},
}
OTHERS: tuple[dict[str, Any], ...] = (
    {"color": TEAL, "linestyle": "-"},
    {"color": GRAY, "linestyle": "--"},
    {"color": OLIVE, "linestyle": "-."},
    {"color": VIOLET, "linestyle": ":"},
)

# Own runs have the first, the paper's the second.
LOSSES = {"held_out_loss": "held-out", "training_loss": "training"}

# The scale of losses is for the steps after this share; before, all losses fall alike.
SETTLED = 0.1


def start_curves(runs: Sequence[Run]) -> pl.DataFrame:
    """Return the curves of Figure S5: held-out loss and symmetry from different initializations.

    Columns are ``start`` and the columns of `wqk_lab.figures.curves`. Models with scores but no
    recipe have no losses, and their names are used as ``start``.

    Raises
    ------
    RunError
        The runs have fewer than two initializations, or some have no scores or losses.
    """
    if only_followed(runs):
        curves_by_title = {}
        for title, run in zip(titles_of_runs(runs), runs, strict=True):
            curves_by_title[title] = score_curves([run])
        return of_cells(curves_by_title, "start")
    cells = starts(runs, "s5", penalties=False)
    curves = {
        start: pl.concat([score_curves(cell.runs), loss_curves(cell.runs)])
        for start, cell in cells.items()
    }
    return of_cells(curves, "start")


def losses_by_start(runs: Sequence[Run]) -> pl.DataFrame:
    """Return held-out losses of all initializations and penalties, and differences from the first.

    The first is random initialization, if present. Differences are between runs with equal seeds.

    Raises
    ------
    RunError
        The runs have fewer than two initializations, or some have no losses.
    """
    runs_by_start = {}
    for start, cell in starts(runs, "losses", penalties=True).items():
        runs_by_start[start] = cell.runs
    baseline, *other_starts = runs_by_start.values()
    baseline_seeds = _seeds(baseline)
    other_seeds = _seeds(chain.from_iterable(other_starts))
    shared_seeds = baseline_seeds & other_seeds or baseline_seeds
    curves = {}
    for start, runs_of_start in runs_by_start.items():
        # Both panels show the same runs: runs with seeds of the baseline.
        paired = [run for run in runs_of_start if run.recipe.get("seed") in shared_seeds]
        paired = paired or list(runs_of_start)
        curves[start] = pl.concat([loss_curves(paired), loss_differences(paired, baseline)])
    return of_cells(curves, "start")


def _seeds(runs: Iterable[Run]) -> set[Any]:
    """Return the different seeds of runs."""
    return {run.recipe.get("seed") for run in runs}


@style()
def loss_and_symmetry(curves: pl.DataFrame) -> Figure:
    """Draw Figure S5: loss (a), median symmetry and gap between layers (b), every layer (c).

    Without losses, panel a is left out.
    """
    looks = looks_of(curves)
    scored = looks_of(curves.drop_nulls("layer"))  # the paper's symmetric runs have no scores
    rows = 1 if len(scored) < 5 else 2
    columns = math.ceil(len(scored) / rows)
    figure = new_figure(PAPER_WIDTH, 2.8 + 1.6 * rows)
    parts = figure.subfigures(2, 1, height_ratios=[2.6, 0.2 + 1.6 * rows], squeeze=False)
    upper, lower = parts[:, 0]
    medians = curves.filter(pl.col("layer").is_null())
    has_losses = medians["quantity"].is_in(list(LOSSES)).any()
    above = list(upper.subplots(1, 3 if has_losses else 2))
    if has_losses:
        _draw_losses(above[0], medians, looks)
    for axis, quantity, label, band in (
        (above[-2], "symmetry", "median symmetry", ("q25", "q75")),
        (above[-1], "symmetry_gap", "gap between layers", ("low", "high")),
    ):
        _draw_starts(axis, medians.filter(quantity=quantity), looks, band)
        finish_row([axis], label)
    _add_legend(upper, above[0])
    below = panel_grid(lower, len(scored), columns, sharex=True, sharey=True)
    symmetry = curves.filter(pl.col("layer").is_not_null(), quantity="symmetry")
    ends = []
    for axis, (start, look) in zip(below, scored.items(), strict=True):
        color = GRAY if look["color"] == "black" else look["color"]
        ends.append(draw_layers(axis, symmetry.filter(start=start), color))
        axis.set_title(start)
        axis.tick_params(labelbottom=True)
    for first in range(0, len(below), columns):
        finish_row(below[first:][:columns], "symmetry", ends[first:])
    label_steps([[*above, *below]])
    lettered((*above[:-1], below[0]), "abc")
    bands = "Bands: the quartiles over layers."
    if has_seeds(curves):
        bands = "Bands: the range over seeds; of the median symmetry, the quartiles over layers."
    note(figure, f"{bands} The numbers are layers, from light (0) to dark.")
    return figure


@style()
def losses_and_differences(curves: pl.DataFrame) -> Figure:
    """Draw held-out losses from all initializations, and their differences from the first."""
    looks = looks_of(curves)
    figure = new_figure(PAPER_WIDTH, 2.9)
    axes = figure.subplots(1, 2)
    _draw_losses(axes[0], curves, looks)
    differences = curves.filter(quantity="loss_difference")
    _draw_starts(axes[1], differences, looks, ("low", "high"))
    _from_settled(axes[1], differences)
    finish_row([axes[1]], f"difference from {next(iter(looks))} (nats)")
    label_steps([[*axes]])
    _add_legend(figure, axes[0])
    note(figure, "Bands: the range over seeds. Both panels show the seeds that have a partner.")
    return figure


def _add_legend(figure: FigureBase, axis: Axes) -> None:
    """Put one panel's legend above all panels, in as many columns as fit on a page."""
    handles, labels = axis.get_legend_handles_labels()
    inches = 0.6 + 0.06 * max(map(len, labels))
    figure.legend(
        handles, labels, loc="outside upper center", ncols=max(1, int(PAPER_WIDTH / inches))
    )


def _draw_losses(axis: Axes, curves: pl.DataFrame, looks: Mapping[str, Any]) -> None:
    losses = curves.filter(pl.col("quantity").is_in(list(LOSSES)))
    _draw_starts(axis, losses, looks, ("low", "high"))
    _from_settled(axis, losses)
    axis.set_ylabel(f"{LOSSES[losses['quantity'][0]]} loss (nats)")


def _draw_starts(
    axis: Axes, curves: pl.DataFrame, looks: Mapping[str, Any], band: tuple[str, str]
) -> None:
    for start, look in looks.items():
        curve = curves.filter(start=start)
        if curve.is_empty():
            continue
        label = f"{start}, {counted(curve['runs'][0], 'run')}"
        draw_curve(axis, curve, band, label=label, **look)


def _from_settled(axis: Axes, curves: pl.DataFrame) -> None:
    """Fit the limits to the steps after the first fall of the loss, if any."""
    first_step = SETTLED * pl.col("step").max()
    settled = curves.filter(pl.col("step") >= first_step)
    bands = settled.select("low", "high").to_numpy()
    if not bands.size:
        return
    lowest = bands.min()
    highest = bands.max()
    if highest - lowest > 0:
        margin = 0.05 * (highest - lowest)
        axis.set_ylim(lowest - margin, highest + margin)


def looks_of(curves: pl.DataFrame) -> dict[str, dict[str, Any]]:
    """Return a style for every initialization, the same in all figures."""
    names = curves["start"].unique(maintain_order=True)
    declared = {name: look for name, look in LOOKS.items() if name in names}
    undeclared = (name for name in names if name not in LOOKS)
    return declared | dict(zip(undeclared, cycle(OTHERS), strict=False))
