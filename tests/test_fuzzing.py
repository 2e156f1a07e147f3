"""Fuzzers of what users write: adapters' settings, family files, and command lines.

Whatever is written is read or refused in a line; nothing unexpected, and nothing without end.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

import click
import numpy as np
import pytest
from safetensors.numpy import save_file
from tests import small
from tests.command import run
from tests.limits import counts, within
from tests.sameness.adapting import adapter_on
from tools.mutating.mutants import data_mutants

import wqk
from wqk.cli.main import command
from wqk.errors import UnknownFamily, WqkError
from wqk.families import plan_attention
from wqk.families.family import parse_family

NUMBERS = [0, -1, 1, 2**63, 10**400, 1e308, -0.0, float("nan"), float("inf"), True]
TEXTS = [
    "",
    " ",
    "a" * 5000,
    "nan",
    "1e400",
    "{layer}",
    "../..",
    "(a+)+$",
    ".*",
    "q_proj",
    "\ud800",
]
HOSTILE = [*NUMBERS, *TEXTS, None, [], {}, [[]], {"q_proj": -1}, {"": {}}, ["q_proj", 3], "١٢"]


@counts(150, 20_000)
def test_adapters_are_read_as_they_say_or_refused(tmp_path: Path, count: int) -> None:
    dice, model = random.Random(0), small.llama(layers=1, key_heads=4, head_width=4, width=16)
    tensors = {name: w.astype(np.float32) for name, w in model._arrays.items()}
    names = list(tensors)
    folder, update = adapter_on(tmp_path, tensors, model.config)
    about = json.loads((folder / "adapter_config.json").read_text())
    factors = wqk.open_checkpoint(folder / "adapter_model.safetensors")
    keys = [
        *about,
        "alpha_pattern",
        "rank_pattern",
        "use_rslora",
        "use_dora",
        "bias",
        "init_lora_weights",
        "modules_to_save",
        "layers_to_transform",
        "layers_pattern",
        "fan_in_fan_out",
        "lora_dropout",
        "exclude_modules",
        "layer_replication",
        "trainable_token_indices",
        "target_parameters",
        "no_such_option",
    ]
    harmless = 0
    for _ in range(count):
        changes = {dice.choice(keys): dice.choice(HOSTILE) for _ in range(dice.randrange(1, 3))}
        (folder / "adapter_config.json").write_text(json.dumps(about | changes))
        try:
            with within(5):
                read = np.concatenate(wqk.open(folder)[0].query.weight)
        except WqkError:
            continue
        # Nothing but the scale of what is added may be told by settings.
        added = read - tensors[names[0]]
        along = float((added * update[names[0]]).sum() / (update[names[0]] ** 2).sum())
        np.testing.assert_allclose(
            added, along * update[names[0]], atol=1e-4 * max(1, abs(along)), err_msg=str(changes)
        )
        scaling = {"r", "lora_alpha", "alpha_pattern", "rank_pattern", "use_rslora"}
        chosen = {"target_modules", "exclude_modules", "layers_to_transform", "layers_pattern"}
        assert along == pytest.approx(1, rel=1e-4) or changes.keys() & (scaling | chosen), changes
        harmless += 1
    assert harmless
    shapes = {name: info.shape for name, info in factors.tensors().items()}
    assert shapes
    (folder / "adapter_config.json").write_text(json.dumps(about))
    for name, (rows, columns) in shapes.items():  # factors of other shapes are not added
        wrong = shapes | {name: (rows + 1, columns)}
        made = {n: np.zeros(shape, np.float32) for n, shape in wrong.items()}
        save_file(made, folder / "adapter_model.safetensors")
        with pytest.raises(WqkError):
            wqk.scan(folder)


@counts(200, 20_000)
def test_family_files_are_read_or_refused(count: int) -> None:
    dice, model = random.Random(1), small.llama(key_heads=4, sides="qkvo")
    files = sorted((Path(wqk.__file__).parent / "families" / "data").glob("*.toml"))
    messages: list[str] = []
    for _ in range(count):
        path = dice.choice(files) if dice.random() < 0.7 else files[0].with_name("llama.toml")
        text = path.read_text(encoding="utf-8")
        for _ in range(dice.randrange(1, 4)):
            made = [*data_mutants(path, text)] if dice.random() < 0.5 else []
            if made:
                text = dice.choice(made).text
                continue
            at = dice.randrange(len(text))
            piece = dice.choice(['"', "[", "]", "=", "\n", "{layer}", "true", "-1", "¹", "#", "["])
            text = text[:at] + piece + text[at + dice.randrange(3) :]
            try:
                parse_family(text, path.name)
            except UnknownFamily:
                break
        try:
            with within(5):
                family = parse_family(text, path.name)
                plan_attention(model, family)
        except WqkError as error:
            messages.append(str(error))
    assert messages
    assert [message for message in messages if "\n" in message] == []


# Verbs that neither wait, nor serve, nor start processes.
VERBS = ("scan", "explain", "show", "diff", "same", "tokens", "compose", "kin", "bars", "families")
WORDS = [
    "",
    "-1",
    "0",
    "1e300",
    "nan",
    "0:100000000",
    "1:2:3",
    "a" * 3000,
    "{layer}",
    "..",
    "\x00",
    "١",
    "[]",
    "5",
    "0.5",
    "encoder",
    "q",
    "all",
    "no/such/file.toml",
    "--",
    "%s",
    "\u202e",
]


@counts(60, 10_000)
def test_command_lines_are_done_or_refused_in_a_line(tmp_path, monkeypatch, count):
    monkeypatch.chdir(tmp_path)
    dice = random.Random(2)
    verbs = {name: command.get_command(click.Context(command), name) for name in VERBS}
    verb_by_name = {name: verb for name, verb in verbs.items() if verb is not None}
    for _ in range(count):
        name = dice.choice(sorted(verb_by_name))
        line = [name, *([str(wqk.demo_model("encoder"))] * dice.choice([0, 1, 1, 1, 2]))]
        options = [
            parameter
            for parameter in verb_by_name[name].params
            if isinstance(parameter, click.Option) and not {"--help", "--jobs"} & {*parameter.opts}
        ]
        for option in dice.sample(options, min(len(options), dice.randrange(1, 4))):
            line.append(dice.choice(option.opts))
            if not option.is_flag:
                line.append(dice.choice(WORDS))
        with within(20):
            done = run(*line, exits=None)
        assert done.exit_code in (0, 1, 2), line
        assert "wqk: unexpected" not in done.stderr, (line, done.stderr)
        assert "Traceback" not in done.output, line
