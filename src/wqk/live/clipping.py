"""QK-clip: rescale the weights of heads with attention logits above a limit.

After MuonClip (Kimi K2, 2025): if the largest logit S of a head exceeds the limit τ, the queries
and the keys of the head are multiplied by √(τ/S) each. The form W_qk and the logits then change by
exactly τ/S.

==================  ============================================================================
attention           what is multiplied
==================  ============================================================================
one key per query   weights and biases of the head's queries and keys, by √ each
grouped heads       the shared key by the √ of its worst query head, each query by the rest; or
                    queries alone
latent (MLA)        parts without positions by √ each; the query's rotary part by τ/S, as all heads
                    share the key's
query/key norms     gains instead of weights, which the norms would undo; gains that all heads
                    share, by the worst head's factor
learned factors     their logarithm, by log τ/S (Swin v2)
shared keys         queries alone, where a key also serves another block or as a value
position terms      keys alone, where queries also make a term for positions, or convolutions
==================  ============================================================================

Axes: H query heads, G key heads, R head width, L layers.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from wqk._console import Result, counted
from wqk._files import append_lines
from wqk._typing import FilePath, Float
from wqk.checkpoints import Part
from wqk.checkpoints.modules import LiveCheckpoint
from wqk.errors import Advising, CheckpointError, FormError, RunError, called_as, required_by
from wqk.families import AttentionPlan, Composed, Norm, Place, Projection, Side
from wqk.families.plans import part_names
from wqk.families.sides import Temperature
from wqk.live.addresses import known_plans, network_of, opened_live, subject_of
from wqk.live.logits import LogitMeter, Logits
from wqk.live.scoring import is_distributed, is_first_process
from wqk.tables.run import drop_after
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    import torch

    from wqk.live.monitor import Monitor


class ClippedHead(NamedTuple):
    """A head with a W_qk that was multiplied by a factor."""

    stack: str
    kind: str
    layer: int
    head: int
    max_logit: float  #: Before; −∞ if it is not known.
    factor: float  #: Of W_qk, and so of the head's logits.


@dataclass(frozen=True, repr=False)
class Clipping(Result):
    """Result of `clip_`; printing shows a line for each head."""

    limit: float | None  #: None if nothing was to be clipped.
    heads: tuple[ClippedHead, ...] = ()
    notes: tuple[str, ...] = ()  #: Blocks that could not be clipped or measured, with reasons.
    #: Logits measured in this process by a `Clipper`, if any.
    logits: Logits | None = None
    #: Logits that may exceed the limit although heads were clipped: negative logits, later layers.
    remarks: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.heads)

    @property
    def sentence(self) -> str:
        """Number of clipped heads."""
        if self.limit is None:
            return "logits were measured, no head was to be clipped"
        return f"{counted(len(self.heads), 'head')} clipped to logits of at most {self.limit:g}"

    def _rows(self) -> Sequence[Mapping[str, Any]]:
        return [head._asdict() for head in self.heads]

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        if self.heads:
            columns = ("attention", "layer", "head", "largest logit", "factor")
            table = Sheet.of(*columns, text=["attention"])
            for head in self.heads:
                largest = f"{head.max_logit:.4g}" if math.isfinite(head.max_logit) else "–"
                place = f"{head.stack} {head.kind}", str(head.layer), str(head.head)
                table.add(*place, largest, f"{head.factor:.4f}")
            yield table
        yield from self.notes
        yield from self.remarks


class Reach(Enum):
    """Logits of a block that change with a factor on one side, queries or keys."""

    NONE = "no logits, or also logits of other blocks"
    LAYER = "the logits of all heads, by one factor"
    HEAD = "the logits of each head, by a factor of its own"


class Scaling(NamedTuple):
    """A change of some rows of a tensor: row · factor + added."""

    tensor: str
    rows: tuple[tuple[int, int], ...] | None  # ranges of outputs; None for all
    factors: Float[np.ndarray, " outputs"]
    transposed: bool = False  # whether outputs are the tensor's second axis
    added: Float[np.ndarray, " outputs"] | None = None


class BlockScaling(NamedTuple):
    """Changes that multiply the heads of a block."""

    scalings: list[Scaling]
    factors: Float[np.ndarray, " heads"]  # of W_qk, in effect
    note: str  # on heads with other factors than requested; empty if there are none


class SideFactors(NamedTuple):
    """Factors of a block's queries and keys, and of its W_qk."""

    query: Float[np.ndarray, " heads"]
    key: Float[np.ndarray, " key_heads"]
    form: Float[np.ndarray, " heads"]


