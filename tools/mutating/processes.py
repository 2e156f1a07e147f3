"""Calls in forked processes, where the heavy libraries are loaded, within limits of time."""

from __future__ import annotations

import os
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# What one call may take of the processor; what takes more, or hangs, counts as neither.
SECONDS = 120.0
SLOWER = 10  # limit by the clock, as a multiple of the limit of processor time
BROKEN = 99
_TOLD: list[int] = []  # the pipe to which a call writes the failed test


@dataclass
class Ended:
    status: int | None  # None: took too long
    told: str
    seconds: float  # of processor time

    @property
    def passed(self) -> bool:
        return self.status in (0, 5)  # 5: there was nothing to run

    @property
    def decided(self) -> bool:
        return self.status not in (None, BROKEN)


def tell(text: str) -> None:
    for descriptor in _TOLD:
        os.write(descriptor, text[:2000].encode())


def ended(call: Callable[[], int], limit: float = SECONDS) -> Ended:
    """Return the status and the message of a call in a forked process."""
    before = _used()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        resource.setrlimit(resource.RLIMIT_CPU, (int(limit), int(limit) + 5))
        _TOLD[:] = [writing]
        with Path(os.devnull).open("w") as quiet:
            os.dup2(quiet.fileno(), 1)
            os.dup2(quiet.fileno(), 2)
        try:
            os._exit(call())
        except BaseException:
            tell(traceback.format_exc()[-1500:])
            os._exit(BROKEN)
    os.close(writing)
    deadline = time.monotonic() + SLOWER * limit
    while not (done := os.waitpid(child, os.WNOHANG))[0]:
        if time.monotonic() > deadline:
            os.killpg(child, signal.SIGKILL)
            done = os.waitpid(child, 0)
            break
        time.sleep(0.02)
    os.set_blocking(reading, False)
    try:
        message = os.read(reading, 2000).decode(errors="replace")
    except BlockingIOError:
        message = ""  # a process that it left behind still has the pipe
    os.close(reading)
    code = os.waitstatus_to_exitcode(done[1])
    late = code in (-signal.SIGXCPU, -signal.SIGKILL)
    return Ended(None if late else code, message, _used() - before)


def _used() -> float:
    spent = resource.getrusage(resource.RUSAGE_CHILDREN)
    return spent.ru_utime + spent.ru_stime


def run_items(session: Any, items: Sequence[Any]) -> int:
    """Run tests of a pytest session until one fails; its name is written to the pipe."""
    for n, item in enumerate(items):
        following = items[n + 1] if n + 1 < len(items) else None
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if session.testsfailed:
            stats = session.config.pluginmanager.get_plugin("terminalreporter").stats
            report = [*stats.get("failed", ()), *stats.get("error", ())][-1]
            tell(f"{item.nodeid}\n{report.longreprtext[-400:]}")
            return 1
    return 0


def run_named(session: Any, names: Sequence[str]) -> int:
    """The same, of tests by their names, in this order."""
    items = {item.nodeid: item for item in session.items}
    return run_items(session, [items[name] for name in names if name in items])
