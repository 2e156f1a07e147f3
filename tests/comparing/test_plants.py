"""Each cause is planted, seen, named, and undone by the code that is printed."""

from __future__ import annotations

import numpy as np
import pytest
from tests.comparing.conversions import MISTAKES
from tests.comparing.mending import mend
from tests.comparing.plants import CONFIGS, LAYERS, PLANTS, Plant, planted, right

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.comparing.mismatches import UNEXPLAINED, Kind
from wqk.comparing.rewrites import OF_VECTORS, OF_WEIGHTS


@pytest.mark.parametrize("model", CONFIGS)
def test_a_right_conversion_is_the_same(model: str) -> None:
    pair = (StateDict(*right(model), name) for name in "ab")
    assert wqk.same(*pair, everything=True).sentence.startswith("The same model: attention 2/2")


def test_every_cause_has_a_plant() -> None:
    """Those of quantized weights, of heads alone and of sizes stand in other tests."""
    planted = {plant.kind for plant in PLANTS} | {mistake.verdict for mistake in MISTAKES}
    elsewhere = {Kind.GROUPS, Kind.HEADS, Kind.DIMENSIONS, Kind.SINKS, Kind.SIZES, Kind.AVERAGED}
    assert planted | elsewhere | UNEXPLAINED == set(Kind)
    assert {kind for one in (*OF_WEIGHTS, *OF_VECTORS) for kind in one.kinds} <= set(Kind)


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.what for plant in PLANTS])
def test_a_plant_is_seen_named_and_undone(plant: Plant) -> None:
    pytest.importorskip("torch")
    (original, config), (tensors, _) = right(plant.model), planted(plant)
    comparison = wqk.same(StateDict(original, config, "a"), StateDict(tensors, config, "b"))
    assert [block.same for block in comparison.blocks] == [False] * LAYERS
    repaired = dict(tensors)
    for block in comparison.blocks:
        assert len(block.mismatches) == (2 if plant.kind is Kind.TENSOR else 1)
        for cause in block.mismatches:
            assert cause.verdict is plant.kind, cause
            assert plant.named in cause.reason
            mend(cause, repaired, original, config, config)
    again = wqk.same(StateDict(original, config, "a"), StateDict(repaired, config, "b"))
    assert again.same, again.sentence


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
