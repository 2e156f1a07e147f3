"""One engine of hooks: what the attention blocks of a model are given while it runs.

Hooks are PyTorch's global ones, and there only while someone listens. Nothing is put into the
model: it can be copied, averaged, saved and forgotten meanwhile, and a copy's passes are not taken
for its own. A listener keeps no model alive, and a hook no listener.

Masks that an attention was called with are read by a table of conventions: what a mask means
depends on who wrote the attention: `transformers` says by the name of its implementation, PyTorch's
own attention by the argument. A mask of no known convention is not guessed at.

Axes: B sequences, H query heads, N tokens (I queries, J keys), W windows of a picture.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from wqk.checkpoints.adapters import module_of
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan, Place
from wqk.live.addresses import _plain_module, is_pytorch_s, parent_of

# How far from 1 a row of probabilities may sum, and in half precision.
ROUNDING, HALF_ROUNDING = 1e-5, 1e-2


class AttentionCall(NamedTuple):
    """One run of one block's attention, as the model's own tensors."""

    plan: AttentionPlan
    module: Any  # what holds both projections
    arguments: Mapping[str, Any]  # what it was called with, by name
    inputs: Mapping[str, Any]  # of the ``query``, ``key`` and ``value`` projections, (B, N, D)
    queries: Any  # what the query's projection put out, or None
    output: Any  # what the module returned

    @property
    def attention(self) -> Any:
        """The probabilities, (B, H, I, J) or (B · H, I, J), where they are reported; else None."""
        outputs = self.output if isinstance(self.output, tuple | list) else ()
        found = [value for value in outputs if _is_attention(value, self.plan)]
        return found[-1] if found else None


class Listener:
    """Calls a function whenever the attention of a block has run.

    PyTorch's own attention takes its weights itself, so that its inputs are among the arguments.
    Passes that activation checkpointing repeats are not heard.

    Parameters
    ----------
    model, plans
        The `nn.Module`, and those of its blocks that are listened to.
    heard, entered
        Called after a block has run, and before.

    Examples
    --------
    >>> import torch, transformers, wqk
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config)
    >>> calls = []
    >>> listener = Listener(model, wqk.open(model).plans, calls.append)
    >>> _ = model(torch.arange(12)[None])
    >>> [(call.plan.layer, tuple(call.inputs["query"].shape)) for call in calls]
    [(0, (1, 12, 32)), (1, (1, 12, 32))]
    >>> listener.stop()
    """

    def __init__(
        self,
        model: Any,
        plans: Sequence[AttentionPlan],
        heard: Callable[[AttentionCall], object],
        entered: Callable[[], object] = lambda: None,
    ) -> None:
        from torch.nn.modules import module as torch_module

        self._heard, self._entered = heard, entered
        self._plans = {plan.place: plan for plan in plans}
        self._given: dict[Place, dict[str, Any]] = {place: {} for place in self._plans}
        self._roles: WeakKeyDictionary[Any, list[tuple[Place, str]]] = WeakKeyDictionary()
        self._apart: set[tuple[Place, str]] = set()  # projections that another block's module runs
        modules = {
            _plain_module(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        for plan in plans:
            found = _modules_of(plan, modules)
            within = set(found["parent"].modules())
            for role, module in found.items():
                self._roles.setdefault(module, []).append((plan.place, role))
                if module not in within:
                    self._apart.add((plan.place, role))
        held = weakref.ref(self)

        def entering(module: Any, args: Any) -> None:
            if (listener := held()) is not None:
                listener._enter(module, args)

        def leaving(module: Any, args: Any, *rest: Any) -> None:
            if (listener := held()) is not None and listener.is_listening:
                listener._leave(module, args, *rest)

        # Of code compiled by `torch.compile`, whose outermost module nobody listens to.
        warnings.filterwarnings("ignore", "Using `torch.compile.* when there are global hooks")
        self._handles = [
            torch_module.register_module_forward_pre_hook(entering),
            torch_module.register_module_forward_hook(leaving, with_kwargs=True),
        ]
        if not self._given:
            self.stop()

    @property
    def is_listening(self) -> bool:
        """Whether any block is still listened to."""
        return bool(self._given)

    def sharing(self) -> dict[Place, int]:
        """How many blocks are run by the same module, for each block."""
        parents = [
            [place for place, role in roles if role == "parent"] for roles in self._roles.values()
        ]
        return {place: len(places) for places in parents for place in places}

    def forget(self, place: Place) -> None:
        """Listen to a block no longer."""
        self._given.pop(place, None)
        if not self._given:
            self.stop()

    def stop(self) -> None:
        """Listen to nothing any longer."""
        from torch.nn.modules import module as torch_module

        self._given.clear()
        for handle in self._handles:
            handle.remove()
            # Which PyTorch 2.13 leaves there, so that it takes the hook to be there still.
            torch_module._global_forward_hooks_with_kwargs.pop(handle.id, None)
        self._handles.clear()

    def __del__(self) -> None:
        try:
            self.stop()
        except (AttributeError, ImportError, TypeError):  # before it began; at the process's end
            return

    def _enter(self, module: Any, args: Any) -> None:
        for place, role in self._roles.get(module, ()):
            given = self._given.get(place)
            if given is None or _is_repeated():
                continue
            if role == "parent":  # what was given before is of a pass that failed within it
                kept = {name: x for name, x in given.items() if (place, name) in self._apart}
                self._given[place] = kept
                self._entered()
            elif args and ((place, role) in self._apart or role not in given):
                # Only the first: relative positions may go through the same projection later.
                given[role] = args[0]

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        for place, role in self._roles.get(module, ()):
            given = self._given.get(place)
            if given is None or _is_repeated():
                continue
            if role == "query" and hasattr(output, "numpy"):
                given.setdefault("queries", output)
            elif role == "parent":
                inputs, self._given[place] = given, {}
                queries = inputs.pop("queries", None)
                named = _arguments(module, args, kwargs)
                plan = self._plans[place]
                self._heard(AttentionCall(plan, module, named, inputs, queries, output))


def _modules_of(plan: AttentionPlan, modules: Mapping[str, Any]) -> dict[str, Any]:
    """The modules that project a block's vectors, and the ``parent`` that runs its attention."""
    sides = {"query": plan.query, "key": plan.key} | ({"value": plan.value} if plan.value else {})
    try:
        found = {role: modules[module_of(side.tensor)] for role, side in sides.items()}
        parent = modules[parent_of(plan)]
    except KeyError as missing:
        raise UnknownFamily(
            f"no module is called {missing} while the model runs, where {plan.query.tensor} is "
            "made of other weights when it is saved; its attention cannot be followed"
        ) from None
    if is_pytorch_s(found["query"]):
        return {"parent": found["query"]}
    return found | {"parent": parent}


