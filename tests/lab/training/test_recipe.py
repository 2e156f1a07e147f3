"""Recipes: presets against the paper, formulas, and values that are refused."""

from __future__ import annotations

import json
import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wqk.errors import RunError
from wqk_lab.training.initializations import STARTS
from wqk_lab.training.recipe import (
    INITIALIZATIONS,
    PRESETS,
    SIZES,
    Recipe,
    differences,
    make_recipe,
)

WRONG_RECIPES = [
    ({"mode": "both"}, "mode='both' must be one of encoder, decoder"),
    ({"objective": "causal"}, "an encoder's objective must be masked"),
    ({"mode": "decoder", "objective": "masked"}, "a decoder's causal or masked-next"),
    ({"width": 30, "heads": 4}, "divisible by the number of heads; got width 30 and 4 heads"),
    ({"layers": 0}, "layers=0 must be at least 1"),
    ({"layers": 2.0}, "layers=2.0 must be of type int"),
    ({"layers": True}, "layers=True must be of type int"),
    ({"steps": "many"}, "steps='many' must be of type int"),
    ({"dropout": 1}, "dropout=1.0 must be less than 1"),
    ({"learning_rate": 0}, "learning_rate=0.0 must be greater than 0"),
    ({"learning_rate": float("inf")}, "finite"),
    ({"weight_decay": float("nan")}, "weight_decay=nan must be at least 0"),
    ({"warmup": 11, "steps": 10}, "warmup must not exceed the steps; got 11 of 10"),
    ({"block": 2, "mask_share": 0.1}, "at least one token"),
    ({"keep_checkpoints": "some"}, "got 'some'"),
    ({"config": "bert"}, "config='bert' must be of type Mapping"),
    ({"init_norm": "twice"}, "of type float"),
    ({"init_norm": 1.0, "init_head_norm": 1.0}, "give only one"),
    ({"lauers": 3}, "no field named lauers"),
]


AT_A_LIMIT: list[dict[str, Any]] = [
    {"warmup": 10, "steps": 10},
    {"warmup": 0, "steps": 1},
    {"width": 30, "heads": 30},
    {"layers": 1, "dropout": 0.0},
    {"block": 2, "mask_share": 0.3},
    {"seed": 0, "weight_decay": 0.0, "penalty_weight": 0.0},
]


@pytest.mark.parametrize("fields", AT_A_LIMIT, ids=str)
def test_a_value_at_a_limit_is_one_that_is_taken(fields: dict[str, Any]) -> None:
    recipe = make_recipe(**fields)
    assert {name: getattr(recipe, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("size", "table_s1"), [("base", (12, 768, 12, 3072)), ("mini", (4, 256, 4, 1024))]
)
def test_the_paper_s_preset_is_the_paper_s(size: str, table_s1: tuple[int, ...]) -> None:
    recipe = make_recipe("paper", size=size)
    assert (recipe.layers, recipe.width, recipe.heads, recipe.intermediate) == table_s1
    assert (recipe.dropout, recipe.block, recipe.norm) == (0.1, 512, "post")
    assert (recipe.steps, recipe.batch, recipe.accumulation) == (200_000, 32, 8)
    assert (recipe.learning_rate, recipe.warmup, recipe.schedule) == (5e-5, 200, "linear")
    assert (recipe.weight_decay, recipe.precision, recipe.mask_share) == (0.01, "bf16", 0.15)
    assert recipe.corruption == "bert"
    assert make_recipe("paper", mode="decoder").objective == "causal"
    assert make_recipe("paper") == make_recipe("paper", size="base")


def test_the_documented_presets_are_these() -> None:
    page = Path(__file__).parents[3] / "docs" / "training.md"
    rows = re.findall(r"^\| `(\w+)` \| (\S+) \| (\S+) \|$", page.read_text("utf-8"), re.MULTILINE)
    assert len(rows) > 20
    for name, *cells in rows:
        values = (getattr(make_recipe(preset), name) for preset in ("paper", "fast"))
        printed = [f"{value:,}" if isinstance(value, int) else str(value) for value in values]
        assert cells == printed, name


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["encoder", "decoder"])
def test_recipes_survive_json(preset: str, size: str, mode: str) -> None:
    recipe = make_recipe(preset, size=size, mode=mode)
    assert Recipe.from_json(json.loads(json.dumps(recipe.to_json()))) == recipe


