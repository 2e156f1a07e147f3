"""The list of all columns of a score table, from the records that declare them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wqk.tables.columns import COLUMNS, LOGIT_COLUMNS, MEASURES, UPDATE_COLUMNS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from wqk.tables.columns import Column


def sections() -> Iterator[tuple[str, tuple[Column, ...]]]:
    """The columns, by what adds them."""
    yield "every table", COLUMNS
    for measure in MEASURES:
        asked = f"`wqk scan --{measure.name}`" if measure.help else f"`measures=[{measure.name!r}]`"
        yield asked, measure.columns
    yield "`wqk diff --terms`, and a monitor's updates", UPDATE_COLUMNS
    yield "[a monitor of logits](attention-logits.md)", LOGIT_COLUMNS


def write(path: Path) -> None:
    """Write the list into a file that the page includes."""
    lines = ["| in | column | type | what it is |", "|:--|:--|:--|:--|"]
    for where, columns in sections():
        for number, column in enumerate(columns):
            meaning = column.meaning.replace("|", "\\|")
            cells = (
                where if number == 0 else "",
                f"`{column.name}`",
                column.type.__name__,
                meaning,
            )
            lines.append(f"| {' | '.join(cells)} |")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
