"""Repeated runs: what may differ between two runs that are to have the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from wqk.tables.run import SETTINGS, Run, open_run
from wqk_lab.training.corpus import TokenStore
from wqk_lab.training.recipe import Recipe
from wqk_lab.training.training import train

# A process of its own, as `wqk lab experiments` starts one for each run.
TRAIN = """
import json, sys, torch
from wqk_lab.training.recipe import Recipe
from wqk_lab.training.training import train
order = json.loads(sys.argv[1])
torch.set_num_threads(1)
train(Recipe.from_json(order["recipe"]), order["corpus"], order["folder"])
"""


def weights(run: Run) -> bytes:
    return (run.checkpoints[-1][1] / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def recipe(tiny: Any) -> Recipe:
    # Wide enough for kernels that work in blocks, and for two threads to share a product.
    made: Recipe = tiny(width=128, block=32, batch=32, steps=4, save_every=4)
    return made


@pytest.fixture(scope="module")
def first(recipe: Recipe, corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.set_num_threads(1)  # as every test does, but this comes before the first
    return weights(train(recipe, corpus.folder, tmp_path_factory.mktemp("first") / "run"))


def as_it_is() -> None:
    pass


def deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)


def denormals_flushed() -> None:
    torch.set_flush_denormal(True)


@pytest.fixture
def restored() -> Any:
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_flush_denormal(False)


@pytest.mark.usefixtures("restored")
@pytest.mark.parametrize("setting", [as_it_is, deterministic_algorithms, denormals_flushed])
def test_a_repeated_run_has_the_same_bits(
    setting: Callable[[], None], recipe: Recipe, corpus: TokenStore, first: bytes, tmp_path: Path
) -> None:
    setting()
    assert weights(train(recipe, corpus.folder, tmp_path)) == first


def test_where_its_memory_lies_changes_no_bit(
    recipe: Recipe, corpus: TokenStore, first: bytes, tmp_path: Path
) -> None:
    kept = [torch.empty(1 + (7919 * n) % 100_003) for n in range(301)][::2]
    assert weights(train(recipe, corpus.folder, tmp_path)) == first
    assert kept


def test_in_another_process_with_other_settings_it_has_the_same_bits(
    recipe: Recipe, corpus: TokenStore, first: bytes, tmp_path: Path
) -> None:
    order = {
        "recipe": recipe.to_json(),
        "corpus": str(corpus.folder),
        "folder": str(tmp_path / "run"),
    }
    other = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "1"}
    subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(order)], check=True, env={**os.environ, **other}
    )
    assert weights(open_run(tmp_path / "run")) == first


def test_two_threads_repeat_what_two_threads_gave(
    recipe: Recipe, corpus: TokenStore, first: bytes, tmp_path: Path
) -> None:
    torch.set_num_threads(2)
    runs = [train(recipe, corpus.folder, tmp_path / name) for name in ("one", "again")]
    assert weights(runs[0]) == weights(runs[1])
    torch.set_num_threads(1)
    assert weights(train(recipe, corpus.folder, tmp_path / "single")) == first


def test_a_run_records_what_chooses_its_kernels(
    tiny: Any,
    corpus: TokenStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    run = train(tiny(steps=4), corpus.folder, tmp_path, stop=2)
    begun_in = run.settings["environment"]
    assert begun_in["instructions"] == torch.backends.cpu.get_cpu_capability()
    assert begun_in["kernels"] == {"ONEDNN_MAX_CPU_ISA": "AVX2"}
    assert begun_in["processor"]
    changed = begun_in | {"processor": "a Xeon", "instructions": "AVX512"}
    (tmp_path / SETTINGS).write_text(json.dumps({**run.settings, "environment": changed}))
    train(None, None, tmp_path, resume=True)
    assert f"processor {begun_in['processor']} instead of a Xeon" in caplog.text
