"""Score tables for terminals, prompts and notebooks, and as figures."""

from __future__ import annotations

import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self

import numpy as np
import polars as pl
from rich.text import Text

from wqk._console import counted, display_name, kind_in_words, number, one_line, spans
from wqk._style import (
    BLUE,
    GRAY,
    ORANGE,
    PAPER_WIDTH,
    SCORE_LABELS,
    SIGN_COLORS,
    SKY,
    TEAL,
    VIOLET,
    YELLOW,
    new_figure,
    style,
)
from wqk.errors import TableError, did_you_mean, shortened
from wqk.forms.scores import symmetry_by_chance
from wqk.tables import sheet
from wqk.tables.changes import sentences
from wqk.tables.columns import COLUMNS, MEASURES, Column, advice_on_measure
from wqk.tables.schema import FURTHER_COLUMNS, SUMMARIZED, conditions, status_counts, statuses
from wqk.tables.sheet import NEGATIVE, POSITIVE, Bar, Cell, Sheet

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.image import AxesImage

    class ScoreRows(Protocol):
        """The part of a score table that the display needs; `ScoreTable` has this interface."""

        @property
        def frame(self) -> pl.DataFrame:
            """The rows."""

        @property
        def metadata(self) -> Mapping[str, Any]:
            """Description of the scores."""

        @property
        def layers(self) -> Self:
            """The rows of whole layers."""

        @property
        def heads(self) -> Self:
            """The rows of single heads."""

        def summary(self) -> pl.DataFrame:
            """Return medians and quartiles."""

        def __len__(self) -> int:
            """Return the number of rows."""


# Width of a table of medians without the names of the checkpoints, the kinds of attention, the
# steps and the distances; width of steps or distances.
WIDTH_OF_MEDIANS, WIDTH_OF_NUMBERS = 39, 10

# The scores that are shown by default. The directionality is that of the published tables, by
# excess, in tables, ranks, figures and reports alike.
HEADLINE = ("symmetry", "directionality_excess")

# Smallest width of half a bar, in cells.
SHORTEST_BAR = 4

# Most heads that are listed instead of summarized, and most lines of an overview.
MOST_HEADS = 5000
MOST_LINES = 200

# The group of entry points; each is a function of a score table, such as `wqk_lab.atlas.place`.
PLACES = "wqk.places"

# Largest number of models in the note on a status.
MOST_NAMED = 4

