"""The logits of a model's own eager attention, as its softmax gets them, next to measured ones."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from tests.families.architectures import Architecture
from tests.families.proving import build
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from wqk.families import AttentionPlan
from wqk.live.addresses import parent_of
from wqk.live.logits import BlockLogits, LogitMeter, Logits
from wqk.live.running import double_precision, inputs_of

SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax")

# Below this, a score is that of a hidden key; GPT adds -10,000 to them, Funnel -1,000,000.
HIDDEN = {"openai-gpt": -5e3, "funnel": -5e5}


class Seen(NamedTuple):
    """One softmax: what went in and what came out, (B, H, I, J); the batched products before it."""

    scores: np.ndarray
    weights: np.ndarray
    products: tuple[np.ndarray, ...]
    values: list[np.ndarray]  # what the first product after it takes besides the weights


class Softmaxes(TorchDispatchMode):  # type: ignore[misc]
    """Every softmax that runs within some modules."""

    def __init__(self, modules: dict[Any, Any]) -> None:
        super().__init__()
        self.seen: dict[Any, list[Seen]] = {place: [] for place in modules}
        self._within: list[Any] = []
        self._products: list[np.ndarray] = []
        self.hooks: list[Any] = []
        for place, module in modules.items():
            enter = module.register_forward_pre_hook(lambda m, a, p=place: self._within.append(p))
            leave = module.register_forward_hook(lambda m, a, o: self._within.pop() and None)
            self.hooks += [enter, leave]

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        for hook in self.hooks:
            hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name = func._schema.name
        if name in ("aten::bmm", "aten::baddbmm") and self._within:
            self._products.append(torch.bmm(*args[-2:]).numpy())
            seen = self.seen[self._within[-1]]
            if seen and not seen[-1].values:
                turned = np.may_share_memory(args[-1].numpy(), seen[-1].weights)
                seen[-1].values.append(args[-2 if turned else -1].numpy().copy())
        if name in SOFTMAXES and self._within and args[0].ndim in (3, 4):
            products, self._products = self._products, []
            self.seen[self._within[-1]].append(
                Seen(args[0].numpy(), output.numpy(), tuple(products), [])
            )
        return output


def trainable(architecture: Architecture) -> Any:
    """The random model in float64 and in training mode, with eager attention, without dropout."""
    with double_precision():  # in which models compute their tables of angles
        return in_training(build(architecture).double())


def in_training(model: Any) -> Any:
    """A model in training mode, with eager attention, without dropout."""
    model.config._experts_implementation = "eager"
    parts = (getattr(model.config, name) for name in model.config.sub_configs)
    for config in filter(None, (model.config, *parts)):
        config._experts_implementation = "eager"
    if hasattr(model, "set_attn_implementation"):
        model.set_attn_implementation("eager")
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if ("drop" in name or name == "p") and isinstance(value, float):
                setattr(module, name, 0.0)
    return model.train()


def measured(
    model: Any, sequences: int = 10**6, inputs: dict[str, Any] | None = None
) -> tuple[LogitMeter, Logits, dict[Any, list[Seen]]]:
    """A meter, its measurements in one pass, and the softmaxes of that pass."""
    meter = LogitMeter(model, sequences=sequences)
    modules = {plan.place: model.get_submodule(parent_of(plan)) for plan in meter.plans}
    inputs = inputs_of(model, None, 24, 0) if inputs is None else inputs
    meter.start()
    softmaxes = Softmaxes(modules)
    with torch.no_grad(), double_precision(), sdpa_kernel(SDPBackend.MATH), softmaxes:
        model(**inputs)
    assert meter.logits is not None
    return meter, meter.logits, softmaxes.seen


def own_logits(plan: AttentionPlan, seen: list[Seen]) -> list[BlockLogits]:
    """The measures from the model's own attention, without anything of wqk's queries and keys.

    Where something is added to the scores or taken off them before the softmax, logits are the
    products of queries and keys that it computed, some of which are scaled and others not: all
    that they could be.
    """
    heads = plan.query.heads
    pairs, shares, entropies, firsts = [], [], [], []
    logits: list[list[np.ndarray]] = []
    for softmax in seen:
        scores, weights = (a.reshape(-1, heads, *a.shape[-2:]) for a in softmax[:2])
        if plan.sinks:
            scores, weights = scores[..., :-1], weights[..., :-1]
        shown = scores > HIDDEN.get(plan.family, -1e30)
        size, keys = scores.shape[-2:]
        if size == keys:  # what no query sees is padding
            shown = shown & shown.any(axis=(1, 2))[:, None, :, None]
        if plan.softcap:
            scores = plan.softcap * np.arctanh(np.where(shown, scores / plan.softcap, 0))
        possible = [scores]
        if plan.position or plan.sinks:
            fitting = [
                visible.reshape(scores.shape)
                for visible in softmax.products
                if visible.size == scores.size
            ]
            possible = [*fitting, *(plan.score_scale * product for product in fitting)]
        logits.append(possible), pairs.append(shown)
        rows = shown.any(axis=-1)
        share = np.where(shown, weights, 0)
        entropy = -(share * np.log(np.where(share > 0, share, 1))).sum(-1)
        shares.append([share[:, h].max(-1)[rows[:, h]] for h in range(heads)])
        entropies.append([entropy[:, h][rows[:, h]] for h in range(heads)])
        first = shown.any(axis=(1, 2)).argmax(-1)
        share_of_first = np.take_along_axis(share, first[:, None, None, None], -1)[..., 0]
        firsts.append([share_of_first[:, h][rows[:, h]] for h in range(heads)])

    def by_head(values: list[Any]) -> np.ndarray:
        means = []
        for head in range(heads):
            values_of_head = [values_of_call[head] for values_of_call in values]
            means.append(np.concatenate(values_of_head).mean())
        return np.array(means)

    logits_of_block = []
    for scores_of_calls in zip(*logits, strict=True):
        logits_by_head = []
        for head in range(heads):
            calls = zip(scores_of_calls, pairs, strict=True)
            visible_scores = [scores[:, head][visible[:, head]] for scores, visible in calls]
            logits_by_head.append(np.concatenate(visible_scores))
        largest = np.array([logits_of_head.max() for logits_of_head in logits_by_head])
        spread = np.array([logits_of_head.std() for logits_of_head in logits_by_head])
        extreme = np.array(
            [logits_of_head[np.abs(logits_of_head).argmax()] for logits_of_head in logits_by_head]
        )
        logits_of_block.append(
            BlockLogits(
                max_logit=largest,
                logit_std=spread,
                attention_entropy=by_head(entropies),
                attention_top_share=by_head(shares),
                extreme_logit=extreme,
                first_token_share=by_head(firsts),
            )
        )
    return logits_of_block


def difference(measured: BlockLogits, candidates: list[BlockLogits]) -> float:
    """The largest difference, relative where values exceed 1; NaN if something is not known."""
    largest_differences = []
    for candidate in candidates:
        differences = [
            float((np.abs(actual - expected) / np.maximum(1, np.abs(expected))).max())
            for actual, expected in zip(measured, candidate, strict=True)
        ]
        largest_differences.append(max(differences))
    return min(largest_differences)
