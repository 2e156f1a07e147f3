"""The files that hold a table: Parquet, JSON Lines, CSV, Markdown and LaTeX."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._console import number, one_line
from wqk.errors import TableError
from wqk.tables.schema import GROUP, OPTIONAL, SCHEMA, conditions, present
from wqk.tables.sheet import Column, Sheet

if TYPE_CHECKING:
    from wqk.tables.score_table import Table

    Content = tuple[pl.DataFrame, Mapping[str, Any]]

# Metadata that a CSV file repeats in every row, in columns after the table's own.
CONDITIONS: dict[str, pl.DataType] = {
    "gamma": pl.Float64(),
    "folded_norms": pl.Boolean(),
    "biases": pl.Boolean(),
}

# A cell that begins with one of these is a formula to a spreadsheet.
FORMULA = ("=", "+", "-", "@", "\t", "\r", "'")

# A Parquet file ends in its footer, the footer's length and these bytes.
MAGIC = b"PAR1"
MARK = b"wqk blake2b:"
DIGEST = 32

# Errors from a file that holds no table.
UNREADABLE = (
    TableError,
    ValueError,
    RecursionError,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)


def to_parquet(table: Table) -> bytes:
    """The table, with the hash of all its bytes in the gap before the footer.

    Readers follow the offsets in the footer and ignore the gap.
    """
    buffer = io.BytesIO()
    table.frame.write_parquet(buffer, metadata={"wqk": json.dumps(dict(table.metadata))})
    whole = buffer.getvalue()
    start = _footer_start(whole)
    return whole[:start] + MARK + _digest(whole) + whole[start:]


def from_parquet(content: bytes) -> Content:
    """Read a Parquet file, in a subprocess unless it is an intact file written by wqk.

    Some damaged files crash polars and its process without an exception.
    """
    start = _footer_start(content)
    rest, mark, digest = (
        content[: start - len(MARK) - DIGEST],
        content[start - len(MARK) - DIGEST : start - DIGEST],
        content[start - DIGEST : start],
    )
    if mark != MARK:
        content = _rewritten(content)
    elif digest != _digest(rest + content[start:]):
        raise ValueError("its checksum does not match: the file is damaged")
    metadata = json.loads(pl.read_parquet_metadata(io.BytesIO(content)).get("wqk", "{}"))
    return pl.read_parquet(io.BytesIO(content)), _mapping(metadata)


def _footer_start(content: bytes) -> int:
    length = int.from_bytes(content[-8:-4], "little")
    start = len(content) - 8 - length
    if content[-4:] != MAGIC or start < len(MAGIC):
        raise ValueError("it is not a Parquet file, or it is truncated")
    return start


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=DIGEST).digest()


_REWRITE = """
import io, sys, polars as pl
content = io.BytesIO(sys.stdin.buffer.read())
metadata = {k: v for k, v in pl.read_parquet_metadata(content).items() if k == "wqk"}
content.seek(0)
pl.read_parquet(content).write_parquet(sys.stdout.buffer, metadata=metadata)
"""


def _rewritten(content: bytes) -> bytes:
    """A Parquet file, read and rewritten by a subprocess."""
    done = subprocess.run(
        [sys.executable, "-c", _REWRITE], input=content, capture_output=True, check=False
    )
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise ValueError(lines[-1] if lines else "polars cannot read it")
    return done.stdout


def to_json_lines(table: Table) -> bytes:
    """The metadata, then one row on each line."""
    rows = table.frame.fill_nan(None).to_dicts()
    lines = [{"metadata": dict(table.metadata)}, *rows]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def from_json_lines(content: bytes) -> Content:
    """Read what `to_json_lines` wrote, with or without the metadata."""
    lines = [_mapping(json.loads(line)) for line in content.decode().split("\n") if line]
    if not lines:
        raise ValueError("it is empty")
    metadata = _mapping(lines.pop(0)["metadata"]) if "metadata" in lines[0] else {}
    if lines and not lines[0].keys() >= SCHEMA.keys():
        raise ValueError("its lines lack columns of a score table")
    columns = {**SCHEMA, **present(OPTIONAL, {name for line in lines for name in line})}
    return pl.DataFrame(lines, schema=columns, strict=False), metadata


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("expected a JSON object")
    return value


def to_csv(table: Table) -> bytes:
    """The rows, each with the table's conditions at its end; no cell is a formula."""
    texts = [name for name, kind in table.schema.items() if kind == pl.String]
    quoted = table.frame.with_columns(
        *(
            pl.when(pl.col(name).str.slice(0, 1).is_in(list(FORMULA)))
            .then(pl.concat_str(pl.lit("'"), pl.col(name)))
            .otherwise(pl.col(name))
            .alias(name)
            for name in texts
        ),
        *(pl.lit(table.metadata.get(name), kind).alias(name) for name, kind in CONDITIONS.items()),
    )
    return quoted.write_csv().encode()


def from_csv(content: bytes) -> Content:
    """Read what `to_csv` wrote; the conditions are those of the first row."""
    frame = pl.read_csv(content, schema_overrides={**SCHEMA, **OPTIONAL, **CONDITIONS})
    frame = frame.with_columns(pl.col(pl.String).str.strip_prefix("'"))
    first = frame.row(0, named=True) if frame.height else {}
    metadata = {name: first[name] for name in CONDITIONS if first.get(name) is not None}
    return frame, metadata


def to_markdown(table: Table) -> bytes:
    """Every row as readable text, below a description of the numbers."""
    return as_sheet(table).markdown().encode()


def to_latex(table: Table) -> bytes:
    """Every row as a tabular, below a description of the numbers."""
    return as_sheet(table).latex().encode()


def as_sheet(table: Table) -> Sheet:
    """A table's nonempty columns in words, below what all rows share."""
    frame = table.frame
    # Columns that distinguish attentions come first.
    context = [c for c in GROUP if c in frame.columns and frame[c].n_unique() > 1]
    shown = [c for c in table.printed if c == "layer" or frame[c].is_not_null().any()]
    if (frame["status"] == "ok").all():
        shown = [column for column in shown if column != "status"]
    columns = [Column(name, text=True) for name in context]
    columns += [Column(table.printed[name][0], latex=table.printed[name][1]) for name in shown]
    checkpoints = frame["checkpoint"].drop_nulls().unique().to_list()
    names = [one_line(name) for name in checkpoints] if len(checkpoints) == 1 else []
    about = [*names, ", ".join(conditions(frame, table.metadata, every=True))]
    sheet = Sheet(columns, caption="; ".join(about))
    for row in frame.iter_rows(named=True):
        sheet.add(*(_cell(row[name]) for name in (*context, *shown)))
    return sheet


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return number(value) if isinstance(value, float) else str(value)


WRITERS: dict[str, Callable[[Any], bytes]] = {
    ".parquet": to_parquet,
    ".csv": to_csv,
    ".jsonl": to_json_lines,
    ".tex": to_latex,
    ".md": to_markdown,
}

READERS: dict[str, Callable[[bytes], Content]] = {
    ".parquet": from_parquet,
    ".jsonl": from_json_lines,
    ".csv": from_csv,
}
