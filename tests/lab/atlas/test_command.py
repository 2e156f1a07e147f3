"""``wqk lab atlas`` and the placing line of ``wqk scan``, as a stranger uses them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import polars as pl
from tests import small
from tests.command import ENCODER, run, shell

from wqk._console import count
from wqk_lab.atlas import all_published, flags, published
from wqk_lab.atlas.ranks import spread


def names(*arguments: str) -> list[str]:
    return [
        row["name"] for row in json.loads(run("lab", "atlas", *arguments, "--json").stdout)["rows"]
    ]


def test_filters_and_orders() -> None:
    assert names() == all_published()["name"].to_list()
    assert names()[:70] == published()["name"].to_list()
    assert {"BEiT-base", "vit-mae-base"} <= set(names("--modality", "vision"))
    assert names("--modality", "audio", "--search", "whisper-tiny") == ["whisper-tiny"] * 2
    assert len(names("--stack", "encoder")) + len(names("--stack", "decoder")) == 198
    assert len(names("--sound")) == all_published()["sound"].sum()
    assert set(names("--search", "PHI-")) == {
        "Phi-1",
        "Phi-1.5",
        "Phi-2",
        "Phi-3-mini-4k-instruct",
        "Phi-3-mini-128k-instruct",
    }
    assert names("--sort", "symmetry")[:2] == ["BERT-tiny", "BERT-2L-128"]
    smallest_first = [names("--sort", "-symmetry"), names("--sort", "symmetry")]
    assert {*smallest_first[0]} == {*smallest_first[1]}
    assert smallest_first[0][:1] != smallest_first[1][:1]
    assert names("--sort", "directionality")[:2] == ["TinyStories-1M", "TinyStories-3M"]
    assert names("--sort", "directionality")[-2:] == ["GPT2-medium", "Phi-2"]
    assert names("--sort", "parameters")[-1] == "LLaMA3.1-405B"
    ordered = names("--sort", "name")
    assert ordered == sorted(ordered, key=str.lower)


def test_an_empty_choice_says_so() -> None:
    result = run("lab", "atlas", "--search", "qqq")
    assert result.stdout == ""
    assert "No row" in result.stderr


def test_flags_are_marked_in_lists_and_explained_for_a_model() -> None:
    listed = run("lab", "atlas", "--search", "modernbert", width=60).output
    assert "a: fused tensor, not transposed; an artifact" in listed
    shown = " ".join(run("lab", "atlas", "Mistral-7B", width=60).output.split())
    assert "key head h mod G instead of h // (H/G)" in shown


def test_counts_of_flags_agree_between_the_list_and_csv() -> None:
    listed = run("lab", "atlas", "--flagged", width=100).output
    assert "wrong pairs of heads; an artifact (20 rows, 17 printed in Tables S2 and S3)" in listed
    text = run("lab", "atlas", "--flagged", "--csv").stdout
    rows = pl.read_csv(text.encode()).filter(pl.col("flags").str.contains("grouped-heads"))
    assert (rows.height, rows["printed"].sum()) == (20, 17)
    assert all_published()["printed"].to_list() == [True] * 70 + [False] * 128
    everything = " ".join(run("lab", "atlas", width=100).output.split())
    assert "188 lines for 198 rows of CSV and JSON" in everything
    assert "share a line" not in listed


def test_a_pipe_gets_plain_text() -> None:
    done = shell("wqk lab atlas | head -3")
    assert "\x1b" not in done.stdout
    assert done.stderr == ""
    assert "BERT-tiny" in done.stdout


def test_scan_places_what_compares_in_one_sentence() -> None:
    rank = "\nrank among the paper's models: more symmetric than 18 of 24"
    assert run("scan", ENCODER).output.count(rank) == 1
    assert "\nrank" not in run("scan", ENCODER, "--gamma", "3").output


def test_scans_of_several_models_name_the_model_of_a_rank_and_those_without(tmp_path: Path) -> None:
    fresh = small.llama(layers=3, width=64, head_width=16)
    small.save(tmp_path / "fresh", fresh._arrays, fresh.config)
    lines = run("scan", ENCODER, tmp_path / "fresh", width=200).output.splitlines()
    rank, meaning, without = lines[-3:]
    assert rank.startswith(
        "rank of demo:encoder among the paper's models: more symmetric than 18 of 24"
    )
    assert meaning.startswith("demo:encoder: A median symmetry of 0.60 is typical of")
    assert without == "no rank: fresh (random-looking)"
    for name in "ab":
        shutil.copytree(ENCODER, tmp_path / name / "last")
    output = run("scan", tmp_path / "a" / "last", tmp_path / "b" / "last", width=200).output
    assert all(f"\nrank of {name}/last among " in output for name in "ab")


def test_a_model_is_shown_in_full() -> None:
    row = published().filter(name="Mistral-7B").row(0, named=True)
    shown = run("lab", "atlas", "Mistral-7B", width=200).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert f"Mistral-7B · {row['model']}" in lines
    assert f"decoder · language · {count(row['parameters'])} parameters" in lines
    assert f"published {spread(row, 'symmetry')} {spread(row, 'directionality')}" in lines
    assert "symmetry directionality (excess)" in lines
    for flag in row["flags"]:
        assert f"• {flags()[flag].sentence}" in " ".join(shown.split())
    assert "not sound: the numbers do not describe the form of the trained model" in lines
    assert "no known problem: " in run("lab", "atlas", "BERT-base", width=200).stdout
    explained = json.loads(run("lab", "atlas", "Mistral-7B", "--json").stdout)["flags"]
    assert explained == {flag: flags()[flag].sentence for flag in row["flags"]}


def test_unsound_rows_complement_the_sound_ones_with_reasons() -> None:
    sound, unsound = names("--sound"), names("--unsound")
    assert len(sound) + len(unsound) == all_published().height
    rows = json.loads(run("lab", "atlas", "--unsound", "--json").stdout)["rows"]
    assert not any(row["sound"] for row in rows)
    assert all(row["reasons"] == "; ".join(flags()[f].title for f in row["flags"]) for row in rows)
    written = pl.read_csv(run("lab", "atlas", "--flagged", "--csv").stdout.encode())
    assert written.columns[-1] == "reasons"
    assert "wrong pairs of heads" in written["reasons"].to_list()
    refused = run("lab", "atlas", "--sound", "--unsound", exits=2)
    assert "exclude each other" in refused.stderr


def test_two_rows_of_one_model_are_numbered() -> None:
    shown = " ".join(run("lab", "atlas", "LLaMA3-8B", width=200).stdout.split())
    assert "parameters · row 1 of 2 " in shown
    assert "parameters · row 2 of 2 " in shown
    assert "The paper has 2 rows of LLaMA3-8B, which contradict each other: directionality" in shown
    assert "row 1 of" not in run("lab", "atlas", "BERT-base").stdout


def test_a_list_has_a_line_for_each_model() -> None:
    shown = run("lab", "atlas", "--search", "bert-base", width=220).stdout
    lines = [" ".join(line.split()) for line in shown.splitlines()]
    assert "name checkpoint stack symmetry directionality flags" in lines
    row = published().filter(name="BERT-base").row(0, named=True)
    scores = f"{spread(row, 'symmetry')} {spread(row, 'directionality')}"
    assert f"BERT-base {row['model']} encoder {scores}" in lines
    assert "\n BERT-base " in shown  # names begin in the first column
    flagged = all_published().filter(pl.col("flags").list.len() > 0)["name"].to_list()
    assert names("--flagged") == flagged


def test_sound_rows_may_carry_flags_that_are_no_artifacts() -> None:
    rows = json.loads(run("lab", "atlas", "--sound", "--json").stdout)["rows"]
    flags_of_sound = {flag for row in rows for flag in row["flags"]}
    assert flags_of_sound == {"mislabeled", "contradicted"}
    assert not any(flags()[name].artifact for name in flags_of_sound)
    listed = " ".join(run("lab", "atlas", "--sound").stdout.split())
    assert "a: mislabeled model; no artifact, the numbers are sound (3 rows" in listed
    help_text = " ".join(run("lab", "atlas", "--help").stdout.split())
    assert "also with a flag that is no artifact" in help_text
