"""The command: every field has an option, what is given is heard, and mistakes are one line."""

from __future__ import annotations

import json
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.command import run
from tests.lab.training import making
from tests.lab.training.making import flags

from wqk._console import counted
from wqk._files import append_lines
from wqk.tables.run import METRICS, SETTINGS, Run, create_run, open_run
from wqk_lab.cli.train import _advice_on_threads, summary
from wqk_lab.training.conversion import continued
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.frequencies import plateau_note
from wqk_lab.training.progress import TrainingProgress
from wqk_lab.training.recipe import SIZES, Recipe, make_recipe

MISTAKES = [
    (["--heads", "3", "--width", "16"], "divisible by the number of heads"),
    (["--steps", "0"], "--steps 0 must be at least 1"),
    (["--steps", "many"], "Invalid value for '--steps'"),
    (["--penalty", "symmetric"], "a kind and a weight such as symmetric=0.1"),
    (["--penalty", "round=1"], "--penalty 'round' must be one of none, symmetric, skew"),
    (["--mode", "decoder", "--objective", "masked"], "an encoder's objective must be masked"),
    (["--preset", "slow"], "Invalid value for '--preset'"),
    (["--report-to", "nonsense"], "expected installed loggers: "),
    ([], "--corpus"),
]

SMALL = making.SMALL | {"steps": 4, "warmup": 1}
wqk_train = partial(run, "lab", "train")


@pytest.fixture
def where(corpus: TokenStore, tmp_path: Path) -> list[str]:
    return ["--corpus", str(corpus.folder), "-o", str(tmp_path / "run")]


def test_every_field_of_a_recipe_has_an_option() -> None:
    help_text = wqk_train("--help").output
    for entry in fields(Recipe):
        if entry.name not in ("penalty_weight", "parent"):  # part of --penalty; --from
            assert f"--{entry.name.replace('_', '-')} " in help_text


# A value of each option that is neither the preset's nor its default.
CHOSEN: dict[str, Any] = {
    "layers": 3,
    "width": 24,
    "heads": 3,
    "intermediate": 40,
    "norm": "pre",
    "dropout": 0.2,
    "initial_std": 0.03,
    "vocabulary_multiple": 8,
    "attention": "eager",
    "init": "symmetric",
    "init_head_norm": 2.0,
    "init_values": 3.0,
    "rows": "documents",
    "block": 16,
    "batch": 5,
    "accumulation": 2,
    "steps": 40,
    "mask_share": 0.25,
    "corruption": "mask",
    "learning_rate": 0.003,
    "warmup": 7,
    "schedule": "cosine",
    "weight_decay": 0.2,
    "clip": 2.0,
    "qk_clip": 50.0,
    "logits": "yes",
    "precision": "float32",
    "seed": 9,
    "log_every": 3,
    "held_out_every": 4,
    "held_out_blocks": 6,
    "score_every": 5,
    "save_every": 8,
    "keep_checkpoints": "last",
}


def test_each_option_sets_its_field(where, monkeypatch):
    trained: list[Recipe] = []

    def stop(recipe: Recipe, corpus: Path, folder: Path, **_: Any) -> None:
        trained.append(recipe)
        raise KeyboardInterrupt

    monkeypatch.setattr("wqk_lab.training.training.train", stop)
    wqk_train("--preset", "paper", *flags(**CHOSEN), *where, exits=130)
    assert trained == [make_recipe("paper", **CHOSEN)]
    plain = make_recipe("paper")
    assert [name for name, value in CHOSEN.items() if getattr(plain, name) == value] == []


