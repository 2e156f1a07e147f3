"""Several processes: each takes its share of the same batches, and the run is the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from safetensors.numpy import load_file
from tests.lab.training.making import LOOKS, SAVES, SHAPE, WORK, flags, tiny

from wqk.tables.run import open_run
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.training import train

# What differs from a tiny recipe.
OTHER = {"accumulation": 2, "held_out_blocks": 20}
PENALTY = {"penalty": "symmetric", "penalty_weight": 0.1}
FLAGS = flags(**SHAPE, **WORK | LOOKS | SAVES | OTHER, penalty="symmetric=0.1")


def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return subprocess.run(
        [*launcher, "-m", "wqk", "lab", "train", *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_two_processes_train_as_one(corpus: TokenStore, tmp_path: Path) -> None:
    done = torchrun(*FLAGS, "--corpus", str(corpus.folder), "-o", str(tmp_path / "two"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("12 steps") == 1
    distributed = open_run(tmp_path / "two")
    assert distributed.settings["environment"]["processes"] == 2
    recipe = tiny(**OTHER, **PENALTY)
    assert distributed.recipe == recipe.to_json()
    single = train(recipe, corpus.folder, tmp_path / "one")
    # Sums in another order: a few units in the last place of float32, grown over 12 steps.
    for name in ("loss", "held_out_loss", "penalty"):
        expected = single.metrics[name].drop_nulls().to_list()
        assert distributed.metrics[name].drop_nulls().to_list() == pytest.approx(
            expected, rel=1e-5
        ), name
    assert distributed.metrics["tokens"].equals(single.metrics["tokens"])
    weights, distributed_weights = (
        load_file(run.checkpoints[-1][1] / "model.safetensors") for run in (single, distributed)
    )
    for name, weight in weights.items():
        if not name.endswith("key.bias"):  # moves no attention weight: its gradient is rounding
            assert distributed_weights[name] == pytest.approx(weight, abs=2e-5), name
    key = ["step", "layer", "head"]
    assert distributed.scores.frame.select(key).equals(single.scores.frame.select(key))
    assert (distributed.scores.frame["norm"] / single.scores.frame["norm"] - 1).abs().max() < 1e-4
    assert distributed.scores.frame.select(pl.struct(key).is_duplicated().any()).item() is False


@pytest.mark.campaign
def test_two_processes_go_on(corpus: TokenStore, tmp_path: Path) -> None:
    place = ("--corpus", str(corpus.folder), "-o", str(tmp_path / "two"))
    odd = torchrun(*FLAGS, "--batch", "7", *place)
    assert odd.returncode
    assert "divisible by the number of processes; got 7 blocks and 2 processes" in odd.stderr
    assert not (tmp_path / "two").exists()
    assert torchrun(*FLAGS, *place).returncode == 0
    weights = tmp_path / "two" / "checkpoint-12" / "model.safetensors"
    finished = weights.read_bytes()
    again = torchrun("--resume", "-o", str(tmp_path / "two"))
    assert again.returncode == 0, again.stderr
    assert weights.read_bytes() == finished
