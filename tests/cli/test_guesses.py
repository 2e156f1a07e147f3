"""Guessed names of verbs and options lead to the right ones; outputs are uniform over the verbs."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from tests.command import run

import wqk
from wqk._guesses import GUESSES, OPTION_GUESSES
from wqk.cli.main import LABORATORY, SECTIONS, command

VERBS = [name for names in SECTIONS.values() for name in names if name != "lab"]
ENCODER, DECODER, INDUCTION = map(wqk.demo_model, ("encoder", "decoder", "induction"))


def every_verb() -> Iterator[tuple[str, click.Command]]:
    yield from ((verb, command.verbs[verb]) for verb in VERBS)
    yield from ((f"lab {verb}", LABORATORY[verb]) for verb in LABORATORY)


def options_of(verb: click.Command) -> set[str]:
    return {name for parameter in verb.params for name in parameter.opts}


def test_no_name_is_guessed_for_two_things() -> None:
    names = [name for guess in GUESSES for name in guess.names]
    assert sorted(names) == sorted(set(names))


def test_every_option_that_advice_names_exists() -> None:
    options = set().union(*(options_of(verb) for _, verb in every_verb())) | {
        "--directions",
    }
    for guess in OPTION_GUESSES:
        assert set(guess.options) <= options, guess
        assert guess.options or guess.advice, guess


@pytest.mark.parametrize(
    ("arguments", "advice"),
    [
        (["scan", ENCODER, "--latex"], "--out FILE.tex writes LaTeX"),
        (["scan", ENCODER, "--quiet"], "2>/dev/null leaves only the result"),
        (["scan", ENCODER, "--format", "csv"], "--csv and --json print these formats"),
        (["scan", ENCODER, "--plot", "a.png"], "did you mean --picture FILE?"),
        (["scan", ENCODER, "--layer", "1"], "did you mean --layers L,L:M?"),
        (["scan", ENCODER, "--per-head"], "did you mean --heads?"),
        (["show", ENCODER, "--layers", "1"], "did you mean --layer L?"),
        (["show", ENCODER, "--save", "a.png"], "did you mean --out FILE?"),
        (["scan", "--model", ENCODER], "the checkpoint is an argument"),
        (["lab", "theory", ENCODER, "--plot", "a.png"], "did you mean --picture FILE?"),
        (["scan", ENCODER, "--dry-run"], "wqk explain REF shows the tensors and bytes"),
        (["same", ENCODER, ENCODER, "--fix"], "--repair FOLDER writes a repaired copy"),
        (["models"], "the page Models lists the model types"),
        (["ls", ENCODER], "wqk explain REF"),
        ([str(ENCODER)], f"did you mean wqk scan {ENCODER}?"),
        (["same", ENCODER, ENCODER, "--repair", "-o", "a"], "expected a path, got the option '-o'"),
        (["scan", ENCODER, "--heads", "1"], "An option that is a switch, such as --heads"),
        (["info", ENCODER], "wqk explain REF"),
        (["lab", "compare", ENCODER], "wqk same REFERENCE CANDIDATE"),
        (["theory", ENCODER], "wqk theory is now wqk lab theory"),
    ],
)
def test_a_guess_leads_to_the_right_call(arguments: list[str], advice: str) -> None:
    stderr = run(*arguments, exits=2).stderr
    assert advice in stderr
    assert stderr.count("Error:") == 1


@pytest.mark.parametrize(("name", "verb"), [*every_verb()])
def test_out_has_a_short_name_everywhere(name: str, verb: click.Command) -> None:
    options = options_of(verb)
    assert ("-o" in options) == ("--out" in options)
    assert ("--csv" not in options) or "--json" in options


@pytest.mark.parametrize(
    "arguments",
    [
        ["scan", ENCODER],
        ["explain", ENCODER],
        ["show", ENCODER, "--layer", "1"],
        ["compose", INDUCTION],
        ["diff", ENCODER, ENCODER],
        ["kin", ENCODER, DECODER],
        ["same", ENCODER, ENCODER],
    ],
    ids=lambda arguments: arguments[0],
)
def test_csv_is_printed_by_every_verb(arguments: list[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(run(*arguments, "--csv").stdout)))
    assert rows
    assert None not in rows[0]
    assert "choose one of the two" in run(*arguments, "--csv", "--json", exits=2).stderr


def test_out_to_standard_output_is_the_csv_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    run("scan", ENCODER, "-o", str(file))
    printed = run("scan", ENCODER, "--out", "-").stdout
    assert printed == file.read_text("utf-8") == run("scan", ENCODER, "--csv").stdout


@pytest.mark.parametrize("heads", [[], ["--heads"]])
def test_a_scan_draws_its_picture(tmp_path: Path, heads: list[str]) -> None:
    pytest.importorskip("matplotlib")
    file = tmp_path / "scan.svg"
    result = run("scan", ENCODER, *heads, "--picture", str(file))
    assert f"picture: {file}" in result.stderr
    assert ("head</text>" in file.read_text("utf-8")) == bool(heads)
    assert "a picture is written as" in run("scan", ENCODER, "--picture", "a", exits=2).stderr


def test_ranges_may_have_a_dash() -> None:
    rows = json.loads(run("scan", ENCODER, "--layers", "0-2", "--json").stdout)["rows"]
    assert [row["layer"] for row in rows] == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("compare", "wqk.diff(reference, candidate)"),
        ("initialize", 'wqk.initialize_(model, "symmetric")'),
        ("clip", "wqk.clip_(model, limit, wqk.logits(model, batch))"),
        ("atlas", "wqk_lab.atlas.published()"),
    ],
)
def test_hints_are_calls_with_all_their_arguments(name: str, call: str) -> None:
    with pytest.raises(AttributeError, match=re.escape(call)):
        getattr(wqk, name)


def test_a_table_of_the_paper_and_an_adapter_lead_to_their_calls() -> None:
    assert "wqk lab figure NAME --out" in run("lab", "table", "1", exits=2).stderr
    assert "--base BASE" in run("scan", str(ENCODER), "--adapter", "x", exits=2).stderr
    assert "--out FILE.tex" in run("scan", str(ENCODER), "--format", "latex", exits=2).stderr
