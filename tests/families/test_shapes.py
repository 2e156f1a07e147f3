"""Tensors that do not fit together are reported when a block is planned, for every caller."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from tests import small

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError, WqkError

D, H = 16, 4
LAYER = "model.layers.0."
QUERY, KEY, OUTPUT = (f"{LAYER}self_attn.{side}_proj.weight" for side in "qko")


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def qwen3(**changed: Any) -> StateDict:
    """A block with everything around it; tensors may be given other shapes, or left out."""
    block = small.llama(
        layers=1,
        heads=H,
        key_heads=H // 2,
        head_width=D // H,
        width=D,
        sides="qkvo",
        norms=True,
        model_type="qwen3",
        rms_norm_eps=1e-6,
    )
    norms = {f"{LAYER}self_attn.{side}_norm.weight": draw(D // H) for side in "qk"}
    tensors = block._arrays | norms | {"model.embed_tokens.weight": draw(9, D)}
    return StateDict(tensors | changed, block.config, "changed")


def test_a_block_that_fits_is_read():
    assert wqk.scan(qwen3()).layers.frame.height == 1


@pytest.mark.parametrize("name", list(qwen3().tensors())[:-1])
@pytest.mark.parametrize(
    "shape", [(3,), (D + 1,), (D, D + 4), (D + 4, D), (D, 0), (D, D, 1), (2 * D, D), (), (1, D - 1)]
)
def test_any_other_shape_is_one_clear_error(name: str, shape: tuple[int, ...]):
    if (name, shape) in ((OUTPUT, (D + 4, D)), (OUTPUT, (2 * D, D))):
        return  # what attention writes to may be wider than what it reads
    broken = qwen3(**{name: draw(*shape)})
    verbs = [
        lambda: wqk.scan(broken, circuit="ov"),
        lambda: wqk.scan(broken, fold_norm=True, bias=True, details=True),
        lambda: wqk.match_tokens(broken, 0, 0, top=2, fold_norm=True),
        lambda: wqk.explain(broken),
    ]
    for verb in verbs:
        with pytest.raises(WqkError):
            verb()


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (OUTPUT, (D, 3 * D), "takes the outputs of 4 heads of width 12"),
        (KEY, (D // 2, D + 2), "read the same vectors"),
        (f"{LAYER}input_layernorm.weight", (D - 1,), r"must have 16 entries.*got shape \(15,\)"),
        (f"{LAYER}self_attn.k_norm.weight", (3,), "must have 4 or 8 entries"),
    ],
)
def test_the_error_says_what_does_not_fit(name: str, shape: tuple[int, ...], message: str):
    with pytest.raises(CheckpointError, match=message):
        wqk.scan(qwen3(**{name: draw(*shape)}))


def test_a_bias_of_another_length_is_refused():
    with pytest.raises(CheckpointError, match="one for each output"):
        wqk.scan(qwen3(**{QUERY.replace("weight", "bias"): draw(D - 1)}))


def test_a_key_that_the_family_does_not_have_is_not_read():
    """GPT-2 has as many key heads as query heads, whatever its configuration holds besides."""
    tensors = {
        f"h.0.attn.c_attn.{name}": draw(*shape)
        for name, shape in {"weight": (24, 72), "bias": (72,)}.items()
    }
    config = {"model_type": "gpt2", "n_head": 4, "n_layer": 1}
    plain = wqk.scan(StateDict(tensors, config, "plain")).layers.frame
    for stray in ("num_key_value_heads", "num_kv_heads", "n_head_kv"):
        scores = wqk.scan(StateDict(tensors, config | {stray: 1}, "stray")).layers.frame
        assert scores["key_heads"].to_list() == [4]
        assert scores["norm"].to_list() == plain["norm"].to_list()
