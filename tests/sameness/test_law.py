"""No change passes unreported: each tensor of a model changed once, in three ways.

`same` with everything has to report the change; without everything, `same` has to report the
change or list the tensor as not compared.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.families.architectures import ALL, NAMED
from tests.families.proving import safetensors, save
from tests.sameness.plants import right

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.modules import StateDict

CHANGES = ("an entry by 10 %", "two rows", "a sign")


def changed(value: np.ndarray, change: str, dice: np.random.Generator) -> np.ndarray | None:
    """A copy with one change; None where it would change nothing."""
    value = value.copy()
    if change == "two rows":
        rows = [r for r in range(1, len(value)) if not np.array_equal(value[r], value[0])]
        if not rows:
            return None
        row = int(dice.choice(rows))
        value[[0, row]] = value[[row, 0]]
        return value
    places = np.flatnonzero(value)
    if not len(places):
        return None
    value.reshape(-1)[int(dice.choice(places))] *= {"a sign": -1}.get(change, 1.1)
    return value


def violations(name: str, folder: Path, count: int | None = None) -> Iterator[str]:
    """Yield unreported changes, among a number of drawn changes or all changes of all tensors."""
    save(NAMED[name], folder)
    config = open_checkpoint(folder).config
    tensors: dict[str, np.ndarray] = {}
    for file in folder.glob("*.safetensors"):
        for tensor, value in safetensors.load_file(file).items():
            if value.is_floating_point() and value.numel() > 1:
                tensors[tensor] = np.asarray(value.float().numpy())
    dice = np.random.default_rng(zlib.crc32(name.encode()))
    original = wqk.open(StateDict(tensors, config, "original"))
    changes = list(product(tensors, CHANGES))
    dice.shuffle(changes)
    for tensor, change in changes[:count]:
        edited = changed(tensors[tensor], change, dice)
        if edited is None:
            continue
        copy = StateDict({**tensors, tensor: edited}, config, "copy")
        if wqk.same(original, copy, everything=True).same:
            yield f"{name}, --all: {tensor}, {change}"
        result: Any = wqk.same(original, copy)
        listed = [*result.not_compared, *result.unknown]
        if result.same and not any(tensor in entry for entry in listed):
            yield f"{name}: {tensor}, {change}"


SAMPLE = random.Random(5).sample([a.name for a in ALL], 8)


@pytest.mark.parametrize("name", SAMPLE)  # of all, in the campaign
def test_a_change_of_some_tensors_is_said(name: str, tmp_path: Path) -> None:
    assert list(violations(name, tmp_path / "model", 5)) == []


@pytest.mark.campaign
@pytest.mark.parametrize("name", [a.name for a in ALL])
def test_a_change_of_any_tensor_is_said(name: str, tmp_path: Path) -> None:
    assert list(violations(name, tmp_path / "model")) == []


def test_a_bias_that_is_called_like_a_mask_is_compared() -> None:
    """SAM's ``layer_norm_final_attn.bias`` was taken for GPT-2's causal mask, ``attn.bias``."""
    stored = wqk.open(wqk.demo_model("encoder")).checkpoint
    names = [*stored.tensors()]
    tensors = dict(zip(names, stored.read([Part(name) for name in names]), strict=True))
    mask = {"layers.0.attn.bias": np.tri(4, dtype=np.float32)[None, None]}
    for bias in ("layer_norm_final_attn.bias", "layers.0.attn.bias"):
        reference = {**mask, **tensors, bias: np.ones(8, np.float32)}
        candidate = {**reference, bias: reference[bias] * 2}
        models = [StateDict(arrays, stored.config, "m") for arrays in (reference, candidate)]
        assert not wqk.same(*models, everything=True).same
    masked = [StateDict(arrays, stored.config, "m") for arrays in (tensors | mask, tensors)]
    assert wqk.same(*masked, everything=True).same


def test_an_infinity_is_no_rounding() -> None:
    """Its distance of any number was within its own rounding; and float16 rounds to it."""
    tensors, config, _ = right("LLaMA")
    name = "model.layers.0.mlp.up_proj.weight"
    for value in (np.inf, -np.inf, np.nan):
        broken = tensors[name].copy()
        broken.reshape(-1)[3] = value
        pair = [
            StateDict({**tensors, name: weight}, config, "m") for weight in (tensors[name], broken)
        ]
        assert not wqk.same(*pair, everything=True).same
        assert wqk.same(pair[1], pair[1], everything=True).same
