"""Attention of a running model, for a comparison with the forms of its weights.

Each use of a block is recorded: the inputs of its projections, and the observed attention. The
products of queries and keys are computed again from inputs and weights. Scale, mask and added terms
are observed.

If a family does not describe positions, or only scores are observed, the product is compared
without rotary positions. The product is x_i W_q W_kᵀ y_jᵀ up to one factor and up to constants of
rows and columns from biases. Centering of rows and columns removes these constants.

Axes: B texts, H query heads, N tokens (I queries, J keys), D model width.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from wqk.attention import Block
from wqk.errors import UnknownFamily
from wqk.families import AttentionPlan, Place
from wqk.live.calls import ObservedCall
from wqk.live.listening import AttentionCall, Listener, own_inputs
from wqk.live.observing import Observer

# Rounding of float64 products, relative to the largest product.
ROUNDING = 1e-13
# Centered products that do not exceed the rounding by this factor are noise.
MIN_SIGNAL = 1e3
# Products that differ by less, relative to the largest product, are surely the same.
ALIKE = 1e-6

# Positions that are added to scores as a function of the distance.
FROM_DISTANCE = ("", "alibi", "scaled alibi")
# Times that plain operations add such biases, if not once: transformers' Falcon has them in its
# mask, and adds them to the scores as well.
REPEATED = {"scaled alibi": 2}
# Positions that are added to scores as the model computes them, and are read off the run.
OBSERVED = ("relative", "disentangled", "mask")


class Attention(NamedTuple):
    """One observed attention in one array, on the host (B, H, I, J)."""

    weights: np.ndarray
    logits: np.ndarray | None  # None if only scores were observed
    added: np.ndarray  # scores less logits, after a soft cap; 0 where a pair is hidden
    visible: np.ndarray
    # Weights and scores of the same queries and the keys of another stream, in joint attention.
    other_weights: np.ndarray | None = None
    other_scores: np.ndarray | None = None

    def parts(self, queries: int, keys: int) -> Iterator[Attention]:
        """Yield the parts of a joint attention that may belong to one stream's queries and keys.

        The tokens of a stream are the first or the last of all tokens.
        """
        if self.logits is None:
            return
        *_, all_queries, all_keys = self.weights.shape
        scores = np.where(self.visible, self.logits + self.added, np.finfo(np.float64).min)
        for rows in _ranges_of_stream(queries, all_queries):
            for columns in _ranges_of_stream(keys, all_keys):
                part = (slice(None), slice(None), rows, columns)
                yield Attention(
                    self.weights[part],
                    self.logits[part],
                    self.added[part],
                    self.visible[part],
                    other_weights=np.delete(self.weights[:, :, rows], columns, axis=-1),
                    other_scores=np.delete(scores[:, :, rows], columns, axis=-1),
                )


def _ranges_of_stream(tokens: int, all_tokens: int) -> list[slice]:
    """Return the possible ranges of a stream's tokens: the first, or the last of all tokens."""
    if tokens > all_tokens:
        return []
    starts = sorted({0, all_tokens - tokens})
    return [slice(start, start + tokens) for start in starts]


class Application(NamedTuple):
    """One use of a block's attention; windows of an image count as examples."""

    query_input: np.ndarray  # (B, I, D)
    key_input: np.ndarray  # (B, J, D)
    calls: tuple[ObservedCall, ...] = ()
    reported: np.ndarray | None = None  # probabilities returned by the module

    def attentions(self, heads: int) -> Iterator[Attention]:
        """Return the observed attentions with this number of heads."""
        for call in self.calls:
            arranged = call.by_head(heads)
            if arranged is not None and arranged.shape[1] == heads:
                yield whole(arranged)

    @property
    def observed_heads(self) -> int | None:
        """Number of heads of an observed attention of all queries and keys; None if unobserved."""
        if self.query_input.ndim != 3 or self.key_input.ndim != 3:
            return None
        batch, queries, _ = self.query_input.shape
        keys = self.key_input.shape[1]
        for call in self.calls:
            if len(call.shape) == 4 and (call.shape[0], *call.shape[2:]) == (batch, queries, keys):
                return int(call.shape[1])
        return None

    def products(self, heads: int) -> Iterator[np.ndarray]:
        """Products of observed queries and keys, (B, H, I, J)."""
        for call in self.calls:
            if not call.has_logits:
                continue
            arrangements = [call.by_head(heads)]
            if len(call.shape) > 4:  # windows may stand behind heads
                arrangements.append(call.in_one())
            for arranged in arrangements:
                logits = None if arranged is None else whole(arranged).logits
                if logits is not None:
                    yield logits


