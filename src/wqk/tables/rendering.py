"""Score tables for terminals, prompts and notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl
from rich.cells import cell_len
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from wqk._console import counted, number, one_line, plain_table
from wqk.tables.bars import NEGATIVE, POSITIVE, Bar
from wqk.tables.conditions import conditions
from wqk.tables.schema import SUMMARIZED

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from rich.console import Console, ConsoleOptions, RenderResult

    from wqk.tables.score_table import ScoreTable

    Column = tuple[str, Callable[[Mapping[str, Any]], str | Text | Bar]]

# What is dropped if a terminal is too narrow: first the heads' terms, then the bars, then the null.
EXTRAS = (("null", "bars", "terms"), ("null", "bars"), ("null",), ())

# Most heads that are listed instead of summarized, and most lines of an overview.
MOST_HEADS = 5000
MOST_LINES = 200

# More than any line of numbers takes.
MOST_CELLS = 10_000

# What headings and statuses mean, for those that are shown.
LEGEND = {
    "null": "null: symmetry left when the signs of rows are random",
    "in heads": "in heads: the part of symmetry within single heads; (random): the same if the "
    "rank dimensions were assigned to heads at random",
    "(excess)": "(excess): sums norm − threshold, the rule of the published tables",
    "window": "window: tokens that local attention reaches",
    "degenerate": "degenerate: the form is zero",
    "guessed": "guessed: the family was guessed from tensor names",
    "random-looking": "random-looking: as if the weights had never been trained",
    "non-finite": "non-finite: NaN or infinite weights",
}


class NumberTable(Table):
    """A table without lines, wider than the terminal rather than with a number cut short."""

    def __init__(self, *headings: str, narrow: bool = False) -> None:
        super().__init__(box=None, padding=(0, 1, 0, 0 if narrow else 1), header_style="dim")
        for heading in headings:
            self.add_column(heading, justify="right" if heading else "left", no_wrap=True)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        needed = Measurement.get(console, options.update(width=MOST_CELLS), self).minimum
        width = max(needed, options.max_width)
        return super().__rich_console__(console, options.update(width=width))


def score_table(table: ScoreTable, width: int) -> Iterator[Any]:
    """The layers of one checkpoint and their heads; for several, their medians."""
    checkpoints = table.frame.select("checkpoint", "revision", "step").unique()
    if checkpoints.height > 1:
        yield from overview(table)
    elif len(table):
        yield from one_checkpoint(table, width)
    else:
        yield Text("no rows")


def one_checkpoint(table: ScoreTable, width: int) -> Iterator[Any]:
    """The scores of a checkpoint, what the headings mean, and what the forms leave out."""
    yield from scores(table, width)
    yield Text("\n".join([*definitions(table, width), *notes(table)]), style="dim")


def scores(table: ScoreTable, width: int) -> Iterator[Any]:
    """A table for each kind of attention of a checkpoint, its heads, and the medians."""
    for frame in table.frame.partition_by("stack", "kind", maintain_order=True):
        layers = frame.filter(pl.col("head").is_null())
        shown = layers if layers.height else frame
        nearest = layers.filter(pl.col("distance") == shown["distance"][0])
        yield _title(shown.row(0, named=True), nearest.height, table.metadata, frame)
        if nearest.height:
            yield _layer_lines(nearest, width)[1]
        heads = frame.filter(
            pl.col("head").is_not_null(), pl.col("distance") == shown["distance"][0]
        )
        if heads.height > MOST_HEADS:
            yield _head_summary(heads)
        for score in ("symmetry", "directionality"):
            if 0 < heads.height <= MOST_HEADS:
                yield from _across(heads, score, "head", width)
            if nearest.height < layers.height:
                yield from _across(layers, score, "distance", width)
    yield from _summary_lines(table)


def _title(
    row: Mapping[str, Any], layers: int, metadata: Mapping[str, Any], frame: pl.DataFrame
) -> Text:
    heads = counted(row["heads"], "head") if row["heads"] else ""
    if row["key_heads"] not in (None, row["heads"]):
        heads += f" over {counted(row['key_heads'], 'key head')}"
    size = str(row["d_query"])
    if row["d_key"] != row["d_query"]:
        size += f" × {row['d_key']}"
    facts = [
        str(row["family"]),
        f"{row['stack']} {row['kind']}-attention",
        counted(layers, "layer"),
        heads,
        f"d {size}",
        *conditions(frame, metadata, every=False),
    ]
    return Text.assemble("\n", (title(row), "bold"), f"\n{' · '.join(filter(None, facts))}")


def title(row: Mapping[str, Any]) -> str:
    """The name of a row's checkpoint, with its revision."""
    revision = f" @ {row['revision']}" if row["revision"] else ""
    return one_line(f"{row['checkpoint'] or 'unnamed'}{revision}")


