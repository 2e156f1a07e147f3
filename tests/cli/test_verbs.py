"""Consequences of the declaration of a verb: modules, options, pages; none is forgotten."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest
from tests.command import run

import wqk
from wqk.cli import verbs
from wqk.cli.main import LABORATORY, SECTIONS, command
from wqk.cli.verb import MODEL_PARAMETERS, Verb, declaration, function_definition

VERBS = [name for names in SECTIONS.values() for name in names if name != "lab"]
DECLARATIONS = {name: command.verbs.declared(name) for name in VERBS}
DECLARED = {name: verb for name, verb in DECLARATIONS.items() if isinstance(verb, Verb)}
ROOT = Path(__file__).parents[2]

# Files next to the verbs that declare no verb.
NO_VERBS = {
    "__init__",
    "display",
    "limits",
    "main",
    "repetition",
    "options",
    "rewording",
    "signals",
    "streams",
    "verb",
    "verbs",
}


@pytest.mark.parametrize(
    ("package", "listed"),
    [("wqk.cli", {*VERBS}), ("wqk_lab.cli", {*LABORATORY, "atlas_display"})],
)
def test_every_file_of_a_verb_is_listed(package: str, listed: set[str]) -> None:
    folder = Path(import_module(package).__file__ or "").parent
    files = {path.stem for path in folder.glob("*.py")} - NO_VERBS
    declared = {name for name in listed if hasattr(verbs, name)} if package == "wqk.cli" else set()
    assert files == listed - declared, f"{package}: name it in SECTIONS of main.py, or in COMMANDS"


@pytest.mark.parametrize("verb", VERBS)
def test_python_has_the_verb_by_the_same_name(verb: str) -> None:
    function = {"demo": "demo_model"}.get(verb, verb)
    assert function in wqk.__all__, f"name {verb} in src/wqk/__init__.pyi"


def test_the_page_of_commands_lists_every_verb() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import generate_verbs as g; print(g.table(), end='')"],
        cwd=ROOT / "docs",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout in (ROOT / "docs" / "commands.md").read_text("utf-8"), (
        "docs/commands.md: python docs/generate_verbs.py writes its table"
    )


@pytest.mark.parametrize("verb", DECLARED)
def test_the_declaration_is_what_python_says(verb: str) -> None:
    module, _, name = DECLARED[verb].function.partition(":")
    function = getattr(import_module(module), name)
    assert getattr(wqk, verb) is function
    declared = declaration(DECLARED[verb].function)
    signature = inspect.signature(function).parameters
    assert [parameter.name for parameter in declared.parameters] == [*signature]
    for parameter in declared.parameters:
        default = signature[parameter.name].default
        if default is not inspect.Parameter.empty:
            assert parameter.default == default
        described = (*MODEL_PARAMETERS, *declared.descriptions)
        assert parameter.name in described, f"{function}: describe {parameter.name}"
    for line in DECLARED[verb].examples:
        assert line.startswith(f"wqk {verb} ")
    parameters = command.verbs[verb].params
    models = [entry.name for entry in parameters if isinstance(entry, click.Argument)]
    assert models in (["ref"], ["reference", "candidate"])


def test_an_option_means_the_same_for_every_verb() -> None:
    meanings: dict[str, set[tuple[object, ...]]] = {}
    for verb in VERBS:
        for option in command.verbs[verb].params:
            if isinstance(option, click.Option):
                kind = "flag" if option.is_flag else repr(option.type)
                meanings.setdefault(option.opts[-1], set()).add((kind, option.metavar))
    ambiguous = {name for name, uses in meanings.items() if len(uses) > 1}
    # --out is a table, a picture or a folder; tokens are at one distance, not several, and of one
    # head; verify takes a text itself, parts takes a file.
    assert ambiguous == {"--out", "--distance", "--head", "--text"}


@pytest.mark.parametrize("layers", ["-1", "1,-1", "-3:-1"])
def test_layers_count_from_the_end_in_every_verb(layers: str) -> None:
    encoder = wqk.demo_model("encoder")
    assert "\n     3 " in run("scan", encoder, "--layers", layers).output
    run("same", encoder, encoder, "--layers", layers)
    assert run("scan", encoder, "--layers=-5", exits=2).stderr.count("no layer -5") == 1


def test_what_an_older_version_left_of_a_folder_is_no_module(tmp_path, monkeypatch):
    package = tmp_path / "package_of_verbs"
    (package / "go" / "__pycache__").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "go.py").write_text('def go(ref: str) -> None:\n    """Go there. Now."""\n')
    monkeypatch.syspath_prepend(tmp_path)
    definition = function_definition("package_of_verbs.go:go")
    assert definition is not None
    assert ast.unparse(definition.args) == "ref: str"
    assert ast.get_docstring(definition) == "Go there. Now."


def test_a_function_without_a_docstring_has_no_help(tmp_path, monkeypatch):
    package = tmp_path / "package_without_help"
    package.mkdir()
    (package / "__init__.py").touch()
    source = (
        'def go(\n    ref: str,\n) -> None:\n    ...\n\n\ndef stop() -> None:\n    """Stop."""\n'
    )
    (package / "go.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    definition = function_definition("package_without_help.go:go")
    assert definition is not None
    assert ast.get_docstring(definition) is None
    with pytest.raises(AssertionError, match="has no docstring"):
        declaration("package_without_help.go:go")
