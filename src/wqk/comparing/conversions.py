"""The search for a conversion's mistake: each one is undone, and found if the scores then agree.

First come repairs of rows, told by where they come from, then those of biases and norms, at last
the rotation and a factor. What no repair explains may be an adapter, or is said by its size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from wqk.comparing import mistakes
from wqk.comparing.blocks import Distances, far_apart, fitted, same_rotation
from wqk.comparing.gains import biases_repaired, norms_repaired
from wqk.comparing.invariant import explained
from wqk.comparing.mistakes import Mismatch
from wqk.comparing.origins import rows_repaired
from wqk.comparing.weights import SIDES, Attempt, StoredBlock

# Most directions of a difference that is an adapter's.
LARGEST_RANK = 64
# An adapter changes more than this share of a weight's rows.
MOST_ROWS = 0.9
# Factors that differ by less than this are the same.
SAME = 2e-2


def explain(
    a: StoredBlock, b: StoredBlock, at: Sequence[int], apart: Distances
) -> tuple[Mismatch, ...]:
    """How b differs from a: not at all, by known mistakes, or by how much.

    Both have the same number of query heads and the same width. They are compared ``at`` relative
    positions, 0 first; only 0 counts without rotary positions. ``apart`` is how far apart they are,
    and what is allowed.
    """
    if apart.agree:
        return ()
    # Rows can only be compared in the same order of rotary pairs.
    aligned = b if a.rotary is None else b.in_order(a.rotary.order)
    known = _known_adapter(a, b)
    if known is not None:
        return (known,)
    partial = []
    for attempt in _attempts(a, aligned):
        if attempt.beyond:  # only where nothing explains those heads, too
            partial.append(attempt)
        elif (finished := _finished(a, attempt, at, apart.tolerance)) is not None:
            return tuple(mistakes.distinct(finished))
    found = explained(a.scoring, b.scoring, at, apart)
    if found:
        return found
    merged = _adapter(a, b)
    if merged is not None:
        return (merged,)
    for attempt in partial:
        if (finished := _finished(a, attempt, at, apart.tolerance)) is not None:
            return tuple(mistakes.distinct(finished))
    return (mistakes.unexplained(apart.relative.max(axis=0), apart.tolerance),)


def _attempts(a: StoredBlock, b: StoredBlock) -> Iterator[Attempt]:
    """The second block after repairs of its rows: nothing first."""
    plain = Attempt(b)
    yield from _with_settings(a, plain)
    for repaired in rows_repaired(a, b):
        yield from _with_settings(a, repaired)


def _with_settings(a: StoredBlock, attempt: Attempt) -> Iterator[Attempt]:
    """An attempt, then with its biases, its norms, or both repaired."""
    yield attempt
    biases = biases_repaired(a, attempt)
    if biases is not attempt:
        yield biases
    for before in dict.fromkeys((attempt, biases)):
        norms = norms_repaired(a, before)
        if norms is not before:
            yield norms


def _finished(
    a: StoredBlock, attempt: Attempt, at: Sequence[int], allowed: np.ndarray
) -> tuple[Mismatch, ...] | None:
    """The mismatches, with rotation and factors settled too; None if the blocks still differ."""
    ours, theirs = a.scoring, attempt.block.scoring
    kept = [head for head in range(a.query.heads) if head not in attempt.beyond]
    rotations = [theirs.rotary]
    if not same_rotation(ours.rotary, theirs.rotary):
        rotations.append(ours.rotary)
    lost = np.isin(np.arange(a.query.heads), list(attempt.beyond))
    for rotary in rotations:
        turned = replace(theirs, rotary=rotary).heads
        if far_apart(ours.heads, turned, at, np.where(lost, np.inf, allowed)):
            continue
        factors, apart = fitted(ours, turned, at, (ours.rounding, theirs.rounding))
        near = apart.relative <= np.maximum(apart.tolerance, allowed)
        if not (factors[kept].all() and near[:, kept].all()):
            continue
        found = list(attempt.found)
        if rotary is not theirs.rotary:
            found.append(mistakes.other_rotary(ours.rotary, theirs.rotary, a.query.width))
        if (factors[kept] != 1).any():
            found.append(mistakes.scaled([float(f) for f in 1 / factors[kept]], a.query.width))
        return tuple(found) or None
    return None


def _known_adapter(a: StoredBlock, b: StoredBlock) -> Mismatch | None:
    """How the adapter of one of the two is merged in the other's weights."""
    for with_adapter, other in ((a, b), (b, a)):
        unadapted = with_adapter.unadapted()
        if unadapted is not None:
            return _merged(with_adapter, unadapted[0], other, unadapted[1])
    return None


