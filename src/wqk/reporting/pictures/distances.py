"""Scores as functions of the relative distance (rotary positions)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._style import BLUE, GRAY, LABELS, PAGE, new_figure, style
from wqk.errors import TableError
from wqk.reporting.pictures.panels import label_ends, sequence
from wqk.reporting.pictures.selection import latest, titled

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.figure import Figure

    from wqk.tables.score_table import ScoreTable


@style()
def distance_curves(values: Mapping[str, Any], title: str) -> Figure:
    """Draw the values of `wqk.inspecting.views.distance_view`: the layer bold, its heads thin."""
    figure = new_figure(5.2, 2.4)
    axes = figure.subplots(1, len(LABELS))
    for axis, (score, label) in zip(axes, LABELS.items(), strict=True):
        axis.plot(values["distance"], values["heads"][score], color=GRAY, linewidth=0.5)
        axis.plot(values["distance"], values[score], color=BLUE, label="layer")
        axis.axhline(0, color="black", linewidth=0.4, zorder=0)
        axis.set(title=label, xlabel="distance i − j (tokens)", ylim=(-1.02, 1.02))
    axes[0].plot([], [], color=GRAY, linewidth=0.5, label="heads")
    axes[0].legend(loc="upper right")
    figure.suptitle(title, fontsize=8)
    return figure


def distance_rows(table: ScoreTable | None) -> pl.DataFrame:
    """A row for each layer and distance: ``title`` (the model), ``layer``, ``distance``, scores.

    Raises
    ------
    TableError
        No model was scored at several distances.
    """
    frame = pl.DataFrame() if table is None else latest(table).layers.frame
    if frame.is_empty() or frame["distance"].n_unique() < 2:
        raise TableError(
            "distances needs scores at several distances: wqk scan REF --distance 0:64 --out FILE "
            "(rotary models), then --from FILE; got none"
        )
    several = pl.col("distance").n_unique().over("title") > 1
    return titled(frame).filter(several).select("title", "layer", "distance", *LABELS)


@style()
def distances_by_layer(rows: pl.DataFrame) -> Figure:
    """Draw `distance_rows`: a curve for every layer, dark to light; a row for every model."""
    groups = rows.partition_by("title", maintain_order=True)
    figure = new_figure(0.8 * PAGE, 0.4 + 1.9 * len(groups))
    axes = figure.subplots(len(groups), len(LABELS), squeeze=False)
    for row, group in zip(axes, groups, strict=True):
        layers = group.sort("layer", "distance").partition_by("layer", maintain_order=True)
        for axis, (score, label) in zip(row, LABELS.items(), strict=True):
            ends = []
            for curve, shade in zip(layers, sequence(len(layers)), strict=True):
                axis.plot(curve["distance"], curve[score], color=shade)
                ends.append((curve[score][-1], str(curve["layer"][0]), shade))
            axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
            axis.margins(x=0)
            axis.set_ylabel(label)
            label_ends(axis, ends)
        row[0].set_title(group["title"][0])
    for axis in axes[-1]:
        axis.set_xlabel("distance i − j (tokens)")
    return figure
