"""Objects as a notebook shows them: small, escaped, without scripts."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path

from tests import small
from tests.reporting.making import EVIL, rows, table

import wqk


def test_a_table_shows_its_layers():
    scores = wqk.scan(wqk.demo_model("encoder"))
    shown = scores._repr_html_()
    assert shown.count("<table") == 1 + 2  # the layers, and the heads of each score
    for value in scores.layers.frame["symmetry"]:
        assert f"{value:.3f}" in shown


def test_names_are_escaped():
    shown = table(rows(EVIL), rows("plain"))._repr_html_()
    assert "<script" not in shown
    assert shown.count("<img") == shown.count("<img alt") == 1  # the picture
    assert "&lt;/script&gt;" in shown


def test_a_report_is_its_own_page(tmp_path):
    report = wqk.report(table(rows(EVIL)), tmp_path / "r.html")
    assert Path(report).read_text("utf-8").startswith("<!doctype html>")
    (frame,) = re.findall(r'<iframe srcdoc="([^"]*)"[^>]*></iframe>', report._repr_html_())
    assert unescape(frame) == Path(report).read_text("utf-8")
    shown = "".join(repr(report).split())  # a long path may break
    assert re.fullmatch(r".*r\.html\(\d\.\dMB\)", shown)
    assert "parameters stored" in unescape(frame)


def test_numbers_are_not_broken_and_a_repair_is_code():
    reference, candidate = small.llama(sides="qkvo"), small.llama(sides="qkvo")
    candidate._arrays["model.layers.1.self_attn.q_proj.weight"] *= 2
    shown = wqk.same(reference, candidate)._repr_html_()
    assert 'style="text-align: right; white-space: nowrap"' in shown
    assert re.search("<code>.*q_proj.*</code>", shown)


def test_attention_says_what_it_is():
    attention = wqk.open(wqk.demo_model("decoder"))[2]
    shown = attention._repr_html_()
    for phrase in (
        "decoder self, layer 2",
        "4 over 4 key heads, of width 32",
        "128 × 128, rank 128",
    ):
        assert phrase in shown
    assert repr(attention.form) == "BilinearForm(128 × 128, rank 128)"
