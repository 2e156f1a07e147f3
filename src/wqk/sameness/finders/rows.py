"""Rows and columns of a weight in another order.

Axes: n rows, D columns; H query heads, G key heads, R head width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

import numpy as np

from wqk.sameness.axis_orders import Axes, HeadOrder
from wqk.sameness.edits import Permute, Take, Transpose
from wqk.sameness.matching import same_numbers
from wqk.sameness.mismatches import Kind, listed
from wqk.sameness.permutations import (
    NamedOrder,
    name_in_fused,
    name_of_side,
    name_permutation,
    whole_heads,
)
from wqk.sameness.weight_pairs import WeightFinding, WeightPair

Find: TypeAlias = "Callable[[WeightPair], WeightFinding | None]"

# Description of an order without a name.
UNORDERED = "in another order, by no known rule"


def find_rows(pair: WeightPair) -> WeightFinding | None:
    """Find rows in a named order, in a weight and its bias."""
    rows = pair.row_order
    if rows is None:
        return None
    if _are_repeated_as_a_whole(pair, rows):
        description = (
            f"{pair.role} heads are repeated as a whole (repeat), not one by one "
            "(repeat_interleave)"
        )
        shape = pair.repeated, pair.heads // pair.repeated, pair.sizes.width
        edit = Permute(0, Axes(shape, (1, 0, 2)))
        return pair.finding(Kind.PAIRING, description, edit, rows=rows)
    side = name_of_side(rows, pair.heads, pair.sizes) if pair.is_side else None
    if side is not None:
        kind, name = side
        return pair.finding(kind, name.description, name.edit, rows=rows)
    if pair.heads:
        of_heads = _find_heads_in_order(pair, rows)
        if of_heads is not None:
            return of_heads
    name_of_rows = _name(pair, rows)
    if name_of_rows is None:
        return None
    description = f"rows of {{}} {name_of_rows.description}"
    return pair.finding(_kind_of_order(pair), description, name_of_rows.edit, rows=rows)


def find_unnamed_rows(pair: WeightPair) -> WeightFinding | None:
    """Find rows in an order without a name."""
    if pair.row_order is None:
        return None
    description = f"rows of {{}} {UNORDERED}"
    return pair.finding(_kind_of_order(pair), description, Take(), rows=pair.row_order)


def _kind_of_order(pair: WeightPair) -> Kind:
    """Return the kind of an order of rows: in a fused weight, or in any other weight."""
    return Kind.FUSED if len(pair.parts) > 2 else Kind.ROWS


def _name(pair: WeightPair, rows: np.ndarray) -> NamedOrder | None:
    """Return the name of an order of rows; for a fused weight, the order of its sections."""
    if len(pair.parts) <= 2:
        return name_permutation(rows, pair.sizes)
    queries = pair.parts[0].rows
    by_group = queries is not None and len(queries) <= queries[-1]
    return name_in_fused(rows, by_group, pair.sizes)


def _are_repeated_as_a_whole(pair: WeightPair, rows: np.ndarray) -> bool:
    """Return whether the list of key heads is repeated, instead of each key head."""
    if pair.repeated == 1 or not pair.heads:
        return False
    heads = whole_heads(rows, pair.sizes.width)
    groups = pair.heads // pair.repeated
    tiled = np.arange(pair.heads).reshape(-1, groups).T.ravel()
    return heads is not None and np.array_equal(heads, tiled)


def _find_heads_in_order(pair: WeightPair, rows: np.ndarray) -> WeightFinding | None:
    """Find whole heads in another order, from the order of their rows."""
    heads = whole_heads(rows, pair.sizes.width)
    if heads is None:
        return None
    edit = Permute(0, HeadOrder(tuple(heads.tolist()), pair.sizes.width))
    description = f"{pair.role} heads in another order: {listed(heads)}"
    order = tuple(heads.tolist())
    return pair.finding(
        Kind.HEADS, description, edit, rows=rows, heads=order, facts=pair.facts_of_heads(order)
    )


def find_columns(pair: WeightPair) -> WeightFinding | None:
    """Find columns in another order."""
    return find_in_columns(pair, _find_column_order)


def find_in_columns(pair: WeightPair, find: Find) -> WeightFinding | None:
    """Apply a finder of rows to the columns of a weight."""
    finding = find(pair.transposed)
    if finding is None:
        return None
    edits = {name: edit.for_transposed() for name, edit in finding.edits.items()}
    return replace(finding, rows=None, edits=edits, pair=pair)


def _find_column_order(transposed: WeightPair) -> WeightFinding | None:
    """Find rows of a transposed weight in another order."""
    rows = transposed.row_order
    if rows is None:
        return None
    if transposed.heads:
        of_heads = _find_heads_in_order(transposed, rows)
        if of_heads is not None:
            return of_heads
    name = name_permutation(rows, transposed.sizes)
    if name is not None:
        return transposed.finding(Kind.COLUMNS, f"columns of {{}} {name.description}", name.edit)
    description = UNORDERED
    if transposed.grid:
        description = "lie in the order of their groups: act-order was not undone"
    return transposed.finding(Kind.COLUMNS, f"columns of {{}} {description}", Take())


def find_transposed(pair: WeightPair) -> WeightFinding | None:
    """Find a square weight that is stored transposed."""
    rows, columns = pair.actual.shape
    if rows != columns or not same_numbers(pair.expected, pair.actual.T):
        return None
    actual, expected = "(out, in)", "(in, out)"
    if not pair.layout.is_transposed:
        actual, expected = expected, actual
    description = f"{{}}: stored transposed, {actual} instead of {expected}"
    return pair.finding(Kind.TRANSPOSED, description, Transpose(), with_bias=False)