STATUS_MEANINGS = {
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


def score_table(table: ScoreRows, width: int) -> Iterator[Any]:
    """Yield the layers and heads of one checkpoint, or the medians of several checkpoints."""
    checkpoints = table.frame.select("checkpoint", "revision", "step").unique()
    if checkpoints.height > 1:
        yield from overview(table, width)
    elif len(table):
        yield from one_checkpoint(table, width)
    else:
        yield Text("no rows")


def one_checkpoint(table: ScoreRows, width: int, full: bool = False) -> Iterator[Any]:
    """Yield a checkpoint's scores, the meaning of statuses, and the terms that forms leave out.

    ``full`` adds the other scores and definitions of the headings.
    """
    yield from scores(table, width, full)
    yield from definitions(table, full)
    yield from remarks(table)


def scores(table: ScoreRows, width: int, full: bool = False) -> Iterator[Any]:
    """Yield a table for each kind of attention of a checkpoint, its heads, and the medians."""
    for frame in table.frame.partition_by("stack", "kind", maintain_order=True):
        layers = frame.filter(pl.col("head").is_null())
        described = layers if layers.height else frame
        first_distance = pl.col("distance") == described["distance"][0]
        layers_there = layers.filter(first_distance)
        yield from _title(described.row(0, named=True), layers_there.height, table.metadata, frame)
        has_further_distances = frame["distance"].n_unique() > 1
        if has_further_distances:
            yield Text(f"distance {described['distance'][0]}", style="dim")
        if layers_there.height:
            yield _layers(layers_there, full)
        heads = frame.filter(pl.col("head").is_not_null(), first_distance)
        if heads.height > MOST_HEADS:
            yield _head_summary(heads)
        for score in HEADLINE:
            if 0 < heads.height <= MOST_HEADS:
                yield from _across(heads, score, "head", width)
            if has_further_distances and layers.height:
                yield from _across(layers, score, "distance", width)
    yield from _medians(table, SUMMARIZED if full else HEADLINE)


def _title(
    row: Mapping[str, Any], layers: int, metadata: Mapping[str, Any], frame: pl.DataFrame
) -> Iterator[Text]:
    heads = counted(row["heads"], "head") if row["heads"] else ""
    if row["key_heads"] not in (None, row["heads"]):
        heads += f" over {counted(row['key_heads'], 'key head')}"
    size = f"d {row['d_query']}" if row["d_query"] else ""
    if row["d_key"] != row["d_query"]:
        size += f" × {row['d_key']}"
    facts = [
        row["family"],
        f"{row['stack']} {kind_in_words(row['kind'])}",
        _counted_layers(row, layers, metadata, frame),
        heads,
        size,
        *conditions(frame, metadata, every=False),
    ]
    yield Text(f"\n{title(row)}", style="bold")
    yield Text(" · ".join(filter(None, facts)))


def _counted_layers(
    row: Mapping[str, Any], layers: int, metadata: Mapping[str, Any], frame: pl.DataFrame
) -> str:
    """Return the number of layers, or the chosen layers and the number of all layers."""
    if not layers:
        return ""
    layers_of_model = (metadata.get("layers_of_model") or {}).get(row["checkpoint"]) or {}
    count = layers_of_model.get(f"{row['stack']} {row['kind']}")
    if count is None:
        return counted(layers, "layer")
    numbers = spans(sorted(frame["layer"].drop_nulls().unique().to_list()))
    return f"{'layer' if layers == 1 else 'layers'} {numbers} of {count}"


def title(row: Mapping[str, Any]) -> str:
    """Return the name of a row's checkpoint, with its revision."""
    name = display_name(row["checkpoint"] or "unnamed")
    revision = f" @ {row['revision']}" if row["revision"] else ""
    return one_line(f"{name}{revision}")


# Scores with values by chance next to them, and the columns of these values.
BY_CHANCE = {"symmetry_within_heads": "symmetry_within_random"}


def _in_printed_order() -> Iterator[Column]:
    """Yield all columns in order, but each value by chance directly after the score."""
    column_of = {column.name: column for column in COLUMNS}
    for column in COLUMNS:
        if column.name not in BY_CHANCE.values():
            yield column
        if column.name in BY_CHANCE:
            yield column_of[BY_CHANCE[column.name]]


def _columns(frame: pl.DataFrame, full: bool) -> list[Column]:
    """Return the columns that a table of layers shows after the layer's number.

    The columns contain floating-point numbers or text. The norm is not shown. Columns without
    values are left out, and so is the status if all layers are ``ok``. Without ``full``, only
    windows, the headline scores and the status remain.
    """
    columns = []
    for column in _in_printed_order():
        if not column.heading or column.name in ("layer", "head", "norm"):
            continue
        if not full and column.name not in ("window", *HEADLINE, "status"):
            continue
        if frame[column.name].is_null().all():
            continue
        if column.name == "status" and (frame["status"] == "ok").all():
            continue
        columns.append(column)
    return columns


def _layers(layers: pl.DataFrame, full: bool) -> Sheet:
    """Lay out one line for each layer."""
    columns = _columns(layers, full)
    lines = Sheet([sheet.SheetColumn("layer")])
    for column in columns:
        heading = column.heading if full else label(column.name)
        lines.columns.append(sheet.SheetColumn(heading))
        if column.name in HEADLINE:
            lines.columns.append(sheet.SheetColumn("", text=True))
    for row in layers.iter_rows(named=True):
        cells: list[Any] = [str(row["layer"])]
        for column in columns:
            value = row[column.name]
            cells.append(number(value) if column.type is float else value or "")
            if column.name in HEADLINE:
                cells.append(Bar(value, SHORTEST_BAR))
        lines.add(*cells)
    return lines


def _across(frame: pl.DataFrame, score: str, column: str, width: int) -> Iterator[Any]:
    """Lay out layers down, heads or distances across, in hundredths, split to fit the width."""
    if frame[score].is_null().all():
        return
    places = frame[column].unique(maintain_order=True).to_list()  # heads or distances
    cell_width = 2 + max(4, *(len(str(place)) for place in places))
    per_block = max(1, (width - 8) // cell_width)
    yield Text(f"{label(score)} × 100 by {column}", style="dim")
    for start in range(0, len(places), per_block):
        places_of_block = places[start : start + per_block]
        block = Sheet.of("layer", *map(str, places_of_block))
        for layer in frame.partition_by("layer", maintain_order=True):
            values = dict(zip(layer[column], layer[score], strict=True))
            cells = [_hundredths(values.get(place)) for place in places_of_block]
            block.add(str(layer["layer"][0]), *cells)
        yield block


def _hundredths(value: float | None) -> Cell:
    if value is None or value != value:
        return Cell("–")
    color = POSITIVE if value >= 0 else NEGATIVE
    return Cell(number(100 * value, 0), style=f"bold {color}" if abs(value) >= 0.5 else color)


def _head_summary(heads: pl.DataFrame) -> Sheet:
    """Return the quartiles over heads, for layers with too many heads for a list."""
    title = f"{heads.height:,} heads"
    lines = Sheet.of(title, "lowest", "q25", "median", "q75", "highest", text=[title])
    for score in HEADLINE:
        values = heads[score].fill_nan(None).drop_nulls()
        if len(values):
            quantiles = (values.quantile(q, "linear") for q in (0, 0.25, 0.5, 0.75, 1))
            lines.add(label(score), *map(number, quantiles))
    return lines


def _medians(table: ScoreRows, scores: Sequence[str]) -> Iterator[Text]:
    """Yield medians and quartiles over layers, at the first distance of a table."""
    distances = table.frame["distance"]
    rows = table.summary().filter(pl.col("over") == "layers", pl.col("distance") == distances[0])
    at_distance = f" at distance {distances[0]}" if distances.n_unique() > 1 else ""
    for row in rows.iter_rows(named=True):
        attention = f" {row['stack']} {row['kind']}" if rows.height > 1 else ""
        if table.metadata.get("inferred"):
            attention += " (guessed)"
        for score in scores:
            if row[f"{score}_median"] is not None:
                beginning = f"median {label(score)}{attention}{at_distance}: "
                yield Text.assemble((beginning, "dim"), median(row, score))


def median(row: Mapping[str, Any], score: str) -> str:
    """Return the median and the quartiles of a summary's row."""
    middle, low, high = (number(row[f"{score}_{name}"], 2) for name in ("median", "q25", "q75"))
    return f"{middle} (quartiles {low} to {high})"


def definitions(table: ScoreRows, full: bool = False) -> Iterator[Text]:
    """Define the statuses in a table of `scores`; with ``full``, also the headings."""
    meanings = list(_meanings_of_headings(table)) if full else []
    present = table.frame.select(statuses().explode())["status"].drop_nulls().unique().sort()
    for status in present:
        if status in STATUS_MEANINGS:
            meanings.append(f"{status}: {STATUS_MEANINGS[status]}")
    if meanings:
        yield Text("\n".join(meanings), style="dim")


def _meanings_of_headings(table: ScoreRows) -> Iterator[str]:
    """Define the headings of a table of `scores` with all columns."""
    for column in _columns(table.frame, full=True):
        if column.name != "status":
            yield f"{column.heading}: {column.meaning}"
        if column.name == "symmetry_null":
            yield from _chance_at_width(table)


def _chance_at_width(table: ScoreRows) -> Iterator[str]:
    """Yield the symmetry of independent entries, with its spread, for each width of a table."""
    widths = table.frame.filter(pl.col("d_query") == pl.col("d_key"))["d_query"].unique().sort()
    for width in widths.drop_nulls():
        mean, spread = symmetry_by_chance(width)
        yield (
            f"chance: {mean:.2g} ± {spread:.2g} for independent entries at d {width}, "
            "1/d ± √2/d (mean and standard deviation)"
        )


def heading_definitions(table: ScoreRows) -> Iterator[Text]:
    """Define the headings of a table of `scores` with all columns."""
    yield Text("\n".join(_meanings_of_headings(table)), style="dim")


def model_statuses(table: ScoreRows) -> Iterator[Text]:
    """Define the statuses in a table of several models, and name the models."""
    rows = table.frame.filter(pl.col("head").is_null())
    rows = rows if len(rows) else table.frame
    models = rows.partition_by("checkpoint", "revision", "step", maintain_order=True)
    names = titles([model.row(0, named=True) for model in models])
    models_by_status: dict[str, list[str]] = {}
    for name, model in zip(names, models, strict=True):
        for status, count in status_counts(model["status"].drop_nulls()).items():
            share = "" if count == len(model) else f" ({count} of {len(model)} rows)"
            models_by_status.setdefault(status, []).append(name + share)
    for status, meaning in STATUS_MEANINGS.items():
        named = models_by_status.get(status, [])
        is_note = status == "guessed" and len(named) == 1 and table.metadata.get("inferred")
        if named and not is_note:  # the note on a guessed family names the only model
            models_of_status = ", ".join(named[:MOST_NAMED])
            if len(named) > MOST_NAMED:
                models_of_status += f" and {len(named) - MOST_NAMED} more"
            yield Text(f"{status}: {meaning}, in {models_of_status}", style="dim")


def remarks(table: ScoreRows) -> Iterator[Text]:
    """Yield the `notes` as one text; nothing without notes."""
    if text := "\n".join(notes(table)):
        yield Text(text, style="dim")


def notes(table: ScoreRows) -> Iterator[str]:
    """Yield the terms that forms leave out, and notes on partial forms and guessed families.

    Equal notes on several checkpoints become one note.
    """
    checkpoints = table.frame["checkpoint"].drop_nulls().unique(maintain_order=True).to_list()
    yield from left_out(table)
    yield from folded(_notes(table), checkpoints)


def folded(lines: Iterable[str], names: Sequence[str]) -> Iterator[str]:
    """Yield lines without repetitions: lines that differ only in one of the names count as equal.

    Examples
    --------
    >>> [*folded(["a: guessed", "b: guessed", "b: partial"], ["a", "b"])]
    ['a: guessed (1 more checkpoint)', 'b: partial']
    """
    lines_by_form: dict[str, list[str]] = {}
    longest_first = sorted(names, key=len, reverse=True)
    for line in lines:
        form = line
        for name in longest_first:
            if name and re.search(_whole(name), line):
                form = re.sub(_whole(name), "\0", line)
                break
        lines_by_form.setdefault(form, []).append(line)
    for similar_lines in lines_by_form.values():
        further = len(set(similar_lines)) - 1
        if further:
            yield f"{similar_lines[0]} ({counted(further, 'more checkpoint')})"
        else:
            yield similar_lines[0]


def _whole(name: str) -> str:
    """Return a pattern that matches a name, but not within a longer word."""
    return rf"(?<![\w/.-]){re.escape(name)}(?![\w/-])"


def _notes(table: ScoreRows) -> Iterator[str]:
    """Yield notes on partial forms and guessed families, and the notes on the checkpoints."""
    reasons: Mapping[str, str] = table.metadata.get("partial") or {}
    yield from (f"partial ({stack}): {reason}" for stack, reason in reasons.items())
    guesses = table.metadata.get("inferred") or []
    yield from (f"family {guess}; check with wqk verify" for guess in guesses)
    unread = table.metadata.get("unread") or []
    yield from (f"not read, though named like attention: {name}" for name in unread)
    yield from table.metadata.get("notes") or []
    if groups := table.metadata.get("identical"):
        yield identical_models(groups)


# Groups of identical models in one note, and names of one group.
MOST_GROUPS, MOST_IDENTICAL = 4, 4


def identical_models(groups: Sequence[Sequence[str]]) -> str:
    """Return the note on groups of models with identical scores.

    Examples
    --------
    >>> identical_models([["a", "b"], ["c", "d", "e", "f", "g"]])
    'identical scores (biases ignored): a = b; c = d = e = f and 1 more'
    """
    phrases = []
    for names in groups[:MOST_GROUPS]:
        phrase = " = ".join(names[:MOST_IDENTICAL])
        if len(names) > MOST_IDENTICAL:
            phrase += f" and {len(names) - MOST_IDENTICAL} more"
        phrases.append(phrase)
    if len(groups) > MOST_GROUPS:
        phrases.append(f"and {counted(len(groups) - MOST_GROUPS, 'more group')}")
    return f"identical scores (biases ignored): {'; '.join(phrases)}"


def left_out(table: ScoreRows) -> Iterator[str]:
    """Yield the terms of scores that forms leave out, each with the number of models.

    One line is for attention with a softmax, and one for each kind of block without a softmax.
    Terms that differ only in a number are counted as one term.
    """
    softmax: Mapping[str, Sequence[str]] = table.metadata.get("left_out") or {}
    without_softmax: Mapping[str, Any] = table.metadata.get("left_out_without_softmax") or {}
    # By kind of block ("" for a softmax), the terms of each checkpoint.
    terms_by_kind: dict[str, list[Sequence[str]]] = {}
    for checkpoint in {**softmax, **without_softmax}:
        by_kind = {"": softmax.get(checkpoint, ()), **without_softmax.get(checkpoint, {})}
        for kind, terms in by_kind.items():
            if terms:
                terms_by_kind.setdefault(kind, []).append(terms)
    checkpoints = table.frame["checkpoint"].n_unique()
    for kind, terms_of_checkpoints in terms_by_kind.items():
        phrases = []
        for term, count in _terms_with_counts(terms_of_checkpoints):
            scope = "" if count == checkpoints else f" ({count} of {checkpoints} checkpoints)"
            phrases.append(f"{term}{scope}")
        blocks = f" in {kind}" if kind else ""
        yield f"ignored{blocks}: {'; '.join(phrases)} (wqk explain)"


# The first number of a term, with the text around it.
NUMBER_IN_TERM = re.compile(r"(.*?)(\d+(?:\.\d+)?(?:e[-+]?\d+)?)(.*)", re.DOTALL)

# Most numbers of a term that are listed; of more, the lowest and the highest.
MOST_NUMBERS = 3


def _terms_with_counts(
    terms_of_checkpoints: Iterable[Iterable[str]],
) -> Iterator[tuple[str, int]]:
    """Yield terms with numbers of checkpoints; terms that differ in a number are joined.

    Examples
    --------
    >>> terms = [["biases", "the scale, 0.5"], ["the scale, 0.25"], ["the scale, 0.5"]]
    >>> [*_terms_with_counts(terms)]
    [('biases', 1), ('the scale, 0.25 or 0.5', 3)]
    """
    counts: Counter[tuple[str, str]] = Counter()
    numbers: dict[tuple[str, str], set[str]] = {}
    for terms in terms_of_checkpoints:
        forms = set()
        for term in terms:
            match = NUMBER_IN_TERM.fullmatch(term)
            before, number_in_term, after = match.groups() if match else (term, "", "")
            form = (before, after)
            numbers.setdefault(form, set()).add(number_in_term)
            forms.add(form)
        counts.update(forms)
    for before, after in numbers:  # in the order of the terms
        values = sorted(numbers[before, after] - {""}, key=float)
        yield f"{before}{_listed_numbers(values)}{after}", counts[before, after]


def _listed_numbers(values: Sequence[str]) -> str:
    """Return sorted numbers as a phrase.

    Examples
    --------
    >>> [_listed_numbers("12345"[:count]) for count in range(5)]
    ['', '1', '1 or 2', '1, 2 or 3', '1 to 4']
    """
    if len(values) > MOST_NUMBERS:
        return f"{values[0]} to {values[-1]}"
    beginning = ", ".join(values[:-1])
    return f"{beginning} or {values[-1]}" if beginning else "".join(values)


def overview(table: ScoreRows, width: int) -> Iterator[Any]:
    """Lay out medians over layers, one line for each checkpoint and kind of attention."""
    rows = table.summary()
    over = "layers" if (rows["over"] == "layers").any() else "heads"
    rows = rows.filter(pl.col("over") == over)
    further_columns = []
    if rows["step"].is_not_null().any():
        further_columns.append("step")
    if rows["distance"].n_unique() > 1:
        further_columns.append("distance")
    headings = ["checkpoint", *further_columns, "attention", *map(label, HEADLINE)]
    lines = Sheet.of(*headings, text=["checkpoint", "attention"])
    printed = [*rows.head(MOST_LINES).iter_rows(named=True)]
    attentions = [f"{row['stack']} {row['kind']}" for row in printed]
    width_of_attention = max(map(len, ["attention", *attentions]))
    width_of_others = (
        WIDTH_OF_MEDIANS + width_of_attention + len(further_columns) * WIDTH_OF_NUMBERS
    )
    longest = max(16, width - width_of_others)
    folder, names = short_names([title(row) for row in printed], longest)
    for name, attention, row in zip(names, attentions, printed, strict=True):
        cells = [name]
        for column in further_columns:
            cells.append("–" if row[column] is None else str(row[column]))
        cells.append(attention)
        cells += [number(row[f"{score}_median"]) for score in HEADLINE]
        lines.add(*cells)
    conditional = conditions(table.frame, table.metadata, every=False)
    where = f", of {folder}" if folder else ""
    yield Text(f"\nmedians over {', '.join([over, *conditional])}{where}", style="dim")
    yield lines
    if rows.height > MOST_LINES:
        yield Text(f"and {rows.height - MOST_LINES:,} more", style="dim")
    yield from map(Text, sentences(table.frame))
    yield from remarks(table)
    yield from model_statuses(table)


def side_by_side(table: ScoreRows) -> Iterator[Any]:
    """Yield a table for each headline score, layers down and checkpoints across."""
    names = table.frame["checkpoint"].unique(maintain_order=True).to_list()
    layers = table.layers.frame
    for score in HEADLINE:
        lines = Sheet([sheet.SheetColumn("layer")])
        for name in names:
            lines.columns += [
                sheet.SheetColumn(display_name(name or "unnamed")),
                sheet.SheetColumn("", text=True),
            ]
        for layer in layers.partition_by("layer", maintain_order=True):
            values = dict(zip(layer["checkpoint"], layer[score], strict=True))
            cells: list[Any] = []
            for name in names:
                value = values.get(name)
                cells += [number(value), Bar(value, SHORTEST_BAR)]
            lines.add(str(layer["layer"][0]), *cells)
        yield Text(f"\n{label(score)}", style="bold")
        yield lines


@dataclass(frozen=True)
class SortOrder:
    """The order of rows by a column, as ``--sort`` describes it.

    Rows without a value come last in either direction.

    Attributes
    ----------
    column
        Name of the column.
    smallest_first
        Whether the smallest values come first, instead of the largest.

    Examples
    --------
    >>> SortOrder.parse("symmetry")
    SortOrder(column='symmetry', smallest_first=False)
    >>> SortOrder.parse("-symmetry")
    SortOrder(column='symmetry', smallest_first=True)
    """

    column: str
    smallest_first: bool = False

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the order for a column's name; after a minus, smallest values come first."""
        return cls(text.removeprefix("-"), smallest_first=text.startswith("-"))

    def sort(self, frame: pl.DataFrame) -> pl.DataFrame:
        """Sort the rows.

        Raises
        ------
        TableError
            No column has the name.
        """
        name = self.column
        if name not in frame.columns:
            # Scores are the usual columns for sorting.
            scores = [column for column, kind in frame.schema.items() if kind.is_float()]
            advice = (
                advice_on_measure(name)
                or did_you_mean(name, frame.columns)
                or f"; scores are {', '.join(scores)}; a minus in front, such as -symmetry, puts "
                "the smallest values first"
            )
            raise TableError(f"no column {name!r}{advice}")
        key = pl.col(name)
        if frame[name].dtype.is_float():
            key = key.fill_nan(None)
        return frame.sort(
            key, descending=not self.smallest_first, nulls_last=True, maintain_order=True
        )


def measured(
    table: ScoreRows, measures: Sequence[str], order: SortOrder | None, top: int | None
) -> Iterator[Any]:
    """Yield a table of scores and a table for each measure, of the first ``top`` rows.

    A sorted table ranks heads with heads: if the table has heads, the rows of layers are left out.
    """
    frame = ranked(table.frame, order, top)
    selected = [measure for measure in MEASURES if measure.name in measures]
    columns_of_sheets = [[*HEADLINE, "norm"]]
    for measure in selected:
        columns_of_sheets.append([column.name for column in measure.columns if column.heading])
    index = ["checkpoint", "stack", "kind", "distance"]
    index = [name for name in index if table.frame[name].n_unique() > 1]
    index += ["layer", "head"] if table.frame["head"].is_not_null().any() else ["layer"]
    yield Text(display_name(table.frame["checkpoint"][0] or "unnamed"), style="bold")
    for names in columns_of_sheets:
        filled = [
            name
            for name in names
            if name in frame.columns and table.frame[name].is_not_null().any()
        ]
        if not filled:
            continue
        if order is not None and order.column not in (*filled, *index):
            filled.append(order.column)
        yield _sheet_of_columns(frame, index, filled)
    notes = []
    columns = chain.from_iterable(measure.columns for measure in selected)
    if any(column.chance for column in columns):
        notes.append("In parentheses: the same of factors with independent entries.")
    for measure in selected:
        reasons = table.metadata.get(f"no_{measure.name}") or {}
        notes += [f"No {measure.name} ({stack}): {reason}." for stack, reason in reasons.items()]
    yield from (Text(note, style="dim") for note in notes)


def ranked(frame: pl.DataFrame, order: SortOrder | None, top: int | None) -> pl.DataFrame:
    """Return the first ``top`` rows, sorted by a column; if sorted, only rows of heads, if any."""
    if order is not None:
        if frame["head"].is_not_null().any():
            frame = frame.filter(pl.col("head").is_not_null())
        frame = order.sort(frame)
    return frame.head(top or frame.height)


# Columns that rows of layers leave empty.
COLUMNS_OF_HEADS = ("head", "key_head")
# Advice if such a column is requested, but the table has only rows of layers.
ROWS_OF_LAYERS = "these are rows of layers; --heads adds a row for each head"


def reason_not_sorted(table: ScoreRows, order: SortOrder) -> str:
    """Return the reason if a column is empty in all rows to be sorted; otherwise nothing."""
    name = order.column
    values = ranked(table.frame, order, None)[name]
    if values.dtype.is_float():
        values = values.fill_nan(None)
    if values.is_empty() or values.is_not_null().any():
        return ""
    is_of_layers = table.frame["head"].is_null().all()
    if is_of_layers and name in COLUMNS_OF_HEADS:
        return f"not sorted by {name}: {ROWS_OF_LAYERS}"
    is_filled_elsewhere = table.frame[name].is_not_null().any()
    if not is_of_layers and is_filled_elsewhere:
        return f"not sorted by {name}: only rows of layers have it; leave out --heads to sort those"
    return f"not sorted by {name}: the column is empty"


def _sheet_of_columns(frame: pl.DataFrame, index: Sequence[str], names: Sequence[str]) -> Sheet:
    """Lay out columns of a frame; values by chance are in parentheses after the values."""
    column_of = {column.name: column for column in (*COLUMNS, *FURTHER_COLUMNS)}
    headings = []
    for name in (*index, *names):
        heading = label(name) if name in HEADLINE else column_of[name].heading
        headings.append(heading or name)
    lines = Sheet.of(*headings)
    for row in frame.iter_rows(named=True):
        places = [_place(row[name]) for name in index]
        values = [_cell(row[name], row.get(column_of[name].chance)) for name in names]
        lines.add(*places, *values)
    return lines


def _place(value: object) -> str:
    """Return an index value as text; None, the head of a whole layer's row, is "all heads"."""
    return "all" if value is None else str(value)


def _cell(value: object, chance: float | None) -> Cell:
    if not isinstance(value, float):
        return Cell("–" if value is None else str(value))
    return Cell(f"{value:.3g}", "" if chance is None else f"{chance:.2g}")


# Stacks differ by color, as in every figure, and models of one stack by its shade.
SHADES = {
    "encoder": (BLUE, SKY, "#1b3f8f"),
    "decoder": (ORANGE, YELLOW, "#8f3a00"),
    "other": (GRAY, TEAL, VIOLET),
}
STACK_SHADES = {"encoder": "encoder", "vision": "encoder", "decoder": "decoder"}

# Models in one panel differ by more than color.
LINE_STYLES = ("o-", "s--", "^-.", "v:", "P-", "X--")

# More models than this are not drawn as maps; more than that are drawn as boxes, not as curves.
MOST_MAPS = 8
MOST_CURVES = 12

VIEWS = ("layers", "heads", "models")

# Inches of a line of a legend, and of the box of a model.
LEGEND_LINE = 0.155
BOX_HEIGHT = 0.165


def plot_table(
    table: ScoreRows,
    view: Literal["layers", "heads", "models"] | None,
    score: str | None = None,
) -> Figure:
    """Draw a table's layers as curves or boxes, or its heads as maps; see `ScoreTable.plot`."""
    if view in SUMMARIZED and score is None:
        view, score = None, str(view)
    if view is None:
        is_crowded = sum(1 for _ in _models(table.layers.frame)) > MOST_CURVES
        view = "models" if is_crowded else "layers"
    if view not in VIEWS:
        advice = ""
        if str(view).endswith((".pdf", ".png", ".svg")):
            advice = f"; table.plot().savefig({str(view)!r}) writes a file"
        raise TableError(f"view is {', '.join(map(repr, VIEWS))}; got {str(view)!r}{advice}")
    rows = table.heads if view == "heads" else table.layers
    if not len(rows):
        unit = "heads" if view == "heads" else "layers"
        raise TableError(f"the table has no rows of {unit} to plot")
    labels: Mapping[str, str] = SCORE_LABELS
    if score is not None:
        drawable = [name for name in SUMMARIZED if rows.frame[name].is_not_null().any()]
        if score not in drawable:
            raise TableError(f"the score is one of {', '.join(drawable)}; got {score!r}")
        labels = {score: SCORE_LABELS.get(score, label(score))}
    draw = {"layers": _layer_curves, "heads": _heads, "models": _model_boxes}[view]
    with style():
        return draw(rows, labels)


def _model_boxes(table: ScoreRows, labels: Mapping[str, str]) -> Figure:
    """Draw a horizontal box for each model and score, models downward; colors by stack."""
    from matplotlib.patches import Patch

    models = list(_models(table.frame))
    color_by_stack = {}
    for _, rows in models:
        stack = rows["stack"][0]
        shades = SHADES[STACK_SHADES.get(stack, "other")]
        color_by_stack[stack] = shades[0]
    figure = new_figure(PAPER_WIDTH, 1.0 + BOX_HEIGHT * len(models))
    axes = figure.subplots(1, len(labels), sharey=True, squeeze=False)[0]
    for axis, (score, title) in zip(axes, labels.items(), strict=True):
        for place, (_, rows) in enumerate(models):
            _box(axis, place, rows[score], color_by_stack[rows["stack"][0]])
        axis.set(title=title, xlabel="over layers: quartiles, median, range")
        _finish_axis_of_boxes(axis, score, table.frame[score])
    axes[0].set(ylim=(len(models) - 0.5, -0.5))
    names = [name for name, _ in models]
    axes[0].set_yticks(range(len(names)), names, fontsize=6.5)
    handles = [Patch(color=color, label=stack) for stack, color in color_by_stack.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles))
    return figure


def _box(axis: Axes, place: int, scores: pl.Series, color: str) -> None:
    """Draw the scores of a model's layers at a place of the vertical axis.

    The box reaches from quartile to quartile, with a mark at the median; the line reaches from the
    smallest score to the largest.
    """
    values = scores.drop_nulls().drop_nans().to_numpy()
    if not len(values):
        return
    smallest, first_quartile, median, third_quartile, largest = np.quantile(
        values, [0, 0.25, 0.5, 0.75, 1]
    )
    axis.hlines(place, smallest, largest, color=color, linewidth=0.9)
    axis.barh(
        place,
        third_quartile - first_quartile,
        left=first_quartile,
        height=0.62,
        color=color,
        alpha=0.55,
        linewidth=0,
    )
    axis.plot(median, place, "|", color=color, markersize=7, markeredgewidth=1.6)


def _finish_axis_of_boxes(axis: Axes, score: str, values: pl.Series) -> None:
    """Set lines and limits of a score's axis; the limits include all values."""
    axis.axvline(0, color=GRAY, linewidth=0.6, zorder=0)
    axis.grid(axis="y", color=GRAY, alpha=0.15, linewidth=0.5)
    axis.tick_params(axis="y", length=0)
    if score == "symmetry":
        smallest = min([0.0, *values.drop_nulls().drop_nans()])
        left = max(-1.0, smallest - 0.05)
        axis.set(xlim=(left, 1))
    elif score == "directionality_excess":
        axis.set(xlim=(-1, 1), xticks=(-1, -0.5, 0, 0.5, 1))


def _layer_curves(table: ScoreRows, labels: Mapping[str, str]) -> Figure:
    models = len(list(_models(table.frame)))
    lines_of_legend = math.ceil(models / 2)
    figure = new_figure(5.4, 2.35 + LEGEND_LINE * lines_of_legend)
    axes = figure.subplots(1, len(labels), squeeze=False)[0]
    for axis, (score, title) in zip(axes, labels.items(), strict=True):
        layer_curves(axis, table, score, title)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=2)
    return figure


