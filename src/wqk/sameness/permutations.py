"""Names of orders of a weight's rows, each with the edit that makes the order.

An order is an array *rows*: for each row of the result, the source row of the candidate. The
expected weight is ``w[rows]``. Names are searched in this order:

- `Reorder`: rotary pairs become halves, or halves become pairs; heads are regrouped; two of these
  changes in sequence;
- `Sections`: queries, keys and values of a fused weight are joined in another way;
- rolled and reversed rows; views of the rows with up to four axes, in another order of the axes;
- one order that is repeated in every stretch of rows; an order in which only a few rows moved.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, reduce
from itertools import pairwise, permutations, product
from typing import NamedTuple, TypeAlias

import numpy as np

from wqk._typing import Int
from wqk.sameness.axis_orders import (
    Axes,
    Listed,
    Order,
    Periodic,
    Reversed,
    Rolled,
    RotatedPart,
    Sections,
)
from wqk.sameness.edits import Edit, Permute, Then
from wqk.sameness.matching import evenly_spaced
from wqk.sameness.mismatches import Kind

# Explicit orders are printed up to this length.
SHORT = 16
# Number of rows to compare first, to exclude most orders.
FIRST_COMPARED = 17
# Number of reorderings for the actual heads, which are first.
MOST_OF_ALL_HEADS = 4


# A shape of rows with several axes, and an order of these axes.
AxesView: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class NamedOrder(NamedTuple):
    """An order of rows with a name.

    Attributes
    ----------
    description
        The change as a phrase, such as ``rolled by 5``.
    edit
        The edit that makes the order.
    """

    description: str
    edit: Edit


class ReorderKind(StrEnum):
    """Kind of a reordering: the resulting order of rotary pairs, or another order of heads."""

    HALF = "half"
    INTERLEAVED = "interleaved"
    HEADS = "heads"


# The order of rotary pairs before a reordering, by the order after it.
OPPOSITE_ORDERS = {"half": "interleaved", "interleaved": "half"}


@dataclass(frozen=True)
class Sizes:
    """Numbers of a block that determine views of its weights.

    Attributes
    ----------
    heads, groups, width
        H, G and R.
    rotated
        Number of dimensions of a head that rotate with positions; R without rotary positions.
    order
        The order of rotary pairs in the model, ``half`` or ``interleaved``; empty without rotary
        positions.
    """

    heads: int
    groups: int
    width: int
    rotated: int = 0
    order: str = ""

    @property
    def factors(self) -> dict[int, str]:
        """Names of the lengths of axes in views; lengths with a meaning come first."""
        share = self.heads // self.groups
        named = [
            (self.heads, "heads"),
            (self.groups, "key heads"),
            (self.width, "head width"),
            (share, "queries per key head"),
            (share + 2, "queries, key and value"),
            (self.width // 2, "rotary pairs"),
            (3, "q, k, v"),
            (2, "2"),
            (4, "4"),
            (8, "8"),
        ]
        names: dict[int, str] = {}
        for length, name in named:
            if length > 1:
                names.setdefault(length, name)
        return names


@dataclass(frozen=True, eq=False)
class Reorder:
    """A reordering of a side's rows, ``w[rows]``.

    Attributes
    ----------
    rows
        For each row of the result, its source row.
    kind
        The kind: neighboring pairs become halves, halves become pairs, or heads move.
    heads, width
        Number and width of the heads that the reordering assumes.
    order
        The reordering as an `Order`, which can be printed.
    """

    rows: Int[np.ndarray, " rows"]
    kind: ReorderKind
    heads: int
    width: int
    order: Order


@cache
def reorders(heads: int, width: int, rotated: int) -> tuple[Reorder, ...]:
    """Return all reorderings of H·R rows; reorderings with the actual heads come first.

    Parameters
    ----------
    heads, width
        H and R.
    rotated
        Number of dimensions of a head that rotate with positions.

    Examples
    --------
    >>> first = reorders(2, 4, 4)[0]
    >>> first.rows, first.order
    (array([0, 2, 1, 3, 4, 6, 5, 7]), Axes(shape=(2, 2, 2), axes=(0, 2, 1)))
    """
    count = heads * width
    orders_of_pairs = (ReorderKind.HALF, ReorderKind.INTERLEAVED)
    result: list[Reorder] = []
    if 0 < rotated < width:
        for kind in orders_of_pairs:
            part = RotatedPart(width, _shape_of_pairs(kind, rotated))
            result.append(Reorder(part.indices(count), kind, heads, width, part))
    head_counts = [number for number in range(1, count // 2 + 1) if count % number == 0]
    head_counts.sort(key=lambda number: number != heads)
    for number, kind in product(head_counts, orders_of_pairs):
        head_width = count // number
        if head_width % 2 == 0 and head_width > 2:
            pairs = Axes((number, *_shape_of_pairs(kind, head_width)), (0, 2, 1))
            result.append(Reorder(pairs.indices(count), kind, number, head_width, pairs))
    for groups in range(2, heads):
        if heads % groups == 0:
            regrouped = Axes((groups, heads // groups, width), (1, 0, 2))
            rows = regrouped.indices(count)
            result.append(Reorder(rows, ReorderKind.HEADS, heads, width, regrouped))
    return tuple(result)


def _shape_of_pairs(kind: ReorderKind, rotated: int) -> tuple[int, int]:
    """Return the shape of a head's rotated dimensions before a transposing reordering."""
    half = rotated // 2
    return (half, 2) if kind is ReorderKind.HALF else (2, half)


