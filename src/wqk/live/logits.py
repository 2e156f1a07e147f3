"""Attention logits as they occur while a model trains, measured without a second pass.

Fused attention kernels do not return logits. A meter takes the inputs of a block's query and key
projections while the block runs, forms queries and keys as `wqk.Block` does (biases, norms,
positions, groups, latents), and sums over their logits tile by tile, so that memory does not grow
with the square of the number of tokens.

A logit here is what the weights make: the scaled product of a query and a key, before a soft cap
and without additive position terms, of every pair that the masks let through. Entropy and the
largest weight are of the whole attention, with caps, sinks and position terms.

Axes: B sequences, H query heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wqk._console import Result, counted, json_value, number
from wqk._machine import whole_products
from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.checkpoints.modules import LiveCheckpoint, Read
from wqk.errors import CheckpointError, NonFiniteWeights, first_line, required_by
from wqk.families import AttentionPlan, Place
from wqk.live.listening import (
    AttentionCall,
    Listener,
    known_plans,
    mask_of,
    masks_all,
    network_of,
    own_inputs,
    positions_of,
    shown,
)
from wqk.live.recomputation import alibi, allowed, beyond
from wqk.live.running import run_batch
from wqk.model import open as open_model
from wqk.tables.sheet import Sheet

if TYPE_CHECKING:
    import polars as pl

LOG = logging.getLogger("wqk.live")

# Sequences of a batch that are measured, in full.
SEQUENCES = 4

# Logits that are held at once, over all heads.
TILE = 2**23

# Positions that do not enter the score besides queries and keys, or follow from what is at hand.
KNOWN_POSITIONS = ("", "alibi", "scaled alibi", "mask")

# The argument by which models pass learned position terms from block to block, and the families
# that add it to their scores as it is. Others compute the term within the block, or change it.
TERM = "position_bias"
SHOW_TERM = {"t5", "mpnet"}


class BlockLogits(NamedTuple):
    """The logits of one block, for each query head (H,); natural logarithms."""

    max_logit: Float[np.ndarray, " heads"]  #: The largest logit; NaN if one of them is.
    logit_std: Float[np.ndarray, " heads"]  #: Standard deviation of the logits.
    attention_entropy: Float[np.ndarray, " heads"]  #: Mean over tokens, in nats; NaN if unknown.
    attention_top_share: Float[np.ndarray, " heads"]  #: Mean of each row's largest weight.

    def of_layer(self) -> dict[str, float]:
        """The layer's own: the largest maximum, and means over heads."""
        means = {name: float(np.mean(getattr(self, name))) for name in self._fields[1:]}
        return {"max_logit": float(np.max(self.max_logit)), **means}

    def of_head(self, head: int) -> dict[str, float]:
        """One head's."""
        return {name: float(values[head]) for name, values in self._asdict().items()}


#: The columns that measured logits add to a score table.
COLUMNS = BlockLogits._fields