def whole(call: ObservedCall) -> Attention:
    """Return an observed attention with the axes (B, H, I, J), as one tile."""
    import torch

    batch, heads, queries, keys = call.shape
    (tile,) = call.tiles(size=max(1, batch * heads * queries * keys))
    shape = (batch, heads, queries, tile.logits.shape[-1])
    visible = torch.ones(shape, dtype=torch.bool)
    if tile.visible is not None:
        visible = tile.visible.expand(shape)
    added = (tile.scores - call.capped(tile.logits)).masked_fill(~visible, 0)
    hidden_keys = keys - shape[-1]  # keys that no query may see are not in the tile

    def with_all_keys(part: torch.Tensor) -> np.ndarray:
        padded = torch.nn.functional.pad(part, (0, hidden_keys))
        return np.asarray(padded.detach().cpu().numpy())

    return Attention(
        weights=with_all_keys(tile.attention()),
        logits=with_all_keys(tile.logits) if call.has_logits else None,
        added=with_all_keys(added),
        visible=with_all_keys(visible),
    )


@contextmanager
def recording(
    model: Any, plans: Sequence[AttentionPlan], live: Sequence[AttentionPlan]
) -> Iterator[list[list[Application]]]:
    """Yield records of the plans' blocks, which are filled while the model runs.

    Parameters
    ----------
    model
        The running `nn.Module`.
    plans
        Plans of the checkpoint's blocks to record.
    live
        Plans of the model in memory.

    Raises
    ------
    UnknownFamily
        The model lacks a block that the checkpoint has.
    """
    in_model = {plan.place: plan for plan in live}
    records: dict[Place, list[Application]] = {}
    for plan in plans:
        if plan.place not in in_model:
            raise UnknownFamily(
                f"{type(model).__name__}, as transformers loads it, has no {plan.kind}-"
                f"attention in layer {plan.layer} of a {plan.stack}, but the checkpoint has"
            )
        records[plan.place] = []
    calls: list[ObservedCall] = []
    first_calls: list[int] = []  # of each running block, the number of its first call

    def begin_block() -> None:
        first_calls.append(len(calls))

    def record_block(call: AttentionCall) -> None:
        start = first_calls.pop() if first_calls else 0
        application = _application(call, calls[start:])
        if application is not None:
            records[call.plan.place].append(application)

    listener = Listener(
        model, [in_model[place] for place in records], heard=record_block, entered=begin_block
    )
    try:
        with Observer(model, calls.append):
            yield list(records.values())
    finally:
        listener.stop()


def _application(call: AttentionCall, calls: Sequence[ObservedCall]) -> Application | None:
    """Return the record of one run of a block's attention; None if the inputs are unknown."""
    inputs = own_inputs(call)
    if not {"query", "key"} <= inputs.keys():
        return None
    reported = call.attention
    if reported is not None and reported.ndim == 3:
        heads = call.plan.query.heads
        reported = reported.unflatten(0, (-1, heads)) if len(reported) % heads == 0 else None
    return Application(
        query_input=inputs["query"].detach().cpu().numpy(),
        key_input=inputs["key"].detach().cpu().numpy(),
        calls=tuple(calls),
        reported=None if reported is None else reported.detach().cpu().numpy(),
    )


def require_records(
    model: Any, plans: Sequence[AttentionPlan], records: Sequence[Sequence[Application]]
) -> None:
    """Raise `UnknownFamily` if a block's attention did not run, or was not observed."""
    silent = [plan for plan, record in zip(plans, records, strict=True) if not record]
    if silent:
        raise UnknownFamily(
            f"{type(model).__name__}: the module of {silent[0].query.tensor} does not project "
            "queries and keys and return attention weights"
        )


