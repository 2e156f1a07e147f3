"""The edit that makes one tensor outside attention equal to the expected tensor.

The order of the search: one number everywhere, an added constant, a factor, an exponential,
exchanged axes, orders of the entries along one axis.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wqk._console import few, spans
from wqk.sameness.axis_orders import Listed, Stretches
from wqk.sameness.edits import (
    Edit,
    ExchangeLastAxes,
    Logarithm,
    Offset,
    Permute,
    Scale,
    Take,
    Transpose,
    Within,
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

# Number of entries for the median difference, a possible added constant.
SAMPLED_ENTRIES = 1 << 16

# Numbers by which orders of rows are named: rows of feed-forward networks make no heads.
SIZES_WITHOUT_HEADS = Sizes(2, 2, 1)


class TensorEdit(NamedTuple):
    """An edit that makes a tensor equal to the expected tensor.

    Attributes
    ----------
    kind, description
        The cause, and its description as a phrase.
    edit
        The edit of the stored tensor.
    facts
        Numbers behind the description, by name.
    """

    kind: Kind
    description: str
    edit: Edit
    facts: Mapping[str, Any] = {}


def find_edit(expected: np.ndarray, actual: np.ndarray) -> TensorEdit | None:
    """Return the edit of a tensor that has the expected shape; None if no edit is known."""
    if not np.isfinite(actual).all():
        return None
    if not actual.any():
        return TensorEdit(Kind.ZERO, str(Kind.ZERO), Take())
    if np.ptp(actual) == 0 and actual.size > 1:
        return TensorEdit(Kind.CONSTANT, f"{Kind.CONSTANT}: all are {actual.flat[0]:g}", Take())
    finding = _find_arithmetic(expected, actual)
    if finding is not None:
        return finding
    if is_transposed(expected, actual):
        if expected.ndim == 2:
            return TensorEdit(Kind.TRANSPOSED, "stored transposed", Transpose())
        description = "stored with the last two axes exchanged"
        return TensorEdit(Kind.TRANSPOSED, description, ExchangeLastAxes())
    for axis in range(expected.ndim):
        order = _order_along(expected, actual, axis)
        if order is not None:
            return _edit_of_order(order, axis, expected.ndim)
    return None


def find_scaled_rows(expected: np.ndarray, actual: np.ndarray) -> TensorEdit | None:
    """Return the edit of some rows or columns of a matrix that were scaled by one factor.

    Examples
    --------
    >>> expected = np.arange(12.0).reshape(6, 2)
    >>> actual = expected * np.array([1, 1, 1, -2, -2, 1])[:, None]
    >>> find_scaled_rows(expected, actual).description
    'rows 3-4 scaled by -2'
    """
    if expected.ndim != 2 or not np.isfinite(actual).all():
        return None
    for axis, noun in ((0, "row"), (1, "column")):
        numbers = np.flatnonzero((expected != actual).any(axis=1 - axis))
        if not 0 < len(numbers) < expected.shape[axis]:
            continue
        stretches = Stretches.of(numbers)
        if not np.array_equal(stretches.indices, numbers):
            continue
        changed_expected, changed_actual = (
            np.take(array, numbers, axis) for array in (expected, actual)
        )
        if not changed_expected.any():
            continue
        fit = fit_factor(changed_expected, changed_actual)
        is_factor = abs(fit.factor - 1) > SAME_FACTOR
        if not is_factor or not same_numbers(fit.factor * changed_expected, changed_actual):
            continue
        plural = "" if len(numbers) == 1 else "s"
        description = f"{noun}{plural} {ranges_in_words(numbers)} scaled by {fit.factor:.4g}"
        edit = Within(axis, stretches, Scale(fit.factor))
        return TensorEdit(Kind.SCALED, description, edit, fit.facts())
    return None


def ranges_in_words(numbers: Sequence[int] | np.ndarray) -> str:
    """Return the ranges of row numbers, or the first ranges and the number of further ranges.

    Examples
    --------
    >>> ranges_in_words([0, 1, 4, 5, 8, 9, 12, 13])
    '0-1, 4-5, 8-9 and 1 more'
    """
    return few(spans([*map(int, numbers)]).split(", "))


def _find_arithmetic(expected: np.ndarray, actual: np.ndarray) -> TensorEdit | None:
    """Return an edit of each number that undoes an added constant, a factor, or an exponential."""
    offset = _find_added_constant(expected, actual)
    if offset is not None:
        return offset
    square = max(np.vdot(expected, expected), TINY)
    factor = float(np.vdot(expected, actual) / square)
    if abs(factor - 1) > SAME_FACTOR and same_numbers(factor * expected, actual):
        fit = fit_factor(expected, actual)
        description = f"scaled by {fit.factor:.4g}"
        return TensorEdit(Kind.SCALED, description, Scale(fit.factor), fit.facts())
    for sign, name in ((-1, "−exp"), (1, "exp")):
        # The first row rules most tensors out.
        may_be_exponential = _is_exponential(expected[:1], actual[:1], sign)
        if may_be_exponential and _is_exponential(expected, actual, sign):
            description = f"{Kind.EXPONENTIAL}, {name} of it"
            return TensorEdit(Kind.EXPONENTIAL, description, Logarithm(sign < 0))
    return None


def _find_added_constant(expected: np.ndarray, actual: np.ndarray) -> TensorEdit | None:
    """Return the edit that undoes an added constant; None if there is no constant."""
    stride = max(1, actual.size // SAMPLED_ENTRIES)
    differences = (actual - expected).ravel()
    fitted = float(np.median(differences[::stride]))
    if abs(fitted) <= LEAST_OFFSET or not _is_offset(expected, actual, fitted):
        return None
    is_whole = round(fitted) != 0 and abs(fitted - round(fitted)) < WHOLE
    constant = round(fitted) if is_whole else fitted
    verb = "added" if fitted > 0 else "subtracted"
    return TensorEdit(Kind.OFFSET, f"{abs(constant):g} was {verb}", Offset(-constant))


def _is_exponential(expected: np.ndarray, actual: np.ndarray, sign: int) -> bool:
    """Return whether an array is the exponential of the expected array, up to a sign."""
    with np.errstate(over="ignore"):
        exponential = sign * np.exp(expected)
    return bool(np.isfinite(exponential).all()) and same_numbers(exponential, actual)


def _is_offset(expected: np.ndarray, actual: np.ndarray, constant: float) -> bool:
    """Return whether a constant explains most of a difference, and not only its rounding."""
    difference = actual - expected
    remainder = np.linalg.norm(difference - constant)
    explains = remainder <= UNEXPLAINED_BY_FACTORS * np.linalg.norm(difference)
    return bool(explains) and same_numbers(expected + constant, actual)


def _order_along(expected: np.ndarray, actual: np.ndarray, axis: int) -> np.ndarray | None:
    """Return the order of the entries along an axis that makes the expected array.

    None if no order does, or if all entries are in place.
    """
    if expected.ndim == 1:
        return order_of_entries(expected, actual)
    if expected.shape[axis] < 2:
        return None
    expected_rows, actual_rows = (
        np.moveaxis(array, axis, 0).reshape(array.shape[axis], -1) for array in (expected, actual)
    )
    return permutation(expected_rows, actual_rows, ALIKE)


def _edit_of_order(order: np.ndarray, axis: int, axes: int) -> TensorEdit:
    """Return the edit that reorders the entries along an axis."""
    is_last = axis == axes - 1
    kind = Kind.COLUMNS if is_last and axes > 1 else Kind.ROWS
    entries = f"entries along axis {axis}"
    if axes == 1:
        entries = "entries"
    elif axis == 0:
        entries = "rows"
    elif is_last and axes == 2:
        entries = "columns"
    named = name_permutation(order, SIZES_WITHOUT_HEADS)
    if named is None or not isinstance(named.edit, Permute):
        edit = Permute(axis, Listed(tuple(order.tolist())))
        return TensorEdit(kind, f"{entries} in another order", edit)
    predicate = named.description
    if not predicate.startswith("lie") and not predicate.endswith("exchanged"):
        predicate = f"in another order: {predicate}"
    return TensorEdit(kind, f"{entries} {predicate}", Permute(axis, named.edit.order))


def is_transposed(expected: np.ndarray, actual: np.ndarray) -> bool:
    """Return whether an array is the expected array with its last two axes exchanged."""
    if expected.ndim < 2 or expected.ndim != actual.ndim:
        return False
    turned = actual.swapaxes(-1, -2)
    return turned.shape == expected.shape and same_numbers(expected, turned)