def to_order(order: str, heads: int, width: int, rotated: int) -> Int[np.ndarray, " rows"]:
    """Return the rows of a side that convert rotary pairs to an order from the opposite order.

    Parameters
    ----------
    order
        The resulting order of rotary pairs, ``half`` or ``interleaved``.
    heads, width, rotated
        As for `reorders`.
    """
    if min(width, rotated) > 2:
        for reorder in reorders(heads, width, rotated):
            if reorder.kind == order:
                return reorder.rows
    return np.arange(heads * width)


def sequences_to(
    rows: Int[np.ndarray, " rows"], heads: int, width: int, rotated: int
) -> list[tuple[Reorder, ...]]:
    """Return the sequences of one or two reorderings that result in an order of rows.

    All sequences have one result. Therefore all sequences are possible mistakes: in heads of width
    8, a conversion that was done twice has the same result as a missing conversion.

    Parameters
    ----------
    rows
        The order.
    heads, width, rotated
        As for `reorders`.

    Returns
    -------
    list of tuple of Reorder
        First single reorderings, then a reordering that was done twice, with the actual heads.
        Other pairs of reorderings are returned only if there are none of these.
    """
    candidates = reorders(heads, width, rotated)
    single: list[tuple[Reorder, ...]] = [
        (reorder,) for reorder in candidates if np.array_equal(reorder.rows, rows)
    ]
    by_rows = {reorder.rows.tobytes(): reorder for reorder in reversed(candidates)}
    double: list[tuple[Reorder, ...]] = []
    twice: list[tuple[Reorder, ...]] = []
    for first in candidates:
        # w[first][second] is w[rows] if second contains the place of each of the rows in first.
        place_in_first = np.argsort(first.rows)
        second = by_rows.get(place_in_first[rows].tobytes())
        if second is None:
            continue
        double.append((first, second))
        if first.kind is second.kind and first.heads == second.heads == heads:
            twice.append((first, second))
    return [*single, *twice] or double[:1]


def whole_heads(rows: np.ndarray, width: int) -> np.ndarray | None:
    """Return, for each head, its source head, (H,).

    None unless the rows are whole heads with their rows in order.

    Examples
    --------
    >>> whole_heads(np.array([2, 3, 0, 1]), 2).tolist(), whole_heads(np.array([1, 0, 2, 3]), 2)
    ([1, 0], None)
    """
    if len(rows) % width:
        return None
    table = rows.reshape(-1, width)
    first_rows = table[:, 0]
    begin_heads = first_rows % width == 0
    rows_in_order = first_rows[:, None] + np.arange(width)
    if not begin_heads.all() or not np.array_equal(table, rows_in_order):
        return None
    return first_rows // width


def name_of_side(rows: np.ndarray, heads: int, sizes: Sizes) -> tuple[Kind, NamedOrder] | None:
    """Return the kind and the name of an order of queries or keys; None without a name.

    Parameters
    ----------
    rows, heads
        The order, and the number of heads in the rows.
    sizes
        The numbers of the block.
    """
    width = sizes.width
    sequences = sequences_to(rows, heads, width, sizes.rotated)
    if sequences:
        return _name_of_sequences(sequences, heads, sizes)
    first_rows = width * np.arange(heads)
    dimensions = rows.reshape(heads, width) - first_rows[:, None]
    if (dimensions == dimensions[0]).all():
        order = Periodic(tuple(dimensions[0].tolist()))
        description = "dimensions of each head in another order"
        return Kind.DIMENSIONS, NamedOrder(description, Permute(0, order))
    return None


def _name_of_sequences(
    sequences: Sequence[tuple[Reorder, ...]], heads: int, sizes: Sizes
) -> tuple[Kind, NamedOrder]:
    """Return the kind and the name of sequences of reorderings with one result."""
    descriptions = list(dict.fromkeys(_in_words(sequence, heads, sizes) for sequence in sequences))
    description = descriptions[0]
    if len(descriptions) > 1:
        alternative = descriptions[1].removeprefix("rotary order: ")
        description += f" (or {alternative}, which is the same here)"
    first = sequences[0]
    is_regrouped = any(reorder.kind is ReorderKind.HEADS for reorder in first)
    edits: list[Edit] = [Permute(0, reorder.order) for reorder in first]
    kind = Kind.HEADS if is_regrouped else Kind.ROTARY
    return kind, NamedOrder(description, reduce(Then, edits))


