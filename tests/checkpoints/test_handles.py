"""Handles of files: one owner each, few at once, none in copies, pickles or forked processes."""

from __future__ import annotations

import copy
import gc
import multiprocessing
import os
import pickle
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch
from safetensors.torch import save_file

import wqk
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.checkpoint import Checkpoint
from wqk.errors import CheckpointError, RunError

DECODER = wqk.demo_model("decoder")


def pickled(original: Any) -> Any:
    return pickle.loads(pickle.dumps(original))


COPIES = pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickled])


def save(path: Path, value: float, name: str = "a.weight") -> None:
    save_file({name: torch.full((4, 4), value)}, path)


def total(checkpoint: Checkpoint, name: str = "a.weight") -> float:
    return float(checkpoint.read([Part(name)])[0].sum())


@COPIES
@pytest.mark.parametrize("part", [lambda m: m, lambda m: m[0], lambda m: m.checkpoint])
def test_a_copy_that_is_gone_leaves_the_original_its_file(tmp_path, duplicate, part):
    model = wqk.open(DECODER)
    expected = wqk.open(DECODER)[2, 1].qk.symmetry
    copied = duplicate(part(model))
    del copied
    gc.collect()
    save(tmp_path / "other.safetensors", 7.0)
    # Would take the number of a handle that was closed, and pass for the first file by its time.
    opened = [open_checkpoint(tmp_path) for _ in range(4)]
    assert model[2, 1].qk.symmetry == expected
    assert [total(checkpoint) for checkpoint in opened] == [112.0] * 4


@COPIES
def test_a_copy_outlives_its_original(duplicate: Callable[[Any], Any]):
    model = wqk.open(DECODER)
    expected = model[2, 1].qk.symmetry
    copied = duplicate(wqk.open(DECODER))
    gc.collect()
    assert copied[2, 1].qk.symmetry == expected
    assert copied.checkpoint.name == model.checkpoint.name


def write_archive(path: Path) -> Path:
    torch.save({"a.weight": torch.full((4, 4), 2.0)}, path / "pytorch_model.bin")
    return path


def write_steps(path: Path) -> Path:
    for step in (1, 2):
        (path / f"checkpoint-{step}").mkdir()
        save(path / f"checkpoint-{step}" / "model.safetensors", float(step))
    return path


@COPIES
@pytest.mark.parametrize("write", [write_archive, write_steps])
def test_copies_of_checkpoints_of_every_kind(tmp_path, write, duplicate, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checkpoint = open_checkpoint(write(Path()))
    monkeypatch.chdir("/")
    copied = duplicate(checkpoint)
    assert (total(copied), copied.name, copied.step) == (32.0, checkpoint.name, checkpoint.step)


@COPIES
def test_copies_of_weights_in_memory(duplicate: Callable[[Any], Any]):
    assert total(duplicate(open_checkpoint({"a.weight": np.full((4, 4), 2.0)}))) == 32


def test_a_pickle_holds_no_handle_and_no_token(tmp_path: Path):
    save(tmp_path / "model.safetensors", 2.0)
    assert b"hf_secret" not in pickle.dumps(wqk.open(DECODER, token="hf_secret"))
    assert b"hf_secret" not in pickle.dumps(open_checkpoint(tmp_path, token="hf_secret"))
    assert len(pickle.dumps(open_checkpoint(tmp_path))) < 2000


def test_a_pickle_of_a_file_that_was_replaced_is_refused(tmp_path: Path):
    path, replacement = tmp_path / "model.safetensors", tmp_path / "other.safetensors"
    save(path, 1.0)
    stored = pickle.dumps(open_checkpoint(path))
    times = path.stat().st_atime_ns, path.stat().st_mtime_ns
    save(replacement, 2.0)
    replacement.replace(path)
    os.utime(path, ns=times)  # equal in size and time, and yet another file
    with pytest.raises(CheckpointError, match="no longer what it was"):
        pickle.loads(stored)


def test_few_files_are_open_at_once(tmp_path: Path):
    """Files that were closed are opened again, and must be the same."""
    count, limits = 300, resource.getrlimit(resource.RLIMIT_NOFILE)
    for n in range(count):
        save(tmp_path / f"model-{n:05}.safetensors", float(n), f"{n}.weight")
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, limits[1]))
    try:
        checkpoint = open_checkpoint(tmp_path)
        assert [total(checkpoint, f"{n}.weight") for n in range(count)] == [
            16.0 * n for n in range(count)
        ]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    save(tmp_path / "new.safetensors", 5.0, "0.weight")
    (tmp_path / "new.safetensors").replace(tmp_path / "model-00000.safetensors")
    with pytest.raises(CheckpointError, match=r"model-00000.* no longer the file"):
        total(checkpoint, "0.weight")


def test_without_reads_by_position(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """As on Windows."""
    for function in ("pread", "preadv", "register_at_fork"):
        monkeypatch.delattr(os, function)
    save(tmp_path / "model.safetensors", 2.0)
    assert total(open_checkpoint(tmp_path)) == 32


def in_a_child(work: Callable[[], Any]) -> Any:
    """The result of work in a forked process, or its error, within ten seconds."""
    forking = multiprocessing.get_context("fork")
    receiver, sender = forking.Pipe()

    def run() -> None:
        try:
            sender.send(work())
        except Exception as error:
            sender.send(error)

    process = forking.Process(target=run)
    process.start()
    outcome = receiver.recv() if receiver.poll(10) else "hangs"
    process.kill()
    process.join()
    return outcome


def test_forms_are_read_in_a_forked_process():
    expected = wqk.open(DECODER)[1, 2].qk.symmetry
    assert in_a_child(lambda: wqk.open(DECODER)[1, 2].qk.symmetry) == expected
    fresh = wqk.open(DECODER)
    assert in_a_child(lambda: fresh[1, 2].qk.symmetry) == expected
    assert fresh[1, 2].qk.symmetry == expected


def test_a_scan_in_a_forked_process_says_so_instead_of_waiting():
    pl.DataFrame({"a": [2, 1]}).lazy().sort("a").collect()  # starts the threads
    error = in_a_child(lambda: len(wqk.scan(DECODER)))
    assert isinstance(error, RunError)
    assert "spawn" in str(error)


def test_a_process_forked_from_one_that_only_imported_polars_scans():
    program = f"import os, polars, wqk; scan = wqk.scan; ref = {str(DECODER)!r}"
    forked = "os.fork() or os._exit(not len(scan(ref))); exit(os.wait()[1] != 0)"
    done = subprocess.run([sys.executable, "-c", f"{program}; {forked}"], timeout=60)
    assert done.returncode == 0
