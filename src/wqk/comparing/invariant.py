"""Mistakes that are told from the forms alone, whatever each head's own coordinates.

The heads of one block are searched for among the other's: every query head with every key head,
unchanged and transposed, up to a factor. A match is confirmed by the exact distance. So an order of
heads, a pairing, an exchange, a factor or a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk.comparing import mistakes
from wqk.comparing.blocks import (
    Heads,
    Scoring,
    best_factors,
    distances,
    distances_of,
    same_rotation,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wqk.comparing.mistakes import Mismatch
    from wqk.families.rotary import Rotary

# Probe vectors on either side; their P² scores distinguish heads.
PROBES = 8

# Smallest cosine of two heads' probes that is worth an exact comparison.
ALIKE = 0.99


def explained(a: Scoring, b: Scoring, at: Sequence[int]) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a, as few as possible; None if there are none."""
    explanations = [
        (*first, *rest) for first, view in _views(b) if (rest := _explain(a, view, at)) is not None
    ]
    if explanations:
        return min(explanations, key=len)
    if distances(a.without_biases(), b.without_biases(), at).agree:
        return (mistakes.other_bias("same weights, other biases"),)
    return None


def signature(scoring: Scoring) -> np.ndarray:
    """Scores of random probes by every head, (H, P²) of norm 1: a short mark of its form."""
    random = np.random.default_rng(0)
    left, right = (
        random.standard_normal((PROBES, w.shape[-1])).astype(w.dtype)
        for w in (scoring.query, scoring.key)
    )
    probed = _probed(scoring.query @ left.T, (scoring.key @ right.T)[scoring.pairing])
    return probed.reshape(len(probed), -1)


def _views(b: Scoring) -> Iterator[tuple[tuple[Mismatch, ...], Scoring]]:
    """The block unchanged, and with one side's rotary order changed."""
    yield (), b
    if b.rotary is None:
        return
    for side, order in product(("query", "key"), ("half", "interleaved")):
        factor = getattr(b, side)
        rows = _reordered(b.rotary, factor.shape[1], order)
        reason = f"other rotary order in the {side} weights alone"
        view = replace(b, **{side: factor[:, rows]})
        yield (mistakes.reordered(mistakes.ROTARY, reason, "", (side,), one_side=side),), view


def _reordered(rotary: Rotary, width: int, order: str) -> np.ndarray:
    """The rows that bring a head's rotated dimensions into this order from the other one."""
    pairs = len(rotary.frequencies)
    rows = np.arange(2 * pairs).reshape((pairs, 2) if order == "half" else (2, pairs)).T
    return np.concatenate([rows.ravel(), np.arange(2 * pairs, width)])


def _explain(a: Scoring, b: Scoring, at: Sequence[int]) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a; None where some head is not among b's."""
    match = _match(a, b)
    if match is None:
        return None
    query_heads, key_heads, flipped = match
    plain = b.heads()
    roundings = a.rounding, b.rounding
    for rotary in _rotations(a.turning, b.turning):
        if flipped:
            heads = Heads(b.key[key_heads], b.query, query_heads, plain.factor, rotary)
        else:
            heads = plain._replace(query=b.query[query_heads], key_head=key_heads, rotary=rotary)
        factors = best_factors(a.heads(), heads, a.rounding + b.rounding)
        scaled = heads._replace(factor=heads.factor * factors)
        if factors.all() and distances_of(a.heads(), scaled, at, roundings).agree:
            return tuple(_named(a, b, match, rotary, factors))
    return None


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads, flipped = match
    if not np.array_equal(b.pairing[query_heads], key_heads):
        yield mistakes.pairing(query_heads, key_heads, len(b.key))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mistakes.head_order(query_heads)
    if flipped:
        yield mistakes.exchanged()
    if not same_rotation(rotary, b.turning):
        yield mistakes.other_rotary(rotary, b.turning)
    if (factors != 1).any():
        yield mistakes.scaled([float(f) for f in 1 / factors], a.query.shape[1])


class Match(NamedTuple):
    """Which of b's query and key heads make each of a's heads, (H,), and whether transposed."""

    query_heads: np.ndarray
    key_heads: np.ndarray
    flipped: bool


def _match(a: Scoring, b: Scoring) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    random = np.random.default_rng(0)
    left, right = (
        random.standard_normal((PROBES, w.shape[-1])).astype(w.dtype) for w in (a.query, a.key)
    )
    ours = _probed(a.query @ left.T, (a.key @ right.T)[a.pairing])
    straight = _probed((b.query @ left.T)[:, None], (b.key @ right.T)[None])
    candidates = [(False, straight)]
    if left.shape == right.shape:
        flipped = _probed((b.query @ right.T)[:, None], (b.key @ left.T)[None])
        candidates.append((True, flipped.swapaxes(-1, -2)))
    heads = np.arange(len(a.query))
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
            query_heads, key_heads = np.divmod(best, len(b.key))
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
