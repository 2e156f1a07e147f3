"""Clipping, ceilings and starts hold of every model as the model itself runs.

One law for every architecture: the blocks of a random model are run alone, with the inputs of a
recorded pass, before and after a change; the inputs of each block's own softmax are compared. wqk
reads none of these numbers, and therefore every wrong weight or scale is noticed.

Axes: B examples, H query heads, I queries, J keys.
"""

from __future__ import annotations

import copy
import math
import random
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
import torch
from tests.families.architectures import ALL
from tests.families.test_derived import proven_types
from tests.lab.training.starts.untrained import untrained
from tests.live.softmaxes import HIDDEN, Seen, Softmaxes, in_training, trainable
from tools.deriving.building import build
from tools.deriving.configured import tiny_file
from tools.deriving.feeding import adapted, model_feeds
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import wqk
from wqk.errors import CheckpointError
from wqk.families import AttentionPlan
from wqk.live.addresses import parent_of
from wqk.live.running import double_precision, inputs_of
from wqk_lab.training.initializations import STARTS

SIGNS = {"symmetric": 1, "paired": 1, "skew": -1}  # the symmetry of what starts make
STEPS = 25  # of inputs that climb to the largest scores
CROSSED = (1, "key", "key_value_states", "encoder_hidden_states", "cross_attention_states")
# How much a ceiling may be above what they reach; more where heads are wider than inputs, whose
# queries cannot point anywhere.
LOOSE = 4.0

Feeds = Iterable[dict[str, Any]]
Rerun = Callable[[dict[Any, Any]], list[tuple[Any, list[Any]]]]


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

    def seen(self, calls: list[tuple[Any, Any]]) -> list[Seen]:
        """The softmaxes of the block, run alone."""
        softmaxes = Softmaxes({0: self.module})
        with torch.no_grad(), double_precision(), sdpa_kernel(SDPBackend.MATH), softmaxes:
            torch.manual_seed(0)
            for args, kwargs in copy.deepcopy(calls):
                self.module(*args, **kwargs)
        return softmaxes.seen[0]

    def uses(self) -> list[Use]:
        """Run the block alone, with the same inputs."""
        uses_of_calls = []
        for seen in self.seen(self.given):
            heads, sizes = self.plan.query.heads, seen.scores.shape
            if sizes[-3] != heads if len(sizes) == 4 else sizes[0] % heads:
                pytest.skip("its scores are not of all heads, queries and keys")
            if not seen.values:
                pytest.skip("it does not multiply its probabilities with its values")
            scores = seen.scores.reshape(-1, heads, *sizes[-2:])
            if cap := self.plan.softcap:
                scores = cap * np.arctanh(np.where(np.abs(scores) < cap, scores / cap, np.nan))
            scores = np.where(scores > HIDDEN.get(self.plan.family, -1e8), scores, np.nan)
            if self.plan.sinks:  # less the score of the sink, which is the last
                scores = (seen.scores - seen.scores[..., -1:])[..., :-1]
                scores = np.where(scores > HIDDEN.get(self.plan.family, -1e8), scores, np.nan)
                uses_of_calls.append(Use(scores, seen.values[0], seen.products))
                continue
            seen_keys = np.maximum(1, np.isfinite(scores).sum(axis=-1, keepdims=True))
            scores = scores - np.nansum(scores, axis=-1, keepdims=True) / seen_keys
            uses_of_calls.append(Use(scores, seen.values[0], seen.products))
        return uses_of_calls


def run(model: Any, feeds: Feeds, blocks: Iterable[RanBlock]) -> None:
    """Run it with the first feed that it accepts."""
    reason = "there is nothing to give"
    for first_feed in feeds:
        feed: dict[str, Any] | None = first_feed
        for _ in range(4):
            try:
                model(**feed)
                return
            except Exception as error:
                reason = f"{type(error).__name__}: {error}"
                for block in blocks:
                    block.given.clear()
                feed = adapted(feed or {}, reason)
            if feed is None:
                break
    pytest.skip(reason)


def ran_blocks(model: Any, feeds: Feeds) -> dict[Any, RanBlock]:
    blocks, hooks = {}, []

    def keep(calls: list[Any], module: Any, args: Any, kwargs: Any) -> None:
        calls.append(copy.deepcopy((args, kwargs)))

    for plan in wqk.open(model).plans:
        module = model.get_submodule(plan.query.tensor.rpartition(".")[0])
        if not isinstance(module, torch.nn.MultiheadAttention):
            module = model.get_submodule(parent_of(plan))
        blocks[plan.place] = block = RanBlock(plan, module, [])
        hook = partial(keep, block.given)
        hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
    with torch.no_grad(), double_precision(), sdpa_kernel(SDPBackend.MATH):
        run(model, feeds, blocks.values())
    for handle in hooks:
        handle.remove()
    ran = {place: block for place, block in blocks.items() if block.given}
    return ran or pytest.skip("no block was run")


