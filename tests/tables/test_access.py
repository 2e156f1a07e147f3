"""Columns, layers, heads and rows of a table, and what it exports to."""

from __future__ import annotations

import pickle

import pytest

import wqk
from wqk.errors import TableError


@pytest.fixture(scope="module")
def table() -> wqk.ScoreTable:
    return wqk.scan(wqk.demo_model("encoder"))


def places(table: wqk.ScoreTable) -> list[tuple[int, int | None]]:
    return list(zip(table["layer"], table["head"], strict=True))


def test_layers_and_heads_are_chosen_by_number(table):
    assert places(table[1]) == [(1, None), *((1, h) for h in range(4))]
    assert places(table[-1, 2]) == [(3, 2)]
    assert places(table[:2, :2]) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert "4 layers" in str(table)
    assert "layers" not in str(table.heads).split("\n")[1]
    assert places(table[2, :]) == places(table[2].heads) == [(2, h) for h in range(4)]
    assert table[1].metadata == table.metadata
    assert isinstance(table[1], wqk.ScoreTable)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (4, "no layer 4; its layers are 0 to 3"),
        ((0, 4), "no head 4; its heads are 0 to 3"),
        (slice(4, 9), "no layer slice"),
        ("symetry", "no column 'symetry'; did you mean 'symmetry'"),
        ((0, 1, 2), "a layer and a head"),
        (None, "a layer and a head"),
        ("", "no column ''"),
    ],
)
def test_what_is_not_there_is_named(table, index, message):
    with pytest.raises(TableError, match=message):
        table[index]


def test_a_table_of_layers_has_no_heads(table):
    with pytest.raises(TableError, match="its heads are none"):
        table.layers[0, 0]


def test_rows_are_dictionaries(table):
    rows = list(table)
    assert len(rows) == len(table) == 20
    assert rows[0]["symmetry"] == table["symmetry"][0]


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("report", r"wqk.report\(table, path\)"),
        ("layer", r"table\[layer\]"),
        ("to_panda", "to_pandas"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(table, name, meant):
    with pytest.raises(AttributeError, match=f"ScoreTable has no attribute '{name}'.*{meant}"):
        getattr(table, name)


def test_a_table_is_pickled(table):
    assert pickle.loads(pickle.dumps(table)).frame.equals(table.frame)
