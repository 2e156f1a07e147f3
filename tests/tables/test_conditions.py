"""Conditions on rows: however a column is written, the rows are those of polars' own expression."""

from __future__ import annotations

import polars as pl
import pytest

import wqk
from wqk.tables.score_table import ScoreTable

SYMMETRY = pl.col("symmetry")
EXCESS = pl.col("directionality_excess")
HEAD = pl.col("head")
LAYER = pl.col("layer")
STACK = pl.col("stack")

EQUIVALENT = [
    ("symmetry > 0.5", SYMMETRY > 0.5),
    ('"symmetry" > 0.5', SYMMETRY > 0.5),
    ("'symmetry' > 0.5", SYMMETRY > 0.5),
    ("`symmetry` > .5", SYMMETRY > 0.5),
    ('0.5 < "symmetry"', SYMMETRY > 0.5),
    ("0.5 <= 'symmetry'", SYMMETRY >= 0.5),
    ("directionality (excess) < -0.1", EXCESS < -0.1),
    ('"directionality (excess)" < -0.1', EXCESS < -0.1),
    ("symmetry >= .5 & symmetry <= .6", SYMMETRY.is_between(0.5, 0.6)),
    ("head is null && layer < 2", HEAD.is_null() & (LAYER < 2)),
    ("layer == 0 || layer == 2", LAYER.is_in([0, 2])),
    ('stack == "encoder" and layer in (1, 2)', (STACK == "encoder") & LAYER.is_in([1, 2])),
    ("stack != 'encoder'", STACK != "encoder"),
    ("stack <> 'encoder'", STACK != "encoder"),
    ("stack in ('decoder', 'encoder') and head = 1", HEAD == 1),
    ("stack like 'enc%' and head = 1", HEAD == 1),
    ("stack == 'a & b | c == d'", pl.lit(value=False)),
    # A value that is the name of a column, too.
    ("stack == 'layer'", pl.lit(value=False)),
]

REFUSED = [
    ('"simmetry" > 0.5 and layer < 4', "no column 'simmetry'; did you mean 'symmetry'?"),
    ("simmetry > 0.5", "no column 'simmetry'; did you mean 'symmetry'?"),
    ("'ok' == status", "no column 'ok'; a value follows its column: status == 'ok'"),
    ("symmetry > 'abc'", "no column 'abc'"),
    ("symmetry == 'abc'", "is no condition on this table"),
    ("layer", "is no condition on this table"),
    ("layer ===== 2", "is no condition"),
]


@pytest.fixture(scope="module")
def table() -> ScoreTable:
    return wqk.scan(wqk.demo_model("encoder"))


@pytest.mark.parametrize(("text", "expression"), EQUIVALENT)
def test_a_condition_has_the_rows_of_the_expression(text, expression, table):
    assert table.filter(text).frame.equals(table.frame.filter(expression))


@pytest.mark.parametrize(("text", "message"), REFUSED)
def test_what_is_no_condition_is_refused(text, message, table):
    with pytest.raises(wqk.WqkError) as caught:
        table.filter(text)
    assert str(caught.value).startswith(f"{text}: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
