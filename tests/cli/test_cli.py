"""The command as a stranger uses it: good input, bad input, pipes and narrow terminals."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from importlib.metadata import version
from pathlib import Path

import click
import numpy as np
import pytest
from tests import small
from tests.command import ENCODER, refuse, run, shell

import wqk
from wqk.cli.main import LABORATORY, command
from wqk.tables.schema import SCHEMA
from wqk.tables.score_table import read_table


@pytest.mark.parametrize("verb", LABORATORY)
def test_a_verb_of_the_laboratory_needs_no_lab(verb: str) -> None:
    name, _, arguments = command.resolve_command(click.Context(command), [verb, "anything"])
    assert (name, arguments) == ("lab", [verb, "anything"])


def test_the_version_is_that_of_the_package_and_of_what_families_were_proven_against() -> None:
    proven = tomllib.loads((resources.files("wqk.families") / "proven.toml").read_text("utf-8"))
    assert run("--version").stdout.splitlines() == [
        f"wqk, version {version('wqk')}",
        f"families proven against transformers {proven['transformers']}",
    ]


def test_scan_prints_a_table_that_fits_the_terminal() -> None:
    for width in (60, 80, 120):
        result = run("scan", ENCODER, width=width)
        lines = result.output.splitlines()
        assert max(map(len, lines)) <= width or any(ENCODER in line for line in lines)
        assert "median symmetry" in result.output
        assert "is typical of published encoders" in " ".join(result.output.split())
        assert ("█" in result.output) == (width >= 80)
    full = " ".join(run("scan", ENCODER, "--full", width=80).output.split())
    assert "chance: 0.0078 ± 0.011 for independent entries at d 128, 1/d ± √2/d" in full
    assert "Definition 3.2" in full
    assert "expected by chance" in full
    assert "in heads (random) between" in full  # the value by chance next to its score
    assert "between: the part of symmetry between different heads" in full


def test_grids_of_heads_name_the_options_that_print_rows() -> None:
    for refs in ([ENCODER], [ENCODER, wqk.demo_model("decoder")]):
        grids = run("scan", *refs, "--heads").stdout
        assert grids.count("a row for each head: --sort symmetry --top 10") == 1
        assert "a row for each head" not in run("scan", *refs).stdout
    rows = run("scan", ENCODER, "--heads", "--sort", "symmetry", "--top", "10").stdout
    assert len(re.findall(r"^ +\d +\d ", rows, re.M)) == 10
    assert "wqk survey" in run("scan", "--help").stdout


@pytest.mark.parametrize(
    ("arguments", "width"),
    [
        (("scan", ENCODER, "--heads"), 30),
        (("diff", ENCODER, ENCODER, "--heads"), 40),
        (("demo",), 40),
    ],
)
def test_no_number_is_cut_where_the_terminal_is_narrow(tmp_path, monkeypatch, arguments, width):
    monkeypatch.chdir(tmp_path)
    shown = run(*arguments, width=width).stdout
    assert "…" not in shown
    assert re.search(r"^ *layer", shown, re.MULTILINE)


def test_diff_prints_the_heads_that_moved_most() -> None:
    """--top is for every format but --out, whose file has all rows; without heads, of layers."""
    decoder = wqk.demo_model("decoder")
    table = wqk.diff(ENCODER, decoder)
    moved = sorted(table.heads["moved"], reverse=True)[:3]
    arguments = ("diff", ENCODER, decoder, "--heads", "--top", "3")
    rows = [line.split(",") for line in run(*arguments, "--csv").stdout.splitlines()]
    place = rows[0].index("moved")
    assert [float(row[place]) for row in rows[1:]] == moved
    printed_as_json = json.loads(run(*arguments, "--json").stdout)
    assert [row["moved"] for row in printed_as_json["rows"]] == moved
    shown = run(*arguments).stdout
    assert len(re.findall(r"^ +\d+ +\d+ ", shown, re.M)) == 3
    assert table.result in " ".join(shown.split()), "the result is that of all rows"
    layers = run("diff", ENCODER, decoder, "--top", "1").stdout
    assert re.findall(r"^ +(\d) ", layers, re.M) == [str(table.layers.farthest(1)["layer"].item())]


def test_json_is_the_whole_table() -> None:
    printed = json.loads(run("scan", ENCODER, "--heads", "--json", "--gamma", "1.5").stdout)
    table = wqk.scan(ENCODER, gamma=1.5)
    assert list(printed["rows"][0]) == list(SCHEMA)
    assert printed["metadata"]["gamma"] == 1.5
    assert [row["symmetry"] for row in printed["rows"]] == table.frame["symmetry"].to_list()
    assert len(printed["summary"]) == 2


@pytest.mark.parametrize("ending", [".parquet", ".csv", ".jsonl"])
def test_out_saves_what_python_gives(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"scores{ending}"
    run("scan", ENCODER, "--heads", "--out", str(path))
    assert read_table(path).frame.equals(wqk.scan(ENCODER).frame)


def test_bad_input_gives_one_clear_line_and_nothing_else(tmp_path: Path) -> None:
    """Errors before anything is read, in a file's header, and in weights that are read last."""
    truncated, not_finite = (Path(shutil.copytree(ENCODER, tmp_path / name)) for name in "ab")
    content = (truncated / "model.safetensors").read_bytes()
    (truncated / "model.safetensors").write_bytes(content[:-100])
    with_a_nan = np.where(np.arange(128 * 128).reshape(128, 128) == 3, np.nan, 0)
    query_name = "2.attention.self.query.weight"
    small.edit(not_finite, lambda name, tensor: with_a_nan if name.endswith(query_name) else tensor)
    out = tmp_path / "scores.parquet"
    for path, message in (
        (tmp_path / "nothing", "no such file or folder"),
        (truncated, "truncated"),
        (not_finite, "1 of 16384 weights are NaN"),
    ):
        assert message in refuse("scan", path, "--out", out)
        assert not out.exists()


