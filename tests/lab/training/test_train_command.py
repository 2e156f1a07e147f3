"""The command: every field has an option, what is given is heard, and mistakes are one line."""

from __future__ import annotations

import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tests.command import run
from tests.lab.training import making
from tests.lab.training.making import flags

from wqk.tables.run import create_run, open_run
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.recipe import Recipe, make_recipe

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
    assert "differs in width: 16 → 32; seed: 1 → 3" in refused.stderr


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
    import torch

    from wqk_lab.cli.train import summary

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert "3 more GPUs idle: torchrun uses all" in summary(make_recipe())
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "idle" not in summary(make_recipe())
