"""From a checkpoint to its score table, block by block."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal

import numpy as np

from wqk._machine import (
    all_blas_threads,
    is_confined,
    one_blas_thread,
    require_threads,
    usable_cores,
    whole_products,
)
from wqk._typing import Array
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import PLAIN, Coordinates, lacks_norm, omissions
from wqk.checkpoints import Checkpoint, Part, steps_of
from wqk.errors import (
    CheckpointError,
    FormError,
    MissingPackage,
    errors_about,
    first_line,
    require_list,
    required_by,
)
from wqk.families import AttentionPlan
from wqk.forms import BilinearForm
from wqk.forms.kernels import directionalities, on_host
from wqk.forms.scores import head_terms, looks_random
from wqk.model import Model
from wqk.model import open as open_model
from wqk.tables.columns import (
    COLUMNS,
    Measure,
    measure_metadata,
    select_measures,
    with_block_measures,
)
from wqk.tables.details import BlockDetails, Details, LayerKey, block_details
from wqk.tables.score_table import LAYER, ScoreTable, join, joined_statuses

# Memory, in bytes, that may be spent on scoring several blocks at once.
SPARE_MEMORY = 512 * 2**20


def score_heads(
    stack: BilinearForm,
    layer: BilinearForm | None = None,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    measures: Sequence[Measure] = (),
) -> list[dict[str, Any]]:
    """Scores of a layer and, with ``heads``, of each head after it: what follows from the forms.

    ``stack`` has the layer's heads as (G, H/G), ``layer`` their sum, if already computed.
    """
    layer = stack.sum() if layer is None else layer
    scores = {name: float(value) for name, value in _scores(layer, gamma, measures).items()}
    row = {"rank": layer.rank, **scores}
    if layer.is_square:
        terms = head_terms(stack, layer)
        row |= {
            "symmetry_within_heads": float(terms.within),
            "symmetry_between_heads": float(terms.between),
            "symmetry_within_random": float(terms.within_random),
        }
    if not heads:
        return [row]
    columns = {
        name: np.ravel(on_host(values)) for name, values in _scores(stack, gamma, measures).items()
    }
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


def block_columns(
    form: BilinearForm, plan: AttentionPlan, coordinates: Coordinates, distance: int
) -> dict[str, Any]:
    """The columns that all rows of a block at one distance share; heads are stacked (G, H/G)."""
    key_heads, sharing = form.stack
    return {
        "family": plan.family,
        "stack": plan.stack,
        "kind": plan.kind,
        "window": None if plan.window is None else str(plan.window),
        "layer": plan.layer,
        "heads": key_heads * sharing,
        "key_heads": key_heads,
        "d_query": form.widths[0],
        "d_key": form.widths[1],
        "applications": plan.applications,
        "circuit": coordinates.circuit,
        "distance": distance,
    }


def with_status(
    rows: list[dict[str, Any]],
    plan: AttentionPlan,
    coordinates: Coordinates,
    weights: Sequence[Array],
) -> list[dict[str, Any]]:
    """Return the rows of one block, the layer's own first, with their status.

    ``weights`` are the two that the forms are made of; none if these are not a model's own.
    """
    statuses = {*plan.statuses, *(["partial"] if lacks_norm(plan, coordinates) else [])}
    score = rows[0].get("symmetry")
    if len(weights) and score is not None and looks_random(weights, score, weights[0].shape[-1]):
        statuses.add("random-looking")

    def status(row: dict[str, Any]) -> str:
        is_zero = math.isnan(row["directionality"])
        return joined_statuses(
            statuses - {"random-looking"} | {"degenerate"} if is_zero else statuses
        )

    return [{**row, "status": status(row)} for row in rows]


def checkpoint_columns(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the columns that all rows of a checkpoint share."""
    model_type = checkpoint.config.get("model_type")
    return {
        "checkpoint": checkpoint.name,
        "revision": checkpoint.revision,
        "step": checkpoint.step,
        "model_type": (
            model_type.encode("utf-8", "replace").decode() if isinstance(model_type, str) else None
        ),
        "parameters": checkpoint.parameters,
    }


# The scores that a form has as attributes, named as their columns; directionality takes a gamma.
ATTRIBUTES = tuple(
    column.name
    for column in COLUMNS
    if column.type is float
    and hasattr(BilinearForm, column.name)
    and not column.name.startswith("directionality")
)


