"""Where a survey's jobs run: in worker processes, on any executor, on a Dask cluster."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    CancelledError,
    Executor,
    Future,
    ProcessPoolExecutor,
    as_completed,
    wait,
)
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from wqk.errors import RunError, all_lines, required_by
from wqk.scanning.surveys.jobs import Outcome, failure

if TYPE_CHECKING:
    from wqk.scanning.surveys.jobs import Job

# Seconds to wait for a Dask scheduler's answer.
TIMEOUT = 10


class WorkerDied(Exception):
    """A worker process ended in the middle of a job."""


def run_on(
    executor: Executor, work: Callable[[Job], Outcome], jobs: Iterable[Job]
) -> Generator[tuple[Job, Outcome], None, None]:
    """Outcomes from any executor, as they complete.

    Raises `RunError` if the executor fails, or forks its processes, which would wait forever for
    locks of threads that they do not have.
    """
    context = getattr(executor, "_mp_context", None)
    if context is not None and context.get_start_method() == "fork":
        raise RunError(
            "worker processes must not be forked, for BLAS and polars have running threads: give "
            "ProcessPoolExecutor(mp_context=multiprocessing.get_context('spawn'))"
        )
    running = {executor.submit(work, job): job for job in jobs}
    try:
        for future in as_completed(list(running)):
            job = running.pop(future)
            try:
                outcome = future.result()
            except (BrokenExecutor, CancelledError) as error:
                raise RunError(
                    f"the executor gave up ({type(error).__name__}); finished checkpoints are "
                    "kept: start a new executor and survey again"
                ) from None
            except Exception as error:  # the executor's own: a worker that died, no way to send
                outcome = failure(error)
            yield job, outcome
    finally:
        for future in running:
            future.cancel()


def run_in_processes(
    work: Callable[[Job], Outcome], jobs: Iterable[Job], processes: int
) -> Generator[tuple[Job, Outcome], None, None]:
    """Outcomes from worker processes, as they complete; `RunError` if none can be started.

    A process that dies breaks the whole pool, without telling which job it ran. The jobs in
    progress then run again one by one; a job during which a process dies has failed.
    """
    waiting = deque(jobs)
    suspects: deque[Job] = deque()
    while waiting or suspects:
        queue, at_once = (suspects, 1) if suspects else (waiting, processes)
        # One more than the number of processes, so that none is idle; a suspect runs alone.
        limit = 1 if suspects else at_once + 1
        running: dict[Future[Outcome], Job] = {}
        with _pool(at_once) as pool:
            broken: list[Job] = []
            while (queue or running) and not broken:
                while queue and len(running) < limit:
                    try:
                        running[pool.submit(work, queue[0])] = queue[0]
                    except BrokenExecutor:
                        break
                    queue.popleft()
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        outcome = future.result()
                    except BrokenExecutor:
                        broken.append(job)
                        continue
                    yield job, outcome
            broken += running.values()
        if limit == 1 and broken:
            died = WorkerDied("the process at work on it was killed, or ran out of memory")
            yield broken[0], failure(died)
        else:
            suspects.extend(broken)


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    """Fresh processes, not forked, since forks would inherit threads and locks."""
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(processes, mp_context=context, initializer=_start_worker)
    try:
        try:
            pool.submit(os.getpid).result()
        except BrokenExecutor:
            raise RunError(
                "no worker process can be started; in a script, survey under `if __name__ == "
                "'__main__':`, or give an executor such as ThreadPoolExecutor()"
            ) from None
        yield pool
    except BaseException:
        # The results of jobs in progress are no longer needed.
        for process in (getattr(pool, "_processes", None) or {}).values():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker() -> None:
    """Leave interrupts to the parent, and exit when the parent exits, for any reason."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """The workers of the Dask scheduler at an address, such as ``tcp://host:8786``, as an executor.

    RunError if no scheduler answers there.
    """
    with required_by("a Dask cluster", "cluster"):
        distributed: Any = importlib.import_module("distributed")
    try:
        client = distributed.Client(address, timeout=TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = all_lines(error)
        raise RunError(
            f"{address}: no Dask scheduler responds ({reason}); expected such as tcp://host:8786"
        ) from None
    with client:
        yield client.get_executor(pure=False)
