"""The ``wqk`` command: its verbs, and the message and exit status of every error.

==========================================  ========
what                                          status
==========================================  ========
a negative result (``verify``, ``same``)          1
an error, expected or not                         2
interrupted by Ctrl-C                           130
a survey ended by SIGTERM or SIGHUP         143, 129
the reader of the output closed the pipe        141
==========================================  ========
"""

from __future__ import annotations

import ast
import contextlib
import os
import re
import shlex
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any

import click

from wqk._guesses import COMMANDS, EXTRA_ARGUMENTS, MISSING, option_advice
from wqk._synonyms import VERBS
from wqk._version import __version__
from wqk.cli.limits import too_small
from wqk.cli.repetition import require_single_values
from wqk.cli.rewording import reworded, with_figure_name, with_verb
from wqk.cli.streams import discard, open_streams
from wqk.cli.verb import Verb, first_sentence, function_definition
from wqk.errors import WqkError, shortened

# Names of verbs by the title of their section in the help.
Sections = Mapping[str, Sequence[str]]


# Variables of the environment with values that libraries fail on: the pattern of valid values, and
# their description.
ENVIRONMENT = {
    "POLARS_MAX_THREADS": (r"0*[1-9]\d*|.*\D.*", "a number of threads"),
    "COLUMNS": (r"0*[1-9]\d*|.*\D.*", "a width in characters"),
    **dict.fromkeys(("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"), (r"\d{1,9}", "seconds")),
    "HF_ENDPOINT": (r"https?://[^/\[\]]+/?", "the address of a hub"),
    **dict.fromkeys(
        ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"),
        (r"(\w+://)?([^@/]*@)?([^:/\[\]]+|\[[\da-fA-F:]+\])(:\d{1,5})?/?", "a proxy's address"),
    ),
    "MPLBACKEND": (
        r"(?i)agg|\w+(agg|cairo)|pdf|pgf|ps|svg|module://.+|.*inline",
        "a backend such as agg",
    ),
    "SOURCE_DATE_EPOCH": (r"\d{1,11}", "seconds since 1970"),
}
# Words of one path, besides the first, that a forgotten quote has separated.
MOST_SPACES = 8

# An unknown option is a misspelling of an option that is at least this similar.
ALIKE = 0.75

# Invalid values of these variables end or silence the process without an error. All others are
# checked only after an unexpected error.
CHECKED_FIRST = ("POLARS_MAX_THREADS", "COLUMNS")


def wrong_variable(names: Iterable[str] = ENVIRONMENT) -> str | None:
    """Describe the first of these variables with an invalid value; None if there is none."""
    for name in names:
        pattern, expected = ENVIRONMENT[name]
        value = os.environ.get(name) or ""
        if value and not re.fullmatch(pattern, value, re.DOTALL):
            return f"the environment has {name}={value!r}; expected {expected}, or nothing"
    return None


