"""A run that grows while it is watched: whole checkpoints once each, torn ones never."""

from __future__ import annotations

import contextlib
import os
import pty
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests import small
from tests.command import run as cli

import wqk
from wqk.errors import OutputError, WqkError
from wqk.scanning.surveys.watch import watch
from wqk.tables.score_table import read_table


def checkpoint(run: Path, step: int) -> Path:
    folder = run / f"checkpoint-{step}"
    shutil.copytree(wqk.demo_model("decoder"), folder)
    return folder


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run without checkpoints."""
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """The folder of the watch's scores."""
    return tmp_path / "out"


def watched(run: Path, out: Path, **options: Any) -> Iterator[wqk.ScoreTable]:
    with ThreadPoolExecutor(1) as threads:
        yield from watch(run, out=out, every=0.01, heads=False, executor=threads, **options)


def steps(table: wqk.ScoreTable) -> list[int]:
    return sorted(table.frame["step"].unique())


def test_checkpoints_are_scored_as_they_become_whole(run: Path, out: Path) -> None:
    checkpoint(run, 10)
    torn = checkpoint(run, 20) / "model.safetensors"
    content = torn.read_bytes()
    torn.write_bytes(content[: len(content) // 2])
    waited: list[str] = []

    def mend(folder: str, reason: str) -> None:
        waited.append(folder)
        torn.write_bytes(content)
        shutil.rmtree(run / "checkpoint-10", ignore_errors=True)  # as trainers do

    tables = list(watched(run, out, until=20, on_wait=mend))
    assert waited == [str(run / "checkpoint-20")]
    assert steps(tables[-1]) in ([10, 20], [20])
    assert steps(read_table(out / "scores.parquet")) == steps(tables[-1])


def test_a_watch_resumes_and_keeps_what_the_trainer_has_deleted(run: Path, out: Path) -> None:
    seen: list[int] = []
    for step in (5, 9, 100):
        checkpoint(run, step)
        if step > 5:
            shutil.rmtree(run / "checkpoint-5", ignore_errors=True)
        tables = list(
            watched(run, out, until=step, on_scores=lambda rows: seen.append(rows.frame["step"][0]))
        )
    assert seen == steps(tables[-1]) == [5, 9, 100]


def test_a_run_that_does_not_exist_yet_is_waited_for(tmp_path: Path, out: Path) -> None:
    run, waits = tmp_path / "run", []

    def wait(folder: str, reason: str) -> None:
        waits.append((folder, reason))
        run.mkdir()
        checkpoint(run, 5)

    *_, table = watched(run, out, until=5, on_wait=wait)
    assert waits == [(str(run), "there is no such folder")]
    assert steps(table) == [5]


def broken(folder: Path) -> bytes:
    """Put a NaN into a checkpoint's queries; the content as it was."""
    content = (folder / "model.safetensors").read_bytes()
    small.edit(folder, lambda name, weight: weight * (np.nan if "query" in name else 1))
    return content


def test_a_checkpoint_that_fails_is_told_kept_and_tried_again(run: Path, out: Path) -> None:
    checkpoint(run, 10)
    content = broken(checkpoint(run, 20))
    failures: list[tuple[str, str]] = []

    def mend(folder: str, reason: str) -> None:
        failures.append((folder, reason))
        checkpoint(run, 30)  # the run goes on
        if len(failures) == 1:
            failed = read_table(out / "scores.parquet").metadata["failed"]
            assert [entry["checkpoint"] for entry in failed] == [str(run / "checkpoint-20")]
            (run / "checkpoint-20" / "model.safetensors").write_bytes(content)

    tables = []
    for table in watched(run, out, on_failure=mend):
        tables.append(table)
        if steps(table) == [10, 20, 30]:
            break
    assert len(failures) == 1
    assert "NaN" in failures[0][1]
    assert tables[-1].metadata["failed"] == []


def test_the_last_checkpoint_may_be_one_that_fails(run: Path, out: Path) -> None:
    broken(checkpoint(run, 20))
    for _ in range(2):  # the second watch tries it again, and ends as well
        *_, table = watched(run, out, until=20)
        assert len(table.metadata["failed"]) == 1


def test_a_failed_checkpoint_is_not_tried_again_before_it_changes(run: Path, out: Path) -> None:
    broken(checkpoint(run, 20))
    failures: list[str] = []

    def fail(folder: str, _: str) -> None:
        failures.append(folder)
        checkpoint(run, 30)

    *_, table = watched(run, out, until=30, on_failure=fail)
    assert failures == [str(run / "checkpoint-20")]
    assert steps(table) == [30]
    assert len(table.metadata["failed"]) == 1


def test_a_full_disk_is_named_and_the_watch_goes_on(run, out, monkeypatch):
    from wqk.scanning.surveys import watch as module

    reports: list[tuple[str, str]] = []
    write = module.survey

    def full(*arguments: Any, **options: Any) -> wqk.ScoreTable:
        if reports:
            return write(*arguments, **options)
        raise OutputError(f"{out}: cannot be written (No space left on device)")

    monkeypatch.setattr(module, "survey", full)
    checkpoint(run, 10)
    *_, table = watched(run, out, until=10, on_failure=lambda *report: reports.append(report))
    assert steps(table) == [10]
    ((place, reason),) = reports
    assert place == str(out)
    assert reason.endswith(f"; free space on the disk of {out}, or allow to write there")


def test_a_full_disk_is_no_checkpoint_that_cannot_be_scored(run, monkeypatch):
    from click.testing import CliRunner

    from wqk.cli.verbs import watch as verb
    from wqk.scanning.surveys import watch as module

    def fails(*_: Any, on_failure: Any, **__: Any) -> Iterator[wqk.ScoreTable]:
        on_failure(str(run / module.WATCHED), "the disk is full")
        on_failure(str(run / "checkpoint-10"), "query: NaN")
        return iter(())

    monkeypatch.setattr(module, "watch", fails)
    lines = CliRunner().invoke(verb, [str(run)]).stderr.splitlines()
    tries = "the watch tries again every 10 seconds"
    assert f"no scores were written: the disk is full; {tries}" in lines[-2]
    assert "checkpoint-10 cannot be scored" in lines[-1]


def test_an_unexpected_error_does_not_end_a_watch(run, out, monkeypatch):
    from wqk.scanning.surveys import watch as module

    waits, plain = [], module.open_model
    checkpoint(run, 10)
    checkpoint(run, 20)

    def surprising(folder: Any) -> Any:
        if "checkpoint-10" in folder:
            raise ZeroDivisionError("surprise")
        return plain(folder)

    monkeypatch.setattr(module, "open_model", surprising)
    *_, table = watched(run, out, until=20, on_wait=lambda *arguments: waits.append(arguments))
    assert waits == [(str(run / "checkpoint-10"), "unexpected surprise")]
    assert steps(table) == [20]


def test_a_checkpoint_whose_files_still_change_waits(
    run: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = checkpoint(run, 10) / "model.safetensors"
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) < 3:  # the trainer writes on
            os.utime(weights, (len(waits), len(waits)))

    monkeypatch.setattr(sys.modules[watch.__module__], "time", SimpleNamespace(sleep=wait))
    table = next(watched(run, out, until=10))
    assert steps(table) == [10]
    assert len(waits) == 3


def test_what_is_no_run_or_no_place_for_scores_is_told_at_once(run, out, tmp_path, monkeypatch):
    surveyed = tmp_path / "surveyed"
    single = checkpoint(run, 10)
    overwritten = checkpoint(run, 20).rename(tmp_path / "overwritten")
    (tmp_path / "file").write_text("")
    wqk.survey([wqk.demo_model("encoder")], out=surveyed, heads=False)
    for watched_folder, place, message in (
        (tmp_path / "file", out, "is a file"),
        (surveyed, out, "is the folder of a survey"),
        (single, out, "is one checkpoint, without folders named after steps"),
        (overwritten, out, "without folders named after steps"),
        (run, surveyed, "holds a survey of other checkpoints"),
        (run, tmp_path / "file" / "out", "is no folder"),
        (tmp_path / "file" / "run", tmp_path / "file" / "run" / "out", "is no folder"),
    ):
        with pytest.raises(WqkError, match=message):
            watch(watched_folder, out=place, heads=False)
    for seconds in (0, -1, 1e300, float("nan"), float("inf")):
        with pytest.raises(WqkError, match="expected seconds"):
            watch(run, out=out, every=seconds)
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write everywhere
    with pytest.raises(WqkError, match="it is read-only"):
        watch(run, out=run / "wqk-scores")


def test_steps_beside_the_final_model_are_scored(run: Path, out: Path) -> None:
    for file in checkpoint(run, 20).iterdir():  # as Trainer saves it at the end
        (run / file.name).write_bytes(file.read_bytes())
    *_, table = watched(run, out, until=20)
    assert steps(table) == [20]


def test_a_killed_watch_loses_nothing(run: Path, out: Path) -> None:
    for step in range(1, 6):
        checkpoint(run, step)
    command = [
        sys.executable,
        "-m",
        "wqk",
        "watch",
        str(run),
        "--out",
        str(out),
        "--every",
        "0.05",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        timer = threading.Timer(120, process.kill)
        timer.start()
        process.stdout.readline()
        process.kill()
        timer.cancel()
    checkpoint(run, 6)
    *_, table = watched(run, out, until=6)
    assert steps(table) == [1, 2, 3, 4, 5, 6]
    assert len(table) == 6 * 4


LIVE = ["--live", "--until", "20", "--every", "0.01"]


def test_a_live_watch_redraws_one_table_in_a_terminal(run: Path, out: Path) -> None:
    for step in (10, 20):
        checkpoint(run, step)
    terminal, process_side = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    command = [sys.executable, "-m", "wqk", "watch", str(run), "-o", str(out), *LIVE]
    process = subprocess.Popen(
        command, stdout=process_side, stderr=subprocess.DEVNULL, env=environment
    )
    os.close(process_side)
    pieces = []
    with contextlib.suppress(OSError):  # the terminal is closed once the process has ended
        while piece := os.read(terminal, 4096):
            pieces.append(piece)
    os.close(terminal)
    assert process.wait(60) == 0
    drawn = b"".join(pieces).decode()
    cursor_up = "\x1b[1A"
    first, last = drawn.index("step"), drawn.rindex(cursor_up)
    assert first < last
    final_table = drawn[last:]
    assert "10  decoder self" in final_table
    assert "20  decoder self" in final_table


def test_a_live_watch_prints_every_table_in_a_pipe(run: Path, out: Path) -> None:
    for step in (10, 20):
        checkpoint(run, step)
    done = cli("watch", run, "-o", out, *LIVE)
    assert "\x1b" not in done.stdout
    assert "20  decoder self" in done.stdout


def test_one_look_at_a_run_without_steps_names_the_folders_that_are_expected(tmp_path):
    run_folder, scored = tmp_path / "run", tmp_path / "scored"
    run_folder.mkdir()
    first = cli("watch", run_folder, "--once", "--out", tmp_path / "scores")
    assert "no complete checkpoint; expected folders in it that are named after" in first.stderr
    checkpoint(scored, 10)
    second = cli("watch", scored, "--once", "--out", tmp_path / "scores-of-10")
    assert "no complete checkpoint" not in second.stderr


def test_a_half_written_step_is_tried_again_without_advice_on_the_file(
    run: Path, tmp_path: Path
) -> None:
    checkpoint(run, 10)
    torn = checkpoint(run, 20) / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-1000])
    shown = " ".join(cli("watch", run, "--once", "--out", tmp_path / "scores").stderr.split())
    assert "bytes, 1000 are missing, from " in shown
    assert " on; it may still be being written, and the next wqk watch tries it again" in shown
    assert "save the file again" not in shown
    absent = cli("watch", tmp_path / "absent", "--once", "--out", tmp_path / "scores-of-absent")
    assert "absent is not complete yet: there is no such folder" in absent.stderr
    assert "being written" not in absent.stderr


@pytest.mark.parametrize("verb", [("watch", "run", "--once"), ("survey", "run")])
def test_a_table_of_the_runs_name_leaves_the_run_as_it_is(
    run: Path, monkeypatch: pytest.MonkeyPatch, verb: tuple[str, ...]
) -> None:
    checkpoint(run, 10)
    monkeypatch.chdir(run.parent)
    cli(*verb, "--out", "run.csv")
    checkpoint(run, 20)
    cli(*verb, "--out", "run.csv")
    assert sorted(path.name for path in run.iterdir()) == ["checkpoint-10", "checkpoint-20"]
    assert steps(read_table("run.csv")) == [10, 20]
    assert Path("run.csv.survey", "manifest.jsonl").is_file()


def test_a_run_whose_folder_contains_a_survey_can_be_watched(run: Path) -> None:
    checkpoint(run, 10)
    cli("survey", run, "--out", run)
    cli("watch", run, "--once", "--out", run.parent / "scores")
    assert steps(read_table(run.parent / "scores" / "scores.parquet")) == [10]
    shutil.rmtree(run / "checkpoint-10")
    refused = cli("watch", run, "--once", "--out", run.parent / "others", exits=2)
    assert "is the folder of a survey" in refused.stderr


def test_a_watch_names_layers_that_look_untrained(run: Path, out: Path) -> None:
    random = np.random.default_rng(0)
    for step in (1, 2):
        file = checkpoint(run, step) / "model.safetensors"
        drawn = {
            name: 0.02 * random.standard_normal(tensor.shape).astype(tensor.dtype)
            for name, tensor in load_file(file).items()
        }
        save_file(drawn, file)
    done = cli("watch", run, "--once", "--out", out)
    lines = done.stdout.splitlines()
    assert [line.endswith("; random-looking") for line in lines] == [True, True]
    assert done.stderr.count("random-looking: as if the weights had never been trained") == 1
    shown = cli("watch", run, "--once", "--live", "--out", out.with_name("further")).stdout
    assert "random-looking: as if the weights had never been trained" in shown
