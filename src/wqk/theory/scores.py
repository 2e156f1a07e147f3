"""Proposition 2.1: scores are a bilinear form, whose order the softmax keeps, and mix convexly.

=========================================  ==========================================
paper                                      here
=========================================  ==========================================
x_i W_qk x_jᵀ = q_i · k_j, Equation 2      `ScoreCheck.form`
α_ij = softmax of the scores, S12          `ScoreCheck.attention`
α_ij < α_ij' ⇔ score_ij < score_ij', S15   `ScoreCheck.order`, `order_plain`
Σ_j α_ij = 1, Σ_j α_ij x_j W_v, S16        `ScoreCheck.convexity`, `mixing`
W_qk = Σ_h W_qk,h, S20 and S21             `ScoreCheck.heads`, `order_layer`
=========================================  ==========================================

Axes: B batch, H query heads, G key heads, N tokens (I queries, J keys), D width, R head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from wqk._typing import Array, Float
from wqk.attention import load_attention
from wqk.attention.factor import load_factor
from wqk.checkpoints import open_checkpoint
from wqk.theory.capture import attention_recorded, bilinear_plans, require_records

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from wqk.attention import Attention
    from wqk.checkpoints import Checkpoint
    from wqk.families import AttentionPlan
    from wqk.theory.capture import Attended

# Pairs of keys, for each query, from which the share of kept orders is estimated.
PAIRS = 256


@dataclass(frozen=True)
class ScoreCheck:
    """How far one use of one block's attention is from what Proposition 2.1 says.

    Attributes
    ----------
    stack, kind, layer, application
        Which; ``application`` counts the uses of shared weights from 0.
    form
        Largest difference of x_i W_h x_jᵀ, W_h dense, from q_i · k_j, relative to the largest
        score; no biases.
    attention
        Largest difference of the model's probabilities from the softmax of the scores; None where
        the family adds terms of its own to them.
    order
        Largest amount by which scores are ordered otherwise than the probabilities, relative to the
        largest score. The whole score: at its distance, with biases, but without added terms.
    order_plain
        Share of pairs of keys that the plain form x_i W_h x_jᵀ orders as the probabilities do.
    order_layer
        The same for the layer's form, Σ_h W_h, and the mean of the heads' probabilities.
    convexity
        Largest difference of Σ_j α_ij from 1; not near 0 where a sink takes its share.
    mixing
        Largest difference of what W_o is given from Σ_j α_ij (x_j W_v + b_v), relative; None where
        the family names no values.
    heads
        Largest difference of the layer's scores from the sum of its heads' scores, relative.
    """

    stack: str
    kind: str
    layer: int
    application: int
    form: float
    attention: float | None
    order: float
    order_plain: float
    order_layer: float
    convexity: float
    mixing: float | None
    heads: float


def check_scores(
    model: Any, batch: Mapping[str, Any], layers: Collection[int] | None = None
) -> list[ScoreCheck]:
    """Run a model once, and compare its attention with what Proposition 2.1 says of it.

    Parameters
    ----------
    model
        A `transformers` model of a family that wqk knows.
    batch
        Keyword arguments for it.
    layers
        Numbers of the layers to look at; all of them otherwise.

    Raises
    ------
    TheoryError
        A block's score is no bilinear form, or it does not hand out its attention.
    UnknownFamily
        No family knows the model.

    Examples
    --------
    >>> import torch, transformers
    >>> shape = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> config = transformers.BertConfig(vocab_size=9, intermediate_size=8, **shape)
    >>> model = transformers.BertModel(config)
    >>> check, = check_scores(model, {"input_ids": torch.tensor([[3, 1, 4, 1, 5]])})
    >>> max(check.form, check.attention, check.order, check.convexity, check.mixing) < 1e-5
    True
    """
    checkpoint = open_checkpoint(model)
    plans = bilinear_plans(checkpoint, layers)
    with attention_recorded(model, plans) as records:
        model(**batch)
    require_records(model, plans, records)
    checks = []
    for plan, record in zip(plans, records, strict=True):
        attention = load_attention(checkpoint, plan)
        values = _values(checkpoint, plan)
        for application, use in enumerate(record.uses):
            mixed = record.mixed[application] if values and record.mixed else None
            checks.append(_check(attention, application, use, values, mixed))
    return checks


def queries(
    attention: Attention, inputs: Float[Array, "batch tokens d"]
) -> Float[Array, "batch heads tokens width"]:
    """Queries as they meet the keys: with their biases, turned to their positions.

    Norms of queries and keys are not applied, nor are limits.
    """
    return _turned(attention.plan, _projected(inputs, attention.query.weight, attention.query.bias))


def keys(
    attention: Attention, inputs: Float[Array, "batch tokens d"]
) -> Float[Array, "batch heads tokens width"]:
    """Keys as they meet the queries of each query head, of which several may share a key head."""
    found = _turned(attention.plan, _projected(inputs, attention.key.weight, attention.key.bias))
    return found.repeat(attention.head_count // attention.key_head_count, axis=1)


def logits(plan: AttentionPlan, scores: np.ndarray) -> np.ndarray:
    """What the softmax takes of q_i · k_j: scaled, and held below the cap where there is one."""
    scaled = plan.scale * scores
    return plan.softcap * np.tanh(scaled / plan.softcap) if plan.softcap else scaled


def as_array(tensor: Any) -> np.ndarray:
    """A tensor of a graph as NumPy's, in float64 where it is, and in float32 otherwise."""
    host = tensor.detach().cpu()
    return np.asarray((host if str(host.dtype) == "torch.float64" else host.float()).numpy())


