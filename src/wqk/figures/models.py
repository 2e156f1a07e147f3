"""Trained models by size: Figures 2, S1 and S2."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._style import (
    COLORS,
    DIRECTIONALITY,
    GRAY,
    PAGE,
    SYMMETRY,
    new_figure,
    style,
)
from wqk.atlas import drawn_models, flags, published, sound_models, summarize
from wqk.atlas.published import COLUMNS, last_part
from wqk.figures.matrix import draw_form
from wqk.figures.panels import letter, separate_labels
from wqk.figures.selection import latest
from wqk.scanning.surveys.model_sets import model_set, model_sets

if TYPE_CHECKING:
    from collections.abc import Mapping

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from wqk.forms.images import MatrixImage
    from wqk.scanning.tables import ScoreTable

SCORES = {"symmetry": SYMMETRY, "directionality": DIRECTIONALITY}

# Which of the paper's sets of models each figure shows.
SETS = {
    "fig2": ("paper:language",),
    "s1": ("paper:vision", "paper:audio"),
    "s2": ("paper:encoder-decoder",),
}

# What counts as an encoder and as a decoder; other stacks have no place in these figures.
STACKS = {"encoder": "encoder", "vision": "encoder", "decoder": "decoder"}

MARKERS = {"encoder": "o", "decoder": "s"}

# Rows that do not describe a trained model's own form are hollow, with the marker of the first of
# these reasons.
HOLLOW = {
    "random-looking": "X",
    "grouped-heads": "D",
    "fused-tensor": "v",
    "missing-layers": "^",
    "cross-attention": "<",
}

# More of the user's scans than this are not labeled.
NAMED = 8

# Published models that are labeled: the extremes of each score and of size.
NAMED_EXTREMES = 3

# From this share on, a checkpoint holds queries and keys alone: its size is not its model's.
QUERIES_AND_KEYS_ALONE = 0.9


def model_rows(figure: str, table: ScoreTable | None = None) -> pl.DataFrame:
    """The rows behind Figure 2, S1 or S2: published ones, then your own.

    Of the published rows, every sound model is included once, and every artifact. Of your own
    scores, those of models that the paper's sets assign to another figure are omitted; models of no
    set go to Figure S2 if they have an encoder and a decoder, else to the others. Of several steps,
    only the last is used.

    Parameters
    ----------
    figure
        ``fig2`` (language), ``s1`` (vision and audio) or ``s2`` (encoder-decoder models).
    table
        Your own scores.

    Returns
    -------
    polars.DataFrame
        The columns of `wqk.atlas.published`; ``stack`` is ``encoder`` or ``decoder``.

    Examples
    --------
    >>> rows = model_rows("fig2")
    >>> rows.group_by("stack", "sound").len().sort("stack", "sound").rows()
    [('decoder', False, 28), ('decoder', True, 21), ('encoder', False, 4), ('encoder', True, 21)]
    """
    own = _own_rows(table)
    return pl.concat(
        [
            rows.filter([_belongs(figure, row, rows) for row in rows.iter_rows(named=True)])
            for rows in (_published_rows(), own)
        ]
    )


def by_size(rows: pl.DataFrame, matrices: Mapping[str, MatrixImage] | None = None) -> Figure:
    """Medians and quartiles over layers against parameters; Figure 2 with a matrix at each score.

    Parameters
    ----------
    rows
        From `model_rows`.
    matrices
        By title, at most one for each score.
    """
    matrices = matrices or {}
    with style():
        figure = new_figure(PAGE, 5.4 if matrices else 3.0)
        labels = {}
        shape, widths = ((2, 2), [1.6, 1.0]) if matrices else ((1, 2), [1.0, 1.0])
        grid = figure.add_gridspec(*shape, width_ratios=widths)
        for index, (score, label) in enumerate(SCORES.items()):
            axis = figure.add_subplot(grid[index, 0] if matrices else grid[0, index])
            labels[axis] = _draw_models(axis, rows.drop_nulls(score), score)
            axis.set_ylabel(label)
            letter(axis, "ab"[index])
        for index, (title, image) in enumerate(matrices.items()):
            cell = grid[index, 1] if len(matrices) > 1 else grid[:, 1]
            draw_form(figure, cell, image, title, "cd"[index])
        figure.legend(handles=_handles(rows), loc="outside lower center", ncols=3)
        for axis, some in labels.items():
            separate_labels(axis, some)
    return figure


@cache
def _published_rows() -> pl.DataFrame:
    """Every sound model once, printed or only drawn, and every artifact."""
    artifacts = published().filter(~pl.col("sound"))
    once = artifacts.unique(["model", *SCORES], keep="last", maintain_order=True)
    return pl.concat([sound_models(), once, drawn_models()])


def _own_rows(table: ScoreTable | None) -> pl.DataFrame:
    """One row for each encoder and decoder in a score table."""
    if table is None:
        return pl.DataFrame(schema=COLUMNS)
    rows = summarize(latest(_whole_models(table)))
    return rows.with_columns(pl.col("stack").replace_strict(STACKS, default=None)).drop_nulls(
        ["stack", "parameters"]
    )


def _whole_models(table: ScoreTable) -> ScoreTable:
    """The table without checkpoints that hold only queries and keys: their size is unknown."""
    layers = table.layers.frame.unique(["checkpoint", "revision", "step", "stack", "kind", "layer"])
    # The layer's form has rank G·R: its keys hold G·R·D weights, its queries H/G times as many.
    weights = pl.col("rank") * (
        pl.col("d_query") * pl.col("heads") / pl.col("key_heads") + pl.col("d_key")
    )
    read = layers.group_by("checkpoint").agg(
        weights.sum().alias("read"), pl.col("parameters").max()
    )
    alone = read.filter(pl.col("read") >= QUERIES_AND_KEYS_ALONE * pl.col("parameters"))
    return table.filter(~pl.col("checkpoint").is_in(alone["checkpoint"].implode()))


def _belongs(figure: str, row: Mapping[str, Any], rows: pl.DataFrame) -> bool:
    """Whether a figure shows a row, one of several."""
    name = last_part(row["model"]).lower()
    sets = [some for some in model_sets() if name in _names(some)]
    stacks = rows.filter(model=row["model"])["stack"].n_unique()
    if SETS["s2"][0] in sets or (not sets and stacks > 1):
        return figure == "s2"
    return figure != "s2" and (not sets or any(some in sets for some in SETS[figure]))


@cache
def _names(some: str) -> set[str]:
    """What the models of a set are called, without their owners."""
    return {last_part(model).lower() for model in model_set(some)}


def _draw_models(axis: Axes, rows: pl.DataFrame, score: str) -> list[Annotation]:
    """Marks with quartiles; returns the names beside some of them."""
    from matplotlib.patheffects import withStroke

    own = rows.filter(source="own")
    for row in rows.iter_rows(named=True):
        look = _look(row, faint=bool(own.height))
        below, above = (row[f"{score}_{side}"] for side in ("below", "above"))
        axis.errorbar(
            row["parameters"],
            row[score],
            [[max(below, 0)], [max(above, 0)]],
            linestyle="",
            elinewidth=0.7,
            **look,
        )
    named = own if 0 < own.height <= NAMED else _extremes(rows.filter("sound"), score)
    labels = [
        axis.annotate(
            row["name"],
            (row["parameters"], row[score]),
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=6.5 if row["source"] == "own" else 5.5,
            color=COLORS[row["stack"]],
            zorder=5,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
        )
        for row in named.iter_rows(named=True)
    ]
    axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
    axis.set(xscale="log", xlabel="parameters")
    return labels


def _extremes(rows: pl.DataFrame, score: str) -> pl.DataFrame:
    """Of each stack, the models with the lowest and the highest score, and the largest."""
    chosen = [
        pl.concat([some.sort(score)[[0, -1]], some.sort("parameters")[-1:]])
        for some in rows.partition_by("stack")
        if some.height >= NAMED_EXTREMES
    ]
    return pl.concat(chosen).unique(maintain_order=True) if chosen else rows.clear()


def _look(row: Mapping[str, Any], faint: bool) -> dict[str, Any]:
    """How a row is drawn; published rows are faint next to your own."""
    if not row["sound"]:
        return {"marker": _reason(row), "color": GRAY, "mfc": "white", "ms": 4, "zorder": 1} | {
            "alpha": 0.6, "mew": 0.7
        }  # fmt: skip
    own = row["source"] == "own"
    return {
        "marker": MARKERS[row["stack"]],
        "color": COLORS[row["stack"]],
        "mec": "black" if own else "white",
        "mew": 0.7 if own else 0.4,
        "ms": 6.0 if own else 4.5,
        "alpha": 0.45 if faint and not own else 1.0,
        "zorder": 4 if own else 3,
    }


def _reason(row: Mapping[str, Any]) -> str:
    """The marker of the first reason why a row does not describe a model's own form."""
    return next(marker for flag, marker in HOLLOW.items() if flag in row["flags"])


def _handles(rows: pl.DataFrame) -> list[Any]:
    """The legend: encoders, decoders, and the reasons for hollow marks, with their numbers."""
    from matplotlib.lines import Line2D

    def handle(row: Mapping[str, Any], label: str) -> Line2D:
        look = _look(row, faint=False) | {"linestyle": "", "label": label}
        return Line2D([], [], **look)

    handles = []
    for source, sound in (("published", "published"), ("own", "own scan")):
        some = rows.filter("sound", source=source)
        handles += [
            handle(group.row(0, named=True), f"{group['stack'][0]}, {sound} ({group.height})")
            for group in some.sort("stack", descending=True).partition_by(
                "stack", maintain_order=True
            )
        ]
    artifacts = rows.filter(~pl.col("sound")).to_dicts()
    for flag, marker in HOLLOW.items():
        if same := [row for row in artifacts if _reason(row) == marker]:
            handles.append(handle(same[0], f"{flags()[flag].title} ({len(same)})"))
    return handles
