"""One engine of hooks: what the attention blocks of a model are given while it runs.

Hooks are PyTorch's global ones, and there only while someone listens. Nothing is put into the
model: it can be copied, averaged, saved and forgotten meanwhile, and a copy's passes are not taken
for its own. A listener keeps no model alive, and a hook no listener.
"""

from __future__ import annotations

import inspect
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from wqk.checkpoints.modules import ADAPTED, plain_name
from wqk.families import AttentionPlan

# What identifies a block.
Place = tuple[str, str, int]

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
        modules = {
            _plain_module(name): module
            for name, module in model.named_modules(remove_duplicate=False)
        }
        for plan in plans:
            for role, module in _modules_of(plan, modules).items():
                self._roles.setdefault(module, []).append((plan.place, role))
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
            if role == "parent":
                self._entered()
            elif args:
                # Only the first: relative positions may go through the same projection later.
                given.setdefault(role, args[0])

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
    if is_pytorch_s(own := modules[module_of(plan.query.tensor)]):
        return {"parent": own}
    sides = {"query": plan.query, "key": plan.key} | ({"value": plan.value} if plan.value else {})
    found = {role: modules[module_of(side.tensor)] for role, side in sides.items()}
    return found | {"parent": modules[parent_of(plan)]}


def is_pytorch_s(module: Any) -> bool:
    """Whether it is PyTorch's own attention."""
    from torch.nn import MultiheadAttention

    return isinstance(module, MultiheadAttention)


def module_of(tensor: str) -> str:
    """The path of the module that holds a parameter."""
    return tensor.rpartition(".")[0]


def parent_of(plan: AttentionPlan) -> str:
    """The module that runs a block's attention: the query's, if the key is another layer's."""
    query, key = (module_of(side.tensor).split(".") for side in (plan.query, plan.key))
    names = takewhile(lambda pair: pair[0] == pair[1], zip(query, key, strict=False))
    shared = [name for name, _ in names]
    apart = ("".join(name[len(shared) :][:1]) for name in (query, key))
    is_own = query == key or all(map(str.isdigit, apart))
    return ".".join(query[:-1] if is_own else shared)


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


def _plain_module(name: str) -> str:
    """A module's name as the model itself has it."""
    return plain_name(f"{name}.").rstrip(".").removesuffix(f".{ADAPTED}")


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
