"""Assumptions of a plan, unknown facts, and missing tensors are listed and shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.families import Aspect
from wqk.families.model_types import always_present, proven_version

COUNTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
WIDTH = 16


def tensors(norms: bool = False, further: tuple[str, ...] = ()) -> dict[str, np.ndarray]:
    """Queries and keys of two layers; with norms of four dimensions."""
    rng = np.random.default_rng(0)
    made: dict[str, np.ndarray] = {}
    for layer in range(2):
        name = f"model.layers.{layer}."
        for side, rows in (("q", 16), ("k", 8), ("v", 8)):
            made[f"{name}self_attn.{side}_proj.weight"] = rng.standard_normal((rows, WIDTH))
        made[f"{name}self_attn.o_proj.weight"] = rng.standard_normal((WIDTH, 16))
        made[f"{name}input_layernorm.weight"] = np.ones(WIDTH)
        if norms:
            made |= {f"{name}self_attn.{side}_norm.weight": np.full(4, 0.5) for side in "qk"}
        made |= {f"{name}{name_of_further}.weight": np.ones(WIDTH) for name_of_further in further}
    return {name: value.astype(np.float32) for name, value in made.items()}


def guessed(**changes: Any) -> wqk.Model:
    return wqk.open(Module(tensors(**changes), {"model_type": "nobody", **COUNTS}))


def test_a_guess_lists_what_it_assumes_and_what_is_unknown() -> None:
    plan = guessed(norms=True).plans[0]
    listed = {assumption.aspect: assumption.value for assumption in plan.assumptions}
    assert listed == {
        Aspect.SCALE: "0.5",
        Aspect.ROTATION: None,
        Aspect.MASK: None,
        Aspect.WINDOW: None,
        Aspect.TERMS: None,
        Aspect.CAP: None,
        Aspect.GAINS: "as stored",
        Aspect.INPUT_NORM: None,
    }
    assert [assumption.is_unknown for assumption in plan.assumptions] == [
        v is None for v in listed.values()
    ]


def test_a_guess_shows_no_assumed_value_as_known() -> None:
    plan = guessed().plans[0]
    assert (plan.scale, plan.causal, plan.window, plan.softcap) == (None, None, None, None)
    for field in ("scale", "causal", "window", "rotary", "position", "softcap"):
        assert f"{field}=unknown" in repr(plan)
    assert plan.score_scale == 0.5
    plan_of_llama = wqk.open(Module(tensors(), {"model_type": "llama", **COUNTS})).plans[0]
    assert "scale=0.5, softcap=None" in repr(plan_of_llama)
    assert "causal=True" in repr(plan_of_llama)
    assert plan_of_llama.assumptions == ()


def test_explain_and_the_table_show_them() -> None:
    model = guessed(norms=True)
    notes = " ".join(wqk.explain(model).notes)
    assert "scale: assumed 0.5 (only names and shapes of tensors are known" in notes
    assert "unknown: rotation, mask, window" in notes
    assert notes.count("unknown: ") == 1
    assert "gains of the norms of queries and keys: assumed as stored" in notes
    (line,) = (line for line in wqk.scan(model).metadata["notes"] if "assumed" in line)
    assert line.startswith("assumed: scale 0.5, gains of the norms of queries and keys as stored")
    assert "unknown: rotation, mask, window" in line


@pytest.mark.parametrize(
    ("model_type", "further", "offset"),
    [
        ("nobody", (), 0.0),
        ("nobody", ("pre_feedforward_layernorm",), 1.0),
        ("gemma4_next", ("pre_feedforward_layernorm",), 0.0),
    ],
)
def test_gains_are_guessed_as_gemma_stores_them(
    model_type: str, further: tuple[str, ...], offset: float
) -> None:
    model = wqk.open(
        Module(tensors(norms=True, further=further), {"model_type": model_type, **COUNTS})
    )
    norm = model.plans[0].query.norm
    assert norm is not None
    assert norm.offset == offset
    values = {assumption.aspect: assumption.value for assumption in model.plans[0].assumptions}
    assert values[Aspect.GAINS] == ("1 plus what is stored" if offset else "as stored")


@pytest.mark.parametrize(
    ("fused", "expected"),
    [("qkv_proj", "all queries, then all keys"), ("query_key_value", "for each key head")],
)
def test_the_order_of_a_fused_weight_is_an_assumption(fused: str, expected: str) -> None:
    name = f"layers.0.attn.{fused}.weight"
    model = wqk.open(
        Module({name: np.ones((32, WIDTH), np.float32)}, {"model_type": "nobody", **COUNTS})
    )
    (order,) = (
        assumption
        for assumption in model.plans[0].assumptions
        if assumption.aspect is Aspect.LAYOUT
    )
    assert order.value is not None
    assert order.value.startswith(expected)


def test_a_rotation_that_is_only_named_is_unknown() -> None:
    name = "encoder.layer.0.attention"
    weights = {f"{name}.{side}.weight": np.eye(12, dtype=np.float32) for side in ("query", "key")}
    config = {"model_type": "vjepa2", "num_attention_heads": 1, "num_hidden_layers": 1}
    (assumption,) = wqk.open(Module(weights, config)).plans[0].assumptions
    assert (assumption.aspect, assumption.value) == (Aspect.ROTATION, None)
    assert "only names its positions" in assumption.reason


def test_tensors_that_a_type_always_has_are_reported_missing() -> None:
    config = {"model_type": "qwen3", "head_dim": 4, **COUNTS}
    complete = wqk.open(Module(tensors(norms=True), config))
    assert all(plan.missing == () for plan in complete.plans)
    model = wqk.open(Module(tensors(), config))
    plan = model.plans[0]
    names = tuple(f"model.layers.0.self_attn.{side}_norm.weight" for side in "qk")
    assert plan.missing == names
    assert {assumption.aspect for assumption in plan.assumptions} == {Aspect.MISSING}
    sentence = "which models of this type have, are missing from the file"
    assert sentence in plan.reason
    assert sentence in " ".join(wqk.explain(model).notes)
    table = wqk.scan(model)
    assert all("partial" in status for status in table.frame["status"])
    assert sentence in " ".join(table.metadata["partial"].values())
    assert always_present("llama") == []


def test_the_version_that_families_were_proven_against() -> None:
    page = Path(__file__).parents[2] / "docs" / "model-types.jsonl"
    first = json.loads(page.read_text(encoding="utf-8").splitlines()[0])
    assert first == {"transformers": proven_version()}


@pytest.mark.parametrize(
    ("written", "newer"), [(None, False), ("4.40.0", False), ("99.1.0", True), ("x", False)]
)
def test_a_guess_names_the_version(written: str | None, newer: bool) -> None:
    config = {"model_type": "nobody", **COUNTS, "transformers_version": written}
    notes = " ".join(wqk.explain(Module(tensors(), config)).notes)
    assert f"families were proven against transformers {proven_version()}" in notes
    assert ("this type is newer than the families" in notes) is newer
