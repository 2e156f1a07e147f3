"""Figures with a curve or a panel for each layer, and their common elements."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._console import counted
from wqk._style import (
    CHANCE,
    GRAY,
    PAPER_WIDTH,
    SAND,
    SCORE_LABELS,
    TEAL,
    new_figure,
    style,
)
from wqk.errors import TableError
from wqk.forms.images import MatrixImage, draw_with_norms
from wqk.forms.scores import untrained_range
from wqk.reporting.pictures import (
    BAND,
    CurveEnd,
    add_color_scale,
    band,
    draw_coupling,
    draw_curve,
    heading,
    label_ends,
    latest,
    letter,
    note,
    panel_grid,
    sequence,
    shades,
    titled,
    with_room,
)
from wqk.tables.details import BlockDetails
from wqk.tables.rendering import titles
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.gridspec import SubplotSpec
    from matplotlib.text import Annotation
    from matplotlib.transforms import Bbox


def draw_layers(axis: Axes, curves: pl.DataFrame, color: str, **look: Any) -> list[CurveEnd]:
    """Draw a curve for each layer, light to dark, with the range over seeds as a band."""
    layers = curves.drop_nulls("layer").partition_by("layer", maintain_order=True)
    if not layers:
        return []
    ends: list[CurveEnd] = []
    for layer, shade in zip(layers, shades(color, len(layers)), strict=True):
        draw_curve(axis, layer, ("low", "high"), color=shade, **look)
        ends.append((layer["value"][-1], str(layer["layer"][0]), shade))
    return ends


def finish_row(
    axes: Sequence[Axes], label: str, ends: Iterable[Sequence[CurveEnd]] = (), zero: bool = True
) -> None:
    """Label the common y axis of a row and its curves, after the limits are final; draw zero.

    Numbered curves, such as layers, are labeled if there is room for their numbers.
    """
    axes[0].set_ylabel(label)
    if zero:
        for axis in axes:
            axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
    for axis, ends_of_axis in zip(axes, ends, strict=False):
        axis.set_ylim(axes[0].get_ylim())
        numbered = all(name.isdigit() for _, name, _ in ends_of_axis)
        label_ends(axis, with_room(axis, ends_of_axis) if numbered else ends_of_axis)


def lettered(axes: Iterable[Axes], names: str) -> None:
    """Put letters at the top left of panels."""
    for axis, name in zip(axes, names, strict=False):
        letter(axis, name)


def label_steps(rows: np.ndarray | list[list[Axes]]) -> None:
    """Label the x axes of the last row, with k for thousands of steps."""
    from matplotlib.ticker import EngFormatter

    for axis in chain.from_iterable(rows):
        axis.xaxis.set_major_formatter(EngFormatter(sep=""))
    for axis in rows[-1]:
        axis.set_xlabel("training step")


# Distances of a label from its point, in points, the preferred ones first: to either side, and up
# or down.
SIDEWAYS = (5, 14, 26)
UPWARD = (3, -7, 9, -14, 15, -20, 24, -30, 36, -42)

# A label at a larger distance, in points, has a line to its point.
NEAR = 8


def separate_labels(axis: Axes, labels: Iterable[Annotation]) -> None:
    """Move labels of points away from markers, error bars, lines, edges and other labels.

    Call this function last, because the layout determines the places of points. If every offset
    overlaps an element, error bars and lines are preferred to markers, and markers to other labels
    and edges. A label far from its point gets a line to the point.
    """
    axis.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
    markers = _marker_boxes(axis)
    bars = [*_bar_boxes(axis), *_horizontal_boxes(axis)]
    placed: list[Bbox] = []

    def overlap(box: Bbox) -> int:
        is_outside = min(*(box.p0 - axis.bbox.p0), *(axis.bbox.p1 - box.p1)) < 2
        labels_and_edges = sum(map(box.overlaps, placed)) + int(is_outside)
        covered_markers = sum(map(box.overlaps, markers))
        covered_bars = sum(map(box.overlaps, bars))
        return int(covered_bars + 4 * covered_markers + 50 * labels_and_edges)

    offsets = _label_offsets()
    for label in labels:
        boxes = []
        for x, y, side in offsets:
            label.set(position=(x, y), horizontalalignment=side)
            boxes.append(label.get_window_extent())
        best = min(range(len(boxes)), key=lambda index: overlap(boxes[index]))
        x, y, side = offsets[best]
        label.set(position=(x, y), horizontalalignment=side)
        if abs(x) > NEAR or abs(y) > NEAR:
            axis.annotate(
                "",
                label.xy,
                xytext=(x, y + 2),
                textcoords="offset points",
                arrowprops={
                    "arrowstyle": "-",
                    "linewidth": 0.4,
                    "color": label.get_color(),
                    "shrinkA": 0,
                    "shrinkB": 2,
                },
            )
        placed.append(boxes[best])


def _label_offsets() -> list[tuple[int, int, str]]:
    """Return the offsets (x, y) of labels, the preferred ones first, with their alignments."""
    offsets = []
    for sideways in SIDEWAYS:
        for y in UPWARD:
            offsets += [(sideways, y, "left"), (-sideways, y, "right")]
    return offsets


def _marker_boxes(axis: Axes) -> list[Bbox]:
    """Return boxes around the markers of single points, in pixels."""
    from matplotlib.transforms import Bbox

    points = []
    for line in axis.lines:
        line_points = np.asarray(line.get_xydata())
        if len(line_points) == 1:
            points.append(line_points[0])
    return [Bbox([xy - 3, xy + 3]) for xy in axis.transData.transform(points)]


def _bar_boxes(axis: Axes) -> list[Bbox]:
    """Return boxes around error bars, in pixels."""
    from matplotlib.collections import LineCollection
    from matplotlib.transforms import Bbox

    boxes = []
    for bars in axis.collections:
        segments = bars.get_segments() if isinstance(bars, LineCollection) else []
        for segment in segments:
            ends = axis.transData.transform(segment)
            if len(ends):
                boxes.append(Bbox([ends.min(axis=0), ends.max(axis=0)]))
    return boxes


def _horizontal_boxes(axis: Axes) -> list[Bbox]:
    """Return flat boxes along the lines of `axhline`, in pixels."""
    from matplotlib.transforms import Bbox

    boxes = []
    for line in axis.lines:
        heights = np.asarray(line.get_ydata(), dtype=float)
        if len(heights) == 2 and heights[0] == heights[1]:
            _, y = axis.transData.transform((1, heights[0]))
            boxes.append(Bbox.from_extents(axis.bbox.x0, y, axis.bbox.x1, y))
    return boxes


# The ends of each score's range by chance.
ENDINGS = ("untrained_low", "untrained_high")


def _ends_of_scores() -> tuple[str, ...]:
    """Return the columns of the ranges by chance: the ends of each score in turn."""
    names = []
    for score in SCORE_LABELS:
        names += [f"{score}_{end}" for end in ENDINGS]
    return tuple(names)


ENDS = _ends_of_scores()


def distance_rows(table: ScoreTable | None) -> pl.DataFrame:
    """Return a row for each layer and distance: ``title``, ``layer``, ``distance``, scores.

    Each score is followed by the ends of its range by chance (``symmetry_untrained_low``, …), null
    if the table lacks the forms' width and rank.

    Raises
    ------
    TableError
        No model was scored at several distances.
    """
    layers = None if table is None else latest(table).layers
    if layers is None or layers.frame["distance"].n_unique() < 2:
        raise TableError(
            "distances needs scores at several distances: wqk scan REF --distance 0:64 --out FILE "
            "(rotary models), then --from FILE; got none"
        )
    several = pl.col("distance").n_unique().over("title") > 1
    rows = titled(layers.frame).filter(several)
    gamma = float(layers.metadata.get("gamma", 2.0))
    sizes = rows.select("d_query", "rank").iter_rows()
    untrained = [_ends(width, rank, gamma) for width, rank in sizes]
    ends = pl.DataFrame(untrained, schema=dict.fromkeys(ENDS, pl.Float64), orient="row")
    return rows.select("title", "layer", "distance", *SCORE_LABELS).hstack(ends)


def _ends(width: int | None, rank: int | None, gamma: float) -> tuple[float | None, ...]:
    """Return the values of `ENDS` for a form of this size."""
    if width is None or rank is None:
        return (None,) * len(ENDS)
    ranges = untrained_range(width, rank, gamma)
    return tuple(chain.from_iterable(ranges[score] for score in SCORE_LABELS))


@style()
def distances_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `distance_rows`: a curve for every layer, dark to light; a row for every model."""
    groups = rows.partition_by("title", maintain_order=True)
    figure = new_figure(0.8 * PAPER_WIDTH, 0.4 + 1.9 * len(groups))
    axes = figure.subplots(len(groups), len(SCORE_LABELS), squeeze=False)
    for row, group in zip(axes, groups, strict=True):
        layers = group.sort("layer", "distance").partition_by("layer", maintain_order=True)
        for axis, (score, label) in zip(row, SCORE_LABELS.items(), strict=True):
            ends = []
            for curve, shade in zip(layers, sequence(len(layers)), strict=True):
                axis.plot(curve["distance"], curve[score], color=shade)
                ends.append((curve[score][-1], str(curve["layer"][0]), shade))
            axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
            low, high = (group[f"{score}_{end}"][0] for end in ENDINGS)
            if low is not None:
                band(axis, low, high)
            axis.margins(x=0)
            axis.set_ylabel(label)
            label_ends(axis, ends)
        row[0].set_title(group["title"][0])
    for axis in axes[-1]:
        axis.set_xlabel("distance i − j (tokens)")
    if rows["symmetry_untrained_low"].is_not_null().any():
        note(figure, BAND)
    return figure


