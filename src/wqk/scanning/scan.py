"""Scoring a checkpoint block by block."""

from __future__ import annotations

import math
import os
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any, Literal

import numpy as np

from wqk._machine import (
    all_blas_threads,
    is_confined,
    keep_freed_memory,
    one_blas_thread,
    require_threads,
    usable_cores,
    whole_products,
)
from wqk._typing import Array
from wqk._version import __version__
from wqk.attention import Block
from wqk.attention.factors import PLAIN, Coordinates, lacks_norm, omissions, reason_without_norm
from wqk.checkpoints import Checkpoint, Part, steps_of
from wqk.errors import (
    CheckpointError,
    FormError,
    HubError,
    MissingPackage,
    UnknownFamily,
    called_as,
    errors_about,
    first_line,
    require_list,
    required_by,
)
from wqk.families import AttentionPlan
from wqk.families.assumptions import in_one_line
from wqk.forms import BilinearForm
from wqk.forms.arrays import on_host
from wqk.forms.kernels import directionalities
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
from wqk.tables.schema import LAYER, joined_statuses
from wqk.tables.score_table import ScoreTable, join

# Memory, in bytes, that may be spent on scoring several blocks at once.
SPARE_MEMORY = 512 * 2**20
# End of the error of one reference in a list of several.
SURVEY_ADVICE = (
    "wqk.survey(refs, out=folder) scores the other references, and lists this one as failed"
)


def score_heads(
    stack: BilinearForm,
    layer: BilinearForm | None = None,
    *,
    gamma: float = 2.0,
    heads: bool = True,
    measures: Sequence[Measure] = (),
) -> list[dict[str, Any]]:
    """Score a layer and, with ``heads``, each of its heads; the layer's row is first.

    Parameters
    ----------
    stack
        The heads of the layer, (G, H/G).
    layer
        Sum of the heads, if already computed.
    gamma
        Threshold of the directionality score.
    heads
        Whether to add a row for each head.
    measures
        Further measures; measures of whole blocks are ignored.
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
    scores_by_head = {
        name: np.ravel(on_host(values)) for name, values in _scores(stack, gamma, measures).items()
    }
    _, sharing = stack.stack
    rows = [row]
    for head in range(math.prod(stack.stack)):
        head_scores = {name: float(values[head]) for name, values in scores_by_head.items()}
        position = {"head": head, "key_head": head // sharing, "rank": stack.rank}
        rows.append(position | head_scores)
    return rows


def block_columns(
    form: BilinearForm, plan: AttentionPlan, coordinates: Coordinates, distance: int
) -> dict[str, Any]:
    """Return the columns with one value for a block at one distance; heads are (G, H/G)."""
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
    """Return the rows of one block, the layer's own row first, with their status.

    ``weights`` are the matrices of the forms that an initialization draws; empty if the forms are
    not the model's own, such as differences.
    """
    statuses = set(plan.statuses)
    if lacks_norm(plan, coordinates):
        statuses.add("partial")
    score = rows[0].get("symmetry")
    if len(weights) and score is not None and looks_random(weights, score, rows[0]["d_query"]):
        statuses.add("random-looking")

    def status(row: dict[str, Any]) -> str:
        is_zero = math.isnan(row["directionality"])
        if is_zero:
            return joined_statuses(statuses - {"random-looking"} | {"degenerate"})
        return joined_statuses(statuses)

    return [{**row, "status": status(row)} for row in rows]


def checkpoint_columns(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the columns with one value for all rows of a checkpoint."""
    model_type = checkpoint.config.get("model_type")
    if isinstance(model_type, str):
        model_type = model_type.encode("utf-8", "replace").decode()  # without lone surrogates
    else:
        model_type = None
    return {
        "checkpoint": checkpoint.name,
        "revision": checkpoint.revision,
        "step": checkpoint.step,
        "model_type": model_type,
        "parameters": checkpoint.parameters,
    }


# Columns with a score that is an attribute of forms. Directionality depends on gamma.
SCORE_ATTRIBUTES = tuple(
    column.name
    for column in COLUMNS
    if column.type is float
    and hasattr(BilinearForm, column.name)
    and not column.name.startswith("directionality")
)


