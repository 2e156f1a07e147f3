"""Score curves of an encoder and a decoder, and the matrices behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wqk._style import LABELS, new_figure, style
from wqk.figures.matrix import draw_entries
from wqk.scanning.plotting import layer_curves

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from wqk.forms.images import MatrixImage
    from wqk.scanning.tables import ScoreTable


def contrast(table: ScoreTable, matrices: Mapping[str, MatrixImage] | None = None) -> Figure:
    """Symmetry and directionality over the layers of each checkpoint, next to matrices.

    Parameters
    ----------
    table
        Scores of one or several checkpoints; each gets a curve.
    matrices
        Images of forms, by title.
    """
    matrices = matrices or {}
    with style():
        panels = len(LABELS) + len(matrices)
        figure = new_figure(2.35 * panels, 2.4)
        axes = figure.subplots(1, panels, width_ratios=[1.1] * len(LABELS) + [1.0] * len(matrices))
        for axis, (score, title) in zip(axes, LABELS.items(), strict=False):
            layer_curves(axis, table, score, title)
        axes[0].legend(loc="best")
        for axis, (title, matrix) in zip(axes[len(LABELS) :], matrices.items(), strict=True):
            draw_entries(axis, matrix)
            axis.set(title=title, xlabel="key side", ylabel="query side", xticks=[], yticks=[])
            axis.set_box_aspect(1)
    return figure
