"""Factors of forms: arrays of any library, stacks of them, and what an index takes of a stack."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
from array_api_compat import array_namespace, is_array_api_obj

from wqk._typing import Array
from wqk.errors import FormError
from wqk.forms import kernels


def as_array(values: Any) -> Array:
    """An array as it is; nested lists, and lists of arrays, as one array of real numbers."""
    if is_array_api_obj(values):
        return values
    if hasattr(values, "weight"):
        raise FormError(
            f"expected arrays, got the module {type(values).__name__}; use "
            "BilinearForm.from_linear(q_proj, k_proj)"
        )
    if hasattr(values, "query") and hasattr(values, "key"):
        raise FormError("expected arrays, got a form; use form.query and form.key, or form.dense()")
    if isinstance(values, list | tuple) and values and is_array_api_obj(values[0]):
        return array_namespace(*values).stack(list(values))
    try:
        array = np.asarray(values)
    except ValueError as error:
        raise FormError(f"expected an array or nested lists of one shape: {error}") from None
    if array.dtype.kind not in "biufc":
        raise FormError(
            f"expected an array or nested lists of numbers, got {type(values).__name__}; a model's "
            "forms are wqk.open(model)[layer].form and wqk.open(model)[layer, head]"
        )
    return array.astype(float) if array.dtype.kind in "iub" else array


def linear_weight(projection: Any) -> Array:
    """The weight (out, in) of an ``nn.Linear``, or such a weight itself."""
    weight = projection if is_array_api_obj(projection) else getattr(projection, "weight", None)
    weight = as_array(projection if weight is None else weight)
    expected = getattr(projection, "out_features", None), getattr(projection, "in_features", None)
    is_module = hasattr(projection, "weight")
    if weight.ndim != 2 or (is_module and tuple(weight.shape) != expected):
        raise FormError(
            f"expected an nn.Linear, or its weight (out, in), got {type(projection).__name__} with "
            f"a weight of shape {tuple(weight.shape)}; wqk.open reads other models"
        )
    return weight


def is_number(index: Any) -> bool:
    """Whether an index selects one row or column, not several."""
    return hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0


def axes_taken(index: Any) -> int:
    """How many axes an index takes: a boolean mask takes as many as it has."""
    return index.ndim if "bool" in str(getattr(index, "dtype", "")) else 1


def kept(index: Any, count: int) -> Any:
    """An index of rows or columns that keeps their axis."""
    if not is_number(index):
        return index
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of bounds for {count} rows or columns")
    return slice(number % count, number % count + 1)


def common_stack(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    """The common shape of two stacks."""
    try:
        return np.broadcast_shapes(a, b)
    except ValueError:
        raise FormError(f"the stacks of query and key must broadcast, got {a} and {b}") from None


def stacked_as(factor: Array, stack: tuple[int, ...]) -> Array:
    """A factor broadcast to a stack's shape."""
    return array_namespace(factor).broadcast_to(factor, (*stack, *factor.shape[-2:]))


def side_by_side(a: Array, b: Array) -> Array:
    """Concatenate along the rank, after broadcasting the stacks."""
    stack = common_stack(tuple(a.shape[:-2]), tuple(b.shape[:-2]))
    return array_namespace(a, b).concat([stacked_as(a, stack), stacked_as(b, stack)], axis=-1)


def total(factor: Array, xp: Any) -> Array:
    """The sum of (..., S, D, R) over S, in float64 if float32 cannot hold it."""
    if factor.shape[-3] == 1:
        return factor[..., 0, :, :]
    with np.errstate(over="ignore", invalid="ignore"):
        total = xp.sum(factor, axis=-3)
        fits = bool(xp.isfinite(xp.sum(total)))
    if kernels.bits(factor, xp) < 64 and not fits:
        return xp.sum(xp.astype(factor, xp.float64), axis=-3)
    return total


def joined(factor: Array, xp: Any) -> Array:
    """Reshape (..., S, D, R) to (..., D, S·R): a view if the factor is a transposed weight."""
    *stack, count, width, rank = factor.shape
    transposed = xp.matrix_transpose(factor)
    return xp.matrix_transpose(xp.reshape(transposed, (*stack, count * rank, width)))
