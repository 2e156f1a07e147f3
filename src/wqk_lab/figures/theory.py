"""Tails of updates by layer: the heavier side, and changes that remove the difference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._style import GRAY, SAND, TEAL, VIOLET, WINE, new_figure, style
from wqk.errors import TheoryError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# A line for the updates as they are, and one for each change.
LOOKS: dict[str, dict[str, Any]] = {
    "as it is": {"color": "black", "linewidth": 1.8},
    "centered": {"color": SAND},
    "isotropic": {"color": TEAL},
    "rotated": {"color": GRAY},
    "random signs": {"color": VIOLET},
    "shuffled": {"color": WINE, "linestyle": "--"},
    "reversed": {"color": SAND, "linestyle": ":"},
}


@style()
def tails(numbers: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw ln(Var‖column‖ / Var‖row‖) of updates over layers, unchanged and with one change.

    The numbers are from `wqk_lab.theory.causes.curves`. Raises `TheoryError` without numbers, if
    the statement could not be tested.
    """
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    if not numbers:
        raise TheoryError(f"{title}: no updates to draw; the findings give the reason")
    figure = new_figure(4.6, 2.8)
    axis = figure.subplots()
    rows = pl.DataFrame(numbers)
    labels = rows["layer"].unique(maintain_order=True).to_list()
    for change, look in LOOKS.items():
        curve = rows.filter(change=change)
        if curve.is_empty():
            continue
        layers = [labels.index(label) for label in curve["layer"]]
        ratios = curve["log_variance_ratio"]
        axis.plot(layers, ratios, label=change, marker=".", **look)
        if change == "as it is":
            half_interval = curve["log_variance_ratio_error"]
            axis.fill_between(
                layers,
                ratios - half_interval,
                ratios + half_interval,
                color="black",
                alpha=0.12,
                linewidth=0,
            )
    axis.axhline(0, color="black", linewidth=0.4, zorder=0)
    axis.set(title=title, xlabel="layer", ylabel="ln(Var‖column‖ / Var‖row‖)")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    names = dict(enumerate(labels))
    axis.xaxis.set_major_formatter(FuncFormatter(lambda place, _: names.get(place, "")))
    axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
