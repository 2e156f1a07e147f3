"""Score tables for terminals, prompts and notebooks, and as figures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, kind_in_words, last_part, number, one_line
from wqk._style import (
    BLUE,
    GRAY,
    LABELS,
    ORANGE,
    PAGE,
    SIGNS,
    SKY,
    TEAL,
    VIOLET,
    YELLOW,
    new_figure,
    style,
)
from wqk.errors import TableError
from wqk.tables import sheet
from wqk.tables.columns import COLUMNS, MEASURES, Column
from wqk.tables.score_table import FURTHER_COLUMNS, SUMMARIZED, conditions, statuses
from wqk.tables.sheet import NEGATIVE, POSITIVE, Bar, Cell, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    from wqk.tables.score_table import ScoreTable

# The scores that are shown unless all are asked for: the headline directionality is the published
# rule's, by excess, so that tables, ranks, figures and reports agree.
HEADLINE = ("symmetry", "directionality_excess")

# Cells of the shorter half of a bar, where lines are short.
SHORTEST = 4

# Most heads that are listed instead of summarized, and most lines of an overview.
MOST_HEADS = 5000
MOST_LINES = 200

# The group of entry points: each is a function of a score table, as `wqk_lab.atlas.place` is.
PLACES = "wqk.places"

STATUSES = {
    "degenerate": "the form is zero",
    "guessed": "the family was guessed from tensor names",
    "random-looking": "as if the weights had never been trained",
    "non-finite": "NaN or infinite weights",
    "quantized": "the weights are stored with few bits, and scored as they stand",
}


def label(score: str) -> str:
    """Return a score's name on screen.

    Examples
    --------
    >>> label("directionality_excess")
    'directionality (excess)'
    """
    return score.replace("_excess", " (excess)")


def score_table(table: ScoreTable, width: int) -> Iterator[Any]:
    """Yield the layers of one checkpoint and their heads; for several, their medians."""
    checkpoints = table.frame.select("checkpoint", "revision", "step").unique()
    if checkpoints.height > 1:
        yield from overview(table)
    elif len(table):
        yield from one_checkpoint(table, width)
    else:
        yield Text("no rows")


def one_checkpoint(table: ScoreTable, width: int, full: bool = False) -> Iterator[Any]:
    """Yield the scores of a checkpoint, what statuses mean, and what the forms leave out.

    With ``full``, all scores, and what their headings mean.
    """
    yield from scores(table, width, full)
    yield from definitions(table, full)
    yield from remarks(table)


def scores(table: ScoreTable, width: int, full: bool = False) -> Iterator[Any]:
    """Yield a table for each kind of attention of a checkpoint, its heads, and the medians."""
    for frame in table.frame.partition_by("stack", "kind", maintain_order=True):
        layers = frame.filter(pl.col("head").is_null())
        shown = layers if layers.height else frame
        nearest = layers.filter(pl.col("distance") == shown["distance"][0])
        yield from _title(shown.row(0, named=True), nearest.height, table.metadata, frame)
        if nearest.height:
            yield _layers(nearest, full)
        heads = frame.filter(
            pl.col("head").is_not_null(), pl.col("distance") == shown["distance"][0]
        )
        if heads.height > MOST_HEADS:
            yield _head_summary(heads)
        for score in HEADLINE:
            if 0 < heads.height <= MOST_HEADS:
                yield from _across(heads, score, "head", width)
            if nearest.height < layers.height:
                yield from _across(layers, score, "distance", width)
    yield from _medians(table, SUMMARIZED if full else HEADLINE)


def _title(
    row: Mapping[str, Any], layers: int, metadata: Mapping[str, Any], frame: pl.DataFrame
) -> Iterator[Text]:
    heads = counted(row["heads"], "head") if row["heads"] else ""
    if row["key_heads"] not in (None, row["heads"]):
        heads += f" over {counted(row['key_heads'], 'key head')}"
    size = str(row["d_query"])
    if row["d_key"] != row["d_query"]:
        size += f" × {row['d_key']}"
    facts = [
        str(row["family"]),
        f"{row['stack']} {kind_in_words(row['kind'])}",
        counted(layers, "layer") if layers else "",
        heads,
        f"d {size}",
        *conditions(frame, metadata, every=False),
    ]
    yield Text(f"\n{title(row)}", style="bold")
    yield Text(" · ".join(filter(None, facts)))


def title(row: Mapping[str, Any]) -> str:
    """Return the name of a row's checkpoint, with its revision."""
    revision = f" @ {row['revision']}" if row["revision"] else ""
    return one_line(f"{row['checkpoint'] or 'unnamed'}{revision}")


