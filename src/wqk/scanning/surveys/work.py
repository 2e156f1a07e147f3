"""A worker's job: open a checkpoint, score it, and hash what was read."""

from __future__ import annotations

import hashlib
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import numpy as np

from wqk._version import __version__
from wqk.checkpoints import Checkpoint, Part, TensorInfo, open_checkpoint
from wqk.checkpoints.options import HubAccess
from wqk.checkpoints.references import without_secrets
from wqk.errors import CheckpointError, RunError, WqkError, all_lines
from wqk.model import open as open_model
from wqk.scanning.cores import one_blas_thread
from wqk.scanning.memory import plan_bytes
from wqk.scanning.scan import scan
from wqk.tables.score_table import ScoreTable

if TYPE_CHECKING:
    from wqk.scanning.surveys.jobs import Job


@dataclass(frozen=True)
class Options:
    """What all jobs of a survey share; a resumed survey must have the same."""

    gamma: float
    heads: bool
    wqk: str
    schema: int


@dataclass(frozen=True)
class Outcome:
    """The outcome of a job: a table, or an error's class and reason."""

    table: ScoreTable | None = field(default=None, repr=False)
    weights: str | None = None  # hash of all query and key values that were read, in order
    files: str | None = None  # hash of names, sizes and times of a local checkpoint's files
    bytes_read: int = 0
    seconds: float = 0.0
    error: str | None = None
    reason: str | None = None
    trace: str | None = None  # traceback of an unexpected error


class Hashed(Checkpoint):
    """A checkpoint that keeps a hash of each part that is read from it."""

    def __init__(self, inner: Checkpoint) -> None:
        self.name, self.revision, self.step = inner.name, inner.revision, inner.step
        self.config, self.notes, self.inner = inner.config, inner.notes, inner
        self.digests: dict[Part, bytes] = {}

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self.inner.tensors()

    def read(self, parts: Sequence[Part]) -> list[np.ndarray]:
        """The wanted rows of each part, joined."""
        arrays = self.inner.read(parts)
        self.digests.update(zip(parts, map(_digest, arrays), strict=True))
        return arrays

    def prefetch(self, parts: Sequence[Part]) -> None:
        """Announce a later read."""
        self.inner.prefetch(parts)

    def abandon(self) -> None:
        """Cancel what was announced."""
        self.inner.abandon()


def run_job(options: Options, job: Job, **hub: Unpack[HubAccess]) -> Outcome:
    """Score one checkpoint; errors are outcomes, too."""
    start = time.perf_counter()
    try:
        # One BLAS thread: parallel scans that each use all cores are slower than a single one, and
        # the last digits of a product depend on the number of threads.
        with one_blas_thread():
            table, weights, files, bytes_read = _score(options, job, hub)
    except Exception as error:  # one model must not end a survey of hundreds
        expected, seconds = isinstance(error, WqkError), time.perf_counter() - start
        failed, trace = failure(error), None if expected else traceback.format_exc()
        reason, trace = (
            text and without_secrets(text.replace(job.location, job.name))
            for text in (failed.reason or "", trace)
        )
        return replace(failed, reason=reason, seconds=seconds, trace=trace)
    return Outcome(table, weights, files, bytes_read, time.perf_counter() - start)


def failure(error: BaseException) -> Outcome:
    """The outcome of a job that raised this, its message in one line."""
    return Outcome(error=type(error).__name__, reason=all_lines(error))


def files_of(location: str) -> str | None:
    """Hash of names, sizes and times of the files of a checkpoint on disk; None elsewhere."""
    path = Path(location)
    try:
        if not path.exists():
            return None
        # One folder deeper as well, where distributed checkpoints keep the model.
        inside = [*path.iterdir(), *path.glob("*/*")] if path.is_dir() else [path]
        paths = sorted(p for p in inside if p.is_file())
        stats = [(p.name, s.st_size, s.st_mtime_ns) for p in paths for s in [p.stat()]]
    except OSError as error:
        raise CheckpointError(f"{location}: cannot be read ({error.strerror})") from None
    return hashlib.blake2b(repr(stats).encode(), digest_size=16).hexdigest()


def _score(options: Options, job: Job, hub: HubAccess) -> tuple[ScoreTable, str, str | None, int]:
    if options.wqk != __version__:
        raise RunError(
            f"the worker runs wqk {__version__}, the survey {options.wqk}; install one version"
        )
    files = files_of(job.location)
    checkpoint = open_checkpoint(job.location, revision=job.revision, **hub)
    checkpoint.name, checkpoint.revision = job.name, job.revision
    if checkpoint.step is None:
        checkpoint.step = job.step
    hashed = Hashed(checkpoint)
    model = open_model(hashed)
    table = scan(model, gamma=options.gamma, heads=options.heads)
    if files_of(job.location) != files:
        raise CheckpointError(
            f"{job.name}: its files changed during the read; survey it again with retry=True"
        )
    weights = hashlib.blake2b(digest_size=16)
    for plan in model.plans:
        for part in plan.parts:
            weights.update(hashed.digests.get(part, b""))
    bytes_read = sum(plan_bytes(checkpoint, plan) for plan in model.plans)
    return table, weights.hexdigest(), files, bytes_read


def _digest(array: np.ndarray) -> bytes:
    hashed = hashlib.blake2b(f"{array.dtype} {array.shape}".encode(), digest_size=16)
    hashed.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return hashed.digest()
