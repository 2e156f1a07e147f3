"""Images of forms with limited size, computed without the whole matrix; pictures with norms."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from wqk._style import GRAY, OUTLIER, SIGN_COLORS, new_figure, style
from wqk._typing import Array, Bool, Float
from wqk.errors import FormError
from wqk.forms.arrays import on_host
from wqk.forms.kernels import Moments, outliers, restore

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import GridSpecBase
    from matplotlib.image import AxesImage

    class Matrix(Protocol):
        """The attributes of a form that its image needs; a `BilinearForm` has all of them."""

        @property
        def stack(self) -> tuple[int, ...]:
            """Shape of the stack of forms; () for a single form."""

        @property
        def widths(self) -> tuple[int, int]:
            """(d_query, d_key)."""

        @property
        def moments(self) -> Moments:
            """Sums over the entries, with the scaled factors."""

        @property
        def row_norms(self) -> Float[Array, " d_query"]:
            """L2 norms of the rows."""

        @property
        def column_norms(self) -> Float[Array, " d_key"]:
            """L2 norms of the columns."""


class MatrixImage(NamedTuple):
    """A form reduced to an image, with the norms of all its rows and columns.

    A pixel that covers several entries shows the entry of largest magnitude, so that a single large
    row, column or entry stays visible. Outlying norms exceed mean + gamma · std.
    """

    pixels: Float[Array, "height width"]
    row_norms: Float[Array, " d_query"]
    column_norms: Float[Array, " d_key"]
    outlying_rows: Bool[Array, " d_query"]
    outlying_columns: Bool[Array, " d_key"]


def matrix_image(form: Matrix, side: int = 1024, gamma: float = 2.0) -> MatrixImage:
    """Reduce a form to an image of at most ``side`` × ``side`` pixels, strip by strip.

    Raises
    ------
    FormError
        A stack of forms was given.

    Examples
    --------
    >>> from wqk import BilinearForm
    >>> columns = np.ones((40, 1)); columns[7] = -9.0
    >>> image = matrix_image(BilinearForm(np.ones((40, 1)), columns), side=10)
    >>> image.pixels.shape, image.pixels[0, :3].tolist(), np.flatnonzero(image.outlying_columns)
    ((10, 10), [1.0, -9.0, 1.0], array([7]))
    """
    if form.stack:
        raise FormError(
            f"an image shows one form, got a stack of {form.stack}; index the stack first"
        )
    query, key = on_host(form.moments.query), on_host(form.moments.key)
    row_edges, column_edges = (  # the first row or column of each pixel, and the end of the last
        np.linspace(0, length, min(length, side) + 1).round().astype(int) for length in form.widths
    )
    strips = []
    for start, stop in pairwise(row_edges):
        strip = query[start:stop] @ key.T
        highest = np.maximum.reduceat(strip.max(axis=0), column_edges[:-1])
        lowest = np.minimum.reduceat(strip.min(axis=0), column_edges[:-1])
        strips.append(np.where(highest > -lowest, highest, lowest))
    rows, columns = on_host(form.row_norms), on_host(form.column_norms)
    pixels = restore(np.stack(strips), on_host(form.moments.exponent))
    return MatrixImage(pixels, rows, columns, outliers(rows, gamma), outliers(columns, gamma))


# The color scale ends at this quantile of the magnitudes.
SATURATION = 0.995
# Space around the entries of a form, as a share of its width and height.
MARGIN = 0.02


@style()
def matrix(image: MatrixImage, title: str, subtitle: str = "") -> Figure:
    """Draw a form as in the right panels of Figure 2, with norms in the margins.

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
    drawn, columns, rows = draw_with_norms(figure, grid, image)
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
    rows_per_pixel = len(image.row_norms) / height
    columns_per_pixel = len(image.column_norms) / width
    if max(rows_per_pixel, columns_per_pixel) > 1:
        figure.text(
            0.01,
            0.005,
            f"each pixel: the largest of about {rows_per_pixel:.1f} × {columns_per_pixel:.1f} "
            "entries",
            ha="left",
            va="bottom",
            fontsize=5.5,
            color=GRAY,
        )
    return figure


def draw_entries(axis: Axes, image: MatrixImage) -> AxesImage:
    """Draw the entries alone, on a color scale that is symmetric about zero."""
    height, width = len(image.row_norms), len(image.column_norms)
    limit = float(np.quantile(np.abs(image.pixels), SATURATION)) or 1.0
    drawn = axis.imshow(
        image.pixels,
        cmap=SIGN_COLORS,
        vmin=-limit,
        vmax=limit,
        interpolation="nearest",
        aspect="auto",
        extent=(-0.5, width - 0.5, height - 0.5, -0.5),
    )
    # Space around the entries, so that no axis lies on the first row or column.
    axis.spines[:].set_visible(False)
    axis.set_xlim(-0.5 - MARGIN * width, width - 0.5 + MARGIN * width)
    axis.set_ylim(height - 0.5 + MARGIN * height, -0.5 - MARGIN * height)
    return drawn


def draw_with_norms(
    figure: Figure, grid: GridSpecBase, image: MatrixImage
) -> tuple[AxesImage, Axes, Axes]:
    """Draw the entries, with column norms above and row norms on the right."""
    drawn = draw_entries(figure.add_subplot(grid[1, 0]), image)
    columns = figure.add_subplot(grid[0, 0], sharex=drawn.axes)
    rows = figure.add_subplot(grid[1, 1], sharey=drawn.axes)
    for lines, norms, outlying in (
        (columns.vlines, image.column_norms, image.outlying_columns),
        (rows.hlines, image.row_norms, image.outlying_rows),
    ):
        for chosen, color, width in ((~outlying, "#b8bcc2", 0.7), (outlying, OUTLIER, 1.3)):
            lines(np.flatnonzero(chosen), 0, norms[chosen], color=color, linewidth=width)
    # Rows and columns have one scale, for a comparison of the two sides.
    longest = 1.05 * float(max(image.column_norms.max(), image.row_norms.max())) or 1.0
    columns.set_ylim(0, longest)
    columns.spines["left"].set_position(("outward", 2))
    rows.set_xlim(0, longest)
    rows.spines["bottom"].set_position(("outward", 2))
    return drawn, columns, rows
