"""Initialisations side by side: Figure S5, and the losses with their spread."""

from __future__ import annotations

from itertools import cycle
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk.figures.cells import starts
from wqk.figures.curves import loss_curves, loss_differences, of_cells, score_curves
from wqk.figures.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    PAGE,
    PURPLE,
    SKY,
    SYMMETRY,
    YELLOW,
    draw_curve,
    label_ends,
    label_steps,
    letter,
    new_figure,
    shades,
    style,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.runs import Run

# What starts are told apart by, also in grey; penalties and combinations take what is left.
LOOKS: dict[str, dict[str, Any]] = {
    "random": {"color": "black", "linestyle": "-"},
    "symmetric": {"color": BLUE, "linestyle": "--"},
    "indefinite": {"color": GREEN, "linestyle": "-."},
    "paired": {"color": ORANGE, "linestyle": ":"},
    "skew": {"color": PURPLE, "linestyle": (0, (6, 1, 1, 1, 1, 1))},
    "mimetic": {"color": SKY, "linestyle": (0, (8, 2))},
}
OTHERS: tuple[dict[str, Any], ...] = (
    {"color": YELLOW, "linestyle": "-"},
    {"color": GREY, "linestyle": "--"},
    {"color": SKY, "linestyle": "-."},
    {"color": PURPLE, "linestyle": ":"},
)

# Losses are drawn from this share of the steps on; before it, all fall alike.
SETTLED = 0.1


def start_curves(runs: Sequence[Run]) -> pl.DataFrame:
    """What Figure S5 shows: held-out loss and symmetry from different initialisations.

    Columns are those of `wqk.figures.curves`, after ``start``.

    Raises
    ------
    RunError
        The runs do not start in two ways at least, or some have no scores or losses.
    """
    found = starts(runs, "s5", penalties=False).cells
    return of_cells(
        {
            start: pl.concat([score_curves(cell.runs), loss_curves(cell.runs)])
            for start, cell in found.items()
        },
        "start",
    )


def loss_by_start(runs: Sequence[Run]) -> pl.DataFrame:
    """Held-out losses of all starts and penalties, and their differences to the random start.

    Differences are taken seed by seed; where no run starts at random, to the first start.

    Raises
    ------
    RunError
        The runs do not start in two ways at least, or some have no losses.
    """
    found = starts(runs, "losses", penalties=True).cells
    baseline = next(iter(found.values())).runs
    return of_cells(
        {
            start: pl.concat([loss_curves(cell.runs), loss_differences(cell.runs, baseline)])
            for start, cell in found.items()
        },
        "start",
    )


def loss_and_symmetry(curves: pl.DataFrame) -> Figure:
    """Figure S5: loss (a), median symmetry (b), gap between layers, and every layer (c)."""
    names = curves["start"].unique(maintain_order=True).to_list()
    looks = _looks(names)
    columns = max(3, min(len(names), 4))
    rows = 1 + -(-len(names) // columns)
    with style():
        figure = new_figure(PAGE, 2.0 + 1.7 * (rows - 1))
        grid = figure.add_gridspec(rows, 1)
        first = grid[0].subgridspec(1, 3).subplots()
        panels = (("held_out_loss", "held-out loss (nats)", ("low", "high")),
                  ("symmetry", "median symmetry", ("q25", "q75")),
                  ("symmetry_gap", "largest − least symmetry", ("low", "high")))  # fmt: skip
        for axis, (quantity, label, band) in zip(first, panels, strict=True):
            some = curves.filter(pl.col("layer").is_null(), quantity=quantity)
            _draw_starts(axis, some, looks, band, label)
        letter(first[0], "a")
        letter(first[1], "b")
        below = [
            axis
            for row in range(1, rows)
            for axis in grid[row].subgridspec(1, columns).subplots(sharey=True)
        ]
        symmetry = curves.filter(pl.col("layer").is_not_null(), quantity="symmetry")
        for axis, name in zip(below, names, strict=False):
            _draw_layers(axis, symmetry.filter(start=name), looks[name]["color"])
            axis.set_title(name)
        letter(below[0], "c")
    return figure