def shades_of(stacks: Iterable[str]) -> list[tuple[str, int]]:
    """Return, for each model, the color of its stack and the number of a shade.

    Examples
    --------
    >>> shades_of(["encoder", "decoder", "vision"])
    [('encoder', 0), ('decoder', 0), ('encoder', 1)]
    """
    seen: Counter[str] = Counter()
    shades = []
    for stack in stacks:
        kind = STACK_SHADES.get(stack, "other")
        shades.append((kind, seen[kind] % len(SHADES[kind])))
        seen[kind] += 1
    return shades


def layer_curves(axis: Axes, table: ScoreRows, score: str, label: str) -> None:
    """Draw one score over the layers, a curve for each model, with zero and the value by chance."""
    models = list(_models(table.layers.frame))
    shades = shades_of(rows["stack"][0] for _, rows in models)
    for index, ((name, rows), (kind, shade)) in enumerate(zip(models, shades, strict=True)):
        color, line = SHADES[kind][shade], LINE_STYLES[index % len(LINE_STYLES)]
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
                    zorder=1,  # behind the curves
                )
    axis.axhline(0, color=GRAY, linewidth=0.6, zorder=0)
    axis.set(title=label, xlabel="layer", ylim=(-1, 1))
    axis.locator_params(axis="x", integer=True, min_n_ticks=1)


