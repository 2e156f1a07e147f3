"""Score tables: a polars frame with a schema, a summary, and every export."""

from __future__ import annotations

import io
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from wqk._files import check_output, write_whole
from wqk._html import html_table
from wqk.errors import TableError, first_line

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence
    from os import PathLike

    import pandas

SCHEMA_VERSION = 1

SCHEMA: dict[str, pl.DataType] = {
    "checkpoint": pl.String(),
    "revision": pl.String(),
    "step": pl.Int64(),
    "model_type": pl.String(),
    "family": pl.String(),
    "parameters": pl.Int64(),
    "stack": pl.String(),
    "kind": pl.String(),
    "window": pl.String(),
    "layer": pl.Int64(),
    "head": pl.Int64(),
    "key_head": pl.Int64(),
    "heads": pl.Int64(),
    "key_heads": pl.Int64(),
    "rank": pl.Int64(),
    "d_query": pl.Int64(),
    "d_key": pl.Int64(),
    "applications": pl.Int64(),
    "circuit": pl.String(),
    "distance": pl.Int64(),
    "norm": pl.Float64(),
    "symmetry": pl.Float64(),
    "symmetry_null": pl.Float64(),
    "symmetry_within_heads": pl.Float64(),
    "symmetry_between_heads": pl.Float64(),
    "symmetry_within_random": pl.Float64(),
    "directionality": pl.Float64(),
    "directionality_excess": pl.Float64(),
    "status": pl.String(),
}

KEY = ("checkpoint", "revision", "step", "stack", "kind", "layer", "head", "circuit", "distance")

# What one line of a summary is about.
GROUP = ("checkpoint", "revision", "step", "stack", "kind", "circuit", "distance")

# Lines of a table that a notebook shows.
SHOWN_IN_NOTEBOOKS = 48

SUMMARIZED = ("symmetry", "directionality", "directionality_excess")


