"""Pictures of matrices and of score tables (extra ``report``)."""

from wqk._style import save_figure, style
from wqk.reporting.pictures.arcs import composition_arcs
from wqk.reporting.pictures.panels import coupling, distance_curves, rotary_planes

__all__ = [
    "composition_arcs",
    "coupling",
    "distance_curves",
    "rotary_planes",
    "save_figure",
    "style",
]
