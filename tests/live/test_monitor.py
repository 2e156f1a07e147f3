"""Files of a monitor: a scan's own numbers, the forms' changes, and nothing that harms a run."""

from __future__ import annotations

import logging
import math
import re
from pathlib import Path

import numpy as np
import polars as pl
import pytest
import torch
from tests.limits import failing
from tests.live.models import bert, gpt2, llama, train, train_step

import wqk
from wqk.errors import MissingPackage, OutputError, RunError, UnknownFamily
from wqk.live.monitor import LogitAlarm
from wqk.tables.schema import KEY, SCHEMA

MODELS = {"separate": bert, "fused": gpt2, "grouped": llama}
CONTEXT = ["checkpoint", "step", "parameters"]


def same(table: wqk.ScoreTable, other_table: wqk.ScoreTable) -> bool:
    """Return whether two tables hold the same numbers to the last digit."""
    frames = (compared.frame.drop(CONTEXT).fill_nan(None) for compared in (table, other_table))
    return next(frames).equals(next(frames), null_equal=True)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_rows_are_a_scan_s_of_the_model_and_of_its_checkpoint(tmp_path, make):
    model = make()
    monitor = train(model, tmp_path / "run" / "scores.jsonl", steps=2)
    last = monitor.table.filter(pl.col("step") == 2)
    assert same(last, wqk.scan(model))
    assert last.frame["parameters"].to_list() == wqk.scan(model).frame["parameters"].to_list()
    model.save_pretrained(tmp_path / "checkpoint-2")
    assert same(last, wqk.scan(tmp_path / "checkpoint-2"))
    assert same(last, monitor.latest)
    assert set(monitor.table.frame["checkpoint"]) == {"run"}
    assert sorted(set(monitor.table.frame["step"])) == [0, 1, 2]
    made, scanned = dict(monitor.table.metadata), dict(wqk.scan(model).metadata)
    assert [*made.pop("left_out").values()] == [*scanned.pop("left_out").values()]
    assert made == scanned
    assert same(monitor.table, wqk.read_table(tmp_path / "run" / "scores.jsonl"))
    assert not monitor.table.frame.select(KEY).is_duplicated().any()


def test_a_device_changes_only_the_rounding(tmp_path: Path) -> None:
    plain, on_device = (
        train(llama(), tmp_path / f"{device}.jsonl", steps=2, device=device)
        for device in (None, "cpu")
    )
    for table, table_of_device in (
        (plain.table, on_device.table),
        (plain.updates, on_device.updates),
    ):
        for name in ("norm", "symmetry", "directionality"):
            np.testing.assert_allclose(
                table.frame[name], table_of_device.frame[name], rtol=2e-5, atol=2e-6
            )
    assert not plain.updates.frame["norm"].equals(on_device.updates.frame["norm"])
    with pytest.raises(MissingPackage, match="PyTorch cannot use it here"):
        wqk.Monitor(llama(), device="nowhere")


def dense(model: torch.nn.Module) -> list[np.ndarray]:
    """Every layer's form in float64, its heads' before it: (H + 1, D, D)."""
    forms = []
    for layer in range(2):
        attention = wqk.open(model)[layer]
        heads = [attention[number] for number in range(attention.head_count)]
        matrices = np.stack([head.query.astype(float) @ head.key.astype(float).T for head in heads])
        forms.append(np.concatenate([matrices.sum(0, keepdims=True), matrices]))
    return forms


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_updates_are_the_differences_of_dense_forms(tmp_path, make):
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)  # small steps of large forms
    monitor = wqk.Monitor(model, tmp_path / "scores.jsonl", every=2)
    monitor(0)
    before = dense(model)
    train_step(model, optimizer, 0)
    assert monitor(1) == {}
    train_step(model, optimizer, 1)
    medians = monitor(2)
    changes = [new - old for new, old in zip(dense(model), before, strict=True)]
    frame = monitor.updates.frame
    assert set(frame["step"]) == {2}
    assert frame["symmetry_within_random"].null_count() == len(frame)
    for row in frame.iter_rows(named=True):
        change = changes[row["layer"]][0 if row["head"] is None else row["head"] + 1]
        square = np.sum(change**2)
        assert row["norm"] == pytest.approx(math.sqrt(square), rel=1e-4)
        assert row["symmetry"] == pytest.approx(np.sum(change * change.T) / square, abs=1e-4)
        scored = wqk.BilinearForm(change, np.eye(len(change)))
        expected = float(wqk.directionality(scored, weight="excess"))
        assert row["directionality_excess"] == pytest.approx(expected, abs=1e-3)
        if row["head"] is None:
            heads = changes[row["layer"]][1:]
            within = sum(np.sum(m * m.T) for m in heads) / square
            assert row["symmetry_within_heads"] == pytest.approx(within, abs=1e-4)
    layers = monitor.updates.layers.frame
    assert medians["wqk/update_symmetry_median"] == layers["symmetry"].median()
    assert medians["wqk/symmetry_median"] == monitor.latest.layers.frame["symmetry"].median()


