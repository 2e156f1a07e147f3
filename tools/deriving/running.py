"""A model's forward pass, and those of its parts that it does not reach, with every softmax."""

from __future__ import annotations

import contextlib
import re
from typing import TYPE_CHECKING, Any

import torch
import transformers
from tools.deriving.feeding import adapted, model_feeds, module_feeds
from tools.deriving.tracing import GraphTrace

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tools.deriving.tracing import Site

# Modules that hold queries or keys.
PROJECTIONS = re.compile(
    r"(.*_)?(q|k|query|key|queries|keys|qkv|to_q|to_k|wq|wk|kv|query_key_value|c_attn|in_proj)"
    r"(_proj|_lin|_b_proj|_proj_layer|_projection)?(_\w)?"
)


class TracedRun:
    """Runs a model, then what the run did not reach: models within it, then modules of these.

    Parameters
    ----------
    model
        Built with all angles of rotary positions zero.
    turned
        The same with its positions, where they are not computed each time; None: ``model`` itself.
    """

    def __init__(self, model: Any, turned: Any = None) -> None:
        self.model, self.turned_model = model, turned or model
        self.names = {id(module): name for name, module in model.named_modules()}
        self.sites: list[Site] = []
        self.turned: list[Site] = []
        self.notes: list[str] = []
        self.fed: list[tuple[str, dict[str, Any]]] = []  # what ran, and what it was given
        self.entered: set[int] = set()
        self._run_model(model)
        if self.notes or self.unreached:
            self._run_modules(model)

    @property
    def unreached(self) -> list[str]:
        """Names of projections that no run reached."""
        return [
            name
            for name, module in self.model.named_modules()
            if PROJECTIONS.fullmatch(name.rpartition(".")[2])
            and id(module) not in self.entered
            and any(p.ndim == 2 for p in module.parameters(recurse=False))
        ]

    def _run_model(self, part: Any) -> None:
        reasons = self._try(part, model_feeds(part))
        for inner in self._models_within(part):
            if id(inner) not in self.entered:
                self._run_model(inner)
        if reasons:
            self.notes.append(f"{self.names[id(part)] or 'whole'}: {' | '.join(reasons[:2])}"[:400])

    def _run_modules(self, module: Any) -> None:
        """Outermost modules that hold projections and were not reached."""
        for child in module.children():
            if id(child) in self.entered or isinstance(child, torch.nn.ModuleList):
                self._run_modules(child)
                continue
            linear = next(
                (
                    inner
                    for name, inner in child.named_modules()
                    if name
                    and PROJECTIONS.fullmatch(name.rpartition(".")[2])
                    and isinstance(getattr(inner, "weight", None), torch.Tensor)
                    and inner.weight.ndim == 2
                ),
                None,
            )
            if linear is None:
                continue
            owner = self._owner(child)
            widths = dict.fromkeys((linear.weight.shape[1], linear.weight.shape[0]))
            failed = all(self._try(child, module_feeds(child, owner, width)) for width in widths)
            if failed:
                self._run_modules(child)

    def _owner(self, module: Any) -> Any:
        """The innermost model that a module is in."""
        name = self.names.get(id(module), "")
        owner = self.model
        for inner, path in ((m, self.names[id(m)]) for m in self.model.modules()):
            if isinstance(inner, transformers.PreTrainedModel) and name.startswith(f"{path}."):
                owner = inner
        return owner

    def _try(self, part: Any, feeds: Iterable[dict[str, Any]]) -> list[str]:
        """Run with the feed that reaches most; the reasons why none could be run."""
        reasons: list[str] = []
        best: tuple[list[Site], set[int], dict[str, Any]] | None = None
        most = sum(1 for _ in part.modules()) - 3
        for first in feeds:
            inputs: dict[str, Any] | None = first
            for _ in range(4):
                try:
                    sites, ran = _traced(self.model, part, inputs, self.names)
                    break
                except Exception as error:
                    message = f"{type(error).__name__}: {error}".replace("\n", " ")
                    reasons.append(f"{sorted(inputs)}: {message}"[:200])
                    inputs = adapted(inputs, message)
                if inputs is None:
                    break
            else:
                inputs = None
            if inputs is None:
                continue
            if best is None or len(ran) > len(best[1]):
                best = (sites, ran, inputs)
            if len(ran) >= most:
                break
        if best is None:
            return reasons or ["nothing to give"]
        self.sites += best[0]
        self.fed.append((self.names[id(part)], best[2]))
        with contextlib.suppress(Exception):
            if best[0] and (part is self.model or isinstance(part, transformers.PreTrainedModel)):
                is_same_model = self.turned_model is self.model
                modules = () if is_same_model else self.turned_model.named_modules()
                names = {id(m): name for name, m in modules} or self.names
                turned_part = self.turned_model.get_submodule(self.names[id(part)])
                self.turned += _traced(self.turned_model, turned_part, best[2], names, flat=False)[
                    0
                ]
        self.entered |= best[1]
        return []

    def _models_within(self, part: Any) -> list[Any]:
        """The outermost models within a model."""
        models: list[Any] = []
        for child in part.children():
            is_model = isinstance(child, transformers.PreTrainedModel)
            models += [child] if is_model else self._models_within(child)
        return models


def _traced(
    model: Any, part: Any, inputs: dict[str, Any], names: dict[int, str], flat: bool = True
) -> tuple[list[Site], set[int]]:
    trace = GraphTrace(flat)
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
            trace.given(*inputs.values())
            trace.recording = True
            with contextlib.suppress(AttributeError):
                part.config.use_cache = False
            part(**inputs)
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
