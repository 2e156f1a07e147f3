"""Scores as functions of the relative distance, which rotary positions make them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from wqk.figures.style import BLUE, GREY, new_figure, style

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

PANELS = {"symmetry": "symmetry", "directionality_excess": "directionality (excess)"}


def distance_curves(values: Mapping[str, Any], title: str) -> Figure:
    """One layer's scores over the distance: the layer bold, its heads thin.

    Parameters
    ----------
    values
        ``distance``, and for each score a list over distances, and under ``heads`` the same for
        every head: what `wqk.views.distance_view` gives.
    title
        What is shown.
    """
    with style():
        figure = new_figure(5.2, 2.4)
        axes = figure.subplots(1, len(PANELS))
        for axis, (score, label) in zip(axes, PANELS.items(), strict=True):
            axis.plot(values["distance"], values["heads"][score], color=GREY, linewidth=0.5)
            axis.plot(values["distance"], values[score], color=BLUE, label="layer")
            axis.axhline(0, color="black", linewidth=0.4, zorder=0)
            axis.set(title=label, xlabel="distance i − j (tokens)", ylim=(-1.02, 1.02))
        axes[0].plot([], [], color=GREY, linewidth=0.5, label="heads")
        axes[0].legend(loc="upper right")
        figure.suptitle(title, fontsize=8)
    return figure
