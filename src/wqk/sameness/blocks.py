"""Exact distances of the scores of two blocks, computed from the weights.

The forms M(N) = scale · A R(−N) Bᵀ of every head are compared on normalized inputs, with biases, at
a few relative distances N. Changes that leave attention unchanged leave these forms unchanged:
rotations within a head, a factor moved from queries to keys, norms or the scale folded into
weights. Distances are computed from R × R Gram matrices, ⟨M_a, M_b⟩ = Σ (A_aᵀA_b) ∘ (B_aᵀB_b), head
by head in float64: at most one head at a time is in memory as float64. Norms and biases are folded
in head by head, too.

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

# Probe vectors on either side; their P² scores tell heads apart, and estimate distances of blocks.
PROBES = 8
# Tokens between query and key at which rotary positions are compared: none, one, many. See
# `positions` for models with fewer positions.
DISTANCES = (0, 1, 1024)
# Products of at least this many numbers are computed on several cores.
MANY = 1 << 20


class InputNorm(NamedTuple):
    """The norm before a projection; the norm is folded into the rows of the projection.

    Attributes
    ----------
    gain, shift
        The vectors (D,) that the norm multiplies by and adds; None without a shift.
    kind
        ``rms`` or ``layer``.
    """

    gain: np.ndarray
    shift: np.ndarray | None
    kind: str


@dataclass(frozen=True, eq=False)
class Rows:
    """Stored rows of one side of a block, with the biases and the norms that are folded in.

    Attributes
    ----------
    weight, bias
        The rows of all heads, and their biases.
    norm
        The norm before the projection.
    score_norm_bias
        The bias of the norm between projection and score, in the size of the projected vectors.
    """

    weight: Float[np.ndarray, "heads width d"]
    bias: Float[np.ndarray, "heads width"] | None
    norm: InputNorm | None
    score_norm_bias: Float[np.ndarray, "heads width"] | None = None

    @property
    def columns(self) -> int:
        """Number of columns of a head: inputs, bias, and the bias of the norm after it."""
        return int(self.weight.shape[2]) + 1 + (self.score_norm_bias is not None)

    def of(self, head: int) -> Float[np.ndarray, "width d"]:
        """Return one head in float64, with its biases in the last columns, (R, D + 1 or D + 2)."""
        weight = self.weight[head : head + 1]
        bias = None if self.bias is None else self.bias[head : head + 1]
        if self.norm is not None:
            weight, bias = with_norm(weight.astype(np.float64), bias, *self.norm)
        _, width, inputs = weight.shape
        # In the order of the memory: to transpose a weight takes longer than to multiply it.
        is_contiguous = weight.strides[2] == weight.itemsize
        rows = np.empty((width, self.columns), order="C" if is_contiguous else "F")
        rows[:, :inputs] = weight[0]
        rows[:, inputs] = 0 if bias is None else bias[0]
        if self.score_norm_bias is not None:
            rows[:, inputs + 1] = self.score_norm_bias[head]
        return rows


@dataclass(frozen=True, eq=False)
class Scoring:
    """All numbers that determine the scores of a block.

    Query head h uses key head h // (H/G).

    Attributes
    ----------
    query, key
        The rows of the two sides.
    scale
        Scale of the score.
    rotary
        Rotary positions, with their attention factor.
    rounding
        Half the relative distance of neighboring numbers of the stored types.
    """

    query: Rows
    key: Rows
    scale: float
    rotary: Rotary | None
    rounding: float

    @property
    def own_match(self) -> HeadMatch:
        """The query heads of the block in order, with their key heads."""
        heads, groups = len(self.query.weight), len(self.key.weight)
        return HeadMatch(np.arange(heads), np.arange(heads) // (heads // groups))

    @property
    def width(self) -> int:
        """Width of a head."""
        return int(self.query.weight.shape[1])

    @property
    def rotation(self) -> Rotary | None:
        """The rotation by positions, without the attention factor."""
        return None if self.rotary is None else self.rotary.turning

    def query_of(self, head: int) -> Float[np.ndarray, "width d"]:
        """Return the queries of one head in float64, (R, D + 1), times the attention factor."""
        query = self.query.of(head)
        if self.rotary is None or self.rotary.amplitude == 1:
            return query
        return np.asarray(self.rotary.stretch(query.T).T)

    @cached_property
    def probes(self) -> tuple[np.ndarray, np.ndarray]:
        """Query heads and key heads times random vectors, (H, R, P) and (G, R, P)."""
        random = np.random.default_rng(0)
        products = []
        for rows in (self.query, self.key):
            vectors = random.standard_normal((PROBES, rows.columns)).T
            heads = range(len(rows.weight))
            products.append(np.stack([rows.of(head) @ vectors for head in heads]))
        query_products, key_products = products
        return query_products, key_products


class HeadMatch(NamedTuple):
    """The query heads and key heads of a block that correspond to another block's heads, (H,)."""

    query_heads: np.ndarray
    key_heads: np.ndarray


