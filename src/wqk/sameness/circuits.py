"""The scores, the values and the scores of positions of a block, from its stored weights.

An invertible map between values and outputs leaves the output-value form W_v W_o of a head
unchanged, as a rotation of queries and keys leaves the scores unchanged. One computation compares
all these forms.

Axes: H query heads, G key heads, R head width, D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from wqk._machine import side_by_side
from wqk.attention import Block
from wqk.attention.factors import Factor, load_factor
from wqk.attention.rounding import rounding_of
from wqk.checkpoints import Checkpoint, Part
from wqk.families import AttentionPlan, Composed, Projection, Rotary, Side
from wqk.sameness.blocks import MANY, InputNorm, Rows, Scoring, as_exact_as

SCORES, VALUES, POSITIONS = CIRCUITS = "attention", "values", "scores of positions"

PlanPair = tuple[AttentionPlan, AttentionPlan]


def scorings(
    checkpoints: Sequence[Checkpoint], pair: PlanPair, circuit: str
) -> tuple[Scoring, Scoring] | None:
    """Return one of the `CIRCUITS` of two blocks, in equal terms; None if a block lacks one.

    If the family of a block is guessed, the block has the scale of the other block. If a rotation
    is unknown, both rotations are left out.
    """
    is_unknown = any(plan.rotation_unknown for plan in pair)
    is_large = math.prod(checkpoints[0].info(pair[0].query.tensor).shape) > MANY
    reference, candidate = side_by_side(
        _scoring,
        map(Block, checkpoints, pair),
        _folds_norms(pair),
        _counts_key_bias(pair),
        (circuit, circuit),
        many=is_large,
    )
    if reference is None or candidate is None:
        return None
    reference, candidate = _with_equal_columns(reference, candidate)
    if circuit != SCORES:
        return reference, candidate
    reference_plan, candidate_plan = pair
    reference_scale, candidate_scale = reference_plan.score_scale, candidate_plan.score_scale
    if reference_plan.rule.guess:
        reference_scale = candidate_plan.score_scale
    if candidate_plan.rule.guess:
        candidate_scale = reference_plan.score_scale
    reference_rotary, candidate_rotary = reference.rotary, candidate.rotary
    if candidate_plan.rotary:
        candidate_rotary = as_exact_as(reference_plan.rotary, candidate_plan.rotary)
    if is_unknown:
        # Rows may lie in any order of pairs: they are compared at distance 0 alone.
        reference_rotary = candidate_rotary = None
    return (
        replace(reference, scale=reference_scale, rotary=reference_rotary),
        replace(candidate, scale=candidate_scale, rotary=candidate_rotary),
    )


def _with_equal_columns(reference: Scoring, candidate: Scoring) -> tuple[Scoring, Scoring]:
    """Add a column for the norm's bias to both blocks if either block has such a bias."""
    query, candidate_query = _with_equal_shifts(reference.query, candidate.query)
    key, candidate_key = _with_equal_shifts(reference.key, candidate.key)
    return (
        replace(reference, query=query, key=key),
        replace(candidate, query=candidate_query, key=candidate_key),
    )


def _with_equal_shifts(reference: Rows, candidate: Rows) -> list[Rows]:
    """Add the bias of the norm after the projection to both blocks; zeros if absent.

    If neither block has such a bias, both are returned unchanged.
    """
    rows_of_models = [reference, candidate]
    if all(rows.score_norm_bias is None for rows in rows_of_models):
        return rows_of_models
    with_biases = []
    for rows in rows_of_models:
        if rows.score_norm_bias is None:
            rows = replace(rows, score_norm_bias=np.zeros(rows.weight.shape[:2]))
        with_biases.append(rows)
    return with_biases


def _folds_norms(pair: PlanPair) -> list[bool]:
    """Return for each block whether the norm before the block is folded in."""
    has_norm = [bool(plan.query.input_norm or plan.key.input_norm) for plan in pair]
    # A guess may miss a norm. Where names are known, a norm that is absent was folded in.
    if any(plan.rule.guess and not plan.rule.input_norm for plan in pair):
        return [all(has_norm)] * 2
    return has_norm


def _counts_key_bias(pair: PlanPair) -> list[bool]:
    """Return for each block whether the bias of keys changes scores."""
    # Terms of keys with positions contain the key's bias, too.
    counts = [plan.key_bias_counts or "key" in plan.position_uses for plan in pair]
    if not any(plan.rotation_unknown for plan in pair):
        return counts
    # If one rotation is unknown, the block with the known rotation decides for both.
    counts_if_known = [
        count for plan, count in zip(pair, counts, strict=True) if not plan.rotation_unknown
    ]
    return [any(counts_if_known or counts)] * 2


def sides_of(plan: AttentionPlan, circuit: str) -> tuple[Side, ...]:
    """Return the two sides of a circuit; empty if the plan does not contain the circuit."""
    if circuit == SCORES:
        return plan.query, plan.key
    if circuit == VALUES:
        if plan.value is None or plan.output is None:
            return ()
        return plan.output, plan.value
    if plan.positional is None:
        return ()
    return plan.positional.query, plan.positional.key


