"""Trained models by size: Figures 2, S1 and S2."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import last_part
from wqk._style import (
    DIRECTIONALITY,
    GRAY,
    PAPER_WIDTH,
    STACK_COLORS,
    SYMMETRY,
    new_figure,
    style,
)
from wqk.errors import TableError, did_you_mean
from wqk.forms.images import MatrixImage
from wqk.reporting.pictures import latest, letter
from wqk.scanning.surveys.model_sets import model_set, model_sets
from wqk.tables.score_table import ScoreTable
from wqk_lab.atlas import all_published, drawn_models, flags, published, sound_models, summarize
from wqk_lab.atlas.ranks import ATLAS_COLUMNS
from wqk_lab.figures.by_layer import draw_form, separate_labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.text import Annotation

SCORES = {"symmetry": SYMMETRY, "directionality": DIRECTIONALITY}

# The paper's sets of models that each figure shows.
SETS = {
    "fig2": ("paper:language",),
    "s1": ("paper:vision", "paper:audio"),
    "s2": ("paper:encoder-decoder",),
}

# What counts as an encoder and as a decoder; other stacks are not drawn.
STACKS = {"encoder": "encoder", "vision": "encoder", "decoder": "decoder"}

MARKERS = {"encoder": "o", "decoder": "s"}

# Rows that do not describe a trained model's own form are hollow, with the marker of their first
# flag in this order.
HOLLOW = {
    "random-looking": "X",
    "grouped-heads": "D",
    "fused-tensor": "v",
    "missing-layers": "^",
    "cross-attention": "<",
}

# Up to this many own scans are all labeled.
LABELED = 8

# The extremes of a stack are labeled as well, if it has at least this many models.
EXTREMES = 3

# Above this share, a checkpoint contains only queries and keys: the model is larger.
QUERIES_AND_KEYS_ALONE = 0.9


# Reasons why figures leave out a checkpoint.
OTHER_FORMS = (
    "no scores of plain self-attention, as of wqk scan without --fold-norm, --bias, --circuit, "
    "--gamma and --distance"
)
OTHER_STACK = "neither an encoder nor a decoder"
NO_SIZE = "no number of parameters in the table"
ALONE = "queries and keys alone, without the other parameters of the model"

# Checkpoints named in a message; the remaining ones are counted.
LISTED = 5


def model_rows(
    figure: str, table: ScoreTable | None = None, parameters: Mapping[str, int] | None = None
) -> pl.DataFrame:
    """Return the rows of ``fig2`` (language), ``s1`` (vision, audio) or ``s2`` (both stacks).

    The rows contain every valid published model once, every published artifact, and the user's
    models at their last step. A user's model is in the figure of its set; a model without a set is
    in ``s2`` if it has an encoder and a decoder, otherwise in ``fig2`` and ``s1``. Columns are the
    columns of `wqk_lab.atlas.ranks`, with ``encoder`` or ``decoder`` as ``stack``; ``modality`` is
    null for the user's models that the paper does not have. ``parameters``
    contains sizes of the user's models, by the name of the checkpoint or the last part of the name.

    Raises
    ------
    TableError
        No size of the user's models is known, or ``parameters`` contains a name that is not in the
        table.

    Examples
    --------
    >>> rows = model_rows("fig2")
    >>> rows.group_by("stack", "sound").len().sort("stack", "sound").rows()
    [('decoder', False, 28), ('decoder', True, 21), ('encoder', False, 4), ('encoder', True, 21)]
    """
    sizes = _sizes(table, parameters or {})
    own_rows = _own_rows(table, sizes)
    if table is not None and len(table) and own_rows.is_empty():
        absent = left_out(table, parameters)
        raise TableError(f"{figure} places models by their size; {'; '.join(absent)}")
    frames = []
    for rows in (_published_rows(), own_rows):
        figures = {model: _figures_of(model, rows) for model in rows["model"].unique()}
        shown = [model for model, names in figures.items() if figure in names]
        frames.append(rows.filter(pl.col("model").is_in(shown)))
    return pl.concat(frames)


def left_out(table: ScoreTable | None, parameters: Mapping[str, int] | None = None) -> list[str]:
    """Return the checkpoints of a table that no figure shows by size, a line for each reason.

    A line about unknown sizes ends with the option and the argument that supply one.

    Examples
    --------
    >>> import wqk
    >>> left_out(wqk.scan(wqk.demo_model("encoder"), gamma=3.0))[0].partition(",")[0]
    'encoder: no scores of plain self-attention'
    """
    if table is None:
        return []
    sizes = _sizes(table, parameters or {})
    placed = set(_own_rows(table, sizes)["model"])
    names_by_reason: dict[str, list[str]] = {}
    for name in table.frame["checkpoint"].unique(maintain_order=True):
        if name not in placed:
            reason = _reason(name, table.filter(pl.col("checkpoint") == name), sizes)
            names_by_reason.setdefault(reason, []).append(name)
    lines = []
    for reason, names in names_by_reason.items():
        advice = _advice(names[0]) if reason in (NO_SIZE, ALONE) else ""
        lines.append(f"{_listed(names)}: {reason}{advice}")
    return lines


def _reason(name: str, table: ScoreTable, sizes: Mapping[str, int]) -> str:
    """Return the reason why no figure shows the only checkpoint of a table."""
    rows = summarize(latest(table))
    if rows.is_empty():
        return OTHER_FORMS
    if not set(rows["stack"]) & set(STACKS):
        return OTHER_STACK
    has_size = name in sizes or rows["parameters"].is_not_null().any()
    return ALONE if has_size else NO_SIZE


def _listed(names: Sequence[str]) -> str:
    """Return the first names of a list, and the number of further names.

    Examples
    --------
    >>> _listed(["models/a", "b"]), _listed([*"abcdefg"])
    ('a, b', 'a, b, c, d, e and 2 more')
    """
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{', '.join(map(last_part, names[:LISTED]))}{more}"


def _advice(checkpoint: str) -> str:
    """Return the end of a message: the option and the argument that supply a model's size.

    Examples
    --------
    >>> _advice("models/bert-base-uncased").partition(", in Python")[0]
    '; give its size: --parameters bert-base-uncased=109000000'
    >>> _advice("models/mine")
    '; give its size: --parameters mine=N, in Python Sources(..., parameters={"mine": N})'
    """
    name = last_part(checkpoint)
    model = pl.col("model").str.split("/").list.last().str.to_lowercase()
    sizes = all_published().filter(model == name.lower())["parameters"].drop_nulls().unique()
    size = str(sizes[0]) if len(sizes) == 1 else "N"
    return (
        f"; give its size: --parameters {shlex.quote(name)}={size}, in Python "
        f'Sources(..., parameters={{"{name}": {size}}})'
    )


def _sizes(table: ScoreTable | None, parameters: Mapping[str, int]) -> dict[str, int]:
    """Return the given numbers of parameters by checkpoint.

    Raises
    ------
    TableError
        A name fits no checkpoint or several checkpoints of the table, or a value is not a number of
        parameters.
    """
    checkpoints: list[str] = []
    if table is not None:
        checkpoints = table.frame["checkpoint"].unique(maintain_order=True).to_list()
    sizes: dict[str, int] = {}
    for name, size in parameters.items():
        fitting = [checkpoint for checkpoint in checkpoints if checkpoint == name]
        fitting = fitting or [each for each in checkpoints if last_part(each) == name]
        if not fitting:
            known = [*map(last_part, checkpoints)]
            advice = did_you_mean(name, known) or f"; there are: {', '.join(known) or 'none'}"
            raise TableError(f"parameters of {name}: no such checkpoint in the table{advice}")
        if len(fitting) > 1:
            raise TableError(
                f"parameters of {name}: several checkpoints have this name; expected one of "
                f"{', '.join(fitting)}"
            )
        if size < 1:
            raise TableError(f"parameters of {name}: expected a whole number from 1 on, got {size}")
        sizes[fitting[0]] = size
    return sizes


@style()
def by_size(rows: pl.DataFrame, matrices: Mapping[str, MatrixImage] | None = None) -> Figure:
    """Draw medians and quartiles of `model_rows` against parameters, next to up to two matrices."""
    # The reason for a hollow marker; null where the row is sound.
    flagged = [pl.when(pl.col("flags").list.contains(flag)).then(pl.lit(flag)) for flag in HOLLOW]
    rows = rows.with_columns(reason=pl.coalesce(flagged))
    matrices = matrices or {}
    figure = new_figure(PAPER_WIDTH, 5.4)
    names_by_axis = {}
    column_widths = [1.6, 1.0] if matrices else [1.6]
    grid = figure.add_gridspec(2, len(column_widths), width_ratios=column_widths)
    for index, (score, title_of_score) in enumerate(SCORES.items()):
        axis = figure.add_subplot(grid[index, 0])
        names_by_axis[axis] = _draw_models(axis, rows.drop_nulls(score), score)
        axis.set_ylabel(title_of_score)
        letter(axis, "ab"[index])
    for index, (title, image) in enumerate(matrices.items()):
        cell = grid[index, 1] if len(matrices) > 1 else grid[:, 1]
        draw_form(figure, cell, image, title, "cd"[index])
    figure.legend(handles=_handles(rows), loc="outside lower center", ncols=3)
    for axis, names in names_by_axis.items():
        separate_labels(axis, names)
    return figure


@cache
def _published_rows() -> pl.DataFrame:
    """Return every valid model once, printed or only drawn, and every artifact."""
    artifacts = published().filter(~pl.col("sound"))
    once = artifacts.unique(["model", *SCORES], keep="last", maintain_order=True)
    return pl.concat([sound_models(), once, drawn_models()])


def _own_rows(table: ScoreTable | None, sizes: Mapping[str, int]) -> pl.DataFrame:
    """Return one row for each encoder and decoder of a score table; ``sizes`` have precedence."""
    if table is None:
        return pl.DataFrame(schema=ATLAS_COLUMNS)
    rows = summarize(latest(_whole_models(table, sizes)))
    size = pl.col("model").replace_strict(sizes, default=None, return_dtype=pl.Int64)
    name = pl.col("model").str.split("/").list.last().str.to_lowercase()
    rows = rows.with_columns(
        pl.col("stack").replace_strict(STACKS, default=None),
        modality=name.replace_strict(_modalities(), default=None, return_dtype=pl.String),
        parameters=pl.coalesce(size, "parameters"),
    )
    return rows.drop_nulls(["stack", "parameters"])


@cache
def _modalities() -> dict[str, str]:
    """Return the modality of each published model, by the last part of its name in lowercase."""
    rows = all_published().drop_nulls(["model", "modality"])
    return {last_part(row["model"]).lower(): row["modality"] for row in rows.to_dicts()}


def _whole_models(table: ScoreTable, sizes: Collection[str]) -> ScoreTable:
    """Return the table without checkpoints of only queries and keys, unless in ``sizes``."""
    layers = table.layers.frame.unique(["checkpoint", "revision", "step", "stack", "kind", "layer"])
    # The layer's form has rank G·R: its keys hold G·R·D weights, its queries H/G times as many.
    rank = pl.col("rank")
    heads_per_key_head = pl.col("heads") / pl.col("key_heads")
    query_weights = rank * pl.col("d_query") * heads_per_key_head
    key_weights = rank * pl.col("d_key")
    checkpoints = layers.group_by("checkpoint").agg(
        pl.col("parameters").max(), read=(query_weights + key_weights).sum()
    )
    is_alone = pl.col("read") >= QUERIES_AND_KEYS_ALONE * pl.col("parameters")
    size_is_unknown = ~pl.col("checkpoint").is_in([*sizes])
    dropped = checkpoints.filter(is_alone, size_is_unknown)["checkpoint"]
    return table.filter(~pl.col("checkpoint").is_in(dropped.implode()))


def _figures_of(model: str, rows: pl.DataFrame) -> list[str]:
    """Return the figures that show a model, by the paper's sets that contain the model.

    For a model without a set, the number of its stacks in ``rows`` decides.
    """
    name = last_part(model).lower()
    sets = {set_name for set_name in model_sets() if name in _names(set_name)}
    if not sets:
        has_both_stacks = rows.filter(model=model)["stack"].n_unique() > 1
        return ["s2"] if has_both_stacks else ["fig2", "s1"]
    if not sets.isdisjoint(SETS["s2"]):
        return ["s2"]
    return [figure for figure, of_figure in SETS.items() if not sets.isdisjoint(of_figure)]


@cache
def _names(set_name: str) -> set[str]:
    """Return the names of a set's models, without their owners."""
    return {last_part(model).lower() for model in model_set(set_name)}


