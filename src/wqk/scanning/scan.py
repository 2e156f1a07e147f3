"""From a checkpoint to its score table."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from threadpoolctl import ThreadpoolController

from wqk._typing import FilePath
from wqk._version import __version__
from wqk.attention import attention_plans
from wqk.attention.coordinates import PLAIN, Block, Coordinates, lacks_norm, read_block
from wqk.checkpoints import open_checkpoint
from wqk.errors import CheckpointError, MissingPackage, first_line
from wqk.forms import BilinearForm
from wqk.forms.randomness import looks_random
from wqk.forms.scores import directionality, head_terms, symmetry, symmetry_null
from wqk.scanning.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from wqk.checkpoints import Checkpoint, Part
    from wqk.families import AttentionPlan


# Memory, in bytes, that may be spent on scoring several blocks at once.
SPARE_MEMORY = 512 * 2**20


@dataclass(frozen=True)
class Progress:
    """How far a scan has come."""

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
    device: str | None = None,
    on_progress: Callable[[Progress], None] | None = None,
    **hub: Any,
) -> ScoreTable:
    """Score the query-key form of every layer, and of every head, of a checkpoint.

    Only query and key weights are read, one block at a time; PyTorch is not needed.

    Parameters
    ----------
    ref
        A folder, a file, a hub id, an `nn.Module`, a state dict or a `Checkpoint`.
    gamma
        Threshold of the directionality score, in standard deviations above the mean.
    heads
        Whether single heads get rows, too.
    circuit, fold_norm, bias, distances
        Another form than the plain W_q W_kᵀ: see `wqk.attention.coordinates`. Each distance has
        its own rows.
    family
        A family file to use instead of the model type's own.
    heads_per_layer
        Number of query heads, where the tensors have to be guessed and the configuration is silent.
    device
        Where PyTorch multiplies, such as ``"cuda"``; without it NumPy does, on the CPU.
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

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("decoder"), heads=False)
    >>> table.frame["layer"].to_list()
    [0, 1, 2, 3]
    """
    move = _mover(device) if device else None
    checkpoint = open_checkpoint(ref, **hub)
    coordinates = Coordinates(circuit, fold_norm, bias, tuple(distances))

    def read(plan: AttentionPlan) -> Block:
        block = read_block(checkpoint, plan, coordinates)
        return block if move is None else block._replace(forms=map(move, block.forms))

    return scan_plans(
        checkpoint,
        attention_plans(checkpoint, family, heads_per_layer),
        coordinates,
        gamma=gamma,
        heads=heads,
        on_progress=on_progress,
        read=read,
    )


def scan_plans(
    checkpoint: Checkpoint,
    plans: Sequence[AttentionPlan],
    coordinates: Coordinates = PLAIN,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    on_progress: Callable[[Progress], None] | None = None,
    read: Callable[[AttentionPlan], Block] | None = None,
) -> ScoreTable:
    """Score the blocks of a checkpoint that have been found already; everything else as `scan`.

    With ``read``, other forms than those of the checkpoint, such as differences of two.
    """
    read = read or partial(read_block, checkpoint, coordinates=coordinates)
    start, bytes_read = time.perf_counter(), 0
    rows: list[dict[str, Any]] = []
    reasons = _reasons(plans, coordinates)
    blocks = _score_blocks(checkpoint, plans, coordinates, gamma, heads, read)
    for done, (plan, scored) in enumerate(zip(plans, blocks, strict=True), 1):
        rows += scored
        bytes_read += plan_bytes(checkpoint, plan, coordinates)
        if on_progress:
            on_progress(Progress(done, len(plans), bytes_read, time.perf_counter() - start))
    about = _about(checkpoint)
    metadata = {
        "wqk": __version__,
        "gamma": gamma,
        "folded_norms": coordinates.fold_norm,
        "biases": coordinates.bias,
        "partial": reasons,
        "inferred": list(dict.fromkeys(p.rule.guess for p in plans if p.rule.guess)),
    }
    return ScoreTable.from_rows(({**about, **row} for row in rows), metadata)


def plan_bytes(
    checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates = PLAIN
) -> int:
    """Bytes of the checkpoint that scoring one block reads, but for the vectors of norms."""
    parts = set(_wanted(plan, coordinates))
    return sum(part.nbytes(checkpoint.info(part.name)) for part in parts)


def _score_blocks(
    checkpoint: Checkpoint,
    plans: Sequence[AttentionPlan],
    coordinates: Coordinates,
    gamma: float,
    heads: bool,
    read: Callable[[AttentionPlan], Block],
) -> Iterator[list[dict[str, Any]]]:
    """Read and score blocks side by side, as many at a time as the spare memory holds, in order.

    One block for each core uses the cores better than all cores on one block, whose sums and
    conversions run on a single one; large blocks are taken one by one, with every core on their
    matrix products.

    A remote checkpoint is told of the blocks to come, so that it fetches while others are scored.
    """
    upcoming = iter(plans)

    def prefetch(count: int) -> None:
        for plan in islice(upcoming, count):
            checkpoint.prefetch(_wanted(plan, coordinates))

    def score(plan: AttentionPlan) -> list[dict[str, Any]]:
        prefetch(1)
        return _score_block(read(plan), plan, coordinates, gamma, heads)

    # A circuit that is not there has no size; reading it says so.
    largest = max(1, *(_working_set(checkpoint, plan, coordinates) for plan in plans))
    fitting = max(1, SPARE_MEMORY // largest)
    at_once = min(usable_cores(), fitting)
    blas_threads = 1 if at_once > 1 else None
    with (
        ThreadpoolController().limit(limits=blas_threads, user_api="blas"),
        ThreadPoolExecutor(at_once) as pool,
    ):
        prefetch(fitting)
        try:
            yield from pool.map(score, plans)
        except BaseException:
            checkpoint.abandon()  # else an interrupted scan would wait for its downloads
            raise


def usable_cores() -> int:
    """Cores that this process may use, fewer than there are under Slurm and in containers."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _wanted(plan: AttentionPlan, coordinates: Coordinates) -> list[Part]:
    """The parts of a block that take long to fetch."""
    if coordinates.circuit == "qk":
        return list(plan.parts)
    sides = (plan.value, plan.output)
    return [part for side in sides if side is not None for part in side.parts]