def test_a_recipe_written_before_a_field_existed_has_its_default() -> None:
    values = make_recipe().to_json()
    del values["init_norm"]
    assert Recipe.from_json(values) == make_recipe()


def test_formulas_follow_what_is_said() -> None:
    assert make_recipe(width=512, heads=8).intermediate == 2048
    assert make_recipe(width=512, heads=8, intermediate=7).intermediate == 7
    assert make_recipe(steps=100).warmup == 5
    assert make_recipe(block=64).held_out_blocks == 512
    wide = make_recipe(config={"model_type": "gpt2", "n_embd": 512})
    assert wide.learning_rate == make_recipe(width=512, heads=8).learning_rate


def test_a_configuration_takes_the_place_of_the_sizes() -> None:
    recipe = make_recipe(config={"model_type": "llama"}, mode="decoder")
    assert (recipe.layers, recipe.width, recipe.norm) == (None, None, None)
    for twice in ({"layers": 2}, {"size": "mini"}, {"dropout": 0.1}):
        with pytest.raises(RunError, match="the configuration determines"):
            make_recipe(config={"model_type": "llama"}, **twice)


@pytest.mark.parametrize(("wrong", "message"), WRONG_RECIPES)
def test_wrong_values_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(RunError, match=message):
        make_recipe(**wrong)


@pytest.mark.parametrize("wrong", [{"preset": "slow"}, {"size": "huge"}])
def test_unknown_presets_and_sizes(wrong: dict[str, str]) -> None:
    with pytest.raises(RunError, match="must be one of"):
        make_recipe(**wrong)


def test_json_with_missing_or_unknown_fields() -> None:
    values = make_recipe().to_json()
    lacking = {name: value for name, value in values.items() if name != "steps"}
    for wrong in (lacking, values | {"stepz": 3}):
        with pytest.raises(RunError, match="missing or unknown: step"):
            Recipe.from_json(wrong)


def test_differences_name_every_field() -> None:
    first = make_recipe()
    assert differences(first, first) == []
    changed = replace(first, seed=2, schedule="cosine")
    assert differences(first, changed) == ["schedule: linear → cosine", "seed: 1 → 2"]


@pytest.mark.parametrize(
    ("steps", "keep", "save_every", "kept", "saved"),
    [
        (1024, "spaced", 2000, [0, *(2**n for n in range(1, 11))], None),
        (5, "spaced", 2000, [0, 1, 2, 5], None),
        (100, "0, 7,500", 40, [0, 7, 100], [0, 7, 40, 80, 100]),
        (100, "last", 50, [100], [50, 100]),
        (100, "all", 40, [0, 40, 80, 100], None),
    ],
)
def test_which_checkpoints_stay(steps, keep, save_every, kept, saved):
    recipe = make_recipe(steps=steps, keep_checkpoints=keep, save_every=save_every)
    assert sorted(recipe.kept_steps) == kept
    assert sorted(recipe.saved_steps) == (saved or kept)


@given(st.sampled_from(fields(Recipe)), st.none() | st.integers() | st.text() | st.lists(st.none()))
def test_whatever_a_file_holds_is_a_recipe_or_an_error(field: Any, value: Any) -> None:
    values = {**make_recipe().to_json(), field.name: value}
    try:
        recipe = Recipe.from_json(values)
    except RunError:
        return
    assert getattr(recipe, field.name) == value


def test_initializations_are_those_there_are() -> None:
    assert set(INITIALIZATIONS) == set(STARTS)


