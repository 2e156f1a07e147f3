"""Figures from score tables and matrices; they open no checkpoint (extra ``report``)."""

from wqk.figures.contrast import contrast, layer_curves, matrix_image
from wqk.figures.style import style

__all__ = ["contrast", "layer_curves", "matrix_image", "style"]