def form_parts(plan: AttentionPlan) -> Iterator[Part]:
    """Yield all parts of tensors in the forms of a block, with the norms before the block."""
    for circuit in CIRCUITS:
        yield from circuit_parts(plan, circuit)
    if plan.sinks is not None:
        yield plan.sinks


def circuit_parts(plan: AttentionPlan, circuit: str) -> Iterator[Part]:
    """Yield all parts of tensors in the forms of one circuit, with the norms before the block."""
    for side in sides_of(plan, circuit):
        if side is plan.output:
            yield from side.projection.roles.values()
            continue
        yield from side.parts
        if side.input_norm is not None:
            yield from (*side.input_norm.gain, *side.input_norm.bias)


def rotation_of(plan: AttentionPlan, circuit: str) -> Rotary | None:
    """Return the rotation of the two sides of a circuit by positions."""
    if circuit == SCORES:
        return plan.rotary or plan.axial
    if circuit != POSITIONS or plan.positional is None:
        return None
    rotary = plan.positional.rotary
    return rotary if rotary is not None and len(rotary.frequencies) else None


def _scoring(block: Block, folds_norm: bool, counts_key_bias: bool, circuit: str) -> Scoring | None:
    """Return one circuit of a block; None if the plan does not contain the circuit."""
    sides = sides_of(block.plan, circuit)
    if not sides:
        return None
    query_side, key_side = sides
    query, query_rounding = _rows_and_rounding(
        block, query_side, folds_norm=folds_norm and circuit == SCORES, has_bias=True
    )
    key, key_rounding = _rows_and_rounding(
        block,
        key_side,
        folds_norm=folds_norm and circuit != POSITIONS,
        has_bias=counts_key_bias or circuit != SCORES,
    )
    rounding = max(query_rounding, key_rounding)
    if circuit == POSITIONS:
        rounding *= 2
    return Scoring(
        query=query,
        key=key,
        scale=1.0 if circuit == VALUES else block.plan.score_scale,
        rotary=rotation_of(block.plan, circuit),
        rounding=rounding,
    )


def _rows_and_rounding(
    block: Block, side: Side, *, folds_norm: bool, has_bias: bool
) -> tuple[Rows, float]:
    """Read the rows of a side, and the relative rounding of their stored types.

    Parameters
    ----------
    block, side
        The block, and the side to read.
    folds_norm
        Whether the norm before the projection belongs to the rows.
    has_bias
        Whether the biases of the projection and of the norms count. A bias of keys adds one number
        to all scores of a query, and the softmax ignores such a number.

    Returns
    -------
    tuple of Rows and float
        The rows, and half the relative distance of neighboring numbers of the stored types. The
        distance is larger if the rows are products of several stored tensors.
    """
    parts = list(side.parts)
    stored: dict[Part, Any] = {}
    if isinstance(side.projection, Projection):
        # The block would keep the weight, which is needed only here.
        part = side.projection.part
        parts.remove(part)
        (stored[part],) = block.checkpoint.read([part])
    stored |= zip(parts, block.read(parts), strict=True)
    factor = load_factor(stored, side, block.checkpoint.name, contiguous=False)
    norm = None
    if folds_norm and side.input_norm is not None:
        gain, shift = block.gain(side.input_norm)
        norm = InputNorm(gain, shift if has_bias else None, side.input_norm.kind)
    rows = Rows(
        weight=factor.weight,
        bias=factor.bias if has_bias else None,
        norm=norm,
        score_norm_bias=_score_norm_bias(factor) if has_bias else None,
    )
    return rows, rounding_of(block, factor, side, _rounded_factors(side, factor, norm is not None))


def _rounded_factors(side: Side, factor: Factor, folds_norm: bool) -> float:
    """Count the stored factors of a side, because storing rounds each factor.

    A temperature is stored as its logarithm; the rounding of the logarithm affects the whole head.
    """
    count = 1.0
    if isinstance(side.projection, Composed):
        count += 2
    if folds_norm:
        count += 1
    if factor.gain is not None:
        count += 1
    if factor.temperature is not None:
        count += 3 * float(np.square(np.log(factor.temperature)).max())
    return count


def _score_norm_bias(factor: Factor) -> np.ndarray | None:
    """Return the bias of the norm after a projection, (heads, R); None without such a bias.

    The norm divides vectors by their size before the bias is added. Therefore the bias is
    multiplied by the root mean square of the rows' norms: the size of the vectors for inputs with
    independent entries.
    """
    if factor.shift is None or not factor.shift.any():
        return None
    shift = factor.shift
    if factor.temperature is not None:
        shift = shift * factor.temperature
    squares_of_rows = np.square(factor.stored_weight, dtype=np.float64).sum(axis=2)
    sizes = np.sqrt(squares_of_rows.mean(axis=1, keepdims=True))
    return np.asarray(shift * sizes)
