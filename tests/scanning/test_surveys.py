"""Surveys: one table whatever the executor and whatever interrupts; named errors for the rest."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest
from safetensors.numpy import load_file, save_file
from tests import small
from tests.command import refuse
from tests.command import run as run_command
from tests.limits import counts, failing, refused

import wqk
from wqk._console import size
from wqk._machine import usable_cores
from wqk.errors import (
    CheckpointError,
    MissingPackage,
    OutputError,
    RunError,
    TableError,
    UnknownName,
)
from wqk.scanning.surveys import SurveyProgress, dask_executor
from wqk.scanning.surveys import jobs as survey_jobs
from wqk.scanning.surveys.jobs import Job, JobOutcome, expand, run_in_processes
from wqk.scanning.surveys.model_sets import model_set, model_sets
from wqk.storage import patience
from wqk.tables.schema import SCHEMA_VERSION
from wqk.tables.score_table import ScoreTable, read_table

LAYERS, WIDTH, HEADS = 3, 64, 4


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Twenty checkpoints: 3 and 11 are equal, 7 is truncated, 13 of an unknown kind."""
    root = tmp_path_factory.mktemp("models")
    sizes = {"layers": LAYERS, "heads": HEADS, "key_heads": HEADS, "head_width": 16, "width": WIDTH}
    made = [small.llama(**sizes, seed=seed) for seed in range(20)]
    folders = [small.save_model(root / f"m{i:02}", m) for i, m in enumerate(made)]
    shutil.copy(folders[3] / "model.safetensors", folders[11] / "model.safetensors")
    broken = folders[7] / "model.safetensors"
    broken.write_bytes(broken.read_bytes()[:-100])
    save_file({"w": np.zeros((2, 2), np.float32)}, folders[13] / "model.safetensors")
    (folders[13] / "config.json").write_text('{"model_type": "perceptron"}')
    return [str(folder) for folder in folders]


def survey(refs: Any, out: Path | str, **options: Any) -> ScoreTable:
    """In a thread of this process, which nobody has to start."""
    with ThreadPoolExecutor(1) as threads:
        return wqk.survey(refs, out=out, executor=threads, **options)


@pytest.fixture(scope="module")
def table_bytes(models: list[str], tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The table's file after a run that nothing interrupts."""
    out = tmp_path_factory.mktemp("table_bytes") / "out"
    survey(models, out=out)
    return (out / "scores.parquet").read_bytes()


run = partial(run_command, width=100)


def start(*arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "wqk", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    )


def manifest(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "manifest.jsonl").read_text().splitlines()]


# What comes out


def test_one_table_of_what_single_scans_give(models: list[str], table_bytes: bytes, tmp_path: Path):
    (tmp_path / "t.parquet").write_bytes(table_bytes)
    table = read_table(tmp_path / "t.parquet")
    sound = [model for i, model in enumerate(models) if i not in (7, 13)]
    assert table.frame["checkpoint"].unique(maintain_order=True).to_list() == sound
    for model in sound[:3]:
        assert table.frame.filter(checkpoint=model).equals(wqk.scan(model).frame)
    assert table.metadata["gamma"] == 2.0
    assert table.metadata["identical"] == [[models[3], models[11]]]
    truncated, unknown = table.metadata["failed"]
    assert (truncated["checkpoint"], unknown["checkpoint"]) == (models[7], models[13])
    assert "model.safetensors" in truncated["reason"]
    assert "'perceptron'" in unknown["reason"]


def test_a_folder_of_checkpoints_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    (tmp_path / "many" / "one").mkdir(parents=True)
    (tmp_path / "many" / "one" / "model.safetensors").touch()
    monkeypatch.chdir(tmp_path)
    for ref in ("many/", "./many", "many"):
        expected = rf"^{re.escape(ref)}: is a folder of checkpoints \(one\); survey them as \S+/\*$"
        with pytest.raises(CheckpointError, match=expected):
            survey(ref, out="scores")
        with pytest.raises(CheckpointError, match=r"^many: no weights here"):
            wqk.scan(ref)
    assert "as many/*" in run("survey", "many", "--dry-run", exits=2).stderr
    assert not Path("scores").exists()


def test_a_pattern_that_no_shell_expanded_names_paths(tmp_path: Path) -> None:
    for step in (2, 10):
        shutil.copytree(wqk.demo_model("encoder"), tmp_path / f"step-{step}")
    pattern = str(tmp_path / "step-*")
    printed = run("survey", pattern, "--dry-run").stdout.splitlines()
    assert printed == [str(tmp_path / "step-2"), str(tmp_path / "step-10")]
    table = survey([pattern], out=tmp_path / "scores", jobs=1)
    assert table.frame["checkpoint"].unique().sort().to_list() == sorted(printed)
    message = run("survey", str(tmp_path / "stage-*"), "--dry-run", exits=2).stderr
    assert message.endswith("stage-*: no file or folder matches the pattern\n")


