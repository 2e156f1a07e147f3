"""One style for all figures: colour-blind safe, small, vector first."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wqk.errors import WqkError

if TYPE_CHECKING:
    from collections.abc import Iterator

# Okabe and Ito's colours; encoders and decoders keep theirs in every figure.
BLUE, ORANGE, GREEN, PURPLE, GREY = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#767676"

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
    WqkError
        matplotlib is not installed.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise WqkError("figures need matplotlib: pip install 'wqk[report]'") from None
    with mpl.rc_context(RULES):
        yield
