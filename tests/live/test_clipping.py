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
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import wqk
from wqk.attention import Block
from wqk.errors import CheckpointError, FormError, UnknownFamily
from wqk.families import Place
from wqk.live.logits import Logits


def forms(model: Any) -> dict[tuple[Any, ...], tuple[np.ndarray, float]]:
    """Every head's queries and keys at a distance, as their products for fixed inputs."""
    checkpoint = wqk.open_checkpoint(model)
    products_and_forms = {}
    for plan in wqk.open(checkpoint).plans:
        attention = Block(checkpoint, plan)
        random = np.random.default_rng(plan.layer)
        x, y = (random.standard_normal((5, d)) for d in attention.groups.widths)
        at = np.arange(5), np.arange(3, 8)
        for head, products in enumerate(attention.products(x, y, at)):
            form = attention[head]
            products_and_forms[plan.stack, plan.kind, plan.layer, head] = products, form
    return products_and_forms


def others(model: Any, changed: set[str]) -> dict[str, torch.Tensor]:
    return {n: p.clone() for n, p in model.state_dict().items() if n not in changed}


@pytest.mark.parametrize("grouped", ["both", "queries"])
def test_grouped_heads_change_by_their_factors(grouped: Any) -> None:
    model = build(NAMED["llama"]).double()
    before = forms(model)
    random = np.random.default_rng(0)
    maxima = {key: float(random.uniform(101, 1000)) for key in before if random.random() < 0.4}
    keys = [layer.self_attn.k_proj.weight.clone() for layer in model.model.layers]
    report = wqk.clip_(model, 100.0, logits=maxima, grouped=grouped)
    assert {head[:4]: head.max_logit for head in report.heads} == pytest.approx(maxima)
    for key, (products, form) in forms(model).items():
        factor = 100 / maxima[key] if key in maxima else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)
        np.testing.assert_allclose(form.dense(), factor * before[key][1].dense(), atol=1e-7)
    kept = [
        torch.equal(key, layer.self_attn.k_proj.weight)
        for key, layer in zip(keys, model.model.layers, strict=True)
    ]
    assert all(kept) == (grouped == "queries")


def test_shared_gains_take_the_worst_head_s_factor_and_the_report_says_so() -> None:
    model = build(NAMED["qwen3"]).double()
    report = wqk.clip_(model, 100.0, logits={(0, 1): 400.0, (0, 2): 90.0})
    assert [(head.head, head.factor) for head in report.heads] == [
        (number, 0.25) for number in range(6)
    ]
    assert "that of 5 heads that needed less or none" in repr(report)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("deberta", "position terms are made with queries and keys"),
        ("olmo-clipped", "where they do, logits fall less"),
    ],
)
def test_what_cannot_be_exact_is_said(name: str, note: str) -> None:
    assert note in " ".join(wqk.clip_(build(NAMED[name]), 100.0, logits={(0, 1): 400.0}).notes)


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
    unclipped = [h for h in range(4) if h != head]
    assert np.array_equal(attention.query.weight[unclipped], original.query.weight[unclipped])
    read = {part.name for part in plan.parts}
    for (name, tensor), original_tensor in zip(
        model.state_dict().items(), untouched.state_dict().values(), strict=True
    ):
        assert name in read or torch.equal(tensor, original_tensor), name
    projection = plan.value.projection
    values_after, values_before = (
        projection.take(opened.read([projection.part])[0])
        for opened in (wqk.open_checkpoint(model), checkpoint)
    )
    assert np.array_equal(values_after, values_before)


def large(model: Any) -> Any:
    """The model with logits far from zero."""
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(40)
            layer.self_attn.k_proj.weight.mul_(40)
    return model


def batches(count: int) -> list[torch.Tensor]:
    """Several batches of two sequences."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(20, (2, 8), generator=generator) for _ in range(count)]


def published_rule(model: Any, micro_batches: list[torch.Tensor], limit: float) -> set[Any]:
    """The heads that MuonClip clips, from the softmax's input of eager attention."""
    model = copy.deepcopy(model)
    model.set_attn_implementation("eager")
    largest: dict[tuple[int, int], float] = {}
    for number, layer in enumerate(model.layers):
        attention = layer.self_attn

        def keep(module: Any, args: Any, kwargs: Any, number: int = number) -> None:
            x, (cos, sin) = kwargs["hidden_states"], kwargs["position_embeddings"]
            shape = (*x.shape[:2], -1, module.head_dim)
            query = module.q_proj(x).view(shape).transpose(1, 2)
            key = module.k_proj(x).view(shape).transpose(1, 2)
            query, key = apply_rotary_pos_emb(query, key, cos, sin)
            key = key.repeat_interleave(module.num_key_value_groups, 1)
            logits = (query @ key.mT * module.scaling).tril()
            hidden = torch.ones_like(logits, dtype=torch.bool).triu(1)
            of_heads = logits.masked_fill(hidden, -math.inf).amax((0, 2, 3))
            for head, value in enumerate(of_heads.tolist()):
                largest[number, head] = max(value, largest.get((number, head), -math.inf))

        attention.register_forward_pre_hook(keep, with_kwargs=True)
    with torch.no_grad():
        for tokens in micro_batches:
            model(tokens)
    return {key for key, value in largest.items() if value > limit}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.filterwarnings("error:Using `torch.compile")
