"""Picture of a comparison: the distance of every head, and the causes next to the layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from wqk._console import last_part
from wqk._style import CATEGORIES, style
from wqk.errors import TableError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.sameness.comparisons import BlockComparison, Comparison
    from wqk.sameness.mismatches import Kind

# The color of heads that are the same.
SAME_COLOR = "#f3f3f1"
# Relative distances with the palest and the darkest color; others have the nearer one's color.
PALEST, DARKEST = 1e-4, 2
# Width of the bar of a layer's cause, and its distance from the heads, relative to the map's width.
BAR_WIDTH, BAR_DISTANCE = 0.025, 0.035
# Letters of a model's name in the title.
TITLE_WIDTH = 40


@style()
def plot_distances(comparison: Comparison) -> Figure:
    """Draw the distance of every head from the same head of the other model, by attention.

    Heads that are equal up to rounding are pale. A bar next to each layer has the color of the
    layer's first cause. The causes are named below.

    Raises
    ------
    TableError
        No block was compared.
    MissingPackage
        Matplotlib is not installed.
    """
    from matplotlib.colors import LogNorm
    from matplotlib.patches import Patch

    from wqk.tables.rendering import head_maps

    attentions: dict[str, list[BlockComparison]] = {}
    for block in comparison.blocks:
        attentions.setdefault(f"{block.stack} {block.kind}-attention", []).append(block)
    if not attentions:
        raise TableError("no attention block was compared, so there is nothing to draw")
    color_of = _colors(comparison)
    maps = [(title, _distances(blocks)) for title, blocks in attentions.items()]
    scale = LogNorm(PALEST, DARKEST, clip=True)
    figure = head_maps(maps, {"distance": ""}, "relative distance of a head", norm=scale)
    for axes, blocks in zip(figure.axes, attentions.values(), strict=False):
        _draw_causes(axes, blocks, color_of)
    figure.suptitle(_title(comparison), x=0.01, ha="left", fontsize=8, fontweight="bold")
    patches = [Patch(color=color, label=kind) for kind, color in color_of.items()]
    patches.append(Patch(color=SAME_COLOR, label="the same, up to rounding"))
    figure.legend(handles=patches, loc="outside lower left", ncols=2)
    return figure


def _colors(comparison: Comparison) -> dict[Kind, str]:
    """Return a color for each kind of cause; the last color stands for all further kinds."""
    kinds = dict.fromkeys(cause.mismatch.verdict for cause in comparison.causes)
    last = len(CATEGORIES) - 1
    return {kind: CATEGORIES[min(number, last)] for number, kind in enumerate(kinds)}


def _distances(blocks: Sequence[BlockComparison]) -> pl.DataFrame:
    """Return a table of the distances of heads; null for equal heads."""
    import polars as pl

    cells: list[tuple[int, int, float | None]] = []
    for block in blocks:
        for head, distance in enumerate(block.heads):
            cells.append((block.layer, head, distance if distance > 0 else None))
    schema = {"layer": pl.Int64, "head": pl.Int64, "distance": pl.Float64}
    return pl.DataFrame(cells, schema, orient="row")


def _draw_causes(
    axes: Axes, blocks: Sequence[BlockComparison], color_of: Mapping[Kind, str]
) -> None:
    """Draw a bar next to each layer, in the color of the layer's first cause."""
    axes.set_facecolor(SAME_COLOR)
    left, right = axes.get_xlim()
    width = right - left
    for block in blocks:
        if block.mismatches:
            axes.barh(
                block.layer,
                BAR_WIDTH * width,
                left=left - BAR_DISTANCE * width,
                height=1.0,
                linewidth=0,
                color=color_of[block.mismatches[0].verdict],
                clip_on=False,
            )
    axes.set_xlim(left, right)
    axes.tick_params(axis="y", length=0, pad=12)
    axes.spines[:].set_visible(False)


def _title(comparison: Comparison) -> str:
    """Return the names of both models, without folders if the last parts differ."""
    reference, candidate = comparison.reference, comparison.candidate
    if last_part(reference) != last_part(candidate):
        reference, candidate = last_part(reference), last_part(candidate)
    return f"{shorten(candidate, TITLE_WIDTH)} against {shorten(reference, TITLE_WIDTH)}"
