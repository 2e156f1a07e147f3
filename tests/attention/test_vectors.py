"""Queries, keys and logits of a block beside the running model's own attention."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import save

import wqk
from wqk.checkpoints import open_checkpoint
from wqk.live.running import run
from wqk.live.verification import _InDoublePrecision

if TYPE_CHECKING:
    from pathlib import Path

# Biases; groups; gains of one head, of all heads, of each head; layer norms; gains stored from 1;
# limits; a cap; a latent; a part of the head that turns, in pairs; a scale that is none.
MODELS = (
    "bert", "gpt2", "llama", "qwen3", "olmo2", "stablelm-norms", "cohere-norms", "gemma3-text",
    "olmo-clipped", "gemma2", "deepseek-v2", "deepseek-v2-lite", "glm", "gpt-neo", "persimmon",
)  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_what_the_model_gives_the_softmax(name: str, tmp_path: Path) -> None:
    save(NAMED[name], tmp_path)
    checkpoint = _InDoublePrecision(open_checkpoint(tmp_path))
    model = wqk.open(checkpoint)
    settings = {"text": None, "tokens": [3, 1, 4, 1, 5, 9, 2, 6], "length": 8, "seed": 0}
    records, *_ = run(tmp_path, model, **settings)
    for attention, record in zip(model, records, strict=True):
        for x, y, reported, *_ in record:
            logits = attention.logits(x, y)
            visible = reported > 0
            shares = np.where(visible, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
            shares /= shares.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(shares, reported, atol=1e-12)
            # One distance for all pairs agrees with those that lie so far apart.
            apart = attention.logits(x, y, distance=3)
            at = np.arange(3, len(x[0]))
            np.testing.assert_allclose(apart[:, :, at, at - 3], logits[:, :, at, at - 3], rtol=1e-9)


def test_heads_share_keys_in_order() -> None:
    attention = wqk.open(wqk.demo_model("decoder"))[1]
    x = np.random.default_rng(0).standard_normal((2, 5, 128)).astype(np.float32)
    assert attention.keys(x).shape == attention.queries(x).shape == (2, 4, 5, 32)
    scores = attention.logits(x, x, distance=0) / attention.plan.scale
    bias = attention.query.bias if attention.query.bias is not None else np.zeros((4, 32))
    for head in range(4):
        key = x @ attention.key.weight[head].T
        if attention.key.bias is not None:
            key = key + attention.key.bias[head]
        query = x @ attention.query.weight[head].T + bias[head]
        np.testing.assert_allclose(
            scores[:, head], query @ key.swapaxes(-1, -2), rtol=2e-3, atol=1e-3
        )
