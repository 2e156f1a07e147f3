"""A score in [-1, 1] as a bar from the middle of its column; wider on wider terminals."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rich.measure import Measurement
from rich.text import Text

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# Legible on white and on black. Blue and orange are for encoders and decoders.
POSITIVE, NEGATIVE = "spring_green4", "medium_orchid3"

# Middle, whole cell, and the half cell of either side; then for terminals without Unicode.
BLOCKS = ("│", "█", "▌", "▐")
ASCII = ("|", "#", "#", "#")


@dataclass
class Bar:
    """A bar to the right for positive, to the left for negative scores; ±1 fills its half."""

    value: float | None  # the score; nothing is drawn without one
    cells: int = 6  # width of each half

    MOST: ClassVar[int] = 20

    @property
    def width(self) -> int:
        """Cells of both halves and the middle."""
        return 2 * self.cells + 1

    def __str__(self) -> str:
        return bar(self.value, self.cells).plain

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self.value, self.cells, options.ascii_only)


def bar(value: float | None, cells: int = 6, ascii_only: bool = False) -> Text:
    """The bar of a score, with this many cells on each side of the middle.

    Examples
    --------
    >>> bar(0.75).plain, bar(-0.25).plain, bar(-0.25, 4, ascii_only=True).plain
    ('      │████▌ ', '    ▐█│      ', '   #|    ')
    """
    if value is None or value != value:
        return Text(" " * (2 * cells + 1))
    middle, whole, left_half, right_half = ASCII if ascii_only else BLOCKS
    count, half = divmod(min(2 * cells, round(abs(value) * 2 * cells)), 2)
    if value >= 0:
        right = (whole * count + left_half * half).ljust(cells)
        return Text.assemble(" " * cells, (middle, "dim"), (right, POSITIVE))
    left = (right_half * half + whole * count).rjust(cells)
    return Text.assemble((left, NEGATIVE), (middle, "dim"), " " * cells)
