"""A build may end anywhere, by an error or by kill -9; the next one gives the same store."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.lab.training.corpus.samples import content, sentences, write_jsonl

from wqk.errors import CorpusError, OutputError, RunError
from wqk_lab.training.corpus import (
    CorpusOptions,
    CorpusProgress,
    TokenStore,
    build_corpus,
    build_folder,
)

OPTIONS = {
    "characters": CorpusOptions(text="characters", held_out=20),
    "words": CorpusOptions(vocabulary=300, held_out=20),
}

# Says when it begins to build, so that a kill hits the build and not the imports.
CHILD = """
import sys
from wqk_lab.training.corpus import CorpusOptions, build_corpus, building
import tokenizers
building.SHARD = 2_000
print("go", flush=True)
build_corpus([sys.argv[1]], sys.argv[2], CorpusOptions(vocabulary=300, held_out=20), jobs=2)
"""


class Stop(Exception):
    """Ends a build where no error of wqk's would."""


@pytest.mark.usefixtures("small_shards")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_a_build_that_ends_anywhere_goes_on(
    options: CorpusOptions, text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = content(build_corpus([text_file], tmp_path / "whole", options).folder)
    write = build_folder.write_atomically
    left = 0

    def write_some(path: Path, text: bytes) -> None:
        nonlocal left
        if not left:
            raise Stop
        left -= 1
        write(path, text)

    monkeypatch.setattr(build_folder, "write_atomically", write_some)
    ended = 0
    for files in (0, 1, 2, 3, 5, 2, 6, 1000):
        left = files
        try:
            build_corpus([text_file], tmp_path / "store", options, jobs=1)
        except Stop:
            ended += 1
            assert not (tmp_path / "store").exists()
    assert ended == 7
    assert content(tmp_path / "store") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "whole"]