@called_as("wqk.clip_(model, limit, wqk.logits(model, batch))")
def clip_(
    model: Any,
    limit: float = 100.0,
    logits: Logits | Monitor | Mapping[Any, float] | None = None,
    *,
    grouped: Literal["both", "queries"] = "both",
    family: FilePath | None = None,
    heads_per_layer: int | None = None,
) -> Clipping:
    """Rescale the queries and keys of heads with logits above a limit, in place.

    Call this function after the optimizer's step; the momentum of the optimizer does not change, as
    in MuonClip. The form W_qk of every listed head changes by exactly its factor, limit/maximum;
    the rest of the model does not change. In a distributed run all processes call this function,
    and measured maxima are maxima over all processes.

    The limit is for the largest logit of a head, not for negative logits of larger magnitude. On
    the measured batch, a clipped head then reaches the limit up to rounding. A clipped layer
    changes the inputs of later layers, whose heads may exceed the limit again: measure and clip
    once more, if they must not.

    Parameters
    ----------
    model
        The trained `nn.Module`, of a known family; plain, wrapped or sharded; or a `Model` opened
        from a module.
    limit
        The largest logit that is not clipped.
    logits
        The largest logit of each head: a result of `wqk.logits`; a `Monitor` with ``logits=True``
        (each measurement is used once); or a mapping {(layer, head): value} or {(stack, kind,
        layer, head): value}. For a training loop, use a `Clipper`, which measures every pass.
    grouped
        Method for query heads that share a key head: ``both`` multiplies the key by the √ of its
        smallest factor and each query by the remaining factor; ``queries`` does not change the key.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Returns
    -------
    Clipping
        The clipped heads, and notes on heads that could not be clipped.

    Raises
    ------
    FormError
        The limit is not a positive number, or the logits do not fit the model.
    UnknownFamily
        No family describes the model; weights are not written based on a guess.
    CheckpointError
        Queries or keys of the model have an adapter.

    Examples
    --------
    >>> import transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config)
    >>> before = wqk.open(model)[1, 2].norm
    >>> wqk.clip_(model, 100.0, logits={(1, 2): 400.0})
    1 head clipped to logits of at most 100
     attention     layer  head  largest logit  factor
     decoder self      1     2            400  0.2500
    >>> round(float(wqk.open(model)[1, 2].norm / before), 6)
    0.25
    """
    with required_by("clipping"):
        import torch  # noqa: F401

    limit = _checked_limit(limit)
    _require_grouping(grouped)
    if logits is None:
        raise FormError(
            "logits are missing: expected the largest logit of each head, got None; pass "
            "logits=wqk.logits(model, batch), or in a training loop make clipper = "
            "wqk.Clipper(model, limit) before it and call clipper() after each step"
        )
    weights = LiveCheckpoint(network_of(model, "clipped"))
    opened = opened_live(model, family, heads_per_layer)
    plans = known_plans(opened, "clipping needs the model's queries and keys")
    _require_own(weights, plans)
    if isinstance(logits, Logits) or hasattr(logits, "take_logits"):
        measured = logits if isinstance(logits, Logits) else logits.take_logits()
        own_maxima, notes = _maxima(measured, plans, weights)
        maxima = _over_processes(own_maxima, weights, plans)
    else:
        measured = None
        maxima, notes = _from_mapping(logits, plans), []
    notes += [f"{mixer}: left as they are" for mixer in opened.without_softmax]
    clipping = _clipped(weights, plans, maxima, limit, grouped, notes)
    return replace(clipping, remarks=tuple(_remarks(clipping, plans, measured)))


