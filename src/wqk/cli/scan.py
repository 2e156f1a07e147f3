"""``wqk scan``: the scores of one or several checkpoints."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from wqk._console import counted, display_name, few, kind_in_words
from wqk.cli.main import tell
from wqk.cli.options import (
    COUNT,
    FILE,
    OPENING,
    RANGES,
    REF,
    csv_output,
    gamma,
    json_output,
    layers,
    measure_options,
    opened,
    option,
    picture_file,
    reading,
    table_files,
)
from wqk.errors import TableError, WqkError, did_you_mean
from wqk.tables.columns import MEASURES

if TYPE_CHECKING:
    import polars as pl

    from wqk.tables.rendering import SortOrder
    from wqk.tables.score_table import ScoreTable


# Endings of tables whose columns --columns chooses.
CHOOSABLE = (".csv", ".md", ".tex")

# Columns whose values are in the name of a row.
ROW_NAMES = ("checkpoint", "stack", "kind", "layer", "head", "distance")


@click.command()
@click.argument("refs", nargs=-1, required=True, metavar="REF...", type=REF)
@click.option(
    "--heads",
    is_flag=True,
    help="Also score every head, and print grids of them; --head, --top, --sort and --csv print a "
    "row for each.",
)
@gamma
@click.option(
    "--circuit",
    type=click.Choice(["qk", "ov"]),
    default="qk",
    help="Circuit to score: queries and keys, or values and outputs.",
)
@option("fold_norm")
@click.option("--bias", is_flag=True, help="Score the form augmented with the biases.")
@option("distances")
@click.option(
    "--revision", "revisions", multiple=True, metavar="R", help="Hub revision; repeatable."
)
@option("base")
@reading
@click.option(
    "--device",
    metavar="D",
    help="Compute with PyTorch on this device, such as cuda, instead of NumPy.",
)
@table_files
@picture_file("Draw symmetry and directionality over the layers, of many models as boxes")
@click.option(
    "--report",
    type=FILE,
    metavar="FILE.html",
    help="Write an HTML report that includes every head.",
)
@click.option("--title", metavar="TEXT", help="Heading of --report.  [default: the models' names]")
@click.option(
    "--details",
    type=FILE,
    metavar="FILE.npz",
    help="Save matrices as images, norms and head coupling; the report shows them.",
)
@measure_options
@click.option(
    "--full",
    is_flag=True,
    help="Print every score: what chance gives, heads' shares, directionality by definition.",
)
@click.option(
    "--sort",
    "sort_by",
    metavar="COLUMN",
    help="Largest values of a column first, or smallest with a minus, -symmetry; also in --out; "
    "with --heads, of the heads alone.",
)
@click.option(
    "--top",
    type=COUNT,
    metavar="N",
    help="Print this many rows of each checkpoint, also of --csv, --json and --out.",
)
@click.option(
    "--where",
    metavar="CONDITION",
    help="Only rows with this condition, such as 'symmetry > 0.5 and layer < 4'.",
)
@click.option(
    "--fail-if",
    metavar="CONDITION",
    help="Exit with status 1 if a row has this condition, also a row that --top leaves out.",
)
@layers
@click.option(
    "--head",
    "head_numbers",
    type=RANGES,
    metavar="H,H:M",
    help="Only these heads, such as 3,8:11 (8 to 11), without the rows of whole layers.",
)
@click.option(
    "--columns",
    metavar="NAME,NAME",
    help="Only these columns of --csv and of --out FILE.csv, FILE.md or FILE.tex, such as "
    "layer,symmetry.",
)
@json_output
@csv_output
@click.pass_context
def scan(
    context: click.Context,
    /,
    refs: tuple[str, ...],
    heads: bool,
    revisions: tuple[str, ...],
    out: tuple[Path, ...],
    picture: Path | None,
    report: Path | None,
    title: str | None,
    details: Path | None,
    full: bool,
    sort_by: str | None,
    top: int | None,
    where: str | None,
    fail_if: str | None,
    head_numbers: Sequence[int] | None,
    columns: str | None,
    as_json: bool,
    as_csv: bool,
    **options: Any,
) -> None:
    """Score the query-key form of every layer.

    REF is a folder, a file, an https:// URL, a Hub id such as
    google-bert/bert-base-uncased, or demo:encoder, demo:decoder or demo:induction, a small model
    of the package. For a training run's folder, all its checkpoint-* steps are scored. For many
    checkpoints, wqk survey writes one table into a folder, and resumes after an interruption.

    Exit status 1: a row has the condition of --fail-if. Exit status 2: a checkpoint could not be
    read, or no row has a value for the condition.

    \b
    Columns:
      symmetry                 1 symmetric, -1 skew-symmetric, about 0 untrained
      directionality (excess)  below 0: a few columns, the key side, dominate;
                               above 0: rows do; by the rule of the published tables
      status                   why a layer's scores are to be doubted

    \b
    Statuses, also for --where and --fail-if "status == 'guessed'":
      ok              nothing is known against the scores
      non-finite      NaN or infinite weights, in tables of a monitor
      degenerate      the form is zero
      partial         the form is only a part of the score; a note names the reason
      guessed         the family was guessed from tensor names
      random-looking  as if the weights had never been trained
      quantized       the weights are stored with few bits, and scored as they stand
    A row may have several: 'guessed, random-looking'.

    \b
    Examples:
      wqk scan google-bert/bert-base-uncased
      wqk scan ./my-model --heads --out scores.parquet
      wqk scan ./my-model --details forms.npz --report report.html
      wqk scan ./my-model --csv | head
      wqk scan ./my-model --heads --sort -symmetry --top 10
      wqk scan ./my-model --csv --columns layer,symmetry
      wqk scan ./run --json | jq '.summary[].symmetry_median'
      wqk scan ./my-model --heads --ceiling --fail-if 'score_ceiling > 1000'
    """
    from wqk.cli import display
    from wqk.scanning.scan import scan as scan_checkpoint
    from wqk.tables.rendering import (
        SortOrder,
        heading_definitions,
        measured,
        one_checkpoint,
        overview,
        ranked,
        reason_not_sorted,
        scores,
    )
    from wqk.tables.score_table import join

    heads = heads or head_numbers is not None
    ending, tables_of_out = display.separated_outputs(as_csv, out, as_json)
    endings = {ending, *(file.suffix for file in tables_of_out)}
    if columns is not None and endings.isdisjoint(CHOOSABLE):
        raise click.UsageError(
            "--columns chooses columns of CSV, Markdown and LaTeX; add --csv, or --out FILE.csv, "
            "FILE.md or FILE.tex"
        )
    if title is not None and report is None:
        raise click.UsageError("--title is the heading of a report; add --report FILE.html")
    chosen_columns = None if columns is None else columns.split(",")
    files = _Files(
        tables=tables_of_out,
        columns=chosen_columns,
        picture=picture,
        details=details,
        report=report,
        title=title,
    )
    files.check()
    measures = [measure.name for measure in MEASURES if options.pop(measure.name, False)]
    order = None if sort_by is None else SortOrder.parse(sort_by)
    _check_columns(measures, order, chosen_columns, where=where, fail_if=fail_if)
    opening = {name: options.pop(name) for name in OPENING if name in options}
    console = display.output()
    tables: list[ScoreTable] = []
    chosen: list[ScoreTable] = []
    last_tables: dict[tuple[str, str | None], ScoreTable] = {}
    jobs = _jobs(refs, revisions)
    for ref, step, revision in jobs:
        try:
            with display.bar(step, display.scan_progress) as on_progress:
                model = opened(step, {**opening, "revision": revision})
                table = scan_checkpoint(
                    model,
                    heads=heads or report is not None,
                    details=details is not None,
                    measures=measures,
                    on_progress=on_progress,
                    **options,
                )
            printed = _of_heads(table if heads else table.layers, head_numbers)
            printed = _filtered(printed, where, measures)
        except WqkError as error:
            if len(jobs) == 1:
                raise
            tell(str(error))
            continue
        tables.append(table)
        chosen.append(printed)
        last_tables[ref, revision] = table
        if not (as_json or ending):
            if not len(printed):
                console.print(_no_row(model.name, where or "", heads), markup=False)
            elif measures or order or top or where or head_numbers:
                console.print(*measured(printed, measures, order, top), sep="\n")
            elif len(jobs) > 1:
                lines = scores(printed, console.width, full)
                console.print(*(display.from_top(lines) if len(tables) == 1 else lines), sep="\n")
            else:
                lines = one_checkpoint(printed, console.width, full)
                console.print(*display.from_top(lines), sep="\n")
                _print_way_to_rows(printed)
                _print_placements([printed])
        display.say_traffic(model.checkpoint)
    if not tables:
        context.exit(2)
    joined = join(chosen)
    rows = join([replace(table, frame=ranked(table.frame, order, top)) for table in chosen])
    if order is not None:
        reason = reason_not_sorted(joined, order)
        if reason:
            display.say(reason)
    if as_json:
        # Medians are those of all rows.
        display.print_object(joined.to_dict() | {"rows": rows.to_dict()["rows"]})
    elif ending:
        display.print_content(_content(rows, ending, chosen_columns))
    elif len(jobs) > 1:
        console.print(*overview(joined, console.width), sep="\n")
        if full:
            console.print(*heading_definitions(joined), sep="\n")
        _print_way_to_rows(joined)
        _print_placements([*last_tables.values()], named=True)
    files.write(tables, joined, rows, by_head=heads and len(jobs) == 1)
    status = 0 if fail_if is None else _status_of_condition(chosen, fail_if, measures)
    if failures := len(jobs) - len(tables):
        tell(f"{failures} of {len(jobs)} checkpoints failed")
        status = 2
    context.exit(status)


def _columns_of(measures: Sequence[str]) -> dict[str, pl.DataType]:
    """Return the types of the columns that measures add, by name."""
    from wqk.tables.schema import types

    columns: dict[str, pl.DataType] = {}
    for measure in MEASURES:
        if measure.name in measures:
            columns |= types(measure.columns)
    return columns


def _with_columns_of(table: ScoreTable, measures: Sequence[str]) -> ScoreTable:
    """Return the table with empty columns for measures that no layer has."""
    import polars as pl

    empty_columns = [
        pl.lit(None, kind).alias(name)
        for name, kind in _columns_of(measures).items()
        if name not in table.frame
    ]
    return replace(table, frame=table.frame.with_columns(empty_columns))


def _filtered(table: ScoreTable, where: str | None, measures: Sequence[str]) -> ScoreTable:
    """Return the rows that satisfy a condition; by default all rows."""
    if where is None:
        return table
    rows = _with_columns_of(table, measures).filter(where)
    return replace(rows, frame=rows.frame.select(table.frame.columns))


def _check_columns(
    measures: Sequence[str],
    order: SortOrder | None,
    columns: Sequence[str] | None,
    **conditions: str | None,
) -> None:
    """Raise an error before the scan if an option names a column that the table will not have.

    Raises
    ------
    TableError
        No column has the name, or a condition is not valid.
    """
    import polars as pl

    from wqk.tables.conditions import condition
    from wqk.tables.rendering import ranked
    from wqk.tables.schema import SCHEMA

    table = pl.DataFrame(schema=SCHEMA | _columns_of(measures))
    ranked(table, order, top=None)
    if columns is not None:
        _with_columns(table, columns)
    for name, text in conditions.items():
        if text is None:
            continue
        try:
            condition(text, table.columns)
        except TableError as error:
            raise TableError(f"--{name.replace('_', '-')}: {error}") from None


def _jobs(refs: Sequence[str], revisions: Sequence[str]) -> list[tuple[str, str, str | None]]:
    """Return the ref, the checkpoint and the revision of each scan; a run has several checkpoints.

    Raises
    ------
    UsageError
        A ref is a list of checkpoints.
    """
    from wqk.checkpoints import steps_of
    from wqk.scanning.surveys.planning import with_lists

    jobs: list[tuple[str, str, str | None]] = []
    revisions_of_each: Sequence[str | None] = revisions or [None]
    for ref in refs:
        if ref.startswith("@") or with_lists([ref]) != [ref]:
            raise click.UsageError(
                f"{ref} is a list of checkpoints; wqk survey {ref} --out FOLDER scores them"
            )
        jobs += product([ref], steps_of(ref), revisions_of_each)
    return jobs


@dataclass(frozen=True)
class _Files:
    """The files that a scan writes; None for files that were not requested.

    Attributes
    ----------
    tables
        The files of the table.
    columns
        The columns of the table as CSV, Markdown and LaTeX; None for all.
    picture
        The picture of the table.
    details
        The arrays for pictures of forms.
    report, title
        The HTML report, and the heading of the report; None for the models' names.
    """

    tables: Sequence[Path]
    columns: Sequence[str] | None
    picture: Path | None
    details: Path | None
    report: Path | None
    title: str | None

    def check(self) -> None:
        """Raise `OutputError` if a file cannot be written, before anything is read."""
        from wqk._style import check_picture
        from wqk.reporting import check_report
        from wqk.tables.details import check_details_output
        from wqk.tables.score_table import check_table_output

        for file in self.tables:
            check_table_output(file)
        for path, check in (
            (self.picture, check_picture),
            (self.details, check_details_output),
            (self.report, check_report),
        ):
            if path:
                check(path)

    def write(
        self, tables: Sequence[ScoreTable], joined: ScoreTable, rows: ScoreTable, *, by_head: bool
    ) -> None:
        """Write the files, and print a line for each.

        Parameters
        ----------
        tables
            All rows, a table for each checkpoint, for the report.
        joined
            The chosen rows, for the picture and the details.
        rows
            The printed rows, for the table.
        by_head
            Whether the picture is a map of heads.
        """
        from wqk._files import write_atomically
        from wqk._style import save_figure
        from wqk.cli import display
        from wqk.reporting import write_report

        for file in self.tables:
            if self.columns is None:
                rows.write(file)
            else:
                write_atomically(file, _content(rows, file.suffix, self.columns))
            display.say(f"{file}: {counted(len(rows), 'row')}")
        if self.picture:
            save_figure(joined.plot("heads" if by_head else None), self.picture)
            display.say_picture(self.picture, joined, self.tables)
        if self.details and joined.details:
            joined.details.write(self.details)
            display.say(f"{self.details}: {counted(len(joined.details.blocks), 'layer')}")
        if self.report:
            write_report(tables, self.report, title=self.title)
            display.say(f"report: {self.report}")


def _of_heads(table: ScoreTable, head_numbers: Sequence[int] | None) -> ScoreTable:
    """Return the rows of the heads with these numbers; by default all rows."""
    if head_numbers is None:
        return table
    missing = sorted({*head_numbers} - {*table.heads.frame["head"]})
    if missing:
        count = table.heads.frame["head"].n_unique()
        raise TableError(f"no head {missing[0]}; heads are numbered from 0 to {count - 1}")
    return table.heads.filter(f"head in ({', '.join(map(str, head_numbers))})")


def _status_of_condition(
    tables: Sequence[ScoreTable], fail_if: str, measures: Sequence[str]
) -> int:
    """Return the exit status for a condition; print the rows that have the condition.

    The status is 1 if a row has the condition, and 2 if a table has no values for the condition.
    """
    from wqk.tables.conditions import condition
    from wqk.tables.score_table import join

    status = 0
    with_condition = []
    for table in tables:
        if not len(table):
            continue
        name = display_name(table.frame["checkpoint"][0] or "unnamed")
        complete = _with_columns_of(table, measures)
        try:
            has_condition = condition(fail_if, complete.frame.columns)
            with_condition.append(complete.filter(fail_if))
            without_value = complete.filter(has_condition.is_null())
        except TableError as error:
            tell(f"--fail-if: {name}: {error}")
            status = 2
            continue
        if len(without_value) == len(table):
            tell(f"--fail-if: {name}: no row has a value for the condition {fail_if}")
            status = 2
    rows = join(with_condition).frame if with_condition else None
    if rows is not None and len(rows):
        columns = condition(fail_if, rows.columns).meta.root_names()
        names_of_rows = _names_of_rows(rows, named=len(tables) > 1)
        names = [
            f"{name}{_values(row, columns)}"
            for name, row in zip(names_of_rows, rows.to_dicts(), strict=True)
        ]
        verb = "has" if len(rows) == 1 else "have"
        tell(f"{counted(len(rows), 'row')} {verb} the condition {fail_if}: {few(names)}")
        status = status or 1
    return status


def _values(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Return a row's values in the columns of a condition, in parentheses; "" if it has none.

    Examples
    --------
    >>> row = {"layer": 3, "status": "guessed", "symmetry": 0.25, "score_ceiling": 51336.9}
    >>> _values(row, ["status", "symmetry"]), _values(row, ["score_ceiling"])
    (' (status guessed, symmetry 0.25)', ' (51337)')
    """
    values = {}
    for column in columns:
        if column not in ROW_NAMES and row[column] is not None:
            values[column] = _in_few_digits(row[column])
    if len(values) == 1:
        return f" ({', '.join(values.values())})"
    texts = [f"{column} {value}" for column, value in values.items()]
    return f" ({', '.join(texts)})" if texts else ""


