"""Pictures of matrices, tables and pairs of heads, and elements of all figures (extra ``report``).

The elements are curves with bands, labels, letters and names of models. The pictures are the
coupling of heads, the effect of parts of the scores on the loss, and the composition of heads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import polars as pl

from wqk._style import (
    GRAY,
    OLIVE,
    OUTLIER,
    PAPER_WIDTH,
    SIGN_COLORS,
    SKY,
    TEAL,
    VIOLET,
    WINE,
    YELLOW,
    new_figure,
    style,
)
from wqk._typing import Array, Float
from wqk.errors import TableError
from wqk.forms.scores import SIGNIFICANT
from wqk.tables.rendering import DISTINGUISHING, titles
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase
    from matplotlib.image import AxesImage
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation


def latest(table: ScoreTable) -> ScoreTable:
    """Keep only the last step of each checkpoint."""
    steps = pl.col("step")
    return table.filter(steps.is_null() | (steps == steps.max().over("checkpoint", "revision")))


def titled(frame: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of a score table with `titles` in the column ``title``."""
    names = titles(frame.select("checkpoint", *DISTINGUISHING).to_dicts())
    return frame.with_columns(pl.Series("title", names, pl.String()))


CurveEnd = tuple[float, str, str | tuple[float, ...]]

# Minimum distance between two labels at the ends of curves, as a fraction of the axis height.
LABEL_GAP = 0.085

# A label further than this from the end of its curve has a connecting line.
NEAR_ENOUGH = 0.02


def draw_curve(axis: Axes, curve: pl.DataFrame, band: tuple[str, str], **look: Any) -> None:
    """Draw the column ``value`` over ``step``, and a band between two columns.

    A curve of one step is a point, drawn with a marker.
    """
    marker = "o" if curve.height == 1 else ""
    axis.plot(curve["step"], curve["value"], marker=marker, **look)
    lower, upper = band
    axis.fill_between(
        curve["step"], curve[lower], curve[upper], color=look["color"], alpha=0.15, linewidth=0
    )
    axis.margins(x=0)
    axis.locator_params(axis="x", nbins=4, integer=True, min_n_ticks=1)


def panel_grid(figure: FigureBase, count: int, columns: int, **share: Any) -> list[Axes]:
    """Create ``count`` panels in rows; the last row may be incomplete.

    Examples
    --------
    >>> from wqk._style import new_figure
    >>> figure = new_figure(4, 3)
    >>> panel_grid(figure, 3, 2) == figure.axes
    True
    """
    axes = figure.subplots(math.ceil(count / columns), columns, squeeze=False, **share).flat
    for axis in axes[count:]:
        axis.remove()
    return list(axes[:count])


def shades(color: str, count: int) -> list[tuple[float, ...]]:
    """Return shades of a color, from light to dark.

    Examples
    --------
    >>> from wqk._style import BLUE
    >>> [float(sum(shade).round(2)) for shade in shades(BLUE, 3)]
    [2.07, 1.15, 0.46]
    """
    from matplotlib.colors import to_rgb

    places = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    channels = []
    for channel in to_rgb(color):
        # From halfway to white, through the color itself, to 40 % of its brightness.
        shades_of_channel = [(1 + channel) / 2, channel, 0.4 * channel]
        channels.append(np.interp(places, [0, 0.5, 1], shades_of_channel))
    return list(zip(*channels, strict=True))


def sequence(count: int) -> list[tuple[float, ...]]:
    """Return colors of an ordered series, from dark violet to light green.

    Examples
    --------
    >>> [round(float(sum(color)), 2) for color in sequence(3)]
    [0.6, 1.21, 1.69]
    """
    from matplotlib import colormaps

    places = np.linspace(0, 0.85, count) if count > 1 else np.array([0.425])
    return [tuple(color[:3]) for color in colormaps["viridis"](places)]


