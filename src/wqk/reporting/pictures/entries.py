"""One form as an image, with the norms of its rows and columns in the margins."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from wqk._style import GRAY, OUTLIER, SIGNS, new_figure, style
from wqk.forms.images import MatrixImage
from wqk.reporting.pictures.panels import letter, titles
from wqk.tables.details import BlockDetails

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecBase, SubplotSpec
    from matplotlib.image import AxesImage

# The color scale ends at this quantile of the magnitudes.
SATURATION = 0.995


@style()
def matrix(image: MatrixImage, title: str, subtitle: str = "") -> Figure:
    """Draw a form as Figure 2's right panels do, with norms in the margins.

    Parameters
    ----------
    image
        From `wqk.forms.images.matrix_image`.
    title, subtitle
        Name and scores of the form.
    """
    figure = new_figure(4.4, 4.4)
    grid = figure.add_gridspec(
        2, 3, width_ratios=[4, 1, 0.14], height_ratios=[1, 4], wspace=0.03, hspace=0.03
    )
    drawn, columns, rows = _draw_with_norms(figure, grid, image)
    drawn.axes.set(xlabel="key side", ylabel="query side")
    columns.tick_params(labelbottom=False, labelsize=6)
    columns.set_ylabel("column norm", fontsize=7)
    rows.tick_params(labelleft=False, labelsize=6)
    rows.set_xlabel("row norm", fontsize=7)
    figure.suptitle(title, x=0.01, ha="left", fontsize=8, fontweight="bold", wrap=True)
    columns.set_title(subtitle.replace("-", "−"), fontsize=7, fontweight="normal")
    bar = figure.colorbar(drawn, cax=figure.add_subplot(grid[1, 2]))
    bar.outline.set_visible(False)
    bar.ax.tick_params(labelsize=6)
    height, width = image.pixels.shape
    down, across = len(image.row_norms) / height, len(image.column_norms) / width
    if max(down, across) > 1:
        figure.text(
            0.01, 0.005, f"each pixel: the largest of about {down:.1f} × {across:.1f} entries",
            ha="left", va="bottom", fontsize=5.5, color=GRAY,
        )  # fmt: skip
    return figure


def draw_form(figure: Figure, cell: SubplotSpec, image: MatrixImage, title: str, name: str) -> None:
    """Draw a form with norms, but without ticks, in one cell of a grid, as panel ``name``."""
    grid = cell.subgridspec(
        2, 2, width_ratios=[4, 1], height_ratios=[1, 4], wspace=0.03, hspace=0.03
    )
    drawn, columns, rows = _draw_with_norms(figure, grid, image)
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


def draw_entries(axis: Axes, image: MatrixImage) -> AxesImage:
    """Draw the entries alone, on a color scale that is symmetric about zero."""
    height, width = len(image.row_norms), len(image.column_norms)
    limit = float(np.quantile(np.abs(image.pixels), SATURATION)) or 1.0
    return axis.imshow(
        image.pixels,
        cmap=SIGNS,
        vmin=-limit,
        vmax=limit,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )


def _draw_with_norms(
    figure: Figure, grid: GridSpecBase, image: MatrixImage
) -> tuple[AxesImage, Axes, Axes]:
    """Draw the entries, the column norms above them and the row norms at their right."""
    drawn = draw_entries(figure.add_subplot(grid[1, 0]), image)
    columns = figure.add_subplot(grid[0, 0], sharex=drawn.axes)
    rows = figure.add_subplot(grid[1, 1], sharey=drawn.axes)
    for lines, norms, outlying in (
        (columns.vlines, image.column_norms, image.outlying_columns),
        (rows.hlines, image.row_norms, image.outlying_rows),
    ):
        for chosen, color in ((~outlying, "#b8bcc2"), (outlying, OUTLIER)):
            lines(np.flatnonzero(chosen), 0, norms[chosen], color=color, linewidth=0.7)
    columns.set_ylim(bottom=0)
    rows.set_xlim(left=0)
    return drawn, columns, rows