def test_a_survey_has_the_medians_of_its_models(models, tmp_path):
    table = survey(models[:2], out=tmp_path)
    medians = pl.read_csv(tmp_path / "summary.csv")
    expected = [rows["symmetry"].median() for rows in table.layers.frame.partition_by("checkpoint")]
    assert medians["model"].to_list() == [Path(model).name for model in models[:2]]
    assert medians["symmetry_median"].to_list() == pytest.approx(expected)
    lines = (tmp_path / "summary.md").read_text("utf-8").splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("| ")][2:]
    quartiles = medians.select("symmetry_median", "symmetry_q25", "symmetry_q75")
    assert [row[3] for row in rows] == [
        "{:.2f} [{:.2f}, {:.2f}]".format(*values) for values in quartiles.iter_rows()
    ]
    assert "\\toprule" in (tmp_path / "summary.tex").read_text("utf-8")


def test_a_summary_has_the_statuses_of_models_that_look_untrained(tmp_path: Path) -> None:
    folders = [tmp_path / "trained", tmp_path / "half", tmp_path / "fresh"]
    random = np.random.default_rng(0)
    for number, folder in enumerate(folders):
        shutil.copytree(wqk.demo_model("encoder"), folder)
        fresh = tuple(f".{layer}." for layer in range(2 * number))
        small.edit(
            folder,
            lambda name, tensor, fresh=fresh: (
                random.standard_normal(tensor.shape)
                if any(map(name.__contains__, fresh))
                else tensor
            ),
        )
    done = run("survey", *folders, "--out", tmp_path / "out", width=200)
    line = "random-looking: as if the weights had never been trained, in half (2 of 4 rows), fresh"
    assert line in done.stdout
    statuses = ["ok", "random-looking (2 of 4)", "random-looking"]
    assert pl.read_csv(tmp_path / "out" / "summary.csv")["status"].to_list() == statuses
    lines = (tmp_path / "out" / "summary.md").read_text("utf-8").splitlines()
    assert [line.split(" | ")[-1].strip("| ") for line in lines[-3:]] == ["", *statuses[1:]]


def test_a_dry_run_has_bytes_and_time(models):
    plan = json.loads(run("survey", *models[:2], "o/m", "--dry-run", "--json").stdout)
    expected = [wqk.explain(model).bytes_to_read for model in models[:2]]
    assert plan["bytes_to_read"] == [*expected, None]
    assert plan["seconds"] > 0
    stderr = run("survey", *models[:2], "o/m", "--dry-run").stderr
    assert "about 1 second on this machine; the size of 1 that are not" in stderr


def test_a_dry_run_has_the_bytes_of_each_ref(models: list[str], tmp_path: Path):
    for step in (1, 2):
        shutil.copytree(models[0], tmp_path / "run" / f"checkpoint-{step}")
    bytes_of_model = wqk.explain(models[0]).bytes_to_read
    refs = (tmp_path / "run", models[1], "o/m")
    plan = json.loads(run("survey", *refs, "--dry-run", "--json").stdout)
    assert plan["refs"] == [
        {"ref": str(refs[0]), "checkpoints": 2, "bytes_to_read": 2 * bytes_of_model},
        {"ref": models[1], "checkpoints": 1, "bytes_to_read": bytes_of_model},
        {"ref": "o/m", "checkpoints": 1, "bytes_to_read": None},
    ]
    lines = run("survey", *refs, "--dry-run").stderr.splitlines()
    assert lines[:-1] == [
        f"{refs[0]}: {size(2 * bytes_of_model)} to read (2 checkpoints)",
        f"{models[1]}: {size(bytes_of_model)} to read",
    ]
    (only,) = run("survey", models[0], "--dry-run").stderr.splitlines()
    assert only.startswith("1 checkpoint; ")


def test_a_dry_run_has_at_most_twenty_sizes(models: list[str], tmp_path: Path):
    copies = [shutil.copytree(models[0], tmp_path / f"m{number:02}") for number in range(23)]
    *sizes, last_size, total = run("survey", *copies, "--dry-run").stderr.splitlines()
    assert [line.partition(":")[0] for line in sizes] == [str(copy) for copy in copies[:20]]
    assert last_size == f"and 3 more: {size(3 * wqk.explain(models[0]).bytes_to_read)} to read"
    assert total.startswith("23 checkpoints; ")


