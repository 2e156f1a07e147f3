"""A change of any tensor is seen: tiny models of many types, one tensor changed at a time."""

from __future__ import annotations

import re

import numpy as np
import pytest
from tools.deriving.building import build

import wqk
from wqk.checkpoints.modules import StateDict

# Biases of keys, which add the same to all scores of a query; and tables that are computed when a
# model is loaded.
WITHOUT_EFFECT = re.compile(r"(?:\bk|key|k_proj|linear_k|key_proj)\.bias$|inv_freq$")
TYPES = ["llama", "persimmon", "minimax", "whisper", "esm", "olmo2", "qwen3_next", "gpt_oss"]


@pytest.mark.parametrize("model_type", TYPES)
def test_no_tensor_differs_unnoticed(model_type: str) -> None:
    """Biases of query norms passed as the same model once, and decays that are all nearly 1."""
    module, _ = build(model_type, 1, flat=False)
    random = np.random.default_rng(0)
    state = module.state_dict()
    tensors = {n: v.float().numpy() for n, v in state.items() if v.is_floating_point() and v.ndim}
    config = module.config.to_dict() | {"architectures": [type(module).__name__]}
    reference = StateDict(tensors, config, "reference")
    assert wqk.same(reference, StateDict(tensors, config, "copy"), everything=True).same
    patterns: dict[str, str] = {}
    for name, value in tensors.items():
        if value.size and not WITHOUT_EFFECT.search(name):
            patterns.setdefault(re.sub(r"\d+", "*", name), name)
    unnoticed = []
    for name in patterns.values():
        value = tensors[name]
        noise = 0.2 * (value.std() + 0.1) * random.standard_normal(value.shape)
        changed = tensors | {name: (value + noise).astype(np.float32)}
        comparison = wqk.same(reference, StateDict(changed, config, "b"), everything=True)
        if comparison.same is not False:
            unnoticed.append(name)
    assert unnoticed == []
