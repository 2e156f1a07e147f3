"""The tool that derives families: its limits, what it feeds models, and what it writes."""

from __future__ import annotations

import os
import random
import time
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from tools.deriving import probing
from tools.deriving.feeding import adapted
from tools.deriving.mending import mended, strong
from tools.deriving.parts import (
    DEFAULTS,
    PARTS,
    UNREAD_DEFAULTS,
    defaults_of,
    line,
    merged,
    parts_of,
    unread_defaults_of,
)
from tools.deriving.probing import record_type
from tools.deriving.proof import faults
from tools.deriving.records import RunRecord, read_record
from tools.deriving.writing import family_text, rule_table
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

from wqk.checkpoints import Checkpoint, open_checkpoint
from wqk.families import families
from wqk.families.family import parse_family


@pytest.mark.parametrize(
    ("work", "told"),
    [
        (lambda: None, ""),
        (lambda: time.sleep(60), "hung for 1 seconds"),
        (lambda: os._exit(7), "ended with 7"),
        (lambda: 1 / 0, "ended with 1"),
    ],
)
def test_a_model_that_hangs_or_crashes_ends_alone(work, told, monkeypatch):
    monkeypatch.setattr(probing, "SECONDS", 1)
    monkeypatch.setattr(probing, "WALL", 1)
    assert probing.in_a_process(work) == told


MENDED_SHAPES = [
    ([2, 11, 96], "mat1 and mat2 shapes cannot be multiplied (22x96 and 160x96)", [2, 11, 160]),
    ([2, 96, 80], "mat1 and mat2 shapes cannot be multiplied (48x640 and 1024x96)", [2, 96, 128]),
    ([2, 40], "weight of size [64, 1, 7], expected input[1, 2, 40] to have 1 channels", [2, 1, 40]),
    (
        [40, 588],
        "Expected 4D (batched) input to conv2d, but got input of size: [40, 588]",
        [40, 3, 14, 14],
    ),
    ([40, 588], "not enough values to unpack (expected 5, got 2)", [1, 40, 3, 14, 14]),
    ([2, 80, 128], "must be a multiple of `n_window * 2` (100), but got 128", [2, 80, 200]),
]


@pytest.mark.parametrize(("shape", "error", "wanted"), MENDED_SHAPES)
def test_what_is_given_follows_from_the_error(shape, error, wanted):
    assert list(adapted({"x": torch.zeros(shape)}, error)["x"].shape) == wanted
    assert adapted({"x": torch.zeros(shape)}, "something else") is None


@pytest.mark.parametrize("name", [n for n, f in families().items() if f.attention])
def test_a_family_is_written_as_it_was_read(name: str) -> None:
    family = families()[name]
    tables = [rule_table(rule) for rule in family.attention]
    again = parse_family(family_text(name, family.model_types, tables), name)
    # A guess is written as a claim.
    assert again.attention == tuple(replace(rule, guess="") for rule in family.attention)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunRecord, Checkpoint]:
    folder = tmp_path_factory.mktemp("llama") / "model"
    record_type("llama", folder)
    return read_record(folder), open_checkpoint(folder)


CHANGES = [
    {"scale": []},
    {"causal": False, "stack": "encoder"},
    {"rotary": {"order": "interleaved"}},
    {"input_norm": "layers.{layer}.post_attention_layernorm"},
]


@pytest.mark.parametrize("changes", CHANGES)
def test_a_rule_that_nearly_fits_is_mended(llama, changes):
    (right,) = (rule_table(rule) for rule in families()["llama"].attention)
    _, problems = mended(*llama, [right | changes])
    assert problems == []


def test_positions_apart_from_the_content_are_compared(tmp_path: Path) -> None:
    record_type("minicpm3", tmp_path / "model")
    record, checkpoint = read_record(tmp_path / "model"), open_checkpoint(tmp_path / "model")
    assert strong(faults(record, checkpoint, families()["minicpm3"])) == []
    assert strong(faults(record, checkpoint, families()["deepseek"])) == ["positions are rotary"]


def written_lines(kinds: Iterable[str]) -> tuple[set[str], set[str], set[str]]:
    """The lines of the three files that the tool writes for types; empty tables have none."""
    used = {part for table in tomllib.loads(PARTS.read_text()).values() for part in table.values()}
    listed = {kind: family for family in families().values() for kind in family.model_types}
    defaults, parts, unread = set[str](), set[str](), set[str]()
    for kind in kinds:
        config = CONFIG_MAPPING[kind]
        parts |= {line(kind, table)} if (table := parts_of(config)) else set()
        defaults |= {line(f"{kind}.{key}", value) for key, value in merged(config, listed).items()}
        if kind in listed and (settings := defaults_of(config, listed[kind], kind in used)):
            defaults.add(line(kind, settings))
        if kind in listed and (settings := unread_defaults_of(config, listed[kind])):
            unread.add(line(kind, settings))
    return defaults, parts, unread


# Among them those whose lines were once written by hand.
BY_HAND = (
    "EvollaModel",
    "evolla",
    "layoutlmv3",
    "nemotron3_5_transcribe_word_timestamp",
    "voxtral",
)


def test_generated_lines_are_what_the_tool_writes() -> None:
    """A few types are compared, and all types in the campaign."""
    defaults, parts, unread = written_lines(
        [*BY_HAND, *random.Random(7).sample([*CONFIG_MAPPING_NAMES], 20)]
    )
    assert defaults <= {*DEFAULTS.read_text().splitlines(keepends=True)}
    assert parts <= {*PARTS.read_text().splitlines(keepends=True)}
    assert unread <= {*UNREAD_DEFAULTS.read_text().splitlines(keepends=True)}


@pytest.mark.campaign
def test_all_generated_lines_are_what_the_tool_writes() -> None:
    written = written_lines(CONFIG_MAPPING_NAMES)
    for path, lines in zip((DEFAULTS, PARTS, UNREAD_DEFAULTS), written, strict=True):
        assert sorted(lines) == sorted(path.read_text().splitlines(keepends=True)[1:])
