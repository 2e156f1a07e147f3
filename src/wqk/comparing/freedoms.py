"""Heads found by their forms alone, whatever each head's own coordinates.

The heads of one block are searched for among the other's: every query head with every key head,
up to a factor. A match is confirmed by the exact distance. So an order of heads, a pairing, a
factor or a rotation is found even where heads were also turned.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from wqk.comparing import mismatches
from wqk.comparing.blocks import (
    Distances,
    Heads,
    Scoring,
    Side,
    fitted,
    inner_products,
    positions,
    same_rotation,
)
from wqk.comparing.configured import other_rotary
from wqk.comparing.mismatches import Kind, Mismatch
from wqk.comparing.tolerances import ALIKE_FORMS
from wqk.families.rotary import Rotary


class Apart(NamedTuple):
    """A circuit of two blocks that differs: how far, and which heads may be which."""

    read: Callable[[], tuple[Scoring, Scoring] | None]
    distances: Distances
    match: Match | None

    @property
    def explained(self) -> tuple[Mismatch, ...] | None:
        """The changes after which the second is the first; None if some head is not among its."""
        both = self.match and self.read()
        return _explained(*both, self.match, self.distances) if self.match and both else None


def _explained(
    a: Scoring, b: Scoring, match: Match, apart: Distances
) -> tuple[Mismatch, ...] | None:
    at = positions(a, b)
    sides = Side(b.query, match.query_heads), Side(b.key, match.key_heads)
    view = Heads(*sides, b.heads.factor, None, b.heads.stretch)
    own, both, theirs = inner_products(a.heads, view)
    other = {"half": "interleaved", "interleaved": "half"}
    for order in ("", other[b.turning.order]) if b.turning else ("",):
        rotary = replace(b.turning, order=order) if b.turning and order else b.turning
        turned = both._replace(rotary=(a.turning, rotary)), theirs._replace(rotary=(rotary, rotary))
        factors, left = fitted(a, (own, *turned), at, (a.rounding, b.rounding))
        if factors.all() and (left.relative <= np.maximum(left.tolerance, apart.tolerance)).all():
            return tuple(_named(a, b, match, rotary, factors))
    return None


def signature(scoring: Scoring) -> np.ndarray:
    """Scores of random probes by every head, (H, P²) of norm 1: a short mark of its form."""
    query, key = scoring.probes
    probed = _probed(query, key[scoring.pairing])
    return probed.reshape(len(probed), -1)


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads = match
    if not np.array_equal(b.pairing[query_heads], key_heads):
        yield mismatches.pairing(query_heads, key_heads, len(b.key.weight))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mismatches.head_order(query_heads)
    if not same_rotation(rotary, b.turning):
        yield Mismatch(Kind.ROTARY, other_rotary(rotary, b.turning))
    if (factors != 1).any():
        yield mismatches.scaled([float(f) for f in 1 / factors], a.width)


class Match(NamedTuple):
    """Which of b's query and key heads make each of a's heads, (H,)."""

    query_heads: np.ndarray
    key_heads: np.ndarray


def matched(a: Scoring, b: Scoring) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    heads = np.arange(len(a.query.weight))
    ours, theirs = signature(a), _probed(b.probes[0][:, None], b.probes[1][None])
    ours = ours.reshape(len(heads), *theirs.shape[2:])
    cosines = np.abs(np.einsum("hij,qkij->hqk", ours, theirs))
    # Pruned heads, whose scores are zero, are alike.
    silent, theirs_silent = ((some == 0).all(axis=(-2, -1)) for some in (ours, theirs))
    cosines[silent[:, None, None] & theirs_silent] = 1
    # Among equal heads, each is its own best match and keeps its own key.
    cosines[heads, heads] += 1e-6
    cosines[:, heads, b.pairing] += 2e-6
    flat = cosines.reshape(len(heads), -1)
    if (flat.max(axis=1) <= ALIKE_FORMS).any():
        return None
    return Match(*np.divmod(flat.argmax(axis=1), len(b.key.weight)))


def _probed(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Scores of probes, (..., P, P), from projected probes (..., R, P); of norm 1 or 0."""
    scores = query.swapaxes(-1, -2).astype(np.float64) @ key
    norms = np.linalg.norm(scores, axis=(-2, -1), keepdims=True)
    return np.asarray(scores / np.where(norms > 0, norms, 1.0))
