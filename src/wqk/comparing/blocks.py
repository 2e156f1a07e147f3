"""How far apart two blocks' scores are, exactly, from their weights.

Compared are the forms M(N) = scale · A R(−N) Bᵀ of every head on normalized inputs, with biases,
at a few relative distances N. They are invariant to changes that leave attention unchanged:
rotations within a head, a factor moved from queries to keys, norms or the scale folded into
weights. Distances come from R × R Gram matrices, ⟨M_a, M_b⟩ = Σ (A_aᵀA_b) ∘ (B_aᵀB_b), head by head
in float64, so that no more than one head is ever wider than stored.

Axes: H query heads, G key heads, D model width and 1 for the biases, R head width.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from wqk._typing import Float

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wqk.families.rotary import Rotary

# By how many times the expected rounding two equal forms may differ.
SAFETY = 1.5

# Products of float64 Gram matrices resolve no smaller distance, relative to ‖A‖ ‖B‖.
RESOLUTION = 1e-7

# Far below any tolerance.
TINY = 1e-30


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a block's scores are made of.

    The last of the D dimensions multiplies the 1 that stands for the biases. Query head h meets key
    head ``pairing[h]``, which is h // (H/G).
    """

    query: Float[np.ndarray, "heads width d"]
    key: Float[np.ndarray, "key_heads width d"]
    scale: float  # of the score
    rotary: Rotary | None  # with its attention factor
    rounding: float  # half the relative distance of neighboring numbers, as stored

    @property
    def pairing(self) -> np.ndarray:
        """The key head of each query head, (H,)."""
        return np.arange(len(self.query)) // (len(self.query) // len(self.key))

    @property
    def turning(self) -> Rotary | None:
        """The rotation without its attention factor."""
        return None if self.rotary is None else self.rotary.turning

    def heads(self) -> Heads:
        """Every head's two factors."""
        factors = np.full(len(self.query), self.scale)
        stretch = self.rotary if self.rotary is not None and self.rotary.amplitude != 1 else None
        return Heads(self.query, self.key, self.pairing, factors, self.turning, stretch)

    def without_biases(self) -> Scoring:
        """The same block, biases left out."""
        return replace(self, query=self.query[..., :-1], key=self.key[..., :-1])


class Heads(NamedTuple):
    """The form of each head: its two factors, and a number."""

    query: np.ndarray  # (H, R, D)
    key: np.ndarray  # (G, R, D)
    key_head: np.ndarray  # of each query head, (H,)
    factor: np.ndarray  # (H,)
    rotary: Rotary | None
    stretch: Rotary | None = None  # what multiplies the rotated dimensions at every distance

    def query_of(self, head: int) -> np.ndarray:
        """One head's queries in float64, (R, D)."""
        query = self.query[head].astype(np.float64)
        return np.asarray(query if self.stretch is None else self.stretch.stretch(query.T).T)

    def key_of(self, head: int) -> np.ndarray:
        """The keys of one query head in float64, (R, D)."""
        return np.asarray(self.key[self.key_head[head]].astype(np.float64))


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


def distances(a: Scoring, b: Scoring, at: Sequence[int], tolerance: float = 0.0) -> Distances:
    """Relative distances of two blocks, head by head, at each relative position of ``at``.

    ``tolerance`` is a relative distance that is accepted anyway.
    """
    found = distances_of(a.heads(), b.heads(), at, (a.rounding, b.rounding))
    return found._replace(tolerance=np.maximum(found.tolerance, tolerance))


