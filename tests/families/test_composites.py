"""Models of parts are read part by part, each by its own configuration."""

from __future__ import annotations

import numpy as np
import pytest

import wqk
from wqk.checkpoints import Checkpoint, TensorInfo
from wqk.errors import CheckpointError


class Named(Checkpoint):
    """Tensors of which there are only names and shapes."""

    def __init__(self, config: dict[str, object], shapes: dict[str, tuple[int, ...]]) -> None:
        self.name, self.config = "toy", config
        self._shapes = shapes

    def read(self, parts: object) -> list[np.ndarray]:
        raise AssertionError("only names and shapes are looked at")

    def tensors(self) -> dict[str, TensorInfo]:
        return {n: TensorInfo("F32", s, 4 * int(np.prod(s))) for n, s in self._shapes.items()}


def pair(stem: str, layers: int, query: tuple[int, int], key: tuple[int, int]) -> dict:
    return {
        f"{stem}.{layer}.self_attn.{role}_proj.weight": shape
        for layer in range(layers)
        for role, shape in (("q", query), ("k", key))
    }


TEXT = {
    "model_type": "llama", "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2,
    "num_hidden_layers": 2,
}  # fmt: skip
VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "num_attention_heads": 4,
    "num_hidden_layers": 3,
}  # fmt: skip
LLAVA = {
    **pair("model.language_model.layers", 2, (48, 48), (16, 48)),
    **pair("model.vision_tower.vision_model.encoder.layers", 3, (32, 32), (32, 32)),
}


def test_each_part_has_its_own_heads() -> None:
    config = {"model_type": "of-tomorrow", "text_config": TEXT, "vision_config": VISION}
    plans = wqk.open(Named(config, LLAVA)).plans
    told = {(p.stack, p.query.heads, p.key.heads, p.query.head_width) for p in plans}
    assert told == {("decoder", 6, 2, 8), ("vision", 4, 4, 8)}
    assert [p.layer for p in plans if p.stack == "vision"] == [0, 1, 2]
    assert {p.family for p in plans} == {"siglip-vision + llama"}


def test_parts_within_parts_are_read() -> None:
    config = {"model_type": "of-tomorrow", "thinker_config": {"text_config": TEXT}}
    tensors = pair("thinker.model.layers", 2, (48, 48), (16, 48))
    assert len(wqk.open(Named(config, tensors)).plans) == 2


def test_a_part_without_a_type_is_what_transformers_takes_it_for() -> None:
    vision = {key: value for key, value in VISION.items() if key != "model_type"}
    config = {"model_type": "paligemma", "text_config": TEXT, "vision_config": vision}
    stacks = {plan.stack for plan in wqk.open(Named(config, LLAVA)).plans}
    assert "decoder" in stacks


def test_towers_that_are_called_like_their_configurations() -> None:
    other = TEXT | {"num_attention_heads": 3, "num_key_value_heads": 1}
    config = {"model_type": "of-tomorrow", "left_config": TEXT, "right_config": other}
    tensors = pair("right_net.layers", 2, (48, 48), (16, 48))
    tensors |= pair("left.layers", 2, (48, 48), (16, 48))
    plans = wqk.open(Named(config, tensors)).plans
    heads = {p.query.tensor.partition(".")[0]: p.query.heads for p in plans}
    assert heads == {"left": 6, "right_net": 3}


def test_two_towers_that_nothing_tells_apart_are_refused() -> None:
    config = {"model_type": "of-tomorrow", "text_config": TEXT}
    tensors = pair("a.layers", 2, (48, 48), (16, 48)) | pair("b.layers", 2, (48, 48), (16, 48))
    with pytest.raises(CheckpointError, match=r"may be under 'a\.' or 'b\.'"):
        wqk.open(Named(config, tensors))


def test_modules_that_are_called_like_their_part_share_its_configuration() -> None:
    config = {"model_type": "of-tomorrow", "qformer_config": TEXT}
    tensors = pair("near.0.qformer.layers", 2, (48, 48), (16, 48))
    tensors |= pair("near.1.qformer.layers", 2, (48, 48), (16, 48))
    tensors |= pair("far.0.qformer.layers", 2, (48, 48), (16, 48))
    plans = wqk.open(Named(config, tensors)).plans
    assert {(p.stack, p.query.heads) for p in plans} == {
        ("qformer-far", 6), ("qformer-near", 6), ("qformer-near-1", 6)
    }  # fmt: skip
    assert len(plans) == 6


def test_attention_beside_the_parts_is_read_with_them() -> None:
    config = {"model_type": "moonshine_streaming", "encoder_config": TEXT, "num_attention_heads": 3}
    tensors = pair("encoder.layers", 2, (48, 48), (16, 48))
    for kind in ("self_attn", "encoder_attn"):
        own = pair("decoder.layers", 2, (48, 48), (48, 48)).items()
        tensors |= {name.replace("self_attn", kind): shape for name, shape in own}
    plans = wqk.open(Named(config, tensors)).plans
    told = {(p.stack, p.kind, p.query.heads, p.key.heads) for p in plans}
    assert told == {
        ("decoder", "self", 3, 3),
        ("decoder", "cross", 3, 3),
        ("encoder", "self", 6, 2),
    }
    assert {p.family for p in plans} == {"moonshine-streaming + llama"}


WINDOWED = {
    "model_type": "ultrabert", "num_attention_heads": 4, "num_hidden_layers": 2,
    "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip


def test_a_window_that_is_told_for_either_side() -> None:
    tensors = pair("layers", 2, (32, 32), (32, 32))
    plans = wqk.open(Named(WINDOWED, tensors)).plans
    assert [plan.window for plan in plans] == ["12", None]


def test_keys_and_values_in_one_tensor() -> None:
    config = {"model_type": "granite_speech_encoder", "num_heads": 4, "num_layers": 1}
    tensors = {"layers.0.attn.to_q.weight": (32, 16), "layers.0.attn.to_kv.weight": (64, 16)}
    (plan,) = wqk.open(Named(config, tensors)).plans
    assert plan.value is not None
    parts = [side.projection.outputs for side in (plan.key, plan.value)]
    assert parts == [((0, 32),), ((32, 64),)]


def test_a_part_that_leaves_out_its_heads_has_those_of_its_type() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    tensors = pair("language_model.model.layers", 32, (64, 32), (64, 32))
    plans = wqk.open(Named(config, tensors)).plans
    assert {(plan.query.heads, plan.query.head_width) for plan in plans} == {(32, 2)}
