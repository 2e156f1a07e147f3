"""The ``wqk`` command: its verbs, and the one place that turns errors into one line and a status.

==========================================  ======
what                                        status
==========================================  ======
a negative result (``verify``, ``same``)         1
an error, expected or not                        2
interrupted by Ctrl-C                          130
the reader of the output closed the pipe       141
==========================================  ======
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib import import_module
from typing import Any

import click

from wqk._version import __version__
from wqk.errors import WqkError, shortened


class Verbs(Mapping[str, click.Command]):
    """The verbs by name, each in a module of its name, which is imported when it is asked for.

    ``sections`` are those next to this module, by title. Packages add verbs with an entry point of
    the group ``plugins``: it names a mapping like this one, and the modules are those next to it.
    """

    def __init__(self, sections: Mapping[str, Sequence[str]], plugins: str) -> None:
        self._own, self._plugins = {"wqk.cli": sections}, plugins

    @cached_property
    def _packages(self) -> dict[str, Mapping[str, Sequence[str]]]:
        from importlib.metadata import entry_points

        return self._own | {one.module: one.load() for one in entry_points(group=self._plugins)}

    @property
    def sections(self) -> dict[str, list[str]]:
        """The names of all verbs, by title."""
        return {t: [*verbs] for found in self._packages.values() for t, verbs in found.items()}

    def __getitem__(self, name: str) -> click.Command:
        # Other packages are looked for only if this one has no such verb.
        places = (places for of in ("_own", "_packages") for places in getattr(self, of).items())
        for package, sections in places:
            if any(name in verbs for verbs in sections.values()):
                verb: click.Command = getattr(import_module(f"{package}.{name}"), name)
                return verb
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return (name for names in self.sections.values() for name in names)

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Boundary(click.Group):
    """Verbs whose errors are one line on standard error; with ``--debug``, a traceback.

    Their list in the help has sections, with the first sentence of each verb.
    """

    def __init__(self, *arguments: Any, verbs: Verbs, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.verbs = self.commands = verbs  # type: ignore[assignment]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the sections, as click writes its one list."""
        widest = max(map(len, self.verbs))
        for title, names in self.verbs.sections.items():
            with formatter.section(title):
                rows = [(n.ljust(widest), first_sentence(self.verbs[n].help or "")) for n in names]
                formatter.write_dl(rows)

    def invoke(self, context: click.Context) -> Any:
        """Run a verb."""
        try:
            return super().invoke(context)
        except KeyboardInterrupt as stopped:
            # A verb that can be continued says how: KeyboardInterrupt("what to do next").
            tell("; ".join(["interrupted", *map(str, stopped.args)]))
            context.exit(130)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise
        except Exception as error:
            if context.params.get("debug"):
                raise
            tell(self.described(error, context))
            context.exit(2)

    def described(self, error: Exception, context: click.Context) -> str:
        """An error in one line."""
        if isinstance(error, WqkError):
            return self.in_flags(str(error), context)
        if isinstance(error, OSError):
            file = f"{error.filename}: " if error.filename else ""
            return f"{file}{error.strerror or error}"
        if isinstance(error, MemoryError) or "start new thread" in str(error):
            return (
                "out of memory: give the process more, or score fewer layers at a time (--layers)"
            )
        message = f": {error}" if str(error) else ""
        return f"unexpected {type(error).__name__}{message} (wqk --debug shows where)"

    def in_flags(self, message: str, context: click.Context) -> str:
        """A message that names Python's arguments, naming the verb's options instead.

        ``heads_per_layer=4`` becomes ``--heads-per-layer 4``, ``retry=True`` ``--retry``.
        """
        verb = self.verbs.get(context.invoked_subcommand or "")
        for option in verb.params if verb else ():
            if isinstance(option, click.Option):
                value = "=True" if option.is_flag else "="
                after = "" if option.is_flag else " "
                message = re.sub(rf"\b{option.name}{value}", option.opts[-1] + after, message)
        return message


def first_sentence(text: str) -> str:
    """The first sentence of a command's help, on one line.

    Examples
    --------
    >>> first_sentence("Score the query-key form of\\nevery layer. REF is a folder.")
    'Score the query-key form of every layer.'
    """
    sentence, point, _ = " ".join(text.split()).partition(". ")
    return sentence + point.rstrip()


def tell(message: str) -> None:
    """Print one line to standard error, if it is open."""
    from wqk._console import printable
    from wqk.checkpoints.references import without_secrets

    message = without_secrets(" ".join(message.split()))
    with contextlib.suppress(OSError, ValueError):
        click.echo(f"wqk: {printable(shortened(message))}", err=True)


def run(command: Callable[..., Any]) -> int:
    """Run the command with the process's own arguments and streams; returns the exit status."""
    _open_streams()
    # What NumPy says of overflow stands in the result, or in the one line of an error.
    warnings.filterwarnings("ignore", category=RuntimeWarning)
    status = 0
    try:
        try:
            command(prog_name="wqk")
        except SystemExit as done:
            status = done.code if isinstance(done.code, int) else int(done.code is not None)
        sys.stdout.flush()
    except BrokenPipeError:
        status = 141
    except KeyboardInterrupt:
        tell("interrupted")
        status = 130
    except OSError as error:  # from printing, be it click's own messages
        tell(f"standard output cannot be written ({error.strerror})")
        status = 2
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            _discard(stream)
    return status


def _discard(stream: Any) -> None:
    """Discard further output, so that Python does not report a broken pipe at exit."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _open_streams() -> None:
    """Replace closed standard streams with the null device, so that no file takes their number."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets a question mark, not a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]


# Every command has a module of its name.
SECTIONS = {
    "Look at a checkpoint": ("scan", "explain", "verify", "show", "tokens", "compose"),
    "Compare checkpoints": ("diff", "same", "kin"),
    "Score many checkpoints": ("survey", "watch"),
    "Publish": ("report", "demo"),
}
PLUGINS = "wqk.commands"
SHOWN = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=Boundary, verbs=Verbs(SECTIONS, PLUGINS), context_settings=SHOWN)
@click.version_option(__version__, prog_name="wqk")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def command(debug: bool) -> None:
    """Read, measure and follow the query-key form of self-attention.

    W_qk = W_q W_kᵀ, from any transformer checkpoint, without PyTorch.
    """


def main() -> None:
    """Entry point of the ``wqk`` command."""
    sys.exit(run(command))
