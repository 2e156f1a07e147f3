"""Whether the tensors of a plan have the shapes that the rest of it asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from wqk.checkpoints import Part, TensorInfo
from wqk.errors import CheckpointError
from wqk.families.layouts import Composed

if TYPE_CHECKING:
    from wqk.families.layouts import Norm, Projection
    from wqk.families.plans import AttentionPlan
    from wqk.families.sides import Side


def require_fitting(plan: AttentionPlan, tensors: Mapping[str, TensorInfo]) -> None:
    """Check the shapes of everything that may be read for a block.

    Of queries, keys, values and outputs, their biases, and the norms around them. Raises
    `CheckpointError`, naming the tensor, what it should be, and what it is.
    """
    sides = [plan.query, plan.key, plan.value, plan.output]
    if plan.positional is not None:
        sides += [plan.positional.query, plan.positional.key]
    inputs = [(side, _inputs(side, tensors)) for side in sides if side is not None]
    widths = {side.tensor: width for side, width in inputs if side in (plan.query, plan.key)}
    if plan.kind == "self" and not plan.rule.guess and len(set(widths.values())) > 1:
        (name, width), (other, found) = widths.items()
        raise CheckpointError(
            f"{other} takes inputs of width {found}, and {name} of width {width}; queries and "
            "keys of self-attention read the same vectors"
        )
    for side, width in inputs:
        _require_small(side, width, tensors)
    if plan.sinks is not None:
        _require_entries(plan.sinks, (plan.query.heads,), tensors, "one for each query head")
    value, output = plan.value, plan.output
    if (
        value is not None
        and output is not None
        and (value.head_width != output.head_width or output.heads % value.heads)
    ):
        raise CheckpointError(
            f"{output.tensor} takes the outputs of {output.heads} heads of width "
            f"{output.head_width}, and {value.tensor} makes values of {value.heads} heads of width "
            f"{value.head_width}"
        )


def _inputs(side: Side, tensors: Mapping[str, TensorInfo]) -> int:
    """The width of what a side projects; an error if its matrices do not fit together."""
    projection = side.projection
    if not isinstance(projection, Composed):
        return _columns(projection, tensors)
    outer, inner = _columns(projection.outer, tensors), _columns(projection.inner, tensors)
    latent = projection.inner.heads * projection.inner.head_width
    if outer != latent:
        raise CheckpointError(
            f"{projection.outer.tensor} takes a latent of width {outer}, and "
            f"{projection.inner.tensor} makes one of width {latent}"
        )
    for part in (*projection.norm.gain, *projection.norm.bias):
        _require_entries(part, (latent,), tensors, "one for each entry of the latent")
    return inner


def _columns(projection: Projection, tensors: Mapping[str, TensorInfo]) -> int:
    """How many inputs a projection has, its outputs checked."""
    shape = tensors[projection.tensor].shape
    if projection.stacked:
        return shape[1] if projection.transposed else shape[2]
    if len(shape) != 2 or 0 in shape:
        raise CheckpointError(f"{projection.tensor} must be a matrix, got shape {shape}")
    inputs, outputs = shape if projection.transposed else shape[::-1]
    wanted = projection.heads * projection.head_width
    ranges = projection.outputs if projection.outputs is not None else ((0, outputs),)
    if sum(stop - start for start, stop in ranges) != wanted or ranges[-1][1] > outputs:
        raise CheckpointError(
            f"{projection.tensor}: {outputs} outputs do not hold {projection.heads} heads of width "
            f"{projection.head_width}"
        )
    return inputs


def _require_small(side: Side, width: int, tensors: Mapping[str, TensorInfo]) -> None:
    """Check a side's bias, norms and temperature."""
    heads, outputs = side.heads, side.heads * side.head_width
    if side.bias is not None:
        _require_entries(side.bias, (outputs,), tensors, "one for each output")
    if side.temperature is not None:
        _require_entries(side.temperature.logarithm, (heads,), tensors, "one for each head")
    if side.norm is not None:
        _require_norm(side.norm, (side.head_width, outputs), tensors, "of a head, or of all")
    if side.input_norm is not None:
        _require_norm(side.input_norm, (width,), tensors, "as wide as what is projected")


def _require_norm(
    norm: Norm, widths: tuple[int, ...], tensors: Mapping[str, TensorInfo], what: str
) -> None:
    for parts in (norm.gain, norm.bias):
        if len(parts) == 1:
            _require_entries(parts[0], widths, tensors, what)
        for part in parts[1:] and parts:  # each head has its own
            _require_entries(part, widths[:1], tensors, what)


def _require_entries(
    part: Part, counts: tuple[int, ...], tensors: Mapping[str, TensorInfo], what: str
) -> None:
    shape = tensors[part.name].shape
    if math.prod(part.shape(shape)) not in counts:
        wanted = " or ".join(map(str, dict.fromkeys(counts)))
        raise CheckpointError(f"{part.name} must have {wanted} entries, {what}, got shape {shape}")
