"""Which side of an update has the heavier tail, layer by layer, and what changes that."""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any

from wqk._style import BLUE, GRAY, GREEN, ORANGE, PURPLE, new_figure, style
from wqk.errors import TheoryError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from matplotlib.figure import Figure

# A color for each change, and its line.
LOOKS: dict[str, dict[str, Any]] = {
    "as it is": {"color": "black", "linewidth": 1.8},
    "centered": {"color": ORANGE},
    "isotropic": {"color": GREEN},
    "rotated": {"color": GRAY},
    "random signs": {"color": PURPLE},
    "shuffled": {"color": BLUE, "linestyle": "--"},
    "reversed": {"color": ORANGE, "linestyle": ":"},
}


def tails(numbers: Sequence[Mapping[str, Any]], title: str) -> Figure:
    """Draw ln(Var‖column‖ / Var‖row‖) of updates over layers, as they are and with one change.

    Parameters
    ----------
    numbers
        Rows with ``change``, ``layer``, ``log_variance_ratio`` and ``log_variance_ratio_error``:
        the numbers of the finding on Theorem S1.12's causes.
    title
        What is shown.

    Raises
    ------
    TheoryError
        There are no numbers: the statement could not be tested.
    """
    if not numbers:
        raise TheoryError(f"{title}: no updates to draw; the findings give the reason")
    with style():
        from matplotlib.ticker import MaxNLocator

        figure = new_figure(4.6, 2.8)
        axis = figure.subplots()
        for change, rows in groupby(
            sorted(numbers, key=lambda row: (list(LOOKS).index(row["change"]), row["layer"])),
            key=lambda row: row["change"],
        ):
            some = list(rows)
            layers = [row["layer"] for row in some]
            ratios = [row["log_variance_ratio"] for row in some]
            axis.plot(layers, ratios, label=change, marker=".", **LOOKS[change])
            if change == "as it is":
                errors = [row["log_variance_ratio_error"] for row in some]
                low, high = (
                    [r + sign * e for r, e in zip(ratios, errors, strict=True)] for sign in (-1, 1)
                )
                axis.fill_between(layers, low, high, color="black", alpha=0.12, linewidth=0)
        axis.axhline(0, color="black", linewidth=0.4, zorder=0)
        axis.set(title=title, xlabel="layer", ylabel="ln(Var‖column‖ / Var‖row‖)")
        axis.xaxis.set_major_locator(MaxNLocator(integer=True))
        axis.legend(loc="center left", bbox_to_anchor=(1, 0.5))
    return figure
