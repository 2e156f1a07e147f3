"""Weights that the few rows tested first do not tell from a copy that was trained on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tests.small import edit, llama, save_model

import wqk
from wqk.sameness.finders.all_finders import find_first
from wqk.sameness.finders.low_rank import low_rank
from wqk.sameness.matching import are_in_place, cosines
from wqk.sameness.mismatches import Kind
from wqk.sameness.permutations import Sizes
from wqk.sameness.tolerances import ALIKE, SCREENED
from wqk.sameness.weight_pairs import Role, WeightPair

# Two rows, or two columns, that are not among the few that are tested first.
PLACES = [5, 151]
SHAPE = (192, 288)
HEADS = 6
# The weight in which a mistake is planted next to the training.
QUERIES = "model.layers.1.self_attn.q_proj.weight"


def weight_pair(actual: np.ndarray, expected: np.ndarray, side: str) -> WeightPair:
    """Return a weight whose numbers all moved by 1 % of their standard deviation."""
    noise = np.random.default_rng(3).standard_normal(actual.shape).astype(np.float32)
    return WeightPair(
        name=f"{side}.weight",
        role=Role(side),
        expected=expected,
        actual=actual + 0.01 * actual.std() * noise,
        sizes=Sizes(HEADS, HEADS, SHAPE[0] // HEADS),
        heads=0 if side == "output" else HEADS,
    )


def weight_of(side: str) -> np.ndarray:
    """Return a random weight, (n, D)."""
    shape = SHAPE[::-1] if side == "output" else SHAPE
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


@pytest.mark.parametrize("side", ["query", "output"])
@pytest.mark.parametrize(("axis", "kind"), [(0, Kind.ROWS), (1, Kind.COLUMNS)])
def test_two_exchanged_rows_or_columns_are_found(side: str, axis: int, kind: Kind) -> None:
    expected = weight_of(side)
    assert all(place % (expected.shape[axis] // SCREENED) for place in PLACES)
    actual = expected.swapaxes(0, axis).copy()
    actual[PLACES] = actual[PLACES[::-1]]
    finding = find_first(weight_pair(actual.swapaxes(0, axis), expected, side))
    assert finding is not None
    assert finding.kind is kind


@pytest.mark.parametrize("side", ["query", "output"])
def test_a_trained_weight_has_no_finding(side: str) -> None:
    expected = weight_of(side)
    pair = weight_pair(expected, expected, side)
    assert find_first(pair) is None
    assert "sketch_of_actual" not in vars(pair)  # no row was searched for


@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("place", [None, *range(0, 300, 23)])
def test_rows_are_in_place_exactly_where_all_cosines_are_large(
    order: str, place: int | None
) -> None:
    random = np.random.default_rng(0)
    rows = random.standard_normal((300, 130)).astype(np.float32)
    partners = -2 * rows + 0.01 * random.standard_normal(rows.shape).astype(np.float32)
    rows[11] = partners[11] = 0
    if place is not None:
        partners[place] += 0.5 * random.standard_normal(130).astype(np.float32)
    rows, partners = (np.asarray(each, order=order) for each in (rows, partners))
    expected = bool((cosines(rows, partners) > ALIKE).all())
    assert expected == (place is None)
    assert are_in_place(rows, partners, ALIKE) == expected


def test_a_change_whose_sampled_rows_alone_are_of_low_rank_is_of_high_rank() -> None:
    random = np.random.default_rng(1)
    weight = random.standard_normal((600, 400))
    change = random.standard_normal((600, 400))
    change[::2] = random.standard_normal((300, 3)) @ random.standard_normal((3, 400))
    assert low_rank(weight + change, weight, 0.0) is None
    change[1::2] = 0
    assert low_rank(weight + change, weight, 0.0) == 3


def double(weight: np.ndarray) -> np.ndarray:
    """Multiply a weight by 2."""
    return 2 * weight


def exchange_rows(weight: np.ndarray) -> np.ndarray:
    """Exchange two rows of a weight."""
    return weight[[1, 0, *range(2, len(weight))]]


@pytest.mark.parametrize(
    ("change", "kind"), [(double, Kind.SCALED), (exchange_rows, Kind.ROWS), (None, None)]
)
def test_a_mistake_in_a_trained_copy_is_named_beside_the_training(
    tmp_path: Path, change: Callable[[np.ndarray], np.ndarray] | None, kind: Kind | None
) -> None:
    original = llama(sides="qkvo")
    noise = np.random.default_rng(1)

    def train(name: str, weight: np.ndarray) -> np.ndarray:
        trained = weight + 0.001 * weight.std() * noise.standard_normal(weight.shape)
        return change(trained) if change is not None and name == QUERIES else trained

    save_model(tmp_path / "original", original)
    edit(save_model(tmp_path / "trained", original), train)
    comparison = wqk.same(tmp_path / "original", tmp_path / "trained")
    causes = []
    for block in comparison.blocks:
        causes += [(mismatch.verdict, block.layer) for mismatch in block.mismatches]
    named = [cause for cause in causes if cause[0] is not Kind.CLOSE]
    assert named == ([] if kind is None else [(kind, 1)])
    assert (Kind.CLOSE, 0) in causes