def _in_words(sequence: tuple[Reorder, ...], heads: int, sizes: Sizes) -> str:
    """Describe a change of rows, undone by one or two reorderings."""
    if len(sequence) == 1:
        return _single_in_words(sequence[0], heads, sizes)
    first, last = sequence
    actual_heads = (heads, sizes.width)
    if first.kind is ReorderKind.HEADS:
        return _regrouped_in_words(first)
    if first.kind is last.kind and first.heads == last.heads == heads:
        order = "half" if first.kind is ReorderKind.INTERLEAVED else "pairs"
        return f"rotary order: converted twice to {order}"
    if (first.heads, first.width) == (last.heads, last.width) == actual_heads:
        return "rotary order: converted as if other dimensions of each head were rotated"
    wrong = first if (first.heads, first.width) != actual_heads else last
    if wrong.kind is ReorderKind.HEADS:
        return "rotary order and grouping of heads"
    noun = "heads" if wrong.heads > 1 else "head"
    return (
        f"rotary order: converted with {wrong.heads} {noun} of width {wrong.width} "
        f"instead of {heads} of {sizes.width}"
    )


def _single_in_words(reorder: Reorder, heads: int, sizes: Sizes) -> str:
    """Describe a change of rows, undone by one reordering."""
    if reorder.kind is ReorderKind.HEADS:
        return _regrouped_in_words(reorder)
    if (reorder.heads, reorder.width) != (heads, sizes.width):
        return (
            f"rotary order: rows lie as if there were {reorder.heads} heads of width "
            f"{reorder.width}, not {heads} of {sizes.width}"
        )
    # A conversion is missing, or one conversion too many was made.
    if sizes.order in (reorder.kind, ""):
        return f"rotary order: stored {OPPOSITE_ORDERS[reorder.kind]}, read as {reorder.kind}"
    return f"rotary order: converted to {sizes.order} once too often"


def _regrouped_in_words(reorder: Reorder) -> str:
    """Describe heads in the order of another grouping."""
    return f"heads regrouped: {reorder.heads} heads in the order of another grouping"


@cache
def _views(count: int, sizes: Sizes) -> tuple[AxesView, ...]:
    """Return shapes of up to four axes with orders of the axes, the simplest first.

    All lengths except one are factors of the sizes; the remaining length follows.
    """
    views: dict[AxesView, None] = {}
    for axes in (2, 3, 4):
        orders = [order for order in permutations(range(axes)) if _is_tried(order)]
        for factors in product(sizes.factors, repeat=axes - 1):
            length, remainder = divmod(count, math.prod(factors))
            if remainder or length < 2:
                continue
            for place in range(axes):
                shape = (*factors[:place], length, *factors[place:])
                views |= dict.fromkeys((shape, order) for order in orders)
    return tuple(views)


def _is_tried(order: tuple[int, ...]) -> bool:
    """Return whether an order of axes is tried: four axes only if three axes do not suffice."""
    if len(order) < 4:
        return order != tuple(range(len(order)))
    keeps_neighbors = any(b == a + 1 for a, b in pairwise(order))
    return not keeps_neighbors and order[0] != 0


def name_permutation(rows: np.ndarray, sizes: Sizes) -> NamedOrder | None:
    """Name any order of rows; None if the order has no short name.

    Examples
    --------
    >>> rows = np.arange(24).reshape(2, 4, 3).transpose(0, 2, 1).ravel()
    >>> name_permutation(rows, Sizes(2, 2, 12)).edit.order
    Axes(shape=(2, 4, 3), axes=(0, 2, 1))
    """
    count = len(rows)
    steps = np.diff(rows)
    if (steps % count == 1).all():
        first = int(rows[0])
        by = first if 2 * first <= count else first - count
        return NamedOrder(f"rolled by {by}", Permute(0, Rolled(by)))
    if (steps == -1).all():
        return NamedOrder("in reverse order", Permute(0, Reversed()))
    return _name_as_axes(rows, sizes) or _name_in_stretches(rows, sizes) or _name_short(rows)


def _name_as_axes(rows: np.ndarray, sizes: Sizes) -> NamedOrder | None:
    """Name an order that exchanges the axes of a view; None for other orders."""
    count = len(rows)
    start = np.arange(count)
    sample = evenly_spaced(count, FIRST_COMPARED)
    for shape, order in _views(count, sizes):
        moved = start.reshape(shape).transpose(order).ravel()
        fits_sample = np.array_equal(moved[sample], rows[sample])
        if not fits_sample or not np.array_equal(moved, rows):
            continue
        names = [str(length) for length in shape]
        for place, length in enumerate(shape):
            if length > 2:
                names[place] = sizes.factors.get(length, str(length))
        actual = " × ".join(names)
        expected = " × ".join(names[axis] for axis in order)
        description = f"lie as {actual}; expected as {expected}"
        return NamedOrder(description, Permute(0, Axes(shape, order)))
    return None


