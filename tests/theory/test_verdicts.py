"""Verdicts on planted numbers: what holds, holds in part and fails."""

from __future__ import annotations

import numpy as np
import pytest

from wqk.theory.measuring import pairing, scores
from wqk.theory.measuring.rows import by_layer, span


def rows(**columns: tuple[float, ...]) -> tuple[dict[str, float], ...]:
    """One row a layer, of one batch."""
    count = len(next(iter(columns.values())))
    return tuple(
        {"layer": layer, **{name: values[layer] for name, values in columns.items()}}
        for layer in range(count)
    )


@pytest.mark.parametrize(
    ("correlation", "verdict"),
    [((0.9, 0.7), "holds"), ((0.9, 0.2), "holds in part"), ((0.01, -0.02), "fails")],
)
def test_coefficients_that_pair_up(correlation: tuple[float, ...], verdict: str) -> None:
    seen = rows(correlation=correlation, agreement=(0.5, 0.5))
    assert pairing._coefficients(seen, causal=False).verdict == verdict


@pytest.mark.parametrize(("pair", "verdict"), [(0.0, "holds"), (1e-3, "fails")])
def test_under_a_causal_mask_nothing_pairs_up(pair: float, verdict: str) -> None:
    assert pairing._coefficients(rows(pair_symmetry=(0.0, pair)), causal=True).verdict == verdict


@pytest.mark.parametrize(
    ("symmetry", "pairs", "likeness", "verdict"),
    [
        ((0.8, 0.6), (0.7, 0.5), (0.1, 0.1), "holds"),
        ((0.8, 0.6), (0.0, 0.5), (0.8, 0.1), "holds in part"),  # symmetric, not from pairs
        ((0.8, 0.0), (0.7, 0.0), (0.1, 0.0), "holds in part"),
        ((0.05, 0.0), (0.0, 0.0), (0.05, 0.0), "fails"),
    ],
)
def test_symmetry_has_to_come_from_pairs(
    symmetry: tuple[float, ...],
    pairs: tuple[float, ...],
    likeness: tuple[float, ...],
    verdict: str,
) -> None:
    seen = rows(
        symmetry=symmetry, from_pairs=pairs, from_likeness=likeness, from_diagonal=(0.0, 0.0)
    )
    assert pairing._symmetry(seen, causal=False).verdict == verdict
    assert pairing._symmetry(seen, causal=True).verdict == "not tested"


@pytest.mark.parametrize(
    ("order", "plain", "verdict"),
    [(1e-8, 1.0, "holds"), (1e-8, 0.9, "holds in part"), (0.1, 1.0, "holds in part")],
)
def test_the_form_has_to_be_the_whole_score(order: float, plain: float, verdict: str) -> None:
    seen = rows(order=(0.0, order), order_plain=(1.0, plain))
    assert scores._order(seen).verdict == verdict


def test_medians_leave_out_what_is_not_known() -> None:
    seen = [{"layer": 1, "s": np.nan}, {"layer": 0, "s": 1.0}, {"layer": 1, "s": np.nan}]
    np.testing.assert_array_equal(by_layer(seen, "s"), [1.0, np.nan])
    assert span(seen, "s") == "+1.00"
