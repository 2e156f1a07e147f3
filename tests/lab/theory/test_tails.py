"""Tails of columns and rows: against dense matrices, and under the theorem's assumptions."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk import BilinearForm
from wqk_lab.theory.tails import lemma, tails, tails_of
from wqk_lab.theory.verdict import Estimate, Sample


def simulate_update(
    variances: np.ndarray,
    *,
    context_share: float = 1.0,
    contexts: int = 256,
    tokens: int = 16,
    seed: int = 0,
) -> BilinearForm:
    """One update under the assumptions of Proposition S1.8 and Theorem S1.12, drawn at random.

    Of the tokens t*, a share acts as context, Σ_i β_i x_i yᵀ, and the others are predicted,
    y (Σ_j β_j x_j)ᵀ. Every y has the identity as covariance, as the proposition asks.
    """
    random = np.random.default_rng(seed)
    shape = (contexts, len(variances))
    # Of normal x_i, the sum Σ_i β_i x_i is normal with the covariance Σ_i β_i² Σ.
    sizes = np.linalg.norm(random.standard_normal((contexts, tokens)), axis=1, keepdims=True)
    summed = sizes * random.standard_normal(shape) * np.sqrt(variances)
    predicted = random.standard_normal(shape)
    as_context = np.arange(contexts)[:, None] < context_share * contexts
    query, key = np.where(as_context, summed, predicted), np.where(as_context, predicted, summed)
    return BilinearForm.from_factors(query.T, key.T)


def random_form(seed: int, width: int = 12) -> BilinearForm:
    random = np.random.default_rng(seed)
    scales = np.exp(random.standard_normal((2, width, 1)))
    return BilinearForm.from_factors(*(random.standard_normal((2, width, 5)) * scales))


@given(st.integers(0, 10**6))
def test_tails_are_those_of_the_dense_matrix_and_turn_with_it(seed: int) -> None:
    form = random_form(seed)
    dense = form.dense()
    columns, rows = np.linalg.norm(dense, axis=0), np.linalg.norm(dense, axis=1)
    upright, turned = tails(form), tails(form.T)
    assert upright.log_variance_ratio == pytest.approx(np.log(columns.var() / rows.var()))
    assert upright.reach == pytest.approx(columns.max() / rows.max())
    longest, shorter = (columns, rows) if upright.reach >= 1 else (rows, columns)
    assert upright.beyond == pytest.approx((longest > shorter.max()).mean())
    assert turned.log_variance_ratio == pytest.approx(-upright.log_variance_ratio)
    assert turned.reach == pytest.approx(1 / upright.reach)
    for score in ("directionality", "directionality_excess"):
        assert getattr(upright, score) == pytest.approx(getattr(form, score))
        assert getattr(turned, score) == pytest.approx(-getattr(form, score))


def mean_tails(variances: np.ndarray, context_share: float = 1.0) -> tuple[float, float, float]:
    """ln of the ratio of variances, the directionality (excess), and the latter's error."""
    updates = [
        tails(simulate_update(variances, context_share=context_share, seed=seed))
        for seed in range(12)
    ]
    excess = [update.directionality_excess for update in updates]
    ratio = np.mean([update.log_variance_ratio for update in updates])
    return float(ratio), float(np.mean(excess)), float(np.std(excess) / np.sqrt(12))


def test_more_context_than_prediction_means_longer_rows_and_the_reverse() -> None:
    some_large = np.exp(np.random.default_rng(7).standard_normal(96))
    ratios = [mean_tails(some_large, share)[0] for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] > 2
    assert abs(ratios[2]) < 0.2


def test_isotropic_tokens_favor_neither_side() -> None:
    ratio, excess, error = mean_tails(np.ones(96))
    assert abs(ratio) < 0.2
    assert abs(excess) < 4 * error


def test_a_larger_variance_is_no_larger_directionality() -> None:
    # Evenly spread variances: rows vary much more, but none lies two deviations above the mean.
    ratio, excess, _ = mean_tails(np.linspace(0.1, 2, 96))
    assert ratio < -1
    assert excess < 0


def test_the_simulated_update_is_the_sum_over_tokens_drawn_one_by_one() -> None:
    # The law of large numbers for E[ΔM ΔMᵀ] and E[ΔMᵀ ΔM], against drawing every x_i.
    variances, contexts, tokens = np.array([1.0, 4.0, 9.0]), 64, 8
    random = np.random.default_rng(9)
    drawn, simulated = np.zeros((2, 2, 3))
    for seed in range(100):
        x = random.standard_normal((contexts, tokens, 3)) * np.sqrt(variances)
        beta, y = (random.standard_normal((contexts, count)) for count in (tokens, 3))
        dense = np.einsum("ti,tim,tk->mk", beta, x, y)
        drawn += [(dense**2).sum(axis=0), (dense**2).sum(axis=1)]
        form = simulate_update(variances, contexts=contexts, tokens=tokens, seed=seed)
        simulated += [form.column_norms**2, form.row_norms**2]
    np.testing.assert_allclose(simulated, drawn, rtol=0.2)


@pytest.mark.parametrize("width", [17, 64])
def test_the_chance_of_independent_entries_is_the_one_that_is_stated(width: int) -> None:
    random = np.random.default_rng(0)
    forms = [
        BilinearForm(random.standard_normal((width, width)), np.eye(width)) for _ in range(400)
    ]
    sample = tails_of({"0": forms})
    assert sample.chance == pytest.approx(2 / np.sqrt(width - 1))
    assert sample.values.std() == pytest.approx(sample.chance, rel=0.12)
    assert not sample.one_model
    assert tails_of({"0": forms[:1]}, "models").one_model


def test_a_lemma_is_said_to_be_of_the_batches_that_there_were() -> None:
    sample = Sample(np.ones((3, 2)), "batches", ("0", "1"), {"reach": np.full((3, 2), 2.0)})
    assert Estimate.of(lemma(sample)).over == "3 batches × 2 layers"


def test_forms_are_measured_one_at_a_time() -> None:
    """The forms of all layers and batches of a large model do not fit into memory."""
    made: list[weakref.ref[BilinearForm]] = []

    def forms() -> Iterator[BilinearForm]:
        random = np.random.default_rng(0)
        for _ in range(4):
            assert sum(reference() is not None for reference in made) <= 1
            form = BilinearForm(random.standard_normal((5, 3)), random.standard_normal((5, 3)))
            made.append(weakref.ref(form))
            yield form
            del form

    assert tails_of({"0": forms()}).values.shape == (4, 1)
