"""One form as an image: its entries, and its row and column norms in the margins."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk._style import GRAY, OUTLIER, new_figure, style
from wqk.figures.panels import letter
from wqk.figures.selection import titles
from wqk.forms.images import MatrixImage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecBase, SubplotSpec
    from matplotlib.image import AxesImage

    from wqk.scanning.details import BlockDetails

# Colors reach their end at this quantile of the pixels' magnitudes.
SATURATION = 0.995


def matrix(image: MatrixImage, title: str, subtitle: str = "") -> Figure:
    """Draw a form as Figure 2's right panels do, with norms at the sides.

    Parameters
    ----------
    image
        From `wqk.forms.images.matrix_image`.
    title, subtitle
        Heading with the scores.
    """
    with style():
        figure = new_figure(4.4, 4.4)
        grid = figure.add_gridspec(
            2, 3, width_ratios=[4, 1, 0.14], height_ratios=[1, 4], wspace=0.03, hspace=0.03
        )
        drawn, columns, _ = _draw_with_norms(figure, grid, image)
        figure.suptitle(title, x=0.01, ha="left", fontsize=8, fontweight="bold", wrap=True)
        columns.set_title(subtitle.replace("-", "−"), fontsize=7, fontweight="normal")
        bar = figure.colorbar(drawn, cax=figure.add_subplot(grid[1, 2]))
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=6)
        drawn.axes.set(xlabel="key side", ylabel="query side")
        blocks = [n / p for n, p in zip(_shape(image), image.pixels.shape, strict=True)]
        if max(blocks) > 1:
            figure.text(
                0.01, 0.005,
                f"each pixel: the largest of about {blocks[0]:.1f} × {blocks[1]:.1f} entries",
                ha="left", va="bottom", fontsize=5.5, color=GRAY,
            )  # fmt: skip
    return figure


def draw_form(figure: Figure, cell: SubplotSpec, image: MatrixImage, title: str, name: str) -> None:
    """A form in one cell of a grid, under its letter: entries, norms above and right of them."""
    grid = cell.subgridspec(
        2, 2, width_ratios=[4, 1], height_ratios=[1, 4], wspace=0.03, hspace=0.03
    )
    drawn, columns, rows = _draw_with_norms(figure, grid, image)
    drawn.axes.set(xlabel="key side", ylabel="query side", xticks=[], yticks=[])
    for axis in (columns, rows):
        axis.tick_params(labelbottom=False, labelleft=False, length=0)
        axis.set(xlabel="", ylabel="")
    columns.set_title(title)
    letter(columns, name)


def examples(blocks: Iterable[BlockDetails]) -> dict[str, MatrixImage]:
    """By title: the encoder's most symmetric form, the decoder's form with the most uneven columns.

    With models of one kind alone, both examples are of that kind.

    Symmetry is computed from the image, so it is an estimate where the form is larger than that.
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
    """A form out of the details of a scan, as figures draw it."""
    outlying = [
        np.isin(np.arange(len(norms)), numbers)
        for norms, numbers in (
            (block.row_norms, block.outlying_rows),
            (block.column_norms, block.outlying_columns),
        )
    ]
    pixels = block.image.astype(np.float32)
    return MatrixImage(pixels, block.row_norms, block.column_norms, *outlying)


def draw_entries(axis: Axes, image: MatrixImage) -> AxesImage:
    """The entries alone, on a color scale that is symmetric about zero."""
    height, width = _shape(image)
    limit = float(np.quantile(np.abs(image.pixels), SATURATION)) or 1.0
    return axis.imshow(
        image.pixels,
        cmap="RdBu_r",
        vmin=-limit,
        vmax=limit,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )


def _shape(image: MatrixImage) -> tuple[int, int]:
    return len(image.row_norms), len(image.column_norms)


def _draw_with_norms(
    figure: Figure, grid: GridSpecBase, image: MatrixImage
) -> tuple[AxesImage, Axes, Axes]:
    """The entries, and on axes above and right of them the norms of columns and rows."""
    drawn = draw_entries(figure.add_subplot(grid[1, 0]), image)
    columns = figure.add_subplot(grid[0, 0], sharex=drawn.axes)
    rows = figure.add_subplot(grid[1, 1], sharey=drawn.axes)
    _draw_norms(columns, image.column_norms, image.outlying_columns, sideways=False)
    _draw_norms(rows, image.row_norms, image.outlying_rows, sideways=True)
    return drawn, columns, rows


def _draw_norms(axis: Axes, norms: np.ndarray, outlying: np.ndarray, sideways: bool) -> None:
    """Norms as gray bars along a margin, outliers in black."""
    numbers = np.arange(len(norms))
    for chosen, color in ((~outlying, "#b8bcc2"), (outlying, OUTLIER)):
        lines = (np.zeros(chosen.sum()), norms[chosen])
        if sideways:
            axis.hlines(numbers[chosen], *lines, color=color, linewidth=0.7)
        else:
            axis.vlines(numbers[chosen], *lines, color=color, linewidth=0.7)
    axis.tick_params(labelbottom=sideways, labelleft=not sideways, labelsize=6)
    axis.set_xlabel("row norm" if sideways else "", fontsize=7)
    axis.set_ylabel("" if sideways else "column norm", fontsize=7)
    if sideways:
        axis.set_xlim(left=0)
    else:
        axis.set_ylim(bottom=0)
