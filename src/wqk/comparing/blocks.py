"""Whether two blocks attend the same way, and if not, which change explains the difference.

Compared are the forms M(N) = scale · A R(−N) Bᵀ of every head on normalized inputs, with biases,
at a few relative distances N. They are invariant to changes that leave attention unchanged:
rotations within a head, a factor moved from queries to keys, norms or the scale folded into
weights. Distances come from R × R Gram matrices, ⟨M_a, M_b⟩ = Σ (A_aᵀA_b) ∘ (B_aᵀB_b).

If a block differs, its heads are searched for among the other's: every query head with every key
head, unchanged and transposed, up to a factor. A match is confirmed by the exact distance.

Axes: H query heads, G key heads, D model width and 1 for the biases, R head width, P probes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Float
from wqk.attention.inner_products import Heads, InnerProducts
from wqk.comparing.mistakes import (
    Mismatch,
    OtherBias,
    OtherHeadOrder,
    OtherPairing,
    OtherRotary,
    Scaled,
    Transposed,
    Unexplained,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from wqk.families.rotary import Rotary

# Probe vectors on either side; their P² scores distinguish heads.
PROBES = 8

# By how many times the expected rounding two equal forms may differ.
SAFETY = 1.5

# Products of float64 Gram matrices resolve no smaller distance, relative to ‖A‖ ‖B‖.
RESOLUTION = 1e-7

# Far below any tolerance.
TINY = 1e-30

# Smallest cosine of two heads' probes that is worth an exact comparison.
ALIKE = 0.99


@dataclass(frozen=True)
class Scoring:
    """What a block's scores are made of, in float64.

    The last of the D dimensions multiplies the 1 that stands for the biases. Query head h meets key
    head h // (H/G).
    """

    query: Float[np.ndarray, "heads width d"]  # including the score's scale
    key: Float[np.ndarray, "key_heads width d"]
    rotary: Rotary | None
    rounding: float  # half the relative distance of neighboring numbers of the stored type

    @property
    def pairing(self) -> np.ndarray:
        """The key head of each query head, (H,)."""
        return np.arange(len(self.query)) // (len(self.query) // len(self.key))

    def heads(self) -> Heads:
        """Every head's two factors."""
        return Heads(self.query, self.key[self.pairing], self.rotary)


class Distances(NamedTuple):
    """How far apart two blocks are."""

    relative: Float[np.ndarray, "distances heads"]  # ‖M_a(N) − M_b(N)‖ / ‖M_a(N)‖
    tolerance: Float[np.ndarray, " heads"]  # what rounding explains of it

    @property
    def agree(self) -> bool:
        """Whether rounding explains all of it."""
        return bool((self.relative <= self.tolerance).all())

    @property
    def worst(self) -> int:
        """The head that exceeds its tolerance (0 for a pruned one) by the largest factor."""
        return int((self.relative.max(axis=0) / (self.tolerance + TINY)).argmax())


def distances(a: Scoring, b: Scoring, at: Sequence[int]) -> Distances:
    """Relative distances of two blocks, head by head, at each relative position of ``at``."""
    return _distances(a.heads(), b.heads(), at, a.rounding, b.rounding)


def mismatches(a: Scoring, b: Scoring, at: Sequence[int]) -> tuple[Mismatch, ...]:
    """How b differs from a: not at all, by known changes, or `Unexplained`.

    Both have the same number of query heads and the same width. They are compared ``at`` relative
    positions, 0 first; only 0 counts without rotary positions.
    """
    if distances(a, b, at).agree:
        return ()
    explanations = [
        (*first, *rest) for first, view in _views(b) if (rest := _explain(a, view, at)) is not None
    ]
    if explanations:
        return min(explanations, key=len)
    bare_a, bare_b = (replace(s, query=s.query[..., :-1], key=s.key[..., :-1]) for s in (a, b))
    if distances(bare_a, bare_b, at).agree:
        return (OtherBias(),)
    return (Unexplained(),)