def is_fairseq_s(module: Any) -> bool:
    """Whether it is fairseq's attention, as FSMT has it: masks are PyTorch's, tokens come first."""
    return type(module).__module__.endswith(".modeling_fsmt")


def own_inputs(call: AttentionCall) -> dict[str, Any]:
    """What queries and keys were made of, (B, N, D); arguments, where no projection ran."""
    if not is_pytorch_s(call.module):
        one = call.arguments.get("hidden_states") if not call.inputs else None
        given = dict(call.inputs) if one is None else {"query": one, "key": one}
        swaps = is_fairseq_s(call.module)
        return {name: side.swapaxes(0, 1) if swaps else side for name, side in given.items()}
    given = {side: call.arguments[side] for side in ("query", "key") if side in call.arguments}
    given = {name: side if side.ndim == 3 else side[None] for name, side in given.items()}
    swaps = not call.module.batch_first and call.arguments["query"].ndim == 3
    return {name: side.swapaxes(0, 1) if swaps else side for name, side in given.items()}


def _is_attention(value: Any, plan: AttentionPlan) -> bool:
    """Whether something is a tensor of probabilities (B, H, I, J) or (B · H, I, J).

    They may lack the share of a sink, which a family may not know of.
    """
    if getattr(value, "ndim", 0) not in (3, 4) or not value.is_floating_point():
        return False
    shares = value.detach()
    total, rounding = shares.sum(-1), ROUNDING if shares.element_size() >= 4 else HALF_ROUNDING
    if plan.sinks or (shares.ndim == 4 and shares.shape[1] == plan.query.heads):
        return bool(shares.min() >= 0 and total.max() <= 1 + rounding)
    return bool(((total - 1).abs() <= rounding).all())