def _draw_models(axis: Axes, rows: pl.DataFrame, score: str) -> list[Annotation]:
    """Draw markers with quartiles; return the names to write next to some markers."""
    from matplotlib.patheffects import withStroke

    own_rows = rows.filter(source="own")
    for row in rows.iter_rows(named=True):
        error = [[max(row[f"{score}_{side}"], 0)] for side in ("below", "above")]
        look = _look(row, faint=bool(own_rows.height)) | {"linestyle": "", "elinewidth": 0.7}
        axis.errorbar(row["parameters"], row[score], error, **look)
    names = []
    for row in _labeled(rows, score).iter_rows(named=True):
        name = axis.annotate(
            row["name"],
            (row["parameters"], row[score]),
            xytext=(5, 3),
            textcoords="offset points",
            fontsize=6.5 if row["source"] == "own" else 5.5,
            color=STACK_COLORS[row["stack"]],
            zorder=5,
            path_effects=[withStroke(linewidth=1.5, foreground="white")],
        )
        names.append(name)
    axis.axhline(0, color=GRAY, linewidth=0.5, zorder=0)
    axis.set(xscale="log", xlabel="parameters")
    return names


def _labeled(rows: pl.DataFrame, score: str) -> pl.DataFrame:
    """Return the models with a label: own models, unless there are many, and the extremes."""
    own_rows = rows.filter(source="own")
    if own_rows.height > LABELED:
        return _extremes(rows.filter("sound"), score)
    # Own models are first, so that labels are close to the markers.
    return pl.concat([own_rows, _extremes(rows.filter("sound", source="published"), score)])