def note(figure: FigureBase, text: str) -> None:
    """Write an explanation below the panels."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=6, color=GRAY)


def letter(axis: Axes, text: str) -> None:
    """Put the letter of a panel at the top left."""
    _above(axis, text, (-26.0, 8.0), 10.0)


def heading(axis: Axes, text: str) -> None:
    """Write the title of a row of panels above the first panel; the panel must have no title."""
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


def with_room(axis: Axes, ends: Sequence[CurveEnd]) -> list[CurveEnd]:
    """Return the curves to label: all if the axis is high enough for their labels.

    Otherwise the first, the last, and further curves with enough room next to their ends.
    """
    if len(ends) * LABEL_GAP <= 1:
        return list(ends)
    low, high = axis.get_ylim()
    labeled: list[CurveEnd] = []
    for end in sorted(ends, key=lambda end: end not in (ends[0], ends[-1])):
        if all(abs(end[0] - neighbor[0]) >= LABEL_GAP * (high - low) for neighbor in labeled):
            labeled.append(end)
    return labeled


def label_ends(axis: Axes, ends: Iterable[CurveEnd]) -> None:
    """Label curves at their right ends, without overlaps; the limits of the axis must be final."""
    low, high = axis.get_ylim()
    ordered = sorted(ends, key=lambda end: end[0])
    curve_heights = [(value - low) / (high - low) for value, _, _ in ordered]
    label_heights = spread_apart(curve_heights, LABEL_GAP)
    for curve_height, height, (_, name, color) in zip(
        curve_heights, label_heights, ordered, strict=True
    ):
        left, line = 1.02, None
        if abs(height - curve_height) > NEAR_ENOUGH:
            left = 1.06
            line = {"arrowstyle": "-", "color": color, "linewidth": 0.5, "shrinkA": 0, "shrinkB": 0}
        axis.annotate(
            name,
            (1.0, curve_height),
            xytext=(left, height),
            xycoords="axes fraction",
            color=color,
            fontsize=7,
            verticalalignment="center",
            arrowprops=line,
        )


def spread_apart(heights: Sequence[float], gap: float) -> list[float]:
    """Move ascending heights apart to gaps of at least ``gap``, within [0, 1] if possible.

    The sum of squared moves is minimal: isotonic regression, by pooling adjacent violators.

    Examples
    --------
    >>> spread_apart([0.1, 0.5, 0.5], 0.25)
    [0.1, 0.375, 0.625]
    """
    offsets = gap * np.arange(len(heights))
    pools: list[tuple[float, int]] = []  # means of adjacent values, and their number
    for mean in np.asarray(heights) - offsets:
        count = 1
        while pools and pools[-1][0] > mean:
            previous, size = pools.pop()
            mean, count = (mean * count + previous * size) / (count + size), count + size
        pools.append((mean, count))
    fitted: list[float] = []
    for mean, count in pools:
        fitted += [mean] * count
    free = 1 - gap * (len(heights) - 1)
    clipped = np.clip(fitted, min(0, free / 2), max(free, free / 2))
    return list((clipped + offsets).tolist())


BAND = "Band: where 95 % of layers of this size with untrained weights lie."


def band(axis: Axes, low: float, high: float) -> None:
    """Draw the range of a score by chance."""
    axis.axhspan(low, high, color=GRAY, alpha=0.25, linewidth=0, zorder=0)


# Colors of the parts of scores; parts that carry no information are gray or black.
PART_COLORS = {
    "symmetric": TEAL,
    "skew": WINE,
    "random": GRAY,
    "half": OUTLIER,
    "next head": VIOLET,
    "all": OUTLIER,
}
# Parts that others are compared with, and the names of lines in the legend.
CONTROLS = ("random", "half", "all")
LEGEND = {
    "symmetric": "symmetric",
    "skew": "skew",
    "random": "random",
    "half": "all, or half of all",
}
# Names of the parts without a line in the legend, for the points of shares.
POINTS = {
    "next head": "half, and half of the next head's, transposed",
    "random, size of symmetric": "random, size of a part",
}


def parts_figure(shares: pl.DataFrame, curves: pl.DataFrame, predicts: str) -> Figure:
    """Draw a row of panels for each stack: curves, if any, shares, and shares by layer.

    A panel without any share has the losses instead.
    """
    stacks = shares["stack"].unique(maintain_order=True).to_list()
    has_layers = shares["layer"].is_not_null().any()
    has_curves = not curves.is_empty()
    panels_in_row = 1 + has_curves + has_layers
    loss = "distance of states" if predicts == "states" else "loss (nats)"
    width = PAPER_WIDTH if panels_in_row > 1 else PAPER_WIDTH / 2
    with style():
        figure = new_figure(width, 0.3 + 2.3 * len(stacks))
        panels = figure.subplots(len(stacks), panels_in_row, squeeze=False)
        for row, stack in zip(panels, stacks, strict=True):
            shares_of_stack = shares.filter(stack=stack)
            axes = iter(row)
            if has_curves:
                _curves(next(axes), curves.filter(stack=stack), loss)
            shares_of_all = shares_of_stack.filter(pl.col("layer").is_null())
            if shares_of_all["share"].is_null().all():
                _losses(next(axes), shares_of_all, loss)
            else:
                _shares(next(axes), shares_of_all)
            if has_layers:
                shares_of_layers = shares_of_stack.filter(pl.col("head").is_null())
                _layers(next(axes), shares_of_layers.drop_nulls("layer"), loss)
            row[0].set_title(stack)
        if panels_in_row > 1:  # one legend for all panels, with equal names
            lines = {name: _line(part) for part, name in LEGEND.items()}
            parts_drawn = set(shares["part"])
            for part, name in POINTS.items():
                if part in parts_drawn:
                    lines[name] = _point(part)
            ranks = shares["part"].str.starts_with("rank ")
            if ranks.any():
                lines["rank k"] = _point("rank")
            columns = len(LEGEND) if len(lines) == len(LEGEND) else 3
            figure.legend(lines.values(), lines.keys(), loc="outside upper right", ncols=columns)
        return figure


def _line(part: str) -> Line2D:
    """Return a sample of the line of a part, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], **part_look(part))


