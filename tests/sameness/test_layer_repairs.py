"""Layers that were dropped, repeated, inserted or added are put right in a written copy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from tests import small
from tests.sameness.test_repaired_files import write

import wqk
from wqk.errors import CheckpointError
from wqk.sameness.verdicts import Verdict

LAYERS = 6
# For each case, the source of each of the candidate's layers; None for a new layer.
CASES: dict[str, list[int | None]] = {
    "dropped from the middle": [0, 1, 2, 4, 5],
    "two dropped": [0, 3, 4, 5],
    "the last dropped": [0, 1, 2, 3],
    "the first dropped": [1, 2, 3, 4, 5],
    "repeated": [0, 1, 1, 2, 3, 4, 5],
    "new in the middle": [0, 1, None, 2, 3, 4, 5],
    "new at the end": [0, 1, 2, 3, 4, 5, None],
}


def deep(layers: int = LAYERS, seed: int = 0) -> tuple[dict[str, np.ndarray], dict]:
    model = small.llama(layers=layers, sides="qkvo", seed=seed)
    random = np.random.default_rng(seed)
    for layer in range(layers):
        model._arrays[f"model.layers.{layer}.mlp.up_proj.weight"] = random.standard_normal((40, 24))
    model._arrays["model.embed_tokens.weight"] = random.standard_normal((50, 24))
    kinds = ["full_attention"] * layers
    return model._arrays, model.config | {"layer_types": kinds}


def with_layers(sources: list[int | None]) -> tuple[dict[str, np.ndarray], dict]:
    """The model with these layers."""
    tensors, config = deep()
    new, _ = deep(seed=7)
    arrays = {name: value for name, value in tensors.items() if ".layers." not in name}
    for layer, source in enumerate(sources):
        stored = new if source is None else tensors
        start = f"model.layers.{source or 0}."
        for name, value in stored.items():
            if name.startswith(start):
                arrays[f"model.layers.{layer}.{name.removeprefix(start)}"] = value
    kinds = ["full_attention"] * len(sources)
    return arrays, config | {"num_hidden_layers": len(sources), "layer_types": kinds}


@pytest.mark.parametrize("case", CASES)
def test_layers_are_put_right(case: str, tmp_path: Path) -> None:
    sources = CASES[case]
    reference = write(tmp_path / "reference", *deep())
    candidate = write(tmp_path / "candidate", *with_layers(sources))
    repaired = wqk.same(reference, candidate, repair=tmp_path / "fixed").repaired
    assert repaired is not None
    assert repaired.verdict is Verdict.SAME
    comparison = wqk.same(reference, tmp_path / "fixed", everything=True)
    assert comparison.verdict is Verdict.SAME
    # Only what no layer of the candidate has is the reference's.
    lost = set(range(LAYERS)) - set(sources)
    supplied = {int(name.split(".")[2]) for name in repaired.supplied}
    assert supplied == lost
    assert {int(name.split(".")[2]) for name in repaired.removed} == set(
        range(LAYERS, len(sources))
    )
    for path in (tmp_path / "fixed").glob("*.safetensors"):
        with safe_open(path, framework="np") as file:
            assert file.metadata() == {"format": "pt", "who": "a test"}


def test_layers_whose_other_tensors_have_another_source_are_not_moved(tmp_path: Path) -> None:
    """Attention has moved and the feed-forward network has not: moving both would harm."""
    tensors, config = with_layers([0, 1, 2, 4, 5])
    original, _ = deep()
    name = "model.layers.3.mlp.up_proj.weight"
    tensors[name] = original[name]
    reference = write(tmp_path / "reference", *deep())
    candidate = write(tmp_path / "candidate", tensors, config)
    comparison = wqk.same(reference, candidate)
    assert "layer 3 is missing" in comparison.sentence
    assert "tensors[" not in comparison.repair
    with pytest.raises(CheckpointError, match="no repair is known"):
        wqk.same(reference, candidate, repair=tmp_path / "fixed")
