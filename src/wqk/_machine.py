"""How the machine is used: its threads, its cores and its memory; and a word on forked processes.

One block for each core uses the cores better than all cores on one block, whose sums and
conversions run on a single one. Large blocks are taken one by one, with every core on their matrix
products.

The last digits of a product depend on the number of BLAS threads, which belongs to the process and
not to a thread. Scans in several threads therefore agree on it block by block: small blocks share
one BLAS thread each, a large block waits until it is alone. The number that was there before is put
back as soon as no block is being scored.

Before Python 3.12, `functools.cached_property` holds one lock for all instances of a class, so that
threads that score different forms would wait for each other. A process that was forked may wait for
threads that it lacks.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from threading import Condition
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from wqk.errors import RunError

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Value = TypeVar("Value")
Found = TypeVar("Found")

# The GNU C library hands freed memory back, to be cleared again page by page for the next block,
# until an array this large was freed; then it keeps twice as much. No page of this one is touched.
np.empty(2**25 - 2**16, np.uint8)


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


_changed = Condition()
_sharing = 0  # small blocks that are being scored
_limit: Any = None  # while there are any: what puts back the number of BLAS threads
_alone = False  # whether a large block is being scored
_confined: ContextVar[bool] = ContextVar("confined", default=False)


# Worker processes of a survey that share the cores with this one, itself among them.
_sharers = 1


def share_cores(processes: int) -> None:
    """Take this process for one of so many that compute side by side."""
    global _sharers
    _sharers = processes


def usable_cores() -> int:
    """Cores that this process may use, fewer than there are under Slurm and in containers."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, count // _sharers)


def is_confined() -> bool:
    """Whether this code runs within `one_blas_thread`."""
    return _confined.get()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Compute with one BLAS thread, concurrently with others that do."""
    global _sharing, _limit
    token = _confined.set(True)
    with _changed:
        _changed.wait_for(lambda: not _alone)
        if not _sharing:
            with _control() as libraries:
                _limit = libraries.limit(limits=1, user_api="blas")
        _sharing += 1
    try:
        yield
    finally:
        _confined.reset(token)
        with _changed:
            _sharing -= 1
            if not _sharing:
                with _control():
                    _limit.restore_original_limits()
                _changed.notify_all()


def side_by_side(do: Callable[..., Found], *items: Iterable[Any], many: bool = True) -> list[Found]:
    """What a function gives for each item, one on each core, each with one BLAS thread.

    What is not ``many`` is done in this thread: others take longer to start.
    """
    if not many or usable_cores() == 1:
        return list(map(do, *items))
    with one_blas_thread(), ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(do, *items))


@contextmanager
def all_blas_threads() -> Iterator[None]:
    """Compute with all BLAS threads of the process, while no other thread scores."""
    global _alone
    with _changed:
        _changed.wait_for(lambda: not _sharing and not _alone)
        _alone = True
    try:
        yield
    finally:
        with _changed:
            _alone = False
            _changed.notify_all()


@contextmanager
def whole_products() -> Iterator[None]:
    """Multiply float32 in float32, even where PyTorch may round it to TF32 or bfloat16."""
    import torch

    settings: list[Any] = [torch.backends.cuda.matmul]
    whole: tuple[str, Any] = ("allow_tf32", False)
    if hasattr(settings[0], "fp32_precision"):  # since PyTorch 2.9; the two must not be mixed
        settings.append(torch.backends.mkldnn.matmul)  # products on a CPU
        whole = ("fp32_precision", "ieee")
    before = [getattr(one, whole[0]) for one in settings]
    try:
        for one in settings:
            setattr(one, *whole)
        yield
    finally:
        for one, value in zip(settings, before, strict=True):
            setattr(one, whole[0], value)


@contextmanager
def _control() -> Iterator[ThreadpoolController]:
    """Change the BLAS threads from this thread.

    threadpoolctl 3.8 heeds only the first thread that ever changed them, and ignores all others
    without a word. Here any thread may be the first to come or the last to go, under one lock.
    """
    from threadpoolctl import ThreadpoolController

    libraries = ThreadpoolController()

    def release() -> None:
        for library in libraries.lib_controllers:
            if hasattr(library, "clear_controlling_thread"):
                library.clear_controlling_thread(force=True)

    release()
    try:
        yield libraries
    finally:
        release()
