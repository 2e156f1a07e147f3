"""The ``wqk`` command and what all its verbs share: errors as one line, exit status 2."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from wqk._version import __version__
from wqk.cli.atlas import atlas
from wqk.cli.corpus import corpus
from wqk.cli.demo import demo
from wqk.cli.diff import diff
from wqk.cli.experiments import experiments
from wqk.cli.explain import explain
from wqk.cli.figure import figure
from wqk.cli.report import report
from wqk.cli.same import same
from wqk.cli.scan import scan
from wqk.cli.show import show
from wqk.cli.speedup import speedup
from wqk.cli.survey import survey
from wqk.cli.theory import theory
from wqk.cli.tokens import tokens
from wqk.cli.train import train
from wqk.cli.verify import verify
from wqk.errors import WqkError


class _Command(click.Group):
    """Turns wqk's errors into one line on standard error and exit status 2."""

    def invoke(self, context: click.Context) -> Any:
        try:
            return super().invoke(context)
        except WqkError as error:
            if context.params.get("debug"):
                raise
            click.echo(f"wqk: {' '.join(str(error).split())}", err=True)
            context.exit(2)


@click.group(cls=_Command, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="wqk")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def command(debug: bool) -> None:
    """Read, measure and follow the query-key form of self-attention.

    W_qk = W_q W_kᵀ, out of any transformer checkpoint, without PyTorch.
    """


# fmt: off
for verb in (
    scan, explain, verify, show, tokens, diff, same, survey, atlas, report, figure, corpus,
    train, experiments, speedup, theory, demo,
):
    command.add_command(verb)
# fmt: on


def main() -> None:
    """Entry point of the ``wqk`` command."""
    for stream in (sys.stdout, sys.stderr):
        # A terminal that lacks a character gets a question mark, not a traceback.
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        command(prog_name="wqk")
    except BrokenPipeError:
        # The reader of our pipe has seen enough; leave without a word, as other commands do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(141)