@dataclass(frozen=True, repr=False)
class Logits(Result, synonyms={"max": "largest", "max_logit": "largest"}):
    """What one training pass showed: every block's logits, and why some have none."""

    blocks: Mapping[Place, BlockLogits]  #: By stack, kind and layer.
    missing: Mapping[Place, str] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The largest logit, and where."""
        if not self.blocks:
            return "no logits were measured"
        place = max(self.blocks, key=lambda p: float(np.max(self.blocks[p].max_logit)))
        head = int(np.argmax(self.blocks[place].max_logit))
        where = f"{place[0]} {place[1]}, layer {place[2]}, head {head}"
        return f"largest logit {self.largest:.4g} ({where}); {counted(len(self.blocks), 'block')}"

    def _rows(self) -> Iterator[dict[str, Any]]:
        for (stack, kind, layer), block in self.blocks.items():
            place = {"stack": stack, "kind": kind, "layer": layer}
            yield {**place, "head": None, **block.of_layer()}
            for head in range(len(block.max_logit)):
                yield {**place, "head": head, **block.of_head(head)}

    @property
    def frame(self) -> pl.DataFrame:
        """One row for each head, and one for each layer with the head null."""
        import polars as pl

        places = {"stack": pl.String, "kind": pl.String, "layer": pl.Int64, "head": pl.Int64}
        types = places | dict.fromkeys(COLUMNS, pl.Float64)
        return pl.DataFrame(list(self._rows()), schema=types, orient="row")

    def to_dict(self) -> dict[str, Any]:
        """The rows, and why some blocks have none, as plain values."""
        missing = {str(place): why for place, why in self.missing.items()}
        rows = [json_value(row) for row in self._rows()]
        return {"sentence": self.sentence, "rows": rows, "missing": missing}

    def _shown(self, width: int) -> Iterator[Any]:
        yield self.sentence
        sheet = Sheet.of("attention", "layer", "head", *COLUMNS, text=["attention"])
        for row in self._rows():
            head = "all" if row["head"] is None else str(row["head"])
            numbers = (number(row[name], 4) for name in COLUMNS)
            sheet.add(f"{row['stack']} {row['kind']}", str(row["layer"]), head, *numbers)
        if self.blocks:
            yield sheet
        yield from (f"{place}: {why}" for place, why in self.missing.items())

    @property
    def largest(self) -> float:
        """The largest logit of all; NaN if one is not a number, or none was measured."""
        return float(np.max([np.max(b.max_logit) for b in self.blocks.values()] or [math.nan]))


class Tally:
    """Sums over a block's logits, for each head, in float64."""

    def __init__(self, heads: int, device: Any) -> None:
        import torch

        self._zero = partial(torch.zeros, heads, dtype=torch.float64, device=device)
        self._largest = self._zero() - math.inf
        self._pairs, self._sum, self._squares = self._zero(), self._zero(), self._zero()
        self._middle: Any = None  # (H, 1, 1), from which logits differ little where they all do
        self._rows, self._entropy, self._top = self._zero(), self._zero(), self._zero()

    def add(self, logits: Array, weights_log: Array | None, visible: Array, rows: Array) -> None:
        """Add a tile.

        Parameters
        ----------
        logits, weights_log
            (H, I, J): scaled products, and logarithms of the attention, if that is known.
        visible
            (1 or H, I, J): which pairs are let through.
        rows
            (I,): which queries are no padding.
        """
        import torch

        visible = visible & rows[:, None]
        wide, hidden = torch.float64, ~visible
        largest = logits.masked_fill(hidden, -math.inf).amax((-2, -1)).to(wide)
        self._largest = torch.maximum(self._largest, largest)
        self._pairs += visible.sum((-2, -1))
        if self._middle is None:
            pairs = visible.sum((-2, -1), keepdim=True).clip(min=1)
            total = logits.masked_fill(hidden, 0).sum((-2, -1), keepdim=True, dtype=wide)
            self._middle = (total / pairs).to(logits.dtype)
        logits = (logits - self._middle).masked_fill(hidden, 0)
        self._sum += logits.sum((-2, -1), dtype=wide)
        self._squares += logits.square().sum((-2, -1), dtype=wide)
        if weights_log is None:
            self._entropy += math.nan
            self._top += math.nan
        else:
            weights_log = weights_log.masked_fill(hidden, 0)
            weights = weights_log.exp().masked_fill(hidden, 0)
            self._entropy -= (weights * weights_log).sum((-2, -1), dtype=wide)
            self._top += weights.amax(-1).sum(-1, dtype=wide)
        self._rows += visible.any(-1).sum(-1)

    def result(self) -> BlockLogits:
        """The measures, on the host."""
        variance = (self._squares / self._pairs - (self._sum / self._pairs) ** 2).clip(min=0)
        measured = (
            self._largest,
            variance.sqrt(),
            self._entropy / self._rows,
            self._top / self._rows,
        )
        return BlockLogits(*(one.cpu().numpy() for one in measured))


