"""``wqk theory``: what it prints and writes, and the lines with which it refuses."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from tests.theory import subjects

from wqk.cli.main import command

SMALL = ["--batches", "2", "--batch", "2", "--block", "16"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    subjects.save(subjects.llama(), folder / "llama")
    subjects.run_of({0: subjects.llama(), 4: subjects.llama()}, folder / "run")
    subjects.tokens_file(folder)
    return folder


def run(place: Path, ref: str, *options: str) -> Result:
    arguments = ["theory", str(place / ref), "--corpus", str(place / "tokens.npy"), *SMALL]
    return CliRunner().invoke(command, [*arguments, *options])


def test_findings_are_printed_and_saved(place: Path) -> None:
    files = [place / f"findings{ending}" for ending in (".json", ".md", ".csv")]
    picture = place / "tails.svg"
    for path in files:
        more = ["--figure", str(picture)] if path is files[0] else ["--layers", "1"]
        result = run(place, "llama", "--out", str(path), *more)
        assert result.exit_code == 0, result.output
        assert "llama: causal; 2 × 2 blocks of 16 tokens of tokens.npy" in result.stdout
        assert "Theorem S1.12, Equation S96" in result.stdout
        assert "× holds" in result.stdout
    (report,) = json.loads(files[0].read_text())["reports"]
    assert report["block"] == 16
    statements = [finding["statement"] for finding in report["findings"]]
    markdown = files[1].read_text()
    assert all(statement.replace("|", "\\|") in markdown for statement in statements)
    with files[2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["statement"] for row in rows] == statements
    assert {row["model"] for row in rows} == {"llama"}
    assert picture.read_text().count("isotropic") >= 1


def test_json_is_the_whole_report_and_nothing_else(place: Path) -> None:
    result = run(place, "llama", "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    (report,) = json.loads(result.stdout, parse_constant=pytest.fail)["reports"]
    assert all(f["numbers"] or f["verdict"] == "not tested" for f in report["findings"])
    assert json.loads(run(place, "llama", "--json").stdout)["reports"] == [report]


def test_steps_of_a_run_stand_side_by_side(place: Path) -> None:
    result = run(place, "run", "--steps", "all", "--out", str(place / "steps.json"))
    assert result.exit_code == 0, result.output
    assert "✓ holds, ~ holds in part, ✗ fails, – not tested" in result.stdout
    reports = json.loads((place / "steps.json").read_text())["reports"]
    assert [report["step"] for report in reports] == [0, 4]
    assert "along training" in reports[1]["findings"][-1]["statement"]


HOSTILE: dict[str, tuple[list[str], str]] = {
    "ending": (["llama", "--out", "findings.txt"], "expected .json, .md, .csv, got '.txt'"),
    "folder": (["llama", "--out", "/nowhere/findings.md"], "there is no folder /nowhere"),
    "picture": (["llama", "--figure", "tails.gif"], "expected .png, .pdf, .svg, got '.gif'"),
    "no model": (["absent"], "no such file or folder"),
    "no run": (["llama", "--steps", "all"], "steps are those of a training run"),
    "no step": (["run", "--steps", "3"], "no checkpoint at step 3; saved are 0, 4"),
    "masks": (["llama", "--objective", "masked"], "no masked language model of type 'llama'"),
    "much": (["llama", "--batches", "100000"], "take fewer or shorter ones"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_refusals_are_one_line_and_leave_no_file(case: str, place: Path) -> None:
    arguments, message = HOSTILE[case]
    before = sorted(place.rglob("*"))
    result = run(place, *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before


@pytest.mark.parametrize(
    "options",
    [["--batches", "1"], ["--block", "2"], ["--mask-share", "1"], ["--steps", "x"], ["--layers", "-"]],
)  # fmt: skip
def test_impossible_options_are_usage_errors(options: list[str], place: Path) -> None:
    result = run(place, "llama", *options)
    assert result.exit_code == 2
    assert "Usage" in result.stderr


def test_a_picture_needs_updates(place: Path) -> None:
    subjects.save(subjects.qwen3(), place / "qwen3")
    result = run(place, "qwen3", "--figure", str(place / "none.png"))
    assert result.exit_code == 2
    assert "no updates to draw" in result.stderr
    assert not (place / "none.png").exists()
    assert "not tested" in result.stdout
