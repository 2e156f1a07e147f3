"""Orders of a weight's rows, and their names: views in the model's own numbers, axes exchanged.

Conversions make and forget orders; each order is found here with a description and as an `Order`.
Some turn rotary pairs that lie side by side into halves, or back; others regroup the heads. Any
other order is looked for among the views of the rows with up to four axes, and all orders of the
axes.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise, permutations, product
from typing import NamedTuple

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
from wqk.sameness.mismatches import Kind

# Explicit orders are printed up to this length.
SHORT = 16


class NamedOrder(NamedTuple):
    """An order of rows that has a name: its description, and the edit that brings it about."""

    description: str
    edit: Edit


@dataclass(frozen=True)
class Sizes:
    """The numbers of a block that views of its weights are made of.

    Attributes
    ----------
    heads, groups, width
        H, G and R.
    turned
        How many dimensions of a head turn with positions; all without rotary ones.
    order
        The order in which rotary pairs are read; empty without them.
    """

    heads: int
    groups: int
    width: int
    turned: int = 0
    order: str = ""

    @property
    def factors(self) -> dict[int, str]:
        """Lengths of axes, those with a meaning first."""
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
        For each row of the result, the row that it is taken from.
    kind
        ``half`` (pairs side by side become halves), ``interleaved`` (halves become pairs) or
        ``heads``.
    heads, width
        How many heads of which width it takes the rows for.
    order
        The same as an `Order` of an axis.
    """

    rows: Int[np.ndarray, " rows"]
    kind: str
    heads: int
    width: int
    order: Order