def tally(
    into: Tally,
    attention: Block,
    x: Float[Array, "batch queries d"],
    y: Float[Array, "batch keys d"],
    mask: Array | None = None,
    sinks: Float[Array, " heads"] | None = None,
    term: Float[Array, "batch heads queries keys"] | None = None,
    positions: np.ndarray | None = None,
) -> None:
    """Add the logits of some inputs of a block's projections.

    Parameters
    ----------
    mask
        True where a key is visible, or what is added to the scores, with the axes (B, H, I, J),
        each of which may be 1; None for what the block's own rules hide.
    term
        What the model adds to the scores besides, of the same axes.
    positions
        Those of the tokens, (1 or B, N); by default 0, 1, 2, ...
    """
    import torch

    plan, heads = attention.plan, attention.head_count
    (count, size, _), others = x.shape, y.shape[1]
    at, to = (torch.arange(n, device=x.device) for n in (size, others))
    whole = plan.position in KNOWN_POSITIONS or term is not None
    # A guess cannot tell PyTorch's attention to another sequence from that to its own.
    alike = torch.equal(x, y) if plan.family == "inferred" else plan.kind != "cross"
    step = max(1, TILE // (heads * others))
    for b in range(count):
        place = None if positions is None else positions[b % len(positions)]
        queries, keys = attention.queries(x[b], place), attention.keys(y[b], place)
        own = None if mask is None else mask[b % len(mask)]
        is_token = torch.ones(size, dtype=torch.bool, device=x.device)
        if own is not None and size == others and alike:
            # A key that no query may see is padding, and so is the query at its place.
            is_token = shown(own).any(-2).any(0).expand(size)
        for start in range(0, size, step):
            rows = slice(start, min(size, start + step))
            distance = at[rows, None] - to
            visible = allowed(plan, distance)[None]
            logits = plan.scale * (queries[:, rows] @ keys.swapaxes(-1, -2))
            scores = plan.softcap * (logits / plan.softcap).tanh() if plan.softcap else logits
            if plan.position.endswith("alibi") and term is None:
                scores = scores + alibi(plan, heads, distance).to(logits)
            if own is not None:
                tile = own if own.shape[-2] == 1 else own[:, rows]
                visible = visible & shown(tile)
                # Where the plan tells what is added, a mask may hold that, too.
                if tile.dtype != torch.bool and plan.position in ("", "mask"):
                    scores = scores + tile
            if term is not None:
                added = term[b % len(term)]
                scores = scores + (added if added.shape[-2] == 1 else added[:, rows]).to(logits)
            weights_log = _normalized(scores.masked_fill(~visible, -math.inf), sinks)
            into.add(logits, weights_log if whole else None, visible, is_token[rows])


def _normalized(scores: Array, sinks: Array | None) -> Array:
    """Logarithms of the softmax (H, I, J); sinks (H,) take a share of their own."""
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = total.logaddexp(sinks[:, None, None].to(total))
    return scores - total


def logits(model: Any, batch: Any = None, *, sequences: int | None = None) -> Logits:
    """The attention logits of one pass: for each head the largest, their spread, the entropy.

    Parameters
    ----------
    model
        An `nn.Module` of a family that wqk knows, in the mode in which it is to run; or a `Model`
        opened from one.
    batch
        What it is called with: arguments by name, in order, or a single one.
    sequences
        How many sequences of the batch are measured, the first ones; None for all.

    Raises
    ------
    UnknownFamily
        No family describes the model's attention: scale and positions of a guess are not known.
    CheckpointError
        The model cannot be run on this batch.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> found = wqk.logits(transformers.GPT2Model(config), torch.arange(12)[None])
    >>> found.frame.shape, found.blocks["decoder", "self", 1].max_logit.shape
    ((10, 8), (4,))
    """
    if batch is None:
        raise CheckpointError(
            "the batch is missing, whose logits they are: wqk.logits(model, batch), with what the "
            "model is called with"
        )
    with required_by("measuring logits"):
        import torch
    network = network_of(model, "run")
    meter = LogitMeter(model, sequences or sys.maxsize, training=False)
    meter.start()
    try:
        with torch.no_grad():
            run_batch(network, batch)
        found = meter.logits
        silent = {plan.place for plan in meter.plans} - found.blocks.keys() - found.missing.keys()
        return Logits(found.blocks, {**found.missing, **dict.fromkeys(silent, "it did not run")})
    finally:
        meter.stop()


class LogitMeter:
    """Measures the logits of a model's next training pass, when asked to.

    `start` puts hooks on the modules that project queries and keys; each is removed once its block
    has been measured, so that a pass without measurement costs nothing. Passes of modules in
    evaluation mode, and those that activation checkpointing repeats, do not count. Code compiled
    by `torch.compile` runs uncompiled while hooks are there.

    Parameters
    ----------
    model
        The `nn.Module` that is trained, plain or wrapped, or a `Model` opened from one.
    sequences
        How many sequences of a batch are measured, each in full: the first ones.
    training
        Whether only passes in training mode count.

    Raises
    ------
    UnknownFamily
        No family describes the model's attention: scale and positions of a guess are not known.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config).train()
    >>> meter = LogitMeter(model)
    >>> meter.start()
    >>> _ = model(torch.arange(12)[None])
    >>> meter.logits.blocks["decoder", "self", 1].max_logit.shape
    (4,)
    """

    def __init__(self, model: Any, sequences: int = SEQUENCES, training: bool = True) -> None:
        if sequences < 1:
            raise CheckpointError(f"sequences must be 1 or more, got {sequences}")
        opened = open_model(model)
        opened.require_softmax()
        self.plans = known_plans(opened, "logits need the model's scale and positions")
        self.left = opened.without_softmax
        self._sequences, self._training = sequences, training
        self._model = weakref.ref(opened.ref)  # so that a meter keeps no model alive
        self._listener: Listener | None = None
        self._weights: LiveCheckpoint | None = None
        self._began = self._eager = False
        self._sharing: dict[Place, int] = {}
        self._tallies: dict[Place, Tally] = {}
        self._passes: dict[Place, int] = {}
        self._missing: dict[Place, str] = {}

    @property
    def is_measuring(self) -> bool:
        """Whether some block has yet to run."""
        return self._listener is not None and self._listener.is_listening

    @property
    def has_measured(self) -> bool:
        """Whether a pass has run, at least in part, since the last `start`."""
        return bool(self._passes) or (self._began and not self.is_measuring)

    @property
    def logits(self) -> Logits:
        """What was measured since the last `start`."""
        measured = {place: tally.result() for place, tally in self._tallies.items()}
        return Logits(measured, dict(self._missing))

    def start(self) -> None:
        """Measure the next training pass, and forget the previous one."""
        self.stop()
        self._tallies, self._passes, self._missing = {}, {}, {}
        model = self._model()
        if model is None:
            return
        self._missing = {plan.place: why for plan in self.plans if (why := _not_computed(plan))}
        plans = [plan for plan in self.plans if plan.place not in self._missing]
        held = weakref.ref(self)  # a listener does not keep its meter alive

        def heard(call: AttentionCall) -> None:
            if (meter := held()) is not None and (call.module.training or not meter._training):
                meter._heard(call)

        self._weights = LiveCheckpoint(model, Read.DEVICE, keep=False)
        self._listener = Listener(model, plans, heard)
        self._sharing = self._listener.sharing()
        self._began = True
        if plans:
            self._eager = _run_uncompiled(True)

    def stop(self) -> None:
        """Listen to no block any longer."""
        if self._listener is not None:
            self._listener.stop()
        self._listener = self._weights = None
        if self._eager:
            self._eager = _run_uncompiled(False)

    def __del__(self) -> None:
        try:
            self.stop()
        except (AttributeError, ImportError, TypeError):  # at the process's end, or never begun
            return

    def _heard(self, call: AttentionCall) -> None:
        """Measure an application of a block, and stop listening after its last."""
        assert self._listener is not None
        place = call.plan.place
        try:
            self._measure(call)
        except NonFiniteWeights:
            self._missing[place] = "weights are NaN or infinite"
        except Exception as error:  # a measurement must not stop a run of weeks
            self._missing[place] = f"{type(error).__name__}: {first_line(error)}"
        self._passes[place] = self._passes.get(place, 0) + 1
        # A module that stands for several layers runs once for each of them. Where it is one pass
        # that is asked for, all that runs in it counts.
        wanted = call.plan.applications * self._sharing[place]
        if (self._training and self._passes[place] >= wanted) or place in self._missing:
            self._listener.forget(place)
            if not self._listener.is_listening:
                self.stop()

    def _measure(self, call: AttentionCall) -> None:
        """Add one application of a block."""
        import torch

        plan = call.plan
        assert self._weights is not None
        inputs = {side: given.detach() for side, given in own_inputs(call).items()}
        if "query" not in inputs or "key" not in inputs:
            raise CheckpointError("the block ran without its own projections")
        # Rows and columns of a picture are one sequence, or else several.
        joined = (1, 2) if plan.rule.position == "relative" else (0, 1)
        x, y = (v.flatten(*joined) if v.ndim == 4 else v for v in (inputs["query"], inputs["key"]))
        if y.ndim == 3 and len(y) % len(x) == 0:
            y = y.reshape(len(x), -1, y.shape[-1])  # several pictures of one text
        if x.ndim != 3 or y.ndim != 3 or len(x) != len(y):
            raise CheckpointError(
                f"inputs must be sequences (B, N, D), got {tuple(x.shape)} and {tuple(y.shape)}"
            )
        for given in call.arguments.values():  # a cache, which holds what this pass has added
            earlier = hasattr(given, "get_seq_length") and plan.kind == "self"
            if earlier and given.get_seq_length(getattr(call.module, "layer_idx", 0)) > y.shape[1]:
                raise CheckpointError("keys of earlier passes, in a cache, are not measured")
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False), whole_products():
            attention = Block(self._weights, plan)
            sinks = self._weights.read([plan.sinks])[0] if plan.sinks else None
            mask, positions = mask_of(call, x, y), positions_of(call, x, y)
            counted_alone = positions is None or plan.grows_from is not None
            length = y.shape[1] if counted_alone else 1 + positions.max()
            if why := beyond(plan, length):
                raise CheckpointError(why)
            if (mask is None or 1 < mask.shape[-2] == x.shape[1]) and masks_all(call):
                attention = Block(self._weights, replace(plan, causal=False, window=None))
            x, y = (side[: self._sequences].to(attention.query.weight.dtype) for side in (x, y))
            own = self._tallies.setdefault(plan.place, Tally(attention.head_count, x.device))
            tally(own, attention, x, y, mask, sinks, _position_term(call), positions)


