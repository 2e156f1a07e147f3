"""‖wᵀ r‖² of many pairs of matrices: of what some heads write with what others read.

Two ways lead to it, and the cheaper one is taken. *By cores*: of each pair the R × R core wᵀ r,
and its squares summed; 2 D R² operations for each pair. *By tiles*: ‖wᵀ r‖² = ⟨w wᵀ, r rᵀ⟩, a
product of two D × D matrices, both symmetric; D² operations for each pair, and D² R for each
matrix, which pays where there are many pairs and 2 R² > D. The D × D matrices are made tile by tile
for all heads, so that one product of tiles gives the summand of every pair.

Products are in single precision, sums over tiles in double. Other than cores, tiles can cancel:
`uncertain` says for which pairs, and these are left to their cores.

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

# How many times as long as in cores an operation takes in tiles, whose products are smaller.
SLOWER = 1.5

# Pairs are left to their cores if rounding could change a score by more than this, or by more than
# this many of its standard deviations.
PRECISION, DEVIATIONS = 2e-6, 1e-3


@dataclass(frozen=True, eq=False)
class StackSide:
    """The query side of every form of a stack, as the stream meets it; each form has norm 1.

    Forms that share a factor share its columns: those of head h are the columns of its group times
    its own ``mix``.
    """

    columns: Float[np.ndarray, "d groups_rank"]
    mix: Float[np.ndarray, "groups sharing rank r"] | None  # none if no factor is shared
    heads: int
    zero: Bool[np.ndarray, " heads"]  # whether the form is zero
    size: Float[np.ndarray, " heads"]  # ‖w wᵀ‖, or of the shared factor's a bound

    @property
    def width(self) -> int:
        """Of the stream."""
        return len(self.columns)

    @property
    def shares(self) -> Float[np.ndarray, " d"]:
        """The share of each dimension in a form's squared norm, averaged over the stack."""
        factors = self.factors(slice(None))
        images = factors
        if self.mix is not None:
            images = factors @ (self.mix @ self.mix.swapaxes(-1, -2)).sum(axis=1)
        return np.asarray(np.vecdot(images, factors).sum(axis=0, dtype=np.float64) / self.heads)

    def factors(self, rows: slice | np.ndarray) -> Float[np.ndarray, "factors rows r"]:
        """Some rows of each factor."""
        count = self.heads if self.mix is None else len(self.mix)
        return self.columns.reshape(self.width, count, -1)[rows].swapaxes(0, 1)

    def left(self, rows: slice) -> Float[np.ndarray, "factors rows_of_all r"]:
        """What gives some rows of w wᵀ of every form when multiplied by the factors."""
        factors = self.factors(rows)
        if self.mix is None:
            return np.ascontiguousarray(factors)
        rows_of_all = factors[:, None] @ (self.mix @ self.mix.swapaxes(-1, -2))
        return np.asarray(rows_of_all.reshape(len(factors), -1, factors.shape[-1]))


def by_cores(
    writer: StackSide, reader: StackSide, heads: slice | np.ndarray = slice(None)
) -> Float[np.ndarray, "w r"]:
    """‖wᵀ r‖² of every pair of two stacks, or of some writing heads, from the cores."""
    columns = writer.columns
    if not isinstance(heads, slice):
        columns = columns.reshape(len(columns), writer.heads, -1)[:, heads].reshape(
            len(columns), -1
        )
    core = columns.T @ reader.columns
    if reader.mix is None:
        core = core.reshape(len(core), reader.heads, -1)
        squares = np.linalg.vecdot(core, core)
    else:
        groups, _, rank, _ = reader.mix.shape
        core = core.reshape(len(core), groups, 1, rank)
        squares = np.stack(
            [
                np.linalg.vecdot(part, part)
                for group in range(groups)
                for part in core[:, group, 0] @ reader.mix[group]
            ],
            -1,
        )
    rank = writer.columns.shape[1] // writer.heads
    parts = squares.reshape(-1, rank, squares.shape[-1])
    return np.asarray(parts.sum(axis=1, dtype=np.float64))


def uncertain(
    squares: np.ndarray, variance: np.ndarray, writer: StackSide, reader: StackSide
) -> Bool[np.ndarray, "w r"]:
    """Which pairs tiles may have given with too large an error, as it is relative to the tiles."""
    error = 2.0**-24 * np.outer(writer.size, reader.size)
    allowed = np.minimum(PRECISION * np.sqrt(squares.clip(min=0)), DEVIATIONS * np.sqrt(variance))
    return np.asarray(
        (error > allowed) & np.logical_not(np.logical_or.outer(writer.zero, reader.zero))
    )


