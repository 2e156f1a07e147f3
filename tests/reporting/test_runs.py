"""A report of training runs: results in words, at a step that all runs have."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.reporting.making import Page, trained

import wqk
from wqk.reporting.payload import training_result
from wqk.tables.run import Run


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return trained(tmp_path)


def test_results_are_told_where_all_seeds_are(runs: list[Run], tmp_path: Path):
    path = tmp_path / "run.html"
    wqk.write_report([run.scores for run in runs], path, runs=runs)
    page = Page(path)
    assert (
        "encoder, 2 seeds, 10 steps: the loss fell from 3.850 to 2.850 nats (2.800 to 2.900 over "
        "seeds), the median symmetry rose from 0.00 to 0.10."
    ) in page.text
    curves = {curve["kind"]: curve for curve in page.data["losses"]}
    assert curves["held-out loss"]["step"] == [0, 5, 10]
    spread = {name: curves["held-out loss"][name] for name in ("low", "mean", "high")}
    assert spread == {
        "low": pytest.approx([3.8, 2.3, 2.8]),
        "mean": pytest.approx([3.85, 2.35, 2.85]),
        "high": pytest.approx([3.9, 2.4, 2.9]),
    }
    assert curves["symmetry"]["mean"] == [0, 0.05, 0.1]


def test_a_report_of_tables_alone_has_no_results(tmp_path: Path):
    wqk.write_report(wqk.scan(wqk.demo_model("encoder")), tmp_path / "r.html")
    assert '<section id="runs">' not in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_a_loss_that_rose_is_not_said_to_have_fallen():
    assert "rose from 2.000 to 3.000" in training_result("x", 1, [2.0], [3.0], [], [])
    assert "stayed at 2.000" in training_result("x", 1, [2.0], [2.0], [], [])