def _color_of(part: str) -> str:
    """Return the color of a part; random halves of the size of a part have one color."""
    return PART_COLORS.get(part, OLIVE)


def _point(part: str) -> Line2D:
    """Return a sample of the point of a part, for a legend."""
    from matplotlib.lines import Line2D

    return Line2D([], [], linestyle="", marker="o", color=_color_of(part))


def part_look(part: str) -> dict[str, Any]:
    """Return color and line of a part of the scores, equal in all panels."""
    return {"color": PART_COLORS[part], "linestyle": "--" if part in CONTROLS else "-"}


def _curves(axes: Axes, curves: pl.DataFrame, loss: str) -> None:
    for (name,), rows in curves.group_by("direction", maintain_order=True):
        axes.plot(rows["factor"], rows["loss"], **part_look(str(name)))
    axes.axvline(1, color=GRAY, linewidth=0.5)
    axes.set(xlabel="factor of the part", ylabel=loss)


def _shares(axes: Axes, rows: pl.DataFrame) -> None:
    is_reference = pl.col("part").is_in(["whole", "none"])  # of shares 1 and 0
    upward = rows.filter(~is_reference).drop_nulls("share").reverse()
    for place, row in enumerate(upward.iter_rows(named=True)):
        share = row["share"]
        interval = [[share - row["low"]], [row["high"] - share]]
        color = _color_of(row["part"])
        axes.errorbar(share, place, xerr=interval, fmt="o", color=color, capsize=2)
    names = [part.replace(", size of ", ",\nsize of ") for part in upward["part"]]
    axes.set_yticks(range(len(names)), names)
    axes.axvline(0, color=GRAY, linewidth=0.5)
    axes.axvline(1, color=GRAY, linewidth=0.5)
    axes.set(xlabel="share of the loss kept")


def _losses(axes: Axes, rows: pl.DataFrame, loss: str) -> None:
    """Draw the loss of the whole model and of each replacement of the scores."""
    upward = rows.drop_nulls("loss").reverse()
    for place, row in enumerate(upward.iter_rows(named=True)):
        axes.plot(row["loss"], place, "o", color=_color_of(row["part"]))
    axes.set_yticks(range(len(upward)), upward["part"])
    axes.locator_params(axis="x", nbins=3)  # losses that differ little have many digits
    for reference_loss in rows.filter(pl.col("part").is_in(["whole", "none"]))["loss"]:
        axes.axvline(reference_loss, color=GRAY, linewidth=0.5)
    axes.set(xlabel=f"{loss}; no shares, as the scores\nexplain no more than chance")


