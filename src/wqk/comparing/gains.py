"""Mistakes in what stands around the weights: biases, and the gains and biases of norms."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from wqk.comparing import mistakes
from wqk.comparing.mistakes import of_vector, reorders
from wqk.comparing.weights import SIDES, Attempt, StoredBlock, Weights

# Values that differ by less than this, relative to the largest, are the same gains or biases.
SAME = 2e-2


def rotated(block: StoredBlock, weights: Weights) -> int:
    """How many dimensions of a head turn with positions; all of them without rotary ones."""
    rotary = block.rotary
    return 2 * len(rotary.frequencies) if rotary is not None else weights.width


def alike(ours: np.ndarray | None, theirs: np.ndarray | None) -> bool:
    """Whether two vectors are the same, up to rounding."""
    if ours is None or theirs is None:
        return (ours is None or not ours.any()) and (theirs is None or not theirs.any())
    if ours.shape != theirs.shape:
        return False
    return bool(np.abs(ours - theirs).max() <= SAME * max(np.abs(ours).max(), 1e-30))


def biases_repaired(a: StoredBlock, attempt: Attempt) -> Attempt:
    """The biases as in the first block."""
    for side in SIDES:
        ours, theirs = a.side(side), attempt.block.side(side)
        bias = theirs.bias
        if alike(ours.bias, bias) or (side == "key" and not a.key_bias):
            continue
        if ours.heads != theirs.heads:
            continue
        other = a.side(SIDES[1 - SIDES.index(side)])
        reason, repair = f"other biases of the {side}", ""
        if bias is None or not bias.any():
            reason = f"biases of the {side} are missing"
            repair = "b = original"
        elif ours.bias is None:
            reason, repair = f"biases of the {side} that the original lacks", "b[:] = 0"
        elif alike(other.bias, bias):
            reason = f"the {side} has the biases of the {SIDES[1 - SIDES.index(side)]}"
            repair = "b_q, b_k = b_k, b_q"
        else:
            for step in reorders(ours.heads, ours.width, rotated(a, ours)):
                if alike(ours.bias, bias[step.rows]):
                    reason = "biases were not reordered along with the weights' rows"
                    repair = of_vector(step.code, "b")
                    break
        named = mistakes.other_bias(f"same weights, {reason}", repair, (side,))
        attempt = attempt.with_side(side, theirs.changed(bias=ours.bias), named)
    return attempt


def norms_repaired(a: StoredBlock, attempt: Attempt) -> Attempt:
    """The gains of norms before and after the projection."""
    start = attempt
    for side in SIDES:
        ours, theirs = a.side(side), attempt.block.side(side)
        for what, gains, offsets in (
            ("before the projection", (ours.gain, theirs.gain), (0.0, 0.0)),
            ("before the score", (ours.factor.gain, theirs.factor.gain), _offsets(ours, theirs)),
        ):
            if gains[0] is None or gains[1] is None or gains[0].shape != gains[1].shape:
                continue
            wanted, has = gains[0] + offsets[0], gains[1] + offsets[1]
            if alike(wanted, has):
                continue
            reason, repair = _gains(wanted, has, ours)
            named = mistakes.other_norm(f"norm {what}: {reason}", repair, (side,))
            weights = attempt.block.side(side)
            if what == "before the projection":
                weights = replace(weights, gain=wanted)
            else:
                weights = weights.changed(after=wanted - offsets[1])
            attempt = attempt.with_side(side, weights, named)
        weights = attempt.block.side(side)
        if not alike(ours.shift, weights.shift):
            named = mistakes.other_norm(
                "norm before the projection: other biases",
                "norm.bias = original",
                (side,),
            )
            attempt = attempt.with_side(side, replace(weights, shift=ours.shift), named)
    return attempt if attempt.found != start.found else start


def _offsets(ours: Weights, theirs: Weights) -> tuple[float, float]:
    first, second = (
        weights.factor.side.norm.offset if weights.factor.side.norm else 0.0
        for weights in (ours, theirs)
    )
    return first, second


def _gains(wanted: np.ndarray, has: np.ndarray, ours: Weights) -> tuple[str, str]:
    if alike(wanted, has + 1):
        return "gains are read as stored, but are differences from 1", "gain = 1 + gain"
    if alike(wanted, has - 1):
        return "gains have 1 added that were not differences from 1", "gain = gain - 1"
    if np.ptp(has) == 0:
        return f"gains were not converted (all are {has[0]:g})", "gain = original"
    if len(wanted) == ours.width:
        for step in reorders(1, ours.width, ours.width):
            if alike(wanted, has[step.rows]):
                return "gains were not reordered along with the rows", of_vector(step.code, "gain")
    return "other gains", "gain = original"