def _views(b: Scoring) -> Iterator[tuple[tuple[Mismatch, ...], Scoring]]:
    """The block unchanged, and with one side's rotary order changed."""
    yield (), b
    if b.rotary is None:
        return
    for side, order in product(("query", "key"), ("half", "interleaved")):
        factor = getattr(b, side)
        rows = _reordered(b.rotary, factor.shape[1], order)
        yield (OtherRotary(one_side=side),), replace(b, **{side: factor[:, rows]})


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
    query, key = b.query[query_heads], b.key[key_heads]
    if flipped:
        query, key = key, query
    for rotary in _rotations(a.rotary, b.rotary):
        heads = Heads(query, key, rotary)
        factors = _factors(a.heads(), heads, a.rounding + b.rounding)
        scaled = heads._replace(query=query * factors[:, None, None])
        if _distances(a.heads(), scaled, at, a.rounding, b.rounding).agree:
            return tuple(_named(a, b, match, rotary, factors))
    return None


def _named(
    a: Scoring, b: Scoring, match: Match, rotary: Rotary | None, factors: np.ndarray
) -> Iterator[Mismatch]:
    query_heads, key_heads, flipped = match
    if not np.array_equal(b.pairing[query_heads], key_heads):
        yield OtherPairing(tuple(map(int, query_heads)), tuple(map(int, key_heads)), len(b.key))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield OtherHeadOrder(tuple(map(int, query_heads)))
    if flipped:
        yield Transposed()
    if rotary is not b.rotary:
        yield OtherRotary.between(rotary, b.rotary)
    if (factors != 1).any():
        yield Scaled(tuple(map(float, 1 / factors)), a.query.shape[1])


class Match(NamedTuple):
    """Which of b's query and key heads make each of a's heads, (H,), and whether transposed."""

    query_heads: np.ndarray
    key_heads: np.ndarray
    flipped: bool


def _match(a: Scoring, b: Scoring) -> Match | None:
    """The pair of b's heads most like each of a's heads at distance 0, by random probes."""
    random = np.random.default_rng(0)
    left, right = (random.standard_normal((PROBES, w.shape[-1])) for w in (a.query, a.key))
    ours = _probed(a.heads().query @ left.T, a.heads().key @ right.T)
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
        cosines[heads, heads] += 1e-9
        cosines[:, heads, b.pairing] += 2e-9
        best = cosines.reshape(len(heads), -1).argmax(axis=1)
        if (cosines.reshape(len(heads), -1).max(axis=1) > ALIKE).all():
            query_heads, key_heads = np.divmod(best, len(b.key))
            return Match(query_heads, key_heads, is_flipped)
    return None


def _probed(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Scores of probes, (..., P, P), from projected probes (..., R, P); of norm 1 or 0."""
    scores = query.swapaxes(-1, -2) @ key
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


def _factors(a: Heads, b: Heads, rounding: float) -> np.ndarray:
    """Each head's factor that brings b closest to a at distance 0; 1 if rounding explains it.

    A pruned head, which any factor fits, gets the median of the others.
    """
    across, own = InnerProducts(a, b).at(0), InnerProducts(b, b).at(0)
    pruned = own == 0
    factors = across / np.where(pruned, 1.0, own)
    factors[pruned] = 1.0 if pruned.all() else np.median(factors[~pruned])
    return np.where(np.abs(factors - 1) <= SAFETY * rounding + RESOLUTION, 1.0, factors)


def _distances(
    a: Heads, b: Heads, at: Sequence[int], rounding_a: float, rounding_b: float
) -> Distances:
    own, other, both = InnerProducts(a, a), InnerProducts(b, b), InnerProducts(a, b)
    squares = np.stack([own.at(n) for n in at])
    across = squares + np.stack([other.at(n) - 2 * both.at(n) for n in at])
    norms = np.sqrt(np.where(squares > 0, squares, 1.0))
    # Independent roundings of entries move M by the norms of the columns' products.
    sizes = [np.square(factor).sum(axis=-1) for factor in (a.query, a.key)]
    columns = np.sqrt((sizes[0] * sizes[1]).sum(axis=-1))
    reach = np.sqrt(sizes[0].sum(axis=-1) * sizes[1].sum(axis=-1))
    rounding = SAFETY * np.hypot(rounding_a, rounding_b)
    return Distances(
        np.sqrt(across.clip(min=0)) / norms,
        (rounding * columns + RESOLUTION * reach) / norms[0],
    )
