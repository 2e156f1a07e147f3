"""A table that is shown: on a terminal, on a page, in Markdown and in LaTeX."""

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
    """Return the bar of a score, with this many cells on each side of the middle.

    Examples
    --------
    >>> bar(0.75).plain, bar(-0.25).plain, bar(-0.25, 4, ascii_only=True).plain
    ('      │████▌ ', '    ▐█│      ', '   #|    ')
    >>> bar(float("nan"), 1).plain
    '   '
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

# A column of text takes at least so many cells before a table is given up for a list.
NARROWEST = 14

# Between two columns, and before the first.
GAP = 2


class Cell(NamedTuple):
    """What stands in one place of a sheet.

    Attributes
    ----------
    text
        One line.
    beside
        A second, less important text: quartiles, or what chance would give.
    marks
        The letters of its footnotes.
    style
        On a terminal, such as ``bold``, ``dim`` or a color.
    html
        What a page shows instead of the text, already escaped.
    """

    text: str
    beside: str = ""
    marks: str = ""
    style: str = ""
    html: str = ""


@dataclass(frozen=True)
class Column:
    """A heading, and how its column is set.

    Attributes
    ----------
    heading
        One line; may be empty.
    text
        Whether the column has text, which is left-aligned and may be wrapped, or numbers.
    latex
        The heading in LaTeX, if it is a formula there.
    optional
        Whether the column is left out where lines are too short, the last one first.
    """

    heading: str
    text: bool = False
    latex: str = ""
    optional: bool = False


@dataclass
class Sheet:
    """Columns, rows, a caption and footnotes, in whatever form they are shown.

    Attributes
    ----------
    columns
        From left to right.
    rows
        Of as many cells as there are columns; a row of one cell is a heading across all of them.
    caption
        Above the table, except on a terminal.
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

    columns: list[Column]
    rows: list[list[Cell | Bar]] = field(default_factory=list)
    caption: str = ""
    notes: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, *headings: str, text: Collection[str] = ()) -> Sheet:
        """Return an empty sheet; the columns ``text`` hold text, the others numbers."""
        return cls([Column(heading, heading in text) for heading in headings])

    def add(self, *cells: Cell | Bar | str, style: str = "") -> None:
        """Add a row; ``style`` is that of its cells without one of their own."""
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
        """Return a pipe table between its caption and its footnotes."""
        places = self._worded()
        lines = [
            [_in_markdown(self.columns[place].heading) for place in places],
            [":--" if self.columns[place].text else "--:" for place in places],
        ]
        for row in self.rows:
            if self._is_heading(row):
                lines.append([f"**{_in_markdown(_words(row[0]))}**", *[""] * (len(places) - 1)])
            else:
                lines.append(
                    [_filed(row[place], _in_markdown, "<sup>{}</sup>") for place in places]
                )
        grid = "\n".join(f"| {' | '.join(texts)} |" for texts in lines)
        notes = [f"<sup>{mark}</sup> {_in_markdown(text)}" for mark, text in self.notes.items()]
        return "\n\n".join(filter(None, [_in_markdown(self.caption), grid, *notes])) + "\n"

    def latex(self) -> str:
        """Return a booktabs tabular below its caption, and its footnotes as paragraphs."""
        places = self._worded()
        body = []
        for row in self.rows:
            if self._is_heading(row):
                words = _words(row[0]).translate(LATEX)
                texts = [rf"\multicolumn{{{len(places)}}}{{l}}{{\textbf{{{words}}}}}"]
            else:
                texts = [
                    _filed(row[place], _in_latex, r"\textsuperscript{{{}}}") for place in places
                ]
            body.append(f"  {' & '.join(texts)} \\\\")
        columns = [self.columns[place] for place in places]
        notes = [
            rf"{{\footnotesize\textsuperscript{{{mark}}} {text.translate(LATEX)}\par}}"
            for mark, text in self.notes.items()
        ]
        lines = [
            r"% needs \usepackage{booktabs,amsmath}",
            *([rf"{{{self.caption.translate(LATEX)}\par}}"] if self.caption else []),
            rf"\begin{{tabular}}{{{''.join('l' if column.text else 'r' for column in columns)}}}",
            r"  \toprule",
            f"  {' & '.join(c.latex or c.heading.translate(LATEX) for c in columns)} \\\\",
            r"  \midrule",
            *body,
            r"  \bottomrule",
            r"\end{tabular}",
            *([r"\par\smallskip"] if notes else []),
            *notes,
        ]
        return "\n".join(lines) + "\n"

    # On a page.

    def html(self) -> str:
        """Return a table for a notebook or a page, with headings that screen readers announce."""
        header = "".join(
            f'<th scope="col"{_side(column)}>{escape(column.heading)}</th>'
            if column.heading
            else "<td></td>"
            for column in self.columns
        )
        parts = ["<table>"]
        if self.caption:
            parts.append(f"<caption>{escape(self.caption)}</caption>")
        if any(column.heading for column in self.columns):
            parts.append(f"<thead><tr>{header}</tr></thead>")
        parts.append(f"<tbody>{''.join(map(self._row_in_html, self.rows))}</tbody></table>")
        for mark, text in self.notes.items():
            parts.append(f"<p><small><sup>{escape(mark)}</sup> {escape(text)}</small></p>")
        return "".join(parts)

    def _row_in_html(self, row: list[Cell | Bar]) -> str:
        if self._is_heading(row):
            return (
                f'<tr><th scope="colgroup" colspan="{len(self.columns)}">{_paged(row[0])}</th></tr>'
            )
        cells = [
            f'{_side(column)} data-label="{escape(column.heading)}">{_paged(cell)}'
            for column, cell in zip(self.columns, row, strict=True)
        ]
        rest = "".join(f"<td{cell}</td>" for cell in cells[1:])
        return f'<tr><th scope="row"{cells[0]}</th>{rest}</tr>'

    # On a terminal.

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        places = list(range(len(self.columns)))
        if self._least(places) > options.max_width:  # before text is wrapped
            places = self._worded()
        optional = [place for place in places if self.columns[place].optional]
        while optional and self._least(places) > options.max_width:
            places.remove(optional.pop())
        # Wider than the terminal rather than with a number cut short.
        width = max(options.max_width, self._least(places, NARROWEST))
        yield from console.render(self._grid(places, width), options.update(width=width))

    def _widths(self, place: int) -> Iterator[int]:
        yield cell_len(self.columns[place].heading)
        for row in self.rows:
            if not self._is_heading(row):
                cell = row[place]
                yield cell.width if isinstance(cell, Bar) else cell_len(_words(cell))

    def _least(self, places: Sequence[int], narrowest: int = 10**6) -> int:
        """Return the cells that these columns need, of text at most ``narrowest``."""
        widths = ((max(self._widths(place)), self.columns[place].text) for place in places)
        needed = sum(min(width, narrowest) if text else width for width, text in widths)
        return needed + GAP * len(places)

    def _grid(self, places: list[int], width: int) -> Table:
        """Return the columns side by side; bars take what is left of the width."""
        widths = {place: max(self._widths(place), default=0) for place in places}
        barred = [p for p in places if any(isinstance(r[p], Bar) for r in self.rows if len(r) > 1)]
        left_over = width - sum(widths.values()) - GAP * len(places)
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
                no_wrap=not column.text,
                min_width=min(widths[place], NARROWEST) if column.text else widths[place],
            )
        for row in self.rows:
            if self._is_heading(row):
                grid.add_row(Text(_words(row[0]), style="bold"))
            else:
                grid.add_row(*(_drawn(row[place], left_over, len(barred)) for place in places))
        return grid

    def _is_heading(self, row: list[Cell | Bar]) -> bool:
        return len(row) == 1 < len(self.columns)

    def _worded(self) -> list[int]:
        """Return the columns that files show: all but those of bars."""
        return [
            place
            for place in range(len(self.columns))
            if not any(
                isinstance(row[place], Bar) for row in self.rows if not self._is_heading(row)
            )
        ]