def test_a_survey_draws_a_box_for_each_model(models, tmp_path):
    pytest.importorskip("matplotlib")
    run("survey", *models[:2], "--out", tmp_path / "s", "--picture", tmp_path / "boxes.svg")
    picture = (tmp_path / "boxes.svg").read_text("utf-8")
    assert all(f">{Path(model).name}</text>" in picture for model in models[:2])


def test_models_without_symmetry_have_a_box_of_directionality_alone(models, tmp_path):
    """Layers whose queries and keys read different vectors have no symmetry."""
    pytest.importorskip("matplotlib")
    table = survey(models[:2], out=tmp_path)
    frame = table.frame.with_columns(symmetry=pl.lit(None, pl.Float64))
    figure = replace(table, frame=frame).plot("models")
    boxes = [len(axis.patches) for axis in figure.axes]
    assert boxes == [0, 2]


@pytest.mark.parametrize("kind", ["processes", "own processes", "one thread"])
def test_any_executor_gives_the_same_bytes(models, table_bytes, tmp_path, kind):
    executor: Executor | None = None
    if kind == "processes":
        executor = ProcessPoolExecutor(2, multiprocessing.get_context("spawn"))
    elif kind == "one thread":
        executor = ThreadPoolExecutor(1)
    wqk.survey(models, out=tmp_path / "out", executor=executor, jobs=2)
    if executor:
        executor.shutdown()
    assert (tmp_path / "out" / "scores.parquet").read_bytes() == table_bytes


def test_a_dask_cluster_gives_the_same_bytes(models: list[str], table_bytes: bytes, tmp_path: Path):
    distributed = pytest.importorskip("distributed", reason="needs the extra: wqk[cluster]")
    cluster = distributed.LocalCluster(
        n_workers=2, threads_per_worker=1, processes=True, dashboard_address=None
    )
    with cluster:
        done = start(
            *("survey", *models, "--heads", "--dask", cluster.scheduler_address),
            *("--out", str(tmp_path / "out")),
        )
        _, errors = done.communicate()
        workers = len(cluster.scheduler_info["workers"])
    assert done.returncode == 1, errors.decode()
    assert workers == 2
    assert (tmp_path / "out" / "scores.parquet").read_bytes() == table_bytes