NUMBERS = [entry for entry in fields(Recipe) if entry.type.split(" ")[0] in ("int", "float")]
CAN_BE_ZERO = {"dropout", "penalty_weight", "warmup", "weight_decay", "seed"}
IN_WORDS = [
    entry.name for entry in fields(Recipe) if entry.type.split(" ")[0] == "str"
]  # and each has its choices


@pytest.mark.parametrize("entry", NUMBERS, ids=lambda entry: entry.name)
def test_no_number_is_negative_and_few_are_zero(entry: Any) -> None:
    number = -1 if entry.type.startswith("int") else -1.0
    with pytest.raises(RunError, match=f"{entry.name}="):
        replace(make_recipe(), **{entry.name: number})
    if entry.name in CAN_BE_ZERO:
        assert getattr(replace(make_recipe(), **{entry.name: 0}), entry.name) == 0
        return
    with pytest.raises(RunError, match=f"{entry.name}="):
        replace(make_recipe(), **{entry.name: 0})


@pytest.mark.parametrize(
    "name", [entry.name for entry in NUMBERS if entry.type.startswith("float")]
)
def test_a_number_just_above_zero_is_taken(name: str) -> None:
    nothing = {field: None for field in ("init_norm", "init_head_norm") if field != name}
    recipe = replace(make_recipe(block=1000), **{**nothing, name: 1e-3})
    assert getattr(recipe, name) == 1e-3


@pytest.mark.parametrize("name", [name for name in IN_WORDS if name != "preset"])
def test_no_text_is_taken_that_is_no_choice(name: str) -> None:
    with pytest.raises(RunError, match=r"nonsense"):
        replace(make_recipe(), **{name: "nonsense"})


@pytest.mark.parametrize("name", ["dropout", "mask_share"])
def test_shares_are_below_one(name: str) -> None:
    with pytest.raises(RunError, match=f"{name}=1.0 must be less than 1"):
        make_recipe(**{name: 1.0})


@pytest.mark.parametrize("name", ["hidden_size", "n_embd", "d_model"])
def test_formulas_take_the_width_of_any_configuration(name: str) -> None:
    recipe = make_recipe(config={"model_type": "gpt2", name: 512})
    by_width = make_recipe(width=512, heads=8)
    assert recipe.learning_rate == by_width.learning_rate == 0.001
    assert recipe.initial_std is None
    assert by_width.initial_std == round(0.68 / 512**0.5, 4)
    # A width that is none is not taken.
    for nothing in (0, "wide", None):
        unknown = make_recipe(config={"model_type": "gpt2", name: nothing})
        assert unknown.learning_rate == make_recipe().learning_rate


def test_intervals_of_the_fast_preset_are_shares_of_its_steps() -> None:
    recipe = make_recipe(steps=4000)
    counts = {"log_every": 200, "held_out_every": 20, "score_every": 50, "save_every": 10}
    assert {name: 4000 // getattr(recipe, name) for name in counts} == counts
    short = make_recipe(steps=3)
    assert {name: getattr(short, name) for name in counts} == dict.fromkeys(counts, 1)
    assert make_recipe(block=40_000).held_out_blocks == 1


def test_a_parent_is_a_run_a_step_and_a_recipe_and_brings_the_weights() -> None:
    parent = {"run": "a", "step": 3, "recipe": make_recipe(steps=3, accumulation=2).to_json()}
    child = replace(make_recipe(mode="decoder"), parent=parent, objective="masked")
    assert child.batches_before == 6
    grandchild = replace(child, parent={"run": "b", "step": 5, "recipe": child.to_json()})
    assert grandchild.batches_before == 6 + 5
    lacking = {name: value for name, value in parent.items() if name != "step"}
    with pytest.raises(RunError, match="a parent must have a run, a step and a recipe"):
        replace(child, parent=lacking)
    for name, value in (("init", "symmetric"), ("init_norm", 2.0), ("init_values", 2.0)):
        with pytest.raises(RunError, match="has its weights; leave out init"):
            replace(child, **{name: value})
