"""The likely ceilings of `benchmarks.likely`, next to inputs drawn with their moments."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.likely import SHARE, VectorMoments, VectorPair, bound, likely_ceilings
from tests.lab.theory.subjects import made, torch
from tests.small import sizes

import wqk
from wqk.attention.block import Block

SIZE = sizes(24, 1, 4, vocab_size=20, intermediate_size=8, initializer_range=0.3)


def attention_of(name: str) -> Block:
    """With biases, or with grouped heads and rotary positions."""
    if name == "llama":
        return wqk.open(made("LlamaModel", **SIZE, num_key_value_heads=2))[0]
    model = made("BertModel", **SIZE)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    return wqk.open(model)[0]


@pytest.mark.parametrize("name", ["bert", "llama"])
def test_a_text_exceeds_them_as_rarely_as_stated(name: str) -> None:
    """For independent tokens, and for keys whose inputs give the query its largest scores."""
    attention = attention_of(name)
    random = np.random.default_rng(0)
    root, mean = random.standard_normal((24, 24)) / 4, random.standard_normal(24) / 2
    moments = VectorMoments(mean, root @ root.T)
    normal = random.standard_normal((200, 16, 24))
    inputs = mean + normal @ root.T
    logits = attention.logits(inputs, inputs)
    seen = np.tril(np.ones(logits.shape[-2:], bool)) if attention.plan.causal else True
    maxima = np.where(seen, logits, -np.inf).max(axis=(-2, -1))
    independent = likely_ceilings(attention, moments, 16)
    assert (maxima > independent).mean(axis=0).max() <= SHARE
    assert (independent < 2.5 * maxima.max(axis=0)).all()  # not by being large

    u, _, v = np.linalg.svd(root.T @ attention[0].query @ attention[0].key.T @ root)
    partners = mean + normal @ u @ v @ root.T
    maxima = attention.logits(inputs, partners, distance=0)[:, 0].max(axis=(-2, -1))
    any_way = likely_ceilings(attention, moments, 16, independent=False)[0]
    assert any_way > independent[0]
    assert (maxima > any_way).mean() <= SHARE
    assert any_way < 3.5 * maxima.max()


def test_bounds_are_those_of_gaussian_integrals() -> None:
    """E exp(t (zᵀAz + b·z)) = exp(t² bᵀ(1 − 2tA)⁻¹b / 2) / √det(1 − 2tA)."""
    random, zero = np.random.default_rng(1), np.zeros((3, 3))
    pair = VectorPair(random.standard_normal((3, 3)), *random.standard_normal((2, 3)), constant=0.5)
    form, left, right, constant = pair
    u, sizes, v = np.linalg.svd(form)
    query, key = (u * sizes) @ u.T, (v.T * sizes) @ v
    cases = {
        "same": (form, left + right, 1.0),
        "independent": (np.block([[zero, form], [zero, zero]]), np.r_[right, left], 1.0),
        "any": (np.block([[query, zero], [zero, key]]), 2 * np.r_[right, left], 0.5),
    }
    for kind, (matrix, slope, power) in cases.items():
        square = (matrix + matrix.T) / 2
        limit = 1 / (2 * np.linalg.eigvalsh(square).max())
        bounds = []
        for t in np.linspace(0, limit, 4001)[1:-1]:
            room = np.eye(len(square)) - 2 * t * square
            grown = t**2 * slope @ np.linalg.solve(room, slope) - np.linalg.slogdet(room)[1]
            bounds.append((3.0 + t * constant + power * grown / 2) / t)
        assert bound(pair, 3.0, kind) == pytest.approx(min(bounds), rel=2e-3)
