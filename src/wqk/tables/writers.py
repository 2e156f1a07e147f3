"""Table files: Parquet, JSON Lines, CSV, Markdown and LaTeX."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any, Protocol

import polars as pl

from wqk._console import display_name, json_text, number, one_line, without_formulas
from wqk.errors import TableError
from wqk.tables import sheet
from wqk.tables.columns import Column
from wqk.tables.schema import GROUP, conditions
from wqk.tables.sheet import Sheet

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


def as_sheet(table: TableContent) -> Sheet:
    """Return a table's nonempty columns in words, below the values that all rows share."""
    frame = table.frame
    # Columns that distinguish attentions come first.
    context = [c for c in GROUP if c in frame.columns and frame[c].n_unique() > 1]
    columns = [sheet.SheetColumn(name, text=True) for name in context]
    shown = [
        column
        for column in table.headed()
        if column.name == "layer" or frame[column.name].is_not_null().any()
    ]
    if (frame["status"] == "ok").all():
        shown = [column for column in shown if column.name != "status"]
    columns += [sheet.SheetColumn(column.heading, latex=column.latex) for column in shown]
    caption = ", ".join(conditions(frame, table.metadata, every=True))
    checkpoints = frame["checkpoint"].drop_nulls().unique().to_list()
    if len(checkpoints) == 1:
        caption = f"{one_line(display_name(checkpoints[0]))}; {caption}"
    lines = Sheet(columns, caption=caption)
    names_of_shown = [column.name for column in shown]
    for row in frame.select(*context, *names_of_shown).iter_rows():
        lines.add(*map(_cell, row))
    return lines


def _cell(value: Any) -> str:
    """Return a value of a row as text."""
    if value is None or isinstance(value, float):
        return number(value)
    return str(value)


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
