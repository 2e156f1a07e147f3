"""Helpers for tests of bad input and of failures: repetitions, time limits, calls that fail."""

from __future__ import annotations

import contextlib
import signal
import time
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from wqk.errors import WqkError

HANGING = 120.0  # seconds by the clock: what takes these waits for ever, on however busy a machine


def counts(short: int, long: int, name: str = "count") -> pytest.MarkDecorator:
    """A test of random cases: a few of them, and in the campaign many."""
    return pytest.mark.parametrize(name, [short, pytest.param(long, marks=pytest.mark.campaign)])


def some(usual: Iterable[str], cases: Iterable[str]) -> list[Any]:
    """Cases of a test: a few of them always, all others in the campaign."""
    chosen = dict.fromkeys(usual)
    remaining = (case for case in cases if case not in chosen)
    return [*chosen, *(pytest.param(case, marks=pytest.mark.campaign) for case in remaining)]


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Fails where the block takes more of the processor, or seems never to end."""

    def stop(*_: object) -> None:
        raise AssertionError(f"took longer than {HANGING} s by the clock")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, HANGING)
    start = time.process_time()
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < seconds


@contextlib.contextmanager
def in_memory(most: float) -> Iterator[None]:
    """Fails where the block holds more bytes at once."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < most
    finally:
        tracemalloc.stop()


def failing(error: BaseException) -> Callable[..., Any]:
    """A function that raises this error for any arguments."""

    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def refused(call: Callable[..., Any], *arguments: Any) -> bool:
    """Return whether a call ends in an error of wqk; any other error is raised."""
    try:
        call(*arguments)
    except WqkError:
        return True
    return False
