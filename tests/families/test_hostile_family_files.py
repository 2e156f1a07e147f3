"""Family files that are wrong: whatever a key holds ends in a scan or in a WqkError."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import fields
from tests.attacks.family_files import toml
from tests.limits import counts, refused, within
from tests.stand_in import Module

import wqk
from wqk.families.rules import VALUES, AttentionRule, Family, RotaryRule

HEADS, WIDTH, INPUTS, RANK, POSITION = 4, 6, 24, 8, 2
CONFIG = {
    "model_type": "ours",
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": 2,
    "width": WIDTH,
    "position": POSITION,
    "none": None,
    "list": [1, 2],
}
SHAPES: dict[str, tuple[int, ...]] = {
    "q": (HEADS * WIDTH, INPUTS),
    "k": (2 * WIDTH, INPUTS),
    "v": (2 * WIDTH, INPUTS),
    "o": (INPUTS, HEADS * WIDTH),
    "qkv": (3 * HEADS * WIDTH, INPUTS),
    "stacked": (HEADS, INPUTS, WIDTH),
    "norm": (INPUTS,),
    "head_norm": (WIDTH,),
    "query_down": (RANK, INPUTS),
    "query_up": (HEADS * (WIDTH + POSITION), RANK),
    "key_down": (RANK + POSITION, INPUTS),
    "key_up": (HEADS * 2 * WIDTH, RANK),
    "latent_norm": (RANK,),
}
NAMES = [f"{{layer}}.{name}" for name in SHAPES]

# Tables that are right: what they hold is read.
START: dict[str, Any] = {"stack": "decoder", "input_norm": "{layer}.norm", "output": "{layer}.o"}
TABLES: dict[str, dict[str, Any]] = {
    "separate": {
        **START,
        "query": "{layer}.q",
        "key": "{layer}.k",
        "value": "{layer}.v",
        "query_norm": "{layer}.head_norm",
        "window": "position",
        "rotary": {"order": "half", "fraction": []},
    },
    "sectioned": {**START, "layout": "sectioned", "fused": "{layer}.qkv", "key_heads": []},
    "sections": {
        **START,
        "fused": "{layer}.qkv",
        "sections": [[role, "num_attention_heads", "width"] for role in "kqv"],
        "section_blocks": "1",
    },
    "latent": {
        **START,
        "layout": "latent",
        "query": "{layer}.query_up",
        "key": "{layer}.key_up",
        "query_inner": "{layer}.query_down",
        "key_inner": "{layer}.key_down",
        "query_inner_norm": "{layer}.latent_norm",
        "key_inner_norm": "{layer}.latent_norm",
        "content_width": "width",
        "position_width": "position",
        "rotary": {"order": "interleaved", "fraction": []},
    },
}
# Values of wrong types and wrong words, for every key.
HOSTILE: list[Any] = [
    True,
    -1,
    0,
    10**30,
    0.5,
    float("nan"),
    "",
    "no such word",
    "none",
    "list",
    "width",
    "width // 0",
    "width ** 999",
    "-width",
    "'text'",
    "a" * 900,
    "{layer}",
    "{layer}.{layer}.q",
    "{no}{such}",
    "{previous}.q",
    "{last}.q",
    "{head}.q",
    "(",
    "[",
    [],
    [""],
    [[]],
    [[[]]],
    [["q"]],
    [["q", "*"], ["k", "*"]],
    [["query", "width", "*"], ["key", "width", "*"]],
    [["q", "width", "none"], ["k", "list"]],
    ["width", "none"],
    [1.5, -2],
    {},
    {"a": 1},
    {"query": "width"},
    {"order": "no such order"},
    {"full": {"parameters": "list", "base": "none"}},
    {"num_hidden_layers": -1, "position": "text"},
]


def module() -> Module:
    """A model with tensors for every table."""
    rng = np.random.default_rng(0)
    tensors = {f"0.{name}.weight": rng.standard_normal(shape) for name, shape in SHAPES.items()}
    return Module(tensors, CONFIG)


def is_refused(table: dict[str, Any], path: Path, **head: Any) -> bool:
    """Return whether a family file with this table of attention is refused, or its model is."""
    entries = {"name": "ours", "attention": [table], **head}
    path.write_text("".join(f"{key} = {toml(value)}\n" for key, value in entries.items()))
    model = module()

    def look() -> None:
        opened = wqk.open(model, family=path)
        str(wqk.explain(opened))
        wqk.scan(opened, heads=False)

    return refused(look)


def values_of(key: str) -> list[Any]:
    """Values of a key: hostile ones, names of all tensors, and all words."""
    known_values: list[Any] = []
    for values_by_key in VALUES.values():
        known_values += values_by_key.get(key, ())
    return [*HOSTILE, *NAMES, *known_values]


@pytest.mark.parametrize("kind", TABLES)
def test_the_tables_are_right(kind: str, tmp_path: Path) -> None:
    assert not is_refused(TABLES[kind], tmp_path / "family.toml")


KEYS = [*(field.name for field in fields(AttentionRule)), "like"]
ROTARY_KEYS = [field.name for field in fields(RotaryRule)]


@counts(4, 10_000)
@pytest.mark.parametrize("key", [*KEYS, *(f"rotary.{key}" for key in ROTARY_KEYS)])
def test_no_key_does_more_than_be_refused(key: str, count: int, tmp_path: Path) -> None:
    dice = random.Random(key)
    outer, _, inner = key.rpartition(".")
    for table in TABLES.values():
        values = values_of(inner)
        for value in dice.sample(values, min(count, len(values))):
            changed = {**table, inner: value}
            if outer:
                changed = {**table, outer: {"order": "half", **table.get(outer, {}), inner: value}}
            with within(5):
                is_refused(changed, tmp_path / "family.toml")


@pytest.mark.parametrize("key", [*(field.name for field in fields(Family)), "like", "change"])
def test_no_key_of_the_file_does_more_than_be_refused(key: str, tmp_path: Path) -> None:
    changes = [{"layout": "latent"}, {"self": 1}, {"cross": {"query": 1}}, {"rotary": {"axes": 0}}]
    for value in [*HOSTILE, *changes, "llama", ["llama"], ["mamba2", "no such mixer"]]:
        is_refused(TABLES["separate"], tmp_path / "family.toml", **{key: value})
        if key == "change":
            is_refused(TABLES["separate"], tmp_path / "family.toml", like="bert", change=value)


@pytest.mark.parametrize("kind", TABLES)
def test_no_missing_key_does_more_than_be_refused(kind: str, tmp_path: Path) -> None:
    for key in TABLES[kind]:
        table = {other: value for other, value in TABLES[kind].items() if other != key}
        is_refused(table, tmp_path / "family.toml")


@counts(60, 20_000)
def test_seeded_pairs_of_changes(count: int, tmp_path: Path) -> None:
    dice = random.Random(count)
    outcomes = set()
    for _ in range(count):
        table = dict(dice.choice(list(TABLES.values())))
        for key in dice.sample(KEYS, 2):
            table[key] = dice.choice(values_of(key))
            if dice.random() < 0.3:
                table.pop(dice.choice(list(table)))
        outcomes.add(is_refused(table, tmp_path / "family.toml"))
    assert outcomes == {True, False}


@pytest.mark.parametrize("times", [10**30, 100_001, 0, -1])
def test_layers_are_applied_a_possible_number_of_times(times: int, tmp_path: Path) -> None:
    path = tmp_path / "family.toml"
    assert not is_refused({**TABLES["separate"], "applied_in_total": 2}, path)
    assert is_refused({**TABLES["separate"], "applied_in_total": times}, path)
    if times > 0:  # others are refused as factors
        with pytest.raises(wqk.WqkError, match="applications of shared layers, must be from 1 to"):
            wqk.open(module(), family=path)
