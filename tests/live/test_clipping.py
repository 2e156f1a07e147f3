"""Clipping changes W_qk of the heads above the limit by their factor, and nothing else."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from tests.families.architectures import NAMED
from tests.families.proving import build
from tests.live.models import bert, gpt2, llama, train_step

import wqk
from wqk.attention import Block
from wqk.errors import FormError, UnknownFamily
from wqk.live.logits import LogitMeter

# Separate, fused (in, out), fused by key head, sectioned, grouped, one key head, latent with and
# without a latent of queries, norms of all heads at once, scores without a scale, sinks.
LAYOUTS = (
    "bert", "gpt2", "gpt-neox", "phi3", "llama", "gemma", "falcon-grouped", "deepseek-v2",
    "deepseek-v2-lite", "olmo2", "bloom", "t5", "gpt-oss",
)  # fmt: skip
SHARED_GAINS = ("qwen3", "gemma3-text")


def forms(model: Any) -> dict[tuple[Any, ...], tuple[np.ndarray, float]]:
    """Every head's queries and keys at a distance, as their products for fixed inputs."""
    checkpoint = wqk.open_checkpoint(model)
    found = {}
    for plan in wqk.open(checkpoint).plans:
        attention = Block(checkpoint, plan)
        random = np.random.default_rng(plan.layer)
        x, y = (random.standard_normal((5, d)) for d in attention.heads.shape)
        at = np.arange(5), np.arange(3, 8)
        for head, products in enumerate(attention.products(x, y, at)):
            form = attention.head(head)
            found[plan.stack, plan.kind, plan.layer, head] = products, form
    return found


def others(model: Any, changed: set[str]) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in model.state_dict().items() if n not in changed}


