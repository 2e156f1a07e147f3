"""`wqk scan --fail-if`: the exit status for a condition on the rows of the table."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tests import small
from tests.command import ENCODER, run, shell

import wqk
from wqk.tables.columns import MEASURES, Measure

CONDITION = "score_ceiling_any_distance > 50000"
LINE = ("--heads", "--ceiling", "--fail-if", CONDITION)


def enlarge_one_head(name: str, tensor: np.ndarray) -> np.ndarray:
    """Multiply the queries of head 2 of layer 1 by 100."""
    if name == "model.layers.1.self_attn.q_proj.weight":
        tensor = tensor.copy()
        tensor[12:18] *= 100
    return tensor


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return small.save_model(tmp_path / "good", small.llama(norms=True))


@pytest.fixture
def scaled(tmp_path: Path) -> Path:
    folder = small.save_model(tmp_path / "scaled", small.llama(norms=True))
    return small.edit(folder, enlarge_one_head)


def test_a_row_with_the_condition_gives_status_1(scaled: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    done = run("scan", scaled, *LINE, "-o", file, exits=1)
    line = f"wqk: 2 rows have the condition {CONDITION}: layer 1 (51337), head 1.2 (51337)"
    assert line in done.stderr.splitlines()
    assert len(wqk.read_table(file)) == 10
    assert done.stdout == run("scan", scaled, *LINE[:2]).stdout
    assert line in run("scan", scaled, *LINE, "--top", "1", exits=1).stderr.splitlines()


def test_no_row_with_the_condition_gives_status_0(good: Path) -> None:
    assert "condition" not in run("scan", good, *LINE).stderr


def test_rows_of_heads_count_only_if_they_are_in_the_table(scaled: Path) -> None:
    of_heads = "symmetry_null > 0 and head >= 0"
    line = ("scan", scaled, "--fail-if", of_heads)
    assert "no row has a value for the condition" in run(*line, exits=2).stderr
    assert "8 rows have the condition" in run(*line, "--heads", exits=1).stderr
    message = run(*line, "--head", "3", exits=1).stderr
    assert f"2 rows have the condition {of_heads}: head 0.3 (0.0261), head 1.3 (0.0426)" in message
    run(*line, "--heads", "--where", "layer > 5")


def test_several_checkpoints_are_named(scaled: Path, good: Path, tmp_path: Path) -> None:
    done = run("scan", good, scaled, *LINE, exits=1)
    assert f"{CONDITION}: layer 1 of scaled (51337), head 1.2 of scaled (51337)\n" in done.stderr
    done = run("scan", scaled, tmp_path / "missing", *LINE, exits=2)
    assert "2 rows have the condition" in done.stderr
    assert "1 of 2 checkpoints failed" in done.stderr


def test_a_missing_checkpoint_gives_status_2(tmp_path: Path) -> None:
    assert "missing" in run("scan", tmp_path / "missing", *LINE, exits=2).stderr


@pytest.mark.parametrize(
    ("condition", "message"),
    [
        ("symetry > 0", "no column 'symetry'; did you mean 'symmetry'?"),
        ("symmetry >", "is no condition; expected one such as"),
    ],
)
@pytest.mark.parametrize("option", ["--where", "--fail-if"])
def test_a_condition_that_is_not_valid_is_refused_before_the_scan(
    good: Path, tmp_path: Path, option: str, condition: str, message: str
) -> None:
    file = tmp_path / "scores.csv"
    done = run("scan", good, option, condition, "-o", file, exits=2)
    assert f"{option}: {condition}: " in done.stderr
    assert message in done.stderr
    assert not done.stdout
    assert not file.exists()


def test_a_condition_without_values_gives_status_2(good: Path, tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    line = ("scan", good, "--fail-if", "window = '3 back'", "-o", file)
    assert "no row has a value for the condition" in run(*line, exits=2).stderr
    assert file.is_file()


@pytest.mark.parametrize("option", ["--where", "--fail-if"])
def test_a_requested_measure_that_no_layer_has_is_no_unknown_column(option: str) -> None:
    line = ("scan", ENCODER, "--ceiling", option, "score_ceiling > 1")
    done = run(*line, exits=2 if option == "--fail-if" else 0)
    assert "no column" not in done.stderr
    assert "no row has" in done.stderr + done.stdout


def test_values_of_several_columns_are_named(good: Path) -> None:
    condition = "status != 'ok' or symmetry > 2"
    done = run("scan", good, "--fail-if", condition, exits=1)
    assert "layer 0 (status random-looking, symmetry " in done.stderr


def test_columns_are_chosen_in_a_file_of_csv_too(tmp_path: Path) -> None:
    file = tmp_path / "scores.csv"
    line = ("scan", ENCODER, "--columns", "symmetry,layer")
    run(*line, "-o", file)
    assert file.read_text(encoding="utf-8") == run(*line, "--csv").stdout
    assert file.read_text(encoding="utf-8").splitlines()[0] == "symmetry,layer"
    refused = run(*line, "-o", tmp_path / "scores.parquet", exits=2)
    assert "add --csv, or --out FILE.csv, FILE.md or FILE.tex" in refused.stderr


@pytest.mark.parametrize("line", [("--sort", "symetry"), ("--csv", "--columns", "layer,symetry")])
def test_unknown_columns_are_refused_before_a_checkpoint_is_opened(
    tmp_path: Path, line: tuple[str, ...]
) -> None:
    done = run("scan", tmp_path / "missing", *line, exits=2)
    assert "no column 'symetry'; did you mean 'symmetry'?" in done.stderr


@pytest.mark.parametrize("measure", [measure for measure in MEASURES if measure.help])
def test_columns_known_before_a_scan_are_those_of_its_table(measure: Measure) -> None:
    columns = wqk.scan(ENCODER, measures=[measure.name]).frame.columns
    line = ("scan", ENCODER, f"--{measure.name}", "--csv", "--columns", ",".join(columns))
    assert run(*line).stdout.splitlines()[0] == ",".join(columns)


def test_rows_at_several_distances_are_told_apart(scaled: Path) -> None:
    line = ("scan", scaled, "--distance", "0,3", "--fail-if", "layer == 1")
    assert "layer 1 at distance 0, layer 1 at distance 3" in run(*line, exits=1).stderr


@pytest.mark.parametrize(("condition", "status"), [("symmetry > 0.9", 1), ("symmetry > 2", 0)])
def test_the_status_is_that_of_the_condition_although_nobody_reads_the_output(
    condition: str, status: int
) -> None:
    done = shell(f"wqk scan ENCODER --fail-if '{condition}' | true; exit ${{PIPESTATUS[0]}}")
    assert done.returncode == status
