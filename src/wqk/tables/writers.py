"""Table files: Parquet, JSON Lines, CSV, Markdown and LaTeX."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

from wqk._console import display_name, json_text, number, one_line, without_formulas
from wqk.errors import TableError
from wqk.tables.columns import COLUMNS, Column
from wqk.tables.schema import FURTHER_COLUMNS, GROUP, conditions
from wqk.tables.sheet import Cell, Sheet, SheetColumn

if TYPE_CHECKING:
    Content = tuple[pl.DataFrame, Mapping[str, Any]]
    Types = Mapping[str, pl.DataType]

    class TableContent(Protocol):
        """The part of a table for its files; `wqk.tables.score_table.Table` implements it."""

        @property
        def frame(self) -> pl.DataFrame:
            """The rows."""

        @property
        def metadata(self) -> Mapping[str, Any]:
            """Description of the numbers."""

        def headed(self) -> list[Column]:
            """Return the columns that are printed."""

        def to_dict(self) -> dict[str, Any]:
            """Return the metadata and the rows."""


# Metadata that a CSV file repeats in every row, in columns after the table's own.
CONDITIONS: dict[str, pl.DataType] = {
    "gamma": pl.Float64(),
    "folded_norms": pl.Boolean(),
    "biases": pl.Boolean(),
}

# Errors from a file that holds no table.
UNREADABLE_TABLES = (
    TableError,
    ValueError,
    RecursionError,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)


def to_parquet(table: TableContent) -> bytes:
    """Return the table, with its metadata as JSON under ``wqk``."""
    buffer = io.BytesIO()
    table.frame.write_parquet(buffer, metadata={"wqk": json.dumps(dict(table.metadata))})
    return buffer.getvalue()


def from_parquet(content: bytes, types: Types) -> Content:
    """Read a Parquet file, from wqk or another program."""
    metadata = json.loads(pl.read_parquet_metadata(io.BytesIO(content)).get("wqk", "{}"))
    return pl.read_parquet(io.BytesIO(content)), _mapping(metadata)


def to_json_lines(table: TableContent) -> bytes:
    """Return one line with the metadata, then one line for each row."""
    rows = table.frame.fill_nan(None).to_dicts()
    lines = [{"metadata": dict(table.metadata)}, *rows]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def from_json_lines(content: bytes, types: Types) -> Content:
    """Read a file written by `to_json_lines`, with or without the metadata."""
    lines = [_mapping(json.loads(line)) for line in content.decode().split("\n") if line]
    if not lines:
        raise ValueError("it is empty")
    return from_objects(lines, types)


def from_objects(lines: list[dict[str, Any]], types: Types) -> Content:
    """Return the rows and the metadata of lines of JSON."""
    metadata = {}
    if lines and "metadata" in lines[0]:
        metadata = _mapping(lines.pop(0)["metadata"])
    names = dict.fromkeys(chain.from_iterable(lines))
    columns = {name: kind for name, kind in types.items() if name in names}
    if lines and not columns:
        raise ValueError("its lines have no column of such a table")
    # Unknown columns are kept until the table names and drops them.
    columns |= {name: pl.Object() for name in names if name not in types}
    return pl.DataFrame(lines, schema=columns, strict=False), metadata


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def to_csv(table: TableContent) -> bytes:
    """Return the rows, each followed by the table's conditions."""
    conditions = (
        pl.lit(table.metadata.get(name), kind).alias(name) for name, kind in CONDITIONS.items()
    )
    return without_formulas(table.frame.with_columns(*conditions)).write_csv().encode()


def from_csv(content: bytes, types: Types) -> Content:
    """Read a file written by `to_csv`; the conditions are taken from the first row."""
    header = content.partition(b"\n")[0].decode(errors="replace")
    for separator in (";", "\t"):
        if separator in header and "," not in header:
            raise ValueError(
                f"columns are separated by {separator!r}, expected ','; save the file with commas, "
                f"or read it with polars.read_csv(path, separator={separator!r})"
            )
    frame = pl.read_csv(content, schema_overrides={**types, **CONDITIONS})
    frame = frame.with_columns(pl.col(pl.String).str.strip_prefix("'"))
    if frame.is_empty():
        return frame, {}
    first_row = frame.row(0, named=True)
    metadata = {}
    for name in CONDITIONS:
        if first_row.get(name) is not None:
            metadata[name] = first_row[name]
    return frame, metadata


