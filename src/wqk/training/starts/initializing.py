"""Initialize the query, key and value weights of a model, in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk.attention import attention_plans, load_attention
from wqk.checkpoints import Part, open_checkpoint
from wqk.checkpoints.live import Parameters
from wqk.errors import CheckpointError, FormError, UnknownFamily
from wqk.families.layouts import Projection, put_outputs
from wqk.training.starts.kinds import KINDS, Kind, mimetic, planes, shared_queries
from wqk.training.starts.report import Initialization, LayerChange, LayerScores, layer_scores

if TYPE_CHECKING:
    from wqk._typing import Array, FilePath
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan, Side

# By how much a start's symmetry may differ from its kind's, in float32.
TOLERANCE = 1e-4

# New values of a layer by where they are stored: weights (heads, R, D) and biases (heads, R, 1).
Start = dict[Projection | Part, np.ndarray]


def initialize_(
    model: Any,
    kind: str,
    *,
    seed: int | None = None,
    norm_ratio: float | None = None,
    value_ratio: float | None = None,
    alpha: float = 0.7,
    beta: float = 0.7,
    family: FilePath | None = None,
) -> Initialization:
    """Set the queries, keys and values of every self-attention of a model, in place.

    Everything else is unchanged, including cross-attention and other parts of fused tensors;
    parameters keep their identity, type and device. All kinds but ``mimetic`` and ``published``
    keep the queries and compute the keys from them, so that models from one seed differ only in
    their keys; where both have biases, the key's is computed in the same way.

    Parameters
    ----------
    model
        An `nn.Module` of `transformers`, of a family that wqk knows.
    kind
        ``random``: the model is only measured. ``symmetric``: W_k = W_q (paper, S2.1).
        ``negated``: W_k = −W_q. ``indefinite``: W_q with half of the signs flipped. ``paired``:
        every other head is its neighbor's transpose. ``skew``: rotated by 90°, for symmetry −1.
        ``mimetic``: W_q W_kᵀ ≈ α Z + β I. ``published``: as the paper's code did, queries and
        values drawn anew, uniform in ±1/√D, W_k = W_q, biases left; and its controls
        ``published-independent``, ``-indefinite``, ``-negated``, ``-values`` and
        ``-queries-keys``. The documentation's page on initialization defines each of them.
    seed
        For newly drawn weights; PyTorch's own generators are not used. None for the seed that
        PyTorch was last given.
    norm_ratio
        Scale queries and keys equally so that every layer's ‖W_qk‖ changes by this factor.
    value_ratio
        Multiply the values by this factor, after the kind has set them.
    alpha, beta
        Parameters of ``mimetic``.
    family
        A family file, for a model of an unknown family.

    Returns
    -------
    Initialization
        Each layer's symmetry, trace, norm, own-token score and norm of values, before and after.

    Raises
    ------
    FormError
        There is no such kind, or a ratio is not a positive number.
    UnknownFamily
        No family describes the model; weights are not written based on a guess.
    CheckpointError
        The model's weights are not loaded, or this kind cannot set them. Nothing was written.

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
        raise FormError(f"an initialization must be one of {', '.join(KINDS)}, got {kind!r}")
    for name, ratio in (("norm_ratio", norm_ratio), ("value_ratio", value_ratio)):
        if ratio is not None and not 0 < ratio < float("inf"):
            raise FormError(f"{name} is a positive number, got {ratio!r}")
    import torch

    chosen = KINDS[kind]
    if kind == "mimetic":
        chosen = chosen._replace(draw=partial(mimetic, alpha=alpha, beta=beta))
    writes = chosen != Kind() or norm_ratio is not None or value_ratio is not None
    parameters = Parameters(model)
    checkpoint = open_checkpoint(model)
    plans = [plan for plan in attention_plans(checkpoint, family) if plan.kind == "self"]
    _require_settable(plans, checkpoint.name, parameters.adapted, writes)
    # NumPy's generator, since PyTorch's with the model's own seed would repeat its embedding.
    rng = np.random.default_rng(torch.initial_seed() if seed is None else seed)
    # All are planned before the first is written: a model is set as a whole or not at all.
    planned = [
        _plan_start(checkpoint, plan, chosen, rng, norm_ratio, value_ratio) for plan in plans
    ]
    with torch.no_grad():
        for _, start in planned:
            _write(start, parameters.arrays)
    return Initialization(
        kind,
        tuple(
            LayerChange(plan.stack, plan.layer, before, _measured(checkpoint, plan))
            for plan, (before, _) in zip(plans, planned, strict=True)
        ),
    )


def _require_settable(
    plans: Sequence[AttentionPlan], name: str, adapted: Collection[str], writes: bool
) -> None:
    if not plans:
        raise CheckpointError(f"{name}: has no self-attention to initialize")
    for plan in plans if writes else ():
        if plan.rule.guess:
            raise UnknownFamily(
                f"{name}: the family of this model is unknown, and no weights are "
                f"written based on a guess ({plan.rule.guess}); describe it in a family file, "
                "check that with `wqk verify`, and pass it as family="
            )
        weights = [part.name for part in (*plan.parts, *(plan.value.parts if plan.value else ()))]
        if own := next((weight for weight in weights if weight in adapted), None):
            raise CheckpointError(
                f"{name}: {own} has an adapter, whose product would be added to what is written; "
                "initialize the model before it is adapted"
            )
        sides = (plan.query.projection, plan.key.projection)
        if not all(isinstance(projection, Projection) for projection in sides):
            raise CheckpointError(
                f"{name}: keys and values share a latent, so the keys cannot be set without the "
                "values"
            )


