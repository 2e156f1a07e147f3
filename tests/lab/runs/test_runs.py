"""Run directories: what a killed or running training leaves, and what only looks like one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import wqk
from wqk._files import append_lines, read_lines
from wqk.errors import RunError
from wqk.tables.run import METRICS, SCORES, SETTINGS, Run, create_run, drop_after, open_run

SETTINGS_EXAMPLE = {"recipe": {"steps": 3}, "corpus": {"fingerprint": "ab"}}


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = create_run(tmp_path / "run", SETTINGS_EXAMPLE)
    append_lines(run.folder / METRICS, {"step": 0, "held_out_loss": 5})
    append_lines(run.folder / METRICS, {"step": 2, "loss": 4.5, "tokens": 64, "seconds": 1})
    append_lines(run.folder / METRICS, {"step": 2, "held_out_loss": 4.25})
    return run


def test_metrics_are_one_row_for_each_step(run: Run) -> None:
    rows = run.metrics.select("step", "loss", "held_out_loss", "tokens", "seconds").rows()
    assert rows == [(0, None, 5.0, None, None), (2, 4.5, 4.25, 64, 1.0)]


def test_a_run_that_has_just_begun_is_empty(tmp_path: Path) -> None:
    run = open_run(create_run(tmp_path / "new", SETTINGS_EXAMPLE).folder)
    assert run.name == "new"
    assert run.recipe == {"steps": 3}
    assert (len(run.metrics), len(run.scores), len(run.updates), run.checkpoints) == (0, 0, 0, [])


def test_scores_come_back_as_a_table(run: Run) -> None:
    table = wqk.scan(wqk.demo_model("encoder"))
    append_lines(run.folder / SCORES, {"metadata": {"gamma": 2.0}})
    for row in table.frame.to_dicts():
        append_lines(run.folder / SCORES, {**row, "step": 7})
    with (run.folder / SCORES).open("ab") as file:
        file.write(b'{"checkpoint": "torn')
    scores = open_run(run.folder).scores
    assert scores.metadata["gamma"] == 2.0
    assert scores.frame.drop("step").equals(table.frame.drop("step"))
    assert set(scores.frame["step"]) == {7}


def test_checkpoints_in_the_order_of_their_steps(run: Run) -> None:
    for name in ("checkpoint-10", "checkpoint-9", "checkpoint-x", ".saving"):
        (run.folder / name).mkdir()
    (run.folder / "checkpoint-11").write_text("no folder")
    assert [(step, path.name) for step, path in run.checkpoints] == [
        (9, "checkpoint-9"),
        (10, "checkpoint-10"),
    ]


def test_going_back_drops_later_lines_and_the_torn_one(run: Run) -> None:
    path = run.folder / METRICS
    with path.open("ab") as file:
        file.write(b'{"step": 1, "lo')
    drop_after(path, 1)
    assert read_lines(path) == [{"step": 0, "held_out_loss": 5}]
    assert path.read_bytes().endswith(b"\n")
    drop_after(run.folder / "nothing.jsonl", 1)
    assert not (run.folder / "nothing.jsonl").exists()


@pytest.mark.parametrize("content", [b"[1]", b"{", b"\xff", b"", b"[" * 100_000])
def test_settings_that_are_none(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SETTINGS).write_bytes(content)
    with pytest.raises(RunError, match="one JSON object"):
        open_run(tmp_path)
    for place in ("nowhere", "."):
        (tmp_path / SETTINGS).unlink(missing_ok=True)
        with pytest.raises(RunError, match=r"not a run's folder; expected a run\.json"):
            open_run(tmp_path / place)


NUMBERS = ["1" + "0" * 30, "1" * 5_000, "1e999", '"one"']  # that no column holds


@pytest.mark.parametrize(
    "line",
    [b"[]", b"nonsense", b'{"step": "two"}', b'{"step": 1, "loss": "low"}', b"\xff\xfe"]
    + [b'{"step": ' + number.encode() + b"}" for number in NUMBERS],
    ids=range(9),
)
def test_damaged_metrics_are_named_in_a_line(run: Run, line: bytes) -> None:
    with (run.folder / METRICS).open("ab") as file:
        file.write(line + b"\n")
    with pytest.raises(RunError, match=METRICS) as caught:
        _ = run.metrics
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", [{"metadata": 1}, {"step": "two"}, {"layer": {}}])
def test_damaged_scores_are_named(run: Run, line: dict[str, Any]) -> None:
    append_lines(run.folder / SCORES, line)
    with pytest.raises(RunError, match=SCORES):
        _ = run.scores


def test_settings_without_a_recipe(tmp_path: Path) -> None:
    run = create_run(tmp_path / "run", {"recipe": [], "corpus": {"unit": "words"}})
    assert run.corpus == {"unit": "words"}
    with pytest.raises(RunError, match=r"run\.json: expected an object 'recipe', got \[\]"):
        _ = run.recipe


def test_a_run_is_made_once(run: Run) -> None:
    before = (run.folder / SETTINGS).read_bytes()
    with pytest.raises(RunError, match="already contains a run"):
        create_run(run.folder, {})
    assert (run.folder / SETTINGS).read_bytes() == before
    assert json.loads(before) == SETTINGS_EXAMPLE


def test_a_run_cannot_be_made_under_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="cannot be created"):
        create_run(tmp_path / "file" / "run", {})


@pytest.mark.parametrize(
    "line",
    ['{"step": 1, "seconds": "x"}', '{"step": null}', '{"step": 1, "seconds": []}', "7", "["],
)
def test_junk_among_the_metrics_is_an_error_of_ours(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f"{line}\n")
    with pytest.raises(RunError, match=r"metrics\.jsonl"):
        drop_after(path, 5)
    assert path.read_text() == f"{line}\n"


def test_settings_of_halves_of_characters_can_be_printed(tmp_path):
    run = create_run(tmp_path / "run", {"recipe": {"text": "a\udcff"}})
    assert open_run(run.folder).recipe == {"text": "a?"}
    (run.folder / "run.json").write_text('{"recipe": {"text": "a\\ud800"}}')
    assert open_run(run.folder).recipe == {"text": "a?"}