def distances_of(
    a: Heads, b: Heads, at: Sequence[int], roundings: tuple[float, float]
) -> Distances:
    """The same of any heads; ``roundings`` are those of the two blocks."""
    if _identical(a, b):
        count = len(a.query)
        return Distances(np.zeros((len(at), count)), np.full(count, RESOLUTION))
    own, other, both = InnerProducts(a, a), InnerProducts(b, b), InnerProducts(a, b)
    squares = np.stack([own.at(n) for n in at])
    across = squares + np.stack([other.at(n) - 2 * both.at(n) for n in at])
    norms = np.sqrt(np.where(squares > 0, squares, 1.0))
    # Independent roundings of entries move M by the norms of the columns' products.
    sizes = [
        np.stack([np.square(pick(head)).sum(axis=-1) for head in range(len(a.query))])
        for pick in (a.query_of, a.key_of)
    ]
    factor = np.abs(a.factor)
    columns = factor * np.sqrt((sizes[0] * sizes[1]).sum(axis=-1))
    reach = factor * np.sqrt(sizes[0].sum(axis=-1) * sizes[1].sum(axis=-1))
    rounding = SAFETY * np.hypot(*roundings)
    return Distances(
        np.sqrt(across.clip(min=0)) / norms,
        (rounding * columns + RESOLUTION * reach) / norms[0],
    )


def _identical(a: Heads, b: Heads) -> bool:
    """Whether every number is the same, as in most conversions, which saves all products."""
    rotations = (a.rotary, b.rotary), (a.stretch, b.stretch)
    return (
        np.array_equal(a.factor, b.factor)
        and np.array_equal(a.key_head, b.key_head)
        and all(map(same_rotation, *zip(*rotations, strict=True)))
        and np.array_equal(a.query, b.query)
        and np.array_equal(a.key, b.key)
    )


def same_rotation(a: Rotary | None, b: Rotary | None) -> bool:
    """Whether two rotations are the same."""
    if a is None or b is None:
        return a is b
    same = (a.order, a.amplitude, a.axes) == (b.order, b.amplitude, b.axes)
    return same and np.array_equal(a.frequencies, b.frequencies)


class InnerProducts:
    """⟨M_a(N), M_b(N)⟩ of each head, at any N from the same Gram matrices."""

    def __init__(self, a: Heads, b: Heads) -> None:
        heads = range(len(a.query))
        self._queries = np.stack([a.query_of(h) @ b.query_of(h).T for h in heads])
        keys: dict[tuple[int, int], np.ndarray] = {}
        for head in heads:
            pair = int(a.key_head[head]), int(b.key_head[head])
            if pair not in keys:
                keys[pair] = a.key_of(head) @ b.key_of(head).T
        pairs = zip(a.key_head.tolist(), b.key_head.tolist(), strict=True)
        self._keys = np.stack([keys[pair] for pair in pairs])
        self._rotary, self._factor = (a.rotary, b.rotary), a.factor * b.factor

    def at(self, distance: int) -> Float[np.ndarray, " heads"]:
        """The products at one distance, (H,)."""
        queries = self._queries
        if distance:
            queries = _turned(queries, self._rotary[1], distance).swapaxes(-1, -2)
            queries = _turned(queries, self._rotary[0], distance).swapaxes(-1, -2)
        return np.asarray(self._factor * (queries * self._keys).sum(axis=(-2, -1)))


def _turned(vectors: np.ndarray, rotary: Rotary | None, distance: int) -> np.ndarray:
    """Vectors (..., N, R), all turned to one position."""
    if rotary is None:
        return vectors
    turned: np.ndarray = rotary.rotate(vectors, np.full(vectors.shape[-2], distance))
    return turned


def best_factors(a: Heads, b: Heads, rounding: float) -> np.ndarray:
    """Each head's factor that brings b closest to a at distance 0; 1 if rounding explains it.

    A pruned head, which any factor fits, gets the median of the others.
    """
    across, own = InnerProducts(a, b).at(0), InnerProducts(b, b).at(0)
    pruned = own == 0
    factors = across / np.where(pruned, 1.0, own)
    factors[pruned] = 1.0 if pruned.all() else np.median(factors[~pruned])
    return np.where(np.abs(factors - 1) <= SAFETY * rounding + RESOLUTION, 1.0, factors)
