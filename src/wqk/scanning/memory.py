"""Sizes of blocks in bytes: in the checkpoint, and in memory during scoring."""

from __future__ import annotations

import math
from collections.abc import Sequence

from wqk.attention.coordinates import PLAIN, Coordinates
from wqk.checkpoints import Checkpoint, Part
from wqk.families import AttentionPlan

# Memory, in bytes, that may be spent on scoring several blocks at once.
SPARE_MEMORY = 512 * 2**20


def wanted_parts(plan: AttentionPlan, coordinates: Coordinates) -> list[Part]:
    """The large parts of a block: all but the vectors of norms."""
    if coordinates.circuit == "qk":
        return list(plan.parts)
    sides = (plan.value, plan.output)
    return [part for side in sides if side is not None for part in side.parts]


def plan_bytes(
    checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates = PLAIN
) -> int:
    """Bytes of the checkpoint that scoring one block reads, but for the vectors of norms."""
    parts = set(wanted_parts(plan, coordinates))
    return sum(part.nbytes(checkpoint.info(part.name)) for part in parts)


def blocks_that_fit(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], coordinates: Coordinates
) -> int:
    """How many of the largest block the spare memory holds, at least 1.

    A block needs its weights in float32, twice.
    """

    def numbers(plan: AttentionPlan) -> int:
        parts = set(wanted_parts(plan, coordinates))
        return sum(math.prod(p.shape(checkpoint.info(p.name).shape)) for p in parts)

    # A circuit that is missing has no size; reading it says so.
    largest = max(1, *(2 * 4 * numbers(plan) for plan in plans))
    return max(1, SPARE_MEMORY // largest)
