"""A survey before it runs: its checkpoints, the bytes to read, and an estimate of time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from wqk._files import exists
from wqk._machine import one_blas_thread, usable_cores
from wqk.checkpoints import steps_of
from wqk.checkpoints.formats import has_weights
from wqk.checkpoints.modules import StateDict
from wqk.errors import CheckpointError, WqkError
from wqk.model import open as open_model
from wqk.scanning.scan import plan_bytes, scan
from wqk.scanning.surveys.jobs import Job, expand
from wqk.storage.references import redacted

# Most processes by default: each may hold a block of a large model.
MOST_JOBS = 8

# Seconds for the start of a worker process with its imports.
START_SECONDS = 1.0

# Endings of text files with lists of checkpoints; weights have other endings.
LIST_ENDINGS = {".txt", ".list", ".lst"}
# Endings of files that may list checkpoints, or may be something else.
TEXT_ENDINGS = {".csv", ".tsv", ""}


@dataclass(frozen=True)
class PlannedCheckpoint:
    """A checkpoint of a survey, before it is read.

    Attributes
    ----------
    title
        Name and revision.
    bytes_to_read
        Size of the weights that a scan reads; None if the headers are not on this machine, or the
        checkpoint cannot be opened.
    problem
        Reason why a local checkpoint cannot be opened.
    ref
        The ref that lists the checkpoint.
    """

    title: str
    bytes_to_read: int | None
    problem: str | None = None
    ref: str = ""


@dataclass(frozen=True)
class PlannedRef:
    """A ref of a survey: the number of its checkpoints, and the bytes to read, if known."""

    ref: str
    checkpoints: int
    bytes_to_read: int | None


@dataclass(frozen=True)
class SurveyPlan:
    """The checkpoints that a survey would read."""

    checkpoints: tuple[PlannedCheckpoint, ...]

    @property
    def bytes_to_read(self) -> int:
        """Total size of the weights of the checkpoints with known size."""
        return sum(checkpoint.bytes_to_read or 0 for checkpoint in self.checkpoints)

    @property
    def refs(self) -> list[PlannedRef]:
        """The refs in order, each with the total size of its checkpoints with known size."""
        checkpoints_by_ref: dict[str, list[PlannedCheckpoint]] = {}
        for checkpoint in self.checkpoints:
            checkpoints_by_ref.setdefault(checkpoint.ref, []).append(checkpoint)
        refs = []
        for ref, checkpoints in checkpoints_by_ref.items():
            sizes = [each.bytes_to_read for each in checkpoints if each.bytes_to_read is not None]
            refs.append(PlannedRef(ref, len(checkpoints), sum(sizes) if sizes else None))
        return refs

    @property
    def unknown(self) -> int:
        """Number of checkpoints of unknown size."""
        sizes = [checkpoint.bytes_to_read for checkpoint in self.checkpoints]
        return sizes.count(None)

    def seconds(self, jobs: int | None = None) -> float:
        """Estimate the duration on this machine, for all checkpoints of known size.

        Parameters
        ----------
        jobs
            Number of processes; by default as for `wqk.survey`.
        """
        known = len(self.checkpoints) - self.unknown
        if not known:
            return 0.0
        processes = min(known, jobs or min(MOST_JOBS, usable_cores()))
        return START_SECONDS + self.bytes_to_read * _seconds_per_byte() / processes


def plan_survey(refs: Iterable[str | Path], revisions: Sequence[str] = ()) -> SurveyPlan:
    """List the checkpoints of a survey, and read the headers of local ones.

    Raises
    ------
    CheckpointError
        As for `require_checkpoints`, or a list or a named set does not exist.

    Examples
    --------
    >>> import wqk
    >>> plan = plan_survey([wqk.demo_model("encoder"), "owner/model"])
    >>> plan.bytes_to_read, plan.unknown
    (264192, 1)
    >>> [ref.bytes_to_read for ref in plan.refs]
    [264192, None]
    """
    names = with_lists(map(str, refs))
    require_checkpoints(names, revisions)
    return SurveyPlan(tuple(map(_planned, expand(names, revisions))))


def with_lists(refs: Iterable[str]) -> list[str]:
    """Return the refs, with ``@`` before names of text files that can only be lists."""
    names = []
    for ref in refs:
        is_list = Path(ref).suffix in LIST_ENDINGS and not ref.startswith("@")
        names.append(f"@{ref}" if is_list and Path(ref).is_file() else ref)
    return names


def require_checkpoints(refs: Iterable[str], revisions: Sequence[str] = ()) -> None:
    """Raise `CheckpointError` for a list without ``@``, and for a folder of checkpoints.

    If ``revisions`` are set, a folder belongs to a run, and the revisions are names of step
    folders.
    """
    for ref in refs:
        path = Path(ref)
        if ref.startswith(("http://", "https://")) and "*" in ref:
            raise CheckpointError(
                f"{redacted(ref)}: is a pattern of addresses, and a server lists no folders; "
                "expected the addresses, or a list of them, @list.txt"
            )
        if ref.startswith("@") or not exists(path):
            continue
        is_text = path.is_file() and path.suffix in TEXT_ENDINGS
        if is_text and (path.suffix or not has_weights(path.parent)):
            raise CheckpointError(
                f"{redacted(ref)}: is a file of text, not a checkpoint; if it lists checkpoints, "
                f"give it as @{redacted(ref)}"
            )
        if path.is_dir() and not revisions and not has_weights(path) and [*steps_of(ref)] == [ref]:
            folders = sorted(folder.name for folder in path.iterdir() if has_weights(folder))
            pattern = "*" if len(folders) == len([*path.iterdir()]) else "*/"
            if folders:
                raise CheckpointError(
                    f"{redacted(ref)}: is a folder of checkpoints ({', '.join(folders[:3])}"
                    f"{', …' if len(folders) > 3 else ''}); survey them as "
                    f"{redacted(ref).rstrip('/')}/{pattern}"
                )


def _planned(job: Job) -> PlannedCheckpoint:
    """Read the headers of a job's checkpoint if it is local."""
    if job.problem is not None:
        return PlannedCheckpoint(job.title, None, str(job.problem), job.ref)
    if not exists(Path(job.location)):
        return PlannedCheckpoint(job.title, None, ref=job.ref)
    try:
        model = open_model(job.location)
        size = sum(plan_bytes(model.checkpoint, plan) for plan in model.scored)
    except WqkError as error:
        return PlannedCheckpoint(job.title, None, str(error), job.ref)
    return PlannedCheckpoint(job.title, size, ref=job.ref)


@cache
def _seconds_per_byte() -> float:
    """Measure the time of scoring a block of BERT-base's size, per byte in float32."""
    rng = np.random.default_rng(0)
    tensors = {
        f"model.layers.0.self_attn.{side}_proj.weight": rng.standard_normal(
            (768, 768), dtype=np.float32
        )
        for side in "qk"
    }
    config = {
        "model_type": "llama",
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 1,
    }
    model = StateDict(tensors, config, "block")
    with one_blas_thread():
        scan(model)  # loads what is imported when first used
        start = time.perf_counter()
        scan(model)
        seconds = time.perf_counter() - start
    return seconds / sum(tensor.nbytes for tensor in tensors.values())
