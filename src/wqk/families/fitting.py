"""Checks of shapes: all tensors of a block must fit together."""

from __future__ import annotations

import math

from wqk.checkpoints import Part
from wqk.checkpoints.checkpoint import Tensors
from wqk.errors import CheckpointError
from wqk.families.expressions import PLAIN_KEY
from wqk.families.layouts import MISFIT, Composed, Norm, Projection
from wqk.families.plans import AttentionPlan
from wqk.families.sides import Side


def require_fitting(plan: AttentionPlan, tensors: Tensors) -> None:
    """Check the shapes of all tensors that may be read for a block.

    These are the tensors of queries, keys, values and outputs, with their biases and norms.

    Raises
    ------
    CheckpointError
        A shape is wrong. The message contains the tensor, the expected shape and the actual shape.
    """
    _require_matching_heads(plan)
    sides = [plan.query, plan.key, plan.value, plan.output]
    if plan.positional is not None:
        sides += [plan.positional.query, plan.positional.key]
    input_widths = [(side, _input_width(side, tensors)) for side in sides if side is not None]
    if plan.kind == "self" and not plan.rule.guess:
        _require_equal_inputs(plan, tensors)
    for side, width in input_widths:
        _require_vectors(side, width, tensors)
    if plan.sinks is not None:
        _require_entries(plan.sinks, (plan.query.heads,), tensors, "one for each query head")
    value, output = plan.value, plan.output
    if value is None or output is None:
        return
    if value.head_width != output.head_width or output.heads % value.heads:
        raise CheckpointError(
            f"{output.tensor}: takes the outputs of {output.heads} heads of width "
            f"{output.head_width}, and {value.tensor} makes values of {value.heads} heads of width "
            f"{value.head_width}; {MISFIT}"
        )


def _require_matching_heads(plan: AttentionPlan) -> None:
    """Check for one head width, and for key heads that divide the query heads."""
    query, key = plan.query, plan.key
    if query.head_width != key.head_width or query.heads % key.heads:
        raise CheckpointError(
            f"{query.heads} query heads of width {query.head_width} do not fit "
            f"{key.heads} key heads of width {key.head_width} in layer {plan.layer} of the "
            f"{plan.rule.stack}; expected one width, and a number of key heads that divides that "
            f"of query heads; {_fitting_key_heads(plan)}"
        )


def _fitting_key_heads(plan: AttentionPlan) -> str:
    """Return advice that ends a message: the number of key heads that fits the shapes, if any."""
    query, key = plan.query, plan.key
    key_heads, remainder = divmod(key.heads * key.head_width, query.head_width)
    names = [name for name in plan.rule.key_heads if PLAIN_KEY.fullmatch(name)]
    if remainder or not key_heads or query.heads % key_heads or not names:
        return MISFIT
    correction = f"give key_heads={key_heads}"
    if names[0] != "key_heads":  # the number is the configuration's, not the caller's
        nested = f"{plan.rule.config}." if plan.rule.config else ""
        correction = f"set {nested}{' or '.join(names)} to {key_heads} in config.json"
    return f"{correction}, or use another family (family=NAME)"


def _require_equal_inputs(plan: AttentionPlan, tensors: Tensors) -> None:
    """Check that queries and keys of self-attention have inputs of the same width."""
    query_width, key_width = (_input_width(side, tensors) for side in (plan.query, plan.key))
    if query_width != key_width:
        raise CheckpointError(
            f"{plan.key.tensor}: takes inputs of width {key_width}, and {plan.query.tensor} of "
            f"width {query_width}; queries and keys of self-attention read the same vectors; "
            f"{MISFIT}"
        )


def _input_width(side: Side, tensors: Tensors) -> int:
    """Return the width of the vectors that a side projects.

    Raises
    ------
    CheckpointError
        The matrices of the side do not fit together.
    """
    projection = side.projection
    if not isinstance(projection, Composed):
        return _columns(projection, tensors)
    outer = _columns(projection.outer, tensors)
    inner = _columns(projection.inner, tensors)
    latent = projection.inner.heads * projection.inner.head_width
    if outer != latent:
        raise CheckpointError(
            f"{projection.outer.tensor}: takes a latent of width {outer}, and "
            f"{projection.inner.tensor} makes one of width {latent}; {MISFIT}"
        )
    biases = () if projection.bias is None else (projection.bias,)
    for part in (*projection.norm.gain, *projection.norm.bias, *biases):
        _require_entries(part, (latent,), tensors, "one for each entry of the latent")
    return inner


def _columns(projection: Projection, tensors: Tensors) -> int:
    """Return the number of inputs of a projection; `CheckpointError` if its outputs do not fit."""
    shape = tensors[projection.tensor].shape
    if projection.axes is not None:
        return shape[projection.axes[2]]
    if projection.groups:
        shape = (shape[0], shape[1] * projection.groups)
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{projection.tensor}: must be a matrix, got shape {shape}; {MISFIT}")
    inputs, outputs = shape if projection.transposed else reversed(shape)
    ranges = projection.outputs if projection.outputs is not None else ((0, outputs),)
    used_outputs = sum(stop - start for start, stop in ranges)
    expected_outputs = projection.heads * projection.head_width
    if used_outputs != expected_outputs or ranges[-1][1] > outputs:
        raise CheckpointError(
            f"{projection.tensor}: {outputs} outputs do not hold {projection.heads} heads of width "
            f"{projection.head_width}; {MISFIT}"
        )
    return inputs


def _require_vectors(side: Side, input_width: int, tensors: Tensors) -> None:
    """Check the bias, the norms and the temperature of a side."""
    outputs = side.heads * side.head_width
    if side.bias is not None:
        _require_entries(side.bias, (outputs,), tensors, "one for each output")
    if side.temperature is not None:
        if side.temperature.of_head:
            count, meaning = side.heads, "one for each head"
        else:
            count, meaning = side.head_width, "one for each dimension of a head"
        _require_entries(side.temperature.stored, (count,), tensors, meaning)
    if side.norm is not None:
        _require_norm(side.norm, (side.head_width, outputs), tensors, "of a head, or of all")
    if side.input_norm is not None:
        _require_norm(side.input_norm, (input_width,), tensors, "as wide as what is projected")


def _require_norm(norm: Norm, widths: tuple[int, ...], tensors: Tensors, meaning: str) -> None:
    """Check the width of gains and biases: a given width, or the first width for each head."""
    for parts in (norm.gain, norm.bias):
        possible = widths if len(parts) == 1 else widths[:1]
        for part in parts:
            _require_entries(part, possible, tensors, meaning)


def _require_entries(part: Part, counts: tuple[int, ...], tensors: Tensors, meaning: str) -> None:
    """Check that the number of entries of a part is one of ``counts``."""
    shape = tensors[part.name].shape
    if math.prod(part.shape(shape)) not in counts:
        expected = " or ".join(map(str, dict.fromkeys(counts)))
        raise CheckpointError(
            f"{part.name}: must have {expected} entries, {meaning}, got shape {shape}; {MISFIT}"
        )
