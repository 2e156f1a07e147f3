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


def transposed(tensors: dict[str, np.ndarray], word: str) -> dict[str, np.ndarray]:
    wrong = dict(tensors)
    for name, value in tensors.items():
        if word in name:
            wrong[name] = np.ascontiguousarray(value.T)
    return wrong


def test_transposed_weights_are_not_counted_as_equal() -> None:
    """Blocks were counted as equal, because they were compared as the reference stores them."""
    tensors, config = right("llama")
    reference = StateDict(tensors, config, "reference")
    candidate = StateDict(transposed(tensors, "layers.1.self_attn.k_proj"), config, "candidate")
    comparison = same(reference, candidate)
    assert comparison.counts == {"attention": (2, 3), "values": (3, 3)}
    assert [block.layer for block in comparison.blocks if not block.same] == [1]
    assert "1 of 3 blocks differ: k_proj: stored transposed." in comparison.sentence  # no distance
    assert same(reference, candidate, layers=[0]).same


def test_transposed_weights_elsewhere_belong_to_a_comparison_of_everything() -> None:
    tensors, config = right("llama")
    random = np.random.default_rng(0)
    up = "model.layers.0.mlp.up_proj.weight"
    tensors[up] = random.standard_normal((40, config["hidden_size"])).astype(np.float32)
    reference = StateDict(tensors, config, "reference")
    wrong = transposed(transposed(tensors, up), "k_proj")
    candidate = StateDict(wrong, config, "candidate")
    assert "up_proj" not in same(reference, candidate).reason
    comparison = same(reference, candidate, everything=True)
    (differing,) = comparison.differing
    assert str(differing) == f"{up}: stored transposed"
    assert {cause.mismatch.verdict for cause in comparison.causes} == {Kind.TRANSPOSED}
    assert comparison.unexplained == comparison.unrepaired == ()
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