@pytest.mark.parametrize("grouped", ["both", "queries"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_forms_of_named_heads_change_by_their_factor(name: str, grouped: Any) -> None:
    model = build(NAMED[name]).double()
    before = forms(model)
    random = np.random.default_rng(0)
    chosen = [key for key in before if random.random() < 0.4] or [next(iter(before))]
    maxima = {key: float(random.uniform(101, 1000)) for key in chosen}
    report = wqk.clip_(model, 100.0, logits=maxima, grouped=grouped)
    assert {one[:4]: one.max_logit for one in report.heads} == pytest.approx(maxima)
    factors = {one[:4]: one.factor for one in report.heads}
    for key, (products, form) in forms(model).items():
        factor = 100 / maxima[key] if key in maxima else 1.0
        assert factors.get(key, 1.0) == pytest.approx(factor)
        old_products, old_form = before[key]
        np.testing.assert_allclose(products, factor * old_products, rtol=1e-6, atol=1e-9)
        expected = factor * old_form.dense()
        np.testing.assert_allclose(form.dense(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", SHARED_GAINS)
def test_shared_gains_take_the_worst_head_s_factor(name: str) -> None:
    model = build(NAMED[name]).double()
    before = forms(model)
    stack, kind, layer, head = next(key for key in before if key[3] == 1)
    report = wqk.clip_(model, 100.0, logits={(stack, kind, layer, head): 400.0})
    assert {one.factor for one in report.heads} == {0.25}
    assert "share the gains" in repr(report)
    for key, (products, _) in forms(model).items():
        factor = 0.25 if key[:3] == (stack, kind, layer) else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)


def test_norms_without_gains_are_said_to_prevent_it() -> None:
    model = build(NAMED["nanochat"]).double()
    state = others(model, set())
    report = wqk.clip_(model, 100.0, logits={(0, 1): 400.0})
    assert not report.heads
    assert "no effect here" in repr(report)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())


@pytest.mark.parametrize("make", [bert, gpt2, llama])
def test_everything_else_is_the_same_to_the_last_bit(make: Any) -> None:
    model, untouched = make(), make()
    head = 1
    wqk.clip_(model, 1.0, logits={(1, head): 3.0}, grouped="queries")
    checkpoint = wqk.open_checkpoint(untouched)
    plan = wqk.open(checkpoint).plans[1]
    attention = Block(wqk.open_checkpoint(model), plan)
    original = Block(checkpoint, plan)
    others = [h for h in range(4) if h != head]
    assert np.array_equal(attention.query.weight[others], original.query.weight[others])
    read = {part.name for part in plan.parts}
    for (name, one), other in zip(
        model.state_dict().items(), untouched.state_dict().values(), strict=True
    ):
        assert name in read or torch.equal(one, other), name
    assert plan.value is not None
    values = plan.value.projection
    one, other = (
        values.take(c.read([values.part])[0]) for c in (wqk.open_checkpoint(model), checkpoint)
    )
    assert np.array_equal(one, other)


def test_measured_maxima_come_down_to_the_limit() -> None:
    model = llama().double().train()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(40)
            layer.self_attn.k_proj.weight.mul_(40)
    tokens = torch.randint(20, (2, 8), generator=torch.Generator().manual_seed(0))
    assert "next training pass" in repr(wqk.clip_(model, 0.5))
    model(tokens)
    assert len(wqk.clip_(model, 0.5)) > 0
    meter = LogitMeter(model)
    meter.start()
    model(tokens)
    assert meter.logits.blocks["decoder", "self", 0].max_logit.max() == pytest.approx(0.5)


def test_a_loop_of_five_lines() -> None:
    model = bert().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    clipped = 0
    for step in range(6):
        train_step(model, optimizer, step)
        clipped += len(wqk.clip_(model, 2.0))
    assert clipped > 0
    assert all(torch.isfinite(parameter).all() for parameter in model.parameters())


def test_tied_layers_are_scaled_once() -> None:
    model = build(NAMED["albert"]).double()
    before = forms(model)
    wqk.clip_(model, 100.0, logits={(0, 2): 200.0})
    for key, (products, _) in forms(model).items():
        factor = 0.5 if key[3] == 2 else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)
    model = llama().double()
    model.layers[1].self_attn = model.layers[0].self_attn
    before = forms(model)
    report = wqk.clip_(model, 100.0, logits={(0, 2): 200.0, (1, 2): 400.0})
    assert {(one.layer, one.factor) for one in report.heads} == {(0, 0.25), (1, 0.25)}
    for key, (products, _) in forms(model).items():
        factor = 0.25 if key[3] == 2 else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_momentum_is_rescaled_or_left(make: Any) -> None:
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    model = llama().train()
    optimizer = make(model.parameters(), lr=1e-3, **options)
    train_step(model, optimizer, 0)
    query = model.layers[0].self_attn.q_proj.weight
    state = copy.deepcopy(optimizer.state[query])
    wqk.clip_(model, 1.0, logits={(0, 1): 4.0}, grouped="queries")
    name = "exp_avg" if make is torch.optim.AdamW else "momentum_buffer"
    assert torch.equal(optimizer.state[query][name], state[name])
    wqk.clip_(model, 1.0, logits={(0, 1): 4.0}, grouped="queries", optimizer=optimizer)
    rows = torch.ones(32, 1)
    rows[8:16] = 0.25
    torch.testing.assert_close(optimizer.state[query][name], state[name] * rows)
    if make is torch.optim.AdamW:
        found, old = optimizer.state[query]["exp_avg_sq"], state["exp_avg_sq"]
        torch.testing.assert_close(found, old * rows**2)


def test_half_precision_is_rescaled_within_its_rounding() -> None:
    model = llama().bfloat16()
    before = model.layers[0].self_attn.q_proj.weight.float()
    wqk.clip_(model, 1.0, logits={(0, 1): 4.0}, grouped="queries")
    after = model.layers[0].self_attn.q_proj.weight.float()
    torch.testing.assert_close(after[8:16], before[8:16] / 4)
    assert torch.equal(after[16:], before[16:])


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf])
def test_limits_are_positive_numbers(limit: float) -> None:
    with pytest.raises(FormError, match="limit must be a positive number"):
        wqk.clip_(bert(), limit, logits={(0, 0): 1.0})


def test_logits_have_to_fit() -> None:
    model = bert()
    for wrong in ({(0, 4): 1.0}, {(2, 0): 1.0}, {0: 1.0}, np.ones((4, 2)), np.ones(4)):
        with pytest.raises(FormError, match="logits"):
            wqk.clip_(model, 1.0, logits=wrong)
    assert len(wqk.clip_(model, 1.0, logits=np.full((2, 4), 2.0))) == 8
    report = wqk.clip_(model, 1.0, logits={(0, 0): math.nan, (0, 1): math.inf})
    assert not report.heads
    assert "without a finite maximum" in repr(report)
    with pytest.raises(FormError, match="grouped"):
        wqk.clip_(model, 1.0, grouped="keys")  # type: ignore[arg-type]


def test_no_weights_are_written_on_a_guess() -> None:
    sides = ({"q_proj": torch.nn.Linear(8, 8), "k_proj": torch.nn.Linear(8, 8)} for _ in range(2))
    with pytest.raises(UnknownFamily):
        wqk.clip_(torch.nn.Sequential(*map(torch.nn.ModuleDict, sides)))
