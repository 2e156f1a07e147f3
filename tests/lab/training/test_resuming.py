"""Interrupted runs: killed at any moment, they go on and end in the very same bits."""

from __future__ import annotations

import random
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.training.conftest import Order
from tests.lab.training.making import tiny
from tests.limits import counts

from wqk._files import read_lines
from wqk.tables.run import METRICS, Run, open_run
from wqk_lab.training import loop
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.training import train


def result(run: Run) -> dict[str, Any]:
    """All that a run says, but for how long it took, and what has been measured on it."""
    _, last = run.checkpoints[-1]
    files = ("model.safetensors", "optimizer.pt")
    tables = (run.scores, run.updates)
    return {
        "files": {name: (last / name).read_bytes() for name in files},
        "metrics": [line | {"seconds": 0} for line in read_lines(run.folder / METRICS)],
        "looks": [table.frame.select("step", "layer", "head").rows() for table in tables],
        "checkpoints": [step for step, _ in run.checkpoints],
    }


def assert_same_scores(actual: Run, expected: Run) -> None:
    """To the rounding of products whose order of summation is not ours."""
    for table, expected_table in (
        (actual.scores, expected.scores),
        (actual.updates, expected.updates),
    ):
        for score in ("norm", "symmetry", "symmetry_null"):
            assert table.frame[score].to_list() == pytest.approx(
                expected_table.frame[score].to_list(), abs=1e-5
            )


# With dropout.
LONG = tiny("paper", steps=24, save_every=7, keep_checkpoints="0,10", accumulation=2)


@pytest.fixture(scope="module")
def whole(corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)  # as every test does, but this comes before the first
    return train(LONG, corpus.folder, folder)


@counts(4, 10, "times")
def test_killed_several_times_a_run_ends_in_the_same_bits(times, order, whole, tmp_path):
    touches, folder = random.Random(1), tmp_path / "killed"
    codes = [order(LONG, folder, touch=touches.randint(1, 45))[0] for _ in range(times)]
    assert {*codes} <= {0, -signal.SIGKILL}
    assert codes.count(-signal.SIGKILL) >= times // 2
    assert order(LONG, folder) == (0, "")
    finished = open_run(folder)
    assert result(finished) == result(whole)
    assert_same_scores(finished, whole)
    assert not (folder / ".saving").exists()


@pytest.mark.campaign
def test_killed_at_every_single_touch(order: Order, corpus: TokenStore, tmp_path: Path) -> None:
    recipe = tiny(steps=4, save_every=2, held_out_every=2, score_every=2)
    expected = result(train(recipe, corpus.folder, tmp_path / "whole"))
    for touch in range(1, 500):
        folder = tmp_path / str(touch)
        if order(recipe, folder, touch=touch) == (0, ""):
            break
        assert order(recipe, folder) == (0, "")
        assert result(open_run(folder)) == expected, touch
    assert touch > 40


class Interrupted(Exception):
    """Stands for any end that is not a kill: Ctrl-C, an error, a full disk."""


@pytest.fixture
def stopped(corpus: TokenStore, tmp_path: Path) -> Run:
    """A run that ended at its twentieth step."""

    def on_progress(progress: Any) -> None:
        if progress.steps_done == 20:
            raise Interrupted

    with pytest.raises(Interrupted):
        train(LONG, corpus.folder, tmp_path / "stopped", on_progress=on_progress)
    return open_run(tmp_path / "stopped")


def test_an_exception_is_survived_too(whole, stopped, caplog):
    assert [step for step, _ in stopped.checkpoints] == [0, 10, 14]
    finished = train(None, None, stopped.folder, resume=True)
    assert result(finished) == result(whole)
    assert_same_scores(finished, whole)
    assert "resumed with" not in caplog.text


def test_without_the_optimizer_s_state_a_run_ends_elsewhere(whole: Run, stopped: Run) -> None:
    # The control: what the bitwise tests compare does depend on what a checkpoint holds.
    path = stopped.checkpoints[-1][1] / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
    torch.save(state, path)
    resumed = train(None, None, stopped.folder, resume=True)
    assert result(resumed)["files"] != result(whole)["files"]


def test_dropout_is_a_function_of_the_step(corpus, whole, tmp_path, monkeypatch):
    # The other control: dropout does matter, and no state of the process takes part in it.
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    assert result(train(LONG, corpus.folder, tmp_path / "same")) == result(whole)
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(loop, "DROPOUT", 77)
    other_run = train(LONG, corpus.folder, tmp_path / "other")
    assert result(other_run)["files"] != result(whole)["files"]