def fitted(
    application: Application, batch: int, queries: int, keys: int, widths: tuple[int, int]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return inputs of queries (B, I, D) and keys (B, J, D) in the shape of an attention.

    Tokens may be the first or, as for convolutions, the last axis. Windows of an image are
    examples. Several streams may follow the first. None if the inputs do not fit.
    """
    inputs = (application.query_input, application.key_input)
    sides, shortened = [], set()
    for side, count, width in zip(inputs, (queries, keys), widths, strict=True):
        side = _with_tokens_first(side, width)
        is_longer = side.ndim == 3 and len(side) == batch and side.shape[1] >= count
        shortened.add(is_longer and side.shape[1] > count)
        if is_longer:
            sides.append(side[:, :count])
        elif side.shape[:-1] == (count, batch):
            sides.append(side.swapaxes(0, 1))
        elif side.size == batch * count * side.shape[-1]:
            sides.append(side.reshape(batch, count, side.shape[-1]))
        else:
            return None
    # Queries that are pooled are fewer than their inputs, and keys are not.
    return (sides[0], sides[1]) if len(shortened) == 1 else None


def beyond(plan: AttentionPlan, length: int) -> str:
    """Return why the score of a text of this length differs from the plan; else empty."""
    if plan.longest is None or length <= plan.longest:
        return ""
    where = f"beyond {plan.longest} tokens, " if plan.longest else ""
    return f"{where}positions act otherwise"


def allowed(plan: AttentionPlan, distance: np.ndarray) -> np.ndarray:
    """Return a mask (I, J) of the pairs of a query and a key with attention, from distances i − j.

    The first key is the first token of the text.
    """
    shown = distance >= 0 if plan.causal else np.ones_like(distance, dtype=bool)
    if plan.window is None:
        return np.asarray(shown)
    query = np.arange(len(distance))[:, None]
    return np.asarray(shown & plan.window.allows(query, query - distance))


def alibi(plan: AttentionPlan, heads: int, distance: np.ndarray) -> np.ndarray:
    """Return the terms (H, I, J) that distances (I, J) add to the scores of each head."""
    slopes = alibi_slopes(heads) * (plan.score_scale if plan.position == "scaled alibi" else 1.0)
    return np.asarray(-slopes[:, None, None] * abs(distance))


def alibi_slopes(heads: int) -> np.ndarray:
    """Return the decrease of the score for each token of distance, (H,) (Press et al., 2022).

    Examples
    --------
    >>> alibi_slopes(2)
    array([0.0625    , 0.00390625])
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = [2 ** (-8 * (n + 1) / power) for n in range(power)]
    slopes += [2 ** (-4 * (2 * n + 1) / power) for n in range(heads - power)]
    return np.asarray(slopes)


def softmax(scores: np.ndarray, sinks: np.ndarray | None) -> np.ndarray:
    """Return the probabilities of scores (B, H, I, J), without the shares of sinks (H,)."""
    keys = scores.shape[-1]
    if sinks is not None:
        sink_scores = np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))
        scores = np.concatenate([scores, sink_scores], axis=-1)
    highest = scores.max(axis=-1, keepdims=True)
    exponentials = np.exp(scores - highest)
    probabilities = exponentials / exponentials.sum(axis=-1, keepdims=True)
    return np.asarray(probabilities[..., :keys])


def form_difference(block: Block, application: Application | None) -> float | None:
    """Return the largest difference of a product from the form's, relative to the largest product.

    Among several observed products, the closest is used. None if no product is of all heads,
    queries and keys. If the form is known to be only a part of the score, a different product
    proves nothing.
    """
    if application is None:
        return None
    x, y = application.query_input, application.key_input
    products = tuple(application.products(block.plan.query.heads))
    if block.plan.rule.joint:
        products = tuple(_parts_of(products, x, y))
    differences: list[float] = []
    for key_count in {product.shape[-1] for product in products}:
        for expected in _expected_products(block, x, y, key_count):
            for product in _of_size(products, expected, len(x)):
                differences.append(product_difference(expected, product))
    is_part_of_score = block.plan.rule.partial and not block.plan.rule.whole_score
    if is_part_of_score or beyond(block.plan, y.shape[1]):
        differences = [difference for difference in differences if difference < ALIKE]
    measured = [difference for difference in differences if not math.isnan(difference)]
    # A product that is noise may be that of these queries and keys: then only a product that
    # agrees with the form decides.
    has_noise = len(measured) < len(differences)
    if not measured or (has_noise and min(measured) >= ALIKE):
        return None
    return min(measured)


