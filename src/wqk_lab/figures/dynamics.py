"""Symmetry and directionality during training (Figures 3, S3 and S4), and of the updates."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import polars as pl

from wqk._style import PAPER_WIDTH, SCORE_LABELS, STACK_COLORS, new_figure, style
from wqk.errors import RunError
from wqk.reporting.pictures import CurveEnd, draw_curve, heading, note
from wqk.tables.run import Run
from wqk_lab.figures.by_layer import draw_layers, finish_row, label_steps, lettered
from wqk_lab.figures.curves import SCORES, has_seeds, of_cells, score_curves
from wqk_lab.figures.followed import followed_groups, only_followed
from wqk_lab.runs.groups import ModeGroup, modes, one, pairs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LINES = {"encoder": "-", "decoder": "--"}

MEDIAN_BANDS = "Medians over layers; bands reach from quartile to quartile."
LAYER_NUMBERS = "The numbers are layers, light to dark"


def pair_curves(runs: Sequence[Run], figure: str) -> pl.DataFrame:
    """Return curves of encoders and decoders with otherwise equal recipes; Figure 3 has one pair.

    Columns are ``comparison`` (the corpus), ``mode`` and the columns of `wqk_lab.figures.curves`.
    For models with scores but no recipe, one encoder, one decoder, or both form a comparison; with
    several models of one stack, each model forms a comparison with its name.

    Raises
    ------
    RunError
        The runs contain no pair, several pairs for Figure 3, or a pair without scores.
    """
    if only_followed(runs):
        return _curves(followed_groups(runs, figure))
    curve_pairs = pairs(runs, figure)
    return _curves([one(curve_pairs, figure, "s3 or s4")] if figure == "fig3" else curve_pairs)


def update_curves(runs: Sequence[Run]) -> pl.DataFrame:
    """Return scores of each form's change since the last scores, of encoders, decoders or both.

    Raises
    ------
    RunError
        The list of runs is empty, or a run has no updates.
    """
    if not runs:
        raise RunError("updates needs runs (wqk lab train); got none")
    return _curves(modes(runs), "updates")


@style()
def medians_and_layers(curves: pl.DataFrame) -> Figure:
    """Draw Figure 3: medians over layers (a, b), every layer of encoder and decoder (c, d)."""
    modes = [mode for mode in STACK_COLORS if mode in curves["mode"]]
    figure = new_figure(PAPER_WIDTH, 3.8)
    axes = figure.subplots(2, 1 + len(modes), sharex=True, sharey="row")
    for row, score, letters in zip(axes, SCORES, ("ac", "bd"), strict=True):
        shown = curves.filter(quantity=score)
        ends = [_draw_medians(row[0], shown), *_draw_layers(row[1:], shown, modes)]
        finish_row(row, SCORE_LABELS[score], ends)
        lettered(row, letters)
    titles = ("median over layers", *(f"{mode}, by layer" for mode in modes))
    for axis, title in zip(axes[0], titles, strict=True):
        axis.set_title(title)
    label_steps(axes)
    note(figure, f"Left: {MEDIAN_BANDS.lower()} Right: {_layer_note(curves).lower()}")
    return figure


@style()
def medians_by_comparison(curves: pl.DataFrame) -> Figure:
    """Draw Figure S3, or updates: medians over layers, a row for every corpus."""
    groups = curves.partition_by("comparison", maintain_order=True)
    figure = new_figure(0.8 * PAPER_WIDTH, 0.4 + 1.6 * len(groups))
    axes = figure.subplots(len(groups), 2, sharex="row", sharey="col", squeeze=False)
    for column, score in zip(axes.T, SCORES, strict=True):
        ends = [
            _draw_medians(axis, group.filter(quantity=score))
            for axis, group in zip(column, groups, strict=True)
        ]
        # The panels of a column share one scale, final after all panels are drawn.
        for axis, ends_of_axis in zip(column, ends, strict=True):
            finish_row([axis], SCORE_LABELS[score], [ends_of_axis])
    for axis, group in zip(axes[:, 0], groups, strict=True):
        axis.set_title(group["comparison"][0])
    lettered(axes[0], "ab")
    label_steps(axes)
    note(figure, MEDIAN_BANDS)
    return figure


@style()
def layers_by_comparison(curves: pl.DataFrame) -> Figure:
    """Draw Figure S4: every layer of encoder and decoder, a row for every corpus."""
    groups = curves.partition_by("comparison", maintain_order=True)
    modes = [mode for mode in STACK_COLORS if mode in curves["mode"]]
    width = len(modes)
    figure = new_figure(PAPER_WIDTH, 0.3 + 1.75 * len(groups))
    axes = figure.subplots(len(groups), 2 * width, sharex="row", squeeze=False)
    for row, group in zip(axes, groups, strict=True):
        for panels, score in zip((row[:width], row[width:]), SCORES, strict=True):
            for panel in panels[1:]:
                panel.sharey(panels[0])
                panel.tick_params(labelleft=False)
            ends = _draw_layers(panels, group.filter(quantity=score), modes)
            finish_row(panels, SCORE_LABELS[score], ends)
        for axis, mode in zip(row, modes * 2, strict=True):
            axis.set_title(f"\n{mode}", fontweight="normal", fontsize=8)
        heading(row[0], group["comparison"][0])
    label_steps(axes)
    note(figure, _layer_note(curves))
    return figure


def _curves(
    groups: Iterable[ModeGroup], of: Literal["scores", "updates"] = "scores"
) -> pl.DataFrame:
    curves_by_title = {}
    for group in groups:
        curves_by_mode = {mode: score_curves(cell.runs, of) for mode, cell in group.cells.items()}
        curves_by_title[group.title] = of_cells(curves_by_mode, "mode")
    return of_cells(curves_by_title, "comparison")


def _draw_layers(
    axes: Sequence[Axes], curves: pl.DataFrame, modes: Sequence[str]
) -> list[list[CurveEnd]]:
    """Draw every layer, in a panel for each mode."""
    return [
        draw_layers(axis, curves.filter(mode=mode), STACK_COLORS[mode], linestyle=LINES[mode])
        for axis, mode in zip(axes, modes, strict=True)
    ]


def _layer_note(curves: pl.DataFrame) -> str:
    """Explain the curves of layers, and their bands, if drawn."""
    layers = curves.filter(pl.col("layer").is_not_null())
    bands = "; bands span the seeds" if has_seeds(layers) else ""
    return f"{LAYER_NUMBERS}{bands}."


def _draw_medians(axis: Axes, curves: pl.DataFrame) -> list[CurveEnd]:
    """Draw each mode's median over layers, with a band from quartile to quartile."""
    medians = curves.filter(pl.col("layer").is_null())
    ends: list[CurveEnd] = []
    for curve in medians.partition_by("mode", maintain_order=True):
        mode = curve["mode"][0]
        color = STACK_COLORS[mode]
        draw_curve(axis, curve, ("q25", "q75"), color=color, linestyle=LINES[mode])
        ends.append((curve["value"][-1], mode, color))
    return ends
