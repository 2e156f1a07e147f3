"""``wqk lab figure``: files, numbers, tables, and errors in one line."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from tests.command import refuse, run
from tests.lab.figures.making import make_run, row, table

from wqk.reporting.demo import demo_table
from wqk.tables.details import Details
from wqk_lab.cli.figure import FIGURES as NAMES
from wqk_lab.cli.figure import _with_package_models
from wqk_lab.figures import FIGURES, draw, read_sources

wqk = partial(run, "lab", "figure")


def test_the_command_knows_the_figures() -> None:
    assert set(NAMES) == set(FIGURES)


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("figur2", "did you mean 'fig2'?"),
        ("Figuer S3", "did you mean 's3'?"),
        ("tabel-s2", "did you mean 'tableS2'?"),
        ("distance", "did you mean 'distances'?"),
        ("fig9", "figures are fig2, fig3, s1"),
    ],
)
def test_an_unknown_name_is_answered_with_one_line(name: str, advice: str) -> None:
    line = refuse("lab", "figure", name)
    assert line.startswith(f"wqk: {name}: no such figure or table; {advice}")
    assert ("tables are table1, tableS2, tableS3" in line) == (name == "fig9")


@pytest.mark.parametrize(
    ("ending", "head"), [("png", b"\x89PNG"), ("pdf", b"%PDF"), ("svg", b"<?xml")]
)
def test_pictures_by_their_endings(ending: str, head: bytes, tmp_path: Path) -> None:
    out = tmp_path / f"heads.{ending}"
    assert wqk("heads", "--out", out).stderr.strip() == f"heads: {out}"
    assert out.read_bytes().startswith(head)
    assert [path.name for path in tmp_path.iterdir()] == [out.name]


def test_the_default_is_a_pdf_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for mode in ("encoder", "decoder"):
        make_run(tmp_path / mode, mode=mode)
    wqk("fig3", "--from", "encoder", "decoder")
    assert (tmp_path / "fig3.pdf").is_file()


def test_numbers_as_csv_and_json(tmp_path: Path) -> None:
    table(row(0, checkpoint="mine", symmetry=0.25)).write(tmp_path / "own.parquet")
    wqk("fig2", tmp_path / "own.parquet", "--out", tmp_path / "x.csv")
    lines = (tmp_path / "x.csv").read_text().splitlines()
    assert lines[0].startswith("source,name,model,stack")
    assert "own,mine,mine,encoder,,1000000,0.25" in lines[-1]
    rows = json.loads(wqk("fig2", "--from", tmp_path / "own.parquet", "--json").stdout)["rows"]
    assert rows[-1]["name"] == "mine"
    assert len(rows) == len(lines) - 1


def test_the_size_of_a_model_is_given_on_the_command_line(tmp_path: Path) -> None:
    scores, out = tmp_path / "own.csv", tmp_path / "fig2.csv"
    table(row(0, checkpoint="models/my bert", parameters=None)).write(scores)
    refused = refuse("lab", "figure", "fig2", scores)
    assert "my bert: no number of parameters in the table; give its size: --parameters" in refused
    assert "--parameters 'my bert'=N, in Python Sources(..., parameters={" in refused
    for size, number in (("109482240", 109_482_240), ("109.5M", 109_500_000), ("1e3", 1000)):
        done = wqk("fig2", scores, "--parameters", f"my bert={size}", "--out", out)
        assert done.stderr.strip() == f"fig2: {out}"
        assert f"own,my bert,models/my bert,encoder,,{number},0.1" in out.read_text()
    for wrong in ("my bert", "my bert=", "=5", "my bert=many", "my bert=-5", "my bert=0", "a=1e99"):
        usage = run("lab", "figure", "fig2", scores, "--parameters", wrong, exits=2).stderr
        assert "such as bert-base-uncased=109M, got" in usage
    assert "fig2, s1, s2; got heads" in refuse(
        "lab", "figure", "heads", scores, "--parameters", "a=1"
    )
    usage = run("lab", "figure", "tableS2", scores, "--parameters", "a=1", exits=2).stderr
    assert "--parameters is for fig2, s1 and s2; got tableS2" in usage
    refused = refuse("lab", "figure", "fig2", "--parameters", "a=1")
    assert "parameters of a: no such checkpoint in the table; there are: none" in refused


def test_figure_2_has_matrices_next_to_own_scores(tmp_path: Path) -> None:
    scores, details = tmp_path / "own.parquet", tmp_path / "own.npz"
    table(row(0, checkpoint="mine")).write(scores)
    demo_details = demo_table().details
    assert demo_details is not None
    Details(demo_details.blocks[:1]).write(details)

    def panels(*sources: Path) -> list[str]:
        """The titles of the figure's matrices."""
        drawn = _with_package_models(FIGURES["fig2"], read_sources(*sources))
        titles = [axis.get_title(loc="left") for axis in draw("fig2", drawn).axes]
        return [title for title in titles if "layer" in title]

    assert panels() == ["encoder, layer 0", "decoder, layer 3"]
    assert panels(scores) == ["demo:encoder, layer 0", "demo:decoder, layer 3"]
    assert panels(scores, details) == ["encoder, layer 0"]