def _clipped(
    weights: LiveCheckpoint,
    plans: Sequence[AttentionPlan],
    maxima: Mapping[Place, np.ndarray],
    limit: float,
    grouped: str,
    notes: list[str],
) -> Clipping:
    """Multiply the heads with largest logits above the limit; on an error, no head changes."""
    import torch

    heads: list[ClippedHead] = []
    scalings: list[Scaling] = []
    uses = _uses(weights, plans)
    for tied in _tied(weights, plans):
        plan = tied[0]
        largest = np.max([maxima[tied_plan.place] for tied_plan in tied], axis=0)
        factors = np.minimum(1.0, limit / np.maximum(largest, limit))
        is_lost = ~np.isfinite(largest) & (largest != -math.inf)  # NaN or ∞; −∞ was not measured
        if is_lost.any():
            factors[is_lost] = 1.0
            notes.append(
                f"{subject_of(plan)}: {counted(int(is_lost.sum()), 'head')} without a finite "
                "maximum, left as they are"
            )
        if (factors == 1).all():
            continue
        change = _block_scaling(weights, plan, factors, grouped, uses)
        scalings += change.scalings
        if change.note:
            notes.append(f"{subject_of(plan)}: {change.note}")
        for tied_plan in tied:
            heads += [
                ClippedHead(*tied_plan.place, head, float(largest[head]), float(factor))
                for head, factor in enumerate(change.factors)
                if factor != 1
            ]
    tensors = {scaling.tensor: weights.writable(scaling.tensor) for scaling in scalings}
    with torch.no_grad():
        for scaling in scalings:
            _scale(tensors[scaling.tensor], scaling)
    return Clipping(limit, tuple(heads), tuple(notes))


def _remarks(
    clipping: Clipping, plans: Sequence[AttentionPlan], measured: Logits | None
) -> Iterator[str]:
    """Yield remarks on logits that may exceed the limit after a clipping."""
    assert clipping.limit is not None
    most_negative: tuple[float, ClippedHead] | None = None
    for head in clipping.heads:
        place = Place(head.stack, head.kind, head.layer)
        if measured is None or place not in measured.blocks:
            continue
        extreme = float(measured.blocks[place].extreme_logit[head.head]) * head.factor
        if extreme < -clipping.limit and (most_negative is None or extreme < most_negative[0]):
            most_negative = extreme, head
    if most_negative is not None:
        extreme, head = most_negative
        yield (
            "negative logits are not limited: the logit of largest magnitude is now about "
            f"{extreme:.4g} ({head.stack} {head.kind}, layer {head.layer}, head {head.head})"
        )
    clipped_layers = {head.layer for head in clipping.heads}
    if clipped_layers and min(clipped_layers) < max(plan.layer for plan in plans):
        yield (
            "on the same batch, heads of later layers may exceed the limit again, because their "
            "inputs have changed: wqk.logits(model, batch) measures them"
        )


