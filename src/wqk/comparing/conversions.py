"""The search for a conversion's mistake: each one is undone, and found if the scores then agree.

First come repairs of rows, told by where they come from, then those of biases and norms, at last
the rotation and a factor. What no repair explains may be an adapter, or is said by its size.

Some mistakes are told from the forms alone, whatever each head's own coordinates. The heads of one
block are searched for among the other's: every query head with every key head, unchanged and
transposed, up to a factor. A match is confirmed by the exact distance. So an order of heads, a
pairing, an exchange, a factor or a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple, TypeAlias

import numpy as np

from wqk.comparing import mistakes
from wqk.comparing.blocks import (
    Distances,
    Heads,
    Scoring,
    Side,
    distances,
    far_apart,
    fitted,
    same_rotation,
)
from wqk.comparing.mistakes import Mismatch
from wqk.comparing.origins import rows_repaired
from wqk.comparing.weights import SIDES, Attempt, StoredBlock, biases_repaired, norms_repaired
from wqk.families.rotary import Rotary

# Smallest cosine of two heads' probes that is worth an exact comparison.
ALIKE = 0.99


# Of each head's rows, (R,); None as they are.
Order: TypeAlias = "np.ndarray | None"


def explained(
    a: Scoring, b: Scoring, at: Sequence[int], apart: Distances
) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a, as few as possible; None if there are none.

    ``apart`` is how far apart the two are.
    """
    explanations = [
        (*first, *rest)
        for first, view in _views(b)
        if (rest := _explain(a, b, view, at, apart)) is not None
    ]
    if explanations:
        return min(explanations, key=len)
    bare = a.without_biases(), b.without_biases()
    if (
        (_has_biases(a) or _has_biases(b))
        and not far_apart(bare[0].heads, bare[1].heads, at[:1], apart.tolerance)
        and distances(*bare, at).agree
    ):
        return (mistakes.other_bias("same weights, other biases"),)
    return None


def _has_biases(scoring: Scoring) -> bool:
    sides = scoring.query, scoring.key
    return any(side.bias is not None or (side.norm and side.norm[1] is not None) for side in sides)


def signature(scoring: Scoring) -> np.ndarray:
    """Scores of random probes by every head, (H, P²) of norm 1: a short mark of its form."""
    probed = _probed(*scoring.heads.probes)
    return probed.reshape(len(probed), -1)


def _views(b: Scoring) -> Iterator[tuple[tuple[Mismatch, ...], tuple[Order, Order]]]:
    """The orders of each head's rows, by side: as they are, and one side's changed."""
    yield (), (None, None)
    if b.rotary is None:
        return
    for side, order in product(("query", "key"), ("half", "interleaved")):
        rows = _reordered(b.rotary, b.width, order)
        reason = f"other rotary order in the {side} weights alone"
        named = mistakes.reordered(mistakes.ROTARY, reason, "", (side,), one_side=side)
        yield (named,), (rows, None) if side == "query" else (None, rows)


def _reordered(rotary: Rotary, width: int, order: str) -> np.ndarray:
    """The rows that bring a head's rotated dimensions into this order from the other one."""
    pairs = len(rotary.frequencies)
    rows = np.arange(2 * pairs).reshape((pairs, 2) if order == "half" else (2, pairs)).T
    return np.concatenate([rows.ravel(), np.arange(2 * pairs, width)])