def _heads(table: ScoreRows, labels: Mapping[str, str]) -> Figure:
    """Draw maps of heads, layers down and heads across; a row of two maps for each model."""
    models = list(_models(table.frame))
    if len(models) > MOST_MAPS:
        raise TableError(
            f"at most {MOST_MAPS} models fit into a figure of heads, got {len(models)}: filter the "
            "table first"
        )
    return head_maps(models, labels, "", cmap=SIGN_COLORS, vmin=-1, vmax=1)


def head_map(axis: Axes, rows: pl.DataFrame, column: str, **look: Any) -> AxesImage:
    """Return a column of rows of heads as a map, layers down and heads across."""
    layers = rows["layer"].to_numpy()
    heads = rows["head"].to_numpy()
    values = rows[column].cast(pl.Float64).fill_null(np.nan)
    matrix = np.full((layers.max() + 1, heads.max() + 1), np.nan)
    matrix[layers, heads] = values.to_numpy()
    image = axis.imshow(matrix, aspect="auto", interpolation="nearest", **look)
    axis.set_xlabel("head")
    axis.locator_params(integer=True, min_n_ticks=1)
    return image


# Heads and layers of a map whose cells contain numbers, at most.
MOST_HEADS_WITH_NUMBERS, MOST_LAYERS_WITH_NUMBERS = 12, 16


