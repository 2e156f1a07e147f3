"""Conditions on the rows of a table, written as in SQL or in Python."""

from __future__ import annotations

import re
from collections.abc import Sequence

import polars as pl

from wqk.errors import TableError, did_you_mean, first_line
from wqk.tables.columns import advice_on_measure

EXAMPLE = "symmetry > 0.5 and layer < 4"
# Text in quotation marks.
QUOTED = re.compile(r"""("[^"]*"|'[^']*'|`[^`]*`)""")
# Operators of Python, as patterns, and those of SQL.
OPERATORS = {"==": "=", r"&{1,2}": " AND ", r"\|{1,2}": " OR "}
# The end of what stands before a value in quotation marks: an equality, LIKE, or a list.
BEFORE_VALUE = re.compile(r"((?<![<>])=|<>|\blike|\bin\s*\(|,)\s*$", re.I)


def condition(text: str, names: Sequence[str]) -> pl.Expr:
    """Return the expression of a condition on a row.

    Text in quotation marks after an equality, LIKE or IN is a value. Elsewhere, text in quotation
    marks is the name of a column, like a name without quotation marks. A column has its name in
    files or on the terminal.

    Parameters
    ----------
    text
        The condition.
    names
        Names of the table's columns.

    Raises
    ------
    TableError
        The condition is not valid, or the table lacks one of the columns.

    Examples
    --------
    >>> str(condition("layer == 2", ["layer"]))
    '[(col("layer")) == (dyn int: 2)]'
    >>> str(condition("directionality (excess) < 0", ["directionality_excess"]))
    '[(col("directionality_excess")) < (dyn int: 0)]'
    """
    parts = QUOTED.split(text.replace(" (excess)", "_excess"))
    for place, part in enumerate(parts):
        is_quoted = place % 2 == 1
        if not is_quoted:
            parts[place] = _in_sql(part)
        elif BEFORE_VALUE.search(parts[place - 1]) and part[0] != "`":
            parts[place] = _value(part[1:-1])
        else:
            _require_column(part[1:-1], names, text)
            parts[place] = f'"{part[1:-1]}"'
    try:
        expression = pl.sql_expr("".join(parts))
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise TableError(
            f'{text}: is no condition; expected one such as "{EXAMPLE}" ({first_line(error)})'
        ) from None
    for name in expression.meta.root_names():
        _require_column(name, names, text)
    return expression


def _in_sql(text: str) -> str:
    """Return text without quotation marks, with SQL operators in place of Python's operators."""
    for operator, sql in OPERATORS.items():
        text = re.sub(operator, sql, text)
    return text


def _value(text: str) -> str:
    """Return a text as a literal of SQL."""
    escaped = text.replace("'", "''")
    return f"'{escaped}'"


def _require_column(name: str, names: Sequence[str], text: str) -> None:
    """Raise `TableError` if no column has the name."""
    if name not in names:
        advice = (
            advice_on_measure(name)
            or did_you_mean(name, names)
            or "; a value follows its column: status == 'ok'"
        )
        raise TableError(f"{text}: the table has no column {name!r}{advice}")
