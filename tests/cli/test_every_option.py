"""Every option of every verb is in a test; options that only pass a value on are tested here."""

from __future__ import annotations

import ast
import inspect
import json
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import click
import pytest
from tests.command import ENCODER, run

from wqk.cli.main import command
from wqk_lab.training.corpus.settings import CorpusOptions
from wqk_lab.training.glue import FineTuning
from wqk_lab.training.recipe import make_recipe

TESTS = Path(__file__).parents[1]

OPENED = "--base adapted --family llama --heads-per-layer 4 --key-heads 2"
OPENED_WITH = {"base": "adapted", "family": "llama", "heads_per_layer": 4, "key_heads": 2}

# A command, the function that the command calls, and arguments that the function receives.
PASSED: list[tuple[str, str, dict[str, Any]]] = [
    (f"parts ENCODER --revision r {OPENED}", "wqk.model:open", OPENED_WITH | {"revision": "r"}),
    (f"verify ENCODER --revision r {OPENED}", "wqk.model:open", OPENED_WITH | {"revision": "r"}),
    (
        "parts ENCODER --corpus c --mask-share 0.3 --draws 3 --seed 5",
        "wqk.live.parts:parts",
        {"corpus": "c", "mask_share": 0.3, "draws": 3, "seed": 5},
    ),
    (
        "verify ENCODER --text cat --seed 3",
        "wqk.live.verification:verify",
        {"text": "cat", "seed": 3},
    ),
    (
        "same ENCODER ENCODER --tolerance 0.1 --all --repair out --merged-with a --merged-with b",
        "wqk.sameness.same:same",
        {
            "tolerance": 0.1,
            "everything": True,
            "repair": Path("out"),
            "merged_with": ("a", "b"),
        },
    ),
    (
        "scan ENCODER --bias --bands --device cuda",
        "wqk.scanning.scan:scan",
        {"bias": True, "measures": ["bands"], "device": "cuda"},
    ),
    ("show ENCODER --layer 0 --linear", "wqk.inspecting.showing:show", {"kind": "linear"}),
    (
        "show ENCODER --layer 0 --state-space",
        "wqk.inspecting.showing:show",
        {"kind": "state-space"},
    ),
    ("survey ENCODER --out scores --retry", "wqk.scanning.surveys:survey", {"retry": True}),
    (
        "tokens ENCODER --layer 0 --head 1 --embeddings wte",
        "wqk.inspecting.tokens:match_tokens",
        {"embeddings": "wte"},
    ),
    (
        "lab corpus c4 --subset en --split validation --max-characters 900 -o store",
        "wqk_lab.training.corpus:build_corpus",
        {"options": CorpusOptions(subset="en", split="validation", max_characters=900)},
    ),
    (
        "lab glue ENCODER --tasks mood.jsonl --learning-rate 0.01 --batch 3 --length 9",
        "wqk_lab.training.glue:fine_tune",
        {"how": FineTuning(learning_rate=0.01, batch=3, length=9)},
    ),
    ("lab pairs --out pairs --retry", "wqk_lab.runs.pairs:survey_pairs", {"retry": True}),
    (
        "lab train --preset paper --size mini --corpus c -o run",
        "wqk_lab.training.training:train",
        {"recipe": make_recipe("paper", size="mini")},
    ),
    (
        "lab theory ENCODER --corpus c --seed 7",
        "wqk_lab.theory.studying:study",
        {"seed": 7},
    ),
]


def received(
    line: str, function: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> dict[str, Any]:
    """The arguments of the function, which is not run, by name."""
    # Every module is imported before a function is replaced, and keeps the function itself.
    modules = {f: import_module(f.partition(":")[0]) for _, f, _ in PASSED}
    module, name = modules[function], function.partition(":")[2]
    signature = inspect.signature(getattr(module, name))
    calls: list[dict[str, Any]] = []

    def stop(*arguments: Any, **options: Any) -> None:
        bound = signature.bind(*arguments, **options).arguments
        for parameter in signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                bound |= bound.pop(parameter.name, {})
        calls.append(bound)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, name, stop)
    monkeypatch.chdir(folder)
    rows = [{"sentence": f"w{n}", "label": n % 2} for n in range(20)]
    (folder / "mood.jsonl").write_text("\n".join(map(json.dumps, rows)))
    arguments = [ENCODER if word == "ENCODER" else word for word in line.split()]
    run(*arguments, exits=130)
    (call,) = calls
    return call


@pytest.mark.parametrize(("line", "function", "expected"), PASSED)
def test_an_option_reaches_its_function(line, function, expected, tmp_path, monkeypatch):
    arguments = received(line, function, tmp_path, monkeypatch)
    assert {name: arguments[name] for name in expected} == expected


# Options that no test has in a command, with the reason.
UNTESTED: dict[tuple[str, str], str] = {}


def options_of(group: click.Group, verb: str = "") -> Iterator[tuple[str, click.Option]]:
    """Every option of every verb, with the verb's name."""
    context = click.Context(group)
    for name in group.list_commands(context):
        within = group.get_command(context, name)
        if isinstance(within, click.Group):
            yield from options_of(within, f"{name} ")
            continue
        assert within is not None
        for option in within.params:
            if isinstance(option, click.Option):
                yield f"{verb}{name}", option


def words_of(node: ast.AST) -> set[str]:
    """The words of all texts in a piece of code."""
    vocabulary: set[str] = set()
    for piece in ast.walk(node):
        if isinstance(piece, ast.Constant) and isinstance(piece.value, str):
            vocabulary.update(re.split(r"[\s=\[\],]+", piece.value))
    return vocabulary


def units(file: Path) -> Iterator[set[str]]:
    """The words of every test of a file, with the words of all that the test uses of the file."""
    vocabularies, names_in = dict[str, set[str]](), dict[str, set[str]]()
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement]
        for target in targets:
            if isinstance(target, ast.AnnAssign):
                target = target.target
            name = getattr(target, "name", getattr(target, "id", ""))
            vocabularies[name] = vocabularies.get(name, set()) | words_of(statement)
            names = {piece.id for piece in ast.walk(statement) if isinstance(piece, ast.Name)}
            parameters = {piece.arg for piece in ast.walk(statement) if isinstance(piece, ast.arg)}
            names_in[name] = names_in.get(name, set()) | names | parameters
    for test in (name for name in vocabularies if name.startswith("test_")):
        reached, waiting = set[str](), [test]
        while waiting:
            name = waiting.pop()
            if name in vocabularies and name not in reached:
                reached.add(name)
                waiting += names_in[name]
        every = set[str]().union(*(vocabularies[name] for name in reached))
        if "flags" in reached | names_in[test]:  # which makes options of names
            every |= {f"--{word.replace('_', '-')}" for word in every}
        yield every


def untested() -> set[tuple[str, str]]:
    """Each verb and option that no test names together."""
    files = [f for f in sorted(TESTS.rglob("test_*.py")) if "--" in f.read_text("utf-8")]
    vocabularies = [vocabulary for file in files for vocabulary in units(file)]
    return {
        (verb, option.opts[-1])
        for verb, option in options_of(command)
        if not any(
            verb.split()[-1] in vocabulary and vocabulary & {*option.opts, *option.secondary_opts}
            for vocabulary in vocabularies
        )
    }


def test_every_option_is_in_a_test() -> None:
    assert untested() == set(UNTESTED)
