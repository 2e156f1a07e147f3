"""From tables to rows: medians and quartiles against numpy, and what is left out."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.lab.atlas.making import layers

from wqk.errors import TableError
from wqk.scanning.surveys.surveying import survey_table
from wqk.tables.score_table import join
from wqk_lab.atlas import published, summarize
from wqk_lab.atlas.ranks import ATLAS_COLUMNS, of_model

OWN_ROW = {
    "source": "own",
    "name": "up",
    "model": "made/up",
    "stack": "encoder",
    "parameters": 1000,
    "flags": [],
    "sound": True,
}

SCORES = st.lists(st.floats(-1, 1), min_size=1, max_size=12)


@given(SCORES, st.randoms())
def test_medians_and_quartiles_are_numpys(symmetries, random):  # type: ignore[no-untyped-def]
    directionalities = random.sample(symmetries, len(symmetries))
    (row,) = summarize(layers(symmetries, directionalities)).to_dicts()
    for score, values in (("symmetry", symmetries), ("directionality", directionalities)):
        low, middle, high = np.percentile(values, [25, 50, 75])
        assert row[score] == pytest.approx(middle, abs=1e-12)
        assert row[f"{score}_below"] == pytest.approx(middle - low, abs=1e-12)
        assert row[f"{score}_above"] == pytest.approx(high - middle, abs=1e-12)


def test_rows_are_like_the_published_ones() -> None:
    row = summarize(layers([0.1, 0.2], [0.0, 0.0]))
    assert row.schema == published().schema == pl.Schema(ATLAS_COLUMNS)
    assert row.to_dicts()[0] == row.to_dicts()[0] | OWN_ROW


def test_only_plain_forms_are_taken() -> None:
    plain = layers([0.3, 0.5], [-0.1, -0.3])
    special = [
        layers([0.9], [0.9], circuit="ov"),
        layers([0.9], [0.9], distance=8),
        layers([0.9], [0.9], kind="cross"),
        layers([0.9], [0.9], head=0),
    ]
    (row,) = summarize(join([special[0], plain, *special[1:]])).to_dicts()
    assert (row["symmetry"], row["directionality"]) == (0.4, -0.2)
    assert summarize(join(special)).is_empty()


@pytest.mark.parametrize(
    "metadata", [{"gamma": 1.5}, {"folded_norms": True}, {"biases": True}, {"gamma": None}]
)
def test_tables_of_other_forms_give_no_rows(metadata: dict[str, object]) -> None:
    rows = summarize(layers([0.3], [0.1], metadata=metadata))
    assert rows.is_empty()
    assert rows.schema == pl.Schema(ATLAS_COLUMNS)


def test_every_stack_revision_and_step_is_a_row_with_its_name() -> None:
    tables = [
        layers([0.1], [0.1], checkpoint="run", step=100),
        layers([0.2], [0.2], checkpoint="run", step=200),
        layers([0.3], [0.3], checkpoint="a/run", revision="main"),
        layers([0.4], [0.4], checkpoint="a/run", revision="main", stack="decoder"),
        layers([0.5], [0.5], checkpoint="/b/checkpoint-7", step=7),
    ]
    assert summarize(join(tables)).select("name", "stack", "symmetry").rows() == [
        ("run, step 100", "encoder", 0.1),
        ("run, step 200", "encoder", 0.2),
        ("run @ main", "encoder", 0.3),
        ("run @ main", "decoder", 0.4),
        ("checkpoint-7", "encoder", 0.5),
    ]


def test_statuses_become_flags() -> None:
    tables = [
        layers([0.0], [0.0], status="random-looking"),
        layers([0.1], [0.0], checkpoint="b", status="partial"),
        layers([0.2, 0.4], [0.0, 0.0], checkpoint="c"),
        layers([float("nan")], [float("nan")], checkpoint="c", status="degenerate"),
    ]
    assert summarize(join(tables)).select("flags", "sound", "symmetry").rows() == [
        (["random-looking"], False, 0.0),
        (["partial"], True, 0.1),
        (["degenerate"], True, 0.30000000000000004),
    ]


def test_a_row_finds_its_model_by_id_before_folder_and_by_stack() -> None:
    row = published().filter(name="BERT-base").row(0, named=True)
    tables = [
        layers([0.1], [0.0], checkpoint="/models/bert-base-uncased"),
        layers([0.2], [0.0], checkpoint="Google-BERT/bert-base-uncased"),
        layers([0.3], [0.0], checkpoint="/models/other", stack="decoder"),
    ]
    rows = summarize(join(tables))
    assert of_model(rows, row)["symmetry"].to_list() == [0.2]
    assert of_model(rows[:1], row)["symmetry"].to_list() == [0.1]
    assert of_model(rows[2:], row).is_empty()
    stacks = ("x", "encoder")
    tables = [layers([0.1], [0.0], checkpoint=row["model"], stack=stack) for stack in stacks]
    of_both_stacks = summarize(join(tables))
    assert of_model(of_both_stacks, row)["stack"].to_list() == ["encoder"]
    assert of_model(of_both_stacks[:1], row)["stack"].to_list() == ["x"]


def test_a_survey_that_is_not_finished_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "parts").mkdir()
    with pytest.raises(TableError, match="contains no survey"):
        survey_table(tmp_path)
    layers([0.1], [0.0]).write(tmp_path / "parts" / "b.parquet")
    layers([0.2], [0.0], checkpoint="other").write(tmp_path / "parts" / "a.parquet")
    assert set(survey_table(tmp_path).frame["checkpoint"]) == {"made/up", "other"}
    layers([0.3], [0.0]).write(tmp_path / "scores.parquet")
    assert survey_table(os.fspath(tmp_path)).frame["symmetry"].to_list() == [0.3]


def test_of_two_surveys_the_later_scores_stand(tmp_path: Path) -> None:
    for name, symmetries in (("one", [0.1, 0.1]), ("two", [0.3, 0.5])):
        (tmp_path / name).mkdir()
        layers(symmetries, [0.0, 0.0]).write(tmp_path / name / "scores.parquet")
    table = survey_table(tmp_path / "one", tmp_path / "two")
    assert summarize(table)["symmetry"].to_list() == [0.4]
