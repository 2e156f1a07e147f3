"""Families are read by the threads of a survey at once."""

from __future__ import annotations

import subprocess
import sys

# A process of its own: only the first conversions of a process are at risk.
PROGRAM = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from wqk.families.family import families

start = Barrier(8)

def read(_):
    start.wait()
    return len(families.__wrapped__())

with ThreadPoolExecutor(8) as threads:
    assert len(set(threads.map(read, range(8)))) == 1
"""


def test_threads_that_read_families_for_the_first_time_do_not_crash() -> None:
    for _ in range(3):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-500:]
