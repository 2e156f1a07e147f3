"""Effects of keys of a configuration, perturbed in transformers' models, and their treatment.

Keys that `same` passes over when they differ change nothing. Keys that change attention are read,
or `explain` lists them as not read.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from tests.families.proving import edit_config
from tests.limits import some
from tools.deriving.building import build
from tools.deriving.perturbing import known_values, perturbed, switches_of
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import wqk
from wqk.families.model_types import switches, unread_settings

# Positions counted from the padding, values that may be rotated, and a plain decoder.
FEW = ("camembert", "roformer", "llama")


@cache
def known(*kinds: str) -> dict[str, list[Any]]:
    return known_values(kinds) if kinds else known_values()


@pytest.mark.parametrize("model_type", some(FEW, CONFIG_MAPPING_NAMES))
def test_keys_that_are_passed_over_change_nothing(model_type: str) -> None:
    row = perturbed(model_type, known(*FEW if model_type in FEW else ()))
    if not row["keys"]:
        pytest.skip(row["ended"])
    assert switches_of(row) == switches(model_type)


def test_a_switch_of_attention_that_is_not_read_is_said(tmp_path: Path) -> None:
    model, _ = build("bros", 0, flat=False)
    for name in ("plain", "other"):
        model.save_pretrained(tmp_path / name)
    edit_config(tmp_path / "other", {"bbox_scale": 10.0})
    note = "bbox_scale stands in config.json, is not read, and changes attention"
    for name, count in (("plain", 0), ("other", 1)):
        assert str(wqk.explain(tmp_path / name).notes).count(note) == count
    comparison = wqk.same(tmp_path / "plain", tmp_path / "other")
    assert [str(setting) for setting in comparison.settings] == ["bbox_scale: 100.0 against 10.0"]


# What two exports of one model may say otherwise: training, generation, names, kernels.
HARMLESS: dict[str, Any] = {
    "architectures": ["OtherModel"],
    "attention_dropout": 0.2,
    "hidden_dropout_prob": 0.3,
    "bos_token_id": 7,
    "eos_token_id": [8, 9],
    "decoder_start_token_id": 6,
    "dtype": "bfloat16",
    "early_stopping": True,
    "id2label": {"0": "no", "1": "yes"},
    "initializer_range": 0.5,
    "no_repeat_ngram_size": 3,
    "num_logits_to_keep": 7,
    "output_attentions": True,
    "pretraining_tp": 2,
    "problem_type": "regression",
    "router_aux_loss_coef": 0.5,
    "summary_type": "mean",
    "torch_dtype": "float16",
    "transformers_version": "4.40.0",
    "unsloth_fixed": True,
    "use_cache": False,
    "use_flash_attn": True,
    "_name_or_path": "there",
}


@pytest.mark.parametrize(
    "model_type", ["llama", "gpt2", "bert", "t5", "mixtral", "gemma3_text", "vit", "whisper"]
)
def test_settings_of_other_things_are_no_difference(model_type: str, tmp_path: Path) -> None:
    model, _ = build(model_type, 0, flat=False)
    for name in ("one", "other"):
        model.save_pretrained(tmp_path / name)
    config = json.loads((tmp_path / "one" / "config.json").read_text())
    edit_config(
        tmp_path / "one", {key: [value] for key, value in HARMLESS.items() if key not in config}
    )
    edit_config(tmp_path / "other", HARMLESS)
    comparison = wqk.same(tmp_path / "one", tmp_path / "other", everything=True)
    assert comparison, comparison.sentence


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "bert", "pad_token_id": 1}, {}),
        ({"model_type": "camembert", "pad_token_id": 1}, {("pad_token_id",): 1}),
        (
            {"model_type": "altclip", "text_config": {"pad_token_id": 1}},
            {("text_config", "pad_token_id"): 1},
        ),
        (
            {
                "model_type": "dbrx",
                "ffn_config": {"model_type": "", "ffn_act_fn": {"name": "gelu"}},
            },
            {("ffn_config", "ffn_act_fn", "name"): "gelu"},
        ),
    ],
)
def test_a_key_is_idle_in_the_types_that_do_not_use_it(config, told):
    assert unread_settings(config, []) == told
