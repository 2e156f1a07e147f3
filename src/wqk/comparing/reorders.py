"""Orders of a weight's rows that conversions make and forget: each as indices, words and code.

All of them are one operation, a view of the rows with three axes of which two change places. With
pairs it turns rotary pairs that lie side by side into halves, or back; with heads it regroups them.

Axes: H heads, R head width, D model width, n = H·R rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np

from wqk._typing import Int


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
def reorders(heads: int, width: int, rotated: int) -> tuple[Reorder, ...]:
    """Every reordering of H·R rows, those of the actual heads first.

    ``rotated`` is how many dimensions of a head turn with positions, where fewer than all do.

    Examples
    --------
    >>> first = reorders(2, 4, 4)[0]
    >>> first.rows, first.code
    (array([0, 2, 1, 3, 4, 6, 5, 7]), 'w = w.view(-1, 2, 2, D).transpose(1, 2).reshape(-1, D)')
    """
    n = heads * width
    found: list[Reorder] = []
    if 0 < rotated < width:
        found += [_partial(kind, heads, width, rotated) for kind in ("half", "interleaved")]
    counts = sorted((h for h in range(1, n // 2 + 1) if n % h == 0), key=lambda h: h != heads)
    for count in counts:
        wide = n // count
        if wide % 2 == 0 and wide > 2:
            found.append(_swapped("half", count, wide, (count, wide // 2, 2)))
            found.append(_swapped("interleaved", count, wide, (count, 2, wide // 2)))
    for groups in (g for g in range(2, heads) if heads % g == 0):
        axes = (groups, heads // groups, width)
        rows = np.arange(n).reshape(axes).swapaxes(0, 1).ravel()
        code = f"w = w.view({groups}, -1, {width}, D).transpose(0, 1).reshape(-1, D)"
        found.append(Reorder(rows, "heads", heads, width, code))
    return tuple(found)


def _swapped(kind: str, heads: int, width: int, axes: tuple[int, int, int]) -> Reorder:
    rows = np.arange(heads * width).reshape(axes).swapaxes(1, 2).ravel()
    code = f"w = w.view(-1, {axes[1]}, {axes[2]}, D).transpose(1, 2).reshape(-1, D)"
    return Reorder(rows, kind, heads, width, code)


def _partial(kind: str, heads: int, width: int, rotated: int) -> Reorder:
    """The first dimensions of each head alone."""
    axes = (rotated // 2, 2) if kind == "half" else (2, rotated // 2)
    within = np.arange(rotated).reshape(axes).T.ravel()
    rows = np.arange(heads * width).reshape(heads, width)
    rows[:, :rotated] = rows[:, within]
    view = ", ".join(map(str, axes))
    code = (
        f"h = w.view(-1, {width}, D); h[:, :{rotated}] = h[:, :{rotated}].reshape(-1, {view}, D)"
        f".transpose(1, 2).reshape(-1, {rotated}, D)"
    )
    return Reorder(rows.ravel(), kind, heads, width, code)


def to_order(kind: str, heads: int, width: int, rotated: int) -> Reorder:
    """The conversion of a side's rows between rotary pairs side by side and in halves."""
    known = (one for one in reorders(heads, width, rotated) if one.kind == kind)
    same = Reorder(np.arange(heads * width), kind, heads, width, "")
    return next(known, same) if min(width, rotated) > 2 else same


def steps_to(
    rows: Int[np.ndarray, " rows"], heads: int, width: int, rotated: int
) -> list[tuple[Reorder, ...]]:
    """The reorderings, one or two in a row, whose result has its rows in this order.

    Several, if they are equal: in heads of width 8, a conversion done twice is one left undone.
    """
    known = reorders(heads, width, rotated)
    single: list[tuple[Reorder, ...]] = [(one,) for one in known if np.array_equal(one.rows, rows)]
    by_rows = {one.rows.tobytes(): one for one in reversed(known)}
    double: list[tuple[Reorder, ...]] = []
    for first in known:
        # w[first][second] is w[rows] where second says at which place of first each row is.
        place = np.empty_like(first.rows)
        place[first.rows] = np.arange(len(rows))
        second = by_rows.get(place[rows].tobytes())
        if second is not None:
            double.append((first, second))
    own = [pair for pair in double if all((s.heads, s.kind) == (heads, pair[0].kind) for s in pair)]
    return [*single, *own] or double[:1]


def whole_heads(rows: np.ndarray, heads: int, width: int) -> np.ndarray | None:
    """The head that each head's rows are taken from, if they are taken whole and in order."""
    table = rows.reshape(heads, width)
    first = table[:, 0]
    in_order = np.array_equal(table, first[:, None] + np.arange(width))
    return first // width if in_order and not (first % width).any() else None


def of_vector(code: str, name: str) -> str:
    """The code of a reordering for a bias or a gain, which has no columns.

    Examples
    --------
    >>> of_vector("w = w.view(-1, 2, 4, D).transpose(1, 2).reshape(-1, D)", "b")
    'b = b.view(-1, 2, 4).transpose(1, 2).reshape(-1)'
    """
    return code.replace(", D)", ")").replace("w", name).replace("vie" + name, "view")
