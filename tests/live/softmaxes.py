"""The logits of a model's own eager attention, as its softmax sees them, beside those measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from tests.families.proving import build
from torch.utils._python_dispatch import TorchDispatchMode

from wqk.inspecting.verification.inputs import inputs_of
from wqk.inspecting.verification.recomputation import alibi_slopes
from wqk.inspecting.verification.recording import parent_of
from wqk.inspecting.verification.running import double_precision
from wqk.live.logits import BlockLogits, LogitMeter, Logits, place_of_rows

if TYPE_CHECKING:
    from tests.families.architectures import Architecture

    from wqk.families import AttentionPlan

# Below this, a score is that of a hidden key.
HIDDEN = -1e6


class Seen(NamedTuple):
    """One softmax: what went in and what came out, (B, H, I, J)."""

    scores: np.ndarray
    weights: np.ndarray


class Softmaxes(TorchDispatchMode):  # type: ignore[misc]
    """Every softmax that runs within some modules."""

    def __init__(self, modules: dict[Any, Any]) -> None:
        super().__init__()
        self.seen: dict[Any, list[Seen]] = {place: [] for place in modules}
        self._within: list[Any] = []
        self.hooks = [
            hook
            for place, module in modules.items()
            for hook in (
                module.register_forward_pre_hook(lambda m, a, p=place: self._within.append(p)),
                module.register_forward_hook(lambda m, a, o: self._within.pop() and None),
            )
        ]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        if func._schema.name == "aten::_softmax" and self._within and args[0].ndim in (3, 4):
            self.seen[self._within[-1]].append(Seen(args[0].numpy(), output.numpy()))
        return output


def trainable(architecture: Architecture) -> Any:
    """The random model in float64 and in training mode, with eager attention, without dropout."""
    model = build(architecture).double()
    model.config._experts_implementation = "eager"
    for config in (model.config, *(getattr(model.config, n) for n in model.config.sub_configs)):
        config._experts_implementation = "eager"
    model.set_attn_implementation("eager")
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name or name == "p") and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def measured(model: Any, sequences: int = 10**6) -> tuple[LogitMeter, Logits, dict[Any, list[Seen]]]:
    """What a meter measures in one pass, and the softmaxes of that pass."""
    meter = LogitMeter(model, sequences=sequences)
    modules = {place_of_rows(plan): model.get_submodule(parent_of(plan)) for plan in meter.plans}
    given = inputs_of(model, None, 24, 0)
    meter.start()
    softmaxes = Softmaxes(modules)
    with torch.no_grad(), double_precision(), softmaxes:
        model(**given)
    for hook in softmaxes.hooks:
        hook.remove()
    assert meter.logits is not None
    return meter, meter.logits, softmaxes.seen


def own_logits(plan: AttentionPlan, seen: list[Seen]) -> BlockLogits:
    """The measures from the model's own softmax, without anything of wqk's queries and keys."""
    logits, pairs, shares, entropies = [], [], [], []
    for one in seen:
        scores, weights = (a.reshape(-1, plan.query.heads, *a.shape[-2:]) for a in one)
        if plan.sinks:
            scores, weights = scores[..., :-1], weights[..., :-1]
        shown = scores > HIDDEN
        size, others = scores.shape[-2:]
        is_token = shown.any(axis=(1, 2))[:, None, :] if size == others else np.array([[[True]]])
        shown = shown & is_token[..., None]
        if plan.softcap:
            scores = plan.softcap * np.arctanh(scores.clip(-plan.softcap, None) / plan.softcap)
        if plan.position.endswith("alibi"):
            distance = np.abs(np.arange(size)[:, None] - np.arange(others))
            factor = plan.scale if plan.position == "scaled alibi" else 1
            scores = scores + factor * alibi_slopes(plan.query.heads)[:, None, None] * distance
        logits.append(scores), pairs.append(shown)
        rows = shown.any(axis=-1)
        share = np.where(shown, weights, 0)
        entropy = -(share * np.log(share, where=share > 0, out=np.zeros_like(share))).sum(-1)
        by_head = [(share[:, h].max(-1)[rows[:, h]], entropy[:, h][rows[:, h]]) for h in range(plan.query.heads)]
        shares.append([top for top, _ in by_head]), entropies.append([e for _, e in by_head])
    heads = range(plan.query.heads)
    flat = [np.concatenate([s[:, h][p[:, h]] for s, p in zip(logits, pairs, strict=True)]) for h in heads]
    return BlockLogits(
        np.array([one.max() for one in flat]),
        np.array([one.std() for one in flat]),
        np.array([np.concatenate([e[h] for e in entropies]).mean() for h in heads]),
        np.array([np.concatenate([s[h] for s in shares]).mean() for h in heads]),
    )