def _is_repeated() -> bool:
    """Whether a module runs within a backward pass, as activation checkpointing lets it."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)


def _arguments(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What a module was called with, by name, also where it takes any names."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound


# Masks add less than this to the scores of hidden keys; models use -10,000 or less.
HIDDEN = -5e3

# Implementations to which transformers tells texts in a row by a mask; empty: a module's own.
MASKED = ("", "eager", "sdpa", "flex_attention")

# Names under which models pass masks to their attention; the last to that of another sequence.
ARGUMENTS = ("attention_mask", "mask", "attn_mask", "encoder_attention_mask")


class Convention(NamedTuple):
    """What a mask of some axes and type means."""

    whose: tuple[str, ...]  # implementations of transformers, or families; none for all
    axes: int
    boolean: bool | None  # or numbers; None for either
    # From the mask and B to four axes: True visible, or added; None where neither can be meant.
    read: Callable[[Any, int], Any]


def _windows(mask: Any, batch: int) -> Any:
    """(W, I, J) for each of B/W pictures, or (B · H, I, J), with four axes.

    Examples
    --------
    >>> import torch
    >>> windows = torch.arange(3.0).expand(4, 2, 3).contiguous()
    >>> _windows(windows, 8).shape, _windows(windows, 2).shape
    (torch.Size([8, 1, 2, 3]), torch.Size([2, 2, 2, 3]))
    """
    if batch % len(mask) == 0:
        return mask.repeat(batch // len(mask), 1, 1)[:, None]
    return mask.unflatten(0, (batch, -1))


def _of_keys(mask: Any, batch: int) -> Any:
    """(B, J), with four axes: 1 for a token; or numbers of which none is above 0, which are added.

    Longformer's are neither: for tokens that all others see, a large number is added.
    """
    if len(mask) not in (1, batch):
        return None
    if not mask.is_floating_point() or (((mask == 0) | (mask == 1)).all() and mask.any()):
        return mask.bool()[:, None, None]
    return None if (mask > 0).any() else mask[:, None, None]


CONVENTIONS = (
    Convention(("deberta", "deberta-v2"), 4, False, lambda mask, batch: mask.bool()),  # 1: visible
    Convention(("canine",), 3, False, lambda mask, batch: mask.bool()[:, None]),  # the same
    Convention(("mpt",), 4, True, lambda mask, batch: ~mask),  # True: hidden
    Convention(("sdpa",), 4, True, lambda mask, batch: mask),  # True: visible
    Convention((), 4, False, lambda mask, batch: mask),  # added to the scores
    Convention((), 3, False, _windows),  # added
    Convention((), 2, None, _of_keys),
)


def mask_of(call: AttentionCall, x: Any, y: Any) -> Any:
    """The mask that a block was called with, with the axes (B, H, I, J), of which each may be 1.

    True where a key is visible, or what is added to the scores; None if it got none. ``x`` and
    ``y`` are the inputs of queries and keys, (B, N, D). `CheckpointError` if it is of no known
    convention.
    """
    import torch

    (batch, queries, _), keys = x.shape, y.shape[1]
    if is_pytorch_s(call.module) or is_fairseq_s(call.module):
        return _of_pytorch(call, batch)
    names = ARGUMENTS[::-1] if call.plan.kind == "cross" else ARGUMENTS[:-1]
    mask: Any = next((m for n in names if (m := call.arguments.get(n)) is not None), None)
    if mask is None and call.plan.family == "funnel":  # beside its positions
        mask = call.arguments["attention_inputs"][2]
    for name, given in call.arguments.items() if mask is None else ():
        is_model_s = name in ARGUMENTS or name.startswith("input_")
        if name.endswith("mask") and not is_model_s and hasattr(given, "ndim"):
            raise CheckpointError(f"mask unknown: {name} {tuple(given.shape)}")
    if mask is None:
        return _packed(call, batch, queries, keys)
    if hasattr(mask, "mask_mod"):  # of FlexAttention
        at, to = (torch.arange(n, device=x.device) for n in (queries, keys))
        numbers = torch.arange(batch, device=x.device)
        rows = [mask.mask_mod(number, 0, at[:, None], to) for number in numbers]
        return torch.stack(rows)[:, None]
    whose, is_boolean = {_kernel(call), call.plan.family}, mask.dtype == torch.bool
    for convention in CONVENTIONS if mask.shape[-1] == keys else ():
        known = not convention.whose or not whose.isdisjoint(convention.whose)
        fits = mask.ndim == convention.axes and convention.boolean in (None, is_boolean)
        if known and fits and (read := convention.read(mask, batch)) is not None:
            return read
    kind = f"{str(mask.dtype).removeprefix('torch.')} {tuple(mask.shape)}"
    raise CheckpointError(f"mask unknown: {kind} for {_kernel(call) or 'its own'} attention")


def _kernel(call: AttentionCall) -> str:
    """How transformers calls the implementation of a module's attention; empty for its own."""
    return str(getattr(getattr(call.module, "config", None), "_attn_implementation", ""))


