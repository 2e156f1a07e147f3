"""Pairs of tokens against sums by hand, planted coefficients, and a causal mask."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.theory.tiny import batch_for, built, linear, objective

from wqk.errors import TheoryError
from wqk.forms import BilinearForm
from wqk.theory.gradients import LayerGradient, gradients
from wqk.theory.pairing import common_update, masking_sweep, pairing, predicted_pairing
from wqk.theory.subject import Subject

torch = pytest.importorskip("torch")

B, H, N, D = 2, 3, 7, 40


@pytest.fixture(scope="module")
def layer() -> LayerGradient:
    """A layer of a model; its numbers are made anew below."""
    with built("bert") as model:
        return gradients(model, batch_for(model), objective(linear, 0))[0]


def planted(layer: LayerGradient, beta: np.ndarray, inputs: np.ndarray) -> LayerGradient:
    return replace(layer, beta=beta, query_input=inputs, key_input=inputs)


def drawn(seed: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return random.standard_normal((B, H, N, N)), random.standard_normal((B, N, D))


def orthogonal(seed: int) -> np.ndarray:
    """Inputs that share nothing, of different lengths."""
    random = np.random.default_rng(seed)
    basis = np.linalg.qr(random.standard_normal((D, B * N)))[0].T
    return (basis * random.uniform(0.5, 2, (B * N, 1))).reshape(B, N, D)


@pytest.mark.parametrize(("sign", "agreement"), [(1, 1.0), (-1, 0.0)])
def test_planted_pairs(layer: LayerGradient, sign: int, agreement: float) -> None:
    beta, _ = drawn(0)
    beta = np.triu(beta, 1)
    beta = beta + sign * beta.swapaxes(-1, -2)
    row = pairing(planted(layer, beta, orthogonal(0)))
    assert row.pair_symmetry == pytest.approx(sign)
    assert row.agreement == agreement
    assert [row.symmetry, row.from_pairs] == pytest.approx([sign, sign])
    assert row.symmetric_share == pytest.approx((1 + sign) / 2)
    assert row.from_likeness == pytest.approx(0, abs=1e-9)
    assert row.likeness == pytest.approx(0, abs=1e-12)


def test_sums_by_hand(layer: LayerGradient) -> None:
    beta, x = drawn(1)
    row = pairing(planted(layer, beta, x))
    ones, others = [], []
    for b, h, i, j in np.ndindex(B, H, N, N):
        if i != j:
            ones.append(beta[b, h, i, j])
            others.append(beta[b, h, j, i])
    one, other = np.array(ones), np.array(others)
    assert row.correlation == pytest.approx(np.corrcoef(one, other)[0, 1])
    assert row.pair_symmetry == pytest.approx((one * other).sum() / (one**2).sum())
    assert row.agreement == pytest.approx(np.mean(one * other > 0))
    whole, pairs, diagonal = np.zeros((D, D)), 0.0, 0.0
    summed = beta.sum(axis=1)
    for b, i, j in np.ndindex(B, N, N):
        whole += summed[b, i, j] * np.outer(x[b, i], x[b, j])
        size = (x[b, i] @ x[b, i]) * (x[b, j] @ x[b, j]) * summed[b, i, j] * summed[b, j, i]
        pairs, diagonal = pairs + size * (i != j), diagonal + size * (i == j)
    square = (whole**2).sum()
    assert row.symmetry == pytest.approx((whole * whole.T).sum() / square)
    assert row.from_pairs == pytest.approx(pairs / square)
    assert row.from_diagonal == pytest.approx(diagonal / square)
    unit = x / np.linalg.norm(x, axis=-1, keepdims=True)
    likeness = [unit[b, i] @ unit[b, j] for b, i, j in np.ndindex(B, N, N) if i != j]
    assert row.likeness == pytest.approx(np.mean(likeness))


def test_predicted_pairs_by_hand(layer: LayerGradient) -> None:
    beta, x = drawn(2)
    predicted = np.array([[1, 1, 0, 0, 1, 0, 0], [0, 1, 1, 0, 0, 0, 0]], bool)
    row = predicted_pairing(planted(layer, beta, x), predicted)
    summed = beta.sum(axis=1)
    sizes: dict[str, float] = {}
    counts: dict[str, int] = {}
    both, rest = np.zeros((D, D)), np.zeros((D, D))
    for b, i, j in np.ndindex(B, N, N):
        m, n = predicted[b, i], predicted[b, j]
        kind = (
            "itself" if i == j else ("both" if n else "one") if m else "other" if n else "neither"
        )
        term = summed[b, i, j] * np.outer(x[b, i], x[b, j])
        sizes[kind] = sizes.get(kind, 0.0) + (term**2).sum()
        counts[kind] = counts.get(kind, 0) + 1
        if kind == "both":
            both += term
        else:
            rest += term
    for kind, size in sizes.items():
        assert getattr(row, kind) == pytest.approx(size / sum(sizes.values()))
    assert row.size_ratio == pytest.approx(sizes["both"] / sizes["one"])
    assert row.count_ratio == pytest.approx(counts["both"] / counts["one"])
    assert row.share == pytest.approx(5 / 14)
    assert row.count_limit == pytest.approx(5 / 9)
    assert row.symmetry_of_both == pytest.approx((both * both.T).sum() / (both**2).sum())
    assert row.symmetry_without_both == pytest.approx((rest * rest.T).sum() / (rest**2).sum())
    pairs = [
        (beta[b, h, i, j], beta[b, h, j, i])
        for b, h, i, j in np.ndindex(B, H, N, N)
        if i != j and predicted[b, i] and predicted[b, j]
    ]
    one, other = np.array(pairs).T
    assert row.pair_symmetry_of_both == pytest.approx(one @ other / (one @ one))


def test_masked_tokens_that_share_an_embedding_are_symmetric_whatever_beta_is(
    layer: LayerGradient,
) -> None:
    beta, x = drawn(3)
    predicted = np.zeros((B, N), bool)
    predicted[:, :3] = True
    x[predicted] = x[0, 0]
    row = predicted_pairing(planted(layer, beta, x), predicted)
    assert row.symmetry_of_both == pytest.approx(1)
    assert row.likeness_of_both == pytest.approx(1)
    assert abs(row.pair_symmetry_of_both) < 0.9


@pytest.mark.parametrize(("share", "limit"), [(0.15, 0.176), (0.2, 0.25), (0.3, 0.429)])
def test_the_remarks_share_of_pairs(layer: LayerGradient, share: float, limit: float) -> None:
    tokens, count = 200, round(200 * share)
    predicted = np.zeros((1, tokens), bool)
    predicted[:, :count] = True
    random = np.random.default_rng(0)
    beta, x = random.standard_normal((1, 1, tokens, tokens)), random.standard_normal((1, tokens, 8))
    row = predicted_pairing(planted(layer, beta, x), predicted)
    assert row.count_limit == pytest.approx(limit, abs=5e-4)
    assert row.count_ratio == pytest.approx((count - 1) / (tokens - count))


def test_a_causal_mask_leaves_no_pairs() -> None:
    with built("llama") as model:
        found = gradients(model, batch_for(model), objective(linear, 0))
    for causal in found:
        row = pairing(causal)
        assert row.pair_symmetry == 0
        assert row.from_pairs == 0
        assert math.isnan(row.agreement)


def test_pairs_that_are_needed(layer: LayerGradient) -> None:
    for predicted in (np.zeros((2, 9), bool), np.ones((2, 9), bool), np.eye(9, dtype=bool)[:2]):
        with pytest.raises(TheoryError, match="two predicted tokens and one that is not"):
            predicted_pairing(layer, predicted)
    with built("bart") as model:
        found = gradients(model, batch_for(model), objective(linear, 0))
    (cross, *_) = (one for one in found if one.attention.plan.kind == "cross")
    for measure in (pairing, lambda one: predicted_pairing(one, np.zeros((2, 9), bool))):
        with pytest.raises(TheoryError, match="only in self-attention"):
            measure(cross)


def test_the_last_layer_has_rows_of_predicted_tokens_alone() -> None:
    # The remark's sum over predicted i; earlier layers have others, which later tokens look at.
    with built("bert") as model:
        subject = masked(model)
        rows = list(masking_sweep(subject, [0.3]))
    assert [row["layer"] for row in rows] == [0, 1, 0, 1]
    for row in rows:
        unpredicted = row["other"] + row["neither"]
        assert (unpredicted == 0) == (row["layer"] == 1)


def masked(model: Any) -> Subject:
    blocks = np.random.default_rng(0).integers(4, 61, (2, 3, 10))
    return Subject("tiny", model, "masked", blocks, mask_token=3)


def test_what_updates_have_in_common() -> None:
    random = np.random.default_rng(0)
    symmetric = random.standard_normal((12, 12))
    symmetric += symmetric.T
    noise = 4 * random.standard_normal((60, 12, 12))
    noise -= noise.swapaxes(-1, -2)  # each batch's own part is skew
    matrices = symmetric + noise
    found = common_update([BilinearForm(m, np.eye(12)) for m in matrices])
    assert found.single < -0.5 < 0.8 < found.common < 1.2
    assert 0 < found.share_error < found.share
    crossed = [(a, b) for a, b in np.ndindex(60, 60) if a != b]
    above = sum((matrices[a] * matrices[b].T).sum() for a, b in crossed)
    below = sum((matrices[a] * matrices[b]).sum() for a, b in crossed)
    assert found.common == pytest.approx(above / below)
    assert found.share == pytest.approx(below / 59 / (matrices**2).sum())
    total = matrices.sum(axis=0)
    assert found.together == pytest.approx((total * total.T).sum() / (total**2).sum())
    with pytest.raises(TheoryError, match="takes three of them, got 2"):
        common_update([BilinearForm(symmetric, symmetric)] * 2)


def test_updates_that_have_nothing_in_common() -> None:
    noise = np.random.default_rng(0).standard_normal((8, 12, 12))
    found = common_update([BilinearForm(m, np.eye(12)) for m in noise])
    assert abs(found.share) < found.share_error
    assert math.isnan(found.common)


def test_a_sweep_over_shares() -> None:
    with built("bert") as model:
        rows = list(masking_sweep(masked(model), [0.2, 0.5], layers=[1]))
        with pytest.raises(TheoryError, match="not trained on masked tokens"):
            next(masking_sweep(masked(model).having(objective="causal"), [0.2]))
    assert [(row["mask_share"], row["batch"]) for row in rows] == [
        (0.2, 0), (0.2, 1), (0.5, 0), (0.5, 1),
    ]  # fmt: skip
    assert [row["share"] for row in rows] == pytest.approx([0.2, 0.2, 0.5, 0.5])