class Clipper(Advising):
    """Clips a model after each optimizer step, by the logits of all passes since the last step.

    As in MuonClip, the maximum of a head is taken over all micro-batches, sequences and processes.
    All processes of a distributed run make a clipper and call it at the same steps; their maxima
    are exchanged in one packed operation. The optimizer's momentum does not change.

    Parameters
    ----------
    model
        The trained `nn.Module`, of a family that is known or proven by `wqk.verify`; plain, wrapped
        or sharded; or a `Model` opened from a module.
    limit
        The largest logit that is not clipped; None to measure without clipping.
    path
        A ``.jsonl`` file; a line is appended for each clipped head.
    every
        Number of calls from one clipping to the next. Only the passes before a clipping are
        measured. All other passes have no extra cost, and run compiled if the model is compiled.
    sequences
        Number of sequences to measure at the beginning of each batch; None for all.
    grouped
        As for `clip_`.
    family, heads_per_layer
        Options of opening the model, as for `wqk.open`.

    Raises
    ------
    FormError
        The limit is not a positive number.
    UnknownFamily
        No family describes the model, and no guess has been verified.
    CheckpointError
        Queries or keys of the model have an adapter.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config).train()
    >>> clipper = wqk.Clipper(model, 1e-6)
    >>> for micro_batch in torch.arange(24).reshape(2, 1, 12):
    ...     _ = model(micro_batch)
    >>> clipper()  # doctest: +ELLIPSIS
    8 heads clipped to logits of at most 1e-06
    ...
    """

    @called_as("wqk.Clipper(model, limit)")
    def __init__(
        self,
        model: Any,
        limit: float | None = 100.0,
        path: FilePath | None = None,
        every: int = 1,
        *,
        sequences: int | None = None,
        grouped: Literal["both", "queries"] = "both",
        family: FilePath | None = None,
        heads_per_layer: int | None = None,
    ) -> None:
        if not isinstance(every, int) or every < 1:
            raise RunError(f"clipping happens every N steps with N at least 1, got {every!r}")
        self.limit = None if limit is None else _checked_limit(limit)
        _require_grouping(grouped)
        opened = opened_live(model, family, heads_per_layer)
        self._plans = known_plans(opened, "clipping needs the model's queries and keys")
        self._network = weakref.ref(network_of(model, "clipped"))
        weights = LiveCheckpoint(self._network())
        _require_own(weights, self._plans)
        if self.limit is not None:
            weights.require_stored(part_names(self._plans))
        self._without_softmax = opened.without_softmax
        self._path = None if path is None else Path(path)
        self._every, self._grouped, self._calls = every, grouped, 0
        self._meter = LogitMeter(opened, sequences, passes=None)
        self._prepare()

    def __repr__(self) -> str:
        limit = "no limit" if self.limit is None else f"limit {self.limit:g}"
        blocks = counted(len(self._plans), "block")
        every = "every step" if self._every == 1 else f"every {self._every} steps"
        return f"Clipper({blocks}, {limit}, {every}, step {self._calls})"

    def begin(self, step: int) -> None:
        """Start after this many steps; lines of later steps are removed from the file."""
        if self._path is not None and is_first_process():
            drop_after(self._path, step)
        self._calls = step
        self._meter.stop()
        self._prepare()

    def __call__(self, step: int | None = None) -> Clipping:
        """Clip by the logits measured since the last call, and measure the following passes.

        Parameters
        ----------
        step
            Number of finished optimizer steps, for the file; counted if omitted.
        """
        self._calls = self._calls + 1 if step is None else step
        network = self._network()
        clipping = Clipping(self.limit)
        if self._calls % self._every == 0 and network is not None:
            clipping = self._clip(LiveCheckpoint(network))
            self._record(clipping)
        self._prepare()
        return clipping

    def close(self) -> None:
        """Stop measuring, after a run."""
        self._meter.stop()

    def _clip(self, weights: LiveCheckpoint) -> Clipping:
        """Clip by the measured maxima of all processes, and return the clipping."""
        measured = self._meter.logits
        own_maxima, notes = _maxima(measured, self._plans, weights)
        # In a distributed run, other processes may have measured other passes.
        is_known = self._meter.has_measured or not is_distributed()
        if is_known and not measured.blocks:
            notes.append("no pass in training mode was measured")
        maxima = _over_processes(own_maxima, weights, self._plans)
        notes += [f"{mixer}: left as they are" for mixer in self._without_softmax]
        if self.limit is None:
            return Clipping(None, notes=tuple(notes), logits=measured)
        clipping = _clipped(weights, self._plans, maxima, self.limit, self._grouped, notes)
        remarks = tuple(_remarks(clipping, self._plans, measured))
        return replace(clipping, logits=measured, remarks=remarks)

    def _record(self, clipping: Clipping) -> None:
        """Append a line for each clipped head."""
        if self._path is not None and clipping.heads and is_first_process():
            rows = ({"step": self._calls, **head._asdict()} for head in clipping.heads)
            append_lines(self._path, *rows)

    def _prepare(self) -> None:
        """Measure the following passes if clipping follows their step."""
        if (self._calls + 1) % self._every == 0:
            self._meter.start()
        else:
            self._meter.stop()
            self._meter.reset()


