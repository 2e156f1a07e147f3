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


GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 9}
SHAPES = {
    "ln_1.weight": (16,),
    "ln_1.bias": (16,),
    "attn.c_attn.weight": (16, 48),
    "attn.c_attn.bias": (48,),
    "attn.c_proj.weight": (16, 16),
    "attn.c_proj.bias": (16,),
    "ln_2.weight": (16,),
    "mlp.c_fc.weight": (16, 64),
    "mlp.c_proj.bias": (16,),
}


def gpt2() -> dict[str, np.ndarray]:
    """The tensors of the layers of a GPT-2."""
    rng = np.random.default_rng(0)
    return {
        f"transformer.h.{layer}.{name}": rng.standard_normal(shape).astype(np.float32)
        for layer in range(2)
        for name, shape in SHAPES.items()
    }


def separated(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The tensors of a GPT-2 under unknown names, with queries, keys and values apart."""
    renamed = {}
    for name, value in tensors.items():
        name = name.replace("transformer.h", "stack").replace(".mlp.c_fc", ".ff.up")
        if ".attn.c_attn." not in name:
            renamed[name.replace(".mlp.c_proj", ".ff.down").replace(".ln_2.", ".second.")] = value
            continue
        for side, part in zip("qkv", np.split(value.T, 3), strict=True):
            renamed[name.replace("c_attn", f"{side}_proj")] = np.ascontiguousarray(part)
    return renamed


@pytest.mark.parametrize(
    "exchanged",
    ["", "attn.v_proj.weight", "attn.v_proj.bias", "ff.up.weight", "ff.down.bias", "second.weight"],
)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_tensors_under_unknown_names_are_found_in_their_layer(
    exchanged: str, is_reversed: bool
) -> None:
    """Values apart were missing in a fused weight; those of another layer were found."""
    tensors = gpt2()
    renamed = separated(tensors)
    if exchanged:
        names = [f"stack.{layer}.{exchanged}" for layer in (0, 1)]
        renamed |= {names[0]: renamed[names[1]], names[1]: renamed[names[0]]}
    models = [StateDict(tensors, GPT2, "known"), StateDict(renamed, {}, "unknown")]
    if is_reversed:
        models.reverse()
    comparison = same(*models, everything=True, heads_per_layer=2)
    assert comparison.same is (not exchanged)
    assert bool(comparison.differing) is bool(exchanged)


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
