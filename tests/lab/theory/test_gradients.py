"""β of every family against PyTorch's own gradient of a term that is put into the scores."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.families.architectures import ALL
from tests.lab.theory.tiny import OBJECTIVES, VARIETY, batch_for, built, linear, objective
from transformers import BertConfig, BertForMaskedLM

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, TheoryError
from wqk.families import AttentionPlan
from wqk_lab.theory.capture import BlockUses, require_records
from wqk_lab.theory.gradients import (
    LayerGradient,
    bilinear_plans,
    blocks_of,
    gradients,
    gradients_in_passes,
)
from wqk_lab.theory.updates import parameter_gradients

DISTANCES = (0, 1, 4)

# Families that are refused, and the reason that is given.
REFUSALS = {
    "normalized token by token before they meet": [
        "apertus",
        "cohere-norms",
        "dots1",
        "exaone4",
        "exaone4-full",
        "gemma3",
        "gemma3-hub",
        "gemma3-text",
        "gemma3-text-hub",
        "gemma3-text-scaled-windows",
        "glm4-moe",
        "lfm2",
        "llama4-text",
        "llama4-text-hub",
        "minimax-m2",
        "minimax-m2-hub",
        "mllama",
        "nanochat",
        "olmo2",
        "olmo3",
        "olmoe",
        "persimmon",
        "phi-norms",
        "qwen3",
        "qwen3-moe",
        "stablelm-norms",
        "swinv2",
        "sdar",
        "a2d-qwen3",
    ],
    "go through a latent": [
        "deepseek-v2",
        "deepseek-v2-lite",
        "deepseek-v3",
        "deepseek-v3-yarn",
        "kimi-k2",
        "longcat-flash",
    ],
    "clipped at ±0.7": ["mpt-clipped", "olmo-clipped"],
    "linear biases are added twice": ["falcon-alibi"],
    "reports no attention": [
        "data2vec-vision",
        "mask2former",
        "sam",
        "siglip",
        "siglip-hub",
        "siglip-vision",
        "wavlm",
        "wavlm-large",
    ],
}
REFUSED = {name: reason for reason, names in REFUSALS.items() for name in names}


class PutIntoScores(torch.overrides.TorchFunctionMode):
    """Adds scale · x E yᵀ to what is given to the softmax, or to the soft cap, of each block.

    Knows nothing of attention probabilities or of β: it waits for the functions by name.
    """

    def __init__(self, model: Any, plans: list[AttentionPlan]) -> None:
        super().__init__()
        self.given: dict[str, Any] = {}
        self.plan: AttentionPlan | None = None
        self.terms: dict[int, dict[int | None, Any]] = {}
        self.handles: list[Any] = []
        for plan in plans:
            query_width, key_width = (
                model.get_parameter(side.tensor).shape[0 if side.projection.transposed else 1]
                for side in (plan.query, plan.key)
            )
            self.terms[id(plan)] = {
                distance: torch.zeros(plan.query.heads, query_width, key_width, requires_grad=True)
                for distance in (None, *(DISTANCES if plan.rotary else ()))
            }
            for side in ("query", "key"):
                module = model.get_submodule(getattr(plan, side).tensor.rpartition(".")[0])
                self.handles.append(module.register_forward_pre_hook(self._given(side, plan)))

    def _given(self, side: str, plan: AttentionPlan) -> Callable[[Any, Any], None]:
        def keep(module: Any, args: Any) -> None:
            # A projection that is used again, for relative positions, comes after the first.
            if self.plan is not plan:
                self.given.clear()
            self.plan = plan
            self.given.setdefault(side, args[0])

        return keep

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.plan is not None and len(self.given) == 2:
            capped = self.plan.softcap is not None
            if func in ((torch.tanh, torch.Tensor.tanh) if capped else SOFTMAXES):
                scores = args[0] if args else kwargs["input"]
                args = (self._added(scores), *args[1:])
        return func(*args, **(kwargs or {}))

    def _added(self, scores: Any) -> Any:
        plan = self.plan
        assert plan is not None
        queries = scores.shape[-2]
        x = self.given["query"].reshape(-1, 1, queries, self.given["query"].shape[-1])
        y = self.given["key"].reshape(len(x), 1, -1, self.given["key"].shape[-1])
        i, j = torch.arange(x.shape[2])[:, None], torch.arange(y.shape[2])
        term = torch.zeros(())
        for distance, e in self.terms[id(plan)].items():
            pairs = torch.ones(()) if distance is None else (i - j == distance).double()
            term = term + plan.score_scale / (plan.softcap or 1.0) * (x @ e @ y.mT) * pairs
        self.given, self.plan = {}, None
        if plan.sinks:
            term = torch.nn.functional.pad(term, (0, 1))
        return scores + term.reshape(scores.shape)


SOFTMAXES = (torch.softmax, torch.nn.functional.softmax, torch.Tensor.softmax)


def gradients_of_terms(
    model: Any, plans: list[AttentionPlan], batch: Any, loss: Any
) -> list[dict[int | None, Any]]:
    """∂loss/∂E of every block: of an E for all pairs, and for pairs at some distances."""
    model.eval()
    mode = PutIntoScores(model, plans)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config._attn_implementation = module.config._experts_implementation = "eager"
    try:
        with mode:
            value = loss(model, batch | {"output_attentions": True})
    finally:
        for handle in mode.handles:
            handle.remove()
    terms_by_plan = [mode.terms[id(plan)] for plan in plans]
    terms = list(itertools.chain.from_iterable(terms.values() for terms in terms_by_plan))
    gradient_of_terms = iter(torch.autograd.grad(value, terms))
    gradients_by_plan = []
    for terms_of_plan in terms_by_plan:
        gradients_by_plan.append({distance: next(gradient_of_terms) for distance in terms_of_plan})
    return gradients_by_plan


def place(plan: AttentionPlan) -> tuple[str, str, int]:
    return plan.stack, plan.kind, plan.layer


# A family, an objective, whether the second example is padded, and a seed.
DIFFERENTIABLE = [architecture.name for architecture in ALL if architecture.name not in REFUSED]
CASES = [
    (name, OBJECTIVES[index % 3], index % 2 == 0, index)
    for index, name in enumerate(DIFFERENTIABLE)
]


@pytest.mark.parametrize(("name", "kind", "padded", "seed"), CASES)
def test_beta_is_the_gradient_of_the_form(name: str, kind: Any, padded: bool, seed: int) -> None:
    with built(name) as model:
        batch, loss = batch_for(model, seed, padded=padded), objective(kind, seed)
        layer_gradients = gradients(model, batch, loss)
        plans = wqk.open(open_checkpoint(model)).plans
        expected = gradients_of_terms(model, plans, batch, loss)
    # Where attention is all but certain a block's gradient is a small difference of large numbers.
    largest = 0.0
    for terms in expected:
        largest = max(largest, *(np.abs(term.numpy()).max() for term in terms.values()))
    assert largest > 1e-6
    for plan, terms in zip(plans, expected, strict=True):
        uses = [
            gradient
            for gradient in layer_gradients
            if place(gradient.attention.plan) == place(plan)
        ]
        for head, (distance, term) in itertools.product(range(plan.query.heads), terms.items()):
            forms = [
                use.by_prediction(head) if distance is None else use.at_distance(distance, head)
                for use in uses
            ]
            together = sum(form.dense() for form in forms)
            assert np.abs(together - term[head].numpy()).max() < 1e-10 * largest


@pytest.mark.parametrize("name", VARIETY)
def test_factor_gradients_are_those_of_the_parameters(name: str) -> None:
    with built(name) as model:
        batch, loss = batch_for(model, 3), objective(linear, 3)
        layer_gradients = gradients(model, batch, loss)
        assert all(parameter.grad is None for parameter in model.parameters())
        loss(model, batch).backward()
        expected = parameter_gradients(model, plans := wqk.open(open_checkpoint(model)).plans)
    for plan, exact in zip(plans, expected, strict=True):
        uses = [
            gradient
            for gradient in layer_gradients
            if place(gradient.attention.plan) == place(plan)
        ]
        implied = [use.factor_gradients() for use in uses]
        for side in range(2):
            together = sum(factors[side] for factors in implied)
            assert np.abs(together - exact[side]).max() < 1e-10 * np.abs(exact[side]).max()


def test_distances_add_up_to_all_pairs() -> None:
    with built("llama") as model:
        layer_gradients = gradients(model, batch_for(model, 2), objective(linear, 2))
    for gradient in layer_gradients:
        tokens = gradient.beta.shape[-1]
        by_distance = [
            gradient.at_distance(distance).dense() for distance in range(-tokens + 1, tokens)
        ]
        np.testing.assert_allclose(sum(by_distance), gradient.by_prediction().dense(), atol=1e-12)
        for distance in (tokens, -tokens):
            with pytest.raises(TheoryError, match="no pair of 9 tokens has the distance"):
                gradient.at_distance(distance)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5), st.integers(1, 6), st.integers(1, 4))
def test_the_sum_is_made_of_rank_one_matrices(seed, tokens, contexts, heads):
    random = np.random.default_rng(seed)
    x, y = random.standard_normal((2, tokens, 7)), random.standard_normal((2, contexts, 5))
    beta = random.standard_normal((2, heads, tokens, contexts))
    gradient = LayerGradient(None, x, y, beta, beta, beta)  # type: ignore[arg-type]
    expected = np.zeros((7, 5))
    for b, h, i, j in np.ndindex(beta.shape):
        expected += beta[b, h, i, j] * np.outer(x[b, i], y[b, j])
    for form in (gradient.by_prediction(), gradient.by_context()):
        np.testing.assert_allclose(form.dense(), expected, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_other_scores_are_refused_by_name(name: str) -> None:
    with built(name) as model, pytest.raises(TheoryError, match=REFUSED[name]):
        gradients(model, batch_for(model), objective(linear, 0))


def test_some_layers_alone() -> None:
    with built("llama") as model:
        batch, loss = batch_for(model), objective(linear, 0)
        of_both_layers = gradients(model, batch, loss)
        (last,) = gradients(model, batch, loss, layers=[1])
        with pytest.raises(CheckpointError, match="no layer 7; layers are numbered from 0 to 1"):
            gradients(model, batch, loss, layers=[7])
    np.testing.assert_array_equal(last.beta, of_both_layers[1].beta)


def test_the_model_is_left_as_it_was() -> None:
    with built("llama") as model:
        gradients(model, batch_for(model), objective(linear, 0))  # transformers leaves its hooks
        model.train()
        hooks = hook_count(model)
        before = {name: value.clone() for name, value in model.state_dict().items()}
        gradients(model, batch_for(model), objective(linear, 0))
        assert model.training
        assert model.config._attn_implementation == "sdpa"
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        assert hook_count(model) == hooks


def test_a_loss_has_to_be_one() -> None:
    with built("bert") as model:
        batch = batch_for(model)
        with pytest.raises(TheoryError, match="gives no loss for input_ids"):
            gradients(model, batch)
        for wrong in (lambda y: y, lambda y: y.sum().detach(), lambda y: float(y.sum())):
            with pytest.raises(TheoryError, match="a loss must be a scalar"):
                gradients(model, batch, lambda m, b, wrong=wrong: wrong(m(**b).logits))
        hooks = hook_count(model)
        with pytest.raises(TheoryError, match="loss does not depend on the attention that layer 1"):
            gradients(model, batch, first_hidden_state)
        assert hook_count(model) == hooks


def hook_count(model: Any) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def first_hidden_state(model: Any, batch: Any) -> Any:
    return model(**batch, output_hidden_states=True).hidden_states[1].square().sum()


def test_passes_over_parts_of_a_batch_give_the_gradients_of_the_batch():
    shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    model = BertForMaskedLM(BertConfig(vocab_size=19, intermediate_size=8, **shape))
    tokens = torch.arange(40).reshape(5, 8) % 19
    labels = tokens.where(torch.arange(8) % 4 == 0, -100)
    batch = {"input_ids": tokens, "labels": labels}
    opened = wqk.open(model)
    blocks = blocks_of(opened.checkpoint, opened.plans)
    whole = gradients(model, batch, blocks=blocks)
    parts = gradients_in_passes(model, batch, blocks, positions=16)
    for expected, actual in zip(whole, parts, strict=True):
        for name in ("query_input", "probabilities", "error", "beta", "mixed"):
            a, b = getattr(expected, name), getattr(actual, name)
            assert np.allclose(a, b, rtol=1e-4, atol=1e-6 * np.abs(a).max())
        assert actual.query_input is actual.key_input


def test_each_kind_of_score_that_is_not_bilinear_is_refused() -> None:
    for name in ("qwen3", "deepseek-v2", "mpt-clipped", "falcon-alibi"):
        with built(name) as model:
            opened = wqk.open(model)
        with pytest.raises(TheoryError, match=REFUSED[name]) as raised:
            bilinear_plans("a model", opened.plans)
        layer = opened.plans[0].layer
        assert str(raised.value).startswith(f"a model: the scores of layer {layer} of the decoder")


def test_a_block_that_reports_no_attention_is_named() -> None:
    model = BertForMaskedLM(BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=2))
    plans = wqk.open(model).plans
    reported = torch.zeros(1, requires_grad=True)
    with_gradient, without = (
        SimpleNamespace(attention=attention) for attention in (reported, reported.detach())
    )
    used: Any = BlockUses([with_gradient], [])  # type: ignore[list-item]
    require_records(model, plans, [used, used])
    for uses in ([], [with_gradient, without]):
        lacking: Any = BlockUses(uses, [])  # type: ignore[arg-type]
        with pytest.raises(TheoryError, match=r"layer 1 of the encoder \(self-attention\) reports"):
            require_records(model, plans, [used, lacking])
