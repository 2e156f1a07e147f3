"""The coupling of a layer's heads: how far each pair are each other's transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._console import counted
from wqk._style import PAGE, SIGNS, new_figure, style
from wqk._typing import Array, Float
from wqk.errors import TableError
from wqk.reporting.pictures.panels import heading
from wqk.reporting.pictures.selection import titles
from wqk.tables.details import BlockDetails

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

# Up to this many heads, the numbers are printed into the matrix.
PRINTED_HEADS = 16

# Small matrices side by side.
COLUMNS = 6


@style()
def coupling(matrix: Float[Array, "heads heads"], title: str) -> Figure:
    """Draw T[a, b] = tr(M_a M_b)/(‖M_a‖ ‖M_b‖), from `wqk.coupling`.

    1 (red) where two heads are each other's transpose; the diagonal holds each head's own symmetry.
    Numbers are printed in hundredths where they fit.
    """
    figure = new_figure(3.9, 3.5)
    axis = figure.subplots()
    drawn = _draw_coupling(axis, matrix, ticks=16)
    axis.set(title=title, xlabel="head b", ylabel="head a")
    if len(matrix) <= PRINTED_HEADS:
        for (a, b), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.6 else "black"
            hundredths = "–" if np.isnan(value) else f"{round(100 * value) + 0:d}"
            hundredths = hundredths.replace("-", "−")
            axis.text(b, a, hundredths, ha="center", va="center", fontsize=5.5, color=color)
        axis.set_xlabel("head b\n(printed: coupling × 100)")
    _add_color_scale(figure, drawn, shrink=0.8)
    return figure


def coupling_rows(blocks: Sequence[BlockDetails]) -> pl.DataFrame:
    """A row for each pair of heads: ``title`` (the model), ``layer``, ``a``, ``b``, ``coupling``.

    Raises
    ------
    TableError
        There are no details of a square form.
    """
    square = [block for block in blocks if block.coupling is not None]
    if not square:
        raise TableError(
            "coupling needs details of square forms: wqk scan REF --details FILE.npz, then --from "
            f"FILE.npz; got {counted(len(blocks), 'layer')}"
        )
    frames = []
    for title, block in zip(titles([vars(block.key) for block in square]), square, strict=True):
        matrix = np.asarray(block.coupling, np.float64)
        a, b = np.indices(matrix.shape).reshape(2, -1)
        frames.append(
            pl.DataFrame(
                {
                    "title": title,
                    "layer": block.key.layer,
                    "a": a,
                    "b": b,
                    "coupling": matrix.ravel(),
                }
            )
        )
    return pl.concat(frames)


@style()
def coupling_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `coupling_rows`: small matrices on one color scale; every model begins a row."""
    models = [
        model.partition_by("layer", maintain_order=True)
        for model in rows.partition_by("title", maintain_order=True)
    ]
    # Rows of equal length: twelve layers are two rows of six, thirteen three of five or less.
    longest = max(map(len, models))
    columns = math.ceil(longest / math.ceil(longest / COLUMNS))
    lines = [model[at : at + columns] for model in models for at in range(0, len(model), columns)]
    width = 1.2 + (PAGE - 1.2) / COLUMNS * columns
    figure = new_figure(width, 0.3 + len(lines) * (0.45 + (width - 1.2) / columns))
    axes = figure.subplots(len(lines), columns, squeeze=False)
    for row, line in zip(axes, lines, strict=True):
        for axis, layer in zip(row, line, strict=False):
            square = layer["coupling"].to_numpy().reshape(layer["a"].n_unique(), -1)
            drawn = _draw_coupling(axis, square, ticks=4)
            axis.set_title(f"\nlayer {layer['layer'][0]}", fontsize=8, fontweight="normal")
            axis.set_xlabel("head b")
        for axis in row[len(line) :]:
            axis.remove()
        row[0].set_ylabel("head a")
        if any(line[0] is model[0] for model in models):
            heading(row[0], line[0]["title"][0])
    _add_color_scale(figure, drawn, shrink=min(1.0, 1.6 / len(lines)), aspect=15)
    return figure


def _draw_coupling(axis: Axes, matrix: Float[Array, "heads heads"], ticks: int) -> AxesImage:
    drawn = axis.imshow(matrix, cmap=SIGNS, vmin=-1, vmax=1, interpolation="nearest")
    numbers = range(0, len(matrix), math.ceil(len(matrix) / ticks))
    axis.set(xticks=numbers, yticks=numbers)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return drawn


def _add_color_scale(figure: Figure, drawn: AxesImage, **size: Any) -> None:
    """Add the color scale of all matrices, at their right."""
    bar = figure.colorbar(drawn, ax=figure.axes, **size)
    bar.outline.set_visible(False)
    bar.set_label(r"$\mathrm{tr}(M_a M_b) \,/\, \|M_a\| \|M_b\|$", fontsize=7)