def head_maps(
    kinds: Sequence[tuple[str, pl.DataFrame]],
    columns: Mapping[str, str],
    label: str,
    *,
    with_numbers: bool = False,
    **look: Any,
) -> Figure:
    """Draw columns of heads as maps with one scale: columns across, attentions down.

    Small maps also contain the numbers, if ``with_numbers``.
    """
    figure = new_figure(PAPER_WIDTH * 0.45 * len(columns) + 1, 0.6 + 1.9 * len(kinds))
    axes = figure.subplots(len(kinds), len(columns), squeeze=False)
    for (name, part), line in zip(kinds, axes, strict=True):
        for axis, (column, title) in zip(line, columns.items(), strict=True):
            drawn = head_map(axis, part, column, **{"cmap": "magma_r", **look})
            axis.set_title(title)
            if with_numbers:
                _write_numbers(axis, drawn)
        line[0].set_ylabel(f"{name}\nlayer")
    bar = figure.colorbar(drawn, ax=axes, shrink=0.8, aspect=25)
    bar.outline.set_visible(False)
    bar.set_label(label, fontsize=7)
    return figure


def _write_numbers(axis: Axes, image: AxesImage) -> None:
    """Write the numbers of a map with few heads and layers into its cells."""
    matrix: np.ndarray = np.ma.filled(np.ma.asarray(image.get_array(), float), np.nan)
    layers, heads = matrix.shape
    if layers > MOST_LAYERS_WITH_NUMBERS or heads > MOST_HEADS_WITH_NUMBERS:
        return
    shades = np.ma.filled(image.norm(matrix), 0.0)
    for layer, head in np.argwhere(np.isfinite(matrix)):
        value = float(matrix[layer, head])
        axis.text(
            head,
            layer,
            f"{value:#.2g}".removeprefix("0") if value else "0",
            ha="center",
            va="center",
            fontsize=5.5,
            color="white" if shades[layer, head] > 0.5 else "black",
        )


