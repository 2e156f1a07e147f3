"""Every proven family takes every kind of start, and keeps all else to the bit.

Axes: H query heads, G key heads, D model width.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.architectures import ALL, NAMED, Architecture
from tests.lab.training.starts.untrained import build_untrained

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan, Projection
from wqk.live.running import inputs_of
from wqk_lab.training.initializations import STARTS

# Keys and values share a latent.
REFUSED = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-yarn", "longcat-flash")
# What files on the hub are like says nothing of a live model.
LIVE = [a for a in ALL if not a.hub and not a.spelling]
SETTABLE = [architecture for architecture in LIVE if architecture.name not in REFUSED]
SYMMETRY = {"symmetric": 1, "negated": 1, "indefinite": 1, "paired": 1, "skew": -1}


# A share of them: every fourth architecture, with the kinds in turn.
SHARE = [
    pytest.param(architecture, [kind], id=f"{architecture.name}-{kind}")
    for architecture, kind in zip(SETTABLE[::4], itertools.cycle(SYMMETRY))
]
WHOLE = [
    pytest.param(architecture, [*SYMMETRY], id=architecture.name, marks=pytest.mark.campaign)
    for architecture in SETTABLE
]


@pytest.mark.parametrize(("architecture", "kinds"), SHARE + WHOLE)
def test_a_family(architecture: Architecture, kinds: list[str]) -> None:
    model, plans = build_untrained(architecture)
    keys = {plan.key.tensor for plan in plans}
    keys |= {plan.key.bias.name for plan in plans if plan.key.bias}
    drawn = {name: value.clone() for name, value in model.state_dict().items()}
    for kind in kinds:
        symmetry = SYMMETRY[kind]
        report = wqk.initialize_(model, STARTS[kind])
        held = model.state_dict()
        assert all(torch.equal(held[name], drawn[name]) for name in drawn.keys() - keys)
        for plan, change in zip(plans, report.layers, strict=True):
            for before, after in zip(others(drawn, plan), others(held, plan), strict=True):
                assert torch.equal(before, after), f"{kind}, layer {plan.layer}"
            heads = dense_heads(model, plan)
            require_symmetry(heads, kind, symmetry)
            layer = heads.sum((0, 1))
            moments = change.after
            np.testing.assert_allclose(moments.norm, np.linalg.norm(layer), rtol=1e-5)
            np.testing.assert_allclose(moments.trace, np.trace(layer), atol=1e-5 * moments.norm)
    layers = wqk.scan(model, heads=False).frame.filter(kind="self")
    assert [*layers["symmetry"]] == [change.after.symmetry for change in report.layers]
    wqk.initialize_(model, STARTS["mimetic"], seed=0)
    run(model)


def others(tensors: dict[str, torch.Tensor], plan: AttentionPlan) -> list[torch.Tensor]:
    """The queries and values of a layer, and their biases, cut out of whatever they share."""
    weights = []
    for side in (plan.query, plan.value):
        projection, bias = side.projection, side.bias
        assert isinstance(projection, Projection)
        weight = tensors[projection.tensor]
        cut = [(weight.T if projection.transposed else weight, projection.outputs)]
        cut += [(tensors[bias.name], bias.rows)] if bias else []
        for tensor, ranges in cut:
            weights += [tensor[start:stop] for start, stop in ranges or ((0, len(tensor)),)]
    return weights


def dense_heads(model: Any, plan: AttentionPlan) -> np.ndarray:
    """The heads' forms (G, H/G, D, D) in float64, written out."""
    heads = Block(open_checkpoint(model), plan).groups
    query, key = (factor.astype(np.float64) for factor in (heads.query, heads.key))
    return query @ key.swapaxes(-1, -2)


def symmetry_of(forms: np.ndarray) -> np.ndarray:
    """Tr(M M) / ‖M‖² of a stack of dense forms."""
    return (forms * forms.swapaxes(-1, -2)).sum((-2, -1)) / (forms**2).sum((-2, -1))


def require_symmetry(heads: np.ndarray, kind: str, symmetry: int) -> None:
    """Check the symmetry of the layer, and of every head that shares its key with no other head."""
    assert abs(symmetry_of(heads.sum((0, 1))) - symmetry) < 1e-6
    if heads.shape[1] > 1:
        return
    single = symmetry_of(heads[:, 0])
    with_neighbor = len(single) // 2 * 2 if kind == "paired" else 0
    assert np.all(np.abs(single[with_neighbor:] - symmetry) < 1e-6)
    assert np.all(np.abs(single[:with_neighbor]) < 0.9)


def run(model: Any) -> None:
    """The model's forward pass gives numbers."""
    inputs = {
        name: value.float() if getattr(value, "dtype", None) == torch.double else value
        for name, value in inputs_of(model, None, length=24, seed=0).items()
    }
    with torch.no_grad():
        outputs = model(**inputs)
    assert torch.isfinite(outputs[0]).all()


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_set_is_refused_and_left_alone(name: str) -> None:
    model, plans = build_untrained(NAMED[name])
    drawn = {key: value.clone() for key, value in model.state_dict().items()}
    for kind in (*SYMMETRY, "mimetic"):
        with pytest.raises(CheckpointError, match="keys and values share a latent"):
            wqk.initialize_(model, STARTS[kind])
    assert all(torch.equal(value, drawn[key]) for key, value in model.state_dict().items())
    assert len(wqk.initialize_(model, "random").layers) == len(plans) == NAMED[name].block_count
