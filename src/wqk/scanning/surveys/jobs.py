"""Jobs of a survey, one for each checkpoint, and their execution.

Jobs run in worker processes, on any executor, or on a Dask cluster.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
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
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from itertools import chain
from multiprocessing.context import SpawnContext, SpawnProcess
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any, Unpack

from wqk._files import exists, write_atomically
from wqk._machine import cached_property, one_blas_thread, share_cores
from wqk._version import __version__
from wqk.checkpoints import open_checkpoint, steps_of
from wqk.checkpoints.formats import has_weights
from wqk.errors import (
    CheckpointError,
    HubError,
    RunError,
    WqkError,
    all_lines,
    demo_folder,
    errors_about,
    required_by,
)
from wqk.model import open as open_model
from wqk.scanning.scan import plan_bytes, scan
from wqk.scanning.surveys.model_sets import SET_PREFIX, model_set, read_list
from wqk.storage.buckets import BucketFolder, matching_folders
from wqk.storage.hub_files import within_deadline
from wqk.storage.references import (
    HubAccess,
    digest_of_query,
    is_bucket,
    redacted,
    step_in,
    without_secrets,
)
from wqk.tables.score_table import ScoreTable
from wqk.tables.writers import to_parquet

# Characters of patterns.
WILDCARDS = frozenset("*?[")
ADDRESS_WILDCARDS = WILDCARDS - {"?"}  # a question mark begins the query of an address


@dataclass(frozen=True)
class Job:
    """One checkpoint of a survey.

    Attributes
    ----------
    name, revision, step
        The columns of the table.
    location
        Reference that a worker opens, from any folder: an absolute path, a Hub id, a URL.
    problem
        Message of the error, if the ref cannot be resolved.
    ref
        The ref that lists the checkpoint, such as the folder of a run, without secrets.
    """

    name: str
    revision: str | None
    step: int | None
    location: str
    problem: WqkError | None = None
    ref: str = ""

    @property
    def title(self) -> str:
        """Name and revision as text."""
        return f"{self.name} @ {self.revision}" if self.revision else self.name

    @cached_property
    def key(self) -> str:
        """File name, from name and revision only."""
        identity = json.dumps([self.name, self.revision]).encode()
        digest = hashlib.blake2b(identity, digest_size=8).hexdigest()
        readable = re.sub(r"[^A-Za-z0-9.]+", "-", self.title).strip("-.")[-60:]
        return f"{readable}-{digest}"


def expand(
    refs: Iterable[str],
    revisions: Sequence[str] = (),
    list_revisions: Callable[[str], list[str]] | None = None,
) -> list[Job]:
    """List a job for each checkpoint of refs and revisions, in order and without repetitions.

    The arguments are as for `survey`. ``list_revisions`` lists a repository's revisions and is
    called only for patterns. An invalid ref becomes a job with a problem, but a missing list or set
    raises an error.

    Examples
    --------
    >>> [job.title for job in expand(["owner/model"], ["step8", "step16"])]
    ['owner/model @ step8', 'owner/model @ step16']
    """
    jobs: dict[str, Job] = {}
    for ref in _single_refs(refs):
        try:
            jobs_of_ref = list(_jobs_of(ref, revisions, list_revisions or hub_revisions))
        except WqkError as error:
            jobs_of_ref = [Job(_name(ref), None, None, ref, problem=error)]
        for job in jobs_of_ref:
            # Addresses that differ only in their signatures have one name; the second checkpoint
            # gets the name with a number.
            job = replace(job, ref=_name(ref))
            distinct, number = job, 1
            while jobs.setdefault(distinct.key, distinct).location != job.location:
                number += 1
                distinct = replace(job, name=f"{job.name} ({number})")
    return list(jobs.values())


def _name(ref: str) -> str:
    """Return a ref's name in tables: without secrets, and different for every address."""
    digest = digest_of_query(ref)
    return redacted(ref) + (f" ({digest})" if digest else "")


