"""How the heads of a layer relate: the coupling of each with each other's transpose."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from wqk._typing import Array, Float
from wqk.figures.style import new_figure, style

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def coupling(matrix: Float[Array, "heads heads"], title: str) -> Figure:
    """Draw T[a, b] = tr(M_a M_b)/(‖M_a‖ ‖M_b‖), from `wqk.coupling`.

    1 (red) where two heads are each other's transpose; the diagonal holds each head's own symmetry.
    Numbers are printed in hundredths where they fit.
    """
    heads = len(matrix)
    with style():
        figure = new_figure(3.9, 3.5)
        axis = figure.subplots()
        drawn = axis.imshow(matrix, cmap="RdBu_r", vmin=-1, vmax=1, interpolation="nearest")
        step = max(1, int(np.ceil(heads / 16)))
        axis.set(title=title, xlabel="head b", ylabel="head a")
        axis.set_xticks(range(0, heads, step))
        axis.set_yticks(range(0, heads, step))
        axis.spines[:].set_visible(False)
        axis.tick_params(length=0)
        if heads <= 16:
            for (a, b), value in np.ndenumerate(matrix):
                colour = "white" if abs(value) > 0.6 else "black"
                axis.text(
                    b, a, f"{100 * value:.0f}", ha="center", va="center", fontsize=5.5, color=colour
                )
        bar = figure.colorbar(drawn, ax=axis, shrink=0.8)
        bar.outline.set_visible(False)
        bar.set_label("tr(M_a M_b) / (‖M_a‖ ‖M_b‖)", fontsize=7)
    return figure
