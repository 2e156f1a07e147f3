"""Guessed names of verbs and options lead to the right ones; outputs are uniform over the verbs."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random

import click
import numpy as np
import pytest
from tests import small
from tests.command import run

import wqk
from wqk import _synonyms
from wqk._console import Result
from wqk._guesses import GUESSES, OPTION_GUESSES
from wqk._synonyms import ATTRIBUTES, FUNCTIONS
from wqk._synonyms import VERBS as VERB_SYNONYMS
from wqk.cli.main import LABORATORY, SECTIONS, command
from wqk.cli.rewording import reworded
from wqk.errors import CheckpointError, TableError
from wqk.inspecting.explanation import Explanation
from wqk.kinship.kin import Kinship
from wqk.live.verification import Verification
from wqk.sameness.answer import CheckpointComparison

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
        (["explain", ENCODER, "--latex"], "printed as CSV or JSON, and not as .tex"),
        (["explain", ENCODER, "--format", "xlsx"], "and there is no other"),
        (["explain", ENCODER, DECODER], "wqk same A B names the difference"),
        (["explain", ENCODER, "--tensors"], "the table lists tensors, layers and bytes"),
        (["scan", ENCODER, "--median"], "jq '.summary[].symmetry_median'"),
        (["scan", ENCODER, "--metric", "symmetry"], "symmetry and directionality are always"),
        (["scan", ENCODER, "--hedas"], "did you mean --heads?"),
        (
            ["diff", ENCODER, DECODER, "--junit", "a.xml"],
            "command verify and command same have this option",
        ),
        (["--json", "scan", ENCODER], "--json follows the verb: command scan REF... --json"),
        (["--verbose", "scan", ENCODER], "did you mean --full?"),
        (["tokens", INDUCTION, "--token", "5"], "--query TOKEN lists the keys of one token"),
        (["show", ENCODER, "--all"], "wqk scan REF --picture FILE draws all layers"),
        (["tokens", ENCODER], "Missing --layer, --head: command tokens REF --layer L --head H"),
        (["lab", "corpus"], "Missing TEXT..., -o: command lab corpus TEXT... -o DIR"),
        (["lab", "train"], "wqk lab corpus TEXT -o STORE makes one of a text"),
        (["lab", "train", "--text", "a.txt"], "a text becomes a token store first"),
        (["lab", "speedup", "--csv"], "--json prints all values"),
        (["compose", INDUCTION, "--heatmap", "a.png"], "--matrix --picture FILE draws a map"),
        (["same", ENCODER, DECODER, "-o", "fixed"], "--repair FOLDER writes a repaired copy"),
        (["compose", ENCODER], 'wqk.demo_model("induction")'),
        (["tokens", DECODER, "0.1"], 'wqk.demo_model("induction")'),
        (["scan", ENCODER, "--circuit", "ov"], 'wqk.demo_model("induction")'),
        (["scan", ENCODER, "--columns", "layer"], "add --csv"),
        (["scan", ENCODER, "--csv", "--columns", "symetry"], "did you mean 'symmetry'?"),
        (["tokens", INDUCTION, "0.1", "--query", "cat"], "expected the number of a token, from"),
        (["tokens", INDUCTION, "0.1", "--key", "9", "--directions"], "leave out query and key"),
        (["scan", ENCODER, "--latex", "-o", "a.csv"], "No such option '--latex'; --out FILE.tex"),
        (["survey", ENCODER, "--latex"], "--out FILE.tex writes LaTeX"),
        (["survey", ENCODER, "--format", "latex", "-o", "a"], "No such option '--format'"),
        (["watch", ENCODER, "--latex"], "--out FILE.tex writes LaTeX"),
        (["report", ENCODER, "--latex"], "wqk scan REF --out FILE.tex writes scores as LaTeX"),
        (["scan", ENCODER, "-o", "missing/a.csv"], "there is no folder missing"),
        (["models", ENCODER], f"wqk explain {ENCODER} shows its type"),
        (["ci", ENCODER, ENCODER], "wqk same REFERENCE CANDIDATE --junit FILE.xml"),
        (["parts", ENCODER, "--random"], "every part is measured in any case"),
        (["report", ENCODER, "--json"], "wqk scan REF --json prints the scores"),
        (["list"], "wqk models lists the model types that are read"),
        (["scan", ENCODER, "--quiet"], "2>/dev/null leaves only the result"),
        (["scan", ENCODER, "--format", "xlsx"], "--csv and --json print these formats, and --out"),
        (["scan", ENCODER, "--png", "a.png"], "did you mean --picture FILE?"),
        (["scan", ENCODER, "--block", "1"], "did you mean --layers L,L:M?"),
        (["show", ENCODER, "--layers", "1"], "did you mean --layer L?"),
        (["show", ENCODER], "Which layer; negative: from the end: command show REF --layer L"),
        (["scan", "--path", ENCODER], "the checkpoint is an argument"),
        (["scan", ENCODER, DECODER, "--adapter", "a"], "--base BASE names the model"),
        (["scan", ENCODER, "--csv", "--format", "latex"], "choose one"),
        (["scan", ENCODER, "--out", "-.parquet"], "expected one of -.csv, -.jsonl, -.tex, -.md"),
        (["scan", ENCODER, "--dry-run"], "wqk explain REF shows the tensors and bytes"),
        (["same", ENCODER, ENCODER, "--apply"], "--repair FOLDER writes a repaired copy"),
        (["diff", ENCODER, DECODER, "--filter", "layer < 3"], "filter the rows of --csv"),
        (["compare", ENCODER, DECODER], "or wqk scan A B, for the scores of both"),
        (
            ["same", ENCODER, ENCODER, ENCODER],
            "expected command same [OPTIONS] REFERENCE CANDIDATE",
        ),
        (["same", ENCODER, ENCODER, "--quiet"], ">/dev/null leaves only the exit status"),
        (["plot", ENCODER], "wqk scan REF --picture FILE.png the scores of all layers"),
        (["repair", ENCODER, ENCODER], "wqk same REFERENCE CANDIDATE --repair FOLDER writes"),
        (["help", "symmetry"], "the page Definitions has the formulas"),
        (["qk-clip", ENCODER], "weights are clipped in Python"),
        (["lab", "train", "decoder", "-o", "run"], "Missing option '--corpus'"),
        (["scan", ENCODER, "--reverse"], "largest values first, --sort -symmetry the smallest"),
        (["diff", ENCODER, DECODER, "--sort", "moved"], "--heads --top N the heads"),
        (["diff", ENCODER, wqk.demo_model("induction")], "wqk scan REFERENCE CANDIDATE, or"),
        (["scan", ENCODER, "--top", "symmetry"], "a whole number, such as 10, got 'symmetry'"),
        (["scan", ENCODER, "--sort"], "--sort COLUMN: Largest values of a column first"),
        (["scan", ENCODER, "--where", "symmetry"], 'such as "symmetry > 0.5 and layer < 4"'),
        (["scan", "-"], "cat LIST | xargs wqk scan"),
        (["docs"], "wqk COMMAND --help the options of one"),
        ([str(ENCODER)], f"did you mean wqk scan {ENCODER}?"),
        (["same", ENCODER, ENCODER, "--repair", "-o", "a"], "expected a path, got the option '-o'"),
        (["scan", ENCODER, "--heads", "a", "1"], "An option that is a switch, such as --heads"),
        (["lab", "compare", ENCODER], "expected wqk same A B"),
        (["theory", ENCODER], "Missing option '--corpus'"),
        (["--install-completion"], "_WQK_COMPLETE=bash_source wqk"),
        (["reproduce", "--list"], "the figures are fig2, fig3 and s1 to s5"),
    ],
)
def test_a_guess_leads_to_the_right_call(arguments: list[str], advice: str) -> None:
    stderr = run(*arguments, exits=2).stderr
    assert advice in stderr
    assert stderr.count("Error:") + stderr.count("wqk: ") == 1


@pytest.mark.parametrize("name", ["encoder", "decoder", "induction"])
def test_demo_models_have_names(name: str) -> None:
    shown = run("explain", f"demo:{name}", "--json").stdout
    assert shown == run("explain", wqk.demo_model(name), "--json").stdout
    assert f"demo:{name}" in run("scan", name, exits=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["scan", "demo:induction"],
        ["scan", "demo:induction", "demo:encoder"],
        ["scan", "demo:induction", "--out", "-.tex"],
        ["scan", "demo:induction", "--out", "-.md"],
        ["explain", "demo:induction"],
        ["same", "demo:induction", "demo:induction"],
        ["diff", "demo:induction", "demo:induction"],
        ["kin", "demo:induction", "demo:induction"],
        ["compose", "demo:induction"],
        ["tokens", "demo:induction", "--layer", "1", "--head", "2"],
    ],
)
def test_headings_have_the_names_of_demo_models(arguments: list[str]) -> None:
    printed = run(*arguments).stdout
    assert "demo:induction" in printed
    assert "demo_models" not in printed


def test_a_report_takes_a_demo_model_by_name(tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    run("report", "demo:encoder", "-o", page)
    assert page.stat().st_size


def test_no_other_demo_model_is_named() -> None:
    assert "encoder, decoder, induction" in run("scan", "demo:bert", exits=2).stderr


def test_a_dissimilar_option_is_not_suggested() -> None:
    message = run("verify", ENCODER, "--seeds-of-doubt", exits=2).stderr
    assert message.endswith("No such option '--seeds-of-doubt'\n")


def test_a_path_with_spaces_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ENCODER, tmp_path / "my models" / "the encoder")
    message = run("scan", "my", "models/the", "encoder", exits=2).stderr
    assert "quote it: 'my models/the encoder'" in message
    message = run("same", "my", "models", ENCODER, exits=2).stderr
    assert "quote it: 'my models'" in message
    assert "d 128" in run("scan", "my models/the encoder").stdout
    (tmp_path / "my").symlink_to(ENCODER)
    assert "quote it" not in run("scan", "my", "models/the", exits=2).stderr


@pytest.mark.parametrize("line", [["scan", "help"], ["version"], ["-V"], ["--version"]])
def test_words_for_help_and_for_the_version(line: list[str]) -> None:
    expected = "Usage: command scan" if "help" in line else f"wqk, version {wqk.__version__}"
    assert run(*line).stdout.startswith(expected)


def test_model_types_are_listed(tmp_path: Path) -> None:
    everything = json.loads(run("models", "--json").stdout)["types"]
    names = [row["model_type"] for row in everything]
    assert names == sorted({*names})
    assert {"bert", "llama", "gguf-llama", "qwen2_vl"} <= {*names}
    rows = [*csv.DictReader(io.StringIO(run("families", "Modern-BERT", "--csv").stdout))]
    assert {"modernbert", "modernbert-decoder"} <= {row["model_type"] for row in rows}
    assert "llama" not in {row["model_type"] for row in rows}
    (refused,) = (row for row in everything if row["model_type"] == "axk2")
    assert "no one matrix" in refused["refusal"]
    (composite,) = (row for row in everything if row["model_type"] == "paligemma")
    assert composite["family"] == "gemma + siglip-vision"
    assert "guessed from the names" in run("models", "no-such-type").stdout
    file = tmp_path / "types.json"
    run("models", "gpt2", "-o", file)
    assert json.loads(file.read_text())["types"] == [
        row for row in everything if "gpt2" in row["model_type"] + row["family"]
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["explain", ENCODER],
        ["tokens", INDUCTION, "--layer", "1", "--head", "0"],
        ["kin", ENCODER, DECODER],
        ["same", ENCODER, ENCODER],
        ["lab", "claims"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_results_are_written_as_csv_and_json(tmp_path: Path, arguments: list[str]) -> None:
    table, values = tmp_path / "result.csv", tmp_path / "result.json"
    run(*arguments, "-o", table)
    assert table.read_text("utf-8") == run(*arguments, "--csv").stdout
    assert run(*arguments, "-o", "-").stdout == table.read_text("utf-8")
    run(*arguments, "--out", values)
    assert json.loads(values.read_text("utf-8")) == json.loads(run(*arguments, "--json").stdout)
    assert " is written as .csv, .json" in run(*arguments, "-o", "a.txt", exits=2).stderr


def test_chosen_columns_are_printed() -> None:
    printed = run("scan", ENCODER, "--csv", "--columns", "symmetry,layer").stdout
    rows = [*csv.DictReader(io.StringIO(printed))]
    table = wqk.scan(ENCODER).layers.frame
    assert [*rows[0]] == ["symmetry", "layer"]
    assert [float(row["symmetry"]) for row in rows] == table["symmetry"].to_list()


def test_printed_rows_are_ranked_in_every_format() -> None:
    line = ["scan", ENCODER, "--heads", "--sort", "symmetry", "--top", "2"]
    heads = wqk.scan(ENCODER).heads.frame.sort("symmetry", descending=True)
    largest = heads["symmetry"].head(2).to_list()
    rows = [*csv.DictReader(io.StringIO(run(*line, "--csv").stdout))]
    assert [float(row["symmetry"]) for row in rows] == largest
    printed = json.loads(run(*line, "--json").stdout)
    assert [row["symmetry"] for row in printed["rows"]] == largest
    everything = json.loads(run(*line[:3], "--json").stdout)
    assert printed["summary"] == everything["summary"]
    assert len(run("compose", INDUCTION, "--top", "2", "--csv").stdout.splitlines()) == 3
    assert len(run("compose", INDUCTION, "--csv").stdout.splitlines()) > 21


@pytest.mark.parametrize(
    "line",
    [
        ["scan", ENCODER, "--heads", "--sort", "symmetry", "--top", "2"],
        ["scan", ENCODER, DECODER, "--sort", "symmetry", "--top", "1"],
        ["scan", ENCODER, "--heads", "--sort", "symmetry"],
        ["scan", ENCODER, "--heads"],
        ["diff", ENCODER, DECODER, "--heads", "--top", "5"],
        ["diff", ENCODER, DECODER],
        ["compose", INDUCTION, "--top", "3"],
        ["compose", INDUCTION],
    ],
)
def test_a_file_has_the_rows_that_csv_prints(line: list[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    done = run(*line, "--out", file)
    assert file.read_text("utf-8") == run(*line, "--csv").stdout
    count = len([*csv.DictReader(io.StringIO(file.read_text("utf-8")))])
    assert f"{file}: {count} rows" in done.stderr


@pytest.mark.parametrize("line", [["scan"], ["scan", "--heads"], ["survey", "-o", "folder"]])
def test_nothing_is_above_the_first_line(
    line: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for refs in ([ENCODER], [ENCODER, DECODER]):
        printed = run(*line, *refs, width=200).stdout
        assert printed.startswith(("medians", "demo:encoder"))
        if line[0] == "scan" and len(refs) == 2:
            assert "\n\ndemo:decoder\n" in printed


def test_a_run_that_has_no_scores_is_scanned_for_a_report(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(ENCODER, tmp_path / "run" / f"checkpoint-{step}")
    page = tmp_path / "a.html"
    run("report", tmp_path / "run", "-o", page)
    assert "checkpoint-2" in page.read_text("utf-8")
    (tmp_path / "run" / "wqk-scores").mkdir()
    (tmp_path / "run" / "wqk-scores" / "scores.parquet").write_bytes(b"damaged")
    run("report", tmp_path / "run", "-o", page, exits=2)


def test_a_checkpoint_is_reported_and_a_table_drawn(tmp_path: Path) -> None:
    page, table, picture = (tmp_path / name for name in ("a.html", "scores.csv", "scores.svg"))
    run("report", ENCODER, "-o", page)
    assert "coupling" in page.read_text("utf-8")
    wqk.scan(ENCODER).write(table)
    run("report", table, "--picture", picture)
    assert "symmetry</text>" in picture.read_text("utf-8")
    assert not (tmp_path / "report.html").exists()
    message = run("report", tmp_path, "--picture", picture, exits=2).stderr
    assert "expected the file of a table" in message


def test_a_run_is_watched_once(tmp_path: Path) -> None:
    for step in (1, 2):
        shutil.copytree(ENCODER, tmp_path / "run" / f"checkpoint-{step}")
    file = tmp_path / "history.csv"
    result = run("watch", tmp_path / "run", "--once", "--every", "0.01", "-o", file)
    assert [line.split(":")[0] for line in result.stdout.splitlines()] == ["step 1", "step 2"]
    assert wqk.read_table(file).frame["step"].unique().sort().to_list() == [1, 2]


def test_a_survey_is_also_written_as_a_file(tmp_path: Path) -> None:
    file = tmp_path / "survey.csv"
    run("survey", ENCODER, DECODER, "--jobs", "1", "--resume", "-o", file)
    assert (tmp_path / "survey" / "scores.parquet").exists()
    assert wqk.read_table(file).frame["checkpoint"].n_unique() == 2


def test_a_pattern_of_addresses_is_refused() -> None:
    message = run("survey", "https://example.org/models/*", "--dry-run", exits=2).stderr
    assert "expected the addresses, or a list of them, @list.txt" in message


def test_a_table_is_no_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    wqk.scan(ENCODER).write(file)
    with pytest.raises(CheckpointError, match=r"wqk.read_table\(.*reads a table of scores"):
        wqk.load(file)


def test_rows_of_a_scan_are_chosen() -> None:
    rows = json.loads(run("scan", ENCODER, "--layer", "1", "--head", "2:3", "--json").stdout)[
        "rows"
    ]
    assert [(row["layer"], row["head"]) for row in rows] == [(1, 2), (1, 3)]
    line = ["scan", ENCODER, "--where", "layer < 2 and symmetry > 0.7"]
    assert [row["layer"] for row in json.loads(run(*line, "--json").stdout)["rows"]] == [0]
    assert "0.909" in run(*line).stdout
    message = run("scan", ENCODER, "--head", "9", exits=2).stderr
    assert "no head 9; heads are numbered from 0 to 3" in message
    message = run("scan", ENCODER, "--where", "symetry > 0", exits=2).stderr
    assert "no column 'symetry'; did you mean 'symmetry'?" in message
    for option in ("--where", "--fail-if"):
        message = run("scan", ENCODER, option, "score_ceiling > 1", exits=2).stderr
        assert "no column 'score_ceiling'; wqk scan --ceiling adds it" in message
    message = run("scan", ENCODER, "--sort", "score_ceiling", exits=2).stderr
    assert "no column 'score_ceiling'; wqk scan --ceiling adds it" in message
    assert "no row has the condition" in run(*line[:3], "symmetry > 1").stdout
    assert json.loads(run(*line[:3], "symmetry > 1", "--json").stdout)["rows"] == []


def test_a_table_is_written_as_json_and_read(tmp_path: Path) -> None:
    file = tmp_path / "scores.json"
    run("scan", ENCODER, "--heads", "--json", str(file))
    printed = run("scan", ENCODER, "--heads", "--json").stdout
    assert json.loads(file.read_text()) == json.loads(printed)
    assert wqk.read_table(file).frame.equals(wqk.scan(ENCODER).frame)


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
        ["models", "bert"],
        ["lab", "atlas"],
        ["lab", "claims"],
    ],
    ids=lambda arguments: arguments[-1] if arguments[0] == "lab" else arguments[0],
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


def words(*arguments: object) -> list[str]:
    """Return what the verb of these arguments receives."""
    context = click.Context(command)
    name, verb, following = command.resolve_command(context, list(map(str, arguments)))
    assert verb is not None
    if isinstance(verb, click.Group):
        lab_name, _, following = verb.resolve_command(
            click.Context(verb, parent=context), following
        )
        return [str(name), str(lab_name), *following]
    return [str(name), *following]


@pytest.mark.parametrize(
    ("guess", "meaning"),
    [
        ("scan X --layer 2", "scan X --layers 2"),
        ("scan X --layer=2", "scan X --layers 2"),
        ("scan X --format latex", "scan X --out -.tex"),
        ("scan X --format=JSON", "scan X --json"),
        ("scan X -f csv", "scan X --csv"),
        ("scan X --markdown", "scan X --out -.md"),
        ("scan X --output a.csv", "scan X --out a.csv"),
        ("scan X --plot a.png --top 3", "scan X --picture a.png --top 3"),
        ("scan X --adapter A", "scan A --base X"),
        ("scan --model X --per-head", "scan X --heads"),
        ("scan X -- --layer", "scan X -- --layer"),
        ("scan X --report --layer", "scan X --report --layer"),  # a value is no option
        ("show X 0 1", "show X --layer 0 --head 1"),
        ("show X 0 1 a.png", "show X --layer 0 --head 1 --out a.png"),
        ("show X --layer 0 --save a.png", "show X --layer 0 --out a.png"),
        ("tokens X 0.1", "tokens X --layer 0 --head 1"),
        ("lab figures fig 2", "lab figure fig2"),
        ("tokens X 0 1 -k 5", "tokens X --layer 0 --head 1 --top 5"),
        ("parts X text.txt", "parts X --text text.txt"),
        ("report a.csv r.html", "report a.csv --out r.html"),
        ("same X Y --tol 1e-3", "same X Y --tolerance 1e-3"),
        ("compose X --topk 5", "compose X --top 5"),
        ("info X", "explain X"),
        ("ls X", "explain X"),
        ("lab table 1", "lab figure table1"),
        ("lab table tableS2", "lab figure tableS2"),
        ("lab fig 2", "lab figure 2"),
        ("reproduce figure 2", "lab figure figure2"),
        ("tableS2", "lab figure tableS2"),
        ("atlas X", "lab atlas X"),
        ("composition X --type Q -n 2", "compose X --type Q --top 2"),
        ("kinship X Y", "kin X Y"),
        ("typical X", "scan X"),
        ("trajectory X --revisions a,b", "scan X --revision a --revision b"),
        ("repair X Y -o fixed", "same X Y --repair fixed"),
        ("repair X Y --output=fixed", "same X Y --repair=fixed"),
        ("plot X --save a.png --heads", "scan X --picture a.png --heads"),
        ("plot X 0.1 -o a.png", "show X --layer 0 --head 1 -o a.png"),
        ("plot X --head 0.1 -o a.png", "show X --layer 0 --head 1 -o a.png"),
        ("head X L5H11", "scan X --layers 5 --head 11 --heads --spectrum"),
        ("scan X -l 2", "scan X --layers 2"),
        ("show X -l 2", "show X --layer 2"),
        ("scan X --svd", "scan X --spectrum"),
        ("watch X --interval 5", "watch X --every 5"),
        ("scan X 5 1", "scan X --layers 5 --head 1"),
        ("spectrum X --layer 5", "scan X --layers 5 --spectrum"),
        ("coupling X 0", "show X --layer 0 --coupling"),
        ("directions X 5.1", "tokens X --layer 5 --head 1 --directions"),
        ("scan X --csv a.csv", "scan X --out a.csv"),
        ("scan X --json=a.json", "scan X --out a.json"),
        ("scan X --csv --full", "scan X --csv --full"),
        ("scan X --latex a.tex", "scan X --out a.tex"),
        ("scan X --latex --full", "scan X --out -.tex --full"),
        ("scan X --revisions a,b", "scan X --revision a --revision b"),
        ("plot a.csv -o a.pdf", "report a.csv --picture a.pdf"),
        ("survey --models X --resume --out a", "survey X --out a"),
        ("watch X --no-follow", "watch X --once"),
        ("same --reference X --candidate=Y --all", "same X Y --all"),
        ("same --converted Y X --all", "same X Y --all"),
        ("diff X --new Y", "diff X Y"),
    ],
)
def test_a_hidden_synonym_is_what_it_stands_for(guess: str, meaning: str) -> None:
    assert words(*guess.split()) == meaning.split()


def test_no_synonym_is_a_name_of_its_own() -> None:
    """A name of the contract is never replaced, and no name has two meanings."""
    for name, verb in every_verb():
        for option in options_of(verb):
            assert words(*name.split(), "X", option)[-1] == option
    names = {name for names in SECTIONS.values() for name in names} | {*LABORATORY}
    assert not names & {*VERB_SYNONYMS}
    assert not {*wqk.__all__, *dir(wqk)} & {*FUNCTIONS}
    # A package would hide the function once the package is imported.
    assert not {path.stem for path in Path(wqk.__file__).parent.iterdir()} & {*FUNCTIONS}


@pytest.mark.parametrize("owner", [*ATTRIBUTES])
def test_synonyms_of_attributes_hide_nothing(owner: str) -> None:
    classes = {
        "Table": wqk.ScoreTable,
        "Result": Result,
        "Model": wqk.Model,
        "Block": wqk.Block,
        "BilinearForm": wqk.BilinearForm,
        "Clipper": wqk.Clipper,
        "Explanation": Explanation,
        "Kinship": Kinship,
        "Monitor": wqk.Monitor,
        "Head": wqk.Head,
        "CheckpointComparison": CheckpointComparison,
        "Verification": Verification,
    }
    assert not {*dir(classes[owner])} & {*ATTRIBUTES[owner]}


def test_a_table_of_the_paper_is_printed_in_latex(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "\\begin{tabular}" in run("reproduce", "table", "1", "--latex").stdout
    assert not [*tmp_path.iterdir()]


def test_a_table_is_printed_in_every_format(tmp_path: Path) -> None:
    for name, ending in (("latex", ".tex"), ("markdown", ".md"), ("jsonl", ".jsonl")):
        file = tmp_path / f"scores{ending}"
        run("scan", ENCODER, "--out", str(file))
        assert run("scan", ENCODER, "--format", name).stdout == file.read_text("utf-8")


def test_pandas_names_of_a_table(tmp_path: Path) -> None:
    table = wqk.scan(ENCODER)
    for name, ending in (("to_csv", ".csv"), ("to_latex", ".tex"), ("to_markdown", ".md")):
        file, same_file = tmp_path / f"a{ending}", tmp_path / f"b{ending}"
        table.write(file)
        assert getattr(table, name)(same_file) is None
        assert file.read_text() == same_file.read_text() == getattr(table, name)()
    assert json.loads(table.to_json()) == table.to_dict()
    assert table.df is table.frame
    assert table.symmetry.equals(table["symmetry"])
    assert table[["layer", "symmetry"]].columns == ["layer", "symmetry"]
    assert table.head(2).equals(table.frame.head(2))
    explained = wqk.explain(ENCODER)
    assert json.loads(explained.to_json()) == explained.to_dict()
    assert explained.to_csv().startswith("stack,")


def test_a_picture_is_the_current_figure_of_pyplot() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    table, form = wqk.scan(ENCODER), wqk.open(ENCODER)[0, 1]
    pyplot.close("all")
    for figure in (table.plot(), form.plot()):
        assert figure.number in pyplot.get_fignums()
    assert pyplot.gcf() is figure
    figure._repr_html_()  # a notebook displays the figure once
    assert figure.number not in pyplot.get_fignums()
    pyplot.close("all")
    assert table._repr_html_()
    assert not pyplot.get_fignums()


def test_synonyms_of_a_model() -> None:
    model = wqk.open(ENCODER)
    assert wqk.load(ENCODER).name == model.name
    assert (model.n_layers, model.n_heads, model.num_key_value_heads) == (4, 4, 4)
    assert model[0].symmetry == model[0].form.symmetry
    head = model[0, 1]
    assert head.W_Q is head.query
    rotary = wqk.open(small.llama(sides="qkvo", name="llama"))
    head = rotary[1, 2]
    np.testing.assert_allclose(head.W_V @ head.W_O, head.ov.numpy(), rtol=1e-5)
    assert rotary[1].W_Q.shape == (len(rotary[1]), *head.W_Q.shape)
    transformers = pytest.importorskip("transformers")
    config = transformers.T5Config(d_model=8, d_kv=4, num_heads=2, num_layers=1, vocab_size=9)
    both = wqk.open(transformers.T5Model(config))
    with pytest.raises(CheckpointError, match="several stacks"):
        both.n_layers  # noqa: B018


def test_synonyms_of_a_form_and_in_training() -> None:
    form = wqk.open(ENCODER)[0, 1].qk
    np.testing.assert_array_equal(form.to_dense(), form.dense())
    network = small.running(key_heads=2)
    monitor = wqk.Monitor(network)
    assert monitor.step(0)
    assert len(monitor.to_pandas()) == len(monitor.table)
    assert wqk.Clipper(network, None).step().limit is None


def test_aggregates_of_a_table_have_rows_of_one_kind() -> None:
    table = wqk.scan(ENCODER)
    with pytest.raises(TableError, match="layers and of heads"):
        table.groupby("layer")
    means = table.heads.groupby("layer")["symmetry"].mean()
    by_head = wqk.open(ENCODER)[2].heads.symmetry
    assert means[2] == pytest.approx(np.mean(by_head))


def test_a_word_for_the_mode_of_training() -> None:
    line = reworded(LABORATORY["train"], ["decoder", "--steps", "50", "-o", "run"])
    assert line == ["--mode", "decoder", "--steps", "50", "-o", "run"]
    line = reworded(command.verbs["same"], ["a", "b", "--fix", "fixed"])
    assert line == ["a", "b", "--repair", "fixed"]


def test_text_files_are_lists_of_checkpoints(tmp_path: Path) -> None:
    listing = tmp_path / "models.txt"
    listing.write_text(f"{ENCODER}\n{DECODER}\n")
    (tmp_path / "model.safetensors").write_bytes(Path(ENCODER, "model.safetensors").read_bytes())
    message = run("scan", str(listing), exits=2).stderr
    assert f"wqk survey {listing} --out FOLDER scores them" in message
    assert run("survey", str(listing), "--dry-run").stdout == "demo:encoder\ndemo:decoder\n"
    copy = shutil.copytree(ENCODER, tmp_path / "a folder with a long name" / "encoder")
    listing.write_text(f"{copy}\n")
    for width in (30, 200):  # a line for each, however long
        assert run("survey", str(listing), "--dry-run", width=width).stdout == f"{copy}\n"


def test_a_measure_that_no_layer_has_is_explained() -> None:
    assert "No bands (encoder): no rotary positions." in run("scan", ENCODER, "--bands").stdout


def test_a_lack_of_values_names_what_lacks_them() -> None:
    message = run("compose", ENCODER, exits=2).stderr
    assert "the checkpoint has no values and outputs; family bert-prenorm expects" in message


@pytest.mark.parametrize("verb", ["verify", "parts"])
def test_a_missing_tokenizer_is_found_before_libraries_are_loaded(verb: str) -> None:
    code = (
        "import sys; from wqk.cli.main import command\n"
        f"try: command(['{verb}', {str(ENCODER)!r}, '--text', {__file__!r}])\n"
        "finally: print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "has no tokenizer that encodes text (no tokenizer.json" in done.stderr
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("seed", range(20))
def test_no_words_of_a_line_are_lost_or_stop_the_rewording(seed: int) -> None:
    """A synonym at the end of a line, without its value, is left for click to refuse."""
    random = Random(seed)
    synonyms = [*_synonyms.OPTIONS, *_synonyms.FORMAT_OPTIONS, *_synonyms.CHECKPOINT_OPTIONS]
    pool = [*synonyms, *_synonyms.ADAPTER_OPTIONS, "-", "a", "0.2", "head.png", "--layer=3"]
    for name in ("scan", "show", "tokens", "same", "parts", "report", "survey"):
        for _ in range(50):
            arguments = random.choices(pool, k=random.randint(0, 6))
            line = reworded(command.verbs[name], arguments)
            assert all(word in line for word in arguments if word in ("a", "head.png"))


def test_a_synonym_without_its_value_is_a_usage_error() -> None:
    message = run("show", "x", "--model", exits=2).stderr
    assert "Missing option '--layer'" in message


def test_the_folder_of_a_survey_is_shown_by_a_report(tmp_path: Path) -> None:
    wqk.scan(ENCODER, heads=False).write(tmp_path / "scores.parquet")
    refused = run("scan", tmp_path, exits=2).stderr
    assert "no weights here" in refused
    assert "the folder contains scores, which wqk report shows" in refused
