"""Configurations that lie: whatever stands under a key ends in a scan or in a WqkError."""

from __future__ import annotations

import json
import random
import shutil
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from tests.limits import counts, refused, within
from tests.stand_in import Module

import wqk

HOSTILE = [
    None,
    True,
    -1,
    0,
    7,
    2**31,
    2**63,
    1e308,
    -0.5,
    "",
    "12",
    "x" * 10_000,
    [],
    [1, 2],
    [[]],
    {},
    {"a": {"b": []}},
    [None],
    ["full_attention"],
    {"rope_type": "no such"},
    {"factor": "x"},
    10**400,
    1e9,
    5,
    "\ud800",
    {"rope_theta": "x"},
    {"rope_type": "yarn", "factor": 10**400},
    {"rope_theta": 0, "partial_rotary_factor": 1e9},
    {"full_attention": {"rope_theta": {}}},
]
ROWS = Path(__file__).with_name("hostile.toml").read_text(encoding="utf-8")
KINDS = tomllib.loads(ROWS)
GOOD = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "n_head": 4,
    "num_heads": 4,
    "num_hidden_layers": 1,
    "n_layer": 1,
    "num_layers": 1,
}


def model(kind: str, changes: dict[str, object]) -> Module:
    """A tiny model whose configuration is right but for the changes."""
    rng = np.random.default_rng(0)
    shapes = KINDS[kind]["tensors"]
    tensors = {f"{name}.weight": rng.standard_normal(shape) for name, shape in shapes.items()}
    return Module(tensors, {"model_type": kind, **GOOD, **changes})


@counts(10, len(HOSTILE))
@pytest.mark.parametrize(
    ("kind", "key"), [(kind, key) for kind in KINDS for key in KINDS[kind]["keys"]]
)
def test_no_value_does_more_than_be_refused(kind: str, key: str, count: int) -> None:
    distances = (0, 1) if kind == "llama" else (0,)
    for value in random.Random(key).sample(HOSTILE, count):
        liar = model(kind, {key: value})
        for look in (partial(wqk.scan, heads=False, distances=distances), wqk.explain):
            with within(5):
                refused(look, liar)


@counts(400, 47_000)
def test_seeded_pairs_of_lies(count: int) -> None:
    rng = np.random.default_rng(count)
    outcomes = set()
    for _ in range(count):
        kind = str(rng.choice(list(KINDS)))
        keys = rng.choice(KINDS[kind]["keys"], 2)
        changes = {str(key): HOSTILE[rng.integers(len(HOSTILE))] for key in keys}
        outcomes.add(refused(wqk.scan, model(kind, changes)))
    assert outcomes == {True, False}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", "\x00", '{"a":' * 5000, '"bert"', "NaN"])
def test_what_is_no_configuration_is_refused(tmp_path: Path, text: str) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wqk.demo_model("encoder"), folder)
    (folder / "config.json").write_text(text)
    with pytest.raises(wqk.WqkError):
        wqk.scan(folder)


def test_heads_that_do_not_divide_are_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(wqk.demo_model("encoder"), folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
    with pytest.raises(wqk.WqkError, match="128 outputs do not divide into 5 heads"):
        wqk.scan(folder)


@pytest.mark.parametrize("factor", [5, 1.5, 1e9, -1, 0.1])
def test_no_more_dimensions_turn_than_there_are(factor: float) -> None:
    with pytest.raises(wqk.WqkError, match="rotary"):
        wqk.scan(model("stablelm", {"partial_rotary_factor": factor}), distances=(0, 1))


@pytest.mark.parametrize(
    "tensors",
    [
        {"layers.0.self_attn.q_proj": (32, 0), "layers.0.self_attn.k_proj": (32, 0)},
        {"layers.0.self_attn.q_proj": (0, 8), "layers.0.self_attn.k_proj": (0, 8)},
        {f"layers.{'9' * 5000}.self_attn.{side}_proj": (8, 8) for side in "qk"},
        {f"layers.٣.self_attn.{side}_proj": (8, 8) for side in "qk"},
        {f"layers.0.\ud800.self_attn.{side}_proj": (8, 8) for side in "qk"},
    ],
    ids=["no width", "no heads", "5,000 digits", "other digits", "surrogate"],
)
@pytest.mark.parametrize("kind", ["llama", "unknown"])
def test_tensors_that_lie(tensors: dict[str, tuple[int, int]], kind: str) -> None:
    named = {f"{name}.weight": np.ones(shape) for name, shape in tensors.items()}
    liar = Module(named, {"model_type": kind, **GOOD})
    for look in (wqk.scan, wqk.explain):
        refused(lambda: str(look(liar)))  # noqa: B023 - called at once
