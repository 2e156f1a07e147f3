"""Options change what a command prints, one at a time."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests import small
from tests.command import ENCODER, run

import wqk
from wqk.tables.schema import STATUSES

DECODER, INDUCTION = (str(wqk.demo_model(name)) for name in ("decoder", "induction"))
SHOWN = [
    ("scan ENCODER --spectrum", "effective rank"),
    ("scan DECODER --ceiling", "No ceiling (decoder)"),
    ("verify ENCODER --csv", "stack,kind,layer,application,difference"),
    ("scan ENCODER --csv", "checkpoint,revision,step,model_type"),
    ("demo --csv", "checkpoint,revision,step,model_type"),
    ("survey ENCODER --out scores --csv", "checkpoint,revision,step,model_type"),
    ("explain ENCODER --csv", "stack,kind,layers,role,tensor"),
    ("show ENCODER --layer 0 --csv", "place,row_norms,column_norms"),
    ("compose INDUCTION --csv", "checkpoint,revision,step,kind,writer_stack"),
    ("diff ENCODER ENCODER --csv", "reference,reference_revision,reference_step"),
    ("same ENCODER ENCODER --csv", "stack,kind,layer,same,distance"),
    ("kin ENCODER ENCODER --csv", "stack,layer,reference_stack,reference_layer"),
    ("lab atlas --modality vision --json", '"modality": "vision"'),
]


@pytest.mark.parametrize(("line", "text"), SHOWN, ids=[line for line, _ in SHOWN])
def test_an_option_changes_what_is_printed(line, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    models = {"ENCODER": ENCODER, "DECODER": DECODER, "INDUCTION": INDUCTION}
    arguments = [models.get(word, word) for word in line.split()]
    assert text in run(*arguments, width=120).stdout


def test_heads_are_sorted_alone_and_layers_alone() -> None:
    scores = wqk.scan(ENCODER).frame.sort("symmetry", descending=True)
    for options, rows in (
        (["--heads"], scores.filter(scores["head"].is_not_null())),
        ([], scores.filter(scores["head"].is_null())),
    ):
        shown = run("scan", ENCODER, "--sort", "symmetry", "--top", 3, *options).stdout
        _, _, *lines = shown.splitlines()
        assert [float(line.split()[1 + len(options)]) for line in lines] == pytest.approx(
            rows["symmetry"].to_list()[:3], rel=5e-3
        )


def test_a_minus_in_front_of_a_column_puts_its_smallest_values_first(tmp_path: Path) -> None:
    heads = wqk.scan(ENCODER).heads.frame.sort("symmetry")["symmetry"].to_list()
    line = ["scan", ENCODER, "--heads", "--sort", "-symmetry", "--top", "3"]
    shown = [float(row.split()[2]) for row in run(*line).stdout.splitlines()[2:]]
    assert shown == pytest.approx(heads[:3], rel=5e-3)
    csv = run(*line, "--csv", "--columns", "layer,head,symmetry").stdout
    assert [float(row.split(",")[2]) for row in csv.splitlines()[1:]] == pytest.approx(heads[:3])
    run(*line, "--out", tmp_path / "scores.csv")
    assert wqk.read_table(tmp_path / "scores.csv")["symmetry"].to_list() == heads[:3]
    layers = run("scan", ENCODER, "--sort=-symmetry", "--columns", "symmetry", "--csv").stdout
    values = [float(row) for row in layers.splitlines()[1:]]
    assert values == sorted(values)
    message = run("scan", ENCODER, "--sort", "-symetry", exits=2).stderr
    assert "no column 'symetry'; did you mean 'symmetry'?" in message
    message = run("scan", ENCODER, "--sort", "xyzzy", exits=2).stderr
    assert "a minus in front, such as -symmetry, puts the smallest values first" in message
    with pytest.raises(wqk.errors.TableError, match="smallest values first, descending=True"):
        wqk.scan(ENCODER).sort("-symmetry")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--sort head", "these are rows of layers; --heads adds a row for each head"),
        ("--sort key_head --csv", "these are rows of layers; --heads adds a row for each head"),
        ("--sort window", "the column is empty"),
        ("--sort symmetry_within_heads --heads", "only rows of layers have it; leave out --heads"),
        ("--sort head --heads", ""),
        ("--sort layer", ""),
        ("--sort symmetry --where symmetry>2", ""),
    ],
)
def test_a_column_that_sorts_no_rows_has_a_reason(options: str, reason: str) -> None:
    message = run("scan", ENCODER, *options.split()).stderr
    assert ("not sorted by" in message) == bool(reason)
    assert reason in message


def test_a_condition_on_heads_that_only_layers_face_names_the_option() -> None:
    advice = "these are rows of layers; --heads adds a row for each head"
    line = ["scan", ENCODER, "--where"]
    assert advice in " ".join(run(*line, "head > 0").stdout.split())
    assert "--heads" not in run(*line, "symmetry > 2").stdout
    assert "--heads" not in run(*line, "head > 9", "--heads").stdout


def test_bands_of_a_rotary_model_are_printed_at_each_distance(tmp_path: Path) -> None:
    folder = small.save_model(tmp_path / "rotary", small.llama())
    shown = run("scan", folder, "--bands", "--distance", "0,5", width=160).stdout
    expected = wqk.scan(folder, measures=["bands"], distances=(0, 5)).layers.frame
    shares = [f"{share:.3g}" for share in expected["rotary_low_share"]]
    assert all(share in shown for share in shares), shown


def test_a_picture_of_several_distances_names_the_one_that_it_shows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = small.save_model(tmp_path / "rotary", small.llama())
    picture, table, curve = (tmp_path / name for name in ("a.svg", "my scores.csv", "b.svg"))
    messages = run("scan", folder, "--distance", "2:4", "--picture", picture, "-o", table).stderr
    line = f"picture: {picture}, at distance 2; over all distances: "
    assert f"{line}wqk lab figure distances '{table}'\n" in messages
    assert (
        f"{line}wqk lab figure distances '{table}'\n"
        in run("report", table, "--picture", picture).stderr
    )
    run("lab", "figure", "distances", table, "--out", curve)
    assert curve.is_file()
    without_table = run("scan", folder, "--distance", "0,5", "--picture", picture).stderr
    assert "at distance 0; over all distances: wqk lab figure distances FILE" in without_table
    assert f"picture: {picture}\n" in run("scan", folder, "--picture", picture).stderr
    assert "wqk lab figure distances FILE" in " ".join(run("scan", "--help").stdout.split())


def test_a_report_has_a_name_by_default(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wqk.scan(ENCODER).write("scores.parquet")
    assert "report: report.html" in run("report", "scores.parquet").stderr
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_report_without_a_name_replaces_no_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wqk.scan(ENCODER).write("scores.parquet")
    (tmp_path / "report.html").write_text("mine")
    message = run("report", "scores.parquet", exits=2).stderr
    assert "report.html: already exists; -o report.html replaces it" in message
    assert (tmp_path / "report.html").read_text() == "mine"
    run("report", "scores.parquet", "-o", "report.html")
    assert (tmp_path / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_atlas_leaves_out_rows_whose_numbers_are_doubted() -> None:
    all_rows, sound = (
        run("lab", "atlas", *options, width=160).stdout for options in ([], ["--sound"])
    )
    assert 0 < sound.count("\n") < all_rows.count("\n")


def test_scores_of_several_distances_name_the_one_that_they_are_at(tmp_path: Path) -> None:
    folder = small.save_model(tmp_path / "rotary", small.llama())
    several = run("scan", folder, "--distance", "2:3", width=100).stdout
    lines = several.splitlines()
    table = next(number for number, line in enumerate(lines) if line.startswith(" layer"))
    assert lines[table - 1] == "distance 2"
    assert "\nmedian symmetry at distance 2: " in several
    single = run("scan", folder, "--distance", "2", width=100).stdout
    assert "\ndistance 2\n" not in single
    assert "\nmedian symmetry: " in single
    other = small.save_model(tmp_path / "other", small.llama(seed=1))
    overview = run("scan", folder, other, "--distance", "2:3", width=100).stdout
    rows = re.findall(r"^ (?:rotary|other) +(\d) +decoder", overview, re.M)
    assert rows == ["2", "3", "2", "3"]


def test_tables_for_people_contain_the_values_by_chance(tmp_path: Path) -> None:
    table, latex = tmp_path / "scores.md", tmp_path / "scores.tex"
    screen = run("scan", ENCODER, "--spectrum", "-o", table, "-o", latex, width=160).stdout
    row = next(line for line in screen.splitlines() if re.match(r" +0 .*\(.*\(.*\(", line))
    for cell in re.findall(r"\S+ \(\S+\)", row):
        assert f" {cell} " in table.read_text("utf-8")
        assert f" {cell} " in latex.read_text("utf-8")
    assert "in parentheses: the same of factors with independent entries" in table.read_text(
        "utf-8"
    )
    plain = run("scan", ENCODER, "-o", "-.md").stdout
    assert "in parentheses" not in plain


def test_columns_are_chosen_in_markdown_and_latex() -> None:
    names = "layer,directionality_excess,effective_rank,effective_rank_null,stack"
    line = ["scan", ENCODER, "--spectrum", "--columns", names, "--layers", "0", "-o"]
    markdown = run(*line, "-.md").stdout.splitlines()
    heading = (
        r"| layer | directionality (excess) | effective rank | effective\_rank\_null | stack |"
    )
    assert markdown[2] == heading
    assert markdown[4] == "| 0 | -0.329 | 11.8 | 85 | encoder |"
    latex = run(*line, "-.tex").stdout
    assert r"layer & $d$ (excess) & effective rank & effective\_rank\_null & stack \\" in latex


def test_pairs_in_markdown_have_distinct_headings_and_small_probabilities() -> None:
    lines = run("compose", INDUCTION, "--kind", "k", "-o", "-.md").stdout.splitlines()
    headings = [heading.strip() for heading in lines[2].strip("|").split("|")]
    assert len(set(headings)) == len(headings)
    assert {"writer head", "reader head", "p"} < {*headings}
    assert lines[4].endswith("| 2e-48 |")


def test_the_help_of_a_scan_lists_every_status_of_a_scan() -> None:
    shown = run("scan", "--help").stdout
    for status in ("ok", *STATUSES):
        assert (f"\n    {status} " in shown) == (status != "unmoved")  # a status of differences


def test_the_report_of_a_scan_has_a_heading(tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    run("scan", ENCODER, "--layers", "0", "--report", report, "--title", "One layer of it")
    assert "<title>One layer of it" in report.read_text("utf-8")
    assert "add --report FILE.html" in run("scan", ENCODER, "--title", "x", exits=2).stderr
