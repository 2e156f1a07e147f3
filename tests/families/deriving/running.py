"""A model's forward pass, and those of its parts that it does not reach, with every softmax."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tests.families.deriving.building import feeds
from tests.families.deriving.tracing import Trace

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.families.deriving.tracing import Site


def run(model: Any) -> tuple[list[Site], list[str]]:
    """Every softmax of the model, and which parts could not be run, with the reason."""
    names = {id(module): name for name, module in model.named_modules()}
    sites: list[Site] = []
    notes: list[str] = []
    entered: set[int] = set()
    _run(model, model, names, sites, notes, entered)
    return sites, notes


def _run(
    model: Any,
    part: Any,
    names: dict[int, str],
    sites: list[Site],
    notes: list[str],
    entered: set[int],
) -> None:
    """Run a part as a whole; where that fails or leaves out models within it, run these."""
    reasons = []
    best: tuple[int, Any, set[int]] | None = None
    for given in feeds(part):
        try:
            found, ran = _traced(model, part, given, names)
        except Exception as error:
            reasons.append(
                f"{sorted(given)}: {type(error).__name__}: {error}".replace("\n", " ")[:200]
            )
            continue
        if best is None or len(ran) > best[0]:
            best = (len(ran), found, ran)
        if len(ran) >= sum(1 for _ in part.modules()) - 3 or len(reasons) > 3:
            break
    if best:
        sites += best[1]
        entered |= best[2]
    parts = [m for m in _models_within(part) if id(m) not in entered]
    if best is None and not parts:
        notes.append(f"{names[id(part)] or 'whole'}: {' | '.join(reasons[:3])}"[:600])
    for inner in parts:
        if id(inner) not in entered:
            _run(model, inner, names, sites, notes, entered)
    if best is None and parts:
        why = reasons[0] if reasons else "no input"
        notes.append(f"{names[id(part)] or 'whole'} (parts were run): {why}"[:300])


def _models_within(part: Any) -> list[Any]:
    """The outermost models within a model."""
    found: list[Any] = []

    def visit(module: Any) -> None:
        for child in module.children():
            if isinstance(child, transformers.PreTrainedModel):
                found.append(child)
            else:
                visit(child)

    visit(part)
    return found


def _traced(
    model: Any, part: Any, given: dict[str, Any], names: dict[int, str]
) -> tuple[list[Site], set[int]]:
    trace = Trace()
    ran: set[int] = set()
    stack: list[str] = []

    def entering(module: Any, args: Any) -> None:
        ran.add(id(module))
        stack.append(trace.module)
        trace.module = names.get(id(module), trace.module)

    def leaving(module: Any, args: Any, output: Any) -> None:
        trace.module = stack.pop() if stack else ""

    hooks = [
        torch.nn.modules.module.register_module_forward_pre_hook(entering),
        torch.nn.modules.module.register_module_forward_hook(leaving, always_call=True),
    ]
    try:
        with _plain_kernels(), trace:
            trace.name_parameters(model)
            trace.given(*given.values())
            trace.recording = True
            with contextlib.suppress(AttributeError):
                part.config.use_cache = False
            part(**given)
    finally:
        for hook in hooks:
            hook.remove()
    return trace.sites(), ran


@contextlib.contextmanager
def _plain_kernels() -> Iterator[None]:
    """PyTorch's own attention as products and softmax."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
