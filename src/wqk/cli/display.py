"""What the verbs print: tables on standard output, everything else on standard error."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from wqk._console import UNPRINTABLE, cleaning, printable
from wqk._files import finite
from wqk.atlas import place
from wqk.attention.rendering import size
from wqk.scanning.rendering import definitions, one_checkpoint, overview, scores, side_by_side
from wqk.scanning.tables import records

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from wqk.atlas import Placement
    from wqk.checkpoints import Checkpoint
    from wqk.scanning.scan import Progress as ScanProgress
    from wqk.scanning.tables import ScoreTable

# polars' own handler lets a main thread that waits for others sleep on through Ctrl-C.
if hasattr(signal, "siginterrupt"):
    signal.siginterrupt(signal.SIGINT, True)


class _Output(Console):
    """A console that leaves broken pipes to the command, and wide tables to the terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        super().print(*objects, **{"crop": False, **options})

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def output() -> Console:
    """The current standard output, without automatic highlighting of numbers."""
    return cleaning(_Output(highlight=False, markup=False))


def say(message: str) -> None:
    """One line on standard error."""
    Console(stderr=True, highlight=False, markup=False).print(
        "\n".join(map(printable, message.split("\n"))), soft_wrap=True
    )


def say_traffic(checkpoint: Checkpoint) -> None:
    """Report how much of a remote checkpoint was fetched; nothing for local ones."""
    fetched = checkpoint.bytes_fetched
    if fetched is not None:
        stored = sum(info.nbytes for info in checkpoint.tensors().values())
        rest = "" if fetched else "; all that was read was in the cache"
        say(f"{checkpoint.name}: fetched {size(fetched)} of {size(stored)}{rest}")


@contextmanager
def bar(title: str) -> Iterator[Callable[..., None] | None]:
    """A progress bar on a terminal, nothing in a pipe.

    Yields
    ------
    What updates it, with any of the keywords ``description``, ``completed``, ``total`` and
    ``text``, which stands behind the bar.
    """
    if not sys.stderr.isatty():
        yield None
        return
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[text]}")
    console = Console(stderr=True)
    with Progress(*columns, TimeRemainingColumn(), console=console, transient=True) as progress:
        task = progress.add_task(printable(title), total=None, text="")
        begun = False

        def update(**changes: Any) -> None:
            nonlocal begun
            if not begun:  # what an earlier run has done says nothing about the time that remains
                progress.reset(task, completed=changes.get("completed", 0))
                begun = True
            progress.update(task, **changes)

        yield update


@contextmanager
def scan_bar(name: str) -> Iterator[Callable[[ScanProgress], None] | None]:
    """The bar of a scan: blocks, and bytes a second."""
    with bar(name) as update:

        def show(done: ScanProgress) -> None:
            assert update is not None
            rate = f"{size(done.bytes_read / max(done.seconds, 1e-9))}/s"
            text = f"{done.blocks_done}/{done.blocks} blocks, {rate}"
            update(total=done.blocks, completed=done.blocks_done, text=text)

        yield update and show


def print_json(table: ScoreTable) -> None:
    """Metadata, summary and rows as one JSON object."""
    print_object(
        {
            "metadata": dict(table.metadata),
            "summary": records(table.summary()),
            "rows": records(table.frame),
        }
    )


def print_object(value: Mapping[str, Any]) -> None:
    """One JSON object on standard output, with null for NaN and infinity, which JSON lacks."""
    text = json.dumps(finite(value), ensure_ascii=False, indent=2, allow_nan=False)
    sys.stdout.write(UNPRINTABLE.sub(lambda match: f"\\u{ord(match[0]):04x}", text) + "\n")


def print_table(table: ScoreTable) -> None:
    """The layers of a checkpoint, its heads, and its rank among the published models."""
    console = output()
    console.print(*one_checkpoint(table, console.width), sep="\n")
    _print_placements(place(table))


def print_scores(table: ScoreTable) -> None:
    """The layers of one of several checkpoints, and its heads."""
    console = output()
    console.print(*scores(table, console.width), sep="\n")


def print_several(table: ScoreTable, last: Iterable[ScoreTable]) -> None:
    """What follows the scores of several checkpoints, once for all of them.

    Medians, the meaning of the headings, and the ranks of the last step of each run.
    """
    console = output()
    text = Text("\n".join(definitions(table, console.width)), style="dim")
    console.print(*overview(table), text, sep="\n")
    _print_placements([placement for scan in last for placement in place(scan)])


def print_overview(table: ScoreTable) -> None:
    """Medians over layers, one line for each checkpoint and kind of attention."""
    output().print(*overview(table), sep="\n")


def _print_placements(placements: Sequence[Placement]) -> None:
    names = {placement.name for placement in placements}
    for placement in placements:
        name = f" {placement.name}" if len(names) > 1 else ""
        stack = f" {placement.stack}" if len(placements) > len(names) else ""
        output().print(Text.assemble((f"atlas{name}{stack}: ", "dim"), str(placement)))


def print_side_by_side(table: ScoreTable, introduction: str, verdict: str) -> None:
    """Layers down, checkpoints across: symmetry, then directionality as published."""
    output().print(introduction, *side_by_side(table), "", verdict, sep="\n")
