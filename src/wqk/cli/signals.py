"""Signals that end a process: from a batch system, a container, a closed terminal."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class Ended(KeyboardInterrupt):
    """A signal asked the process to end; ``status`` is the exit status for this signal."""

    def __init__(self, signal_number: int) -> None:
        super().__init__()
        self.name = signal.Signals(signal_number).name
        self.status = 128 + signal_number


@contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Raise `Ended` at SIGTERM and SIGHUP, so that worker processes end properly."""

    def end(signal_number: int, frame: FrameType | None) -> None:
        raise Ended(signal_number)

    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may handle signals
        return
    names = [name for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    numbers = [getattr(signal, name) for name in names]
    # A process that ignores a signal (nohup) goes on ignoring the signal.
    handled = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in handled:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, signal.SIG_DFL)