def _checked_limit(limit: Any) -> float:
    """Return the limit as a number; `FormError` if it is not positive and finite."""
    value = _as_number(limit)
    if value is None or not 0 < value < math.inf:
        advice = ""
        if value is None:
            advice = "; expected wqk.clip_(model, limit, wqk.logits(model, batch))"
        raise FormError(f"limit must be a positive number, got {_shortened(limit)}{advice}")
    return value


def _require_grouping(grouped: Any) -> None:
    """Raise `FormError` for an unknown method for heads that share a key."""
    if grouped not in ("both", "queries"):
        raise FormError(f"grouped must be 'both' or 'queries', got {grouped!r}")


def _as_number(value: Any) -> float | None:
    """Return a number as a float; None for other values, and for numbers too large for a float."""
    if isinstance(value, str | bytes | bool):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):
        return None


def _shortened(value: Any) -> str:
    """Return a short form of a value for an error."""
    try:
        shown = repr(value)
    except ValueError:  # an integer of too many digits
        return "an integer of more digits than Python prints"
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _block_scaling(
    weights: LiveCheckpoint,
    plan: AttentionPlan,
    requested: Float[np.ndarray, " heads"],
    grouped: str,
    uses: Counter[Any],
) -> BlockScaling:
    """Return the changes that multiply the W_qk of a block's heads by the requested factors.

    If heads share weights or gains, all these heads get the smallest factor.
    """
    query_reach, key_reach = _reach(weights, plan.query, uses), _reach(weights, plan.key, uses)
    if plan.position_uses == ("query",):
        query_reach = Reach.NONE
    factors = _side_factors(plan, requested, query_reach, key_reach, grouped)
    if factors is None:
        note = (
            "no effect here: neither queries nor keys have weights or gains of their own that "
            "scale their logits"
        )
        return BlockScaling([], np.ones_like(requested), note)
    notes = []
    lowered = int((factors.form < requested).sum())
    if lowered:
        shared = "a key" if key_reach is Reach.HEAD else "the gains of their norms"
        notes.append(
            f"heads share {shared}, so the factor of the worst is also that of "
            f"{counted(lowered, 'head')} that needed less or none"
        )
    if plan.clip:
        notes.append(
            f"entries of queries and keys end at ±{plan.clip:g}; where they do, logits fall less"
        )
    if "key" in plan.position_uses:
        notes.append("position terms are made with queries and keys, and change with them")
    scalings = _side_scalings(weights, plan.query, factors.query)
    scalings += _side_scalings(weights, plan.key, factors.key)
    if plan.positional is not None:
        scalings += _side_scalings(weights, plan.positional.query, factors.form)
    return BlockScaling(scalings, factors.form, "; ".join(notes))