def test_a_cadence_looks_first_and_then_when_due(tmp_path: Path) -> None:
    monitor = wqk.Monitor(bert(), tmp_path / "scores.jsonl", every=4, steps=[6], heads=False)
    assert [step for step in range(3, 10) if monitor(step)] == [3, 4, 6, 8]
    assert monitor.look(9)
    assert not monitor.look(9)
    assert monitor.table.frame["head"].is_null().all()
    assert len(monitor.table) == 2 * 5


def test_a_weight_that_has_not_moved_has_a_degenerate_update(tmp_path: Path) -> None:
    model = bert()
    monitor = wqk.Monitor(model, tmp_path / "scores.jsonl", every=1)
    monitor(0)
    model.encoder.layer[1].attention.self.key.weight.data *= 1.5
    monitor(1)
    layers = monitor.updates.layers.frame
    assert layers["status"].to_list() == ["degenerate", "ok"]
    assert layers["symmetry"][0] is None
    # The form has grown by half: its change is half of it, of the same shape.
    scores = monitor.table.layers.filter(pl.col("step") == 0, pl.col("layer") == 1).frame
    assert layers["norm"][1] == pytest.approx(scores["norm"].item() / 2, rel=1e-5)
    assert layers["symmetry"][1] == pytest.approx(scores["symmetry"].item(), abs=1e-5)


def test_half_precision_is_followed_in_its_own_type(tmp_path: Path) -> None:
    model = bert().to(torch.bfloat16)
    assert same(train(model, tmp_path / "scores.jsonl", steps=1).latest, wqk.scan(model))


# Resuming


def test_a_resumed_run_continues_the_files(tmp_path: Path) -> None:
    uninterrupted = train(bert(), tmp_path / "whole" / "scores.jsonl", steps=5)
    model, path = bert(), tmp_path / "run" / "scores.jsonl"
    train(model, path, steps=3)
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    train(model, path, steps=4, first=3)  # beyond the checkpoint, then killed in a write
    with path.open("a") as file:
        file.write('{"checkpoint": "run", "ste')
    model.load_state_dict(saved)
    resumed = train(model, path, steps=5, first=3)
    for table, expected in (
        (resumed.table, uninterrupted.table),
        (resumed.updates, uninterrupted.updates),
    ):
        assert table.frame.drop("checkpoint").equals(
            expected.frame.drop("checkpoint"), null_equal=True
        )
    wqk.read_table(path)


def test_a_resumed_run_may_start_between_two_looks(tmp_path: Path) -> None:
    model, path = bert(), tmp_path / "scores.jsonl"
    monitor = wqk.Monitor(model, path, every=10)
    for step in (0, 10, 20):
        monitor(step)
    monitor = wqk.Monitor(model, path, every=10)
    assert [step for step in range(15, 31) if monitor(step)] == [15, 20, 30]
    assert monitor.table.layers.frame["step"].unique().to_list() == [0, 10, 15, 20, 30]
    assert monitor.updates.layers.frame["step"].unique().to_list() == [10, 20, 30]


def test_a_run_from_the_start_replaces_an_earlier_one_and_says_so(tmp_path, caplog):
    path = tmp_path / "scores.jsonl"
    train(bert(), path, steps=2)
    assert not caplog.records
    monitor = train(bert(seed=1), path, steps=1)
    assert "30 rows of an earlier run are gone" in caplog.text
    assert sorted(set(monitor.table.frame["step"])) == [0, 1]
    monitor(0)  # the same monitor in a second loop
    assert sorted(set(monitor.table.frame["step"])) == [0]
    assert len(monitor.updates) == 0


# Whatever goes wrong


def test_weights_that_are_not_finite_have_rows_that_say_so(tmp_path, caplog):
    model = bert()
    monitor = wqk.Monitor(model, tmp_path / "scores.jsonl", every=1)
    monitor(0)
    query = model.encoder.layer[1].attention.self.query.weight
    kept = query.data.clone()
    query.data[3, 4] = math.nan
    medians = monitor(1)
    monitor(2)
    assert caplog.text.count("NaN or infinite") == 1
    assert "encoder.layer.1.attention.self.query.weight" in caplog.text
    frame = monitor.latest.frame
    broken = frame.filter(pl.col("layer") == 1)
    assert set(broken["status"]) == {"non-finite"}
    scores = list(SCHEMA)[list(SCHEMA).index("norm") : -1]
    assert all(broken[score].null_count() == len(broken) for score in scores)
    sound = wqk.ScoreTable(frame.filter(pl.col("layer") == 0))
    model.encoder.layer[1].attention.self.query.weight.data = kept
    assert same(sound, wqk.scan(model).filter(pl.col("layer") == 0))
    assert medians["wqk/symmetry_median"] == sound.layers.frame["symmetry"].item()
    updates = monitor.updates.frame
    assert set(updates.filter(pl.col("layer") == 1)["status"]) == {"non-finite"}
    monitor(3)  # and back
    updates = monitor.updates.filter(pl.col("step") == 3).frame
    assert set(updates.filter(pl.col("layer") == 1)["status"]) == {"non-finite"}
    monitor(4)
    updates = monitor.updates.filter(pl.col("step") == 4).frame
    assert set(updates["status"]) == {"degenerate"}


