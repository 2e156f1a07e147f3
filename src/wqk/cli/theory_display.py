"""What ``wqk theory`` prints: one model's findings in full, or several states' verdicts."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from wqk.cli import display
from wqk.theory.report import title

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wqk.theory.report import Report

STYLES = {"holds": "green", "holds in part": "yellow", "fails": "red", "not tested": "dim"}
MARKS = {"holds": "✓", "holds in part": "~", "fails": "✗", "not tested": "–"}


@contextmanager
def progress() -> Iterator[Callable[[str, int, int], None] | None]:
    """A bar on a terminal, nothing in a pipe."""
    if not sys.stderr.isatty():
        yield None
        return
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task("model", total=None)

        def update(name: str, done: int, total: int) -> None:
            bar.update(task, description=name, completed=done, total=total)

        yield update


def print_report(report: Report) -> None:
    """Each statement with its verdict, what it assumes and predicts, and what was seen."""
    console = display.output()
    console.print(Text(f"\n{title(report)}", style="bold"))
    for note in report.notes:
        console.print(Text(f"• {note}"))
    table = Table(box=None, padding=(0, 1), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for finding in report.findings:
        verdict = Text(finding.verdict, style=STYLES[finding.verdict])
        table.add_row()
        table.add_row(verdict, Text(finding.statement, style="bold"))
        for label in ("assumption", "prediction", "observation"):
            if said := getattr(finding, label):
                table.add_row(Text(label, style="dim"), Text(said))
    console.print(table)
    counted: Counter[str] = Counter(finding.verdict for finding in report.findings)
    console.print("\n" + ", ".join(f"{n} × {v}" for v in STYLES if (n := counted[v])))


def print_states(reports: Sequence[Report]) -> None:
    """Statements down, steps of a run across."""
    console = display.output()
    console.print(Text(f"\n{reports[0].model}", style="bold"))
    table = Table(box=None, padding=(0, 1), header_style="dim")
    table.add_column("statement", overflow="fold")
    for report in reports:
        table.add_column(str(report.step), justify="right", no_wrap=True)
    verdicts = [{f.statement: f.verdict for f in report.findings} for report in reports]
    for statement in dict.fromkeys(name for some in verdicts for name in some):
        shown = [some.get(statement, "not tested") for some in verdicts]
        table.add_row(statement, *(Text(MARKS[v], style=STYLES[v]) for v in shown))
    console.print(table)
    console.print(Text(", ".join(f"{MARKS[v]} {v}" for v in STYLES), style="dim"))
