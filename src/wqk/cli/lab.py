"""``wqk lab``: the verbs of the laboratory, and of other packages."""

from __future__ import annotations

import click

from wqk.cli.main import LABORATORY, Boundary


@click.group(cls=Boundary, verbs=LABORATORY)
def lab() -> None:
    """Train small models, and test the paper on them.

    These verbs come from packages: the laboratory, wqk_lab, is installed with wqk; others add
    theirs with an entry point of the group wqk.commands.
    """
