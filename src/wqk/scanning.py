"""From a checkpoint to its score table."""

from __future__ import annotations

import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from threadpoolctl import ThreadpoolController

from wqk._version import __version__
from wqk.attention import Attention, attention_plans, load_attention
from wqk.checkpoints import open_checkpoint
from wqk.randomness import looks_random
from wqk.scores import directionality, head_terms, symmetry, symmetry_null
from wqk.tables import ScoreTable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan
    from wqk.forms import BilinearForm


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
    family: Path | None = None,
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
    family
        A family file to use instead of the model type's own.
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
    checkpoint = open_checkpoint(ref, **hub)
    plans = attention_plans(checkpoint, family)
    start, bytes_read = time.perf_counter(), 0
    rows: list[dict[str, Any]] = []
    blocks = _score_blocks(checkpoint, plans, gamma, heads)
    for done, (plan, scored) in enumerate(zip(plans, blocks, strict=True), 1):
        rows += scored
        bytes_read += plan_bytes(checkpoint, plan)
        if on_progress:
            on_progress(Progress(done, len(plans), bytes_read, time.perf_counter() - start))
    about = _about(checkpoint)
    metadata = {
        "wqk": __version__,
        "gamma": gamma,
        "folded_norms": False,
        "biases": False,
        "partial": {p.stack: p.reason for p in plans if p.reason},
    }
    return ScoreTable.from_rows(({**about, **row} for row in rows), metadata)


def plan_bytes(checkpoint: Checkpoint, plan: AttentionPlan) -> int:
    """Bytes of the checkpoint that scoring one block reads."""
    return sum(part.nbytes(checkpoint.info(part.name)) for part in set(plan.parts.values()))


def _score_blocks(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], gamma: float, heads: bool
) -> Iterator[list[dict[str, Any]]]:
    """Read and score blocks side by side, as many at a time as the spare memory holds, in order.

    One block for each core uses the cores better than all cores on one block, whose sums and
    conversions run on a single one; large blocks are taken one by one, with every core on their
    matrix products.
    """

    def score(plan: AttentionPlan) -> list[dict[str, Any]]:
        return score_attention(load_attention(checkpoint, plan), gamma=gamma, heads=heads)

    largest = max(_working_set(checkpoint, plan) for plan in plans)
    at_once = max(1, min(os.cpu_count() or 1, SPARE_MEMORY // largest))
    blas_threads = 1 if at_once > 1 else None
    with (
        ThreadpoolController().limit(limits=blas_threads, user_api="blas"),
        ThreadPoolExecutor(at_once) as pool,
    ):
        yield from pool.map(score, plans)


def _working_set(checkpoint: Checkpoint, plan: AttentionPlan) -> int:
    """About the bytes that scoring a block takes: its weights in float32, twice."""
    shapes = (part.shape(checkpoint.info(part.name).shape) for part in set(plan.parts.values()))
    return 2 * 4 * sum(map(math.prod, shapes))


def score_attention(
    attention: Attention, *, gamma: float = 2.0, heads: bool = True
) -> list[dict[str, Any]]:
    """Rows of one block: its layer's and, with ``heads``, its heads'.

    Columns that belong to the checkpoint as a whole are left out.
    """
    place = _place(attention)
    layer, stack = attention.form, attention.heads
    row = {**place, "rank": layer.rank, **_scores(layer, gamma)}
    if layer.is_square:
        terms = head_terms(stack, layer)
        row |= {
            "symmetry_within_heads": float(terms.within),
            "symmetry_between_heads": float(terms.between),
            "symmetry_within_random": float(terms.within_random),
        }
    rows = [row]
    if heads:
        columns = {name: np.ravel(values) for name, values in _score_arrays(stack, gamma).items()}
        sharing = attention.head_count // attention.key_head_count
        for head in range(attention.head_count):
            scores = {name: float(values[head]) for name, values in columns.items()}
            own = {"head": head, "key_head": head // sharing, "rank": stack.rank}
            rows.append({**place, **own, **scores})
    status = attention.plan.status
    if layer.is_square and looks_random(attention.weights, row["symmetry"], layer.shape[0]):
        status = "random-looking"
    for row in rows:
        row["status"] = "degenerate" if math.isnan(row["directionality"]) else status
    return rows


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


def _place(attention: Attention) -> dict[str, Any]:
    """What a block's rows share."""
    plan = attention.plan
    d_query, d_key = attention.form.shape
    return {
        "family": plan.family,
        "stack": plan.stack,
        "kind": plan.rule.kind,
        "window": plan.window,
        "layer": plan.layer,
        "heads": attention.head_count,
        "key_heads": attention.key_head_count,
        "d_query": d_query,
        "d_key": d_key,
        "applications": plan.applications,
        "circuit": "qk",
        "distance": 0,
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
