"""How the heads of a layer relate: the coupling of each with each other's transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._style import PAGE, new_figure, style
from wqk._typing import Array, Float
from wqk.errors import TableError
from wqk.figures.panels import heading
from wqk.figures.selection import titles

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from wqk.scanning.details import BlockDetails

LABEL = r"$\mathrm{tr}(M_a M_b) \,/\, \|M_a\| \|M_b\|$"

# Up to this many heads, the numbers are printed into the matrix.
PRINTED_HEADS = 16

# Small matrices side by side.
COLUMNS = 6


def coupling(matrix: Float[Array, "heads heads"], title: str) -> Figure:
    """Draw T[a, b] = tr(M_a M_b)/(‖M_a‖ ‖M_b‖), from `wqk.coupling`.

    1 (red) where two heads are each other's transpose; the diagonal holds each head's own symmetry.
    Numbers are printed in hundredths where they fit.
    """
    with style():
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
        _add_scale(figure, drawn, shrink=0.8)
    return figure


def coupling_rows(blocks: Sequence[BlockDetails]) -> pl.DataFrame:
    """The coupling of each pair of heads in some layers, a row for each pair.

    Raises
    ------
    TableError
        There are no details, or none of a square form.
    """
    square = [block for block in blocks if block.coupling is not None]
    if not square:
        raise TableError(
            "coupling needs details of square forms: wqk scan REF --details FILE.npz, then --from "
            f"FILE.npz; got {len(blocks)} layers"
        )
    names = titles([vars(block.key) for block in square])
    return pl.concat([_pairs(name, block) for name, block in zip(names, square, strict=True)])


def coupling_by_layer(rows: pl.DataFrame) -> Figure:
    """The matrices of `coupling_rows`, small, on one color scale; every model begins a row."""
    models = [
        model.partition_by("layer", maintain_order=True)
        for model in rows.partition_by("title", maintain_order=True)
    ]
    # Rows of one length: twelve layers are two rows of six, not six and five and one.
    longest = max(map(len, models))
    columns = -(-longest // -(-longest // COLUMNS))
    lines = [model[at : at + columns] for model in models for at in range(0, len(model), columns)]
    with style():
        width = 1.2 + (PAGE - 1.2) / COLUMNS * columns
        figure = new_figure(width, 0.3 + len(lines) * (0.45 + (width - 1.2) / columns))
        axes = figure.subplots(len(lines), columns, squeeze=False)
        for row, line in zip(axes, lines, strict=True):
            for axis, layer in zip(row, line, strict=False):
                square = layer["coupling"].to_numpy().reshape(layer["a"].n_unique(), -1)
                drawn = _draw_coupling(axis, square, ticks=4)
                axis.set_title(f"\nlayer {layer['layer'][0]}", fontsize=8, fontweight="normal")
            for axis in row[len(line) :]:
                axis.remove()
            if any(line[0] is model[0] for model in models):
                heading(row[0], line[0]["title"][0])
        for row, line in zip(axes, lines, strict=True):
            row[0].set_ylabel("head a")
            for axis in row[: len(line)]:
                axis.set_xlabel("head b")
        _add_scale(figure, drawn, shrink=min(1.0, 1.6 / len(lines)), aspect=15)
    return figure


def _draw_coupling(axis: Axes, matrix: Float[Array, "heads heads"], ticks: int) -> AxesImage:
    drawn = axis.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
    step = max(1, int(np.ceil(len(matrix) / ticks)))
    axis.set_xticks(range(0, len(matrix), step))
    axis.set_yticks(range(0, len(matrix), step))
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return drawn


def _add_scale(figure: Figure, drawn: AxesImage, **size: Any) -> None:
    """The color scale of all matrices, right of them."""
    bar = figure.colorbar(drawn, ax=figure.axes, **size)
    bar.outline.set_visible(False)
    bar.set_label(LABEL, fontsize=7)


def _pairs(title: str, block: BlockDetails) -> pl.DataFrame:
    matrix = np.asarray(block.coupling, np.float64)
    a, b = np.indices(matrix.shape)
    return pl.DataFrame({"a": a.ravel(), "b": b.ravel(), "coupling": matrix.ravel()}).select(
        pl.lit(title).alias("title"), pl.lit(block.key.layer).alias("layer"), pl.all()
    )
