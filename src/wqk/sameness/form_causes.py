"""Causes found from the forms of two blocks, independent of the coordinates within heads.

If stored weights do not explain a difference, forms may. The candidate's heads are searched for
among the reference's heads, every query head with every key head, up to a factor. The exact
distance confirms a match. An order of heads, a pairing, a factor or a rotation is found even if the
heads were also rotated.

Axes: H query heads, G key heads, R head width, P probes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from wqk._machine import side_by_side
from wqk._typing import Float
from wqk.checkpoints import Checkpoint
from wqk.families.rotary import Rotary
from wqk.sameness import mismatches
from wqk.sameness.blocks import (
    DISTANCES,
    MANY,
    Distances,
    HeadMatch,
    ProductsOfPair,
    Scoring,
    distances,
    fit_factors,
    inner_products,
    positions,
    same_rotation,
)
from wqk.sameness.circuits import (
    VALUES,
    PlanPair,
    circuit_parts,
    rotation_of,
    scorings,
    sides_of,
)
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.permutations import OPPOSITE_ORDERS
from wqk.sameness.rotary_settings import other_rotary
from wqk.sameness.stored_tensors import equal_parts
from wqk.sameness.tolerances import ALIKE_FORMS, DEVIATIONS_OF_FACTOR, IN_PLACE, WITH_OWN_KEY


class CircuitDifference(NamedTuple):
    """A circuit that differs between two blocks.

    Attributes
    ----------
    distances
        The distances of the forms.
    causes
        The changes that make the candidate's forms equal to the reference's; None if unknown.
    """

    distances: Distances
    causes: tuple[Mismatch, ...] | None


def compare(
    checkpoints: Sequence[Checkpoint], pair: PlanPair, tolerance: float, circuits: Sequence[str]
) -> dict[str, CircuitDifference]:
    """Return the differences of all differing circuits of two blocks, by the circuit's name.

    Parameters
    ----------
    checkpoints, pair
        The reference and the candidate, and the plans of the two blocks.
    tolerance
        Relative distance that is accepted besides rounding.
    circuits
        The circuits to compare. Circuits that a block lacks, and circuits of different sizes, are
        left out.
    """
    differences: dict[str, CircuitDifference] = {}
    is_local = checkpoints[0].bytes_fetched is None  # other stores fetch whole weights at once
    for circuit in circuits:
        if is_local and identical(checkpoints, pair, circuit, reads_numbers=True):
            continue
        forms = scorings(checkpoints, pair, circuit)
        if forms is None or not comparable(*forms):
            continue
        difference = measure(*forms, tolerance)
        if not difference.distances.agree:
            differences[circuit] = difference
    return differences


def measure(reference: Scoring, candidate: Scoring, tolerance: float) -> CircuitDifference:
    """Measure the distances of a circuit of two blocks; if the forms differ, find the causes.

    ``tolerance`` is a relative distance that is always accepted.
    """
    products = inner_products(reference, candidate, candidate.own_match)
    # Probes are computed at the same time, and kept by the scorings.
    has_many_numbers = reference.query.weight.size > MANY
    side_by_side(attrgetter("probes"), (reference, candidate), many=has_many_numbers)
    distances_in_place = distances(reference, candidate, products, tolerance)
    if distances_in_place.agree:
        return CircuitDifference(distances_in_place, None)
    match = matching_heads(reference, candidate)
    if match is None:
        return CircuitDifference(distances_in_place, None)
    if not all(map(np.array_equal, match, candidate.own_match)):
        products = inner_products(reference, candidate, match)
    causes = _find_causes(reference, candidate, match, products, distances_in_place.tolerance)
    return CircuitDifference(distances_in_place, causes)


def _find_causes(
    reference: Scoring,
    candidate: Scoring,
    match: HeadMatch,
    products: ProductsOfPair,
    tolerance: np.ndarray,
) -> tuple[Mismatch, ...] | None:
    """Return the changes of the candidate, given the heads that match.

    Parameters
    ----------
    reference, candidate
        The circuit in both blocks.
    match, products
        The candidate's heads that match, and the inner products of the forms of these heads.
    tolerance
        The distances that are accepted without a change, (distances, H).

    Returns
    -------
    tuple of Mismatch or None
        None if the matching heads differ even with fitted factors, in both orders of rotary pairs.
    """
    # Rotations change no form at distance 0.
    factors, residual = fit_factors(reference, candidate, products, DISTANCES[:1])
    if not _is_explained(factors, residual, tolerance[:1]):
        return None
    rotations = [candidate.rotation]
    if candidate.rotation is not None:
        order = OPPOSITE_ORDERS[candidate.rotation.order]
        rotations.append(replace(candidate.rotation, order=order))
    for rotation in rotations:
        rotated = products._replace(
            across=products.across._replace(rotations=(reference.rotation, rotation)),
            candidate=products.candidate._replace(rotations=(rotation, rotation)),
        )
        compared_at = positions(reference, candidate)
        factors, residual = fit_factors(reference, candidate, rotated, compared_at)
        if _is_explained(factors, residual, tolerance):
            # Rounding of the weights, (H, R, D), moves the factor of a form by at most this share.
            inputs = min(reference.query.weight.shape[-1], reference.key.weight.shape[-1])
            deviation = float(residual.relative[0].max()) / math.sqrt(inputs)
            uncertainty = DEVIATIONS_OF_FACTOR * deviation
            return tuple(_causes(reference, candidate, match, rotation, factors, uncertainty))
    return None


def _is_explained(factors: np.ndarray, residual: Distances, tolerance: np.ndarray) -> bool:
    """Return whether distances after fitted factors are within a tolerance."""
    allowed = np.maximum(residual.tolerance, tolerance)
    return bool(factors.all() and (residual.relative <= allowed).all())


def _causes(
    reference: Scoring,
    candidate: Scoring,
    match: HeadMatch,
    rotation: Rotary | None,
    factors: np.ndarray,
    uncertainty: float,
) -> Iterator[Mismatch]:
    """Yield the causes of heads that match under a rotation, each with a factor.

    ``uncertainty`` is the relative difference of a factor that rounding explains.
    """
    query_heads, key_heads = match
    if not np.array_equal(candidate.own_match.key_heads[query_heads], key_heads):
        yield mismatches.pairing(query_heads, key_heads, len(candidate.key.weight))
    elif not np.array_equal(query_heads, np.arange(len(query_heads))):
        yield mismatches.head_order(query_heads, len(candidate.key.weight))
    if not same_rotation(rotation, candidate.rotation):
        yield Mismatch(Kind.ROTARY, other_rotary(rotation, candidate.rotation))
    if (factors != 1).any():
        factors_of_candidate = 1 / factors
        yield mismatches.scaled(factors_of_candidate.tolist(), reference.width, uncertainty)


def signature(scoring: Scoring) -> Float[np.ndarray, "H P2"]:
    """Return a signature of each head's form: scores of P × P random probes, of norm 1."""
    query, key = scoring.probes
    scores = _scores_of_probes(query, key[scoring.own_match.key_heads])
    return scores.reshape(len(scores), -1)