def _side_factors(
    plan: AttentionPlan,
    requested: Float[np.ndarray, " heads"],
    query_reach: Reach,
    key_reach: Reach,
    grouped: str,
) -> SideFactors | None:
    """Split requested factors of W_qk between queries and keys; None if neither can be scaled."""
    sharing = plan.query.heads // plan.key.heads
    smallest_by_key = requested.reshape(-1, sharing).min(1)
    one_by_query, one_by_key = np.ones_like(requested), np.ones(plan.key.heads)
    if query_reach is Reach.HEAD:
        # If single entries are limited, a key's factor would also affect other queries.
        scales_shared_keys = grouped == "both" and not plan.clip
        of_key = one_by_key
        if key_reach is Reach.HEAD and (sharing == 1 or scales_shared_keys):
            of_key = np.sqrt(smallest_by_key)
        return SideFactors(query=requested / of_key.repeat(sharing), key=of_key, form=requested)
    if key_reach is Reach.HEAD:
        return SideFactors(
            query=one_by_query, key=smallest_by_key, form=smallest_by_key.repeat(sharing)
        )
    if query_reach is Reach.NONE and key_reach is Reach.NONE:
        return None
    of_layer = np.full_like(requested, requested.min())
    of_side = of_layer if Reach.NONE in (query_reach, key_reach) else np.sqrt(of_layer)
    return SideFactors(
        query=of_side if query_reach is Reach.LAYER else one_by_query,
        key=of_side[::sharing] if key_reach is Reach.LAYER else one_by_key,
        form=of_layer,
    )


def _reach(weights: LiveCheckpoint, side: Side, uses: Counter[Any]) -> Reach:
    """Return the logits that change with a factor on one side of a block."""
    if any(uses[use] > 1 for use in _uses_of(weights, side)):
        return Reach.NONE
    if (side.temperature and side.temperature.of_head) or side.norm is None:
        return Reach.HEAD
    gain_count = sum(_length(weights, part) for part in side.norm.gain)
    if gain_count > side.head_width:  # gains for each head
        return Reach.HEAD
    return Reach.LAYER if gain_count else Reach.NONE


def _side_scalings(
    weights: LiveCheckpoint, side: Side, factors: Float[np.ndarray, " heads"]
) -> list[Scaling]:
    """Return the scalings that multiply a side's heads by factors."""
    if (factors == 1).all():
        return []
    if side.temperature and side.temperature.of_head:
        return [_temperature_scaling(weights, side.temperature, factors)]
    if side.norm is not None:
        return _norm_scalings(weights, side.norm, factors.repeat(side.head_width))
    projection = _outer_projection(side)
    if projection.axes is not None:  # heads are an axis of weight and bias
        is_transposed = projection.axes[0] == 1
        scalings = [Scaling(projection.tensor, None, factors, is_transposed)]
        if side.bias is not None:
            scalings.append(Scaling(side.bias.name, None, factors))
        return scalings
    by_output = factors.repeat(side.head_width)
    scalings = [Scaling(projection.tensor, projection.outputs, by_output, projection.transposed)]
    if side.bias is not None:
        scalings.append(Scaling(side.bias.name, side.bias.rows, by_output))
    return scalings


def _temperature_scaling(
    weights: LiveCheckpoint, temperature: Temperature, factors: Float[np.ndarray, " heads"]
) -> Scaling:
    """Return the scaling of learned factors, which are stored as logarithms, up to a limit."""
    part = temperature.stored
    logarithm = weights.read([part])[0].reshape(-1).astype(np.float64)
    in_effect = np.minimum(logarithm, math.log(temperature.limit))
    added = in_effect - logarithm + np.log(factors)
    return Scaling(part.name, part.rows, np.ones_like(added), added=added)


def _norm_scalings(
    weights: LiveCheckpoint, norm: Norm, factors: Float[np.ndarray, " outputs"]
) -> list[Scaling]:
    """Return the scalings of a norm's gains and biases, which consist of consecutive parts."""
    scalings = []
    for parts, offset in ((norm.gain, norm.offset), (norm.bias, 0.0)):
        start = 0
        for part in parts:
            stop = start + _length(weights, part)
            of_part = factors[start:stop]
            # The gain is the stored number plus the offset: (g + o) f − o = g f + o (f − 1).
            added = offset * (of_part - 1) if offset else None
            scalings.append(Scaling(part.name, part.rows, of_part, added=added))
            start = stop
    return scalings


