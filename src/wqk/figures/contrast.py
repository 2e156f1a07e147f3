"""Score curves of an encoder and a decoder, and the matrices behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk.figures.matrix import draw_entries
from wqk.figures.style import BLUE, GRAY, GREEN, ORANGE, PURPLE, new_figure, style

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.forms.images import MatrixImage
    from wqk.scanning.tables import ScoreTable

SCORES = {"symmetry": "symmetry", "directionality_excess": "directionality (excess)"}


def contrast(table: ScoreTable, matrices: Mapping[str, MatrixImage] | None = None) -> Figure:
    """Symmetry and directionality over the layers of each checkpoint, beside matrices.

    Parameters
    ----------
    table
        Scores of one or several checkpoints; each gets a curve.
    matrices
        Images of forms, by title.
    """
    matrices = matrices or {}
    with style():
        panels = len(SCORES) + len(matrices)
        figure = new_figure(2.35 * panels, 2.4)
        axes = figure.subplots(1, panels, width_ratios=[1.1] * len(SCORES) + [1.0] * len(matrices))
        for axis, (score, title) in zip(axes, SCORES.items(), strict=False):
            layer_curves(axis, table, score, title)
        axes[0].legend(loc="best")
        for axis, (title, matrix) in zip(axes[len(SCORES) :], matrices.items(), strict=True):
            draw_entries(axis, matrix)
            axis.set(title=title, xlabel="key side", ylabel="query side", xticks=[], yticks=[])
            axis.set_box_aspect(1)
    return figure


def layer_curves(axis: Axes, table: ScoreTable, score: str, title: str) -> None:
    """One score over the layers, a curve for each checkpoint, zero and the null drawn in."""
    colors = (BLUE, ORANGE, GREEN, PURPLE)
    layers = table.layers.frame
    for index, frame in enumerate(layers.partition_by("checkpoint", maintain_order=True)):
        color = colors[index % len(colors)]
        axis.plot(
            frame["layer"],
            frame[score],
            "o-",
            color=color,
            label=frame["checkpoint"][0],
            clip_on=False,
        )
        if score == "symmetry":
            axis.plot(frame["layer"], frame["symmetry_null"], ":", color=color, linewidth=0.8)
            if index == 0:
                first = frame.row(0, named=True)
                place = (first["layer"], first["symmetry_null"])
                axis.annotate(
                    "null", place, xytext=(6, 3), textcoords="offset points", fontsize=6, color=GRAY
                )
    axis.axhline(0, color=GRAY, linewidth=0.6, zorder=0)
    axis.set(title=title, xlabel="layer", ylim=(-1, 1))
    axis.set_xticks(sorted(layers["layer"].unique()))
