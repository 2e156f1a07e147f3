"""Each cause is planted in each layout, seen, named, and undone by the code that is printed."""

from __future__ import annotations

import copy
import random
from collections import Counter

import numpy as np
import pytest
from tests.sameness.conversions import MISTAKES
from tests.sameness.mending import mend
from tests.sameness.plants import (
    EVERYWHERE,
    LAYOUTS,
    PLANTS,
    SETTINGS,
    Case,
    Plant,
    Setting,
    cases,
    planted,
    right,
    tried,
)

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.sameness import further_settings
from wqk.sameness.mismatches import UNEXPLAINED, Kind

# Of all plants, what is not right: seen, but not named.
NAMED = 0.95


def test_every_cause_has_a_plant() -> None:
    """Causes of quantized weights, sizes, merges and tensors elsewhere are in other tests."""
    planted = {mistake.verdict for mistake in MISTAKES}
    for plant in PLANTS:
        planted.update(plant.kinds)
    of_tensors = {
        Kind.OFFSET,
        Kind.CONSTANT,
        Kind.EXPERTS,
        Kind.RESIZED,
        Kind.MISSING,
        Kind.EXPONENTIAL,
        Kind.INITIALIZED,
        Kind.LAYERS,
    }
    of_sizes = {Kind.GROUPS, Kind.QUANTIZED, Kind.SIZES}
    of_merges = {Kind.SUM}
    assert planted | of_tensors | of_sizes | of_merges | UNEXPLAINED == set(Kind)


def judged(selection: list[Case]) -> Counter[str]:
    """Count the plants by outcome; all have to be seen, and none may have a wrong name."""
    counts, wrong = Counter[str](), []
    for case in selection:
        verdict = tried(case)
        if verdict is None:
            continue
        counts[verdict.named] += 1
        counts["repaired"] += verdict.repaired is True
        if verdict.named in ("unseen", "wrong") or verdict.repaired is False:
            wrong.append(f"{case}: {verdict}")
    assert not wrong, "\n".join(wrong)
    return counts


@pytest.mark.parametrize("plant", PLANTS, ids=[plant.description for plant in PLANTS])
def test_each_plant_is_seen_named_and_undone_somewhere(plant: Plant) -> None:
    plant_cases = []
    for layout in LAYOUTS:
        plant_cases += [case for case in cases(layout) if case.plant is plant]
    random.Random(12).shuffle(plant_cases)
    assert judged([next(case for case in plant_cases if planted(case) is not None)])["right"]


@pytest.mark.campaign
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_plants_are_seen_named_and_undone(layout: str) -> None:
    counts = judged(cases(layout))
    print(layout, dict(counts))
    assert counts["right"] >= NAMED * (counts.total() - counts["repaired"])


