"""A table for display: on a terminal, on a page, in Markdown and in LaTeX."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from wqk._console import one_line

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

# Legible on white and on black. Blue and orange are for encoders and decoders.
POSITIVE, NEGATIVE = "spring_green4", "medium_orchid3"

# Middle, whole cell, and the half cell of either side; then for terminals without Unicode.
BLOCKS = ("│", "█", "▌", "▐")
ASCII = ("|", "#", "#", "#")


@dataclass
class Bar:
    """A bar for a score, to the right if positive, to the left if negative; ±1 is a full bar."""

    value: float | None  # the score; None for no bar
    cells: int = 6  # width of each half

    WIDEST: ClassVar[int] = 20

    @property
    def width(self) -> int:
        """Width in cells: both halves and the middle."""
        return 2 * self.cells + 1

    def __str__(self) -> str:
        return bar(self.value, self.cells).plain

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement(self.width, self.width)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield bar(self.value, self.cells, options.ascii_only)


def bar(value: float | None, cells: int = 6, ascii_only: bool = False) -> Text:
    """Draw the bar of a score, with ``half`` cells on each side of the middle.

    Examples
    --------
    >>> bar(0.75).plain, bar(-0.25).plain, bar(-0.25, 4, ascii_only=True).plain
    ('      │████▌ ', '    ▐█│      ', '   #|    ')
    >>> bar(float("nan"), 1).plain
    '   '
    """
    if value is None or value != value:
        return Text(" " * (2 * cells + 1))
    middle, full, left_half, right_half = ASCII if ascii_only else BLOCKS
    half_cells = min(2 * cells, round(abs(value) * 2 * cells))
    length, has_half = divmod(half_cells, 2)
    empty = " " * cells
    if value >= 0:
        end = left_half if has_half else ""
        right = (full * length + end).ljust(cells)
        return Text.assemble(empty, (middle, "dim"), (right, POSITIVE))
    end = right_half if has_half else ""
    left = (end + full * length).rjust(cells)
    return Text.assemble((left, NEGATIVE), (middle, "dim"), empty)


LATEX = str.maketrans(
    {
        **{character: f"\\{character}" for character in "_%&#${}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
        "±": r"$\pm$",
        "−": "$-$",
        "×": r"$\times$",
    }
)
MARKDOWN = str.maketrans({character: f"\\{character}" for character in "\\`*_|"}) | str.maketrans(
    {"&": "&amp;", "<": "&lt;"}
)

LINK = re.compile(r"\[(?![-+−]?\d)")

# Least width of a column of text, in cells.
NARROWEST = 14

# Between two columns, and before the first.
GAP = 2


class Cell(NamedTuple):
    """Content of one cell of a sheet.

    Attributes
    ----------
    text
        One line.
    aside
        A second, less important text: quartiles, or the value by chance.
    marks
        The letters of the cell's footnotes.
    style
        Style on a terminal, such as ``bold``, ``dim`` or a color.
    html
        HTML that replaces the text on a page.
    """

    text: str
    aside: str = ""
    marks: str = ""
    style: str = ""
    html: str = ""


@dataclass(frozen=True)
class SheetColumn:
    """A heading, and the layout of its column.

    Attributes
    ----------
    heading
        One line; may be empty.
    text
        Whether the column contains text instead of numbers; text is left-aligned and may be
        wrapped.
    latex
        Heading in LaTeX, if a formula.
    optional
        Whether the column may be left out if lines are too short. The last column goes first.
    whole
        Whether text is never wrapped, as a number is not.
    """

    heading: str
    text: bool = False
    latex: str = ""
    optional: bool = False
    whole: bool = False

    @property
    def wraps(self) -> bool:
        """Return whether the cells of the column may be wrapped."""
        return self.text and not self.whole


@dataclass
class Sheet:
    """Columns, rows, a caption and footnotes, independent of the medium.

    Attributes
    ----------
    columns
        The columns from left to right.
    rows
        The rows, each with one cell for each column. A row with a single cell is a heading across
        all columns.
    caption
        Text above the table; terminals do not show it.
    notes
        Footnotes, by letter.

    Examples
    --------
    >>> sheet = Sheet.of("task", "score", text=["task"])
    >>> sheet.add("mnli", "0.84")
    >>> print(sheet.markdown(), end="")
    | task | score |
    | :-- | --: |
    | mnli | 0.84 |
    """

    columns: list[SheetColumn]
    rows: list[list[Cell | Bar]] = field(default_factory=list)
    caption: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *headings: str, text: Collection[str] = ()) -> Sheet:
        """Return an empty sheet; the columns ``text`` contain text, the rest contain numbers."""
        return cls([SheetColumn(heading, heading in text) for heading in headings])

    def add(self, *cells: Cell | Bar | str, style: str = "") -> None:
        """Add a row; ``style`` applies to cells without a style."""
        row: list[Cell | Bar] = []
        for cell in cells:
            if isinstance(cell, str):
                cell = Cell(cell)
            if isinstance(cell, Cell):
                cell = cell._replace(text=one_line(cell.text), style=cell.style or style)
            row.append(cell)
        self.rows.append(row)

    def heading(self, text: str) -> None:
        """Add a heading across all columns."""
        self.rows.append([Cell(text)])

    # In files.

    def markdown(self) -> str:
        """Return a pipe table, with the caption above and the footnotes below."""
        places = self._worded()
        lines = [
            [_in_markdown(self.columns[place].heading) for place in places],
            [":--" if self.columns[place].text else "--:" for place in places],
        ]
        for row in self.rows:
            if self._is_heading(row):
                heading = f"**{_in_markdown(_words(row[0]))}**"
                lines.append([heading, *[""] * (len(places) - 1)])
            else:
                lines.append(
                    [_in_file(row[place], _in_markdown, "<sup>{}</sup>") for place in places]
                )
        grid = "\n".join(f"| {' | '.join(texts)} |" for texts in lines)
        notes = [f"<sup>{mark}</sup> {_in_markdown(text)}" for mark, text in self.notes.items()]
        paragraphs = [_in_markdown(self.caption), grid, *notes]
        return "\n\n".join(filter(None, paragraphs)) + "\n"

    def latex(self) -> str:
        """Return a booktabs tabular, and its footnotes as paragraphs.

        The caption becomes comments above the tabular, because a manuscript needs its own caption.
        """
        places = self._worded()
        body = []
        for row in self.rows:
            if self._is_heading(row):
                heading = _in_latex(_words(row[0]))
                texts = [rf"\multicolumn{{{len(places)}}}{{l}}{{\textbf{{{heading}}}}}"]
            else:
                texts = [
                    _in_file(row[place], _in_latex, r"\textsuperscript{{{}}}") for place in places
                ]
            body.append(f"  {' & '.join(texts)} \\\\")
        columns = [self.columns[place] for place in places]
        alignment = "".join("l" if column.text else "r" for column in columns)
        headings = [column.latex or _in_latex(column.heading) for column in columns]
        lines = [r"% needs \usepackage{booktabs,amsmath}"]
        lines += [f"% {line}" for line in self.caption.splitlines()]
        lines += [
            rf"\begin{{tabular}}{{{alignment}}}",
            r"  \toprule",
            f"  {' & '.join(headings)} \\\\",
            r"  \midrule",
            *body,
            r"  \bottomrule",
            r"\end{tabular}",
        ]
        if self.notes:
            lines.append(r"\par\smallskip")
        for mark, text in self.notes.items():
            lines.append(rf"{{\footnotesize\textsuperscript{{{mark}}} {_in_latex(text)}\par}}")
        return "\n".join(lines) + "\n"

    # On a page.

    def html(self) -> str:
        """Return a table for a notebook or a page, with headings for screen readers."""
        parts = ["<table>"]
        if self.caption:
            parts.append(f"<caption>{escape(self.caption)}</caption>")
        if any(column.heading for column in self.columns):
            header = "".join(map(_heading_in_html, self.columns))
            parts.append(f"<thead><tr>{header}</tr></thead>")
        parts.append(f"<tbody>{''.join(map(self._row_in_html, self.rows))}</tbody></table>")
        for mark, text in self.notes.items():
            parts.append(f"<p><small><sup>{escape(mark)}</sup> {escape(text)}</small></p>")
        return "".join(parts)

    def _row_in_html(self, row: list[Cell | Bar]) -> str:
        if self._is_heading(row):
            heading = _in_html(row[0])
            return f'<tr><th scope="colgroup" colspan="{len(self.columns)}">{heading}</th></tr>'
        cells = [
            f'{_alignment(column)} data-label="{escape(column.heading)}">{_in_html(cell)}'
            for column, cell in zip(self.columns, row, strict=True)
        ]
        data_cells = "".join(f"<td{cell}</td>" for cell in cells[1:])
        return f'<tr><th scope="row"{cells[0]}</th>{data_cells}</tr>'

    # On a terminal.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        places = list(range(len(self.columns)))
        if self._least(places) > options.max_width:  # before text is wrapped
            places = self._worded()
        optional = [place for place in places if self.columns[place].optional]
        while optional and self._least(places) > options.max_width:
            places.remove(optional.pop())
        # A table may become wider than the terminal; a number is never cut.
        width = max(options.max_width, self._least(places, NARROWEST))
        yield from console.render(self._grid(places, width), options.update(width=width))

    def _widths(self, place: int) -> Iterator[int]:
        yield cell_len(self.columns[place].heading)
        for row in self.rows:
            if not self._is_heading(row):
                cell = row[place]
                yield cell.width if isinstance(cell, Bar) else cell_len(_words(cell))

    def _least(self, places: Sequence[int], narrowest: int = 10**6) -> int:
        """Return the width that columns need; a column of text needs at most ``narrowest``."""
        needed = GAP * len(places)
        for place in places:
            width = max(self._widths(place))
            if self.columns[place].wraps:
                width = min(width, narrowest)
            needed += width
        return needed

    def _grid(self, places: list[int], width: int) -> Table:
        """Lay out the columns next to each other; bars use the remaining width."""
        widths = {place: max(self._widths(place), default=0) for place in places}
        bars = sum(self._has_bars(place) for place in places)
        spare = width - sum(widths.values()) - GAP * len(places)
        grid = Table(
            box=None,
            padding=(0, 1),
            header_style="dim",
            show_header=any(column.heading for column in self.columns),
        )
        for place in places:
            column = self.columns[place]
            grid.add_column(
                Text(column.heading),
                justify="left" if column.text else "right",
                overflow="fold",
                no_wrap=not column.wraps,
                min_width=min(widths[place], NARROWEST) if column.wraps else widths[place],
            )
        for row in self.rows:
            if self._is_heading(row):
                grid.add_row(Text(_words(row[0]), style="bold"))
            else:
                grid.add_row(*(_on_terminal(row[place], spare, bars) for place in places))
        return grid

    def _is_heading(self, row: list[Cell | Bar]) -> bool:
        return len(row) == 1 < len(self.columns)

    def _worded(self) -> list[int]:
        """Return the numbers of the columns in files: all columns except bars."""
        return [place for place in range(len(self.columns)) if not self._has_bars(place)]

    def _has_bars(self, place: int) -> bool:
        return any(isinstance(row[place], Bar) for row in self.rows if not self._is_heading(row))


def _words(cell: Cell | Bar) -> str:
    """Return a cell as plain text."""
    if isinstance(cell, Bar):
        return ""
    aside = f" ({cell.aside})" if cell.aside else ""
    marks = f" {' '.join(cell.marks)}" if cell.marks else ""
    return f"{cell.text}{aside}{marks}"


def _on_terminal(cell: Cell | Bar, spare: int, bars: int) -> Text | Bar:
    """Return a cell for a terminal; the bars of a line have equal shares of the spare width."""
    if isinstance(cell, Bar):
        return Bar(cell.value, min(Bar.WIDEST, cell.cells + max(0, spare) // (2 * bars)))
    suffix = _words(cell).removeprefix(cell.text)
    return Text.assemble(cell.text, (suffix, "dim"), style=cell.style)


def _in_markdown(text: str) -> str:
    """Escape HTML, emphasis and links in a text; an interval keeps its brackets."""
    return LINK.sub(r"\\[", text.translate(MARKDOWN))


def _in_latex(text: str) -> str:
    return text.translate(LATEX)


def _in_file(cell: Cell | Bar, markup: Callable[[str], str], superscript: str) -> str:
    """Return a cell for a file: the text and the letters of the footnotes."""
    if isinstance(cell, Bar):
        return ""
    marks = superscript.format(",".join(cell.marks)) if cell.marks else ""
    return markup(_words(cell._replace(marks=""))) + marks


# With letters of one width, the middles of all bars lie below each other.
BAR_STYLE = "white-space: pre; font-family: monospace"


def _in_html(cell: Cell | Bar) -> str:
    if isinstance(cell, Bar):
        return f'<span aria-hidden="true" style="{BAR_STYLE}">{escape(str(cell))}</span>'
    text = cell.html or escape(cell.text)
    marks = f"<sup>{','.join(cell.marks)}</sup>" if cell.marks else ""
    if "bold" in cell.style.split():
        text = f"<b>{text}</b>"
    if cell.aside:
        text = f"<span>{text} <small>{escape(cell.aside)}</small></span>"
    return text + marks


def _heading_in_html(column: SheetColumn) -> str:
    if not column.heading:
        return "<td></td>"
    return f'<th scope="col"{_alignment(column)}>{escape(column.heading)}</th>'


def _alignment(column: SheetColumn) -> str:
    # Browsers must not break a number at its hyphens.
    return f' style="text-align: {"left" if column.text else "right; white-space: nowrap"}"'