def _scale(tensor: torch.Tensor, scaling: Scaling) -> None:
    """Multiply a parameter's rows in place, and add to them."""
    import torch

    axis = 1 if scaling.transposed else 0
    shape = [1] * tensor.ndim
    shape[axis] = tensor.shape[axis]
    if scaling.rows is None and len(scaling.factors) == tensor.numel():  # gains (heads, R)
        shape = [*tensor.shape]
    size = math.prod(shape)
    row_ranges = scaling.rows or ((0, size),)
    rows = np.concatenate([np.arange(start, stop) for start, stop in row_ranges])

    def along_rows(values: np.ndarray, elsewhere: float) -> Any:
        """Return values of the rows, with one value for all other rows, ready to broadcast."""
        of_all_rows = np.full(size, elsewhere)
        of_all_rows[rows] = values
        return _placed_like(tensor, torch.from_numpy(of_all_rows.reshape(shape)))

    tensor.detach().mul_(along_rows(scaling.factors, 1.0))
    if scaling.added is not None:
        tensor.detach().add_(along_rows(scaling.added, 0.0))


def _placed_like(tensor: Any, factors: torch.Tensor) -> Any:
    """Return factors on the device and the mesh of a parameter, in at least float32."""
    import torch

    factors = factors.to(tensor.device, tensor.dtype if tensor.itemsize > 2 else torch.float32)
    if not hasattr(tensor, "full_tensor"):
        return factors
    from torch.distributed.tensor import DTensor, Replicate

    mesh = tensor.device_mesh
    return DTensor.from_local(factors, mesh, [Replicate()] * mesh.ndim)


def _tied(weights: LiveCheckpoint, plans: Sequence[AttentionPlan]) -> list[list[AttentionPlan]]:
    """Return groups of blocks; blocks with the same queries and keys form one group."""
    plans_by_uses: dict[Any, list[AttentionPlan]] = {}
    for plan in plans:
        uses = (*_uses_of(weights, plan.query), *_uses_of(weights, plan.key))
        plans_by_uses.setdefault(uses, []).append(plan)
    return list(plans_by_uses.values())


def _uses(weights: LiveCheckpoint, plans: Sequence[AttentionPlan]) -> Counter[Any]:
    """Count the queries, keys and values of different blocks that use the same rows."""
    counts: Counter[Any] = Counter()
    for first, *_ in _tied(weights, plans):
        for side in filter(None, (first.query, first.key, first.value)):
            counts.update(_uses_of(weights, side))
    return counts


def _uses_of(weights: LiveCheckpoint, side: Side) -> list[Any]:
    """Return the memory and the rows of a side's weight and of the gains of its norm."""
    projection = _outer_projection(side)
    uses: list[Any] = [(weights.memory(projection.tensor), projection.outputs)]
    for part in side.norm.gain if side.norm else ():
        uses.append((weights.memory(part.name), part.rows))
    return uses


def _outer_projection(side: Side) -> Projection:
    """Return the projection that outputs a side's vectors, after a latent, if any."""
    if isinstance(side.projection, Composed):
        return side.projection.outer
    return side.projection


def _length(weights: LiveCheckpoint, part: Part) -> int:
    """Return the number of entries of a part."""
    return math.prod(part.shape(weights.info(part.name).shape))


def _require_own(weights: LiveCheckpoint, plans: Sequence[AttentionPlan]) -> None:
    """Raise `CheckpointError` if a weight of a block has an adapter."""
    for plan in plans:
        for part in plan.parts:
            if part.name in weights.adapted:
                raise CheckpointError(
                    f"{weights.name}: {part.name} has an adapter, whose product clip_ would leave "
                    "as it is; clip a model before it is adapted, or once the adapter is merged"
                )


