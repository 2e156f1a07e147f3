"""``wqk lab atlas`` and the placing line of ``wqk scan``, as a stranger uses them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.command import ENCODER, run, shell
from tests.lab.atlas.making import layers

from wqk_lab.atlas import all_published, published


def names(*arguments: str) -> list[str]:
    return [
        row["name"] for row in json.loads(run("lab", "atlas", *arguments, "--json").stdout)["rows"]
    ]


@pytest.fixture
def survey(tmp_path: Path) -> Path:
    """A survey's folder with the scores of one published model and of one other."""
    (tmp_path / "parts").mkdir()
    tables = [
        layers([0.5, 0.52], [-0.1, -0.1], checkpoint="google-bert/bert-base-uncased"),
        layers([0.01], [0.0], checkpoint="/mine/grown", status="random-looking"),
    ]
    for index, table in enumerate(tables):
        table.write(tmp_path / "parts" / f"{index}.parquet")
    return tmp_path


@pytest.mark.parametrize("width", [40, 60, 80, 100, 120, 160])
def test_lists_fit_the_terminal(width: int) -> None:
    for arguments in (["--stack", "encoder"], ["LLaMA3-8B"], ["BERT-base", "--scan", ENCODER]):
        result = run("lab", "atlas", *arguments, width=width)
        assert result.exit_code == 0, result.output
        assert max(map(len, result.output.splitlines())) <= max(width, 60)
    listed = run("lab", "atlas", width=width).output
    assert ("google-bert/bert-base-uncased" in listed) == (width >= 120)
    assert ("0.51 ± [0.09, 0.07]" in listed) == (width >= 140)


def test_filters_and_orders() -> None:
    assert names() == all_published()["name"].to_list()
    assert names()[:70] == published()["name"].to_list()
    assert {"BEiT-base", "vit-mae-base"} <= set(names("--modality", "vision"))
    assert names("--modality", "audio", "--search", "whisper-tiny") == ["whisper-tiny"] * 2
    assert len(names("--stack", "encoder")) + len(names("--stack", "decoder")) == 198
    assert len(names("--sound")) == all_published()["sound"].sum()
    assert set(names("--search", "PHI-")) == {
        "Phi-1", "Phi-1.5", "Phi-2", "Phi-3-mini-4k-instruct", "Phi-3-mini-128k-instruct",
    }  # fmt: skip
    assert names("--sort", "symmetry")[:2] == ["BERT-tiny", "BERT-2L-128"]
    assert names("--sort", "directionality")[:2] == ["TinyStories-1M", "TinyStories-3M"]
    assert names("--sort", "directionality")[-2:] == ["GPT2-medium", "Phi-2"]
    assert names("--sort", "parameters")[-1] == "LLaMA3.1-405B"
    ordered = names("--sort", "name")
    assert ordered == sorted(ordered, key=str.lower)


def test_an_empty_choice_says_so() -> None:
    result = run("lab", "atlas", "--search", "qqq")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "No row" in result.stderr


def test_flags_are_marked_in_lists_and_explained_for_a_model() -> None:
    listed = run("lab", "atlas", "--search", "modernbert", width=60).output
    assert "a: fused tensor, not transposed; an artifact" in listed
    shown = " ".join(run("lab", "atlas", "Mistral-7B", width=60).output.split())
    assert "key head h mod G instead of h // (H/G)" in shown


def test_a_scan_stands_beside_the_row() -> None:
    result = run("lab", "atlas", "bert-mini", "--scan", ENCODER)
    assert result.exit_code == 0, result.output
    assert "differs from the published row, by more than" in result.output
    told = json.loads(run("lab", "atlas", "bert-mini", "--scan", ENCODER, "--json").stdout)
    (row,) = told["rows"]
    assert row["comparison"]["verdict"] == "differs"
    assert row["comparison"]["scan"]["name"] == "encoder"
    assert set(row["comparison"]["differences"]) == {"symmetry", "directionality"}


def test_a_saved_table_stands_beside_the_row(tmp_path: Path) -> None:
    table = tmp_path / "scores.parquet"
    layers([0.51], [-0.08]).write(table)
    agreed = run("lab", "atlas", "BERT-base", "--from", str(table))
    assert "agrees with the published row, within 0.01 of symmetry" in agreed.output
    artifact = run("lab", "atlas", "ModernBERT-base", "--from", str(table))
    assert "is an artifact; the scan need not agree" in artifact.output


def test_a_survey_extends_the_atlas(survey: Path) -> None:
    listed = run("lab", "atlas", "--survey", str(survey), width=120).output
    assert "/mine/grown" in listed
    assert "looks untrained" in listed
    told = json.loads(run("lab", "atlas", "BERT-base", "--json", WQK_SURVEY=str(survey)).stdout)
    assert told["rows"][0]["comparison"]["verdict"] == "agrees"
    told = json.loads(run("lab", "atlas", "BERT-large", "--json", WQK_SURVEY=str(survey)).stdout)
    assert told["rows"][0]["comparison"] is None
    own = run("lab", "atlas", "grown", "--survey", str(survey))
    assert "own" in own.output
    assert "published" not in own.output
    assert names("--survey", str(survey))[198:] == ["bert-base-uncased", "grown"]


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["BERT-bass"], "did you mean BERT-base"),
        (["EleutherAI/pythia-70mm"], "did you mean"),
        (["--scan", ENCODER], "compare with one MODEL"),
        (["--from", "x.parquet"], "compare with one MODEL"),
        (["BERT-base", "--from", "x.parquet", "--scan", ENCODER], "got both"),
        (["BERT-base", "--from", "/no/such.parquet"], "cannot be read"),
        (["BERT-base", "--from", "scores.tex"], "expected a table in"),
        (["BERT-base", "--scan", "/no/such/model"], "no such file"),
        (["BEiT-base", "--scan"], "matches microsoft/beit"),
        (["--survey", "/no/such/folder"], "contains no survey"),
        (["BERT-base", "--stack", "decoder"], "no model with this name"),
        (["--sort", "color"], "color"),
    ],
)
def test_wrong_input_is_one_clear_message(arguments: list[str], word: str) -> None:
    result = run("lab", "atlas", *arguments)
    assert result.exit_code == 2
    assert word in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_a_pipe_gets_plain_text() -> None:
    done = shell("wqk lab atlas | head -3")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert "BERT-tiny" in done.stdout


def test_scan_places_what_compares_in_one_sentence() -> None:
    assert run("scan", ENCODER).output.count("\nrank: more symmetric than 18 of 24") == 1
    for arguments in (["--circuit", "ov"], ["--fold-norm"], ["--gamma", "3"]):
        assert "rank:" not in run("scan", ENCODER, *arguments).output