def _layers(axes: Axes, rows: pl.DataFrame, loss: str) -> None:
    """Draw the shares by changed layer; the losses if no part has a share."""
    has_shares = rows["share"].is_not_null().any()
    column = "share" if has_shares else "loss"
    for name in ("symmetric", "skew", "half", "random"):
        rows_of_part = rows.filter(part=name).drop_nulls(column)
        look = part_look(name) | {"marker": "o", "markersize": 3}
        axes.plot(rows_of_part["layer"], rows_of_part[column], **look)
    if has_shares:
        axes.axhline(1, color=GRAY, linewidth=0.5)
        axes.axhline(0, color=GRAY, linewidth=0.5)
        for (layer,), rows_of_layer in rows.group_by("layer", maintain_order=True):
            if rows_of_layer["share"].is_null().all():
                _note_blank_layer(axes, layer)
    axes.set(xlabel="changed layer", ylabel="share of the loss kept" if has_shares else loss)
    layers = sorted(rows["layer"].unique())
    axes.set_xticks(layers)
    axes.set_xlim(layers[0] - 0.4, layers[-1] + 0.4)  # room for the note on a blank layer


def _note_blank_layer(axes: Axes, layer: Any) -> None:
    """Write into the place of a layer without shares that its scores explain nothing."""
    axes.text(
        layer,
        0.5,
        "no share: scores explain nothing",
        rotation=90,
        ha="center",
        va="center",
        fontsize=6,
        color=GRAY,
        transform=axes.get_xaxis_transform(),
    )


# Up to this many heads, the numbers are printed into the matrix.
PRINTED_HEADS = 16


@style()
def coupling(matrix: Float[Array, "heads heads"], title: str) -> Figure:
    """Draw T[a, b] = tr(M_a M_b)/(‖M_a‖ ‖M_b‖), from `wqk.coupling`.

    The value is 1 (red) if two heads are transposes of each other; the diagonal contains the
    symmetry of each head. Numbers are printed in hundredths if the cells are large enough.

    Examples
    --------
    >>> figure = coupling(np.full((PRINTED_HEADS, PRINTED_HEADS), -0.99), "all opposite")
    >>> figure.draw_without_rendering()
    >>> axis = figure.axes[0]
    >>> widest = max(text.get_window_extent().width for text in axis.texts)
    >>> bool(widest < axis.bbox.width / PRINTED_HEADS)
    True
    """
    figure = new_figure(3.9, 3.5)
    axis = figure.subplots()
    drawn = draw_coupling(axis, matrix, ticks=16)
    axis.set(title=title, xlabel="head b", ylabel="head a")
    if len(matrix) <= PRINTED_HEADS:
        for (a, b), value in np.ndenumerate(matrix):
            color = "white" if abs(value) > 0.6 else "black"
            hundredths = "–" if np.isnan(value) else f"{round(100 * value) + 0:d}"
            hundredths = hundredths.replace("-", "−")
            axis.text(b, a, hundredths, ha="center", va="center", fontsize=5.5, color=color)
        axis.set_xlabel("head b\n(printed: coupling × 100)")
    add_color_scale(figure, drawn, shrink=0.8)
    return figure


def attention_figure(matrices: Float[np.ndarray, "heads queries keys"]) -> Figure:
    """Draw the attention matrices of a block's heads, with one color scale from 0 to 1.

    Examples
    --------
    >>> figure = attention_figure(np.tril(np.full((3, 4, 4), 0.25)))
    >>> len(figure.axes)
    3
    """
    heads = len(matrices)
    columns = min(6, math.ceil(math.sqrt(heads)))
    rows = math.ceil(heads / columns)
    figure = new_figure(1.4 * columns + 0.4, 1.5 * rows + 0.3)
    axes = panel_grid(figure, heads, columns)
    for head, (axis, matrix) in enumerate(zip(axes, matrices, strict=True)):
        axis.imshow(matrix, cmap="Blues", vmin=0, vmax=1, interpolation="nearest")
        axis.set(title=f"head {head}", xticks=[], yticks=[])
    axes[0].set(xlabel="key", ylabel="query")
    return figure


def draw_coupling(axis: Axes, matrix: Float[Array, "heads heads"], ticks: int) -> AxesImage:
    """Draw a matrix of couplings on the color scale of signs, with about ``ticks`` ticks."""
    drawn = axis.imshow(matrix, cmap=SIGN_COLORS, vmin=-1, vmax=1, interpolation="nearest")
    numbers = range(0, len(matrix), math.ceil(len(matrix) / ticks))
    axis.set(xticks=numbers, yticks=numbers)
    axis.spines[:].set_visible(False)
    axis.tick_params(length=0)
    return drawn


def add_color_scale(figure: Figure, drawn: AxesImage, **size: Any) -> None:
    """Add the color scale of all matrices to the right of the matrices."""
    bar = figure.colorbar(drawn, ax=figure.axes, **size)
    bar.outline.set_visible(False)
    bar.set_label(r"$\mathrm{tr}(M_a M_b) \,/\, (\|M_a\| \, \|M_b\|)$", fontsize=7)


