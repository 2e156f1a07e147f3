"""Interrupted runs: killed at any moment, they go on and end in the very same bits."""

from __future__ import annotations

import json
import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.lab.training.conftest import Order
from tests.limits import counts

from wqk._files import read_lines
from wqk.tables.run import METRICS, SETTINGS, Run, open_run
from wqk_lab.training import loop
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.recipe import Recipe
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


def assert_same_scores(left: Run, right: Run) -> None:
    """To the rounding of products whose order of summation is not ours."""
    for one, other in ((left.scores, right.scores), (left.updates, right.updates)):
        for score in ("norm", "symmetry", "symmetry_null"):
            assert one.frame[score].to_list() == pytest.approx(
                other.frame[score].to_list(), abs=1e-5
            )


def with_dropout(tiny: Any, **overrides: Any) -> Recipe:
    recipe: Recipe = tiny(
        "paper", steps=24, save_every=7, keep_checkpoints="0,10", accumulation=2, **overrides
    )
    return recipe


@pytest.fixture(scope="module")
def whole(corpus: TokenStore, tiny: Any, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that nothing has interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    torch.set_num_threads(1)  # as every test does, but this comes before the first
    return train(with_dropout(tiny), corpus.folder, folder)


def interrupt_and_finish(
    order: Order, recipe: Recipe, folder: Path, interruptions: int, seed: int
) -> int:
    """How often the run was killed before it came to its end."""
    random_touch, killed = random.Random(seed), 0
    for _ in range(interruptions):
        code, _ = order(recipe, folder, touch=random_touch.randint(1, 45))
        assert code in (0, -signal.SIGKILL)
        if code == 0:
            return killed
        killed += 1
    assert order(recipe, folder) == (0, "")
    return killed


@counts(4, 10, "times")
def test_killed_several_times_a_run_ends_in_the_same_bits(
    times: int, order: Order, whole: Run, tiny: Any, tmp_path: Path
) -> None:
    killed = interrupt_and_finish(order, with_dropout(tiny), tmp_path / "killed", times, seed=1)
    assert killed >= times // 2
    finished = open_run(tmp_path / "killed")
    assert result(finished) == result(whole)
    assert_same_scores(finished, whole)
    assert not (tmp_path / "killed" / ".saving").exists()


@pytest.mark.campaign
def test_killed_at_every_single_touch(
    order: Order, corpus: TokenStore, tiny: Any, tmp_path: Path
) -> None:
    recipe = tiny(steps=4, save_every=2, held_out_every=2, score_every=2)
    whole = result(train(recipe, corpus.folder, tmp_path / "whole"))
    for touch in range(1, 500):
        folder = tmp_path / str(touch)
        if order(recipe, folder, touch=touch) == (0, ""):
            break
        assert order(recipe, folder) == (0, "")
        assert result(open_run(folder)) == whole, touch
    assert touch > 40


class Interrupted(Exception):
    """Stands for any end that is not a kill: Ctrl-C, an error, a full disk."""


def interrupt_at(step: int) -> Callable[[Any], None]:
    def on_progress(progress: Any) -> None:
        if progress.steps_done == step:
            raise Interrupted

    return on_progress


def interrupted(recipe: Recipe, corpus: TokenStore, folder: Path, step: int) -> Run:
    with pytest.raises(Interrupted):
        train(recipe, corpus.folder, folder, on_progress=interrupt_at(step))
    return open_run(folder)


def test_an_exception_is_survived_too(
    corpus: TokenStore, whole: Run, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = interrupted(with_dropout(tiny), corpus, tmp_path / "stopped", 20)
    assert [step for step, _ in stopped.checkpoints] == [0, 10, 14]
    finished = train(None, None, tmp_path / "stopped", resume=True)
    assert result(finished) == result(whole)
    assert_same_scores(finished, whole)
    assert "resumed with" not in caplog.text


def test_resuming_in_another_environment_says_so(
    corpus: TokenStore, tiny: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = train(tiny(steps=4), corpus.folder, tmp_path, stop=2).settings
    begun_in = settings["environment"] | {"threads": 3, "torch": "2.0.1"}
    (tmp_path / SETTINGS).write_text(json.dumps({**settings, "environment": begun_in}))
    train(None, None, tmp_path, resume=True)
    told = f"torch {torch.__version__} instead of 2.0.1, threads 1 instead of 3; its numbers can"
    assert f"{tmp_path}: resumed with {told}" in caplog.text


def test_without_the_optimizer_s_state_a_run_ends_elsewhere(
    corpus: TokenStore, whole: Run, tiny: Any, tmp_path: Path
) -> None:
    # The control: what the bitwise tests compare does depend on what a checkpoint holds.
    stopped = interrupted(with_dropout(tiny), corpus, tmp_path / "stopped", 20)
    path = stopped.checkpoints[-1][1] / "optimizer.pt"
    state = torch.load(path, weights_only=True)
    for moments in state["state"].values():
        moments["exp_avg"].zero_()
    torch.save(state, path)
    resumed = train(None, None, tmp_path / "stopped", resume=True)
    assert result(resumed)["files"] != result(whole)["files"]


def test_dropout_is_a_function_of_the_step(
    corpus: TokenStore, whole: Run, tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The other control: dropout does matter, and no state of the process takes part in it.
    torch.manual_seed(99)
    before = torch.random.get_rng_state()
    same = train(with_dropout(tiny), corpus.folder, tmp_path / "same")
    assert result(same) == result(whole)
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(loop, "DROPOUT", 77)
    other = train(with_dropout(tiny), corpus.folder, tmp_path / "other")
    assert result(other)["files"] != result(whole)["files"]
