"""``wqk lab claims``: the paper's claims with the records that decide them."""

from __future__ import annotations

import click

from wqk.cli.options import json_output
from wqk_lab.training.declared import documented


@documented
@click.command()
@json_output
def claims(as_json: bool) -> None:
    """Compare the paper's empirical claims with published records and our own runs.

    Each claim has an estimate with its 95 % interval, a p-value that is adjusted for all claims,
    and the effect that would have been found. All records come with the package; nothing is read
    from the network. Needs SciPy (pip install '.[train]').

    \b
    Examples:
      wqk lab claims
      wqk lab claims --json
    """
    from wqk.cli import display
    from wqk_lab.claims import claims as compare

    page = compare()
    display.show(page.to_dict(), page, as_json=as_json)
