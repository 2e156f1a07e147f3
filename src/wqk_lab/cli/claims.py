"""``wqk lab claims``: the paper's claims, with evidence."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from wqk.cli.options import FILE, csv_output, json_output
from wqk_lab.training.declared import documented

if TYPE_CHECKING:
    from wqk_lab.claims.page import Verdict

# Repeated here to avoid heavy imports; a test compares both lists.
VERDICTS = ("holds", "contradicted", "open", "count", "no record")

ENDINGS = (".csv", ".json", ".md")


@documented
@click.command()
@click.option(
    "-o",
    "--out",
    type=FILE,
    help="Write the claims: rows as .csv, all values as .json, a table as .md; - prints CSV.",
)
@click.option("--verdict", "verdicts", type=click.Choice(VERDICTS), multiple=True)
@json_output
@csv_output
def claims(out: Path | None, verdicts: tuple[Verdict, ...], as_json: bool, as_csv: bool) -> None:
    """Compare the paper's empirical claims with published records and our own runs.

    Each claim has an estimate with its 95 % interval, a p-value that is adjusted for the number of
    tested claims (Benjamini and Hochberg), and the effect that would have been found. A claim
    holds, is contradicted, or is open, by the adjusted p-value. All records come with the package;
    nothing is read from the network. Needs SciPy (pip install '.[train]').

    \b
    Examples:
      wqk lab claims
      wqk lab claims --json
      wqk lab claims --verdict open --verdict contradicted -o claims.md

    Parameters
    ----------
    verdicts
        Only the claims with this verdict; repeatable. Counts and p-values remain those of all.
    """
    from wqk._files import check_output, write_atomically
    from wqk.cli import display
    from wqk_lab.claims import claims as compare

    ending = display.require_one_output(as_csv, out, as_json)
    if ending not in ("", ".csv", ".md"):
        raise click.UsageError(f"claims are printed as CSV, JSON or Markdown, and not as {ending}")
    file = None if display.is_standard_output(out) else out
    if file is not None:
        check_output(file, "a page of claims", ENDINGS)
    page = replace(compare(), verdicts=verdicts)
    markdown = "\n".join(page.markdown())
    if ending == ".md":
        click.echo(markdown)
    else:
        display.show(page.to_dict(), page, as_json=as_json, ending=ending, rows=page)
    if file is None:
        return
    if file.suffix == ".md":
        write_atomically(file, f"{markdown}\n".encode())
        display.say(f"claims: {file}")
    else:
        display.write_result(page, file)
