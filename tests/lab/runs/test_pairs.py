"""Pairs as data, and what is measured of an update, against dense products."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from tests.command import run
from tests.small import sizes
from tests.stand_in import Module

import wqk
from wqk._console import size
from wqk.errors import CheckpointError, TableError
from wqk_lab.runs import pairs as room
from wqk_lab.runs.pairs import (
    Pair,
    bytes_to_read,
    pairs,
    read_pairs,
    span_shares,
    survey_pairs,
    update_rows,
)

CONFIG = sizes(32, 1, 4, model_type="llama", num_key_value_heads=2, head_dim=8)
QUERY, KEY = (f"model.layers.0.self_attn.{side}_proj.weight" for side in "qk")
DICE = np.random.default_rng(0)
OLD = {QUERY: DICE.normal(size=(32, 32)), KEY: DICE.normal(size=(16, 32))}


def block(**changes: np.ndarray) -> Any:
    return wqk.open(Module({QUERY: OLD[QUERY], KEY: OLD[KEY], **changes}, CONFIG))[0]


def test_shares_in_the_span_are_those_of_dense_projections() -> None:
    new = {name: value + 0.1 * DICE.normal(size=value.shape) for name, value in OLD.items()}
    shares = span_shares(block(), block(**new))
    inside, total = [], []
    for head in range(4):
        rows, group = slice(8 * head, 8 * head + 8), slice(8 * (head // 2), 8 * (head // 2) + 8)
        a, b = OLD[QUERY][rows].T, OLD[KEY][group].T
        step = new[QUERY][rows].T @ new[KEY][group] - a @ b.T
        onto_a, onto_b = (side @ np.linalg.pinv(side) for side in (a, b))
        inside.append(np.square(onto_a @ step @ onto_b).sum())
        total.append(np.square(step).sum())
    expected = [sum(inside) / sum(total), *np.divide(inside, total)]
    np.testing.assert_allclose(shares, expected, rtol=1e-6)


def test_a_rescaled_form_stays_in_its_span_and_an_equal_one_has_none() -> None:
    np.testing.assert_allclose(span_shares(block(), block(**{QUERY: 1.5 * OLD[QUERY]})), 1)
    assert np.isnan(span_shares(block(), block())).all()


def test_every_pair_is_another_and_says_what_is_expected_of_it() -> None:
    titles = [pair.title for pair in pairs()]
    assert isinstance(pairs(), tuple)
    assert len(titles) == len(set(titles)) == len({pair.key for pair in pairs()})
    for pair in pairs():
        allowed = {"twins": {1}, "converted": {1, -1}, "contrast": {None}, "control": {0}}
        assert pair.expected in allowed[pair.relation], pair.title
        assert pair.bytes_after >= pair.bytes_before > 0
        assert pair.differs
    assert bytes_to_read(pairs()) < sum(p.bytes_before + p.bytes_after for p in pairs())


def test_a_dry_run_lists_pairs_and_bytes_and_reads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "open_model", None)
    result = run("lab", "pairs", "--dry-run", width=200)
    for pair in pairs():
        assert pair.title in result.output
    assert "unchecked" in result.output
    assert "44 pairs, 32 GB of queries and keys, estimated" in result.output


def demo_pairs() -> list[Pair]:
    encoder, decoder = (str(wqk.demo_model(name)) for name in ("encoder", "decoder"))
    return [
        Pair("demo", "control", encoder, encoder, expected=0),
        Pair("demo", "converted", decoder, encoder, expected=1),
        Pair("demo", "converted", decoder, "/nowhere", expected=1),
        Pair("demo", "contrast", decoder, encoder, after_stack="vision"),
    ]


def test_a_survey_resumes_and_keeps_the_reasons_of_what_is_missing(tmp_path, monkeypatch):
    with ThreadPoolExecutor(1) as executor:
        first = survey_pairs(tmp_path, demo_pairs(), executor=executor, heads=False)
        # Nothing is measured twice.
        monkeypatch.setattr(room, "update_rows", None)
        read = [pair for pair in demo_pairs() if pair.title not in first.problems]
        again = survey_pairs(tmp_path, read, executor=executor, heads=False)
    assert len(first.problems) == 2
    assert any("no vision self-attention" in reason for reason in first.problems.values())
    assert again.problems == {}
    assert again.updates.equals(first.updates)
    assert first.updates.filter(pair=demo_pairs()[0].title)["moved"].to_list() == [0.0] * 4
    assert read_pairs(tmp_path).pairs == tuple(read)


def test_the_command_reports_what_it_skipped(tmp_path, monkeypatch):
    monkeypatch.setattr(room, "pairs", lambda: tuple(demo_pairs()[:3]))
    result = run("lab", "pairs", "--out", tmp_path, "--jobs", 1, width=300, exits=1)
    for phrase in ("skipped: ", "2 of 3 pairs", f"wqk lab figure pairs {tmp_path}"):
        assert phrase in result.output


def test_models_that_do_not_fit_are_refused_in_a_line(tmp_path: Path) -> None:
    unrelated = Module({QUERY: np.zeros((32, 32)), KEY: np.zeros((16, 32))}, CONFIG)
    demo = str(wqk.demo_model("encoder"))
    with pytest.raises(CheckpointError, match="cannot be compared: 1 layers and 4"):
        update_rows(Pair("demo", "converted", unrelated, demo))  # type: ignore[arg-type]
    (tmp_path / "pairs.json").write_text("[{}]")
    with pytest.raises(TableError, match="damaged"):
        read_pairs(tmp_path)


def test_columns_of_an_update_are_those_of_dense_matrices() -> None:
    """Compare the layer, and each of four heads, which share two keys."""
    new = {name: value + 0.1 * DICE.normal(size=value.shape) for name, value in OLD.items()}
    before, after = Module(OLD, CONFIG), Module(new, CONFIG)
    pair = Pair("r", "converted", before, after)  # type: ignore[arg-type]
    rows = update_rows(pair, gamma=1.5)
    assert rows["head"].to_list() == [None, 0, 1, 2, 3]
    assert update_rows(pair, 1.5, heads=False).equals(rows[:1])
    assert update_rows(pair).equals(update_rows(pair, gamma=2.0))
    assert not update_rows(pair).equals(rows)

    def forms(weights: dict[str, np.ndarray]) -> list[np.ndarray]:
        each = []
        for head in range(4):
            query = weights[QUERY][8 * head : 8 * head + 8]
            key = weights[KEY][8 * (head // 2) : 8 * (head // 2) + 8]
            each.append(query.T @ key)
        return [np.sum(each, axis=0), *each]

    shares = span_shares(block(), block(**new))
    dense = zip(forms(OLD), forms(new), shares, strict=True)
    for row, (first, last, share) in zip(rows.to_dicts(), dense, strict=True):
        change = last - first
        assert row["norm"] == pytest.approx(np.linalg.norm(first), rel=1e-5)
        moved = np.linalg.norm(change) / np.linalg.norm(first)
        assert row["moved"] == pytest.approx(moved, rel=1e-5)
        cosine = (first * last).sum() / np.linalg.norm(first) / np.linalg.norm(last)
        assert row["cosine"] == pytest.approx(cosine, rel=1e-5)
        symmetry = (change * change.T).sum() / (change**2).sum()
        assert row["symmetry"] == pytest.approx(symmetry, abs=1e-5)
        null = np.diag(change) @ np.diag(change) / (change**2).sum()
        assert row["symmetry_null"] == pytest.approx(null, abs=1e-5)
        form = wqk.BilinearForm(change, np.eye(32))
        excess = float(wqk.directionality(form, gamma=1.5, weight="excess"))
        assert row["directionality_excess"] == pytest.approx(excess, abs=1e-5)
        assert row["span"] == pytest.approx(share)
        assert row["span_chance"] == 8 / 32
        assert row["layer"] == 0


def test_a_dry_run_has_a_row_for_each_pair() -> None:
    result = run("lab", "pairs", "--dry-run", width=250)
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    signs = {1: "+", -1: "−", 0: "exactly 0", None: "–"}
    for pair in pairs():
        amount = size(pair.bytes_before + pair.bytes_after)
        name = "" if pair.checked else " unchecked"
        cells = (pair.title, pair.recipe, pair.relation, signs[pair.expected], amount)
        assert " ".join(" ".join(cells).split()) + name in lines
    assert all(f"\n {pair.title} " in result.stdout for pair in pairs())
    unchecked = sum(not pair.checked for pair in pairs())
    assert f"{unchecked} have a name that no page confirmed" in result.stderr
    listed = json.loads(run("lab", "pairs", "--dry-run", "--json").stdout)["pairs"]
    assert [pair["title"] for pair in listed] == [pair.title for pair in pairs()]
    assert listed[0]["expected"] == 1


def test_bytes_of_a_pair_are_those_of_its_shapes() -> None:
    """From the table itself: layers × width × bytes × (queries + keys), once for each attention."""
    table = pl.read_csv(room.DATA / "pairs.csv", comment_prefix="#").to_dicts()
    for row, pair in zip(table, pairs(), strict=True):
        matrices = row["layers"] * row["width"] * row["item"] * (row["queries"] + row["keys"])
        assert pair.bytes_before == matrices
        assert pair.bytes_after == matrices * row["attentions"]
        assert pair.checked == (row["checked"] == "yes")
        assert (pair.before_stack, pair.after_stack) == (
            row["before_stack"] or "",
            row["after_stack"] or "",
        )
        stack = f" ({pair.after_stack})" if pair.after_stack else ""
        assert pair.title == f"{pair.before} → {pair.after}{stack}"
