"""Sentences of reports about the initializations among runs."""

from __future__ import annotations

import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from tests.lab.figures.making import logged, make_run

import wqk.reporting.report
from wqk.tables.run import Run
from wqk_lab.runs.outcomes import is_uninformative, results
from wqk_lab.runs.seeds import Paired


def started(folder: Path, init: str, seed: int, saving: float) -> Run:
    """A run whose held-out loss falls by 1 / step, sooner by a share of its steps."""
    recipe = {"init": init, "seed": seed, "steps": 100}
    losses = {step: 4.0 - step / 100 / (1 - saving) + seed / 100 for step in range(10, 101, 10)}
    return logged(folder / f"{init}-{seed}", recipe, losses)


def test_a_speed_up_is_told_with_its_interval(tmp_path: Path) -> None:
    savings = {1: 0.2, 2: 0.3, 3: 0.25}
    runs = [started(tmp_path, "random", seed, 0.0) for seed in savings]
    runs += [started(tmp_path, "symmetric", seed, saved) for seed, saved in savings.items()]
    difference, saved = results(runs)
    assert "symmetric ends 0." in difference
    assert "below random" in difference
    assert saved.startswith("Speed-up of symmetric over random: +2")
    assert saved.endswith("of the steps (95 % interval, 3 seeds).")
    # The other way round, were the starts exchanged.
    exchanged = [started(tmp_path / "other", "random", s, saved) for s, saved in savings.items()]
    exchanged += [started(tmp_path / "other", "symmetric", s, 0.0) for s in savings]
    assert "above random" in results(exchanged)[0]
    assert "over random: −2" in results(exchanged)[1]


@pytest.mark.parametrize("saved", [0.2, 0.0, -0.25])
def test_equal_differences_are_no_single_seed(tmp_path: Path, saved: float) -> None:
    """The losses of the second seed are .01 higher: the differences are equal but for rounding."""
    runs = [started(tmp_path, "random", seed, 0.0) for seed in (1, 2)]
    runs += [started(tmp_path, "symmetric", seed, saved) for seed in (1, 2)]
    difference, _ = results(runs)
    assert "in each of 2 seeds: equal differences give no interval" in difference
    assert "one common seed" not in difference
    single = results([run for run in runs if run.recipe["seed"] == 1])
    assert "one common seed" in single[0]


def test_runs_without_another_start_or_a_common_seed_are_passed_over(tmp_path: Path) -> None:
    assert results([]) == []
    assert results([make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=2)]) == []
    alone = [started(tmp_path, "random", 1, 0.0), started(tmp_path, "symmetric", 2, 0.2)]
    assert results(alone) == []


def test_a_report_tells_what_packages_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = tomllib.loads(Path(__file__).parents[3].joinpath("pyproject.toml").read_text())
    declaration = declared["project"]["entry-points"]["wqk.results"]["laboratory"]
    module, _, name = declaration.partition(":")
    assert getattr(import_module(module), name) is results
    entry_point = SimpleNamespace(load=lambda: lambda runs: [f"{len(runs)} runs & more"])
    monkeypatch.setattr(wqk.reporting.report, "entry_points", lambda group: [entry_point])
    section = wqk.reporting.report.runs_section([make_run(tmp_path / "a")])
    assert "<li>1 runs &amp; more</li>" in section


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (-1.0, 1.0, False),
        (-1.01, 0.5, True),
        (-0.5, 1.01, True),
        (0.0, 1.01, True),
        (-1.01, 0.0, True),
        (0.01, 1.5, False),
        (-1.5, -0.01, False),
    ],
)
def test_an_interval_beyond_what_can_be_has_no_news(
    low: float, high: float, expected: bool
) -> None:
    """Unless the interval excludes zero; speed-ups lie from −1 to 1, these included."""
    assert is_uninformative(Paired(3, 0.1, low, high)) == expected
