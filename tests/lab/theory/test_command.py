"""``wqk lab theory``: what it prints and writes, and the lines with which it refuses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import Result
from tests.command import run as run_command
from tests.lab.theory import subjects

from wqk_lab.theory.findings import FINDINGS_WRITERS, StudyReport, report, result, save
from wqk_lab.theory.studying import STATEMENTS
from wqk_lab.theory.verdict import (
    Finding,
    Needs,
    Sample,
    Statement,
    StatementVerdict,
    decide,
    not_tested,
)

SMALL = {"--batches": "2", "--batch": "2", "--block": "16"}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    subjects.save(subjects.llama(), folder / "llama")
    subjects.run_of({0: subjects.llama(), 4: subjects.bert(decoder=True)}, folder / "run")
    subjects.tokens_file(folder)
    return folder


def run(place: Path, ref: str, *options: str, exits: int = 0, width: int = 80) -> Result:
    corpus = ("--corpus", place / "tokens.npy")
    small = {name: value for name, value in SMALL.items() if name not in options}
    arguments = ("lab", "theory", place / ref, *corpus, *chain(*small.items()), *options)
    return run_command(*arguments, exits=exits, width=width)


def test_shorter_blocks_and_missing_tensors_are_reported_first(tmp_path: Path) -> None:
    corpus = tmp_path / "tokens.npy"
    np.save(corpus, subjects.text().tokens)
    options = ("--corpus", corpus, "--batches", "2", "--batch", "2", "--layers", "0")
    result = run_command("lab", "theory", "demo:decoder", *options, "--json")
    (first,) = result.stderr.splitlines()
    assert first.startswith("decoder: blocks of 32 tokens instead of 64")
    assert "the demo model with all weights is " in first
    assert "demo:induction" in first
    (model_report,) = json.loads(result.stdout)["reports"]
    assert model_report["block"] == 32
    reasons = [finding["why"] for finding in model_report["findings"]]
    untested = sum(why.startswith("rests on tensors") for why in reasons)
    assert f"lacks 62 tensors, and {untested} of " in first


def test_findings_are_printed_saved_and_drawn(place: Path) -> None:
    out, picture = place / "findings.json", place / "tails.svg"
    result = run(place, "llama", "--out", str(out), "--figure", str(picture))
    lines = result.stdout.strip().splitlines()
    assert lines[0] == "llama: causal; 2 × 2 blocks of 16 tokens of tokens.npy"
    # The tally comes first; a text in tokens of unknown meaning marks every finding.
    assert "identities" in lines[1]
    assert "the model has no tokenizer" in " ".join(" ".join(lines[2:4]).split())
    assert "not tested" in result.stdout
    # A finding is one line in a pipe; statements that cannot be tested share their reason.
    (finding,) = (text for text in lines if "Theorems 2.3 and S1.12, W_qk: " in text)
    assert "(> 0)" in finding
    (reason,) = (text for text in lines if "sees what came before" in text)
    assert "Corollary S1.13, update; Corollary S1.13, W_qk" in reason
    assert "quantity:" not in result.stdout
    # Verbose, what each statement assumes is shown, and untested statements have lines.
    verbose = run(place, "llama", "--verbose", width=400).stdout  # not wrapped
    assert verbose.count("quantity: ") > 10
    assert verbose.count("assumes: ") > 5
    assert "sees what came before" in verbose
    # Statements that are not tested share lines by their reasons, unless all are printed.
    assert "\n not tested, " in result.stdout
    assert "\n not tested, " not in verbose
    assert lines[-1].startswith("Of 1") or lines[-1].startswith("None of the statements")
    assert "isotropic" in picture.read_text()
    # The same again, as JSON: nothing else on either stream, and the same numbers.
    result = run(place, "llama", "--json")
    assert result.stderr == ""
    (report,) = json.loads(result.stdout, parse_constant=pytest.fail)["reports"]
    assert json.loads(out.read_text())["reports"] == [report]
    # Statements about random matrices are not counted among the model's.
    count_of_random = sum(not statement.about_model for statement in STATEMENTS)
    assert sum(report["tally"].values()) == len(report["findings"]) - count_of_random
    assert all(f["numbers"] or f["verdict"] == "not tested" for f in report["findings"])


def test_files_hold_every_finding(tmp_path: Path) -> None:
    statement = Statement(
        "A | b", "x,\n2 grows", "none", "x", "above", 0.1, lambda _: sample, needs="text"
    )
    sample = Sample(np.array([[1.5], [np.nan], [1.6]]), "batches")
    findings = (decide(statement, sample), not_tested(statement, "no way"))
    report = StudyReport("m, step 3", "t", "masked", 1, 2, 8, 0.15, 0, "beware", 2, findings)
    for ending in FINDINGS_WRITERS:
        save([report, report], tmp_path / f"findings{ending}")
    reports = json.loads((tmp_path / "findings.json").read_text())["reports"]
    assert reports[0] == reports[1]
    numbers = reports[0]["findings"][0]["numbers"]
    assert [row["value"] for row in numbers] == [1.5, None, 1.6]
    assert reports[0]["tally"] == {
        "holds": 1,
        "fails": 0,
        "undecided": 0,
        "described": 0,
        "not tested": 1,
        "identity": 0,
    }
    save([replace(report, model="modèle")], tmp_path / "named.json")
    assert '"modèle"' in (tmp_path / "named.json").read_text("utf-8")  # as it is written
    markdown = (tmp_path / "findings.md").read_text()
    assert "## m, step 3: masked, 15% masked; 1 × 2 blocks of 8 tokens of t" in markdown
    assert "| holds | A \\| b | x, 2 grows | 1.55 [0.91, 2.19] | > 0 |" in markdown
    assert "- beware" in markdown
    with (tmp_path / "findings.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["number"] for row in rows] == ["A | b"] * 4
    assert rows[1]["verdict"] == "not tested"
    assert rows[1]["caveat"] == "beware"


def test_steps_of_a_run_stand_side_by_side(place: Path) -> None:
    chosen = ("--layers", "1", "--steps", "all")
    result = run(place, "run", *chosen, "--out", str(place / "steps.json"))
    assert "✓ holds, ✗ fails, ? undecided, · described, – not tested, = identity" in result.stdout
    assert "run, 2 saved steps" in result.stdout
    reports = json.loads((place / "steps.json").read_text())["reports"]
    assert [report["model"] for report in reports] == [
        "run, step 0",
        "run, step 4",
        "run, 2 saved steps",
    ]
    assert "along training" in reports[-1]["findings"][-1]["number"]


# One of each place that refuses: endings, folders, the opening of what is tested, the text.
HOSTILE = {
    "--out findings.txt": "written as .json, .md, .csv; got the ending '.txt'",
    "--out /nowhere/findings.md": "/nowhere/findings.md",
    "--figure tails.gif": "written as .png, .pdf, .svg; got the ending '.gif'",
    "--steps all": "only a training run has steps",
    "--objective masked": "no masked language model of type 'llama'",
    "--layers 9": "no layer 9; layers are numbered from 0 to 1",
    "--revision main": "only a Hub repository has revisions",
    "--batches 100000": "take fewer or shorter ones",
}


@pytest.mark.parametrize("options", HOSTILE)
def test_refusals_are_one_line_and_leave_no_file(options: str, place: Path) -> None:
    before = sorted(place.rglob("*"))
    result = run(place, "llama", *options.split(), exits=2)
    assert result.stdout == ""
    assert HOSTILE[options] in result.stderr
    assert result.stderr.count("\n") == 1
    assert sorted(place.rglob("*")) == before


IMPOSSIBLE = ("--batches 1", "--block 2", "--mask-share 1", "--steps x", "--layers -")


@pytest.mark.parametrize("options", IMPOSSIBLE)
def test_impossible_options_are_usage_errors(options: str, place: Path) -> None:
    assert "Usage" in run(place, "llama", *options.split(), exits=2).stderr


def test_a_picture_needs_updates(place: Path) -> None:
    subjects.save(subjects.qwen3(), place / "qwen3")
    result = run(place, "qwen3", "--figure", str(place / "none.png"), exits=2)
    assert "no updates to draw" in result.stderr
    assert not (place / "none.png").exists()
    assert "not tested" in result.stdout


def findings_of(
    *verdicts: StatementVerdict, needs: Needs = "loss", first: int = 0
) -> tuple[Finding, ...]:
    """A finding of each verdict, on a statement with a number of its own."""
    findings = []
    for number, verdict in enumerate(verdicts, start=first):
        about = (f"S{number}", f"x {number}", "", "x", "above", 0.1)
        statement = Statement(*about, lambda _: sample_of_one(), needs=needs)
        findings.append(Finding(statement, verdict, why="no way" if "not" in verdict else ""))
    return tuple(findings)


def sample_of_one() -> Sample:
    return Sample(np.ones((1, 1)), "batches")


def reported(findings: tuple[Finding, ...], model: str = "m", caveat: str = "") -> StudyReport:
    return StudyReport(model, "t", "causal", 1, 2, 8, None, 0, caveat, 0, findings)


def test_a_result_counts_the_verdicts_and_names_three_failures() -> None:
    verdicts: list[StatementVerdict] = ["holds", *["fails"] * 4, *["undecided"] * 2, "described"]
    of_random = findings_of("fails", needs="nothing")
    assert result(reported((*findings_of(*verdicts), *of_random), caveat="beware")) == (
        "Of 7 statements tested on m, 1 holds, 4 fail and 2 are undecided, if the reservation "
        "above does not matter (beware). Failing: S1 (x 1); S2 (x 2); S3 (x 3); and 1 more."
    )
    assert result(reported(findings_of(*verdicts[:4]))) == (
        "Of 4 statements tested on m, 1 holds, 3 fail and none is undecided. "
        "Failing: S1 (x 1); S2 (x 2); S3 (x 3)."
    )
    assert result(reported(findings_of("described", "identity", "not tested"))) == (
        "None of the statements could be tested on m; 2 others described or identities."
    )


def test_a_report_is_that_of_its_subject() -> None:
    settings = {"seed": 4, "step": 5, "missing": ("a", "b"), "caveat": "beware"}
    subject = subjects.subject(None, "masked", batches=2, mask_share=0.25, **settings)
    findings = findings_of("holds")
    made = report(subject, subjects.text(), findings)
    sizes = (2, 3, 16)
    assert made == StudyReport(
        "tiny, step 5", "sentences", "masked", *sizes, 0.25, 4, "beware", 2, findings
    )
    lacks = "the checkpoint lacks 2 tensors; statements on them are not tested"
    assert made.notes == ["beware", lacks]
    causal = report(subjects.subject(None, "causal"), subjects.text(), findings)
    assert (causal.model, causal.mask_share, causal.notes) == ("tiny", None, [])
    assert causal.title == "tiny: causal; 2 × 3 blocks of 16 tokens of sentences"
    fresh = report(subjects.subject(None, "causal", is_fresh=True), subjects.text(), findings)
    assert fresh.title.startswith("tiny (weights freshly drawn with seed 0): causal; ")


def test_findings_are_lines_with_all_that_decides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = np.array([[1.5, 1.4], [1.4, 1.3], [1.6, 1.5]])
    sample = Sample(values, "batches", ("0", "1"))
    statement = Statement("S9", "x grows", "chance", "x", "above", 0.1, lambda _: sample)
    decided = decide(statement, sample)
    simulated = findings_of("holds", "holds", "fails", needs="nothing", first=20)
    findings = (decided, *findings_of("undecided", "not tested", "not tested"), *simulated)
    reports = [reported(findings[:1], "m, step 1"), reported(findings, "m, step 2", "beware")]
    options: dict[str, Any] = {}

    def study(refs: Any, corpus: Path, **chosen: Any) -> list[StudyReport]:
        options.update(chosen, refs=refs, corpus=corpus)
        return reports

    monkeypatch.setattr("wqk_lab.theory.studying.study", study)
    arguments = ("lab", "theory", "m", "--corpus", tmp_path / "text.npy")
    shown = run_command(*arguments).stdout.splitlines()
    defaults = {"batches": 8, "batch": 8, "block": None, "mask_share": 0.15, "seed": 0}
    defaults |= {"objective": None, "layers": None, "steps": None, "revision": None}
    assert {name: options[name] for name in defaults} == defaults
    assert (options["refs"], options["corpus"]) == (("m",), tmp_path / "text.npy")
    titles = [f"m, step {step}: causal; 1 × 2 blocks of 8 tokens of t" for step in (1, 2)]
    assert shown[:2] == [f"{number}  {title}" for number, title in enumerate(titles, start=1)]
    table = [line.split() for line in shown]
    assert ["S9:", "x", "grows", "✓", "✓"] in table
    assert ["S0:", "x", "0", "–", "?"] in table
    assert titles[1] in shown
    assert "1 holds, 1 undecided, 2 not tested" in shown
    assert "not counted, about random matrices: 2 hold, 1 fails" in shown
    assert "a reservation for every verdict: beware" in shown
    (line,) = (line for line in shown if line.split()[:1] == ["holds"] and "S9: x grows" in line)
    assert f"{decided.estimate} (> 0); 2 of 2 layers hold (by chance alone, 0.05 would" in line
    assert " not tested, no way: S1; S2" in shown
    assert shown[-1] == result(reports[-1])
    # Above the result stands the meaning of each verdict that a reader has just met.
    meanings = [line.partition(": ")[0] for line in shown[-5:-1]]
    assert meanings == ["holds", "fails", "undecided", "not tested"]
    assert shown[-4] == "fails: this model's numbers contradict what the paper's text predicts"
    lines = run_command(*arguments, "-v", width=80).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    verbose = [" ".join(line.split()) for line in lines]
    for label in ("quantity: x", "over: 3 batches × 2 layers", "assumes: chance"):
        assert label in verbose
    untested = verbose.index("not tested S1: x 1")
    assert verbose[untested + 1] == "no way"
    as_json = json.loads(run_command(*arguments, "--json").stdout)["reports"]
    assert [report["model"] for report in as_json] == ["m, step 1", "m, step 2"]
    finding = as_json[1]["findings"][0]
    assert finding["layers"] == {"holds": 2, "fails": 0, "count": 2, "by_chance": 0.05}
    assert finding["estimate"]["value"] == pytest.approx(values.mean())
    assert len(finding["numbers"]) == 6
    assert finding["p"] == decided.p
    out = tmp_path / "findings.csv"
    assert f"{out}: 8 findings" in run_command(*arguments, "--out", out).stderr
