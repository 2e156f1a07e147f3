"""Initialize a model's queries, keys and values before training, in place, and report the changes.

A start can *draw* new weights, and can *turn* the queries into keys by an orthogonal map T of the
layer's key dimensions. With Q̄_g = Σ_{h in g} Q_h / √(H/G), the sum of the queries that share key
head g,

    W_k = Q̄ Tᵀ,    W_qk = √(H/G) Q̄ T Q̄ᵀ,

so that the layer's form is symmetric, or skew-symmetric, if T is. Its norm is √(1 + ((tr T)² +
tr T²)/(r D)) times the norm with independent keys of the same variance.

==============  =================================================  ==========  ====  =============
turn            T                                                  symmetry    tr T  norm
==============  =================================================  ==========  ====  =============
``symmetric``   keeps every dimension                              1           r     √(1 + (r+1)/D)
``indefinite``  turns the sign of every other plane                1           0     √(1 + 1/D)
``skew``        turns every plane by 90°                           −1          0     √(1 − 1/D)
==============  =================================================  ==========  ====  =============

A plane is a pair of dimensions of a head. With rotary positions, these are two dimensions that
rotate together, so that T commutes with the rotation. `wqk_lab.training.initializations` contains
starts that only the paper's experiments need.

Axes: H query heads, G key heads, R head width, D model width, r = G R.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import numpy as np

from wqk._console import Result, counted, number
from wqk._typing import Array, FilePath, Float
from wqk.attention import Block
from wqk.checkpoints import Checkpoint, Part, open_checkpoint
from wqk.checkpoints.modules import LiveCheckpoint, Read
from wqk.errors import CheckpointError, FormError, called_as, required_by
from wqk.families import AttentionPlan, Side
from wqk.families.layouts import Projection, put_outputs
from wqk.forms.scores import symmetry
from wqk.live.addresses import known_plans, network_of, opened_live
from wqk.tables.sheet import Sheet

Shared = Float[Array, "key_heads width d"]


def shared_queries(
    query: Float[Array, "heads width d"], key_heads: int
) -> Float[Array, "key_heads width d"]:
    """Return Q̄, the sum of the queries that share a key head, scaled to the variance of one query.

    Examples
    --------
    >>> shared_queries(np.ones((4, 1, 2)), key_heads=1)
    array([[[2., 2.]]])
    """
    heads, width, d = query.shape
    sharing = heads // key_heads
    summed: np.ndarray = query.reshape(key_heads, sharing, width, d).sum(1)
    return summed / query.dtype.type(sharing**0.5)


def planes(plan: AttentionPlan) -> np.ndarray:
    """Return a head's dimensions (R,) in an order where neighboring pairs form the planes."""
    dimensions = np.arange(plan.key.head_width)
    if plan.rotary is None:
        return dimensions
    first, second = plan.rotary.planes
    turned = np.stack([dimensions[first], dimensions[second]], axis=-1).ravel()
    return np.concatenate([turned, np.setdiff1d(dimensions, turned)])


def symmetric(shared: Shared, order: np.ndarray) -> Shared:
    """Return the queries as keys (paper, S2.1): every head's form is positive semidefinite."""
    return shared