def test_explain_names_tensors_and_bytes() -> None:
    assert "attention.self.query.weight" in run("explain", ENCODER, width=120).output
    printed = json.loads(run("explain", ENCODER, "--json").stdout)
    weights = [use for use in printed["uses"] if use["role"] in ("query", "key")]
    assert sum(use["bytes"] for use in weights) == 4 * 2 * 128 * 128 * 2


def test_a_pipe_that_closes_early_is_no_error() -> None:
    done = shell("wqk scan ENCODER --heads --json | head -1")
    assert done.stdout == "{\n"
    assert done.stderr == ""


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_pipe_that_is_closed_gets_no_message_at_the_end(unbuffered: str) -> None:
    """Python flushes what a stream holds as the process ends; an unbuffered one holds nothing."""
    reads, writes = os.pipe()
    os.close(reads)
    done = subprocess.run(
        [sys.executable, "-m", "wqk", "explain", ENCODER],
        stdout=writes,
        stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
    )
    os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")


def test_messages_into_a_pipe_that_closes_early_are_no_other_status(tmp_path: Path) -> None:
    """Status 1 is reserved for comparisons that found a difference."""
    reads, writes = os.pipe()
    os.close(reads)
    arguments = ("compose", wqk.demo_model("induction"), "--picture", tmp_path / "arcs.png")
    done = subprocess.run(
        [sys.executable, "-m", "wqk", *arguments], stdout=subprocess.DEVNULL, stderr=writes
    )
    os.close(writes)
    assert done.returncode == 141


@pytest.mark.parametrize(
    ("line", "name", "status"),
    [
        ("wqk scan ENCODER --out FILE", "scores.csv", 0),
        ("wqk scan ENCODER --json --out FILE", "scores.csv", 0),
        ("wqk scan ENCODER --csv --report FILE", "report.html", 0),
        ("wqk same ENCODER demo:decoder --junit FILE", "report.xml", 1),
        ("wqk compose demo:induction --out FILE", "pairs.csv", 0),
        ("wqk lab claims --out FILE", "claims.csv", 0),
    ],
)
def test_files_are_written_although_nobody_reads_the_output(
    line: str, name: str, status: int, tmp_path: Path
) -> None:
    file = tmp_path / name
    line = line.replace("FILE", f"'{file}'")
    done = shell(f"{line} | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert file.stat().st_size > 100
    if name.endswith(".csv"):
        shell(line.replace(str(file), str(tmp_path / "read.csv")))
        assert file.read_text() == (tmp_path / "read.csv").read_text()


def test_a_pipe_gets_no_colors_and_no_progress() -> None:
    done = shell("wqk scan ENCODER")
    assert done.returncode == 0
    assert "\x1b" not in done.stdout
    assert done.stderr == ""


def test_demo_says_what_shows_and_draws_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "demo.png"
    run("demo", "--out", str(picture), "--report", str(tmp_path / "demo.html"))
    assert picture.read_bytes().startswith(b"\x89PNG")
    printed = json.loads(run("demo", "--json").stdout)
    assert {row["checkpoint"] for row in printed["rows"]} == {"encoder", "decoder"}


@pytest.mark.parametrize(
    "verb", ["scan", "explain", "verify", "show", "diff", "same", "kin", "watch"]
)
def test_a_shell_completes_paths_for_a_checkpoint(verb: str) -> None:
    from click.shell_completion import BashComplete

    complete = BashComplete(command, {}, "wqk", "_WQK_COMPLETE")
    [completion] = complete.get_completions([verb], "models/be")
    assert (completion.type, completion.value) == ("file", "models/be")


def test_several_checkpoints_share_one_legend_and_only_trained_ones_are_placed(tmp_path):
    for step in (0, 10):
        shutil.copytree(ENCODER, tmp_path / "run" / f"checkpoint-{step}")
    fresh, dice = tmp_path / "run" / "checkpoint-0", np.random.default_rng(0)
    small.edit(fresh, lambda _, tensor: dice.standard_normal(tensor.shape))
    printed = run("scan", str(tmp_path / "run"), width=200).stdout
    assert printed.count("random-looking: as if") == 1
    assert printed.count("\nrank") == 1
    alone = run("scan", str(fresh), width=200).stdout
    assert alone.count("random-looking") >= 4
    assert "\nrank" not in alone


def test_help_of_a_verb_is_what_its_option_prints() -> None:
    assert run("help", "scan").output == run("scan", "--help").output
    assert run("help").output == run("--help").output
