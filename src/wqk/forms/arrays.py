"""Arrays of NumPy, PyTorch, JAX and other libraries: conversion, indices of forms, and stacks.

``xp`` is the library of an array: a module with the functions of the array API.

Axes: ``...`` a stack of forms, S one axis of the stack, D width, R rank.
"""

from __future__ import annotations

import operator
from typing import Any

import array_api_compat
import numpy as np
from array_api_compat import is_array_api_obj

from wqk._typing import Array, Float
from wqk.errors import FormError


def array_namespace(*arrays: Any) -> Any:
    """Return the module that computes with these arrays.

    For NumPy arrays this is NumPy itself, which follows the array API since version 2.1. The
    wrapper of NumPy in array-api-compat takes .09 s to import, a sixth of a small scan.

    Examples
    --------
    >>> array_namespace(np.eye(2), 1.0).__name__
    'numpy'
    """
    if all(isinstance(array, np.ndarray | np.generic | float | int | None) for array in arrays):
        return np
    return array_api_compat.array_namespace(*arrays)


def as_array(values: Any) -> Array:
    """Convert nested lists, or a list of arrays, to one array; return an array unchanged.

    Raises
    ------
    FormError
        The values are a module, a form, ragged lists, or no numbers.
    """
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


def linear_weight(projection: Any) -> Float[Array, "out in"]:
    """Return the weight (out, in) of an ``nn.Linear``; return an array unchanged.

    Raises
    ------
    FormError
        The weight does not have two axes, or a module's weight is stored in another order.
    """
    weight = None if is_array_api_obj(projection) else getattr(projection, "weight", None)
    if weight is None:
        weight = projection
    weight = as_array(weight)
    shape_of_linear = (
        getattr(projection, "out_features", None),
        getattr(projection, "in_features", None),
    )
    is_module = hasattr(projection, "weight")
    if weight.ndim != 2 or (is_module and tuple(weight.shape) != shape_of_linear):
        raise FormError(
            f"expected an nn.Linear, or its weight (out, in), got {type(projection).__name__} with "
            f"a weight of shape {tuple(weight.shape)}; wqk.open reads other models"
        )
    return weight


def widen(query: Array, key: Array) -> tuple[Array, Array]:
    """Convert both factors to a common type, at least float32; sums in half precision overflow.

    Raises
    ------
    FormError
        The entries are not real floating-point numbers of at most 64 bits.
    """
    xp = array_namespace(query, key)
    for factor in (query, key):
        if not xp.isdtype(factor.dtype, "real floating") or bits(factor, xp) > 64:
            raise FormError(
                f"factors must hold real numbers, float16 to float64, got {factor.dtype}"
            )
    common = xp.result_type(query.dtype, key.dtype, xp.float32)
    return xp.astype(query, common, copy=False), xp.astype(key, common, copy=False)


def on_host(array: Array) -> np.ndarray:
    """Return an array of any library as NumPy's, without gradient."""
    return np.asarray(array.detach().cpu() if hasattr(array, "detach") else array)


def bits(array: Array, xp: Any) -> int:
    """Return the width of an array's floating-point type: 16, 32 or 64."""
    return int(xp.finfo(array.dtype).bits)


def is_number(index: Any) -> bool:
    """Return whether an index selects a single row or column."""
    return hasattr(index, "__index__") and getattr(index, "ndim", 0) == 0


def axes_taken(index: Any) -> int:
    """Return the number of axes that an index consumes: a mask consumes all its axes."""
    is_mask = "bool" in str(getattr(index, "dtype", ""))
    return index.ndim if is_mask else 1


def keep_axis(index: Any, count: int) -> Any:
    """Return an index that selects the same rows or columns, of ``count``, and keeps the axis.

    Examples
    --------
    >>> keep_axis(-1, 5), keep_axis([0, 2], 5)
    (slice(4, 5, None), [0, 2])
    """
    if not is_number(index):
        return index
    number = operator.index(index)
    if not -count <= number < count:
        raise IndexError(f"index {number} is out of bounds for {count} rows or columns")
    return slice(number % count, number % count + 1)


def common_stack(query_stack: tuple[int, ...], key_stack: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape to which the stacks of query and key broadcast.

    Raises
    ------
    FormError
        The stacks do not broadcast.
    """
    try:
        return np.broadcast_shapes(query_stack, key_stack)
    except ValueError:
        raise FormError(
            f"the stacks of query and key must broadcast, got {query_stack} and {key_stack}"
        ) from None


def stacked_as(factor: Float[Array, "... d r"], stack: tuple[int, ...]) -> Float[Array, "... d r"]:
    """Return a factor broadcast to a stack's shape."""
    return array_namespace(factor).broadcast_to(factor, (*stack, *factor.shape[-2:]))


def side_by_side(
    left: Float[Array, "... d r_left"], right: Float[Array, "... d r_right"]
) -> Float[Array, "... d r"]:
    """Concatenate two factors along the rank, after broadcasting the stacks."""
    stack = common_stack(tuple(left.shape[:-2]), tuple(right.shape[:-2]))
    factors = [stacked_as(left, stack), stacked_as(right, stack)]
    return array_namespace(left, right).concat(factors, axis=-1)


def total(factor: Float[Array, "... s d r"], xp: Any) -> Float[Array, "... d r"]:
    """Return the sum of (..., S, D, R) over S, in float64 if float32 cannot hold it."""
    if factor.shape[-3] == 1:
        return factor[..., 0, :, :]
    with np.errstate(over="ignore", invalid="ignore"):
        summed = xp.sum(factor, axis=-3)
        fits = bool(xp.isfinite(xp.sum(summed)))
    if bits(factor, xp) < 64 and not fits:
        return xp.sum(xp.astype(factor, xp.float64), axis=-3)
    return summed


def joined(factor: Float[Array, "... s d r"], xp: Any) -> Float[Array, "... d sr"]:
    """Reshape (..., S, D, R) to (..., D, S·R): a view if the factor is a transposed weight."""
    *stack, count, width, rank = factor.shape
    transposed = xp.matrix_transpose(factor)
    return xp.matrix_transpose(xp.reshape(transposed, (*stack, count * rank, width)))
