"""Heads: how far pairs are transposes of each other, the terms between them, and their forms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._console import counted
from wqk._style import CHANCE, GRAY, PAGE, SAND, SIGNS, TEAL, new_figure, style
from wqk._typing import Array, Float
from wqk.errors import TableError
from wqk.forms.images import MatrixImage, draw_with_norms
from wqk.reporting.pictures.panels import heading, latest, letter, panel_grid, titled, titles
from wqk.tables.details import BlockDetails
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
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


TERMS = ("symmetry_within_heads", "symmetry_between_heads", "symmetry_within_random")

# Panels side by side.
WIDE_COLUMNS = 3


def head_terms(table: ScoreTable | None) -> pl.DataFrame:
    """A row for each layer: ``title`` (the model), ``layer``, ``symmetry`` and its `TERMS`.

    Raises
    ------
    TableError
        No layer has the terms.

    Examples
    --------
    >>> import wqk
    >>> head_terms(wqk.scan(wqk.demo_model("encoder"))).select("title", "layer").rows()
    [('encoder', 0), ('encoder', 1), ('encoder', 2), ('encoder', 3)]
    """
    if table is None:
        raise TableError("heads needs scores: wqk scan REF --out FILE, then --from FILE; got none")
    plain = latest(table).layers.filter(pl.col("distance") == 0).frame.drop_nulls(TERMS)
    if plain.is_empty():
        raise TableError("heads needs the terms within and between heads; no layer has them")
    return titled(plain).select("title", "layer", "symmetry", *TERMS)


@style()
def terms_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `head_terms`: bars for the two terms of every layer, a cross for the first by chance.

    Chance is the expected term within heads if the layer's dimensions are assigned to heads at
    random.
    """
    groups = rows.partition_by("title", maintain_order=True)
    columns = min(WIDE_COLUMNS, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure = new_figure(min(PAGE, 0.9 + 2.4 * columns), 0.5 + 1.9 * lines)
    axes = panel_grid(figure, len(groups), columns, sharey=True)
    width = 0.38
    for axis, group in zip(axes, groups, strict=True):
        layers = group["layer"].to_numpy()
        within, between, chance = (group[term] for term in TERMS)
        axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
        handles = [
            axis.bar(layers - width / 2, within, width, color=TEAL, label="within heads"),
            axis.bar(layers + width / 2, between, width, color=SAND, label="between heads"),
            *axis.plot(layers - width / 2, chance, label="within heads by chance", **CHANCE),
            axis.hlines(
                group["symmetry"], layers - width, layers + width,
                color=GRAY, linewidth=1, label="sum: the symmetry",
            ),
        ]  # fmt: skip
        axis.set(title=group["title"][0], xlabel="layer")
        axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    for axis in axes[::columns]:
        axis.set_ylabel("symmetry")
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(columns, 2))
    return figure


def draw_form(figure: Figure, cell: SubplotSpec, image: MatrixImage, title: str, name: str) -> None:
    """Draw a form with norms, but without ticks, in one cell of a grid, as panel ``name``."""
    grid = cell.subgridspec(
        2, 2, width_ratios=[4, 1], height_ratios=[1, 4], wspace=0.03, hspace=0.03
    )
    drawn, columns, rows = draw_with_norms(figure, grid, image)
    drawn.axes.set(xlabel="key side", ylabel="query side", xticks=[], yticks=[])
    for axis in (columns, rows):
        axis.tick_params(labelbottom=False, labelleft=False, length=0)
    columns.set_title(title)
    letter(columns, name)


def examples(blocks: Iterable[BlockDetails]) -> dict[str, MatrixImage]:
    """By title: the encoder's most symmetric form, the decoder's form with the most uneven columns.

    Without encoders or without decoders, both are of the other kind. The symmetry of forms larger
    than their image is an estimate.
    """
    left = list(blocks)
    chosen = []
    for stack, measure in (("encoder", _image_symmetry), ("decoder", _unevenness)):
        if left:
            chosen.append(max([b for b in left if b.key.stack == stack] or left, key=measure))
            left.remove(chosen[-1])
    names = titles([vars(block.key) for block in chosen])
    return {
        f"{name}, layer {block.key.layer}": picture(block)
        for name, block in zip(names, chosen, strict=True)
    }


def _image_symmetry(block: BlockDetails) -> float:
    image = block.image.astype(np.float64)
    square = image.shape[0] == image.shape[1]
    return float(np.sum(image * image.T) / np.sum(image**2)) if square and image.any() else -1.0


def _unevenness(block: BlockDetails) -> float:
    return float(np.std(block.column_norms) / (np.std(block.row_norms) or 1.0))


def picture(block: BlockDetails) -> MatrixImage:
    """The image of a form in the details of a scan."""
    return MatrixImage(
        block.image.astype(np.float32),
        block.row_norms,
        block.column_norms,
        np.isin(np.arange(len(block.row_norms)), block.outlying_rows),
        np.isin(np.arange(len(block.column_norms)), block.outlying_columns),
    )
