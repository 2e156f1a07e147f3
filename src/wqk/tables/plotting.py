"""Figures of a score table: its layers as curves, its heads as maps (needs matplotlib)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import polars as pl

from wqk._style import (
    BLUE,
    GRAY,
    LABELS,
    ORANGE,
    SIGNS,
    SKY,
    TEAL,
    VIOLET,
    YELLOW,
    new_figure,
    style,
)
from wqk.errors import TableError
from wqk.tables.rendering import title

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from wqk.tables.score_table import ScoreTable

    View = Literal["layers", "heads"]

# Stacks differ by color, as in every figure, and models of one stack by its shade.
SHADES = {
    "encoder": (BLUE, SKY, "#1b3f8f"),
    "decoder": (ORANGE, YELLOW, "#8f3a00"),
    "other": (GRAY, TEAL, VIOLET),
}
STACKS = {"encoder": "encoder", "vision": "encoder", "decoder": "decoder"}

# Models in one panel differ by more than color.
LINES = ("o-", "s--", "^-.", "v:", "P-", "X--")

# More models than this are not drawn as maps.
MOST_MAPS = 8


def plot_table(table: ScoreTable, view: View = "layers") -> Figure:
    """Draw a table's layers as curves, or its heads as maps; see `ScoreTable.plot`."""
    if view not in ("layers", "heads"):
        raise TableError(f"view is 'layers' or 'heads', got {view!r}")
    rows = table.layers if view == "layers" else table.heads
    if not len(rows):
        raise TableError(f"the table has no rows of {view} to plot")
    with style():
        return _layers(rows) if view == "layers" else _heads(rows)


def _layers(table: ScoreTable) -> Figure:
    figure = new_figure(5.4, 2.5)
    axes = figure.subplots(1, len(LABELS))
    for axis, (score, label) in zip(axes, LABELS.items(), strict=True):
        layer_curves(axis, table, score, label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def layer_curves(axis: Axes, table: ScoreTable, score: str, label: str) -> None:
    """One score over the layers, a curve for each model, with zero and the null."""
    seen: Counter[str] = Counter()
    for index, (name, rows) in enumerate(_models(table.layers.frame)):
        stack = STACKS.get(rows["stack"][0], "other")
        color, line = SHADES[stack][seen[stack] % len(SHADES[stack])], LINES[index % len(LINES)]
        seen[stack] += 1
        axis.plot(rows["layer"], rows[score], line, color=color, label=name, clip_on=False)
        if score == "symmetry":
            axis.plot(rows["layer"], rows["symmetry_null"], ":", color=color, linewidth=0.8)
            if index == 0:
                axis.annotate(
                    "by chance", (rows["layer"][0], rows["symmetry_null"][0] or 0.0), xytext=(6, 3),
                    textcoords="offset points", fontsize=6, color=GRAY,
                )  # fmt: skip
    axis.axhline(0, color=GRAY, linewidth=0.6, zorder=0)
    axis.set(title=label, xlabel="layer", ylim=(-1, 1))
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)


def _heads(table: ScoreTable) -> Figure:
    """Layers down, heads across; a row of two maps for each model."""
    models = list(_models(table.frame))
    if len(models) > MOST_MAPS:
        raise TableError(
            f"at most {MOST_MAPS} models fit into a figure of heads, got {len(models)}: filter the "
            "table first"
        )
    figure = new_figure(5.4, 0.5 + 2.2 * len(models))
    axes = figure.subplots(len(models), len(LABELS), squeeze=False)
    for (name, rows), row in zip(models, axes, strict=True):
        for axis, (score, label) in zip(row, LABELS.items(), strict=True):
            layer, head = rows["layer"].to_numpy(), rows["head"].to_numpy()
            values = np.full((layer.max() + 1, head.max() + 1), np.nan)
            values[layer, head] = rows[score].cast(pl.Float64).fill_null(np.nan).to_numpy()
            drawn = axis.imshow(values, cmap=SIGNS, vmin=-1, vmax=1, aspect="auto")
            axis.set(title=label, xlabel="head")
            axis.locator_params(integer=True, min_n_ticks=1)
        row[0].set_ylabel(f"{name}\nlayer")
    figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=25).outline.set_visible(False)
    return figure


def _models(frame: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Each model's attention under a distinct name, at its smallest distance only."""
    parts = ("checkpoint", "revision", "step", "stack", "kind", "circuit")
    models = frame.partition_by(parts, maintain_order=True)
    names = [title(rows.row(0, named=True)).rpartition("/")[2] for rows in models]
    for name, rows in zip(names, models, strict=True):
        first = rows.row(0, named=True)
        words = [f"{part} {first[part]}" for part in parts[2:] if first[part] is not None]
        label = [name, *words] if names.count(name) > 1 else [name]
        yield ", ".join(label), rows.filter(pl.col("distance") == rows["distance"].min())
