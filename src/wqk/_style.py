"""The style of all figures: small, and safe for color-blind readers."""

from __future__ import annotations

import base64
import io
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from wqk._files import check_output, write_atomically
from wqk.errors import required_by

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Method = TypeVar("Method", bound=Callable[..., Any])

PICTURES = (".png", ".pdf", ".svg")

# Encoders and decoders have the same colors in every figure (Okabe and Ito's), and their shades.
BLUE, ORANGE, SKY, YELLOW, GRAY = "#0072B2", "#D55E00", "#56B4E9", "#E69F00", "#767676"
STACK_COLORS = {"encoder": BLUE, "decoder": ORANGE}

# Colors of all other distinctions (Tol's "muted" scheme).
WINE, TEAL, SAND, VIOLET, OLIVE = "#882255", "#44AA99", "#C6B24A", "#AA4499", "#999933"
CATEGORIES = (WINE, TEAL, SAND, VIOLET, OLIVE, GRAY)

# Purple for negative, green for positive: blue and orange are the colors of stacks.
SIGN_COLORS = "PRGn"

# Outlying rows and columns, and values expected by chance, in every figure.
OUTLIER = "#1b1f24"
CHANCE: dict[str, Any] = {
    "marker": "x",
    "color": OUTLIER,
    "linestyle": "",
    "markersize": 4.5,
    "markeredgewidth": 1.0,
}

# Width of a page of a paper, in inches.
PAPER_WIDTH = 6.8

# Pixels in a notebook per inch of a figure; files have twice as many.
DOTS = 100

SYMMETRY, DIRECTIONALITY = "symmetry", "directionality (excess)"
SCORE_LABELS = {"symmetry": SYMMETRY, "directionality_excess": DIRECTIONALITY}

STYLE_RULES: dict[str, Any] = {
    "figure.dpi": 150,
    "savefig.dpi": 300,
    "figure.constrained_layout.use": True,
    "font.size": 8,
    "axes.titlesize": 9,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 8,
    "axes.linewidth": 0.6,
    "axes.formatter.useoffset": False,
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
    """Draw in the project's style, as a context or a decorator; restores matplotlib's settings.

    Raises
    ------
    MissingPackage
        matplotlib is not installed.
    """
    with required_by("drawing", "report"):
        import matplotlib as mpl
    with mpl.rc_context(STYLE_RULES):  # type: ignore[arg-type]
        yield


def new_figure(width: float, height: float) -> Figure:
    """Create an empty figure, for drawing in `style`; the size is in inches."""
    return _displayed()(figsize=(width, height))


def current(method: Method) -> Method:
    """Make a figure pyplot's current figure, if the program uses pyplot.

    After ``table.plot()``, ``plt.savefig(path)`` and ``plt.show()`` then refer to this figure. A
    displayed figure is closed in pyplot; otherwise pyplot's backend would display the figure again.
    """

    @wraps(method)
    def drawn(*arguments: Any, **options: Any) -> Any:
        figure = method(*arguments, **options)
        pyplot = sys.modules.get("matplotlib.pyplot")
        if pyplot is not None:
            with suppress(Exception):  # a backend without a display opens no window
                pyplot.figure(FigureClass=lambda **_: figure)
        return figure

    return drawn  # type: ignore[return-value]


def close(figure: Figure) -> None:
    """Close a figure in pyplot, if pyplot has it; the figure can still be saved."""
    if pyplot := sys.modules.get("matplotlib.pyplot"):
        pyplot.close(figure)


@cache
def _displayed() -> type[Figure]:
    from matplotlib.figure import Figure

    class Picture(Figure):
        """A figure that a notebook displays, also without ``%matplotlib inline``."""

        def _repr_png_(self) -> bytes:
            return as_png(self)

        def _repr_html_(self) -> str:
            close(self)
            return as_image(self)

        def savefig(self, *arguments: Any, **options: Any) -> None:
            # Fonts and resolution are chosen when a file is written, not when a figure is drawn.
            with style():
                super().savefig(*arguments, **options)

    return Picture


def as_picture(figure: Figure, ending: str, **options: Any) -> bytes:
    """Encode a figure as the content of a file: ``png``, ``pdf`` or ``svg``."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format=ending, **options)
    return buffer.getvalue()


def as_png(figure: Figure) -> bytes:
    """Encode a figure in the resolution of a screen."""
    return as_picture(figure, "png", dpi=2 * DOTS)


def as_image(figure: Figure, alt: str = "") -> str:
    """Encode a figure as an ``img`` element: pixels for a notebook, curves if described."""
    data = as_picture(figure, "svg") if alt else as_png(figure)
    kind, text = "svg+xml" if alt else "png", base64.b64encode(data).decode()
    width = round(figure.get_figwidth() * DOTS)
    return f'<img alt="{alt}" width="{width}" src="data:image/{kind};base64,{text}">'


@style()
def written(text: str) -> Figure:
    r"""Draw lines of text as a figure, in a font with aligned columns.

    Examples
    --------
    >>> figure = written("one line\nor more\n" * 9)
    >>> extent = figure.texts[0].get_window_extent()
    >>> bool(extent.width < figure.bbox.width and extent.height < figure.bbox.height)
    True
    """
    lines = text.splitlines() or [""]
    figure = new_figure(0.2 + 0.068 * max(map(len, lines)), 0.2 + 0.16 * len(lines))
    figure.text(
        0.1 / figure.get_figwidth(),
        1 - 0.1 / figure.get_figheight(),
        text,
        va="top",
        family="monospace",
        fontsize=8,
        linespacing=1.2,
        parse_math=False,
    )
    return figure


def check_picture(path: Path) -> None:
    """Raise an error if no figure can be written to a path, or matplotlib is missing."""
    check_output(path, "a picture", PICTURES)
    with required_by("drawing", "report"):
        import matplotlib as _  # noqa: F401


def save_figure(figure: Figure, path: Path) -> None:
    """Write a figure as .png, .pdf or .svg, atomically.

    Raises
    ------
    OutputError
        The ending is unsupported, or the file cannot be written.
    """
    check_picture(path)
    write_atomically(path, as_picture(figure, path.suffix[1:]))