def hub_revisions(repository: str, token: str | bool | None = None) -> list[str]:
    """Return names of a repository's branches and tags; `HubError` without an answer."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError

    try:
        refs = within_deadline(lambda: HfApi(token=token).list_repo_refs(repository))
    except HFValidationError:
        raise CheckpointError(
            f"{redacted(repository)}: neither a local path nor a Hub id, so it has no revisions"
        ) from None
    except Exception as error:  # the client lets errors of its transport through, of any class
        is_late = isinstance(error, TimeoutError)
        reason = "the server does not answer" if is_late else all_lines(error)
        raise HubError(f"{repository}: its revisions cannot be listed ({reason})") from None
    return list(dict.fromkeys(ref.name for ref in (*refs.branches, *refs.tags)))


def natural_order(name: str) -> list[str | int]:
    """Return a sort key that treats digits in names as numbers: step2 before step10.

    Examples
    --------
    >>> sorted(["step10", "step2", "main"], key=natural_order)
    ['main', 'step2', 'step10']
    """
    pieces = re.split(r"([0-9]+)", name)  # text and digits alternate
    return [int(piece) if place % 2 else piece for place, piece in enumerate(pieces)]


def _single_refs(refs: Iterable[str]) -> Iterator[str]:
    """Expand lists and named sets."""
    for ref in refs:
        is_list = ref.startswith("@")
        entries = read_list(Path(ref[1:])) if is_list else [ref]
        for entry in entries:
            if is_list and entry.startswith("@"):
                raise CheckpointError(
                    f"{ref[1:]}: a list cannot include another list, got {redacted(entry)}"
                )
            if demo := demo_folder(entry):
                yield str(demo)
            elif entry.startswith(SET_PREFIX):
                yield from model_set(entry)
            elif _is_pattern_of_paths(entry):
                yield from _matching_paths(entry)
            else:
                yield entry


def _is_pattern_of_paths(ref: str) -> bool:
    """Return whether a ref is a pattern of local paths, not expanded by a shell."""
    return bool(ADDRESS_WILDCARDS & set(ref)) and "://" not in ref and not exists(Path(ref))


def _matching_paths(pattern: str) -> list[str]:
    """Return the paths that match a pattern, in natural order; `CheckpointError` if none does."""
    root = Path(pattern).anchor
    matches = Path(root).glob(str(Path(pattern).relative_to(root)))
    paths = sorted(map(str, matches), key=natural_order)
    if not paths:
        raise CheckpointError(f"{redacted(pattern)}: no file or folder matches the pattern")
    return paths


def _jobs_of(
    ref: str, revisions: Sequence[str], list_revisions: Callable[[str], list[str]]
) -> Iterator[Job]:
    if is_bucket(ref):
        for path in _bucket_paths(ref, revisions):
            yield Job(redacted(path), None, step_in(PurePath(redacted(path)).name), path)
    elif exists(Path(ref)):
        paths = _step_paths(ref, revisions) if revisions else steps_of(ref)
        for path in paths:
            absolute = Path(path).absolute()
            yield Job(redacted(path), None, step_in(absolute.name), str(absolute))
    elif not revisions:
        yield Job(_name(ref), None, None, ref)
    else:
        names: dict[str, None] = {}
        for pattern in revisions:
            if set(pattern) & WILDCARDS:  # revisions are listed only for a pattern
                names |= dict.fromkeys(_matching(pattern, list_revisions(ref), ref))
            else:
                names[pattern] = None
        for name in names:
            yield Job(_name(ref), name, step_in(name), ref)


def _bucket_paths(ref: str, revisions: Sequence[str]) -> list[str]:
    """Return the addresses of checkpoints in a bucket that match an address or a pattern."""
    if revisions:
        raise CheckpointError(f"{redacted(ref)}: only Hub repositories have revisions")
    with errors_about(redacted(ref)):
        folders = matching_folders(ref) if set(redacted(ref)) & ADDRESS_WILDCARDS else [ref]
        steps = [steps_of(folder) for folder in folders]
    return list(chain.from_iterable(steps))


def _step_paths(run: str, patterns: Sequence[str]) -> list[str]:
    """Return paths of a run's folders with weights and with names that match a pattern."""
    if not Path(run).is_dir():
        raise CheckpointError(f"{run}: a file has no revisions; leave out the revision")
    steps = [path.name for path in Path(run).iterdir() if has_weights(path)]
    names: dict[str, None] = {}
    for pattern in patterns:
        names |= dict.fromkeys(_matching(pattern, steps, run))
    return [str(Path(run, name)) for name in names]


def _matching(pattern: str, names: Sequence[str], ref: str) -> list[str]:
    """Return the names of revisions or steps that match a pattern, in natural order."""
    matching = [name for name in names if fnmatchcase(name, pattern)]
    if not matching:
        available = "none"
        if names:
            examples = ", ".join(sorted(names, key=natural_order)[:3])
            available = f"{len(names)}: {examples}"
        if len(names) > 3:
            available += ", …"
        raise CheckpointError(
            f"{redacted(ref)}: no revision or step matches {pattern!r}; it has {available}"
        )
    return sorted(matching, key=natural_order)


