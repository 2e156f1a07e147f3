"""Matrices as images of limited size, without building them whole."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Array, Bool, Float
from wqk.errors import FormError
from wqk.forms.kernels import restore
from wqk.forms.scores import outliers

if TYPE_CHECKING:
    from wqk.forms import BilinearForm


class MatrixImage(NamedTuple):
    """A form as a picture needs it.

    Attributes
    ----------
    pixels
        Entries; where several fall into one pixel, the one of largest magnitude, so that a single
        large row, column or entry is never averaged away.
    row_norms, column_norms
        Of all rows (d_query,) and columns (d_key,).
    outlying_rows, outlying_columns
        Which of them exceed mean + gamma · std.
    """

    pixels: Float[Array, "height width"]
    row_norms: Float[Array, " d_query"]
    column_norms: Float[Array, " d_key"]
    outlying_rows: Bool[Array, " d_query"]
    outlying_columns: Bool[Array, " d_key"]


def matrix_image(form: BilinearForm, side: int = 1024, gamma: float = 2.0) -> MatrixImage:
    """Reduce one form to an image of at most ``side`` × ``side`` pixels, a strip at a time.

    Raises
    ------
    FormError
        A stack of forms was given, which no single image can show.

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
    row_edges, column_edges = (_edges(length, side) for length in form.shape)
    strips = []
    for start, stop in pairwise(row_edges):
        strip = query[start:stop] @ key.T
        highest = np.maximum.reduceat(strip.max(axis=0), column_edges[:-1])
        lowest = np.minimum.reduceat(strip.min(axis=0), column_edges[:-1])
        strips.append(np.where(highest > -lowest, highest, lowest))
    rows, columns = on_host(form.row_norms), on_host(form.column_norms)
    pixels = restore(np.stack(strips), on_host(form.moments.exponent))
    return MatrixImage(pixels, rows, columns, outliers(rows, gamma), outliers(columns, gamma))


def on_host(array: Array) -> np.ndarray:
    """An array of any library as NumPy's."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def _edges(length: int, side: int) -> np.ndarray:
    """Where each pixel's rows begin, and the end."""
    return np.linspace(0, length, min(length, side) + 1).round().astype(int)
