"""What inputs with known second moments are likely to produce, beside inputs drawn with them."""

from __future__ import annotations

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import build
from tests.lab.theory.subjects import made, torch

import wqk
from wqk.attention.block import Block
from wqk.errors import FormError
from wqk_lab.theory.likely import Moments, likely_ceilings

SIZE = {
    "hidden_size": 24, "num_attention_heads": 4, "num_hidden_layers": 1, "vocab_size": 20,
    "intermediate_size": 8, "initializer_range": 0.3,
}  # fmt: skip


def attention_of(name: str) -> Block:
    """With biases, or with grouped heads and rotary positions."""
    if name == "llama":
        return wqk.open(made("LlamaModel", **SIZE, num_key_value_heads=2))[0]
    model = made("BertModel", **SIZE)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return wqk.open(model)[0]


def drawn(texts: int, tokens: int, seed: int) -> tuple[Moments, np.ndarray]:
    random = np.random.default_rng(seed)
    root = random.standard_normal((24, 24)) / 4
    mean = random.standard_normal(24) / 2
    inputs = mean + random.standard_normal((texts, tokens, 24)) @ root.T
    return Moments(mean, root @ root.T), inputs


def largest(attention: Block, inputs: np.ndarray) -> np.ndarray:
    logits = attention.logits(inputs, inputs)
    seen = np.tril(np.ones(logits.shape[-2:], bool)) if attention.plan.causal else True
    return np.asarray(np.where(seen, logits, -np.inf).max(axis=(-2, -1)))


@pytest.mark.parametrize("name", ["bert", "llama"])
@pytest.mark.parametrize("seed", range(3))
def test_normal_inputs_exceed_them_as_rarely_as_stated(name: str, seed: int) -> None:
    attention = attention_of(name)
    moments, inputs = drawn(400, 16, seed)
    maxima = largest(attention, inputs)
    every = range(16)
    rare = likely_ceilings(attention, moments, 16, share=0.05, distances=every)
    assert (maxima > rare).mean(axis=0).max() <= 0.05
    expected = likely_ceilings(attention, moments, 16, share=1.0, distances=every)
    assert (maxima.mean(axis=0) <= expected).all()
    assert (rare < 2.5 * maxima.max(axis=0)).all()  # not by being large
    assert (rare > expected).all()


def test_a_known_form_has_its_own_cumulants() -> None:
    """The bound of independent tokens against the sum over many drawn logits, at the same t."""
    attention = attention_of("bert")
    moments, inputs = drawn(2, 200_000, 0)
    products = attention.query.vectors(inputs[:1])[0, 0] * attention.key.vectors(inputs[1:])[0, 0]
    logits = attention.plan.scale * products.sum(axis=-1)
    level = float(likely_ceilings(attention, moments, 1000, share=0.05)[0])
    assert (logits > level).mean() < 1e-4
    assert logits.max() > level / 4


def test_more_tokens_and_rarer_events_are_larger() -> None:
    attention = attention_of("llama")
    moments, _ = drawn(1, 2, 0)
    few = likely_ceilings(attention, moments, 8)
    assert (likely_ceilings(attention, moments, 80) > few).all()
    assert (likely_ceilings(attention, moments, 8, share=1e-6) > few).all()


def test_what_has_none_is_said() -> None:
    attention = attention_of("llama")
    moments, _ = drawn(1, 2, 0)
    with pytest.raises(FormError, match="share must be"):
        likely_ceilings(attention, moments, 8, share=0.0)
    with pytest.raises(FormError, match="moments must be of 24 dimensions"):
        likely_ceilings(attention, Moments(np.zeros(3), np.eye(3)), 8)
    normalized = wqk.open(build(NAMED["qwen3"]))[0]
    with pytest.raises(FormError, match="not linear in the input"):
        likely_ceilings(normalized, moments, 8)


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_tokens_that_depend_on_each_other_are_covered_if_said_so(name: str) -> None:
    """Every key's input is the one that the query likes best, of the same marginal law."""
    attention = attention_of(name)
    moments, inputs = drawn(400, 16, 0)
    head = attention[0]
    root = np.linalg.cholesky(moments.covariance)
    u, _, v = np.linalg.svd(root.T @ head.query @ head.key.T @ root)
    normal = np.linalg.solve(root, (inputs - moments.mean)[..., None])[..., 0]
    partners = moments.mean + normal @ u @ v @ root.T
    maxima = attention.logits(inputs, partners, distance=0)[:, 0].max(axis=(-2, -1))
    alone = likely_ceilings(attention, moments, 16, distances=[0])[0]
    any_way = likely_ceilings(attention, moments, 16, distances=[0], independent=False)[0]
    assert any_way > alone
    assert (maxima > any_way).mean() <= 0.05
    assert any_way < 3 * maxima.max()