def _working_set(checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates) -> int:
    """About the bytes that scoring a block takes: its weights in float32, twice."""
    parts = set(_wanted(plan, coordinates))
    shapes = (part.shape(checkpoint.info(part.name).shape) for part in parts)
    return 2 * 4 * sum(map(math.prod, shapes))


def _score_block(
    block: Block,
    plan: AttentionPlan,
    coordinates: Coordinates,
    gamma: float,
    heads: bool,
) -> list[dict[str, Any]]:
    """Rows of one block, at every distance."""
    rows: list[dict[str, Any]] = []
    for distance, form in block.forms:
        place = _place(plan, form) | {"circuit": coordinates.circuit, "distance": distance}
        rows += ({**place, **row} for row in score_heads(form, gamma=gamma, heads=heads))
    status = _status(plan, coordinates, block, rows[0].get("symmetry"))
    for row in rows:
        row["status"] = "degenerate" if math.isnan(row["directionality"]) else status
    return rows


def score_heads(
    stack: BilinearForm, *, gamma: float = 2.0, heads: bool = True
) -> list[dict[str, Any]]:
    """Scores of a layer, the sum of the stack, and with ``heads`` of every head after it.

    Parameters
    ----------
    stack
        The layer's heads, stacked as (G, H/G).
    gamma, heads
        As for `scan`.

    Returns
    -------
    list of dict
        The columns of a score table that follow from the forms alone.
    """
    layer = stack.sum()
    row = {"rank": layer.rank, **_scores(layer, gamma)}
    if layer.is_square:
        terms = head_terms(stack, layer)
        row |= {
            "symmetry_within_heads": float(terms.within),
            "symmetry_between_heads": float(terms.between),
            "symmetry_within_random": float(terms.within_random),
        }
    if not heads:
        return [row]
    columns = {name: _flat(values) for name, values in _score_arrays(stack, gamma).items()}
    _, sharing = stack.stack
    return [row] + [
        {
            "head": head,
            "key_head": head // sharing,
            "rank": stack.rank,
            **{name: float(values[head]) for name, values in columns.items()},
        }
        for head in range(math.prod(stack.stack))
    ]