@dataclass(frozen=True)
class Options:
    """Options of all jobs of a survey; a resumed survey must have the same options."""

    gamma: float
    heads: bool
    wqk: str
    schema: int


@dataclass(frozen=True)
class JobOutcome:
    """Result of a job: a table, or the class and the message of an error.

    Attributes
    ----------
    table
        The table, unless written by the worker.
    rows
        Number of rows of the table.
    files
        Hash of names, sizes and times of a local checkpoint's files, also if the job failed.
    bytes_read, seconds
        Size of the scored weights, and duration of the job.
    error, reason
        Class and message of the error, if the job failed.
    trace
        Traceback of an unexpected error.
    """

    table: ScoreTable | None = field(default=None, repr=False)
    rows: int = 0
    files: str | None = None
    bytes_read: int = 0
    seconds: float = 0.0
    error: str | None = None
    reason: str | None = None
    trace: str | None = None


def run_job(
    options: Options, job: Job, parts: Path | None = None, **hub: Unpack[HubAccess]
) -> JobOutcome:
    """Score one checkpoint; return an outcome also if an error is raised.

    With ``parts``, a folder, the worker writes the table there instead of sending it back.
    """
    start = time.perf_counter()
    try:
        # One BLAS thread: parallel scans that each use all cores are slower than a single one, and
        # the last digits of a product depend on the number of threads.
        with one_blas_thread():
            table, files, bytes_read = _score(options, job, hub)
    except Exception as error:  # one model must not end a survey of hundreds
        outcome = failure(error)
        trace = None
        if not isinstance(error, WqkError):
            trace = _without_location(traceback.format_exc(), job)
        return replace(
            outcome,
            reason=_without_location(outcome.reason or "", job),
            files=local_files_of(job.location),
            seconds=time.perf_counter() - start,
            trace=trace,
        )
    if parts is not None:
        # No wait for the disk: after a loss of power, an empty part is computed again.
        write_atomically(parts / f"{job.key}.parquet", to_parquet(table), sync=False)
    return JobOutcome(
        table=None if parts else table,
        rows=len(table),
        files=files,
        bytes_read=bytes_read,
        seconds=time.perf_counter() - start,
    )


def _without_location(text: str, job: Job) -> str:
    """Replace the location of a job, which may contain secrets, by the name of the job."""
    return without_secrets(text.replace(job.location, job.name))


def failure(error: BaseException) -> JobOutcome:
    """Return the outcome of a job that raised an error; the reason is the message as one line."""
    return JobOutcome(error=type(error).__name__, reason=all_lines(error))