def prove_clipping(model: Any, feeds: Feeds) -> None:
    """Each head's logits change by the factor that is reported, and nothing else of its block."""
    blocks = ran_blocks(model, feeds)
    draw = random.Random(0)
    maxima = {}
    for place, block in blocks.items():
        for head in range(block.plan.query.heads):
            if draw.random() < 0.6:
                maxima[(*place, head)] = draw.uniform(101, 400)
    states = [{place: block.uses() for place, block in blocks.items()}]
    for _ in range(2):
        report = wqk.clip_(model, 100.0, logits=maxima)
        states.append({place: block.uses() for place, block in blocks.items()})
    for place, block in blocks.items():
        factors = np.ones(block.plan.query.heads)
        for clipped in report.heads:
            if clipped[:3] == place:
                factors[clipped.head] = clipped.factor
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
    if plan.clip or "key" in plan.position_uses:  # as the report says, not exactly
        return
    exact(new - newest, f * (old - new), err_msg="factor")
    # What the model adds to the form's part does not depend on the form, and so not on the input.
    form = (old - new) / (1 - f)
    added = old - form
    if not plan.position and not plan.sinks:
        exact(added, 0 * added, err_msg="rest")
        return
    half = len(added) // 2
    added_to_first, added_to_second = added[:half], added[half : 2 * half]
    try:
        exact(
            added_to_first + 0 * added_to_second,
            added_to_second + 0 * added_to_first,
            err_msg="rest of another input",
        )
    except AssertionError:  # some terms do
        if not any(is_product(form, product, plan, clipped) for product in before.products):
            raise


def is_product(
    form: np.ndarray, product: np.ndarray, plan: AttentionPlan, heads: np.ndarray
) -> bool:
    """Return whether the form equals a product of queries and keys that the model computed."""
    if product.size != form.size // len(heads) * plan.query.heads:
        return False
    product = product.reshape(len(form), -1, *form.shape[2:])[:, heads] + 0 * form
    product = product - np.nansum(product, axis=-1, keepdims=True) / np.maximum(
        1, np.isfinite(product).sum(axis=-1, keepdims=True)
    )
    return any(
        np.allclose(form, factor * product, equal_nan=True) for factor in (1, plan.score_scale)
    )