@cache
def reorders(heads: int, width: int, turned: int) -> tuple[Reorder, ...]:
    """Every reordering of H·R rows, those of the actual heads first.

    ``turned`` is how many dimensions of a head turn with positions, where fewer than all do.

    Examples
    --------
    >>> first = reorders(2, 4, 4)[0]
    >>> first.rows, first.order
    (array([0, 2, 1, 3, 4, 6, 5, 7]), Axes(shape=(2, 2, 2), axes=(0, 2, 1)))
    """
    count = heads * width
    known: list[Reorder] = []
    if 0 < turned < width:
        for kind in ("half", "interleaved"):
            shape = (turned // 2, 2) if kind == "half" else (2, turned // 2)
            part = RotatedPart(width, shape)
            known.append(Reorder(part.indices(count), kind, heads, width, part))
    counts = [number for number in range(1, count // 2 + 1) if count % number == 0]
    counts.sort(key=lambda number: number != heads)
    for number, kind in product(counts, ("half", "interleaved")):
        head_width = count // number
        if head_width % 2 == 0 and head_width > 2:
            shape = (head_width // 2, 2) if kind == "half" else (2, head_width // 2)
            pairs = Axes((number, *shape), (0, 2, 1))
            known.append(Reorder(pairs.indices(count), kind, number, head_width, pairs))
    for groups in range(2, heads):
        if heads % groups == 0:
            regrouped = Axes((groups, heads // groups, width), (1, 0, 2))
            known.append(Reorder(regrouped.indices(count), "heads", heads, width, regrouped))
    return tuple(known)


def to_order(order: str, heads: int, width: int, turned: int) -> Int[np.ndarray, " rows"]:
    """Return the rows of a side that bring its rotary pairs into an order from the other order."""
    if min(width, turned) > 2:
        for reorder in reorders(heads, width, turned):
            if reorder.kind == order:
                return reorder.rows
    return np.arange(heads * width)


def steps_to(
    rows: Int[np.ndarray, " rows"], heads: int, width: int, turned: int
) -> list[tuple[Reorder, ...]]:
    """Return the reorderings, one or two in a row, whose result has its rows in this order.

    Several, if they are equal: in heads of width 8, a conversion done twice is one left undone.
    """
    known = reorders(heads, width, turned)
    single: list[tuple[Reorder, ...]] = [
        (reorder,) for reorder in known if np.array_equal(reorder.rows, rows)
    ]
    by_rows = {reorder.rows.tobytes(): reorder for reorder in reversed(known)}
    double: list[tuple[Reorder, ...]] = []
    for first in known:
        # w[first][second] is w[rows] where second says at which place of first each row is.
        second = by_rows.get(np.argsort(first.rows)[rows].tobytes())
        if second is not None:
            double.append((first, second))
    twice = [
        pair
        for pair in double
        if pair[0].kind == pair[1].kind and pair[0].heads == pair[1].heads == heads
    ]
    return [*single, *twice] or double[:1]


def whole_heads(rows: np.ndarray, width: int) -> np.ndarray | None:
    """Return the head that each head is taken from; None unless heads are whole and in order."""
    if len(rows) % width:
        return None
    table = rows.reshape(-1, width)
    first_rows = table[:, 0]
    if (first_rows % width).any() or not np.array_equal(table, table[:, :1] + np.arange(width)):
        return None
    return first_rows // width


def name_of_side(rows: np.ndarray, heads: int, sizes: Sizes) -> tuple[Kind, NamedOrder] | None:
    """Return kind and name of an order of queries or keys; None without a name of its own."""
    width = sizes.width
    steps = steps_to(rows, heads, width, sizes.turned)
    if steps:
        descriptions = list(dict.fromkeys(_in_words(sequence, heads, sizes) for sequence in steps))
        description = descriptions[0]
        if len(descriptions) > 1:
            alternative = descriptions[1].removeprefix("rotary order: ")
            description += f" (or {alternative}, which is the same here)"
        regrouped = any(step.kind == "heads" for step in steps[0])
        edits: list[Edit] = [Permute(0, step.order) for step in steps[0]]
        kind = Kind.HEADS if regrouped else Kind.ROTARY
        return kind, NamedOrder(description, reduce(Then, edits))
    table = rows.reshape(heads, width) - width * np.arange(heads)[:, None]
    if (table == table[0]).all():
        order = Periodic(tuple(table[0].tolist()))
        description = "dimensions of each head in another order"
        return Kind.DIMENSIONS, NamedOrder(description, Permute(0, order))
    return None


def _in_words(steps: tuple[Reorder, ...], heads: int, sizes: Sizes) -> str:
    """Describe the change of rows that these steps undo."""
    first, last = steps[0], steps[-1]
    actual = (heads, sizes.width)
    if first.kind == "heads":
        return f"heads regrouped: {first.heads} heads in the order of another grouping"
    if len(steps) == 1 and (first.heads, first.width) != actual:
        return (
            f"rotary order: rows lie as if there were {first.heads} heads of width "
            f"{first.width}, not {heads} of {sizes.width}"
        )
    if len(steps) == 1:
        # Undone are a conversion that is missing, or one too many.
        other = {"half": "interleaved", "interleaved": "half"}[first.kind]
        if first.kind == sizes.order or not sizes.order:
            return f"rotary order: stored {other}, read as {first.kind}"
        return f"rotary order: converted to {sizes.order} once too often"
    if first.kind == last.kind and first.heads == last.heads == heads:
        return f"rotary order: converted twice to {'half' if first.kind != 'half' else 'pairs'}"
    if (first.heads, first.width) == (last.heads, last.width) == actual:
        return "rotary order: converted as if other dimensions of each head were rotated"
    wrong = first if (first.heads, first.width) != actual else last
    if wrong.kind == "heads":
        return "rotary order and grouping of heads"
    noun = "heads" if wrong.heads > 1 else "head"
    return (
        f"rotary order: converted with {wrong.heads} {noun} of width {wrong.width} "
        f"instead of {heads} of {sizes.width}"
    )


@cache
def _views(count: int, sizes: Sizes) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Return shapes of up to four axes with orders of the axes, the simplest first."""
    views: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for axes in (2, 3, 4):
        for known in product(sizes.factors, repeat=axes - 1):
            length, remainder = divmod(count, math.prod(known))
            if remainder or length < 2:
                continue
            for place in range(axes):
                shape = (*known[:place], length, *known[place:])
                for order in permutations(range(axes)):
                    if _is_tried(order):
                        views.setdefault((shape, order))
    return tuple(views)


def _is_tried(order: tuple[int, ...]) -> bool:
    """Return whether an order of axes is tried: of four axes, only if no fewer axes suffice."""
    if len(order) < 4:
        return order != tuple(range(len(order)))
    keeps_neighbors = any(b == a + 1 for a, b in pairwise(order))
    return not keeps_neighbors and order[0] != 0


def name_permutation(rows: np.ndarray, sizes: Sizes) -> NamedOrder | None:
    """Name the permutation ``w[rows]``; None if it has no short name.

    Examples
    --------
    >>> rows = np.arange(24).reshape(2, 4, 3).transpose(0, 2, 1).ravel()
    >>> name_permutation(rows, Sizes(2, 2, 12)).edit.order
    Axes(shape=(2, 4, 3), axes=(0, 2, 1))
    """
    count = len(rows)
    if (np.diff(rows) % count == 1).all():
        by = int(rows[0]) if 2 * rows[0] <= count else int(rows[0]) - count
        return NamedOrder(f"rolled by {by}", Permute(0, Rolled(by)))
    if (np.diff(rows) == -1).all():
        return NamedOrder("in reverse order", Permute(0, Reversed()))
    return _name_as_axes(rows, sizes) or _name_in_stretches(rows, sizes) or _name_short(rows)


def _name_as_axes(rows: np.ndarray, sizes: Sizes) -> NamedOrder | None:
    """Name a permutation that exchanges axes; None if it exchanges none."""
    count = len(rows)
    start = np.arange(count)
    sampled = np.unique(np.linspace(0, count - 1, 17).astype(int))  # compared first
    for shape, order in _views(count, sizes):
        moved = start.reshape(shape).transpose(order).ravel()
        fits_sample = np.array_equal(moved[sampled], rows[sampled])
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
    """Name a permutation that is the same in every stretch of rows; None if it is not."""
    count = len(rows)
    share = sizes.heads // sizes.groups
    periods = {sizes.width, 3 * sizes.width, (share + 2) * sizes.width, 2, 4, 8, 16, 32, 64, 128}
    for length in sorted(periods):
        if length >= count or count % length:
            continue
        starts = length * np.arange(count // length)
        table = rows.reshape(-1, length) - starts[:, None]
        inner = table[0]
        stays_inside = inner.min() >= 0 and inner.max() < length
        if stays_inside and (table == inner).all():
            return _within(inner, sizes)
    return None


def _name_short(rows: np.ndarray) -> NamedOrder | None:
    """Name a permutation of a few rows by their numbers; None for more rows."""
    moved = np.flatnonzero(rows != np.arange(len(rows)))
    if len(moved) > SHORT:
        return None
    listed = " ".join(map(str, moved))
    order_of_all = Listed(tuple(rows.tolist()))
    return NamedOrder(f"{listed} in each other's places", Permute(0, order_of_all))


def _within(inner: np.ndarray, sizes: Sizes) -> NamedOrder:
    """Name a permutation that is the same in every stretch of as many rows."""
    length, width = len(inner), sizes.width
    heads = whole_heads(inner, width) if length > width else None
    if heads is not None:
        order = Periodic(tuple(heads.tolist()), width)
        return NamedOrder(f"lie in another order within each {len(heads)} heads", Permute(0, order))
    description = f"lie in another order within each {length}"
    if np.array_equal(np.roll(np.arange(length), length // 2), inner):
        description += ", as halves of bytes (nibbles) read in the other order"
    return NamedOrder(description, Permute(0, Periodic(tuple(inner.tolist()))))


def name_in_fused(rows: np.ndarray, by_group: bool, sizes: Sizes) -> NamedOrder | None:
    """Name an order in which queries, keys and values are joined otherwise, or moved inside.

    ``by_group`` is whether each key head's should follow each other, rather than all queries.
    """
    heads, groups, width = sizes.heads, sizes.groups, sizes.width
    for step in reorders(len(rows) // width, width, sizes.turned)[:4]:
        if step.width == width and np.array_equal(step.rows, rows):
            description = f"in {_in_words((step,), step.heads, sizes)}"
            return NamedOrder(description, Permute(0, step.order))
    lengths = heads * width, groups * width, groups * width
    shards = groups if by_group else 1
    if sum(lengths) == len(rows):
        counts = dict.fromkeys((1, groups, 2, 4, 8, 16))
        for count, order in product(counts, permutations(range(3))):
            if any(length % count for length in lengths) or (count, order) == (shards, (0, 1, 2)):
                continue
            sections = Sections(lengths, count, order, shards)
            if np.array_equal(sections.indices(len(rows)), rows):
                actual = _in_shards(count, groups, order)
                expected = _in_shards(shards, groups, (0, 1, 2))
                return NamedOrder(f"lie {actual}; expected {expected}", Permute(0, sections))
    return name_permutation(rows, sizes)


def _in_shards(shards: int, groups: int, order: Sequence[int]) -> str:
    """Describe how a fused weight is joined."""
    letters = " ".join("qkv"[part] for part in order)
    ordered = "" if letters == "q k v" else f", in the order {letters}"
    if shards == 1:
        return f"in the order {letters}" if ordered else "in sections (all q, all k, all v)"
    if shards == groups:
        return f"per key head (its queries, its key, its value){ordered}"
    return f"in {shards} shards, joined without being taken apart{ordered}"
