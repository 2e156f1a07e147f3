"""Quantized weights of a block with other codes than rounding of the exact weights gives.

See `wqk.sameness.half_steps` for the test. Weights without corresponding entries, such as rotated
weights, are left out: only their forms can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.circuits import SCORES, VALUES, PlanPair
from wqk.sameness.half_steps import is_coded_alone, ratio_of_scales, share_beyond_half_step
from wqk.sameness.matching import root_mean_square
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.tolerances import CORRESPONDING, FEW_BEYOND, SAME_FACTOR
from wqk.sameness.weight_pairs import WeightPair

# The reasons of the two causes; numbers differ from tensor to tensor.
BEYOND = f"{Kind.QUANTIZED}: many entries lie beyond half a step of their own scale"
RESCALED = "equal codes, other scales"


def coded_otherwise(checkpoints: Sequence[Checkpoint], pair: PlanPair) -> Iterator[Mismatch]:
    """Find quantized weights of a block with codes of other weights, or other scales."""
    if not any(plan.quantized for plan in pair):
        return
    beyond: dict[str, dict[str, float]] = {}
    rescaled: dict[str, dict[str, float]] = {}
    block = BlockWeights(checkpoints, pair)
    for weights in block.pairs:
        source = block.tensors[weights.name].source
        is_stored = source in checkpoints[0].tensors()
        if not weights.is_matrix or weights.layout.is_transposed or not is_stored:
            continue
        infos = checkpoints[0].info(source), checkpoints[1].info(weights.name)
        circuit = SCORES if weights.sides else VALUES
        share = _share_beyond(weights, infos)
        if share > FEW_BEYOND:
            beyond.setdefault(circuit, {})[weights.name] = share
        change = _change_of_scales(weights, infos)
        if change > SAME_FACTOR:
            rescaled.setdefault(circuit, {})[weights.name] = change
    block.clear()
    for circuit, shares in beyond.items():
        facts = {"circuit": circuit, "tensors": dict.fromkeys(shares, "weight"), "shares": shares}
        yield Mismatch(Kind.QUANTIZED, BEYOND, facts=facts)
    for circuit, changes in rescaled.items():
        tensors = dict.fromkeys(changes, "weight")
        facts = {"circuit": circuit, "tensors": tensors, "changes": changes}
        yield Mismatch(Kind.BLOCK_SCALES, RESCALED, facts=facts)


def _share_beyond(weights: WeightPair, infos: Sequence[TensorInfo]) -> float:
    """Return the share of a weight's entries beyond half a step; 0 if entries do not correspond.

    ``infos`` are the metadata of the tensors of the reference and the candidate.
    """
    if not is_coded_alone(infos):
        return 0.0
    expected = weights.expected
    if weights.gain is not None:
        expected = expected * (weights.gain.expected / weights.gain.actual)
    reference_info, candidate_info = infos
    grid = candidate_info.grid
    coded, exact, exact_info = weights.actual, expected, reference_info
    if grid is None:
        grid = reference_info.grid
        coded, exact, exact_info = expected, weights.actual, candidate_info
    if grid is None:
        return 0.0
    largest_distance = grid.rounding(coded) * CORRESPONDING * root_mean_square(coded)
    if root_mean_square(exact - coded) > largest_distance:
        return 0.0
    return share_beyond_half_step(exact, coded, grid.shared, rounding_in(exact_info, exact))


def _change_of_scales(weights: WeightPair, infos: Sequence[TensorInfo]) -> float:
    """Return the largest relative change of the scales of two weights with equal codes; else 0."""
    expected_grid, actual_grid = (info.grid for info in infos)
    if expected_grid is None or expected_grid != actual_grid:
        return 0.0
    factors = ratio_of_scales(weights.expected, weights.actual, expected_grid.shared)
    return 0.0 if factors is None else float(np.abs(factors - 1).max())