def indefinite(shared: Shared, order: np.ndarray) -> Shared:
    """Return the queries as keys, half of them with flipped signs; + and − alternate by head.

    Examples
    --------
    >>> indefinite(np.ones((2, 4, 1)), np.arange(4))[..., 0]
    array([[ 1.,  1., -1., -1.],
           [-1., -1.,  1.,  1.]])
    """
    heads, width, _ = shared.shape
    signs = np.empty((heads, width, 1), shared.dtype)
    signs[:, order, 0] = (-1) ** (np.arange(width) // 2 + np.arange(heads)[:, None])
    return shared * signs


def skew(shared: Shared, order: np.ndarray) -> Shared:
    """Return the queries as keys, rotated by 90° in every plane; an odd last dimension is zero.

    Examples
    --------
    >>> skew(np.array([[[1.0], [2.0]]]), np.arange(2)).ravel()
    array([ 2., -1.])
    """
    first, second = order[: len(order) // 2 * 2].reshape(-1, 2).T
    turned = np.zeros_like(shared)
    turned[:, first] = shared[:, second]
    turned[:, second] = -shared[:, first]
    return turned


class Turn(NamedTuple):
    """A map of queries to keys, and the resulting symmetry of a layer's form."""

    keys: Callable[[Shared, np.ndarray], Shared]
    symmetry: float


TURNS: Mapping[str, Turn] = {
    "symmetric": Turn(symmetric, 1.0),
    "indefinite": Turn(indefinite, 1.0),
    "skew": Turn(skew, -1.0),
}

# (heads, width, D) by role: query, key, value, in this order.
Shapes = dict[str, tuple[int, int, int]]
Weights = dict[str, np.ndarray]


class StartKind(NamedTuple):
    """A start: the weights that are drawn, and the map of queries to keys."""

    name: str
    draw: Callable[[Shapes, np.random.Generator], Weights] | None = None  # None: keeps all
    turn: Turn | None = None  # None: independent keys
    biases: bool = True  # whether the keys' biases are computed in the same way


KINDS: Mapping[str, StartKind] = {
    "random": StartKind("random"),
    **{name: StartKind(name, turn=turn) for name, turn in TURNS.items()},
}

# By how much a start's symmetry may differ from its kind's, in float32.
TOLERANCE = 1e-4

# Whole tensors of a layer, by name.
Copies = dict[str, np.ndarray]


class PlannedLayer(NamedTuple):
    """A layer with new weights that are not yet written."""

    plan: AttentionPlan
    before: LayerScores
    copies: Copies  # the layer's tensors with its new weights


class LayerScores(NamedTuple):
    """Scores of a layer's form, which includes the gains of query and key norms.

    ``norm`` is the norm of the layer's form, the sum of its heads; ``head_norm`` is the mean norm
    of the heads. The spread of the logits of independent tokens depends on the norms of heads.

    ``own_score`` is the expected attention logit of a token with itself, averaged over heads, if
    the token's components are independent with unit variance, as after a layer norm: scale · trace
    / H.
    """

    symmetry: float
    trace: float
    norm: float
    own_score: float
    value_norm: float  #: ‖W_v‖; NaN if values are not a single projection.
    head_norm: float


@dataclass(frozen=True)
class LayerChange:
    """Scores of one layer's form before and after."""

    derived: ClassVar = ("head_norm_ratio", "norm_ratio", "value_ratio")

    stack: str
    layer: int
    before: LayerScores
    after: LayerScores

    @property
    def norm_ratio(self) -> float:
        """‖W_qk‖ of the layer after, divided by the norm before; NaN for zero before."""
        return self.after.norm / self.before.norm if self.before.norm else math.nan

    @property
    def head_norm_ratio(self) -> float:
        """Mean norm of the heads after, divided by the norm before; NaN for zero before."""
        before = self.before.head_norm
        return self.after.head_norm / before if before else math.nan

    @property
    def value_ratio(self) -> float:
        """‖W_v‖ after, divided by the norm before; NaN if zero or unknown before."""
        before = self.before.value_norm
        return self.after.value_norm / before if before else math.nan


@dataclass(frozen=True, repr=False)
class Initialization(Result):
    """Changed layers in order; printing shows a line for each layer."""

    kind: str  #: The kind of initialization.
    layers: tuple[LayerChange, ...]  #: Each with its scores before and after.
    left: tuple[str, ...] = ()  #: Layers without a softmax, which no start is defined for.

    @property
    def sentence(self) -> str:
        """The kind of initialization, and the number of layers."""
        return f"{self.kind} initialization of {counted(len(self.layers), 'layer')}"

    def _rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield a row for each layer; ratios are norms after divided by norms before."""
        for layer in self.layers:
            row: dict[str, Any] = {"stack": layer.stack, "layer": layer.layer}
            for name, score in layer.before._asdict().items():
                row[f"{name}_before"] = score
            for name, score in layer.after._asdict().items():
                row[f"{name}_after"] = score
            for name in LayerChange.derived:
                row[name] = getattr(layer, name)
            yield row

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        columns = ("attention", "layer", "symmetry", "", "trace", "", "own-token score", "")
        table = Sheet.of(*columns, "heads ×", "norm ×", "values ×", text=["attention"])
        digits = _digits_of_traces(self.layers)
        for layer in self.layers:
            table.add(layer.stack, str(layer.layer), *_cells(layer, digits))
        yield table
        yield OWN_SCORE
        yield from (f"{mixer}: left as they are" for mixer in self.left)


# The meaning of a column of a printed result.
OWN_SCORE = "own-token score: mean logit of a token with itself, for tokens of unit variance"


class Ratios(NamedTuple):
    """Factors by which norms change; None keeps the norms that result from the kind."""

    head_norm_ratio: float | None = None
    norm_ratio: float | None = None
    value_ratio: float | None = None

    def factor(self, before: LayerScores, after: LayerScores) -> np.float32 | None:
        """Return the factor of queries and of keys; None to keep the weights."""
        if self.head_norm_ratio is not None and after.head_norm:
            return np.float32((self.head_norm_ratio * before.head_norm / after.head_norm) ** 0.5)
        if self.norm_ratio is not None and after.norm:
            return np.float32((self.norm_ratio * before.norm / after.norm) ** 0.5)
        return None


def _digits_of_traces(changes: Sequence[LayerChange]) -> int:
    """Return the decimals with which the largest trace has three digits, equal in all rows."""
    traces = [abs(scores.trace) for change in changes for scores in (change.before, change.after)]
    largest = max((trace for trace in traces if math.isfinite(trace)), default=0.0)
    return max(0, 2 - math.floor(math.log10(largest))) if largest else 2


def _cells(change: LayerChange, trace_digits: int) -> Iterator[str]:
    """Return the scores before and after, followed by the ratios of norms."""
    for name, digits in (("symmetry", 3), ("trace", trace_digits), ("own_score", 3)):
        yield number(getattr(change.before, name), digits)
        yield f"→ {number(getattr(change.after, name), digits)}"
    for name in LayerChange.derived:
        yield f"{getattr(change, name):.3f}"


@called_as('wqk.initialize_(model, "symmetric"), or "indefinite", "skew" or "random"')
def initialize_(
    model: Any,
    kind: str | StartKind,
    *,
    seed: int | None = None,
    head_norm_ratio: float | None = None,
    norm_ratio: float | None = None,
    value_ratio: float | None = None,
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
) -> Initialization:
    """Set the queries, keys and values of every self-attention of a model, in place.

    Everything else is unchanged, including cross-attention and other parts of fused tensors;
    parameters keep their identity, type and device. The queries are kept, and the keys are computed
    from the queries. Therefore models from one seed differ only in their keys, unless a ratio
    scales their queries, too. If queries and keys have biases, the bias of keys is computed in the
    same way.

    Parameters
    ----------
    model
        An `nn.Module` of `transformers`, of a known family, or a `Model` opened from a module.
    kind
        ``random``: the model is only measured. ``symmetric``: W_k = W_q (paper, S2.1).
        ``indefinite``: W_q with half of the signs flipped. ``skew``: W_q rotated by 90°, for
        symmetry −1. Or a record, such as an entry of `wqk_lab.training.initializations.STARTS`,
        which may draw new weights: the starts of the paper's code, and its controls.
    seed
        Seed of newly drawn weights, without PyTorch's generators. None for the last seed of
        PyTorch.
    head_norm_ratio
        Factor of the mean norm of every layer's heads, by equal scaling of queries and keys; 1
        keeps the spread of the logits of independent tokens.
    norm_ratio
        Factor of the norm of each layer's form, the sum of its heads. Heads of symmetric starts add
        up, while heads of random starts cancel. Therefore 1 makes the heads of symmetric starts
        smaller.
    value_ratio
        Factor of the values, applied after the kind of start.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Returns
    -------
    Initialization
        Each layer's symmetry, trace, norm, own-token score and norm of values, before and after.

    Raises
    ------
    FormError
        The kind is unknown, a ratio is not a positive number, or ratios of both norms are set.
    UnknownFamily
        No family describes the model; weights are not written based on a guess.
    CheckpointError
        The model's weights are not loaded, or cannot be set by this kind. Nothing was written.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> _ = torch.manual_seed(0)
    >>> model = transformers.GPT2Model(transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4))
    >>> report = wqk.initialize_(model, "symmetric")
    >>> round(report.layers[0].after.symmetry, 6)
    1.0
    """
    chosen = kind if isinstance(kind, StartKind) else KINDS.get(str(kind))
    if chosen is None:
        raise FormError(
            f"an initialization must be one of {', '.join(KINDS)}, got {kind!r}; the paper's other "
            "starts are records: wqk_lab.training.initializations.STARTS['published']"
        )
    ratios = Ratios(head_norm_ratio, norm_ratio, value_ratio)
    for name, ratio in ratios._asdict().items():
        if ratio is not None and not 0 < ratio < float("inf"):
            raise FormError(f"{name} must be a positive number, got {ratio!r}")
    if head_norm_ratio is not None and norm_ratio is not None:
        raise FormError("head_norm_ratio and norm_ratio scale the same weights; give only one")
    with required_by("an initialization"):
        import torch

    writes = chosen != KINDS["random"] or ratios != Ratios()
    parameters = LiveCheckpoint(network_of(model, "initialized"), Read.GRADIENT)
    opened = opened_live(model, family, heads_per_layer)
    opened.require_softmax()
    checkpoint = opened.checkpoint
    plans = [plan for plan in opened.plans if plan.kind == "self"]
    if writes:
        known_plans(opened, "no weights are written based on a guess")
    sets_values = chosen.draw is not None or value_ratio is not None
    if sets_values and any(plan.rule.guess for plan in plans):
        raise CheckpointError(
            f"{opened.name}: this would set the values too, whose tensor is a guess that verify "
            "does not compare; choose a kind that sets the keys alone, such as 'symmetric', or "
            "describe the model in a family file, wqk.open(model, family=FILE)"
        )
    _require_settable(plans, checkpoint.name, parameters.adapted, writes)
    # NumPy's generator, since PyTorch's with the model's own seed would repeat its embedding.
    rng = np.random.default_rng(torch.initial_seed() if seed is None else seed)
    # All are planned before the first is written: a model is set as a whole or not at all.
    layers = [_planned(checkpoint, plan, chosen, rng, ratios) for plan in plans]
    if writes:
        tensors = _writable(parameters, [layer.copies for layer in layers])
        with torch.no_grad():
            for layer in layers:
                _write(tensors, layer)
    changes = [
        LayerChange(
            stack=layer.plan.stack,
            layer=layer.plan.layer,
            before=layer.before,
            after=_measured(checkpoint, layer.plan),
        )
        for layer in layers
    ]
    return Initialization(chosen.name, tuple(changes), tuple(opened.without_softmax))


def _write(tensors: Mapping[str, Any], layer: PlannedLayer) -> None:
    """Write the new weights and biases of a layer into the model's tensors, by name."""
    new = open_checkpoint(layer.copies)
    for side in (layer.plan.query, layer.plan.key, layer.plan.value):
        if side is None or not _is_single(side):
            continue
        weight = _weight(new, side)
        bias = None if side.bias is None else _bias(new, side)
        _put(tensors, side, weight, bias)


def _parts_of(plan: AttentionPlan) -> list[Part]:
    """Return the parts of a block's queries, keys and values."""
    return [*plan.parts, *(plan.value.parts if plan.value else ())]


def _require_settable(
    plans: Sequence[AttentionPlan], name: str, adapted: Collection[str], writes: bool
) -> None:
    """Raise `CheckpointError` without blocks, or if weights of a block cannot be written."""
    if not plans:
        raise CheckpointError(f"{name}: has no self-attention to initialize")
    if not writes:
        return
    for plan in plans:
        for part in _parts_of(plan):
            if part.name in adapted:
                raise CheckpointError(
                    f"{name}: {part.name} has an adapter, whose product would be added to what is "
                    "written; initialize the model before it is adapted"
                )
        if not (_is_single(plan.query) and _is_single(plan.key)):
            raise CheckpointError(
                f"{name}: keys and values share a latent, so the keys cannot be set without the "
                "values"
            )


def _writable(parameters: LiveCheckpoint, planned: Sequence[Copies]) -> dict[str, Any]:
    """Return the parameters to write; `CheckpointError` if a parameter would get two values."""
    names_and_values: dict[Any, tuple[str, np.ndarray]] = {}  # by memory
    for name, values in chain.from_iterable(copies.items() for copies in planned):
        memory = parameters.memory(name)
        first_name, first_values = names_and_values.setdefault(memory, (name, values))
        if first_name != name and not np.array_equal(first_values, values, equal_nan=True):
            raise CheckpointError(
                f"{parameters.name}: {first_name} and {name} are one weight, which this start "
                "would set in two ways; give each its own first"
            )
    names = chain.from_iterable(planned)
    return {name: parameters.writable(name) for name in names}


def _planned(
    checkpoint: Checkpoint,
    plan: AttentionPlan,
    kind: StartKind,
    rng: np.random.Generator,
    ratios: Ratios,
) -> PlannedLayer:
    """Return a layer's current scores, and copies of its tensors with its new weights."""
    query, key, value = plan.query, plan.key, plan.value
    names = dict.fromkeys(part.name for part in _parts_of(plan))
    copies = {name: checkpoint.read([Part(name)])[0] for name in names}
    trial = open_checkpoint(copies)  # reads the copies, with all changes
    before = _measured(trial, plan)
    if kind.draw:
        _draw(copies, checkpoint.name, plan, kind.draw, rng)
    if kind.turn:
        _turn_queries_into_keys(copies, plan, kind.turn, with_biases=kind.biases)
    if ratios.value_ratio is not None:
        if value is None or not _is_single(value):
            raise _values_apart(checkpoint.name, plan, "scaled")
        _put(copies, value, _weight(trial, value) * np.float32(ratios.value_ratio))
    after = _measured(trial, plan)
    if kind.turn and not abs(after.symmetry - kind.turn.symmetry) < TOLERANCE:
        raise CheckpointError(
            f"{checkpoint.name}: layer {plan.layer} of the {plan.stack} would have symmetry "
            f"{after.symmetry:.3f} instead of {kind.turn.symmetry:.0f}: its queries are zero, or "
            "the gains of its query and key norms differ; change these first"
        )
    factor = ratios.factor(before, after)
    if factor is not None:
        for side in (query, key):
            bias = None if side.bias is None else _bias(trial, side) * factor
            _put(copies, side, _weight(trial, side) * factor, bias)
    return PlannedLayer(plan, before, copies)


def _draw(
    copies: Copies,
    name: str,
    plan: AttentionPlan,
    draw: Callable[[Shapes, np.random.Generator], Weights],
    rng: np.random.Generator,
) -> None:
    """Draw new weights of a layer, into copies of its tensors."""
    trial = open_checkpoint(copies)
    sides = {"query": plan.query, "key": plan.key, "value": plan.value}
    single_sides = {role: side for role, side in sides.items() if side and _is_single(side)}
    shapes = {role: _weight(trial, side).shape for role, side in single_sides.items()}
    try:
        weights = draw(shapes, rng)
    except KeyError:
        raise _values_apart(name, plan, "drawn") from None
    for role, weight in weights.items():
        _put(copies, single_sides[role], weight)


def _turn_queries_into_keys(
    copies: Copies, plan: AttentionPlan, turn: Turn, *, with_biases: bool
) -> None:
    """Compute the keys of a layer from its queries, in copies of its tensors."""
    trial = open_checkpoint(copies)
    query, key, order = plan.query, plan.key, planes(plan)

    def keys_of(queries: Float[Array, "heads width d"]) -> Shared:
        if query.norm and query.norm.kind == "layer":
            queries = queries - queries.mean(axis=1, keepdims=True)  # as the norm will
        return turn.keys(shared_queries(queries, key.heads), order)

    bias = None
    if with_biases and query.bias is not None and key.bias is not None:
        bias = keys_of(_bias(trial, query))
    _put(copies, key, keys_of(_weight(trial, query)), bias)


def _values_apart(name: str, plan: AttentionPlan, change: str) -> CheckpointError:
    """Return the error about values that are no single projection; ``change`` is a participle."""
    return CheckpointError(
        f"{name}: the values of layer {plan.layer} are not a single projection and cannot be "
        f"{change}"
    )


def _is_single(side: Side) -> bool:
    """Return whether a side is one projection instead of a product with a latent between."""
    return isinstance(side.projection, Projection)


def _weight(checkpoint: Checkpoint, side: Side) -> np.ndarray:
    """Return a side's weight (heads, R, D)."""
    assert isinstance(side.projection, Projection)
    weight: np.ndarray = side.projection.take(checkpoint.read([side.projection.part])[0])
    return weight


def _bias(checkpoint: Checkpoint, side: Side) -> np.ndarray:
    """Return a side's bias (heads, R, 1)."""
    assert side.bias is not None
    bias: np.ndarray = checkpoint.read([side.bias])[0].reshape(side.heads, side.head_width, 1)
    return bias


def _put(
    tensors: Mapping[str, Any], side: Side, weight: np.ndarray, bias: np.ndarray | None = None
) -> None:
    """Write a side's weight (heads, R, D) and bias (heads, R, 1) into whole tensors, by name.

    The tensors are NumPy arrays or PyTorch tensors.
    """

    def as_in(tensor: Any, values: np.ndarray) -> Any:
        if isinstance(tensor, np.ndarray):
            return values
        import torch

        return torch.from_numpy(np.ascontiguousarray(values)).to(tensor)

    assert isinstance(side.projection, Projection)
    tensor = tensors[side.tensor]
    side.projection.put(tensor, as_in(tensor, weight))
    if side.bias is not None and bias is not None:
        tensor = tensors[side.bias.name]
        put_outputs(tensor, side.bias.rows, as_in(tensor, bias.reshape(-1)))


def _measured(checkpoint: Checkpoint, plan: AttentionPlan) -> LayerScores:
    """Return the current scores of one layer."""
    block = Block(checkpoint, plan)
    form, value_norm = block.form, math.nan
    if plan.value and _is_single(plan.value):
        weight = _weight(checkpoint, plan.value)
        value_norm = float(np.linalg.norm(weight.astype(np.float64)))
    trace = float(form.trace)
    own_score = plan.score_scale * trace / plan.query.heads
    head_norm = float(np.mean(block.groups.norm))
    return LayerScores(
        symmetry=float(symmetry(form)),
        trace=trace,
        norm=float(form.norm),
        own_score=own_score,
        value_norm=value_norm,
        head_norm=head_norm,
    )
