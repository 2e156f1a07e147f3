"""Attention logits as they occur while a model trains, measured without a second pass.

Fused attention kernels do not return logits. A meter takes the inputs of a block's query and key
projections while the block runs, forms queries and keys as `wqk.Attention` does (biases, norms,
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
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from wqk._typing import Array, Float
from wqk.attention import Block
from wqk.checkpoints import Checkpoint, Part, TensorInfo
from wqk.checkpoints.modules import ADAPTED, open_live, plain_name, with_adapter, without_adapter
from wqk.errors import CheckpointError, NonFiniteWeights, UnknownFamily, first_line
from wqk.families import AttentionPlan
from wqk.inspecting.verification.recomputation import HIDDEN, alibi_slopes, allowed
from wqk.inspecting.verification.recording import module_of, parent_of
from wqk.model import open as open_model


class LiveWeights(Checkpoint):
    """A model's weights as its passes use them: what is read are tensors on their own device.

    They are looked up at every reading, since FSDP and others replace parameters during a pass, and
    widened to at least float32; no gradients flow through them.
    """

    def __init__(self, model: Any) -> None:
        found = open_live(model)
        self.name, self.config = found.name, found.config
        self._tensors, self.adapted = found.tensors(), found.adapted
        self._owners: dict[str, tuple[Any, str]] = {}
        for prefix, module in model.named_modules(remove_duplicate=False):
            for name in (*module._parameters, *module._buffers):
                full = plain_name(f"{prefix}.{name}" if prefix else name)
                self._owners[without_adapter(full)] = (module, name)

    def tensors(self) -> Mapping[str, TensorInfo]:
        """Every tensor's type, shape and size by name."""
        return self._tensors

    def current(self, name: str) -> Any:
        """A parameter or buffer itself, by its plain name."""
        module, attribute = self._owners[name]
        return getattr(module, attribute)

    def read(self, parts: Sequence[Part]) -> list[Any]:
        """The wanted rows of each part, joined, on their own device."""
        return [self._read(part) for part in parts]

    def _read(self, part: Part) -> Any:
        import torch

        tensor = self.current(part.name).detach()
        if part.name in self.adapted:
            tensor = with_adapter(tensor, self.adapted[part.name], part.name)
        if hasattr(tensor, "full_tensor"):
            tensor = tensor.full_tensor()
        if part.rows is not None:
            ranges = part.row_ranges(tuple(tensor.shape))
            tensor = torch.cat([tensor[start:stop] for start, stop in ranges])
        return tensor if tensor.element_size() > 2 else tensor.float()


LOG = logging.getLogger("wqk.live")

# Sequences of a batch that are measured, in full.
SEQUENCES = 4

# Logits that are held at once, over all heads.
TILE = 2**23

# Names under which models pass masks to their attention.
MASKS = ("attention_mask", "mask", "attn_mask", "encoder_attention_mask", "key_padding_mask")

# Positions that do not enter the score besides queries and keys, or follow from what is at hand.
KNOWN_POSITIONS = ("", "alibi", "scaled alibi", "mask")

# The argument by which models pass learned position terms from block to block, and the families
# that add it to their scores as it is. Others compute the term within the block, or change it.
TERM = "position_bias"
SHOW_TERM = {"t5", "mpnet"}

# What identifies a block's rows in a score table.
Place = tuple[str, str, int]


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