@dataclass(frozen=True, eq=False, repr=False)
class ScoreTable:
    """Scores, one row for each layer and, with ``head`` filled in, for each head.

    Attributes
    ----------
    frame
        A polars frame with the columns of `SCHEMA`, in that order.
    metadata
        How the scores were made: gamma, folded norms, biases, software and schema version, and why
        rows are ``partial``. Kept by Parquet and JSON Lines files.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("encoder"))
    >>> table.layers.frame.select("layer", "head", "rank").rows()[:2]
    [(0, None, 128), (1, None, 128)]
    >>> len(table) == 4 * (1 + 4)
    True
    """

    frame: pl.DataFrame
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        missing = [name for name in SCHEMA if name not in self.frame.columns]
        if missing:
            raise TableError(f"a score table needs the columns {', '.join(missing)}")
        try:
            frame = self.frame.select(pl.col(n).cast(t) for n, t in SCHEMA.items())
        except pl.exceptions.PolarsError as error:
            raise TableError(f"a column does not hold what a score table wants: {error}") from None
        object.__setattr__(self, "frame", frame)

    @classmethod
    def from_rows(
        cls, rows: Iterable[Mapping[str, Any]], metadata: Mapping[str, Any] | None = None
    ) -> ScoreTable:
        """A table from one mapping for each row; absent columns are null."""
        frame = pl.DataFrame(list(rows), schema=SCHEMA, strict=False)
        return cls(frame, {"schema_version": SCHEMA_VERSION, **(metadata or {})})

    @property
    def layers(self) -> ScoreTable:
        """Only the rows of whole layers."""
        return self.filter(pl.col("head").is_null())

    @property
    def heads(self) -> ScoreTable:
        """Only the rows of single heads."""
        return self.filter(pl.col("head").is_not_null())

    def filter(self, *predicates: pl.Expr) -> ScoreTable:
        """The rows for which all polars expressions hold."""
        return ScoreTable(self.frame.filter(*predicates), self.metadata)

    def summary(self) -> pl.DataFrame:
        """Median and quartiles of each score, over layers and over heads apart.

        One row for each checkpoint, stack, kind of attention, circuit and distance, and ``over``
        (``layers`` or ``heads``), with ``count``, and for each score ``{score}_median``, ``_q25``
        and ``_q75`` (linear interpolation). Degenerate rows do not take part.
        """
        scored = self.frame.with_columns(
            pl.when(pl.col("head").is_null())
            .then(pl.lit("layers"))
            .otherwise(pl.lit("heads"))
            .alias("over"),
            *(pl.col(score).fill_nan(None) for score in SUMMARIZED),
        )
        quartiles = {"q25": 0.25, "median": 0.5, "q75": 0.75}
        return scored.group_by([*GROUP, "over"], maintain_order=True).agg(
            pl.col("directionality").count().alias("count"),
            *(
                pl.col(score).quantile(q, "linear").alias(f"{score}_{name}")
                for score in SUMMARIZED
                for name, q in quartiles.items()
            ),
        )

    def to_pandas(self) -> pandas.DataFrame:
        """The frame as pandas' (pandas has to be installed)."""
        return self.frame.to_pandas()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.frame.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self.frame.height

    def __repr__(self) -> str:
        return f"ScoreTable({len(self)} rows)\n{self.summary()}"

    def _repr_html_(self) -> str:
        context, cells = _printed_rows(self)
        header = [*context, *(markdown for markdown, _ in _PRINTED.values())]
        names = self.frame["checkpoint"].unique(maintain_order=True).drop_nulls().to_list()
        caption = f"{', '.join(names[:4])}: {len(self)} rows, {len(cells)} of them layers"
        if len(cells) > SHOWN_IN_NOTEBOOKS:
            caption += f", of which the first {SHOWN_IN_NOTEBOOKS} are shown"
        return html_table(caption, header, cells[:SHOWN_IN_NOTEBOOKS])

    def save(self, path: str | PathLike[str]) -> None:
        """Write the table in the format of the file's ending; whole or not at all.

        ``.parquet`` and ``.jsonl`` keep the metadata and can be loaded again, as can ``.csv``
        (without it); ``.tex`` and ``.md`` hold one line for each layer, for people to read.

        Raises
        ------
        OutputError
            The ending names no format, or the file cannot be written.
        """
        path = Path(path)
        check_ending(path)
        write_whole(path, _WRITERS[path.suffix](self))

    @classmethod
    def load(cls, path: str | PathLike[str]) -> ScoreTable:
        """Read a table from ``.parquet``, ``.jsonl`` or ``.csv``.

        Raises
        ------
        TableError
            There is no such file, or it holds no score table.
        """
        path = Path(path)
        reader = _READERS.get(path.suffix)
        if reader is None:
            raise TableError(
                f"{path}: a table is loaded from {', '.join(_READERS)}; got {path.suffix!r}"
            )
        try:
            return reader(path.read_bytes())
        except OSError as error:
            raise TableError(f"{path}: cannot be read ({error.strerror})") from None
        except _UNREADABLE as error:
            reason = first_line(error)
            raise TableError(f"{path}: holds no score table ({reason})") from None


def check_ending(path: Path) -> None:
    """Raise `OutputError` where no table can be written under this name."""
    check_output(path, "a table", _WRITERS)


def join(tables: Sequence[ScoreTable]) -> ScoreTable:
    """All rows of several tables in one; where the metadata disagrees, the first one's stays."""
    metadata: dict[str, Any] = {}
    for table in reversed(tables):
        metadata |= table.metadata
    return ScoreTable(pl.concat([table.frame for table in tables]), metadata)


def records(frame: pl.DataFrame) -> list[dict[str, Any]]:
    """A frame's rows as JSON can hold them: NaN becomes null."""
    return frame.fill_nan(None).to_dicts()


def _to_parquet(table: ScoreTable) -> bytes:
    buffer = io.BytesIO()
    table.frame.write_parquet(buffer, metadata={"wqk": json.dumps(dict(table.metadata))})
    return buffer.getvalue()