def _models(frame: pl.DataFrame) -> Iterator[tuple[str, pl.DataFrame]]:
    """Yield the rows of each model at its smallest distance, under a distinct name."""
    models = frame.partition_by("checkpoint", *DISTINGUISHING, maintain_order=True)
    names = titles([rows.row(0, named=True) for rows in models])
    for name, rows in zip(names, models, strict=True):
        yield name, rows.filter(pl.col("distance") == rows["distance"].min())


# Columns to add to a model's name in a title, if models with this name differ.
DISTINGUISHING = ("revision", "step", "stack", "kind", "circuit")


# Characters before a difference that a name keeps, if its beginning is left out.
CONTEXT = 4


def short_names(names: Sequence[str], longest: int) -> tuple[str, list[str]]:
    """Return the folder that all names share, and the names without the folder, all distinct.

    The folder is empty if all names fit in a line of a table. A name that is too long even without
    the folder keeps only the last parts that fit, or loses its middle. Names that would become
    equal keep the part in which they differ, or stay whole if no such part is short enough.

    Examples
    --------
    >>> short_names(["/models/of/1/a", "/models/of/1/b/c"], longest=9)
    ('/models/of/1', ['a', 'b/c'])
    >>> short_names(["/models/of/a", "owner/b"], longest=9)
    ('', ['…/of/a', 'owner/b'])
    >>> short_names(["gpt-seed-1-of-a-series", "gpt-seed-2-of-a-series"], longest=12)
    ('', ['…eed-1-of-a…', '…eed-2-of-a…'])
    """
    if all(len(name) <= longest for name in names):
        return "", [*names]
    folder = posixpath.commonprefix(names).rpartition("/")[0]
    if len(set(names)) == 1:
        folder = ""
    start = len(folder) + 1 if folder else 0
    short_by_end = _fitting([name[start:] for name in names], longest)
    return folder, [short_by_end[name[start:]] for name in names]


