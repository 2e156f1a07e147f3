"""Changes of several tensors or heads together: one cause each, and a repair that undoes it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from tests import small
from tests.sameness.conversions import G, H, R, right
from tests.sameness.mending import mend

from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import Kind
from wqk.sameness.same import same

Tensors = dict[str, np.ndarray]
Change = Callable[[Tensors], Tensors]


def exchange(first: str, second: str) -> Change:
    """Exchange the tensors with one word in their names for those with another."""

    def name_of(name: str) -> str:
        if first in name:
            return name.replace(first, second)
        return name.replace(second, first)

    return lambda tensors: {name: tensors[name_of(name)] for name in tensors}


def scale(**factors: float) -> Change:
    """Multiply the weights of sides by factors."""

    def change(tensors: Tensors) -> Tensors:
        scaled = dict(tensors)
        for name, value in tensors.items():
            match = re.search(r"(\w)_proj.weight$", name)
            factor = factors.get(match[1], 1.0) if match else 1.0
            scaled[name] = (factor * value).astype(np.float32)
        return scaled

    return change


def scale_heads(side: str, heads: int, *, columns: bool = False) -> Change:
    """Multiply each head of a side by a factor of its own."""
    factors = np.repeat(np.linspace(0.5, 2, heads), R)

    def change(tensors: Tensors) -> Tensors:
        scaled = dict(tensors)
        for name, value in tensors.items():
            if f"{side}_proj" in name:
                by_head = factors if columns or value.ndim == 1 else factors[:, None]
                scaled[name] = (value * by_head).astype(np.float32)
        return scaled

    return change


def both(*changes: Change) -> Change:
    """Make changes one after the other."""

    def change(tensors: Tensors) -> Tensors:
        for single_change in changes:
            tensors = single_change(tensors)
        return tensors

    return change


def without(word: str) -> Change:
    """Leave out the tensors with a word in their names."""
    return lambda tensors: {name: value for name, value in tensors.items() if word not in name}


class Case(NamedTuple):
    """A change of a model, and the one cause that it has."""

    description: str
    model: str
    change: Change
    kind: Kind
    reason: str


def interleave(word: str, heads: int) -> Change:
    """Store the rotary halves of rows or gains interleaved."""

    def change(tensors: Tensors) -> Tensors:
        moved = dict(tensors)
        for name, value in tensors.items():
            if word in name:
                pairs = value.reshape(heads, 2, R // 2, *value.shape[1:]).swapaxes(1, 2)
                moved[name] = np.ascontiguousarray(pairs.reshape(value.shape))
        return moved

    return change


CASES = [
    Case(
        "rows and gains in another rotary order",
        "qwen3",
        both(
            interleave("q_proj", H),
            interleave("k_proj", G),
            interleave("q_norm", 1),
            interleave("k_norm", 1),
        ),
        Kind.ROTARY,
        "rotary order: stored interleaved, read as half",
    ),
    Case(
        "norms of queries and keys exchanged",
        "qwen3",
        exchange("q_norm", "k_norm"),
        Kind.TENSOR,
        "q_norm and k_norm have changed places",
    ),
    Case(
        "scales of q, k and v exchanged",
        "llama",
        scale(q=1.9 / 0.7, k=1.2 / 1.9, v=0.7 / 1.2),
        Kind.SCALED,
        "q_proj, k_proj, v_proj: scaled by 2.714, 0.6316, 0.5833, whose product is 1",
    ),
    Case(
        "a factor of each query head",
        "llama",
        scale_heads("q", H),
        Kind.ROW_FACTORS,
        "q_proj: each head has a factor of its own",
    ),
    Case(
        "a factor of each query head and of its bias",
        "qwen2",
        scale_heads("q", H),
        Kind.ROW_FACTORS,
        "q_proj: each head has a factor of its own",
    ),
    Case(
        "factors of query and key heads",
        "llama",
        both(scale_heads("q", H), scale_heads("k", G)),
        Kind.SCALED,
        "scaled, each head by a factor of its own",
    ),
    Case(
        "a factor of the outputs of each head",
        "llama",
        scale_heads("o", H, columns=True),
        Kind.COLUMN_FACTORS,
        "o_proj: each head has a factor of its own",
    ),
    Case(
        "values scaled",
        "llama",
        scale(v=3.0),
        Kind.SCALED,
        "scaled by 3",
    ),
    Case(
        "norms of queries and keys left out",
        "qwen3",
        both(without("q_norm"), without("k_norm")),
        Kind.MISSING,
        "q_norm, k_norm: missing from the file",
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.description for case in CASES])
def test_a_change_of_several_tensors_is_one_cause(case: Case) -> None:
    tensors, config = right(case.model)
    wrong = case.change(tensors)
    reference = StateDict(tensors, config, "reference")
    comparison = same(reference, StateDict(wrong, config, "candidate"))
    assert [cause.mismatch.verdict for cause in comparison.causes] == [case.kind]
    (cause,) = comparison.causes
    assert case.reason in cause.mismatch.reason
    assert len(cause.places) == len(comparison.blocks)
    mend(comparison.repair, wrong, tensors)
    assert same(reference, StateDict(wrong, config, "mended")).same


def test_tensors_that_both_files_lack_are_reported() -> None:
    tensors, config = right("qwen3")
    bare: dict[str, Any] = without("k_norm")(without("q_norm")(tensors))
    comparison = same(StateDict(bare, config, "a"), StateDict(bare, config, "b"))
    assert comparison.same
    assert "not compared: q_norm, k_norm, which models of qwen3 have" in "".join(comparison.notes)


def normalized_phi() -> tuple[Tensors, dict[str, Any]]:
    """A Phi whose queries and keys pass a layer norm with a bias."""
    tensors, config = right("phi")
    random = np.random.default_rng(5)
    for name in [name for name in tensors if name.endswith("q_proj.weight")]:
        for side in "qk":
            norm = name.replace("q_proj.weight", f"{side}_layernorm")
            tensors[f"{norm}.weight"] = random.uniform(0.5, 2, R).astype(np.float32)
            tensors[f"{norm}.bias"] = 0.3 * random.standard_normal(R).astype(np.float32)
    return tensors, {**config, "qk_layernorm": True}


@pytest.mark.parametrize("kind", ["another", "exchanged"])
def test_biases_of_query_and_key_norms_are_compared(kind: str) -> None:
    """They were part of no form and of no list of tensors, and passed as the same model."""
    tensors, config = normalized_phi()
    wrong = dict(tensors)
    reason = "norm before the score: other biases"
    if kind == "exchanged":
        reason = "q_layernorm.bias and k_layernorm.bias have changed places"
        wrong = exchange("q_layernorm.bias", "k_layernorm.bias")(
            {name: value for name, value in tensors.items() if "layernorm.bias" in name}
        )
        wrong = tensors | {name: value for name, value in wrong.items() if "input" not in name}
    for name in tensors:
        if kind == "another" and name.endswith("q_layernorm.bias"):
            wrong[name] = tensors[name] + np.float32(0.1)
    reference = StateDict(tensors, config, "a")
    assert same(reference, StateDict(tensors, config, "b"), everything=True).same
    comparison = same(reference, StateDict(wrong, config, "b"), everything=True)
    assert comparison.same is False
    (cause,) = comparison.causes
    assert cause.mismatch.reason == reason
    mend(comparison.repair, wrong, tensors)
    assert same(reference, StateDict(wrong, config, "b"), everything=True).same


def test_a_model_moves_with_the_biases_of_its_query_norms() -> None:
    """The model's own forward pass, which decides that these biases count."""
    import torch
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    config = transformers.PhiConfig(**sizes, intermediate_size=16, vocab_size=20, qk_layernorm=True)
    module = transformers.PhiModel(config).eval()
    tensors = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    reference = StateDict(tensors, config.to_dict(), "a")
    tokens = torch.arange(12)[None]
    before = module(tokens).last_hidden_state
    with torch.no_grad():
        module.layers[0].self_attn.q_layernorm.bias.normal_()
    assert not torch.allclose(before, module(tokens).last_hidden_state, atol=1e-3)
    moved = {name: value.numpy().copy() for name, value in module.state_dict().items()}
    assert same(reference, StateDict(moved, config.to_dict(), "b")).same is False


