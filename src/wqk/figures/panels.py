"""Parts of panels that several figures share: curves in bands, their names, shades, letters."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._style import GRAY

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import FigureBase
    from matplotlib.text import Annotation

    Color = str | tuple[float, float, float]
    # Where a curve ends, its name and its color.
    End = tuple[float, str, Color]

# Names at the ends of curves are in this size; more layers than this are not all named.
SMALL = 7
NAMED_LAYERS = 12


def draw_curve(axis: Axes, curve: pl.DataFrame, band: tuple[str, str], **look: Any) -> None:
    """One line over the steps, in the middle of a band; a lone point is marked."""
    axis.plot(curve["step"], curve["value"], marker="o" if curve.height == 1 else "", **look)
    low, high = (curve[name] for name in band)
    axis.fill_between(curve["step"], low, high, color=look["color"], alpha=0.15, linewidth=0)
    axis.margins(x=0)
    axis.locator_params(axis="x", nbins=4, integer=True, min_n_ticks=1)


def draw_layers(axis: Axes, curves: pl.DataFrame, color: str, **look: Any) -> list[End]:
    """A curve for each layer, light to dark, with the range over seeds as a band."""
    layers = curves.drop_nulls("layer").partition_by("layer", maintain_order=True)
    drawn = list(zip(layers, shades(color, len(layers)), strict=True))
    for curve, shade in drawn:
        draw_curve(axis, curve, ("low", "high"), color=shade, **look)
    every = -(-len(layers) // NAMED_LAYERS) or 1
    return [(curve["value"][-1], str(curve["layer"][0]), shade) for curve, shade in drawn[::every]]


def finish_row(
    axes: Sequence[Axes], label: str, ends: Iterable[Sequence[End]] = (), zero: bool = True
) -> None:
    """Label the shared axis and the curves once all limits are final; draw zero."""
    axes[0].set_ylabel(label)
    if zero:
        for axis in axes:
            axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
    for axis, some in zip(axes, ends, strict=False):
        axis.set_ylim(axes[0].get_ylim())
        label_ends(axis, some)


def label_steps(axes: Iterable[Axes], name: str = "training step") -> None:
    """Name the axis of steps, with thousands as k."""
    from matplotlib.ticker import EngFormatter

    for axis in axes:
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
        axis.set_xlabel(name)


def shades(color: str, count: int) -> list[tuple[float, float, float]]:
    """Colors from light to dark, in this many steps.

    Examples
    --------
    >>> from wqk._style import BLUE
    >>> [round(sum(shade), 2) for shade in shades(BLUE, 3)]
    [2.07, 1.15, 0.46]
    """
    from matplotlib.colors import to_rgb

    def shade(share: float) -> tuple[float, float, float]:
        # Half way to white at the light end, three fifths of the way to black at the dark one.
        toward, share = (1.0, 0.5 - share) if share < 0.5 else (0.0, 1.2 * (share - 0.5))
        red, green, blue = (c + (toward - c) * share for c in to_rgb(color))
        return red, green, blue

    return [shade(0.5 if count == 1 else index / (count - 1)) for index in range(count)]


def sequence(count: int) -> list[tuple[float, float, float]]:
    """Colors of an ordered series, from dark violet to light green, that can be told apart.

    Examples
    --------
    >>> [round(float(sum(color)), 2) for color in sequence(3)]
    [0.6, 1.21, 1.69]
    """
    from matplotlib import colormaps

    scale = colormaps["viridis"]
    return [scale(0.85 * (i / (count - 1) if count > 1 else 0.5))[:3] for i in range(count)]


def note(figure: FigureBase, text: str) -> None:
    """Explain bands and numbers below the panels."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=6, color=GRAY)


def letter(axis: Axes, text: str) -> None:
    """Name a panel, left of its top."""
    _above(axis, text, (-26.0, 8.0), 10.0)


def heading(axis: Axes, text: str) -> None:
    """Name a row of panels, in the first line of its first panel's title, which is left empty."""
    _above(axis, text, (0.0, 16.0), 8.5).set_in_layout(False)


def _above(axis: Axes, text: str, offset: tuple[float, float], size: float) -> Annotation:
    return axis.annotate(
        text,
        (0, 1),
        xytext=offset,
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=size,
        fontweight="bold",
    )


def label_ends(axis: Axes, ends: Sequence[tuple[float, str, Any]], gap: float = 0.085) -> None:
    """Write the names of curves right of where they end, in their colors, without overlaps.

    Parameters
    ----------
    axis
        Its limits must be final.
    ends
        For every curve its last value, its name and its color.
    gap
        Minimum distance between two names, as a fraction of the axis height.
    """
    low, high = axis.get_ylim()
    ordered = sorted(ends, key=lambda end: end[0])
    heights = spread_apart([(value - low) / (high - low) for value, _, _ in ordered], gap)
    for height, (_, name, color) in zip(heights, ordered, strict=True):
        axis.text(
            1.02, height, name, color=color, fontsize=SMALL, va="center", transform=axis.transAxes
        )


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights, moved until none are closer than ``gap``, within [0, 1] if there is room.

    Examples
    --------
    >>> spread_apart([0.1, 0.5, 0.5], 0.25)
    [0.1, 0.375, 0.625]
    """
    # Names that touch form a cluster, kept as the sum and the number of where they would be.
    clusters: list[tuple[float, int]] = []

    def middle(total: float, count: int) -> float:
        half = min(gap * (count - 1) / 2, 0.5)
        return min(max(total / count, half), 1 - half)

    for height in heights:
        total, count = height, 1
        while clusters:
            before = clusters[-1]
            apart = gap * (count + before[1]) / 2
            if middle(total, count) - middle(*before) >= apart:
                break
            total, count = total + before[0], count + before[1]
            clusters.pop()
        clusters.append((total, count))
    return [
        middle(total, count) + gap * (index - (count - 1) / 2)
        for total, count in clusters
        for index in range(count)
    ]


# Where a label may stand beside its point, in points, in the order of preference.
SPOTS = tuple(
    (x, y, side) for y in (3, -8, 9, -14, 15, -20) for x, side in ((5, "left"), (-5, "right"))
)


def separate_labels(axis: Axes, labels: Iterable[Annotation]) -> None:
    """Move the labels of points to where they cover no mark, no edge and no other label.

    Call it when everything else is drawn: the layout decides where points are. Where no spot is
    free, covering a mark is better than covering another label or an edge.
    """
    from matplotlib.transforms import Bbox

    axis.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    points = [xy[0] for line in axis.lines if len(xy := np.asarray(line.get_xydata())) == 1]
    marks = [Bbox([xy - 3, xy + 3]) for xy in axis.transData.transform(points)]
    placed: list[Bbox] = []
    for label in labels:
        boxes = []
        for x, y, side in SPOTS:
            label.set(position=(x, y), horizontalalignment=side)
            boxes.append(label.get_window_extent())
        crowds = [
            sum(box.overlaps(mark) for mark in marks)
            + 9 * sum(box.overlaps(other) for other in placed)
            + 9 * any(inner < 2 for inner in (*(box.p0 - axis.bbox.p0), *(axis.bbox.p1 - box.p1)))
            for box in boxes
        ]
        best = crowds.index(min(crowds))
        x, y, side = SPOTS[best]
        label.set(position=(x, y), horizontalalignment=side)
        placed.append(boxes[best])
