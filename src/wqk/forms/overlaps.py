"""‖wᵀ r‖² for many pairs of matrices: w of writing heads, r of reading heads.

There are two methods, and the cheaper one is used. *By cores*: compute the R × R core wᵀ r of each
pair and sum its squares, in 2 D R² operations for each pair. *By tiles*: ‖wᵀ r‖² = ⟨w wᵀ, r rᵀ⟩, a
product of two symmetric D × D matrices, in D² operations for each pair and D² R for each matrix.
Tiles are cheaper if there are many pairs and 2 R² > D. The D × D matrices are computed tile by tile
for all heads; one product of tiles contains a summand of every pair.

Products are in single precision, sums over tiles in double. Unlike cores, tiles can cancel:
`uncertain` finds the pairs that lose digits, and these pairs are computed from their cores.

Axes: W writing and R reading heads, D width of the stream, r rank of a form's core.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from wqk._typing import Bool, Float

# Rows and columns of a tile: 64 kB for each head.
TILE = 128

# Time of an operation in tiles, whose products are small, relative to an operation in cores.
TILE_COST = 1.5

# A pair is computed from its core if rounding in tiles could change its score by more than
# PRECISION, or by more than DEVIATIONS standard deviations of the score.
PRECISION, DEVIATIONS = 2e-6, 1e-3


@dataclass(frozen=True, eq=False)
class StackSide:
    """The matrices w, (D, r), of one side of all forms of a stack; each form has norm 1.

    Forms with a common factor have common columns: the matrix of head h is the product of its
    group's columns and its own ``mix``.

    Attributes
    ----------
    columns
        The factors next to each other, one for each head or, if shared, for each group.
    mix
        Matrices on the right of the shared factors; None if no factor is shared.
    heads
        Number of forms.
    zero
        Mask of the forms that are zero.
    size
        ‖w wᵀ‖ of each form; an upper bound if the factor is shared.
    """

    columns: Float[np.ndarray, "d groups_rank"]
    mix: Float[np.ndarray, "groups sharing rank r"] | None
    heads: int
    zero: Bool[np.ndarray, " heads"]
    size: Float[np.ndarray, " heads"]

    @property
    def width(self) -> int:
        """Width D of the stream."""
        return len(self.columns)

    @property
    def shares(self) -> Float[np.ndarray, " d"]:
        """Return the share of each dimension in a form's squared norm, averaged over the stack."""
        factors = self.factors(slice(None))
        images = factors
        if self.mix is not None:
            squares_of_mixes = self.mix @ self.mix.swapaxes(-1, -2)
            images = factors @ squares_of_mixes.sum(axis=1)
        shares_of_factors = np.vecdot(images, factors)
        return np.asarray(shares_of_factors.sum(axis=0, dtype=np.float64) / self.heads)

    def factors(self, rows: slice | np.ndarray) -> Float[np.ndarray, "factors rows r"]:
        """Return the given rows of each factor."""
        count = self.heads if self.mix is None else len(self.mix)
        return self.columns.reshape(self.width, count, -1)[rows].swapaxes(0, 1)

    def gram_rows(self, rows: slice) -> Float[np.ndarray, "factors rows_of_all r"]:
        """Return matrices whose products with the factors are rows of every form's w wᵀ."""
        factors = self.factors(rows)
        if self.mix is None:
            return np.ascontiguousarray(factors)
        rows_of_all = factors[:, None] @ (self.mix @ self.mix.swapaxes(-1, -2))
        return np.asarray(rows_of_all.reshape(len(factors), -1, factors.shape[-1]))


def by_cores(
    writer: StackSide, reader: StackSide, heads: slice | np.ndarray = slice(None)
) -> Float[np.ndarray, "w r"]:
    """Return ‖wᵀ r‖² of every pair of two stacks, (W, R), or of some writing heads, from the cores.

    The writing heads share no factor.
    """
    columns = writer.columns
    if not isinstance(heads, slice):
        by_head = columns.reshape(len(columns), writer.heads, -1)
        columns = by_head[:, heads].reshape(len(columns), -1)
    core = columns.T @ reader.columns
    if reader.mix is None:
        core = core.reshape(len(core), reader.heads, -1)
        squares = np.linalg.vecdot(core, core)
    else:
        groups, _, rank, _ = reader.mix.shape
        core = core.reshape(len(core), groups, rank)
        squares_by_head = []
        for group in range(groups):
            mixed = core[:, group] @ reader.mix[group]
            squares_by_head += [np.linalg.vecdot(head_core, head_core) for head_core in mixed]
        squares = np.stack(squares_by_head, -1)
    writer_rank = writer.columns.shape[1] // writer.heads
    squares_by_row = squares.reshape(-1, writer_rank, squares.shape[-1])
    return np.asarray(squares_by_row.sum(axis=1, dtype=np.float64))


def uncertain(
    squares: np.ndarray, variance: np.ndarray, writer: StackSide, reader: StackSide
) -> Bool[np.ndarray, "w r"]:
    """Return the mask of pairs that may lose too many digits by tiles.

    Parameters
    ----------
    squares
        ‖wᵀ r‖² of every pair, by tiles.
    variance
        Variance of ‖wᵀ r‖² by chance.
    """
    error = 2.0**-24 * np.outer(writer.size, reader.size)
    allowed_by_score = PRECISION * np.sqrt(squares.clip(min=0))
    allowed_by_chance = DEVIATIONS * np.sqrt(variance)
    allowed = np.minimum(allowed_by_score, allowed_by_chance)
    is_zero = np.logical_or.outer(writer.zero, reader.zero)
    return np.asarray((error > allowed) & ~is_zero)


