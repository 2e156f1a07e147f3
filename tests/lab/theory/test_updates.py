"""The implicit update against steps that are really made, and its symmetry against simulation."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.lab.theory.tiny import batch_for, built, linear, objective

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.forms import BilinearForm
from wqk.forms.scores import symmetry
from wqk_lab.theory.gradients import blocks_of, gradients
from wqk_lab.theory.updates import (
    alignment,
    expected_symmetry,
    first_order,
    parameter_gradients,
    passed_on,
    queries_and_keys_alone,
)

LAYOUTS = ("bert", "gpt2", "gptj", "llama", "phi3", "falcon-grouped", "bloom", "gemma2")


def attentions(model: Any) -> list[Any]:
    checkpoint = open_checkpoint(model)
    return blocks_of(checkpoint, wqk.open(checkpoint).plans)


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_of_gradient_descent_does_what_is_said(name: str) -> None:
    """S39: a first-order part, and the square of the rate times the product of the gradients."""
    rate = 1e-3
    with built(name) as model:
        batch, loss = batch_for(model, 6), objective(linear, 6)
        layer_gradients = gradients(model, batch, loss)
        before = attentions(model)
        loss(model, batch).backward()
        torch.optim.SGD(model.parameters(), lr=rate).step()
        after = attentions(model)
    for layer, old, new in zip(layer_gradients, before, after, strict=True):
        factor_gradients = layer.factor_gradients()
        slope, square = (
            first_order(layer.attention, *factor_gradients),
            layer.attention.with_weights(*factor_gradients),
        )
        step = rate * slope.dense() + rate**2 * square.form.dense()
        expected = new.form.dense() - old.form.dense()
        np.testing.assert_allclose(step, expected, atol=1e-9 * np.abs(expected).max())


def test_gradients_have_to_be_there() -> None:
    with built("bert") as model, pytest.raises(CheckpointError, match=r"query\.weight"):
        parameter_gradients(model, wqk.open(open_checkpoint(model)).plans)


def test_all_parameters_have_gradients_again_afterwards() -> None:
    with built("bert") as model:
        plans = wqk.open(open_checkpoint(model)).plans
        frozen = next(model.parameters())
        frozen.requires_grad_(False)
        before = [parameter.requires_grad for parameter in model.parameters()]
        with queries_and_keys_alone(model, plans):
            inside = [parameter.requires_grad for parameter in model.parameters()]
        assert sum(inside) == sum(len(plan.parts) for plan in plans)
        assert [parameter.requires_grad for parameter in model.parameters()] == before


@pytest.mark.parametrize("name", ["bert", "gptj"])
def test_symmetry_passes_through_tied_factors_only(name: str) -> None:
    with built(name) as model:
        layer_gradients = gradients(model, batch_for(model, 8), objective(linear, 8))
    for layer in layer_gradients:
        row = passed_on(replace(layer, beta=layer.beta + layer.beta.swapaxes(-1, -2)))
        assert row["gradient"] == pytest.approx(1)
        assert row["update_of_symmetric_part"] < 0.8
        if not layer.attention.plan.rotary:
            assert row["if_tied"] == pytest.approx(1)
        again = passed_on(layer)
        part = again["update_of_symmetric_part"]
        assert part == pytest.approx(row["update_of_symmetric_part"])
        update = first_order(layer.attention, *layer.factor_gradients()).dense()
        gradient = layer.by_prediction().dense()
        cosine = -(update * gradient).sum() / np.linalg.norm(update) / np.linalg.norm(gradient)
        assert alignment(layer) == pytest.approx(cosine)
        assert again["update"] == pytest.approx((update * update.T).sum() / (update**2).sum())


@pytest.mark.parametrize("rank", [24, 48, 96, 192])
def test_the_expected_symmetry_of_an_update(rank: int) -> None:
    random = np.random.default_rng(rank)
    a, b = random.standard_normal((2, 192, rank))
    gradient = random.standard_normal((192, 192))
    gradient += gradient.T
    update = gradient @ b @ b.T + a @ a.T @ gradient
    actual = float(symmetry(BilinearForm(update, np.eye(192))))
    assert actual == pytest.approx(expected_symmetry(192, rank), abs=0.03)
    tied = gradient @ b @ b.T + b @ b.T @ gradient
    assert float(symmetry(BilinearForm(tied, np.eye(192)))) == pytest.approx(1)