@pytest.mark.parametrize(
    ("rows", "description"), [(R, "query heads of the original"), (1, "none of the original's")]
)
def test_a_head_is_of_other_weights_only_with_all_its_rows(rows: int, description: str) -> None:
    tensors, config = right("llama")
    name = "model.layers.1.self_attn.{}_proj.weight"
    query, key = tensors[name.format("q")], tensors[name.format("k")].copy()
    key[R:] = np.random.default_rng(5).standard_normal(key[R:].shape) / np.sqrt(key.shape[1])
    key[R : R + rows] = query[R : R + rows]
    changed = StateDict(tensors | {name.format("k"): key}, config, "candidate")
    (cause,) = same(StateDict(tensors, config, "reference"), changed).causes
    assert cause.mismatch.verdict == Kind.STRANGERS
    assert f"key heads 1 are {description}" in cause.mismatch.reason


def test_orders_that_differ_beyond_the_listed_heads_are_two_causes() -> None:
    """A reason lists 16 heads; the facts of one layer were those of both."""
    heads, head_width = 20, 4
    model = small.llama(heads=heads, key_heads=heads, head_width=head_width)
    tensors = dict(model._arrays)
    orders = []
    for layer, exchanged in enumerate(([17, 18], [18, 19])):
        order = np.arange(heads)
        order[[0, 1, *exchanged]] = order[[1, 0, *exchanged[::-1]]]
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        by_head = tensors[name].reshape(heads, head_width, -1)
        tensors[name] = by_head[order].reshape(tensors[name].shape)
        orders.append(order.tolist())
    comparison = same(model, StateDict(tensors, model.config, "candidate"))
    causes = sorted(comparison.causes, key=lambda cause: cause.places)
    assert [list(cause.mismatch.facts["query_heads"]) for cause in causes] == orders
