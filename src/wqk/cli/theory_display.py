"""What ``wqk theory`` prints: the tally, and a line for each finding."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from wqk._console import sheet
from wqk.cli import display
from wqk.theory.report import line

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wqk.theory.report import Report
    from wqk.theory.verdict import Finding

STYLES = {
    "holds": "green",
    "fails": "red",
    "undecided": "yellow",
    "not tested": "dim",
    "identity": "dim",
}
# Wide enough for every finding to be one line, for grep.
IN_A_PIPE = 400
MARKS = {"holds": "✓", "fails": "✗", "undecided": "?", "not tested": "–", "identity": "="}


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """The bar of a study: batches of a model."""
    with display.bar("model") as update:

        def show(name: str, done: int, total: int) -> None:
            assert update is not None
            update(description=name, completed=done, total=total, text=f"{done}/{total}")

        yield update and show


def print_reports(reports: Sequence[Report], verbose: bool = False) -> None:
    """The last report in full, after the verdicts of all of them side by side."""
    if len(reports) > 1:
        _print_verdicts(reports)
    _print_findings(reports[-1], verbose)


def _print_findings(report: Report, verbose: bool) -> None:
    """The tally, a line for each finding, and why the other statements could not be tested."""
    console = display.output()
    if not console.is_terminal:
        console.width = IN_A_PIPE
    console.print(Text(f"\n{report.title}", style="bold"), soft_wrap=True)
    tally = [Text(f"{n} {v}", style=STYLES[v]) for v, n in report.tally.items() if n]
    console.print(Text(", ").join(tally), soft_wrap=True)
    for note in report.notes:
        console.print(Text(f"! {note}", style="yellow"), soft_wrap=True)
    doubtful = "!" if report.caveat else ""
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    table.add_column(overflow="fold")
    untested: dict[str, list[str]] = {}
    for finding in report.findings:
        cells = line(finding)
        if finding.verdict == "not tested" and not verbose:
            untested.setdefault(finding.why, []).append(finding.statement.number)
            continue
        verdict = Text(finding.verdict + doubtful, style=STYLES[finding.verdict])
        statement = Text.assemble((f"{cells['number']}: ", "bold"), cells["says"])
        measured = f"{cells['estimate']} ({cells['prediction']})" if finding.estimate else ""
        facts = [measured, cells["why"], cells["layers"] if finding.verdict != "identity" else ""]
        table.add_row(verdict, statement, Text("; ".join(filter(None, facts))))
        if verbose:
            for label in ("quantity", "over", "assumes"):
                if cells[label]:
                    table.add_row("", Text(f"{label}: {cells[label]}", style="dim"), "")
    console.print(table)
    for why, numbers in untested.items():
        said = f"not tested{doubtful}, {why}: {'; '.join(dict.fromkeys(numbers))}"
        console.print(
            Text(f" {said}", style=STYLES["not tested"]), soft_wrap=not console.is_terminal
        )


def _print_verdicts(reports: Sequence[Report]) -> None:
    """Statements down, models or steps across."""
    console = display.output()
    for number, report in enumerate(reports, start=1):
        console.print(Text(f"{number}  {report.title}"))
    table = sheet("statement", left=["statement"])
    for number in range(1, len(reports) + 1):
        table.add_column(str(number), justify="right", no_wrap=True)
    verdicts = [{_key(f): f.verdict for f in report.findings} for report in reports]
    for key in verdicts[-1]:
        shown = [some.get(key, "not tested") for some in verdicts]
        table.add_row(": ".join(key), *(Text(MARKS[v], style=STYLES[v]) for v in shown))
    console.print(table)
    console.print(Text(", ".join(f"{MARKS[v]} {v}" for v in STYLES), style="dim"))


def _key(finding: Finding) -> tuple[str, str]:
    return finding.statement.number, finding.statement.says
