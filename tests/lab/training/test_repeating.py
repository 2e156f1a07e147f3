"""Repeated runs: what may differ between two runs that are to have the same bits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.lab.training.making import tiny

from wqk.tables.run import SETTINGS, Run, open_run
from wqk_lab.training.corpus import TokenStore
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


# Wide enough for kernels that work in blocks, and for two threads to share a product.
WIDE = {"width": 128, "block": 32, "batch": 32, "steps": 4, "save_every": 4}


@pytest.fixture(scope="module")
def first(corpus: TokenStore, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    torch.set_num_threads(1)  # as every test does, but this comes before the first
    return weights(train(tiny(**WIDE), corpus.folder, tmp_path_factory.mktemp("first") / "run"))


def test_in_another_process_with_other_settings_it_has_the_same_bits(corpus, first, tmp_path):
    folders = {"corpus": str(corpus.folder), "folder": str(tmp_path / "run")}
    order = {"recipe": tiny(**WIDE).to_json(), **folders}
    environment = {"PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "2", "MALLOC_ARENA_MAX": "1"}
    subprocess.run(
        [sys.executable, "-c", TRAIN, json.dumps(order)],
        check=True,
        env={**os.environ, **environment},
    )
    assert weights(open_run(tmp_path / "run")) == first


def test_a_run_records_what_chooses_its_kernels_and_says_what_has_changed(
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
    changed = begun_in | {"torch": "2.0.1", "processor": "a Xeon", "threads": 3}
    (tmp_path / SETTINGS).write_text(json.dumps({**run.settings, "environment": changed}))
    train(None, None, tmp_path, resume=True)
    differences = (
        f"torch {torch.__version__} instead of 2.0.1, processor {begun_in['processor']} instead of "
        "a Xeon, threads 1 instead of 3; its numbers can"
    )
    assert f"{tmp_path}: resumed with {differences}" in caplog.text
    assert "was never interrupted; --threads 3 is the run's own number" in caplog.text