def tiles_pay(
    writers: Sequence[StackSide], readers: Sequence[StackSide], pairs: Sequence[tuple[int, int]]
) -> bool:
    """Return whether tiles take less time than cores for these pairs of stacks.

    ``pairs`` are numbers of a writing and of a reading stack. Operations are counted.
    """
    width = writers[0].width
    cost_of_cores, cost_of_tiles = 0.0, 0.0
    for i, j in pairs:
        writer, reader = writers[i], readers[j]
        writer_columns = writer.columns.shape[1]
        cost_of_cores += 2 * width * writer_columns * reader.columns.shape[1]
        if reader.mix is not None:
            *_, rank, core_rank = reader.mix.shape
            cost_of_cores += 2 * writer_columns * reader.heads * rank * core_rank
        cost_of_tiles += width**2 * writer.heads * reader.heads
    for side in (*writers, *readers):
        factors = side.heads if side.mix is None else len(side.mix)
        rank = side.columns.shape[1] // factors
        cost_of_tiles += width**2 * side.heads * rank
    return TILE_COST * cost_of_tiles < cost_of_cores


def by_tiles(
    writers: Sequence[StackSide],
    readers: Sequence[StackSide],
    spans: Sequence[tuple[int, int]],
    threads: int,
) -> Float[np.ndarray, "w r"]:
    """Return ‖wᵀ r‖² of all heads of all stacks, in the order of the stacks.

    Parameters
    ----------
    writers, readers
        Stacks of one width. The writing stacks share no factors.
    spans
        For each reading stack, the range of writing stacks to pair with: the first and the end,
        both in ascending order. Other pairs are zero.
    threads
        Number of tiles that are computed at the same time, each with a single-threaded BLAS.
    """
    write_starts = np.cumsum([0, *(side.heads for side in writers)])
    read_starts = np.cumsum([0, *(side.heads for side in readers)])
    rectangles = [  # ranges of writing and of reading heads
        (slice(*write_starts[[begin, end]]), slice(*read_starts[[first, last]]))
        for begin, end, first, last in _rectangles(spans)
    ]
    width = writers[0].width
    strip_count = -(-width // TILE)
    edges = [width * n // strip_count for n in range(strip_count + 1)]
    strips = [slice(start, stop) for start, stop in itertools.pairwise(edges)]
    # The matrices are symmetric: tiles below and above the diagonal are equal.
    tiles = list(itertools.combinations_with_replacement(range(strip_count), 2))
    largest_tile = max(strip.stop - strip.start for strip in strips) ** 2

    def sum_over_tiles(portion: Sequence[tuple[int, int]]) -> np.ndarray:
        """Sum the products of tiles; each tile is given by its strips of rows and columns."""
        total = np.zeros((int(write_starts[-1]), int(read_starts[-1])))
        write_buffer, read_buffer = (
            np.empty(heads * largest_tile, np.float32) for heads in total.shape
        )
        write_rows: list[np.ndarray] = []
        read_rows: list[np.ndarray] = []
        current_row = -1
        for row, column in portion:
            if row != current_row:
                current_row = row
                write_rows = [side.gram_rows(strips[row]) for side in writers]
                read_rows = [side.gram_rows(strips[row]) for side in readers]
            write_tiles = _tiles(writers, write_rows, strips[column], write_buffer)
            read_tiles = _tiles(readers, read_rows, strips[column], read_buffer)
            multiplicity = 1 if row == column else 2
            for writing, reading in rectangles:
                product = write_tiles[writing] @ read_tiles[reading].T
                total[writing, reading] += multiplicity * product
        return total

    bounds = [n * len(tiles) // threads for n in range(threads + 1)]
    portions = [tiles[start:stop] for start, stop in itertools.pairwise(bounds)]
    with ThreadPoolExecutor(threads) as pool:
        return np.asarray(sum(pool.map(sum_over_tiles, portions)))


def _rectangles(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Cover all spans with few large rectangles, (first writer, end, first reader, end).

    The upper half of the readers forms a rectangle with the writers of its first reader. The pairs
    that remain of either half are divided in the same way.

    Examples
    --------
    >>> list(_rectangles([(0, 1), (0, 2), (0, 2), (0, 3)]))
    [(0, 2, 1, 4), (2, 3, 3, 4), (0, 1, 0, 1)]
    """
    begins = [begin for begin, _ in spans]
    remaining = [(begin, begins.index(begin), bisect_right(begins, begin)) for begin in set(begins)]
    while remaining:
        begin, first, last = remaining.pop()
        if first < last:
            middle = (first + last) // 2
            end = spans[middle][1]
            equal_first = bisect_left(spans, spans[middle])
            equal_last = bisect_right(spans, spans[middle])
            yield begin, end, equal_first, last
            remaining += [(begin, first, equal_first), (end, equal_last, last)]


def _tiles(
    sides: Sequence[StackSide], rows: Sequence[np.ndarray], columns: slice, buffer: np.ndarray
) -> Float[np.ndarray, "heads tile"]:
    """Compute one tile of w wᵀ for every head, in ``buffer``; ``rows`` are from `gram_rows`."""
    start = 0
    for side, row_matrices in zip(sides, rows, strict=True):
        column_matrices = side.factors(columns).swapaxes(-1, -2)
        shape = (*row_matrices.shape[:-1], column_matrices.shape[-1])
        size = int(np.prod(shape))
        out = buffer[start : start + size].reshape(shape)
        np.matmul(row_matrices, column_matrices, out=out)
        start += size
    return buffer[:start].reshape(sum(side.heads for side in sides), -1)
