"""The file of a report before any browser opens it: numbers, words, and nothing that runs."""

from __future__ import annotations

import base64
import hashlib
import itertools
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests import small
from tests.command import run as run_command
from tests.reporting.making import EVIL, Page, rows, table, training

import wqk
from wqk._style import STACK_COLORS
from wqk.errors import MissingPackage, TableError
from wqk.reporting.summary import groups, short_names
from wqk.tables.details import Details, LayerKey, block_details
from wqk.tables.rendering import SHADES
from wqk.tables.schema import SCHEMA
from wqk.tables.score_table import ScoreTable, read_table

ROOT = Path(__file__).parents[2]
ENCODER = wqk.demo_model("encoder")


@pytest.fixture(autouse=True)
def short_script(monkeypatch):
    """Tests of words and numbers need not read five megabytes of plotly again and again."""
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "/* plotly's place */")


def written(folder: Path, *arguments: Any, **options: Any) -> Page:
    path = folder / "report.html"
    wqk.write_report(*arguments, path, **options)
    return Page(path)


def unpacked(group: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows out of their short form."""

    def cell(column: dict[str, Any], i: int) -> Any:
        if "all" in column:
            return column["all"]
        return column["words"][column["codes"][i]] if "words" in column else column["values"][i]

    unpacked_rows = []
    for i in range(group["count"]):
        unpacked_rows.append({name: cell(column, i) for name, column in group["rows"].items()})
    return unpacked_rows


def test_every_number_of_the_table_is_in_the_file(tmp_path):
    scores = wqk.scan(ENCODER)
    (group,) = written(tmp_path, scores).data["groups"]
    for written_row, row in zip(unpacked(group), scores.frame.iter_rows(named=True), strict=True):
        assert list(written_row) == list(SCHEMA)
        for name, value in row.items():
            if name == "checkpoint":
                value = f"demo:{Path(value).name}"  # without the folders around it
            is_number = isinstance(value, float)
            assert written_row[name] == (pytest.approx(value, rel=1e-5) if is_number else value)


def test_nan_infinity_and_nothing_are_nothing(tmp_path):
    scores = table(rows("a", symmetry=float("nan"), norm=float("inf"), directionality=None))
    (group,) = written(tmp_path, scores).data["groups"]
    for row in unpacked(group):
        assert row["symmetry"] is row["norm"] is row["directionality"] is None


def test_scripts_are_allowed_by_their_hash_alone(tmp_path, monkeypatch):
    monkeypatch.undo()
    page = written(tmp_path, table(rows("a")))
    assert "'unsafe-inline'" not in page.policy.split("style-src")[0]
    assert page.policy.startswith("default-src 'none'; ")
    running = [text for attributes, text in page.scripts if "type" not in attributes]
    assert [len(script) > 1_000_000 for script in running] == [True, False]
    for script in running:
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page.policy


def test_a_script_that_could_end_early_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: "a = '</script>';\r\nb = 1;")
    page = written(tmp_path, table(rows("a")))
    first = next(text for attributes, text in page.scripts if "type" not in attributes)
    assert first == "a = '<\\/script>';\nb = 1;"
    digest = base64.b64encode(hashlib.sha256(first.encode()).digest()).decode()
    assert f"'sha256-{digest}'" in page.policy


def test_nothing_in_the_file_points_elsewhere(tmp_path):
    page = written(tmp_path, table(rows("a")))
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "base")
        for name in ("src", "href", "action"):
            assert attributes.get(name, "#").startswith("#")
        assert not [name for name in attributes if name.startswith("on")]


def test_names_out_of_a_checkpoint_are_text(tmp_path):
    scores = table(
        rows(EVIL, status="partial", revision=EVIL, family=EVIL),
        partial={"encoder": EVIL},
        inferred=[EVIL],
    )
    sound = written(tmp_path, table(rows("a")))
    page = written(tmp_path, scores, title=EVIL)
    assert EVIL in page.text
    assert len(page.scripts) == len(sound.scripts)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in sound.tags} | {"h4", "ul", "li"}
    assert page.data["groups"][0]["rows"]["checkpoint"] == {"all": EVIL}


def test_the_summary_tells_medians_and_quartiles(tmp_path):
    scores = table(rows("owner/name", layers=5), rows("other", layers=5, seed=1))
    text = written(tmp_path, scores).text
    for name in ("owner/name", "other"):
        values = scores.layers.frame.filter(checkpoint=name)["symmetry"]
        low, middle, high = (f"{np.quantile(values, q):.2f}" for q in (0.25, 0.5, 0.75))
        assert f"{middle} {low} to {high}".replace("-", "−") in text
    assert "12.3 M" in text


def test_statuses_are_told_in_words(tmp_path):
    scores = table(
        rows("odd", layers=3, status="ok")[:-6] + rows("odd", layers=3, status="degenerate")[3:6],
        rows("new", status="random-looking"),
        rows("rotary", status="partial", stack="decoder"),
        partial={"decoder": "the norms are outside"},
        inferred=["guessed from q_proj"],
    )
    text = written(tmp_path, scores).text
    assert "odd: the form of layer 1 is degenerate: the form is zero." in text
    assert (
        "new: every layer's form is random-looking: as if the weights had never been trained."
        in text
    )
    assert "rotary: every layer's form is partial: not the model's whole attention score." in text
    assert "partial (decoder): the norms are outside." in text
    assert "guessed from q_proj; check with wqk verify." in text


def test_sides_that_differ_are_both_in_the_summary(tmp_path: Path) -> None:
    sides = {"circuit": "ov", "key_heads": 1, "d_key": 32, "symmetry": None}
    partial = rows("long", layers=14, status="partial") + rows("long", layers=15)[-3:]
    text = written(tmp_path, table(rows("crossed", step=1200, **sides), partial)).text
    assert "bert · encoder self-attention · ov circuit · step 1,200" in text
    assert re.search(r"\b2 over 1 64 × 32\b", text)
    assert "crossed: the two sides have different widths, so there is no symmetry." in text
    assert "long: the two sides" not in text
    listed = ", ".join(map(str, range(12)))
    assert f"long: the form of each of the layers {listed}, … is partial" in text


def test_all_numbers_of_a_report_have_minus_signs(tmp_path: Path) -> None:
    page = written(tmp_path, wqk.scan([ENCODER, small.llama(layers=4)], details=True))
    sentences = [layer["pair"] for layer in page.data["details"] if "pair" in layer]
    assert any("−0." in sentence for sentence in sentences)
    composed = wqk.compose(wqk.demo_model("induction"))
    composition = written(tmp_path, wqk.scan(ENCODER), compositions=[composed])
    for text in (page.text, composition.text, *sentences):
        assert not re.search(r"(?<![\w.-])-\.?\d", text), text


def test_gammas_that_differ_are_told(tmp_path):
    page = written(tmp_path, [table(rows("a"), gamma=2.0), table(rows("b"), gamma=3.0)])
    assert "different gammas (2.0, 3.0)" in page.text
    assert [marker["group"] for marker in page.data["published"]["own"]] == [0]


def test_where_models_stand_among_published_ones(tmp_path):
    scores = wqk.scan(ENCODER)
    page = written(tmp_path, scores)
    assert "more symmetric than 18 of 24 published encoders and 15 of 15 decoders" in page.text
    (marker,) = page.data["published"]["own"]
    assert marker["symmetry"] == pytest.approx(scores.layers.frame["symmetry"].median())
    assert len(page.data["published"]["models"]) >= 30
    folded = ScoreTable(scores.frame, {**scores.metadata, "folded_norms": True})
    assert written(tmp_path, folded).data["published"] is None


def test_how_the_scores_were_made(tmp_path):
    text = written(tmp_path, wqk.scan(ENCODER, gamma=1.5)).text
    for setting in (f"wqk {wqk.__version__}", "gamma 1.5", "folded norms no", "biases no"):
        assert setting in text


def test_the_citation_is_that_of_the_repository():
    cff = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    bib = (ROOT / "src/wqk/reporting/citation.bib").read_text(encoding="utf-8")
    flat = " ".join(bib.split())
    entries = [*re.findall(r'title: "(.*)"', cff), *re.findall(r'url: "(.*)"', cff)]
    entries += re.findall(r"version: ([\d.]+)\n", cff.removeprefix("cff-version: 1.2.0"))
    entries += [name.strip('" ') for name in re.findall(r"family-names: (.*?), given", cff)]
    assert len(entries) == 10
    for entry in entries:
        assert entry in flat
    assert wqk.__version__ in flat


# What belongs together


def test_steps_of_one_model_are_one_group():
    (group,) = groups([training("runs/bert", (10, 20))])
    assert group.label == "runs/bert"
    assert group.latest["step"].unique().to_list() == [20]
    assert group.facts["layer"] == 0


def test_groups_are_told_apart_by_what_differs_but_for_steps():
    parts = [rows("o/m", step=step, revision=f"step{step}") for step in (1, 2)]
    parts += [rows("o/n", revision=revision) for revision in ("main", "v2")]
    parts += [rows("o/p", stack=s, kind=k) for s, k in (("encoder", "self"), ("decoder", "cross"))]
    labels = [group.label for group in groups([table(*parts)])]
    expected = ["o/m", "o/n @ main", "o/n @ v2", "o/p, encoder, self", "o/p, decoder, cross"]
    assert labels == expected


def test_a_row_that_is_given_twice_is_shown_once(tmp_path):
    scores = table(rows("a"))
    (group,) = written(tmp_path, [scores, scores]).data["groups"]
    assert group["count"] == len(scores)


def test_names_are_as_short_as_tells_them_apart():
    names = ["/x/a/bert", "/x/b/bert", "/y/a/bert", "gpt", "owner/gpt", "/", "x/y/z", "x//y/z"]
    short = short_names(names)
    assert len(set(short.values())) == len(names)
    assert short["owner/gpt"] == "owner/gpt"
    assert short["gpt"] == "gpt"


def test_rows_of_heads_alone_are_a_report(tmp_path):
    page = written(tmp_path, table(rows("a")).heads)
    assert page.data["groups"][0]["count"] == 6
    assert page.data["published"] is None


# Details


def block(checkpoint: str, layer: int, d: int = 700, seed: int = 0) -> Any:
    heads = wqk.BilinearForm(*np.random.default_rng(seed).standard_normal((2, 2, 1, d, 3)))
    place = LayerKey(checkpoint, None, None, "encoder", "self", layer, "qk", 0)
    return block_details(place, heads)


def test_details_are_those_of_the_layers_in_the_table(tmp_path):
    places = itertools.product(("a", "b"), range(4))
    details = Details(tuple(block(name, layer, 40) for name, layer in places))
    page = written(tmp_path, table(rows("z"), rows("b")), details=[details, details])
    written_details = page.data["details"]
    assert [(block["group"], block["layer"]) for block in written_details] == [
        (1, 0),
        (1, 1),
        (1, 2),
    ]
    kept = details.blocks[4]
    image = np.frombuffer(base64.b64decode(written_details[0]["image"]), np.int8).reshape(
        written_details[0]["shape"]
    )
    np.testing.assert_array_equal(image, kept.image)
    np.testing.assert_allclose(written_details[0]["row_norms"], kept.row_norms, rtol=1e-5)
    np.testing.assert_allclose(written_details[0]["coupling"], kept.coupling.round(3), atol=1e-6)
    marked = {number for number, _ in written_details[0]["outlying_rows"]}
    assert marked == set(kept.outlying_rows.tolist())


def test_details_of_another_model_are_refused(tmp_path):
    with pytest.raises(TableError, match=r"checkpoints in the tables, a; these are of b;"):
        written(tmp_path, table(rows("a")), details=Details((block("b", 0, 40),)))


def test_long_norms_and_many_images_are_made_smaller_without_losing_peaks(tmp_path, monkeypatch):
    monkeypatch.setattr("wqk.reporting.payload.PIXELS", 3 * 64 * 64)
    kept = block("a", 0)
    kept.row_norms[123] = 1e3
    (written_block,) = written(tmp_path, table(rows("a")), details=Details((kept,))).data["details"]
    assert len(written_block["row_norms"]) == 512
    assert max(written_block["row_norms"]) == 1e3
    assert written_block["shape"] == [110, 110]
    image = np.frombuffer(base64.b64decode(written_block["image"]), np.int8).reshape(110, 110)
    edges = [round(256 * i / 110) for i in range(111)]
    for i, j in ((0, 0), (17, 93), (86, 43), (109, 109)):
        shared = kept.image[edges[i] : edges[i + 1], edges[j] : edges[j + 1]].ravel().tolist()
        assert image[i, j] == max(shared, key=lambda level: (abs(level), level))


# What cannot be written


@pytest.mark.parametrize("count", [0, 1])
def test_a_report_of_nothing(count, tmp_path):
    tables = [ScoreTable.from_rows([])] * count
    with pytest.raises(TableError, match="at least one row"):
        wqk.write_report(tables, tmp_path / "report.html")
    assert not list(tmp_path.iterdir())


def test_without_plotly(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(MissingPackage, match=r"pip install '\.\[report\]'"):
        wqk.write_report(table(rows("a")), tmp_path / "report.html")


def test_one_table_gives_one_file_byte_for_byte(tmp_path):
    for name in ("one.html", "two.html"):
        wqk.write_report(wqk.scan(ENCODER), tmp_path / name)
    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


# The command


@pytest.fixture
def run(tmp_path, monkeypatch):
    """The command, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return run_command


def test_scan_writes_report_and_details_and_report_writes_the_same(run, tmp_path):
    scan = ("scan", ENCODER, "--heads", "--out", "scores.parquet")
    done = run(*scan, "--details", "forms.npz", "--report", "one.html")
    assert "report: one.html" in done.stderr
    again = ("report", "scores.parquet", "--details", "forms.npz", "-o", "two.html")
    run(*again)
    from_scan, from_files = Page(tmp_path / "one.html").data, Page(tmp_path / "two.html").data
    assert from_scan["groups"] == from_files["groups"]
    for exact, rounded in zip(from_scan["details"], from_files["details"], strict=True):
        assert exact["image"] == rounded["image"]


def test_a_report_has_the_heads_that_the_terminal_does_not_show(run, tmp_path):
    done = run("scan", ENCODER, "--report", "r.html", "--out", "s.parquet")
    assert "by head" not in done.stdout
    assert read_table(tmp_path / "s.parquet").heads.frame.height == 0
    (group,) = Page(tmp_path / "r.html").data["groups"]
    assert group["count"] == 4 * (1 + 4)


def test_reports_of_runs_and_surveys(run, tmp_path):
    from wqk.tables.run import create_run

    create_run(tmp_path / "run", {"recipe": {}, "corpus": {}})
    training("run", (5, 10)).write(tmp_path / "run" / "scores.jsonl")
    run("survey", ENCODER, "--out", "survey")
    run("report", "run", "survey", "-o", "r.html", "--title", "Two")
    page = Page(tmp_path / "r.html")
    assert [group["label"] for group in page.data["groups"]] == ["run", "demo:encoder"]
    assert "Two – wqk" in page.text


def test_a_watched_run_is_a_report(run, tmp_path):
    shutil.copytree(ENCODER, tmp_path / "run" / "checkpoint-1")
    run("watch", tmp_path / "run", "--until", "1")
    run("report", tmp_path / "run", "-o", tmp_path / "page.html")
    assert "checkpoint-1" in (tmp_path / "page.html").read_text("utf-8")


def test_the_demo_writes_a_report_with_matrices(run, tmp_path):
    run("demo")
    data = Page(tmp_path / "wqk-demo.html").data
    assert [group["label"] for group in data["groups"]] == ["encoder", "decoder"]
    places = [(block["group"], block["layer"]) for block in data["details"]]
    assert places == list(itertools.product((0, 1), range(4)))


def test_encoders_are_blue_and_decoders_orange_wherever_they_are_drawn():
    style = (ROOT / "src/wqk/reporting/page.css").read_text()
    for kind, color in {"encoder": "#0072B2", "decoder": "#D55E00"}.items():  # Okabe and Ito's
        assert {STACK_COLORS[kind], SHADES[kind][0]} == {color}
        assert f"--{kind}-0: light-dark({color.lower()}, " in style


def test_a_report_has_no_local_folders(tmp_path):
    names = [str(tmp_path / "home & <ada>" / name) for name in ("one", "runs/two")]
    table = wqk.scan(wqk.demo_model("encoder"), heads=False)
    notes = {"notes": [f"{names[0]}: guessed"]}
    tables = []
    for name in names:
        frame = table.frame.with_columns(pl.lit(name).alias("checkpoint"))
        tables.append(ScoreTable(frame, {**table.metadata, **notes}))
    page = wqk.report(tables, tmp_path / "report.html").path.read_text("utf-8")
    assert str(tmp_path) not in page
    assert "ada" not in page
    assert '"all":"runs/two"' in page
    assert "one: guessed" in page


@pytest.mark.parametrize("name", ["/model", "/2/model"])
def test_scripts_are_whole_wherever_the_checkpoint_lies(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = "// see https://host.org/2/page"
    monkeypatch.setattr("plotly.offline.get_plotlyjs", lambda: script)
    page = wqk.report(table(rows(name)), tmp_path / "report.html").path.read_text("utf-8")
    assert script in page