def _scores(form: BilinearForm, gamma: float, measures: Sequence[Measure]) -> dict[str, Any]:
    """Compute every score of a form or a stack; symmetry is missing if the form is not square."""
    scores: dict[str, Any] = {}
    for name in SCORE_ATTRIBUTES:
        with suppress(FormError):
            scores[name] = getattr(form, name)
    scores |= directionalities(form.moments, gamma)._asdict()
    for measure in measures:
        if measure.of == "form":
            scores |= measure.compute(form)
    return scores


@dataclass(frozen=True)
class Progress:
    """Progress of a scan."""

    blocks_done: int
    blocks: int
    bytes_read: int
    seconds: float


@called_as("wqk.scan(ref), or wqk.scan([a, b]) for several")
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

    A list of models gives one table of all of them: ``wqk.scan([a, b])``. The list is scored in
    this process, nothing is written, and a reference that cannot be scored raises. For many
    references, `wqk.survey` writes a folder: a survey resumes after an interruption, uses several
    processes, and lists failed references instead of raising.

    Parameters
    ----------
    ref
        A `Model`, or a reference for `wqk.open`; the folder of a training run, for all its steps;
        or a list of models and references.
    gamma
        Threshold of the directionality score, in standard deviations above the mean.
    heads
        Whether to add rows for single heads.
    circuit, fold_norm, bias, distances
        Coordinates of the form, if it is not the plain W_q W_kᵀ: see `wqk.attention.factors`. Each
        distance has its own rows.
    device
        Device on which PyTorch multiplies, such as ``"cuda"``; without it NumPy multiplies on the
        CPU.
    details
        Whether to keep the data for pictures as the table's ``details``: every layer's image,
        norms, outlying dimensions and coupling of heads, at the first distance.
    measures
        Further measures: ``"spectral_norm"``, ``"spectrum"``, ``"ceiling"``, ``"bands"``; see
        `wqk.tables.columns`.
    layers
        Numbers of the layers to score; by default all.
    on_progress
        Called after every block.

    Returns
    -------
    ScoreTable
        A row for each layer, and with ``heads`` one for each head after it. For several models,
        ``table.side_by_side("symmetry")`` has a column for each model.

    Raises
    ------
    WqkError
        The checkpoint cannot be found, read, understood or scored; see `wqk.errors`.

    Notes
    -----
    While blocks are scored, BLAS has one thread in the whole process, also for the computations of
    other threads. If that matters, scan in a separate process: ``wqk.survey`` does, and so does any
    ``ProcessPoolExecutor`` that spawns.

    Examples
    --------
    >>> import wqk
    >>> table = wqk.scan(wqk.demo_model("decoder"), heads=False)
    >>> table.frame["layer"].to_list()
    [0, 1, 2, 3]
    """
    require_threads()
    select_measures(measures, circuit)  # raises before anything is read
    require_list("distances", distances, [0, 64])
    move = mover(device) if device else None
    coordinates = Coordinates(circuit, fold_norm, bias, tuple(dict.fromkeys(distances)))

    def scan_one(single: Any) -> ScoreTable:
        with _survey_advised(ref):
            model = open_model(single)
        with errors_about(model.name):
            chosen = model if layers is None else model.select(layers=layers)
            table = scan_model(
                chosen,
                coordinates,
                gamma=gamma,
                heads=heads,
                details=details,
                measures=measures,
                on_progress=on_progress,
                move=move,
            )
        if len(chosen.scored) == len(model.scored):
            return table
        layers_of_model = {model.name: _layer_counts(model)}
        return replace(table, metadata={**table.metadata, "layers_of_model": layers_of_model})

    return join([scan_one(single) for single in _single_refs(ref)])


def _layer_counts(model: Model) -> dict[str, int]:
    """Return the number of layers of each stack and kind of attention.

    Examples
    --------
    >>> import wqk
    >>> _layer_counts(wqk.open(wqk.demo_model("encoder")))
    {'encoder self': 4}
    """
    return dict(Counter(f"{plan.stack} {plan.kind}" for plan in model.scored))


@contextmanager
def _survey_advised(ref: Any) -> Iterator[None]:
    """Add advice to use `wqk.survey` to the error of a reference in a list of several."""
    try:
        yield
    except (CheckpointError, HubError, UnknownFamily) as error:
        is_list = isinstance(ref, list | tuple) and len(ref) > 1
        if is_list and all(isinstance(single, str | os.PathLike) for single in ref):
            error.args = (f"{error}; {SURVEY_ADVICE}",)
        raise


def _single_refs(ref: Any) -> list[Any]:
    """Return one reference for each checkpoint of a reference, a list of references or a run."""
    if isinstance(ref, list | tuple):
        if not ref:
            raise CheckpointError("a scan needs at least one checkpoint, got an empty list")
        return list(chain.from_iterable(map(_single_refs, ref)))
    return steps_of(os.fspath(ref)) if isinstance(ref, str | os.PathLike) else [ref]


def scored_parts(plan: AttentionPlan, coordinates: Coordinates) -> list[Part]:
    """Return the large parts of a block without repetitions: all except vectors of norms."""
    sides = (plan.query, plan.key) if coordinates.circuit == "qk" else (plan.value, plan.output)
    parts: dict[Part, None] = {}
    for side in sides:
        if side is not None:
            parts |= dict.fromkeys(side.parts)
    return list(parts)


def plan_bytes(
    checkpoint: Checkpoint, plan: AttentionPlan, coordinates: Coordinates = PLAIN
) -> int:
    """Count the bytes that scoring one block reads, without the vectors of norms."""
    parts = scored_parts(plan, coordinates)
    return sum(part.nbytes(checkpoint.info(part.name)) for part in parts)


def _blocks_that_fit(
    checkpoint: Checkpoint, plans: Sequence[AttentionPlan], coordinates: Coordinates
) -> int:
    """Return the number of blocks that fit into the spare memory, at least 1.

    A block needs its weights in float32, twice. All blocks count as the largest of them.

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
        parts = scored_parts(plan, coordinates)
        return sum(math.prod(p.shape(checkpoint.info(p.name).shape)) for p in parts)

    # A missing circuit has no size; reading it raises an error.
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
            torch.tensor(form.query, device=device), torch.tensor(form.key, device=device)
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
    """Score the blocks of an open model; see `scan`.

    The next blocks of a remote checkpoint are fetched while earlier blocks are scored.

    Parameters
    ----------
    model
        The open model.
    coordinates
        Coordinates of the forms.
    gamma, heads, details, measures, on_progress
        As for `scan`.
    move
        Function that moves a form to another device before scoring.
    forms
        Function that replaces the form of a block, such as by the difference from another model.
    """
    keep_freed_memory()
    checkpoint = model.checkpoint
    # Blocks without a softmax have no form at a distance.
    plans = model.scored if coordinates.distances == (0,) else model.plans
    if coordinates.circuit == "ov":
        plans = tuple(plan for plan in plans if plan.has_softmax or plan.value)
    plans = plans or model.scored  # reading these raises an error with the reason
    selected = select_measures(measures, coordinates.circuit)
    start, bytes_read = time.perf_counter(), 0
    metadata = _metadata(model, plans, coordinates, gamma) | measure_metadata(plans, selected)
    columns = checkpoint_columns(checkpoint)
    upcoming = iter(plans)

    def prefetch(count: int) -> None:
        for plan in islice(upcoming, count):
            checkpoint.prefetch(scored_parts(plan, coordinates))

    def forms_of(block: Block) -> Iterator[tuple[int, BilinearForm]]:
        by_distance = [(0, forms(block))] if forms else block.forms(coordinates)
        for distance, form in by_distance:
            yield distance, move(form) if move else form

    fitting = _blocks_that_fit(checkpoint, plans, coordinates)
    at_once = min(usable_cores(), fitting)
    side_by_side = at_once > 1 or is_confined()

    def score(block: Block) -> tuple[list[dict[str, Any]], list[BlockDetails]]:
        """Score one block at every distance; details are for the first distance."""
        prefetch(1)
        rows: list[dict[str, Any]] = []
        layer_details: list[BlockDetails] = []
        with nullcontext() if side_by_side else all_blas_threads():
            for distance, form in forms_of(block):
                layer = form.sum()
                shared = columns | block_columns(form, block.plan, coordinates, distance)
                scored_rows = score_heads(form, layer, gamma=gamma, heads=heads, measures=selected)
                rows += [shared | row for row in scored_rows]
                if details and not layer_details:
                    key = LayerKey(**{name: rows[0][name] for name in LAYER})
                    layer_details.append(block_details(key, form, gamma, layer))
                del form, layer  # large, and no longer needed
            weights = () if forms else block.drawn_weights(coordinates.circuit)
            rows = with_status(rows, block.plan, coordinates, weights)
            rows = with_block_measures(rows, block, coordinates.distances, selected)
        return rows, layer_details

    rows: list[dict[str, Any]] = []
    layer_details: list[BlockDetails] = []
    with (
        whole_products() if move else nullcontext(),
        one_blas_thread() if side_by_side else nullcontext(),
        ThreadPoolExecutor(at_once) as pool,
    ):
        prefetch(fitting)
        try:
            blocks = (Block(checkpoint, plan) for plan in plans)
            results = zip(plans, pool.map(score, blocks), strict=True)
            for done, (plan, (block_rows, details_of_block)) in enumerate(results, start=1):
                rows += block_rows
                layer_details += details_of_block
                bytes_read += plan_bytes(checkpoint, plan, coordinates)
                if on_progress:
                    seconds = time.perf_counter() - start
                    on_progress(Progress(done, len(plans), bytes_read, seconds))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            checkpoint.abandon()  # an interrupted scan must not wait for its downloads
            raise
    images = Details(tuple(layer_details), gamma) if details else None
    return ScoreTable.from_rows(rows, metadata, images)