def test_what_is_given_is_heard_and_the_rest_is_the_preset_s(where, tmp_path):
    done = wqk_train(
        *flags(**SMALL),
        *where,
        "--mode",
        "decoder",
        "--penalty",
        "skew=0.5",
        "--init",
        "skew",
        "--init-norm",
        "1",
        "--threads",
        "1",
    )
    run = open_run(tmp_path / "run")
    expected = make_recipe(
        "fast",
        mode="decoder",
        penalty="skew",
        penalty_weight=0.5,
        init="skew",
        init_norm=1.0,
        **SMALL,
    )
    assert run.recipe == expected.to_json()
    assert "4 steps, 128 tokens" in done.stdout
    assert f"next: wqk scan {tmp_path / 'run'}" in done.stdout
    # In a pipe, the recipe in a line, and a line for each held-out loss, with the symmetry.
    recipe, *lines = done.stderr.splitlines()
    assert recipe == (
        "decoder (causal), 1 layer, width 16, 2 heads, init skew, penalty skew, 4 steps of "
        "4 × 8 tokens, learning rate 0.0057, seed 1, float32 on 1 thread"
    )
    assert [line.split(":")[0] for line in lines] == [f"step {step}/4" for step in range(5)]
    assert "symmetry -1.00" in lines[0]


def test_a_configuration_of_one_s_own(where: list[str], tmp_path: Path) -> None:
    config = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model_flags = ("--config", str(tmp_path / "config.json"), "--mode", "decoder")
    wqk_train(*model_flags, *flags(block=8, batch=4, steps=2, held_out_blocks=4), *where)
    run = open_run(tmp_path / "run")
    assert run.settings["model"]["class"] == "GPT2LMHeadModel"
    assert run.settings["model"]["config"]["vocab_size"] == 40
    assert len(run.scores.layers) == 3


def test_resuming_needs_no_more_than_the_folder(where: list[str], tmp_path: Path) -> None:
    wqk_train(*flags(**SMALL), *where)
    run = str(tmp_path / "run")
    wqk_train("--resume", "-o", run)
    # The same command again is as good, another is not.
    wqk_train("--resume", *flags(**SMALL), *where)
    refused = wqk_train("--resume", "-o", run, "--seed", "3", "--width", "32", exits=2)
    message = " ".join(refused.stderr.split())
    assert "expected width 16, seed 1, as the run began, got width 32, seed 3; leave" in message


def test_a_resumed_run_takes_its_own_threads_and_a_finished_one_warns_of_nothing(
    where: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    folder = tmp_path / "run"
    wqk_train(*flags(**SMALL), *where, "--stop", "2", "--threads", "1")
    settings = json.loads((folder / SETTINGS).read_text())

    def begun_with(threads: int) -> None:
        environment = settings["environment"] | {"threads": threads}
        (folder / SETTINGS).write_text(json.dumps(settings | {"environment": environment}))

    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch, "get_num_threads", lambda: chosen[-1] if chosen else 1)
    monkeypatch.setattr("wqk_lab.cli.train.usable_cores", lambda: 4)
    begun_with(3)
    resume = ["--resume", "-o", str(folder)]
    partial_run = wqk_train(*resume, "--stop", "3")
    assert chosen == [3]
    assert "float32 on 3 threads" in partial_run.stderr
    assert "resumed with" not in caplog.text
    chosen.clear()
    begun_with(5)  # more than there are
    finished = wqk_train(*resume)
    assert chosen == []
    assert "threads 1 instead of 5" in caplog.text
    assert "--threads 5 is the run's own number" in caplog.text
    assert "the command took" in finished.stdout
    caplog.clear()
    again = wqk_train(*resume)
    assert "resumed with" not in caplog.text
    assert "no step was left" in again.stdout
    begun_with(3)
    wqk_train(*resume, "--threads", "2")
    assert chosen == [2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        *MISTAKES,
        (["--config", __file__], "contains no JSON object"),
    ],
)
def test_mistakes_are_one_line(arguments, message, where, tmp_path):
    done = wqk_train(*(where if arguments else where[2:]), *arguments, exits=2)
    assert message in done.stderr
    assert "Traceback" not in done.output
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("begun", [True, False])
def test_interrupted_it_promises_what_there_is(begun, where, tmp_path, monkeypatch):
    import wqk_lab.training.training

    def interrupt(recipe: Recipe, corpus: Path, folder: Path, **_: Any) -> None:
        if begun:
            create_run(folder, {})
        raise KeyboardInterrupt

    monkeypatch.setattr(wqk_lab.training.training, "train", interrupt)
    done = wqk_train(*flags(**SMALL), *where, exits=130)
    promise = f"wqk lab train --resume -o {tmp_path / 'run'} resumes it"
    assert done.stderr.strip() == f"wqk: interrupted; {promise if begun else 'no run was begun'}"