def _not_computed(plan: AttentionPlan) -> str:
    """Why a block's logits, or the pairs that it lets through, are not known; empty if they are."""
    if plan.position.startswith("rotary") or plan.axial is not None:
        return f"its positions ({plan.position or 'rotary, on two axes'}) are not computed"
    if plan.family == "xlnet":
        return "its tokens come before its texts, and with those of earlier passes"
    is_known = plan.rule.whole_score or (plan.position and not plan.rule.partial)
    return "" if is_known else plan.rule.partial or plan.rule.note


def _run_uncompiled(wanted: bool) -> bool:
    """Let compiled code run as written, with its hooks, or compiled again; whether it does."""
    if "torch._dynamo" not in sys.modules:
        return False
    import torch

    torch.compiler.set_stance("force_eager" if wanted else "default")
    return wanted


def _position_term(call: AttentionCall) -> Any:
    """What a block adds to its scores for positions, (1 or B, H, 1 or I, J), where it shows that.

    T5 and its kin get it from the block before, and hand it on; MPNet's blocks all get the same, as
    do Bloom's and Falcon's, whose linear biases count the tokens that a mask shows.
    """
    plan, output = call.plan, call.output
    biases: Any = call.arguments.get("alibi") if plan.position.endswith("alibi") else None
    if biases is not None:
        scale = plan.scale if plan.position == "scaled alibi" else 1.0
        return scale * biases.detach().unflatten(0, (-1, plan.query.heads))
    takes_term = TERM in inspect.signature(call.module.forward).parameters
    if plan.position != "relative" or plan.family not in SHOW_TERM or not takes_term:
        return None
    both: Any = call.arguments.get(TERM), *(output[1:2] if isinstance(output, tuple) else ())
    terms = [t for t in both if getattr(t, "ndim", 0) == 4 and t.shape[1] == plan.query.heads]
    return terms[0].detach() if terms else None
