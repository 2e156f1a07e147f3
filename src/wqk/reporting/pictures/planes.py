"""Rotary planes of layers or heads, and how forms change with the distance."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._style import PAGE, new_figure, style
from wqk.reporting.pictures.panels import sequence

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@style()
def rotary_planes(values: Mapping[str, Any], title: str) -> Figure:
    """Draw the values of `wqk.inspecting.views.bands_view`.

    A map of rows × planes, and norm and cosine of the forms against the distance.
    """
    rows, numbers = values["rows"], values["numbers"]
    unit, order = ("patches", ": rows, columns") if any(values["axes"]) else ("tokens", "")
    shares = np.asarray(values["shares"])
    figure = new_figure(PAGE, 2.6)
    planes, norm, cosine = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    image = planes.imshow(
        shares * shares.shape[1], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest"
    )
    figure.colorbar(image, ax=planes, label="share of $E_k$ × planes")
    at = np.unique(np.linspace(0, shares.shape[1] - 1, 5).round().astype(int))
    turns = [2 * math.pi / values["frequencies"][k] for k in at]
    planes.set_xticks(at, [f"{t:.0f}" if t < 1e4 else f"{t / 1000:.0f}k" for t in turns])
    shown = np.unique(np.linspace(0, len(numbers) - 1, 8).round().astype(int))
    planes.set_yticks(shown, [str(numbers[i]) for i in shown])
    planes.set(xlabel=f"{unit} per turn of the plane{order}", ylabel=rows, title=title)
    for axis, name, label in (
        (norm, "norm", r"$\|M(N)\| / \|M(0)\|$"),
        (cosine, "cosine", "cosine of $M(N)$ and $M(0)$"),
    ):
        for number, curve, shade in zip(numbers, values[name], sequence(len(numbers)), strict=True):
            entry = f"{rows} {number}" if number in (numbers[0], numbers[-1]) else None
            axis.plot(values["distance"], curve, color=shade, linewidth=0.8, label=entry)
        axis.set_xscale("symlog", linthresh=1)
        axis.set(xlabel=f"distance $N$ ({unit})", ylabel=label)
    norm.set_ylim(bottom=0)
    cosine.axhline(0, color="black", linewidth=0.4, zorder=0)
    norm.legend()
    return figure
