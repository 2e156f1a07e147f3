"""A verb of the command, declared as a function with further options of the command.

The function's signature defines arguments and options, the function's docstring the help. The
result prints itself. A verb that does more has a separate command, with the options of
`wqk.cli.options`.
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

# Parameters for models; the command opens these models.
MODEL_PARAMETERS = ("ref", "reference", "candidate")

# The parameter for progress; not an option.
PROGRESS = "on_progress"

REQUIRED = object()


class Parameter(NamedTuple):
    """A parameter of a function, as in the source; without a default, `REQUIRED` is the default."""

    name: str
    annotation: str
    default: Any


class Declaration(NamedTuple):
    """A function's parameters, and the parts of its docstring.

    Attributes
    ----------
    parameters
        All parameters, in order.
    summary, details
        The first paragraph of the docstring, and the paragraphs before the first section.
    descriptions
        Description of each parameter, by name.
    """

    parameters: tuple[Parameter, ...]
    summary: str
    details: str
    descriptions: Mapping[str, str]


def function_definition(function: str) -> ast.FunctionDef | None:
    """Return the syntax tree of a function, ``module:name``; None if missing.

    No module is imported, and only the lines of the function are parsed, so that help is fast.
    """
    module, _, name = function.partition(":")
    package, *folders = module.split(".")
    spec = find_spec(package)
    assert spec is not None
    assert spec.origin is not None
    file = Path(spec.origin).parent.joinpath(*folders).with_suffix(".py")
    lines = file.read_text("utf-8").splitlines()
    first = next((n for n, line in enumerate(lines) if line.startswith(f"def {name}(")), None)
    if first is None:
        return None
    last = first + 1
    while last < len(lines) and (not lines[last] or lines[last][0] in " )"):
        last += 1
    (definition,) = ast.parse("\n".join(lines[first:last])).body
    assert isinstance(definition, ast.FunctionDef)
    return definition


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
    """Read the declaration of a function, ``module:name``, from the source.

    Examples
    --------
    >>> explain = declaration("wqk.inspecting.explanation:explain")
    >>> explain.parameters[0].name, explain.summary
    ('ref', 'Show which tensors are queries and keys, and the bytes a scan will read.')
    """
    definition = function_definition(function)
    assert definition is not None, f"{function} is not in its module"
    docstring = ast.get_docstring(definition)
    assert docstring, f"{function} has no docstring"
    text, *sections = re.split(r"\n\n(\w+)\n-+\n", docstring)
    content_by_title = dict(zip(sections[::2], sections[1::2], strict=True))
    summary, _, details = text.partition("\n\n")
    return Declaration(
        parameters=_parameters(definition.args),
        summary=" ".join(summary.split()),
        details=details,
        descriptions=_descriptions(content_by_title["Parameters"]),
    )


def _parameters(arguments: ast.arguments) -> tuple[Parameter, ...]:
    """Return the parameters of a signature."""
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults: list[ast.expr | None] = [*[None] * required, *arguments.defaults]
    parameters = []
    for argument, default in zip(
        [*positional, *arguments.kwonlyargs], [*defaults, *arguments.kw_defaults], strict=True
    ):
        annotation = ast.unparse(argument.annotation) if argument.annotation else "str"
        value = REQUIRED if default is None else ast.literal_eval(default)
        parameters.append(Parameter(argument.arg, annotation, value))
    return tuple(parameters)


def _descriptions(section: str) -> dict[str, str]:
    """Return the descriptions in a numpydoc section, by parameter."""
    descriptions: dict[str, str] = {}
    for names, lines in re.findall(r"^(\w.*)\n((?:    .*\n?|\n)+)", section, re.M):
        description = " ".join(cleandoc(lines).split())
        descriptions |= dict.fromkeys(names.split(", "), description)
    return descriptions


def _is_given(name: str) -> bool:
    """Return whether an option of the running verb is on the command line."""
    source = click.get_current_context().get_parameter_source(name)
    return source == click.core.ParameterSource.COMMANDLINE


def plain(text: str) -> str:
    """Return the text of a docstring without markup, and without "whether to" of a flag.

    Examples
    --------
    >>> plain("Whether to add ``both`` of `wqk.scan`.")
    'Add both of wqk.scan.'
    """
    text = re.sub(r"^Whether to (\w)", lambda match: match[1].upper(), text)
    return re.sub(r"`+([^`]*)`+", r"\1", text)


@dataclass(frozen=True)
class Verb:
    """A function as a verb of the command.

    Attributes
    ----------
    function
        ``module:name``. Parameters named in `MODEL_PARAMETERS` are opened. Every other parameter
        becomes an option: the shared option with this name, or an option with the parameter's type
        and description.
    examples
        Command lines, at the end of the help.
    extra
        Options that are not parameters of the function, by name, with the arguments of
        `wqk.cli.options.option`; ``show`` receives their values.
    show
        Function of the result and the extra options that returns the objects to print; the first
        object has ``to_dict``. By default only the result is printed.
    table, picture
        Whether ``--out`` writes every format of tables, or only CSV and JSON; and whether
        ``--picture`` draws the result with ``plot``.
    plotted
        Extra options that ``plot`` receives.
    drawn
        Options that the picture needs; ``--picture`` switches them on.
    progress
        Name of the function in `wqk.cli.display` that turns progress into the text of the bar.
    omit
        Parameters that do not become options.
    fails
        Meaning of exit status 1, for results with the attribute ``ok``.
    junit
        Whether ``--junit`` writes a report, with the cases of the result's ``_junit_cases``.
    """

    function: str
    examples: tuple[str, ...] = ()
    extra: Mapping[str, Mapping[str, Any]] | None = None
    show: Callable[..., Sequence[Any]] | None = None
    table: bool = False
    picture: bool = False
    plotted: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()
    progress: str = "blocks_progress"
    omit: tuple[str, ...] = ()
    fails: str = ""
    junit: bool = False

    @property
    def summary(self) -> str:
        """First sentence of the help."""
        definition = function_definition(self.function)
        return first_sentence(ast.get_docstring(definition) or "") if definition else ""

    def command(self, name: str) -> click.Command:
        """Return the click command of this name."""
        declared = declaration(self.function)
        models = [
            parameter.name
            for parameter in declared.parameters
            if parameter.name in MODEL_PARAMETERS
        ]

        def run(**options: Any) -> None:
            self.run(models, options)

        # click lists options in the reverse order of their decorators.
        command = self._with_outputs(run)
        command = self._with_opening(command, several=len(models) > 1)
        for parameter in reversed(declared.parameters):
            command = self._with_parameter(command, parameter, models)
        return click.command(name, help=self._help(declared))(command)

    def _with_outputs(self, command: Any) -> Any:
        """Add the options of the output, and the extra options."""
        from wqk.cli.options import (
            csv_output,
            json_output,
            junit_file,
            option,
            picture_file,
            result_file,
            table_file,
        )

        command = csv_output(json_output(command))
        command = table_file(command) if self.table else result_file(command)
        if self.picture:
            command = picture_file("Draw the result")(command)
        if self.junit:
            command = junit_file(command)
        for name, settings in (self.extra or {}).items():
            command = option(name, **settings)(command)
        return command

    def _with_opening(self, command: Any, several: bool) -> Any:
        """Add the options of `wqk.open`; with several models, a revision for each model."""
        from wqk.cli.options import OF_EACH, OPENING, option, revision_of_each

        for name in reversed(OF_EACH if several else OPENING):
            command = option(name)(command)
        return revision_of_each(command) if several else command

    def _with_parameter(self, command: Any, parameter: Parameter, models: Sequence[str]) -> Any:
        """Add the argument or the option of a parameter of the function."""
        from wqk.cli.options import REF, option

        if parameter.name in models:
            return click.argument(parameter.name, type=REF)(command)
        if parameter.name in (PROGRESS, *self.omit):
            return command
        description = declaration(self.function).descriptions.get(parameter.name, "")
        settings: dict[str, Any] = {"help": plain(description)}
        if parameter.default is REQUIRED:
            settings["required"] = True
        else:
            settings["default"] = parameter.default
        return option(parameter.name, annotated=parameter.annotation, **settings)(command)

    def _help(self, declared: Declaration) -> str:
        """Return the help: summary, details, meaning of the exit status, and examples."""
        paragraphs = [declared.summary, plain(declared.details)]
        if self.fails:
            paragraphs.append(f"Exit status 1: {self.fails}.")
        if self.examples:
            title = "Examples:" if len(self.examples) > 1 else "Example:"
            lines = [title, *(f"  {example}" for example in self.examples)]
            paragraphs.append("\b\n" + "\n".join(lines))
        return "\n\n".join(filter(None, paragraphs))

    def run(self, models: list[str], options: dict[str, Any]) -> None:
        """Open the models, call the function, and print, write and draw the result."""
        from wqk._console import counted
        from wqk._style import check_picture, save_figure
        from wqk.cli import display
        from wqk.tables.score_table import check_table_output

        as_json, as_csv = options.pop("as_json"), options.pop("as_csv")
        out, picture = options.pop("out", None), options.pop("picture", None)
        junit = options.pop("junit", None)
        if self.table:
            ending = display.require_one_output(as_csv, out, as_json)
            if display.is_standard_output(out):
                out = None
            if out:
                check_table_output(out)
        else:
            ending, out = display.result_output(as_csv, out, as_json)
        if picture:
            check_picture(picture)
            options |= dict.fromkeys(self.drawn, True)
        extra = {name: options.pop(name) for name in self.extra or {}}
        result = self._reported(models, options, junit) if junit else self._call(models, options)
        shown = self.show(result, **extra) if self.show else [result]
        rows = result
        if _is_given("top") and "top" in extra:
            rows = result._first(extra["top"])
        display.show(shown[0].to_dict(), *shown, as_json=as_json, ending=ending, rows=rows)
        if out and self.table:
            rows.write(out)
            display.say(f"{out}: {counted(len(rows), 'row')}")
        elif out:
            display.write_result(result, out)
        if picture:
            options_of_plot = {name: extra[name] for name in self.plotted}
            save_figure(result.plot(**options_of_plot), picture)
            display.say(f"picture: {picture}")
        if self.fails and not result.ok:
            click.get_current_context().exit(1)

    def _reported(self, models: Sequence[str], options: dict[str, Any], junit: Path) -> Any:
        """Call the function, and write the result or the error as JUnit's XML."""
        from wqk._files import check_writable, write_atomically
        from wqk._junit import Case, junit_report

        check_writable(junit)
        name = self.function.partition(":")[2]
        suite = " = ".join(str(options[model]) for model in models)
        try:
            result = self._call(models, options)
        except Exception as error:
            # A build server shows the report of every outcome, of unexpected errors too.
            case = Case(name, error=str(error) or type(error).__name__)
            write_atomically(junit, junit_report(suite, f"wqk.{name}", [case]))
            raise
        write_atomically(junit, junit_report(suite, f"wqk.{name}", result._junit_cases()))
        return result

    def _call(self, models: Sequence[str], options: dict[str, Any]) -> Any:
        """Open the models and call the function, with a progress bar for reported progress."""
        from wqk.cli import display
        from wqk.cli.options import both_opened, opened

        module, _, name = self.function.partition(":")
        function = getattr(import_module(module), name)
        refs = [options.pop(model) for model in models]
        if len(refs) == 1:
            arguments: Sequence[Any] = [opened(refs[0], options)]
        else:
            arguments = both_opened(refs[0], refs[1], options)
        parameters = declaration(self.function).parameters
        if all(parameter.name != PROGRESS for parameter in parameters):
            return function(*arguments, **options)
        with display.bar(refs[-1], getattr(display, self.progress)) as report:
            return function(*arguments, on_progress=report, **options)