def _in_few_digits(value: Any) -> str:
    """Return a value of a table as text, numbers with three digits or as whole numbers."""
    if not isinstance(value, float):
        return str(value)
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _names_of_rows(rows: pl.DataFrame, named: bool) -> list[str]:
    """Return the layer or head of every row, with the stack, kind and distance if they vary.

    If there are several checkpoints, ``named``, the checkpoint is part of the name.
    """
    from wqk.tables.rendering import titles

    values_of_rows = rows.to_dicts()
    varying = {column for column in ("stack", "kind", "distance") if rows[column].n_unique() > 1}
    names = []
    for row, model in zip(values_of_rows, titles(values_of_rows), strict=True):
        is_layer = row["head"] is None
        name = f"layer {row['layer']}" if is_layer else f"head {row['layer']}.{row['head']}"
        if "distance" in varying:
            name += f" at distance {row['distance']}"
        if named:
            name += f" of {model}"
        else:
            places = [row["stack"]] if "stack" in varying else []
            if "kind" in varying:
                places.append(kind_in_words(row["kind"]))
            name = " ".join([*places, name])
        names.append(name)
    return names


def _no_row(name: str, where: str, has_heads: bool) -> str:
    """Return a sentence on a condition without rows."""
    from wqk.tables.rendering import COLUMNS_OF_HEADS, ROWS_OF_LAYERS

    sentence = f"{display_name(name)}: no row has the condition {where}"
    names = re.findall(r"\w+", where)
    is_of_heads = any(column in names for column in COLUMNS_OF_HEADS)
    return f"{sentence}; {ROWS_OF_LAYERS}" if is_of_heads and not has_heads else sentence


