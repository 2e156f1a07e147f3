"""Files that survive whatever kills the process."""

import errno
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tests.limits import failing

from wqk._files import append_lines, locked, read_lines, sync, write_atomically
from wqk.errors import OutputError, RunError

HOLDER = """
import sys, time
from pathlib import Path
from wqk._files import locked
with locked(Path(sys.argv[1]), "survey"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_torn_line_is_neither_read_nor_continued(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    append_lines(path, {"n": 1}, {"n": 2})
    with path.open("ab") as file:
        file.write(b'{"n": ' + b"3" * 100_000)  # longer than one look back for the line's start
    assert read_lines(path) == [{"n": 1}, {"n": 2}]
    append_lines(path, {"n": 4})
    assert read_lines(path) == [{"n": 1}, {"n": 2}, {"n": 4}]
    path.write_bytes(b'{"n"')
    append_lines(path, {"n": 5})
    assert read_lines(path) == [{"n": 5}]


@pytest.mark.parametrize("line", [b"[1]", b'{"n": 1', b"\xff", b"[" * 100_000, b"1" * 5000])
def test_a_damaged_line_is_named(tmp_path: Path, line: bytes):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"n": 1}\n' + line + b"\n")
    with pytest.raises(RunError, match="line 2 is not a JSON object"):
        read_lines(path)


def test_lone_surrogates_are_kept(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    append_lines(path, {"name": "\ud800", "é": "é"})
    assert read_lines(path) == [{"name": "\ud800", "é": "é"}]


def test_a_disk_that_fills_up_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "a.jsonl"
    append_lines(path, {"n": 1})
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
    new, missing = tmp_path / "new", tmp_path / "missing" / "file"
    for write, place in (
        (lambda: append_lines(path, {"n": 2}), path),
        (lambda: write_atomically(path, b"new"), path),
        (lambda: write_atomically(new, b"new"), new),
        (lambda: write_atomically(missing, b"new"), missing),
    ):
        with pytest.raises(OutputError, match=f"{place.name}: cannot be written") as raised:
            write()
        assert raised.value.path == place
    assert read_lines(path) == [{"n": 1}]
    assert [p.name for p in tmp_path.iterdir()] == ["a.jsonl"]


def test_a_short_write_leaves_whole_lines(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    append_lines(path, {"n": 1})
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, limit[1]))
    try:
        with pytest.raises(OutputError, match="cannot be written"):
            append_lines(path, {"n": 2})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, before)
    assert path.read_bytes() == b'{"n": 1}\n'


def test_a_lock_keeps_out_this_process_and_others_and_dies_with_its_holder(tmp_path: Path):
    path = tmp_path / "new" / ".lock"
    process = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    assert process.stdout
    process.stdout.readline()
    with pytest.raises(RunError, match=rf"survey is running here \(process {process.pid} on "):
        locked(path, "survey").__enter__()
    process.kill()
    process.communicate()
    with locked(path, "survey"), pytest.raises(RunError, match=f"process {os.getpid()} "):
        locked(path, "survey").__enter__()
    with locked(path, "survey"):
        pass


def test_a_place_without_a_lock(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match="cannot be written"):
        locked(tmp_path / "file" / ".lock", "survey").__enter__()


def test_an_error_while_a_lock_is_held_is_passed_on(tmp_path: Path):
    with pytest.raises(OSError, match="mine"), locked(tmp_path / ".lock", "survey"):
        raise OSError("mine")
    with locked(tmp_path / ".lock", "survey"):
        pass


def test_on_a_system_without_descriptors_of_folders(tmp_path, monkeypatch):
    """Windows: it cannot wait for folders, nor read by position."""
    for name in ("O_DIRECTORY", "pread", "preadv"):
        monkeypatch.delattr(os, name, raising=False)
    path = tmp_path / "lines.jsonl"
    path.write_bytes(b'{"n": 1}\n{"n":')
    append_lines(path, {"n": 2})
    monkeypatch.setattr(os, "fsync", lambda descriptor: os.write(descriptor, b""))
    sync(path)  # Windows refuses to wait for what is open for reading alone
    sync(tmp_path)
    assert read_lines(path) == [{"n": 1}, {"n": 2}]
