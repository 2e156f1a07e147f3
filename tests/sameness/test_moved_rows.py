"""Rows and layers in the place of others: fused weights that were cut, layers that were dropped."""

from __future__ import annotations

import re
from itertools import product

import numpy as np
import pytest
from tests.sameness.conversions import right
from tests.sameness.mending import mend

from wqk.checkpoints.modules import StateDict
from wqk.sameness.mismatches import Kind
from wqk.sameness.same import same


def layers_of(tensors: dict[str, np.ndarray], kept: list[int]) -> dict[str, np.ndarray]:
    """The tensors of a list of layers, numbered by their place in the list."""
    renumbered = {}
    for place, layer in enumerate(kept):
        for name, value in tensors.items():
            if f".layers.{layer}." in name:
                renumbered[name.replace(f".layers.{layer}.", f".layers.{place}.")] = value
    return renumbered


@pytest.mark.parametrize(
    ("kept", "moved", "text"),
    [
        ([0, 2], [1], "layer 1 is missing, and layer 1 has those of layer 2"),
        ([1, 2], [0, 1], "layer 0 is missing, and layers 0-1 have those of layers 1-2"),
        ([0, 0, 1, 2], [1, 2], "layer 0 is repeated, and layers 1-2 have those of layers 0-1"),
    ],
)
def test_layers_that_were_dropped_or_repeated_are_one_cause(
    kept: list[int], moved: list[int], text: str
) -> None:
    tensors, config = right("llama")
    outside = {name: value for name, value in tensors.items() if ".layers." not in name}
    changed_config = config | {"num_hidden_layers": len(kept)}
    comparison = same(
        StateDict(tensors, config, "a"),
        StateDict(outside | layers_of(tensors, kept), changed_config, "b"),
    )
    assert not comparison.same
    assert text in comparison.sentence
    assert [block.layer for block in comparison.blocks if not block.same] == moved
    assert {cause.mismatch.verdict for cause in comparison.causes} == {Kind.LAYER}


def test_a_layer_that_was_inserted_is_one_cause() -> None:
    """The cause was "different weights", and printed code overwrote the next layers."""
    tensors, config = right("llama")
    deeper = {name: value for name, value in tensors.items() if ".layers." not in name}
    deeper |= layers_of(tensors, [0, 1, 1, 2])
    random = np.random.default_rng(4)
    for name, value in deeper.items():
        if ".layers.1." in name:
            noise = random.standard_normal(value.shape)
            deeper[name] = (value.std() * noise).astype(np.float32)
    deeper_config = config | {"num_hidden_layers": 4}
    comparison = same(StateDict(tensors, config, "a"), StateDict(deeper, deeper_config, "b"))
    (cause,) = comparison.causes
    assert "layer 1 is new, and layer 2 has those of layer 1" in cause.mismatch.reason
    assert "for layer, source in ((1, 2), (2, 3)):" in comparison.repair
    assert "reference[" not in comparison.repair


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("order", ["qkv", "kvq"])
def test_a_fused_weight_that_was_cut_at_other_places_is_one_cause(shards: int, order: str) -> None:
    """Each key head's queries, key and value, or each shard's, cut as three sections."""
    tensors, config = right("llama")
    stored = dict(tensors)
    for layer in {name.split(".")[2] for name in tensors if ".layers." in name}:
        names = {side: f"model.layers.{layer}.self_attn.{side}_proj.weight" for side in "qkv"}
        pieces = {side: np.split(tensors[name], shards) for side, name in names.items()}
        fused = np.concatenate([pieces[side][n] for n, side in product(range(shards), order)])
        ends = np.cumsum([len(tensors[names[side]]) for side in "qk"])
        stored |= dict(zip(names.values(), np.split(fused, ends), strict=True))
    if all(np.array_equal(stored[name], tensors[name]) for name in tensors):
        return
    comparison = same(StateDict(tensors, config, "a"), StateDict(stored, config, "b"))
    assert {cause.mismatch.verdict for cause in comparison.causes} == {
        "other layout of the fused weight"
    }
    mend(comparison.repair, stored, tensors)
    assert same(StateDict(tensors, config, "a"), StateDict(stored, config, "b")).same


RENAMED = {
    "self_attn": "attention",
    "_proj": "",
    "model.layers": "stack",
    "input_layernorm": "norm_a",
}


def test_tensors_of_a_guessed_family_are_found_by_what_they_hold() -> None:
    """Equal values, outputs and norms were reported as missing where one side was a guess."""
    tensors, config = right("llama")
    renamed = {}
    for name, value in tensors.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        renamed[name] = value
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    guessed = StateDict(renamed, {key: config[key] for key in sizes}, "b")
    comparison = same(StateDict(tensors, config, "a"), guessed, everything=True)
    assert comparison.differing == ()
    name = next(name for name in renamed if ".o." in name)
    wrong = StateDict(renamed | {name: renamed[name] + 1}, guessed.config, "c")
    assert same(StateDict(tensors, config, "a"), wrong, everything=True).differing


@pytest.mark.parametrize("order", ["qkv", "kvq", "vqk"])
def test_the_order_within_a_guessed_fused_weight_is_no_mistake(order: str) -> None:
    """Another order was a cause with a repair, and the values of a right one were missing."""
    tensors, config = right("llama")
    fused = {}
    for name, value in tensors.items():
        match = re.match(r"model\.layers\.(\d+)\.self_attn\.([qkv])_proj\.weight", name)
        if match is None:
            fused[name.replace("model.layers", "stack").replace("self_attn", "attention")] = value
        elif match[2] == "q":
            sides = [tensors[name.replace("q_proj", f"{side}_proj")] for side in order]
            fused[f"stack.{match[1]}.attention.wqkv.weight"] = np.concatenate(sides)
    sizes = ("hidden_size", "num_attention_heads", "num_key_value_heads")
    guessed = StateDict(fused, {key: config[key] for key in sizes}, "b")
    comparison = same(StateDict(tensors, config, "a"), guessed, everything=True)
    assert comparison.differing == ()
    assert comparison.causes == ()
    assert comparison.same is (True if order == "qkv" else None)
    if order != "qkv":
        stored = f"rows of wqkv lie in the order {' '.join(order)}"
        assert f"the two are equal up to this order: {stored}" in comparison.sentence