def _metadata(
    model: Model, plans: Sequence[AttentionPlan], coordinates: Coordinates, gamma: float
) -> dict[str, Any]:
    """Describe the computation of all rows; ``plans`` are the plans of the scored blocks."""
    metadata = {
        "wqk": __version__,
        "gamma": gamma,
        "folded_norms": coordinates.fold_norm,
        "biases": coordinates.bias,
        "partial": _reasons(plans, coordinates),
    }
    terms = _omitted_terms(plans, coordinates)
    metadata["left_out"] = {model.name: terms.pop("", [])}
    if terms:
        metadata["left_out_without_softmax"] = {model.name: terms}
    guesses = [plan.rule.guess for plan in model.plans if plan.rule.guess]
    metadata["inferred"] = list(dict.fromkeys(guesses))
    metadata["unread"] = model.unread
    metadata["notes"] = _notes(model, plans, coordinates)
    return metadata


def _omitted_terms(
    plans: Sequence[AttentionPlan], coordinates: Coordinates
) -> dict[str, list[str]]:
    """List the terms that forms leave out, by kind of block; "" is attention with a softmax."""
    terms_by_kind: dict[str, dict[str, None]] = {}
    for plan in plans:
        terms = terms_by_kind.setdefault("" if plan.has_softmax else plan.what, {})
        for omission in omissions(plan, coordinates):
            if omission.kind != "mixing":  # the reason of a partial form has these terms
                terms[omission.term] = None
    return {kind: list(terms) for kind, terms in terms_by_kind.items()}


