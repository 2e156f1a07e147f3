"""Every proven family takes every kind of start, and keeps all else to the bit."""

from __future__ import annotations


from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tests.families.architectures import ALL
from tests.families.proving import build

import wqk
from wqk.attention import attention_plans
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.families import Projection
from wqk.verification.inputs import inputs_of

if TYPE_CHECKING:
    from tests.families.architectures import Architecture

    from wqk.families import AttentionPlan

# What cannot be set, and what is said of it.
REFUSED = {
    "deepseek-v2": "a latent that the values share",
    "deepseek-v2-lite": "a latent that the values share",
    "deepseek-v3": "a latent that the values share",
    "deepseek-v3-yarn": "a latent that the values share",
}
SETTABLE = [architecture for architecture in ALL if architecture.name not in REFUSED]
# Heads of these are wider than the model.
TOO_WIDE = {"gemma3-hub"}
SYMMETRY = {"symmetric": 1, "indefinite": 1, "paired": 1, "skew": -1}


def build_untrained(architecture: Architecture) -> tuple[Any, list[AttentionPlan]]:
    """A random model whose query and key norms are as before training, and its self-attention."""
    model = build(architecture)
    parameters = dict(model.named_parameters())
    plans = [p for p in attention_plans(open_checkpoint(model)) if p.rule.kind == "self"]
    with torch.no_grad():
        for plan in plans:
            for part in (*plan.query_norm, *plan.key_norm):
                parameters[part.name].fill_(1 - plan.rule.norm_offset)
            for part in (*plan.query_norm_bias, *plan.key_norm_bias):
                parameters[part.name].zero_()
            if plan.temperature:
                parameters[plan.temperature.name].fill_(2.0)
    return model, plans


@pytest.mark.parametrize("architecture", SETTABLE, ids=lambda architecture: architecture.name)
def test_a_family(architecture: Architecture) -> None:
    model, plans = build_untrained(architecture)
    key_names = {plan.key.tensor for plan in plans}
    key_names |= {plan.key_bias.name for plan in plans if plan.key_bias}
    drawn = clone(model)
    for kind, symmetry in SYMMETRY.items():
        report = wqk.initialize_(model, kind)
        held = model.state_dict()
        assert all(torch.equal(held[name], drawn[name]) for name in drawn.keys() - key_names)
        for plan in plans:
            for before, after in zip(others(drawn, plan), others(held, plan), strict=True):
                assert torch.equal(before, after), f"{kind}, layer {plan.layer}"
        rows = wqk.scan(model).frame.filter(kind="self")
        require_symmetry(rows, kind, symmetry)
        layers = rows.filter(rows["head"].is_null())
        told = [(layer.after.symmetry, layer.after.norm) for layer in report.layers]
        scanned = list(zip(layers["symmetry"], layers["norm"], strict=True))
        np.testing.assert_allclose(told, scanned, rtol=1e-6)
    if architecture.name not in TOO_WIDE:
        wqk.initialize_(model, "mimetic", seed=0)
    run(model)


def clone(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def others(tensors: dict[str, torch.Tensor], plan: AttentionPlan) -> list[torch.Tensor]:
    """The queries and values of a layer, and their biases, cut out of whatever they share."""
    found = []
    for projection, bias in ((plan.query, plan.query_bias), (plan.value, plan.value_bias)):
        assert isinstance(projection, Projection)
        for name, ranges in ((projection.tensor, projection.outputs), (bias and bias.name, bias and bias.rows)):
            if name:
                tensor = tensors[name]
                tensor = tensor.T if projection.transposed and tensor.ndim > 1 else tensor
                found += [tensor[start:stop] for start, stop in ranges or ((0, len(tensor)),)]
    return found


def require_symmetry(rows: Any, kind: str, symmetry: int) -> None:
    """Of every layer, and of every head that has its key for itself."""
    is_layer = rows["head"].is_null()
    single = rows.filter(~is_layer & (rows["heads"] == rows["key_heads"]))
    exact = [*rows.filter(is_layer)["symmetry"]]
    if kind == "paired":
        with_neighbour = single["head"] < single["heads"] // 2 * 2
        assert all(abs(s) < 0.9 for s in single.filter(with_neighbour)["symmetry"])
        exact += single.filter(~with_neighbour)["symmetry"]
    else:
        exact += single["symmetry"]
    assert max(abs(s - symmetry) for s in exact) < 1e-6


def run(model: Any) -> None:
    """The model's forward pass gives numbers."""
    with torch.no_grad():
        outputs = model(**inputs_of(model, None, length=24, seed=0))
    assert torch.isfinite(outputs[0]).all()
