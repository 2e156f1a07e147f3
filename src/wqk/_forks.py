"""Whether this process was forked from one whose threads it would wait for."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

from wqk.errors import RunError

_waits_forever = False


def in_children(do: Callable[[], None]) -> None:
    """Call this first in every process that is forked from this one."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=do)


def require_threads() -> None:
    """Raise `RunError` where tables would wait for threads that a fork has left behind."""
    if _waits_forever:
        raise RunError(
            "this process was forked from one that had used polars, whose threads it lacks; start "
            "processes with multiprocessing.get_context('spawn') or 'forkserver'"
        )


def _after_fork() -> None:
    global _waits_forever
    if "polars" in sys.modules:
        names = [path.read_text() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]
        _waits_forever = _waits_forever or not names or any(n.startswith("polars-") for n in names)


in_children(_after_fork)
