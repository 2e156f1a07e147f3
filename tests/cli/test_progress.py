"""Progress bars, and messages that are printed next to them."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

import wqk.cli
from wqk.cli import display


def test_no_bar_prints_a_total_that_may_be_none() -> None:
    files = Path(wqk.cli.__file__).parent.glob("*.py")
    assert not [path.name for path in files if "{task.total}" in path.read_text(encoding="utf-8")]


class Terminal(io.TextIOWrapper):
    """A terminal's stream, kept in memory."""

    def isatty(self) -> bool:
        return True


def test_what_is_said_beside_a_bar_has_a_line_to_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal(io.BytesIO(), "utf-8")
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    with display.bar("train", lambda done: {"completed": done, "total": 2, "text": ""}) as update:
        assert update
        update(1)
        display.say("a recipe")
    terminal.flush()
    screen = terminal.buffer.getvalue().decode()
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", screen).replace("\r", "\n").splitlines()
    assert "a recipe" in [line.rstrip() for line in lines]
    assert screen.endswith("\x1b[2K")  # in the end the bar is erased


def test_long_work_reports_lines_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter([0.0, 10.0, 31.0, 40.0, 62.0])
    monkeypatch.setattr(display.time, "monotonic", lambda: next(clock))

    def fields(name: str, done: int, total: int) -> dict[str, str]:
        return {"description": name, "text": f"{done}/{total}"}

    with display.bar("model", fields, seconds=30) as report:
        assert report
        for done in range(4):
            report("batches", done, 4)
    assert capsys.readouterr().err.splitlines() == [
        "batches 1/4, 31 seconds so far",
        "batches 3/4, 62 seconds so far",
    ]
