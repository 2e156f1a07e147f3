"""Small tables of text, with footnote marks, as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wqk.tables.formats import LATEX_ESCAPES

LATEX = LATEX_ESCAPES | str.maketrans({"±": r"$\pm$", "−": "$-$"})


class Cell(NamedTuple):
    """Text, and the letters of its footnotes."""

    text: str
    marks: str = ""


class TextTable(NamedTuple):
    """A table before it has a format; a row of one cell is a heading across all columns."""

    caption: str
    header: Sequence[str]
    alignment: str  # l or r for every column
    rows: Sequence[Sequence[Cell]]
    notes: Mapping[str, str]  # by letter


def markdown(table: TextTable) -> str:
    """A pipe table between its caption and its footnotes."""
    lines = [list(table.header), [{"l": ":--", "r": "--:"}[side] for side in table.alignment]]
    for row in table.rows:
        texts = [
            text.replace("|", r"\|") + (f"<sup>{','.join(marks)}</sup>" if marks else "")
            for text, marks in row
        ]
        if len(row) < len(table.header):
            texts = [f"**{texts[0]}**", *[""] * (len(table.header) - 1)]
        lines.append(texts)
    grid = "\n".join(f"| {' | '.join(texts)} |" for texts in lines)
    notes = [f"<sup>{mark}</sup> {text}" for mark, text in table.notes.items()]
    return "\n\n".join([table.caption, grid, *notes]) + "\n"


def latex(table: TextTable) -> str:
    """A booktabs tabular, and its footnotes as paragraphs below it."""
    body = []
    for row in table.rows:
        texts = [
            text.translate(LATEX) + (rf"\textsuperscript{{{','.join(marks)}}}" if marks else "")
            for text, marks in row
        ]
        if len(row) < len(table.header):
            texts = [rf"\multicolumn{{{len(table.header)}}}{{l}}{{\textbf{{{texts[0]}}}}}"]
        body.append(f"  {' & '.join(texts)} \\\\")
    notes = [
        rf"{{\footnotesize\textsuperscript{{{mark}}} {text.translate(LATEX)}\par}}"
        for mark, text in table.notes.items()
    ]
    lines = [
        f"% {table.caption}",
        r"% needs \usepackage{booktabs,amsmath}",
        rf"\begin{{tabular}}{{{table.alignment}}}",
        r"  \toprule",
        f"  {' & '.join(name.translate(LATEX) for name in table.header)} \\\\",
        r"  \midrule",
        *body,
        r"  \bottomrule",
        r"\end{tabular}",
        *([r"\par\smallskip"] if notes else []),
        *notes,
    ]
    return "\n".join(lines) + "\n"
