"""The algebra of the starts: exact where it is exact, by many draws where it is a mean.

Axes: H query heads, G key heads, R head width, D width, r = G R.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.families.architectures import NAMED
from tests.families.proving import build

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.live.initializing import planes, shared_queries
from wqk_lab.training.initializations import FURTHER_TURNS as TURNS
from wqk_lab.training.initializations import mimetic

KINDS = pytest.mark.parametrize("kind", TURNS)


def drawn(heads: int, width: int, d: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((heads, width, d))


def layer_form(query: np.ndarray, key: np.ndarray) -> np.ndarray:
    """Σ_h Q_hᵀ K_g(h), head by head."""
    sharing = len(query) // len(key)
    return sum(q.T @ key[head // sharing] for head, q in enumerate(query))


@KINDS
@given(
    key_heads=st.integers(1, 5),
    sharing=st.integers(1, 3),
    width=st.integers(2, 5),
    d=st.integers(2, 12),
    data=st.data(),
)
def test_the_layer_has_the_symmetry_of_its_kind(kind, key_heads, sharing, width, d, data):
    query = drawn(key_heads * sharing, width, d, data.draw(st.integers(0, 2**32 - 1)))
    order = np.array(data.draw(st.permutations(range(width))))
    turn, symmetry = TURNS[kind]
    shared = shared_queries(query, key_heads)
    key = turn(shared, order)
    form = layer_form(query, key)
    np.testing.assert_allclose(form, symmetry * form.T, atol=1e-12 * math.sqrt(d) * width * 10)
    is_turned = kind != "skew" or width % 2 == 0
    if is_turned:  # by an orthogonal map, which keeps the keys' size
        assert np.linalg.norm(key) == pytest.approx(np.linalg.norm(shared))
    assert key.shape == shared.shape


@KINDS
@pytest.mark.parametrize(("heads", "key_heads"), [(4, 4), (3, 3), (6, 2)])
def test_the_norm_grows_as_the_table_says(kind, heads, key_heads):
    width, d, draws = 8, 24, 100
    turn = TURNS[kind].keys
    rank = key_heads * width
    trace, trace_of_square = {
        "symmetric": (rank, rank),
        "negated": (-rank, rank),
        "indefinite": (0, rank),
        "paired": (0, rank),
        "skew": (0, -rank),
    }[kind]
    ratios = []
    for seed in range(draws):
        query = drawn(heads, width, d, seed)
        key = turn(shared_queries(query, key_heads), np.arange(width))
        ratios.append((layer_form(query, key) ** 2).sum() / (heads // key_heads * rank * d * d))
    expected = 1 + (trace**2 + trace_of_square) / (rank * d)
    assert np.mean(ratios) == pytest.approx(expected, abs=5 * np.std(ratios) / math.sqrt(draws))


def test_signs_are_balanced_in_every_head_that_can_be():
    turn = TURNS["indefinite"].keys
    for width in (4, 12, 64):
        assert not turn(np.ones((3, width, 1)), np.arange(width)).sum(1).any()
    assert not turn(np.ones((2, 6, 1)), np.arange(6)).sum()


@pytest.mark.parametrize("name", ["llama", "gptj", "gpt-neox", "codegen", "glm", "bert"])
def test_planes_are_the_pairs_that_positions_turn(name):
    plan = wqk.open(open_checkpoint(build(NAMED[name]))).plans[0]
    width = plan.key.head_width
    order = planes(plan)
    assert sorted(order) == list(range(width))
    if plan.rotary is None:
        return
    turned = {}
    for dimension in range(width):  # which others does a rotation bring in?
        vector = np.zeros((1, width))
        vector[0, dimension] = 1
        moved = np.flatnonzero(np.abs(plan.rotary.rotate(vector, np.array([1]))) > 1e-12)
        turned[dimension] = set(moved)
    pairs = [set(pair) for pair in order.reshape(-1, 2)]
    for pair in pairs:
        assert all(turned[dimension] <= pair for dimension in pair)
    assert sum(len(moved_dimensions) == 2 for moved_dimensions in turned.values()) == 2 * len(
        plan.rotary.frequencies
    )


@pytest.mark.parametrize("kind", ["symmetric", "indefinite", "skew"])
def test_the_map_commutes_with_rotations(kind):
    plan = wqk.open(open_checkpoint(build(NAMED["llama"]))).plans[0]
    turn = TURNS[kind].keys
    order, vectors = planes(plan), drawn(2, plan.key.head_width, 7, 0)

    def rotated(stack: np.ndarray) -> Any:
        return plan.rotary.rotate(stack.swapaxes(-1, -2), np.full(7, 5)).swapaxes(-1, -2)

    np.testing.assert_allclose(turn(rotated(vectors), order), rotated(turn(vectors, order)))


def best(heads: int, d: int, rank: int) -> list[tuple[np.ndarray, ...]]:
    """Target of each mimetic head, and the first of its singular vectors and values."""
    noise = np.random.default_rng(3).standard_normal((heads, d, d))
    targets = 0.7 * noise / math.sqrt(d) + 0.4 * np.eye(d)
    parts = ((target, *np.linalg.svd(target)) for target in targets)
    return [(target, u[:, :rank], s[:rank], v[:rank]) for target, u, s, v in parts]


def mimetic_sides(heads: int, key_heads: int, width: int, d: int) -> tuple[Any, Any]:
    """Queries and keys, each repeated for the queries that share it."""
    shapes = {"query": (heads, width, d), "key": (key_heads, width, d)}
    drawn = mimetic(shapes, np.random.default_rng(3), alpha=0.7, beta=0.4)
    return drawn["query"], drawn["key"].repeat(heads // key_heads, axis=0)


def test_a_mimetic_head_is_the_best_of_its_rank_and_both_sides_share_its_values():
    for query, key, (_, u, s, v) in zip(*mimetic_sides(3, 3, 5, 20), best(3, 20, 5), strict=True):
        np.testing.assert_allclose(query.T @ key, u * s @ v, atol=1e-10)
        for side in (query, key):
            np.testing.assert_allclose(np.linalg.svd(side)[1] ** 2, s)


def test_grouped_mimetic_heads_come_as_near_as_their_key_lets_them():
    for query, key, (target, *_) in zip(*mimetic_sides(6, 2, 5, 20), best(6, 20, 5), strict=True):
        # Least squares: what is left over is orthogonal to the key.
        assert np.abs((target - query.T @ key) @ key.T).max() < 1e-10
