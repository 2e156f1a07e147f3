"""Record of the lines of `src` that each test runs: a plugin of pytest, and its file.

Lines are those of the tree in which pytest runs. What runs while tests are collected is kept
apart: it holds for all of them. What fixtures of more than one test run is of all their tests.
"""

from __future__ import annotations

import os
import pickle
import re
import resource
import sys
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

FOLDER = "WQK_RECORD"  # where records go
Lines = dict[str, set[int]]


@dataclass
class LineRecord:
    """Tests that pass, their seconds of processor time, and for each line a bit for each test."""

    tests: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    lines: dict[str, dict[int, int]] = field(default_factory=dict)
    collected: Lines = field(default_factory=dict)

    def add(self, test: str, seconds: float, lines: Lines) -> None:
        bit = 1 << len(self.tests)
        self.tests.append(test)
        self.seconds.append(seconds)
        for file, numbers in lines.items():
            bits_by_line = self.lines.setdefault(file, {})
            for number in numbers:
                bits_by_line[number] = bits_by_line.get(number, 0) | bit

    def extend(self, record: LineRecord) -> None:
        shift = len(self.tests)
        self.tests += record.tests
        self.seconds += record.seconds
        for file, lines in record.lines.items():
            bits_by_line = self.lines.setdefault(file, {})
            for number, bits in lines.items():
                bits_by_line[number] = bits_by_line.get(number, 0) | bits << shift
        for file, numbers in record.collected.items():
            self.collected.setdefault(file, set()).update(numbers)

    def reaching(self, file: str, numbers: Iterable[int]) -> set[int]:
        """The numbers of the tests that run one of these lines."""
        bits_by_line = self.lines.get(file, {})
        bits = 0
        for number in numbers:
            bits |= bits_by_line.get(number, 0)
        return {m.start() for m in re.finditer("1", f"{bits:b}"[::-1])}


def read_record(folder: Path) -> LineRecord:
    """Read the record of all workers."""
    every = LineRecord()
    for file in sorted(folder.glob("*.pickle")):
        every.extend(pickle.loads(file.read_bytes()))
    return every


def _used() -> float:
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


class Recorder:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.record = LineRecord()
        self.shared: dict[Any, Lines] = {}  # by fixture
        self.items: list[tuple[str, float, Lines, list[Any]]] = []
        self.passed: set[str] = set()
        root = Path.cwd()
        self.names = {str(f): f.relative_to(root).as_posix() for f in root.glob("src/**/*.py")}
        self.seen: Lines = {name: set() for name in self.names}
        adders = {name: seen.add for name, seen in self.seen.items()}

        def lines_of(add: Any) -> Any:
            def line(frame: Any, event: str, _: Any) -> Any:
                if event == "line":
                    add(frame.f_lineno)
                return line

            return line

        tracers = {name: lines_of(add) for name, add in adders.items()}

        def call(frame: Any, event: str, _: Any) -> Any:
            return tracers.get(frame.f_code.co_filename)

        sys.settrace(call)
        threading.settrace(call)

    def taken(self) -> Lines:
        """The lines since the last time."""
        lines_by_file = {self.names[name]: set(seen) for name, seen in self.seen.items() if seen}
        for seen in self.seen.values():
            seen.clear()
        return lines_by_file

    def collect(self) -> None:
        for file, numbers in self.taken().items():
            self.record.collected.setdefault(file, set()).update(numbers)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.collect()
        self.within: list[Lines] = []
        before = _used()
        result = yield
        lines = merged([*self.within, self.taken()])
        definitions = getattr(item, "_fixtureinfo", None)
        every = definitions.name2fixturedefs.values() if definitions else ()
        keys = [_key(defs[-1]) for defs in every if defs and defs[-1].scope != "function"]
        self.items.append((item.nodeid, _used() - before, lines, keys))
        return result

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function":
            return (yield)
        self.within.append(self.taken())
        start = len(self.within)
        try:
            return (yield)
        finally:
            self.within.append(self.taken())
            key = _key(fixturedef)
            self.shared[key] = merged([self.shared.get(key, {}), *self.within[start:]])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self.passed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]
        for test, seconds, lines, keys in self.items:
            if test in self.passed:
                every = [lines, *(self.shared[key] for key in keys if key in self.shared)]
                self.record.add(test, seconds, merged(every))
        name = os.environ.get("PYTEST_XDIST_WORKER", "all")
        (self.folder / f"{name}.pickle").write_bytes(pickle.dumps(self.record))


def _key(fixture: Any) -> tuple[str, str]:
    return fixture.baseid, fixture.argname


def merged(every: list[Lines]) -> Lines:
    all_lines: Lines = {}
    for lines in every:
        for file, numbers in lines.items():
            all_lines.setdefault(file, set()).update(numbers)
    return all_lines


# Begun before anything of the tree is imported, in the workers of pytest-xdist alone.
if FOLDER in os.environ and "PYTEST_XDIST_WORKER" in os.environ:
    RECORDER = Recorder(Path(os.environ[FOLDER]))


def pytest_configure(config: pytest.Config) -> None:
    if recorder := globals().get("RECORDER"):
        config.pluginmanager.register(recorder)