def test_idle_gpus_are_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "3 more GPUs idle: torchrun uses all" in summary(make_recipe())
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "idle" not in summary(make_recipe())


def test_a_run_is_a_line_for_each_held_out_loss_and_an_outcome(where, tmp_path, monkeypatch):
    """A process that only pretends to train passes on what a run would."""
    options: dict[str, Any] = {}

    def train(recipe: Recipe, corpus: Path, folder: Path, **chosen: Any) -> Run:
        options.update(chosen, corpus=corpus)
        tell = chosen["on_progress"]
        tell(TrainingProgress(0, 7, None, 3.5, None, True, 0.25))
        tell(TrainingProgress(3, 7, 2.75, 3.5, 1234.0, False, 0.25))
        tell(TrainingProgress(7, 7, 2.5, 2.625, 24_000.0, True, None))
        run = create_run(folder, {"recipe": recipe.to_json()})
        for line in (
            {"step": 0, "held_out_loss": 3.5},
            {"step": 7, "loss": 2.5, "tokens": 8192, "seconds": 75.4, "held_out_loss": 2.625},
        ):
            append_lines(run.folder / METRICS, line)
        return run

    monkeypatch.setattr("wqk_lab.training.training.train", train)
    size = {"layers": 1, "width": 32, "heads": 2, "batch": 3, "accumulation": 5, "block": 9}
    done = wqk_train(*flags(**size, steps=7), *where, "--report-to", "tensorboard", "--stop", "5")
    assert options["report_to"] == ("tensorboard",)
    assert (options["stop"], options["resume"], options["parent"]) == (5, False, None)
    lines = done.stderr.splitlines()
    rate = make_recipe(**size, steps=7).learning_rate
    assert lines[0] == (
        "encoder (masked), 1 layer, width 32, 2 heads, init random, 7 steps of 15 × 9 tokens, "
        f"learning rate {rate:g}, seed 1, float32 on {counted(torch.get_num_threads(), 'thread')}"
    )
    assert lines[1:] == [
        "step 0/7: held out 3.500, symmetry 0.25",
        "step 7/7: loss 2.500, held out 2.625, 24,000 tokens/s",
    ]
    folder = tmp_path / "run"
    assert done.stdout.splitlines() == [
        f"{folder}: 7 steps, 8,192 tokens in 0:01:15 of training; held-out loss 3.500 → 2.625 nats",
        "the command took 0:00:00, with held-out losses and checkpoints",
        f"next: wqk scan {folder}, or wqk lab figure updates {folder}",
    ]


def test_a_line_names_a_configuration_a_penalty_and_a_parent() -> None:
    penalty = {"penalty": "skew", "penalty_weight": 0.1}
    own_model = make_recipe(config={"model_type": "bert"}, init="symmetric", **penalty)
    line = summary(own_model)
    assert "a model of type bert, init symmetric, penalty skew" in line
    child = continued(make_recipe(mode="decoder", seed=4), "decoder-4", {"mode": "encoder"})
    line = summary(child)
    assert line.startswith("encoder (causal), 4 layers, width 256, 4 heads, from decoder-4, ")
    assert "seed 4" in line


def test_what_cannot_be_begun_is_a_usage_error(where: list[str], tmp_path: Path) -> None:
    refused = wqk_train("--resume", "--from", tmp_path, *where, exits=2)
    assert "--resume knows what a run continues; leave out --from." in refused.stderr
    refused = wqk_train(*where[2:], exits=2)
    assert "Missing option '--corpus'" in refused.stderr


