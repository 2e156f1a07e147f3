"""A running model's attention: recorded, and recomputed from the weights and what families say.

It is::

    softmax(scale · (x_i A_h + a_h) R(i)ᵀ R(j) (y_j B_g + b_g)ᵀ + position, where i may see j)

with norms, clipping, softcap, sinks and a part for positions alone where the model has them.

A guessed family does not describe positions, mask and scale, and some models do not report their
attention. What can still be compared is the product q·k before anything is added, without rotary
positions: it is x_i W_q W_kᵀ y_jᵀ up to one factor, and up to what biases add to whole rows and
columns, which centering both removes.

Axes: B texts, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from array_api_compat import array_namespace, device

from wqk._typing import Array
from wqk.attention import Block
from wqk.errors import CheckpointError, UnknownFamily
from wqk.families import AttentionPlan, Place
from wqk.live.addresses import parent_of
from wqk.live.listening import (
    HIDDEN,
    AttentionCall,
    Listener,
    mask_of,
    own_inputs,
)

# Positions added to scores that follow from the distance, or need the term that the model computed.
FROM_DISTANCE, FROM_TERM = ("", "alibi", "scaled alibi"), ("relative", "disentangled")


def holds_whole_score(plan: AttentionPlan, application: Application) -> bool:
    """Whether the plan and what was recorded of an application make up its whole score.

    They do not if the plan was guessed, leaves a term out (``whole_score = false``), or only names
    its positions (``rotary, on several axes``), if a term or mask was not recorded, or if the text
    is so long that positions act otherwise.
    """
    if plan.rule.guess or not plan.rule.whole_score:
        return False
    if beyond(plan, application.key_input.shape[1]):
        return False
    if plan.position == "mask":
        return application.mask is not None
    has_term = application.term is not None
    return plan.position in FROM_DISTANCE or (plan.position in FROM_TERM and has_term)


def beyond(plan: AttentionPlan, length: int) -> str:
    """Why the score of a text of this length is another than the plan's; empty if it is not."""
    longest = plan.longest
    where = f"beyond {longest} tokens, " if longest else ""
    return "" if longest is None or length <= longest else f"{where}positions act otherwise"


def recomputed(
    block: Block,
    products: np.ndarray,
    application: Application,
    seen: Mapping[int, np.ndarray],
    sinks: np.ndarray | None,
) -> np.ndarray | None:
    """The attention (B, H, I, J) of a block, from the products q·k of what went into it.

    None if what the model added to its scores does not fit the products.
    """
    plan, term, mask = block.plan, application.term, application.mask
    scores = block.scores(products)
    sizes = () if mask is None else zip(mask.shape, scores.shape, strict=True)
    if any(given not in (1, size) for given, size in sizes):
        if plan.position:
            return None
        mask = None  # what it hides is said by the plan, or the comparison fails
    distance = np.arange(scores.shape[-2])[:, None] - np.arange(scores.shape[-1])
    if plan.position.endswith("alibi"):
        scores = scores + alibi(plan, scores.shape[1], distance)
        if plan.position == "scaled alibi" and mask is not None:
            scores = scores + mask  # Falcon, when it reports its attention, adds them twice
    elif plan.position or plan.rule.guess:  # which says nothing of masks
        if term is not None and term.size not in (scores.size, scores[0].size):
            return None
        if term is not None:
            scores = scores + term.reshape(-1, *scores.shape[1:])
        if mask is not None:
            scores = scores + mask
    shown = allowed(plan, distance)
    if scores.shape[-1] in seen:
        shown = shown & seen[scores.shape[-1]][:, None, None, :]
    elif mask is not None:  # what no query may see is padding
        shown = shown & (mask > HIDDEN).any(axis=-2, keepdims=True)
    # A finite number, as in models: a padded query may have no key in its window.
    return _softmax(np.where(shown, scores, np.finfo(np.float64).min), sinks)


