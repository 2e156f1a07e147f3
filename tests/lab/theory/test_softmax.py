"""The softmax's effect on β, against explicit sums and the values' own weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from tests.lab.theory.tiny import batch_for, built, linear, objective

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.forms import BilinearForm
from wqk.forms.scores import symmetry
from wqk_lab.theory.capture import attention_recorded
from wqk_lab.theory.gradients import LayerGradient, gradients
from wqk_lab.theory.softmax import softmax_effect


@pytest.fixture(scope="module")
def layers() -> list[LayerGradient]:
    with built("bert") as model:
        return gradients(model, batch_for(model, 4), objective(linear, 4))


def test_the_error_is_the_output_gradient_met_with_the_values() -> None:
    with built("bert") as model:
        batch, loss = batch_for(model, 4), objective(linear, 4)
        layer_gradients = gradients(model, batch, loss)
        plans = wqk.open(open_checkpoint(model)).plans
        with attention_recorded(model, plans) as records:
            value = loss(model, batch)
        outputs = [record.mixed[0] for record in records]
        at_outputs = torch.autograd.grad(value, outputs)
        weights = dict(model.named_parameters())
    for layer, (gradient, delta) in enumerate(zip(layer_gradients, at_outputs, strict=True)):
        name = f"bert.encoder.layer.{layer}.attention.self.value"
        values = gradient.key_input @ weights[f"{name}.weight"].detach().numpy().T
        values += weights[f"{name}.bias"].detach().numpy()
        d, v = (a.reshape(2, 9, 4, 8) for a in (delta.numpy(), values))
        expected = np.einsum("bihr,bjhr->bhij", d, v)
        np.testing.assert_allclose(gradient.error, expected, atol=1e-12 * np.abs(expected).max())


def test_the_numbers_by_hand(layers: list[LayerGradient]) -> None:
    gradient = layers[0]
    effect = softmax_effect(gradient)
    beta, error = gradient.beta.ravel(), gradient.error.ravel()
    assert effect["cosine"] == pytest.approx(
        beta @ error / np.linalg.norm(beta) / np.linalg.norm(error)
    )
    x = gradient.query_input
    form_of_beta = np.einsum("bhij,bid,bje->de", gradient.beta, x, x)
    form_of_error = np.einsum("bhij,bid,bje->de", gradient.error, x, x)
    cosine = (
        (form_of_beta * form_of_error).sum()
        / np.linalg.norm(form_of_beta)
        / np.linalg.norm(form_of_error)
    )
    assert effect["cosine_of_forms"] == pytest.approx(cosine)
    for value, matrix in (
        (effect["symmetry"], form_of_beta),
        (effect["symmetry_without"], form_of_error),
    ):
        assert value == pytest.approx(float(symmetry(BilinearForm(matrix, np.eye(32)))))
    assert effect["row_sums"] < 1e-12


def test_pairs_that_are_not_seen_do_not_count() -> None:
    with built("llama") as model:
        (gradient, _) = gradients(model, batch_for(model, 4), objective(linear, 4))
    hidden = gradient.probabilities == 0
    assert hidden.any()
    with_hidden_errors = replace(gradient, error=np.where(hidden, 1e6, gradient.error))
    assert softmax_effect(with_hidden_errors) == softmax_effect(gradient)


def test_what_is_proportional_has_cosine_one(layers: list[LayerGradient]) -> None:
    effect = softmax_effect(replace(layers[0], beta=-3 * layers[0].error))
    assert effect["cosine"] == pytest.approx(-1)
    assert effect["agreement"] == 0