def _columns(frame: pl.DataFrame, full: bool) -> list[Column]:
    """Return the columns of a table of layers, besides their number: those that say something."""
    return [
        column
        for column in COLUMNS
        if column.heading
        and column.name not in ("layer", "head", "norm")
        and (full or column.name in ("window", *HEADLINE, "status"))
        and frame[column.name].is_not_null().any()
        and not (column.name == "status" and (frame["status"] == "ok").all())
    ]


def _layers(layers: pl.DataFrame, full: bool) -> Sheet:
    """One line per layer."""
    shown = _columns(layers, full)
    lines = Sheet([sheet.Column("layer")])
    for column in shown:
        heading = column.heading if full else label(column.name)
        lines.columns.append(sheet.Column(heading))
        if column.name in HEADLINE:
            lines.columns.append(sheet.Column("", text=True))
    for row in layers.iter_rows(named=True):
        cells: list[Any] = [str(row["layer"])]
        for column in shown:
            value = row[column.name]
            cells.append(number(value) if column.type is float else value or "")
            if column.name in HEADLINE:
                cells.append(Bar(value, SHORTEST))
        lines.add(*cells)
    return lines


def _across(frame: pl.DataFrame, score: str, column: str, width: int) -> Iterator[Any]:
    """Layers down, heads or distances across, in hundredths; in blocks that fit the width."""
    if frame[score].is_null().all():
        return
    labels = frame[column].unique(maintain_order=True).to_list()
    room = max(1, (width - 8) // (2 + max(4, *(len(str(label)) for label in labels))))
    yield Text(f"{label(score)} × 100 by {column}", style="dim")
    for start in range(0, len(labels), room):
        shown = labels[start : start + room]
        block = Sheet.of("layer", *map(str, shown))
        for layer in frame.partition_by("layer", maintain_order=True):
            values = dict(zip(layer[column], layer[score], strict=True))
            block.add(str(layer["layer"][0]), *(_hundredths(values.get(x)) for x in shown))
        yield block


def _hundredths(value: float | None) -> Cell:
    if value is None or value != value:
        return Cell("–")
    strength = "bold " if abs(value) >= 0.5 else ""
    return Cell(number(100 * value, 0), style=strength + (POSITIVE if value >= 0 else NEGATIVE))


def _head_summary(heads: pl.DataFrame) -> Sheet:
    """Quartiles over heads that are too many to list."""
    title = f"{heads.height:,} heads"
    lines = Sheet.of(title, "lowest", "q25", "median", "q75", "highest", text=[title])
    for score in HEADLINE:
        values = heads[score].fill_nan(None).drop_nulls()
        if len(values):
            quantiles = (values.quantile(q, "linear") for q in (0, 0.25, 0.5, 0.75, 1))
            lines.add(label(score), *map(number, quantiles))
    return lines


def _medians(table: ScoreTable, scores: Sequence[str]) -> Iterator[Text]:
    """Medians and quartiles over layers."""
    rows = table.summary().filter(
        pl.col("over") == "layers", pl.col("distance") == table.frame["distance"][0]
    )
    for row in rows.iter_rows(named=True):
        where = f" {row['stack']} {row['kind']}" if rows.height > 1 else ""
        where += " (guessed)" if table.metadata.get("inferred") else ""
        for score in scores:
            if row[f"{score}_median"] is not None:
                yield Text.assemble((f"median {label(score)}{where}: ", "dim"), median(row, score))


def median(row: Mapping[str, Any], score: str) -> str:
    """Return the median and the quartiles of a summary's row."""
    middle, low, high = (number(row[f"{score}_{name}"], 2) for name in ("median", "q25", "q75"))
    return f"{middle} (quartiles {low} to {high})"


def definitions(table: ScoreTable, full: bool = False) -> Iterator[Text]:
    """What the statuses of `scores` mean; with ``full``, also the headings."""
    found = table.frame.select(statuses().explode())["status"].drop_nulls().unique().sort()
    meanings = [f"{name}: {STATUSES[name]}" for name in found if name in STATUSES]
    if full:
        shown = [column for column in _columns(table.frame, full) if column.name != "status"]
        meanings = [f"{column.heading}: {column.meaning}" for column in shown] + meanings
    if meanings:
        yield Text("\n".join(meanings), style="dim")


def remarks(table: ScoreTable) -> Iterator[Text]:
    """`notes`, if there are any."""
    if text := "\n".join(notes(table)):
        yield Text(text, style="dim")


def notes(table: ScoreTable) -> Iterator[str]:
    """What the forms leave out, why some are partial, and how a family was guessed."""
    yield from left_out(table)
    reasons: Mapping[str, str] = table.metadata.get("partial") or {}
    yield from (f"partial ({stack}): {reason}" for stack, reason in reasons.items())
    guesses = table.metadata.get("inferred") or []
    yield from (f"family {guess}; check with wqk verify" for guess in guesses)
    unread = table.metadata.get("unread") or []
    yield from (f"not read, though named like attention: {name}" for name in unread)
    yield from table.metadata.get("notes") or []


def left_out(table: ScoreTable) -> Iterator[str]:
    """Terms of the models' scores besides the form, each with its number of models.

    A line for attention, and one for each kind of block without a softmax.
    """
    terms: dict[str, dict[str, dict[str, None]]] = {}
    softmax: Mapping[str, Sequence[str]] = table.metadata.get("left_out") or {}
    others: Mapping[str, Any] = table.metadata.get("left_out_without_softmax") or {}
    for checkpoint in {**softmax, **others}:
        by_kind = {"": softmax.get(checkpoint, ()), **others.get(checkpoint, {})}
        for kind, named in by_kind.items():
            for term in named:
                terms.setdefault(kind, {}).setdefault(term, {})[checkpoint] = None
    count = table.frame["checkpoint"].n_unique()
    for kind, of_kind in terms.items():
        listed = (
            term if len(models) == count else f"{term} ({len(models)} of {count} checkpoints)"
            for term, models in of_kind.items()
        )
        where = f" in {kind}" if kind else ""
        yield f"ignored{where}: {'; '.join(listed)} (wqk explain)"


def overview(table: ScoreTable) -> Iterator[Any]:
    """Medians over layers, one line for each checkpoint and kind of attention."""
    rows = table.summary()
    over = "layers" if (rows["over"] == "layers").any() else "heads"
    rows = rows.filter(pl.col("over") == over)
    has_steps = rows["step"].is_not_null().any()
    headings = ["checkpoint", *(["step"] if has_steps else []), "attention", *map(label, HEADLINE)]
    lines = Sheet.of(*headings, text=["checkpoint", "attention"])
    for row in rows.head(MOST_LINES).iter_rows(named=True):
        step = ["–" if row["step"] is None else str(row["step"])] if has_steps else []
        medians = (number(row[f"{score}_median"]) for score in HEADLINE)
        lines.add(title(row), *step, f"{row['stack']} {row['kind']}", *medians)
    conditional = conditions(table.frame, table.metadata, every=False)
    yield Text(f"\nmedians over {', '.join([over, *conditional])}", style="dim")
    yield lines
    if rows.height > MOST_LINES:
        yield Text(f"and {rows.height - MOST_LINES:,} more", style="dim")
    yield from remarks(table)


def side_by_side(table: ScoreTable) -> Iterator[Any]:
    """Each score with layers down and checkpoints across."""
    names = table.frame["checkpoint"].unique(maintain_order=True).to_list()
    layers = table.layers.frame
    for score in HEADLINE:
        lines = Sheet([sheet.Column("layer")])
        for name in names:
            lines.columns += [sheet.Column(name), sheet.Column("", text=True)]
        for layer in layers.partition_by("layer", maintain_order=True):
            values = dict(zip(layer["checkpoint"], layer[score], strict=True))
            cells: list[Any] = []
            for name in names:
                cells += [number(values.get(name)), Bar(values.get(name), SHORTEST)]
            lines.add(str(layer["layer"][0]), *cells)
        yield Text(f"\n{label(score)}", style="bold")
        yield lines


def measured(
    table: ScoreTable, measures: Sequence[str], sort_by: str | None, top: int | None
) -> Iterator[Any]:
    """Yield a table of scores and one for each measure, of the first ``top`` rows by a column."""
    frame = table.frame
    if sort_by is not None:
        if sort_by not in frame.columns:
            raise TableError(f"no column {sort_by!r}; columns are {', '.join(frame.columns)}")
        nothing = pl.col(sort_by).fill_nan(None) if frame[sort_by].dtype.is_float() else sort_by
        frame = frame.sort(nothing, descending=True, nulls_last=True, maintain_order=True)
    chosen = [measure for measure in MEASURES if measure.name in measures]
    known = {c.name: c for c in (*COLUMNS, *FURTHER_COLUMNS)}
    sheets = [[*HEADLINE, "norm"]]
    sheets += [[column.name for column in one.columns if column.heading] for one in chosen]
    index = [c for c in ("checkpoint", "stack", "kind", "distance") if frame[c].n_unique() > 1]
    index += ["layer", "head"] if frame["head"].is_not_null().any() else ["layer"]
    yield Text(table.frame["checkpoint"][0], style="bold")
    for columns in sheets:
        there = [c for c in columns if c in frame.columns and frame[c].is_not_null().any()]
        if not there:
            continue
        if sort_by is not None and sort_by not in (*there, *index):
            there.append(sort_by)
        names = (*index, *there)
        headings = (known[n].heading if n not in HEADLINE else label(n) for n in names)
        lines = Sheet.of(*(heading or n for n, heading in zip(names, headings, strict=True)))
        for row in frame.head(top or frame.height).iter_rows(named=True):
            cells = ["all" if row[name] is None else str(row[name]) for name in index]
            lines.add(*cells, *(_cell(row[n], row.get(known[n].chance)) for n in there))
        yield lines
    chance = any(column.chance for one in chosen for column in one.columns)
    notes = ["In parentheses: the same of factors with independent entries."] if chance else []
    for measure in chosen:
        reasons = table.metadata.get(f"no_{measure.name}") or {}
        notes += [f"No {measure.name} ({stack}): {why}." for stack, why in reasons.items()]
    yield from (Text(note, style="dim") for note in notes)


def _cell(value: object, beside: float | None) -> Cell:
    if not isinstance(value, float):
        return Cell("–" if value is None else str(value))
    return Cell(f"{value:.3g}", "" if beside is None else f"{beside:.2g}")


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


def plot_table(table: ScoreTable, view: Literal["layers", "heads"]) -> Figure:
    """Draw a table's layers as curves, or its heads as maps; see `ScoreTable.plot`."""
    if view not in ("layers", "heads"):
        raise TableError(f"view is 'layers' or 'heads', got {view!r}")
    rows = table.layers if view == "layers" else table.heads
    if not len(rows):
        raise TableError(f"the table has no rows of {view} to plot")
    with style():
        return _layer_curves(rows) if view == "layers" else _heads(rows)


def _layer_curves(table: ScoreTable) -> Figure:
    figure = new_figure(5.4, 2.5)
    axes = figure.subplots(1, len(LABELS))
    for axis, (score, label) in zip(axes, LABELS.items(), strict=True):
        layer_curves(axis, table, score, label)
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2)
    return figure


