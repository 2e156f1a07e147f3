"""Pairs as data, and what is measured of an update, against dense products."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.command import run
from tests.small import sizes
from tests.stand_in import Module

import wqk
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