def test_every_pass_since_the_last_call_counts(compiled: bool) -> None:
    """The clipped heads of each step are those of the published rule, written by hand."""
    model = large(llama().train())
    run = torch.compile(model, backend="eager") if compiled else model
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    tokens = batches(9)
    largest = [block.max_logit for block in wqk.logits(model, tokens[0]).blocks.values()]
    limit = float(np.quantile(largest, 0.8))
    clipper = wqk.Clipper(model, limit)
    assert repr(clipper) == f"Clipper(2 blocks, limit {limit:g}, every step, step 0)"
    for step in range(3):
        micro_batches = tokens[3 * step : 3 * step + 3]
        expected = published_rule(model, micro_batches, limit)
        for micro_batch in micro_batches:
            run(micro_batch).last_hidden_state[..., 0].square().sum().backward()
        optimizer.step(), optimizer.zero_grad()
        done = clipper()
        assert {(head.layer, head.head) for head in done.heads} == expected
        assert step or 0 < len(expected) < 8
    clipper.close()


def test_a_head_that_only_the_second_batch_shows_is_clipped() -> None:
    model, (first, second) = large(llama().train()), batches(2)
    clipper = wqk.Clipper(model, None)
    largest = []
    for tokens in (first, second):
        model(tokens)
        done = clipper()
        assert not done.heads
        largest.append(done.logits.frame["max_logit"].to_numpy())
    model(first), model(second)
    of_both_passes = clipper().logits.frame["max_logit"].to_numpy()
    np.testing.assert_array_equal(of_both_passes, np.maximum(*largest))
    assert (of_both_passes > largest[0]).any()


def test_sequences_limit_what_is_measured_and_steps_in_between_cost_nothing() -> None:
    model, (tokens,) = llama().train(), batches(1)
    clipper = wqk.Clipper(model, None, every=2, sequences=1)
    model(tokens)
    assert clipper().logits is None
    assert any(module._forward_hooks for module in model.modules())
    model(tokens)
    measured = clipper().logits
    assert not any(module._forward_hooks for module in model.modules())
    expected = wqk.logits(model, tokens[:1])
    np.testing.assert_allclose(
        measured.frame["max_logit"].to_numpy(), expected.frame["max_logit"].to_numpy(), rtol=1e-6
    )


def test_measured_maxima_come_down_to_the_limit() -> None:
    model, (tokens,) = large(llama().double().train()), batches(1)
    with pytest.raises(FormError, match="logits are missing"):
        wqk.clip_(model, 0.5)
    clipper = wqk.Clipper(model, 0.5)
    assert "no pass in training mode was measured" in repr(clipper())
    model(tokens)
    assert len(clipper()) > 0
    first = wqk.logits(model, tokens).blocks["decoder", "self", 0]
    assert first.max_logit.max() == pytest.approx(0.5)


def test_tied_layers_are_scaled_once() -> None:
    model = llama().double()
    model.layers[1].self_attn = model.layers[0].self_attn
    before = forms(model)
    report = wqk.clip_(model, 100.0, logits={(0, 2): 200.0, (1, 2): 400.0})
    assert {(head.layer, head.factor) for head in report.heads} == {(0, 0.25), (1, 0.25)}
    for key, (products, _) in forms(model).items():
        factor = 0.25 if key[3] == 2 else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("by", ["module", "memory"])