def _name_in_stretches(rows: np.ndarray, sizes: Sizes) -> NamedOrder | None:
    """Name an order that is the same in every stretch of rows; None for other orders."""
    count = len(rows)
    share = sizes.heads // sizes.groups
    periods = {sizes.width, 3 * sizes.width, (share + 2) * sizes.width, 2, 4, 8, 16, 32, 64, 128}
    for length in sorted(periods):
        if length >= count or count % length:
            continue
        starts = length * np.arange(count // length)
        order_by_stretch = rows.reshape(-1, length) - starts[:, None]
        order = order_by_stretch[0]
        stays_inside = order.min() >= 0 and order.max() < length
        if stays_inside and (order_by_stretch == order).all():
            return _name_within(order, sizes)
    return None


def _name_short(rows: np.ndarray) -> NamedOrder | None:
    """Name an order with a few moved rows by the numbers of these rows; None for more rows."""
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    if not 1 < len(moved) <= SHORT:
        return None
    *numbers, last = map(str, moved)
    order_of_all = Listed(tuple(rows.tolist()))
    description = f"{', '.join(numbers)} and {last} exchanged"
    return NamedOrder(description, Permute(0, order_of_all))


def _name_within(order: np.ndarray, sizes: Sizes) -> NamedOrder:
    """Name an order that is repeated in every stretch of rows by the order within a stretch."""
    length, width = len(order), sizes.width
    heads = whole_heads(order, width) if length > width else None
    if heads is not None:
        description = f"lie in another order within each {len(heads)} heads"
        return NamedOrder(description, Permute(0, Periodic(tuple(heads.tolist()), width)))
    description = f"lie in another order within each {length}"
    halves_exchanged = np.roll(np.arange(length), length // 2)
    if np.array_equal(halves_exchanged, order):
        description += ", as halves of bytes (nibbles) read in the other order"
    return NamedOrder(description, Permute(0, Periodic(tuple(order.tolist()))))


def name_in_fused(rows: np.ndarray, by_group: bool, sizes: Sizes) -> NamedOrder | None:
    """Name an order with queries, keys and values joined differently, or with moved rows inside.

    Parameters
    ----------
    rows
        The order of the rows of a fused weight.
    by_group
        Whether the queries, the key and the value of each key head should follow each other.
        Otherwise all queries come first, then all keys, then all values.
    sizes
        The numbers of the block.
    """
    width = sizes.width
    for reorder in reorders(len(rows) // width, width, sizes.rotated)[:MOST_OF_ALL_HEADS]:
        if reorder.width == width and np.array_equal(reorder.rows, rows):
            description = f"in {_single_in_words(reorder, reorder.heads, sizes)}"
            return NamedOrder(description, Permute(0, reorder.order))
    return _name_of_sections(rows, by_group, sizes) or name_permutation(rows, sizes)


def _name_of_sections(rows: np.ndarray, by_group: bool, sizes: Sizes) -> NamedOrder | None:
    """Name an order with queries, keys and values joined differently; None for other orders."""
    groups = sizes.groups
    lengths = sizes.heads * sizes.width, groups * sizes.width, groups * sizes.width
    if sum(lengths) != len(rows):
        return None
    expected_shards = groups if by_group else 1
    shard_counts = dict.fromkeys((1, groups, 2, 4, 8, 16))
    for shards, order in product(shard_counts, permutations(range(3))):
        is_expected = (shards, order) == (expected_shards, (0, 1, 2))
        if is_expected or any(length % shards for length in lengths):
            continue
        sections = Sections(lengths, shards, order, expected_shards)
        if np.array_equal(sections.indices(len(rows)), rows):
            actual = _in_shards(shards, groups, order)
            expected = _in_shards(expected_shards, groups, (0, 1, 2))
            return NamedOrder(f"lie {actual}; expected {expected}", Permute(0, sections))
    return None


def _in_shards(shards: int, groups: int, order: Sequence[int]) -> str:
    """Describe a fused weight of shards, each with q, k and v in an order."""
    letters = " ".join("qkv"[part] for part in order)
    in_order = "" if letters == "q k v" else f", in the order {letters}"
    if shards == 1 and not in_order:
        return "in sections (all q, all k, all v)"
    if shards == 1:
        return f"in the order {letters}"
    if shards == groups:
        return f"per key head (its queries, its key, its value){in_order}"
    return f"in {shards} shards, joined without being taken apart{in_order}"
