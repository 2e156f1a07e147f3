"""Weights that a module computes are read as its passes use them, and never written."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from tests.live.models import bert
from torch import nn
from torch.nn.utils import parametrizations

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.live.scoring import Penalty

TOKENS = torch.arange(16).reshape(2, 8)


class Doubled(nn.Module):
    """A parametrization of one's own."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


def doubled(module: nn.Module) -> nn.Module:
    return nn.utils.parametrize.register_parametrization(module, "weight", Doubled())


METHODS = {
    "spectral norm": parametrizations.spectral_norm,
    "weight norm": parametrizations.weight_norm,
    "orthogonal": parametrizations.orthogonal,
    "own": doubled,
    "older weight norm": nn.utils.weight_norm,
    "older spectral norm": nn.utils.spectral_norm,
}


def parametrized(method: Callable[[nn.Module], object]) -> Any:
    """A BERT whose queries, and keys of layer 0, are computed; after a pass in training mode."""
    model = bert()
    for layer in model.encoder.layer:
        nn.init.normal_(layer.attention.self.query.weight)
        method(layer.attention.self.query)
    method(model.encoder.layer[0].attention.self.key)
    model(TOKENS)
    return model


def state_of(model: nn.Module) -> list[torch.Tensor]:
    return [tensor.clone() for tensor in model.state_dict().values()]


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", METHODS)
def test_forms_are_those_of_the_weights_that_passes_use(name: str) -> None:
    model = parametrized(METHODS[name])
    before = state_of(model)
    norms = [wqk.open(model)[layer].form.norm for layer in range(2)]
    assert all(map(torch.equal, state_of(model), before)), "reading changed the model"
    assert model.encoder.layer[0].attention.self.query.training
    model.eval()
    model(TOKENS)
    for layer, norm in enumerate(norms):
        attention = model.encoder.layer[layer].attention.self
        product = attention.query.weight.T.double() @ attention.key.weight.double()
        np.testing.assert_allclose(norm, float(product.detach().norm()), rtol=1e-5)
    assert wqk.verify(model, TOKENS).verdict == "right"


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_parameters_with_similar_names_are_kept() -> None:
    linear = nn.Linear(2, 3)
    linear.register_parameter("weight_value", nn.Parameter(torch.ones(2)))
    names = set(open_checkpoint(nn.Sequential(nn.utils.weight_norm(linear))).tensors())
    assert names == {"0.bias", "0.weight", "0.weight_value"}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", METHODS)
def test_nothing_is_written_and_a_clipper_refuses_at_once(name: str) -> None:
    model = parametrized(METHODS[name])
    before = state_of(model)
    refused = pytest.raises(CheckpointError, match=r"weight is computed from other param")
    with refused:
        wqk.clip_(model, 1e-6, logits=wqk.logits(model.eval(), TOKENS))
    with refused:
        wqk.Clipper(model, 1.0)
    with refused:
        wqk.initialize_(model, "symmetric")
    assert all(map(torch.equal, state_of(model), before))
    model.train()
    clipper = wqk.Clipper(model, None)
    model(TOKENS)
    measured = clipper().logits
    assert measured is not None
    assert len(measured.blocks) == 2


def test_a_penalty_has_gradients_for_the_original_parameters() -> None:
    model = parametrized(parametrizations.weight_norm)
    Penalty(model, "symmetric")().backward()
    query = model.encoder.layer[1].attention.self.query
    assert float(query.parametrizations.weight.original1.grad.norm()) > 0
