"""The paper's tables: numbers, arrangement, footnotes, own results, and LaTeX's grammar."""

from __future__ import annotations

import re
from typing import Literal

import pytest
from tests.lab.atlas.making import layers

from wqk.errors import TableError, UnknownName
from wqk.tables.score_table import join
from wqk_lab.atlas import TrainingResult, flags, paper_table, published
from wqk_lab.atlas.paper_tables import TableName


def body(markdown: str) -> list[list[str]]:
    """Cells of a Markdown table's rows, without the heading."""
    lines = [line for line in markdown.splitlines() if line.startswith("|")][2:]
    rows = []
    for line in lines:
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


@pytest.mark.parametrize(
    ("name", "score", "height"), [("tableS2", "symmetry", 35), ("tableS3", "directionality", 34)]
)
def test_numbers_and_arrangement_are_the_papers(name: TableName, score: str, height: int) -> None:
    rows = body(paper_table(name))
    assert len(rows) == height
    printed = published().filter(published()[score].is_not_null()).to_dicts()
    for cells, row in zip([r[:3] for r in rows] + [r[3:] for r in rows], printed, strict=True):
        text, *marks = re.split(r"</?sup>", cells[0])
        assert text == row["name"]
        assert len([m for m in ",".join(marks).split(",") if m]) == len(row["flags"])
        assert float(cells[1].replace("−", "-")) == row[score]
        assert cells[2] == f"± [{row[f'{score}_below']:.2f}, {row[f'{score}_above']:.2f}]"


def test_every_mark_is_explained_once() -> None:
    for name in ("table1", "tableS2", "tableS3"):
        table, *notes = paper_table(name).split("\n\n<sup>")
        marks = set(",".join(re.findall(r"<sup>([^<]*)</sup>", table)).split(","))
        assert sorted(marks) == [note[0] for note in notes]
        for note in notes:
            assert any(flag.explanation in note for flag in flags().values())


def test_own_medians_stand_beside_the_published_ones() -> None:
    table = join(
        [
            layers([0.1], [0.1], checkpoint="google-bert/bert-base-uncased", revision="old"),
            layers([0.4, 0.6], [-0.2, 0.0], checkpoint="google-bert/bert-base-uncased"),
            layers([0.9], [0.9], checkpoint="no/such-model"),
        ]
    )
    for name, expected in (("tableS2", "0.50"), ("tableS3", "−0.10")):
        rows = body(paper_table(name, own=table))  # type: ignore[arg-type]
        *printed, heading, further = rows
        halves = [r[:5] for r in printed] + [r[5:] for r in printed]
        mine = [half for half in halves if half[3]]
        assert [half[0] for half in mine] == ["BERT-base", "BERT-base"]
        assert mine[0][3:] == [expected, "± [0.05, 0.05]"]
        assert heading == ["**Your models**", *[""] * 9]
        assert further[:5] == ["such-model (encoder)", "", "", "0.90", "± [0.00, 0.00]"]


@pytest.mark.parametrize("format", ["markdown", "latex"])
@pytest.mark.parametrize(("name", "median"), [("tableS2", "0.50"), ("tableS3", "−0.10")])
def test_models_that_are_not_in_the_table_are_below(
    name: TableName, median: str, format: Literal["markdown", "latex"]
) -> None:
    tables = [
        layers([0.4, 0.6], [-0.2, 0.0], checkpoint="a/mine"),
        layers([None], [0.3], checkpoint="b/mine"),
        layers([0.2], [0.2], checkpoint="speech", stack="vision"),
    ]
    text = paper_table(name, format, own=join(tables))
    assert "below them, own models that are not in the paper's table" in text
    if format == "latex":
        median = median.replace("−", "$-$")
        assert r"\multicolumn{6}{l}{\textbf{Your models}} \\" in text
        assert f"  a/mine (encoder) & {median} & $\\pm$ [0.05, 0.05] & speech (vision) &" in text
        return
    *printed, heading, first, second = body(text)
    assert printed == body(paper_table(name))
    assert heading == ["**Your models**", *[""] * 5]
    assert first[:4] == ["a/mine (encoder)", median, "± [0.05, 0.05]", "speech (vision)"]
    without_symmetry = ["–", ""] if name == "tableS2" else ["0.30", "± [0.00, 0.00]"]
    assert second == ["b/mine (encoder)", *without_symmetry, "", "", ""]


