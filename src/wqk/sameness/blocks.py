"""How far apart two blocks' scores are, exactly, from their weights.

Compared are the forms M(N) = scale · A R(−N) Bᵀ of every head on normalized inputs, with biases,
at a few relative distances N. They are invariant to changes that leave attention unchanged:
rotations within a head, a factor moved from queries to keys, norms or the scale folded into
weights. Distances come from R × R Gram matrices, ⟨M_a, M_b⟩ = Σ (A_aᵀA_b) ∘ (B_aᵀB_b), head by head
in float64, so that no more than one head is ever wider than stored; norms and biases, too, are
folded in head by head.

Axes: H query heads, G key heads, D model width and 1 for the biases (2 if queries or keys are
normalized with a bias), R head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from wqk._machine import cached_property, side_by_side
from wqk._typing import Float
from wqk.attention.factors import with_norm
from wqk.families import AttentionPlan
from wqk.families.rotary import Rotary
from wqk.sameness.tolerances import RESOLUTION, SAFETY, SAME_FREQUENCY, TINY

# Probe vectors on either side; their P² scores tell heads apart, and how far apart blocks are.
PROBES = 8
# Tokens between query and key at which rotary positions are compared: none, one, many.
DISTANCES = (0, 1, 1024)
# From so many numbers on, products are computed on several cores.
MANY = 1 << 20


@dataclass(frozen=True, eq=False)
class Rows:
    """One side's stored rows, and what is folded into them: the norm that feeds them, biases."""

    weight: Float[np.ndarray, "heads width d"]
    bias: Float[np.ndarray, "heads width"] | None
    norm: tuple[np.ndarray, np.ndarray | None, str] | None  # gain, shift and kind
    # The bias of the norm between projection and score, in the size of the projected vectors.
    shift: Float[np.ndarray, "heads width"] | None = None

    @property
    def columns(self) -> int:
        """Number of columns of a head: inputs, the bias, and the bias of the norm after it."""
        return int(self.weight.shape[2]) + 1 + (self.shift is not None)

    def of(self, head: int) -> Float[np.ndarray, "width d"]:
        """One head in float64, its biases last, (R, D + 1) or (R, D + 2)."""
        weight = self.weight[head : head + 1]
        bias = None if self.bias is None else self.bias[head : head + 1]
        if self.norm is not None:
            weight, bias = with_norm(weight.astype(np.float64), bias, *self.norm)
        inputs = weight.shape[2]
        wide = (weight.shape[1], self.columns)
        # As it lies in memory: to transpose a weight takes longer than to multiply it.
        found = np.empty(wide, order="C" if weight.strides[2] == weight.itemsize else "F")
        found[:, :inputs], found[:, inputs] = weight[0], 0 if bias is None else bias[0]
        if self.shift is not None:
            found[:, inputs + 1] = self.shift[head]
        return found


