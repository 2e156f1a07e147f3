"""The speed-up of Table 1, on curves whose speed-up is known."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from wqk._files import append_lines
from wqk.cli.main import command
from wqk.errors import RunError
from wqk.runs.run import METRICS, Run, create_run, open_run
from wqk.runs.speedup import saved_share, speedups

STEPS = 100


def train(folder: Path, losses: list[float], init: str = "random", seed: int = 1, **more) -> Run:
    """A finished run that was logged at equal distances; the first entry is the start."""
    recipe = {"mode": "encoder", "init": init, "seed": seed, "steps": STEPS} | more
    run = create_run(folder / f"{init}-{seed}", {"recipe": recipe})
    for step, loss in zip(np.linspace(0, STEPS, len(losses)).astype(int), losses, strict=True):
        append_lines(run.folder / METRICS, {"step": int(step), "held_out_loss": loss, "loss": loss})
    return open_run(run.folder)


def test_a_run_that_is_there_in_half_the_steps_saves_half_of_them(tmp_path: Path) -> None:
    slow = train(tmp_path, [5, 4, 3, 2, 1])
    fast = train(tmp_path, [5, 3, 1, 0.5, 0.4], init="symmetric")
    [comparison] = speedups([slow, fast], smoothing=0)
    assert (comparison.start, comparison.baseline) == ("symmetric", "random")
    [run] = comparison.runs
    assert (run.first, run.lasting, run.loss, run.baseline_loss) == (0.5, 0.5, 0.4, 1)


def test_never_reached_is_nothing_saved(tmp_path: Path) -> None:
    better = train(tmp_path, [5, 3, 1])
    worse = train(tmp_path, [5, 4, 2], init="paired")
    assert speedups([better, worse])[0].spread("first") == (0.0, None)


def test_the_baseline_is_the_start_of_the_first_run(tmp_path: Path) -> None:
    random = train(tmp_path, [5, 4, 3, 2, 1])
    symmetric = train(tmp_path, [5, 4, 3, 3, 3], init="symmetric")
    [comparison] = speedups([symmetric, random], smoothing=0)
    assert (comparison.start, comparison.baseline) == ("random", "symmetric")
    assert comparison.runs[0].first == 0.5


def test_a_loss_that_touches_the_target_and_rises_is_told_from_one_that_stays(
    tmp_path: Path,
) -> None:
    calm = train(tmp_path, [5, 4, 3, 2, 2])
    noisy = train(tmp_path, [5, 2, 3, 3, 1], init="symmetric")
    [run] = speedups([calm, noisy], smoothing=0)[0].runs
    assert (run.first, run.lasting) == (0.75, 0.0)


def test_seeds_are_compared_with_their_own_baseline(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, [5, 3, 1], seed=1),
        train(tmp_path, [5, 3, 2], seed=2),
        train(tmp_path, [5, 1, 1], init="symmetric", seed=1),
        train(tmp_path, [5, 3, 2], init="symmetric", seed=2),
    ]
    [comparison] = speedups(runs, smoothing=0)
    assert [run.first for run in comparison.runs] == [0.5, 0.0]
    assert comparison.spread("first") == pytest.approx((0.25, np.std([0.5, 0.0], ddof=1)))


@given(
    losses=st.lists(st.floats(0.1, 10), min_size=2, max_size=30),
    target=st.floats(0.1, 10),
    shift=st.floats(0, 5),
)
def test_saved_steps_against_a_search_by_hand(
    losses: list[float], target: float, shift: float
) -> None:
    steps = np.arange(1.0, len(losses) + 1)
    first, lasting = saved_share(steps, np.array(losses), target)
    total = len(losses)
    below = [loss <= target for loss in losses]
    expected = next((1 - (i + 1) / total for i, hit in enumerate(below) if hit), 0.0)
    stays = next((1 - (i + 1) / total for i in range(total) if all(below[i:])), 0.0)
    assert first == pytest.approx(expected)
    assert lasting == pytest.approx(stays)
    assert 0 <= lasting <= first < 1
    # A lower curve is never later.
    assert saved_share(steps, np.array(losses) - shift, target)[0] >= first


def test_smoothing_is_a_trailing_mean(tmp_path: Path) -> None:
    baseline = train(tmp_path, [5, 5, 4, 2, 2])
    candidate = train(tmp_path, [5, 3, 1, 3, 3], init="symmetric")
    [run] = speedups([baseline, candidate], smoothing=0.5)[0].runs
    # Means of two entries: 5, 4.5, 3, 2 and 3, 2, 2, 3.
    assert (run.baseline_loss, run.loss, run.first, run.lasting) == (2, 3, 0.5, 0.0)


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    random = train(tmp_path, [5, 3, 1])
    unfinished = train(tmp_path / "short", [5, 3], init="symmetric", steps=2 * STEPS)
    other = train(tmp_path / "wide", [5, 3, 1], init="symmetric", width=64)
    elsewhere = train(tmp_path, [5, 3, 1], init="symmetric", seed=7)
    for runs, message in (
        ([random], "start differently"),
        ([random, other], "start differently"),
        ([random, elsewhere], "share none"),
        ([unfinished, train(tmp_path / "short", [5, 3], steps=2 * STEPS)], "last step"),
    ):
        with pytest.raises(RunError, match=message):
            speedups(runs)


def test_the_command(tmp_path: Path) -> None:
    folders = [
        str(train(tmp_path, losses, init, seed).folder)
        for init, losses in (("random", [5, 3, 1]), ("symmetric", [5, 1, 1]))
        for seed in (1, 2)
    ]
    printed = CliRunner().invoke(command, ["speedup", *folders])
    assert printed.exit_code == 0
    assert "50 ± 0 %" in printed.output
    as_json = json.loads(CliRunner().invoke(command, ["speedup", "--json", *folders]).output)
    assert [run["first"] for run in as_json["comparisons"][0]["runs"]] == [0.5, 0.5]
    missing = CliRunner().invoke(command, ["speedup", str(tmp_path / "nothing")])
    assert missing.exit_code == 2
    assert "there is none" in missing.output
