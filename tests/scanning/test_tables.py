"""Score tables: their columns, their files, and that no half of one is ever left behind."""

from __future__ import annotations

import csv
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet
import pytest
from polars.testing import assert_frame_equal
from tests.command import run
from tests.limits import counts
from tests.reporting.making import row

import wqk
from wqk._files import write_atomically
from wqk.differences import DifferenceTable
from wqk.errors import OutputError, TableError
from wqk.inspecting.composition import CompositionTable
from wqk.tables.columns import COLUMNS as COLUMN_RECORDS
from wqk.tables.schema import FURTHER_COLUMNS, KEY, SCHEMA, SCHEMA_VERSION, records
from wqk.tables.score_table import ScoreTable, join, read_table
from wqk.tables.writers import CONDITIONS

COLUMNS = [
    *("checkpoint", "revision", "step", "model_type", "family", "parameters", "stack", "kind"),
    *("window", "layer", "head", "key_head", "heads", "key_heads", "rank", "d_query", "d_key"),
    *("applications", "circuit", "distance", "norm", "symmetry", "symmetry_null"),
    *("symmetry_within_heads", "symmetry_between_heads", "symmetry_within_random"),
    *("directionality", "directionality_excess", "status"),
]

SCORES = ("symmetry", "directionality", "directionality_excess")


def degenerate(**changes: Any) -> dict[str, Any]:
    return row(**dict.fromkeys(SCORES, float("nan")), norm=0.0, status="degenerate", **changes)


def some_table(rows: int = 6, **metadata: Any) -> ScoreTable:
    dice = np.random.default_rng(rows)
    made = [
        row(layer=i // 2, head=None if i % 2 == 0 else 1, symmetry=dice.random(), step=10 * i)
        for i in range(rows)
    ]
    return ScoreTable.from_rows(made, metadata)


# What a file has to carry through: nulls, NaN, digits, and names of any letters.
@cache
def awkward() -> ScoreTable:
    return ScoreTable.from_rows(
        [
            row(symmetry=1 / 3, norm=1e-300, parameters=2**62, revision="1e5", window="256"),
            row(checkpoint="ä\u2028ö,\"'|&_%$#{}~^\\ \x85x", symmetry=None, layer=1),
            degenerate(layer=2, head=1, revision="0012"),
        ],
        {"gamma": 2.0, "partial": {"decoder": "a reason\nin two lines\u2028"}, "biases": False},
    )


def test_the_columns_and_their_order():
    assert list(SCHEMA) == COLUMNS
    assert some_table().frame.columns == COLUMNS
    assert dict(some_table().frame.schema) == SCHEMA
    assert set(KEY) < set(COLUMNS)
    # What is absent is null; a table may be empty.
    table, empty = ScoreTable.from_rows([{"layer": 3}, {}]), ScoreTable.from_rows([])
    assert table.frame["layer"].to_list() == [3, None]
    assert table.frame["symmetry"].null_count() == 2
    assert table.metadata == {"schema_version": SCHEMA_VERSION}
    assert len(empty) == len(empty.summary()) == len(empty.layers) == 0
    assert dict(empty.frame.schema) == SCHEMA


def test_columns_of_any_order_and_type_are_brought_into_the_schema():
    frame = some_table().frame
    shuffled = frame.select(reversed(frame.columns)).with_columns(
        pl.col("layer").cast(pl.Int32), pl.col("norm").cast(pl.Float32), extra=pl.lit(1)
    )
    assert_frame_equal(ScoreTable(shuffled).frame, frame)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda frame: frame.select("checkpoint"), "needs the columns layer, symmetry, symm"),
        (lambda frame: frame.drop("symmetry", "symmetry_null"), "columns symmetry, symmetry_null"),
        (
            lambda frame: frame.drop("head", "step"),
            "needs the column head, .* a layer has several rows",
        ),
        (lambda frame: frame.drop("symmetry_null"), "needs the columns symmetry_null"),
        (lambda frame: frame.with_columns(layer=pl.lit("first")), "has the wrong type"),
    ],
)
def test_a_frame_that_is_no_score_table(change, message):
    with pytest.raises(TableError, match=message):
        ScoreTable(change(some_table().frame))


