"""What parts of the scores do to the loss: curves against a factor of each half, and shares."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from wqk._style import GRAY, OLIVE, OUTLIER, PAGE, TEAL, VIOLET, WINE, new_figure, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Every part has one color, and the zeros are gray.
COLORS = {
    "symmetric": TEAL, "skew": WINE, "random": GRAY, "half": OUTLIER, "next head": VIOLET,
    "all": OUTLIER,
}  # fmt: skip
ZEROS = ("random", "half")


def parts_figure(shares: pl.DataFrame, curves: pl.DataFrame, predicts: str) -> Figure:
    """A row of panels for each stack: curves if there are any, shares, and shares by layer."""
    stacks = shares["stack"].unique(maintain_order=True).to_list()
    has_layers = shares["layer"].is_not_null().any()
    width = 1 + (not curves.is_empty()) + has_layers
    loss = "distance of states" if predicts == "states" else "loss (nats)"
    with style():
        figure = new_figure(PAGE if width > 1 else PAGE / 2, 2.6 * len(stacks))
        panels = figure.subplots(len(stacks), width, squeeze=False)
        for row, stack in zip(panels, stacks, strict=True):
            own = shares.filter(stack=stack)
            axes = iter(row)
            if not curves.is_empty():
                _curves(next(axes), curves.filter(stack=stack), loss)
            _shares(next(axes), own.filter(pl.col("layer").is_null()))
            if has_layers:
                _layers(next(axes), own.filter(pl.col("head").is_null()).drop_nulls("layer"))
            row[0].set_title(stack)
        return figure


def _curves(axes: Axes, curves: pl.DataFrame, loss: str) -> None:
    for (name,), rows in curves.group_by("direction", maintain_order=True):
        line = "--" if name in ("random", "all") else "-"
        axes.plot(rows["factor"], rows["loss"], line, color=COLORS[str(name)], label=str(name))
    axes.axvline(1, color=GRAY, linewidth=0.5)
    axes.set(xlabel="factor of this half", ylabel=loss)
    axes.legend()


def _shares(axes: Axes, rows: pl.DataFrame) -> None:
    rows = rows.filter(~pl.col("part").is_in(["whole", "none"])).drop_nulls("share")
    for at, row in enumerate(rows.reverse().iter_rows(named=True)):
        reach = [[row["share"] - row["low"]], [row["high"] - row["share"]]]
        color = COLORS.get(row["part"], OLIVE)
        axes.errorbar(row["share"], at, xerr=reach, fmt="o", color=color, capsize=2)
    axes.set_yticks(range(len(rows)), rows.reverse()["part"].to_list())
    axes.axvline(0, color=GRAY, linewidth=0.5)
    axes.axvline(1, color=GRAY, linewidth=0.5)
    axes.set(xlabel="share of the explained loss kept")


def _layers(axes: Axes, rows: pl.DataFrame) -> None:
    for name in ("symmetric", "skew", "half", "random"):
        own = rows.filter(part=name).drop_nulls("share")
        line = "--" if name in ZEROS else "o-"
        axes.plot(own["layer"], own["share"], line, color=COLORS[name], label=name)
    axes.axhline(1, color=GRAY, linewidth=0.5)
    axes.axhline(0, color=GRAY, linewidth=0.5)
    axes.set(xlabel="layer that is changed", ylabel="share kept")
    axes.set_xticks(sorted(rows["layer"].unique()))
    axes.legend(loc="center")
