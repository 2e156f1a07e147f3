"""Tables that grow in place while a model trains: in a notebook, and printed elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.limits import failing
from tests.live.models import bert, train_step

import wqk
from wqk.tables.growing import RECENT_STEPS, RecentMedians
from wqk.tables.score_table import ScoreTable

TRAINING = """
import torch
from tests.live.models import bert, train_step
import wqk

model = bert()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = wqk.Monitor(model, "scores.jsonl", every=2, live=True)
"""
LOOP = """
for step in range(7):
    monitor(step)
    train_step(model, optimizer, step)
print("trained")
"""
WATCHING = """
for table in wqk.watch("run", out="out", until=20, every=0.01, heads=False, live=True):
    print(len(table))
"""


def executed(cells: list[str], folder: Path) -> list[list[Any]]:
    """Return the outputs of cells that a kernel runs in a folder."""
    nbclient = pytest.importorskip("nbclient")
    nbformat = pytest.importorskip("nbformat.v4")
    notebook = nbformat.new_notebook(cells=[nbformat.new_code_cell(cell) for cell in cells])
    nbclient.NotebookClient(notebook, timeout=300).execute(cwd=str(folder))
    return [cell.outputs for cell in notebook.cells]


def tables_in(outputs: list[Any]) -> list[str]:
    """Return the outputs that are HTML."""
    displayed = [output for output in outputs if output.output_type == "display_data"]
    return [output.data["text/html"] for output in displayed]


def rows_of(html: str) -> list[str]:
    """Return the first cell of each row: the step."""
    starts = html.split('<th scope="row"')[1:]
    return [start.partition(">")[2].partition("<")[0] for start in starts]


def test_in_a_notebook_one_output_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    for step in (10, 20):
        shutil.copytree(wqk.demo_model("decoder"), tmp_path / "run" / f"checkpoint-{step}")
    before, training, later, watching = executed([TRAINING, LOOP, LOOP, WATCHING], tmp_path)
    assert tables_in(before) == []
    (table,) = tables_in(training)
    # The second loop starts over: the table under the first one follows.
    assert rows_of(table) == ["0", "2", "4", "6"]
    assert tables_in(later) == []
    (watched,) = tables_in(watching)
    assert rows_of(watched) in (["10", "20"], ["20"])


def test_elsewhere_every_look_prints_the_last_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = bert()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    path = tmp_path / "scores.jsonl"
    monitor = wqk.Monitor(model, path, every=1, live=True, heads=False)
    for step in range(3):
        monitor(step)
        train_step(model, optimizer, step)
    printed = capsys.readouterr().out.split("medians over layers")[1:]
    assert [table.count("encoder self") for table in printed] == [1, 2, 3]
    resumed = wqk.Monitor(model, path, every=1, live=True, heads=False)
    resumed.look(2)  # the first look of a resumed run replaces the rows of its step
    resumed_table = capsys.readouterr().out
    first_words = [line.split()[0] for line in resumed_table.splitlines()[2:]]
    assert first_words[:3] == ["0", "1", "2"]
    assert first_words[3] == "random-looking:"


def test_a_table_that_cannot_be_shown_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monitor = wqk.Monitor(bert(), tmp_path / "scores.jsonl", every=1, live=True)
    monkeypatch.setattr(monitor, "_show", failing(BrokenPipeError("the reader is gone")))
    assert monitor(0)
    assert "the live table cannot be shown: the reader is gone" in caplog.text
    assert len(monitor.table)


def test_the_last_steps_are_those_of_every_stack() -> None:
    tables = [wqk.scan(wqk.demo_model(name), heads=False) for name in ("encoder", "decoder")]
    rows = [
        {**row, "checkpoint": "run", "step": step}
        for step in range(RECENT_STEPS + 5)
        for table in tables
        for row in table.frame.to_dicts()
    ]
    table = ScoreTable.from_rows(rows, tables[0].metadata)
    lines = repr(RecentMedians(table)).splitlines()[2:]
    assert len(lines) == 2 * RECENT_STEPS
    assert {int(line.split()[0]) for line in lines} == set(range(5, RECENT_STEPS + 5))