def matching_heads(reference: Scoring, candidate: Scoring) -> HeadMatch | None:
    """Return the candidate's query and key heads that are most similar to the reference's heads.

    Heads are compared at distance 0, by random probes. None if a head has no similar head.
    """
    query, key = candidate.probes
    scores_of_pairs = _scores_of_probes(query[:, None], key[None])  # (H, G, P, P)
    scores = signature(reference).reshape(-1, *scores_of_pairs.shape[2:])  # (H, P, P)
    likeness = np.abs(np.einsum("hij,qkij->hqk", scores, scores_of_pairs))  # (H, H, G)
    # Pruned heads, whose scores are zero, are alike.
    are_zero = (scores == 0).all(axis=(-2, -1))
    are_zero_pairs = (scores_of_pairs == 0).all(axis=(-2, -1))
    likeness[are_zero[:, None, None] & are_zero_pairs] = 1
    heads = np.arange(len(scores))
    likeness[heads, heads] += IN_PLACE
    likeness[:, heads, candidate.own_match.key_heads] += WITH_OWN_KEY
    by_head = likeness.reshape(len(heads), -1)
    if (by_head.max(axis=1) <= ALIKE_FORMS).any():
        return None
    query_heads, key_heads = np.divmod(by_head.argmax(axis=1), len(candidate.key.weight))
    return HeadMatch(query_heads, key_heads)


def _scores_of_probes(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Return scores (…, P, P) of projected probes (…, R, P), scaled to norm 1 or 0."""
    scores = query.swapaxes(-1, -2).astype(np.float64) @ key
    norms = np.linalg.norm(scores, axis=(-2, -1), keepdims=True)
    return np.asarray(scores / np.where(norms > 0, norms, 1.0))


def comparable(reference: Scoring, candidate: Scoring) -> bool:
    """Return whether two circuits have equal numbers of query heads, and equal widths."""
    if reference.query.weight.shape != candidate.query.weight.shape:
        return False
    return reference.key.weight.shape[1:] == candidate.key.weight.shape[1:]


def identical(
    checkpoints: Sequence[Checkpoint], pair: PlanPair, circuit: str, *, reads_numbers: bool = False
) -> bool:
    """Return whether a circuit has equal plans and equal stored parts in two blocks.

    The parts are only read, not multiplied. ``reads_numbers`` is as for `equal_parts`.
    """
    reference_plan, candidate_plan = pair
    reference_parts = list(dict.fromkeys(circuit_parts(reference_plan, circuit)))
    candidate_parts = list(dict.fromkeys(circuit_parts(candidate_plan, circuit)))
    texts: list[str] = []
    for plan in pair:
        scale = 1.0 if circuit == VALUES else plan.score_scale
        texts.append(repr((sides_of(plan, circuit), scale)))
    # Corresponding tensors may have different names, which are replaced by numbers.
    for number, parts in enumerate(zip(reference_parts, candidate_parts, strict=False)):
        for model, part in enumerate(parts):
            texts[model] = texts[model].replace(repr(part.name), f"#{number}")
    if texts[0] != texts[1]:
        return False
    rotations = [rotation_of(plan, circuit) for plan in pair]
    if not same_rotation(*rotations):
        return False
    corresponding = zip(reference_parts, candidate_parts, strict=True)
    compare = partial(equal_parts, checkpoints, reads_numbers=reads_numbers)
    return all(map(compare, corresponding))
