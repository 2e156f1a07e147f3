"""Families are proven by running models of every type; a share of them on every test run."""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.limits import some
from tools.deriving.deriving import derive
from tools.deriving.probing import record_type
from tools.deriving.proof import WEAK, faults
from tools.deriving.records import RunRecord, read_record
from tools.deriving.writing import BY_TABLE, PAGE, family_text

from wqk.checkpoints import Checkpoint, open_checkpoint
from wqk.families import find_family
from wqk.families.family import parse_family


@cache
def outcomes() -> list[dict[str, str]]:
    """Outcomes of every model type."""
    return [*map(json.loads, PAGE.read_text(encoding="utf-8").splitlines()[1:])]


def proven_types() -> list[str]:
    return [
        row["type"]
        for row in outcomes()
        if row["outcome"] in ("proven", "partial") and row["why"] != BY_TABLE
    ]


def recorded(model_type: str, folder: Path) -> tuple[RunRecord, Checkpoint]:
    record_type(model_type, folder)
    return read_record(folder), open_checkpoint(folder)


FEW = random.Random(12).sample(proven_types(), 3)


@pytest.mark.parametrize("model_type", some(FEW, proven_types()))
def test_proven_types_are_proven_again(model_type: str, tmp_path: Path) -> None:
    record, checkpoint = recorded(model_type, tmp_path / "model")
    problems = faults(record, checkpoint, find_family(checkpoint))
    assert [fault for fault in problems if not fault.startswith(WEAK)] == []


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Checkpoint]:
    return recorded("qwen3", tmp_path_factory.mktemp("qwen3") / "model")


RULE: dict[str, Any] = {
    "stack": "decoder",
    "query": "layers.{layer}.self_attn.q_proj",
    "key": "layers.{layer}.self_attn.k_proj",
    "value": "layers.{layer}.self_attn.v_proj",
    "output": "layers.{layer}.self_attn.o_proj",
    "query_norm": "layers.{layer}.self_attn.q_norm",
    "key_norm": "layers.{layer}.self_attn.k_norm",
    "input_norm": "layers.{layer}.input_layernorm",
    "causal": True,
    "rotary": {"order": "half"},
}


FAULTS = [
    ({}, ""),
    ({"key": "layers.{layer}.self_attn.v_proj", "value": []}, "is read wrongly"),
    ({"query_norm": [], "key_norm": []}, "is read wrongly"),
    ({"value": []}, "v_proj.weight makes the values"),
    ({"value": "layers.0.self_attn.v_proj"}, "does not make the values"),
    ({"output": []}, "o_proj.weight makes the outputs"),
    ({"output": "layers.0.self_attn.o_proj"}, "does not make the outputs"),
    ({"norm_offset": 1.0}, "is read wrongly"),
    ({"causal": False}, "causal is True"),
    ({"scale": []}, "scale is 0.2"),
    ({"rotary": {"order": "interleaved"}}, "positions are not rotary like that"),
    ({"input_norm": "layers.{layer}.post_attention_layernorm"}, "does not feed"),
    ({"stack": "encoder"}, "the stack is no encoder"),
    ({"position": "relative"}, "nothing is added"),
]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        *FAULTS,
        ({"rotary": None}, "positions are rotary"),
    ],
)
def test_a_wrong_rule_is_noticed(qwen3, changes, fault):
    problems = faults(*qwen3, parse_family(family_text("toy", ["qwen3"], [RULE | changes]), "toy"))
    assert bool(problems) == bool(fault)
    assert fault in "; ".join(problems)


def test_a_rule_is_made_from_what_was_recorded(qwen3: tuple[RunRecord, Checkpoint]) -> None:
    rules, unexplained = derive(*qwen3)
    assert unexplained == []
    (rule,) = rules
    assert {key: rule.get(key) for key in RULE} == RULE
    assert (rule["value"], rule["output"]) == (
        "layers.{layer}.self_attn.v_proj",
        "layers.{layer}.self_attn.o_proj",
    )
