"""Observation of attention at the operations that compute it, while a module runs.

A dispatch mode of PyTorch intercepts every operation below autograd. Three kinds of operations
compute attention: a softmax, whose inputs are the scores; a fused kernel, whose arguments are
queries, keys, mask and scale; and FlexAttention, a higher-order operation. The observation does not
depend on conventions of a library.

Hooks of the observed modules enter the mode when the outermost module begins, and leave the mode
when this module ends or fails. The hooks also record the paths of the running modules. In a copied
or pickled module, the hooks do nothing. Passes that activation checkpointing repeats are not
observed.

Axes: B sequences, H query heads, I queries, J keys, R head width.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache
from typing import Any

from wqk._machine import whole_products
from wqk.checkpoints.modules import unwrapped
from wqk.live.calls import ObservedCall, RunningModule
from wqk.live.fused import FLEX, flex_call, is_kernel, kernel_calls
from wqk.live.tracing import RULES, Trace, Tracer

SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax")
PRODUCTS = ("aten::bmm", "aten::baddbmm", "aten::baddbmm_")

Modules = tuple[RunningModule, ...]


class Observer:
    """Calls a function with each attention in a module's passes.

    Parameters
    ----------
    module
        The `nn.Module`, plain or wrapped (compiled, DDP, FSDP 2).
    observed
        Function that is called with an `ObservedCall` for each attention, in the pass and without
        gradients. Its errors are raised in the pass.
    ended
        Function that is called when a pass of the module or of a part has ended, with the path of
        the outermost module that ran, and with whether this module returned instead of raising an
        error.

    Examples
    --------
    >>> import torch, transformers
    >>> config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=50)
    >>> model = transformers.GPT2Model(config).eval()
    >>> calls = []
    >>> with Observer(model, calls.append):
    ...     _ = model(torch.arange(12)[None])
    >>> [(call.path, tuple(call.queries.shape), round(call.scale, 3)) for call in calls]
    [('h.0.attn', (1, 4, 12, 8), 0.354), ('h.1.attn', (1, 4, 12, 8), 0.354)]
    """

    def __init__(
        self,
        module: Any,
        observed: Callable[[ObservedCall], object],
        ended: Callable[[str, bool], object] = lambda path, complete: None,
    ) -> None:
        self._module = weakref.ref(unwrapped(module))
        self._observed, self._ended = observed, ended
        self._paths: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        self._running: list[RunningModule] = []
        self._handles: list[Any] = []
        self._tracer = Tracer()
        self._until_stop = ExitStack()  # changes by `start`
        self._until_pass_ends = ExitStack()  # the mode, while a module runs

    @property
    def is_observing(self) -> bool:
        """Return whether passes are observed."""
        return bool(self._handles)

    def start(self) -> None:
        """Observe the following passes; compiled code runs uncompiled."""
        if self._handles:
            return
        module = self._module()
        if module is None:
            return
        observer = weakref.ref(self)
        entering = _Hook(observer, Observer._enter)
        leaving = _Hook(observer, Observer._leave)
        for path, part in module.named_modules():
            self._paths[part] = path
            self._handles += [
                part.register_forward_pre_hook(entering, with_kwargs=True),
                part.register_forward_hook(leaving, prepend=True, always_call=True),
            ]
        self._until_stop.enter_context(uncompiled())

    def stop(self) -> None:
        """Stop observing, and restore all changes."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._running.clear()
        self._tracer.clear()
        self._until_pass_ends.close()
        self._until_stop.close()

    def __enter__(self) -> Observer:
        self.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def __del__(self) -> None:
        try:
            self.stop()
        except (AttributeError, ImportError, TypeError):  # at the end of the process
            return

    def _enter(self, module: Any, args: Any, kwargs: Any) -> None:
        """Record that a module begins; the outermost module enters the mode."""
        if module not in self._paths or is_repeated():
            return
        if not self._running:
            self._until_pass_ends.enter_context(slow_path())
            self._until_pass_ends.enter_context(_mode(self))
        reads_another = _reads_another(module, args, kwargs)
        self._running.append(RunningModule(self._paths[module], module, reads_another))
        self._tracer.place = self._paths[module]

    def _leave(self, module: Any, args: Any, output: Any = None) -> None:
        """Record that a module ends or fails; with the outermost module, the mode ends."""
        if module not in self._paths or not self._running or is_repeated():
            return
        while self._running and self._running.pop().module is not module:
            pass  # this module failed before its own hook
        self._tracer.place = self._running[-1].path if self._running else ""
        has_parts = next(module.children(), None) is not None
        if self._tracer and has_parts:
            # Queries and keys of an attention are of no use outside; those of an attention around
            # this module are: it may be what makes the biases by position (Swin V2).
            self._tracer.forget_within(self._paths[module])
        if not self._running:
            self._until_pass_ends.close()
            self._tracer.clear()
            # PyTorch calls hooks of a failed pass without an output, while the error is handled.
            has_failed = output is None and sys.exc_info()[0] is not None
            self._ended(self._paths[module], not has_failed)

    def _hand_on(self, call: ObservedCall) -> None:
        """Call the observer's function without mode, gradients or autocast."""
        import torch
        from torch.utils._python_dispatch import _disable_current_modes

        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch.autocast(call.device.type, enabled=False),
            whole_products(),
        ):
            self._observed(call)


