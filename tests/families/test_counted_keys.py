"""Rules count layers and heads by settings that a type's class of transformers has.

A key that the class lacks is a stray one where a file has it, and is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
import transformers
from transformers.models.auto.configuration_auto import (
    CONFIG_MAPPING_NAMES,
    model_type_to_module_name,
)

from wqk.families.family import families
from wqk.families.model_types import part_types
from wqk.families.rules import AttentionRule

MODELS = Path(transformers.__file__).parent / "models"
# Fields, and attributes that methods set; other names of a field in memory are not in files.
SETTING = re.compile(r"^    (\w+): |\bself\.(\w+) = ", re.MULTILINE)
VQGAN = ("decoder", "decoder-middle", "encoder", "encoder-middle")
# Types and stacks whose number no setting of a class has: it is that of names of tensors, of an
# older file, of a field's other name, or of the whole model that the class is part of.
OTHERWISE = {
    "layers": {
        *(f"chameleon_vqgan {stack}" for stack in VQGAN),
        *(f"emu3_vqgan {stack}" for stack in VQGAN),
        "kosmos-2 projector",
        "kosmos-2.5 projector",
        "mobilevit encoder",
        "molmo2_adapter projector",
        "nemotron_h decoder",  # the length of a list
        "omdet-turbo encoder",
        "sam2_video perceiver",
        "sam3_lite_text_mask_decoder decoder",
        "sam3_mask_decoder decoder",
        "sam3_tracker_video perceiver",
        "trocr encoder",  # a decoder alone
    },
    "heads": {
        "codegen decoder",
        "sam2_video perceiver",
        "sam3_tracker_video perceiver",
        "trocr encoder",
        "xlnet encoder",
    },
    "key_heads": {"voxtral_realtime_encoder decoder"},
}
# The same of rotary positions, where no mapping of parameters has them.
ROTARY_OTHERWISE = {
    "fraction": {
        "clvp_encoder encoder",
        "codegen decoder",
        "cohere2_moe decoder",
        "esm encoder",
        "gptj decoder",
    },
    "base": {"clvp_encoder encoder", "codegen decoder", "gptj decoder"},
}


@cache
def settings_of_class(model_type: str) -> set[str]:
    """The settings of a type's class, as its code names them; none if it inherits others."""
    name = CONFIG_MAPPING_NAMES.get(model_type)
    folder = MODELS / model_type_to_module_name(model_type)
    in_class = re.compile(
        rf"^class {name}\(PreTrainedConfig\):\n(.*?)(?=^\S|\Z)", re.MULTILINE | re.DOTALL
    )
    for file in folder.glob("configuration_*.py") if name else ():
        if match := in_class.search(file.read_text(encoding="utf-8")):
            return {*chain.from_iterable(SETTING.findall(match[1]))}
    return set()


def rules_with_classes() -> Iterator[tuple[str, AttentionRule, set[str]]]:
    """Rules with a softmax, each with its type and stack, and the settings of the type's class."""
    for family in families().values():
        for rule in family.attention:
            for model_type in family.model_types:
                part = part_types(model_type).get(rule.config)
                settings = settings_of_class(part or model_type)
                if settings and (part or not rule.config) and not rule.between:
                    yield f"{model_type} {rule.stack}", rule, settings


def are_stray(expressions: Iterable[str | float], settings: set[str]) -> bool:
    """Return whether expressions read keys, none of which is a setting."""
    keys = set(re.findall(r"[a-z]\w+", " ".join(map(str, expressions))))
    return bool(keys) and keys.isdisjoint(settings)


@pytest.mark.parametrize("number", OTHERWISE)
def test_numbers_are_read_from_settings_that_the_class_has(number: str) -> None:
    without_setting = {
        place
        for place, rule, settings in rules_with_classes()
        if are_stray(getattr(rule, number), settings)
    }
    assert without_setting == OTHERWISE[number]


@pytest.mark.parametrize("number", ROTARY_OTHERWISE)
def test_rotary_numbers_are_read_from_settings_that_the_class_has(number: str) -> None:
    without_setting = {
        place
        for place, rule, settings in rules_with_classes()
        if rule.rotary and "rope_parameters" not in settings
        if are_stray(getattr(rule.rotary, number), settings)
    }
    assert without_setting == ROTARY_OTHERWISE[number]
