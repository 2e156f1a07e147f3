"""``wqk report``: saved tables as one HTML file."""

from __future__ import annotations

from pathlib import Path

import click

from wqk.cli.options import FILE, PATH


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
    from wqk.inspecting.composition import CompositionTable
    from wqk.reporting import check_report, write_report
    from wqk.tables.details import read_details
    from wqk.tables.score_table import ScoreTable, read_one_of

    check_report(out)
    read = [
        read_one_of(source, ScoreTable, CompositionTable) if source.is_file() else source
        for source in sources
    ]
    pairs = [one for one in read if isinstance(one, CompositionTable)]
    tables = [one for one in read if isinstance(one, ScoreTable | Path)]
    if not tables:
        raise TableError(
            "a report shows scores, and these are pairs of heads only; expected a score table "
            "beside them: wqk scan REF --out scores.parquet"
        )
    details = [read_details(file) for file in details_files]
    write_report(tables, out, details=details, compositions=pairs, title=title)
    display.say(f"report: {out}")
