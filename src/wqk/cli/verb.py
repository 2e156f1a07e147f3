"""A verb of the command, declared once: a function, and what the command adds to it.

The function's signature gives the arguments and options, its docstring their help; what it returns
shows itself. A verb that does more has a command of its own, with the options of `wqk.cli.options`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import cleandoc
from pathlib import Path
from typing import Any, NamedTuple

import click

# Arguments of functions that are models.
MODELS = ("ref", "other", "before", "after")

# What reports progress is told, and no option.
PROGRESS = "on_progress"


class Parameter(NamedTuple):
    """An argument of a function, as it is written."""

    name: str
    annotation: str
    default: Any  # REQUIRED if there is none


REQUIRED = object()


class Declaration(NamedTuple):
    """A function's parameters, and its docstring taken apart."""

    parameters: tuple[Parameter, ...]
    summary: str
    details: str
    described: Mapping[str, str]  # by parameter


def written(function: str) -> tuple[str, str] | None:
    """A function's parameters and docstring as its source has them, or None if it has no such one.

    Nothing is imported, so that help starts at once.
    """
    module, _, name = function.partition(":")
    package, *folders = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath(*folders).with_suffix(".py")
    source = file.read_text("utf-8")
    found = re.search(
        rf'^def {name}\((.*?)\) -> .*?:[^\n]*\n    r?"""(.*?)"""', source, re.M | re.S
    )
    return (found[1], found[2]) if found else None


def first_sentence(text: str) -> str:
    """Return the first sentence of a help text, on one line.

    Examples
    --------
    >>> first_sentence("Score the query-key form of\\nevery layer. REF is a folder.")
    'Score the query-key form of every layer.'
    """
    sentence, point, _ = " ".join(text.split()).partition(". ")
    return sentence + point.rstrip()


