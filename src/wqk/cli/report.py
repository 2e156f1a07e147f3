"""``wqk report``: saved tables as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wqk.cli.options import FILE, PATH

if TYPE_CHECKING:
    from wqk.tables.score_table import ScoreTable


@click.command()
@click.argument("sources", nargs=-1, required=True, type=PATH, metavar="TABLE...")
@click.option(
    "--details", "details_files", type=FILE, multiple=True, metavar="FILE.npz",
    help="Details from wqk scan --details (matrices, norms, head coupling); repeatable.",
)  # fmt: skip
@click.option(
    "-o", "--out", type=FILE, required=True, metavar="FILE.html", help="Report to write (.html)."
)
@click.option("--title", metavar="TEXT", help="Heading.  [default: the models' names]")
def report(
    sources: tuple[Path, ...], details_files: tuple[Path, ...], out: Path, title: str | None
) -> None:
    """Write score tables as one HTML file that opens offline.

    TABLE is a .parquet, .jsonl or .csv file with scores, the folder of a training run, of several
    runs, of a callback (scores.jsonl), or of a survey. Several are shown side by side.

    \b
    Examples:
      wqk report scores.parquet -o report.html
      wqk report bert.parquet gpt2.parquet --details forms.npz -o report.html
      wqk report ./run -o run.html
    """
    from wqk.cli import display
    from wqk.reporting import check_report, write_report
    from wqk.tables.details import read_details

    check_report(out)
    tables = [table for source in sources for table in _tables(source)]
    details = [read_details(file) for file in details_files]
    write_report(tables, out, details=details, title=title)
    display.say(f"report: {out}")


def _tables(source: Path) -> list[ScoreTable]:
    """The scores in a file, a training run, a folder of runs, a callback's folder or a survey."""
    from wqk.comparing.medians import survey_table
    from wqk.tables.run import SCORES, SETTINGS, open_run
    from wqk.tables.run import read_table as read_scores
    from wqk.tables.score_table import read_table

    if not source.is_dir():
        return [read_table(source)]
    if (source / SETTINGS).is_file():
        return [open_run(source).scores]
    if (source / SCORES).is_file():
        return [read_scores(source / SCORES)]
    if runs := sorted(source.glob(f"*/{SETTINGS}")):
        return [open_run(run.parent).scores for run in runs]
    return [survey_table(source)]
