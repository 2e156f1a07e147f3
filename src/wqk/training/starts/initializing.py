"""Write a start into the query and key weights of a model, in place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._typing import Array
from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.live import Parameters
from wqk.errors import CheckpointError, FormError, UnknownFamily
from wqk.families.layouts import Projection, put_outputs
from wqk.training.starts.kinds import TURNS, mimetic, planes, shared_queries
from wqk.training.starts.report import FormScores, Initialization, LayerChange, form_scores

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan

KINDS = ("random", *TURNS, "mimetic")

# How far from its kind's a start's symmetry may be, in float32.
TOLERANCE = 1e-4


class Start(NamedTuple):
    """New weights of one layer, as its tensors hold them; None for what stays as it is."""

    query: np.ndarray | None = None  # (H, R, D)
    key: np.ndarray | None = None  # (G, R, D)
    key_bias: np.ndarray | None = None  # (G, R)

    def scaled(self, factor: float) -> Start:
        """With the keys multiplied."""
        key, bias = (None if a is None else a * factor for a in (self.key, self.key_bias))
        return Start(self.query, key, bias)


def initialize_(
    model: Any,
    kind: str,
    *,
    seed: int | None = None,
    keep_norm: bool = False,
    alpha: float = 0.7,
    beta: float = 0.7,
    family: Path | None = None,
) -> Initialization:
    """Set the queries and keys of every self-attention of a model, in place.

    Everything else keeps its bits, cross-attention and the values of fused tensors included;
    parameters stay the objects, of the type and on the device, that they are. All kinds but
    ``mimetic`` keep the queries and set the keys from them, so that models which start from one
    seed differ in their keys alone; a key's bias is set from the query's as its weight is, where
    both are there.

    Parameters
    ----------
    model
        An `nn.Module` of `transformers`, of a family that wqk knows.
    kind
        ``random``: nothing is set, the model is only measured. ``symmetric``: W_k = W_q (paper,
        S2.1). ``indefinite``: with half of the signs turned. ``paired``: every other head is its
        neighbor's transpose. ``skew``: turned by 90°, for a symmetry of −1. ``mimetic``:
        W_q W_kᵀ ≈ α Z + β I. The documentation's page on initialization defines each of them.
    seed
        Of the draws of ``mimetic``, which leave PyTorch's own generators as they are; None for the
        seed that PyTorch was last given.
    keep_norm
        Scale the keys so that every layer's ‖W_qk‖ stays what it was.
    alpha, beta
        Of ``mimetic``.
    family
        A family file, for a model that wqk does not know.

    Returns
    -------
    Initialization
        Symmetry, trace and norm of each layer's form, before and after.

    Raises
    ------
    FormError
        There is no such kind.
    UnknownFamily
        No family knows the model; a guess is not enough to write to it.
    CheckpointError
        The model's weights are not here, or its attention cannot be set so. Nothing was written.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> _ = torch.manual_seed(0)
    >>> model = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4))
    >>> report = wqk.initialize_(model, "symmetric")
    >>> round(report.layers[0].after.symmetry, 6)
    1.0
    """
    if kind not in KINDS:
        raise FormError(f"an initialization is one of {', '.join(KINDS)}, got {kind!r}")
    import torch

    parameters = Parameters(model).arrays
    checkpoint = open_checkpoint(model)
    plans = [plan for plan in attention_plans(checkpoint, family) if plan.rule.kind == "self"]
    _require_settable(plans, checkpoint.name, kind)
    generator = torch.Generator().manual_seed(torch.initial_seed() if seed is None else seed)
    draw = partial(mimetic, alpha=alpha, beta=beta, generator=generator)
    # All of them before the first is written: a model is set as a whole or not at all.
    planned = [_plan_start(checkpoint, plan, kind, draw, keep_norm) for plan in plans]
    with torch.no_grad():
        for plan, (_, start) in zip(plans, planned, strict=True):
            _write(start, plan, parameters)
    return Initialization(
        kind,
        tuple(
            LayerChange(plan.stack, plan.layer, before, _measured(checkpoint, plan))
            for plan, (before, _) in zip(plans, planned, strict=True)
        ),
    )


def _require_settable(plans: Sequence[AttentionPlan], name: str, kind: str) -> None:
    if not plans:
        raise CheckpointError(f"{name}: has no self-attention to initialize")
    for plan in plans if kind != "random" else ():
        if plan.rule.guess:
            raise UnknownFamily(
                f"{name}: no family knows this model, and nothing is written on a guess "
                f"({plan.rule.guess}); describe it in a family file, check that with `wqk verify`, "
                "and pass it as family="
            )
        if not isinstance(plan.query, Projection) or not isinstance(plan.key, Projection):
            raise CheckpointError(
                f"{name}: keys come from a latent that the values share; they cannot be set from "
                "the queries without the values"
            )


def _plan_start(
    checkpoint: Checkpoint,
    plan: AttentionPlan,
    kind: str,
    draw: Callable[..., tuple[np.ndarray, np.ndarray]],
    keep_norm: bool,
) -> tuple[FormScores, Start]:
    """The scores of a layer as it is, and its new weights, tried on a copy."""
    names = {part.name for part in plan.parts.values()}
    copies = {name: checkpoint.read([Part(name)])[0] for name in names}
    trial = open_checkpoint(copies)
    before = _measured(trial, plan)
    start = _start(trial, plan, kind, draw)
    _write(start, plan, copies)
    after = _measured(trial, plan)
    if kind in TURNS and not abs(after.symmetry - TURNS[kind].symmetry) < TOLERANCE:
        raise CheckpointError(
            f"{checkpoint.name}: layer {plan.layer} of the {plan.stack} would have symmetry "
            f"{after.symmetry:.3f}, where a {kind} start has {TURNS[kind].symmetry:.0f}: its "
            "queries are zero, or the gains of its query and key norms differ; set these first"
        )
    if keep_norm and start.key is not None:
        start = start.scaled(before.norm / after.norm)
    return before, start


def _start(
    checkpoint: Checkpoint,
    plan: AttentionPlan,
    kind: str,
    draw: Callable[..., tuple[np.ndarray, np.ndarray]],
) -> Start:
    if kind == "random":
        return Start()
    assert isinstance(plan.query, Projection)
    heads, key_heads, width = plan.query.heads, plan.key.heads, plan.query.head_width
    query = plan.query.take(checkpoint.read([plan.query.part])[0])
    if kind == "mimetic":
        d = query.shape[-1]
        if width > d:
            raise CheckpointError(
                f"{checkpoint.name}: a mimetic start needs heads no wider than the model, got "
                f"{width} of {d}"
            )
        drawn = draw(heads, key_heads, width, d)
        return Start(*(weight.astype(query.dtype) for weight in drawn))
    order = planes(plan)

    def keys(side: Array) -> Array:
        if plan.query_norm and plan.rule.norm == "layer":
            side = side - side.mean(axis=1, keepdims=True)  # as the norm will
        return TURNS[kind].keys(shared_queries(side, key_heads), order)

    if plan.query_bias is None or plan.key_bias is None:
        return Start(key=keys(query))
    bias = checkpoint.read([plan.query_bias])[0].reshape(heads, width, 1)
    return Start(key=keys(query), key_bias=keys(bias)[..., 0])


def _write(start: Start, plan: AttentionPlan, tensors: Mapping[str, Any]) -> None:
    """Put what is new into whole tensors of NumPy or PyTorch."""
    for projection, weight in ((plan.query, start.query), (plan.key, start.key)):
        if weight is not None:
            assert isinstance(projection, Projection)
            tensor = tensors[projection.tensor]
            projection.put(tensor, _as_in(tensor, weight))
    if start.key_bias is not None:
        assert plan.key_bias is not None
        tensor = tensors[plan.key_bias.name]
        put_outputs(tensor, plan.key_bias.rows, _as_in(tensor, start.key_bias.reshape(-1)))


def _as_in(tensor: Any, values: np.ndarray) -> Any:
    """The values in the array library, type and place of a tensor."""
    if isinstance(tensor, np.ndarray):
        return values
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(tensor)


def _measured(checkpoint: Checkpoint, plan: AttentionPlan) -> FormScores:
    return form_scores(load_attention(checkpoint, plan))