def _reasons(plans: Sequence[AttentionPlan], coordinates: Coordinates) -> dict[str, str]:
    """Why rows are ``partial``, by stack."""
    unfolded = {
        plan.stack: "of some layers no norm is known that feeds them, and none was folded in"
        for plan in plans
        if lacks_norm(plan, coordinates)
    }
    if len(plans) == sum(lacks_norm(plan, coordinates) for plan in plans):
        raise CheckpointError(
            f"family {plans[0].family} names no norm that feeds its attention, or the checkpoint "
            "lacks it; scan without folding norms"
        )
    return unfolded | {plan.stack: plan.reason for plan in plans if plan.reason}


def _status(
    plan: AttentionPlan, coordinates: Coordinates, block: Block, symmetry: float | None
) -> str:
    """``random-looking`` before ``partial``: weights that nobody trained say nothing at all."""
    weights = block.weights
    if weights and symmetry is not None and looks_random(weights, symmetry, weights[0].shape[-1]):
        return "random-looking"
    return "partial" if lacks_norm(plan, coordinates) else plan.status


def _mover(device: str) -> Callable[[tuple[int, BilinearForm]], tuple[int, BilinearForm]]:
    """What takes a form at its distance to a device of PyTorch's."""
    try:
        import torch
    except ImportError:
        raise MissingPackage("a device needs PyTorch: pip install 'wqk[train]'") from None
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = first_line(error)
        raise MissingPackage(f"device {device!r}: PyTorch cannot use it here ({reason})") from None

    def move(placed: tuple[int, BilinearForm]) -> tuple[int, BilinearForm]:
        distance, form = placed
        query, key = (torch.tensor(factor, device=device) for factor in (form.query, form.key))
        return distance, BilinearForm(query, key)

    return move


def _flat(values: Any) -> np.ndarray:
    """Scores of a stack as one row, on the host."""
    return np.ravel(values.cpu() if hasattr(values, "cpu") else values)


def _scores(form: BilinearForm, gamma: float) -> dict[str, float]:
    return {name: float(value) for name, value in _score_arrays(form, gamma).items()}


def _score_arrays(form: BilinearForm, gamma: float) -> dict[str, Any]:
    """Every score of a form or a stack; symmetry only where both sides are one space."""
    square = {"symmetry": symmetry(form), "symmetry_null": symmetry_null(form)}
    return {
        "norm": form.norm,
        **(square if form.is_square else {}),
        "directionality": directionality(form, gamma, "norm"),
        "directionality_excess": directionality(form, gamma, "excess"),
    }


def _place(plan: AttentionPlan, heads: BilinearForm) -> dict[str, Any]:
    """What a block's rows share."""
    d_query, d_key = heads.shape
    key_heads, sharing = heads.stack
    return {
        "family": plan.family,
        "stack": plan.stack,
        "kind": plan.kind,
        "window": plan.window,
        "layer": plan.layer,
        "heads": key_heads * sharing,
        "key_heads": key_heads,
        "d_query": d_query,
        "d_key": d_key,
        "applications": plan.applications,
    }


def _about(checkpoint: Checkpoint) -> dict[str, Any]:
    """What all rows of a checkpoint share."""
    model_type = checkpoint.config.get("model_type")
    return {
        "checkpoint": checkpoint.name,
        "revision": checkpoint.revision,
        "step": checkpoint.step,
        "model_type": model_type if isinstance(model_type, str) else None,
        "parameters": checkpoint.parameters,
    }