class _Hook:
    """A hook of a module that calls its observer; a copy of the hook does nothing."""

    def __init__(self, observer: weakref.ref[Observer], method: Callable[..., None]) -> None:
        self._observer, self._method = observer, method

    def __call__(self, *args: Any) -> None:
        observer = self._observer()
        if observer is not None:
            self._method(observer, *args)

    def __deepcopy__(self, memo: Any) -> Any:
        return nullcontext().__exit__

    def __reduce__(self) -> Any:
        # Names in a pickle must exist on loading: a function of the standard library.
        return getattr, (nullcontext(), "__exit__")


def _mode(observer: Observer) -> Any:
    """Return the dispatch mode of one pass."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Observing(TorchDispatchMode):  # type: ignore[misc]
        """Intercepts every operation of a pass, and runs it unchanged."""

        supports_higher_order_operators = True  # FlexAttention

        @classmethod
        def ignore_compile_internals(cls) -> bool:
            """Return True, so that FlexAttention may compile its eager form within the mode."""
            return True

        def __torch_dispatch__(
            self, operation: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return _observe(observer, operation, args, kwargs or {})

    return Observing()


def _observe(observer: Observer, operation: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """Run an operation, and report the computed attention."""
    name, tracer = _name(operation), observer._tracer
    modules = tuple(observer._running)
    if is_kernel(operation):
        for call in kernel_calls(operation, args, kwargs, modules):
            observer._hand_on(call)
    elif name == FLEX:
        observer._hand_on(flex_call(args, modules))
    output = operation(*args, **kwargs)
    completed_call = None
    if name in PRODUCTS:
        completed_call = _note_product(name, tracer, args, kwargs, output)
    elif name in SOFTMAXES:
        completed_call = _note_softmax(name, tracer, args, output, modules)
    elif tracer and name in RULES:
        tracer.follow(name, args, output, kwargs)
    if completed_call is not None:
        observer._hand_on(completed_call)
    return output


@cache
def _name(operation: Any) -> str:
    """Return the name of an operation without its overload."""
    schema = getattr(operation, "_schema", None)
    return str(operation.name() if schema is None else schema.name)


def _note_product(
    name: str, tracer: Tracer, args: Any, kwargs: Mapping[str, Any], output: Any
) -> ObservedCall | None:
    """Begin a trace at a batched product, unless it multiplies attention weights with values.

    Returns
    -------
    ObservedCall or None
        The call of an earlier softmax whose input was not a known product. The product with its
        weights shows that the softmax is attention.
    """
    left, right = args[-2:]  # the first argument of baddbmm is added to the product
    for factor in (left, right):
        trace = tracer.get(factor)
        if trace is not None and not trace.is_product:
            return tracer.take_undecided(trace)  # None if the call was handed on before
    scale = 1.0 if name == "aten::bmm" else float(kwargs.get("alpha", 1.0))
    tracer.multiplied(left, right, output, scale)
    return None


def _note_softmax(
    name: str, tracer: Tracer, args: Any, weights: Any, modules: Modules
) -> ObservedCall | None:
    """Return the attention of a softmax over its last axis, if its input is a known product.

    Otherwise the call is stored with the weights, and `_note_product` decides: the softmax may
    belong to a router or a classifier.
    """
    scores, axis, *_ = args
    if scores.ndim < 3 or axis not in (-1, scores.ndim - 1):
        return None
    traced = tracer.scores_of(scores)
    if traced is None:
        call = ObservedCall(
            operation=name, modules=modules, scores=scores.detach(), weights=weights.detach()
        )
        tracer.put(weights, Trace(undecided=call, place=tracer.place))
        return None
    tracer.put(weights, Trace(place=tracer.place))
    return ObservedCall(
        operation=name,
        modules=modules,
        queries=traced.queries,
        keys=traced.keys,
        scale=traced.scale,
        factors=traced.factors,
        softcap=traced.softcap,
        scores=scores.detach(),
        weights=weights.detach(),
        columns=traced.columns,
    )


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run code of `torch.compile` uncompiled, because compiled code shows no operations."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    import torch

    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def slow_path() -> Iterator[None]:
    """Disable the fast path of `nn.MultiheadAttention`, which hides the attention."""
    import torch

    was_fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(was_fast)


def _reads_another(module: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Return whether `nn.MultiheadAttention` has keys of another sequence than its queries."""
    from torch.nn import MultiheadAttention

    if not isinstance(module, MultiheadAttention):
        return False
    query = args[0] if args else kwargs.get("query")
    key = args[1] if len(args) > 1 else kwargs.get("key")
    return query is not key


def is_repeated() -> bool:
    """Return whether a module runs within a backward pass, as with activation checkpointing."""
    import torch

    return bool(torch._C._current_graph_task_id() != -1)
