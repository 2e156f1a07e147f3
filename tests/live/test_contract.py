"""What is written to a model, and what bounds it, holds of the model as it runs.

One law over every architecture: the blocks of a random model are run alone, with the inputs that a
pass gave them, before and after; and what their own softmax gets is compared. Nothing of it is read
by wqk, so that whatever is read or scaled wrongly shows.

Axes: B examples, H query heads, I queries, J keys.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from tests.families.architectures import ALL, NAMED
from tests.families.test_derived import proven_types
from tests.live.softmaxes import Softmaxes, in_training, trainable
from tools.deriving.building import build
from tools.deriving.feeding import adapted, model_feeds
from torch.nn.attention import SDPBackend, sdpa_kernel

import wqk
from wqk.families import AttentionPlan
from wqk.live.listening import parent_of
from wqk.live.verification.running import double_precision, inputs_of

SHARE = 24  # of the architectures, on every test run

# Scores below this are those of hidden keys; the first GPT adds -10,000 to them.
HIDDEN = {"openai-gpt": -5e3}

Feeds = Iterable[dict[str, Any]]


class Use(NamedTuple):
    """One use of a block: what its softmax gets, and what the weights are multiplied with."""

    scores: np.ndarray  # (B, H, I, J): less their mean over the visible keys; NaN where hidden
    values: np.ndarray
    products: tuple[np.ndarray, ...]  # that were computed before it


class RanBlock(NamedTuple):
    """A block that a pass has reached, and what it was given at each use."""

    plan: AttentionPlan
    module: Any
    given: list[tuple[Any, Any]]

    def uses(self) -> list[Use]:
        """Run the block alone, with the same inputs."""
        softmaxes = Softmaxes({0: self.module})
        with torch.no_grad(), double_precision(), sdpa_kernel(SDPBackend.MATH), softmaxes:
            torch.manual_seed(0)
            for args, kwargs in copy.deepcopy(self.given):
                self.module(*args, **kwargs)
        for hook in softmaxes.hooks:
            hook.remove()
        found = []
        for seen in softmaxes.seen[0]:
            heads, sizes = self.plan.query.heads, seen.scores.shape
            if sizes[-3] != heads if len(sizes) == 4 else sizes[0] % heads:
                pytest.skip("its scores are not of all heads, queries and keys")
            scores = seen.scores.reshape(-1, heads, *sizes[-2:])
            if cap := self.plan.softcap:
                scores = cap * np.arctanh(np.where(np.abs(scores) < cap, scores / cap, np.nan))
            scores = np.where(scores > HIDDEN.get(self.plan.family, -1e8), scores, np.nan)
            if self.plan.sinks:  # less the score of the sink, which is the last
                scores = (seen.scores - seen.scores[..., -1:])[..., :-1]
                scores = np.where(scores > HIDDEN.get(self.plan.family, -1e8), scores, np.nan)
                found.append(Use(scores, seen.values[0], seen.products))
                continue
            seen_keys = np.maximum(1, np.isfinite(scores).sum(axis=-1, keepdims=True))
            scores = scores - np.nansum(scores, axis=-1, keepdims=True) / seen_keys
            found.append(Use(scores, seen.values[0], seen.products))
        return found


def run(model: Any, feeds: Feeds, blocks: Iterable[RanBlock]) -> None:
    """Run it with the first feed that it accepts."""
    reason = "there is nothing to give"
    for first in feeds:
        given: dict[str, Any] | None = first
        for _ in range(4):
            try:
                model(**given)
                return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                for block in blocks:
                    block.given.clear()
                given = adapted(given or {}, reason)
            if given is None:
                break
    pytest.skip(reason)


def ran_blocks(model: Any, feeds: Feeds) -> dict[Any, RanBlock]:
    found, hooks = {}, []

    def keep(given: list[Any], module: Any, args: Any, kwargs: Any) -> None:
        given.append(copy.deepcopy((args, kwargs)))

    for plan in wqk.open(model).plans:
        module = model.get_submodule(plan.query.tensor.rpartition(".")[0])
        if not isinstance(module, torch.nn.MultiheadAttention):
            module = model.get_submodule(parent_of(plan))
        found[plan.place] = block = RanBlock(plan, module, [])
        hook = partial(keep, block.given)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad(), double_precision(), sdpa_kernel(SDPBackend.MATH):
        run(model, feeds, found.values())
    for handle in hooks:
        handle.remove()
    ran = {place: block for place, block in found.items() if block.given}
    return ran or pytest.skip("no block was run")


def prove_clipping(model: Any, feeds: Feeds) -> None:
    """Each head's logits change by the factor that is reported, and nothing else of its block."""
    blocks = ran_blocks(model, feeds)
    draw = random.Random(0)
    maxima = {
        (*place, head): draw.uniform(101, 400)
        for place, block in blocks.items()
        for head in range(block.plan.query.heads)
        if draw.random() < 0.6
    }
    states = [{place: block.uses() for place, block in blocks.items()}]
    for _ in range(2):
        report = wqk.clip_(model, 100.0, logits=maxima)
        states.append({place: block.uses() for place, block in blocks.items()})
    for place, block in blocks.items():
        factors = np.ones(block.plan.query.heads)
        for one in report.heads:
            if one[:3] == place:
                factors[one.head] = one.factor
        for uses in zip(*(state[place] for state in states), strict=True):
            prove_factors(block.plan, factors, *uses)


