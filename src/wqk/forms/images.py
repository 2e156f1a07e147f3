"""Matrices as images of limited size, without building them whole."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Array, Bool, Float
from wqk.errors import FormError
from wqk.forms.kernels import on_host, restore
from wqk.forms.outliers import outliers

if TYPE_CHECKING:
    from wqk.forms.form import BilinearForm


class MatrixImage(NamedTuple):
    """A form reduced to an image, with the norms of all its rows and columns.

    A pixel that covers several entries shows the one of largest magnitude, so that a single large
    row, column or entry is never averaged away. Outlying norms exceed mean + gamma · std.
    """

    pixels: Float[Array, "height width"]
    row_norms: Float[Array, " d_query"]
    column_norms: Float[Array, " d_key"]
    outlying_rows: Bool[Array, " d_query"]
    outlying_columns: Bool[Array, " d_key"]


def matrix_image(form: BilinearForm, side: int = 1024, gamma: float = 2.0) -> MatrixImage:
    """Reduce one form to an image of at most ``side`` × ``side`` pixels, one strip at a time.

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
        raise FormError(f"an image shows one form, got a stack of {form.stack}")
    query, key = on_host(form.moments.query), on_host(form.moments.key)
    row_edges, column_edges = (_edges(length, side) for length in form.widths)
    strips = []
    for start, stop in pairwise(row_edges):
        strip = query[start:stop] @ key.T
        highest = np.maximum.reduceat(strip.max(axis=0), column_edges[:-1])
        lowest = np.minimum.reduceat(strip.min(axis=0), column_edges[:-1])
        strips.append(np.where(highest > -lowest, highest, lowest))
    rows, columns = on_host(form.row_norms), on_host(form.column_norms)
    pixels = restore(np.stack(strips), on_host(form.moments.exponent))
    return MatrixImage(pixels, rows, columns, outliers(rows, gamma), outliers(columns, gamma))


def _edges(length: int, side: int) -> np.ndarray:
    """The first row or column of each pixel, and the end of the last."""
    return np.linspace(0, length, min(length, side) + 1).round().astype(int)