def shades_of(stacks: Iterable[str]) -> list[tuple[str, int]]:
    """Return the color of each model, by its stack, and which of its shades.

    Examples
    --------
    >>> shades_of(["encoder", "decoder", "vision"])
    [('encoder', 0), ('decoder', 0), ('encoder', 1)]
    """
    seen: Counter[str] = Counter()
    found = []
    for stack in stacks:
        kind = STACKS.get(stack, "other")
        found.append((kind, seen[kind] % len(SHADES[kind])))
        seen[kind] += 1
    return found


def layer_curves(axis: Axes, table: ScoreTable, score: str, label: str) -> None:
    """One score over the layers, a curve for each model, with zero and the null."""
    models = list(_models(table.layers.frame))
    shades = shades_of(rows["stack"][0] for _, rows in models)
    for index, ((name, rows), (kind, shade)) in enumerate(zip(models, shades, strict=True)):
        color, line = SHADES[kind][shade], LINES[index % len(LINES)]
        axis.plot(rows["layer"], rows[score], line, color=color, label=name, clip_on=False)
        if score == "symmetry":
            axis.plot(rows["layer"], rows["symmetry_null"], ":", color=color, linewidth=0.8)
            if index == 0:
                axis.annotate(
                    "by chance",
                    (rows["layer"][0], 0.0),
                    xytext=(6, -3),
                    va="top",
                    textcoords="offset points",
                    fontsize=6,
                    color=GRAY,
                )
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
    return head_maps(models, LABELS, "", cmap=SIGNS, vmin=-1, vmax=1)


