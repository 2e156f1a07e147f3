"""Use of the machine: threads, cores and memory, also in forked processes.

Small blocks are scored in parallel, one on each core, because sums and conversions of a block run
on a single core. Large blocks are scored one by one, with all cores for each matrix product.

The last digits of a product depend on the number of BLAS threads, which is a property of the
process and not of a thread. Therefore scans in several threads agree on the number block by block:
small blocks use one BLAS thread each, and a large block waits until no other block is scored. The
previous number is restored as soon as no block is being scored.

Before Python 3.12, `functools.cached_property` holds one lock for all instances of a class. Threads
that score different forms would wait for each other; `cached_property` of this file has no lock. A
forked process may wait forever for threads that only its parent has.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from threading import Condition, Lock
from typing import TYPE_CHECKING, Any, Generic, TypeVar
from weakref import finalize

import numpy as np

from wqk.errors import RunError

if TYPE_CHECKING:
    from threadpoolctl import ThreadpoolController

Value = TypeVar("Value")
Returned = TypeVar("Returned")


@cache
def keep_freed_memory() -> None:
    """Make the GNU C library keep the memory of freed arrays.

    By default the library returns the memory of large arrays to the system, and the system clears
    every page again for the next array. After an array of 32 MB was freed, the library keeps up to
    twice this size. The array is never written, and therefore needs no memory.
    """
    with suppress(MemoryError):
        np.empty(2**25 - 2**16, np.uint8)


class cached_property(Generic[Value]):  # noqa: N801, named like the standard one
    """Like `functools.cached_property`, but two threads may both compute a value.

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


# Names of the worker threads that polars waits for; polars starts other threads on import.
POOL_THREAD = re.compile(r"polars-\d")
_waits_forever = False


def in_children(do: Callable[[], None]) -> None:
    """Register a function that every forked child process calls first."""
    if hasattr(os, "register_at_fork"):  # Windows has no fork
        os.register_at_fork(after_in_child=do)


def require_threads() -> None:
    """Raise `RunError` in a forked process that lacks the threads of polars."""
    if _waits_forever:
        raise RunError(
            "this process was forked from one that had used polars, whose threads it lacks; start "
            "processes with multiprocessing.get_context('spawn') or 'forkserver'"
        )


def _after_fork() -> None:
    global _waits_forever
    if "polars" in sys.modules:
        names = [path.read_text() for path in Path(f"/proc/{os.getppid()}/task").glob("*/comm")]
        _waits_forever = _waits_forever or not names or any(map(POOL_THREAD.match, names))


in_children(_after_fork)


_changed = Condition()
_sharing = 0  # number of small blocks that are being scored
_limit: Any = None  # during that time, an object that can restore the number of BLAS threads
_alone = False  # whether a large block is being scored
_confined: ContextVar[bool] = ContextVar("confined", default=False)


# Number of processes of a survey that share the cores, including this process.
_sharers = 1


def share_cores(processes: int) -> None:
    """Set the number of processes that compute on the same cores at the same time."""
    global _sharers
    _sharers = processes


def usable_cores() -> int:
    """Return the number of cores for this process, also under Slurm and in containers."""
    if hasattr(os, "sched_getaffinity"):
        count = len(os.sched_getaffinity(0))
    else:
        count = os.cpu_count() or 1
    return max(1, count // _sharers)


def is_confined() -> bool:
    """Return whether this code runs within `one_blas_thread`."""
    return _confined.get()


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Compute with one BLAS thread in this context; other threads may also use it."""
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


def side_by_side(
    do: Callable[..., Returned], *items: Iterable[Any], many: bool = True
) -> list[Returned]:
    """Apply a function to all items, in parallel, with one BLAS thread for each core.

    Without ``many``, the function runs in this thread, because starting other threads takes longer.
    """
    if not many or usable_cores() == 1:
        return list(map(do, *items))
    with one_blas_thread(), ThreadPoolExecutor(usable_cores()) as pool:
        return list(pool.map(do, *items))


class _Reserve:
    """Memory of large unused arrays, for the next large arrays."""

    def __init__(self) -> None:
        self._unused: list[np.ndarray] = []
        self._lock = Lock()

    def empty(self, count: int, dtype: type) -> np.ndarray:
        """Return an array (count,) in unused memory, or in new memory."""
        nbytes = count * np.dtype(dtype).itemsize
        with self._lock:
            sizes = {len(memory): place for place, memory in enumerate(self._unused)}
            fitting = [size for size in sizes if size >= nbytes]
            if fitting:
                memory = self._unused.pop(sizes[min(fitting)])
            else:
                self._unused.clear()  # memory of other sizes would add to what is needed
                memory = np.empty(nbytes, np.uint8)
        array: np.ndarray = np.frombuffer(memory.data, dtype, count)
        # Views of the array refer to the array, not to the memory. To append takes no lock, which
        # this thread may hold.
        finalize(array, self._unused.append, memory)
        return array


_reserve: _Reserve | None = None
_reserve_users = 0
# Arrays of at least this many bytes are never kept by the GNU C library.
LARGE = 1 << 25


@contextmanager
def reused_memory() -> Iterator[None]:
    """Keep the memory of large arrays from `empty_array` for the next large arrays.

    The system clears new memory of a process, which takes as long as reading data into this memory.
    """
    global _reserve, _reserve_users
    with _changed:
        _reserve = _reserve or _Reserve()
        _reserve_users += 1
    try:
        yield
    finally:
        with _changed:
            _reserve_users -= 1
            if not _reserve_users:
                _reserve = None


def empty_array(count: int, dtype: type) -> np.ndarray:
    """Return an array (count,) with undefined values; within `reused_memory`, in reused memory."""
    reserve = _reserve
    if reserve is None or count * np.dtype(dtype).itemsize < LARGE:
        return np.empty(count, dtype)
    return reserve.empty(count, dtype)


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
    """Multiply float32 in float32, without PyTorch's rounding to TF32 or bfloat16."""
    import torch

    settings: list[Any] = [torch.backends.cuda.matmul]
    exact: tuple[str, Any] = ("allow_tf32", False)
    if hasattr(settings[0], "fp32_precision"):  # since PyTorch 2.9; the two must not be mixed
        settings.append(torch.backends.mkldnn.matmul)  # products on a CPU
        exact = ("fp32_precision", "ieee")
    before = [getattr(setting, exact[0]) for setting in settings]
    try:
        for setting in settings:
            setattr(setting, *exact)
        yield
    finally:
        for setting, value in zip(settings, before, strict=True):
            setattr(setting, exact[0], value)


@contextmanager
def _control() -> Iterator[ThreadpoolController]:
    """Change the BLAS threads from this thread.

    threadpoolctl 3.8 accepts changes only from the first thread that ever made a change, and
    silently ignores all other threads. Here any thread may be the first or the last scoring thread,
    under one lock.
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