def _maxima(
    measured: Logits | None, plans: Sequence[AttentionPlan], weights: LiveCheckpoint
) -> tuple[dict[Place, np.ndarray], list[str]]:
    """Return the largest logits of all heads by block, −∞ if unmeasured, and notes on these."""
    maxima = {plan.place: np.full(plan.query.heads, -math.inf) for plan in plans}
    missing: dict[Any, str] = {}
    if measured is None:
        return maxima, []
    for place, block in measured.blocks.items():
        if isinstance(place, str):  # the module is no block of this model
            continue
        if len(maxima.get(Place(*place), ())) != len(block.max_logit):
            raise FormError(
                f"the logits of {place}, {counted(len(block.max_logit), 'head')}, are of "
                f"another model than {weights.name}; measure this one's"
            )
        if place in measured.scores:
            missing[place] = "its scores were observed, but not its logits"
            continue
        # The maximum of NaN and a number is not defined among processes; that of ∞ is.
        maxima[place] = np.nan_to_num(block.max_logit, nan=math.inf, neginf=-math.inf)
    silent = maxima.keys() - measured.blocks.keys()
    missing |= dict.fromkeys(sorted(silent), "it did not run")
    missing |= {place: why for place, why in measured.missing.items() if place in maxima}
    return maxima, [f"{place}: not measured: {why}" for place, why in missing.items()]


def _over_processes(
    maxima: dict[Place, np.ndarray], weights: LiveCheckpoint, plans: Sequence[AttentionPlan]
) -> dict[Place, np.ndarray]:
    """Return the largest logits of all processes, exchanged in one operation."""
    import torch
    from torch import distributed

    if not is_distributed():
        return maxima
    device = weights.current(plans[0].query.tensor).device
    joined = torch.from_numpy(np.concatenate([*maxima.values()])).to(device)
    distributed.all_reduce(joined, distributed.ReduceOp.MAX)
    ends = np.cumsum([len(values) for values in maxima.values()])
    maxima_by_block = np.split(joined.cpu().numpy(), ends[:-1])
    return dict(zip(maxima, maxima_by_block, strict=True))


def _from_mapping(logits: Any, plans: Sequence[AttentionPlan]) -> dict[Place, np.ndarray]:
    """Return the maxima of all heads of all blocks from a mapping; −∞ for missing heads."""
    if not isinstance(logits, Mapping):
        raise FormError(
            "logits must be wqk.logits(model, batch), or {(layer, head): value}; got "
            f"{type(logits).__name__}"
        )
    maxima = {plan.place: np.full(plan.query.heads, -math.inf) for plan in plans}
    for key, value in logits.items():
        place, head = _place_and_head(key, list(maxima))
        is_head = place in maxima and isinstance(head, int | np.integer)
        if not is_head or not 0 <= head < len(maxima[place]):
            raise FormError(
                f"logits: {_shortened(key)} is a layer and head which the model lacks; expected "
                "heads of the model, such as the logits that wqk.logits returns for it"
            )
        number = _as_number(value)
        if number is None:
            raise FormError(
                f"logits: the largest logit of {key!r} must be a number, got {_shortened(value)}"
            )
        maxima[place][head] = number
    return maxima


def _place_and_head(key: Any, places: Sequence[Place]) -> tuple[Place, Any]:
    """Return the block and the head of a key of a mapping.

    A pair (layer, head) refers to self-attention, if only one stack of the model has
    self-attention.
    """
    of_self = [place for place in places if place.kind == "self"]
    stacks = {place.stack for place in of_self}
    match key:
        case (stack, kind, layer, head):
            return Place(stack, kind, layer), head
        case (layer, head) if len(stacks) == 1:
            return of_self[0]._replace(layer=layer), head
    kinds = sorted({(place.stack, place.kind) for place in places})
    raise FormError(
        "logits must have keys (layer, head), or (stack, kind, layer, head) in "
        f"models with several of {kinds}; got {_shortened(key)}"
    )
