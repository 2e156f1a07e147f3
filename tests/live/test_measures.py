"""Measures over training, alarms, and scores in the background."""

from __future__ import annotations

import math
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pytest
import torch
from tests.live.models import SIZES, llama, train_step
from tests.live.test_monitor import dense, same

import wqk
from wqk.errors import RunError

if TYPE_CHECKING:
    from pathlib import Path


def run(path: Path, seed: int, growing: float = 1.0, **options: Any) -> wqk.Monitor:
    """Twelve steps, in which the first layer's keys grow by a factor each."""
    model = llama(seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    monitor = wqk.Monitor(model, path / "scores.jsonl", every=2, **options)
    for step in range(12):
        monitor(step)
        train_step(model, optimizer, step)
        with torch.no_grad():
            model.layers[0].self_attn.k_proj.weight.mul_(growing)
    monitor.look(12)
    return monitor


def test_columns_over_training_are_those_of_a_scan(tmp_path: Path) -> None:
    measures = ["spectrum", "ceiling", "bands"]
    model = llama()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = wqk.Monitor(model, tmp_path / "s.jsonl", every=1, measures=measures, per_layer=True)
    monitor(0)
    before = dense(model)
    old = [[wqk.open(model)[layer][h] for h in range(4)] for layer in range(2)]
    train_step(model, optimizer, 0)
    logged = monitor(1)
    assert same(monitor.latest, wqk.scan(model, measures=measures))
    layers = monitor.latest.layers.frame
    assert logged["wqk/score_ceiling_median"] == layers["score_ceiling"].median()
    assert logged["wqk/layer_01/score_ceiling"] == layers["score_ceiling"][1]
    assert logged["wqk/layer_00/update_symmetry"] == monitor.updates.layers.frame["symmetry"][0]
    changes = [new - then for new, then in zip(dense(model), before, strict=True)]
    for row in monitor.updates.frame.iter_rows(named=True):
        change = changes[row["layer"]][0 if row["head"] is None else row["head"] + 1]
        assert row["spectral_norm"] == pytest.approx(np.linalg.norm(change, 2), rel=1e-4)
        if row["head"] is not None:
            then = old[row["layer"]][row["head"]]
            new = wqk.open(model)[row["layer"]][row["head"]]
            steps = (new.query - then.query), (new.key - then.key)
            first = steps[0] @ then.key.T + then.query @ steps[1].T
            second = np.linalg.norm(steps[0] @ steps[1].T)
            size = np.linalg.norm(first, 2)
            assert row["first_order_spectral_norm"] == pytest.approx(size, rel=1e-4)
            stable = (np.linalg.norm(first) / size) ** 2
            assert row["first_order_stable_rank"] == pytest.approx(stable, rel=1e-4)
            assert row["second_order_norm"] == pytest.approx(second, rel=1e-4)


def test_growing_ceilings_raise_an_alarm_and_healthy_seeds_do_not(tmp_path: Path) -> None:
    alarms: list[Any] = []
    options: dict[str, Any] = {"measures": ["ceiling"], "on_alarm": alarms.append}
    reference = run(tmp_path / "0", 0).table
    for seed in (0, 1, 2):
        run(tmp_path / f"healthy-{seed}", seed, **options, growth=1.5, reference=reference)
    assert alarms == []
    run(tmp_path / "growing", 3, 1.1, **options, growth=1.5)
    assert {(a.layer, a.reason) for a in alarms} == {(0, "growth")}
    assert {a.column for a in alarms} == {
        "norm", "key_norm", "score_ceiling", "score_ceiling_any_distance",
    }  # fmt: skip
    assert {a.step for a in alarms} == {6}  # 1.1 ** 5 exceeds 1.5
    alarms.clear()
    run(tmp_path / "deviating", 3, 1.1, **options, reference=tmp_path / "0" / "scores.jsonl")
    (alarm,) = alarms
    assert (alarm.layer, alarm.column, alarm.reason) == (0, "norm", "deviation")
    assert alarm.step in (8, 10)  # 1.1 ** 8 exceeds 2, and seeds differ by a few percent
    assert "in the reference run" in str(alarms[0])


def test_an_alarm_needs_something_to_compare_with(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="give growth="):
        wqk.Monitor(llama(), tmp_path / "s.jsonl", on_alarm=print)
    with pytest.raises(RunError, match="growth must be a factor above 1"):
        wqk.Monitor(llama(), tmp_path / "s.jsonl", on_alarm=print, growth=0.5)
    with pytest.raises(RunError, match="when to call on_alarm"):
        wqk.Monitor(llama(), tmp_path / "s.jsonl", growth=2.0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'evry'"):
        wqk.ScoreCallback(tmp_path, evry=3)


def test_scores_in_the_background_are_the_same_and_do_not_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = run(tmp_path / "plain", 0, measures=["ceiling"], name="run")
    behind = run(tmp_path / "behind", 0, measures=["ceiling"], name="run", background=True)
    for one, other in ((plain.table, behind.table), (plain.updates, behind.updates)):
        assert one.frame.equals(other.frame, null_equal=True)
    assert len(behind.costs) == 7
    assert math.isnan(behind.costs[0].share)
    assert all(0 < cost.share < 1 for cost in behind.costs[1:])
    assert "of the time since the previous scores" in repr(behind)
    assert behind.flush()["wqk/key_norm_median"] > 0
    assert behind.flush() == {}

    gate, score = threading.Event(), wqk.live.monitor.score_look

    def held(*arguments: Any) -> wqk.ScoreTable:
        assert gate.wait(60)
        return score(*arguments)

    monkeypatch.setattr("wqk.live.monitor.score_look", held)
    model = llama()
    monitor = wqk.Monitor(model, tmp_path / "held.jsonl", background=True)
    weights = dense(model)[0][0]
    assert monitor.look(0) == {}  # while scoring has not even begun
    with torch.no_grad():
        model.layers[0].self_attn.k_proj.weight.zero_()
    gate.set()
    assert monitor.table.layers.frame["norm"][0] == pytest.approx(np.linalg.norm(weights), rel=1e-5)
    assert SIZES["num_hidden_layers"] == monitor.table.filter(pl.col("head").is_null()).frame.height
