"""``wqk lab claims``: the paper's claims, with evidence."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import csv_output, json_output, result_file
from wqk_lab.training.declared import documented


@documented
@click.command()
@result_file
@json_output
@csv_output
def claims(out: Path | None, as_json: bool, as_csv: bool) -> None:
    """Compare the paper's empirical claims with published records and our own runs.

    Each claim has an estimate with its 95 % interval, a p-value that is adjusted for the number of
    tested claims (Benjamini and Hochberg), and the effect that would have been found. A claim
    holds, is contradicted, or is open, by the adjusted p-value. All records come with the package;
    nothing is read from the network. Needs SciPy (pip install '.[train]').

    \b
    Examples:
      wqk lab claims
      wqk lab claims --json
    """
    from wqk.cli import display
    from wqk_lab.claims import claims as compare

    ending, out = display.result_output(as_csv, out, as_json)
    page = compare()
    display.show(page.to_dict(), page, as_json=as_json, ending=ending, rows=page)
    if out:
        display.write_result(page, out)