# Small matrices side by side.
PANEL_COLUMNS = 6


def coupling_rows(blocks: Sequence[BlockDetails]) -> pl.DataFrame:
    """Return a row for each pair of heads: ``title``, ``layer``, ``a``, ``b``, ``coupling``.

    Raises
    ------
    TableError
        The details contain no square form.
    """
    square = [block for block in blocks if block.coupling is not None]
    if not square:
        raise TableError(
            "coupling needs details of square forms: wqk scan REF --details FILE.npz, then --from "
            f"FILE.npz; got {counted(len(blocks), 'layer')}"
        )
    frames = []
    for title, block in zip(titles([vars(block.key) for block in square]), square, strict=True):
        matrix = np.asarray(block.coupling, np.float64)
        a, b = np.indices(matrix.shape).reshape(2, -1)
        place = {"title": title, "layer": block.key.layer, "a": a, "b": b}
        frames.append(pl.DataFrame(place | {"coupling": matrix.ravel()}))
    return pl.concat(frames)


@style()
def coupling_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `coupling_rows`: small matrices on one color scale; every model begins a row."""
    layers_of_models = [
        model.partition_by("layer", maintain_order=True)
        for model in rows.partition_by("title", maintain_order=True)
    ]
    # Rows of equal length: twelve layers are two rows of six, thirteen three of five or less.
    longest = max(map(len, layers_of_models))
    columns = math.ceil(longest / math.ceil(longest / PANEL_COLUMNS))
    layers_of_rows: list[list[pl.DataFrame]] = []
    first_rows = []  # of each model
    for layers in layers_of_models:
        first_rows.append(len(layers_of_rows))
        for start in range(0, len(layers), columns):
            layers_of_rows.append(layers[start : start + columns])
    row_count = len(layers_of_rows)
    width = 1.2 + (PAPER_WIDTH - 1.2) / PANEL_COLUMNS * columns
    figure = new_figure(width, 0.3 + row_count * (0.45 + (width - 1.2) / columns))
    axes = figure.subplots(row_count, columns, squeeze=False)
    for row, (panels, layers) in enumerate(zip(axes, layers_of_rows, strict=True)):
        for axis, layer in zip(panels, layers, strict=False):
            square = layer["coupling"].to_numpy().reshape(layer["a"].n_unique(), -1)
            drawn = draw_coupling(axis, square, ticks=4)
            axis.set_title(f"\nlayer {layer['layer'][0]}", fontsize=8, fontweight="normal")
            axis.set_xlabel("head b")
        for axis in panels[len(layers) :]:
            axis.remove()
        panels[0].set_ylabel("head a")
        if row in first_rows:
            heading(panels[0], layers[0]["title"][0])
    add_color_scale(figure, drawn, shrink=min(1.0, 1.6 / row_count), aspect=15)
    return figure


TERMS = ("symmetry_within_heads", "symmetry_between_heads", "symmetry_within_random")


# Panels side by side.
WIDE_COLUMNS = 3


def head_terms(table: ScoreTable | None) -> pl.DataFrame:
    """Return a row for each layer: ``title`` (the model), ``layer``, ``symmetry`` and its `TERMS`.

    Raises
    ------
    TableError
        No layer has the terms.

    Examples
    --------
    >>> import wqk
    >>> head_terms(wqk.scan(wqk.demo_model("encoder"))).select("title", "layer").rows()
    [('demo:encoder', 0), ('demo:encoder', 1), ('demo:encoder', 2), ('demo:encoder', 3)]
    """
    if table is None:
        raise TableError("heads needs scores: wqk scan REF --out FILE, then --from FILE; got none")
    plain = latest(table).layers.filter(pl.col("distance") == 0).frame.drop_nulls(TERMS)
    if plain.is_empty():
        raise TableError("heads needs the terms within and between heads; no layer has them")
    return titled(plain).select("title", "layer", "symmetry", *TERMS)


@style()
def terms_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `head_terms`: bars for the two terms of every layer, a cross for the first by chance.

    Chance is the expected term within heads if the layer's dimensions are assigned to heads at
    random.
    """
    groups = rows.partition_by("title", maintain_order=True)
    columns = min(WIDE_COLUMNS, len(groups))
    lines = math.ceil(len(groups) / columns)
    figure = new_figure(min(PAPER_WIDTH, 0.9 + 2.4 * columns), 0.5 + 1.9 * lines)
    axes = panel_grid(figure, len(groups), columns, sharey=True)
    width = 0.38
    for axis, group in zip(axes, groups, strict=True):
        layers = group["layer"].to_numpy()
        within, between, chance = (group[term] for term in TERMS)
        axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
        handles = [
            axis.bar(layers - width / 2, within, width, color=TEAL, label="within heads"),
            axis.bar(layers + width / 2, between, width, color=SAND, label="between heads"),
            *axis.plot(layers - width / 2, chance, label="within heads by chance", **CHANCE),
            axis.hlines(
                group["symmetry"],
                layers - width,
                layers + width,
                color=GRAY,
                linewidth=1,
                label="sum: the symmetry",
            ),
        ]
        axis.set(title=group["title"][0], xlabel="layer")
        axis.locator_params(axis="x", integer=True, min_n_ticks=1)
    for axis in axes[::columns]:
        axis.set_ylabel("symmetry")
    figure.legend(handles=handles, loc="outside lower center", ncols=2 * min(columns, 2))
    return figure