def head_map(axis: Axes, rows: pl.DataFrame, column: str, **look: Any) -> AxesImage:
    """Return a column of rows of heads as a map, layers down and heads across."""
    layer, head = rows["layer"].to_numpy(), rows["head"].to_numpy()
    values = np.full((layer.max() + 1, head.max() + 1), np.nan)
    values[layer, head] = rows[column].cast(pl.Float64).fill_null(np.nan).to_numpy()
    axis.set_xlabel("head")
    drawn = axis.imshow(values, aspect="auto", interpolation="nearest", **look)
    axis.locator_params(integer=True, min_n_ticks=1)
    return drawn


def head_maps(
    kinds: Sequence[tuple[str, pl.DataFrame]], columns: Mapping[str, str], label: str, **look: Any
) -> Figure:
    """Columns of heads as maps with one scale: titled columns across, named attentions down."""
    figure = new_figure(PAGE * 0.45 * len(columns) + 1, 0.6 + 1.9 * len(kinds))
    axes = figure.subplots(len(kinds), len(columns), squeeze=False)
    for (name, part), line in zip(kinds, axes, strict=True):
        for axis, (column, title) in zip(line, columns.items(), strict=True):
            drawn = head_map(axis, part, column, **{"cmap": "magma_r", **look})
            axis.set_title(title)
        line[0].set_ylabel(f"{name}\nlayer")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=25)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=7)
    return figure