def _fitting(names: Sequence[str], longest: int) -> dict[str, str]:
    """Return, by name, a text of at most ``longest`` characters that identifies the name.

    A name without such a text stays whole.
    """
    end_by_name = distinct_ends(names)
    short_by_name: dict[str, str] = {}
    for name, distinct_end in end_by_name.items():
        short_by_name[name] = _last_parts(name, distinct_end, longest)
    for group in _namesakes(short_by_name):
        short_by_name |= _around_difference(group, longest)
    for group in _namesakes(short_by_name):
        short_by_name |= {name: name for name in group}
    return short_by_name


def _last_parts(name: str, distinct_end: str, longest: int) -> str:
    """Return the last parts of a name that fit, or the name without its middle.

    ``distinct_end`` is the shortest end that identifies the name.
    """
    if len(name) <= longest:
        return name
    parts = name.split("/")
    for first in range(1, len(parts)):
        end = "/".join(parts[first:])
        if len(end) + 2 <= longest and len(end) >= len(distinct_end):
            return f"…/{end}"
    return shortened(name, longest)


def _namesakes(short_by_name: Mapping[str, str]) -> Iterator[list[str]]:
    """Yield groups of names with the same short text."""
    names_by_text: dict[str, list[str]] = {}
    for name, text in short_by_name.items():
        names_by_text.setdefault(text, []).append(name)
    for names in names_by_text.values():
        if len(names) > 1:
            yield names


