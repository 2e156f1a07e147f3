"""From a checkpoint to its score table."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

from wqk._typing import FilePath
from wqk._version import __version__
from wqk.attention import attention_plans, unread_attention
from wqk.attention.coordinates import PLAIN, Block, Coordinates, lacks_norm, left_out, read_block
from wqk.checkpoints import open_checkpoint, steps_of
from wqk.checkpoints.options import check_options
from wqk.errors import CheckpointError, concerning
from wqk.scanning.cores import all_blas_threads, is_confined, one_blas_thread, usable_cores
from wqk.scanning.device import mover
from wqk.scanning.measures import (
    check_measures,
    measure_metadata,
    with_block_measures,
)
from wqk.scanning.memory import blocks_that_fit, plan_bytes, wanted_parts
from wqk.scanning.rows import block_columns, checkpoint_columns, score_heads, with_status
from wqk.tables.details import BlockDetails, Details, LayerKey, block_details
from wqk.tables.schema import LAYER
from wqk.tables.score_table import ScoreTable, join

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence
    from typing import Unpack

    from wqk.checkpoints import Checkpoint
    from wqk.checkpoints.options import HubOptions
    from wqk.families import AttentionPlan


@dataclass(frozen=True)
class Progress:
    """Progress of a scan."""

    blocks_done: int
    blocks: int
    bytes_read: int
    seconds: float


def scan(
    ref: Any,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    circuit: Literal["qk", "ov"] = "qk",
    fold_norm: bool = False,
    bias: bool = False,
    distances: Sequence[int] = (0,),
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
    key_heads: int | None = None,
    device: str | None = None,
    details: bool = False,
    measures: Collection[str] = (),
    layers: Collection[int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **hub: Unpack[HubOptions],
) -> ScoreTable:
    """Score the query-key form of every layer, and of every head, of a checkpoint.

    Only query and key weights are read, one block at a time; PyTorch is not needed.

    Parameters
    ----------
    ref
        A folder, a file, a hub id, an `nn.Module`, a state dict or a `Checkpoint`; the folder of a
        training run, for all its steps; or a list of any of these.
    gamma
        Threshold of the directionality score, in standard deviations above the mean.
    heads
        Whether to add rows for single heads.
    circuit, fold_norm, bias, distances
        Another form than the plain W_q W_kᵀ: see `wqk.attention.coordinates`. Each distance has
        its own rows.
    family
        A family file to use instead of the model type's own.
    heads_per_layer, key_heads
        Numbers of query and key heads, where the configuration does not have them.
    device
        Where PyTorch multiplies, such as ``"cuda"``; without it NumPy does, on the CPU.
    details
        Whether the table's ``details`` are to hold what pictures need: every layer's image, norms,
        outlying dimensions and coupling of heads, at the first distance.
    measures
        What to add, from ``"spectral_norm"``, ``"spectrum"``, ``"ceiling"``, ``"bands"``: see
        `wqk.scanning.measures`.
    layers
        Numbers of the layers to score, where not all of them.
    on_progress
        Called after every block.
    **hub
        ``revision``, ``subfolder``, ``token``, ``cache_dir``, ``local_files_only``: see
        `open_checkpoint`.

    Returns
    -------
    ScoreTable
        A row for each layer, and with ``heads`` one for each head after it.

    Raises
    ------
    WqkError
        The checkpoint cannot be found, read, understood or scored; see `wqk.errors`.

    Notes
    -----
    While blocks are scored, BLAS has one thread in the whole process, also for what other threads
    compute. Where that matters, scan in a process of its own: ``wqk.survey`` does, and so does any
    ``ProcessPoolExecutor`` that spawns.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("decoder"), heads=False)
    >>> table.frame["layer"].to_list()
    [0, 1, 2, 3]
    """
    check_options("scan", hub)
    check_measures(measures, circuit)
    move = mover(device) if device else None
    coordinates = Coordinates(circuit, fold_norm, bias, tuple(dict.fromkeys(distances)))

    def scan_one(one: Any) -> ScoreTable:
        checkpoint = open_checkpoint(one, **hub)

        def read(plan: AttentionPlan) -> Block:
            block = read_block(checkpoint, plan, coordinates)
            if move is None:
                return block
            return block._replace(forms=((n, move(form)) for n, form in block.forms))

        plans = attention_plans(checkpoint, family, heads_per_layer, key_heads, layers)
        with concerning(checkpoint.name):
            return scan_plans(
                checkpoint,
                plans,
                coordinates,
                gamma=gamma,
                heads=heads,
                details=details,
                measures=measures,
                on_progress=on_progress,
                read=read,
            )

    return join([scan_one(one) for one in _single_refs(ref)])


def _single_refs(ref: Any) -> list[Any]:
    """One reference for each checkpoint that a reference, or a list of them, stands for."""
    if isinstance(ref, list | tuple):
        if not ref:
            raise CheckpointError("a scan needs at least one checkpoint, got an empty list")
        return [single for one in ref for single in _single_refs(one)]
    return steps_of(os.fspath(ref)) if isinstance(ref, str | os.PathLike) else [ref]


def scan_plans(
    checkpoint: Checkpoint,
    plans: Sequence[AttentionPlan],
    coordinates: Coordinates = PLAIN,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    details: bool = False,
    measures: Collection[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
    read: Callable[[AttentionPlan], Block] | None = None,
) -> ScoreTable:
    """Score blocks of a checkpoint that are already located; otherwise as `scan`.

    Announces coming blocks to a remote checkpoint, so that it fetches them while others are scored.

    With ``read``, other forms than those of the checkpoint, such as differences of two.
    """
    read = read or partial(read_block, checkpoint, coordinates=coordinates)
    start, bytes_read = time.perf_counter(), 0
    metadata = _metadata(checkpoint, plans, coordinates, gamma) | measure_metadata(plans, measures)
    columns = checkpoint_columns(checkpoint)
    upcoming = iter(plans)

    def prefetch(count: int) -> None:
        for plan in islice(upcoming, count):
            checkpoint.prefetch(wanted_parts(plan, coordinates))

    fitting = blocks_that_fit(checkpoint, plans, coordinates)
    at_once = min(usable_cores(), fitting)
    side_by_side = at_once > 1 or is_confined()

    def score(plan: AttentionPlan) -> tuple[list[dict[str, Any]], list[BlockDetails]]:
        """Rows of one block at every distance, and the details of its layer at the first."""
        prefetch(1)
        rows: list[dict[str, Any]] = []
        pictured: list[BlockDetails] = []
        with nullcontext() if side_by_side else all_blas_threads():
            block = read(plan)
            for distance, form in block.forms:
                layer = form.sum()
                shared = columns | block_columns(form, plan, coordinates, distance)
                more = score_heads(form, layer, gamma=gamma, heads=heads, measures=measures)
                rows += [shared | row for row in more]
                if details and not pictured:
                    key = LayerKey(**{name: rows[0][name] for name in LAYER})
                    pictured.append(block_details(key, form, gamma, layer))
            rows = with_status(rows, plan, coordinates, block)
            del block, form, layer  # large, and no longer needed
            if {"ceiling", "bands"} & set(measures):
                rows = with_block_measures(rows, checkpoint, plan, coordinates, measures)
        return rows, pictured

    rows: list[dict[str, Any]] = []
    pictured: list[BlockDetails] = []
    with (
        one_blas_thread() if side_by_side else nullcontext(),
        ThreadPoolExecutor(at_once) as pool,
    ):
        prefetch(fitting)
        try:
            for done, (plan, scored) in enumerate(
                zip(plans, pool.map(score, plans), strict=True), start=1
            ):
                rows += scored[0]
                pictured += scored[1]
                bytes_read += plan_bytes(checkpoint, plan, coordinates)
                if on_progress:
                    seconds = time.perf_counter() - start
                    on_progress(Progress(done, len(plans), bytes_read, seconds))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            checkpoint.abandon()  # else an interrupted scan would wait for its downloads
            raise
    images = Details(tuple(pictured), gamma) if details else None
    return ScoreTable.from_rows(rows, metadata, images)


def _metadata(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], coordinates: Coordinates, gamma: float
) -> dict[str, Any]:
    """How the scores are computed, for all rows."""
    return {
        "wqk": __version__,
        "gamma": gamma,
        "folded_norms": coordinates.fold_norm,
        "biases": coordinates.bias,
        "partial": _reasons(plans, coordinates),
        "left_out": {
            checkpoint.name: list(
                dict.fromkeys(term for plan in plans for term in left_out(plan, coordinates))
            )
        },
        "inferred": list(dict.fromkeys(p.rule.guess for p in plans if p.rule.guess)),
        "unread": unread_attention(checkpoint, plans),
        "notes": list(checkpoint.notes),
    }


def _reasons(plans: Sequence[AttentionPlan], coordinates: Coordinates) -> dict[str, str]:
    """Why rows are ``partial``, by stack."""
    unfolded = {
        plan.stack: "some layers have no known norm in front of them, so that none was folded in"
        for plan in plans
        if lacks_norm(plan, coordinates)
    }
    if len(plans) == sum(lacks_norm(plan, coordinates) for plan in plans):
        raise CheckpointError(
            f"family {plans[0].family} describes no norm in front of its attention, or the "
            "checkpoint lacks it; scan without folding norms"
        )
    return unfolded | {plan.stack: plan.reason for plan in plans if plan.reason}