@dataclass(frozen=True, eq=False)
class Scoring:
    """What a block's scores are made of.

    Query head h meets key head h // (H/G).
    """

    query: Rows
    key: Rows
    scale: float  # of the score
    rotary: Rotary | None  # with its attention factor
    rounding: float  # half the relative distance of neighboring numbers, as stored

    @property
    def own(self) -> Match:
        """Its query heads in order, and the key head of each."""
        heads, groups = len(self.query.weight), len(self.key.weight)
        return Match(np.arange(heads), np.arange(heads) // (heads // groups))

    @property
    def width(self) -> int:
        """Width of a head."""
        return int(self.query.weight.shape[1])

    @property
    def turning(self) -> Rotary | None:
        """The rotation without its attention factor."""
        return None if self.rotary is None else self.rotary.turning

    def query_of(self, head: int) -> Float[np.ndarray, "width d"]:
        """One head's queries in float64, (R, D + 1), stretched as at every distance."""
        query = self.query.of(head)
        if self.rotary is None or self.rotary.amplitude == 1:
            return query
        return np.asarray(self.rotary.stretch(query.T).T)

    @cached_property
    def probes(self) -> tuple[np.ndarray, np.ndarray]:
        """Query heads and key heads times random vectors, (H, R, P) and (G, R, P)."""
        random, found = np.random.default_rng(0), []
        for rows in (self.query, self.key):
            probes = random.standard_normal((PROBES, rows.columns)).T
            found.append(np.stack([rows.of(head) @ probes for head in range(len(rows.weight))]))
        return found[0], found[1]


class Match(NamedTuple):
    """Which query and key heads make each head of a block, (H,): its own, or another block's."""

    query_heads: np.ndarray
    key_heads: np.ndarray


def positions(a: Scoring | AttentionPlan, b: Scoring | AttentionPlan) -> tuple[int, ...]:
    """Where two circuits are compared; only at 0 without rotary positions."""
    return DISTANCES if a.rotary or b.rotary else DISTANCES[:1]


class Distances(NamedTuple):
    """How far apart two blocks are."""

    relative: Float[np.ndarray, "distances heads"]  # ‖M_a(N) − M_b(N)‖ / ‖M_a(N)‖
    tolerance: Float[np.ndarray, "distances heads"]  # what rounding explains of it

    @property
    def agree(self) -> bool:
        """Whether rounding explains all of it."""
        return bool((self.relative <= self.tolerance).all())

    @property
    def shares(self) -> Float[np.ndarray, "distances heads"]:
        """How many times its tolerance (0 for a pruned head) each one is."""
        return self.relative / (self.tolerance + TINY)

    @property
    def allowed(self) -> float:
        """The tolerance of the largest distance, or of what exceeds its own by most."""
        which = self.relative if self.agree else self.shares
        return float(self.tolerance.flat[which.argmax()])


def distances(
    a: Scoring, b: Scoring, products: Sequence[InnerProducts], tolerance: float = 0.0
) -> Distances:
    """Relative distances of two blocks, head by head, at each of their `positions`.

    Given are the products of a with itself, of a with b, and of b with itself. ``tolerance`` is a
    relative distance that is accepted anyway.
    """
    found = _apart(a, b, products, 1.0)
    return found._replace(tolerance=np.maximum(found.tolerance, tolerance))


def fitted(
    a: Scoring, b: Scoring, products: Sequence[InnerProducts]
) -> tuple[np.ndarray, Distances]:
    """Each head's factor that brings b closest to a at distance 0, and how far apart they then are.

    Given are the products as for `distances`. A factor is 1 if rounding explains it. A pruned head,
    which any factor fits, gets the median of the others.
    """
    across, squares = (one.at(0) for one in products[1:])
    pruned = squares == 0
    factors = across / np.where(pruned, 1.0, squares)
    factors[pruned] = 1.0 if pruned.all() else np.median(factors[~pruned])
    near = np.abs(factors - 1) <= SAFETY * (a.rounding + b.rounding) + RESOLUTION
    factors = np.where(near, 1.0, factors)
    return factors, _apart(a, b, products, factors)


def _apart(
    a: Scoring, b: Scoring, products: Sequence[InnerProducts], factors: np.ndarray | float
) -> Distances:
    """Distances of a's heads to b's times these factors."""
    own, both, other = products
    at = positions(a, b)
    squares = np.stack([own.at(n) for n in at])
    across = squares + np.stack([factors * (factors * other.at(n) - 2 * both.at(n)) for n in at])
    norms = np.sqrt(np.where(squares > 0, squares, 1.0))
    # Independent roundings of entries move M by the norms of the columns' products.
    sizes = [np.diagonal(one, axis1=-2, axis2=-1) for one in (own.queries, own.keys)]
    columns = abs(a.scale) * np.sqrt((sizes[0] * sizes[1]).sum(axis=-1))
    reach = abs(a.scale) * np.sqrt(sizes[0].sum(axis=-1) * sizes[1].sum(axis=-1))
    rounding = SAFETY * np.hypot(a.rounding, b.rounding)
    return Distances(
        np.sqrt(across.clip(min=0)) / norms,
        (rounding * columns + RESOLUTION * reach) / norms,
    )


def same_rotation(a: Rotary | None, b: Rotary | None) -> bool:
    """Whether two rotations are the same."""
    if a is None or b is None:
        return a is b
    same = (a.arrangement, a.amplitude) == (b.arrangement, b.amplitude)
    return same and np.array_equal(a.frequencies, b.frequencies)


def as_exact_as(a: Rotary | None, b: Rotary | None) -> Rotary | None:
    """The second rotation, with the first's frequencies if float32's rounding explains the others.

    GGUF files store factors of the frequencies, and compute them, in float32.
    """
    if a is None or b is None or len(a.frequencies) != len(b.frequencies):
        return b
    far = np.abs(np.append(a.frequencies, a.amplitude) / np.append(b.frequencies, b.amplitude) - 1)
    near = bool((far <= SAME_FREQUENCY).all())
    return replace(b, frequencies=a.frequencies, amplitude=a.amplitude) if near else b


class InnerProducts(NamedTuple):
    """⟨M_a(N), M_b(N)⟩ of each head, at any N from the same Gram matrices."""

    queries: Float[np.ndarray, "heads r r"]
    keys: Float[np.ndarray, "heads r r"]
    scale: float
    rotary: tuple[Rotary | None, Rotary | None]  # of which the matrices know nothing

    def at(self, distance: int) -> Float[np.ndarray, " heads"]:
        """The products at one distance, (H,)."""
        queries = self.queries
        for rotary in reversed(self.rotary) if distance else ():
            if rotary is not None:
                queries = rotary.rotate(queries, np.full(queries.shape[-2], distance))
            queries = queries.swapaxes(-1, -2)
        return np.asarray(self.scale * (queries * self.keys).sum(axis=(-2, -1)))


def inner_products(a: Scoring, b: Scoring, match: Match) -> list[InnerProducts]:
    """Of a with itself, with these heads of b, and of these; each head is made once."""
    met = [*zip(a.own.key_heads.tolist(), match.key_heads.tolist(), strict=True)]
    pairs, count = list(dict.fromkeys(met)), len(met)

    def grams(number: int) -> np.ndarray:
        """Of a head's queries; behind all of them, of each two heads of keys that meet."""
        if number < count:
            ours, theirs = a.query_of(number), b.query_of(match.query_heads[number])
        else:
            ours, theirs = (s.key.of(h) for s, h in zip((a, b), pairs[number - count], strict=True))
        return np.stack([ours @ ours.T, ours @ theirs.T, theirs @ theirs.T])

    made = side_by_side(grams, range(count + len(pairs)), many=a.query.weight.size > MANY)
    queries = np.stack(made[:count], axis=1)
    keys = np.stack([made[count + pairs.index(pair)] for pair in met], axis=1)
    return [
        InnerProducts(queries[n], keys[n], one.scale * two.scale, (one.turning, two.turning))
        for n, (one, two) in enumerate(((a, a), (a, b), (b, b)))
    ]
