"""The paper's figures, from score tables, runs and published numbers (extra ``report``)."""

from wqk._style import save_figure, style
from wqk_lab.figures.catalog import FIGURES, draw, numbers
from wqk_lab.figures.results import table_text
from wqk_lab.figures.sources import Sources, read_sources

__all__ = [
    "FIGURES",
    "Sources",
    "draw",
    "numbers",
    "read_sources",
    "save_figure",
    "style",
    "table_text",
]