def _from_parquet(content: bytes) -> ScoreTable:
    metadata = json.loads(pl.read_parquet_metadata(io.BytesIO(content)).get("wqk", "{}"))
    return ScoreTable(pl.read_parquet(io.BytesIO(content)), _mapping(metadata))


def _to_json_lines(table: ScoreTable) -> bytes:
    lines = [{"metadata": dict(table.metadata)}, *records(table.frame)]
    return "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode()


def _from_json_lines(content: bytes) -> ScoreTable:
    lines = [_mapping(json.loads(line)) for line in content.decode().split("\n") if line]
    if not lines:
        raise ValueError("it is empty")
    metadata = _mapping(lines.pop(0)["metadata"]) if "metadata" in lines[0] else {}
    if lines and not lines[0].keys() >= SCHEMA.keys():
        raise ValueError("its lines lack columns of a score table")
    return ScoreTable.from_rows(lines, metadata)


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError("a JSON object was expected")
    return value


def _to_csv(table: ScoreTable) -> bytes:
    return table.frame.write_csv().encode()


def _from_csv(content: bytes) -> ScoreTable:
    return ScoreTable(pl.read_csv(content, schema_overrides=dict(SCHEMA)))


# Columns of the tables for people, with their headings in Markdown and LaTeX.
_PRINTED = {
    "layer": ("layer", "layer"),
    "symmetry": ("symmetry", "$s$"),
    "symmetry_null": ("null", "$s_0$"),
    "directionality": ("directionality", "$d$"),
    "directionality_excess": ("(excess)", "$d$ (excess)"),
    "norm": ("norm", r"$\lVert W_{qk} \rVert$"),
}


def _printed_rows(table: ScoreTable) -> tuple[list[str], list[list[str]]]:
    """Names of the columns that tell the rows apart, and all cells, one row for each layer."""
    layers = table.layers.frame
    context = [c for c in GROUP if layers[c].n_unique() > 1]
    cells = [[_cell(row[c]) for c in (*context, *_PRINTED)] for row in layers.iter_rows(named=True)]
    return context, cells


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _to_markdown(table: ScoreTable) -> bytes:
    context, cells = _printed_rows(table)
    header = [*context, *(markdown for markdown, _ in _PRINTED.values())]
    rules = [":--"] * len(context) + ["--:"] * len(_PRINTED)
    escaped = [[cell.replace("|", r"\|") for cell in row] for row in cells]
    lines = ["| " + " | ".join(row) + " |" for row in (header, rules, *escaped)]
    return ("\n".join(lines) + "\n").encode()


LATEX_ESCAPES = str.maketrans(
    {
        **{character: f"\\{character}" for character in "_%&#${}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "–": "--",
    }
)


def _to_latex(table: ScoreTable) -> bytes:
    context, cells = _printed_rows(table)
    header = [*context, *(latex for _, latex in _PRINTED.values())]
    escaped = [[cell.translate(LATEX_ESCAPES) for cell in row] for row in cells]
    body = "\n".join("  " + " & ".join(row) + r" \\" for row in escaped)
    columns = "l" * len(context) + "r" * len(_PRINTED)
    return (
        f"% needs \\usepackage{{booktabs,amsmath}}\n\\begin{{tabular}}{{{columns}}}\n  \\toprule\n"
        f"  {' & '.join(header)} \\\\\n  \\midrule\n{body}\n  \\bottomrule\n\\end{{tabular}}\n"
    ).encode()


_WRITERS = {
    ".parquet": _to_parquet,
    ".csv": _to_csv,
    ".jsonl": _to_json_lines,
    ".tex": _to_latex,
    ".md": _to_markdown,
}

# What a file that holds no score table ends in.
_UNREADABLE = (
    TableError,
    ValueError,
    RecursionError,
    pl.exceptions.PolarsError,
    pl.exceptions.PanicException,
)

_READERS = {".parquet": _from_parquet, ".jsonl": _from_json_lines, ".csv": _from_csv}
