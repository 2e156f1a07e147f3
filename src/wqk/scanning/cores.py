"""How the machine is used: its cores, its memory, and a device such as a GPU.

One block for each core uses the cores better than all cores on one block, whose sums and
conversions run on a single one. Large blocks are taken one by one, with every core on their matrix
products.

The last digits of a product depend on the number of BLAS threads, which belongs to the process and
not to a thread. Scans in several threads therefore agree on it block by block: small blocks share
one BLAS thread each, a large block waits until it is alone. The number that was there before is put
back as soon as no block is being scored.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from threading import Condition
from typing import Any, TypeVar

import numpy as np
from threadpoolctl import ThreadpoolController

from wqk.attention.coordinates import PLAIN, Coordinates
from wqk.checkpoints import Checkpoint, Part
from wqk.errors import MissingPackage, first_line, required_by
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm

Found = TypeVar("Found")

# Memory, in bytes, that may be spent on scoring several blocks at once.
SPARE_MEMORY = 512 * 2**20

# The GNU C library hands freed memory back, to be cleared again page by page for the next block,
# until an array this large was freed; then it keeps twice as much. No page of this one is touched.
np.empty(2**25 - 2**16, np.uint8)


def wanted_parts(plan: AttentionPlan, coordinates: Coordinates) -> list[Part]:
    """The large parts of a block: all but the vectors of norms."""
    if coordinates.circuit == "qk":
        return list(plan.parts)
    sides = (plan.value, plan.output)
    return [part for side in sides if side is not None for part in side.parts]


def plan_bytes(
    checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates = PLAIN
) -> int:
    """Bytes of the checkpoint that scoring one block reads, but for the vectors of norms."""
    parts = set(wanted_parts(plan, coordinates))
    return sum(part.nbytes(checkpoint.info(part.name)) for part in parts)


def blocks_that_fit(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], coordinates: Coordinates
) -> int:
    """How many of the largest block the spare memory holds, at least 1.

    A block needs its weights in float32, twice.
    """

    def numbers(plan: AttentionPlan) -> int:
        parts = set(wanted_parts(plan, coordinates))
        return sum(math.prod(p.shape(checkpoint.info(p.name).shape)) for p in parts)

    # A circuit that is missing has no size; reading it says so.
    largest = max(1, *(2 * 4 * numbers(plan) for plan in plans))
    return max(1, SPARE_MEMORY // largest)


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
def _control() -> Iterator[ThreadpoolController]:
    """Change the BLAS threads from this thread.

    threadpoolctl 3.8 heeds only the first thread that ever changed them, and ignores all others
    without a word. Here any thread may be the first to come or the last to go, under one lock.
    """
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


def mover(device: str) -> Callable[[BilinearForm], BilinearForm]:
    """A function that moves a form to a device, such as ``"cuda"``.

    Raises `MissingPackage` if PyTorch is not installed, or cannot use the device.
    """
    with required_by("a device"):
        import torch
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise MissingPackage(
            f"device {device!r}: PyTorch cannot use it here ({first_line(error)})", package="torch"
        ) from None

    def move(form: BilinearForm) -> BilinearForm:
        return BilinearForm.from_factors(
            *(torch.tensor(f, device=device) for f in (form.query, form.key))
        )

    return move
