"""Pairs of tokens against sums by hand, planted coefficients, and a causal mask."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from tests.lab.theory.tiny import batch_for, built, linear, objective

from wqk.errors import TheoryError
from wqk.forms import BilinearForm
from wqk_lab.theory.gradients import LayerGradient, gradients
from wqk_lab.theory.pairing import (
    common_symmetry,
    correlation,
    pairs_of,
    parts_of_symmetry,
    share_of_predicted,
)

B, H, N, D = 2, 3, 7, 40

PREDICTED = np.array([[1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]], bool)


@pytest.fixture(scope="module")
def layer() -> LayerGradient:
    """A layer of a model; tests replace its numbers."""
    with built("bert") as model:
        return gradients(model, batch_for(model), objective(linear, 0))[0]


def planted(layer: LayerGradient, beta: np.ndarray, inputs: np.ndarray) -> LayerGradient:
    return replace(layer, beta=beta, query_input=inputs, key_input=inputs)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((B, H, N, N)), random.standard_normal((B, N, D))


def test_sums_by_hand(layer: LayerGradient) -> None:
    beta, x = drawn(1)
    gradient = planted(layer, beta, x)
    pairs = pairs_of(gradient, PREDICTED)
    row = parts_of_symmetry(gradient, pairs)
    entries, mirrored = [], []
    for b, h, i, j in np.ndindex(B, H, N, N):
        if i != j and PREDICTED[b, i] and PREDICTED[b, j]:
            entries.append(beta[b, h, i, j])
            mirrored.append(beta[b, h, j, i])
    numbers = correlation(pairs)
    assert numbers["correlation"] == pytest.approx(np.corrcoef(entries, mirrored)[0, 1])
    assert numbers["agreement"] == pytest.approx(np.mean(np.multiply(entries, mirrored) > 0))
    assert numbers["pairs"] == len(entries) / 2
    form, between, diagonal = np.zeros((D, D)), 0.0, 0.0
    summed = beta.sum(axis=1)
    for b, i, j in np.ndindex(B, N, N):
        form += summed[b, i, j] * np.outer(x[b, i], x[b, j])
        size = (x[b, i] @ x[b, i]) * (x[b, j] @ x[b, j]) * summed[b, i, j] * summed[b, j, i]
        between, diagonal = between + size * (i != j), diagonal + size * (i == j)
    square = (form**2).sum()
    assert row["symmetry"] == pytest.approx((form * form.T).sum() / square)
    assert row["from_pairs"] == pytest.approx(between / square)
    assert row["from_diagonal"] == pytest.approx(diagonal / square)


def test_the_symmetric_part_of_predicted_pairs_by_hand(layer: LayerGradient) -> None:
    beta, x = drawn(2)
    numbers = share_of_predicted(pairs_of(planted(layer, beta, x), PREDICTED))
    summed, of_predicted_pairs, of_single_predictions = beta.sum(axis=1), 0.0, 0.0
    counts = [0, 0]
    for b, i, j in np.ndindex(B, N, N):
        term = summed[b, i, j] * np.outer(x[b, i], x[b, j])
        if i < j and PREDICTED[b, i] and PREDICTED[b, j]:
            pair = term + summed[b, j, i] * np.outer(x[b, j], x[b, i])
            of_predicted_pairs += (((pair + pair.T) / 2) ** 2).sum()
            counts[0] += 2
        if PREDICTED[b, i] and not PREDICTED[b, j]:
            of_single_predictions += (term**2).sum()
            counts[1] += 1
    assert numbers["size"] == pytest.approx(of_predicted_pairs / of_single_predictions)
    assert numbers["count"] == pytest.approx(counts[0] / counts[1])
    assert numbers["ratio"] == pytest.approx(
        of_predicted_pairs / of_single_predictions / (counts[0] / counts[1])
    )


def test_each_token_in_turn_by_hand(layer: LayerGradient) -> None:
    random = np.random.default_rng(4)
    beta = random.standard_normal((B * N, H, N, N))
    x = random.standard_normal((B * N, N, D))
    pairs = pairs_of(planted(layer, beta, x), np.tile(np.eye(N, dtype=bool), (B, 1)))
    assert pairs.predicted.all()
    for b, i, j in np.ndindex(B, N, N):
        at_i, at_j = b * N + i, b * N + j  # the passes that predict i and j
        np.testing.assert_array_equal(pairs.beta[b, :, i, j], beta[at_i, :, i, j])
        overlap = (x[at_i, i] @ x[at_j, i]) * (x[at_i, j] @ x[at_j, j])
        assert pairs.overlap[b, i, j] == pytest.approx(overlap)
        assert pairs.cross[b, i, j] == pytest.approx((x[at_i, i] @ x[at_i, j]) ** 2)


def test_a_causal_mask_leaves_no_pairs() -> None:
    with built("llama") as model:
        layer_gradients = gradients(model, batch_for(model), objective(linear, 0))
    for causal in layer_gradients:
        pairs = pairs_of(causal, np.ones((2, 9), bool))
        assert parts_of_symmetry(causal, pairs)["from_pairs"] == 0
        assert np.isnan(correlation(pairs)["agreement"])


def test_pairs_that_are_needed(layer: LayerGradient) -> None:
    for predicted in (np.zeros((2, 9), bool), np.ones((2, 9), bool)):
        assert np.isnan(share_of_predicted(pairs_of(layer, predicted))["ratio"])
    assert np.isnan(correlation(pairs_of(layer, np.zeros((2, 9), bool)))["correlation"])
    with built("bart") as model:
        layer_gradients = gradients(model, batch_for(model), objective(linear, 0))
    (cross, *_) = (
        gradient for gradient in layer_gradients if gradient.attention.plan.kind == "cross"
    )
    with pytest.raises(TheoryError, match="only in self-attention"):
        pairs_of(cross, np.zeros((2, 9), bool))


def test_what_updates_have_in_common() -> None:
    random = np.random.default_rng(0)
    symmetric = random.standard_normal((12, 12))
    symmetric += symmetric.T
    noise = 4 * random.standard_normal((40, 12, 12))
    noise -= noise.swapaxes(-1, -2)  # each batch's own part is skew
    matrices = symmetric + noise
    values = common_symmetry([BilinearForm(m, np.eye(12)) for m in matrices])

    def ratio(chosen_batches: list[int]) -> float:
        crossed = list(itertools.permutations(chosen_batches, 2))
        above = sum((matrices[a] * matrices[b].T).sum() for a, b in crossed)
        return float(above / sum((matrices[a] * matrices[b]).sum() for a, b in crossed))

    for out in (0, 17):
        without = ratio([a for a in range(40) if a != out])
        assert values[out] == pytest.approx(40 * ratio(list(range(40))) - 39 * without)
    assert 0.8 < values.mean() < 1.2
    with pytest.raises(TheoryError, match="takes three of them, got 2"):
        common_symmetry([BilinearForm(symmetric, symmetric)] * 2)
    equal = common_symmetry([BilinearForm(symmetric, np.eye(12))] * 3)
    np.testing.assert_allclose(equal, 1)  # three are enough, and have everything in common