def files_of(location: str) -> str | None:
    """Hash the names, sizes and times of a checkpoint's files on disk, or the tags in a bucket.

    None if the files cannot be listed.
    """
    if is_bucket(location):
        objects = sorted(BucketFolder(location).deep.items())
        if not objects:
            return None
        text = repr([(name, *entry) for name, entry in objects])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
    path = Path(location)
    try:
        if not path.exists():
            return None
        # Also one folder deeper, for the model in distributed checkpoints.
        inside = [*path.iterdir(), *path.glob("*/*")] if path.is_dir() else [path]
        stats = []
        for file in sorted(candidate for candidate in inside if candidate.is_file()):
            status = file.stat()
            stats.append((file.name, status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise CheckpointError(f"{location}: cannot be read ({error.strerror})") from None
    return hashlib.blake2b(repr(stats).encode(), digest_size=16).hexdigest()


def local_files_of(location: str) -> str | None:
    """Hash a checkpoint's files on disk, as `files_of`; None for other checkpoints."""
    if is_bucket(location):
        return None
    try:
        return files_of(location)
    except CheckpointError:
        return None


def _score(options: Options, job: Job, hub: HubAccess) -> tuple[ScoreTable, str | None, int]:
    if options.wqk != __version__:
        raise RunError(
            f"the worker runs wqk {__version__}, the survey {options.wqk}; install one version"
        )
    files = files_of(job.location)
    checkpoint = open_checkpoint(job.location, revision=job.revision, **hub)
    checkpoint.name, checkpoint.revision = job.name, job.revision
    if checkpoint.step is None:
        checkpoint.step = job.step
    model = open_model(checkpoint)
    table = scan(model, gamma=options.gamma, heads=options.heads)
    if files_of(job.location) != files:
        raise CheckpointError(
            f"{job.name}: its files changed during the read; survey it again with retry=True"
        )
    bytes_read = sum(plan_bytes(checkpoint, plan) for plan in model.scored)
    return table, files, bytes_read


# Seconds to wait for a Dask scheduler's answer.
DASK_TIMEOUT = 10


class WorkerDied(Exception):
    """A worker process ended in the middle of a job."""


def run_on(
    executor: Executor, work: Callable[[Job], JobOutcome], jobs: Iterable[Job]
) -> Generator[list[tuple[Job, JobOutcome]], None, None]:
    """Yield the outcomes from any executor, one by one as they complete.

    Raises `RunError` if the executor fails. Executors that fork processes are rejected: a forked
    process may wait forever for locks that threads of its parent hold.
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
            except Exception as error:  # from the executor: a worker died, or sending failed
                outcome = failure(error)
            yield [(job, outcome)]
    finally:
        for future in running:
            future.cancel()


def run_in_processes(
    work: Callable[[Job], JobOutcome], jobs: Iterable[Job], processes: int
) -> Generator[list[tuple[Job, JobOutcome]], None, None]:
    """Yield the outcomes from worker processes as they complete.

    If a process dies, the whole pool ends, and the pool does not report the job of that process.
    Then the jobs in progress run again one by one; a job has failed if its process dies again.
    Raises `RunError` if no process can be started.
    """
    waiting = deque(jobs)
    suspects: deque[Job] = deque()
    while waiting or suspects:
        queue, at_once = (suspects, 1) if suspects else (waiting, processes)
        # A queue of twice the number of processes keeps them busy; a suspect runs alone.
        limit = 1 if suspects else 2 * at_once
        running: dict[Future[JobOutcome], Job] = {}
        with _pool(at_once) as pool:
            broken: list[Job] = []
            while (queue or running) and not broken:
                while queue and len(running) < limit:
                    try:
                        running[pool.submit(work, queue[0])] = queue[0]
                    except BrokenExecutor:
                        break
                    queue.popleft()
                complete: list[tuple[Job, JobOutcome]] = []
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    job = running.pop(future)
                    try:
                        complete.append((job, future.result()))
                    except BrokenExecutor:
                        broken.append(job)
                yield complete
            broken += running.values()
        if limit == 1 and broken:
            died = WorkerDied("the process at work on it was killed, or ran out of memory")
            yield [(broken[0], failure(died))]
        else:
            suspects.extend(broken)


# Two surveys that start at the same time must not restore the module that the other has replaced.
_starting = threading.Lock()


class _Worker(SpawnProcess):
    """A process that does not import the user's script."""

    def start(self) -> None:
        with _starting:
            script, sys.modules["__main__"] = sys.modules["__main__"], ModuleType("__main__")
            try:
                super().start()
            finally:
                sys.modules["__main__"] = script


class _Fresh(SpawnContext):
    Process = _Worker  # not forked, since forks would inherit threads and locks


@contextmanager
def _pool(processes: int) -> Iterator[ProcessPoolExecutor]:
    pool = ProcessPoolExecutor(
        processes, mp_context=_Fresh(), initializer=_start_worker, initargs=(processes,)
    )
    try:
        try:
            # Each submission starts a process; later, a pool starts one only if all are busy.
            next(as_completed([pool.submit(os.getpid) for _ in range(processes)])).result()
        except BrokenExecutor:
            raise RunError(
                "no worker process can be started; give an executor such as ThreadPoolExecutor()"
            ) from None
        yield pool
    except BaseException:
        # The results of jobs in progress are no longer needed.
        for process in (getattr(pool, "_processes", None) or {}).values():
            process.terminate()
        raise
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _start_worker(processes: int) -> None:
    """Leave interrupts to the parent, and exit when the parent exits, for any reason."""
    share_cores(processes)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        with one_blas_thread():  # once: it takes a tenth of a small scan
            parent.join()
        os._exit(1)

    threading.Thread(target=follow, daemon=True).start()


@contextmanager
def dask_executor(address: str) -> Iterator[Executor]:
    """Provide the workers of a Dask scheduler as an executor.

    An example of an address is ``tcp://host:8786``. RunError if no scheduler responds there.
    """
    with required_by("a Dask cluster", "cluster"):
        distributed: Any = importlib.import_module("distributed")
    try:
        client = distributed.Client(address, timeout=DASK_TIMEOUT, set_as_default=False)
    except (OSError, ValueError) as error:
        reason = all_lines(error)
        raise RunError(
            f"{address}: no Dask scheduler responds ({reason}); expected such as tcp://host:8786"
        ) from None
    with client:
        yield client.get_executor(pure=False)