def test_keys_of_two_layers_are_left_as_they_are(by: str) -> None:
    model = llama().double()
    if by == "module":
        model.layers[1].self_attn.k_proj = model.layers[0].self_attn.k_proj
    else:
        model.layers[1].self_attn.k_proj.weight.data = model.layers[0].self_attn.k_proj.weight.data
    before = forms(model)
    wqk.clip_(model, 100.0, logits={(0, 2): 200.0})
    for key, (products, _) in forms(model).items():
        factor = 0.5 if key[2:] == (0, 2) else 1.0
        np.testing.assert_allclose(products, factor * before[key][0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_momentum_is_left(make: Any) -> None:
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    model = llama().train()
    optimizer = make(model.parameters(), lr=1e-3, **options)
    train_step(model, optimizer, 0)
    query = model.layers[0].self_attn.q_proj.weight
    state = copy.deepcopy(optimizer.state[query])
    wqk.clip_(model, 1.0, logits={(0, 1): 4.0}, grouped="queries")
    name = "exp_avg" if make is torch.optim.AdamW else "momentum_buffer"
    assert torch.equal(optimizer.state[query][name], state[name])


def test_half_precision_is_rescaled_within_its_rounding() -> None:
    model = llama().bfloat16()
    before = model.layers[0].self_attn.q_proj.weight.float()
    wqk.clip_(model, 1.0, logits={(0, 1): 4.0}, grouped="queries")
    after = model.layers[0].self_attn.q_proj.weight.float()
    torch.testing.assert_close(after[8:16], before[8:16] / 4)
    assert torch.equal(after[16:], before[16:])


@pytest.mark.parametrize("limit", [0, -1, math.nan, math.inf, "100"])
def test_limits_are_positive_numbers(limit: Any) -> None:
    with pytest.raises(FormError, match="limit must be a positive number"):
        wqk.clip_(bert(), limit, logits={(0, 0): 1.0})


def test_logits_have_to_fit() -> None:
    model = bert()
    for wrong in ({(0, 4): 1.0}, {(2, 0): 1.0}, {0: 1.0}, np.ones((4, 2)), np.ones(4)):
        with pytest.raises(FormError, match="logits"):
            wqk.clip_(model, 1.0, logits=wrong)
    report = wqk.clip_(model, 1.0, logits={(0, 0): math.nan, (0, 1): math.inf})
    assert not report.heads
    assert "without a finite maximum" in repr(report)
    with pytest.raises(FormError, match="grouped"):
        wqk.clip_(model, 1.0, grouped="keys")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "value", ["x", 10**400, 10**5000, None, [1.0], 1j], ids=lambda value: type(value).__name__
)
def test_logits_are_numbers(value: Any) -> None:
    with pytest.raises(FormError, match="must be a number"):
        wqk.clip_(bert(), 1.0, logits={(0, 0): value})
    with pytest.raises(FormError, match="limit must be a positive number"):
        wqk.clip_(bert(), value, logits={(0, 0): 1.0})


@pytest.mark.parametrize(
    "key", [("x", 0), (0, "x"), (10**400, 0), (0, None), (0.5, 0), (0, 0.5)], ids=[*"abcdef"]
)
def test_keys_name_heads(key: Any) -> None:
    with pytest.raises(FormError, match="which the model lacks"):
        wqk.clip_(bert(), 1.0, logits={key: 1.0})


def test_measured_logits_of_other_models_are_refused_and_blocks_without_any_said() -> None:
    tokens = torch.arange(8)[None]
    measured = wqk.logits(gpt2(), tokens)
    with pytest.raises(FormError, match=r"logits of decoder self 0, 4 heads, are of another model"):
        wqk.clip_(bert(), 1e-6, measured)
    place = Place("decoder", "self", 1)
    of_one_block = Logits({place: measured.blocks[place]})
    report = wqk.clip_(gpt2(), 1e-6, of_one_block)
    assert {head.layer for head in report.heads} == {1}
    assert report.notes == ("decoder self 0: not measured: it did not run",)


def test_a_model_is_clipped_as_a_whole_or_not_at_all() -> None:
    model = llama()
    key = model.layers[1].self_attn.k_proj
    key.weight.requires_grad_(False)
    key.weight.data = key.weight.data.to(torch.float8_e4m3fn)
    query = model.layers[0].self_attn.q_proj.weight.clone()
    with pytest.raises(CheckpointError, match=r"k_proj\.weight holds float8_e4m3fn"):
        wqk.clip_(model, 1.0, logits={(0, 1): 4.0, (1, 1): 4.0})
    assert torch.equal(model.layers[0].self_attn.q_proj.weight, query)


def test_no_weights_are_written_on_a_guess() -> None:
    sides = ({"q_proj": torch.nn.Linear(8, 8), "k_proj": torch.nn.Linear(8, 8)} for _ in range(2))
    with pytest.raises(UnknownFamily):
        wqk.clip_(torch.nn.Sequential(*map(torch.nn.ModuleDict, sides)), logits={})


def test_logits_that_may_still_exceed_the_limit_are_named() -> None:
    model = large(llama().double().eval())
    (batch,) = batches(1)
    measured = wqk.logits(model, batch)
    limit = measured.largest / 4
    clipping = wqk.clip_(model, limit, logits=measured)
    after = wqk.logits(model, batch)
    first = min(after.blocks)
    heads = [head for head in clipping.heads if head.layer == first[2]]
    lowest = min(after.blocks[first].extreme_logit[head.head] for head in heads)
    assert lowest < -limit, "the test needs a negative logit"
    printed = " ".join(str(clipping).split())
    assert "negative logits are not limited" in printed
    assert "heads of later layers may exceed the limit again" in printed
    assert clipping.to_dict()["remarks"] == list(clipping.remarks)
    for _ in range(4):
        measured = wqk.logits(model, batch)
        if measured.largest <= limit * (1 + 1e-5):
            break
        wqk.clip_(model, limit, logits=measured)
    assert measured.largest <= limit * (1 + 1e-5)


def test_a_head_of_the_last_layer_with_positive_logits_has_no_remark() -> None:
    model = llama()
    last = len(model.layers) - 1
    assert wqk.clip_(model, 100.0, logits={(last, 0): 400.0}).remarks == ()
    assert wqk.clip_(model, 100.0, logits={(last, 0): 4.0}).remarks == ()
