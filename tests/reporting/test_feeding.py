"""The section of a report that shows which heads feed which, and the figure of the same."""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl
import pytest
from tests.command import run

import wqk
from wqk.reporting.pictures import composition_arcs
from wqk.reporting.report import ROWS, feeding_section

MODEL = wqk.demo_model("induction")


@pytest.fixture(scope="module")
def table() -> wqk.CompositionTable:
    return wqk.compose(MODEL)


def test_the_strongest_pairs_are_drawn_and_told(table: wqk.CompositionTable):
    section = feeding_section([table])
    above = table.frame.filter(pl.col("excess") > 0)
    assert 'src="data:image/svg+xml;base64,' in section
    assert section.count("<tr>") == min(ROWS, above.height) + 1
    cells = re.findall(r"<t[hd][^>]*>([^<]*)</t[hd]>", section)
    assert cells[8:15] == ["K", "0.2", "1.2", "0.337", "0.128", "0.209", "34.1"]
    assert feeding_section([]) == ""


def test_its_size_does_not_grow_with_the_table(table: wqk.CompositionTable):
    pair = table.frame.head(1)
    pairs = pl.concat(
        [
            pair.with_columns(
                pl.lit(n % 64).alias("writer_head"), pl.lit(2 + n % 40).alias("reader_layer")
            )
            for n in range(600)
        ]
    )
    assert len(feeding_section([wqk.CompositionTable(pairs)])) < 300_000


def test_names_of_heads_are_read_over_arcs(table: wqk.CompositionTable):
    texts = composition_arcs(table.frame).axes[0].texts
    names = [text for text in texts if text.get_text()]
    arcs = [text for text in texts if not text.get_text()]
    assert len(names) >= 3
    assert min(name.get_zorder() for name in names) > max(arc.get_zorder() for arc in arcs)
    assert all(name.get_path_effects() for name in names)


def test_pairs_by_chance_are_not_drawn(table: wqk.CompositionTable):
    below = table.filter(pl.col("excess") <= 0)
    assert "No pair of heads has a score above chance" in feeding_section([below])


def test_a_report_takes_a_table_of_pairs(table: wqk.CompositionTable, tmp_path: Path):
    table.write(tmp_path / "pairs.parquet")
    scores = wqk.scan(MODEL)
    scores.write(tmp_path / "scores.parquet")
    out, by_call = tmp_path / "report.html", tmp_path / "by-call.html"
    run("report", tmp_path / "scores.parquet", tmp_path / "pairs.parquet", "-o", out)
    wqk.write_report(scores, by_call, compositions=[table])
    for page in (out, by_call):
        assert '<section id="feeding">' in page.read_text(encoding="utf-8")
