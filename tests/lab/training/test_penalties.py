"""Penalties: equal to their definition, with the right gradients, finite where they have poles."""

from __future__ import annotations

import itertools
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.architectures import NAMED
from tests.families.proving import build
from tests.small import bert

import wqk
from wqk.attention import Block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, FormError, NonFiniteWeights
from wqk.live.scoring import FLOOR, Penalty

# One of each layout, and of each thing that is folded into a form.
LAYOUTS = [
    "bert",
    "gpt2",
    "modernbert",
    "codegen",
    "gpt-neox",
    "falcon-multi-query",
    "llama",
    "qwen3",
    "gemma3-text",
    "cohere-norms",
    "phi-norms",
    "stablelm-norms",
    "deepseek-v2",
    "swinv2",
    "t5",
]
KINDS = pytest.mark.parametrize("kind", ["symmetric", "skew"])
EVERY_LAYOUT = pytest.mark.parametrize("name", LAYOUTS)


def penalty(model: Any, kind: str, **chosen: Any) -> torch.Tensor:
    return Penalty(model, kind, **chosen)()


def dense_penalty(model: Any, kind: str, heads: bool) -> float:
    """‖M‖²/(‖M_s‖² + FLOOR/2 ‖M‖²) or with M_n, of matrices written out in float64."""
    checkpoint, ratios = open_checkpoint(model), []
    for plan in wqk.open(checkpoint).plans:
        if plan.kind == "self":
            stack = Block(checkpoint, plan).heads
            forms = stack.query.astype(np.float64) @ stack.key.swapaxes(-1, -2).astype(np.float64)
            forms = forms.reshape(-1, *forms.shape[-2:])
            for form in forms if heads else [forms.sum(0)]:
                part = (form + form.T if kind == "symmetric" else form - form.T) / 2
                square = (form**2).sum()
                ratios.append(square / ((part**2).sum() + FLOOR / 2 * square))
    return float(np.mean(ratios))


@EVERY_LAYOUT
def test_it_is_the_ratio_of_dense_matrices(name):
    model = build(NAMED[name])
    for kind, heads in product(("symmetric", "skew"), (False, True)):
        value = penalty(model, kind, heads=heads)
        assert value.shape == ()
        assert value.item() == pytest.approx(dense_penalty(model, kind, heads), rel=1e-5)


@pytest.mark.parametrize("heads", [False, True], ids=["layers", "heads"])
@EVERY_LAYOUT
def test_the_gradient_is_that_of_finite_differences(name, heads):
    model = build(NAMED[name]).double()
    term = Penalty(model, "symmetric", heads=heads)
    parameters = list(model.parameters())
    gradients = torch.autograd.grad(term(), parameters, allow_unused=True)
    moved = [(p, g) for p, g in zip(parameters, gradients, strict=True) if g is not None]
    directions = [torch.randn_like(p) for p, _ in moved]
    expected = sum(float((g * v).sum()) for (_, g), v in zip(moved, directions, strict=True))

    def stepped(size: float) -> float:
        with torch.no_grad():
            for (parameter, _), direction in zip(moved, directions, strict=True):
                parameter.add_(size * direction)
            value = term().item()
            for (parameter, _), direction in zip(moved, directions, strict=True):
                parameter.sub_(size * direction)
        return value

    size = 1e-5
    measured = (stepped(size) - stepped(-size)) / (2 * size)
    assert expected == pytest.approx(measured, rel=1e-5, abs=1e-8)
    assert abs(expected) > 1e-3


@EVERY_LAYOUT
def test_values_and_all_else_get_no_gradient(name):
    model = build(NAMED[name])
    penalty(model, "skew").backward()
    plans = [p for p in wqk.open(open_checkpoint(model)).plans if p.kind == "self"]
    parts = itertools.chain.from_iterable(plan.parts for plan in plans)
    reached = {part.name for part in parts}
    gradients = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() <= reached
    for plan in plans:
        for side in (plan.query, plan.key):
            assert gradients[side.tensor].any()
        value = plan.value.projection
        if value.tensor in gradients and hasattr(value, "take"):
            (gradient,) = open_checkpoint(gradients).read([value.part])
            assert not value.take(gradient).any()


