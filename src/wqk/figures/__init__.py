"""Figures from score tables, runs and matrices; they open no checkpoint (extra ``report``)."""

from wqk._style import save_figure, style
from wqk.figures.bands import rotary_planes
from wqk.figures.catalog import FIGURES, draw, numbers
from wqk.figures.distances import distance_curves
from wqk.figures.heads import coupling
from wqk.figures.matrix import draw_entries, matrix
from wqk.figures.results import table_text
from wqk.figures.sources import Sources, read_sources

__all__ = [
    "FIGURES",
    "Sources",
    "coupling",
    "distance_curves",
    "draw",
    "draw_entries",
    "matrix",
    "numbers",
    "read_sources",
    "rotary_planes",
    "save_figure",
    "style",
    "table_text",
]
