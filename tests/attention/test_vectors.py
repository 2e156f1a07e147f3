"""Queries, keys and logits of a block next to the running model's own attention."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests.families.architectures import NAMED
from tests.families.proving import save

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.modules import StateDict
from wqk.live.running import run

# Biases; groups; gains of one head, of all heads, of each head; layer norms; gains stored from 1;
# limits; a cap; a latent; a part of the head that turns, in pairs; a scale that is none.
MODELS = (
    "bert",
    "gpt2",
    "llama",
    "qwen3",
    "olmo2",
    "stablelm-norms",
    "cohere-norms",
    "gemma3-text",
    "olmo-clipped",
    "gemma2",
    "deepseek-v2",
    "deepseek-v2-lite",
    "glm",
    "gpt-neo",
    "persimmon",
)


@pytest.mark.parametrize("name", MODELS)
def test_logits_are_what_the_model_gives_the_softmax(name: str, tmp_path: Path) -> None:
    save(NAMED[name], tmp_path)
    stored = open_checkpoint(tmp_path)
    values = zip(stored.tensors(), stored.read([*map(Part, stored.tensors())]), strict=True)
    doubled = {tensor: value.astype(np.float64) for tensor, value in values}
    model = wqk.open(StateDict(doubled, stored.config, name))
    settings = {"text": None, "tokens": [3, 1, 4, 1, 5, 9, 2, 6], "length": 8, "seed": 0}
    records, *_ = run(tmp_path, model, **settings)
    for attention, record in zip(model, records, strict=True):
        for application in record:
            x, y = application.query_input, application.key_input
            reported = next(application.attentions(attention.plan.query.heads)).weights
            logits = attention.logits(x, y)
            visible = reported > 0
            shares = np.where(visible, np.exp(logits - logits.max(axis=-1, keepdims=True)), 0)
            shares /= shares.sum(axis=-1, keepdims=True)
            np.testing.assert_allclose(shares, reported, atol=1e-12)
            # One distance for all pairs agrees with the pairs at this distance.
            query = np.arange(3, len(x[0]))
            at_distance = attention.logits(x, y, distance=3)[:, :, query, query - 3]
            expected = logits[:, :, query, query - 3]
            np.testing.assert_allclose(at_distance, expected, rtol=1e-9)
