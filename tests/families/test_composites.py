"""Models of parts are read part by part, each by its own configuration."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from tests.small import sizes
from tests.stand_in import Module

import wqk
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan


def pair(
    stem: str, query: tuple[int, int] = (48, 48), key: tuple[int, int] = (16, 48), layers: int = 2
) -> dict[str, tuple[int, int]]:
    return {
        f"{stem}.{layer}.self_attn.{role}_proj.weight": shape
        for layer in range(layers)
        for role, shape in (("q", query), ("k", key))
    }


def planned(config: dict[str, Any], shapes: dict[str, tuple[int, int]]) -> list[AttentionPlan]:
    tensors = {name: np.broadcast_to(np.float32(0), shape) for name, shape in shapes.items()}
    return wqk.open(Module(tensors, {"model_type": "of-tomorrow"} | config)).plans


TEXT = sizes(48, 2, 6, model_type="llama", num_key_value_heads=2)
VISION = sizes(32, 3, 4, model_type="siglip_vision_model")
UNTYPED = {key: value for key, value in VISION.items() if key != "model_type"}
LLAVA = pair("model.language_model.layers") | pair(
    "model.vision_tower.vision_model.encoder.layers", (32, 32), (32, 32), layers=3
)
OTHER = TEXT | {"num_attention_heads": 3, "num_key_value_heads": 1}
DECODER = pair("decoder.layers", (48, 48), (48, 48))
CROSS = {name.replace("self_attn", "encoder_attn"): shape for name, shape in DECODER.items()}
# Configurations, tensors, and how many attentions of which stack, kind, heads and width there are.
PARTS: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]], dict[str, int]]] = {
    "a text and a picture": (
        {"text_config": TEXT, "vision_config": VISION},
        LLAVA,
        {"vision self, 4 over 4 heads of 8": 3, "decoder self, 6 over 2 heads of 8": 2},
    ),
    "a part of the type that transformers takes it for": (
        {"model_type": "paligemma", "text_config": TEXT, "vision_config": UNTYPED},
        LLAVA,
        {"vision self, 4 over 4 heads of 8": 3, "decoder self, 6 over 2 heads of 8": 2},
    ),
    "a part with the heads of its type": (
        {"model_type": "llava", "text_config": {"model_type": "llama"}},
        pair("language_model.model.layers", (64, 32), (64, 32), layers=32),
        {"decoder self, 32 over 32 heads of 2": 32},
    ),
    "a part within a part": (
        {"thinker_config": {"text_config": TEXT}},
        pair("thinker.model.layers"),
        {"decoder self, 6 over 2 heads of 8": 2},
    ),
    "towers that are called like their configurations": (
        {"left_config": TEXT, "right_config": OTHER},
        pair("right_net.layers") | pair("left.layers"),
        {"left self, 6 over 2 heads of 8": 2, "right self, 3 over 1 heads of 16": 2},
    ),
    "modules of one configuration": (
        {"qformer_config": TEXT},
        pair("near.0.qformer.layers")
        | pair("near.1.qformer.layers")
        | pair("far.0.qformer.layers"),
        {f"qformer-{one} self, 6 over 2 heads of 8": 2 for one in ("near", "near-1", "far")},
    ),
    "attention beside the parts": (
        {"model_type": "moonshine_streaming", "encoder_config": TEXT, "num_attention_heads": 3},
        pair("encoder.layers") | DECODER | CROSS,
        {
            "encoder self, 6 over 2 heads of 8": 2,
            "decoder self, 3 over 3 heads of 16": 2,
            "decoder cross, 3 over 3 heads of 16": 2,
        },
    ),
}


@pytest.mark.parametrize(("config", "tensors", "told"), PARTS.values(), ids=PARTS)
def test_each_part_is_read_by_its_own_configuration(config, tensors, told):
    plans = planned(config, tensors)
    blocks = [
        f"{p.stack} {p.kind}, {p.query.heads} over {p.key.heads} heads of {p.query.head_width}"
        for p in plans
    ]
    assert Counter(blocks) == told
    layers = {(p.stack, p.kind): p.layer + 1 for p in plans}  # those of the last ones
    assert sum(layers.values()) == len(plans)


def test_families_of_parts_are_named_together() -> None:
    plans = planned(*PARTS["a text and a picture"][:2])
    assert {plan.family for plan in plans} == {"siglip-vision + llama"}


def test_two_towers_that_nothing_tells_apart_are_refused() -> None:
    with pytest.raises(CheckpointError, match=r"may be under 'a\.' or 'b\.'"):
        planned({"text_config": TEXT}, pair("a.layers") | pair("b.layers"))


WINDOWED = {
    "model_type": "ultrabert",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention"],
}


def test_a_window_that_is_told_for_either_side() -> None:
    plans = planned(WINDOWED, pair("layers", (32, 32), (32, 32)))
    assert [str(plan.window) for plan in plans] == ["12", "None"]


def test_keys_and_values_in_one_tensor() -> None:
    config = {"model_type": "granite_speech_encoder", "num_heads": 4, "num_layers": 1}
    tensors = {"layers.0.attn.to_q.weight": (32, 16), "layers.0.attn.to_kv.weight": (64, 16)}
    (plan,) = planned(config, tensors)
    assert plan.value is not None
    parts = [side.projection.outputs for side in (plan.key, plan.value)]
    assert parts == [((0, 32),), ((32, 64),)]
