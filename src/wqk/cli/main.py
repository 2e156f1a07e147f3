"""The ``wqk`` command: its verbs."""

from __future__ import annotations

import sys

import click

from wqk._version import __version__
from wqk.cli.atlas import atlas
from wqk.cli.boundary import Boundary, run
from wqk.cli.corpus import corpus
from wqk.cli.demo import demo
from wqk.cli.diff import diff
from wqk.cli.experiments import experiments
from wqk.cli.explain import explain
from wqk.cli.figure import figure
from wqk.cli.glue import glue
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
from wqk.cli.watch import watch

SHOWN = {"help_option_names": ["-h", "--help"], "show_default": True}


@click.group(cls=Boundary, context_settings=SHOWN)
@click.version_option(__version__, prog_name="wqk")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def command(debug: bool) -> None:
    """Read, measure and follow the query-key form of self-attention.

    W_qk = W_q W_kᵀ, from any transformer checkpoint, without PyTorch.
    """


command.add_sections(
    {
        "Look at a checkpoint": (scan, explain, verify, show, tokens),
        "Compare checkpoints": (diff, same),
        "Score many checkpoints": (survey, watch),
        "Train": (corpus, train, experiments, speedup, glue),
        "Explain the paper": (atlas, figure, theory, demo),
        "Publish": (report,),
    }
)


def main() -> None:
    """Entry point of the ``wqk`` command."""
    sys.exit(run(command))
