"""Columns, layers, heads and rows of a table, and what it exports to."""

from __future__ import annotations

import pickle

import polars as pl
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
        (("layer", "symetry"), "no column 'symetry'; did you mean 'symmetry'"),
        ((0, 1, 2), "a layer and a head"),
        (None, "a layer and a head"),
        ("", "no column ''"),
    ],
)
def test_what_is_not_there_is_named(table, index, message):
    with pytest.raises(TableError, match=message):
        table[index]


def test_several_columns_are_chosen_by_name(table):
    assert table["layer", "symmetry"].columns == ["layer", "symmetry"]
    assert table[["layer", "symmetry"]].equals(table["layer", "symmetry"])


def test_a_column_that_is_not_there_is_not_sorted_by(table):
    with pytest.raises(TableError, match="no column 'symetry'; did you mean 'symmetry'"):
        table.sort("symetry", descending=True)
    assert table.sort(pl.col("symmetry"))["symmetry"][0] == table.layers["symmetry"].min()
    assert table.sort("layer", "head").height == 20


@pytest.mark.parametrize(
    ("name", "meant"),
    [("top", "farthest"), ("worst", "farthest"), ("summary", "result"), ("heatmap", "plot")],
)
def test_a_table_of_differences_names_its_own_methods(name, meant):
    differences = wqk.diff(wqk.demo_model("encoder"), wqk.demo_model("encoder"), heads=False)
    with pytest.raises(AttributeError, match=f"has no attribute '{name}'; did you mean '{meant}"):
        getattr(differences, name)


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
        ("compare", r'side_by_side\("symmetry"\)'),
        ("pivot", "side_by_side.*, with a column for each model"),
        ("order_by", r'sort\("symmetry", descending=True\)'),
        ("best", "nlargest"),
        ("models", r'table\["checkpoint"\].unique\(\)'),
        ("print", r"print\(table\)"),
        ("medians", r"summary\(\)"),
    ],
)
def test_a_wrong_name_is_told_the_right_one(table, name, meant):
    with pytest.raises(AttributeError, match=f"ScoreTable has no attribute '{name}'.*{meant}"):
        getattr(table, name)


@pytest.mark.parametrize("method", ["mean", "median", "std", "max", "describe", "nlargest"])
def test_rows_of_layers_and_of_heads_are_never_aggregated_together(table, method):
    arguments = (2, "symmetry") if method == "nlargest" else ()
    with pytest.raises(TableError, match="would mix the rows of layers and of heads"):
        getattr(table, method)(*arguments)
    assert len(getattr(table.layers, method)(*arguments))


def test_aggregates_are_those_of_polars(table):
    layers = table.layers
    assert layers.mean(numeric_only=True)["symmetry"].item() == layers["symmetry"].mean()
    assert layers.quantile(0.25)["symmetry"].item() == layers["symmetry"].quantile(0.25)
    by_layer = table.heads.group_by("layer").agg(pl.col("symmetry").mean())
    assert len(by_layer) == 4
    with pytest.raises(TableError, match="would mix"):
        table.group_by("layer")
    assert len(table.group_by("head").len()) == 5
    with pytest.raises(TableError, match="would mix"):
        table.select(pl.col("symmetry").mean())
    assert table.select("layer", "head").shape == (20, 2)


def test_tables_are_joined_and_their_models_compared(table):
    with pytest.raises(TableError, match=r"wqk\.diff\(reference, candidate\)"):
        table - table
    with pytest.raises(TableError, match=r"wqk\.join\(\[table, other\]\)"):
        table + table


def test_a_summary_names_its_rows_first(table):
    summary = table.summary()
    assert summary.columns[0] == "over"
    assert summary["over"].to_list() == ["layers", "heads"]
    assert "│ layers" in str(summary)


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "json"])
def test_columns_that_are_left_out_of_a_file_are_named(table, ending, tmp_path):
    path = tmp_path / f"scores.{ending}"
    table.write(path)
    assert not wqk.read_table(path).metadata.get("notes")
    frame = table.frame.with_columns(mine=pl.lit(3), yours=pl.lit("x"))
    match ending:
        case "parquet":
            frame.write_parquet(path)
        case "csv":
            frame.write_csv(path)
        case "jsonl":
            frame.write_ndjson(path)
        case "json":
            path.write_text(f'{{"rows": {frame.write_json()}}}')
    reread = wqk.read_table(path)
    assert reread.frame.equals(table.frame)
    (note,) = reread.metadata["notes"]
    assert note.startswith(
        f"columns of {path.name} that no ScoreTable has were left out: mine, yours"
    )
    assert "were left out: mine, yours" in " ".join(str(reread).split())


def test_a_file_without_stacks_and_families_is_shown_and_reported(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("layer,symmetry,symmetry_null\n0,0.5,0.1\n1,0.25,0.1\n")
    table = wqk.read_table(path)
    rows = wqk.ScoreTable.from_rows([{"layer": 0, "symmetry": 0.5}, {"layer": 1, "symmetry": 0.25}])
    for shown in (table, rows):
        assert "unknown self-attention · 2 layers\n" in str(shown)
        assert shown.plot().axes
    assert "None" not in str(table)
    page = tmp_path / "report.html"
    wqk.report(table, page)
    assert "unknown self-attention" in page.read_text("utf-8")
    assert "None" not in page.read_text("utf-8").partition("<script")[0]


def test_a_table_is_pickled(table):
    assert pickle.loads(pickle.dumps(table)).frame.equals(table.frame)
