"""``wqk report``: saved tables as one HTML file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from wqk.cli.options import FILE, PATH

if TYPE_CHECKING:
    from wqk.tables.run import Run
    from wqk.tables.score_table import Table


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
    runs, of a callback (scores.jsonl), or of a survey. Several are shown side by side. A table of
    wqk compose (.parquet) beside them adds a section with the heads that feed heads.

    \b
    Examples:
      wqk report scores.parquet -o report.html
      wqk report bert.parquet gpt2.parquet --details forms.npz -o report.html
      wqk report scores.parquet pairs.parquet -o report.html
      wqk report ./run -o run.html
    """
    from wqk.cli import display
    from wqk.errors import TableError
    from wqk.reporting import check_report, write_report
    from wqk.tables.details import read_details
    from wqk.tables.score_table import ScoreTable

    check_report(out)
    runs = [run for source in sources for run in _runs(source)]
    read = [_table(source) for source in sources if not _runs(source)]
    tables = [run.scores for run in runs] + [one for one in read if isinstance(one, ScoreTable)]
    pairs = [one for one in read if not isinstance(one, ScoreTable)]
    if not tables:
        raise TableError(
            "a report shows scores, and these are pairs of heads only; expected a score table "
            "beside them: wqk scan REF --out scores.parquet"
        )
    details = [read_details(file) for file in details_files]
    write_report(tables, out, details=details, runs=runs, compositions=pairs, title=title)
    display.say(f"report: {out}")


def _runs(source: Path) -> list[Run]:
    """The training runs in a folder: itself, or those that it holds."""
    from wqk.tables.run import SETTINGS, open_run

    if (source / SETTINGS).is_file():
        return [open_run(source)]
    return [open_run(run.parent) for run in sorted(source.glob(f"*/{SETTINGS}"))]


def _table(source: Path) -> Table:
    """The scores in a file, in a callback's folder or in a survey's, or a file's pairs of heads."""
    from wqk.comparing.published import survey_table
    from wqk.inspecting.composition import CompositionTable
    from wqk.tables.run import SCORES
    from wqk.tables.run import read_table as read_scores
    from wqk.tables.score_table import ScoreTable, read_one_of

    if not source.is_dir():
        return read_one_of(source, ScoreTable, CompositionTable)
    if (source / SCORES).is_file():
        return read_scores(source / SCORES)
    return survey_table(source)