def test_scores_that_cannot_be_compared_are_refused() -> None:
    for other in (
        layers([0.1], [0.1], metadata={"gamma": 3.0}),
        layers([0.1], [0.1], kind="cross"),
    ):
        with pytest.raises(TableError, match="of plain self-attention; the table has none"):
            paper_table("tableS2", own=other)


def test_own_training_stands_below_table_1() -> None:
    results = [
        TrainingResult("4 layers of width 64", "jigsaw", "random", 2.7, (2.6, 2.8), seeds=3),
        TrainingResult("4 layers of width 64", "jigsaw", "paired", 2.6, None, -0.1, (-0.3, 0.1), 2),
        TrainingResult("2 layers", "C4 | 50% $x_y$", "random", 3.0, seeds=1),
    ]
    printed = body(paper_table("table1"))
    rows = body(paper_table("table1", own=results).replace(r"\|", "¦"))
    assert [row[:3] for row in rows[: len(printed)]] == printed
    assert rows[len(printed) :] == [
        ["**2 layers**", "", "", ""],
        [r"C4 ¦ 50% $x\_y$", "3.000", "", "1"],
        ["**4 layers of width 64**", "", "", ""],
        ["jigsaw", "2.700 [2.600, 2.800]", "", "3"],
        ["jigsaw (+ paired)", "2.600", "−10 [−30, 10] %", "2"],
    ]


def test_an_own_result_never_has_a_printed_name() -> None:
    for results in (
        [TrainingResult("4-layer", "Jigsaw", "random", 2.0)],
        [TrainingResult("small", "x", "random", 2.0), TrainingResult("small", "x", "random", 1.0)],
    ):
        with pytest.raises(TableError, match="two results are called"):
            paper_table("table1", own=results)


def test_latex_is_balanced_and_escaped() -> None:
    results = [TrainingResult("4-layer", "50% a_b & $c$ #1 {d}", "random", 3.0)]
    for text in (
        paper_table("table1", "latex", own=results),
        paper_table("tableS2", "latex"),
        paper_table("tableS3", "latex", own=layers([0.5], [-0.1], checkpoint="x/gpt2")),
    ):
        bare = re.sub(r"\\[\\{}%&#$_]", "", re.sub(r"^%.*$", "", text, flags=re.M))
        assert bare.count("{") == bare.count("}")
        assert bare.count("$") % 2 == 0
        assert not re.search(r"[_#−±]|[ \[]-\d", bare)  # nor a hyphen for a minus
        columns = len(re.search(r"tabular\}\{(\w+)\}", text)[1])  # type: ignore[index]
        inside = bare.split(r"\midrule")[1].split(r"\bottomrule")[0]
        for line in filter(str.strip, inside.splitlines()):
            assert line.count("&") == (0 if "multicolumn" in line else columns - 1), line
        assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "tableS4"}, "expected table1, tableS2, tableS3"),
        ({"name": "table1", "format": "html"}, "expected markdown, latex"),
        ({"name": "table1", "own": "scores"}, "training results"),
        ({"name": "tableS2", "own": []}, "a score table"),
    ],
)
def test_wrong_requests(arguments: dict[str, object], message: str) -> None:
    if arguments.get("own") == "scores":
        arguments = arguments | {"own": layers([0.1], [0.1])}
    with pytest.raises((TableError, UnknownName), match=message):
        paper_table(**arguments)  # type: ignore[arg-type]


def test_names_and_ranges_of_tables_are_aligned_as_text() -> None:
    for scores in (None, layers([0.5], [0.1])):  # of no model of the table
        lines = paper_table("tableS2", own=scores).splitlines()
        assert f"| {' | '.join(2 * [':--', '--:', ':--'])} |" in lines
    mine = layers([0.5], [0.1], checkpoint="google-bert/bert-base-uncased")
    cells = [":--", "--:", ":--", "--:", ":--"]
    lines = paper_table("tableS3", own=mine).splitlines()
    assert f"| {' | '.join(2 * cells)} |" in lines
    headings = ["Model", "Median", "Interquartile range", "Own median", "Own range"]
    assert f"| {' | '.join(2 * headings)} |" in lines
    result = TrainingResult("small", "x", "random", 2.0)
    assert "| :-- | --: | --: | --: |" in paper_table("table1", own=[result]).splitlines()
