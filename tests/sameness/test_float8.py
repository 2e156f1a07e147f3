"""Float8 values that are stored in a wider type are rounding, as those of bfloat16 are."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import small

import wqk
from wqk.attention.rounding import lies_on
from wqk.checkpoints.modules import StateDict

torch = pytest.importorskip("torch")
FEED_FORWARD = "model.layers.0.mlp.up_proj.weight"
TYPES = ["float8_e4m3fn", "float8_e5m2"]


def tensors() -> dict[str, Any]:
    """A model in bfloat16 with weights of the usual size."""
    arrays = small.llama(sides="qkvo", width=64, head_width=16)._arrays
    arrays[FEED_FORWARD] = np.random.default_rng(1).standard_normal((96, 64))
    return {name: torch.tensor(0.05 * value).bfloat16() for name, value in arrays.items()}


def model(tensors: dict[str, Any]) -> StateDict:
    return StateDict(tensors, small.llama(width=64, head_width=16).config, "tiny")


def rounded(weight: Any, kind: str, scaled: bool, stored: Any) -> Any:
    """A weight in float8, with a scale for the whole tensor or none, stored in a wider type."""
    dtype = getattr(torch, kind)
    scale = (weight.abs().max() / torch.finfo(dtype).max).float() if scaled else 1.0
    return ((weight.float() / scale).to(dtype).float() * scale).to(stored)


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_float8_stored_wider_is_rounding(kind: str, scaled: bool, stored: Any):
    reference = tensors()
    candidate = {name: rounded(w, kind, scaled, stored) for name, w in reference.items()}
    answer = wqk.same(model(reference), model(candidate), everything=True)
    assert answer.same is True
    assert any("values are rounded to float8" in note for note in answer.notes)


def test_ternary_weights_and_ones_are_no_float8():
    ternary = np.random.default_rng(0).integers(-1, 2, (96, 64)) / 10
    reference = tensors() | {FEED_FORWARD: torch.tensor(ternary).float()}
    candidate = reference | {FEED_FORWARD: reference[FEED_FORWARD] * 1.03}
    answer = wqk.same(model(reference), model(candidate), everything=True)
    assert answer.same is False
    assert "scaled by 1.03" in answer.sentence


def test_the_counter_of_an_averaged_model_is_no_tensor_of_it():
    averaged = torch.optim.swa_utils.AveragedModel(torch.nn.Linear(2, 2)).state_dict()
    assert "n_averaged" in averaged
    candidate = {f"module.{name}": value for name, value in tensors().items()}
    candidate["n_averaged"] = averaged["n_averaged"]
    assert wqk.same(model(tensors()), model(candidate), everything=True).same is True


def test_values_that_are_nearly_one_number_are_not_taken_for_float8() -> None:
    """Decays near 1 passed as "rounded to float8" next to decays that differ by 40 percent."""
    decays = np.exp(-1e-5 * np.arange(1, 257)).astype(np.float32)
    assert not any(lies_on(decays, kind) for kind in ("F8_E4M3", "F8_E5M2"))
    reference = small.llama(layers=1, sides="qkvo")
    name = "model.layers.0.self_attn.decay"
    models = [
        StateDict({**reference._arrays, name: values}, reference.config, "ab"[number])
        for number, values in enumerate((decays, 1.3 * decays + np.float32(0.1)))
    ]
    comparison = wqk.same(*models, everything=True)
    assert comparison.same is False
    assert [tensor.name for tensor in comparison.differing] == [name]
