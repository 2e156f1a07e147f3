"""One style for all figures: colour-blind safe, small, vector first."""

from __future__ import annotations

import io
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wqk.errors import MissingPackage, TableError
from wqk.files import write_whole

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".pdf", ".svg")

# Okabe and Ito's colours; encoders and decoders keep theirs in every figure.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"
SKY, YELLOW = "#56B4E9", "#E69F00"
COLOURS = {"encoder": BLUE, "decoder": ORANGE}

# Widths of a column and of a page of a paper, in inches.
COLUMN, PAGE = 3.3, 6.8

SYMMETRY, DIRECTIONALITY = "symmetry", "directionality (excess)"
LABELS = {"symmetry": SYMMETRY, "directionality_excess": DIRECTIONALITY}

RULES: dict[str, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "legend.fontsize": 7,
    "legend.frameon": False,
    "lines.linewidth": 1.4,
    "lines.markersize": 4,
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
}


@contextmanager
def style() -> Iterator[None]:
    """Draw in the project's style, and leave matplotlib as it was.

    Raises
    ------
    MissingPackage
        matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise MissingPackage("figures need matplotlib: pip install 'wqk[report]'") from None
    with mpl.rc_context(RULES):  # type: ignore[arg-type]
        yield


def new_figure(width: float, height: float) -> Figure:
    """An empty figure, of a size in inches; to be filled inside `style`."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height))


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png, .pdf or .svg; whole or not at all.

    Raises
    ------
    TableError
        The ending is none of these, or the file cannot be written.
    """
    if path.suffix not in PICTURES:
        raise TableError(
            f"{path}: a picture is saved as {', '.join(PICTURES)}; got {path.suffix!r}"
        )
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix[1:])
    write_whole(path, buffer.getvalue())


def shades(colour: str, count: int) -> list[tuple[float, float, float]]:
    """A colour from light to dark, in so many steps.

    Examples
    --------
    >>> [round(sum(shade), 2) for shade in shades(BLUE, 3)]
    [2.07, 1.15, 0.46]
    """
    from matplotlib.colors import to_rgb

    def shade(place: float) -> tuple[float, float, float]:
        # Half way to white at the light end, three fifths of the way to black at the dark one.
        towards, share = (1.0, 0.5 - place) if place < 0.5 else (0.0, 1.2 * (place - 0.5))
        red, green, blue = (c + (towards - c) * share for c in to_rgb(colour))
        return red, green, blue

    return [shade(0.5 if count == 1 else index / (count - 1)) for index in range(count)]


def letter(axis: Axes, text: str) -> None:
    """Name a panel, left of its top."""
    axis.annotate(
        text,
        (0, 1),
        xytext=(-26, 8),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=10,
        fontweight="bold",
    )


def heading(axis: Axes, text: str) -> None:
    """Name a row of panels, above the title of its first."""
    axis.annotate(
        text,
        (0, 1),
        xytext=(-26, 17),
        xycoords="axes fraction",
        textcoords="offset points",
        fontsize=9,
        fontweight="bold",
    )


def label_ends(axis: Axes, ends: Sequence[tuple[float, str, Any]], gap: float = 0.085) -> None:
    """Write the names of curves right of where they end, in their colours, without overlaps.

    Parameters
    ----------
    axis
        Its limits have to stand.
    ends
        For every curve its last value, its name and its colour.
    gap
        Least distance between two names, as a share of the axis' height.
    """
    low, high = axis.get_ylim()
    ordered = sorted(ends, key=lambda end: end[0])
    heights = spread_apart([(value - low) / (high - low) for value, _, _ in ordered], gap)
    for height, (_, name, colour) in zip(heights, ordered, strict=True):
        axis.text(
            1.02, height, name, color=colour, fontsize=7, va="center", transform=axis.transAxes
        )


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights in [0, 1], moved as little as it takes for none to be closer than ``gap``.

    Examples
    --------
    >>> spread_apart([0.1, 0.5, 0.5], 0.25)
    [0.1, 0.375, 0.625]
    """
    # Clusters of names that touch: the sum of where they would be, less their places within.
    clusters: list[tuple[float, int]] = []
    for height in heights:
        total, count = height, 1
        while clusters and total / count - gap * (count - 1) / 2 < (
            clusters[-1][0] / clusters[-1][1] + gap * (clusters[-1][1] - 1) / 2 + gap
        ):
            before = clusters.pop()
            total, count = total + before[0], count + before[1]
        clusters.append((total, count))
    return [
        total / count + gap * (index - (count - 1) / 2)
        for total, count in clusters
        for index in range(count)
    ]