@contextmanager
def scores_and_products() -> Iterator[list[tuple[Any, list[Any]]]]:
    """Record each softmax's input, as part of the graph, and the products computed before it."""
    computations: list[tuple[Any, list[Any]]] = []
    products: list[Any] = []

    multiply = torch.bmm

    def seen(function: Any, name: str) -> Any:
        def computed(*args: Any, **kwargs: Any) -> Any:
            is_softmax = name == "softmax"
            if is_softmax and not (
                computations and computations[-1][0] is args[0]
            ):  # which calls another
                computations.append((args[0], [*products]))
                products.clear()
            result = function(*args, **kwargs)
            if not is_softmax:  # before terms of position are added, at once or in place
                is_sum = name == "baddbmm"
                products.append(multiply(*args[1:3]) if is_sum else result.clone())
            return result

        return computed

    def fused(q: Any, k: Any, v: Any, *args: Any, scale: float | None = None, **_: Any) -> Any:
        k, v = (heads.repeat_interleave(q.shape[-3] // heads.shape[-3], -3) for heads in (k, v))
        scores = (q.shape[-1] ** -0.5 if scale is None else scale) * q @ k.transpose(-1, -2)
        computations.append((scores, []))
        return scores.softmax(-1) @ v

    with ExitStack() as patches:
        for holder, name in (
            *((holder, "softmax") for holder in (torch, torch.Tensor, functional)),
            *((torch, name) for name in ("matmul", "bmm", "baddbmm", "einsum")),
            *((torch.Tensor, name) for name in ("matmul", "__matmul__", "bmm")),
        ):
            instead = seen(getattr(holder, name), name)
            patches.enter_context(patch.object(holder, name, instead))
        patches.enter_context(patch.object(functional, "scaled_dot_product_attention", fused))
        yield computations


def prove_ceilings(model: Any, feeds: Feeds) -> None:
    """No input of the norms makes a score above its ceiling; some input makes one near it."""
    blocks = ran_blocks(model, feeds)
    model.requires_grad_(False)
    tried = 0
    for block in wqk.open(model):
        ceiling = block.ceiling([]) if block.plan.place in blocks else None
        if ceiling is None:
            continue
        ran = blocks[block.plan.place]
        candidates = largest_scores(partial(rerun, model, ran, block.groups.widths), block.plan)
        learned = block.plan.query.temperature
        if learned and learned.of_head:
            factor = model.get_parameter(learned.stored.name).exp().clamp(max=learned.limit)
            candidates += [scores * factor.reshape(-1).numpy() for scores in candidates]
        tried += bool(candidates)
        loose = LOOSE * max(1, ran.plan.query.head_width / min(block.groups.widths))
        fits = [
            (scores <= ceiling.any_distance * (1 + 1e-9)).all()
            and (block.plan.clip is not None or (scores > ceiling.any_distance / loose).all())
            for scores in candidates
        ]
        assert any(fits) or not candidates, (
            ran.plan.place,
            [ceiling.any_distance / scores for scores in candidates],
        )
    if not tried:
        pytest.skip("it has no ceilings, or its scores are not seen")


def largest_scores(run: Rerun, plan: AttentionPlan) -> list[np.ndarray]:
    """The largest scores (H,) of inputs that climb, of everything that may be the scores."""
    candidates = []
    for use, (scores, products) in enumerate(run({})):
        plain = not (plan.position or plan.sinks or plan.softcap)
        fitting = [-1] if plain else range(len(products))
        for product_index in fitting:
            product = scores if product_index < 0 else products[product_index]
            if product.numel() % (plan.query.heads * scores.shape[-2]) == 0:
                climbed = climb(run, plan.query.heads, use, product_index)
                factors = (1.0,) if plain else (1.0, plan.score_scale)
                candidates += [factor * climbed for factor in factors]
    return candidates


def rerun(
    model: Any, block: RanBlock, widths: tuple[int, int], inputs: dict[Any, Any]
) -> list[tuple[Any, list[Any]]]:
    """Run the block alone, fed by its norms, which get these inputs; drawn and kept where new."""
    args, kwargs = copy.deepcopy(block.given[0])
    inside = f"{parent_of(block.plan)}."
    norms, replaced = [], {}
    for side in (block.plan.query, block.plan.key):
        name = side.input_norm.gain[0].name if side.input_norm else inside
        outside = not name.startswith(inside)
        norms.append(model.get_submodule(name.rpartition(".")[0]) if outside else lambda x: x)

    def put(where: Any, value: Any) -> Any:
        is_no_input = isinstance(where, str) and re.search("position|mask|emb|bias|cache", where)
        if (
            not torch.is_tensor(value)
            or not value.is_floating_point()
            or value.ndim < 2
            or is_no_input
        ):
            return value
        is_key = block.plan.kind == "cross" and where in CROSSED
        if value.shape[-1] != widths[is_key]:
            return value
        if id(value) not in replaced:
            if where not in inputs:
                inputs[where] = torch.randn(value.shape, dtype=value.dtype).requires_grad_()
            replaced[id(value)] = norms[is_key](inputs[where])
        return replaced[id(value)]

    args = [put(index, value) for index, value in enumerate(args)]
    kwargs = {name: put(name, value) for name, value in kwargs.items()}
    with double_precision(), scores_and_products() as computations:
        block.module(*args, **kwargs)
    return computations


def climb(run: Rerun, heads: int, use: int, product_index: int) -> np.ndarray:
    """The largest scores of each head, once the tokens of one pair have climbed for it."""
    torch.manual_seed(0)
    inputs: dict[Any, Any] = {}
    pairs: list[int] = []
    largest = torch.full((heads,), -math.inf, dtype=torch.float64)
    for step in range(STEPS):
        scores, products = run(inputs)[use]
        scores = scores if product_index < 0 else products[product_index]
        of_heads = scores.reshape(-1, heads, *scores.shape[-2:]).transpose(0, 1).flatten(1)
        visible = of_heads.detach().where(of_heads > -1e4, -math.inf)
        largest = torch.maximum(largest, visible.max(1).values)
        if not pairs:  # every head its own tokens
            unused = visible.reshape(heads, -1, *scores.shape[-2:]).clone()
            for head in range(heads):
                pairs.append(int(unused[head].argmax()))
                at, i, j = np.unravel_index(pairs[-1], unused[head].shape)
                for token in (i, j):
                    unused[:, at, :, token : token + 1] = -math.inf
                    unused[:, at, token : token + 1] = -math.inf
        height = of_heads[torch.arange(heads), pairs].sum()
        slopes = torch.autograd.grad(height, [*inputs.values()], allow_unused=True)
        with torch.no_grad():
            for values, slope in zip(inputs.values(), slopes, strict=True):
                if slope is not None:
                    length = slope.norm(dim=-1, keepdim=True)
                    values += (
                        values.norm(dim=-1, keepdim=True)
                        * slope
                        / ((1 + step / 5) * length + 1e-300)
                    )
    return largest.numpy()


def prove_start(model: Any, feeds: Feeds) -> None:
    """The model's own scores of a sequence with itself are symmetric, or antisymmetric, by layer.

    Positions are those of the same tokens on both sides, so that the scores of i for j and of
    j for i are those of a form and of its transpose.
    """
    model = untrained(model)
    biases = [[plan.query.bias, plan.key.bias] for plan in wqk.open(model).plans]
    with torch.no_grad():  # a bias of one side alone adds what is not symmetric
        for query_bias, key_bias in (pair for pair in biases if None in pair and any(pair)):
            model.get_parameter((query_bias or key_bias).name).zero_()
    state = copy.deepcopy(model.state_dict())
    drawn = own_scores(model, feeds)
    tried = 0
    for kind, sign in SIGNS.items():
        model.load_state_dict(state)
        try:
            report = wqk.initialize_(model, STARTS[kind])
        except CheckpointError as error:
            pytest.skip(str(error))
        started = own_scores(model, feeds)
        for change in report.layers:
            place = (change.stack, "self", change.layer)
            pairs = [*zip(drawn.get(place, ()), started.get(place, ()), strict=True)]
            # Products that are no scores, such as terms of positions, stay as before.
            symmetries = [
                symmetry_of(after) for before, after in pairs if symmetry_of(before) ** 2 < 0.9
            ]
            tried += bool(symmetries)
            reported = change.after.symmetry
            assert reported == pytest.approx(sign, abs=1e-6)
            assert not symmetries or any(
                abs(symmetry - reported) < 1e-6 for symmetry in symmetries
            ), (place, kind, symmetries)
    if not tried:
        pytest.skip("its scores are not seen, or not of tokens with themselves")


def symmetry_of(scores: np.ndarray) -> float:
    return float((scores * scores.swapaxes(-1, -2)).sum() / (scores * scores).sum())


def own_scores(model: Any, feeds: Feeds) -> dict[Any, list[np.ndarray]]:
    """By block, the products (B, I, I) that it computed before its softmax, summed over heads."""
    products_by_block: dict[Any, list[np.ndarray]] = {}
    torch.manual_seed(0)  # which layers are dropped
    for place, block in ran_blocks(model, feeds).items():
        norm, shares = block.plan.query.norm, block.plan.query.heads != block.plan.key.heads
        if block.plan.kind != "self" or (shares and (norm or block.plan.clip)):
            continue  # the sum of normalized queries is not the normalized sum
        if norm and norm.kind == "layer":  # nor is a turned mean the mean of what is turned
            continue
        heads = block.plan.query.heads
        products_by_block[place] = []
        for seen in block.seen(block.given[:1]):
            length = seen.scores.shape[-2]
            for product in seen.products:
                if product.size % heads == 0 and product.shape[-2:] == (length, length):
                    of_heads = product.reshape(-1, heads, length, length)
                    products_by_block[place].append(of_heads.sum(1))
    return products_by_block


@pytest.mark.parametrize("architecture", ALL, ids=lambda one: one.name)
@pytest.mark.parametrize("prove", [prove_clipping, prove_ceilings, prove_start])
def test_the_model_s_own_scores_are_what_is_said(prove: Any, architecture: Any) -> None:
    model = trainable(architecture)
    prove(model, [inputs_of(model, None, 24, 0)])


@pytest.mark.campaign
@pytest.mark.parametrize("model_type", proven_types())
def test_clipping_does_so_in_every_type(model_type: str) -> None:
    model = derived(model_type)
    with double_precision():
        feeds = [*model_feeds(model)]
    prove_clipping(model, feeds)


def derived(model_type: str, settings: dict[str, Any] | None = None) -> Any:
    """The first variant of a type's tiny model that can be built and read."""
    file = tiny_file({"model_type": model_type}, settings) if settings else None
    for variant in range(4):
        try:
            with double_precision():
                model = in_training(build(model_type, variant, False, file)[0].double())
            if not wqk.open(model).plans[0].rule.guess:
                return model
            reason = "its family is guessed"
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
    pytest.skip(reason)
