"""The ``wqk`` command: its verbs."""

from __future__ import annotations

import sys

import click

from wqk._version import __version__
from wqk.cli.boundary import Boundary, Verbs, run

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
