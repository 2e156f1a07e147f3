"""A growing score table, shown in place: the medians of the last steps."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import Shown, cleaning, number
from wqk.tables.rendering import HEADLINE, label, model_statuses
from wqk.tables.sheet import Bar, Sheet

if TYPE_CHECKING:
    from rich.console import Console

    from wqk.tables.score_table import ScoreTable

# Number of shown steps, the last steps of a run.
RECENT_STEPS = 20


def last_steps(table: ScoreTable) -> ScoreTable:
    """Return the rows of the last `RECENT_STEPS` steps."""
    steps = table.frame["step"].unique().sort().tail(RECENT_STEPS)
    return table.filter(pl.col("step").is_in(steps.to_list()))


class RecentMedians(Shown):
    """The medians over layers of the last steps of a table, as a table with bars."""

    def __init__(self, table: ScoreTable) -> None:
        self.table = table

    def _shown(self, width: int) -> Iterator[Any]:
        yield f"medians over layers, the last {RECENT_STEPS} steps"
        headings: list[str] = []
        for score in HEADLINE:
            headings += [label(score), ""]  # the bar has no heading
        sheet = Sheet.of("step", "attention", *headings, text=["attention", ""])
        medians = last_steps(self.table).layers.summary().sort("step")
        for row in medians.iter_rows(named=True):
            cells: list[Any] = [str(row["step"]), f"{row['stack']} {row['kind']}"]
            for score in HEADLINE:
                median = row[f"{score}_median"]
                cells += [number(median), Bar(median)]
            sheet.add(*cells)
        yield sheet
        yield from model_statuses(last_steps(self.table))


def is_notebook() -> bool:
    """Return whether this process is the kernel of a notebook."""
    ipython = sys.modules.get("IPython")  # a kernel has imported IPython
    return ipython is not None and hasattr(ipython.get_ipython(), "kernel")


class NotebookDisplay:
    """Output of a notebook's cell; each call replaces the output by the last steps of a table.

    The output belongs to the cell of the first call; later calls from any cell replace this output.
    """

    def __init__(self) -> None:
        self._handle: Any = None  # IPython has no types

    def __call__(self, table: ScoreTable) -> None:
        """Show a table in place of the previous table."""
        import IPython

        medians = RecentMedians(table)
        formats = {"text/plain": repr(medians), "text/html": medians._repr_html_()}
        if self._handle is None:
            display: Any = IPython.display
            self._handle = display.DisplayHandle()
            self._handle.display(formats, raw=True)
        else:
            self._handle.update(formats, raw=True)


@contextmanager
def growing_table(console: Console | None = None) -> Iterator[Callable[[ScoreTable], None]]:
    """Yield a function that shows the last steps of a table, in place of the previous table.

    In a notebook the output of the cell is replaced, on a terminal the lines are redrawn. In a pipe
    every table is printed below the previous one. ``console`` is the terminal; by default standard
    output.
    """
    if console is None and is_notebook():
        yield NotebookDisplay()
        return
    from rich.console import Console
    from rich.live import Live

    console = console or cleaning(Console(highlight=False, markup=False))
    with Live(console=console, auto_refresh=False) as live:

        def show(table: ScoreTable) -> None:
            live.update(RecentMedians(table), refresh=True)

        yield show