@KINDS
def test_beside_the_pole_it_leads_away(kind):
    model = bert(initializer_range=0.2)
    wqk.initialize_(model, "skew" if kind == "symmetric" else "indefinite")
    keys = [layer.attention.self.key.weight for layer in model.encoder.layer]
    with torch.no_grad():
        for key in keys:
            key.add_(0.02 * torch.randn(32, 32))
    term = Penalty(model, kind)
    first = term()
    first.backward()
    assert 50 < first.item() < 2 / FLOOR
    with torch.no_grad():
        for key in keys:
            key.sub_(1e-3 * key.grad / key.grad.norm())
    assert term().item() < first.item()


@KINDS
def test_at_the_pole_value_and_gradient_are_finite(kind):
    model = bert()
    wqk.initialize_(model, "skew" if kind == "symmetric" else "symmetric")
    value = penalty(model, kind)
    value.backward()
    assert value.item() == pytest.approx(2 / FLOOR, rel=0.02)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("heads", [False, True], ids=["layers", "heads"])
def test_zero_forms_have_no_symmetry_to_pull_at(heads):
    model = bert(num_hidden_layers=1)
    attention = model.encoder.layer[0].attention.self
    with torch.no_grad():
        attention.query.weight[:8] = 0  # one of four heads
        if not heads:
            attention.query.weight.zero_()
    value = penalty(model, "symmetric", heads=heads)
    value.backward()
    gradient = attention.key.weight.grad
    assert torch.isfinite(gradient).all()
    assert not gradient[:8].any()
    assert value.item() == pytest.approx(2, abs=0.2)


def test_zero_rows_and_columns_leave_the_gradient_finite():
    model = bert()
    attention = model.encoder.layer[1].attention.self
    with torch.no_grad():
        attention.query.weight[:, 3] = 0
        attention.key.weight[:, [3, 5]] = 0
        attention.key.weight[2] = 0
    penalty(model, "symmetric", heads=True).backward()
    assert torch.isfinite(attention.query.weight.grad).all()
    assert torch.isfinite(attention.key.weight.grad).all()


def test_autocast_changes_no_bit():
    model = bert()
    plain = penalty(model, "symmetric")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = penalty(model, "symmetric")
    assert cast.dtype == torch.float32
    assert torch.equal(plain, cast)


@pytest.mark.parametrize("name", ["bert", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_are_widened_first(name, dtype):
    model = build(NAMED[name]).to(dtype)
    value = penalty(model, "skew", heads=True)
    value.backward()
    assert value.dtype == torch.float32
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {dtype}
    assert torch.equal(value, penalty(model.float(), "skew", heads=True))


def test_layers_can_be_chosen():
    model = bert(num_hidden_layers=3)
    of_first, of_last, of_both = (
        penalty(model, "skew", layers=layers).item() for layers in ([0], [2], [0, 2])
    )
    assert of_both == pytest.approx((of_first + of_last) / 2)
    assert of_both != penalty(model, "skew").item()


@pytest.mark.parametrize("layers", [[2], [-1], [0, 7], []])
def test_layers_that_are_not_there_are_refused(layers):
    with pytest.raises(CheckpointError, match=r"which are \[0, 1\], got"):
        penalty(bert(), "symmetric", layers=layers)


def test_what_cannot_be_penalized_is_refused():
    with pytest.raises(FormError, match="one of symmetric, skew, got 'orthogonal'"):
        penalty(bert(), "orthogonal")
    with pytest.raises(CheckpointError, match=r"expected an nn\.Module, got dict"):
        penalty({}, "skew")
    with torch.device("meta"), pytest.raises(CheckpointError, match="on the meta device"):
        penalty(bert(), "skew")


def test_broken_weights_are_named():
    model = bert()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.key.weight[0, 0] = torch.nan
    with pytest.raises(
        NonFiniteWeights, match=r"layer\.1\.attention\.self\.key\.weight: 1 of 1024"
    ):
        penalty(model, "symmetric")