def _around_difference(names: Sequence[str], longest: int) -> dict[str, str]:
    """Return, by name, a part that begins shortly before the first difference."""
    start = max(0, len(posixpath.commonprefix(names)) - CONTEXT)
    short_by_name = {}
    for name in names:
        part = f"…{name[start:]}" if start else name
        short_by_name[name] = part if len(part) <= longest else f"{part[: longest - 1]}…"
    return short_by_name


def titles(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Name models by the end of the checkpoint's name, and by differences between namesakes.

    The end is the last part of the name, or the shortest end that identifies the checkpoint. The
    package's small models keep their names, such as ``demo:encoder``.

    Examples
    --------
    >>> rows = [{"checkpoint": "openai/whisper-tiny", "stack": s} for s in ("encoder", "decoder")]
    >>> titles([*rows, {"checkpoint": "openai-community/gpt2", "stack": "decoder"}])
    ['whisper-tiny, encoder', 'whisper-tiny, decoder', 'gpt2']
    >>> titles([{"checkpoint": f"/runs/{seed}/last"} for seed in (1, 2)])
    ['1/last', '2/last']
    """
    checkpoints = [one_line(display_name(row["checkpoint"] or "unnamed")) for row in rows]
    end_by_checkpoint = distinct_ends(checkpoints)
    names = [end_by_checkpoint[checkpoint] for checkpoint in checkpoints]
    rows_by_name: dict[str, list[Mapping[str, Any]]] = {}
    for name, row in zip(names, rows, strict=True):
        rows_by_name.setdefault(name, []).append(row)
    distinct_titles = []
    for name, row in zip(names, rows, strict=True):
        parts = [name]
        for column in DISTINGUISHING:
            values = {namesake.get(column) for namesake in rows_by_name[name]}
            if len(values) > 1 and row[column] is not None:
                parts.append(_in_title(column, row[column]))
        distinct_titles.append(", ".join(parts))
    return distinct_titles


def distinct_ends(names: Iterable[str]) -> dict[str, str]:
    """Return, by name, the shortest end of the path that identifies the name; else the name."""
    counts: Counter[str] = Counter()
    ends_by_name: dict[str, list[str]] = {}
    for name in dict.fromkeys(names):
        parts = name.rstrip("/").split("/")
        ends = ["/".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        counts.update(ends)
        ends_by_name[name] = ends
    distinct_end_by_name = {}
    for name, ends in ends_by_name.items():
        distinct = [end for end in ends if counts[end] == 1]
        distinct_end_by_name[name] = distinct[0] if distinct else name
    return distinct_end_by_name


def with_model_columns(frame: pl.DataFrame, score: str) -> pl.DataFrame:
    """Return one score with a column for each model; see `ScoreTable.side_by_side`."""
    index = ["layer"]
    if frame["head"].is_not_null().any():
        index.append("head")
    if frame["distance"].n_unique() > 1:
        index.append("distance")
    models = frame.partition_by("checkpoint", *DISTINGUISHING, maintain_order=True)
    names = titles([model.row(0, named=True) for model in models])
    wide = frame.select(index).unique().sort(index)
    for name, model in zip(names, models, strict=True):
        name = name.removeprefix("demo:")  # a column is named in code
        if name in index:
            name = f"{name} (model)"
        column = model.select(*index, pl.col(score).alias(name)).unique()
        if column.select(index).is_duplicated().any():
            raise TableError(
                f"{name}: several values of {score} for one layer or head; expected one, as of a "
                "single scan; filter the table, or join other tables"
            )
        wide = wide.join(column, on=index, how="left", nulls_equal=True, maintain_order="left")
    return wide


def _in_title(column: str, value: Any) -> str:
    if column == "kind":
        return kind_in_words(value)
    return str(value) if column == "stack" else f"{column} {value}"


def place(table: ScoreRows) -> list[Any]:
    """Return the place of each checkpoint and stack of a table among models known to a package.

    As text, a place is one sentence. A place has the attributes ``name`` (of the checkpoint),
    ``stack``, ``meaning`` (a second sentence), the compared values, and ``others``.
    """
    places: list[Any] = []
    for entry_point in entry_points(group=PLACES):
        places += entry_point.load()(table)
    return places
