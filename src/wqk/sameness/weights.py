"""What a block does, from its stored weights: its scores, its values, its scores of positions.

The output-value form W_v W_o of each head does not see an invertible map between the two, as the
scores do not see a rotation between queries and keys; all are compared by one computation.

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
from wqk.sameness.blocks import MANY, Rows, Scoring, as_exact_as

SCORES, VALUES, POSITIONS = CIRCUITS = "attention", "values", "scores of positions"

Pair = tuple[AttentionPlan, AttentionPlan]


def scorings(
    checkpoints: Sequence[Checkpoint], pair: Pair, circuit: str
) -> tuple[Scoring, Scoring] | None:
    """What both blocks make of one of `CIRCUITS`, in the same terms; None if one does not tell it.

    What one of them does not know is the other's.
    """
    fed = [any(side.input_norm for side in (plan.query, plan.key)) for plan in pair]
    # A guess may miss a norm; where names are known, one that is not there is folded in.
    guesses = any(plan.rule.guess and not plan.rule.input_norm for plan in pair)
    norms = [all(fed)] * 2 if guesses else fed
    unknown = any(plan.rotation_unknown for plan in pair)
    # Terms of keys with positions hold the key's bias, too.
    counts = [p.key_bias_counts or "key" in p.position_uses for p in pair]
    if unknown:
        told = [count for p, count in zip(pair, counts, strict=True) if not p.rotation_unknown]
        counts = [any(told or counts)] * 2
    many = math.prod(checkpoints[0].info(pair[0].query.tensor).shape) > MANY
    blocks, circuits = map(Block, checkpoints, pair), (circuit, circuit)
    found = side_by_side(_scoring, blocks, norms, counts, circuits, many=many)
    a, b = found
    if a is None or b is None:
        return None
    a, b = _with_equal_columns(a, b)
    if circuit != SCORES:
        return a, b
    scales = [pair[1 - n if pair[n].rule.guess else n].score_scale for n in (0, 1)]
    turning = as_exact_as(pair[0].rotary, pair[1].rotary) if pair[1].rotary else b.rotary
    # Where not known, rows may lie in any order of pairs: they are compared at distance 0 alone.
    a = replace(a, scale=scales[0], rotary=None if unknown else a.rotary)
    return a, replace(b, scale=scales[1], rotary=None if unknown else turning)


def _with_equal_columns(a: Scoring, b: Scoring) -> tuple[Scoring, Scoring]:
    """Return both with a column for the bias of the norm of a side, if either has that bias."""
    both = [a, b]
    for name in ("query", "key"):
        sides: list[Rows] = [getattr(each, name) for each in both]
        if all(side.shift is None for side in sides):
            continue
        for number, side in enumerate(sides):
            if side.shift is None:
                zeros = np.zeros(side.weight.shape[:2])
                changed: dict[str, Any] = {name: replace(side, shift=zeros)}
                both[number] = replace(both[number], **changed)
    return both[0], both[1]


def sides_of(plan: AttentionPlan, circuit: str) -> tuple[Side, ...]:
    """The two sides that make a circuit; none where a block does not tell it."""
    if circuit == SCORES:
        return plan.query, plan.key
    if circuit == VALUES:
        return () if plan.value is None or plan.output is None else (plan.output, plan.value)
    return () if plan.positional is None else (plan.positional.query, plan.positional.key)


def form_parts(plan: AttentionPlan) -> Iterator[Part]:
    """Everything that the forms of a block hold: its scores', its values', and norms before."""
    for circuit in CIRCUITS:
        yield from circuit_parts(plan, circuit)
    if plan.sinks is not None:
        yield plan.sinks


def circuit_parts(plan: AttentionPlan, circuit: str) -> Iterator[Part]:
    """What the forms of one circuit hold, and norms before."""
    for side in sides_of(plan, circuit):
        is_output = side is plan.output
        yield from side.projection.roles.values() if is_output else side.parts
        if side.input_norm is not None and not is_output:
            yield from (*side.input_norm.gain, *side.input_norm.bias)


def rotation_of(plan: AttentionPlan, circuit: str) -> Rotary | None:
    """What turns the two sides of a circuit with positions."""
    if circuit == SCORES:
        return plan.rotary or plan.axial
    apart = plan.positional.rotary if circuit == POSITIONS and plan.positional else None
    return apart if apart is not None and len(apart.frequencies) else None


def _scoring(block: Block, norms: bool, key_bias: bool, circuit: str) -> Scoring | None:
    if not (sides := sides_of(block.plan, circuit)):
        return None
    folds = norms and circuit == SCORES, norms and circuit != POSITIONS
    biases = True, key_bias or circuit != SCORES
    (left, one), (right, other) = map(_rows, (block, block), sides, folds, biases)
    scale = block.plan.score_scale if circuit != VALUES else 1.0
    rounded = max(one, other) * (2 if circuit == POSITIONS else 1)
    return Scoring(left, right, scale, rotation_of(block.plan, circuit), rounded)


def _rows(block: Block, side: Side, norms: bool, biases: bool) -> tuple[Rows, float]:
    """A side's rows with what comes after them, and the norm before them; and its rounding."""
    parts, one = list(side.parts), side.projection
    stored: dict[Part, Any] = {}
    if isinstance(one, Projection):  # held once, and not kept by the block
        parts.remove(one.part)
        stored[one.part] = block.checkpoint.read([one.part])[0]
    stored |= zip(parts, block.read(parts), strict=True)
    factor = load_factor(stored, side, block.checkpoint.name)
    norm = None
    if norms and side.input_norm is not None:
        gain, shift = block.gain(side.input_norm)
        norm = (gain, shift if biases else None, side.input_norm.kind)
    # Of how many factors, each rounded when it was stored, a side is the product. A temperature is
    # stored as its logarithm, whose rounding is that of the whole head.
    count = 1.0 + 2 * isinstance(side.projection, Composed) + (norm is not None)
    count += factor.gain is not None
    if factor.temperature is not None:
        count += 3 * float(np.square(np.log(factor.temperature)).max())
    bias = factor.bias if biases else None
    shift = _shift_of(factor) if biases else None
    return Rows(factor.weight, bias, norm, shift), rounding_of(block, factor, side, count)


def _shift_of(factor: Factor) -> np.ndarray | None:
    """Return the bias of the norm after a projection, (heads, R); None without one.

    Vectors are divided by their size before the bias is added. Therefore the bias is multiplied by
    the root mean square of the rows' norms, which is their size for inputs of independent entries.
    """
    if factor.shift is None or not factor.shift.any():
        return None
    shift = factor.shift if factor.temperature is None else factor.shift * factor.temperature
    squares = np.square(factor.stored_weight, dtype=np.float64).sum(axis=2)
    sizes = np.sqrt(squares.mean(axis=1, keepdims=True))
    return np.asarray(shift * sizes)
