"""Inputs of the projections of attention blocks, and outputs of the blocks, while a model runs.

Axes: B sequences, H query heads, N tokens (I queries, J keys), D model width.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from wqk.checkpoints.adapters import module_of
from wqk.errors import UnknownFamily
from wqk.families import AttentionPlan, Place
from wqk.live.addresses import is_pytorch_attention, parent_of, plain_modules
from wqk.live.observing import is_repeated

# How far from 1 a row of probabilities may sum, and in half precision.
ROUNDING, HALF_ROUNDING = 1e-5, 1e-2


class AttentionCall(NamedTuple):
    """One run of a block's attention, with the model's tensors."""

    plan: AttentionPlan
    module: Any  # the module with both projections
    arguments: Mapping[str, Any]  # arguments of the module, by name
    inputs: Mapping[str, Any]  # inputs of ``query``, ``key`` and ``value`` projections, (B, N, D)
    output: Any  # the module's output

    @property
    def attention(self) -> Any:
        """The probabilities, (B, H, I, J) or (B · H, I, J), if returned; else None."""
        outputs = self.output if isinstance(self.output, tuple | list) else ()
        reported = [value for value in outputs if _is_attention(value, self.plan)]
        return reported[-1] if reported else None


class Listener:
    """Calls a function after each run of the attention of a block.

    PyTorch's attention does not call projection modules; its inputs are arguments. Passes that
    activation checkpointing repeats are ignored.

    Parameters
    ----------
    model, plans
        The `nn.Module`, and the plans of its observed blocks.
    heard, entered
        Functions that are called after a block has run, and before.

    Raises
    ------
    UnknownFamily
        The model lacks a module of a plan.

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
        self._heard, self._entered = heard, entered
        self._plans = {plan.place: plan for plan in plans}
        self._inputs: dict[Place, dict[str, Any]] = {place: {} for place in self._plans}
        self._roles: WeakKeyDictionary[Any, list[tuple[Place, str]]] = WeakKeyDictionary()
        self._outside: set[tuple[Place, str]] = set()  # projections of another block's module
        modules = plain_modules(model)
        for plan in plans:
            by_role = _modules_of(plan, modules)
            within = set(by_role["parent"].modules())
            for role, module in by_role.items():
                self._roles.setdefault(module, []).append((plan.place, role))
                if module not in within:
                    self._outside.add((plan.place, role))
        reference = weakref.ref(self)  # the hooks do not keep their listener alive

        def entering(module: Any, args: Any) -> None:
            listener = reference()
            if listener is not None:
                listener._enter(module, args)

        def leaving(module: Any, args: Any, kwargs: Any, output: Any) -> None:
            listener = reference()
            if listener is not None:
                listener._leave(module, args, kwargs, output)

        self._handles = []
        for module in self._roles:
            self._handles += [
                module.register_forward_pre_hook(entering),
                module.register_forward_hook(leaving, with_kwargs=True),
            ]

    def stop(self) -> None:
        """Stop observing."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _enter(self, module: Any, args: Any) -> None:
        """Store the input of a projection; begin the run of a block with its parent."""
        if is_repeated():
            return
        for place, role in self._roles[module]:
            inputs = self._inputs[place]
            if role == "parent":
                # Inputs of projections within the parent are left from a pass that failed there.
                self._inputs[place] = {
                    name: states
                    for name, states in inputs.items()
                    if (place, name) in self._outside
                }
                self._entered()
            elif args and ((place, role) in self._outside or role not in inputs):
                # Only the first: relative positions may go through the same projection later.
                inputs[role] = args[0]

    def _leave(self, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        """Report the run of a block whose parent ends."""
        if is_repeated():
            return
        for place, role in self._roles[module]:
            if role == "parent":
                inputs, self._inputs[place] = self._inputs[place], {}
                arguments = _arguments(module, args, kwargs)
                self._heard(AttentionCall(self._plans[place], module, arguments, inputs, output))


def _modules_of(plan: AttentionPlan, modules: Mapping[str, Any]) -> dict[str, Any]:
    """Return the modules that project a block's vectors, and the parent with the attention."""
    sides = {"query": plan.query, "key": plan.key}
    if plan.value:
        sides["value"] = plan.value
    try:
        by_role = {role: modules[module_of(side.tensor)] for role, side in sides.items()}
        parent = modules[parent_of(plan)]
    except KeyError as missing:
        raise UnknownFamily(
            f"no module is called {missing} while the model runs, where {plan.query.tensor} is "
            "made of other weights when it is saved; its attention cannot be followed"
        ) from None
    if is_pytorch_attention(by_role["query"]):
        return {"parent": by_role["query"]}
    return by_role | {"parent": parent}


def own_inputs(call: AttentionCall) -> dict[str, Any]:
    """Return the inputs of queries and keys (B, N, D); arguments, if no projection ran."""
    if is_pytorch_attention(call.module):
        return _inputs_of_pytorch_attention(call)
    if call.inputs:
        return dict(call.inputs)
    states = call.arguments.get("hidden_states")
    return {} if states is None else {"query": states, "key": states}


def _inputs_of_pytorch_attention(call: AttentionCall) -> dict[str, Any]:
    """Return the inputs of queries and keys (B, N, D) from arguments of PyTorch's attention."""
    inputs = {}
    for side in ("query", "key"):
        if side not in call.arguments:
            continue
        states = call.arguments[side]
        if states.ndim != 3:
            states = states[None]  # one sequence without an axis for the batch
        elif not call.module.batch_first:
            states = states.swapaxes(0, 1)
        inputs[side] = states
    return inputs


def _is_attention(value: Any, plan: AttentionPlan) -> bool:
    """Return whether a value is a tensor of probabilities (B, H, I, J) or (B · H, I, J).

    With an axis for heads, the sum of a row may be below 1, because a family may not describe a
    sink.
    """
    if getattr(value, "ndim", 0) not in (3, 4) or not value.is_floating_point():
        return False
    probabilities = value.detach()
    row_sums = probabilities.sum(-1)
    rounding = ROUNDING if probabilities.element_size() >= 4 else HALF_ROUNDING
    has_axis_of_heads = probabilities.ndim == 4 and probabilities.shape[1] == plan.query.heads
    if plan.sinks or has_axis_of_heads:
        return bool(probabilities.min() >= 0 and row_sums.max() <= 1 + rounding)
    return bool(((row_sums - 1).abs() <= rounding).all())


def _arguments(module: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return a module's arguments by name, also if the module accepts any names."""
    signature = inspect.signature(module.forward)
    bound = dict(signature.bind(*args, **kwargs).arguments)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.VAR_KEYWORD:
            bound |= bound.pop(parameter.name, {})
    return bound
