"""Heads found by their forms alone, whatever each head's own coordinates.

The heads of one block are searched for among the other's: every query head with every key head,
unchanged and transposed, up to a factor. A match is confirmed by the exact distance. So an order of
heads, a pairing, an exchange, a factor or a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import NamedTuple

import numpy as np

from wqk.comparing import mismatches
from wqk.comparing.blocks import (
    Distances,
    Heads,
    Scoring,
    Side,
    far_apart,
    fitted,
    same_rotation,
)
from wqk.comparing.configured import other_rotary
from wqk.comparing.mismatches import Mismatch
from wqk.families.rotary import Rotary

# Smallest cosine of two heads' probes that is worth an exact comparison.
ALIKE = 0.99


def explained(
    a: Scoring, b: Scoring, at: Sequence[int], apart: Distances
) -> tuple[Mismatch, ...] | None:
    """The changes after which b is a; None if some head is not among b's.

    ``apart`` is how far apart the two are.
    """
    match = _match(a, b)
    if match is None:
        return None
    query_heads, key_heads, flipped = match
    heads = (key_heads, query_heads) if flipped else (query_heads, key_heads)
    stored = (b.key, b.query) if flipped else (b.query, b.key)
    probes = _probes(b)[flipped]
    if flipped:
        probes = probes[::-1]
    sides = [Side(*side) for side in zip(stored, heads, strict=True)]
    chosen = probes[0][heads[0]], probes[1][heads[1]]
    for rotary in _rotations(a.turning, b.turning):
        stretch = None if flipped else b.heads.stretch
        view = Heads(sides[0], sides[1], b.heads.factor, rotary, stretch, chosen)
        if far_apart(a.heads, view, at, apart.tolerance):
            continue
        factors, left = fitted(a, view, at, (a.rounding, b.rounding))
        if factors.all() and (left.relative <= np.maximum(left.tolerance, apart.tolerance)).all():
            return tuple(_named(a, b, match, rotary, factors))
    return None


def signature(scoring: Scoring) -> np.ndarray:
    """Scores of random probes by every head, (H, P²) of norm 1: a short mark of its form."""
    probed = _probed(*scoring.heads.probes)
    return probed.reshape(len(probed), -1)


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads, flipped = match
    if not np.array_equal(b.pairing[query_heads], key_heads):
        yield mismatches.pairing(query_heads, key_heads, len(b.key.weight))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mismatches.head_order(query_heads)
    if flipped:
        yield mismatches.exchanged()
    if not same_rotation(rotary, b.turning):
        yield other_rotary(rotary, b.turning)
    if (factors != 1).any():
        yield mismatches.scaled([float(f) for f in 1 / factors], a.width)


class Match(NamedTuple):
    """Which of b's query and key heads make each of a's heads, (H,), and whether transposed."""

    query_heads: np.ndarray
    key_heads: np.ndarray
    flipped: bool


def _probes(
    b: Scoring,
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Probes of b's queries and keys, (H, R, P) and (G, R, P); and those of exchanged sides."""
    straight = b.heads.probes[0], b.key_probes
    square = b.query.weight.shape[-1] == b.key.weight.shape[-1]
    return straight, b.exchanged if square else straight


def _match(a: Scoring, b: Scoring) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    ours = _probed(*a.heads.probes)
    straight, exchanged = _probes(b)
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