def tiles_pay(
    writers: Sequence[StackSide], readers: Sequence[StackSide], wanted: Sequence[tuple[int, int]]
) -> bool:
    """Whether tiles take less time than cores for these pairs of stacks, by their operations."""
    width = writers[0].width
    cores, tiles = 0.0, 0.0
    for i, j in wanted:
        columns, reader = writers[i].columns.shape[1], readers[j]
        cores += 2 * width * columns * reader.columns.shape[1]
        if reader.mix is not None:
            cores += 2 * columns * reader.heads * reader.mix.shape[-2] * reader.mix.shape[-1]
        tiles += width**2 * writers[i].heads * reader.heads
    for one in (*writers, *readers):
        factors = one.heads if one.mix is None else len(one.mix)
        tiles += width**2 * one.heads * (one.columns.shape[1] // factors)
    return SLOWER * tiles < cores


def by_tiles(
    writers: Sequence[StackSide],
    readers: Sequence[StackSide],
    spans: Sequence[tuple[int, int]],
    threads: int,
) -> Float[np.ndarray, "w r"]:
    """‖wᵀ r‖² of the heads of all stacks, one after the other.

    Parameters
    ----------
    writers, readers
        Stacks of one width, of which the first share no factors.
    spans
        For each reading stack, in ascending order, which writing ones it is paired with: from, and
        up to. Other pairs are zero.
    threads
        How many tiles are made at a time, each with a single-threaded BLAS.
    """
    starts, reads = (np.cumsum([0, *(one.heads for one in ends)]) for ends in (writers, readers))
    products = [
        (slice(*starts[[begin, end]]), slice(*reads[[first, last]]))
        for begin, end, first, last in _rectangles(spans)
    ]
    width = writers[0].width
    count = -(-width // TILE)
    edges = [width * n // count for n in range(count + 1)]
    strips = [slice(*pair) for pair in itertools.pairwise(edges)]
    tiles = [(row, column) for row in range(count) for column in range(row, count)]
    longest = max(strip.stop - strip.start for strip in strips) ** 2

    def summed(share: Sequence[tuple[int, int]]) -> np.ndarray:
        total = np.zeros((int(starts[-1]), int(reads[-1])))
        room = [np.empty(rows * longest, np.float32) for rows in total.shape]
        left: list[list[np.ndarray]] = []
        place = -1
        for row, column in share:
            if row != place:
                place = row
                left = [[one.left(strips[row]) for one in ends] for ends in (writers, readers)]
            made = [
                _tiles(ends, sides, strips[column], space)
                for ends, sides, space in zip((writers, readers), left, room, strict=True)
            ]
            for writing, reading in products:
                product = made[0][writing] @ made[1][reading].T
                total[writing, reading] += (1 + (row != column)) * product
        return total

    shares = [
        tiles[n * len(tiles) // threads : (n + 1) * len(tiles) // threads] for n in range(threads)
    ]
    with ThreadPoolExecutor(threads) as pool:
        return np.asarray(sum(pool.map(summed, shares)))


def _rectangles(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """Few and large products for all spans: writing stacks from, up to, reading ones from, up to.

    The upper half of the readers meets all that its first one is paired with; what is left of
    either half is cut in the same way.

    Examples
    --------
    >>> list(_rectangles([(0, 1), (0, 2), (0, 2), (0, 3)]))
    [(0, 2, 1, 4), (2, 3, 3, 4), (0, 1, 0, 1)]
    """
    begins = [begin for begin, _ in spans]
    left = [(begin, begins.index(begin), bisect_right(begins, begin)) for begin in set(begins)]
    while left:
        begin, first, last = left.pop()
        if first < last:
            middle = (first + last) // 2
            end = spans[middle][1]
            alike = bisect_left(spans, spans[middle]), bisect_right(spans, spans[middle])
            yield begin, end, alike[0], last
            left += [(begin, first, alike[0]), (end, alike[1], last)]


def _tiles(
    ends: Sequence[StackSide], left: Sequence[np.ndarray], columns: slice, room: np.ndarray
) -> Float[np.ndarray, "heads tile"]:
    """One tile of w wᵀ for every head, written into ``room``."""
    place = 0
    for one, side in zip(ends, left, strict=True):
        right = one.factors(columns).swapaxes(-1, -2)
        shape = (*side.shape[:-1], right.shape[-1])
        size = int(np.prod(shape))
        np.matmul(side, right, out=room[place : place + size].reshape(shape))
        place += size
    return room[:place].reshape(sum(one.heads for one in ends), -1)