@pytest.mark.usefixtures("small_shards")
def test_what_is_done_is_not_done_again(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, files = build_folder.write_atomically, [0]

    def counted(path: Path, text: bytes) -> None:
        if files[0] == 0:
            raise Stop
        files[0] -= 1
        write(path, text)

    # By the number of files, not by what is told while others work: nothing races.
    monkeypatch.setattr(build_folder, "write_atomically", counted)
    files[0] = 10_000
    build_corpus([text_file], tmp_path / "whole", OPTIONS["words"], jobs=1)
    files[0] = 10_000 - files[0] - 2
    with pytest.raises(Stop):
        build_corpus([text_file], tmp_path / "store", OPTIONS["words"], jobs=1)
    monkeypatch.setattr(build_folder, "write_atomically", write)
    told: list[CorpusProgress] = []
    build_corpus([text_file], tmp_path / "store", OPTIONS["words"], on_progress=told.append)
    assert not {"reading", "learning"} & {progress.stage for progress in told}
    done = [progress.documents for progress in told if progress.stage == "tokenizing"][-1]
    assert 0 < done < 120


@pytest.mark.usefixtures("small_shards")
def test_other_options_or_another_text_start_anew(tmp_path: Path) -> None:
    def stop(progress: CorpusProgress) -> None:
        if progress.stage == "tokenizing":
            raise Stop

    path = write_jsonl(tmp_path / "text.jsonl", sentences(60, seed=1))
    with pytest.raises(Stop):
        build_corpus([path], tmp_path / "store", OPTIONS["words"], on_progress=stop)
    made = build_corpus([path], tmp_path / "store", OPTIONS["characters"])
    assert made.unit == "characters"
    with pytest.raises(Stop):
        build_corpus([path], tmp_path / "again", OPTIONS["words"], on_progress=stop)
    write_jsonl(path, sentences(61, seed=2))
    again = build_corpus([path], tmp_path / "again", OPTIONS["words"])
    fresh = build_corpus([path], tmp_path / "fresh", OPTIONS["words"])
    assert content(again.folder) == content(fresh.folder)


@pytest.mark.usefixtures("small_shards")
def test_a_damaged_shard_is_noticed(text_file: Path, tmp_path: Path) -> None:
    def stop(progress: CorpusProgress) -> None:
        if progress.stage == "writing":
            raise Stop

    for name in ("texts/000001.parquet", "tokens/000001.parquet"):
        with pytest.raises(Stop):
            build_corpus([text_file], tmp_path / "store", OPTIONS["words"], on_progress=stop)
        path = tmp_path / ".store.building" / name
        path.write_bytes(path.read_bytes()[:-40])
        with pytest.raises(CorpusError, match=r"damaged; delete .*\.store\.building and build"):
            build_corpus([text_file], tmp_path / "store", OPTIONS["words"])
        for file in (path, *path.parent.iterdir()):
            file.unlink(missing_ok=True)
        (tmp_path / ".store.building" / "plan.json").unlink()


def start(text: Path, folder: Path, code: str = CHILD) -> subprocess.Popen[str]:
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(text), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "go\n"
    return child


def close(child: subprocess.Popen[str]) -> int:
    child.communicate()
    return child.returncode


def kill_again_and_again(text: Path, folder: Path, kills: int, seed: int) -> None:
    """Kill builds at random moments; what is under the final name is always whole."""
    began = time.perf_counter()
    whole = content(build_corpus([text], folder / "whole", OPTIONS["words"], jobs=2).folder)
    seconds = time.perf_counter() - began
    draw = random.Random(seed)
    stores = [folder / "store0"]
    for _ in range(kills):
        child = start(text, stores[-1])
        time.sleep(draw.uniform(0, seconds))
        child.kill()
        close(child)
        if stores[-1].exists():
            assert content(stores[-1]) == whole
            stores.append(folder / f"store{len(stores)}")
    assert close(start(text, stores[-1])) == 0
    assert content(stores[-1]) == whole
    assert not (folder / f".{stores[-1].name}.building").exists()


@pytest.mark.usefixtures("small_shards")
def test_kill_9_leaves_nothing_half_done(text_file: Path, tmp_path: Path) -> None:
    kill_again_and_again(text_file, tmp_path, kills=5, seed=0)


@pytest.mark.campaign
@pytest.mark.usefixtures("small_shards")
def test_kill_9_leaves_nothing_half_done_however_often(text_file: Path, tmp_path: Path) -> None:
    kill_again_and_again(text_file, tmp_path, kills=25, seed=1)


WAITING = (
    CHILD.replace("jobs=2", "on_progress=lambda _: sys.stdin.readline()")
    .replace('print("go", flush=True)', "")
    .replace("sys.stdin.readline()", "(print('go', flush=True), sys.stdin.read())")
)


def test_a_second_build_is_told_who_holds_the_folder(text_file: Path, tmp_path: Path) -> None:
    child = start(text_file, tmp_path / "store", WAITING)
    try:
        with pytest.raises(RunError, match=rf"another build .*\(process {child.pid} on "):
            build_corpus([text_file], tmp_path / "store", OPTIONS["words"])
        assert not (tmp_path / "store").exists()
    finally:
        os.kill(child.pid, signal.SIGKILL)
        close(child)
    made = build_corpus([text_file], tmp_path / "store", OPTIONS["words"])
    TokenStore.open(made.folder).verify()
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_second_build_of_the_same_process_is_refused_too(text_file: Path, tmp_path: Path) -> None:
    refused = []

    def build_again(progress: CorpusProgress) -> None:
        with pytest.raises(RunError, match="another build is running here") as caught:
            build_corpus([text_file], tmp_path / "store", OPTIONS["words"])
        refused.append(str(caught.value))

    made = build_corpus([text_file], tmp_path / "store", OPTIONS["words"], on_progress=build_again)
    assert len(refused) > 3
    made.verify()
    with pytest.raises(CorpusError, match="already exists; choose another folder"):
        build_corpus([text_file], tmp_path / "store", OPTIONS["words"])


def test_an_error_in_the_text_leaves_nothing_behind(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "text.jsonl", sentences(20), field="body")
    with pytest.raises(CorpusError, match="has no 'text'"):
        build_corpus([path], tmp_path / "store")
    assert [entry.name for entry in tmp_path.iterdir()] == ["text.jsonl"]


def test_a_folder_that_cannot_be_made_is_named(text_file: Path) -> None:
    with pytest.raises(OutputError, match="cannot be written"):
        build_corpus([text_file], text_file / "store")
    with pytest.raises(OutputError, match="cannot be written"):
        build_corpus([text_file], "/proc/nothing/store")
