"""Differences of low rank, such as adapters that were merged wrongly or not merged.

Axes: n rows, D columns.
"""

from __future__ import annotations

import numpy as np

from wqk.sameness.axis_orders import Stretches
from wqk.sameness.decomposed_merges import wrong_merge
from wqk.sameness.edits import Edit
from wqk.sameness.lora_merges import FittedMerge, fit_merge, mistake_of, unmerged
from wqk.sameness.matching import largest
from wqk.sameness.mismatches import Kind
from wqk.sameness.tolerances import RANK_FLOOR, SAME_SHARE
from wqk.sameness.weight_pairs import AdapterEffect, WeightFinding, WeightPair

# Most directions of a difference that is an adapter's, where no adapter is known.
LARGEST_RANK = 64
# Number of additional random directions for singular values.
FURTHER_DIRECTIONS = 8
# Rows of the sample that rules out high ranks.
SAMPLED_ROWS = 256


def find_decomposed(pair: WeightPair) -> WeightFinding | None:
    """Find a wrong merge of a DoRA adapter, before a search for factors of its rows."""
    adapter = pair.adapter
    if adapter is None or adapter.update is None:
        return None
    merged = pair.actual if adapter.in_reference else pair.expected
    mistake = wrong_merge(adapter.start, adapter.update, merged)
    if not mistake:
        return None
    facts = {"rank": adapter.scale.rank, "method": "DoRA", "mistake": mistake}
    return pair.finding(Kind.ADAPTER, f"the adapter (DoRA) is {mistake}", facts=facts)


def find_adapter(pair: WeightPair) -> WeightFinding | None:
    """Find a difference of low rank, such as an adapter without a file."""
    if pair.adapter is not None:
        return None
    rank = low_rank(pair.actual, pair.expected, pair.rounding * pair.largest_expected)
    if rank is None:
        return None
    change = pair.actual - pair.expected
    share_of_changed_rows = change.any(axis=1).mean()
    if share_of_changed_rows <= 1 - SAME_SHARE * 10:  # of some heads alone
        return None
    steps = np.abs(np.diff(change, axis=1))
    differs_from_next = (steps > SAME_SHARE * largest(change)).any(axis=0)
    if differs_from_next.sum() < change.shape[1] // 8:  # equal in blocks of columns of any size
        description = "{}: an offset for blocks of columns: a zero point is off"
        return pair.finding(Kind.ZERO_POINT, description)
    description = (
        f"weights differ by an update of rank {rank}, as of an adapter (LoRA) that is merged in "
        "one of the two alone, or otherwise"
    )
    return pair.finding(Kind.ADAPTER, description, facts={"rank": rank})


def find_wrong_merge(pair: WeightPair) -> WeightFinding | None:
    """Find the multiple of a known adapter's product in the merged model."""
    adapter = pair.adapter
    if adapter is None or adapter.update is not None:
        return None
    adapted, merged = pair.expected, pair.actual
    if not adapter.in_reference:
        adapted, merged = merged, adapted
    start = adapter.start.astype(np.float64)
    merge = fit_merge(start, adapted - start, merged)
    # A merge with a multiple of the scale, and its rounding, are larger than the base.
    rounding = pair.rounding * float(max(np.linalg.norm(start), np.linalg.norm(merged)))
    if not merge.explains(2 * rounding):
        return None
    mistake = mistake_of(merge, adapter.scale, 2 * SAME_SHARE)
    facts = {
        "times": merge.share,
        "rank": adapter.scale.rank,
        "method": "LoRA",
        "mistake": mistake,
    }
    edit = _edit_of(merge, adapter, pair, rounding)
    return pair.finding(Kind.ADAPTER, f"the adapter (LoRA) is {mistake}", edit, facts=facts)


def _edit_of(
    merge: FittedMerge, adapter: AdapterEffect, pair: WeightPair, rounding: float
) -> Edit | None:
    """Return the edit of a wrong merge from the adapter's factors; None if they do not suffice."""
    rows = None if pair.rows is None else Stretches.of(pair.rows)
    if adapter.factors is None or pair.grid is not None:
        return None
    return unmerged(
        merge,
        adapter.factors,
        adapter.scale,
        in_reference=adapter.in_reference,
        is_transposed=adapter.is_transposed,
        rows=rows,
        allowed=rounding,
    )


def low_rank(actual: np.ndarray, expected: np.ndarray, noise: float) -> int | None:
    """Return the rank of the change of a matrix if the rank is low and clear; else None.

    Parameters
    ----------
    actual, expected
        The matrix after the change and before, (n, D).
    noise
        Standard deviation of the rounding of the entries.

    Examples
    --------
    >>> random = np.random.default_rng(0)
    >>> weight, noise = random.standard_normal((2, 600, 600))
    >>> factors = random.standard_normal((2, 600, 60))
    >>> low_rank(weight + factors[0] @ factors[1].T, weight, 0.0)
    60
    >>> low_rank(weight + noise, weight, 0.0) is None
    True
    """
    largest_rank = min(LARGEST_RANK, min(actual.shape) // 4)
    random = np.random.default_rng(0)
    directions = random.standard_normal((actual.shape[1], largest_rank + FURTHER_DIRECTIONS))
    directions = directions.astype(actual.dtype)
    step_of_sample = max(1, len(actual) // SAMPLED_ROWS)
    for step in (step_of_sample, 1):  # a few rows rule a high rank out
        change = actual[::step] - expected[::step]
        singular_values = np.linalg.svd(change @ directions, compute_uv=False).astype(np.float64)
        floor = max(singular_values[0] * RANK_FLOOR, noise * np.sqrt(change.size))
        rank = int((singular_values > floor).sum())
        if rank > largest_rank:
            return None
    is_plain = rank > 0 and singular_values[rank] < singular_values[rank - 1] / 3
    return rank if is_plain else None