@dataclass(frozen=True)
class Logits:
    """What one training pass showed: every block's logits, and why some have none."""

    blocks: Mapping[Place, BlockLogits]  #: By stack, kind and layer.
    missing: Mapping[Place, str] = field(default_factory=dict)

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
        logits = logits.masked_fill(hidden, 0)
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
        mean = self._sum / self._pairs
        variance = (self._squares / self._pairs - mean**2).clip(min=0)
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
) -> None:
    """Add the logits of some inputs of a block's projections.

    Parameters
    ----------
    mask
        True where a key is visible, or what is added to the scores, with the axes (B, H, I, J),
        each of which may be 1; None for what the block's own rules hide.
    term
        What the model adds to the scores besides, of the same axes.
    """
    import torch

    plan, heads = attention.plan, attention.head_count
    queries, keys = attention.queries(x), attention.keys(y)
    (count, _, size, _), others = queries.shape, keys.shape[-2]
    at, to = (torch.arange(n, device=x.device) for n in (size, others))
    whole = plan.position in KNOWN_POSITIONS or term is not None
    slopes = alibi_slopes(heads) if plan.position.endswith("alibi") else None
    step = max(1, TILE // (heads * others))
    for b in range(count):
        own = None if mask is None else mask[b % len(mask)]
        is_token = torch.ones(size, dtype=torch.bool, device=x.device)
        if own is not None and size == others:
            # A key that no query may see is padding, and so is the query at its place.
            is_token = _shown(own).any(-2).any(0).expand(size)
        for start in range(0, size, step):
            rows = slice(start, min(size, start + step))
            distance = at[rows, None] - to
            visible = allowed(plan, distance)[None]
            logits = plan.scale * (queries[b, :, rows] @ keys[b].swapaxes(-1, -2))
            scores = plan.softcap * (logits / plan.softcap).tanh() if plan.softcap else logits
            if slopes is not None:
                scale = plan.scale if plan.position == "scaled alibi" else 1.0
                biases = scale * torch.as_tensor(slopes).to(logits)
                scores = scores - biases[:, None, None] * distance.abs()
            if own is not None:
                tile = own if own.shape[-2] == 1 else own[:, rows]
                visible = visible & _shown(tile)
                if tile.dtype != torch.bool and plan.position == "mask":
                    scores = scores + tile
            if term is not None:
                scores = scores + term[b % len(term)][:, rows].to(logits)
            weights_log = _normalized(scores.masked_fill(~visible, -math.inf), sinks)
            into.add(logits, weights_log if whole else None, visible, is_token[rows])


def _shown(mask: Array) -> Array:
    """Where a mask lets pairs through."""
    return mask if str(mask.dtype) == "torch.bool" else mask > HIDDEN


def _normalized(scores: Array, sinks: Array | None) -> Array:
    """Logarithms of the softmax (H, I, J); sinks (H,) take a share of their own."""
    total = scores.logsumexp(-1, keepdim=True)
    if sinks is not None:
        total = total.logaddexp(sinks[:, None, None].to(total))
    return scores - total


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

    def __init__(
        self,
        model: Any,
        sequences: int = SEQUENCES,
    ) -> None:
        self._hooks: dict[Place, list[Any]] = {}
        self._eager = self._began = False
        if sequences < 1:
            raise CheckpointError(f"sequences must be 1 or more, got {sequences}")
        opened = open_model(model)
        checkpoint, model = LiveWeights(opened.ref), opened.ref
        self.plans = opened.plans
        guess = next((plan.rule.guess for plan in self.plans if plan.rule.guess), None)
        if guess:
            raise UnknownFamily(
                f"{checkpoint.name}: logits need the model's scale and positions, and its "
                f"family is unknown ({guess}); describe the model in a family file, and pass it "
                "wqk.open(model, family=FILE)"
            )
        self._sequences = sequences
        self._model = weakref.ref(model)  # so that a meter keeps no model alive
        self._weights: LiveWeights | None = None
        self._modules: dict[str, Any] = {}
        self._tallies: dict[Place, Tally] = {}
        self._passes: dict[Place, int] = {}
        self._missing: dict[Place, str] = {}

    @property
    def is_measuring(self) -> bool:
        """Whether some block has yet to run."""
        return bool(self._hooks)

    @property
    def has_measured(self) -> bool:
        """Whether a pass has run, at least in part, since the last `start`."""
        return bool(self._passes) or (self._began and not self._hooks)

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
        self._weights = LiveWeights(model)
        self._modules = {
            _plain_module(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        for plan in self.plans:
            place = place_of_rows(plan)
            reason = _why_not(plan)
            if reason:
                self._missing[place] = reason
                continue
            self._hooks[place] = self._attach(plan, place)
        self._began = True
        if self._hooks:
            self._eager = _run_uncompiled(True)

    def stop(self) -> None:
        """Remove the hooks that are left."""
        for place in list(self._hooks):
            self._remove(place)

    def __del__(self) -> None:
        try:
            self.stop()
        except (ImportError, TypeError):  # at the end of the process, modules may be gone
            return

    def _remove(self, place: Place) -> None:
        for hook in self._hooks.pop(place, ()):
            hook.remove()
        if not self._hooks:
            self._weights, self._modules = None, {}
            if self._eager:
                self._eager = _run_uncompiled(False)

    def _attach(self, plan: AttentionPlan, place: Place) -> list[Any]:
        given: dict[str, Any] = {}
        module = self._modules[module_of(plan.query.tensor)]
        if _is_pytorch_s(module):
            parent = module
            hooks = []
        else:

            def keep(side: str, projection: Any, args: Any) -> None:
                # Only the first input: relative positions may go through a projection later.
                if args and not _is_repeated():
                    given.setdefault(side, args[0].detach())

            sides = {"query": module, "key": self._modules[module_of(plan.key.tensor)]}
            parent = self._modules[parent_of(plan)]
            hooks = [m.register_forward_pre_hook(partial(keep, s)) for s, m in sides.items()]

        held = weakref.ref(self)  # hooks do not keep their meter alive

        def attended(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            meter = held()
            if meter is not None and module.training and not _is_repeated():
                inputs = dict(given)
                named = _arguments(module, args, kwargs)
                term = _position_term(plan, module, named, output)
                meter._heard(plan, place, module, inputs, named, term)
            given.clear()

        return [*hooks, parent.register_forward_hook(attended, with_kwargs=True)]

    def _heard(
        self, plan: AttentionPlan, place: Place, module: Any, inputs: Any, named: Any, term: Any
    ) -> None:
        """Measure an application of a block, and stop listening after its last."""
        try:
            inputs = inputs if "query" in inputs else _own_inputs(module, named)
            self._measure(plan, place, module, inputs, named, term)
        except NonFiniteWeights:
            self._missing[place] = "weights are NaN or infinite"
        except Exception as error:  # a measurement must not stop a run of weeks
            self._missing[place] = f"{type(error).__name__}: {first_line(error)}"
        self._passes[place] = self._passes.get(place, 0) + 1
        # A module that stands for several layers runs once for each of them.
        sharing = sum(self._modules[parent_of(other)] is module for other in self.plans)
        if self._passes[place] >= plan.applications * max(1, sharing) or place in self._missing:
            self._remove(place)

    def _measure(
        self, plan: AttentionPlan, place: Place, module: Any, inputs: Any, named: Any, term: Any
    ) -> None:
        """Add one application of a block."""
        import torch

        assert self._weights is not None
        if "query" not in inputs or "key" not in inputs:
            raise CheckpointError("the block ran without its own projections")
        x, y = (_as_sequences(plan, inputs[side]) for side in ("query", "key"))
        if y.ndim == 3 and len(y) % len(x) == 0:
            y = y.reshape(len(x), -1, y.shape[-1])  # several pictures of one text
        if x.ndim != 3 or y.ndim != 3 or len(x) != len(y):
            raise CheckpointError(
                f"inputs must be sequences (B, N, D), got {tuple(x.shape)} and {tuple(y.shape)}"
            )
        with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
            attention = Block(self._weights, plan)
            sinks = self._weights.read([plan.sinks])[0] if plan.sinks else None
            dtype = attention.query.weight.dtype
            mask = _mask_of(plan, module, named, x, y)
            x, y = (side[: self._sequences].to(dtype) for side in (x, y))
            own = self._tallies.setdefault(place, Tally(attention.head_count, x.device))
            mask = None if mask is None else mask[: len(x)]
            tally(own, attention, x, y, mask, sinks, term)


def place_of_rows(plan: AttentionPlan) -> Place:
    """What identifies a block's rows in a score table."""
    return plan.stack, plan.kind, plan.layer


def _why_not(plan: AttentionPlan) -> str:
    """Why a block's logits cannot be formed; empty if they can."""
    if plan.position.startswith("rotary") or plan.axial is not None:
        return f"its positions ({plan.position or 'rotary, on two axes'}) are not computed"
    return ""


def _is_repeated() -> bool:
    """Whether a module runs within a backward pass, as activation checkpointing lets it."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _run_uncompiled(wanted: bool) -> bool:
    """Let compiled code run as written, with its hooks, or compiled again; whether it does."""
    import sys

    if "torch._dynamo" not in sys.modules:
        return False
    import torch

    torch.compiler.set_stance("force_eager" if wanted else "default")
    return wanted


def _plain_module(name: str) -> str:
    """A module's name as the model itself has it."""
    return plain_name(f"{name}.").rstrip(".").removesuffix(f".{ADAPTED}")


def _arguments(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, by name, also where it takes any names."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


def _position_term(plan: AttentionPlan, module: Any, named: Mapping[str, Any], output: Any) -> Any:
    """What a block adds to its scores for positions, (1 or B, H, I, J), where it shows that.

    T5 and its kin get it from the block before, and hand it on; MPNet's blocks all get the same.
    """
    import torch

    takes_term = TERM in inspect.signature(module.forward).parameters
    if plan.position != "relative" or plan.family not in SHOW_TERM or not takes_term:
        return None
    handed_on = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    for term in (named.get(TERM), handed_on):
        if isinstance(term, torch.Tensor) and term.ndim == 4 and term.shape[1] == plan.query.heads:
            return term.detach()
    return None


def _own_inputs(module: Any, named: Mapping[str, Any]) -> dict[str, Any]:
    """The inputs of an attention that takes its weights itself, batches first."""
    if not _is_pytorch_s(module):
        one = named.get("hidden_states")
        return {} if one is None else dict.fromkeys(("query", "key"), one.detach())
    sides = {side: named[side].detach() for side in ("query", "key") if side in named}
    return sides if module.batch_first else {k: side.swapaxes(0, 1) for k, side in sides.items()}


def _is_pytorch_s(module: Any) -> bool:
    from torch.nn import MultiheadAttention

    return isinstance(module, MultiheadAttention)


def _as_sequences(plan: AttentionPlan, inputs: Any) -> Any:
    """Inputs (B, N, D): rows and columns of a picture are one sequence, else several."""
    if inputs.ndim != 4:
        return inputs
    return inputs.flatten(1, 2) if plan.position == "relative" else inputs.flatten(0, 1)


def _mask_of(plan: AttentionPlan, module: Any, named: Mapping[str, Any], x: Any, y: Any) -> Any:
    """The mask that a block was called with, with four axes; None if it got none.

    True is a visible pair; to PyTorch's own attention, it is a hidden one.
    """
    import torch

    queries, keys = x.shape[1], y.shape[1]
    found = None
    for name in MASKS:
        mask: Any = named.get(name)
        if hasattr(mask, "mask_mod"):  # of FlexAttention
            at, to = (torch.arange(n, device=x.device) for n in (queries, keys))
            rows = [
                mask.mask_mod(x.new_tensor(b, dtype=torch.long), 0, at[:, None], to)
                for b in range(min(SEQUENCES, len(x)))
            ]
            return torch.stack(rows)[:, None]
        if not isinstance(mask, torch.Tensor) or mask.shape[-1] != keys:
            continue
        if mask.ndim == 2 and name != "attn_mask":  # (B, J): padding
            seen = mask.bool()
            mask = (~seen if name == "key_padding_mask" else seen)[:, None, None]
        elif mask.ndim == 2:
            mask = mask[None, None]
        elif mask.ndim == 3:
            windows = len(x) // len(mask)  # of a picture, which share their masks
            if windows * len(mask) == len(x):
                mask = mask.repeat(windows, 1, 1)[:, None]
            else:
                mask = mask.unflatten(0, (len(x), -1))
        elif mask.ndim != 4:
            continue
        if not mask.is_floating_point():
            mask = mask.bool()
            if _is_pytorch_s(module) and name != "key_padding_mask":
                mask = ~mask
            elif queries == keys == mask.shape[-2]:
                # No token sees a later one, and each sees itself; else True means hidden.
                later = plan.causal and mask.triu(1).any()
                own = mask.diagonal(0, -2, -1).double().mean() > 0.5
                mask = mask if own and not later else ~mask
        found = mask if found is None else _shown(found) & _shown(mask)
        if found.ndim == 4 and named.get("key_padding_mask") is None:
            break
    packed: Any = named.get("position_ids")
    is_packed = isinstance(packed, torch.Tensor) and packed.shape[1:] == (queries,)
    is_training = named.get("past_key_values") is None
    if found is None and is_packed and is_training and queries == keys:
        # Texts in one row, each numbered from 0.
        text = (packed.diff(dim=1, prepend=packed[:, :1] - 1) != 1).cumsum(1)
        return text[:, None, :, None] == text[:, None, None, :]
    return found