def _extremes(rows: pl.DataFrame, score: str) -> pl.DataFrame:
    """Return the models of each stack with the lowest and highest score, and the largest."""
    chosen = []
    for rows_of_stack in rows.partition_by("stack"):
        if rows_of_stack.height >= EXTREMES:
            lowest_and_highest = rows_of_stack.sort(score)[[0, -1]]
            largest = rows_of_stack.sort("parameters")[-1:]
            chosen += [lowest_and_highest, largest]
    if not chosen:
        return rows.clear()
    extremes = pl.concat(chosen).unique(maintain_order=True)
    names = extremes["name"].to_list()
    # Variants of one model are close to each other: the shortest name is enough.
    beginnings = tuple(f"{short}-" for short in names)
    variants = [name for name in names if name.startswith(beginnings)]
    return extremes.filter(~pl.col("name").is_in(variants))


def _look(row: Mapping[str, Any], faint: bool) -> dict[str, Any]:
    """Return the marker of a row; ``faint`` for published rows next to the user's rows."""
    if row["reason"]:
        return {
            "marker": HOLLOW[row["reason"]],
            "color": GRAY,
            "mfc": "white",
            "mew": 0.7,
            "ms": 4,
            "alpha": 0.6,
            "zorder": 1,
        }
    is_own = row["source"] == "own"
    return {
        "marker": MARKERS[row["stack"]],
        "color": STACK_COLORS[row["stack"]],
        "mec": "black" if is_own else "white",
        "mew": 0.7 if is_own else 0.4,
        "ms": 6.0 if is_own else 4.5,
        "alpha": 0.45 if faint and not is_own else 1.0,
        "zorder": 4 if is_own else 3,
    }


def _handles(rows: pl.DataFrame) -> list[Line2D]:
    """Return the legend: encoders, decoders, and the numbered reasons for hollow markers."""
    from matplotlib.lines import Line2D

    rows_by_title = {}
    for source, title_of_source in (("published", "published"), ("own", "own scan")):
        for stack in STACK_COLORS:
            rows_of_stack = rows.filter("sound", source=source, stack=stack)
            rows_by_title[f"{stack}, {title_of_source}"] = rows_of_stack
    for flag in HOLLOW:
        rows_by_title[flags()[flag].title] = rows.filter(reason=flag)
    handles = []
    for title, rows_of_title in rows_by_title.items():
        if rows_of_title.height:
            look = _look(rows_of_title.row(0, named=True), faint=False)
            label = f"{title} ({rows_of_title.height})"
            handles.append(Line2D([], [], linestyle="", label=label, **look))
    return handles
