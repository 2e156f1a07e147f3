"""Each cause is planted, seen, named, and undone by the code that is printed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests.comparing.plants import CONFIGS, LAYERS, PLANTS, Plant, planted, right

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.comparing.rewrites import TITLES


@pytest.mark.parametrize("model", CONFIGS)
def test_a_right_conversion_is_the_same(model: str) -> None:
    pair = (StateDict(*right(model), name) for name in "ab")
    assert wqk.same(*pair, everything=True).sentence.startswith("The same model: attention 2/2")


def test_every_cause_has_a_plant() -> None:
    """That of quantized weights stands with their other mistakes."""
    assert {plant.kind for plant in PLANTS} | {"groups"} == set(TITLES)


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.what for plant in PLANTS])
def test_a_plant_is_seen_named_and_undone(plant: Plant) -> None:
    torch = pytest.importorskip("torch")
    (original, config), (tensors, _) = right(plant.model), planted(plant)
    comparison = wqk.same(StateDict(original, config, "a"), StateDict(tensors, config, "b"))
    assert [block.same for block in comparison.blocks] == [False] * LAYERS
    repaired: dict[str, Any] = dict(tensors)
    for block in comparison.blocks:
        assert len(block.mismatches) == (2 if plant.kind == "another tensor" else 1)
        for cause in block.mismatches:
            assert cause.facts.get("cause") == plant.kind, cause
            assert plant.named in cause.reason
            name = cause.facts["tensor"]
            norm = f"model.layers.{block.layer}.input_layernorm.weight"
            given = {"w": tensors[name], "original": original[name], "gain": original.get(norm)}
            scope: dict[str, Any] = {k: torch.tensor(v) for k, v in given.items() if v is not None}
            scope["torch"] = torch
            exec(cause.repair, scope)
            repaired[name] = np.ascontiguousarray(scope["w"].numpy())
    again = wqk.same(StateDict(original, config, "a"), StateDict(repaired, config, "b"))
    assert again.same, (cause.repair, again.sentence)


@pytest.mark.parametrize("outputs", [True, False])
def test_the_order_of_heads_is_a_freedom_if_values_and_outputs_share_it(outputs: bool) -> None:
    """Key heads rolled with all that belongs to them; or their outputs forgotten."""
    tensors, config = right("llama")
    original = StateDict(dict(tensors), config, "a")
    for name, value in tensors.items():
        if "proj" in name and "o_proj" not in name:
            tensors[name] = np.roll(value, len(value) // 3, axis=0)
        elif "o_proj" in name and outputs:
            tensors[name] = np.roll(value, value.shape[1] // 3, axis=1)
    copy = StateDict(tensors, config, "b")
    assert not wqk.same(original, copy).same
    assert wqk.same(original, copy, up_to=["heads"]).same == outputs