def test_layers_heads_filters_and_joined_tables_keep_what_is_about_them():
    table = some_table(gamma=3.0)
    assert table.layers.frame["head"].null_count() == len(table.layers) == 3
    assert table.heads.frame["head"].to_list() == [1, 1, 1]
    late = table.filter(pl.col("layer") > 0, pl.col("head").is_null())
    assert late.frame["layer"].to_list() == [1, 2]
    assert late.metadata["gamma"] == 3.0
    joined = join([table, some_table(4, gamma=1.0, note="kept")])
    assert_frame_equal(joined.frame, pl.concat([table.frame, some_table(4).frame]))
    assert (joined.metadata["gamma"], joined.metadata["note"]) == (3.0, "kept")


# Files


@pytest.mark.parametrize("made", [lambda: some_table(gamma=2.0), awkward, lambda: some_table(0)])
@pytest.mark.parametrize("ending", [".parquet", ".jsonl", ".csv"])
def test_a_saved_table_comes_back(tmp_path, made, ending):
    table = made()
    # A name that a glob or a format string would trip over.
    path = tmp_path / f"scores [1]*{{x}}{ending}"
    table.write(path)
    loaded = read_table(str(path))
    # JSON has no NaN, and says null.
    expected = table.frame.fill_nan(None) if ending == ".jsonl" else table.frame
    assert_frame_equal(loaded.frame, expected, check_exact=True)
    kept = {name: table.metadata[name] for name in CONDITIONS if name in table.metadata}
    assert loaded.metadata == (
        kept if ending == ".csv" and len(table) else {} if ending == ".csv" else table.metadata
    )
    assert list(tmp_path.iterdir()) == [path]


@cache
def with_measures() -> ScoreTable:
    return wqk.scan(wqk.demo_model("encoder"), heads=False, measures=["spectrum", "ceiling"])


@pytest.mark.parametrize(
    "column", [*COLUMN_RECORDS, *FURTHER_COLUMNS], ids=lambda column: column.name
)
def test_a_file_without_a_column_opens_with_what_that_means(tmp_path, column):
    table = with_measures()
    for ending in ("parquet", "jsonl", "csv"):
        frame, path = table.frame.drop(column.name, strict=False), tmp_path / f"t.{ending}"
        if ending == "parquet":
            frame.write_parquet(path)
        elif ending == "csv":
            frame.write_csv(path)
        else:
            path.write_text("".join(json.dumps(line) + "\n" for line in records(frame)))
        if column.name in ScoreTable.needed:
            with pytest.raises(TableError, match=f"needs the columns {column.name}"):
                read_table(path)
            continue
        opened = read_table(path).frame
        assert_frame_equal(opened.drop(column.name, strict=False), frame)
        if column in COLUMN_RECORDS:
            assert opened.columns == table.frame.columns
            assert opened[column.name].unique().to_list() == [column.missing]
        repr(read_table(path))


@pytest.mark.parametrize("column", COLUMN_RECORDS, ids=lambda column: column.name)
def test_a_scan_fills_every_column(column):
    rows = wqk.scan(wqk.demo_model("encoder")).frame[column.name]
    unknown = {"revision", "step", "window"}  # of a folder, and without local attention
    assert rows.is_null().all() == (column.name in unknown), (
        f"{column.name}: make it an attribute of BilinearForm, or fill it in scanning/scan.py"
    )


def test_every_column_says_what_it_means():
    for kind in (ScoreTable, DifferenceTable, CompositionTable):
        names = [column.name for column in (*kind.declared, *kind.further)]
        assert len(names) == len(set(names))
        for column in (*kind.declared, *kind.further):
            assert column.meaning, f"{column.name}: say what it means, in its record"
            assert not column.chance or column.chance in names, column.name


def test_former_names_of_columns_are_read() -> None:
    former = {"before": "a", "before_revision": "main", "before_step": 3, "layer": 0, "moved": 0.5}
    frame = DifferenceTable(pl.DataFrame([former])).frame
    names = ("reference", "reference_revision", "reference_step")
    assert frame.select(names).row(0) == ("a", "main", 3)


def test_parquet_metadata_is_readable_elsewhere(tmp_path):
    awkward().write(tmp_path / "t.parquet")
    stored = pa.parquet.read_metadata(tmp_path / "t.parquet").metadata
    assert json.loads(stored[b"wqk"]) == awkward().metadata