def masks_all(call: AttentionCall) -> bool:
    """Whether a mask with a row for each query, or none at all, says all that is hidden.

    It does in `transformers`, where no module has rules of its own, in a buffer called ``bias``;
    and where kernels are told not to hide later tokens, by the call or by the module.
    """
    causal = call.arguments.get("is_causal", getattr(call.module, "is_causal", True))
    has_own = "bias" in dict(call.module.named_buffers(recurse=False))
    if all(call.arguments.get(name) is None for name in ARGUMENTS):
        is_eager = _kernel(call) == "eager" and "attention_mask" in call.arguments
        hides_none = (is_eager and not has_own) or is_fairseq_s(call.module)
        return call.plan.causal and (causal is False or hides_none)
    return not has_own


def positions_of(call: AttentionCall, x: Any, y: Any) -> Any:
    """The positions (1 or B, N) that a block was called with; None for 0, 1, 2, ..."""
    given: Any = call.arguments.get("position_ids")
    is_own = x.shape[1:2] == y.shape[1:2] == getattr(given, "shape", ())[1:]
    return given.cpu().numpy() if is_own else None


def shown(mask: Any) -> Any:
    """Where a mask lets pairs through."""
    return mask if str(mask.dtype) == "torch.bool" else mask > HIDDEN


def _of_pytorch(call: AttentionCall, batch: int) -> Any:
    """Of `nn.MultiheadAttention`, to which True is hidden: (B, J); (I, J) or (B · H, I, J).

    Numbers are added to the scores, those of both masks.
    """
    import torch

    given = []
    if (mask := call.arguments.get("attn_mask")) is not None:
        given.append(mask[None, None] if mask.ndim == 2 else mask.unflatten(0, (batch, -1)))
    if (padding := call.arguments.get("key_padding_mask")) is not None:
        given.append(padding.reshape(batch, 1, 1, -1))
    added = [m if m.is_floating_point() else torch.where(m, -torch.inf, 0.0) for m in given]
    return sum(added) if added else None


def _packed(call: AttentionCall, batch: int, queries: int, keys: int) -> Any:
    """Of texts in one row, each numbered from 0, or told by their ends; None if there are none.

    What a module adds to its tokens itself, to fill a last block, is padding.
    """
    import torch

    own: Any = call.arguments.get("hidden_states")
    has_rows = getattr(own, "ndim", 0) == 3 and len(own) == batch
    if has_rows and own.shape[1] < queries == keys:
        return (torch.arange(keys, device=own.device) < own.shape[1])[None, None, None]
    ends: Any = call.arguments.get("cu_seqlens")
    if ends is not None and queries == keys == ends[-1]:
        place = torch.arange(keys, device=ends.device)
        text = torch.bucketize(place, ends[1:], right=True)[None]
        return text[:, None, :, None] == text[:, None, None, :]
    packed: Any = call.arguments.get("position_ids")
    # Flash kernels read one row so; for all others, transformers makes a mask.
    is_packed = _kernel(call) not in MASKED and getattr(packed, "shape", ()) == (1, queries)
    if not is_packed or call.arguments.get("past_key_values") is not None or queries != keys:
        return None
    text = (packed.diff(dim=1, prepend=packed[:, :1] - 1) != 1).cumsum(1)
    return text[:, None, :, None] == text[:, None, None, :]