def test_no_scheduler_and_no_distributed(monkeypatch: pytest.MonkeyPatch):
    with (
        pytest.raises((RunError, MissingPackage), match=r"no Dask scheduler|pip install"),
        dask_executor("nonsense://1"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(MissingPackage, match=r"pip install '\.\[cluster\]'"), dask_executor("x"):
        pass


def test_progress_counts_what_is_done(models: list[str], tmp_path: Path):
    updates: list[SurveyProgress] = []
    survey(models[:6], out=tmp_path)
    survey(models[:9], out=tmp_path, on_progress=updates.append)
    assert [(p.done, p.failed, p.now) for p in updates] == [
        (6, 0, 0),
        (7, 0, 1),
        (7, 1, 2),
        (8, 1, 3),
    ]
    assert updates[-1].bytes_read == 2 * LAYERS * 2 * WIDTH * WIDTH * 4


def test_workers_that_do_not_start_are_said(monkeypatch):
    monkeypatch.setattr(survey_jobs, "_start_worker", os._exit)
    with pytest.raises(RunError, match="no worker process can be started"), survey_jobs._pool(1):
        pass


def test_the_command_reports_failures(models: list[str], tmp_path: Path):
    out = tmp_path / "out"
    result = run("survey", *models, "--jobs", "1", "--out", str(out), exits=1)
    assert f"failed: {models[7]}: " in result.stderr
    assert "18 checkpoints; 2 failed" in result.stderr
    assert "scored before" not in result.stderr
    resumed = run("survey", *models, "--json", "--out", str(out), exits=1)
    assert resumed.stderr.startswith("scored before: 18 checkpoints\n")
    printed = json.loads(resumed.stdout)
    assert len(printed["metadata"]["failed"]) == 2
    assert len(printed["rows"]) == 18 * LAYERS
    assert run("survey", *models[:2], "--dry-run").stdout.split() == models[:2]
    assert "medians over layers" in run("survey", models[0], "--out", str(tmp_path / "fine")).stdout


def test_a_reason_of_an_earlier_run_is_printed_as_such(models: list[str], tmp_path: Path):
    out, late, absent = tmp_path / "out", tmp_path / "late", tmp_path / "absent"
    first = run("survey", models[0], late, "--out", out, exits=1).stderr
    assert f"\nfailed: {late}: no such file or folder" in f"\n{first}"
    resumed = run("survey", models[0], late, absent, "--out", out, exits=1).stderr
    assert f"\nfailed before: {late}: no such file or folder" in resumed
    assert f"\nfailed: {absent}: no such file or folder" in resumed
    assert "; 2 failed, --retry tries them again" in resumed
    for folder in (late, absent):
        shutil.copytree(models[1], folder)
    retried = run("survey", models[0], late, "--retry", "--out", out).stderr
    assert "failed" not in retried


def test_a_failed_checkpoint_is_tried_again_if_its_files_have_changed(
    models: list[str], tmp_path: Path
):
    out, late, damaged = tmp_path / "out", tmp_path / "late", tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "model.safetensors").write_bytes(b"x")
    line = ["survey", models[0], late, damaged, "--out", out]
    assert "2 failed" in run(*line, exits=1).stderr
    assert run(*line, exits=1).stderr.count("failed before: ") == 2
    shutil.copytree(models[1], late)
    resumed = run(*line, exits=1).stderr
    assert f"failed before: {damaged}" in resumed
    assert "1 failed" in resumed
    shutil.copytree(models[2], damaged, dirs_exist_ok=True)
    assert "failed: " not in run(*line).stderr


def test_identical_checkpoints_are_reported_everywhere(models: list[str], tmp_path: Path):
    out = tmp_path / "out"
    refs = (models[3], models[4], models[11])
    printed = run("survey", *refs, "--out", out, width=400)
    note = "identical scores (biases ignored): {} = {}"
    assert note.format(models[3], models[11]) in printed.stdout.splitlines()
    resumed = run("survey", *refs, "--csv", "--out", out)
    assert note.format(models[3], models[11]) in resumed.stderr.splitlines()
    assert "identical" not in resumed.stdout
    for summary in ("summary.md", "summary.tex"):
        assert note.format("m03", "m11") in (out / summary).read_text("utf-8")
    pytest.importorskip("plotly")
    page = wqk.write_report(out, tmp_path / "report.html").path.read_text("utf-8")
    assert f"<li>{note.format('m03', 'm11')}.</li>" in page


def test_checkpoints_without_a_form_are_not_called_identical(tmp_path: Path):
    """Keys of zeros give the same scores whatever the queries are."""
    folders = []
    for seed in range(2):
        folder = small.save_model(tmp_path / f"m{seed}", small.llama(layers=2, seed=seed))
        tensors = load_file(folder / "model.safetensors")
        zeros = {name: 0 * tensor for name, tensor in tensors.items() if "k_proj" in name}
        save_file(tensors | zeros, folder / "model.safetensors")
        folders.append(str(folder))
    table = survey(folders, out=tmp_path / "out")
    assert (table.frame["norm"] == 0).all()
    assert table.metadata["identical"] == []


# Interruptions


def interrupted(models: list[str], out: Path, kills: int, dice: random.Random) -> list[int]:
    """Kill a survey again and again, each time some jobs further; jobs done at each kill."""

    def parts() -> int:
        return len(list(out.glob("parts/*.parquet")))

    done = []
    for _ in range(kills):
        process = start("survey", *models, "--heads", "--jobs", "1", "--out", str(out))
        enough = dice.randint(parts(), 18)
        while parts() < enough and process.poll() is None:
            time.sleep(0.001)
        time.sleep(dice.uniform(0, 0.05 if parts() else 0.8))
        process.kill()
        process.communicate()
        done.append(parts())
        if (out / "scores.parquet").exists():
            assert read_table(out / "scores.parquet").frame["checkpoint"].n_unique() == 18
        if done[-1] == 18:
            shutil.rmtree(out)
    return done


@counts(5, 25, "kills")
def test_killed_and_resumed_the_table_is_identical(models, table_bytes, tmp_path, kills):
    out = tmp_path / "out"
    done = interrupted(models, out, kills, random.Random(kills))
    assert any(0 < parts < 18 for parts in done), done
    for part in out.glob("parts/*.parquet"):
        part.write_bytes(b"")  # as a loss of power leaves it
        break
    run("survey", *models, "--heads", "--jobs", "1", "--out", str(out), exits=1)
    assert (out / "scores.parquet").read_bytes() == table_bytes
    visible = {path.name for path in out.iterdir()}
    summaries = {"summary.csv", "summary.md", "summary.tex"}
    assert visible == {".lock", "manifest.jsonl", "parts", "scores.parquet", *summaries}
    assert len(list((out / "parts").iterdir())) == 18


def test_an_interrupt_is_one_line_and_resumable(
    models: list[str], table_bytes: bytes, tmp_path: Path
):
    out = tmp_path / "out"
    process = start("survey", *models, "--heads", "--jobs", "2", "--out", str(out))
    while process.poll() is None and not list(out.glob("parts/*.parquet")):
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate()
    if process.returncode == 130:
        assert errors.decode() == f"wqk: interrupted; repeat the command to resume in {out}\n"
    else:  # it was faster than the signal
        assert process.returncode == 1
    survey(models, out=out)
    assert (out / "scores.parquet").read_bytes() == table_bytes


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_survey_that_is_asked_to_end_is_one_line_and_resumable(
    models: list[str], table_bytes: bytes, tmp_path: Path, name: str
):
    out = tmp_path / "out"
    process = start("survey", *models, "--heads", "--jobs", "2", "--out", str(out))
    while process.poll() is None and not list(out.glob("parts/*.parquet")):
        time.sleep(0.005)
    number = getattr(signal, name)
    process.send_signal(number)
    _, errors = process.communicate()
    if process.returncode == 128 + number:
        assert errors.decode() == f"wqk: ended by {name}; repeat the command to resume in {out}\n"
    else:  # it was faster than the signal
        assert process.returncode == 1
    survey(models, out=out)
    assert (out / "scores.parquet").read_bytes() == table_bytes


def test_workers_end_with_their_killed_parent(models: list[str], tmp_path: Path):
    out = tmp_path / "out"
    process = start("survey", *models, "--jobs", "2", "--out", str(out))
    while not list(out.glob("parts/*.parquet")):
        time.sleep(0.005)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    if not children.exists():
        process.communicate()
        pytest.skip("needs /proc to find the workers")
    workers = children.read_text().split()
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 10
    while any(is_running(worker) for worker in workers):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_torn_last_line_is_forgotten_a_damaged_one_is_not(models: list[str], tmp_path: Path):
    survey(models[:2], out=tmp_path)
    expected = (tmp_path / "scores.parquet").read_bytes()
    path = tmp_path / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    for length in (1, 30, len(lines[0]) + 5, sum(map(len, lines)) - 1):
        path.write_bytes(b"".join(lines)[:length])
        survey(models[:2], out=tmp_path)
        assert (tmp_path / "scores.parquet").read_bytes() == expected
        assert manifest(tmp_path)[0]["event"] == "settings"
    for damaged in (b"{}\n", lines[1].replace(b'"files"', b'"filez"')):
        path.write_bytes(lines[0] + damaged + lines[1])
        with pytest.raises(RunError, match="line 2 was not written by a survey"):
            survey(models[:2], out=tmp_path)


@counts(6, 500)
def test_a_flipped_byte_in_the_manifest_is_read_around_or_named(models, tmp_path, count):
    dice = random.Random(count)
    survey(models[:2], out=tmp_path)
    scores = (tmp_path / "scores.parquet").read_bytes()
    path = tmp_path / "manifest.jsonl"
    content = path.read_bytes()
    for _ in range(count):
        flipped = bytearray(content)
        flipped[dice.randrange(len(flipped))] ^= 1 << dice.randrange(8)
        path.write_bytes(flipped)
        if not refused(lambda: survey(models[:2], out=tmp_path)):
            assert (tmp_path / "scores.parquet").read_bytes() == scores


def test_nothing_that_one_checkpoint_holds_stops_the_others(models: list[str], tmp_path: Path):
    """Names that are no text: a reference, a folder, a tensor, a shard, a model type."""
    weights = {
        f"layers.0.{side}_proj.weight": np.random.default_rng(0).random((4, 4), np.float32)
        for side in "qk"
    }
    bad = []
    for number, name in enumerate((b"a", b"b\xff", b"c", b"d")):
        config = {"model_type": "x\ud800" if number == 2 else "x", "num_attention_heads": 2}
        bad.append(str(small.save(tmp_path / os.fsdecode(name), weights, config)))
    index = Path(bad[3], "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"a\ud800": "b\ud800.safetensors"}}))
    Path(bad[3], "model.safetensors").unlink()
    refs = [*bad, os.fsdecode(b"\xff/\xfe"), "a" * 5000, "http://[::1", models[0]]
    table = survey(refs, out=tmp_path / "out")
    again = survey(refs, out=tmp_path / "out")
    assert table.frame["checkpoint"].n_unique() == 4
    assert len(table.metadata["failed"]) == 4
    assert again.frame.equals(table.frame)


def test_workers_keep_their_tables_and_are_of_one_version(models: list[str], tmp_path: Path):
    (job,) = expand([models[0]])
    for version, refusal in ((wqk.__version__, ""), ("0.0.0", "install one version")):
        options = survey_jobs.Options(2.0, True, version, SCHEMA_VERSION)
        outcome = survey_jobs.run_job(options, job, parts=tmp_path)
        assert outcome.table is None
        assert refusal in (outcome.reason or "")
        assert bool(outcome.rows) != bool(refusal)
    assert len(read_table(tmp_path / f"{job.key}.parquet")) == LAYERS * (1 + HEADS)


def die_on_the_second(job: Job) -> JobOutcome:
    if job.name == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return JobOutcome(reason=job.name)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_worker_that_dies_fails_its_job_and_no_other(processes: int):
    jobs = [Job(str(i), None, None, str(i)) for i in range(4)]
    outcomes_of_jobs = chain.from_iterable(run_in_processes(die_on_the_second, jobs, processes))
    outcomes = {job.name: outcome for job, outcome in outcomes_of_jobs}
    assert sorted(outcomes) == ["0", "1", "2", "3"]
    assert outcomes["1"].error == "WorkerDied"
    assert [outcomes[i].reason for i in "023"] == ["0", "2", "3"]


def cores_of(job: Job) -> JobOutcome:
    return JobOutcome(rows=usable_cores(), reason=job.name)


def test_workers_share_the_cores():
    jobs = [Job(str(i), None, None, str(i)) for i in range(2)]
    outcomes = chain.from_iterable(run_in_processes(cores_of, jobs, 2))
    assert {outcome.rows for _, outcome in outcomes} == {max(1, usable_cores() // 2)}


def test_a_script_needs_no_guard_and_is_run_once(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import wqk\nprint('run')\n"
        f"print(len(wqk.survey({[str(wqk.demo_model('encoder'))] * 2!r}, out='out', jobs=2).frame))"
    )
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.stderr, done.stdout.count("run"), len(done.stdout.split())) == ("", 1, 2), done


# Resuming


def test_failures_are_tried_again_on_request_or_with_other_files(models: list[str], tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models[7], model)
    assert len(survey(model, out=out)) == 0
    assert survey(model, out=out).metadata["failed"]
    assert sum(line["event"] == "failed" for line in manifest(out)) == 1
    assert survey(model, out=out, retry=True).metadata["failed"]
    assert sum(line["event"] == "failed" for line in manifest(out)) == 2
    shutil.copy(Path(models[1]) / "model.safetensors", model)
    table = survey(model, out=out)
    assert len(table) == LAYERS * (1 + HEADS)
    assert table.metadata["failed"] == []


def test_a_checkpoint_that_changes_between_runs_is_scored_anew(models: list[str], tmp_path: Path):
    model, out = tmp_path / "model", tmp_path / "out"
    shutil.copytree(models[1], model)
    before = survey(model, out=out)
    shutil.copy(Path(models[3]) / "model.safetensors", model)
    after = survey(model, out=out)
    expected = wqk.scan(models[3]).frame["symmetry"]
    assert after.frame["symmetry"].equals(expected)
    assert not before.frame["symmetry"].equals(expected)


def test_a_single_file_that_changes_between_runs_is_scored_anew(
    models: list[str], tmp_path: Path
) -> None:
    file, out = tmp_path / "model.safetensors", tmp_path / "out"
    shutil.copy(Path(models[1]) / "config.json", tmp_path)
    for model in (models[1], models[3]):
        shutil.copy(Path(model) / "model.safetensors", file)
        table = survey(str(file), out=out)
        assert table.frame["symmetry"].equals(wqk.scan(model).frame["symmetry"])


def test_other_settings_are_an_error_more_refs_are_not(models: list[str], tmp_path: Path):
    survey(models[:1], out=tmp_path)
    (tmp_path / ".lock").write_text("an earlier process")
    with pytest.raises(RunError, match=r"different options \(gamma was 2.0, is now 3.0\)"):
        survey(models[:1], out=tmp_path, gamma=3)
    assert (tmp_path / ".lock").read_text() == "an earlier process"
    assert survey(models[:2], out=tmp_path).frame["checkpoint"].n_unique() == 2
    assert "heads was True, is now False" in refuse("survey", models[0], "--out", tmp_path)


def test_the_hubs_keywords_reach_the_workers_and_not_the_manifest(models, tmp_path, monkeypatch):
    keywords_of_calls, plain = [], survey_jobs.open_checkpoint
    monkeypatch.setattr(
        survey_jobs,
        "open_checkpoint",
        lambda ref, **keywords: keywords_of_calls.append(keywords) or plain(ref),
    )
    survey(models[:1], out=tmp_path, token="secret", local_files_only=True)
    assert keywords_of_calls == [{"revision": None, "token": "secret", "local_files_only": True}]
    assert "secret" not in (tmp_path / "manifest.jsonl").read_text()


# Places where nothing can be surveyed


def test_two_surveys_at_once(models: list[str], tmp_path: Path):
    out, refused = tmp_path / "out", []

    def meanwhile(_: SurveyProgress) -> None:
        if not refused:
            refused.append(refuse("survey", models[0], "--heads", "--out", out))

    survey(models[:1], out=out, on_progress=meanwhile)
    (error,) = refused
    assert f"another survey is running here (process {os.getpid()} on " in error


def test_a_full_disk_is_named_and_nothing_is_half_written(
    models, table_bytes, tmp_path, monkeypatch
):
    written = os.fsync
    # The disk fills up at every one of the first places in turn.
    for room in range(7):
        free_places = iter(range(room))

        def fsync(descriptor: int, free_places: Any = free_places) -> None:
            if next(free_places, None) is None:
                raise OSError(errno.ENOSPC, "No space left on device")
            written(descriptor)

        monkeypatch.setattr(os, "fsync", fsync)
        with pytest.raises(OutputError, match=r"cannot be written \(No space left on device\)"):
            survey(models, out=tmp_path)
        content = (tmp_path / "manifest.jsonl").read_bytes()
        assert not content or content.endswith(b"\n")
        assert not [p for p in tmp_path.rglob(".*") if p.name != ".lock"]
    monkeypatch.setattr(os, "fsync", written)
    survey(models, out=tmp_path)
    assert (tmp_path / "scores.parquet").read_bytes() == table_bytes


def test_places_where_nothing_can_be_written(models: list[str], tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(OutputError, match="is a file; a survey needs a folder"):
        survey(models[:1], out=file)
    for place in (file / "out", Path("/sys/wqk"), Path("/proc/wqk")):
        with pytest.raises(OutputError, match="cannot be written"):
            survey(models[:1], out=place)
    unrelated = tmp_path / "other"
    unrelated.mkdir()
    (unrelated / "scores.parquet").touch()
    with pytest.raises(TableError, match="that no survey wrote"):
        survey(models[:1], out=unrelated)
    assert [path.name for path in unrelated.iterdir()] == ["scores.parquet"]


@pytest.mark.parametrize(
    "change",
    [
        lambda file: Path(shutil.copy(file, file.with_name("new"))).replace(file),
        lambda file: file.write_bytes(file.read_bytes()),
        lambda file: file.unlink(),
    ],
    ids=["replaced", "rewritten", "removed"],
)
def test_files_that_change_during_the_scan(models, tmp_path, monkeypatch, change):
    model, scan = Path(shutil.copytree(models[1], tmp_path / "model")), survey_jobs.scan

    def scan_and_change(checkpoint: Any, **options: Any) -> ScoreTable:
        table = scan(checkpoint, **options)
        change(model / "model.safetensors")
        return table

    monkeypatch.setattr(survey_jobs, "scan", scan_and_change)
    table = survey(model, out=tmp_path / "out")
    (failed,) = table.metadata["failed"]
    assert "changed during the read" in failed["reason"]
    assert len(table) == 0


def test_an_unexpected_error_is_recorded_with_its_traceback(models, tmp_path, monkeypatch):
    monkeypatch.setattr(survey_jobs, "scan", failing(MemoryError()))
    assert survey(models[:1], out=tmp_path).metadata["failed"][0]["reason"] == "MemoryError"
    assert "in fail" in next(line for line in manifest(tmp_path) if "trace" in line)["trace"]


# Refs and revisions

LISTING = "huggingface_hub.HfApi.list_repo_refs"


def test_lists_and_named_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = tmp_path / "names.txt"
    names.write_text("# models\nowner/one\n\npaper:audio # a set\nowner/one\n")
    jobs = expand([f"@{names}", "owner/two"])
    assert [jobs[0].name, jobs[-1].name] == ["owner/one", "owner/two"]
    assert len(jobs) == 2 + len(model_set("paper:audio"))
    assert len({job.key for job in jobs}) == len(jobs)
    for name in model_sets():
        assert len(set(model_set(name))) == len(model_set(name)) > 10
        assert all(ref.count("/") == 1 and " " not in ref for ref in model_set(name))
    for bad, content, message in (
        ("paper:music", b"", "sets are paper:audio"),
        (f"@{tmp_path / 'none'}", b"", "cannot be read"),
        (f"@{tmp_path}", b"", "not a regular file"),
        (f"@{names}", b"# nothing\n", "lists no checkpoint"),
        (f"@{names}", b"\xff\xfe", "one ref per line"),
        (f"@{names}", b"@other", "cannot include another list"),
    ):
        names.write_bytes(content)
        with pytest.raises((CheckpointError, UnknownName), match=message):
            expand([bad])
    with pytest.raises(CheckpointError, match="named sets, got dict"):
        survey([{}], out=tmp_path)
    assert survey_jobs.step_in("main") is None


def test_a_list_may_name_models_of_the_package(tmp_path: Path) -> None:
    names = tmp_path / "names.txt"
    names.write_text("demo:encoder\ndemo:bert\n")
    encoder, unknown = expand([f"@{names}"])
    assert encoder.name == str(wqk.demo_model("encoder"))
    assert (unknown.name, unknown.problem) == ("demo:bert", None)
    done = run_command("survey", names, "--out", tmp_path / "scores", exits=1)
    assert "of 1 checkpoint; 1 failed" in done.stderr
    assert "the models of the package are demo:decoder, demo:encoder" in done.stderr


def test_steps_of_a_local_run(models: list[str], tmp_path: Path):
    for name in ("checkpoint-1000", "checkpoint-50", "step200", "step1000"):
        shutil.copytree(models[1], tmp_path / "run" / name)
    (tmp_path / "run" / "checkpoint-7").mkdir()
    ref = str(tmp_path / "run")
    assert [job.step for job in expand([ref])] == [7, 50, 1000]
    assert [job.step for job in expand([ref], ["step*"])] == [200, 1000]
    assert [job.step for job in expand([ref], ["*1000", "step200"])] == [1000, 1000, 200]
    (problem,) = expand([ref], ["epoch*"])
    assert "no revision or step matches 'epoch*'; it has 4: checkpoint-50" in str(problem.problem)
    table = survey(ref, out=tmp_path / "out", revisions=["step*"], heads=False)
    assert table.frame["step"].unique(maintain_order=True).to_list() == [200, 1000]
    assert table.metadata["identical"] == [[f"{ref}/step200", f"{ref}/step1000"]]


def test_patterns_of_hub_revisions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    repositories, branches = [], [SimpleNamespace(name=f"step{n}") for n in (1000, 16, 2)]
    refs = SimpleNamespace(branches=branches, tags=[SimpleNamespace(name="v1.0")])
    monkeypatch.setattr(LISTING, lambda _, repository: repositories.append(repository) or refs)
    jobs = expand(["o/m"], ["step*", "v1.0"])
    steps = [("step2", 2), ("step16", 16), ("step1000", 1000)]
    assert [(job.revision, job.step) for job in jobs] == [*steps, ("v1.0", None)]
    assert repositories == ["o/m"]
    # Plain names are not looked up; the list is asked for once and kept for later runs.
    assert [job.revision for job in expand(["o/m"], ["step7"])] == ["step7"]

    locations, encoder = [], wqk.demo_model("encoder")

    def open_checkpoint(*location: Any, **revision: Any) -> Any:
        locations.append((*location, *revision.values()))
        return wqk.open_checkpoint(encoder)

    monkeypatch.setattr(survey_jobs, "open_checkpoint", open_checkpoint)
    for _ in range(2):
        table = survey("o/m", out=tmp_path, revisions=["step*"])
    assert repositories == ["o/m", "o/m"]
    assert locations == [("o/m", name) for name, _ in steps]
    rows = table.frame.select("checkpoint", "revision", "step").unique(maintain_order=True)
    assert rows.rows() == [("o/m", *step) for step in steps]


def test_a_hub_that_does_not_answer_is_a_failure_of_that_ref(models, tmp_path, monkeypatch):
    monkeypatch.setattr(LISTING, failing(ConnectionError("no\nnetwork")))
    run_folder = tmp_path / "run"
    shutil.copytree(models[1], run_folder / "step1")
    table = survey(["o/m", run_folder], out=tmp_path / "out", revisions=["step*"])
    (failed,) = table.metadata["failed"]
    assert failed["checkpoint"] == "o/m"
    assert failed["reason"] == "o/m: its revisions cannot be listed (no network)"
    assert table.frame["step"].unique().to_list() == [1]
    (job,) = expand([models[0] + "/model.safetensors"], ["step*"])
    assert "a file has no revisions" in str(job.problem)


def test_a_hub_that_never_stops_listing_is_given_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(LISTING, lambda *_: time.sleep(5))
    monkeypatch.setattr(patience, "PATIENCE", patience.Patience(connect=0.01, answer=0.01))
    (job,) = expand(["o/m"], ["step*"])
    assert "its revisions cannot be listed (the server does not answer)" in str(job.problem)


def test_an_executor_that_forks_is_refused(tmp_path: Path) -> None:
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as executor,
        pytest.raises(wqk.WqkError, match="must not be forked"),
    ):
        wqk.survey([wqk.demo_model("encoder")], out=tmp_path / "survey", executor=executor)