@pytest.mark.parametrize("outputs", [True, False])
def test_the_order_of_heads_is_a_freedom_if_values_and_outputs_share_it(outputs: bool) -> None:
    """Key heads rolled with all that belongs to them; or their outputs forgotten."""
    original, config, _ = right("LLaMA")
    tensors = dict(original)
    for name, value in tensors.items():
        if "attn" in name and "o_proj" not in name:
            tensors[name] = np.roll(value, len(value) // 3, axis=0)
        elif "o_proj" in name and outputs:
            tensors[name] = np.roll(value, value.shape[1] // 3, axis=1)
    pair = StateDict(original, config, "a"), StateDict(tensors, config, "b")
    assert not wqk.same(*pair).same
    comparison = wqk.same(*pair, up_to=["heads"])
    assert comparison.same == outputs
    assert not outputs or "Heads lie at most 0.0e+00 apart" in comparison.sentence


@pytest.mark.parametrize(
    ("layout", "is_free"),
    [
        ("Phi-3", True),
        ("Gemma 2", True),
        ("T5", False),
        ("Qwen 3.5", False),  # relative; gates
    ],
)
def test_heads_are_in_any_order_if_nothing_is_theirs_by_number(layout: str, is_free: bool) -> None:
    moved = Plant("", "", lambda w, n: w[::-1], ())
    tensors, config, _ = right(layout)
    reordered = planted(Case(layout, moved, "qkvo", EVERYWHERE))
    pair = StateDict(tensors, config, "a"), StateDict(reordered or {}, config, "b")
    assert wqk.same(*pair, up_to=["heads"], everything=True).same == is_free


def test_what_holds_of_each_part_of_a_fused_weight_is_said_of_the_whole() -> None:
    (tensors, config, _), name = right("Phi-3"), "layers.0.self_attn.qkv_proj.weight"
    scaled = tensors | {name: tensors[name] * np.linspace(0.5, 2, tensors[name].shape[1])}
    comparison = wqk.same(StateDict(tensors, config, "a"), StateDict(scaled, config, "b"))
    assert comparison.blocks[0].reason == "qkv_proj: each of its columns has a factor of its own"


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_a_setting_that_was_lost_is_said_and_put_back(setting: Setting) -> None:
    """With everything, any; without, those of attention, and others are listed."""
    tensors, config, _ = right(setting.layout)
    lost = copy.deepcopy(config)
    for path, value in setting.changes.items():
        *parts, key = path.split(".")
        part = lost
        for name in parts:
            part = part[name]
        assert part[key] != value
        part[key] = value
    pair = StateDict(tensors, config, "a"), StateDict(tensors, lost, "b")
    comparison, usual = wqk.same(*pair, everything=True), wqk.same(*pair)
    assert not comparison.same
    assert usual.same == (not setting.of_attention)
    assert all(text in str(comparison.causes) for text in setting.says)
    assert not usual.same or "not compared" in usual.sentence
    for path in setting.changes:
        assert path.rpartition(".")[2] in str(comparison.causes) + comparison.repair, (
            comparison.sentence
        )
        assert not usual.same or path in usual.settings_not_compared
    mend(comparison.repair, {}, {}, lost)
    repaired = wqk.same(pair[0], StateDict(tensors, lost, "b"), everything=True)
    assert repaired.same, repaired.sentence


@pytest.mark.parametrize(
    "changes",
    [
        {
            "eos_token_id": 5,
            "use_cache": False,
            "dtype": "float16",
            "attention_dropout": 0.5,
            "license": "mit",
            "tags": ["a"],
            "use_flash_attn": True,
            "bf16": True,
        },
        {"rms_norm_eps": float(np.float32(1e-6)), "hidden_act": "swish", "rope_theta": 5e4},
        {"max_position_embeddings": 4096, "initializer_range": 1.0, "vocab_size": 64},
    ],
)
def test_what_no_forward_pass_reads_is_no_difference(changes: dict[str, object]) -> None:
    tensors, config, _ = right("LLaMA")
    config = {"use_flash_attn": False, "bf16": False, "license": "other", **config}
    pair = StateDict(tensors, config, "a"), StateDict(tensors, config | changes, "b")
    comparison = wqk.same(*pair, everything=True)
    assert comparison.same, comparison.sentence
    assert not wqk.same(*pair).settings


@pytest.mark.parametrize(
    ("stored", "tied", "is_same"),
    [
        ("none", True, True),
        ("copy", False, True),
        ("none", None, True),
        ("none", False, False),
        ("other", None, False),
        ("other", True, False),
    ],
)
def test_an_output_head_is_the_embeddings_if_tied_or_a_copy(stored, tied, is_same):
    tensors, config, _ = right("LLaMA")
    without_head = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    copied = without_head | {"lm_head.weight": tensors["model.embed_tokens.weight"]}
    candidate = {"none": without_head, "copy": copied, "other": tensors}[stored]
    first = StateDict(without_head, config | {"tie_word_embeddings": True}, "a")
    second = StateDict(candidate, config | {"tie_word_embeddings": tied}, "b")
    assert wqk.same(first, second, everything=True).same == is_same


def test_what_one_file_lost_is_not_passed_over() -> None:
    tensors, config, _ = right("LLaMA")
    config = config | {"hidden_act": "gelu"}  # not the default of the type
    first, second = (f"model.layers.{layer}.mlp.up_proj.weight" for layer in (0, 1))
    twice = tensors | {second: tensors[first]}  # as after a layer was copied
    lost = {name: value for name, value in twice.items() if name != second}
    silent = {key: value for key, value in config.items() if key != "hidden_act"}
    pair = StateDict(twice, config, "a"), StateDict(lost, silent, "b")
    comparison = wqk.same(*pair, everything=True)
    assert comparison.unknown == (second,)
    assert comparison.settings_not_compared == ("hidden_act",)


def test_a_default_that_one_file_omits_is_not_listed() -> None:
    """As after `save_pretrained`, which writes every setting."""
    tensors, config, _ = right("LLaMA")
    silent = {key: value for key, value in config.items() if key != "hidden_act"}
    for name, is_listed in (("silu", False), ("swish", False), ("gelu", True)):
        stated = StateDict(tensors, silent | {"hidden_act": name}, "a")
        pair = (stated, StateDict(tensors, silent, "b"))
        for models in (pair, pair[::-1]):
            comparison = wqk.same(*models, everything=True)
            assert comparison.same
            assert comparison.settings_not_compared == ("hidden_act",) * is_listed


def test_defaults_are_those_of_the_type_of_the_part() -> None:
    composite = {"model_type": "qwen2_vl", "text_config": {"hidden_size": 8}}
    assert further_settings._default(composite, ("text_config", "hidden_act")) == "silu"
    assert further_settings._default(composite, ("vision_config", "hidden_act")) is None


def test_a_head_that_the_file_lacks_is_not_untied() -> None:
    """The printed line would have left the head random."""
    tensors, config, _ = right("LLaMA")
    without_head = {name: value for name, value in tensors.items() if name != "lm_head.weight"}
    lost = StateDict(without_head, config | {"tie_word_embeddings": True}, "b")
    comparison = wqk.same(StateDict(tensors, config, "a"), lost, everything=True)
    assert not comparison.same
    assert "tie_word_embeddings" in comparison.sentence
    assert "tie_word_embeddings" not in comparison.repair