def _scores(form: BilinearForm, gamma: float, measures: Sequence[Measure]) -> dict[str, Any]:
    """Every score of a form or a stack; some only if both sides are the same space."""
    found: dict[str, Any] = {}
    for name in ATTRIBUTES:
        with suppress(FormError):
            found[name] = getattr(form, name)
    found |= directionalities(form.moments, gamma)._asdict()
    for measure in measures:
        found |= measure.compute(form) if measure.of == "form" else {}
    return found


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
    device: str | None = None,
    details: bool = False,
    measures: Collection[str] = (),
    layers: Collection[int] | None = None,
    on_progress: Callable[[Progress], None] | None = None,
) -> ScoreTable:
    """Score the query-key form of every layer, and of every head, of a checkpoint.

    Only query and key weights are read, one block at a time; PyTorch is not needed.

    Parameters
    ----------
    ref
        A `Model`, or what `wqk.open` takes; the folder of a training run, for all its steps; or a
        list of any of these.
    gamma
        Threshold of the directionality score, in standard deviations above the mean.
    heads
        Whether to add rows for single heads.
    circuit, fold_norm, bias, distances
        Another form than the plain W_q W_kᵀ: see `wqk.attention.factors`. Each distance has
        its own rows.
    device
        Where PyTorch multiplies, such as ``"cuda"``; without it NumPy does, on the CPU.
    details
        Whether the table's ``details`` are to hold what pictures need: every layer's image, norms,
        outlying dimensions and coupling of heads, at the first distance.
    measures
        What to add, from ``"spectral_norm"``, ``"spectrum"``, ``"ceiling"``, ``"bands"``: see
        `wqk.tables.columns`.
    layers
        Numbers of the layers to score, where not all of them.
    on_progress
        Called after every block.

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
    require_threads()
    select_measures(measures, circuit)  # before anything is read
    require_list("distances", distances, [0, 64])
    move = mover(device) if device else None
    coordinates = Coordinates(circuit, fold_norm, bias, tuple(dict.fromkeys(distances)))

    def scan_one(one: Any) -> ScoreTable:
        model = open_model(one)
        with errors_about(model.name):
            return scan_model(
                model if layers is None else model.select(layers=layers),
                coordinates,
                gamma=gamma,
                heads=heads,
                details=details,
                measures=measures,
                on_progress=on_progress,
                move=move,
            )

    return join([scan_one(one) for one in _single_refs(ref)])


def _single_refs(ref: Any) -> list[Any]:
    """One reference for each checkpoint that a reference, or a list of them, stands for."""
    if isinstance(ref, list | tuple):
        if not ref:
            raise CheckpointError("a scan needs at least one checkpoint, got an empty list")
        return [single for one in ref for single in _single_refs(one)]
    return steps_of(os.fspath(ref)) if isinstance(ref, str | os.PathLike) else [ref]


def wanted_parts(plan: AttentionPlan, coordinates: Coordinates) -> list[Part]:
    """Return the large parts of a block, each once: all but the vectors of norms."""
    sides = (plan.query, plan.key) if coordinates.circuit == "qk" else (plan.value, plan.output)
    return [*dict.fromkeys(part for side in sides if side is not None for part in side.parts)]


def plan_bytes(
    checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates = PLAIN
) -> int:
    """Bytes of the checkpoint that scoring one block reads, but for the vectors of norms."""
    parts = wanted_parts(plan, coordinates)
    return sum(part.nbytes(checkpoint.info(part.name)) for part in parts)


def _blocks_that_fit(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], coordinates: Coordinates
) -> int:
    """How many of the largest block the spare memory holds, at least 1.

    A block needs its weights in float32, twice.

    Examples
    --------
    >>> import numpy as np
    >>> import wqk
    >>> fused = {"model.layers.0.self_attn.qkv_proj.weight": np.ones((96, 32), np.float32)}
    >>> model = wqk.open(fused, heads_per_layer=4)
    >>> _blocks_that_fit(model.checkpoint, [model[0].plan], PLAIN) * 8 * 2 * 32**2 == SPARE_MEMORY
    True
    """

    def numbers(plan: AttentionPlan) -> int:
        parts = wanted_parts(plan, coordinates)
        return sum(math.prod(p.shape(checkpoint.info(p.name).shape)) for p in parts)

    # A circuit that is missing has no size; reading it says so.
    largest = max(1, *(2 * 4 * numbers(plan) for plan in plans))
    return max(1, SPARE_MEMORY // largest)


def mover(device: str) -> Callable[[BilinearForm], BilinearForm]:
    """Return a function that moves a form to a device, such as ``"cuda"``.

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