def draw_form(figure: Figure, cell: SubplotSpec, image: MatrixImage, title: str, name: str) -> None:
    """Draw a form with norms, but without ticks, in one cell of a grid, as panel ``name``."""
    grid = cell.subgridspec(
        2, 2, width_ratios=[4, 1], height_ratios=[1, 4], wspace=0.03, hspace=0.03
    )
    drawn, columns, rows = draw_with_norms(figure, grid, image)
    drawn.axes.set(xlabel="key side", ylabel="query side", xticks=[], yticks=[])
    for axis in (columns, rows):
        axis.tick_params(labelbottom=False, labelleft=False, length=0)
    columns.set_title(title)
    letter(columns, name)


def examples(blocks: Iterable[BlockDetails]) -> dict[str, MatrixImage]:
    """Return the encoder's most symmetric form, and the decoder's with the most uneven columns.

    Without encoders or without decoders, both forms are of the remaining kind. The symmetry of
    forms larger than their image is an estimate.
    """
    remaining = list(blocks)
    chosen = []
    for stack, measure in (("encoder", _image_symmetry), ("decoder", _unevenness)):
        if remaining:
            candidates = [block for block in remaining if block.key.stack == stack] or remaining
            example = max(candidates, key=measure)
            chosen.append(example)
            remaining.remove(example)
    names = titles([vars(block.key) for block in chosen])
    return {
        f"{name}, layer {block.key.layer}": picture(block)
        for name, block in zip(names, chosen, strict=True)
    }


def _image_symmetry(block: BlockDetails) -> float:
    """Return the symmetry of a form's image; -1 if the image is zero or not square."""
    image = block.image.astype(np.float64)
    rows, columns = image.shape
    if rows != columns or not image.any():
        return -1.0
    return float(np.sum(image * image.T) / np.sum(image**2))


def _unevenness(block: BlockDetails) -> float:
    return float(np.std(block.column_norms) / (np.std(block.row_norms) or 1.0))


def picture(block: BlockDetails) -> MatrixImage:
    """Return the image of a form in the details of a scan."""
    return MatrixImage(
        block.image.astype(np.float32),
        block.row_norms,
        block.column_norms,
        np.isin(np.arange(len(block.row_norms)), block.outlying_rows),
        np.isin(np.arange(len(block.column_norms)), block.outlying_columns),
    )
