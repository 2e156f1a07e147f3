"""Figures from score tables and matrices; they open no checkpoint (extra ``report``)."""

from wqk.figures.contrast import contrast, layer_curves
from wqk.figures.distances import distance_curves
from wqk.figures.heads import coupling
from wqk.figures.matrix import draw_entries, matrix
from wqk.figures.style import save_figure, style

__all__ = [
    "contrast",
    "coupling",
    "distance_curves",
    "draw_entries",
    "layer_curves",
    "matrix",
    "save_figure",
    "style",
]