def scan_model(
    model: Model,
    coordinates: Coordinates = PLAIN,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    details: bool = False,
    measures: Collection[str] = (),
    on_progress: Callable[[Progress], None] | None = None,
    move: Callable[[BilinearForm], BilinearForm] | None = None,
    forms: Callable[[Block], BilinearForm] | None = None,
) -> ScoreTable:
    """Score the blocks of a model that is open; otherwise as `scan`.

    Announces coming blocks to a remote checkpoint, so that it fetches them while others are scored.

    ``move`` takes forms to another device before they are scored. With ``forms``, others are scored
    than the model's own, such as differences of two.
    """
    checkpoint = model.checkpoint
    # Without a softmax, what a distance changes is no part of a form.
    plans = model.scored if coordinates.distances == (0,) else model.plans
    if coordinates.circuit == "ov":
        plans = tuple(plan for plan in plans if plan.has_softmax or plan.value)
    plans = plans or model.scored  # which then say why they have none
    wanted = select_measures(measures, coordinates.circuit)
    start, bytes_read = time.perf_counter(), 0
    metadata = _metadata(model, plans, coordinates, gamma) | measure_metadata(plans, wanted)
    columns = checkpoint_columns(checkpoint)
    upcoming = iter(plans)

    def prefetch(count: int) -> None:
        for plan in islice(upcoming, count):
            checkpoint.prefetch(wanted_parts(plan, coordinates))

    def forms_of(block: Block) -> Iterator[tuple[int, BilinearForm]]:
        for distance, form in [(0, forms(block))] if forms else block.forms(coordinates):
            yield distance, move(form) if move else form

    fitting = _blocks_that_fit(checkpoint, plans, coordinates)
    at_once = min(usable_cores(), fitting)
    side_by_side = at_once > 1 or is_confined()

    def score(block: Block) -> tuple[list[dict[str, Any]], list[BlockDetails]]:
        """Rows of one block at every distance, and the details of its layer at the first."""
        prefetch(1)
        rows: list[dict[str, Any]] = []
        pictured: list[BlockDetails] = []
        with nullcontext() if side_by_side else all_blas_threads():
            for distance, form in forms_of(block):
                layer = form.sum()
                shared = columns | block_columns(form, block.plan, coordinates, distance)
                more = score_heads(form, layer, gamma=gamma, heads=heads, measures=wanted)
                rows += [shared | row for row in more]
                if details and not pictured:
                    key = LayerKey(**{name: rows[0][name] for name in LAYER})
                    pictured.append(block_details(key, form, gamma, layer))
                del form, layer  # large, and no longer needed
            weights = () if forms else block.weights(coordinates.circuit)
            rows = with_status(rows, block.plan, coordinates, weights)
            rows = with_block_measures(rows, block, coordinates.distances, wanted)
        return rows, pictured

    rows: list[dict[str, Any]] = []
    pictured: list[BlockDetails] = []
    with (
        whole_products() if move else nullcontext(),
        one_blas_thread() if side_by_side else nullcontext(),
        ThreadPoolExecutor(at_once) as pool,
    ):
        prefetch(fitting)
        try:
            for done, (plan, scored) in enumerate(
                zip(plans, pool.map(score, map(partial(Block, checkpoint), plans)), strict=True),
                start=1,
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
    model: Model, plans: Sequence[AttentionPlan], coordinates: Coordinates, gamma: float
) -> dict[str, Any]:
    """How the scores are computed, for all rows; ``plans`` are the blocks that are scored."""
    stored = (kind for plan in plans for kind in plan.quantized)
    apart = model.on(model.checkpoint, [p for p in model.scored if p not in plans])
    lacking = "of values and outputs" if coordinates.circuit == "ov" else "at a distance"
    terms: dict[str, dict[str, None]] = {}  # by kind of block; the reasons have what mixes tokens
    for plan in plans:
        found = (one.term for one in omissions(plan, coordinates) if one.kind != "mixing")
        terms.setdefault("" if plan.has_softmax else plan.what, {}).update(dict.fromkeys(found))
    left_out = {model.name: list(terms.pop("", {}))}
    others = {model.name: {kind: list(of) for kind, of in terms.items()}}
    return {
        "wqk": __version__,
        "gamma": gamma,
        "folded_norms": coordinates.fold_norm,
        "biases": coordinates.bias,
        "partial": _reasons(plans, coordinates),
        "left_out": left_out,
        **({"left_out_without_softmax": others} if terms else {}),
        "inferred": list(dict.fromkeys(p.rule.guess for p in model.plans if p.rule.guess)),
        "unread": model.unread,
        "notes": [
            *model.checkpoint.notes,
            *(f"queries and keys are stored as {kind}" for kind in dict.fromkeys(stored)),
            *(f"{what}: has no form {lacking}" for what in apart.without_softmax),
        ],
    }


def _reasons(plans: Sequence[AttentionPlan], coordinates: Coordinates) -> dict[str, str]:
    """Why rows are ``partial``, by stack."""
    unfolded = {
        plan.where: "some layers have no known norm in front of them, so that none was folded in"
        for plan in plans
        if lacks_norm(plan, coordinates)
    }
    if len(plans) == sum(lacks_norm(plan, coordinates) for plan in plans):
        raise CheckpointError(
            f"family {plans[0].family} describes no norm in front of its attention, or the "
            "checkpoint lacks it; scan without folding norms"
        )
    return unfolded | {plan.where: plan.reason for plan in plans if plan.reason}
