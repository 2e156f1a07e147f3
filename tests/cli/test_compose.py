"""``wqk compose`` and other commands that print pairs of heads."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest
from matplotlib.colors import to_rgb
from tests.command import run

import wqk
from wqk._style import GRAY
from wqk.reporting.pictures import composition_arcs

MODEL = str(wqk.demo_model("induction"))


def test_the_strongest_pairs_are_printed():
    result = run("compose", MODEL, "--top", "2")
    rows = [line.split() for line in result.stdout.splitlines()]
    assert [row[:3] for row in rows if row[:1] == ["K"]] == [
        ["K", "0.2", "1.2"],
        ["K", "0.2", "1.3"],
    ]
    assert "and 46 more" in result.stdout


def test_json_has_the_rows_that_are_asked_for():
    value = json.loads(run("compose", MODEL, "--kind", "v", "--top", "3", "--json").stdout)
    assert [row["kind"] for row in value["rows"]] == ["v"] * 3
    assert value["metadata"]["zero"] == "outliers"


@pytest.mark.parametrize("ending", ["parquet", "csv", "jsonl", "md", "tex"])
def test_the_whole_table_is_written(ending: str, tmp_path: Path):
    path = tmp_path / f"pairs.{ending}"
    run("compose", MODEL, "--out", str(path))
    if ending == "parquet":
        assert pl.read_parquet(path).equals(wqk.compose(MODEL).frame)
    else:
        assert len(path.read_text(encoding="utf-8").splitlines()) >= 48


def test_a_picture_says_that_nothing_is_beyond_chance():
    table = wqk.compose(MODEL)
    for p_corrected, is_noted in ((1.0, True), (0.009, False)):
        frame = table.frame.with_columns(p_corrected=p_corrected)
        axis = composition_arcs(frame).axes[0]
        title = axis.get_title(loc="left") + axis.get_title()
        assert ("none of them beyond chance" in title) == is_noted
        labels = [text for text in axis.texts if not text.arrow_patch]
        assert labels
        for label in labels:
            is_left_of_its_point = label.xyann[0] < 0
            assert (label.get_ha() == "right") == is_left_of_its_point
        arrows = [text.arrow_patch for text in axis.texts if text.arrow_patch]
        colors = {arrow.get_edgecolor()[:3] for arrow in arrows}
        assert (colors == {to_rgb(GRAY)}) == is_noted
        assert max(arrow.get_linewidth() for arrow in arrows) == pytest.approx(2.4)


def test_a_virtual_head_has_token_pairs():
    arguments = ("tokens", MODEL, "--layer", "1", "--head", "2", "--through", "0.2", "--json")
    assert json.loads(run(*arguments).stdout)["through"] == [0, 2]
