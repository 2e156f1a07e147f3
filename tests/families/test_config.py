"""Conditions on a model's configuration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from tests.stand_in import Module

import wqk
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError
from wqk.families.config import Config

FLAGS = [*itertools.product([False, True], repeat=3)]


@pytest.mark.parametrize(("a", "b", "c"), FLAGS)
def test_conditions_are_those_of_logic(a: bool, b: bool, c: bool) -> None:
    config = Config({"a": a, "b": b, "c": c})
    assert config.holds("a or b") == (a or b)
    assert config.holds("a and b") == (a and b)
    assert config.holds("a and not b or c") == ((a and not b) or c)
    assert config.holds("not a or not b") == (not a or not b)
    assert config.holds("")


# Whether a configuration lifts the causal mask.
LIFTED = [
    (False, {}),
    (False, {"is_causal": True}),
    (True, {"is_causal": False}),
    (False, {"is_causal": 0}),
    (True, {"architectures": ["MistralBiModel"]}),
    (True, {"architectures": ["MistralModel", "MistralBiModel"]}),
    (True, {"is_causal": True, "architectures": ["MistralBiModel"]}),
    (True, {"auto_map": {"AutoModel": "code.MistralBiModel"}}),
    (False, {"auto_map": {"AutoModel": "code.MistralModel"}}),
    (False, {"architectures": "MistralBiModel", "auto_map": []}),
    (True, {"architectures": ["Lfm2BidirectionalForMaskedLM"]}),
    (True, {"architectures": ["Lfm2BidirP2ForTokenClassification"]}),
    (True, {"auto_map": {"AutoModel": "modeling_qwen3_bidirectional.Qwen3BidirectionalModel"}}),
    (False, {"architectures": [1, []]}),
]


@pytest.mark.parametrize(("lifted", "config"), LIFTED)
def test_either_of_two_signs_lifts_the_mask(lifted: bool, config: dict[str, object]) -> None:
    assert Config(config).lifts_mask is lifted


LLAMA = {
    f"layers.0.self_attn.{side}_proj.weight": np.eye(rows, 8) for side, rows in (("q", 8), ("k", 4))
}
COUNTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *[("head_dim", value) for value in ("x", 0, -2, 1.5, True, {}, ["2"])],
        *[("layer_types", value) for value in ("full_attention", [1], [None], {"a": 1})],
        *[("rope_parameters", value) for value in ("x", [1], 3)],
        *[("use_sliding_window", value) for value in ("false", "No")],
        *[("num_key_value_heads", value) for value in ("2", 2.0, {})],
        *[
            ("sliding_window must be a positive whole", value)
            for value in ("x", 1.5, {}, 0.5, -4, "131072", True, [], 10**400)
        ],
    ],
)
def test_values_of_another_type_are_refused_by_name(key: str, value: object) -> None:
    assert wqk.open(Module(LLAMA, {"model_type": "qwen2", **COUNTS})).plans
    config = {"model_type": "qwen2", "sliding_window": 4, **COUNTS, key.partition(" ")[0]: value}
    with pytest.raises(CheckpointError, match=key):
        wqk.open(Module(LLAMA, config)).plans  # noqa: B018


def test_zero_key_heads_in_a_list_mean_no_attention_there() -> None:
    tensors = {
        name.replace("layers.0", f"layers.{layer}"): weight
        for name, weight in LLAMA.items()
        for layer in (0, 2)
    }
    config = {"model_type": "llama", **COUNTS, "num_hidden_layers": 3}
    plans = wqk.open(Module(tensors, config | {"num_key_value_heads": [2, 0, 2]})).plans
    assert [plan.layer for plan in plans] == [0, 2]
    with pytest.raises(CheckpointError, match="layer 1 has no query weights"):
        wqk.open(Module(tensors, config | {"num_key_value_heads": [2, 2, 2]})).plans  # noqa: B018


def test_numbers_made_of_keys() -> None:
    config = Config({"window": 8, "heads": 12, "ratio": 5, "zero": 0, "deep": {"size": 9}})
    assert config.get("window // 2 + 1") == 5
    assert config.get("heads // ratio") == 2
    with pytest.raises(CheckpointError, match="zero must be a positive whole number, got 0"):
        config.get("heads // zero")
    assert config.get("deep.size + 1") == 10
    assert config.get("window if ratio == 4 else None", "heads") == 12
    assert config.get("gone // 2 + 1") is None


# Rotary scalings without which a model cannot be run, and the messages about them.
INCOMPLETE_SCALINGS = [
    (
        {"rope_type": "yarn", "original_max_position_embeddings": 64, "factor": 0},
        "'yarn' has a number that is zero",
    ),
    (
        {"rope_type": "yarn", "original_max_position_embeddings": 64},
        "'yarn' lacks or misstates 'factor'",
    ),
    (
        {
            "rope_type": "llama3",
            "original_max_position_embeddings": 64,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
        "'llama3' lacks or misstates 'factor'",
    ),
    ({"rope_type": "linear"}, "'linear' lacks or misstates 'factor'"),
]


@pytest.mark.parametrize(("scaling", "message"), INCOMPLETE_SCALINGS)
def test_rotary_scaling_that_cannot_be_computed_is_named(scaling: object, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        wqk.open(Module(LLAMA, {"model_type": "llama", **COUNTS, "rope_parameters": scaling}))


def test_keys_of_a_part_that_its_model_ignores_are_not_read_and_told() -> None:
    table = {"model_type": "pi0", "dit_config": {"model_type": "gemma", "is_causal": False}}
    part = Config(table, "dit_config")
    assert (part.unread, part.lifts_mask) == (["is_causal"], False)
    config = {"model_type": "llama", **COUNTS, "sliding_window": 4}
    config["rope_parameters"] = {"partial_rotary_factor": 0.5}
    notes = " ".join(wqk.explain(Module(LLAMA, config)).notes)
    assert all(f"{key} stands" in notes for key in ("sliding_window", "partial_rotary_factor"))


def test_a_chosen_family_reads_the_keys_of_a_file_with_another_type() -> None:
    """GPT-2's class has other names for some keys; those of the file still stand."""
    config = {"num_attention_heads": 8, "num_hidden_layers": 5}
    read = Config(config | {"model_type": "gpt2"})
    assert read.get("num_attention_heads") == read.get("n_head") == 8
    assert read.get("num_hidden_layers") == read.get("n_layer") == 5
    tensors = {
        f"model.layers.0.self_attn.{side}_proj.weight": np.ones((8, 8), np.float32) for side in "qk"
    }
    sizes = {"num_attention_heads": 4, "num_hidden_layers": 1, "hidden_size": 8}
    tables = []
    for model_type in ("llama", "gpt2"):
        checkpoint = StateDict(tensors, sizes | {"model_type": model_type}, "made")
        tables.append(wqk.scan(wqk.open(checkpoint, family="llama")))
    llama, mistaken = (table.frame.drop("model_type") for table in tables)
    assert llama.equals(mistaken)
