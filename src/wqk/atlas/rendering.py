"""Small tables of text, with footnote marks, as Markdown and as LaTeX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from wqk.scanning.formats import LATEX_ESCAPES

LATEX = LATEX_ESCAPES | str.maketrans({"±": r"$\pm$", "−": "$-$"})


@dataclass(frozen=True)
class Cell:
    """Text, and the letters of its footnotes."""

    text: str
    marks: str = ""


@dataclass(frozen=True)
class Sheet:
    """A table before it has a format.

    Attributes
    ----------
    caption
        One sentence.
    header, alignment
        For every column its heading, and ``l`` or ``r``.
    rows
        The cells; a row of one cell is a heading across all columns.
    notes
        What each footnote's letter stands for.
    """

    caption: str
    header: Sequence[str]
    alignment: str
    rows: Sequence[Sequence[Cell]]
    notes: Mapping[str, str]


def markdown(sheet: Sheet) -> str:
    """A pipe table between its caption and its footnotes."""

    def line(cells: Sequence[Cell]) -> str:
        texts = [cell.text.replace("|", r"\|") + _marks(cell, "<sup>{}</sup>") for cell in cells]
        if len(texts) < len(sheet.header):
            texts = [f"**{texts[0]}**", *[""] * (len(sheet.header) - 1)]
        return "| " + " | ".join(texts) + " |"

    rules = [Cell({"l": ":--", "r": "--:"}[side]) for side in sheet.alignment]
    lines = [line(cells) for cells in ([Cell(text) for text in sheet.header], rules, *sheet.rows)]
    notes = [f"<sup>{mark}</sup> {text}" for mark, text in sheet.notes.items()]
    return "\n\n".join([sheet.caption, "\n".join(lines), *notes]) + "\n"


def latex(sheet: Sheet) -> str:
    """A booktabs tabular, and its footnotes as paragraphs below it."""

    def line(cells: Sequence[Cell]) -> str:
        texts = [
            cell.text.translate(LATEX) + _marks(cell, r"\textsuperscript{{{}}}") for cell in cells
        ]
        if len(texts) < len(sheet.header):
            texts = [rf"\multicolumn{{{len(sheet.header)}}}{{l}}{{\textbf{{{texts[0]}}}}}"]
        return "  " + " & ".join(texts) + r" \\"

    notes = [
        rf"{{\footnotesize\textsuperscript{{{mark}}} {text.translate(LATEX)}\par}}"
        for mark, text in sheet.notes.items()
    ]
    return (
        "\n".join(
            [
                f"% {sheet.caption}",
                r"% needs \usepackage{booktabs,amsmath}",
                rf"\begin{{tabular}}{{{sheet.alignment}}}",
                r"  \toprule",
                line([Cell(text) for text in sheet.header]),
                r"  \midrule",
                *map(line, sheet.rows),
                r"  \bottomrule",
                r"\end{tabular}",
                *([r"\par\smallskip"] if notes else []),
                *notes,
            ]
        )
        + "\n"
    )


def _marks(cell: Cell, form: str) -> str:
    return form.format(",".join(cell.marks)) if cell.marks else ""
