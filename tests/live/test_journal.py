"""Files that are appended to: whatever tears them, whole rows stay and none comes twice."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.limits import counts

import wqk
from wqk._files import append_lines
from wqk.live import monitor
from wqk.tables.run import read_table
from wqk.tables.schema import records


def rows(step: int) -> wqk.ScoreTable:
    return wqk.ScoreTable.from_rows(
        {"checkpoint": "ß", "step": step, "layer": layer, "symmetry": 0.5} for layer in range(3)
    )


def begin(path: Path, keep: int) -> None:
    monitor.check_journal(path, gamma=2.0)
    monitor.begin_journal(path, keep, {"gamma": 2.0})


def append(path: Path, table: wqk.ScoreTable) -> None:
    append_lines(path, *records(table.frame))


def test_a_file_torn_at_any_byte_is_read_and_mended(tmp_path: Path) -> None:
    path = tmp_path / "scores.jsonl"
    begin(path, -1)
    for step in range(3):
        append(path, rows(step))
    content = path.read_bytes()
    for length in range(0, len(content), 43):
        path.write_bytes(content[:length])
        read = read_table(path).frame["step"].to_list()
        assert read == [0, 0, 0, 1, 1, 1, 2, 2, 2][: len(read)]
        assert len(read) == max(0, content[:length].count(b"\n") - 1)
        begin(path, 0)
        append(path, rows(1))
        table = wqk.read_table(path)
        assert table.frame["step"].to_list() == [0] * min(3, len(read)) + [1, 1, 1]
        assert table.metadata["gamma"] == 2.0


WRITER = """
import sys
from pathlib import Path
from tests.live.test_journal import append, begin, rows
path = Path(sys.argv[1])
begin(path, int(sys.argv[2]))
for step in range(int(sys.argv[2]) + 1, 10**6):
    append(path, rows(step))
    print(flush=True)
"""


def kill_one_writer(path: Path, keep: int, seconds: float) -> None:
    command = [sys.executable, "-c", WRITER, str(path), str(keep)]
    root = Path(__file__).parents[2]
    with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=root) as process:
        assert process.stdout.readline() == b"\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)


@counts(1, 20, "kills")
def test_killed_writers_leave_whole_rows(tmp_path: Path, kills: int) -> None:
    path, keep = tmp_path / "scores.jsonl", -1
    for kill in range(kills):
        kill_one_writer(path, keep, seconds=0.02 + 0.013 * kill)
        steps = read_table(path).frame["step"].to_list()
        assert steps == sorted(steps)
        assert all(steps.count(step) == 3 for step in set(steps[:-3]))
        keep = max(-1, max(steps) - 2)
    begin(path, keep)
    frame = wqk.read_table(path).frame
    assert frame["step"].to_list() == sorted([*range(keep + 1)] * 3)