def _notes(model: Model, plans: Sequence[AttentionPlan], coordinates: Coordinates) -> list[str]:
    """Collect notes on the checkpoint, on quantized weights, and on blocks without a form."""
    notes = [*model.checkpoint.notes]
    quantized: dict[str, None] = {}
    for plan in plans:
        quantized |= dict.fromkeys(plan.quantized)
    guessed = [
        in_one_line(plan.assumptions) for plan in plans if plan.rule.guess or plan.rotation_unknown
    ]
    notes += dict.fromkeys(guessed)
    notes += [f"queries and keys are stored as {number_type}" for number_type in quantized]
    unscored = model.on(model.checkpoint, [plan for plan in model.scored if plan not in plans])
    form = "of values and outputs" if coordinates.circuit == "ov" else "at a distance"
    notes += [f"{blocks}: has no form {form}" for blocks in unscored.without_softmax]
    return notes


def _reasons(plans: Sequence[AttentionPlan], coordinates: Coordinates) -> dict[str, str]:
    """Return the reasons of ``partial`` rows, by stack."""
    lacking = [plan for plan in plans if lacks_norm(plan, coordinates)]
    if len(lacking) == len(plans):
        raise CheckpointError(f"{reason_without_norm(plans[0])}; scan without folding norms")
    reason = "some layers have no known norm in front of them, so that none was folded in"
    reasons = {plan.where: reason for plan in lacking}
    return reasons | {plan.where: plan.reason for plan in plans if plan.reason}
