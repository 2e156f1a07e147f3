"""What all tests share: shapes checked at run time, seeded hypothesis, data that may be absent."""

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
from tests import groups
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
    """What is collected stays: no later search for garbage goes through it, nor through PyTorch."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files without a test of the group that is asked for are not even imported."""
    return groups.has_none(collection_path, config.option.markexpr) or None


def pytest_collection_finish(session: pytest.Session) -> None:
    """A process that only collects has no threads of polars: a forked one would wait for them."""
    for task in Path("/proc/self/task").glob("*/comm"):
        if re.match(r"polars-\d", task.read_text()):
            raise pytest.UsageError("a test uses polars while it is collected; use a fixture")


def pytest_configure() -> None:
    """All workers and what they start know the same day, and have one thread for products each.

    Threads of processes side by side would wait for each other, by spinning.
    """
    groups.today()
    for library in ("OMP", "OPENBLAS"):
        os.environ.setdefault(f"{library}_NUM_THREADS", "1")
    threadpool_limits(1, "blas")  # of NumPy, which plugins have imported by now


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marked before they are selected by their marks."""
    groups.mark(items)
    if left := set(groups.left_to_other_days(items)):
        config.hook.pytest_deselected(items=[*left])
        items[:] = [item for item in items if item not in left]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """The processor time of the test itself goes with its report."""
    before = processor_time()
    if item.get_closest_marker("campaign"):
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(groups.LONGEST)
    try:
        return (yield)
    finally:
        signal.alarm(0)
        item.user_properties.append((SECONDS, processor_time() - before))


SECONDS = "seconds of processor time"


def too_long(*_: object) -> None:
    raise TimeoutError(f"took longer than {groups.LONGEST} s by the clock")


def processor_time() -> float:
    """Of this process and its children that have ended."""
    used = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Name the tests that are too slow for the group that they are in."""
    if "not slow" not in config.option.markexpr:
        return
    reports = [one for one in terminalreporter.getreports("passed") if one.when == "call"]
    took = {one.nodeid: dict(one.user_properties).get(SECONDS, 0.0) for one in reports}
    long = {name: seconds for name, seconds in took.items() if seconds > groups.MOST}
    if long:
        terminalreporter.section(f"over {groups.MOST} s of processor time: see tests/groups.py")
        for name, seconds in sorted(long.items(), key=lambda one: -one[1]):
            terminalreporter.line(f"{seconds:6.1f} {name}")


# Hooks that were there after objects were collected.
KEPT: set[int] = set()


@pytest.fixture(autouse=True)
def no_hooks() -> None:
    """A measurement waits for hooks that a model of an earlier test has left."""
    if "torch" in sys.modules:  # most do without
        hooks = sys.modules["torch"].nn.modules.module._global_forward_pre_hooks
        if not hooks.keys() <= KEPT:
            gc.collect()
            KEPT.update(hooks)  # those that a fixture still needs


@pytest.fixture(scope="session")
def shared() -> Path:
    """Real weights and texts beside the project; where they are not, the test skips."""
    default = Path(__file__).parents[2] / "shared"
    folder = Path(os.environ.get("WQK_SHARED", default))
    if not folder.is_dir():
        pytest.skip(f"needs real data in {folder} (or WQK_SHARED)")
    return folder


@pytest.fixture
def unchecked_arguments() -> Iterator[None]:
    """For arguments that are wrong on purpose: wqk's own check comes before the tests' one."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