def test_tables_go_to_the_terminal_or_a_file(tmp_path: Path) -> None:
    printed = wqk("tableS3")
    assert "| BERT-tiny | −0.79 |" in printed.stdout
    written = wqk("tableS3", "--out", tmp_path / "s3.tex")
    assert written.stderr.strip() == f"tableS3: {tmp_path / 's3.tex'}"
    assert r"\begin{tabular}" in (tmp_path / "s3.tex").read_text()


def test_several_files_in_one_run(tmp_path: Path) -> None:
    scores = tmp_path / "own.parquet"
    table(row(0, checkpoint="google-bert/bert-base-uncased"), row(0, checkpoint="mine")).write(
        scores
    )
    outs = ["--out", tmp_path / "s2.tex", "--out", tmp_path / "s2.md"]
    written = wqk("tableS2", scores, *outs, "--only-own").stderr.splitlines()
    assert written == [f"tableS2: {tmp_path / name}" for name in ("s2.tex", "s2.md")]
    assert r"\begin{tabular}" in (tmp_path / "s2.tex").read_text()
    lines = [line for line in (tmp_path / "s2.md").read_text().splitlines() if line[:1] == "|"]
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["BERT-base", "mine (encoder)"]
    assert "| 0.51 |" in lines[2]
    assert "| 0.10 |" in lines[2]
    wqk("heads", "--out", tmp_path / "x.png", "--out", tmp_path / "x.csv")
    assert {path.name for path in tmp_path.glob("x.*")} == {"x.png", "x.csv"}
    refused = wqk("fig3", "--only-own", exits=2)
    assert "--only-own is for tableS2 and tableS3" in refused.stderr
    assert "expected a score table" in refuse("lab", "figure", "tableS2", "--only-own")


def test_checkpoints_that_a_table_leaves_out_are_named(tmp_path: Path) -> None:
    scores = tmp_path / "own.parquet"
    table(row(0, checkpoint="a/mine"), row(0, checkpoint="b/other", kind="cross")).write(scores)
    done = wqk("tableS2", scores, "--out", tmp_path / "s2.md")
    assert "| mine (encoder) | 0.10 |" in (tmp_path / "s2.md").read_text()
    named, written = done.stderr.strip().splitlines()
    assert named == "not in the table, other: no scores of plain self-attention"
    assert written == f"tableS2: {tmp_path / 's2.md'}"


def test_the_papers_runs_below_ones_own(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / mode, mode=mode) for mode in ("encoder", "decoder")]
    folders = [str(run.folder) for run in runs]
    printed = wqk("s3", *folders, "--published", "--json")
    rows = {row["comparison"] for row in json.loads(printed.stdout)["rows"]}
    assert rows == {"wikipedia", "published: Jigsaw, 12-layer", "published: Red Pajama, 12-layer"}
    wqk("s4", *folders, "--published", "--out", tmp_path / "s4.png")
    refused = refuse("lab", "figure", "fig3", *folders, "--published")
    assert "--published draws the paper's runs below yours in s3 and s4" in refused