@cache
def declaration(function: str) -> Declaration:
    """What a function's source, ``module:name``, declares.

    Examples
    --------
    >>> found = declaration("wqk.inspecting.explanation:explain")
    >>> found.parameters[0].name, found.summary
    ('ref', 'Show which tensors are queries and keys, and the bytes a scan will read.')
    """
    found = written(function)
    assert found, f"{function} has no signature and docstring that can be read"
    (signature,) = ast.parse(f"def f({found[0]}): ...").body
    assert isinstance(signature, ast.FunctionDef)
    arguments = signature.args
    named = [*arguments.posonlyargs, *arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(named) - len(arguments.defaults))
    pairs = [
        *zip(named, [*defaults, *arguments.defaults], strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    parameters = tuple(
        Parameter(
            one.arg,
            ast.unparse(one.annotation) if one.annotation else "str",
            REQUIRED if default is None else ast.literal_eval(default),
        )
        for one, default in pairs
    )
    text, *sections = re.split(r"\n\n(\w+)\n-+\n", cleandoc(found[1]))
    titled = dict(zip(sections[::2], sections[1::2], strict=True))
    described = {
        parameter: " ".join(cleandoc(lines).split())
        for names, lines in re.findall(r"^(\w.*)\n((?:    .*\n?|\n)+)", titled["Parameters"], re.M)
        for parameter in names.split(", ")
    }
    summary, _, details = text.partition("\n\n")
    return Declaration(parameters, " ".join(summary.split()), details, described)


def plain(text: str) -> str:
    """Text of a docstring without its markup; what is said of a flag without "whether to".

    Examples
    --------
    >>> plain("Whether to add ``both`` of `wqk.scan`.")
    'Add both of wqk.scan.'
    """
    text = re.sub(r"^Whether to (\w)", lambda found: found[1].upper(), text)
    return re.sub(r"`+([^`]*)`+", r"\1", text)


@dataclass(frozen=True)
class Verb:
    """A function as a verb of the command.

    Attributes
    ----------
    function
        ``module:name``. Its first parameters named in `MODELS` are opened; each other one is an
        option: the shared one of its name, or else what its type and description say.
    examples
        Command lines, at the end of the help.
    own
        Options that the function does not have, by name, with what `wqk.cli.options.option` takes;
        ``show`` is told their values.
    show
        From the result and the command's own options to what is printed, if that is not the result
        alone: first something with ``to_dict`` that shows itself.
    table, picture
        Whether the result can be written with ``--out``, or drawn, by its ``plot`` of the
        command's own options, with ``--picture``.
    drawn
        Options without which there is nothing to draw: a picture implies them.
    progress
        From what ``on_progress`` is told to what the bar shows: a function of `wqk.cli.display`.
    omit
        Parameters that are no options.
    fails
        What it means that the result's ``ok`` is false: exit status 1.
    """

    function: str
    examples: tuple[str, ...] = ()
    own: Mapping[str, Mapping[str, Any]] | None = None
    show: Callable[..., Sequence[Any]] | None = None
    table: bool = False
    picture: bool = False
    drawn: tuple[str, ...] = ()
    progress: str = "blocks_progress"
    omit: tuple[str, ...] = ()
    fails: str = ""

    @property
    def summary(self) -> str:
        """The first sentence of the help."""
        found = written(self.function)
        return first_sentence(found[1]) if found else ""

    def command(self, name: str) -> click.Command:
        """Return the command of this name."""
        from wqk.cli.options import (
            FILE,
            OPENING,
            REF,
            json_output,
            option,
            revision_of_each,
            table_file,
        )

        declared = declaration(self.function)
        models = [one.name for one in declared.parameters if one.name in MODELS]

        def run(**options: Any) -> None:
            self.run(models, options)

        command: Any = run
        command = json_output(command)
        if self.table:
            command = table_file(command)
        if self.picture:
            drawn = "Draw the result: .png, .pdf or .svg."
            command = click.option("--picture", type=FILE, help=drawn)(command)
        for own, about in (self.own or {}).items():
            command = option(own, **about)(command)
        for opening in reversed(OPENING if len(models) == 1 else OPENING[1:]):
            command = option(opening)(command)
        if len(models) > 1:
            command = revision_of_each(command)
        for parameter in reversed(declared.parameters):
            if parameter.name in models:
                heading = "REF" if len(models) > 1 else None
                command = click.argument(parameter.name, metavar=heading, type=REF)(command)
            elif parameter.name not in (PROGRESS, *self.omit):
                told = plain(declared.described.get(parameter.name, ""))
                required = parameter.default is REQUIRED
                rest = {"required": True} if required else {"default": parameter.default}
                annotated = parameter.annotation
                command = option(parameter.name, annotated=annotated, help=told, **rest)(command)
        lines = "\n".join(f"  {line}" for line in self.examples)
        shown = f"\b\nExample{'s' * (len(self.examples) > 1)}:\n{lines}" if lines else ""
        status = f"Exit status 1: {self.fails}." if self.fails else ""
        texts = [declared.summary, plain(declared.details), status, shown]
        text = "\n\n".join(filter(None, texts))
        return click.command(name, help=text)(command)

    def run(self, models: list[str], options: dict[str, Any]) -> None:
        """Open the models, call the function, and show, write and draw what it returns."""
        from wqk._style import check_picture, save_figure
        from wqk.cli import display
        from wqk.cli.options import both_opened, opened
        from wqk.tables.score_table import check_table_output

        as_json, out, picture = (options.pop(n, None) for n in ("as_json", "out", "picture"))
        if out:
            check_table_output(out)
        if picture:
            check_picture(picture)
            options |= dict.fromkeys(self.drawn, True)
        own = {name: options.pop(name) for name in self.own or {}}
        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        refs = [options.pop(model) for model in models]
        opening = opened(refs[0], options) if len(refs) == 1 else None
        found = [opening] if opening else both_opened(refs[0], refs[1], options)
        if any(one.name == PROGRESS for one in declaration(self.function).parameters):
            with display.bar(refs[-1], getattr(display, self.progress)) as report:
                result = function(*found, on_progress=report, **options)
        else:
            result = function(*found, **options)
        shown = self.show(result, **own) if self.show else [result]
        display.show(shown[0].to_dict(), *shown, as_json=as_json)
        if out:
            result.write(out)
            display.say(f"{out}: {len(result)} rows")
        if picture:
            save_figure(result.plot(**own), picture)
            display.say(f"picture: {picture}")
        if self.fails and not result.ok:
            click.get_current_context().exit(1)
