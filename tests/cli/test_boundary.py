"""Every failure is one line and a status, also with closed streams and odd environments."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tests.command import ENCODER, refuse, run, shell
from tests.limits import failing

import wqk

STREAMS = [
    ("wqk scan ENCODER >/dev/full", 2, "No space left on device"),
    ("wqk --help >/dev/full", 2, "No space left on device"),
    ("wqk scan ENCODER >&-", 0, ""),
    ("wqk explain ENCODER 2>&- <&-", 0, ""),
    ("wqk scan /no/such/model 2>/dev/full", 2, ""),
]

ENVIRONMENT = [
    ("POLARS_MAX_THREADS=0 wqk scan ENCODER", "POLARS_MAX_THREADS='0'; expected a number"),
    ("COLUMNS=0 wqk scan ENCODER", "COLUMNS='0'; expected a width"),
    ("SOURCE_DATE_EPOCH=x wqk scan ENCODER --out /dev/null/a.parquet", "cannot be written"),
    (
        "SOURCE_DATE_EPOCH=x wqk show ENCODER --layer 0 --out /dev/shm/form.pdf",
        "SOURCE_DATE_EPOCH='x'; expected seconds",
    ),
    ("HF_HUB_DOWNLOAD_TIMEOUT=x wqk scan o/m", "HF_HUB_DOWNLOAD_TIMEOUT='x'; expected sec"),
    ("HTTPS_PROXY=http://me:hunter2@h:x wqk scan o/m", "HTTPS_PROXY='http://…'; expected a p"),
    ("HF_ENDPOINT=http://[ wqk scan o/m", "expected the address of a hub"),
    ("wqk explain 'owner/model?token=hunter2'", "wqk: owner/model: "),
]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("line", "status", "message"), STREAMS)
def test_streams_that_are_full_or_closed(line, status, message):
    done = shell(line)
    assert done.returncode == status
    assert "Traceback" not in done.stderr
    assert message in done.stderr
    assert done.stderr.count("\n") <= 1


@pytest.mark.parametrize(("line", "message"), ENVIRONMENT)
def test_what_is_in_the_way_is_one_line_without_secrets(line, message):
    environment, _, verb = line.rpartition("wqk ")
    done = shell(f"HF_HUB_OFFLINE=0 NO_PROXY= {environment} wqk {verb}")
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr
    assert "hunter2" not in done.stderr + done.stdout
    assert len(done.stderr.splitlines()) <= 4  # click's own are a usage, a hint and a line


def test_an_unexpected_error_is_one_line(monkeypatch):
    error = ZeroDivisionError("by\nnothing" + "x" * 10_000)
    monkeypatch.setattr("wqk.scanning.scan.scan_model", failing(error))
    message = refuse("scan", ENCODER)
    assert message.startswith("wqk: unexpected ZeroDivisionError: by nothing")
    assert len(message) < 700


def test_a_traceback_is_shown_on_request():
    done = shell("wqk --debug scan ./nowhere")
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert lines[0].startswith("Traceback")
    assert lines[-1].startswith("wqk: nowhere: no such file or folder")


@pytest.mark.parametrize("verb", ["scan", "explain", "diff"])
def test_an_interruption_ends_every_verb_alike(monkeypatch, verb):
    monkeypatch.setattr("wqk.checkpoints.open_local", failing(KeyboardInterrupt()))
    result = run(verb, ENCODER, *([ENCODER] if verb == "diff" else []), exits=130)
    assert result.stderr == "wqk: interrupted\n"


def test_a_scan_that_is_interrupted_at_its_second_checkpoint_leaves_no_table(monkeypatch, tmp_path):
    openers = iter([wqk.checkpoints.open_local])
    interrupt = failing(KeyboardInterrupt())

    def open_first_alone(*arguments, **options):
        opener = next(openers, interrupt)
        return opener(*arguments, **options)

    monkeypatch.setattr("wqk.checkpoints.open_local", open_first_alone)
    out = tmp_path / "scores.parquet"
    run("scan", ENCODER, ENCODER, "--out", out, exits=130)
    assert not out.exists()


def test_an_interrupted_watch_says_where_its_scores_are(monkeypatch, tmp_path):
    monkeypatch.setattr("wqk.scanning.surveys.watch.watch", failing(KeyboardInterrupt()))
    scores = tmp_path / "out" / "scores.parquet"
    for note in ("no checkpoint was scored", f"the scores are in {scores}"):
        result = run("watch", str(tmp_path), "--out", str(tmp_path / "out"), exits=130)
        assert result.stderr.endswith(f"\nwqk: interrupted; {note}\n")
        scores.parent.mkdir(exist_ok=True)
        scores.touch()


def test_ctrl_c_in_a_real_process(tmp_path):
    code = (
        "import sys, time, wqk.model as m\n"
        "m.open_checkpoint = lambda *a, **k: (print('now', flush=True), time.sleep(60))\n"
        f"sys.argv = ['wqk', 'scan', {ENCODER!r}]\n"
        "from wqk.__main__ import main\nmain()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert (process.returncode, stderr) == (130, "wqk: interrupted\n")


def test_one_bad_checkpoint_does_not_hide_the_good_ones():
    result = run("scan", ENCODER, "/no/such/model", exits=2)
    assert "median symmetry" in result.stdout
    assert "/no/such/model" in result.stderr
    assert "1 of 2 checkpoints failed" in result.stderr
    run("scan", "/no/such/model", "/none/either", exits=2)


def test_an_error_names_its_checkpoint_among_several(tmp_path):
    (tmp_path / "model.safetensors").symlink_to(Path(ENCODER, "model.safetensors").resolve())
    config = json.loads(Path(ENCODER, "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": 5}))
    for arguments in (("scan", ENCODER, str(tmp_path)), ("diff", ENCODER, str(tmp_path))):
        assert f"wqk: {tmp_path}: " in run(*arguments, exits=2).stderr
    result = run("scan", ENCODER, ENCODER, "--layers", "9", exits=2)
    assert "wqk: demo:encoder: no layer 9" in result.stderr


def test_arguments_are_named_as_they_were_given(tmp_path):
    tensors = {"model.layers.0.q_proj.weight": np.ones((6, 6), np.float32)}
    tensors["model.layers.0.k_proj.weight"] = tensors["model.layers.0.q_proj.weight"]
    with pytest.raises(wqk.WqkError, match="heads_per_layer=N"):
        wqk.explain(tensors)
    from safetensors.numpy import save_file

    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    stderr = run("explain", str(tmp_path), exits=2).stderr
    assert "wqk.open(ref, heads_per_layer=N), or with --heads-per-layer N" in stderr


def test_a_runs_folder_is_read_by_every_verb(tmp_path):
    for step in (1000, 50, 200):
        folder = tmp_path / f"checkpoint-{step}"
        folder.mkdir()
        for file in Path(ENCODER).iterdir():
            os.link(file, folder / file.name)
    for verb in (("scan",), ("explain",), ("diff", ENCODER)):
        assert "checkpoint-1000" in run(*verb, str(tmp_path)).stdout.replace("\n", "")
    table, out = wqk.scan(tmp_path), tmp_path / "all.parquet"
    assert table.frame["step"].unique(maintain_order=True).to_list() == [50, 200, 1000]
    run("scan", tmp_path, ENCODER, "--out", out)
    steps = wqk.read_table(out).frame["step"].unique(maintain_order=True)
    assert steps.to_list() == [50, 200, 1000, None]


def test_names_do_not_reach_the_terminal_raw(tmp_path):
    checkpoint = wqk.open_checkpoint(ENCODER)
    checkpoint.name = "evil\x1b]0;title\x07\u202e"
    table = wqk.scan(checkpoint)
    for text in (repr(table), table._repr_html_(), str(wqk.explain(checkpoint))):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert "\x1b" not in run("scan", f"{tmp_path}/\x1b]0;title\x07", exits=2).stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ("lab", "train", "--corpus", "store", "-o", "run", "--threads", "1"),
        ("lab", "glue", ENCODER, "--threads", "1"),
        ("lab", "experiments", "FILE", "--corpora", "corpora", "--out", "runs"),
    ],
)
def test_without_torch_it_is_said_what_to_install(monkeypatch, tmp_path, arguments):
    monkeypatch.setitem(sys.modules, "torch", None)
    cell = '[recipe]\n[[cell]]\nname = "one"\ncorpus = "corpus"\nseeds = [1]\n'
    (tmp_path / "e.toml").write_text(cell)
    file = str(tmp_path / "e.toml")
    result = run(*(file if word == "FILE" else word for word in arguments), exits=2)
    assert "needs torch: pip install '.[train]'" in result.stderr


def test_without_matplotlib_no_picture_is_promised(monkeypatch, tmp_path):
    """A result that cannot be drawn in the end is not computed first."""
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refuse("same", ENCODER, ENCODER, "--picture", tmp_path / "p.png")
    assert "needs matplotlib: pip install '.[report]'" in message
    assert wqk.scan(ENCODER)._repr_html_().count("<table")


def test_a_command_that_read_a_bucket_ends_without_the_interpreters_end() -> None:
    """Threads of obstore's would abort the process there; what was registered still runs."""
    code = """
import atexit, sys
import obstore
class Last:
    def __del__(self):
        print("the interpreter ends")
last = Last()
atexit.register(print, "registered")
sys.argv = ["wqk", "scan", "nowhere/at/all"]
from wqk.__main__ import main
main()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "registered\n")
    assert done.stderr.startswith("wqk: nowhere/at/all: ")
    without = subprocess.run(
        [sys.executable, "-c", code.replace("import obstore", "")], capture_output=True, text=True
    )
    assert (without.returncode, "the interpreter ends" in without.stdout) == (2, True)
