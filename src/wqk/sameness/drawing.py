"""Picture of a comparison: the distance of every head, and the causes next to the layers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import TYPE_CHECKING

from wqk._console import last_part, spans
from wqk._style import CATEGORIES, style
from wqk.errors import TableError

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    from wqk.sameness.comparisons import BlockComparison, Comparison
    from wqk.sameness.mismatches import Kind

# The color of heads that are the same.
SAME_COLOR = "#f3f3f1"
# Quotients of the distances with the darkest and the palest color: at least, so that nearly equal
# distances have nearly equal colors; without a logarithm, at most; and at most.
LEAST_RANGE, LINEAR_RANGE, LARGEST_RANGE = 4, 12, 1e4
# Width of the bar of a layer's cause, and its distance from the heads, relative to the map's width.
BAR_WIDTH, BAR_DISTANCE = 0.025, 0.035
# Letters of a model's name in the title.
TITLE_WIDTH = 40


@style()
def plot_distances(comparison: Comparison) -> Figure:
    """Draw the distance of every head from the same head of the other model, by attention.

    Heads that are equal up to rounding are pale. The colors reach to the largest distance; in small
    maps, numbers are the distances. A bar next to each layer has the color of the
    layer's first cause. The causes are named below.

    Raises
    ------
    TableError
        No block was compared.
    MissingPackage
        Matplotlib is not installed.
    """
    from matplotlib.patches import Patch

    from wqk.tables.rendering import head_maps

    attentions: dict[str, list[BlockComparison]] = {}
    for block in comparison.blocks:
        attentions.setdefault(f"{block.stack} {block.kind}-attention", []).append(block)
    if not attentions:
        raise TableError("no attention block was compared, so there is nothing to draw")
    color_of = _colors(comparison)
    maps = [(title, _distances(blocks)) for title, blocks in attentions.items()]
    scale = _scale([table["distance"].drop_nulls().drop_nans().to_list() for _, table in maps])
    legend = "relative distance of a head"
    figure = head_maps(maps, {"distance": ""}, legend, with_numbers=True, norm=scale)
    for axes, blocks in zip(figure.axes, attentions.values(), strict=False):
        _draw_causes(axes, blocks, color_of)
    figure.suptitle(_title(comparison), x=0.01, ha="left", fontsize=8, fontweight="bold")
    patches = [
        Patch(color=color, label=f"{kind}{_only_side(comparison, kind)}")
        for kind, color in color_of.items()
    ]
    patches.append(Patch(color=SAME_COLOR, label="the same, up to rounding"))
    figure.legend(handles=patches, loc="outside lower left", ncols=2)
    return figure


def _scale(distances: Sequence[Sequence[float]]) -> Normalize:
    """Return the scale of colors, from the smallest to the largest distance of differing heads.

    The scale is logarithmic if the distances differ much.
    """
    from matplotlib.colors import LogNorm, Normalize

    finite = [distance for part in distances for distance in part if math.isfinite(distance)]
    if not finite:
        return LogNorm(1 / LARGEST_RANGE, 1, clip=True)
    largest = max(finite)
    smallest = max(min(*finite, largest / LEAST_RANGE), largest / LARGEST_RANGE)
    if largest / smallest <= LINEAR_RANGE:
        return Normalize(0, largest, clip=True)
    return LogNorm(smallest, largest, clip=True)


def _only_side(comparison: Comparison, kind: Kind) -> str:
    """Return the side in brackets, if all causes of a kind are on one side, with its key heads."""
    mismatches = [cause.mismatch for cause in comparison.causes if cause.mismatch.verdict is kind]
    sides = {mismatch.sides for mismatch in mismatches}
    if sides not in ({("query",)}, {("key",)}):
        return ""
    (side,) = sides.pop()
    plural = {"query": "queries", "key": "keys"}[side]
    heads: dict[int, None] = {}
    for mismatch in mismatches:
        heads |= dict.fromkeys(mismatch.facts.get("key_heads", ()) if side == "key" else ())
    numbers = f", key heads {spans([*heads])}" if heads else ""
    return f" ({plural} alone{numbers})"


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
