"""Forms from the details of a scan, drawn as panels of a figure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from wqk.forms.drawing import draw_with_norms
from wqk.forms.images import MatrixImage
from wqk.reporting.pictures.panels import letter, titles
from wqk.tables.details import BlockDetails

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec


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
