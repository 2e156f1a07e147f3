"""The callback in real Trainers: rows, logs read from TensorBoard, runs resumed and stopped."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars as pl
import pytest
import torch
from tests.live.models import SIZES, bert
from tests.live.test_monitor import same
from transformers import BertConfig, BertForMaskedLM, Trainer, TrainerCallback, TrainingArguments

import wqk
from wqk._files import read_lines
from wqk.errors import FormError, RunError, UnknownFamily

# Of the Trainer on a machine without an accelerator, and of what TensorBoard's writer imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard|torch|google"),
]


def trainer(folder: Path, **arguments: Any) -> Trainer:
    torch.manual_seed(0)
    tokens = torch.randint(20, (64, 8))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    settings: dict[str, Any] = {
        "max_steps": 10,
        "per_device_train_batch_size": 2,
        "logging_steps": 5,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "learning_rate": 1e-3,
        **arguments,
    }
    return Trainer(
        model=BertForMaskedLM(BertConfig(**SIZES)),
        args=TrainingArguments(str(folder), **settings),
        train_dataset=data,
        eval_dataset=data[:4],
    )


def steps(folder: Path, name: str = "scores") -> list[int]:
    return sorted(set(wqk.read_table(folder / f"{name}.jsonl").frame["step"]))


class Watcher(TrainerCallback):
    """Keeps what the Trainer hands to its loggers."""

    def __init__(self) -> None:
        self.logs: list[tuple[int, dict[str, float]]] = []

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.append((state.global_step, dict(logs)))


def test_a_watched_run_has_rows_at_its_cadence_and_its_end(tmp_path: Path) -> None:
    run = trainer(tmp_path, save_strategy="steps", save_steps=5)
    watcher = Watcher()
    run.add_callback(watcher)
    wqk.ScoreCallback(tmp_path, every=4, steps=[5]).attach(run)
    run.train()
    assert steps(tmp_path) == [0, 4, 5, 8, 10]
    assert steps(tmp_path, "updates") == [4, 5, 8, 10]
    table = wqk.read_table(tmp_path / "scores.jsonl")
    for step in (5, 10):
        rows = table.filter(pl.col("step") == step)
        assert same(rows, wqk.scan(tmp_path / f"checkpoint-{step}"))
    assert same(rows, wqk.scan(run.model))
    # Each look is logged once, and the Trainer's own logs come as if nobody watched.
    looked = {step: log for step, log in watcher.logs if "wqk/symmetry_median" in log}
    assert list(looked) == [0, 4, 5, 8, 10]
    assert [step for step, log in watcher.logs if "loss" in log] == [5, 10]
    assert looked[10]["wqk/symmetry_median"] == rows.layers.frame["symmetry"].median()
    assert {"wqk/update_symmetry_median", "wqk/directionality_excess_median"} <= looked[4].keys()
    history = [log["step"] for log in run.state.log_history if "wqk/symmetry_median" in log]
    assert history == [0, 4, 5, 8, 10]


def test_tensorboard_shows_the_medians(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = trainer(tmp_path, report_to=["tensorboard"])
    callback = wqk.ScoreCallback(tmp_path / "run", every=5, per_layer=True)
    run.add_callback(callback)
    assert callback.attach(run) is callback
    assert run.callback_handler.callbacks.count(callback) == 1
    run.train()
    (file,) = tmp_path.rglob("events.out.tfevents.*")
    events = EventAccumulator(str(file))
    events.Reload()
    table = wqk.read_table(tmp_path / "run" / "scores.jsonl")
    summary = table.summary().filter(over="layers")
    for score in ("symmetry", "directionality", "directionality_excess"):
        shown = events.Scalars(f"train/wqk/{score}_median")
        assert [event.step for event in shown] == summary["step"].to_list() == [0, 5, 10]
        expected = summary[f"{score}_median"].to_list()
        assert [event.value for event in shown] == pytest.approx(expected, rel=1e-6)
    assert [event.step for event in events.Scalars("train/wqk/update_symmetry_median")] == [5, 10]
    layer = table.layers.filter(pl.col("layer") == 1).frame
    shown = events.Scalars("train/wqk/layer_01/symmetry")
    assert [event.value for event in shown] == pytest.approx(layer["symmetry"].to_list(), rel=1e-6)
    shares = events.Scalars("train/wqk/look_share")
    assert [event.step for event in shares] == [5, 10]
    assert all(0 < event.value < 1 for event in shares)


def test_a_resumed_run_goes_on_in_the_same_files(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 6, "max_steps": 12}
    uninterrupted = trainer(tmp_path / "whole", **settings)
    uninterrupted.add_callback(wqk.ScoreCallback(tmp_path / "whole", every=3))
    uninterrupted.train()
    killed = trainer(tmp_path / "run", **settings)
    killed.add_callback(wqk.ScoreCallback(tmp_path / "run", every=3))

    class Killed(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 10:
                raise KeyboardInterrupt

    killed.add_callback(Killed())
    with pytest.raises(KeyboardInterrupt):
        killed.train()
    assert steps(tmp_path / "run") == [0, 3, 6, 9]
    resumed = trainer(tmp_path / "run", **settings)
    resumed.add_callback(wqk.ScoreCallback(tmp_path / "run", every=3))
    resumed.train(resume_from_checkpoint=True)
    for name in ("scores", "updates"):
        tables = (wqk.read_table(tmp_path / run / f"{name}.jsonl") for run in ("run", "whole"))
        assert same(*tables)


class Stopper(TrainerCallback):
    """Stops a run when it has been evaluated, as early stopping does."""

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = state.global_step == 4


@pytest.mark.parametrize("best", [False, True])
def test_a_run_that_is_stopped_early_has_its_last_step(tmp_path: Path, best: bool) -> None:
    run = trainer(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        save_strategy="steps" if best else "no",
        save_steps=2,
        load_best_model_at_end=best,
        learning_rate=1.0,  # so that the best model is not the last
    )
    run.add_callback(wqk.ScoreCallback(tmp_path, every=100))
    run.add_callback(Stopper())
    run.train()
    assert run.state.global_step == 4
    # In the end the model is the best one of an earlier step, which must not pass for the last.
    assert steps(tmp_path) == ([0] if best else [0, 4])


def test_a_model_that_cannot_be_followed_is_refused_before_it_is_trained(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4))
    arguments = TrainingArguments(str(tmp_path), report_to=[], use_cpu=True)
    callback = wqk.ScoreCallback(tmp_path / "run")
    with pytest.raises(UnknownFamily):
        Trainer(model=model, args=arguments, train_dataset=[{}], callbacks=[callback])
    with pytest.raises(UnknownFamily):
        callback.attach(Trainer(model=model, args=arguments, train_dataset=[{}]))
    late = Trainer(model=model, args=arguments, train_dataset=[{}])
    late.add_callback(callback)
    with pytest.raises(UnknownFamily):
        late.train()
    assert not (tmp_path / "run").exists()


def test_a_run_is_clipped_and_its_logits_measured(tmp_path: Path) -> None:
    hooks = torch.nn.modules.module._global_forward_pre_hooks
    before = set(hooks)
    run = trainer(tmp_path, learning_rate=3e-2)
    watcher = Watcher()
    run.add_callback(watcher)
    wqk.ScoreCallback(tmp_path, every=5, clip=0.05, logits=True, sequences=1).attach(run)
    run.train()
    clips = read_lines(tmp_path / "clips.jsonl")
    assert {clip["step"] for clip in clips} <= set(range(1, 11))
    assert all(clip["factor"] == 0.05 / clip["max_logit"] < 1 for clip in clips)
    measured = wqk.read_table(tmp_path / "scores.jsonl").layers.frame.drop_nulls("max_logit")
    assert set(measured["step"]) == {0, 5}
    assert len([logs for _, logs in watcher.logs if "wqk/max_logit" in logs]) == 2
    assert sum(logs.get("wqk/clipped_heads", 0) for _, logs in watcher.logs) == len(clips) > 0
    # Nor is anybody left waiting for a pass, by whom compiled code would be slowed.
    assert set(hooks) <= before


def test_clipping_every_few_steps_measures_only_these(tmp_path: Path) -> None:
    run = trainer(tmp_path, learning_rate=3e-2)
    wqk.ScoreCallback(tmp_path, every=None, clip=1e-6, clip_every=4).attach(run)
    run.train()
    assert {clip["step"] for clip in read_lines(tmp_path / "clips.jsonl")} == {4, 8}


def test_a_clip_that_is_no_limit_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FormError, match="limit must be a positive number"):
        wqk.ScoreCallback(tmp_path, clip=0).attach(trainer(tmp_path))
    with pytest.raises(RunError, match="every N steps"):
        wqk.ScoreCallback(tmp_path, clip=1.0, clip_every=0).attach(trainer(tmp_path))


class Loud:
    """A Trainer that keeps what is logged through it, and resets its flag as Trainers do."""

    def __init__(self, control: SimpleNamespace) -> None:
        self.logged: list[dict[str, float]] = []
        self.control = control

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)
        self.control.should_log = False


def by_hand(folder: Path, **options: Any) -> tuple[wqk.ScoreCallback, Any, Any, Any, Any]:
    """A callback without a Trainer's loop: it, its arguments, and who hears its logs."""
    args = SimpleNamespace(report_to=[], load_best_model_at_end=False)
    control = SimpleNamespace(should_log=True, should_training_stop=False)
    callback = wqk.ScoreCallback(folder, **options)
    callback._trainer = Loud(control)
    return callback, args, SimpleNamespace(global_step=0, max_steps=9), control, callback._trainer


def test_clipped_heads_are_counted_between_entries_of_the_log(tmp_path: Path) -> None:
    callback, args, state, control, heard = by_hand(tmp_path, every=2)
    callback.on_train_begin(args, state, control, model=bert())
    callback._clip, clipped = 1.0, {1: 3, 2: 2, 3: 0, 4: 1}
    callback._clipper = lambda step: [None] * clipped[step]  # type: ignore[assignment]
    for step in clipped:
        state.global_step = step
        callback.on_step_end(args, state, control)
    assert [entry["wqk/clipped_heads"] for entry in heard.logged[1:]] == [5.0, 1.0]


@pytest.mark.parametrize(
    ("report_to", "attached", "told"),
    [(["x"], False, True), ([], False, True), (["x"], True, False)],
)
def test_a_log_that_gets_no_medians_is_reported(report_to, attached, told, tmp_path, caplog):
    callback, args, state, control, heard = by_hand(tmp_path, every=2)
    args.report_to, callback._trainer = report_to, heard if attached else None
    callback.on_train_begin(args, state, control, model=bert())
    assert ("call attach(trainer)" in caplog.text) == told