def _words(cell: Cell | Bar) -> str:
    """Return a cell as plain text."""
    if isinstance(cell, Bar):
        return ""
    beside = f" ({cell.beside})" if cell.beside else ""
    marks = f" {' '.join(cell.marks)}" if cell.marks else ""
    return f"{cell.text}{beside}{marks}"


def _drawn(cell: Cell | Bar, left_over: int, bars: int) -> Text | Bar:
    """Return a cell as a terminal shows it."""
    if isinstance(cell, Bar):
        return Bar(cell.value, min(Bar.MOST, cell.cells + max(0, left_over) // (2 * bars)))
    rest = _words(cell).removeprefix(cell.text)
    return Text.assemble(cell.text, (rest, "dim"), style=cell.style)


def _in_markdown(text: str) -> str:
    """Text without HTML, emphasis or links; an interval keeps its brackets."""
    return LINK.sub(r"\\[", text.translate(MARKDOWN))


def _in_latex(text: str) -> str:
    return text.translate(LATEX)


def _filed(cell: Cell | Bar, markup: Callable[[str], str], superscript: str) -> str:
    """Return a cell as a file has it: its text, and the letters of its footnotes."""
    if isinstance(cell, Bar):
        return ""
    marks = superscript.format(",".join(cell.marks)) if cell.marks else ""
    return markup(_words(cell._replace(marks=""))) + marks


def _paged(cell: Cell | Bar) -> str:
    if isinstance(cell, Bar):
        return f'<span aria-hidden="true" style="white-space: pre">{escape(str(cell))}</span>'
    text = cell.html or escape(cell.text)
    marks = f"<sup>{','.join(cell.marks)}</sup>" if cell.marks else ""
    if "bold" in cell.style.split():
        text = f"<b>{text}</b>"
    if cell.beside:
        text = f"<span>{text} <small>{escape(cell.beside)}</small></span>"
    return text + marks


def _side(column: Column) -> str:
    # A number is one word, whatever hyphens it has.
    return f' style="text-align: {"left" if column.text else "right; white-space: nowrap"}"'
