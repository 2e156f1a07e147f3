"""Scores, rotary planes and forms as functions of the relative distance (rotary positions)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from wqk._style import GRAY, LABELS, PAGE, new_figure, style
from wqk.errors import TableError
from wqk.forms.randomness import untrained_range
from wqk.reporting.pictures.panels import label_ends, latest, note, sequence, titled
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# The ends of each score's range by chance.
ENDINGS = ("untrained_low", "untrained_high")
ENDS = tuple(f"{score}_{end}" for score in LABELS for end in ENDINGS)
BAND = "Band: where 95 % of layers of this size with untrained weights lie."


@style()
def distance_curves(values: Mapping[str, Any], title: str) -> Figure:
    """Draw the values of `wqk.inspecting.showing.distance_view`: the layer bold, its heads thin."""
    figure = new_figure(5.2, 2.4)
    axes = figure.subplots(1, len(LABELS))
    for axis, (score, label) in zip(axes, LABELS.items(), strict=True):
        axis.plot(values["distance"], values["heads"][score], color=GRAY, linewidth=0.5)
        axis.plot(values["distance"], values[score], color="black", label="layer")
        axis.axhline(0, color="black", linewidth=0.4, zorder=0)
        _band(axis, *values["untrained"][score])
        axis.set(title=label, xlabel="distance i − j (tokens)", ylim=(-1.02, 1.02))
    axes[0].plot([], [], color=GRAY, linewidth=0.5, label="heads")
    axes[0].legend(loc="upper right")
    figure.suptitle(title, fontsize=8)
    note(figure, BAND)
    return figure


def _band(axis: Axes, low: float, high: float) -> None:
    """Where a score lies by chance."""
    axis.axhspan(low, high, color=GRAY, alpha=0.25, linewidth=0, zorder=0)


def distance_rows(table: ScoreTable | None) -> pl.DataFrame:
    """A row for each layer and distance: ``title`` (the model), ``layer``, ``distance``, scores.

    Each score has the ends of its range by chance beside it (``symmetry_untrained_low``, …), null
    where the table does not tell the forms' width and rank.

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
    rows = titled(frame).filter(several)
    gamma = float(table.metadata.get("gamma", 2.0)) if table is not None else 2.0
    untrained = [_ends(d, rank, gamma) for d, rank in rows.select("d_query", "rank").iter_rows()]
    ends = pl.DataFrame(untrained, schema=dict.fromkeys(ENDS, pl.Float64), orient="row")
    return rows.select("title", "layer", "distance", *LABELS).hstack(ends)


def _ends(width: int | None, rank: int | None, gamma: float) -> tuple[float | None, ...]:
    """The values of `ENDS` for a form of this size."""
    if width is None or rank is None:
        return (None,) * len(ENDS)
    ranges = untrained_range(width, rank, gamma)
    return tuple(end for score in LABELS for end in ranges[score])


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
            low, high = (group[f"{score}_{end}"][0] for end in ENDINGS)
            if low is not None:
                _band(axis, low, high)
            axis.margins(x=0)
            axis.set_ylabel(label)
            label_ends(axis, ends)
        row[0].set_title(group["title"][0])
    for axis in axes[-1]:
        axis.set_xlabel("distance i − j (tokens)")
    if rows["symmetry_untrained_low"].is_not_null().any():
        note(figure, BAND)
    return figure


@style()
def rotary_planes(values: Mapping[str, Any], title: str) -> Figure:
    """Draw the values of `wqk.inspecting.showing.bands_view`.

    A map of rows × planes, and norm and cosine of the forms against the distance.
    """
    rows, numbers = values["rows"], values["numbers"]
    unit, order = ("patches", ": rows, columns") if any(values["axes"]) else ("tokens", "")
    shares = np.asarray(values["shares"])
    figure = new_figure(PAGE, 2.6)
    planes, norm, cosine = figure.subplots(1, 3, width_ratios=(1.6, 1, 1))
    image = planes.imshow(
        shares * shares.shape[1], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest"
    )
    figure.colorbar(image, ax=planes, label="share of $E_k$ × planes")
    at = np.unique(np.linspace(0, shares.shape[1] - 1, 5).round().astype(int))
    turns = [2 * math.pi / values["frequencies"][k] for k in at]
    planes.set_xticks(at, [f"{t:.0f}" if t < 1e4 else f"{t / 1000:.0f}k" for t in turns])
    shown = np.unique(np.linspace(0, len(numbers) - 1, 8).round().astype(int))
    planes.set_yticks(shown, [str(numbers[i]) for i in shown])
    planes.set(xlabel=f"{unit} per turn of the plane{order}", ylabel=rows, title=title)
    for axis, name, label in (
        (norm, "norm", r"$\|M(N)\| / \|M(0)\|$"),
        (cosine, "cosine", "cosine of $M(N)$ and $M(0)$"),
    ):
        for number, curve, shade in zip(numbers, values[name], sequence(len(numbers)), strict=True):
            entry = f"{rows} {number}" if number in (numbers[0], numbers[-1]) else None
            axis.plot(values["distance"], curve, color=shade, linewidth=0.8, label=entry)
        axis.set_xscale("symlog", linthresh=1)
        axis.set(xlabel=f"distance $N$ ({unit})", ylabel=label)
    norm.set_ylim(bottom=0)
    cosine.axhline(0, color="black", linewidth=0.4, zorder=0)
    norm.legend()
    return figure