def test_json_lines_are_json_lines(tmp_path):
    awkward().write(tmp_path / "t.jsonl")
    first, *rows = (tmp_path / "t.jsonl").read_text().split("\n")[:-1]
    assert json.loads(first) == {"metadata": awkward().metadata}
    assert [json.loads(r, parse_constant=pytest.fail) for r in rows] == records(awkward().frame)
    assert [json.loads(r)["symmetry"] for r in rows] == [1 / 3, None, None]


def test_files_that_others_wrote_have_no_metadata_and_more_columns(tmp_path):
    lines = [{**r, "seconds": 1.5} for r in records(some_table().frame)]
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n\n")
    assert_frame_equal(read_table(tmp_path / "t.jsonl").frame, some_table().frame)
    some_table().frame.write_parquet(tmp_path / "t.parquet")
    assert read_table(tmp_path / "t.parquet").metadata == {}
    for metadata in ("[1]", "{", "5"):
        some_table().frame.write_parquet(tmp_path / "t.parquet", metadata={"wqk": metadata})
        with pytest.raises(TableError, match="contains no score table"):
            read_table(tmp_path / "t.parquet")


def test_markdown_has_every_row_and_what_it_is_about(tmp_path):
    table = join([some_table(), awkward()])
    table.write(tmp_path / "t.md")
    text = (tmp_path / "t.md").read_text(encoding="utf-8")
    about, empty, header, rule, *lines = text.rstrip("\n").split("\n")
    assert about == "circuit qk, distance 0, biases left out, gamma 2"
    assert empty == ""
    cells = [c.strip() for c in header.strip("|").split("|")]
    assert cells[:3] == ["checkpoint", "revision", "step"]
    assert cells[cells.index("layer") :][:4] == ["layer", "head", "norm", "symmetry"]
    assert set(rule) <= set("|-: ")
    assert len(lines) == len(table)
    assert all(re.sub(r"\\.", "", line).count("|") == len(cells) + 1 for line in lines)
    assert f" {table.frame['symmetry'][0]:.3f} " in lines[0].split("|")
    # What is not known is a dash, not the word None.
    assert lines[0].split("|")[2] == " – "


def test_a_single_models_table_names_it_once(tmp_path):
    ScoreTable.from_rows([row(), row(layer=1)], {"gamma": 3.0, "folded_norms": True}).write(
        tmp_path / "t.md"
    )
    text = (tmp_path / "t.md").read_text(encoding="utf-8")
    assert text.startswith("owner/model; circuit qk, distance 0, norms folded in, gamma 3\n\n|")
    assert text.count("owner/model") == 1


def read_csv(table: ScoreTable, path: Path) -> list[dict[str, Any]]:
    """The rows of a table's file, as any other reader has them."""
    table.write(path)
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_csv_opens_in_any_reader_and_no_cell_is_a_formula(tmp_path):
    rows = read_csv(awkward(), tmp_path / "t.csv")
    assert list(rows[0]) == [*COLUMNS, "gamma", "folded_norms", "biases"]
    assert [r["checkpoint"] for r in rows] == awkward().frame["checkpoint"].to_list()
    assert float(rows[0]["symmetry"]) == 1 / 3
    names = ["=1+1", "+2", "-3", "@x", "'quoted", "\t=4", "plain"]
    table = ScoreTable.from_rows([row(checkpoint=name, symmetry=-0.5) for name in names])
    rows = read_csv(table, tmp_path / "t.csv")
    assert [r["checkpoint"][0] for r in rows] == ["'"] * 6 + ["p"]
    assert rows[0]["symmetry"] == "-0.5"
    assert read_table(tmp_path / "t.csv").frame["checkpoint"].to_list() == names


def test_latex_is_a_tabular_without_bare_specials(tmp_path):
    names = ["50%_of #1 & $2 {x} ~a^b \\c", "plain"]
    rows = [row(checkpoint=names[0]), row(checkpoint=names[1], head=1)]
    ScoreTable.from_rows(rows, {"gamma": 2.0}).write(tmp_path / "t.tex")
    text = (tmp_path / "t.tex").read_text(encoding="utf-8")
    assert text.startswith(
        "% needs \\usepackage{booktabs,amsmath}\n% circuit qk, distance 0, gamma 2"
    )
    assert "\\begin{tabular}{lrrrrrrr}\n" in text
    assert text.endswith("\\end{tabular}\n")
    _, body = text.split("\\midrule\n")
    first, second = body.split("  \\bottomrule")[0].splitlines()
    assert first.startswith(
        r"  50\%\_of \#1 \& \$2 \{x\} \textasciitilde{}a\textasciicircum{}b \textbackslash{}c & 0"
    )
    assert second == r"  plain & 0 & 1 & 2.500 & 0.250 & 0.062 & -0.500 & -0.750 \\"


