"""The speed-up of Table 1, on curves whose speed-up is known."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.command import run
from tests.lab.figures.making import logged

from wqk._console import plain
from wqk.errors import RunError
from wqk.tables.run import METRICS, Run
from wqk_lab.cli.speedup import lines_of
from wqk_lab.runs.descent import descent, smoothed
from wqk_lab.runs.outcomes import is_uninformative, verdict
from wqk_lab.runs.seeds import interval, paired
from wqk_lab.runs.speedup import SpeedUp, StartSpeedUp, first_below, saved_share, speedups

STEPS = 100


def train(
    folder: Path,
    losses: Iterable[float],
    init: str = "random",
    seed: int = 1,
    last: int = STEPS,
    **more: Any,
) -> Run:
    """A finished run that was logged at equal distances; the first entry is the start."""
    recipe = {"init": init, "seed": seed, "steps": STEPS} | more
    entries = [float(loss) for loss in losses]
    steps = np.linspace(0, last, len(entries)).astype(int).tolist()
    return logged(folder / f"{init}-{seed}", recipe, dict(zip(steps, entries, strict=True)))


def test_losses_are_smoothed_over_a_twentieth_of_the_steps_by_default(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).normal(0, 0.2, (2, STEPS + 1))
    curves = np.linspace(5, 1, STEPS + 1) + noise
    runs = [
        train(tmp_path, curve, init=init)
        for init, curve in zip(("random", "symmetric"), curves, strict=True)
    ]
    [comparison] = speedups(runs)
    expected = [smoothed(np.arange(STEPS + 1), curve, 0.05 * STEPS)[-1] for curve in curves]
    [speedup] = comparison.runs
    assert (speedup.baseline_loss, speedup.loss) == pytest.approx(tuple(expected), rel=1e-9)
    assert speedup.loss != curves[1, -1]  # what was logged last


def test_intervals_against_scipys_paired_test(tmp_path: Path) -> None:
    from scipy.stats import ttest_rel

    pairs = [(1.0, 0.8), (1.1, 1.05), (0.9, 0.92), (1.2, 1.0)]
    runs = []
    for seed, (baseline_loss, loss) in enumerate(pairs, start=1):
        runs.append(train(tmp_path, [5, baseline_loss], init="random", seed=seed))
        runs.append(train(tmp_path, [5, loss], init="symmetric", seed=seed))
    result = speedups(runs, smoothing=0)[0].over_seeds("difference")
    reference = ttest_rel([b for _, b in pairs], [a for a, _ in pairs])
    interval = reference.confidence_interval()
    assert (result.p, result.low, result.high) == pytest.approx(
        (reference.pvalue, interval.low, interval.high)
    )


def test_what_is_detectable_is_detected_in_four_of_five_trials() -> None:
    rng = np.random.default_rng(0)

    def share_detected(effect: float) -> float:
        """Share of trials that detect this effect, in units of the deviation."""
        trials = [paired(rng.normal(effect, 1.0, 12).tolist()).p for _ in range(600)]
        return float(np.mean([p is not None and p < 0.05 for p in trials]))

    detectable_effects = [
        paired(rng.normal(0, 1.0, 12).tolist()).detectable or 0 for _ in range(600)
    ]
    # At the power that was asked for, the effect and the detectable one agree.
    assert share_detected(float(np.mean(detectable_effects))) == pytest.approx(0.8, abs=0.04)
    assert share_detected(0.5) < 0.5


def test_runs_that_stopped_early_compare_where_they_stopped(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, [5, 3, end], init=init, steps=4 * STEPS)
        for init, end in (("random", 2), ("symmetric", 1))
    ]
    [comparison] = speedups(runs)
    assert (comparison.step, comparison.steps) == (STEPS, 4 * STEPS)


def test_the_step_below_a_level_is_that_of_a_mean(tmp_path: Path) -> None:
    run = train(tmp_path, [5, 4, 2, 2, 1])  # at 0, 25, 50, 75, 100
    assert first_below(run, 2.5, steps=50) == 62.5  # means of two: 3 at 50, 2 at 75
    assert first_below(run, 1.2, steps=50) is None


def test_steps_to_a_level_are_paired_by_seed(tmp_path: Path) -> None:
    falls = {("random", 1): 250, ("random", 2): 300, ("paired", 1): 150, ("paired", 2): 180}
    runs = []
    for (init, seed), fall in falls.items():
        losses = [5 if step < fall else 1 for step in range(0, 401, 10)]
        runs.append(train(tmp_path, losses, init, seed, 400))
    [comparison] = speedups(runs, level=3)
    # A window of 10 entries has the mean 3 when 5 of them are at 1.
    assert [(run.below, run.baseline_below) for run in comparison.runs] == [(190, 290), (220, 340)]
    assert comparison.steps_later == paired([-100, -120])
    [never] = speedups(runs, level=0.5)
    assert never.steps_later is None


def test_a_mean_over_seeds_leaves_out_no_slow_one() -> None:
    def compared(*steps: tuple[int | None, int | None]) -> StartSpeedUp:
        runs = (SpeedUp(seed, 2, 1, 0, *steps_below) for seed, steps_below in enumerate(steps))
        return StartSpeedUp("paired", "random", 900, 900, tuple(runs))

    assert compared((500, 450), (600, 500)).steps_later == paired([-50, -100])
    assert compared((500, 450), (None, 500)).steps_later is None


def test_the_baseline_is_the_start_of_the_first_run(tmp_path: Path) -> None:
    random = train(tmp_path, [5, 4, 3, 2, 1])
    symmetric = train(tmp_path, [5, 4, 3, 3, 3], init="symmetric")
    [comparison] = speedups([symmetric, random], smoothing=0)
    assert (comparison.start, comparison.baseline) == ("random", "symmetric")
    assert comparison.runs[0].saved == pytest.approx(0.5)


def test_seeds_are_compared_with_their_own_baseline(tmp_path: Path) -> None:
    runs = [
        train(tmp_path, [5, 3, 1], seed=1),
        train(tmp_path, [5, 3, 2], seed=2),
        train(tmp_path, [5, 1, 0.5], init="symmetric", seed=1),
        train(tmp_path, [5, 3, 2], init="symmetric", seed=2),
    ]
    [comparison] = speedups(runs, smoothing=0)
    assert [run.saved for run in comparison.runs] == pytest.approx([0.5, 0.0])
    assert [(run.loss, run.baseline_loss) for run in comparison.runs] == [(0.5, 1), (2, 2)]
    assert comparison.over_seeds("saved").mean == pytest.approx(0.25)


looks = st.lists(st.floats(0.1, 10), min_size=2, max_size=30)


@given(losses=looks, window=st.sampled_from([0.0, 3.0, 8.0]))
def test_a_run_against_itself_saves_nothing(losses: list[float], window: float) -> None:
    curve = descent(np.arange(1.0, len(losses) + 1), np.array(losses), window)
    assert saved_share(curve, curve) == 0.0


@given(losses=looks, other_losses=looks, window=st.sampled_from([0.0, 3.0, 8.0]))
def test_a_share_is_signed(losses: list[float], other_losses: list[float], window: float) -> None:
    count = min(len(losses), len(other_losses))
    steps = np.arange(1.0, count + 1)
    curve = descent(steps, np.array(losses[:count]), window)
    other_curve = descent(steps, np.array(other_losses[:count]), window)
    assert saved_share(curve, other_curve) == -saved_share(other_curve, curve)
    assert -1 <= saved_share(curve, other_curve) <= 1
    assert np.all(np.diff(curve.losses) < 0)


@given(losses=looks, level=st.floats(0.1, 10))
def test_the_step_at_a_loss_is_where_the_curve_has_it(losses: list[float], level: float) -> None:
    curve = descent(np.arange(1.0, len(losses) + 1), np.array(losses))
    step = curve.step_at(level)
    assert curve.first <= step <= curve.last
    if curve.first < step < curve.last:
        from scipy.interpolate import pchip_interpolate

        assert pchip_interpolate(curve.steps, curve.losses, step) == pytest.approx(level)


def power(steps: np.ndarray) -> np.ndarray:
    return np.asarray(1.2 + 3 * (1 + steps / 100) ** -0.6)


def plateau(steps: np.ndarray) -> np.ndarray:
    return np.asarray(1.9 + 1.15 / (1 + np.exp((steps - 550) / 130)) + 0.1 * np.exp(-steps / 50))


def coverage(curve: Any, effect: float, seeds: int, spacing: int, tables: int) -> tuple[float, int]:
    """Share of intervals with the true effect, and number of tables without an interval.

    Runs of 1,000 steps. A seed stretches both its runs, moves their losses, and has its own effect;
    each logged loss has noise.
    """
    rng = np.random.default_rng([round(100 * effect), seeds, spacing, curve is power])
    steps = np.arange(spacing, 1001, spacing, dtype=float)
    covered = without = 0
    for _ in range(tables):
        shares = []
        for _ in range(seeds):
            scale, level = np.exp(0.08 * rng.standard_normal()), 0.02 * rng.standard_normal()
            effect_of_seed = effect + 0.25 * effect * rng.standard_normal()
            slow = curve(steps * scale) + level
            slow += 0.003 * rng.standard_normal(len(steps))
            fast = curve(steps * scale / (1 - effect_of_seed)) + level
            fast += 0.003 * rng.standard_normal(len(steps))
            shares.append(saved_share(descent(steps, slow, 50), descent(steps, fast, 50)))
        over = paired(shares)
        without += over.low is None
        covered += over.low is not None and over.low <= effect <= (over.high or 0)
    return covered / tables, without


GRID = [*product((power, plateau), (0.0, 0.02, 0.1, 0.2), (3, 5, 10), (10, 50, 100))]


SOME = [(GRID[number], 40, 0.8) for number in (14, 41, 50)]
EACH = [pytest.param(case, 1000, 0.92, marks=pytest.mark.campaign) for case in GRID]


@pytest.mark.parametrize(("case", "tables", "least"), SOME + EACH)
def test_intervals_cover_what_is_true(case: tuple[Any, ...], tables: int, least: float) -> None:
    """Forty tables of a coverage of 92 % have less than 80 % once in a hundred times."""
    share, without = coverage(*case, tables=tables)
    assert without == 0
    assert share >= least


def test_what_does_not_compare_is_refused(tmp_path: Path) -> None:
    random = train(tmp_path, [5, 3, 1])
    behind = train(tmp_path, [5, 3], init="paired", last=50)
    wide = train(tmp_path / "wide", [5, 3, 1], init="symmetric", width=64)
    elsewhere = train(tmp_path, [5, 3, 1], init="symmetric", seed=7)
    for runs, message in (
        ([random], "with different initializations"),
        ([random, wide], "with different initializations"),
        ([random, elsewhere], "have none in common"),
        ([behind, random], "at the same step"),
    ):
        with pytest.raises(RunError, match=message):
            speedups(runs)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("scipy")
    folders = []
    for init, losses in (("random", [5, 3, 1]), ("symmetric", [5, 1, 0.5])):
        for seed in (1, 2):
            folders.append(str(train(tmp_path, losses, init, seed).folder))
    printed = run("lab", "speedup", *folders)
    assert "+50%" in printed.output
    assert "±" not in printed.output
    level = run("lab", "speedup", *folders, "--below", "0.5").output
    assert "by 100: 0 of 2, baseline 0 of 2" in " ".join(level.split())
    as_json = json.loads(run("lab", "speedup", "--json", *folders).output)
    saved = [run["saved"] for run in as_json["comparisons"][0]["runs"]]
    assert saved == pytest.approx([0.5, 0.5])


def test_the_command_takes_another_loss_and_smoothing(tmp_path: Path) -> None:
    noise, steps = np.random.default_rng(0), np.arange(STEPS + 1)
    folders, curves = [], []
    for init in ("random", "symmetric"):
        run_folder, curve = train(tmp_path, [], init).folder, noise.uniform(1, 2, STEPS + 1)
        entries = [
            {"step": step, "held_out_loss": loss, "loss": 10 * loss}
            for step, loss in enumerate(curve)
        ]
        (run_folder / METRICS).write_text("\n".join(map(json.dumps, entries)) + "\n")
        folders.append(str(run_folder))
        curves.append(curve)

    for options, smoothing, factor in (
        (["--smoothing", "0"], 0.0, 1),
        (["--smoothing", "0.2"], 0.2, 1),
        (["--smoothing", "0.2", "--loss", "training"], 0.2, 10),
    ):
        printed = run("lab", "speedup", "--json", *folders, *options).output
        (pair,) = json.loads(printed)["comparisons"][0]["runs"]
        expected = [factor * smoothed(steps, curve, smoothing * STEPS)[-1] for curve in curves]
        assert [pair["baseline_loss"], pair["loss"]] == pytest.approx(expected)


def test_the_table_of_the_command_is_that_of_the_comparison(tmp_path: Path) -> None:
    """One line for each start, with the mean, its interval, p, and the step below a level."""
    ends = {"random": (1.0, 1.2, 1.1), "symmetric": (0.8, 1.0, 1.05), "paired": (1.0, 1.2, 1.1)}
    runs = []
    for init, ends_of_start in ends.items():
        for seed, end in enumerate(ends_of_start, start=1):
            losses = np.interp(range(0, 401, 20), [0, 300, 400], [5, 2, end])
            runs.append(train(tmp_path, losses, init, seed, 400, steps=400))
    folders = [str(run.folder) for run in runs]
    options = ("--smoothing", "0.1", "--below", "3")
    shown = run("lab", "speedup", *folders, *options, width=160)
    rows: dict[str, list[str]] = {}  # the words of each table's line, by the first word
    for line in filter(str.strip, shown.stdout.splitlines()):
        rows.setdefault(line.split()[0], []).extend(line.split())
    comparisons = speedups(runs, smoothing=0.1, level=3.0)
    assert [comparison.start for comparison in comparisons] == ["symmetric", "paired"]
    for comparison in comparisons:
        difference, saved = (comparison.over_seeds(name) for name in ("difference", "saved"))
        cells = [comparison.start, "3", *interval(difference, "+.3f").split()]
        if difference.p is None:
            cells += ["–", "–"]
        else:
            cells += [f"{difference.p:.2g}", f"{difference.detectable:.3f}"]
        assert comparison.steps_later is not None
        cells += [comparison.start, *interval(saved, "+.0%").split()]
        if saved.p is None:
            cells += ["–", "–"]
        else:
            cells += [f"{saved.p:.2g}", f"{saved.detectable:.0%}"]
        cells += [comparison.start, *interval(comparison.steps_later, "+.0f").split()]
        assert rows[comparison.start][: len(cells)] == cells
        assert f"\n {comparison.start} " in shown.stdout  # names begin in the first column
    text = " ".join(shown.stdout.split())
    assert (
        "Against random at step 400 of 400, seed by seed (3 seeds). Difference: held-out loss"
        in text
    )
    assert "(smoothed over 10% of the steps)" in text
    assert "Below 3: steps later than the baseline." in text
    assert verdict(comparisons[0]) in text
    as_json = json.loads(run("lab", "speedup", "--json", *folders, *options).stdout)
    assert (as_json["loss"], as_json["smoothing"]) == ("held-out", 0.1)
    assert as_json["below"] == {each.name: first_below(each, 3.0) for each in runs}
    first = as_json["comparisons"][0]
    assert first["saved_over_seeds"] == asdict(comparisons[0].over_seeds("saved"))
    assert first["difference_over_seeds"] == asdict(comparisons[0].over_seeds("difference"))
    assert first["steps_later"] == asdict(comparisons[0].steps_later)
    assert [each["seed"] for each in first["runs"]] == [1, 2, 3]


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e9])
def test_an_interval_has_the_unit_of_the_differences(scale: float) -> None:
    """Differences that are equal but for rounding are judged next to their size."""
    result = paired([0.1 * scale, 0.3 * scale, 0.2 * scale])
    assert result.low == pytest.approx(-0.0484 * scale, rel=1e-2)
    assert result.p == pytest.approx(0.0742, rel=1e-2)
    assert paired([scale, scale * (1 + 1e-12)]).low is None


def test_small_differences_have_digits_and_a_label_is_whole() -> None:
    changes = ((0.000078, 0.05), (-0.000035, -0.08))
    runs = tuple(SpeedUp(seed, 3.0, 3.0 + d, saved) for seed, (d, saved) in enumerate(changes))
    comparison = StartSpeedUp("symmetric, heads × 1", "random", 200, 200, runs)
    losses, _, note, sentence, *_ = lines_of([comparison], "held-out", 0.05)
    shown = plain(losses, width=80)
    assert " symmetric, heads × 1      2  +0.00002 [−0.00070, +0.00074]  " in shown
    assert all(heading in shown for heading in ("seeds", "loss difference", "detectable"))
    assert max(map(len, shown.splitlines())) <= 80
    assert "0.00080" in shown
    assert "seed by seed (2 seeds)" in str(note)
    assert "0.00080 nats would have been" in sentence


def test_a_speed_up_that_tells_nothing_is_printed_with_its_interval() -> None:
    runs = tuple(SpeedUp(seed, 2.0, 2.1, saved) for seed, saved in enumerate((-0.1, -0.3)))
    comparison = StartSpeedUp("symmetric, heads × 1", "random", 500, 500, runs)
    saved = comparison.over_seeds("saved")
    assert is_uninformative(saved)
    shown = plain(list(lines_of([comparison], "held-out", 0.05))[1], width=80)
    assert f" {interval(saved, '+.0%')}  {saved.p:.2g}" in shown
    assert saved.detectable is not None
    assert f"{saved.detectable:.0%}" in shown