def to_markdown(table: TableContent) -> bytes:
    """Return all rows as readable text, below a description of the numbers."""
    return as_sheet(table).markdown().encode()


def to_latex(table: TableContent) -> bytes:
    """Return all rows as a tabular, below comments that describe the numbers."""
    return as_sheet(table).latex().encode()


def as_sheet(table: TableContent, names: Sequence[str] | None = None) -> Sheet:
    """Return a table's nonempty columns in words, below the values that all rows share.

    Values by chance are in parentheses after the values. With ``names``, the sheet has the columns
    with these names alone, each as a column.
    """
    frame = table.frame
    columns = _declared_columns(frame, names) if names is not None else _shown_columns(table)
    caption = ", ".join(conditions(frame, table.metadata, every=True))
    checkpoints = frame["checkpoint"].drop_nulls().unique().to_list()
    if len(checkpoints) == 1:
        caption = f"{one_line(display_name(checkpoints[0]))}; {caption}"
    with_chance = {
        column.name: column.chance
        for column in columns
        if names is None and column.chance in frame.columns
    }
    if with_chance:
        caption += "; in parentheses: the same of factors with independent entries"
    lines = Sheet([_sheet_column(column, names is not None) for column in columns], caption=caption)
    for row in frame.iter_rows(named=True):
        lines.add(*(_cell(column, row, with_chance.get(column.name)) for column in columns))
    return lines


def _shown_columns(table: TableContent) -> list[Column]:
    """Return the columns of a sheet: those that distinguish attentions, then those with values."""
    frame = table.frame
    columns = [
        Column(name, str, "")
        for name in GROUP
        if name in frame.columns and frame[name].n_unique() > 1
    ]
    for column in table.headed():
        is_filled = column.name == "layer" or frame[column.name].is_not_null().any()
        is_always_ok = column.name == "status" and (frame["status"] == "ok").all()
        if is_filled and not is_always_ok:
            columns.append(column)
    return columns


def _declared_columns(frame: pl.DataFrame, names: Sequence[str]) -> list[Column]:
    """Return the columns with these names."""
    declared = {column.name: column for column in (*COLUMNS, *FURTHER_COLUMNS)}
    types = {pl.String(): str, pl.Int64(): int}
    return [
        declared.get(name) or Column(name, types.get(frame.schema[name], float), "")
        for name in names
    ]


def _sheet_column(column: Column, is_chosen: bool) -> SheetColumn:
    """Return the heading of a column; a chosen column has no neighbor that completes it."""
    heading = column.heading or column.name
    if is_chosen and heading.startswith("("):
        heading = column.name.replace("_excess", " (excess)")
    is_text = column.type is str and not column.heading
    return SheetColumn(heading, text=is_text, latex=column.latex)


def _cell(column: Column, row: Mapping[str, Any], chance: str | None) -> Cell:
    """Return the value of a row in a column; the value by chance is in parentheses."""
    value = row[column.name]
    by_chance = row[chance] if chance else None
    aside = "" if value is None or by_chance is None else f"{by_chance:.2g}"
    if isinstance(value, float) and column.digits:
        return Cell(f"{value:.{column.digits}g}", aside)
    if value is None or isinstance(value, float):
        return Cell(number(value), aside)
    if column.name == "checkpoint":
        value = display_name(value)
    return Cell(str(value), aside)


def to_json(table: TableContent) -> bytes:
    """Return the metadata, the summary and the rows as one object, as ``--json`` prints them."""
    return (json_text(table.to_dict()) or "").encode()


def from_json(content: bytes, types: Types) -> Content:
    """Read a file written by `to_json`."""
    value = _mapping(json.loads(content))
    if not isinstance(value.get("rows"), list):
        raise ValueError("expected a JSON object with rows")
    rows = [_mapping(row) for row in value["rows"]]
    return from_objects([{"metadata": value.get("metadata", {})}, *rows], types)


WRITERS: dict[str, Callable[[Any], bytes]] = {
    ".parquet": to_parquet,
    ".csv": to_csv,
    ".jsonl": to_json_lines,
    ".tex": to_latex,
    ".md": to_markdown,
    ".json": to_json,
}

READERS: dict[str, Callable[[bytes, Types], Content]] = {
    ".parquet": from_parquet,
    ".jsonl": from_json_lines,
    ".csv": from_csv,
    ".json": from_json,
}