def prove_factors(
    plan: AttentionPlan, factors: np.ndarray, before: Use, once: Use, twice: Use
) -> None:
    np.testing.assert_array_equal(once.values, before.values)
    if not plan.rule.whole_score:  # another attention's scores may be added
        return
    exact = partial(np.testing.assert_allclose, rtol=0, atol=1e-8 * np.nanmax(np.abs(before[0])))
    (kept,), (clipped,) = np.nonzero(factors == 1), np.nonzero(factors < 1)
    old, new, newest = (use.scores[:, clipped] for use in (before, once, twice))
    f = factors[clipped, None, None]
    exact(once.scores[:, kept], before.scores[:, kept], err_msg="kept")
    if plan.clip or "key" in plan.rule.position_uses:  # as the report says, not exactly
        return
    exact(new - newest, f * (old - new), err_msg="factor")
    # What the model adds to the form's part does not depend on the form, and so not on the input.
    form = (old - new) / (1 - f)
    rest = old - form
    if not plan.position and not plan.sinks:
        exact(rest, 0 * rest, err_msg="rest")
        return
    half = len(rest) // 2
    one, other = rest[:half], rest[half : 2 * half]
    try:
        exact(one + 0 * other, other + 0 * one, err_msg="rest of another input")
    except AssertionError:  # some terms do
        if not any(is_product(form, product, plan, clipped) for product in before.products):
            raise


def is_product(
    form: np.ndarray, product: np.ndarray, plan: AttentionPlan, heads: np.ndarray
) -> bool:
    """Whether this is a product of queries and keys that the model has computed."""
    if product.size != form.size // len(heads) * plan.query.heads:
        return False
    product = product.reshape(len(form), -1, *form.shape[2:])[:, heads] + 0 * form
    product = product - np.nansum(product, axis=-1, keepdims=True) / np.maximum(
        1, np.isfinite(product).sum(axis=-1, keepdims=True)
    )
    return any(np.allclose(form, factor * product, equal_nan=True) for factor in (1, plan.scale))


@pytest.mark.parametrize("name", random.Random(1).sample(sorted(NAMED), SHARE))
def test_clipping_changes_the_model_s_own_logits_by_its_factor(name: str) -> None:
    model = trainable(NAMED[name])
    prove_clipping(model, [inputs_of(model, None, 24, 0)])


@pytest.mark.campaign
@pytest.mark.parametrize("architecture", ALL, ids=lambda one: one.name)
def test_clipping_does_so_in_every_architecture(architecture: Any) -> None:
    model = trainable(architecture)
    prove_clipping(model, [inputs_of(model, None, 24, 0)])


@pytest.mark.campaign
@pytest.mark.parametrize("model_type", proven_types())
def test_clipping_does_so_in_every_type(model_type: str) -> None:
    model = derived(model_type)
    with double_precision():
        feeds = [*model_feeds(model)]
    prove_clipping(model, feeds)


def derived(model_type: str) -> Any:
    """The first variant of a type's tiny model that can be built and read."""
    for variant in range(4):
        try:
            with double_precision():
                model = in_training(build(model_type, variant, flat=False)[0].double())
            if not wqk.open(model).plans[0].rule.guess:
                return model
            reason = "its family is guessed"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    pytest.skip(reason)
