"""Failures of the process itself: status 2 and one line, never the 1 of models that differ."""

from __future__ import annotations

import subprocess
import sys

import pytest

from wqk import __main__ as entry
from wqk.cli import main as boundary


class Panic(BaseException):
    """An error of a library in another language, which is not an `Exception`."""


def exit_of(script: str, *arguments: str) -> tuple[int, list[str]]:
    """Exit status and lines on standard error of a command under limits of the shell."""
    command = [sys.executable, "-m", "wqk", *arguments]
    done = subprocess.run(
        ["bash", "-c", f'{script}; exec "$@"', "bash", *command], capture_output=True, timeout=60
    )
    assert not done.stdout
    return done.returncode, done.stderr.decode().splitlines()


@pytest.mark.skipif(sys.platform != "linux", reason="limits of the address space")
@pytest.mark.parametrize(
    ("script", "words", "expected"),
    [
        ("ulimit -v 120000", ("same", ".", "."), "out of memory: the process may use 117 MB"),
        ("ulimit -v 400000", ("same", ".", "."), "out of memory: the process may use 390 MB"),
        ("ulimit -v 500000", ("scan", "."), "out of memory: the process may use 488 MB"),
        ("ulimit -v 40000", ("scan", "."), ""),  # not enough for Python's own modules
        ("ulimit -n 5", ("scan", "."), "the process may open 5 files, and needs 16"),
    ],
)
def test_too_small_a_limit_is_one_line_and_status_2(script, words, expected) -> None:
    status, lines = exit_of(script, *words)
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith(f"wqk: {expected}")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (MemoryError(), "wqk: out of memory: give the process more memory"),
        (OSError(24, "Too many open files"), "wqk: too many open files: let the process open more"),
        (Panic("called unwrap on an Err"), "wqk: internal failure, Panic"),
        (RecursionError(), "wqk: internal failure, RecursionError"),
    ],
)
def test_an_error_that_nobody_catches_is_one_line_and_status_2(
    error, line, monkeypatch, capfd
) -> None:
    def fail(_: object) -> int:
        raise error

    monkeypatch.setattr(boundary, "run", fail)
    assert entry.status_of_command() == 2
    (written,) = capfd.readouterr().err.splitlines()
    assert written.startswith(line)


def test_an_error_while_an_error_is_reported_is_one_line_and_status_2(monkeypatch, capfd) -> None:
    def fail(*_: object) -> str:
        raise MemoryError

    monkeypatch.setattr(boundary.Boundary, "described", fail)
    monkeypatch.setattr(sys, "argv", ["wqk", "scan", "no/such/model"])
    assert entry.status_of_command() == 2
    assert capfd.readouterr().err == "wqk: out of memory: give the process more memory\n"
