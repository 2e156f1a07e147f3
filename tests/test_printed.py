"""Commands and calls in README, pages, docstrings and messages can be run as printed.

Sessions of Python are doctests. Here every command is read by the command's parser, and every call
in a snippet is bound to the function's signature: a missing name or option fails the test.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest

import wqk
from wqk._version import ADDRESS
from wqk.cli.main import command

ROOT = Path(__file__).parents[1]
# The log says what was run at its time; the other is generated, and quotes messages.
PAGES = [p for p in ROOT.glob("docs/**/*.md") if p.name not in ("log.md", "coverage.md")]
PAGES = [ROOT / "README.md", *sorted(PAGES)]
CODE = [*sorted(ROOT.glob("src/**/*.py")), *sorted(ROOT.glob("examples/*.*"))]
FENCE = re.compile(r"^(`{3,})(\w*)\n(.*?)^\1", re.M | re.S)
# A command stands for itself in code fences, between backticks, and in the examples of the help.
INLINE = re.compile(r"(?<!`)(?:``|`)(wqk [^`\n]+?)(?:``|`)(?!`)")
EXAMPLE = re.compile(r"^\s+(wqk (?:lab )?[a-z]+ .*)$", re.M)
# What stands for something that the reader is to choose.
OPEN = re.compile(r"\bVERB\b|\bCOMMAND\b|--(name|NAME|X)\b")


def fences(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for fence in FENCE.finditer(page.read_text("utf-8")):
            if fence[2] == language and ">>>" not in fence[3]:
                yield str(page.relative_to(ROOT)), fence[3]


def commands(spoken: bool = True) -> Iterator[tuple[str, str]]:
    """Every command of wqk that is printed, and where; also those within a text."""
    for language in ("sh", "console"):
        for place, text in fences(language):
            for line in text.replace("\\\n", " ").splitlines():
                shown = line.removeprefix("$ ").split("  #")[0]
                for word in re.findall(r"\bwqk (?!=)[^|;&>]*", shown):
                    if language == "sh" or line.startswith("$ "):
                        yield place, word
    for path in [*PAGES, *CODE]:
        text = path.read_text("utf-8")
        commands_of_text = INLINE.findall(text) if spoken else []
        text = re.sub(r"\\\\\n +", "", text)  # a command on several lines of a help text
        commands_of_text += (
            EXAMPLE.findall(text) if path.suffix == ".py" and "cli" in path.parts else []
        )
        yield from (
            (str(path.relative_to(ROOT)), shown_command.split("  ")[0].split("#")[0])
            for shown_command in commands_of_text
        )


def read(text: str) -> str:
    """Return the parser's complaint about a command; empty if the command is right."""
    words_of_command = shlex.split(text.replace("'*'", "x").rstrip(".,:"))[1:]
    group: Any = command
    context = click.Context(command, info_name="wqk")
    while (
        words_of_command
        and isinstance(group, click.Group)
        and not words_of_command[0].startswith("-")
    ):
        name = words_of_command.pop(0)
        verb = group.get_command(context, name)
        if verb is None:
            return f"no verb {name!r}"
        context, group = click.Context(verb, info_name=name, parent=context), verb
    for word in words_of_command:
        option = word.split("=")[0]
        options = {
            name
            for parameter in group.params
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        if re.fullmatch(r"-[a-z]|--[a-z][\w-]*", option) and option not in {*options, "--help"}:
            return f"{context.info_name} has no option {option}"
    return ""


def test_every_printed_command_is_one_that_the_parser_takes() -> None:
    printed = [(place, text) for place, text in dict.fromkeys(commands()) if not OPEN.search(text)]
    wrong = [f"{place}: {text}: {why}" for place, text in printed if (why := read(text))]
    assert not wrong, "\n".join(wrong)
    assert len(printed) > 300


def test_a_wrong_command_would_be_told() -> None:
    assert read("wqk scna x") == "no verb 'scna'"
    assert read("wqk scan x --no-such") == "scan has no option --no-such"
    assert read("wqk lab train --corpus x --seeds 3") == "train has no option --seeds"


def called(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = ast.unparse(node.func)
            if re.fullmatch(r"wqk(\.\w+)+", name):
                yield name, node


def bound(name: str, call: ast.Call) -> str:
    """Return the reason why a printed call of a public name is impossible, or an empty text."""
    value: Any = wqk
    for word in name.split(".")[1:]:
        value = getattr(value, word, None)
    if value is None:
        return f"{name} does not exist"
    if any(isinstance(argument, ast.Starred) for argument in call.args) or any(
        keyword.arg is None for keyword in call.keywords
    ):
        return ""
    arguments = [argument for argument in call.args if ast.unparse(argument) != "..."]
    try:
        inspect.signature(value).bind_partial(
            *arguments, **{str(keyword.arg): ... for keyword in call.keywords}
        )
    except TypeError as error:
        return f"{name}: {error}"
    return ""


def test_every_snippet_is_python_and_calls_what_there_is() -> None:
    snippets = list(fences("python"))
    wrong, calls = [], 0
    for place, text in snippets:
        tree = ast.parse(text)
        for name, call in called(tree):
            calls += 1
            why = bound(name, call)
            wrong += [f"{place}: {why}"] * bool(why)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).startswith("wqk"):
                module = importlib.import_module(str(node.module))
                wrong += [f"{place}: {n.name}" for n in node.names if not hasattr(module, n.name)]
    assert not wrong, "\n".join(wrong)
    assert len(snippets) > 10
    assert calls > 9


CALL = re.compile(r"wqk\.\w+\((?:[^()]|\([^()]*\))*\)")


def messages() -> Iterator[tuple[str, str]]:
    """Calls and commands that errors and hints of the code tell to make, and where."""
    for path in CODE:
        tree = ast.parse(path.read_text("utf-8")) if path.suffix == ".py" else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                constants = [
                    constant.value
                    for constant in ast.walk(node.exc)
                    if isinstance(constant, ast.Constant)
                ]
                text = "…".join(piece for piece in constants if isinstance(piece, str))
                for advised_call in CALL.findall(text) + re.findall(
                    r"\bwqk (?!reads)[a-z]+ [^;:,…)]+", text
                ):
                    yield str(path.relative_to(ROOT)), advised_call


@pytest.mark.parametrize(
    ("text", "why"),
    [("wqk.sacn(x)", "does not exist"), ("wqk.symmetry(x, haeds=True)", "unexpected keyword")],
)
def test_a_wrong_call_would_be_told(text: str, why: str) -> None:
    ((name, call),) = called(ast.parse(text))
    assert why in bound(name, call)


def test_packages_are_installed_by_extras_that_exist() -> None:
    """One way to install them, in every hint, page and notebook."""
    import tomllib

    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    alone = {"pandas", "tensorboard", "trackio", "gguf", "peft", "."}
    for path in [*PAGES, *CODE, *ROOT.glob("docs/notebooks/*.ipynb")]:
        for requirement in re.findall(
            r"pip install (?:--quiet )?(['\"\\\w.\[][^\s`;]*)", path.read_text()
        ):
            named = re.search(r"\[([\w,{}]+)\]", requirement)
            if named and named[1].strip("{}") != "extra":
                assert set(named[1].split(",")) <= set(extras), f"{path}: {requirement}"
            elif not named and not requirement.startswith(('"$', '\\"$')):
                assert requirement.strip("'\"\\n,):.") in alone | {""}, f"{path}: {requirement}"


def test_the_project_lives_at_one_address() -> None:
    notebook = json.loads((ROOT / "docs/notebooks/try-it-in-colab.ipynb").read_text("utf-8"))
    source = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert f'REPOSITORY = "{ADDRESS}"' in source
    elsewhere = [
        path
        for path in [*PAGES, *CODE]
        if re.search(r"(github|gitlab)\.\w+/\w+/wqk\b", path.read_text("utf-8"))
        and path.name != "_version.py"
    ]
    assert not elsewhere