def _layer_lines(layers: pl.DataFrame, width: int) -> tuple[list[str], Table]:
    """One line per layer, with as many columns as fit, and their headings."""
    for extras in EXTRAS:
        columns = _columns(layers, extras)
        headings = [heading for heading, _ in columns]
        rows = [[cell(row) for _, cell in columns] for row in layers.iter_rows(named=True)]
        taken = sum(
            2 + max(cell.width if isinstance(cell, Bar) else cell_len(str(cell)) for cell in cells)
            for cells in zip(headings, *rows, strict=True)
        )
        if taken <= width or extras == EXTRAS[-1]:
            break
    bars = [cell for row in rows for cell in row if isinstance(cell, Bar)]
    if bars:
        left_over = (width - taken) * len(rows) // len(bars)
        for cell in bars:
            cell.cells = min(Bar.MOST, cell.cells + left_over // 2)
    result = NumberTable(*headings)
    for cells in rows:
        result.add_row(*cells)
    return headings, result


def _columns(layers: pl.DataFrame, extras: Sequence[str]) -> list[Column]:
    def plain(name: str) -> Callable[[Mapping[str, Any]], str]:
        return lambda row: number(row[name])

    def as_bar(name: str) -> list[Column]:
        return [("", lambda row: Bar(row[name]))] if "bars" in extras else []

    columns: list[Column] = [("layer", lambda row: str(row["layer"]))]
    if layers["window"].is_not_null().any():
        columns.append(("window", lambda row: row["window"] or ""))
    if layers["symmetry"].is_not_null().any():
        columns += [("symmetry", plain("symmetry")), *as_bar("symmetry")]
        if "null" in extras:
            columns.append(("null", plain("symmetry_null")))
        if "terms" in extras:
            columns.append(("in heads", plain("symmetry_within_heads")))
            columns.append(("(random)", plain("symmetry_within_random")))
    columns += [("directionality", plain("directionality")), *as_bar("directionality")]
    columns.append(("(excess)", plain("directionality_excess")))
    if (layers["status"] != "ok").any():
        columns.append(("status", lambda row: row["status"]))
    return columns


def _across(frame: pl.DataFrame, score: str, column: str, width: int) -> Iterator[Any]:
    """Layers down, heads or distances across, in hundredths; in blocks that fit the width."""
    if frame[score].is_null().all():
        return
    labels = frame[column].unique(maintain_order=True).to_list()
    room = max(1, (width - 6) // (1 + max(4, *(len(str(label)) for label in labels))))
    for start in range(0, len(labels), room):
        block = NumberTable(narrow=True)
        block.add_column("layer", justify="right", style="dim")
        shown = labels[start : start + room]
        for label in shown:
            block.add_column(str(label), justify="right", min_width=3, no_wrap=True)
        for layer in frame.partition_by("layer", maintain_order=True):
            values = dict(zip(layer[column], layer[score], strict=True))
            block.add_row(str(layer["layer"][0]), *(_hundredths(values.get(x)) for x in shown))
        yield Text(f"{score} × 100 by {column}", style="dim")
        yield block


def _hundredths(value: float | None) -> Text:
    if value is None or value != value:
        return Text("–")
    strength = "bold " if abs(value) >= 0.5 else ""
    return Text(number(100 * value, 0), style=strength + (POSITIVE if value >= 0 else NEGATIVE))


def _head_summary(heads: pl.DataFrame) -> Table:
    """Quartiles over heads that are too many to list."""
    title = f"{heads.height:,} heads"
    result = plain_table(title, "lowest", "q25", "median", "q75", "highest", left=[title])
    for score in SUMMARIZED:
        values = heads[score].fill_nan(None).drop_nulls()
        if len(values):
            quantiles = (values.quantile(q, "linear") for q in (0, 0.25, 0.5, 0.75, 1))
            result.add_row(score.replace("_excess", " (excess)"), *map(number, quantiles))
    return result


def _summary_lines(table: ScoreTable) -> Iterator[Text]:
    """Medians and quartiles over layers as the paper prints them."""
    rows = table.summary().filter(
        pl.col("over") == "layers", pl.col("distance") == table.frame["distance"][0]
    )
    for row in rows.iter_rows(named=True):
        where = f" {row['stack']} {row['kind']}" if rows.height > 1 else ""
        where += " (guessed)" if table.metadata.get("inferred") else ""
        for score in SUMMARIZED:
            if row[f"{score}_median"] is not None:
                label = score.replace("_excess", " (excess)")
                yield Text.assemble((f"median {label}{where}: ", "dim"), median(row, score))


def median(row: Mapping[str, Any], score: str) -> str:
    """``median ± [median − q25, q75 − median]`` of a summary's row."""
    middle, low, high = (row[f"{score}_{name}"] for name in ("median", "q25", "q75"))
    return f"{number(middle, 2)} ± [{number(middle - low, 2)}, {number(high - middle, 2)}]"


def definitions(table: ScoreTable, width: int) -> Iterator[str]:
    """What the medians, headings and statuses of `scores` mean."""
    gamma = table.metadata.get("gamma", 2.0)
    statuses = table.frame["status"].drop_nulls().unique().sort().to_list()
    yield "median ± [a, b]: a and b from the median over layers down and up to the quartiles"
    yield (
        f"directionality: below 0 where columns dominate; sums the norms beyond mean + {gamma:g} "
        "std (Definition 3.2)"
    )
    layers = table.frame.filter(pl.col("head").is_null())
    headings = _layer_lines(layers, width)[0] if layers.height else []
    yield from (LEGEND[name] for name in [*headings, *statuses] if name in LEGEND)


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
    """Terms of the models' scores besides the form, each with its number of models."""
    terms: dict[str, dict[str, None]] = {}
    by_checkpoint: Mapping[str, Sequence[str]] = table.metadata.get("left_out") or {}
    for checkpoint, named in by_checkpoint.items():
        for term in named:
            terms.setdefault(term, {})[checkpoint] = None
    if terms:
        count = table.frame["checkpoint"].n_unique()
        listed = (
            term if len(models) == count else f"{term} ({len(models)} of {count} checkpoints)"
            for term, models in terms.items()
        )
        yield f"not in the form: {'; '.join(listed)} (wqk explain)"


def overview(table: ScoreTable) -> Iterator[Any]:
    """Medians over layers, one line for each checkpoint and kind of attention."""
    rows = table.summary()
    over = "layers" if (rows["over"] == "layers").any() else "heads"
    rows = rows.filter(pl.col("over") == over)
    steps = ["step"] if rows["step"].is_not_null().any() else []
    columns = ("checkpoint", *steps, "attention", "symmetry", "directionality", "(excess)")
    lines = plain_table(*columns, left=["checkpoint", "attention"])
    for column in lines.columns[1:]:
        column.no_wrap = True
    for row in rows.head(MOST_LINES).iter_rows(named=True):
        step = ["–" if row["step"] is None else str(row["step"])] if steps else []
        medians = (number(row[f"{score}_median"]) for score in SUMMARIZED)
        lines.add_row(title(row), *step, f"{row['stack']} {row['kind']}", *medians)
    conditional = conditions(table.frame, table.metadata, every=False)
    yield Text(f"\nmedians over {', '.join([over, *conditional])}", style="dim")
    yield lines
    if rows.height > MOST_LINES:
        yield Text(f"and {rows.height - MOST_LINES:,} more", style="dim")
    yield Text("\n".join(notes(table)), style="dim")


def side_by_side(table: ScoreTable) -> Iterator[Any]:
    """Symmetry, then directionality as published: layers down, checkpoints across."""
    names = table.frame["checkpoint"].unique(maintain_order=True).to_list()
    layers = table.layers.frame
    for score in ("symmetry", "directionality_excess"):
        side = NumberTable("layer", *(heading for name in names for heading in (name, "")))
        for layer in layers.partition_by("layer", maintain_order=True):
            values = dict(zip(layer["checkpoint"], layer[score], strict=True))
            cells = (cell(values.get(name)) for name in names for cell in (number, Bar))
            side.add_row(str(layer["layer"][0]), *cells)
        yield Text(f"\n{score.replace('_excess', ' (excess)')}", style="bold")
        yield side