def _adapter(a: StoredBlock, b: StoredBlock) -> Mismatch | None:
    """A difference of low rank on either side, as of an adapter that one of them lacks."""
    ranks = {}
    for side in SIDES:
        ours, theirs = a.side(side).rows, b.side(side).rows
        if ours.shape != theirs.shape:
            return None
        step = theirs - ours
        if not step.any():
            continue
        if not step.any(axis=1).mean() > MOST_ROWS:  # of some heads alone
            return None
        rank = _rank(step, max(a.rounding, b.rounding) * float(max(ours.max(), -ours.min())))
        if rank is None:
            return None
        ranks[side] = rank
    if not ranks:
        return None
    high = max(ranks.values())
    reason = (
        f"weights differ by an update of rank {high}, as of an adapter (LoRA) that is merged in "
        "one of the two alone, or otherwise"
    )
    repair = f"w = w ± scale * (B @ A)  # A and B of rank {high}"
    return mistakes.adapter(reason, repair, tuple(ranks), rank=high)


def _merged(
    adapted: StoredBlock, plain: StoredBlock, other: StoredBlock, scale: float
) -> Mismatch | None:
    """How often the other block has the adapter's update in its weights."""
    times, ranks = {}, {}
    for side in SIDES:
        start = plain.side(side).rows.astype(np.float64)
        step, moved = adapted.side(side).rows - start, other.side(side).rows - start
        size = float(np.vdot(step, step))
        if not size:
            continue
        times[side] = float(np.vdot(moved, step)) / size
        left = float(np.linalg.norm(moved - times[side] * step))
        if left > SAME * np.sqrt(size) + 2 * other.rounding * float(np.linalg.norm(start)):
            return None
        ranks[side] = _rank(step, 0.0) or 0
    if not times or max(times.values()) - min(times.values()) > SAME:
        return None
    found, rank = float(np.mean(list(times.values()))), max(ranks.values())
    known = [
        (0.0, "not merged"),
        (2.0, "merged twice"),
        (1 / scale, f"merged without its scale ({scale:.4g})"),
        (rank**0.5, "merged with alpha / √rank (rank-stabilized) instead of alpha / rank"),
        (rank**-0.5, "merged with alpha / rank instead of alpha / √rank (rank-stabilized)"),
    ]
    fitting = [text for value, text in known if abs(value - found) < SAME]
    text = " or ".join(fitting) or f"merged with {found:.4g} times its scale"
    repair = f"w = w {'+' if found < 1 else '-'} {abs(1 - found):.6g} * scale * (B @ A)"
    facts = {"times": found, "rank": rank}
    return mistakes.adapter(f"the adapter (LoRA) is {text}", repair, tuple(times), **facts)


def _rank(step: np.ndarray, noise: float) -> int | None:
    """The rank of a matrix if it is low and plain; None otherwise."""
    most = min(LARGEST_RANK, min(step.shape) // 4)
    random = np.random.default_rng(0)
    sketch = step @ random.standard_normal((step.shape[1], most + 8)).astype(step.dtype)
    values = np.linalg.svd(sketch, compute_uv=False).astype(np.float64)
    floor = max(values[0] * 1e-4, noise * np.sqrt(step.size))
    rank = int((values > floor).sum())
    return rank if 0 < rank <= most and values[rank] < values[rank - 1] / 3 else None