def alibi(plan: AttentionPlan, heads: int, distance: Array) -> Array:
    """What distances (I, J) add to the scores of each head, (H, I, J), in NumPy or PyTorch."""
    slopes = alibi_slopes(heads) * (plan.scale if plan.position == "scaled alibi" else 1.0)
    xp = array_namespace(distance)
    return -xp.asarray(slopes, device=device(distance))[:, None, None] * abs(distance)


def alibi_slopes(heads: int) -> np.ndarray:
    """What the score of each head (H,) loses with every token of distance (Press et al., 2022).

    Examples
    --------
    >>> alibi_slopes(2)
    array([0.0625    , 0.00390625])
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return np.asarray(slopes)


def allowed(plan: AttentionPlan, distance: Array) -> Array:
    """Which keys a query may attend to, (I, J), of distances i − j in NumPy or PyTorch.

    The first key is the text's first token.
    """
    seen = distance >= 0 if plan.causal else distance == distance
    if plan.window is None:
        return seen
    query = distance[..., :1]  # the distance from the first token
    return seen & plan.window.allows(query, query - distance)


def _softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Probabilities of scores (B, H, I, J); sinks (H,) take their share and are left out."""
    if sinks is None:
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(weights / weights.sum(axis=-1, keepdims=True))
    column = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
    return _softmax(np.concatenate([scores, column], axis=-1), None)[..., :-1]


# Operations of PyTorch that multiply batches of matrices; the last two arguments are the factors.
BATCHED = ("aten::bmm", "aten::baddbmm")

FUSED = "aten::_scaled_dot_product_flash_attention_for_cpu"

SOFTMAXES = ("aten::_softmax", "aten::_safe_softmax")

# Rounding of float64 products, relative to the largest, and how far a contrast must exceed it.
ROUNDING, MIN_SIGNAL = 1e-13, 1e3
# How far the sum of probabilities may be from 1; and how different a product may be from the form's
# that is surely the same.
ROUNDED, ALIKE = 1e-6, 1e-6


class Products:
    """Batched products that are computed within attention modules."""

    def __init__(self) -> None:
        self._depth = 0
        self._kept: list[Any] = []
        self._shares: list[Any] = []

    def enter(self) -> None:
        """An attention module begins."""
        if self._depth == 0:
            self._kept.clear()
            self._shares.clear()
        self._depth += 1

    def leave(self) -> None:
        """It ends."""
        self._depth = max(0, self._depth - 1)

    def within(self) -> tuple[np.ndarray, ...]:
        """What the outermost running module has computed so far."""
        return tuple(product.numpy() for product in self._kept)

    def shares(self, shape: tuple[int, int, int, int]) -> Any:
        """What a softmax within has put out, (B, H, I, J); None if none did."""
        batch, heads, *sizes = shape
        shapes = (shape, (batch * heads, *sizes))
        found = [one for one in self._shares if tuple(one.shape) in shapes]
        return found[0].reshape(shape) if len(found) == 1 else None

    def _compute(
        self, q: Any, k: Any, v: Any, _: float = 0.0, causal: bool = False, **options: Any
    ) -> None:
        """Scores and shares of a kernel that puts out neither, chosen by the model's own code."""
        import torch

        options["enable_gqa"] = q.shape[1] != k.shape[1]
        mask = options.pop("attn_mask", None)
        attend = torch.ops.aten._scaled_dot_product_attention_math
        self._shares.append(attend(q, k, v, mask, 0.0, causal, **options)[1])
        self._kept.append(q @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT)

    @contextmanager
    def open(self, flat: bool) -> Iterator[None]:
        """Record what is computed; if ``flat``, with all angles of rotary positions set to zero."""
        import torch
        from torch.nn.attention import SDPBackend, sdpa_kernel
        from torch.utils._python_dispatch import TorchDispatchMode

        flattened = {
            "aten::cos": lambda output: torch.ones_like(output),
            "aten::sin": lambda output: torch.zeros_like(output),
            "aten::polar": lambda output: torch.polar(output.abs(), torch.zeros_like(output.abs())),
        }
        products = self

        class Recording(TorchDispatchMode):  # type: ignore[misc]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                output = func(*args, **(kwargs or {}))
                name = func._schema.name
                if name == FUSED and products._depth:
                    products._compute(*args, **(kwargs or {}))
                if name in BATCHED and products._depth:
                    rows = args[-2]
                    sums_to_one = ((rows.sum(-1) - 1).abs() < ROUNDED).all()
                    if not ((rows >= 0).all() and sums_to_one):  # else with values
                        products._kept.append(torch.bmm(*args[-2:]))
                if name in SOFTMAXES and products._depth:
                    products._shares.append(output)
                return flattened[name](output) if flat and name in flattened else output

        self._depth = 0
        with sdpa_kernel(SDPBackend.MATH), Recording():
            yield