def test_a_disk_that_fails_does_not_end_the_run(tmp_path, caplog, monkeypatch):
    monitor = wqk.Monitor(bert(), tmp_path / "scores.jsonl", every=1)
    monitor(0)
    with monkeypatch.context() as patch:
        patch.setattr("wqk._files.os.fsync", failing(OSError(28, "No space left on device")))
        assert monitor(1) == {}
        assert monitor(2) == {}
    assert caplog.text.count("No space left") == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert monitor(3)
    assert sorted(set(monitor.table.frame["step"])) == [0, 3]
    assert sorted(set(monitor.updates.frame["step"])) == [3]


def test_a_model_that_cannot_be_followed_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(UnknownFamily):
        wqk.Monitor(torch.nn.Sequential(torch.nn.Linear(4, 4)), tmp_path / "scores.jsonl")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": "scores.parquet"}, OutputError, "appends to .jsonl"),
        ({"path": "file/scores.jsonl"}, OutputError, "file/scores.jsonl: cannot be written"),
        ({"path": "other.jsonl"}, RunError, "line 1 is not a JSON object"),
        ({"path": "table.jsonl", "gamma": 3.0}, RunError, "gamma 2.0, but these have gamma 3.0"),
        ({"every": 0}, RunError, "at least 1, got every=0"),
        ({"steps": "linear"}, RunError, "'log' for 1, 2, 4, 8, ...; got 'linear'"),
    ],
)
def test_what_a_monitor_cannot_work_with(tmp_path, arguments, error, message):
    (tmp_path / "file").touch()
    (tmp_path / "other.jsonl").write_text("a,b\n1,2\n")
    wqk.scan(bert()).write(tmp_path / "table.jsonl")
    settings = {"path": "scores.jsonl", **arguments}
    path = tmp_path / str(settings.pop("path"))
    with pytest.raises(error, match=message):
        wqk.Monitor(bert(), path, **settings)


def test_updates_of_another_file_lie_beside_it(tmp_path: Path) -> None:
    train(bert(), tmp_path / "seed-1.jsonl", steps=1)
    assert len(wqk.read_table(tmp_path / "seed-1-updates.jsonl").layers) == 2


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    train(llama(), tmp_path / "scores.jsonl", 1)
    with pytest.raises(RunError, match="another model, with 4 heads over 2 key heads"):
        wqk.Monitor(bert(), tmp_path / "scores.jsonl")


def test_without_a_file_the_tables_go_with_the_monitor() -> None:
    monitor = wqk.Monitor(bert(), every=1)
    assert "wqk/symmetry_median" in monitor(0)
    assert set(monitor.table.frame["checkpoint"]) == {"BertModel"}
    folder = monitor._scores.parent
    del monitor
    assert not folder.exists()


def test_logits_that_cannot_be_written_are_a_warning(caplog, monkeypatch) -> None:
    model = bert()
    monitor = wqk.Monitor(model, every=1, logits=True)
    monitor(0)
    with monkeypatch.context() as patch:
        full = failing(OSError(28, "No space left on device"))
        patch.setattr("wqk.live.monitor.replace_last_lines", full)
        model(input_ids=torch.arange(6)[None])
        monitor(1)
    assert re.search("wqk.Monitor: step 0 has no logits: .*No space left", caplog.text)
    assert sorted(set(monitor.table.frame["step"])) == [0, 1]


def test_an_alarm_names_the_heads_beyond_a_limit(caplog) -> None:
    model = bert()
    tokens = torch.arange(6)[None]
    alarms: list[LogitAlarm] = []
    monitor = wqk.Monitor(model, every=1, alarm=0.5, on_alarm=alarms.append)
    for step, factor in enumerate((1.0, 100.0, 1.0)):
        model.encoder.layer[1].attention.self.query.weight.data.mul_(factor)
        monitor(step)
        model(input_ids=tokens)
    monitor(3)
    assert [alarm.step for alarm in alarms] == [1, 2]
    assert {(head.layer, head.stack) for head in alarms[0].heads} == {(1, "encoder")}
    logits = [head.logit for head in alarms[0].heads]
    assert logits == sorted(logits, reverse=True)
    assert min(logits) > 0.5
    assert "had logits beyond 0.5; the largest is" in str(alarms[0])
    with pytest.raises(RunError, match="more than 0"):
        wqk.Monitor(model, alarm=-1)
    with pytest.raises(RunError, match="give alarm=100"):
        wqk.Monitor(model, on_alarm=print)