def _projected(inputs: np.ndarray, weight: np.ndarray, bias: np.ndarray | None) -> np.ndarray:
    """(B, heads, N, R) of inputs (B, N, D), weights (heads, R, D) and biases (heads, R)."""
    result = inputs[:, None] @ weight.swapaxes(-1, -2)
    return result if bias is None else np.asarray(result + bias[:, None])


def _turned(plan: AttentionPlan, vectors: np.ndarray) -> np.ndarray:
    if plan.rotary is None:
        return vectors
    positions = np.arange(vectors.shape[-2])
    return plan.rotary.rotate(vectors, positions).astype(vectors.dtype, copy=False)


def _values(
    checkpoint: Checkpoint, plan: AttentionPlan
) -> tuple[np.ndarray, np.ndarray | None] | None:
    """Weights (G, R, D) and biases (G, R) of the values, where the family names them."""
    if plan.value is None:
        return None
    parts = plan.value.parts
    stored = dict(zip(parts, checkpoint.read(parts), strict=True))
    factor = load_factor(stored, plan.value, checkpoint.name)
    return factor.weight, factor.bias


def _check(
    attention: Attention,
    application: int,
    use: Attended,
    values: tuple[np.ndarray, np.ndarray | None] | None,
    mixed: Any | None,
) -> ScoreCheck:
    plan = attention.plan
    x, y, taken, found = (as_array(tensor) for tensor in use)
    shape = (len(x), attention.head_count, x.shape[1], y.shape[1])
    shares = found.reshape(shape)
    visible = shares > 0
    plain = attention.heads(x[:, None, None], y[:, None, None]).reshape(shape)
    layer = attention.form(x, y)
    dense = attention.heads.dense().reshape(-1, *attention.heads.shape)
    whole = logits(plan, queries(attention, x) @ keys(attention, y).swapaxes(-1, -2))
    largest = np.abs(plain).max()
    return ScoreCheck(
        stack=plan.stack,
        kind=plan.kind,
        layer=plan.layer,
        application=application,
        form=float(
            np.abs(x[:, None] @ dense @ y[:, None].swapaxes(-1, -2) - plain).max() / largest
        ),
        attention=None if plan.position or plan.sinks else _softmax_error(whole, shares),
        order=_disorder(whole, shares, visible) / float(np.abs(whole[visible]).max()),
        order_plain=_kept_order(plain, shares, visible),
        order_layer=_kept_order(layer[:, None], shares.mean(axis=1, keepdims=True), visible[:, :1]),
        convexity=float(np.abs(shares.sum(axis=-1) - 1).max()),
        mixing=_mixing_error(taken, shares, values, mixed)
        if values and mixed is not None
        else None,
        heads=float(np.abs(plain.sum(axis=1) - layer).max() / np.abs(layer).max()),
    )


def _softmax_error(whole: np.ndarray, shares: np.ndarray) -> float:
    """Largest difference of probabilities from the softmax over the keys that have any."""
    weights = np.where(shares > 0, np.exp(whole - whole.max(axis=-1, keepdims=True)), 0)
    return float(np.abs(weights / weights.sum(axis=-1, keepdims=True) - shares).max())


def _disorder(scores: np.ndarray, shares: np.ndarray, visible: np.ndarray) -> float:
    """The most by which a key with less attention has a higher score, all pairs of keys."""
    order = np.argsort(shares, axis=-1, kind="stable")
    ranked = np.take_along_axis(np.where(visible, scores, scores.min()), order, axis=-1)
    seen = np.take_along_axis(visible, order, axis=-1)[..., 1:]
    excess = np.maximum.accumulate(ranked, axis=-1)[..., :-1] - ranked[..., 1:]
    tied = np.diff(np.take_along_axis(shares, order, axis=-1), axis=-1) == 0
    return float(np.where(seen & ~tied, excess, 0).max(initial=0))


def _kept_order(scores: np.ndarray, shares: np.ndarray, visible: np.ndarray) -> float:
    """Share of random pairs of visible keys that two (B, H, I, J) order in one way."""
    random = np.random.default_rng(0)
    one, other = random.integers(0, scores.shape[-1], (2, PAIRS))
    difference = (shares[..., one] - shares[..., other]) * (scores[..., one] - scores[..., other])
    counted = visible[..., one] & visible[..., other] & (difference != 0)
    return float((difference > 0).sum(where=counted) / max(counted.sum(), 1))


def _mixing_error(
    taken: np.ndarray, shares: np.ndarray, values: tuple[np.ndarray, np.ndarray | None], mixed: Any
) -> float:
    """Relative difference of W_o's input from the heads' Σ_j α_ij v_j side by side."""
    each = _projected(taken, *values)
    each = each.repeat(shares.shape[1] // each.shape[1], axis=1)
    expected = (shares @ each).swapaxes(1, 2)
    given = as_array(mixed).reshape(expected.shape)
    return float(np.abs(expected - given).max() / np.abs(given).max())