def _models(frame: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Each model's attention under a distinct name, at its smallest distance only."""
    models = frame.partition_by("checkpoint", *DISTINGUISHING, maintain_order=True)
    names = titles([rows.row(0, named=True) for rows in models])
    for name, rows in zip(names, models, strict=True):
        yield name, rows.filter(pl.col("distance") == rows["distance"].min())


# Columns that a title adds to a model's name if models of that name differ in them.
DISTINGUISHING = ("revision", "step", "stack", "kind", "circuit")


def titles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The last part of each checkpoint's name, and in what it differs from others of that name.

    Examples
    --------
    >>> rows = [{"checkpoint": "openai/whisper-tiny", "stack": s} for s in ("encoder", "decoder")]
    >>> titles([*rows, {"checkpoint": "openai-community/gpt2", "stack": "decoder"}])
    ['whisper-tiny, encoder', 'whisper-tiny, decoder', 'gpt2']
    """
    words: dict[str, Callable[[Any], str]] = {"kind": kind_in_words, "stack": str}
    names = [last_part(one_line(row["checkpoint"] or "unnamed")) for row in rows]
    told = []
    for name, row in zip(names, rows, strict=True):
        alike = [other for own, other in zip(names, rows, strict=True) if own == name]
        differing = (
            words.get(column, f"{column} {{}}".format)(row[column])
            for column in DISTINGUISHING
            if len({other.get(column) for other in alike}) > 1 and row[column] is not None
        )
        told.append(", ".join([name, *differing]))
    return told


def place(table: ScoreTable) -> list[Any]:
    """Return the place of each checkpoint and stack of a table among models that a package knows.

    As text, each is one sentence; it has the ``name`` of the checkpoint, its ``stack``, a second
    sentence, ``meaning``, the values that were compared, and the ``others``.
    """
    return [found for point in entry_points(group=PLACES) for found in point.load()(table)]