def _with_columns(frame: pl.DataFrame, names: Sequence[str]) -> pl.DataFrame:
    """Return the given columns in this order; `TableError` for a missing column."""
    for name in names:
        if name not in frame.columns:
            advice = did_you_mean(name, frame.columns) or "; --csv without --columns prints all"
            raise TableError(f"no column {name!r}{advice}")
    return frame.select(names)


def _content(table: ScoreTable, ending: str, columns: Sequence[str] | None) -> bytes:
    """Return the content of a table's file, with the chosen columns if the format has a choice."""
    from wqk._console import csv_of_frame
    from wqk.tables.writers import WRITERS, as_sheet

    if columns is None or ending not in CHOOSABLE:
        return WRITERS[ending](table)
    if ending == ".csv":
        return csv_of_frame(_with_columns(table.frame, columns))
    _with_columns(table.frame, columns)
    sheet = as_sheet(table, columns)
    return (sheet.markdown() if ending == ".md" else sheet.latex()).encode()


def _print_way_to_rows(table: ScoreTable) -> None:
    """Print, below grids of heads, the options that print a row for each head."""
    from wqk.cli import display

    if len(table.heads):
        display.output().print("a row for each head: --sort symmetry --top 10", style="dim")


def _print_placements(scans: Sequence[ScoreTable], named: bool = False) -> None:
    """Print the place of checkpoints among known models, and the meaning of the place.

    If there are several checkpoints, ``named``, checkpoints without a place are listed, too.
    """
    from rich.text import Text

    from wqk.cli import display
    from wqk.tables.rendering import place, titles

    console = display.output()
    titles_of_scans = titles([scan.frame.row(0, named=True) for scan in scans])
    without_place = []
    for scan, title in zip(scans, titles_of_scans, strict=True):
        placements = place(scan)
        if not placements:
            without_place.append(_without_rank(scan, title))
        for placement in placements:
            names = [title] if named else []
            if len(placements) > 1:
                names.append(placement.stack)
            name = ", ".join(names)
            of_model, subject = (f" of {name}", f"{name}: ") if name else ("", "")
            rank = f"rank{of_model} among the paper's models: "
            console.print(Text.assemble((rank, "dim"), str(placement)))
            if placement.meaning:
                console.print(Text.assemble((subject, "dim"), placement.meaning))
    if 0 < len(without_place) < len(scans):
        console.print(Text.assemble(("no rank: ", "dim"), ", ".join(without_place)))


def _without_rank(scan: ScoreTable, title: str) -> str:
    """Return the title of a checkpoint without a place among known models, and the reason."""
    from wqk.tables.schema import status_counts

    counts = status_counts(scan.frame["status"])
    for status in ("guessed", "random-looking"):
        if 2 * counts[status] >= len(scan):
            return f"{title} ({status})"
    return title
