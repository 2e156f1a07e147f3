"""A run that grows while it is watched: whole checkpoints once each, torn ones never."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import wqk
from wqk.scanning.surveys.watch import watch
from wqk.tables.score_table import read_table

if TYPE_CHECKING:
    from pathlib import Path


def checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    shutil.copytree(wqk.demo_model("decoder"), folder)
    return folder


def steps(table: wqk.ScoreTable) -> list[int]:
    return sorted(table.frame["step"].unique())


def test_checkpoints_are_scored_as_they_become_whole(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    checkpoint(run, 10)
    torn = checkpoint(run, 20) / "model.safetensors"
    content = torn.read_bytes()
    torn.write_bytes(content[: len(content) // 2])
    waited: list[str] = []

    def mend(folder: str, reason: str) -> None:
        waited.append(folder)
        torn.write_bytes(content)
        shutil.rmtree(run / "checkpoint-10", ignore_errors=True)  # as trainers do

    with ThreadPoolExecutor(1) as threads:
        tables = list(
            watch(run, out=out, until=20, every=0.01, heads=False, executor=threads, on_wait=mend)
        )
    assert waited == [str(run / "checkpoint-20")]
    assert steps(tables[-1]) in ([10, 20], [20])
    assert steps(read_table(out / "scores.parquet")) == steps(tables[-1])


def test_a_watch_resumes_and_keeps_what_the_trainer_has_deleted(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    seen: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        for step in (5, 9, 100):
            checkpoint(run, step)
            if step > 5:
                shutil.rmtree(run / "checkpoint-5", ignore_errors=True)
            tables = list(
                watch(
                    run, out=out, until=step, every=0.01, heads=False, executor=threads,
                    on_scores=lambda rows: seen.append(rows.frame["step"][0]),
                )
            )  # fmt: skip
    assert seen == steps(tables[-1]) == [5, 9, 100]


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    run, waits = tmp_path / "run", []

    def wait(folder: str, reason: str) -> None:
        waits.append((folder, reason))
        run.mkdir()
        checkpoint(run, 5)

    with ThreadPoolExecutor(1) as threads:
        *_, table = watch(
            run, out=tmp_path / "out", until=5, every=0.01, executor=threads, on_wait=wait
        )
    assert waits == [(str(run), "there is no such folder")]
    assert steps(table) == [5]


def test_a_killed_watch_loses_nothing(tmp_path: Path) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    for step in range(1, 6):
        checkpoint(run, step)
    command = [
        sys.executable, "-m", "wqk", "watch", str(run), "--out", str(out), "--every", "0.05",
    ]  # fmt: skip
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        timer.cancel()
    checkpoint(run, 6)
    with ThreadPoolExecutor(1) as threads:
        *_, table = watch(run, out=out, until=6, every=0.01, heads=False, executor=threads)
    assert steps(table) == [1, 2, 3, 4, 5, 6]
    assert len(table) == 6 * 4