def positions(
    reference: Scoring | AttentionPlan, candidate: Scoring | AttentionPlan
) -> tuple[int, ...]:
    """Return the distances at which two circuits are compared; only 0 without rotary positions.

    If a model has fewer positions than the largest of the `DISTANCES`, the largest distance is that
    between its first and last position, because larger distances do not occur.
    """
    rotations = [side.rotary for side in (reference, candidate) if side.rotary is not None]
    if not rotations:
        return DISTANCES[:1]
    last_positions = [rotary.positions - 1 for rotary in rotations if rotary.positions is not None]
    largest = min([DISTANCES[-1], *last_positions])
    return tuple(sorted({min(distance, largest) for distance in DISTANCES}))


class Distances(NamedTuple):
    """Distances of the forms of two blocks, by relative distance of the tokens and by head.

    Attributes
    ----------
    relative
        ‖M_reference(N) − M_candidate(N)‖ / ‖M_reference(N)‖.
    tolerance
        The relative distance that rounding explains.
    """

    relative: Float[np.ndarray, "distances heads"]
    tolerance: Float[np.ndarray, "distances heads"]

    @property
    def agree(self) -> bool:
        """True if rounding explains all distances."""
        return bool((self.relative <= self.tolerance).all())

    @property
    def shares(self) -> Float[np.ndarray, "distances heads"]:
        """Distances divided by their tolerances; the tolerance of a pruned head is 0."""
        return self.relative / (self.tolerance + TINY)

    @property
    def allowed(self) -> float:
        """Tolerance of the largest distance, or of the distance that exceeds its tolerance most."""
        ranked = self.relative if self.agree else self.shares
        return float(self.tolerance.flat[ranked.argmax()])


class ProductsOfPair(NamedTuple):
    """Inner products of the forms of two blocks, head by head.

    Attributes
    ----------
    reference, candidate
        Inner products of the forms of a block with themselves.
    across
        Inner products of the reference's forms with the candidate's forms.
    """

    reference: InnerProducts
    across: InnerProducts
    candidate: InnerProducts


def distances(
    reference: Scoring,
    candidate: Scoring,
    products: ProductsOfPair,
    tolerance: float = 0.0,
) -> Distances:
    """Relative distances of two blocks, head by head, at each of their `positions`.

    ``tolerance`` is a relative distance that is always accepted.
    """
    compared_at = positions(reference, candidate)
    unscaled = _distances(reference, candidate, products, 1.0, compared_at)
    return unscaled._replace(tolerance=np.maximum(unscaled.tolerance, tolerance))


def fit_factors(
    reference: Scoring,
    candidate: Scoring,
    products: ProductsOfPair,
    compared_at: Sequence[int],
) -> tuple[np.ndarray, Distances]:
    """Return the factors of heads that bring the candidate closest, and the remaining distances.

    The factors are fitted at distance 0. A factor is 1 if rounding explains the difference from 1.
    Any factor fits a pruned head; its factor is the median of the factors of the remaining heads.

    Parameters
    ----------
    reference, candidate
        The circuit in both blocks.
    products
        Inner products of the forms of corresponding heads.
    compared_at
        The distances between tokens at which the remaining distances are measured.

    Returns
    -------
    tuple of ndarray and Distances
        The factors, (H,), and the distances of the heads times these factors.
    """
    across = products.across.at(0)
    squares = products.candidate.at(0)
    is_pruned = squares == 0
    factors = across / np.where(is_pruned, 1.0, squares)
    factors[is_pruned] = 1.0 if is_pruned.all() else np.median(factors[~is_pruned])
    explained = SAFETY * (reference.rounding + candidate.rounding) + RESOLUTION
    factors = np.where(np.abs(factors - 1) <= explained, 1.0, factors)
    return factors, _distances(reference, candidate, products, factors, compared_at)


