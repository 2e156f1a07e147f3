"""Experiments from a file: which runs, in which order, resumed, and what goes wrong."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from subprocess import STDOUT
from types import SimpleNamespace
from typing import TextIO

import pytest
from tests.command import run

from wqk._files import append_lines
from wqk.errors import OutputError, RunError
from wqk.tables.run import METRICS, create_run, open_run
from wqk_lab.cli.speedup import speedup
from wqk_lab.runs.speedup import SMOOTHING
from wqk_lab.training import experiments
from wqk_lab.training.corpus import CorpusOptions, build_corpus
from wqk_lab.training.experiments import (
    comparable_runs,
    flops,
    flops_left,
    read_experiments,
    run_experiments,
)
from wqk_lab.training.recipe import make_recipe

SMALL = """
[recipe]
preset = "fast"
layers = 1
width = 16
heads = 2
block = 8
batch = 4
steps = 6
held-out-blocks = 4
corpus = "text"
seeds = [1]
threads = 1
schedule = "constant"
"""
CELLS = """
[[cell]]
name = "random"
stop = 4
[[cell]]
name = "held"
init = "symmetric"
penalty = "symmetric"
penalty-weight = 0.1
"""


def written(folder: Path, content: str) -> Path:
    (folder / "own.toml").write_text(content)
    return folder / "own.toml"


class Here:
    """Stands for a process of a run: its command is run in this one."""

    def __init__(self, command: Sequence[str], *, stdout: TextIO, **_: object) -> None:
        assert command[:3] == [sys.executable, "-m", "wqk"]
        done = run(*command[3:])
        stdout.write(done.output)
        self.returncode = done.exit_code

    def wait(self, _: float) -> None:
        """It has ended."""


def test_runs_stop_resume_and_are_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("a rose is a rose\nis a rose is a rose\n" * 20)
    options = CorpusOptions(text="characters", document="line", held_out=1)
    build_corpus([tmp_path / "text.txt"], tmp_path / "text", options)
    file = written(tmp_path, SMALL + CELLS)
    arguments = [
        "lab",
        "experiments",
        str(file),
        "--corpora",
        str(tmp_path),
        "-o",
        str(tmp_path / "runs"),
    ]
    planned = run(*arguments, "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert planned.stdout.count("to do") == 2
    assert not (tmp_path / "runs").exists()
    done = run(*arguments, "--jobs", "2")
    assert done.exit_code == 0, done.output
    runs = {name: open_run(tmp_path / "runs" / f"{name}-1") for name in ("random", "held")}
    assert {name: run.metrics["step"].max() for name, run in runs.items()} == {
        "random": 4,
        "held": 6,
    }
    assert runs["held"].recipe["penalty_weight"] == 0.1
    # Patterns such as runs/random-* match runs alone.
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"random-1", "held-1"}
    # A later stop goes on; what is done is not touched again.
    written(tmp_path, SMALL + CELLS.replace("stop = 4", "stop = 6"))
    monkeypatch.setattr(experiments, "subprocess", SimpleNamespace(Popen=Here, STDOUT=STDOUT))
    again = run(*arguments)
    assert again.exit_code == 0, again.output
    assert "random-1: done" in again.stderr
    assert "held-1" not in again.stderr
    assert open_run(tmp_path / "runs/random-1").metrics["step"].max() == 6
    # What is done is compared.
    assert "Against random at step 6 of 6, seed by seed." in " ".join(again.stdout.split())
    assert "not compared" not in again.stderr
    # Another recipe under the same name is not mixed in.
    written(tmp_path, SMALL.replace("batch = 4", "batch = 8") + CELLS)
    other = run(*arguments)
    assert other.exit_code == 2
    assert "different recipe (batch: 4 → 8)" in " ".join(other.stderr.split())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("x = [", "not a TOML"),
        ("[recipe]\nsteps = 3", r"\[\[cell\]\] tables"),
        (SMALL + '[[cell]]\nname = "a"\n[[cell]]\nname = "a"', "two cells are called 'a'"),
        ("cell = [1]", r"\[\[cell\]\] tables"),
        (SMALL + "[[cell]]\n", "a cell needs a name"),
        (SMALL + '[[cell]]\nname = "../a"', "must be a valid folder name"),
        (SMALL + '[[cell]]\nname = "a"\nseeds = [1, 1]', "must be distinct"),
        (SMALL + '[[cell]]\nname = "a"\nstop = 7', "stop must be one of the 6 steps"),
        (SMALL + '[[cell]]\nname = "a"\nstop = true', "stop must be one of the 6 steps"),
        (SMALL + '[[cell]]\nname = "a"\nseed = 3', "cell 'a': a cell lists its seeds; got seed 3"),
        (SMALL + '[[cell]]\nname = "a"\nthreads = 0', "threads must be 1 or more; got 0"),
        (SMALL + '[[cell]]\nname = "a"\ncolor = 1', "cell 'a': recipe: no field named color"),
        (SMALL + '[[cell]]\nname = "a"\nheads = 3', "cell 'a': recipe: the width"),
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
    "given", ['"own.json"', "{ model_type = 'gpt2', n_embd = 16, n_layer = 1, n_head = 2 }"]
)
def test_a_configuration_of_one_s_own(given: str, tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "own.json").write_text(json.dumps(config))
    file = written(tmp_path, own_model(given))
    (trial,) = read_experiments(file, tmp_path, tmp_path)
    assert trial.recipe.config == config
    arguments = ["lab", "experiments", str(file), "--corpora", str(tmp_path), "-o", str(tmp_path)]
    assert "cost unknown" in run(*arguments, "--dry-run").stdout


def test_names_with_a_point_share_no_file(tmp_path: Path) -> None:
    cells = "".join(f'[[cell]]\nname = "norm-{norm}"\ninit-norm = {norm}\n' for norm in (1.4, 1.5))
    one, other = read_experiments(written(tmp_path, SMALL + cells), tmp_path, tmp_path)
    assert one.configuration != other.configuration
    assert one.log != other.log


def test_a_folder_that_cannot_be_created_is_named(tmp_path: Path) -> None:
    file = written(tmp_path, SMALL + CELLS)
    trials = read_experiments(file, tmp_path, file)
    with pytest.raises(OutputError, match=r"own.toml/random-1: cannot be written"):
        run_experiments(trials)


def own_model(given: str) -> str:
    """An experiment of one step with a configuration."""
    recipe = SMALL.replace("layers = 1\nwidth = 16\nheads = 2\n", "mode = 'decoder'\n")
    return recipe.replace("steps = 6", f"steps = 1\nconfig = {given}") + "[[cell]]\nname = 'a'"


def test_operations_of_a_step() -> None:
    recipe = make_recipe("fast", layers=2, width=16, heads=2, block=8, batch=4)
    weights, scores = 2 * (4 * 16**2 + 8 * 16**2), 2 * 2 * 8 * 16
    assert flops(recipe, 3) == 3 * 4 * 8 * 6 * (weights + scores)


def test_finished_runs_of_one_goal_and_recipe_are_compared(tmp_path: Path) -> None:
    cells = {"random": 6, "symmetric": 6, "paired": 4, "indefinite": 4, "skew": 6}
    content = SMALL.replace("seeds = [1]", "seeds = [1, 2]") + "".join(
        f'[[cell]]\nname = "{init}"\ninit = "{init}"\nstop = {stop}\n'
        for init, stop in cells.items()
    )
    trials = read_experiments(written(tmp_path, content), tmp_path, tmp_path)
    for trial in trials:
        run = create_run(trial.folder, {"recipe": trial.recipe.to_json()})
        step = 2 if trial.cell == "skew" else trial.goal
        (run.folder / f"checkpoint-{step}").mkdir()
        append_lines(run.folder / METRICS, {"step": step})
    groups = comparable_runs(trials)
    assert [[run.name for run in group] for group in groups] == [
        ["paired-1", "paired-2", "indefinite-1", "indefinite-2"],
        ["random-1", "random-2", "symmetric-1", "symmetric-2"],
    ]
    # Of ten runs, the two of skew have four steps each to go.
    assert flops_left(trials) == flops(trials[0].recipe, 8)


def test_cells_without_a_common_seed_do_not_keep_the_others_from_being_compared(
    tmp_path: Path,
) -> None:
    seeds = {"random": [1, 2], "symmetric": [1, 2], "paired": [3]}
    content = SMALL + "".join(
        f'[[cell]]\nname = "{init}"\ninit = "{init}"\nseeds = {some}\n'
        for init, some in seeds.items()
    )
    file = written(tmp_path, content)
    for trial in read_experiments(file, tmp_path, tmp_path):
        made = create_run(trial.folder, {"recipe": trial.recipe.to_json()})
        (made.folder / "checkpoint-6").mkdir()
        loss = 2.0 + 0.1 * trial.recipe.seed + 0.5 * (trial.cell == "symmetric")
        append_lines(made.folder / METRICS, {"step": 6, "loss": loss, "held_out_loss": loss})
    arguments = ["lab", "experiments", str(file), "--corpora", str(tmp_path), "-o", str(tmp_path)]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert "not compared: paired and random are compared seed by seed" in result.stderr
    assert re.search(r"symmetric +2 +\+0\.500", result.stdout), result.stdout


def test_the_commands_smooth_as_the_library_does() -> None:
    options = {option.name: option.default for option in speedup.params}
    assert options["smoothing"] == SMOOTHING
