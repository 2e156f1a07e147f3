"""Proposition 2.1 on tiny models, and checks of the checks."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.lab.theory.tiny import VARIETY, batch_for, built, linear, objective

from wqk.checkpoints import open_checkpoint
from wqk_lab.theory import bilinear_scores
from wqk_lab.theory.gradients import LayerGradient, gradients, load_values, mixing_error


def uses_of(model: Any, batch: Any, seed: int = 1) -> list[LayerGradient]:
    return gradients(model, batch, objective(linear, seed))


@pytest.mark.parametrize("name", VARIETY)
def test_attention_is_made_of_bilinear_forms(name: str) -> None:
    with built(name) as model:
        uses = uses_of(model, batch_for(model, 1, padded=True))
        checkpoint = open_checkpoint(model)
        for use in uses:
            plan = use.attention.plan
            mixing = mixing_error(use, load_values(checkpoint, plan))
            assert max(bilinear_scores.form_error(use), bilinear_scores.heads_error(use)) < 1e-13
            assert np.isnan(mixing) or mixing < 1e-13
            error = bilinear_scores.attention_error(use)
            assert np.isnan(error) == bool(plan.position or plan.sinks)
            assert np.isnan(error) or error < 1e-12
            assert bilinear_scores.convexity_error(use) < 1e-12 or plan.sinks
            if plan.rotary:
                assert bilinear_scores.same_order(use) < 0.95


# That of the keys alone does not matter: q_i · b is the same for all keys j; b · k_j is not.
@pytest.mark.parametrize(
    ("name", "biases"),
    [("bert", ("query.bias", "key.bias")), ("gpt2", "c_attn.bias"), ("bert", "query.bias")],
)
def test_without_biases_and_positions_the_form_alone_orders(name: str, biases: Any) -> None:
    with built(name) as model:
        batch = batch_for(model)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith(biases):
                    parameter.zero_()
        assert [bilinear_scores.same_order(use) for use in uses_of(model, batch)] == [1.0, 1.0]


def test_what_is_wrong_is_seen() -> None:
    # Numbers that are not the model's: weights are changed between the pass and the comparison.
    with built("bert") as model:
        checkpoint = open_checkpoint(model)
        for use in uses_of(model, batch_for(model)):
            attention = use.attention
            query, key = attention.query.weight, attention.key.weight
            rolled_use = replace(use, attention=attention.with_weights(np.roll(query, 1, 0), key))
            assert bilinear_scores.attention_error(rolled_use) > 1e-3
            assert bilinear_scores.same_order(rolled_use) < 0.9
            values = load_values(checkpoint, attention.plan)
            rolled = replace(values, stored_weight=np.roll(values.stored_weight, 1, 0))
            assert mixing_error(use, rolled) > 1e-3


def test_each_statement_has_its_own_measure() -> None:
    with built("bert") as model:
        use = uses_of(model, batch_for(model))[0]
    evidence: Any = SimpleNamespace(sample=lambda measure: measure(use, 0))
    measured = {
        name: bilinear_scores.MEASURES[name](evidence)
        for name in ("bilinear", "order", "order_of_layer")
    }
    errors = bilinear_scores.form_error(use), bilinear_scores.attention_error(use)
    assert [measured["bilinear"][name] for name in ("form", "attention")] == [*errors]
    assert measured["order"] == {"alike": bilinear_scores.same_order(use)}
    # The heads' mean scores and shares, of all pairs of keys; the measure draws some.
    means = bilinear_scores.plain_scores(use).mean(axis=1), use.probabilities.mean(axis=1)
    products = np.prod([mean[..., None] - mean[..., None, :] for mean in means], axis=0)
    expected = (products > 0).sum() / (products != 0).sum()
    assert measured["order_of_layer"]["alike"] == pytest.approx(expected, abs=0.03)
    assert abs(measured["order"]["alike"] - expected) > 0.06
