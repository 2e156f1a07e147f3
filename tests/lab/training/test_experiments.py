"""Experiments from a file: which runs, in which order, resumed, and what goes wrong."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from subprocess import STDOUT, TimeoutExpired
from types import SimpleNamespace
from typing import Any, ClassVar, TextIO

import pytest
from click.testing import Result
from tests.command import run
from tests.lab.figures.making import logged
from tests.lab.training.making import experiment

from wqk._files import append_lines
from wqk.errors import OutputError, RunError
from wqk.tables.run import METRICS, open_run
from wqk_lab.cli.speedup import speedup
from wqk_lab.runs.speedup import SMOOTHING
from wqk_lab.training import costs, experiments
from wqk_lab.training.corpus import CorpusOptions, TokenStore, build_corpus
from wqk_lab.training.costs import flops, flops_left, held_out_flops, speed_now, speed_of_runs
from wqk_lab.training.experiments import (
    Trial,
    comparable_runs,
    missing_corpora,
    read_experiments,
    run_experiments,
)
from wqk_lab.training.recipe import make_recipe

WRONG_CELLS = [
    ({"name": "../a"}, "must be a valid folder name"),
    ({"seeds": [1, 1]}, "must be distinct"),
    ({"stop": 7}, "stop must be one of the 6 steps"),
    ({"stop": True}, "stop must be one of the 6 steps"),
    ({"seed": 3}, "cell 'a': a cell lists its seeds; got seed 3"),
    ({"threads": 0}, "threads must be 1 or more; got 0"),
    ({"color": 1}, "cell 'a': recipe: no field named color"),
    ({"heads": 3}, "cell 'a': recipe: the width"),
]

CELLS = (
    {"name": "random", "stop": 4},
    {"name": "held", "init": "symmetric", "penalty": "symmetric", "penalty_weight": 0.1},
)


def written(folder: Path, content: str) -> Path:
    (folder / "own.toml").write_text(content)
    return folder / "own.toml"


def command(folder: Path, *options: str, exits: int = 0) -> Result:
    """The experiments of the file in a folder, with its corpora and runs there."""
    places = ("--corpora", folder, "-o", folder / "runs")
    return run("lab", "experiments", folder / "own.toml", *places, *options, exits=exits)


class Here:
    """Stands for a process of a run: its command is run in this one."""

    def __init__(self, command: Sequence[str], *, stdout: TextIO, **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "wqk"]
        done = run(*command[3:], exits=None)
        stdout.write(done.output)
        self.returncode = done.exit_code

    def wait(self, _: float) -> None:
        """It has ended."""


def test_runs_stop_resume_and_are_left_alone(tmp_path, monkeypatch):
    (tmp_path / "text.txt").write_text("a rose is a rose\nis a rose is a rose\n" * 20)
    options = CorpusOptions(text="characters", document="line", held_out=1)
    build_corpus([tmp_path / "text.txt"], tmp_path / "store", options)
    written(tmp_path, experiment(*CELLS, schedule="constant"))
    assert command(tmp_path, "--dry-run").stdout.count("to do") == 2
    assert not (tmp_path / "runs").exists()
    command(tmp_path, "--jobs", "2")
    runs = {name: open_run(tmp_path / "runs" / f"{name}-1") for name in ("random", "held")}
    assert [run.metrics["step"].max() for run in runs.values()] == [4, 6]
    assert runs["held"].recipe["penalty_weight"] == 0.1
    # Patterns such as runs/random-* match runs alone.
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"random-1", "held-1"}
    # A later stop goes on; what is done is not touched again.
    written(tmp_path, experiment(*(CELLS[0] | {"stop": 6}, CELLS[1]), schedule="constant"))
    monkeypatch.setattr(experiments, "subprocess", SimpleNamespace(Popen=Here, STDOUT=STDOUT))
    again = command(tmp_path)
    assert "random-1: done" in again.stderr
    assert "held-1" not in again.stderr
    assert open_run(tmp_path / "runs/random-1").metrics["step"].max() == 6
    # What is done is compared.
    assert "Against random at step 6 of 6, seed by seed (1 seed)." in " ".join(again.stdout.split())
    assert "not compared" not in again.stderr
    # Another recipe under the same name is not mixed in.
    written(tmp_path, experiment(*CELLS, schedule="constant", batch=8))
    refused = command(tmp_path, exits=2)
    assert "different recipe (batch: 4 → 8)" in " ".join(refused.stderr.split())


NAMED = {"name": "a"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = [", "not a TOML"),
        ("[recipe]\nsteps = 3", r"\[\[cell\]\] tables"),
        (experiment(NAMED, NAMED), "two cells are called 'a'"),
        ("cell = [1]", r"\[\[cell\]\] tables"),
        (experiment({}), "a cell needs a name"),
        *((experiment(NAMED | changes), message) for changes, message in WRONG_CELLS),
    ],
)
def test_files_that_are_no_experiments(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RunError, match=message):
        read_experiments(written(tmp_path, content), tmp_path, tmp_path)


@pytest.mark.parametrize("file", sorted(Path("examples").glob("*.toml")), ids=lambda f: f.name)
def test_the_examples_are_experiments(file: Path, tmp_path: Path) -> None:
    trials = read_experiments(file, tmp_path, tmp_path)
    # With a configuration of its own, a recipe's cost is not known.
    assert all(trial.recipe.config or flops(trial.recipe, trial.goal) > 0 for trial in trials)


@pytest.mark.parametrize(
    "setting", ['"own.json"', "{ model_type = 'gpt2', n_embd = 16, n_layer = 1, n_head = 2 }"]
)
def test_a_configuration_of_one_s_own(setting: str, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "own.json").write_text(json.dumps(config))
    shared = f"[recipe]\ncorpus = 'store'\nseeds = [1]\nmode = 'decoder'\nconfig = {setting}\n"
    file = written(tmp_path, f"{shared}[[cell]]\nname = 'a'")
    (trial,) = read_experiments(file, tmp_path, tmp_path)
    assert trial.recipe.config == config
    assert "cost unknown" in command(tmp_path, "--dry-run").stdout


def test_names_with_a_point_share_no_file(tmp_path: Path) -> None:
    cells = [{"name": f"norm-{norm}", "init_norm": norm} for norm in (1.4, 1.5)]
    trial, other_trial = read_experiments(written(tmp_path, experiment(*cells)), tmp_path, tmp_path)
    assert trial.configuration != other_trial.configuration
    assert trial.log != other_trial.log


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, experiment(*CELLS))
    trials = read_experiments(file, tmp_path, file)
    with pytest.raises(OutputError, match=r"own.toml/random-1: cannot be written"):
        run_experiments(trials)


def test_operations_of_a_step() -> None:
    recipe = make_recipe("fast", layers=2, width=16, heads=2, block=8, batch=4)
    weights, scores = 2 * (4 * 16**2 + 8 * 16**2), 2 * 2 * 8 * 16
    assert flops(recipe, 3) == 3 * 4 * 8 * 6 * (weights + scores)


def ended(trial: Trial, step: int, loss: float = 0.0) -> None:
    """Leave what a run that came this far leaves."""
    made = logged(trial.folder, trial.recipe.to_json(), {step: loss})
    (made.folder / f"checkpoint-{step}").mkdir()


def test_finished_runs_of_one_goal_and_recipe_are_compared(tmp_path: Path) -> None:
    stops = {"random": 6, "symmetric": 6, "paired": 4, "indefinite": 4, "skew": 6}
    cells = [{"name": init, "init": init, "stop": stop} for init, stop in stops.items()]
    file = written(tmp_path, experiment(*cells, seeds=[1, 2], schedule="constant"))
    trials = read_experiments(file, tmp_path, tmp_path)
    for trial in trials:
        ended(trial, 2 if trial.cell == "skew" else trial.goal)
    groups = comparable_runs(trials)
    of_paired, of_random = groups
    names = [run.name for run in of_paired]
    assert names == ["paired-1", "paired-2", "indefinite-1", "indefinite-2"]
    names = [run.name for run in of_random]
    assert names == ["random-1", "random-2", "symmetric-1", "symmetric-2"]
    # Of ten runs, the two of skew have four steps each to go.
    recipe = trials[0].recipe
    assert flops_left(trials) == flops(recipe, 8) + 2 * held_out_flops(recipe, 2, 6)


def test_cells_without_a_common_seed_do_not_keep_the_others_from_being_compared(tmp_path):
    seeds = {"random": [1, 2], "symmetric": [1, 2], "paired": [3]}
    cells = [
        {"name": init, "init": init, "seeds": seeds_of_cell}
        for init, seeds_of_cell in seeds.items()
    ]
    file = written(tmp_path, experiment(*cells))
    for trial in read_experiments(file, tmp_path, tmp_path / "runs"):
        ended(trial, 6, 2.0 + 0.1 * trial.recipe.seed + 0.5 * (trial.cell == "symmetric"))
    result = command(tmp_path)
    assert "not compared: paired and random are compared seed by seed" in result.stderr
    assert re.search(r"symmetric +2 +\+0\.500", result.stdout), result.stdout


def test_a_part_of_the_runs_and_what_they_cost(tmp_path: Path) -> None:
    file = written(tmp_path, experiment(*CELLS, schedule="constant"))
    trials = [t for t in read_experiments(file, tmp_path, tmp_path / "runs") if t.cell == "held"]
    shown = command(tmp_path, "--dry-run", "--only", "hel", "--speed", "2.5").stdout
    assert "held-1" in shown
    assert "random-1" not in shown
    time = "about 1 second of one device at 2.5 TFLOP/s"
    assert f"To do: 1 of 1 runs, {flops_left(trials):.2g} operations, {time}, as given" in " ".join(
        shown.split()
    )
    refused = command(tmp_path, "--only", "symmetric", exits=2).stderr
    assert "no cell has a name that contains 'symmetric'" in refused


def test_runs_are_compared_at_a_level_of_the_loss(tmp_path: Path) -> None:
    cells = [{"name": init, "init": init} for init in ("random", "symmetric")]
    file = written(tmp_path, experiment(*cells, seeds=[1, 2]))
    for trial in read_experiments(file, tmp_path, tmp_path / "runs"):
        ended(trial, 6, (2.0 if trial.cell == "random" else 1.0) + 0.1 * trial.recipe.seed)
    shown = " ".join(command(tmp_path, "--below", "1.5").stdout.split())
    # A trailing mean of 100 steps is never full here.
    assert "by 6: 0 of 2, baseline 0 of 2" in shown
    assert "Below 1.5: steps later than the baseline." in shown


@pytest.mark.parametrize(
    ("listed", "count", "expected"),
    [
        (None, 0, []),
        (None, 2, ["0", "1"]),
        ("3,GPU-8932f937", 2, ["3", "GPU-8932f937"]),
        ("3,9", 1, ["3"]),  # the second is not there
    ],
)
def test_gpus_have_the_names_of_the_environment(listed, count, expected, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: count)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if listed is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert experiments.visible_gpus() == expected


def test_the_commands_smooth_as_the_library_does() -> None:
    assert {option.name: option.default for option in speedup.params}["smoothing"] == SMOOTHING


def trials_of(folder: Path, *cells: dict[str, Any], **recipe: Any) -> list[Trial]:
    file = written(folder, experiment(*cells, **recipe))
    return read_experiments(file, folder / "corpora", folder / "runs")


VARIED: list[dict[str, Any]] = [
    {"init": "symmetric", "init_norm": 1.5, "stop": 5, "threads": 3},
    {"penalty": "skew", "penalty_weight": 0.25, "mode": "decoder", "qk_clip": 20.0},
    {"rows": "documents", "schedule": "cosine", "keep_checkpoints": "0,3", "logits": "yes"},
]


@pytest.mark.parametrize("changes", VARIED, ids=str)
def test_the_command_of_a_trial_trains_its_recipe(changes, tmp_path, monkeypatch):
    """As `wqk lab train` reads it: recipe, corpus, folder, step and threads."""
    import torch

    trained: dict[str, Any] = {}

    def train(recipe: Any, corpus: Path, folder: Path, **options: Any) -> None:
        trained.update(options, recipe=recipe, corpus=corpus, folder=folder)
        raise KeyboardInterrupt

    monkeypatch.setattr("wqk_lab.training.training.train", train)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    (trial,) = trials_of(tmp_path, {"name": "a", **changes}, threads=2)
    assert trial.command(7)[:5] == [sys.executable, "-m", "wqk", "lab", "train"]
    run(*trial.command(7)[3:], exits=130)
    assert trained["recipe"] == trial.recipe
    places = {"corpus": tmp_path / "corpora/store", "folder": tmp_path / "runs/a-1"}
    assert {name: trained[name] for name in places} == places
    assert (trained["stop"], trained["resume"]) == (changes.get("stop", 6), False)
    assert threads == [changes.get("threads", 2)]
    # A run that has begun is resumed, by its folder alone.
    logged(trial.folder, trial.recipe.to_json(), {})
    assert trial.step == 0
    run(*trial.command(7)[3:], exits=130)
    assert (trained["resume"], trained["stop"]) == (True, changes.get("stop", 6))


class Pretended:
    """Stands for a process, whose command and environment are noted; it waits twice."""

    codes: ClassVar[dict[str, int]] = {}
    begun: ClassVar[list[tuple[str, str | None]]] = []

    def __init__(self, command: Sequence[str], *, stdout: TextIO, stderr: int, env: Any) -> None:
        name = Path(command[command.index("--out") + 1]).name
        assert (stderr, env["PATH"]) == (STDOUT, os.environ["PATH"])
        threads = command[command.index("--threads") + 1]
        self.begun.append((f"{name} on {threads}", env.get("CUDA_VISIBLE_DEVICES")))
        stdout.write(f"log of {name}\n")
        self.returncode, self.waits = self.codes.get(name, 0), 1

    def wait(self, _: float) -> None:
        if self.waits:
            self.waits -= 1
            raise TimeoutExpired("wqk", 1)


def test_threads_of_the_command_replace_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[int | None] = []

    def run_experiments(trials: Sequence[Trial], **_: Any) -> list[Trial]:
        begun.extend(trial.threads for trial in trials)
        return []

    monkeypatch.setattr(experiments, "run_experiments", run_experiments)
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").write_text("{}")
    (tmp_path / "own.toml").write_text(experiment({"name": "a"}))
    places = ("--corpora", tmp_path, "--out", tmp_path / "runs")
    run("lab", "experiments", tmp_path / "own.toml", *places, "--threads", 3, "--speed", 1)
    assert begun == [3]


def test_a_narrow_model_has_one_thread(tmp_path: Path) -> None:
    cells = [{"name": "narrow"}, {"name": "wide", "width": 128}, {"name": "two"}]
    trials = trials_of(tmp_path, *cells)
    threads = {}
    for trial, chosen in zip(trials, (None, None, 2), strict=True):
        command = replace(trial, threads=chosen).command(8)
        threads[trial.cell] = command[command.index("--threads") + 1]
    assert threads == {"narrow": "1", "wide": "8", "two": "2"}


@pytest.mark.parametrize(("gpus", "jobs"), [([], None), (["3", "5"], None), (["3"], 2), ([], 16)])
def test_runs_are_begun_told_of_and_counted(gpus, jobs, tmp_path, monkeypatch):
    """Each process has a GPU of its own, or else its share of the cores."""
    monkeypatch.setattr(experiments, "visible_gpus", lambda: gpus)
    monkeypatch.setattr(experiments.os, "cpu_count", lambda: 8)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    process = SimpleNamespace(Popen=Pretended, STDOUT=STDOUT, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(experiments, "subprocess", process)
    monkeypatch.setattr(Pretended, "codes", {"b-1": 1})
    monkeypatch.setattr(Pretended, "begun", [])
    cells = [{"name": name, "width": 128} for name in "abc"]
    trials = [replace(trial, threads=None) for trial in trials_of(tmp_path, *cells)]
    ended(trials[2], 6)
    trials[1].folder.mkdir(parents=True)  # as a run leaves it that was stopped at once
    events: list[tuple[str, str]] = []
    ticks: list[None] = []
    failed = run_experiments(
        trials,
        jobs=jobs,
        on_event=lambda trial, event: events.append((trial.cell, event)),
        on_progress=lambda: ticks.append(None),
    )
    assert [trial.cell for trial in failed] == ["b"]  # and what is done is not begun again
    begun, done = [("a", "training"), ("b", "training")], [("a", "done"), ("b", "failed")]
    assert sorted(events) == sorted([*begun, *done])
    assert len(ticks) == 2
    count = jobs or max(len(gpus), 1)
    assert {name for name, _ in Pretended.begun} == {
        f"{name}-1 on {max(8 // count, 1)}" for name in "ab"
    }
    assert {device for _, device in Pretended.begun} <= set(gpus or [None])
    for trial in trials[:2]:
        assert trial.log.read_text() == f"log of {trial.folder.name}\n"


def test_a_configuration_is_left_for_the_command(tmp_path, monkeypatch):
    monkeypatch.setattr(experiments, "visible_gpus", list)
    process = SimpleNamespace(Popen=Pretended, STDOUT=STDOUT, TimeoutExpired=TimeoutExpired)
    monkeypatch.setattr(experiments, "subprocess", process)
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    content = "[[cell]]\nname = 'a'\ncorpus = 'store'\nseeds = [1]\nmode = 'decoder'\n"
    content += "[cell.config]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in config.items())
    (trial,) = read_experiments(written(tmp_path, content), tmp_path, tmp_path / "runs")
    assert run_experiments([trial]) == []
    command = trial.command(1)
    assert command[command.index("--config") + 1] == str(trial.configuration)
    assert json.loads(trial.configuration.read_text()) == config
    assert "--width" not in command


def test_how_far_runs_are_and_what_they_lack(tmp_path: Path) -> None:
    cells = [{"name": "a"}, {"name": "b", "corpus": "elsewhere"}, {"name": "c"}]
    first, second, third = trials_of(tmp_path, *cells)
    assert missing_corpora([first, second, third]) == [first.corpus, second.corpus]
    (first.corpus).mkdir(parents=True)
    (first.corpus / "store.json").write_text("{}")
    assert missing_corpora([first, second, third]) == [second.corpus]
    ended(second, 6)
    assert missing_corpora([first, second, third]) == []  # what is done needs none
    assert (first.step, second.step, first.done, second.done) == (None, 6, False, True)
    ended(third, 5)
    assert not third.done  # a checkpoint before its goal
    # Speed is that of all runs that have timed their steps; others do not count.
    runs = first.folder.parent
    assert speed_of_runs(runs) is None
    for trial, step, seconds in ((second, 6, 2.0), (third, 5, 3.0)):
        append_lines(trial.folder / METRICS, {"step": step, "seconds": seconds})
    expected = flops(second.recipe, 11) / 5.0
    assert speed_of_runs(runs) == pytest.approx(expected)
    # The last line of a run is its held-out loss, which has no time.
    append_lines(second.folder / METRICS, {"step": 6, "held_out_loss": 1.0})
    logged(runs / "of another version", {}, {5: 1.0})
    assert speed_of_runs(runs) == pytest.approx(expected)
    # What is left: all of the first, a step of the third; of a run past its goal, nothing.
    held_out = held_out_flops(first.recipe, None, 6) + held_out_flops(third.recipe, 5, 6)
    assert flops_left([first, second, third]) == flops(first.recipe, 7) + held_out
    append_lines(third.folder / METRICS, {"step": 9, "seconds": 1.0})
    assert flops_left([third]) == 0


@pytest.mark.parametrize(
    ("begun", "goal", "losses"),
    [
        (None, 40, 5),  # of 0, 10, 20, 30, 40
        (None, 45, 6),
        (0, 40, 4),
        (10, 40, 3),
        (39, 41, 2),
        (40, 40, 0),
        (50, 40, 0),
    ],
)
def test_held_out_losses_cost_a_third_of_a_training_row(begun, goal, losses):
    recipe = make_recipe(steps=50, held_out_every=10, held_out_blocks=7, batch=4)
    expected = losses * 7 * flops(recipe, 1) / 4 / 3
    assert held_out_flops(recipe, begun, goal) == pytest.approx(expected)


def test_the_speed_is_that_of_the_steps_with_the_most_rows(monkeypatch, corpus):
    """One thread is measured, and as many as there are; the faster counts."""
    import torch

    recipe = make_recipe("fast", layers=1, width=16, heads=2, block=8, batch=4)
    assert speed_now(recipe, corpus, enough=0.01) > 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    threads: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    clock = iter(range(1000))  # every step takes a second with two threads, a half with one

    def now() -> float:
        return next(clock) / (2 if threads[-1] == 1 else 1)

    monkeypatch.setattr(costs, "time", SimpleNamespace(perf_counter=now))
    assert speed_now(recipe, corpus, enough=8.0) == pytest.approx(flops(recipe, 1) / 0.5)
    assert threads == [1, 2, 2]


def test_a_dry_run_says_how_long_the_rest_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the speed of a run that has begun, if none is given; otherwise of a few steps now."""
    cells = [{"name": "a", "steps": 20_000}, {"name": "b", "steps": 20_000}]
    file = written(tmp_path, experiment(*cells))
    first, second = read_experiments(file, tmp_path, tmp_path / "runs")
    unknown = " ".join(command(tmp_path, "--dry-run").stdout.split())
    assert "their time can be estimated once the token store is there" in unknown
    monkeypatch.setattr(TokenStore, "open", lambda folder: folder)
    monkeypatch.setattr(costs, "speed_now", lambda recipe, store: flops_left([first, second]) / 600)
    rough = " ".join(command(tmp_path, "--dry-run").stdout.split())
    assert "very roughly 10 minutes of one device" in rough
    assert "measured now in a few training steps. Held-out losses are included" in rough
    logged(first.folder, first.recipe.to_json(), {5_000: 1.0})
    append_lines(first.folder / METRICS, {"step": 5_000, "seconds": 900.0})
    append_lines(first.folder / METRICS, {"step": 5_000, "held_out_loss": 1.0})
    shown = command(tmp_path, "--dry-run")
    rows = [line.split() for line in shown.stdout.splitlines()]
    assert ["a-1", "5000", "20000", "begun"] in rows
    assert ["b-1", "0", "20000", "to", "do"] in rows
    assert sum(line.startswith((" a-1 ", " b-1 ")) for line in shown.stdout.splitlines()) == 2
    rate = flops(first.recipe, 5_000) / 900 / 1e12
    training = flops(second.recipe, 35_000)
    left = flops_left([first, second])
    # Seven times as many steps as the first run took in 900 s, and the held-out losses.
    hours = 900 * 7 / 3600 * left / training
    text = " ".join(shown.stdout.split())
    assert f"To do: 2 of 2 runs, {left:.2g} operations, about {hours:.1f} hours" in text
    assert f"of one device at {rate:.2g} TFLOP/s, as measured in the runs that have begun." in text
    assert f"no corpus in {tmp_path / 'store'}, which unfinished runs need" in " ".join(
        shown.stderr.split()
    )
