"""Quantized weights of a block with other codes than rounding of the exact weights gives.

See `wqk.sameness.half_steps` for the test. Weights without corresponding entries, such as rotated
weights, are left out: only their forms can be compared.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from wqk._typing import Float
from wqk.attention.rounding import rounding_in
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.sameness.block_weights import BlockWeights
from wqk.sameness.circuits import SCORES, VALUES, PlanPair
from wqk.sameness.half_steps import (
    is_coded_alone,
    is_predictable,
    ratio_of_scales,
    share_beyond_half_step,
)
from wqk.sameness.matching import root_mean_square
from wqk.sameness.mismatches import Kind, Mismatch
from wqk.sameness.tolerances import (
    CORRESPONDING,
    FEW_BEYOND,
    SAME_FACTOR,
    SPREAD_OF_FACTORS,
    SPREAD_OVER_LEAST,
    TINY,
)
from wqk.sameness.weight_pairs import WeightPair

# The reasons of the causes; numbers differ from tensor to tensor.
BEYOND = f"{Kind.QUANTIZED}: many entries lie beyond half a step of their own scale"
RESCALED = "equal codes, other scales"
# Fewest rows and columns of a group whose factors are compared, and fewest groups.
FEWEST_ROWS, FEWEST_COLUMNS = 8, 16
FEWEST_GROUPS = 3
MISFIT = f"{Kind.BLOCK_SCALES}: scales of some groups of columns do not fit the weights"


def coded_otherwise(checkpoints: Sequence[Checkpoint], pair: PlanPair) -> Iterator[Mismatch]:
    """Find quantized weights of a block with codes of other weights, or other scales."""
    if not any(plan.quantized for plan in pair):
        return
    beyond: dict[str, dict[str, float]] = {}
    rescaled: dict[str, dict[str, float]] = {}
    misfits: dict[str, dict[str, list[int]]] = {}
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
        groups = _groups_of_other_scales(weights, infos)
        if groups:
            misfits.setdefault(circuit, {})[weights.name] = groups
    block.clear()
    for circuit, shares in beyond.items():
        facts = {"circuit": circuit, "tensors": dict.fromkeys(shares, "weight"), "shares": shares}
        yield Mismatch(Kind.QUANTIZED, BEYOND, facts=facts)
    for circuit, changes in rescaled.items():
        tensors = dict.fromkeys(changes, "weight")
        facts = {"circuit": circuit, "tensors": tensors, "changes": changes}
        yield Mismatch(Kind.BLOCK_SCALES, RESCALED, facts=facts)
    for circuit, groups_by_name in misfits.items():
        tensors = dict.fromkeys(groups_by_name, "weight")
        facts = {"circuit": circuit, "tensors": tensors, "groups": groups_by_name}
        yield Mismatch(Kind.BLOCK_SCALES, MISFIT, facts=facts)


def _share_beyond(weights: WeightPair, infos: Sequence[TensorInfo]) -> float:
    """Return the share of a weight's entries beyond half a step; 0 if entries do not correspond.

    ``infos`` are the metadata of the tensors of the reference and the candidate.
    """
    if not is_coded_alone(infos):
        return 0.0
    expected = _expected(weights)
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


def _expected(weights: WeightPair) -> np.ndarray:
    """Return the expected weight behind the candidate's norm; a gain of 0 leaves its column."""
    gain = weights.gain
    if gain is None:
        return weights.expected
    is_set = gain.actual != 0
    ratios = np.divide(gain.expected, gain.actual, out=np.ones_like(gain.expected), where=is_set)
    return np.asarray(weights.expected * ratios)


def _groups_of_other_scales(weights: WeightPair, infos: Sequence[TensorInfo]) -> list[int]:
    """Return the groups of columns whose scales do not fit the weights; empty if all fit.

    Calibration moves weights away from their nearest codes, so that no half step bounds an entry.
    It does so without regard to the entries themselves: the factor that fits the codes of a row in
    a group to the weights differs from the factors of other rows by chance alone.
    """
    coded = [info for info in infos if info.grid is not None]
    if len(coded) != 1 or is_predictable(coded[0].dtype):
        return []
    codes, exact = weights.actual, _expected(weights)
    if infos[1].grid is None:
        codes, exact = exact, codes
    spreads = []
    for columns in _columns_by_group(weights, infos):
        spreads.append(_spread_of_factors(exact[:, columns], codes[:, columns]))
    if len(spreads) < FEWEST_GROUPS:
        return []
    limit = max(SPREAD_OF_FACTORS, SPREAD_OVER_LEAST * min(spreads))
    return [group for group, spread in enumerate(spreads) if spread > limit]


def _columns_by_group(weights: WeightPair, infos: Sequence[TensorInfo]) -> list[np.ndarray]:
    """Return the numbers of the columns of each group, whose entries in a row share a scale."""
    reference_grid, candidate_grid = (info.grid for info in infos)
    columns = np.arange(weights.actual.shape[1])
    if candidate_grid is not None:
        regrouping = weights.regrouped(Part(weights.name))
        if regrouping is not None:
            groups = range(regrouping.groups)
            return [columns[regrouping.group_of == group] for group in groups]
    grid = candidate_grid or reference_grid
    if grid is None or not grid.shared:
        return [columns]
    return np.split(columns, range(grid.shared, len(columns), grid.shared))


def _spread_of_factors(exact: Float[np.ndarray, "n b"], codes: Float[np.ndarray, "n b"]) -> float:
    """Return the spread over rows of the factors from codes to weights, in standard errors.

    The factor of a row is ⟨exact, codes⟩/‖codes‖², by least squares; its squared standard error is
    ‖residual‖²/((b − 1) ‖codes‖²). A group with few rows or columns has the spread 0.

    Parameters
    ----------
    exact
        The columns of one group in the exact weights.
    codes
        The same columns of the quantized weights, as numbers.
    """
    is_coded = (codes != 0).any(axis=1)
    exact = exact[is_coded].astype(np.float64)
    codes = codes[is_coded].astype(np.float64)
    rows, columns = codes.shape
    if rows < FEWEST_ROWS or columns < FEWEST_COLUMNS:
        return 0.0
    code_squares = np.square(codes).sum(axis=1)
    factors = np.sum(exact * codes, axis=1) / code_squares
    residuals = exact - factors[:, None] * codes
    residual_squares = np.square(residuals).sum(axis=1)
    variances = np.maximum(residual_squares / ((columns - 1) * code_squares), TINY)
    deviations = factors - np.median(factors)
    return float(np.sqrt(np.mean(np.square(deviations) / variances)))