def _plan_start(
    checkpoint: Checkpoint,
    plan: AttentionPlan,
    kind: Kind,
    rng: np.random.Generator,
    norm_ratio: float | None,
    value_ratio: float | None,
) -> tuple[LayerScores, Start]:
    """A layer's current scores, and its new weights, tested on a copy."""
    names = {part.name for part in (*plan.parts, *(plan.value.parts if plan.value else ()))}
    copies = {name: checkpoint.read([Part(name)])[0] for name in names}
    trial = open_checkpoint(copies)
    before = _measured(trial, plan)
    start = _start(trial, plan, kind, rng)
    if value_ratio is not None:
        value = plan.value.projection if plan.value else None
        if not isinstance(value, Projection):
            raise _values_apart(checkpoint.name, plan, "scaled")
        start[value] = _weight(trial, value, start) * np.float32(value_ratio)
    _write(start, copies)
    after = _measured(trial, plan)
    if kind.turn and not abs(after.symmetry - kind.turn.symmetry) < TOLERANCE:
        raise CheckpointError(
            f"{checkpoint.name}: layer {plan.layer} of the {plan.stack} would have symmetry "
            f"{after.symmetry:.3f} instead of {kind.turn.symmetry:.0f}: its queries are zero, or "
            "the gains of its query and key norms differ; change these first"
        )
    if norm_ratio is not None and after.norm:
        factor = np.float32((norm_ratio * before.norm / after.norm) ** 0.5)
        for side in (plan.query, plan.key):
            assert isinstance(side.projection, Projection)
            start[side.projection] = _weight(trial, side.projection, start) * factor
            if side.bias is not None:
                start[side.bias] = _bias(trial, side) * factor
    return before, start


def _start(
    checkpoint: Checkpoint, plan: AttentionPlan, kind: Kind, rng: np.random.Generator
) -> Start:
    start: Start = {}
    if kind.draw:
        sides = {"query": plan.query, "key": plan.key, "value": plan.value}
        stored = {
            role: (side.projection, _weight(checkpoint, side.projection, {}))
            for role, side in sides.items()
            if side and isinstance(side.projection, Projection)
        }
        try:
            drawn = kind.draw({role: weight.shape for role, (_, weight) in stored.items()}, rng)
        except KeyError:
            raise _values_apart(checkpoint.name, plan, "drawn") from None
        for role, weight in drawn.items():
            projection, before = stored[role]
            start[projection] = weight.astype(before.dtype)
    if kind.turn:
        order, turn = planes(plan), kind.turn
        query, key = plan.query, plan.key
        assert isinstance(query.projection, Projection)
        assert isinstance(key.projection, Projection)

        def keys(side: Array) -> Array:
            if query.norm and query.norm.kind == "layer":
                side = side - side.mean(axis=1, keepdims=True)  # as the norm will
            return turn.keys(shared_queries(side, key.heads), order)

        start[key.projection] = keys(_weight(checkpoint, query.projection, start))
        if kind.biases and query.bias is not None and key.bias is not None:
            start[key.bias] = keys(_bias(checkpoint, query))
    return start


def _values_apart(name: str, plan: AttentionPlan, change: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: the values of layer {plan.layer} are not a single projection and cannot be "
        f"{change}"
    )


def _weight(checkpoint: Checkpoint, projection: Projection, start: Start) -> np.ndarray:
    """A side's weight (heads, R, D): the start's, or else the stored one."""
    if projection in start:
        return start[projection]
    weight: np.ndarray = projection.take(checkpoint.read([projection.part])[0])
    return weight


def _bias(checkpoint: Checkpoint, side: Side) -> np.ndarray:
    """A side's bias (heads, R, 1)."""
    assert side.bias is not None
    bias: np.ndarray = checkpoint.read([side.bias])[0].reshape(side.heads, side.head_width, 1)
    return bias


def _write(start: Start, tensors: Mapping[str, Any]) -> None:
    """Write the new values into whole tensors of NumPy or PyTorch."""
    for stored, values in start.items():
        if isinstance(stored, Projection):
            tensor = tensors[stored.tensor]
            stored.put(tensor, _as_in(tensor, values))
        else:
            tensor = tensors[stored.name]
            put_outputs(tensor, stored.rows, _as_in(tensor, values.reshape(-1)))


def _as_in(tensor: Any, values: np.ndarray) -> Any:
    """The values in the array library and type, and on the device, of a tensor."""
    if isinstance(tensor, np.ndarray):
        return values
    import torch

    return torch.from_numpy(np.ascontiguousarray(values)).to(tensor)


def _measured(checkpoint: Checkpoint, plan: AttentionPlan) -> LayerScores:
    value = plan.value.projection if plan.value else None
    read = _weight(checkpoint, value, {}) if isinstance(value, Projection) else None
    return layer_scores(load_attention(checkpoint, plan), read)
