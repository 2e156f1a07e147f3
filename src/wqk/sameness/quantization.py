"""Quantized weights of a block whose codes are not those of the other model's exact weights.

See `wqk.sameness.half_steps` for the test. Weights whose entries do not correspond one by one, such
as rotated ones, are left out: their forms alone can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.circuits import SCORES, VALUES, PlanPair
from wqk.sameness.half_steps import is_coded_alone, ratio_of_scales, share_beyond_half_step
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.tolerances import CORRESPONDING, FEW_BEYOND, SAME_FACTOR
from wqk.sameness.weight_pairs import WeightPair

# The reasons of the two causes; numbers differ from tensor to tensor.
BEYOND = f"{Kind.QUANTIZED}: many entries lie beyond half a step of their own scale"
RESCALED = "equal codes, other scales"


def coded_otherwise(checkpoints: Sequence[Checkpoint], pair: PlanPair) -> Iterator[Mismatch]:
    """Find quantized weights of a block that were quantized from others, or have other scales."""
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
    """Share of a weight's entries beyond half a step; 0 if entries do not correspond."""
    if not is_coded_alone(infos):
        return 0.0
    expected = weights.expected
    if weights.gain is not None:
        expected = expected * (weights.gain.expected / weights.gain.actual)
    is_coded = infos[1].grid is not None
    coded, exact = (weights.actual, expected) if is_coded else (expected, weights.actual)
    grid = infos[is_coded].grid
    if grid is None or grid.rounding(coded) * CORRESPONDING * _size(coded) < _size(exact - coded):
        return 0.0
    rounding = rounding_in(infos[not is_coded], exact)
    return share_beyond_half_step(exact, coded, grid.shared, rounding)


def _change_of_scales(weights: WeightPair, infos: Sequence[TensorInfo]) -> float:
    """Largest relative change of the scales of two weights with equal codes; 0 for others."""
    grids = [info.grid for info in infos]
    if grids[0] is None or grids[0] != grids[1]:
        return 0.0
    factors = ratio_of_scales(weights.expected, weights.actual, grids[0].shared)
    return 0.0 if factors is None else float(np.abs(factors - 1).max())


def _size(values: np.ndarray) -> float:
    """Root mean square of an array."""
    return float(np.sqrt(np.mean(np.square(values, dtype=np.float64))))