# Composition of heads: layers across, heads upward, an arc for each of the strongest pairs.

PAIR_ENDS = ("writer", "reader")
READING_KINDS = {"q": (SKY, "queries"), "k": (YELLOW, "keys"), "v": (GRAY, "values")}

# Number of arcs with labels, the strongest first.
LABELED_ARCS = 6


@style()
def composition_arcs(frame: pl.DataFrame, top: int = 30) -> Figure:
    """Draw the strongest pairs of a table of `wqk.compose`; thicker arcs exceed chance by more.

    If no pair exceeds chance after the correction for the number of pairs, the arcs are gray, and
    the title contains a remark.

    Attentions of one layer are next to each other, in the order of writing: an encoder before its
    decoder, cross-attention after self-attention.

    Raises
    ------
    TableError
        The table has no pair with a score.
    """
    strongest = strongest_pairs(frame, top)
    attentions: set[AttentionKey] = set()
    for end in PAIR_ENDS:
        keys = frame.select(f"{end}_stack", f"{end}_layer", f"{end}_attention").unique()
        attentions.update(attention(row, end) for row in keys.iter_rows(named=True))
    order = sorted(attentions)
    column = {key: number for number, key in enumerate(order)}
    heads: Any = 1 + frame.select(pl.max_horizontal("writer_head", "reader_head").max()).item()
    figure = new_figure(PAPER_WIDTH, min(8.0, 1.6 + 0.22 * heads))
    axis = figure.subplots()
    dots = list(product(range(len(order)), range(heads)))
    axis.scatter(
        [number for number, _ in dots],
        [head for _, head in dots],
        s=6,
        color=GRAY,
        alpha=0.4,
        linewidths=0,
        zorder=1,
        rasterized=True,
    )
    beyond = bool((frame["p_corrected"] < SIGNIFICANT).any())
    _draw_arcs(axis, strongest, column, colored=beyond)
    _label_arcs(axis, strongest.head(LABELED_ARCS), column)
    names = _attention_names(order)
    axis.set_xticks(range(len(order)), names, rotation=45 if any(" " in n for n in names) else 0)
    axis.set(xlabel="layer", ylabel="head", xlim=(-0.6, len(order) - 0.4), ylim=(heads - 0.4, -0.6))
    axis.locator_params(axis="y", integer=True)
    handles = []
    for kind, (color, name) in READING_KINDS.items():
        if kind in set(strongest["kind"]):
            handles.append(axis.plot([], [], color=color, label=name)[0])
    remark = ", none of them beyond chance"
    if beyond:
        remark = ""
        figure.legend(handles=handles, loc="outside upper right", ncols=3, title="read by")
    axis.set_title(f"{strongest.height} strongest pairs of {frame.height:,}{remark}")
    return figure


# Most ticks along a side of a map.
MOST_TICKS = 24


class PairMatrix(Protocol):
    """Numbers of pairs of heads, as in `wqk.inspecting.composition.CompositionMatrix`."""

    @property
    def kind(self) -> str:
        """Side of the readers: q, k or v."""

    @property
    def value(self) -> str:
        """Name of the number."""

    @property
    def values(self) -> np.ndarray:
        """The numbers, (writers, readers)."""

    @property
    def writers(self) -> tuple[str, ...]:
        """Names of the writing heads."""

    @property
    def readers(self) -> tuple[str, ...]:
        """Names of the reading heads."""


