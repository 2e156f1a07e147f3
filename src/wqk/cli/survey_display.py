"""What a survey shows: its progress, then results, failures and duplicates."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from wqk.attention.rendering import size
from wqk.cli import display

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from wqk.scanning.surveys import SurveyProgress
    from wqk.scanning.tables import ScoreTable

# Failures and groups of duplicates that are printed; the manifest has all of them.
MOST_LINES = 20


@contextmanager
def progress() -> Iterator[Callable[[SurveyProgress], None] | None]:
    """The bar of a survey: checkpoints, their rate, and failures."""
    with display.bar("survey") as update:

        def show(done: SurveyProgress) -> None:
            assert update is not None
            over = done.done + done.failed
            text = f"{over}/{done.jobs} checkpoints{rate(done)}"
            update(total=done.jobs, completed=over, text=text)

        yield update and show


def rate(done: SurveyProgress) -> str:
    """Rates and failures, in a line.

    Examples
    --------
    >>> from wqk.scanning.surveys import SurveyProgress
    >>> rate(SurveyProgress(jobs=20, done=9, failed=1, now=4, bytes_read=8_000_000, seconds=2.0))
    ', 2/s, 4 MB/s, 1 failed'
    """
    seconds = max(done.seconds, 1e-9)
    speed = f", {done.now / seconds:.3g}/s, {size(done.bytes_read / seconds)}/s" if done.now else ""
    return speed + (f", {done.failed} failed" if done.failed else "")


def print_survey(table: ScoreTable, out: Path, as_json: bool) -> int:
    """The survey's result; returns the number of checkpoints that failed."""
    failed, duplicates = table.metadata["failed"], table.metadata["duplicates"]
    if as_json:
        display.print_json(table)
    elif len(table):
        display.print_overview(table)
    lines = [f"same queries and keys: {' = '.join(group)}" for group in duplicates]
    _say_some(lines, "groups of duplicates")
    lines = []
    for line in failed:
        title = line["checkpoint"] + (f" @ {line['revision']}" if line["revision"] else "")
        # Most reasons begin with the checkpoint's name.
        lines.append(f"failed: {title}: {line['reason'].removeprefix(line['checkpoint'] + ': ')}")
    _say_some(lines, "failures")
    done = table.frame.select("checkpoint", "revision").unique().height
    display.say(
        f"{out / 'scores.parquet'}: {len(table)} rows of {done} checkpoints"
        + (f"; {len(failed)} failed, --retry tries them again" if failed else "")
    )
    return len(failed)


def _say_some(lines: list[str], what: str) -> None:
    for line in lines[:MOST_LINES]:
        display.say(line)
    if len(lines) > MOST_LINES:
        display.say(f"and {len(lines) - MOST_LINES} more {what}, in manifest.jsonl")
