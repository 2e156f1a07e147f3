"""Orders of a weight's rows, and their names: views in the model's own numbers, axes exchanged.

Conversions make and forget orders, each here as indices, words and code. With pairs they turn
rotary pairs that lie side by side into halves, or back; with heads they regroup these. Any other is
looked for among the views of the rows with up to four axes, and all orders of the axes.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, permutations, product

import numpy as np

from wqk._typing import Int
from wqk.sameness.mismatches import Kind


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
        found: dict[int, str] = {}
        for length, name in named:
            if length > 1:
                found.setdefault(length, name)
        return found


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
    code
        The same in PyTorch, of a weight ``w`` with ``D`` columns.
    """

    rows: Int[np.ndarray, " rows"]
    kind: str
    heads: int
    width: int
    code: str


@cache
def reorders(heads: int, width: int, turned: int) -> tuple[Reorder, ...]:
    """Every reordering of H·R rows, those of the actual heads first.

    ``turned`` is how many dimensions of a head turn with positions, where fewer than all do.

    Examples
    --------
    >>> first = reorders(2, 4, 4)[0]
    >>> first.rows, first.code
    (array([0, 2, 1, 3, 4, 6, 5, 7]), 'w = w.view(-1, 2, 2, D).transpose(1, 2).reshape(-1, D)')
    """
    n = heads * width
    found: list[Reorder] = []
    for kind in ("half", "interleaved") if 0 < turned < width else ():
        axes = (turned // 2, 2) if kind == "half" else (2, turned // 2)
        table = np.arange(n).reshape(heads, width)
        table[:, :turned] = table[:, np.arange(turned).reshape(axes).T.ravel()]
        code = (
            f"h = w.view(-1, {width}, D); h[:, :{turned}] = h[:, :{turned}]"
            f".reshape(-1, {axes[0]}, {axes[1]}, D).transpose(1, 2).reshape(-1, {turned}, D)"
        )
        found.append(Reorder(table.ravel(), kind, heads, width, code))
    counts = sorted((h for h in range(1, n // 2 + 1) if n % h == 0), key=lambda h: h != heads)
    for count, kind in product(counts, ("half", "interleaved")):
        wide = n // count
        if wide % 2 == 0 and wide > 2:
            axes = (wide // 2, 2) if kind == "half" else (2, wide // 2)
            rows = np.arange(n).reshape(count, *axes).swapaxes(1, 2).ravel()
            code = f"w = w.view(-1, {axes[0]}, {axes[1]}, D).transpose(1, 2).reshape(-1, D)"
            found.append(Reorder(rows, kind, count, wide, code))
    for groups in (g for g in range(2, heads) if heads % g == 0):
        rows = np.arange(n).reshape(groups, heads // groups, width).swapaxes(0, 1).ravel()
        code = f"w = w.view({groups}, -1, {width}, D).transpose(0, 1).reshape(-1, D)"
        found.append(Reorder(rows, "heads", heads, width, code))
    return tuple(found)


def to_order(order: str, heads: int, width: int, turned: int) -> Int[np.ndarray, " rows"]:
    """The rows of a side that bring its rotary pairs into an order from the other one."""
    known = (one.rows for one in reorders(heads, width, turned) if one.kind == order)
    same = np.arange(heads * width)
    return next(known, same) if min(width, turned) > 2 else same


def steps_to(
    rows: Int[np.ndarray, " rows"], heads: int, width: int, turned: int
) -> list[tuple[Reorder, ...]]:
    """The reorderings, one or two in a row, whose result has its rows in this order.

    Several, if they are equal: in heads of width 8, a conversion done twice is one left undone.
    """
    known = reorders(heads, width, turned)
    single: list[tuple[Reorder, ...]] = [(one,) for one in known if np.array_equal(one.rows, rows)]
    by_rows = {one.rows.tobytes(): one for one in reversed(known)}
    double: list[tuple[Reorder, ...]] = []
    for first in known:
        # w[first][second] is w[rows] where second says at which place of first each row is.
        second = by_rows.get(np.argsort(first.rows)[rows].tobytes())
        if second is not None:
            double.append((first, second))
    own = [pair for pair in double if all((s.heads, s.kind) == (heads, pair[0].kind) for s in pair)]
    return [*single, *own] or double[:1]


def whole_heads(rows: np.ndarray, width: int) -> np.ndarray | None:
    """The head that each head's rows are taken from, if they are taken whole and in order."""
    if len(rows) % width:
        return None
    table = rows.reshape(-1, width)
    in_order = np.array_equal(table, table[:, :1] + np.arange(width))
    return table[:, 0] // width if in_order and not (table[:, 0] % width).any() else None


def name_of_side(rows: np.ndarray, heads: int, sizes: Sizes) -> tuple[Kind, str, str] | None:
    """Kind, words and code of an order of queries or keys; None if it has no name of its own."""
    width = sizes.width
    if steps := steps_to(rows, heads, width, sizes.turned):
        words, *others = dict.fromkeys(_in_words(each, heads, sizes) for each in steps)
        if others:
            words += f" (or {others[0].removeprefix('rotary order: ')}, which is the same here)"
        regrouped = any(step.kind == "heads" for step in steps[0])
        kind = Kind.HEADS if regrouped else Kind.ROTARY
        return kind, words, "; ".join(step.code for step in steps[0])
    table = rows.reshape(heads, width) - width * np.arange(heads)[:, None]
    if (table == table[0]).all():
        listed = ", ".join(map(str, table[0]))
        code = f"w = w.view(-1, {width}, D)[:, [{listed}]].reshape(-1, D)"
        return Kind.DIMENSIONS, "dimensions of each head in another order", code
    return None


def _in_words(steps: tuple[Reorder, ...], heads: int, sizes: Sizes) -> str:
    """What was done to rows that these steps bring back."""
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
    return (
        f"rotary order: converted with {wrong.heads} head{'s' * (wrong.heads > 1)} of width "
        f"{wrong.width} instead of {heads} of {sizes.width}"
    )


@cache
def _views(count: int, sizes: Sizes) -> tuple[tuple[tuple[int, ...], tuple[int, ...]], ...]:
    """Shapes of up to four axes with orders of them, the simplest first."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], None] = {}
    for axes in (2, 3, 4):
        for known in product(sizes.factors, repeat=axes - 1):
            rest, left = divmod(count, math.prod(known))
            if left or rest < 2:
                continue
            for place in range(axes):
                shape = (*known[:place], rest, *known[place:])
                for order in permutations(range(axes)):
                    kept = any(b == a + 1 for a, b in pairwise(order))
                    if (not kept and order[0] != 0) or (axes < 4 and order != tuple(range(axes))):
                        found.setdefault((shape, order))
    return tuple(found)


def name_permutation(rows: np.ndarray, sizes: Sizes) -> tuple[str, str] | None:
    """Words and code of the permutation ``w[rows]``; None if it has no short name.

    The code has ``%s`` where further axes stand.

    Examples
    --------
    >>> rows = np.arange(24).reshape(2, 4, 3).transpose(0, 2, 1).ravel()
    >>> name_permutation(rows, Sizes(2, 2, 12))[1]
    'w = w.view(2, 4, 3%s).transpose(1, 2).reshape(-1%s)'
    """
    count, start = len(rows), np.arange(len(rows))
    if (np.diff(rows) % count == 1).all():
        by = int(rows[0]) if 2 * rows[0] <= count else int(rows[0]) - count
        return f"rolled by {by}", f"w = w.roll({-by}, 0)"
    if (np.diff(rows) == -1).all():
        return "in reverse order", "w = w.flip(0)"
    some = np.unique(np.linspace(0, count - 1, 17).astype(int))
    for shape, order in _views(count, sizes):
        moved = start.reshape(shape).transpose(order).ravel()
        if np.array_equal(moved[some], rows[some]) and np.array_equal(moved, rows):
            names = [sizes.factors.get(n, str(n)) if n > 2 else str(n) for n in shape]
            lies, should = " × ".join(names), " × ".join(names[axis] for axis in order)
            changed = [at for at, axis in enumerate(order) if at != axis]
            turn = f"permute({', '.join(map(str, order))}%s)"
            if len(changed) == 2:
                turn = f"transpose({changed[0]}, {changed[1]})"
            axes = ", ".join(map(str, shape))
            code = f"w = w.view({axes}%s).{turn}.reshape(-1%s)"
            return f"lie as {lies}, should as {should}", code
    share = sizes.heads // sizes.groups
    periods = {sizes.width, 3 * sizes.width, (share + 2) * sizes.width, 2, 4, 8, 16, 32, 64, 128}
    for length in sorted(periods):
        if length < count and count % length == 0:
            table = rows.reshape(-1, length) - length * np.arange(count // length)[:, None]
            if (table == table[0]).all() and table[0].min() >= 0 and table[0].max() < length:
                return _within(table[0], sizes)
    moved = np.flatnonzero(rows != start)
    if len(moved) <= 16:
        listed = " ".join(map(str, moved[:16]))
        code = f"w[{moved.tolist()}] = w[{rows[moved].tolist()}]"
        return f"{listed} in each other's places", code
    return None


def _within(inner: np.ndarray, sizes: Sizes) -> tuple[str, str]:
    """A permutation that is the same in every stretch of so many rows."""
    length, width = len(inner), sizes.width
    heads = whole_heads(inner, width) if length > width else None
    if heads is not None:
        words = f"lie in another order within each {len(heads)} heads"
        return words, f"w = w.view(-1, {len(heads)}, {width}%s)[:, {heads.tolist()}].reshape(-1%s)"
    words = f"lie in another order within each {length}"
    if np.array_equal(np.roll(np.arange(length), length // 2), inner):
        words += ", as halves of bytes (nibbles) read in the other order"
    return words, f"w = w.view(-1, {length}%s)[:, {inner.tolist()}].reshape(-1%s)"


def name_in_fused(rows: np.ndarray, by_group: bool, sizes: Sizes) -> tuple[str, str] | None:
    """Queries, keys and values joined in another way than they should be, or moved inside.

    ``by_group`` is whether each key head's should follow each other, rather than all queries.
    """
    heads, groups, width = sizes.heads, sizes.groups, sizes.width
    for step in reorders(len(rows) // width, width, sizes.turned)[:4]:
        if step.width == width and np.array_equal(step.rows, rows):
            return f"in {_in_words((step,), step.heads, sizes)}", step.code
    lengths = [heads * width, groups * width, groups * width]
    shards = groups if by_group else 1
    if sum(lengths) == len(rows):
        wanted = _fused(lengths, shards, (0, 1, 2))
        counts = dict.fromkeys((1, groups, 2, 4, 8, 16))
        for count, order in product(counts, permutations(range(3))):
            if any(length % count for length in lengths) or (count, order) == (shards, (0, 1, 2)):
                continue
            if np.array_equal(np.argsort(_fused(lengths, count, order))[wanted], rows):
                each = [lengths[part] // count for part in order]
                code = (
                    f"parts = [torch.cat(some) for some in zip(*(shard.split({each}) "
                    f"for shard in w.chunk({count})))]\n"
                    f"w = torch.cat([torch.cat(some) for some in zip(*(parts[part].chunk({shards}) "
                    f"for part in {[order.index(part) for part in range(3)]}))])"
                )
                should = _in_shards(shards, groups, (0, 1, 2))
                return f"lie {_in_shards(count, groups, order)}, should {should}", code
    return name_permutation(rows, sizes)


def _fused(lengths: Sequence[int], shards: int, order: Sequence[int]) -> np.ndarray:
    """Rows of queries, keys and values, numbered one after the other, as shards join them."""
    parts = np.split(np.arange(sum(lengths)), np.cumsum(lengths)[:-1])
    split = [np.split(parts[part], shards) for part in order]
    return np.concatenate([piece for shard in zip(*split, strict=True) for piece in shard])


def _in_shards(shards: int, groups: int, order: Sequence[int]) -> str:
    """How a fused weight is joined, in words."""
    letters = " ".join("qkv"[part] for part in order)
    ordered = "" if letters == "q k v" else f", in the order {letters}"
    if shards == 1:
        return f"in the order {letters}" if ordered else "in sections (all q, all k, all v)"
    if shards == groups:
        return f"per key head (its queries, its key, its value){ordered}"
    return f"in {shards} shards, joined without being taken apart{ordered}"