def _explain(
    a: Scoring, b: Scoring, rows: tuple[Order, Order], at: Sequence[int], apart: Distances
) -> tuple[Mismatch, ...] | None:
    """The changes after which b, its rows reordered, is a; None if some head is not among b's."""
    match = _match(a, b, rows)
    if match is None:
        return None
    query_heads, key_heads, flipped = match
    heads = (key_heads, query_heads) if flipped else (query_heads, key_heads)
    stored = (b.key, b.query) if flipped else (b.query, b.key)
    probes = _probes(b, rows)[flipped]
    if flipped:
        rows, probes = rows[::-1], probes[::-1]
    sides = [Side(*side) for side in zip(stored, heads, rows, strict=True)]
    if any(np.array_equal(order, np.arange(b.width)) for order in rows if order is not None):
        return None  # no other view than the first
    chosen = probes[0][heads[0]], probes[1][heads[1]]
    own = np.arange(len(query_heads)), b.pairing
    plain = not flipped and rows == (None, None) and all(map(np.array_equal, match[:2], own))
    for rotary in _rotations(a.turning, b.turning):
        if plain and same_rotation(rotary, b.turning):
            continue  # that has been tried
        stretch = None if flipped else b.heads.stretch
        view = Heads(sides[0], sides[1], b.heads.factor, rotary, stretch, chosen)
        if far_apart(a.heads, view, at, apart.tolerance):
            continue
        factors, left = fitted(a, view, at, (a.rounding, b.rounding))
        if factors.all() and left.agree:
            return tuple(_named(a, b, match, rotary, factors))
    return None


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads, flipped = match
    if not np.array_equal(b.pairing[query_heads], key_heads):
        yield mistakes.pairing(query_heads, key_heads, len(b.key.weight))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mistakes.head_order(query_heads)
    if flipped:
        yield mistakes.exchanged()
    if not same_rotation(rotary, b.turning):
        yield mistakes.other_rotary(rotary, b.turning)
    if (factors != 1).any():
        yield mistakes.scaled([float(f) for f in 1 / factors], a.width)


class Match(NamedTuple):
    """Which of b's query and key heads make each of a's heads, (H,), and whether transposed."""

    query_heads: np.ndarray
    key_heads: np.ndarray
    flipped: bool


def _probes(
    b: Scoring, rows: tuple[Order, Order]
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Probes of b's queries and keys, (H, R, P) and (G, R, P); and those of exchanged sides."""
    orders = [slice(None) if order is None else order for order in rows]
    square = b.query.weight.shape[-1] == b.key.weight.shape[-1]
    straight_pair = b.heads.probes[0], b.key_probes
    pairs = straight_pair, b.exchanged if square else straight_pair
    straight, exchanged = ((q[:, orders[0]], k[:, orders[1]]) for q, k in pairs)
    return straight, exchanged


def _match(a: Scoring, b: Scoring, rows: tuple[Order, Order]) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    ours = _probed(*a.heads.probes)
    straight, exchanged = _probes(b, rows)
    candidates = [(False, _probed(straight[0][:, None], straight[1][None]))]
    if a.query.weight.shape[-1] == a.key.weight.shape[-1]:
        flipped = _probed(exchanged[0][:, None], exchanged[1][None])
        candidates.append((True, flipped.swapaxes(-1, -2)))
    heads = np.arange(len(ours))
    for is_flipped, theirs in candidates:
        cosines = np.abs(np.einsum("hij,qkij->hqk", ours, theirs))
        # Pruned heads, whose scores are zero, are alike.
        silent, theirs_silent = ((some == 0).all(axis=(-2, -1)) for some in (ours, theirs))
        cosines[silent[:, None, None] & theirs_silent] = 1
        # Among equal heads, each is its own best match and keeps its own key.
        cosines[heads, heads] += 1e-6
        cosines[:, heads, b.pairing] += 2e-6
        best = cosines.reshape(len(heads), -1).argmax(axis=1)
        if (cosines.reshape(len(heads), -1).max(axis=1) > ALIKE).all():
            query_heads, key_heads = np.divmod(best, len(b.key.weight))
            return Match(query_heads, key_heads, is_flipped)
    return None


def _probed(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Scores of probes, (..., P, P), from projected probes (..., R, P); of norm 1 or 0."""
    scores = query.swapaxes(-1, -2).astype(np.float64) @ key
    norms = np.linalg.norm(scores, axis=(-2, -1), keepdims=True)
    return np.asarray(scores / np.where(norms > 0, norms, 1.0))


def _rotations(a: Rotary | None, b: Rotary | None) -> Iterator[Rotary | None]:
    """The rotation of b, and those that it might have had."""
    yield b
    for order, frequencies in product(("half", "interleaved"), (b, a)):
        if frequencies is not None and (order, frequencies) != (getattr(b, "order", None), b):
            yield replace(frequencies, order=order)
    if a is None:
        yield None


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
