"""Rules count layers and heads by settings that a type's class of transformers has.

A key that the class lacks is a stray one where a file has it, and is not read.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
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
# Rules whose number no setting of a class has: it is that of names of tensors, of an older file, of
# a field's other name, or of the whole model that the class is part of.
OTHERWISE = {
    "layers": {
        "bart encoder",  # of trocr, a decoder alone
        "emu3-vqgan decoder",
        "emu3-vqgan decoder-middle",
        "emu3-vqgan encoder",
        "emu3-vqgan encoder-middle",
        "janus-vqgan decoder",
        "janus-vqgan decoder-middle",
        "janus-vqgan encoder",
        "janus-vqgan encoder-middle",
        "kosmos-2 projector",
        "mobilevit encoder",
        "molmo2-adapter projector",
        "nemotron-h decoder",  # the length of a list
        "omdet-turbo encoder",
        "sam2-video perceiver",
        "sam3-mask-decoder decoder",
    },
    "heads": {
        "bart encoder",
        "codegen decoder",
        "sam2-video perceiver",
        "xlnet encoder",
    },
    "key_heads": {"llama decoder"},
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
    """Rules with a softmax, each with its place and with the settings of a class that it reads."""
    for name, family in families().items():
        for rule in family.attention:
            for model_type in family.model_types:
                part = part_types(model_type).get(rule.config)
                settings = settings_of_class(part or model_type)
                if settings and (part or not rule.config) and not rule.between:
                    yield f"{name} {rule.stack}", rule, settings


@pytest.mark.parametrize("number", OTHERWISE)
def test_numbers_are_read_from_settings_that_the_class_has(number: str) -> None:
    without_setting = set()
    for place, rule, settings in rules_with_classes():
        names = set(re.findall(r"[a-z]\w+", " ".join(getattr(rule, number))))
        if names and names.isdisjoint(settings):
            without_setting.add(place)
    assert without_setting == OTHERWISE[number]