def _parts_of(products: Sequence[np.ndarray], x: np.ndarray, y: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the parts of joint products that may belong to one stream's queries and keys."""
    queries, keys = x.shape[-2], y.shape[-2]
    for product in products:
        *_, all_queries, all_keys = product.shape
        for rows in _ranges_of_stream(queries, all_queries):
            for columns in _ranges_of_stream(keys, all_keys):
                yield product[..., rows, columns]


def _expected_products(
    block: Block, x: np.ndarray, y: np.ndarray, key_count: int
) -> Iterator[np.ndarray]:
    """Yield the forms' products (B, H, I, J) of inputs, with J = ``key_count`` keys in each text.

    The module may have split or joined the texts of its input. Therefore the batch B follows from
    J. The second product, if any, is for inputs with tokens before texts, (N, B, D). Nothing is
    yielded if widths do not fit, or if the texts cannot all have J keys.
    """
    query_width, key_width = block.groups.widths
    x, y = _with_tokens_first(x, query_width), _with_tokens_first(y, key_width)
    if x.shape[-1] != query_width or y.shape[-1] != key_width:
        return
    query_tokens, key_tokens = x.size // query_width, y.size // key_width
    texts = key_tokens // key_count
    if key_tokens % key_count or query_tokens % texts:
        return

    def products(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        queries = x.reshape(texts, -1, query_width)
        keys = y.reshape(texts, -1, key_width)
        return block.products(queries, keys)

    yield products(x, y)
    if x.ndim == y.ndim == 3 and 1 not in x.shape[:2]:
        yield products(x.swapaxes(0, 1), y.swapaxes(0, 1))


def _with_tokens_first(states: np.ndarray, width: int) -> np.ndarray:
    """Return inputs (B, N, D); inputs of a convolution are (B, D, N)."""
    has_tokens_last = states.ndim == 3 and states.shape[-1] != width == states.shape[1]
    return states.swapaxes(1, 2) if has_tokens_last else states


def _of_size(
    products: tuple[np.ndarray, ...], expected: np.ndarray, batch: int
) -> Iterator[np.ndarray]:
    """Yield the products of the expected size, in the expected shape.

    Parameters
    ----------
    products
        Observed products.
    expected
        The forms' products, (texts, H, I, J).
    batch
        Number of texts in the module's input, B. The module may split a text into windows, or
        compute the product of each text separately.
    """
    texts, heads, queries, keys = expected.shape
    with_keys = [
        product
        for product in products
        if product.shape[-1] == keys and product.shape[-2] % queries == 0
    ]
    for product in with_keys:
        if product.size == expected.size:
            yield product.reshape(expected.shape)
            if texts % batch == 0:  # windows of a text may come after its heads
                windows = product.reshape(batch, heads, -1, queries, keys)
                yield windows.swapaxes(1, 2).reshape(expected.shape)
    of_one_text = [product for product in with_keys if product.size * texts == expected.size]
    if texts > 1:
        for start in range(len(of_one_text) - texts + 1):
            yield np.concatenate(of_one_text[start : start + texts]).reshape(expected.shape)


def product_difference(expected: np.ndarray, product: np.ndarray) -> float:
    """Return the difference of centered products beyond rounding, relative to the largest.

    The expected products are first multiplied by the best-fitting factor. NaN if the observed
    product is noise.
    """
    rounding = ROUNDING * np.abs(product).max()
    expected, product = _centered(expected), _centered(product)
    largest = np.abs(product).max()
    square_norm = float((expected**2).sum())
    has_signal = largest > MIN_SIGNAL * rounding
    if not (has_signal and 0 < square_norm < np.inf):
        return np.nan
    factor = max(0.0, float((expected * product).sum()) / square_norm)
    difference = np.abs(product - factor * expected).max()
    return float(max(0.0, difference - rounding) / largest)


def _centered(products: np.ndarray) -> np.ndarray:
    """Return products (B, H, I, J) minus the means of their rows, then of their columns."""
    products = products - products.mean(axis=-1, keepdims=True)
    return np.asarray(products - products.mean(axis=-2, keepdims=True))