def test_a_resumed_run_takes_its_own_recipe_but_for_what_is_given(tmp_path, monkeypatch):
    """A value that differs from the run's own reaches the function, which refuses it."""
    recipe = make_recipe(steps=9, seed=3)
    create_run(tmp_path / "run", {"recipe": recipe.to_json()})
    resumed: list[tuple[Recipe, bool]] = []

    def train(recipe: Recipe, corpus: Any, folder: Path, **chosen: Any) -> None:
        resumed.append((recipe, chosen["resume"]))
        raise KeyboardInterrupt

    monkeypatch.setattr("wqk_lab.training.training.train", train)
    folder = ("-o", tmp_path / "run", "--resume")
    for options in ((), ("--size", "base"), ("--preset", "paper"), ("--seed", "3")):
        wqk_train(*folder, *options, exits=130)
    expected = [recipe, replace(recipe, **SIZES["base"]), replace(recipe, preset="paper"), recipe]
    assert resumed == [(each, True) for each in expected]


def test_a_model_that_learns_nothing_is_named(where: list[str], tmp_path: Path) -> None:
    done = wqk_train(*flags(**SMALL), *where)
    note = next(line for line in done.stdout.splitlines() if "has learnt" in line)
    assert "no more than the frequencies of tokens (held-out loss 3.9" in note
    assert "; by the frequencies of tokens alone 3." in note
    assert note.endswith("train longer, on shorter blocks, or with another learning rate")
    losses = {"step": 4, "held_out_loss": 3.0}
    append_lines(tmp_path / "run" / METRICS, losses)
    assert plateau_note(open_run(tmp_path / "run")) == ""


def test_a_run_that_has_learnt_prints_the_loss_of_frequencies(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wqk_lab.training.frequencies.frequency_loss", lambda _: 9.0)
    done = wqk_train(*flags(**SMALL), *where)
    assert done.stdout.splitlines()[0].endswith(" nats; by the frequencies of tokens alone 9.000")
    assert "has learnt" not in done.stdout


def test_runs_of_another_start_are_named_for_a_comparison(where: list[str], tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    wqk_train(*flags(**SMALL), *where[:2], "-o", runs / "random")
    wqk_train(*flags(**SMALL | {"width": 32}), *where[:2], "-o", runs / "wide")
    done = wqk_train(*flags(**SMALL), *where[:2], "--init", "symmetric", "-o", runs / "even")
    assert done.stdout.splitlines()[-1].endswith(
        f"; wqk lab speedup {runs / 'random'} {runs / 'even'} compares the initializations"
    )


def test_a_stopped_run_names_its_steps_and_how_to_resume(where: list[str], tmp_path: Path) -> None:
    stopped = wqk_train(*flags(**SMALL), *where, "--stop", "2")
    assert f"{tmp_path / 'run'}: stopped at 2 of 4 steps, 64 tokens" in stopped.stdout
    assert f"next: wqk lab train --resume -o {tmp_path / 'run'} trains on" in stopped.stdout
    finished = wqk_train("--resume", "-o", tmp_path / "run")
    assert f"{tmp_path / 'run'}: 4 steps, 128 tokens" in finished.stdout
    assert "of training since the run began" in finished.stdout
    assert f"next: wqk scan {tmp_path / 'run'}" in finished.stdout


def test_a_narrow_model_trains_on_one_thread(
    where: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    wqk_train(*flags(**SMALL), *where)
    wqk_train(*flags(**SMALL), *where[:2], "-o", tmp_path / "two", "--threads", "2")
    wqk_train(*flags(**SMALL | {"width": 128}), *where[:2], "-o", tmp_path / "wide")
    assert chosen == [1, 2]


def test_a_busy_machine_is_named_with_several_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wqk_lab.cli.train.usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert _advice_on_threads(0.9) == ""
    assert "(load 7.5 on 2 cores): with --threads 1" in _advice_on_threads(7.5)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert _advice_on_threads(7.5) == ""
