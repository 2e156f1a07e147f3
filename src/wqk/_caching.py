"""What threads and forks need: a property cached without a lock, and a word on forked processes.

Before Python 3.12, `functools.cached_property` holds one lock for all instances of a class, so that
threads that score different forms would wait for each other. A process that was forked may wait for
threads that it lacks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

from wqk.errors import RunError

Value = TypeVar("Value")


class cached_property(Generic[Value]):  # noqa: N801, named like the standard one
    """As `functools.cached_property`, but two threads may both compute an instance's value.

    Examples
    --------
    >>> class Circle:
    ...     radius = 2
    ...     @cached_property
    ...     def area(self):
    ...         print("computed")
    ...         return 3 * self.radius**2
    >>> circle = Circle()
    >>> circle.area + circle.area
    computed
    24
    """

    def __init__(self, compute: Callable[[Any], Value]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type) -> Value:
        if instance is None:  # accessed on the class, for its documentation
            return self  # type: ignore[return-value]
        value = self._compute(instance)
        # From now on, the instance's own attribute takes precedence.
        instance.__dict__[self._name] = value
        return value


POOL = re.compile(r"polars-\d")  # threads that a child waits for; others begin with the import
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
        _waits_forever = _waits_forever or not names or any(map(POOL.match, names))


in_children(_after_fork)
