"""Attention weights that are stored transposed, which no plan fits: named, and repaired."""

from __future__ import annotations

import numpy as np
import pytest
from tests.sameness.conversions import right
from tests.sameness.mending import mend

from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.sameness.mismatches import Kind
from wqk.sameness.same import same


@pytest.mark.parametrize(
    ("model", "word"), [("llama", "k_proj"), ("llama", "_proj"), ("qwen2", "v_proj")]
)
def test_transposed_weights_of_attention_are_a_cause(model: str, word: str) -> None:
    """They were an error about numbers of heads."""
    tensors, config = right(model)
    wrong = dict(tensors)
    for name, value in tensors.items():
        if word in name and value.ndim == 2:
            wrong[name] = np.ascontiguousarray(value.T)
    reference = StateDict(tensors, config, "reference")
    comparison = same(reference, StateDict(wrong, config, "candidate"), everything=True)
    assert comparison.same is False
    assert {cause.mismatch.verdict for cause in comparison.causes} == {Kind.TRANSPOSED}
    mend(comparison.repair, wrong, tensors)
    assert same(reference, StateDict(wrong, config, "mended"), everything=True).same


def test_weights_of_other_numbers_are_not_taken_for_transposed_ones() -> None:
    tensors, config = right("llama")
    random = np.random.default_rng(0)
    wrong = dict(tensors)
    for name, value in tensors.items():
        if "k_proj" in name:
            wrong[name] = random.standard_normal(value.T.shape).astype(np.float32)
    candidate = StateDict(wrong, config, "candidate")
    with pytest.raises(CheckpointError, match="heads"):
        same(StateDict(tensors, config, "reference"), candidate)
