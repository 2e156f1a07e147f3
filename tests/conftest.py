"""Setup of all tests: shapes checked at run time, seeded hypothesis, data that may be absent."""

from __future__ import annotations

import gc
import os
import re
import resource
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jaxtyping
import pytest
from hypothesis import HealthCheck, settings
from tests import groups, optional
from threadpoolctl import threadpool_limits

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where arrays have shapes worth checking; must stand before anything imports wqk.
SHAPED = (
    "attention",
    "families.rotary",
    "forms",
    "live.initializing",
)
jaxtyping.install_import_hook([f"wqk.{name}" for name in SHAPED], "beartype.beartype")

settings.register_profile(
    "wqk",
    deadline=None,
    derandomize=True,
    max_examples=25,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("campaign", settings.get_profile("wqk"), max_examples=400)
settings.load_profile("wqk")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Keep collected tests and PyTorch out of all later garbage collections."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Skip the import of files that have no test of the selected group."""
    return groups.has_none(collection_path, config.option.markexpr) or None


def pytest_collection_finish(session: pytest.Session) -> None:
    """Refuse tests that use polars while they are collected: a forked process would hang."""
    for task in Path("/proc/self/task").glob("*/comm"):
        if re.match(r"polars-\d", task.read_text()):
            raise pytest.UsageError("a test uses polars while it is collected; use a fixture")


def pytest_configure(config: pytest.Config) -> None:
    """Give all workers and their children the same turn, and one thread for products each.

    Threads of processes that share the cores would wait for each other, by spinning.
    """
    config.pluginmanager.register(optional)
    groups.choose_turn()
    for library in ("OMP", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    threadpool_limits(1, "blas")  # of NumPy, which plugins have imported by now


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the slow tests before tests are selected by their marks; the longest of them begin."""
    groups.mark(items)
    if "not slow" not in config.option.markexpr:
        items.sort(key=groups.begins_first, reverse=True)
    deselected = set(groups.left_out_of_campaign(items))
    if deselected:
        config.hook.pytest_deselected(items=[*deselected])
        items[:] = [item for item in items if item not in deselected]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Add the processor time of the test itself to its report."""
    before = processor_time()
    if item.get_closest_marker("campaign"):
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(groups.CAMPAIGN_SECONDS)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        item.user_properties.append((SECONDS, processor_time() - before))


SECONDS = "seconds of processor time"


def too_long(*_: object) -> None:
    raise TimeoutError(f"took longer than {groups.CAMPAIGN_SECONDS} s by the clock")


def processor_time() -> float:
    """Seconds of processor time of this process and its children that have ended."""
    usages = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Print commands that repeat failures, and name tests that are too slow for their group."""
    failures = [report.nodeid for report in terminalreporter.getreports("failed")]
    if failures:
        terminalreporter.section("to repeat a failure")
        for name in dict.fromkeys(failures):
            terminalreporter.line(groups.repeating_command(name))
    if "not slow" not in config.option.markexpr:
        return
    seconds_by_test = {
        report.nodeid: dict(report.user_properties).get(SECONDS, 0.0)
        for report in terminalreporter.getreports("passed")
        if report.when == "call"
    }
    slow = [name for name, seconds in seconds_by_test.items() if seconds > groups.MOST_SECONDS]
    if slow:
        limit = f"over {groups.MOST_SECONDS} s of processor time: see tests/groups.py"
        terminalreporter.section(limit)
        for name in sorted(slow, key=seconds_by_test.__getitem__, reverse=True):
            terminalreporter.line(f"{seconds_by_test[name]:6.1f} {name}")


# Hooks that were there after objects were collected.
KEPT: set[int] = set()


@pytest.fixture(autouse=True)
def no_hooks() -> None:
    """Remove hooks that models of earlier tests have left, before a test measures."""
    if "torch" in sys.modules:  # most do without
        hooks = sys.modules["torch"].nn.modules.module._global_forward_pre_hooks
        if not hooks.keys() <= KEPT:
            gc.collect()
            KEPT.update(hooks)  # those that a fixture still needs


@pytest.fixture(scope="session")
def shared() -> Path:
    """Folder of real weights and texts next to the project; a test skips where it is missing."""
    default = Path(__file__).parents[2] / "shared"
    folder = Path(os.environ.get("WQK_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (or WQK_SHARED)")
    return folder


@pytest.fixture
def unchecked_arguments() -> Iterator[None]:
    """Switch off the shape checks of the tests, for arguments that are wrong on purpose."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
