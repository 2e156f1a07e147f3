"""Sums over the entries of factors and of their products, in any array library.

Products larger than a core's cache are formed, summed and discarded block by block.

Axes: ``...`` a stack of forms, D width, R rank. Factors are (..., D, R).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import is_numpy_namespace

from wqk._typing import Array, Float

# Entries of one intermediate block: 2 MB in float32, which stays in a core's cache.
BLOCK = 2**19


def square_sum(array: Array, xp: Any) -> Array:
    """Sum of squares over the last two axes, in the memory order of transposed weights."""
    return xp.sum(xp.linalg.vecdot(array, array, axis=-2), axis=-1)


def row_dots(
    a: Float[Array, "... d r"], b: Float[Array, "... d r"], xp: Any
) -> Float[Array, "... d"]:
    """a_i · b_i for every row i."""
    if is_numpy_namespace(xp):  # in one pass, without an array of the products
        return np.einsum("...dr,...dr->...d", a, b)
    return xp.sum(a * b, axis=-1)


def gram_dots(
    a: Float[Array, "... d r"], gram: Float[Array, "... r r"], xp: Any
) -> Float[Array, "... d"]:
    """a_i G · a_i for every row i and a symmetric matrix G, in blocks that stay in the cache."""
    width, rank = a.shape[-2:]
    stack = np.broadcast_shapes(a.shape[:-2], gram.shape[:-2])
    if stack and math.prod(stack) * width * rank > BLOCK // 4:
        a, gram = (xp.broadcast_to(x, (*stack, *x.shape[-2:])) for x in (a, gram))
        return xp.stack([gram_dots(a[i, ...], gram[i, ...], xp) for i in range(stack[0])])
    dots = []
    for part in block_slices(width, max(1024, BLOCK // 4 // rank)):
        rows = a[..., part, :]
        products = xp.matmul(gram, xp.matrix_transpose(rows))
        dots.append(row_dots(rows, xp.matrix_transpose(products), xp))
    return xp.concat(dots, axis=-1)


def gram(factor: Float[Array, "... d r"], xp: Any) -> Float[Array, "... r r"]:
    """AᵀA for each form of the stack."""
    return xp.matmul(xp.matrix_transpose(factor), factor)


def inner(a: Array, b: Array, xp: Any) -> Array:
    """Frobenius inner product over the last two axes."""
    return xp.sum(xp.linalg.vecdot(a, b), axis=-1)


def block_slices(length: int, width: int) -> Iterator[slice]:
    """Cut ``range(length)`` into slices of equal length, at most ``width``."""
    count = max(1, math.ceil(length / width))
    edges = [round(i * length / count) for i in range(count + 1)]
    return (slice(start, stop) for start, stop in pairwise(edges))


class TileSums(NamedTuple):
    """Sums over the squares of M's entries, tr(M M) where M is square, and M itself if small."""

    rows: Float[Array, "... d_query"]
    columns: Float[Array, "... d_key"]
    trace_of_square: Float[Array, "*stack"] | None
    matrix: Float[Array, "... d_query d_key"] | None


def tile_sums(query: Array, key: Array, xp: Any) -> TileSums:
    """Sum over M block by block, so that a large M is never in memory.

    Blocks (i, j) and (j, i) of a square form are taken together: tr(M M) needs both.
    """
    is_square = query.shape[-2] == key.shape[-2]
    stack = math.prod(query.shape[:-2]) or 1
    side = max(32, math.isqrt(BLOCK // stack))
    row_parts = list(block_slices(query.shape[-2], side))
    column_parts = list(block_slices(key.shape[-2], side))
    rows: list[Any] = [0.0] * len(row_parts)
    columns: list[Any] = [0.0] * len(column_parts)
    trace: Any = 0.0
    keys = xp.matrix_transpose(key)
    # One product takes less time than the tiles of a small form.
    is_small = stack * query.shape[-2] * key.shape[-2] <= 2 * BLOCK
    matrix = xp.matmul(query, keys) if is_small else None

    for i in range(len(row_parts)):
        for j in range(i if is_square else 0, len(column_parts)):
            places = dict.fromkeys([(i, j), (j, i)] if is_square else [(i, j)])
            tiles = {
                (row, column): _tile(query, keys, matrix, row_parts[row], column_parts[column], xp)
                for row, column in places
            }
            for (row, column), entries in tiles.items():
                rows[row] = rows[row] + xp.linalg.vecdot(entries, entries)
                turned = xp.matrix_transpose(entries)
                columns[column] = columns[column] + row_dots(turned, turned, xp)
            if is_square:
                mirror = xp.matrix_transpose(tiles[j, i])
                trace = trace + len(tiles) * inner(tiles[i, j], mirror, xp)
    return TileSums(
        xp.concat(rows, axis=-1), xp.concat(columns, axis=-1), trace if is_square else None, matrix
    )


def _tile(
    query: Array, keys: Array, matrix: Array | None, rows: slice, columns: slice, xp: Any
) -> Array:
    """A block of M's entries, computed from the factors unless M is at hand."""
    if matrix is not None:
        return matrix[..., rows, columns]
    return xp.matmul(query[..., rows, :], keys[..., columns])
