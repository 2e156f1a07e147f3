"""Comparing: tolerances to the last hundredth, the right checkpoint, and real models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.lab.atlas.making import layers

import wqk
from wqk.errors import TableError
from wqk.tables.score_table import join
from wqk_lab.atlas import compare, lookup, published

BERT = "google-bert/bert-base-uncased"


@pytest.fixture(scope="module")
def bert() -> dict[str, Any]:
    """The published row, with .51 and -.08; looked up late, as it starts polars' threads."""
    return lookup("BERT-base").row(0, named=True)


@pytest.mark.parametrize(
    ("symmetry", "directionality", "verdict", "beyond"),
    [
        (0.51, -0.08, "agrees", []),
        (0.5249, -0.1349, "agrees", []),
        (0.4951, -0.0251, "agrees", []),
        (0.5251, -0.08, "differs", ["symmetry"]),
        (0.4949, -0.08, "differs", ["symmetry"]),
        (0.51, -0.1351, "differs", ["directionality"]),
        (0.9, 0.9, "differs", ["symmetry", "directionality"]),
    ],
)
def test_tolerances(
    symmetry: float, directionality: float, verdict: str, beyond: list[str], bert: dict[str, Any]
) -> None:
    result = compare(layers([symmetry], [directionality]), bert)
    assert (result.verdict, result.beyond) == (verdict, beyond)


def test_differences_are_of_hundredths(bert: dict[str, Any]) -> None:
    result = compare(layers([0.497], [0.004]), bert)
    assert result.differences == {"symmetry": -0.01, "directionality": 0.08}


def test_an_artifact_stays_one_whatever_the_numbers() -> None:
    for row in published().filter(~published()["sound"]).to_dicts():
        table = layers([row["symmetry"]], [row["directionality"]], stack=row["stack"])
        assert compare(table, row).verdict == "artifact"


def test_two_published_rows_of_one_model_agree_with_each_other() -> None:
    for row in published().filter(published()["sound"]).to_dicts():
        for other in published().filter(model=row["model"], sound=True).to_dicts():
            if other["directionality"] is not None:
                table = layers([other["symmetry"]], [other["directionality"]], stack=row["stack"])
                assert compare(table, row).verdict == "agrees", row


def test_a_score_that_was_not_printed_is_not_compared() -> None:
    row = lookup("GPT2-medium").row(0, named=True)
    result = compare(layers([0.17], [0.9], stack="decoder"), row)
    assert result.differences == {"symmetry": 0.0}
    assert result.verdict == "agrees"


def test_of_several_checkpoints_that_of_the_row_is_taken(bert: dict[str, Any]) -> None:
    other = layers([0.9], [0.9])
    mine = layers([0.51], [-0.08], checkpoint="google-bert/bert-base-uncased")
    assert compare(join([other, mine]), bert).verdict == "agrees"


def test_of_several_stacks_that_of_the_row_is_taken(bert: dict[str, Any]) -> None:
    table = join([layers([0.9], [0.9], stack="decoder"), layers([0.51], [-0.08])])
    assert compare(table, bert).scan["stack"] == "encoder"


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([{"circuit": "ov"}], "circuit qk"),
        ([{"metadata": {"gamma": 3.0}}], "gamma 2"),
        ([{}, {"checkpoint": "b"}], "none named google"),
        ([{"checkpoint": BERT, "step": s} for s in (1, 2)], "got 2, of the name google"),
        ([{"stack": s} for s in ("decoder", "vision")], "the table has decoder, vision"),
        ([{"symmetry": None, "status": "degenerate"}], "none of its layers has a score"),
    ],
)
def test_what_cannot_be_compared_says_why(
    rows: list[dict[str, Any]], words: str, bert: dict[str, Any]
) -> None:
    def made(symmetry: float | None = 0.5, **about: Any) -> wqk.ScoreTable:
        return layers([symmetry], [0.0 if symmetry else float("nan")], **about)

    table = join([made(**row) for row in rows])
    with pytest.raises(TableError, match=words):
        compare(table, bert)


def test_bert_base_agrees_with_its_row(shared: Path, bert: dict[str, Any]) -> None:
    table = wqk.scan(shared / "checkpoints" / "bert-base-uncased", heads=False)
    result = compare(table, bert)
    assert result.verdict == "agrees"
    assert result.differences == {"symmetry": 0.0, "directionality": -0.02}


def test_a_fine_tuned_bert_tiny_keeps_its_symmetry_and_not_its_columns(shared: Path) -> None:
    table = wqk.scan(shared / "checkpoints" / "bert-tiny-sst2", heads=False)
    result = compare(table, lookup("BERT-tiny").row(0, named=True))
    assert result.beyond == ["directionality"]
