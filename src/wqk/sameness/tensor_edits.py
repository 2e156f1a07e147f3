"""The edit that makes one tensor outside attention the expected one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from wqk.sameness.axis_orders import Listed
from wqk.sameness.edits import (
    Edit,
    ExchangeLastAxes,
    Logarithm,
    Offset,
    Permute,
    Scale,
    Take,
    Transpose,
)
from wqk.sameness.finders.vectors import order_of_entries
from wqk.sameness.matching import permutation, same_numbers
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import Sizes, name_permutation
from wqk.sameness.round_factors import fit_factor
from wqk.sameness.tolerances import (
    ALIKE,
    LEAST_OFFSET,
    SAME_FACTOR,
    TINY,
    UNEXPLAINED_BY_FACTORS,
    WHOLE,
)

# Entries whose median difference is a constant that may have been added.
SAMPLED = 1 << 16

# Numbers by which orders of rows are named: rows of feed-forward networks make no heads.
SIZES = Sizes(2, 2, 1)


class EditFound(NamedTuple):
    """An edit that makes a tensor the expected one, with the cause and numbers behind it."""

    kind: Kind
    description: str
    edit: Edit
    facts: Mapping[str, Any] = {}


def _edit_of(expected: np.ndarray, actual: np.ndarray) -> EditFound | None:
    """Find the edit of one tensor that has the expected shape."""
    if not np.isfinite(actual).all():
        return None
    if not actual.any():
        return EditFound(Kind.ZERO, str(Kind.ZERO), Take())
    if np.ptp(actual) == 0 and actual.size > 1:
        return EditFound(Kind.CONSTANT, f"{Kind.CONSTANT}: all are {actual.flat[0]:g}", Take())
    finding = _arithmetic(expected, actual)
    if finding is not None:
        return finding
    if _is_transposed(expected, actual):
        if expected.ndim == 2:
            return EditFound(Kind.TRANSPOSED, "stored transposed", Transpose())
        description = "stored with the last two axes exchanged"
        return EditFound(Kind.TRANSPOSED, description, ExchangeLastAxes())
    for axis in range(expected.ndim):
        order = _order_along(expected, actual, axis)
        if order is not None:
            return _named_order(order, axis, expected.ndim)
    return None


def _arithmetic(expected: np.ndarray, actual: np.ndarray) -> EditFound | None:
    """Find an operation on each number: a constant added, a factor, an exponential."""
    offset = _added_constant(expected, actual)
    if offset is not None:
        return offset
    factor = float(np.vdot(expected, actual) / max(np.vdot(expected, expected), TINY))
    if abs(factor - 1) > SAME_FACTOR and same_numbers(factor * expected, actual):
        fit = fit_factor(expected, actual)
        description = f"scaled by {fit.factor:.4g}"
        return EditFound(Kind.SCALED, description, Scale(fit.factor), fit.facts())
    for sign, exponential in ((-1, "−exp"), (1, "exp")):
        # The first row rules most tensors out.
        is_exponential = _is_exponential(expected[:1], actual[:1], sign)
        if is_exponential and _is_exponential(expected, actual, sign):
            description = f"{Kind.EXPONENTIAL}, {exponential} of it"
            return EditFound(Kind.EXPONENTIAL, description, Logarithm(sign < 0))
    return None


def _added_constant(expected: np.ndarray, actual: np.ndarray) -> EditFound | None:
    """Find a constant that was added to each number."""
    stride = max(1, actual.size // SAMPLED)
    step = float(np.median((actual - expected).ravel()[::stride]))
    if abs(step) <= LEAST_OFFSET or not _is_offset(expected, actual, step):
        return None
    is_whole = round(step) != 0 and abs(step - round(step)) < WHOLE
    constant = round(step) if is_whole else step
    verb = "added" if step > 0 else "subtracted"
    return EditFound(Kind.OFFSET, f"{abs(constant):g} was {verb}", Offset(-constant))


def _is_exponential(expected: np.ndarray, actual: np.ndarray, sign: int) -> bool:
    """Return whether an array is the exponential of the expected one, of either sign."""
    with np.errstate(over="ignore"):
        exponential = sign * np.exp(expected)
    return bool(np.isfinite(exponential).all()) and same_numbers(exponential, actual)


def _is_offset(expected: np.ndarray, actual: np.ndarray, step: float) -> bool:
    """Return whether a constant explains a difference: most of it, not its rounding alone."""
    remainder = np.linalg.norm(actual - expected - step)
    explains = remainder <= UNEXPLAINED_BY_FACTORS * np.linalg.norm(actual - expected)
    return bool(explains) and same_numbers(expected + step, actual)


def _order_along(expected: np.ndarray, actual: np.ndarray, axis: int) -> np.ndarray | None:
    """Return the entries along an axis that make the expected array; None if there are none."""
    if expected.ndim == 1:
        return order_of_entries(expected, actual)
    if expected.shape[axis] < 2:
        return None
    rows = [
        np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (expected, actual)
    ]
    return permutation(rows[0], rows[1], ALIKE)


def _named_order(order: np.ndarray, axis: int, axes: int) -> EditFound:
    """Return the edit of entries along an axis that lie in another order."""
    is_last = axis == axes - 1
    kind = Kind.COLUMNS if is_last and axes > 1 else Kind.ROWS
    entries = f"entries along axis {axis}"
    if axes == 1:
        entries = "entries"
    elif axis == 0:
        entries = "rows"
    elif is_last and axes == 2:
        entries = "columns"
    named = name_permutation(order, SIZES)
    if named is None or not isinstance(named.edit, Permute):
        edit = Permute(axis, Listed(tuple(order.tolist())))
        return EditFound(kind, f"{entries} in another order", edit)
    predicate = named.description
    if not predicate.startswith("lie"):
        predicate = f"in another order: {predicate}"
    return EditFound(kind, f"{entries} {predicate}", Permute(axis, named.edit.order))


def _is_transposed(expected: np.ndarray, actual: np.ndarray) -> bool:
    """Return whether an array is the expected one with its last two axes exchanged."""
    if expected.ndim < 2 or expected.ndim != actual.ndim:
        return False
    turned = actual.swapaxes(-1, -2)
    return turned.shape == expected.shape and same_numbers(expected, turned)