LINE = json.dumps(row(layer=0))
BAD_FILES = {
    "t.parquet": [b"", b"PAR1", b"nonsense", b"PAR1" + bytes(40) + b"PAR1"],
    "t.jsonl": [
        b"",
        b"\n",
        b"{",
        b"5\n",
        b"[1]\n",
        b'{"metadata": 5}\n',
        b'{"text": "of another kind"}\n',
        b'{"metadata": {}}\n{"text": "of another kind"}\n',
        b"\xff\xfe",
        b"[" * 100_000,
        LINE.replace('"layer": 0', '"layer": "first"').encode(),
        LINE.replace('"layer": 0', '"layer": 99999999999999999999').encode(),
        LINE.replace('"layer": 0', '"layer": [0]').encode(),
        f"{LINE}\n{LINE[:-20]}".encode(),
    ],
    "t.csv": [
        b"",
        b"a,b\n1,2\n",
        b"\xff\xfe\x00",
        ",".join(COLUMNS).encode() + b"\n" + b",".join([b"x"] * 29),
    ],
}


@pytest.mark.parametrize(
    ("name", "content"), [(name, content) for name in BAD_FILES for content in BAD_FILES[name]]
)
def test_a_file_that_holds_no_table(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TableError, match="contains no score table") as caught:
        read_table(tmp_path / name)
    assert str(caught.value).startswith(str(tmp_path / name))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_a_truncated_file_is_refused_or_lacks_whole_rows(tmp_path, ending):
    path = tmp_path / f"t{ending}"
    some_table().write(path)
    content = path.read_bytes()
    for length in range(0, len(content) - 1, max(1, len(content) // 60)):
        path.write_bytes(content[:length])
        try:
            table = read_table(path)
        except TableError:
            continue
        # Text cut between two lines cannot be told from a shorter table.
        assert ending != ".parquet"
        assert len(table) < len(some_table())


ENDINGS = ["t", "t.txt", "t.xlsx", "t.parquet.gz", ".parquet"]
READ = [
    (name, "expected a table in .parquet, .jsonl, .csv") for name in (*ENDINGS, "t.md", "t.tex")
]
READ += [(name, "cannot be read (No such file") for name in ("none.parquet", "none/t.csv")]
READ += [("folder.csv", "cannot be read (Is a directory")]
WRITTEN = [(name, "got the ending") for name in ENDINGS]
WRITTEN += [(f"{name}.csv", "cannot be written") for name in ("none/t", "file/t", "x" * 250)]
WRITTEN += [
    ("\0.csv", "can contain a null character"),
    ("folder.csv", "is a folder; expected a file"),
]


@pytest.mark.parametrize(
    ("call", "name", "message"),
    [(read_table, *case) for case in READ]
    + [(lambda path: some_table().write(path), *case) for case in WRITTEN],
)
def test_where_no_table_can_be_nothing_is_read_or_written(tmp_path, call, name, message):
    (tmp_path / "file").touch()
    (tmp_path / "folder.csv").mkdir()
    for ending in ("md", "tex"):  # tables for people
        some_table().write(tmp_path / f"t.{ending}")
    with pytest.raises((OutputError, TableError), match=re.escape(message)):
        call(tmp_path / name)
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder.csv", "t.md", "t.tex"}


# Summary and other people's frames


def test_the_summary_holds_numpys_quartiles():
    dice = np.random.default_rng(1)
    places = itertools.product(("a", "b"), ("encoder", "decoder"), range(7), (None, 0, 1))
    rows = [
        row(checkpoint=checkpoint, stack=stack, layer=layer, head=head)
        | dict(zip(SCORES, dice.normal(size=3), strict=True))
        for checkpoint, stack, layer, head in places
    ]
    empty = [degenerate(checkpoint="a", layer=7, head=h) for h in (None, 0, 1)]
    summary = ScoreTable.from_rows([*rows, *empty]).summary()
    assert len(summary) == 2 * 2 * 2
    for line in summary.iter_rows(named=True):
        is_of_layers = line["over"] == "layers"
        stack = (line["checkpoint"], line["stack"])
        rows_of_stack = [row for row in rows if (row["checkpoint"], row["stack"]) == stack]
        summarized = [row for row in rows_of_stack if (row["head"] is None) == is_of_layers]
        # The degenerate rows are neither counted nor scored.
        assert line["count"] == len(summarized) == (7 if is_of_layers else 14)
        for score in SCORES:
            expected = np.quantile([row[score] for row in summarized], [0.25, 0.5, 0.75])
            quartiles = [line[f"{score}_{name}"] for name in ("q25", "median", "q75")]
            assert quartiles == pytest.approx(list(expected), abs=1e-15)
    (line,) = ScoreTable.from_rows([degenerate()]).summary().iter_rows(named=True)
    assert (line["count"], line["symmetry_median"]) == (0, None)
    # Cross-attention has a direction and no symmetry.
    cross = ScoreTable.from_rows([row(kind="cross", symmetry=None, symmetry_null=None)])
    (line,) = cross.summary().iter_rows(named=True)
    assert (line["count"], line["symmetry_median"]) == (1, None)
    assert line["directionality_median"] == -0.5


def test_other_libraries_take_the_table():
    arrow = pa.table(awkward())
    assert arrow.column_names == COLUMNS
    assert arrow.column("checkpoint").to_pylist() == awkward().frame["checkpoint"].to_list()
    frame = awkward().to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == COLUMNS
    assert frame["norm"].tolist() == [1e-300, 2.5, 0.0]
    assert_frame_equal(pl.DataFrame(awkward()), awkward().frame)


def test_a_prompt_and_a_notebook_show_what_the_command_shows(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    table = wqk.scan(wqk.demo_model("encoder"), heads=False)
    shown = run("scan", wqk.demo_model("encoder"), width=100).stdout
    assert repr(table) == str(table)
    lines = [line.rstrip() for line in shown.strip("\n").splitlines()]
    assert "\n".join(lines).startswith(repr(table))
    assert "median symmetry" in table._repr_html_()
    assert "no rows" in repr(ScoreTable.from_rows([]))
    assert "medians over layers" in repr(some_table().join(awkward()))
    assert "\x1b" not in repr(ScoreTable.from_rows([row(checkpoint="\x1b[2J")]))


def test_wide_labels_leave_room_for_fewer_of_them(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    distances = range(100_000, 100_020)
    text = repr(ScoreTable.from_rows([row(head=None, distance=n) for n in distances]))
    assert all(f" {n}" in text for n in distances)
    assert max(map(len, text.splitlines())) <= 80


def test_a_hundred_thousand_heads_are_summarized():
    places = itertools.product(range(100), (None, *range(1000)))
    rows = [row(layer=layer, head=head) for layer, head in places]
    text = repr(ScoreTable.from_rows(rows))
    assert "100,000 heads" in text
    assert len(text.splitlines()) < 130


# Whole or not at all


def test_a_new_file_has_the_users_rights(tmp_path):
    before = os.umask(0o027)
    try:
        write_atomically(tmp_path / "t", b"content")
    finally:
        os.umask(before)
    assert (tmp_path / "t").stat().st_mode & 0o777 == 0o640


WRITE_FOREVER = """
import sys
from pathlib import Path
from wqk.tables.score_table import ScoreTable

path, rows = Path(sys.argv[1]), int(sys.argv[2])
tables = [
    ScoreTable.from_rows([{"layer": i, "checkpoint": name} for i in range(rows)])
    for name in ("one", "other")
]
tables[0].write(path)
print("saved once", flush=True)
while True:
    for table in tables:
        table.write(path)
"""


@counts(2, 20, "kills")
@pytest.mark.parametrize("ending", [".parquet", ".jsonl"])
def test_killed_while_saving_the_table_is_whole(tmp_path, ending, kills):
    path, rows, dice = tmp_path / f"t{ending}", 3000, random.Random(0)
    seen = set()
    for _ in range(kills):
        arguments = [sys.executable, "-c", WRITE_FOREVER, str(path), str(rows)]
        with subprocess.Popen(arguments, stdout=subprocess.PIPE) as writer:
            assert writer.stdout.readline() == b"saved once\n"
            time.sleep(dice.uniform(0.0, 0.3))
            writer.send_signal(signal.SIGKILL)
        table = read_table(path)
        assert table.frame["layer"].to_list() == list(range(rows))
        assert table.frame["checkpoint"].n_unique() == 1
        seen.add(table.frame["checkpoint"][0])
    assert seen


def test_notes_name_their_model_where_there_are_several() -> None:
    """Reasons of partial rows also name their model; the last reason does not replace the first."""
    about = {
        "notes": ["a note"],
        "inferred": ["guessed from x"],
        "partial": {"decoder": "a reason"},
    }
    frame = some_table().frame
    table_a = ScoreTable(frame.with_columns(checkpoint=pl.lit("a")), about)
    table_b = ScoreTable(frame.with_columns(checkpoint=pl.lit("b")), about)
    text = repr(join([table_a, table_b]))
    for phrase in (
        "partial (a decoder): a reason",
        "partial (b decoder): a reason",
        "b: a note",
        "family of a guessed from x; check with wqk verify",
    ):
        assert phrase in text
    assert "family guessed from x" in repr(join([table_a, table_a]))


def test_a_score_has_a_column_for_each_model(tmp_path: Path) -> None:
    """Columns of folders with the same last name have the folders above them, too."""
    folders = [tmp_path / "seed-1/last", tmp_path / "seed-2/last", tmp_path / "layer"]
    for folder, name in zip(folders, ("encoder", "decoder", "encoder"), strict=True):
        shutil.copytree(wqk.demo_model(name), folder)
    table = wqk.scan(folders)
    table = table.filter((pl.col("layer") < 2) | (pl.col("checkpoint") != str(folders[1])))
    wide = table.side_by_side("norm")
    assert wide.columns == ["layer", "head", "seed-1/last", "seed-2/last", "layer (model)"]
    first = table.filter(checkpoint=str(folders[0])).frame
    assert wide["seed-1/last"].to_list() == first["norm"].to_list() == wide[:, 4].to_list()
    assert wide["head"].to_list() == [None, 0, 1, 2, 3] * 4
    second = table.filter(checkpoint=str(folders[1])).frame["norm"].to_list()
    assert wide["seed-2/last"].to_list() == second + [None] * 10
    assert table.layers.side_by_side().columns[:2] == ["layer", "seed-1/last"]
    assert wqk.join(table, table).side_by_side("norm").equals(wide)

    changed = wqk.ScoreTable(table.frame.with_columns(norm=2 * pl.col("norm")), table.metadata)
    with pytest.raises(TableError, match="seed-1/last: several values of norm"):
        wqk.join(table, changed).side_by_side("norm")
    with pytest.raises(TableError, match="did you mean 'symmetry'"):
        table.side_by_side("symetry")


def test_tables_of_one_checkpoint_are_no_single_curve(tmp_path: Path) -> None:
    """The curve ran back from the last layer to the first."""
    pytest.importorskip("matplotlib")
    table = wqk.scan(wqk.demo_model("encoder"))
    assert len(join(table, table).distinct) == len(table)
    older = ScoreTable(table.frame.with_columns(pl.col("symmetry") / 2))
    joined = join(older, table)
    for draw in (joined.plot, lambda: wqk.report([older, table], tmp_path / "report.html")):
        with pytest.raises(TableError, match=r"layer 0 has several rows.*checkpoint=pl.lit"):
            draw()
    assert not (tmp_path / "report.html").exists()
    renamed = ScoreTable(table.frame.with_columns(checkpoint=pl.lit("new name")))
    assert len(join(table, renamed).plot("layers").axes[0].lines) >= 2


@pytest.mark.parametrize("separator", [";", "\t"])
def test_a_table_of_another_separator_is_named(separator: str, tmp_path: Path) -> None:
    """As spreadsheet programs of some countries write it."""
    path = tmp_path / "scores.csv"
    wqk.scan(wqk.demo_model("encoder")).frame.write_csv(path, separator=separator)
    with pytest.raises(TableError, match=r"columns are separated by .*, expected ','; save"):
        read_table(path)
