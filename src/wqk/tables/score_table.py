"""Score tables: selection of rows, summaries, and export."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn, Self

import polars as pl

from wqk._console import Shown, few, json_text, json_value, one_line
from wqk._files import check_output, require_file, write_atomically
from wqk._guesses import METHOD_CALLS
from wqk._style import current
from wqk._synonyms import (
    FRAME_AGGREGATES,
    PANDAS,
    PANDAS_AGGREGATES,
    PANDAS_RANKINGS,
    attribute,
    meant_attribute,
)
from wqk._typing import FilePath
from wqk.errors import (
    MissingPackage,
    TableError,
    called_as,
    did_you_mean,
    first_line,
    public_attributes,
    unknown_attribute,
)
from wqk.tables.columns import COLUMNS, Column
from wqk.tables.conditions import EXAMPLE, condition
from wqk.tables.details import Details
from wqk.tables.schema import (
    COLUMN_TYPES,
    FURTHER_COLUMNS,
    GROUP,
    KEY,
    LAYER,
    SCHEMA_VERSION,
    SUMMARIZED,
    records,
    types,
)

if TYPE_CHECKING:
    import pandas
    from matplotlib.figure import Figure


# Attributes of data frames, and the expressions to use instead.
TABLE_SYNONYMS = {
    "layer": "table[layer]",
    "iloc": "table[layer, head]",
    "index": "frame.rows()",
    **dict.fromkeys(("checkpoints", "models"), 'table["checkpoint"].unique()'),
    "info": "frame.schema",
    "iterrows": "frame.iter_rows(named=True)",
    "itertuples": "frame.iter_rows(named=True)",
    "loc": "table[layer, head]",
    **dict.fromkeys(
        ("matrix", "unstack"),
        'heads.pivot_table(index="layer", columns="head", values="symmetry")',
    ),
    "pivot": 'side_by_side("symmetry"), with a column for each model, or heads.pivot_table('
    'index="layer", columns="head", values="symmetry")',
    "wide": 'side_by_side("symmetry")',
    "report": "wqk.report(table, path)",
    "rows": "frame.rows()",
    "to_dataframe": "to_pandas()",
    "to_excel": 'to_pandas().to_excel("table.xlsx")',
    "to_html": "wqk.report(table, path)",
    **dict.fromkeys(("best", "largest", "top", "worst"), 'heads.nlargest(5, "symmetry")'),
    **dict.fromkeys(("order_by", "orderby", "rank"), 'heads.sort("symmetry", descending=True)'),
    **dict.fromkeys(("display", "print", "show"), "print(table)"),
    # Methods of pandas' frames that polars' frames lack.
    **{
        name: f"to_pandas().{name}"
        for name in (
            *("assign", "astype", "at", "copy", "drop_duplicates", "dropna", "fillna", "iat"),
            *("idxmax", "idxmin", "isna", "melt", "reset_index", "set_index", "value_counts"),
        )
    },
}


@dataclass(frozen=True, eq=False, repr=False)
class Table(Shown):
    """Rows for layers and, with ``head`` filled in, for heads.

    The columns of the frame are `declared`, in that order, then the existing columns of `further`.
    Declared columns that are not in a file get the `missing` value; a file without a `needed`
    column is rejected. The metadata describes how the numbers were computed; Parquet and JSON Lines
    files store it. `synonyms` are names that users try on a kind of table, with the expressions to
    use instead; `former_names` are columns of earlier versions, with the present names.
    """

    declared: ClassVar[tuple[Column, ...]]
    further: ClassVar[tuple[Column, ...]] = ()
    needed: ClassVar[tuple[str, ...]]
    synonyms: ClassVar[Mapping[str, str]] = {}
    former_names: ClassVar[Mapping[str, str]] = {}

    frame: pl.DataFrame
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        frame = self.frame
        if not frame.columns:  # a file of JSON lines without rows
            frame = pl.DataFrame(schema=types(self.declared))
        present = frame.columns
        if missing := [name for name in self.needed if name not in present]:
            raise TableError(
                f"a {type(self).__name__} needs the columns {', '.join(missing)}, which this table "
                "lacks; wqk scan REF --out FILE.parquet writes all columns, and other tables are "
                "read by polars or pandas"
            )
        self._require_heads(frame)
        columns = [*self.declared, *(column for column in self.further if column.name in present)]
        expressions = []
        for column in columns:
            column_type = COLUMN_TYPES[column.type]
            if column.name in present:
                expressions.append(pl.col(column.name).cast(column_type))
            else:
                expressions.append(pl.lit(column.missing, column_type).alias(column.name))
        try:
            if [*frame.schema.items()] != [*types(columns).items()]:
                frame = frame.select(expressions)
        except pl.exceptions.PolarsError as error:
            raise TableError(
                f"a column has the wrong type for a score table: {first_line(error)}"
            ) from None
        object.__setattr__(self, "frame", frame)

    def _require_heads(self, frame: pl.DataFrame) -> None:
        """Require the column ``head`` if a layer has several rows."""
        has_heads = any(column.name == "head" for column in self.declared)
        if not has_heads or "head" in frame.columns:
            return
        place_of_layer = [name for name in LAYER if name in frame.columns]
        if place_of_layer and frame.select(place_of_layer).is_duplicated().any():
            raise TableError(
                f"a {type(self).__name__} needs the column head, which this table lacks although a "
                "layer has several rows; keep the column, or the rows of layers alone; wqk scan "
                "REF --out FILE.parquet writes all columns"
            )

    def headed(self) -> list[Column]:
        """Return the columns of this table that are printed, in order."""
        return [
            column
            for column in (*self.declared, *self.further)
            if column.heading and column.name in self.frame.columns
        ]

    @property
    def layers(self) -> Self:
        """The rows of whole layers."""
        self._require_column("head")
        return self.filter(pl.col("head").is_null())

    @property
    def heads(self) -> Self:
        """The rows of single heads."""
        self._require_column("head")
        return self.filter(pl.col("head").is_not_null())

    def filter(self, *predicates: pl.Expr | pl.Series | str, **values: Any) -> Self:
        """Return the rows for which all conditions are true.

        Parameters
        ----------
        *predicates
            Expressions of polars, or their text: ``"symmetry > 0.5 and layer < 4"``.
        **values
            Columns with the required values: ``layer=2``.

        Raises
        ------
        TableError
            A condition is not valid, or the table lacks one of the columns.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.scan(wqk.demo_model("encoder"))
        >>> len(table.layers.filter("symmetry > 0.6"))
        2
        """
        for name in values:
            self._require_column(name)
        conditions = []
        for predicate in predicates:
            if isinstance(predicate, str):
                predicate = condition(predicate, self.frame.columns)
            conditions.append(predicate)
        try:
            return replace(self, frame=self.frame.filter(*conditions, **values))
        except pl.exceptions.PolarsError as error:
            if not any(isinstance(predicate, str) for predicate in predicates):
                raise
            raise TableError(
                f"{' and '.join(map(str, predicates))}: is no condition on this table "
                f'({first_line(error)}); expected one such as "{EXAMPLE}"'
            ) from None

    def __getitem__(self, key: Any) -> Any:
        """Return a column by name, or the rows of layers, of a head, or of a condition.

        Returns
        -------
        polars.Series or Table
            ``table["symmetry"]`` is a column. ``table[3]`` and ``table[:4]`` are tables of layers,
            with their heads; ``table[3, 5]`` is the row of head 5, ``table[3, :]`` has the rows of
            all heads. Negative numbers count from the end. ``table[table["symmetry"] > 0.5]`` has
            the rows for which the condition is true.

            A column has the values of layers, followed by the values of heads. For an average,
            choose layers or heads: ``table.layers["symmetry"].mean()`` or
            ``table.heads["symmetry"].mean()``. ``table.mean()`` raises an error for mixed rows.

        Raises
        ------
        TableError
            The table has no column, layer or head with this name or number.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.scan(wqk.demo_model("encoder"))
        >>> len(table[0]), len(table[1:3]), len(table[0, :]), table[-1, 2]["layer"].item()
        (5, 10, 4, 3)
        >>> round(table.layers["symmetry"].mean(), 3), round(table.heads["symmetry"].mean(), 3)
        (0.665, 0.186)
        """
        if isinstance(key, str):
            self._require_column(key)
            return self.frame[key]
        if isinstance(key, list | tuple) and key and all(isinstance(name, str) for name in key):
            for name in key:
                self._require_column(name)
            return self.frame[list(key)]
        if isinstance(key, pl.Series | pl.Expr):
            return self.filter(key)
        table = self
        for column, index in zip(("layer", "head"), _pair(key), strict=False):
            table = table._only(column, index)
        return table

    def _require_column(self, name: str) -> None:
        """Raise `TableError` if the table has no such column."""
        if name not in self.frame.columns:
            advice = did_you_mean(name, self.frame.columns)
            raise TableError(f"the table has no column {name!r}{advice}")

    def _only(self, column: str, index: int | slice) -> Self:
        """Return the rows whose number in a column is ``index``, or in the slice ``index``."""
        count: int = 1 + max(self.frame[column].drop_nulls(), default=-1)
        try:
            chosen = range(count)[index]
        except IndexError:
            chosen = range(0)
        numbers = [chosen] if isinstance(chosen, int) else chosen
        rows = self.filter(pl.col(column).is_in(numbers))
        if not len(rows):
            known = f"0 to {count - 1}" if count else "none"
            raise TableError(f"the table has no {column} {index}; its {column}s are {known}")
        return rows

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, as dictionaries."""
        return self.frame.iter_rows(named=True)

    def __add__(self, other: object) -> NoReturn:
        raise TableError("tables have no sum; wqk.join([table, other]) has the rows of both")

    def __sub__(self, other: object) -> NoReturn:
        raise TableError(
            "tables have no difference; wqk.diff(reference, candidate) compares the forms of two "
            'models, table.layers["symmetry"] - other.layers["symmetry"] two columns'
        )

    if not TYPE_CHECKING:  # type checkers report the mistake themselves

        def __getattr__(self, name: str) -> Any:
            if name == "frame":  # of a table that is being unpickled
                raise unknown_attribute(f"a {type(self).__name__} has no {name!r} yet", name)
            if meaning := meant_attribute(self, name):
                return attribute(self, meaning)
            if name in PANDAS:
                return partial(self._in_pandas, name)
            if name in FRAME_AGGREGATES:
                return partial(self._aggregate, name)
            calls = {name: METHOD_CALLS[name]} if name in METHOD_CALLS else {}
            synonyms = {**calls, **TABLE_SYNONYMS, **self.synonyms}
            if hasattr(pl.DataFrame, name):
                synonyms = {name: f"frame.{name}"} | synonyms
            if name in self.frame.columns and name not in synonyms:
                return self.frame[name]
            advice = ""
            if not name.startswith("_"):
                advice = did_you_mean(name, public_attributes(self), synonyms)
            message = f"a {type(self).__name__} has no attribute {name!r}{advice}"
            raise unknown_attribute(message, name)

    def _in_pandas(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Call a method of the pandas frame that aggregates or ranks rows of a single kind."""
        if method in PANDAS_AGGREGATES or method in PANDAS_RANKINGS:
            self._require_one_kind(method)
        return getattr(self.to_pandas(), method)(*arguments, **options)

    def _aggregate(
        self, method: str, *arguments: Any, numeric_only: bool = True, **options: Any
    ) -> pl.DataFrame:
        """Aggregate the columns of rows of a single kind; columns of text become null."""
        self._require_one_kind(method)
        aggregate: pl.DataFrame = getattr(self.frame, method)(*arguments, **options)
        return aggregate

    def _group_by(self, *keys: Any, **options: Any) -> Any:
        """Group rows of a single kind, or rows whose key contains the head."""
        if "head" not in keys and ["head"] not in keys:
            self._require_one_kind("group_by")
        return self.frame.group_by(*keys, **options)

    def _select(self, *columns: Any, **named: Any) -> pl.DataFrame:
        """Select columns of all rows; aggregates, only of rows of a single kind."""
        frame = self.frame.select(*columns, **named)
        if len(frame) != len(self):
            self._require_one_kind("select")
        return frame

    def _first(self, count: int) -> Self:
        """Return the rows for ``--top``."""
        return replace(self, frame=self.frame.head(count))

    def _require_one_kind(self, method: str) -> None:
        """Raise `TableError` if the table has rows of layers and rows of heads."""
        if len(self._kinds()) > 1:
            raise TableError(
                f"{method}() would mix the rows of layers and of heads; call it on table.layers or "
                "on table.heads"
            )

    def _kinds(self) -> list[Self]:
        """Return the rows of layers and the rows of heads, unless empty."""
        if "head" not in self.frame.columns:  # a row is a pair of heads
            return [self]
        return [rows for rows in (self.layers, self.heads) if len(rows)] or [self]

    def _sort(
        self,
        by: Any,
        *more: Any,
        descending: Any = False,
        ascending: bool | None = None,
        **options: Any,
    ) -> pl.DataFrame:
        """Return the frame, sorted: the rows of layers, then the rows of heads.

        The smallest values are first, as in polars; ``descending=True`` puts the largest first, as
        ``wqk scan --sort`` does.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.scan(wqk.demo_model("encoder"))
        >>> table.heads.sort("symmetry", descending=True).select("layer", "head").row(0)
        (1, 3)
        """
        if ascending is not None:
            descending = not ascending
        for name in (by, *more):
            if not isinstance(name, str):
                continue
            if name.startswith("-") and name[1:] in self.frame.columns:
                raise TableError(
                    f"sort: no column {name!r}; sort({name[1:]!r}) puts the smallest values first, "
                    "descending=True the largest"
                )
            self._require_column(name)
        return pl.concat(
            rows.frame.sort(by, *more, descending=descending, **options) for rows in self._kinds()
        )

    def _sort_values(self, by: Any, **options: Any) -> pandas.DataFrame:
        """Sort the pandas frame: the rows of layers, then the rows of heads."""
        frames = [rows.to_pandas().sort_values(by, **options) for rows in self._kinds()]
        if len(frames) == 1:
            return frames[0]
        import pandas

        return pandas.concat(frames, ignore_index=options.get("ignore_index", False))

    def _text(self, ending: str, path: FilePath | None, index: bool = False) -> str | None:
        """Return the content of a file with this ending, or write the file to a path."""
        from wqk.tables.writers import WRITERS

        if index:
            raise TableError("a table has no index; leave index= out")
        if path is None:
            return WRITERS[ending](self).decode()
        if Path(path).suffix != ending:
            raise TableError(f"{path}: expected the ending {ending}")
        self.write(path)
        return None

    def _to_csv(self, path: FilePath | None = None, *, index: bool = False) -> str | None:
        return self._text(".csv", path, index)

    def _to_latex(self, path: FilePath | None = None, *, index: bool = False) -> str | None:
        return self._text(".tex", path, index)

    def _to_markdown(self, path: FilePath | None = None, *, index: bool = False) -> str | None:
        return self._text(".md", path, index)

    def _to_json(self, path: FilePath | None = None) -> str | None:
        if path is not None and Path(path).suffix == ".jsonl":
            return self._text(".jsonl", path)
        return json_text(self.to_dict(), path)

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata and the rows, as ``--json`` prints them."""
        return {"metadata": json_value(self.metadata), "rows": records(self.frame)}

    def to_pandas(self) -> pandas.DataFrame:
        """Return the frame as a pandas frame.

        The frame has the rows of whole layers and of heads: ``table.layers.to_pandas()`` and
        ``table.heads.to_pandas()`` have rows of one kind, which can be averaged.

        Raises
        ------
        MissingPackage
            pandas or pyarrow, through which polars converts, is not installed.
        """
        try:
            import pandas  # noqa: F401
            import pyarrow  # type: ignore[import-untyped]  # noqa: F401
        except ImportError as error:
            raise MissingPackage(
                f"to_pandas() needs pandas and pyarrow, and {error.name} is not installed: "
                "pip install pandas pyarrow",
                package=error.name,
            ) from None
        return self.frame.to_pandas()

    def __arrow_c_stream__(self, requested_schema: object | None = None) -> object:
        return self.frame.__arrow_c_stream__(requested_schema)

    def __len__(self) -> int:
        return self.frame.height

    def write(self, path: str | PathLike[str]) -> None:
        """Write the table in the format of the file's ending, completely or not at all.

        `read_table` reads ``.parquet``, ``.jsonl`` and ``.csv``; ``.tex`` and ``.md`` are for
        people. All formats contain every row and describe how the numbers were computed.

        Raises
        ------
        OutputError
            The ending names no format, or the file cannot be written.
        """
        from wqk.tables.writers import WRITERS

        path = Path(path)
        check_table_output(path)
        write_atomically(path, WRITERS[path.suffix](self))


@dataclass(frozen=True, eq=False, repr=False)
class ScoreTable(Table):
    """Scores, one row for each layer and, with ``head`` filled in, for each head.

    Attributes
    ----------
    frame
        A polars frame with the columns of `wqk.tables.columns.COLUMNS`, in that order, then the
        columns of requested measures.
    metadata
        Description of the scores: ``gamma``, ``folded_norms``, ``biases``, ``wqk`` and
        ``schema_version``; ``partial``, the reasons of partial rows by stack; ``left_out``, the
        terms that no form contains, by checkpoint; ``layers_of_model``, if layers were chosen, the
        numbers of all layers by checkpoint and attention; ``inferred``, the reasons of guesses;
        ``unread`` settings; and ``notes``. A survey adds ``failed`` and ``identical``. Parquet and
        JSON Lines files store it.
    details
        The data for pictures, if requested, with a separate file:
        ``table.details.write("forms.npz")``.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("encoder"))
    >>> table.layers.frame.select("layer", "head", "rank").rows()[:2]
    [(0, None, 128), (1, None, 128)]
    >>> len(table) == 4 * (1 + 4)
    True
    """

    declared = COLUMNS
    further = FURTHER_COLUMNS
    # No other table with layers has a symmetry by chance. An empty symmetry means that the two
    # sides have different widths.
    needed = ("layer", "symmetry", "symmetry_null")
    synonyms: ClassVar[Mapping[str, str]] = {
        "compare": 'side_by_side("symmetry")',
        "heatmap": 'plot("heads")',
        "medians": "summary()",
    }

    details: Details | None = None

    @classmethod
    def from_rows(
        cls,
        rows: Iterable[Mapping[str, Any]],
        metadata: Mapping[str, Any] | None = None,
        details: Details | None = None,
    ) -> ScoreTable:
        """Return a table from one mapping for each row; absent columns get default values."""
        listed = list(rows)
        named = {*cls.needed}.union(*listed)
        present = types(column for column in (*COLUMNS, *FURTHER_COLUMNS) if column.name in named)
        frame = pl.DataFrame(listed, schema=present, strict=False)
        return cls(frame, {"schema_version": SCHEMA_VERSION, **(metadata or {})}, details)

    def summary(self) -> pl.DataFrame:
        """Median and quartiles of each score, over layers and over heads.

        The result has one row for each ``over`` (``layers`` or ``heads``), checkpoint, stack, kind
        of attention, circuit and distance. Its columns are ``count``, and for each score
        ``{score}_median``, ``_q25`` and ``_q75`` (linear interpolation). Degenerate rows are
        excluded.
        """
        scored = self.frame.with_columns(
            pl.when(pl.col("head").is_null())
            .then(pl.lit("layers"))
            .otherwise(pl.lit("heads"))
            .alias("over"),
            *(pl.col(score).fill_nan(None) for score in SUMMARIZED),
        )
        quartiles = {"q25": 0.25, "median": 0.5, "q75": 0.75}
        aggregates = [pl.col("directionality").count().alias("count")]
        for score in SUMMARIZED:
            for name, q in quartiles.items():
                aggregates.append(pl.col(score).quantile(q, "linear").alias(f"{score}_{name}"))
        return scored.group_by(["over", *GROUP], maintain_order=True).agg(aggregates)

    def side_by_side(self, score: str = "symmetry") -> pl.DataFrame:
        """Return one score with a column for each model and a row for each layer and head.

        A column is named after the end of the model's name. If models have the same end, revision,
        step, stack, kind of attention or circuit follow. ``table.layers.side_by_side()`` has only
        the rows of whole layers. A layer or head that a model lacks is null; the ``head`` of a
        whole layer is also null.

        Raises
        ------
        TableError
            The table lacks the column, or has several values of the same model, layer and head.

        Examples
        --------
        >>> import wqk
        >>> table = wqk.scan([wqk.demo_model("encoder"), wqk.demo_model("decoder")], heads=False)
        >>> wide = table.side_by_side("symmetry")
        >>> wide.columns, wide.row(0)
        (['layer', 'encoder', 'decoder'], (0, 0.909..., 0.351...))
        >>> wide.write_csv().splitlines()[0]
        'layer,encoder,decoder'
        """
        self._require_column(score)
        from wqk.tables.rendering import with_model_columns

        return with_model_columns(self.frame, score)

    def to_dict(self) -> dict[str, Any]:
        """Return the metadata, the `summary` and the rows, as ``--json`` prints them."""
        content = super().to_dict()
        return {"metadata": content.pop("metadata"), "summary": records(self.summary()), **content}

    def join(self, *others: ScoreTable) -> ScoreTable:
        """Return a table with the rows of this and other tables; see `wqk.join`."""
        return join([self, *others])

    @called_as(
        'table.plot("layers"), or table.plot(y="symmetry"), a figure with axes of its own: '
        "figure.savefig(path)"
    )
    @current
    def plot(
        self,
        view: Literal["layers", "heads", "models"] | None = None,
        *,
        y: str | None = None,
    ) -> Figure:
        """Draw the table (needs matplotlib).

        Parameters
        ----------
        view
            ``layers``: symmetry and directionality over the layers, a curve for each model.
            ``heads``: a map of each score, layers down and heads across, for at most eight models.
            ``models``: a box for each model, from quartile to quartile over layers. By default
            ``layers``, or ``models`` if there are more than twelve.
        y
            The score to draw; by default symmetry and directionality (excess).

        Returns
        -------
        matplotlib.figure.Figure
            Displayed by notebooks; save it with ``figure.savefig(path)``. If the program has
            imported ``matplotlib.pyplot``, the figure is pyplot's current figure.

        Raises
        ------
        TableError
            The view does not exist, or the table lacks the rows or the score.

        Examples
        --------
        >>> import wqk
        >>> figure = wqk.scan(wqk.demo_model("encoder")).plot("heads")
        >>> [axis.get_title(loc="left") for axis in figure.axes[:2]]
        ['symmetry', 'directionality (excess)']
        """
        from wqk.tables.rendering import plot_table

        self.require_single_rows()
        return plot_table(self.distinct, view, y)

    @property
    def distinct(self) -> ScoreTable:
        """The table with each row once, for tables that were joined with themselves."""
        return replace(self, frame=self.frame.unique(maintain_order=True))

    def require_single_rows(self) -> None:
        """Raise `TableError` if a layer or a head has rows that differ, which are no curve."""
        frame = self.distinct.frame
        repeated = frame.filter(frame.select(KEY).is_duplicated())
        if repeated.is_empty():
            return
        checkpoint, layer = repeated.select("checkpoint", "layer").row(0)
        raise TableError(
            f"{checkpoint}: layer {layer} has several rows, which no curve can pass; expected one, "
            f"got {len(repeated)} rows from tables of one checkpoint; give a table another name "
            'with wqk.ScoreTable(table.frame.with_columns(checkpoint=pl.lit("new name")))'
        )

    def _drawn(self) -> Figure | None:
        return self.plot() if len(self.layers) else None

    def _shown(self, width: int) -> Iterator[Any]:
        from wqk.tables.rendering import score_table

        return score_table(self, width)


def _pair(key: Any) -> tuple[Any, ...]:
    """Return the layers and, if given, the heads that an index chooses."""
    pair = key if isinstance(key, tuple) else (key,)
    if not 0 < len(pair) < 3 or not all(isinstance(index, int | slice) for index in pair):
        raise TableError(
            f"a table takes a column's name, a layer, or a layer and a head; got {key!r}"
        )
    return pair


def check_table_output(path: Path) -> None:
    """Raise `OutputError` if no table can be written to this path."""
    from wqk.tables.writers import WRITERS

    check_output(path, "a table", WRITERS)


def read_table(path: str | PathLike[str]) -> ScoreTable:
    """Read a score table from a ``.parquet``, ``.jsonl`` or ``.csv`` file.

    Raises
    ------
    TableError
        The file does not exist, or contains no score table.

    Examples
    --------
    >>> import tempfile, wqk
    >>> path = Path(tempfile.mkdtemp()) / "scores.parquet"
    >>> wqk.scan(wqk.demo_model("encoder")).write(path)
    >>> len(read_table(path))
    20
    """
    table = read_one_of(path, ScoreTable)
    assert isinstance(table, ScoreTable)
    return table


def read_one_of(path: str | PathLike[str], *kinds: type[Table]) -> Table:
    """Read a table of the first class, of several, whose columns are in the file.

    Raises
    ------
    TableError
        The file does not exist, or contains no table of these classes.
    """
    from wqk.tables.writers import READERS, UNREADABLE_TABLES

    path = Path(path)
    reader = READERS.get(path.suffix)
    if reader is None:
        missing = "" if path.exists() else "no such file or folder; "
        got = f"; got {path.suffix!r}" if path.suffix or path.exists() else ""
        if path.suffix == ".npz":
            got += ", details of a scan: give its table, and the file with --details"
        raise TableError(
            f"{path}: {missing}expected a table in {', '.join(READERS)}{got}", path=path
        )
    require_file(path, TableError)
    try:
        columns: list[Column] = []
        for table_class in kinds:
            columns += [*table_class.declared, *table_class.further]
        frame, metadata = reader(path.read_bytes(), types(columns))
        for table_class in kinds:
            if {*table_class.needed} <= {*frame.columns}:
                return table_class(frame, _with_note(metadata, path, frame, table_class))
        return kinds[0](frame, metadata)  # raises an error that names the missing columns
    except OSError as error:
        raise TableError(f"{path}: cannot be read ({error.strerror})", path=path) from None
    except UNREADABLE_TABLES as error:
        raise TableError(
            f"{path}: contains no score table ({first_line(error)})", path=path
        ) from None


def _with_note(
    metadata: Mapping[str, Any], path: Path, frame: pl.DataFrame, table_class: type[Table]
) -> Mapping[str, Any]:
    """Return the metadata of a file, with a note on the columns that the table leaves out."""
    from wqk.tables.writers import CONDITIONS

    known = {*CONDITIONS, *table_class.former_names}
    known.update(column.name for column in (*table_class.declared, *table_class.further))
    unknown = [name for name in frame.columns if name not in known]
    if not unknown:
        return metadata
    notes = metadata.get("notes")
    note = (
        f"columns of {path.name} that no {table_class.__name__} has were left out: "
        f"{few([*map(one_line, unknown)])}; polars and pandas read them"
    )
    return {**metadata, "notes": [*(notes if isinstance(notes, list) else []), note]}


def join(tables: ScoreTable | Sequence[ScoreTable], *others: ScoreTable) -> ScoreTable:
    """Return the rows of several tables as one table, and their details.

    The tables are a list, or arguments: ``wqk.join(table, other)``.

    If metadata differ, the first table's metadata are kept. Entries about single checkpoints are
    merged. If the tables have several checkpoints, each note begins with the checkpoint's name.

    Raises
    ------
    TableError
        No table was passed.

    Examples
    --------
    >>> import wqk
    >>> models = [wqk.demo_model(name) for name in ("encoder", "decoder")]
    >>> len(wqk.join([wqk.scan(model, heads=False) for model in models]))
    8
    """
    tables = [*([tables] if isinstance(tables, ScoreTable) else tables), *others]
    if not tables:
        raise TableError("at least one table is needed, got none")
    several = len(set().union(*(table.frame["checkpoint"] for table in tables))) > 1
    metadata: dict[str, Any] = {}
    for table in reversed(tables):
        entries = dict(table.metadata)
        if several:
            entries |= _named_notes(table)
        for name, value in entries.items():
            present = metadata.get(name)
            if isinstance(present, dict) and isinstance(value, dict):
                value = {**present, **value}
            elif isinstance(present, list) and isinstance(value, list):
                value = [*value, *(line for line in present if line not in value)]
            metadata[name] = value
    frame = pl.concat([table.frame for table in tables], how="diagonal")
    return ScoreTable(frame, metadata, _joined_details(tables))


def _joined_details(tables: Sequence[ScoreTable]) -> Details | None:
    details = [table.details for table in tables if table.details is not None]
    if not details:
        return None
    blocks = chain.from_iterable(details_of_table.blocks for details_of_table in details)
    return Details(tuple(blocks), details[0].gamma)


def _named_notes(table: ScoreTable) -> dict[str, Any]:
    """Return the notes on a table's only checkpoint, each with the checkpoint's name."""
    names = table.frame["checkpoint"].unique().to_list()
    if len(names) != 1:
        return {}
    name = names[0]
    beginnings = {"inferred": f"of {name} ", "unread": f"{name}: ", "notes": f"{name}: "}
    notes: dict[str, Any] = {}
    for kind, beginning in beginnings.items():
        lines = table.metadata.get(kind)
        if isinstance(lines, list):
            notes[kind] = [f"{beginning}{line}" for line in lines]
    reasons = table.metadata.get("partial")
    if isinstance(reasons, dict):
        notes["partial"] = {f"{name} {stack}": reason for stack, reason in reasons.items()}
    return notes