@style()
def composition_maps(matrices: Sequence[PairMatrix]) -> Figure:
    """Draw maps of pairs of heads on one scale, writers down and readers across.

    Pairs without a number are light gray: the reader does not come after the writer.
    """
    count = len(matrices)
    aspect = len(matrices[0].writers) / len(matrices[0].readers)
    side = 3.6 if count == 1 else (PAPER_WIDTH - 0.6) / count
    figure = new_figure(side * count + 0.9, 0.8 + 0.9 * side * min(1.6, max(0.5, aspect)))
    axes = figure.subplots(1, count, squeeze=False)[0]
    finite = [matrix.values[np.isfinite(matrix.values)] for matrix in matrices]
    numbers = np.concatenate(finite) if finite else np.zeros(0)
    if not len(numbers):
        raise TableError("no pair of heads has a score; there is nothing to draw")
    low, high = float(numbers.min()), float(numbers.max())
    for axis, matrix in zip(axes, matrices, strict=True):
        drawn = axis.imshow(
            matrix.values, cmap="magma_r", vmin=low, vmax=high, interpolation="nearest"
        )
        axis.set_facecolor("#e6e6e6")
        kind = READING_KINDS[matrix.kind][1] if matrix.kind in READING_KINDS else matrix.kind
        axis.set(title=f"read by {kind}", xlabel="head that reads")
        _name_ticks(axis.set_xticks, matrix.readers, rotation=90)
        _name_ticks(axis.set_yticks, matrix.writers)
        axis.tick_params(length=0, labelsize=6)
        axis.spines[:].set_visible(False)
    axes[0].set_ylabel("head that writes")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=25)
    bar.outline.set_visible(False)
    bar.set_label(matrices[0].value, fontsize=7)
    return figure


def _name_ticks(set_ticks: Callable[..., Any], names: Sequence[str], **look: Any) -> None:
    """Label every head, or if there are many, heads at equal intervals."""
    step = math.ceil(len(names) / MOST_TICKS)
    places = range(0, len(names), step)
    set_ticks(places, [names[place] for place in places], **look)


def _draw_arcs(
    axis: Axes, pairs: pl.DataFrame, column: Mapping[AttentionKey, int], colored: bool
) -> None:
    """Draw an arc for each pair, from the writing to the reading head."""
    largest = float(pairs["excess"][0])
    for rank, row in enumerate(pairs.iter_rows(named=True)):
        start = column[attention(row, "writer")], row["writer_head"]
        stop = column[attention(row, "reader")], row["reader_head"]
        axis.annotate(
            "",
            stop,
            start,
            zorder=3 if rank < LABELED_ARCS else 2,
            arrowprops={
                "arrowstyle": "-|>,head_length=0.3,head_width=0.12",
                "connectionstyle": f"arc3,rad={-0.18 if stop[1] >= start[1] else 0.18}",
                "color": READING_KINDS[row["kind"]][0] if colored else GRAY,
                "linewidth": 0.4 + 2.0 * row["excess"] / largest,
                "alpha": 0.35 + 0.65 * row["excess"] / largest,
                "shrinkA": 2,
                "shrinkB": 2,
            },
        )


def _label_arcs(axis: Axes, pairs: pl.DataFrame, column: Mapping[AttentionKey, int]) -> None:
    """Write layer and number next to each head of these pairs, on top of the arcs."""
    from matplotlib.patheffects import withStroke

    labeled: set[tuple[float, int]] = set()
    for row in pairs.iter_rows(named=True):
        for end, side, shift in (("writer", "right", -5), ("reader", "left", 5)):
            place = column[attention(row, end)], row[f"{end}_head"]
            if place not in labeled:
                labeled.add(place)
                axis.annotate(
                    f"{row[f'{end}_layer']}.{place[1]}",
                    place,
                    xytext=(shift, 0),
                    textcoords="offset points",
                    ha=side,
                    va="center",
                    fontsize=7,
                    zorder=4,
                    path_effects=[withStroke(linewidth=2, foreground="white")],
                )


def _attention_names(order: Sequence[AttentionKey]) -> list[str]:
    """Name attentions by layer number; with several stacks, after the stack."""
    several = len({stack_key for stack_key, _, _ in order}) > 1
    names = []
    for (_, stack), layer, is_cross in order:
        name = f"{stack} {layer}" if several else str(layer)
        names.append(f"{name} cross" if is_cross else name)
    return names


AttentionKey = tuple[tuple[bool, str], int, bool]


def strongest_pairs(frame: pl.DataFrame, top: int) -> pl.DataFrame:
    """Return the pairs with the largest excess over chance.

    Raises
    ------
    TableError
        No pair exceeds chance.
    """
    strongest = frame.filter(pl.col("excess") > 0).sort("excess", descending=True).head(top)
    if strongest.is_empty():
        raise TableError("no pair of heads has a score above chance; there is nothing to draw")
    return strongest


def attention(row: dict[str, object], end: str) -> AttentionKey:
    """Return the sort key of an attention: stack (encoder first), layer, and kind."""
    stack = str(row[f"{end}_stack"])
    layer = row[f"{end}_layer"]
    assert isinstance(layer, int)
    return (stack != "encoder", stack), layer, row[f"{end}_attention"] == "cross"