def _distances(
    reference: Scoring,
    candidate: Scoring,
    products: ProductsOfPair,
    factors: np.ndarray | float,
    compared_at: Sequence[int],
) -> Distances:
    """Distances between the reference's heads and the candidate's heads times factors."""
    reference_squares = []
    squares = []
    for position in compared_at:
        reference_square = products.reference.at(position)
        candidate_square = products.candidate.at(position)
        across = products.across.at(position)
        reference_squares.append(reference_square)
        squares.append(reference_square + factors * (factors * candidate_square - 2 * across))
    norms_squared = np.stack(reference_squares)
    norms = np.sqrt(np.where(norms_squared > 0, norms_squared, 1.0))
    # Independent roundings of entries move M by the norms of the columns' products.
    query_squares = np.diagonal(products.reference.queries, axis1=-2, axis2=-1)
    key_squares = np.diagonal(products.reference.keys, axis1=-2, axis2=-1)
    scale = abs(reference.scale)
    columns = scale * np.sqrt((query_squares * key_squares).sum(axis=-1))
    reach = scale * np.sqrt(query_squares.sum(axis=-1) * key_squares.sum(axis=-1))
    rounding = SAFETY * np.hypot(reference.rounding, candidate.rounding)
    return Distances(
        relative=np.sqrt(np.stack(squares).clip(min=0)) / norms,
        tolerance=(rounding * columns + RESOLUTION * reach) / norms,
    )


def same_rotation(reference: Rotary | None, candidate: Rotary | None) -> bool:
    """Return whether two rotations are equal."""
    if reference is None or candidate is None:
        return reference is candidate
    return (
        reference.arrangement == candidate.arrangement
        and reference.amplitude == candidate.amplitude
        and np.array_equal(reference.frequencies, candidate.frequencies)
    )


def as_exact_as(reference: Rotary | None, candidate: Rotary | None) -> Rotary | None:
    """Return the candidate's rotation, or the reference's if equal up to rounding to float32.

    GGUF files store factors of the frequencies, and compute frequencies, in float32.
    """
    if reference is None or candidate is None:
        return candidate
    if len(reference.frequencies) != len(candidate.frequencies):
        return candidate
    expected = np.append(reference.frequencies, reference.amplitude)
    actual = np.append(candidate.frequencies, candidate.amplitude)
    if not (np.abs(expected / actual - 1) <= SAME_FREQUENCY).all():
        return candidate
    return replace(candidate, frequencies=reference.frequencies, amplitude=reference.amplitude)


class InnerProducts(NamedTuple):
    """⟨M_a(N), M_b(N)⟩ of each head, at any N from the same Gram matrices.

    Attributes
    ----------
    queries, keys
        The Gram matrices of queries and of keys, without positions.
    scale
        Product of the two scales.
    rotations
        The rotations of the two blocks.
    """

    queries: Float[np.ndarray, "heads r r"]
    keys: Float[np.ndarray, "heads r r"]
    scale: float
    rotations: tuple[Rotary | None, Rotary | None]

    def at(self, distance: int) -> Float[np.ndarray, " heads"]:
        """Return the products at one distance, (H,)."""
        # One head at a time: its Gram matrices stay in a cache.
        products = [
            (self._rotated(queries, distance) * keys).sum()
            for queries, keys in zip(self.queries, self.keys, strict=True)
        ]
        return self.scale * np.array(products)

    def _rotated(self, queries: np.ndarray, distance: int) -> Float[np.ndarray, "r r"]:
        """Return the Gram matrix of a head's queries, rotated on both sides by a distance."""
        if not distance:
            return queries
        for rotary in reversed(self.rotations):
            if rotary is not None:
                queries = rotary.rotate(queries, rotary.places(1, distance))
            queries = queries.T
        return queries


def inner_products(reference: Scoring, candidate: Scoring, match: HeadMatch) -> ProductsOfPair:
    """Return the inner products of the reference's heads with matching heads of the candidate.

    Every head is read once.
    """
    key_pairs = [
        *zip(reference.own_match.key_heads.tolist(), match.key_heads.tolist(), strict=True)
    ]
    distinct_pairs = list(dict.fromkeys(key_pairs))
    count = len(key_pairs)

    def grams(number: int) -> np.ndarray:
        """Gram matrices of the queries of a head, or, after all heads, of a pair of key heads."""
        if number < count:
            expected = reference.query_of(number)
            actual = candidate.query_of(match.query_heads[number])
        else:
            reference_head, candidate_head = distinct_pairs[number - count]
            expected = reference.key.of(reference_head)
            actual = candidate.key.of(candidate_head)
        return np.stack([expected @ expected.T, expected @ actual.T, actual @ actual.T])

    is_large = reference.query.weight.size > MANY
    matrices = side_by_side(grams, range(count + len(distinct_pairs)), many=is_large)
    queries = np.stack(matrices[:count], axis=1)
    key_positions = [count + distinct_pairs.index(pair) for pair in key_pairs]
    keys = np.stack([matrices[position] for position in key_positions], axis=1)
    products = []
    scorings = ((reference, reference), (reference, candidate), (candidate, candidate))
    for number, (first, second) in enumerate(scorings):
        products.append(
            InnerProducts(
                queries=queries[number],
                keys=keys[number],
                scale=first.scale * second.scale,
                rotations=(first.rotation, second.rotation),
            )
        )
    return ProductsOfPair(*products)