def form_difference(block: Block, application: Application | None) -> float | None:
    """The largest difference of a product from the form's, relative to the largest product.

    Of the computed products the closest counts; None if none is of all heads, queries and keys.
    Where the form is known to be a part of the score alone, another product tells nothing.
    """
    if application is None:
        return None
    x, y = application.query_input, application.key_input
    found = [
        _difference(expected, product)
        for last in {product.shape[-1] for product in application.products}
        for expected in _expected(block, x, y, last)
        for product in _of_size(application.products, expected, len(x))
    ]
    is_part = block.plan.rule.partial and not block.plan.rule.whole_score
    if is_part or beyond(block.plan, y.shape[1]):
        found = [one for one in found if one < ALIKE]
    telling = [one for one in found if one == one]
    # One that cannot tell may be the product of these queries and keys.
    return (
        min(telling) if telling and (len(telling) == len(found) or min(telling) < ALIKE) else None
    )


def _expected(block: Block, x: np.ndarray, y: np.ndarray, keys: int) -> Iterator[np.ndarray]:
    """The forms' products (B, H, I, J) of inputs with this many keys; tokens may come first."""
    # Convolutions are given the tokens last.
    x, y = (
        side.swapaxes(1, 2) if side.ndim == 3 and side.shape[-1] != width == side.shape[1] else side
        for side, width in zip((x, y), block.groups.widths, strict=True)
    )
    if (x.shape[-1], y.shape[-1]) != block.groups.widths or (y.size // y.shape[-1]) % keys:
        return
    texts = y.size // y.shape[-1] // keys
    if (x.size // x.shape[-1]) % texts:
        return
    swaps = (False, True) if x.ndim == y.ndim == 3 and 1 not in x.shape[:2] else (False,)
    for swapped in swaps:
        given = (side.swapaxes(0, 1) if swapped else side for side in (x, y))
        left, right = (side.reshape(texts, -1, side.shape[-1]) for side in given)
        yield block.products(left, right)


def _of_size(
    products: tuple[np.ndarray, ...], expected: np.ndarray, batch: int
) -> Iterator[np.ndarray]:
    """Products of the expected size, in its shape; several texts may have one product each."""
    texts, heads, _, keys = expected.shape
    # Heads may stand among the queries.
    alike = [
        product
        for product in products
        if product.shape[-1] == keys and product.shape[-2] % expected.shape[-2] == 0
    ]
    for product in alike:
        if product.size == expected.size:
            yield product.reshape(expected.shape)
            if texts % batch == 0:  # windows of a text may come after its heads
                windows = product.reshape(batch, heads, -1, *expected.shape[2:])
                yield windows.swapaxes(1, 2).reshape(expected.shape)
    apart = [product for product in alike if product.size * texts == expected.size]
    if texts > 1:
        for start in range(len(apart) - texts + 1):
            yield np.concatenate(apart[start : start + texts]).reshape(expected.shape)


def _difference(expected: np.ndarray, product: np.ndarray) -> float:
    """Difference beyond rounding, relative to the largest centered product; NaN if it is noise."""
    rounding = ROUNDING * np.abs(product).max()
    expected, product = _centered(expected), _centered(product)
    size, square = np.abs(product).max(), float((expected**2).sum())
    if not (size > MIN_SIGNAL * rounding and 0 < square < np.inf):
        return np.nan
    factor = max(0.0, float((expected * product).sum()) / square)
    return float(max(0.0, np.abs(product - factor * expected).max() - rounding) / size)


def _centered(products: np.ndarray) -> np.ndarray:
    products = products - products.mean(axis=-1, keepdims=True)
    return np.asarray(products - products.mean(axis=-2, keepdims=True))


class Application(NamedTuple):
    """One use of one block's attention; windows of a picture count as examples."""

    query_input: np.ndarray  # (B, I, D)
    key_input: np.ndarray  # (B, J, D)
    attention: np.ndarray | None  # probabilities (B, H, I, J), where they are reported
    term: np.ndarray | None  # the learned term that was computed last
    mask: np.ndarray | None = None  # what the module was passed to add, (B or 1, H or 1, I, J)
    products: tuple[np.ndarray, ...] = ()  # of batches of matrices, computed by the module


# Methods that compute a learned term of the score besides the form, and the term as a function of
# result and arguments; those of a part are of attention modules alone. Later layers may reuse it.
LEARNED_TERMS: Mapping[str, Callable[[Any, Sequence[Any]], Any]] = {
    **dict.fromkeys(
        (
            "compute_bias",
            "compute_position_bias",
            "disentangled_att_bias",
            "disentangled_attention_bias",
            "get_decomposed_rel_pos",
        ),
        lambda result, args: result,
    ),
    "relative_position_bias.forward": lambda result, args: result,
    "add_decomposed_rel_pos": lambda result, args: result - args[0],
    "torch_multi_head_self_attention": lambda result, args: args[2],
}


def _continuous_bias(module: Any) -> Any:
    """The bias that Swin v2 computes from distances, (H, I, J)."""
    table = module.continuous_position_bias_mlp(module.relative_coords_table).flatten(0, -2)
    tokens = int(module.relative_position_index.numel() ** 0.5)
    bias = table[module.relative_position_index.flatten()].view(tokens, tokens, -1)
    return 16 * bias.permute(2, 0, 1).sigmoid()


# Terms that attention modules compute in their own code, by an attribute of such modules.
COMPUTED_TERMS: Mapping[str, Callable[[Any], Any]] = {
    "continuous_position_bias_mlp": _continuous_bias
}


@contextmanager
def recording(
    model: Any, plans: Sequence[AttentionPlan], live: Sequence[AttentionPlan], products: Products
) -> Iterator[list[list[Application]]]:
    """Records of the plans' blocks, which fill while the model runs and ``products`` is open.

    Raises `UnknownFamily` if the model lacks a block that the checkpoint has.
    """
    latest: list[np.ndarray] = []
    attending = {parent_of(plan) for plan in live}
    for name, module in [*model.named_modules()]:
        for path, term in LEARNED_TERMS.items():
            part, _, method = path.rpartition(".")
            owner = getattr(module, part, None) if part else module
            if hasattr(owner, method) and (not part or name in attending):
                setattr(owner, method, _remembering(getattr(owner, method), term, latest))
    in_model = {plan.place: plan for plan in live}
    records: dict[Place, list[Application]] = {}
    for plan in plans:
        if plan.place not in in_model:
            raise UnknownFamily(
                f"{type(model).__name__}, as transformers loads it, has no {plan.kind}-"
                f"attention in layer {plan.layer} of a {plan.stack}, but the checkpoint has"
            )
        records[plan.place] = []

    def heard(call: AttentionCall) -> None:
        records[call.plan.place] += _applications(call, latest, products)
        products.leave()

    listener = Listener(model, [in_model[place] for place in records], heard, products.enter)
    try:
        yield list(records.values())
    finally:
        listener.stop()


def require_records(
    model: Any, plans: Sequence[AttentionPlan], records: Sequence[Sequence[Application]]
) -> None:
    """Raise `UnknownFamily` if a block's attention was not run, or not returned."""
    silent = [plan for plan, record in zip(plans, records, strict=True) if not record]
    if silent:
        raise UnknownFamily(
            f"{type(model).__name__}: the module of {silent[0].query.tensor} does not project "
            "queries and keys and return attention weights"
        )


def _remembering(
    method: Callable[..., Any], term: Callable[..., Any], latest: list[np.ndarray]
) -> Callable[..., Any]:
    """The same method, which also puts the term that it computes into a list."""

    def remembered(*args: Any, **kwargs: Any) -> Any:
        result = method(*args, **kwargs)
        latest[:] = [term(result, args).numpy()]
        return result

    return remembered


def _applications(
    call: AttentionCall, latest: list[np.ndarray], products: Products
) -> Iterator[Application]:
    """What was recorded of one run of a block's attention; nothing if it told nothing."""
    inputs, heads = own_inputs(call), call.plan.query.heads
    if not {"query", "key"} <= inputs.keys():
        return
    x, y, computed = inputs["query"], inputs["key"], products.within()
    # Attention that takes its weights itself, as PyTorch's, reports the mean over heads.
    reported = call.attention if "query" in call.inputs else None
    if reported is None:
        reported = products.shares((len(x), heads, x.shape[1], y.shape[1]))
    if reported is None:
        yield Application(x.numpy(), y.numpy(), None, None, None, computed)
        return
    attention = reported.unflatten(0, (-1, heads)) if reported.ndim == 3 else reported
    # ProphetNet predicts several tokens at once, in streams behind the one that attends here.
    x, y = (
        side[:, :count]
        if side.ndim == 3 and len(side) == len(attention)
        else side.swapaxes(0, 1)  # tokens come first
        if side.shape[:-1] == (count, len(attention))
        else side.reshape(-1, count, side.shape[-1])
        for side, count in zip((x, y), attention.shape[-2:], strict=True)
    )
    queries = None if call.queries is None else call.queries.numpy()
    term = _term_of(call.module, call.plan, call.arguments, queries, latest)
    mask = _added(call, x, y)
    yield Application(x.numpy(), y.numpy(), attention.numpy(), term, mask, computed)


def _added(call: AttentionCall, x: Any, y: Any) -> np.ndarray | None:
    """What the mask of a call adds to its scores; None without one, or if it is not known."""
    try:
        mask = mask_of(call, x, y)
    except CheckpointError:
        return None
    if mask is None or mask.is_floating_point():
        return None if mask is None else np.asarray(mask.numpy())
    return np.where(mask.numpy(), 0.0, np.finfo(np.float64).min)


def _term_of(
    module: Any,
    plan: AttentionPlan,
    given: Mapping[str, Any],
    queries: np.ndarray | None,
    latest: Sequence[np.ndarray],
) -> np.ndarray | None:
    """The learned term of the latest application."""
    for name, compute in COMPUTED_TERMS.items():
        if hasattr(module, name):
            return np.asarray(compute(module).numpy())
    vectors: Any = given.get("position_bias")
    is_relative = not plan.position.endswith("alibi") and getattr(vectors, "ndim", 0) == 3
    if queries is not None and is_relative:
        # Vectors (I, J, R) of relative positions, each of which meets the query (Shaw et al.).
        heads = plan.scale * queries.reshape(*queries.shape[:2], plan.query.heads, -1)
        known: np.ndarray = vectors.numpy()
        return np.asarray(heads.swapaxes(1, 2)[..., None, :] @ known.swapaxes(-1, -2))[..., 0, :]
    term = latest[0] if latest and plan.position in FROM_TERM else None
    shared = given.get("relative_position_bias")  # by all layers, beside one of their own
    return term if term is None or shared is None else term + np.asarray(shared.numpy())