class Verbs(Mapping[str, click.Command]):
    """Verbs by name, each in a module of its name or in ``verbs``, imported on first use.

    ``packages``, called on first use, returns the sections of each package's verbs, by title.
    """

    def __init__(self, packages: Callable[[], Mapping[str, Sections]]) -> None:
        self._packages = cache(packages)

    @property
    def sections(self) -> dict[str, list[str]]:
        """Names of all verbs, by the title of the section."""
        names: dict[str, list[str]] = {}
        for sections in self._packages().values():
            for title, verbs in sections.items():
                names[title] = [*verbs]
        return names

    def module(self, name: str) -> str:
        """Return the module of a verb; `KeyError` for an unknown verb."""
        for package, sections in self._packages().items():
            if any(name in verbs for verbs in sections.values()):
                module = f"{package}.{name}"
                return module if find_spec(module) else f"{package}.verbs"
        raise KeyError(name)

    def declared(self, name: str) -> Verb | click.Command:
        """Return a verb as declared in the verb's module."""
        verb: Verb | click.Command = getattr(import_module(self.module(name)), name)
        return verb

    def __getitem__(self, name: str) -> click.Command:
        verb = self.declared(name)
        return verb.command(name) if isinstance(verb, Verb) else verb

    def summary(self, name: str) -> str:
        """Return the first sentence of a verb's help."""
        if definition := function_definition(f"{self.module(name)}:{name}"):
            return first_sentence(ast.get_docstring(definition) or "")
        verb = self.declared(name)
        return verb.summary if isinstance(verb, Verb) else ""

    def __iter__(self) -> Iterator[str]:
        return chain.from_iterable(self.sections.values())

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Boundary(click.Group):
    """Group of verbs; prints an error as one line, with ``--debug`` after its traceback.

    The help lists the verbs in sections, each with its first sentence.
    """

    def __init__(self, *arguments: Any, verbs: Verbs, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.verbs = self.commands = verbs  # type: ignore[assignment]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the verbs in sections, in the layout of click's list."""
        widest = max(map(len, self.verbs))
        for title, names in self.verbs.sections.items():
            with formatter.section(title):
                rows = [(name.ljust(widest), self.verbs.summary(name)) for name in names]
                formatter.write_dl(rows)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the options before the verb; an unknown option gets advice."""
        arguments = [*args]
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise self._before_verb(error, arguments) from None

    def _before_verb(
        self, error: click.NoSuchOption, arguments: Sequence[str]
    ) -> click.NoSuchOption:
        """Return the error of an option before the verb, with advice if the verb has the option."""
        verb = next((word for word in arguments if word in self.verbs), None)
        if verb is None:
            return _advised(error)
        command = self.verbs[verb]
        if isinstance(command, click.Group):
            return _advised(error)
        context = click.Context(command, info_name=verb, parent=error.ctx)
        for option in command.params:
            if isinstance(option, click.Option) and error.option_name in option.opts:
                usage = [
                    word for word in command.collect_usage_pieces(context) if word != "[OPTIONS]"
                ]
                value = [] if option.is_flag else [option.make_metavar(context)]
                call = " ".join([context.command_path, *usage, error.option_name, *value])
                message = f"{error.option_name} follows the verb: {call}"
                return click.NoSuchOption(error.option_name, message, ctx=error.ctx)
        return _advised(click.NoSuchOption(error.option_name, ctx=context))

    def resolve_command(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb, with advice for laboratory verbs and Python functions."""
        name, verb, arguments = self._resolved(context, arguments)
        if verb is not None and not isinstance(verb, click.Group):
            if arguments == ["help"] and not Path("help").exists():
                arguments = ["--help"]
            if path := _unquoted_path(arguments):
                raise click.UsageError(
                    f"{path}: a path with spaces; expected one word, got several; quote it: "
                    f"{shlex.quote(path)}"
                )
            arguments = reworded(verb, arguments)
            if not context.resilient_parsing:  # of the shell, which completes a line
                require_single_values(verb, arguments, context)
        return name, verb, arguments

    def _resolved(
        self, context: click.Context, arguments: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find a verb or, for a synonym, the verb that it replaces, as in click."""
        if any("\0" in word for word in arguments):
            raise click.UsageError("an argument contains a null character, which no path can have")
        if "figure" in self.verbs:
            arguments = with_figure_name(self._meant(arguments, self.verbs))
        elif arguments[0] not in self.verbs:
            arguments = self._meant(arguments, self.verbs)
            in_laboratory = with_figure_name(self._meant(arguments, LABORATORY))
            if arguments[0] not in self.verbs and in_laboratory[0] in LABORATORY:
                return super().resolve_command(context, ["lab", *in_laboratory])
        if arguments[0] == "version" and context.parent is None:
            _show_version(context, None, requested=True)
        if arguments[0] == "help" and context.parent is None:
            topic = arguments[1:2] or ["--help"]
            return self.resolve_command(context, [*topic, *["--help"][: len(arguments) - 1]])
        plain_name = arguments[0].lower().replace("-", "_")
        if arguments[0] not in self.verbs and (advice := COMMANDS.get(plain_name)):
            raise click.UsageError(f"no such command: {arguments[0]}; {advice}")
        if arguments[0] not in self.verbs and context.parent is None:
            public: list[str] = import_module("wqk").__all__
            names = {name.strip("_").lower(): name for name in public}
            if name := names.get(arguments[0].strip("_").lower()):
                raise click.UsageError(
                    f"no such command; in Python it is wqk.{name}: see help(wqk.{name})"
                )
            if "/" in arguments[0] or Path(arguments[0]).exists():
                raise click.UsageError(
                    f"no such command: {arguments[0]}; did you mean wqk scan {arguments[0]}?"
                )
        return super().resolve_command(context, arguments)

    @staticmethod
    def _meant(arguments: list[str], verbs: Verbs) -> list[str]:
        """Replace the synonym of a verb by the verb and its options."""
        synonym = VERBS.get(arguments[0])
        if arguments[0] in verbs or synonym is None or synonym.verb not in verbs:
            return arguments
        return with_verb(synonym, arguments)

    def invoke(self, context: click.Context) -> Any:
        """Run a verb, and report its error."""
        if problem := wrong_variable(CHECKED_FIRST):
            tell(problem)
            context.exit(2)
        if problem := too_small():
            click.echo(f"wqk: {problem}", err=True)  # imports of `tell` need memory
            context.exit(2)
        try:
            return super().invoke(context)
        except KeyboardInterrupt as interrupt:
            from wqk.cli.signals import Ended

            event, status = "interrupted", 130
            if isinstance(interrupt, Ended):
                event, status = f"ended by {interrupt.name}", interrupt.status
            # A verb that can be continued adds the next step: KeyboardInterrupt("what to do next").
            tell("; ".join([event, *map(str, interrupt.args)]))
            context.exit(status)
        except click.ClickException as error:
            from wqk.storage.references import without_secrets

            if isinstance(error, click.NoSuchOption):
                error = _advised(error)
            # The error of a verb of the laboratory passes here twice.
            is_first = "; expected" not in error.message
            if is_first and error.message.startswith("Got unexpected extra argument"):
                error.message += _expected_call(getattr(error, "ctx", None))  # type: ignore[misc]
            if isinstance(error, click.MissingParameter):
                error = _all_missing(error)
            if error.message.endswith("requires an argument."):
                error.message += self._value_of(error, context)  # type: ignore[misc]
            error.message = without_secrets(error.message)  # type: ignore[misc]
            raise error from None
        except BrokenPipeError:
            # With an error number, click would exit with 1, which `same` defines as a difference.
            raise BrokenPipeError from None
        except (click.exceptions.Exit, click.Abort):
            raise
        except Exception as error:
            if context.find_root().params.get("debug"):
                _print_traceback(error)
            tell(self.described(error, context))
            context.exit(2)

    def _value_of(self, error: click.ClickException, context: click.Context) -> str:
        """Return the end of a message on an option without a value: the value's meaning."""
        verb = self.verbs.get(context.invoked_subcommand or "")
        for option in verb.params if verb else ():
            if (
                isinstance(option, click.Option)
                and getattr(error, "option_name", "") in option.opts
            ):
                value = option.make_metavar(context)
                return f" {option.opts[-1]} {value}: {first_sentence(option.help or '')}"
        return ""

    def described(self, error: Exception, context: click.Context) -> str:
        """Return an error as one line."""
        if isinstance(error, WqkError):
            return self.in_flags(str(error), context)
        if isinstance(error, OSError):
            file = f"{error.filename}: " if error.filename else ""
            return f"{file}{error.strerror or error}"
        if isinstance(error, MemoryError) or "start new thread" in str(error):
            return (
                "out of memory: give the process more, or score fewer layers at a time (--layers)"
            )
        if problem := wrong_variable():
            return problem
        message = f": {error}" if str(error) else ""
        return f"unexpected {type(error).__name__}{message} (wqk --debug shows where)"

    def in_flags(self, message: str, context: click.Context) -> str:
        """Replace names of Python's arguments in a message by the verb's options.

        ``heads_per_layer=4`` becomes ``--heads-per-layer 4``, ``retry=True`` ``--retry``.
        """
        verb = context.invoked_subcommand or ""
        for option in self.verbs[verb].params if verb in self.verbs else ():
            if isinstance(option, click.Option):
                value = "=True" if option.is_flag else "="
                separator = "" if option.is_flag else " "
                # Calls of Python, such as wqk.open(ref, heads_per_layer=4), stay unchanged.
                pattern = rf"(?<!, )\b{option.name}{value}"
                message = re.sub(pattern, option.opts[-1] + separator, message)
        return message


def _name_of(parameter: click.Parameter, context: click.Context) -> str:
    """Return the name of an option with its dashes, or of an argument in capitals."""
    if isinstance(parameter, click.Option):
        return parameter.opts[-1]
    return parameter.make_metavar(context)


def _all_missing(error: click.MissingParameter) -> click.UsageError:
    """Return the error with all missing parameters, and the call with all parameters."""
    context = error.ctx
    if context is None:
        return error
    # click reads the parameters that were given first, and stops at the first that is missing.
    needed = [parameter for parameter in context.command.params if parameter.required]
    missing = [parameter for parameter in needed if parameter.name not in context.params]
    arguments = [
        parameter.make_metavar(context)
        for parameter in context.command.params
        if isinstance(parameter, click.Argument)
    ]
    options = [
        f"{parameter.opts[-1]} {parameter.make_metavar(context)}"
        for parameter in needed
        if isinstance(parameter, click.Option)
    ]
    call = " ".join([context.command_path, *arguments, *options])
    advice = MISSING.get(context.command.name or "", "")
    further = f"; {advice}" if advice else ""
    if len(missing) > 1:
        names = [_name_of(parameter, context) for parameter in missing]
        return click.UsageError(f"Missing {', '.join(names)}: {call}{further}", ctx=context)
    description = ""
    if isinstance(error.param, click.Option):
        description = first_sentence(error.param.help or "").rstrip(".") + ": "
    error.message = f"{description}{call}{further}"  # type: ignore[misc]
    return error


def _unquoted_path(words: Sequence[str]) -> str | None:
    """Return the existing path that words give if joined by spaces; otherwise None."""
    from wqk._files import exists

    plain = [word for word in words if not word.startswith("-")]
    for first, word in enumerate(plain):
        if exists(Path(word)):
            continue
        for end in range(first + 2, first + 2 + MOST_SPACES):
            path = " ".join(plain[first:end])
            if end <= len(plain) and exists(Path(path)):
                return path
    return None


def _expected_call(context: click.Context | None) -> str:
    """Return the end of a message about unexpected arguments: the call of the verb, and advice."""
    if context is None:
        return ""
    call = [context.command_path, *context.command.collect_usage_pieces(context)]
    advice = EXTRA_ARGUMENTS.get(context.command.name or "", "")
    return "".join(f"; {clause}" for clause in (f"expected {' '.join(call)}", advice) if clause)


def _advised(error: click.NoSuchOption) -> click.NoSuchOption:
    """Return the error with the most similar option, instead of click's suggestions."""
    usages: dict[str, str] = {}
    verb = error.ctx.command.name or "" if error.ctx else ""
    if error.ctx:
        for parameter in error.ctx.command.params:
            usages |= dict.fromkeys(parameter.opts, "")
            if isinstance(parameter, click.Option):
                value = "" if parameter.is_flag else f" {parameter.make_metavar(error.ctx)}"
                usages |= {option: f"{option}{value}" for option in parameter.opts}
    name = error.option_name
    if error.message and "; " in error.message:  # the error already has advice
        return error
    advice = option_advice(name, usages, verb)
    if not advice and (similar := get_close_matches(name, usages, n=1, cutoff=ALIKE)):
        advice = f"did you mean {usages[similar[0]] or similar[0]}?"
    if not advice and (verbs := _verbs_with(name, error.ctx)):
        advice = f"{' and '.join(verbs)} {'has' if len(verbs) == 1 else 'have'} this option"
    message = "; ".join(filter(None, [f"No such option '{name}'", advice]))
    return click.NoSuchOption(name, message, ctx=error.ctx)


def _verbs_with(option: str, context: click.Context | None) -> list[str]:
    """Return the verbs with an option, after the command's name; none if more than two have it."""
    group = context.parent.command if context and context.parent else None
    if context is None or context.parent is None or not isinstance(group, Boundary):
        return []
    verbs = []
    for name, verb in group.verbs.items():
        if any(option in parameter.opts for parameter in verb.params):
            verbs.append(f"{context.parent.command_path} {name}")
    return verbs if len(verbs) <= 2 else []


def tell(message: str) -> None:
    """Print one line to standard error, if standard error is open."""
    from wqk._console import printable, with_display_names
    from wqk.storage.references import without_secrets

    message = with_display_names(without_secrets(" ".join(message.split())))
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"wqk: {printable(shortened(message))}", err=True)


def _print_traceback(error: Exception) -> None:
    """Print the traceback of an error to standard error."""
    from traceback import format_exception

    from wqk.storage.references import without_secrets

    click.echo(without_secrets("".join(format_exception(error))), err=True, nl=False)


def run(command: Callable[..., Any]) -> int:
    """Run the command with the process's own arguments and streams, and return the exit status."""
    open_streams()
    try:
        with warnings.catch_warnings():
            # Overflow shows in the result, or in the line of an error; NumPy's warnings repeat it.
            warnings.filterwarnings("ignore", category=RuntimeWarning)
            status = _status_of(command)
        sys.stdout.flush()
    except BrokenPipeError:
        status = 141
    except KeyboardInterrupt:
        tell("interrupted")
        status = 130
    except OSError as error:  # from printing, also by click
        tell(f"standard output cannot be written ({error.strerror})")
        status = 2
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            discard(stream)
    return status


def _status_of(command: Callable[..., Any]) -> int:
    """Run the command, and return the exit status of click's `SystemExit`."""
    try:
        command(prog_name="wqk")
    except SystemExit as exit_request:
        if isinstance(exit_request.code, int):
            return exit_request.code
        return 0 if exit_request.code is None else 1
    return 0


def laboratory() -> dict[str, Sections]:
    """Return the sections of verbs from other packages with the entry point `PLUGINS`."""
    from importlib.metadata import entry_points

    return {entry_point.module: entry_point.load() for entry_point in entry_points(group=PLUGINS)}


# Every command has a module of its name, or is declared in `wqk.cli.verbs`.
SECTIONS: Sections = {
    "Look at a checkpoint": (
        "scan",
        "explain",
        "verify",
        "show",
        "tokens",
        "compose",
        "parts",
        "models",
    ),
    "Compare checkpoints": ("diff", "same", "kin"),
    "Score many checkpoints": ("survey", "watch"),
    "Publish": ("report", "demo"),
    "Train, and test the paper": ("lab",),
}
PLUGINS = "wqk.commands"
CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "show_default": True}


LABORATORY = Verbs(laboratory)


def _show_version(
    context: click.Context, parameter: click.Parameter | None, requested: bool
) -> None:
    """Print the version, and the transformers version of the tests of all families."""
    if not requested or context.resilient_parsing:
        return
    from wqk.families.model_types import proven_version

    click.echo(f"wqk, version {__version__}")
    click.echo(f"families proven against transformers {proven_version()}")
    context.exit()


@click.group(
    cls=Boundary, verbs=Verbs(lambda: {"wqk.cli": SECTIONS}), context_settings=CONTEXT_SETTINGS
)
@click.option(
    "-V",
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_show_version,
    help="Show the version and exit.",
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def command(debug: bool) -> None:
    """Read, measure and follow the query-key form of self-attention.

    W_qk = W_q W_kᵀ, from any transformer checkpoint, without PyTorch.
    """
